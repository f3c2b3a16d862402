"""The page in a real browser: dropped files, the clipboard, a camera, the keyboard, a phone, contrast."""

import urllib.request
from pathlib import Path

import pytest
import test_page
from test_page import CHROMIUM, NO_BROWSER, Watched, doubtful, drawing, faces, give, playwright, says, served, strange

__all__ = ["served"]  # a fixture; the browser has a camera here

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER), pytest.mark.slow]
NARROW = (360, 740)
LOCALES = {"en": "en-GB", "ko": "ko-KR"}
CAMERA = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]  # allowed at once
expect = playwright.expect


@pytest.fixture(scope="module")
def tool():
    with playwright.sync_playwright() as opened:
        yield opened


@pytest.fixture(scope="module")
def browser(tool, tmp_path_factory):
    """Its camera shows one green picture, far from all enrolled ones: chromium's own moves, and any frame may come."""
    film, (width, height) = tmp_path_factory.mktemp("camera") / "green.y4m", (320, 240)
    planes = b"".join(bytes([level]) * pixels for level, pixels in
                      ((145, width * height), (54, width * height // 4), (34, width * height // 4)))  # fmt: skip
    film.write_bytes(f"YUV4MPEG2 W{width} H{height} F10:1 Ip A1:1 C420jpeg\n".encode() + (b"FRAME\n" + planes) * 3)
    camera = [*CAMERA, f"--use-file-for-fake-video-capture={film}"]
    opened = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", *camera])
    yield opened
    opened.close()


@pytest.fixture
def files(tmp_path):
    """Paths of pictures of kinds 0 to 3, by name."""

    def write(name, content):
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


def drag(page, paths, at, end="drop"):
    """Files of the disk, dragged over the page as the system does it."""
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": paths, "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", *([end] if end else [])):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": at[0], "y": at[1], "data": data})


def focused(page):
    return page.evaluate(
        "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
    )


# ---- drop


def test_several_files_are_dropped_anywhere_and_enrolled_together(browser, served, files):
    paths = [files(f"{k}.png", drawing(k, 3)) for k in (1, 2)] + [
        files("odd.png", strange()),
        files("notes.txt", b"no"),
    ]
    with Watched(browser, served.address + "#explore") as page:
        page.wait_for_selector("#map[data-points='32']")
        drag(page, paths, (640, 850), end=None)
        expect(page.locator("#drop-hint")).to_be_visible()
        drag(page, paths, (640, 850))
        expect(page.locator("#drop-hint")).to_be_hidden()
        expect(page.locator("#find")).to_be_visible()  # Explore takes no pictures
        faces(page, "#batch .one", 3)
        says(page, "#batch .one >> nth=0", "kind 1")
        says(page, "#batch .one >> nth=1", "kind 2")
        says(page, "#batch .one >> nth=2", "unknown")
        says(page, "#batch-note", "3 pictures")
        says(page, "#trouble", "1 file is not a picture: notes.txt")
        says(page, "#verdict .who", "kind 1")
        page.click("#batch .one >> nth=2")
        says(page, "#verdict .who", "unknown")
        assert page.get_attribute("#batch .one >> nth=2", "aria-pressed") == "true"
    fresh = [files(f"new{n}.png", drawing(7 + n, 1)) for n in range(2)]
    with Watched(browser, served.address) as page:
        says(page, "#summary", "32 items")
        drag(page, fresh, (640, 300))
        says(page, "#batch-note", "2 pictures")
        page.fill("#enrol-label", "new kind")
        page.check("#enrol-all")
        page.press("#enrol-label", "Enter")
        says(page, "#enrol-note", "Enrolled 2 pictures as “new kind”; 0 of them were enrolled before.")
        says(page, "#summary", "34 items · 5 labels")
        says(page, "#batch .one >> nth=1", "new kind")


def test_two_files_fill_both_sides_and_one_fills_the_free_side(browser, served, files):
    paths = [files("a.png", drawing(2, 1)), files("b.png", drawing(2, 1)), files("c.png", drawing(3, 1))]
    with Watched(browser, served.address + "#compare") as page:
        says(page, "#summary", "32 items")
        drag(page, paths[:2], (640, 850))
        says(page, "#same .who", "the same")
        box = page.locator("#drop-b").bounding_box()
        drag(page, paths[2:], (box["x"] + 50, box["y"] + 50))
        says(page, "#same .who", "not the same")
        assert page.get_attribute("#drop-a img", "alt") == "a.png"
        assert page.get_attribute("#drop-b img", "alt") == "c.png"


def test_files_that_are_no_pictures_are_named_and_nothing_is_searched(browser, served, files):
    watched = Watched(browser, served.address, locale="ko-KR")
    with watched as page:
        says(page, "#summary", "32")
        drag(page, [files(f"{n}.txt", b"text") for n in range(5)], (640, 300))
        says(page, "#trouble", "이미지가 아닌 파일이 5개 있습니다: 0.txt, 1.txt, 2.txt, …")
        page.keyboard.press("Escape")
        expect(page.locator("#trouble")).to_be_hidden()
        assert not [url for url in watched.requests if "identify" in url]


def test_an_address_is_no_picture(browser, served):
    with Watched(browser, served.address) as page:
        says(page, "#summary", "32 items")
        page.evaluate(
            """() => { const t = new DataTransfer(); t.setData("text/uri-list", "http://example.org/a.png");
            document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: t, bubbles: true, cancelable: true})); }"""
        )
        says(page, "#trouble", "an address, not a picture")


# ---- paste, camera


def test_a_copied_picture_is_pasted(browser, served):
    with Watched(browser, served.address, permissions=["clipboard-read", "clipboard-write"]) as page:
        says(page, "#summary", "32 items")
        page.evaluate(
            """async (bytes) => navigator.clipboard.write([new ClipboardItem(
            {"image/png": new Blob([new Uint8Array(bytes)], {type: "image/png"})})])""",
            list(drawing(2, 1)),
        )
        page.keyboard.press("Control+V")
        says(page, "#verdict .who", "kind 2")


def camera_is_off(page):
    """A dialog tells that it was closed a moment after it is hidden."""
    for _ in range(50):
        if page.evaluate("document.querySelector('video').srcObject") is None:
            return True
        page.wait_for_timeout(100)
    return False


def test_the_camera_takes_a_picture(browser, served):
    with Watched(browser, served.address, permissions=["camera"]) as page:
        says(page, "#summary", "32 items")
        page.keyboard.press("c")
        expect(page.locator("#camera-shoot")).to_be_enabled()
        assert focused(page) == "camera-shoot"
        assert page.evaluate("document.querySelector('video').videoWidth") > 100
        page.keyboard.press("Enter")
        expect(page.locator("#camera")).to_be_hidden()
        says(page, "#verdict .who", "unknown")
        assert page.get_attribute("#find-drop img", "alt") == "camera.jpg"
        sizes = page.evaluate("[document.querySelector('#find-drop img').naturalWidth]")
        assert sizes[0] > 100
        assert camera_is_off(page)
        page.click("#tab-compare")
        page.click("#compare .camera-open")
        expect(page.locator("#camera-shoot")).to_be_enabled()
        page.keyboard.press("Escape")
        expect(page.locator("#camera")).to_be_hidden()
        assert camera_is_off(page)


@pytest.mark.parametrize("language, words", [("en", "does not allow this page"), ("ko", "카메라 사용이 차단")])
def test_a_camera_that_is_not_allowed_is_said(tool, served, language, words):
    browser = tool.chromium.launch(
        executable_path=CHROMIUM, args=["--no-sandbox", "--use-fake-device-for-media-stream"]
    )
    try:
        with Watched(browser, served.address, locale=LOCALES[language], permissions=[]) as page:
            says(page, "#summary", "32")
            page.click("#find .camera-open")
            says(page, "#camera-error", words)
            expect(page.locator("#camera-shoot")).to_be_disabled()
            page.click("#camera .dialog-close")
            expect(page.locator("#camera")).to_be_hidden()
            page.evaluate("Object.defineProperty(navigator, 'mediaDevices', {value: undefined})")  # plain http
            page.click("#find .camera-open")
            says(page, "#trouble", "localhost")
    finally:
        browser.close()


def test_the_service_allows_the_camera_to_its_own_page_only(served):
    with urllib.request.urlopen(served.address) as answer:
        assert "camera=(self)" in answer.headers["permissions-policy"]


# ---- keyboard


def test_everything_by_keyboard(browser, served, files):
    with Watched(browser, served.address) as page:
        says(page, "#summary", "32 items")
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.matches('#find-drop input')")
        assert page.evaluate("getComputedStyle(document.querySelector('#find-drop')).outlineStyle") == "solid"
        with page.expect_file_chooser() as chooser:
            page.keyboard.press("Enter" if focused(page) == "" else "Space")
        chooser.value.set_files(files("one.png", drawing(1, 2)))
        says(page, "#verdict .who", "kind 1")
        for _ in range(12):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.matches('#hits .one')"):
                break
        position = "[...document.querySelectorAll('#hits .one')].indexOf(document.activeElement)"
        across = page.evaluate(
            "(() => { const all = [...document.querySelectorAll('#hits .one')];"
            "return all.filter((one) => one.offsetTop === all[0].offsetTop).length; })()"
        )
        assert page.evaluate(position) == 0 and across > 2
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "focus is visible"
        for key, to in (("ArrowRight", 1), ("ArrowDown", 1 + across), ("ArrowLeft", across), ("ArrowUp", 0)):
            page.keyboard.press(key)
            assert page.evaluate(position) == to, key
        page.keyboard.press("ArrowUp")
        assert page.evaluate(position) == 0
        page.keyboard.press("End")
        assert page.evaluate(position) == 23
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        expect(page.locator("#item")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#item")).to_be_hidden()
        assert page.evaluate(position) == 1, "focus returns to the result"
        page.keyboard.press("?")
        says(page, "#help", "from result to result")
        page.keyboard.press("Escape")
        expect(page.locator("#help")).to_be_hidden()
        page.keyboard.press("3")
        page.keyboard.press("/")
        assert focused(page) == "map-label"
        page.keyboard.type("/1?")  # in a field keys are text
        assert page.input_value("#map-label") == "/1?" and page.locator("#explore").is_visible()


CHECKS = Path(__file__).with_name("page_checks.js").read_text(encoding="utf-8")


def wrong(page, check):
    """What a check of page_checks.js lists."""
    return page.evaluate(f"() => {CHECKS[CHECKS.index('({') :].strip()}.{check}()")


def views(page, narrow):
    """The page in each of its states, one after the other."""
    press = page.tap if narrow else page.click
    yield "empty"
    give(page, "#find-drop", strange())
    page.wait_for_selector("#verdict .unknown")
    faces(page, "#hits img", 24)
    yield "unknown"
    give(page, "#find-drop", doubtful())
    page.wait_for_selector("#verdict .bare")
    yield "unsure"
    give(page, "#find-drop", drawing(1, 1))
    says(page, "#verdict .who", "kind 1")
    yield "named"
    names = [{"name": f"{n}.png", "mimeType": "image/png", "buffer": drawing(n, 1)} for n in range(3)]
    page.set_input_files("#find-drop input", names)
    expect(page.locator("#batch .one")).to_have_count(3)
    expect(page.locator("#batch .one >> nth=2")).to_contain_text("kind 2")
    yield "several"
    press("#hits .one >> nth=0")
    page.wait_for_selector("#item[open] .one img")
    yield "item"
    page.keyboard.press("Escape")
    press("#help-open")
    yield "help"
    page.keyboard.press("Escape")
    press("#tab-compare")
    give(page, "#drop-a", drawing(1, 1))
    give(page, "#drop-b", drawing(2, 1))
    page.wait_for_selector("#same .who")
    yield "compare"
    press("#tab-explore")
    page.wait_for_selector("#suspects li")
    page.focus("#map")
    page.keyboard.press("Enter")
    page.wait_for_selector("#selected .one img")
    yield "explore"
    press("#tab-groups")
    page.select_option("#groups-scope", "all")
    press("#groups-propose button[type=submit]")
    page.wait_for_selector("#groups-list .pick img")
    yield "groups"
    give(page, "#find-drop", b"no picture at all")
    page.wait_for_selector("#trouble:visible")
    yield "trouble"


@pytest.mark.parametrize("language", ("en", "ko"))
@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_a_phone_of_360_pixels(browser, served, scheme, language):
    options = {"locale": LOCALES[language], "has_touch": True, "is_mobile": True}
    with Watched(browser, served.address, NARROW, scheme, **options) as page:
        says(page, "#summary", "32")
        with page.expect_file_chooser() as chooser:
            page.tap("#find .camera-open")  # the camera app of the phone
        assert chooser.value.element.get_attribute("capture") == "environment"
        for view in views(page, True):
            for check in ("wide", "small", "nameless"):
                assert wrong(page, check) == [], view
            assert page.evaluate(test_page.BROKEN) == [] or language == "ko", view


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_every_text_has_contrast(browser, served, scheme):
    with Watched(browser, served.address, scheme=scheme) as page:
        says(page, "#summary", "32")
        for view in views(page, False):
            assert wrong(page, "contrast") == [], view
