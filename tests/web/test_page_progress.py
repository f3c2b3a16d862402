"""The page while a folder is enrolled, in a real browser: it says how far, and answers from what is there."""

import io
import socket
import threading
from types import SimpleNamespace

import pytest
from PIL import Image
from test_page import CHROMIUM, NO_BROWSER, browser  # noqa: F401

import tiny_vit
from commands import photos
from nearkin import web
from nearkin.gallery import Gallery
from nearkin.web import enrolment as enrolments
from nearkin.web.enrolment import Enrolment, read_source
from nearkin.web.request_log import request_logger

uvicorn = pytest.importorskip("uvicorn", reason="the service needs pip install 'nearkin[serve]'")
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER), pytest.mark.slow]


@pytest.fixture
def enrolling(tmp_path, monkeypatch):
    """A service whose enrolment is not started: it rests at 20 of 40 pictures until `go_on`; one file is no picture."""
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(enrolments, "STEP", 10)
    monkeypatch.chdir(tmp_path)
    tiny_vit.save(tmp_path / "vit")
    photos(tmp_path / "photos", classes=8, each=5)
    (tmp_path / "photos" / "class7" / "9.png").write_bytes(b"no picture")
    go_on, half = threading.Event(), threading.Event()

    def progress(done, total):
        if done == 20:
            half.set()
            go_on.wait(60)

    with Gallery.open("g", "hf:vit", device="cpu") as gallery:
        enrolment = Enrolment(gallery, "photos", read_source("photos"), progress)
        app = web.build(gallery, log=request_logger(io.StringIO()), enrolment=enrolment)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
        with socket.create_server(("127.0.0.1", 0)) as bound:
            thread = threading.Thread(target=server.run, args=([bound],))
            thread.start()
            yield SimpleNamespace(
                address=f"http://127.0.0.1:{bound.getsockname()[1]}/", enrolment=enrolment, half=half, go_on=go_on
            )
            go_on.set()
            enrolment.stop(60)
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize(
    ("language", "half", "left_out"),
    [
        ("en", "Enrolling: 20 of 41 pictures so far", "1 file could not be read"),
        ("ko", "이미지 41장 중 20장을 등록했고", "파일 1개는 읽을 수 없어"),
    ],
)
def test_the_page_says_how_far_it_is_and_answers_meanwhile(enrolling, browser, tmp_path, language, half, left_out):  # noqa: F811
    enrolling.enrolment.start()
    assert enrolling.half.wait(60)
    page = browser.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{enrolling.address}?lang={language}")
    page.get_by_text(half).wait_for()
    assert page.locator("#progress-bar").get_attribute("value") == "20"
    page.locator("#summary", has_text="20").wait_for()
    new = tmp_path / "new.png"
    Image.new("L", (16, 16)).save(new)
    page.set_input_files("#find-drop input[type=file]", new)
    page.locator("#verdict [lang=en]", has_text="confidences follow").wait_for()
    assert "%" not in page.locator("#verdict").inner_text()
    enrolling.go_on.set()
    page.locator("#progress", has_text=left_out).wait_for(timeout=30_000)
    page.locator("#progress-bar").wait_for(state="hidden")
    page.locator("#summary", has_text="40").wait_for()
    page.click("#progress-again")
    page.locator(".sure", has_text="%").wait_for()  # learned from its own labels
    assert errors == []
    page.close()


@pytest.mark.parametrize(
    ("language", "starting", "answer", "why", "map_note"),
    [
        (
            "en",
            "Enrolling 41 pictures",
            "Enrolling: nothing can be found yet.",
            "are being enrolled",
            "the map follows",
        ),
        ("ko", "이미지 41장을 등록하는 중입니다.", "등록하는 중입니다.", "등록하는 중입니다.", "지도는 그다음에"),
    ],
)
def test_before_the_first_picture_the_page_says_that_it_enrols_and_not_that_it_is_empty(
    enrolling,
    browser,  # noqa: F811
    tmp_path,
    language,
    starting,
    answer,
    why,
    map_note,
):
    page = browser.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{enrolling.address}?lang={language}")
    page.locator("#progress-text", has_text=starting).wait_for()
    assert page.locator("#find-empty").is_hidden()
    page.set_input_files("#find-drop input[type=file]", tmp_path / "photos" / "class1" / "2.png")
    page.locator(".sure", has_text=answer).wait_for()
    page.locator("#why", has_text=why).wait_for()
    page.locator("#tab-explore").click()
    page.locator("#map-wait", has_text=map_note).wait_for()
    enrolling.enrolment.start()
    page.locator("#progress-text", has_text="20").wait_for()
    assert page.locator("#find-empty").is_hidden() and errors == []
    page.close()


def test_an_empty_gallery_without_an_enrolment_is_called_empty(enrolling, browser):  # noqa: F811
    enrolling.enrolment.note = "enrolment ended at 0 of 41: the folder is gone"
    page = browser.new_page()
    page.goto(enrolling.address)
    page.locator("#find-empty", has_text="The gallery is empty.").wait_for()
    page.close()
