"""The page in a real browser: what an answer says and why, what the service lacks, errors."""

import re

import pytest
import test_page
from test_page import CHROMIUM, NO_BROWSER, Served, Watched, doubtful, drawing, give, playwright, says, strange

from nearkin.gallery.schema import UNLABELLED

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER), pytest.mark.slow]
LOCALES = {"en": "en-GB", "ko": "ko-KR"}
browser, served, shoot, expect = test_page.browser, test_page.served, test_page.shoot, playwright.expect


# ---- the best candidate, its chance, the next ones, and why


WORDS = {
    "en": {"named": "Probably ({right})", "unsure": "Not sure: {right} for", "unknown": "{unknown} that it is none"},
    "ko": {"named": "가능성이 높습니다({right})", "unsure": "확실하지 않습니다.", "unknown": "대상일 확률 {unknown}"},
}


def chance(p, language):
    text = "> 99" if p > 0.995 else "< 1" if p < 0.005 else f"{100 * p:.0f}"
    return text + {"en": " %", "ko": "%"}[language]


def rows_of(page):
    """Name, width of the bar and chance of each row, as they are shown."""
    rows = page.locator("#verdict .bars li")
    expect(rows.first).to_be_visible()
    width = "(one) => one.querySelector('.bar span').style.width"
    return [
        (row.locator(".what").inner_text(), float(row.evaluate(width)[:-1]), row.locator(".much").inner_text())
        for row in rows.all()
    ]


@pytest.mark.parametrize("language", ("en", "ko"))
@pytest.mark.parametrize("size", (test_page.DESKTOP, test_page.PHONE), ids=("wide", "narrow"))
def test_an_answer_says_who_how_probably_and_why(browser, served, shoot, language, size):
    nobody = {"en": "nobody we know", "ko": "등록되지 않은 대상"}[language]
    with Watched(browser, served.address, size, locale=LOCALES[language]) as page:
        says(page, "#summary", "32")
        for verdict, content in (("named", drawing(1, 20)), ("unsure", doubtful()), ("unknown", strange())):
            with page.expect_response(re.compile("identify")) as answer:
                give(page, "#find-drop", content)
            identity = answer.value.json()
            best, right, unknown = identity["candidates"][0], identity["p_right"], identity["p_unknown"]
            assert identity["verdict"] == verdict and best["confidence"] == right
            said = WORDS[language][verdict].format(right=chance(right, language), unknown=chance(unknown, language))
            says(page, "#verdict .sure", said)
            who = {
                "named": best["label"],
                "unsure": f"{best['label']}?",
                "unknown": {"en": "unknown", "ko": "알 수 없음"},
            }
            says(page, "#verdict .who", who[verdict] if verdict != "unknown" else who[verdict][language])
            rows = rows_of(page)
            shown = {name: (round(width), text) for name, width, text in rows}
            assert shown[nobody] == (round(100 * unknown), chance(unknown, language))
            for one in identity["candidates"][:4]:
                assert shown[one["label"]] == (round(100 * one["confidence"]), chance(one["confidence"], language))
            assert [width for _, width, _ in rows] == sorted((width for _, width, _ in rows), reverse=True)
            near = [hit["label"] for hit in identity["hits"][:8]].count(best["label"])
            for number in (str(near), "8", f"{best['similarity']:.3f}", best["label"]):
                says(page, "#why", number)
            says(page, "#status", said)  # screen readers hear it, and the reasons
            says(page, "#status", page.inner_text("#why"))
            faces = page.locator("#verdict .bars img")
            expect(faces).to_have_count(min(4, len(identity["candidates"])))
            matches = page.locator("#hits .match").all_inner_texts()
            assert matches and set(matches) == {best["label"]}, "also where it is not named"
            says(page, "#verdict", "30")  # the share of strangers that is assumed
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
            shoot(page, f"{verdict}-{language}-{size[0]}")
        page.locator("#verdict .bars button").first.click()
        says(page, "#item", best["label"])


ANSWER = {
    "verdict": "unknown",
    "label": None,
    "confidence": 0.8,
    "p_right": 0.11,
    "p_unknown": 0.8,
    "similarity": 0.71,
    "score": -2.0,
    "threshold": None,
    "far": None,
    "prior": 0.3,
    "classes": 7,
    "candidates": [{"label": "kind 1", "similarity": 0.71, "confidence": 0.11, "id": 1}],
    "note": "",
    "hits": [],
    "quality": None,
}
NAMED = {"verdict": "named", "label": "kind 1", "prior": 0.25}


@pytest.mark.parametrize(
    ("changes", "words", "rows"),
    [
        ({}, ["80 % that it is none", "nearest: “kind 1”, 11 %", "assume that 30 %"], "nobody kind 1 another"),
        (NAMED | {"p_right": 0.972, "p_unknown": 0.028}, ["Very probably (97 %)", "assume that 25 %"], "kind 1 nobody"),
        (NAMED | {"p_right": 0.98, "p_unknown": 0.02}, ["Almost certainly (98 %)"], "kind 1 nobody"),
        (NAMED | {"p_right": 0.999999, "p_unknown": 0.0}, ["Almost certainly (> 99 %)", "< 1 %"], "kind 1 nobody"),
        (NAMED | {"p_right": 0.7, "p_unknown": 0.2}, ["Probably (70 %)", "10 %"], "kind 1 nobody another"),
        # a bound that says nothing is no promise
        (
            NAMED | {"far": {"asked": 0.9, "expected": 0.9, "at_most": 0.926, "classes": 48, "proven": True}},
            ["Probably", "false-accept", "92"],
            "kind 1",
        ),
    ],
)
def test_words_follow_the_chances(browser, served, changes, words, rows):
    promise = changes.get("far") is not None
    first = [{"label": "kind 1", "similarity": 0.71, "confidence": changes.get("p_right", 0.11), "id": 1}]
    if promise:
        changes = changes | {"p_right": 0.8, "p_unknown": 0.2}
        first[0]["confidence"] = 0.8
    with Watched(browser, served.address) as page:
        says(page, "#summary", "32")
        page.route("**/api/identify*", lambda route, _: route.fulfill(json=ANSWER | changes | {"candidates": first}))
        give(page, "#find-drop", strange())
        shown = [name for name, _, _ in rows_of(page)]
        if promise:
            assert not [one for one in words[1:] if one in page.inner_text("main")]
            return
        for one in words:
            says(page, "#verdict", one)
        names = {"nobody": "nobody we know", "another": "another label", "kind 1": "kind 1"}
        assert shown == [names[one] for one in re.findall("nobody|another|kind 1", rows)]


def test_four_candidates_are_shown_and_equal_ones_stay_in_order(browser, served):
    candidates = [
        {"label": f"c{n}", "similarity": 0.7, "confidence": p, "id": 1} for n, p in enumerate((0.2, 0.2, 0.1, 0.1, 0.1))
    ]
    changes = {"verdict": "unsure", "p_right": 0.2, "p_unknown": 0.15, "candidates": candidates}
    with Watched(browser, served.address) as page:
        says(page, "#summary", "32")
        page.route("**/api/identify*", lambda route, _: route.fulfill(json=ANSWER | changes))
        give(page, "#find-drop", strange())
        shown = [(name, text) for name, _, text in rows_of(page)]
        expected = [("another label", "25 %"), ("c0", "20 %"), ("c1", "20 %"), ("nobody we know", "15 %")]
        assert shown == [*expected, ("c2", "10 %"), ("c3", "10 %")]
        says(page, "#verdict .who", "c0?")


@pytest.mark.parametrize("language, words", [("en", "cannot be said yet"), ("ko", "아직 알 수 없습니다")])
def test_a_gallery_that_has_learned_nothing_shows_similarities_and_a_note(browser, tmp_path, shoot, language, words):
    served = Served(tmp_path / "bare", calibrated=False, labels=["one", "two", "one", "two"])
    try:
        with Watched(browser, served.address, locale=LOCALES[language]) as page:
            says(page, "#summary", {"en": "not calibrated", "ko": "보정 안 됨"}[language])
            give(page, "#find-drop", drawing(1, 20))
            says(page, "#verdict .who", "two?")
            says(page, "#verdict .sure", words)
            says(page, "#verdict [lang=en]", "nothing is learned from its labels yet: at least 3 labels are needed")
            assert [name for name, _, _ in rows_of(page)] == ["two", "one"] and "%" not in page.inner_text("#verdict")
            says(page, "#verdict .much >> nth=0", "1.000")
            shoot(page, f"bare-{language}")
            give(page, "#find-drop", drawing(1, 1))
            says(page, "#verdict .who", "two")
            says(page, "#verdict .sure", {"en": "Almost certainly", "ko": "거의 확실"}[language])  # it is enrolled
            page.click("#tab-compare")
            give(page, "#drop-a", drawing(1, 1))
            give(page, "#drop-b", drawing(2, 1))
            says(page, "#same .who", {"en": "similarity", "ko": "유사도"}[language])
            says(page, "#same", "calibration.json")
    finally:
        served.stop()


def test_errors_in_korean_keep_the_sentence_of_the_service(browser, served):
    with Watched(browser, served.address, locale="ko-KR") as page:
        says(page, "#summary", "32")
        give(page, "#find-drop", drawing(1, 1)[:120], "broken.png")
        says(page, "#trouble", "서버가 요청을 처리하지 못했습니다.")
        says(page, "#trouble [lang=en]", "broken.png is truncated")
        says(page, "#trouble button", "닫기")
        served.stop()
        give(page, "#find-drop", drawing(2, 1))
        says(page, "#trouble", "서버가 응답하지 않습니다.")
        says(page, "#trouble button", "다시 시도")


# ---- a folder without labels, and one that is still being enrolled


def test_items_without_a_label_are_found_and_say_so(browser, tmp_path):
    served = Served(tmp_path / "unlabelled", labels=[UNLABELLED] * test_page.KINDS)
    try:
        with Watched(browser, served.address, locale="ko-KR") as page:
            says(page, "#summary", "항목 32개 · 레이블 없음 32개")
            assert page.locator("#labels option").count() == 0, "none is no label to choose"
            give(page, "#find-drop", drawing(1, 2))
            says(page, "#verdict .who", "유사도 1.000")
            says(page, "#verdict .sure", "레이블이 없습니다")
            expect(page.locator("#why")).to_be_hidden()
            says(page, "#hits .one >> nth=0", "2.png")  # the name of its file
            page.click("#hits .one >> nth=0")
            assert page.input_value("#item input") == ""
            page.fill("#item input", "첫째")
            page.press("#item input", "Enter")
            says(page, "#summary", "항목 32개 · 레이블 1개 · 레이블 없음 31개")
            says(page, "#hits .one >> nth=0", "첫째")
    finally:
        served.stop()


def test_an_enrolment_is_followed_to_its_end(browser, served):
    with Watched(browser, served.address) as page:
        going = {"done": 10, "total": 40, "running": True, "unreadable": 0, "note": ""}

        def answer(route):
            stats = route.fetch().json()
            route.fulfill(json=stats | {"enrolling": dict(going)})

        page.route("**/api/stats", answer)
        page.reload()
        says(page, "#progress-text", "Enrolling: 10 of 40 pictures so far")
        assert page.evaluate("[document.querySelector('progress').value, document.querySelector('progress').max]") == [
            10,
            40,
        ]
        give(page, "#find-drop", drawing(1, 1))
        says(page, "#verdict .who", "kind 1")
        going["done"] = 40
        says(page, "#progress-text", "All 40 pictures are enrolled")
        expect(page.locator("#progress-close")).to_be_hidden()
        going |= {"running": False, "unreadable": 2, "note": "not calibrated: two labels are too few"}
        says(page, "#progress-text", "38 pictures enrolled.")
        says(page, "#progress-note", "2 files could not be read. not calibrated: two labels are too few")
        expect(page.locator("#progress-bar")).to_be_hidden()
        with page.expect_request(re.compile("identify")):
            page.click("#progress-again")
        page.click("#progress-close")
        expect(page.locator("#progress")).to_be_hidden()


def test_a_finished_enrolment_is_not_mentioned(browser, served):
    with Watched(browser, served.address) as page:
        done = {"done": 40, "total": 40, "running": False, "unreadable": 0, "note": ""}
        page.route("**/api/stats", lambda route: route.fulfill(json=route.fetch().json() | {"enrolling": done}))
        page.reload()
        says(page, "#summary", "32 items")
        expect(page.locator("#progress")).to_be_hidden()
