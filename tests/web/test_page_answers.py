"""The page in a real browser: what an answer says, why a picture is unknown, what the service lacks, errors."""

import re

import pytest
import test_page
from test_page import CHROMIUM, NO_BROWSER, Served, Watched, drawing, give, playwright, says, strange

from nearkin.gallery.schema import UNLABELLED

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER), pytest.mark.slow]
LOCALES = {"en": "en-GB", "ko": "ko-KR"}
browser, served, expect = test_page.browser, test_page.served, playwright.expect


# ---- why unknown


@pytest.mark.parametrize("language", ("en", "ko"))
def test_unknown_says_why_with_the_numbers_of_the_answer(browser, served, language):
    with Watched(browser, served.address, locale=LOCALES[language]) as page:
        says(page, "#summary", "32")
        with page.expect_response(re.compile("identify")) as answer:
            give(page, "#find-drop", strange())
        identity = answer.value.json()
        assert identity["label"] is None and identity["similarity"] < identity["threshold"]
        says(page, "#why", identity["candidates"][0]["label"])
        says(page, "#why", f"{identity['similarity']:.3f}")
        says(page, "#why", f"{identity['threshold']:.3f}")
        says(page, "#why", f"{100 * identity['far']:.1f}")
        says(page, "#why", str(identity["classes"]))
        says(page, "#status", f"{identity['threshold']:.3f}")  # screen readers hear it
        give(page, "#find-drop", drawing(1, 1))
        expect(page.locator("#why")).to_have_count(0)


def test_the_reason_follows_what_the_service_lacks(browser, served):
    """Too few calibration classes for the false-accept rate, or for any threshold; and two nearly equal numbers."""
    answer = {
        "label": None,
        "confidence": 0.8,
        "similarity": 0.71,
        "threshold": 0.9,
        "far": None,
        "classes": 7,
        "candidates": [{"label": "kind 1", "similarity": 0.71, "confidence": 0.2, "id": 1}],
        "note": "a note",
        "hits": [],
        "quality": None,
    }
    with Watched(browser, served.address) as page:
        says(page, "#summary", "32")
        for changes, words in (
            ({}, "0.190 short"),
            ({}, "The 7 classes of the calibration are too few to bound the false-accept rate"),
            (
                {"threshold": None},
                "Among 4 labels no similarity below 1 is accepted: the calibration rests on 7 classes",
            ),
            ({"similarity": 0.89996}, "has a similarity of 0.89996. A label is accepted from 0.90000 on"),
            ({"similarity": None, "threshold": None, "candidates": [], "confidence": None}, "Nothing is enrolled yet"),
        ):
            page.route("**/api/identify*", lambda route, _, changes=changes: route.fulfill(json=answer | changes))
            give(page, "#find-drop", strange())
            says(page, "#why", words)


@pytest.mark.parametrize("language, words", [("en", "Nothing is calibrated"), ("ko", "보정되지 않아")])
def test_without_a_calibration_there_is_a_similarity_and_a_note(browser, tmp_path, language, words):
    served = Served(tmp_path / "bare", calibrated=False)
    try:
        with Watched(browser, served.address, locale=LOCALES[language]) as page:
            says(page, "#summary", {"en": "not calibrated", "ko": "보정 안 됨"}[language])
            give(page, "#find-drop", drawing(1, 1))
            says(page, "#verdict .who", "kind 1")
            says(page, "#verdict .sure", words)
            says(page, "#verdict .sure", "1.000")
            says(page, "#verdict", "calibration.json")
            says(page, "#hits .one >> nth=0", "1.000")
            page.click("#tab-compare")
            give(page, "#drop-a", drawing(1, 1))
            give(page, "#drop-b", drawing(2, 1))
            says(page, "#same .who", {"en": "similarity", "ko": "유사도"}[language])
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
            expect(page.locator("#why")).to_have_count(0)
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
