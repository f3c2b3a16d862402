"""Which part matched, in a real browser: by mouse, keyboard and touch, in both languages; NEARKIN_SHOTS=folder."""

import re

import pytest
from test_page import CHROMIUM, PHONE, Watched, browser, drawing, give, playwright, says, served, shoot

__all__ = ["browser", "served", "shoot"]  # fixtures

WAY = "no chromium here: apt install chromium"
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=WAY), pytest.mark.slow]


def hover(page, nth):
    page.hover(f"#hits .one >> nth={nth}")


def shown(page, place, yes=True):
    expected = playwright.expect(page.locator(place))
    expected.to_be_visible() if yes else expected.to_be_hidden()


def explanations(watched):
    return [url for url in watched.requests if "/api/explain" in url]


def drawn_size(page, image):
    """Natural and shown size of a picture that the browser has decoded."""
    return page.eval_on_selector(image, "i => [i.complete && i.naturalWidth, i.getBoundingClientRect().width]")


def test_pointing_at_a_result_shows_which_part_matched(browser, served, shoot):
    watched = Watched(browser, served.address)
    with watched as page:
        give(page, "#find-drop", drawing(1, 2))
        says(page, "#verdict .who", "kind 1")
        shown(page, "#explain", False)
        hover(page, 2)
        shown(page, "#explain .maps")
        similarity = page.inner_text("#hits .one >> nth=2 >> small")
        says(page, "#explain", f"Similarity {similarity}: all places of either picture add up to it.")
        says(page, "#explain", "Orange places add to the similarity, blue ones take from it.")
        says(page, "#explain", "From the small picture in the gallery")  # these were enrolled without files
        says(page, "#explain figcaption >> nth=1", page.get_attribute("#hits .one >> nth=2 >> b", "title"))
        assert page.get_attribute("#hits .one >> nth=2", "aria-describedby") == "explain"
        for image in (".heat img:first-child", ".heat .over"):
            for figure in (1, 2):
                natural, width = drawn_size(page, f"#explain figure:nth-child({figure}) {image}")
                assert natural >= 1 and width > 100
        shoot(page, "heat-maps")
        page.keyboard.press("Escape")
        shown(page, "#explain", False)
        hover(page, 3)
        shown(page, "#explain .maps")
        page.hover("#find-drop")
        shown(page, "#explain", False)
        asked = len(explanations(watched))
        hover(page, 2)  # known already
        says(page, "#explain", similarity)
        assert len(explanations(watched)) == asked == 2


def test_the_card_stays_in_the_window(browser, served, shoot):
    for size in ((1280, 700), (700, 600)):
        with Watched(browser, served.address, size=size) as page:
            give(page, "#find-drop", drawing(2, 1))
            says(page, "#verdict .who", "kind 2")
            for nth in (0, 7, 23):
                hover(page, nth)
                playwright.expect(page.locator(f"#hits .one >> nth={nth}")).to_have_attribute(
                    "aria-describedby", "explain"
                )
                shown(page, "#explain .maps")
                box = page.evaluate(
                    "(r => [r.left, r.right, r.top])(document.getElementById('explain').getBoundingClientRect())"
                )
                assert box[0] >= 0 and box[1] <= size[0] and box[2] >= -1, (size, nth, box)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_passing_over_results_asks_for_nothing(browser, served):
    watched = Watched(browser, served.address)
    with watched as page:
        give(page, "#find-drop", drawing(1, 2))
        says(page, "#verdict .who", "kind 1")
        page.evaluate(
            """() => { for (const one of document.querySelectorAll("#hits .one"))
            one.dispatchEvent(new PointerEvent("pointerover", {bubbles: true, pointerType: "mouse"}));
            document.getElementById("hits").dispatchEvent(new PointerEvent("pointerleave")); }"""
        )
        page.wait_for_timeout(500)
        assert explanations(watched) == []


def test_by_keyboard(browser, served):
    with Watched(browser, served.address) as page:
        give(page, "#find-drop", drawing(1, 2))
        says(page, "#verdict .who", "kind 1")
        page.focus("#enrol button")
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        playwright.expect(page.locator("#hits .one >> nth=1")).to_have_attribute("aria-describedby", "explain")
        shown(page, "#explain .maps")
        page.keyboard.press("ArrowRight")
        playwright.expect(page.locator("#hits .one >> nth=2")).to_have_attribute("aria-describedby", "explain")
        says(page, "#explain", page.inner_text("#hits .one >> nth=2 >> small"))
        page.keyboard.press("Escape")
        shown(page, "#explain", False)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_tap_opens_the_item_with_its_heat_maps(browser, served, shoot, scheme):
    with Watched(browser, served.address, size=PHONE, scheme=scheme, has_touch=True, is_mobile=True) as page:
        give(page, "#find-drop", drawing(1, 2))
        says(page, "#verdict .who", "kind 1")
        page.tap("#hits .one >> nth=2")
        shown(page, "#item .explain .maps")
        says(page, "#item .explain", "Which part matched?")
        shown(page, "#explain", False)  # the card would be below the dialog
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.eval_on_selector("#item", "d => d.scrollWidth <= d.clientWidth")
        page.wait_for_timeout(200)
        shoot(page, f"heat-maps-phone-{scheme}")


def test_in_korean(browser, served, shoot):
    with Watched(browser, served.address, locale="ko-KR") as page:
        give(page, "#find-drop", drawing(1, 2))
        says(page, "#verdict .who", "kind 1")
        hover(page, 2)
        says(page, "#explain", "일치한 부분")
        says(page, "#explain", "주황색은 유사도를 높인 위치")
        assert not re.search("[A-Za-z]{4,}", page.inner_text("#explain").replace("kind", ""))
        shoot(page, "heat-maps-ko")


def test_a_refusal_stands_in_the_card(browser, served):
    with Watched(browser, served.address) as page:
        give(page, "#find-drop", drawing(1, 2))
        says(page, "#verdict .who", "kind 1")
        id = int(page.get_attribute("#hits .one >> nth=2", "data-id"))
        served.gallery.remove(id)  # by another process
        hover(page, 2)
        says(page, "#explain", f"no row has the id {id}")
        shown(page, "#trouble", False)
