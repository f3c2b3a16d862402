"""The page in a real browser: everything that a user does with it. NEARKIN_SHOTS=folder saves the screenshots."""

import io
import os
import re
import shutil
import socket
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_report import made
from test_web import a_run

from nearkin import web
from nearkin.gallery import Gallery, results
from nearkin.report import run_report
from nearkin.web.request_log import request_logger

pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")
uvicorn = pytest.importorskip("uvicorn", reason="the service needs pip install 'nearkin[serve]'")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested by playwright: pip install playwright"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_BROWSER = "the page is tested in a real browser, and there is no chromium: apt install chromium"
playwright.expect.set_options(timeout=20_000)  # a busy machine
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER), pytest.mark.slow]
KINDS, EACH = 4, 8
LABELS = [f"kind {k}" for k in range(KINDS)]
LONG = ["Black footed Albatross", "American Three-toed Woodpecker", "Ovenbird", "Schwarzkehlchenmännchen im Frühling"]
DESKTOP, PHONE = (1280, 900), (390, 844)


def drawing(kind: int, n: int) -> bytes:
    """One shape per kind, slightly different each time."""
    draw = np.random.default_rng(100 * kind + n)
    pixels = np.zeros((24, 24), np.uint8)
    pixels[3 + 4 * kind : 7 + 4 * kind, 2:22] = 220
    pixels[2:22, 3 + 5 * kind : 6 + 5 * kind] = 140
    out = io.BytesIO()
    Image.fromarray((pixels + draw.integers(0, 4, (24, 24))).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def strange() -> bytes:
    """Unlike all of them: grey that grows brighter from left to right."""
    out = io.BytesIO()
    Image.fromarray(np.tile(np.arange(0, 240, 10, dtype=np.uint8), (24, 1))).save(out, "PNG")
    return out.getvalue()


def doubtful() -> bytes:
    """Noise, which is a little like some of them."""
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(9).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


class Served:
    """The service over a fresh gallery, in a thread."""

    def __init__(
        self, folder: Path, full: bool = True, token: str | None = None, labels=LABELS, calibrated: bool = True
    ) -> None:
        (folder / "run").mkdir(parents=True)
        run = a_run(folder / "run")
        if not calibrated:
            (run / results.FILE).unlink()
        self.gallery = Gallery.open(folder / "g.gallery", run, device="cpu")
        if full:
            pictures = [drawing(k, n) for k in range(KINDS) for n in range(EACH)]
            labels = [labels[k] for k in range(KINDS) for _ in range(EACH)]
            labels[3] = labels[2 * EACH]  # a label error
            names = [f"kind{k}/{n}.png" for k in range(KINDS) for n in range(EACH)]
            self.gallery.enrol(pictures, labels, {"place": "<b>pond</b>"}, names=names)
            self.gallery.calibrate_if_changed()
        app = web.build(self.gallery, access=web.Access(token), log=request_logger(io.StringIO()), drawing=True)
        settings = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        self.server, self.socket = uvicorn.Server(settings), socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()
        self.gallery.close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as tool:
        opened = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def served(tmp_path):
    made = Served(tmp_path / "served")
    yield made
    if made.thread.is_alive():
        made.stop()


@pytest.fixture
def shoot(tmp_path):
    folder = Path(os.environ.get("NEARKIN_SHOTS") or tmp_path)

    def keep(page, name):
        page.screenshot(path=folder / f"{name}.png", full_page=True)

    return keep


class Watched:
    """A page, the errors of its scripts, and the addresses it requests."""

    def __init__(self, browser, address, size=DESKTOP, scheme="light", prepare=lambda page: None, **options):
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce", **options
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.errors, self.requests = [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("request", lambda request: self.requests.append(request.url))
        prepare(self.page)
        self.address, self.home = address, re.split("[?#]", address)[0]

    def __enter__(self):
        self.page.goto(self.address)
        if self.address.startswith("http"):
            self.page.wait_for_selector("html[data-ready]")
        return self.page

    def __exit__(self, *raised):
        self.context.close()
        if raised[0] is None:
            assert not [one for one in self.errors if "Failed to load resource" not in one], self.errors
            foreign = [url for url in self.requests if not url.startswith((self.home, "blob:", "data:"))]
            assert not foreign, foreign


def give(page, zone, content, name="new.png"):
    page.set_input_files(f"{zone} input", {"name": name, "mimeType": "image/png", "buffer": content})


def paste(page, content):
    page.evaluate(
        """(bytes) => { const t = new DataTransfer();
        t.items.add(new File([new Uint8Array(bytes)], "pasted.png", {type: "image/png"}));
        window.dispatchEvent(new ClipboardEvent("paste", {clipboardData: t, cancelable: true})); }""",
        list(content),
    )


def drop(page, zone, content):
    page.evaluate(
        """([zone, bytes]) => { const t = new DataTransfer(), at = document.querySelector(zone);
        t.items.add(new File([new Uint8Array(bytes)], "dropped.png", {type: "image/png"}));
        for (const kind of ["dragenter", "dragover", "drop"])
          at.dispatchEvent(new DragEvent(kind, {dataTransfer: t, bubbles: true, cancelable: true})); }""",
        [zone, list(content)],
    )


def faces(page, place, count):
    playwright.expect(page.locator(place)).to_have_count(count)


def says(page, place, text):
    playwright.expect(page.locator(place)).to_contain_text(text)


def test_find_by_choice_drop_and_paste_then_unknown(browser, served, shoot):
    with Watched(browser, served.address) as page:
        says(page, "#summary", "32 items · 4 labels")
        give(page, "#find-drop", drawing(1, 2))
        says(page, "#verdict .who", "kind 1")
        says(page, "#verdict .sure", "Almost certainly (> 99 %)")
        assert page.locator("#hits .one").count() == 24
        says(page, "#hits .one >> nth=0", "1.000")
        faces(page, "#hits img", 24)
        shoot(page, "find")
        drop(page, "#find-drop", drawing(3, 1))
        says(page, "#verdict .who", "kind 3")
        paste(page, drawing(0, 1))
        says(page, "#verdict .who", "kind 0")
        give(page, "#find-drop", strange())
        says(page, "#verdict .who", "unknown")
        says(page, "#verdict .sure", "nearest: “kind")
        says(page, "#verdict", "none of the enrolled labels")
        shoot(page, "unknown")
        give(page, "#find-drop", doubtful())
        says(page, "#verdict .sure", "Not sure")
        shoot(page, "unsure")


def test_enrol_a_new_label_and_see_it_recognised(browser, served, shoot):
    with Watched(browser, served.address) as page:
        give(page, "#find-drop", strange())
        says(page, "#verdict .who", "unknown")
        page.fill("#enrol-label", "<i>noise</i>")  # a label is text, whatever it looks like
        page.press("#enrol-label", "Enter")
        says(page, "#verdict .who", "<i>noise</i>")
        says(page, "#enrol-note", "It is recognised from now on.")
        says(page, "#summary", "33 items · 5 labels")
        shoot(page, "enrolled")
        page.fill("#enrol-label", "another")
        page.click("#enrol button")
        says(page, "#trouble", "relabel or remove that row first")


def test_one_item_relabelled_and_removed(browser, served, shoot):
    with Watched(browser, served.address) as page:
        give(page, "#find-drop", drawing(1, 2))
        page.click("#hits .one >> nth=0")
        says(page, "#item", "kind1/2.png")
        says(page, "#item", "place: <b>pond</b>")
        faces(page, "#item .items img", 12)
        shoot(page, "item")
        page.fill("#item input", "kind one")
        page.click("#item button[type=submit]")
        says(page, "#summary", "5 labels")
        says(page, "#hits .one >> nth=0", "kind one")
        page.click("#hits .one >> nth=0")
        page.click("#item .danger")
        page.click("#item .danger")  # it asks for confirmation
        says(page, "#summary", "31 items · 4 labels")


def test_compare(browser, served, shoot):
    with Watched(browser, served.address + "#compare") as page:
        give(page, "#drop-a", drawing(2, 1))
        give(page, "#drop-b", drawing(2, 1))
        says(page, "#same .who", "the same")
        says(page, "#same", "probability that they are the same")
        give(page, "#drop-b", strange())
        says(page, "#same .who", "not the same")
        says(page, "#same", "probability that they are not the same")
        shoot(page, "compare")
        page.click("#compare-clear")
        playwright.expect(page.locator("#same")).to_be_hidden()
        paste(page, drawing(2, 1))
        paste(page, drawing(2, 2))
        playwright.expect(page.locator("#same")).to_be_visible()


def test_explore_map_lasso_and_label_errors(browser, served, shoot):
    with Watched(browser, served.address) as page:
        page.keyboard.press("3")
        page.wait_for_selector("#map[data-points='32']")
        says(page, "#map-note", "32 items, by PCA")
        says(page, "#suspects", "kind0/3.png")
        assert page.locator("#confused li").count() >= 1
        shoot(page, "explore")
        box = page.locator("#map").bounding_box()
        page.click("#map-lasso")
        corners = [(0.6, 0.01), (0.99, 0.01), (0.99, 0.6), (0.6, 0.6)]  # one cluster; another is to its left
        at = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in corners]
        page.mouse.move(*at[0])
        page.mouse.down()
        for spot in at[1:]:
            page.mouse.move(*spot, steps=6)
        page.mouse.up()
        says(page, "#selected h3 >> nth=0", "selected")
        says(page, "#selected", "8 items selected")
        says(page, "#selected", "kind 3 × 8")
        faces(page, "#around .one", 16)
        assert "kind 3" not in page.inner_text("#around")
        shoot(page, "lasso")
        page.click("#selected button:has-text('Clear selection')")
        page.click("#map-lasso")
        assert page.get_attribute("#map", "data-pictures") == "4"  # one per cluster
        page.mouse.move(box["x"] + 40, box["y"] + box["height"] * 0.26)
        for _ in range(8):
            page.mouse.wheel(0, -300)
        page.wait_for_timeout(300)
        shoot(page, "zoomed")
        page.click("#suspects li:has-text('kind0/3.png') button:has-text('Relabel as kind 0')")
        playwright.expect(page.locator("#suspects li:has-text('kind0/3.png')")).to_have_count(0)
        says(page, "#suspects-note", "None")


def test_by_keyboard_alone(browser, served):
    with Watched(browser, served.address) as page:
        says(page, "#summary", "32 items")
        page.focus("#tab-find")
        page.keyboard.press("ArrowRight")
        assert page.locator("#compare").is_visible() and page.evaluate("document.activeElement.id") == "tab-compare"
        page.keyboard.press("3")
        page.wait_for_selector("#map[data-points='32']")
        page.focus("#map")
        page.keyboard.press("Enter")
        says(page, "#selected h3 >> nth=0", "32 items selected")
        page.keyboard.press("+")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Escape")
        playwright.expect(page.locator("#selected")).to_be_hidden()
        page.keyboard.press("l")
        assert page.get_attribute("#map-lasso", "aria-pressed") == "true"
        page.keyboard.press("1")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.matches('#find-drop input')")


def test_drawing_finds_kin(browser, served, shoot):
    with Watched(browser, served.address) as page:
        listen = "window.fetch = (a, o) => { if (o.body) window.sentBody = o.body; return ask(a, o); };"
        page.evaluate(f"() => {{ const ask = window.fetch; {listen} }}")
        says(page, "#summary", "32 items")
        box = page.locator("#pad canvas").bounding_box()
        page.mouse.move(box["x"] + 40, box["y"] + 120)
        page.mouse.down()
        page.mouse.move(box["x"] + 200, box["y"] + 120, steps=8)
        page.mouse.up()
        says(page, "#hits", "kind")
        content = page.evaluate("window.sentBody.get('item').arrayBuffer().then((b) => [...new Uint8Array(b)])")
        sent = Image.open(io.BytesIO(bytes(content))).convert("L")
        ink = np.asarray(sent) > 128  # bright on black, in the middle, 0.65 of the side: as the glyphs are
        across, down = np.flatnonzero(ink.any(0)), np.flatnonzero(ink.any(1))
        assert sent.size == (128, 128) and abs(np.ptp(across) + 1 - 0.65 * 128) <= 2
        assert abs(across.mean() - 63.5) <= 1 and abs(down.mean() - 63.5) <= 1
        shoot(page, "drawn")
        page.click("#pad-clear")
        playwright.expect(page.locator("#answer")).to_be_hidden()


def test_errors_are_said_and_can_be_left(browser, served, shoot):
    with Watched(browser, served.address) as page:
        says(page, "#summary", "32 items")
        give(page, "#find-drop", drawing(1, 1)[:120], "broken.png")
        says(page, "#trouble", "broken.png is truncated")
        says(page, "#trouble button", "Close")
        shoot(page, "trouble")
        give(page, "#find-drop", drawing(1, 1))
        says(page, "#verdict .who", "kind 1")
        playwright.expect(page.locator("#trouble")).to_be_hidden()
        served.stop()
        give(page, "#find-drop", drawing(2, 1))
        says(page, "#trouble", "does not answer")
        says(page, "#trouble button", "Try again")


def test_an_empty_gallery_on_a_phone_in_the_dark(browser, tmp_path, shoot):
    served = Served(tmp_path / "empty", full=False)
    try:
        with Watched(browser, served.address, PHONE, "dark", has_touch=True, is_mobile=True) as page:
            says(page, "#summary", "0 items")
            playwright.expect(page.locator("#find-empty")).to_be_visible()
            shoot(page, "empty-phone-dark")
            give(page, "#find-drop", drawing(1, 1))
            says(page, "#verdict .who", "unknown")
            page.fill("#enrol-label", "first")
            page.click("#enrol button")
            says(page, "#verdict .who", "first")
            page.tap("#tab-explore")
            says(page, "#confused-note", "two labels")
    finally:
        served.stop()


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_small_screens_fit(browser, served, shoot, scheme):
    with Watched(browser, served.address, PHONE, scheme, has_touch=True, is_mobile=True) as page:
        give(page, "#find-drop", drawing(1, 2))
        says(page, "#verdict .who", "kind 1")
        faces(page, "#hits img", 24)
        shoot(page, f"phone-find-{scheme}")
        for tab in ("compare", "explore"):
            page.tap(f"#tab-{tab}")
            page.wait_for_timeout(500)
            shoot(page, f"phone-{tab}-{scheme}")
        for tab in ("find", "compare", "explore"):
            page.tap(f"#tab-{tab}")
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0], f"{tab} is wider than the screen"


def test_the_token_is_asked_for(browser, tmp_path, shoot):
    served = Served(tmp_path / "closed", token="open-sesame")
    try:
        with Watched(browser, served.address, scheme="dark") as page:
            page.wait_for_selector("#ask-token[open]")
            assert not page.is_visible("#token-wrong")
            page.fill("#token", "wrong")
            page.press("#token", "Enter")
            says(page, "#token-wrong:visible", "That token was wrong.")
            page.fill("#token", "open-sesame")
            page.press("#token", "Enter")
            says(page, "#summary", "32 items")
            give(page, "#find-drop", drawing(1, 2))
            faces(page, "#hits img", 24)
            shoot(page, "find-dark")
            page.click("#tab-explore")
            says(page, "#suspects", "kind0/3.png")
            page.wait_for_timeout(300)
            shoot(page, "explore-dark")
        with Watched(browser, served.address + "#token=open-sesame") as page:
            says(page, "#summary", "32 items")
            assert "sesame" not in page.url
    finally:
        served.stop()


# --- layout, as the browser reports it

# Visible words that are broken over two lines; names may be broken at - _ / and .
BROKEN = """() => { const broken = [], range = document.createRange();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    if (!node.parentElement.checkVisibility() || node.parentElement.closest("script, style, pre, svg")) continue;
    for (const word of node.data.matchAll(/[^\\s\\-_\\/.]+/g)) {
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      const boxes = [...range.getClientRects()].filter((one) => one.width > 0);
      if (new Set(boxes.map((one) => Math.round(one.top))).size > 1) broken.push(word[0]);
    } }
  return broken; }"""
FACES = "(faces) => faces.map((one) => { const r = one.getBoundingClientRect(); return [r.left, r.top, r.height]; })"
# Names in a chart that overlap each other, or the outline of a bar.
MET = """(plots) => plots.flatMap((plot) => { const met = [];
  const boxes = [...plot.querySelectorAll("text")].map((one) => [one.textContent, one.getBoundingClientRect()]);
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => meet(a, b) && met.push([one, other])));
  for (const area of plot.querySelectorAll("polygon.area")) for (const [one, a] of boxes)
    if (/mean/.test(one) && a.bottom > area.getBoundingClientRect().top + 1) met.push([one, "bars"]);
  return met; })"""


def in_line(page, place):
    """Faces of a row have the same top, whatever is below them."""
    faces = page.eval_on_selector_all(f"{place} .face", FACES)
    columns = len({round(left) for left, _, _ in faces})
    rows = [{round(top) for _, top, _ in faces[i : i + columns]} for i in range(0, len(faces), columns)]
    assert len(faces) > columns > 1 and all(len(tops) == 1 for tops in rows), rows


@pytest.mark.parametrize("size, scheme", [(DESKTOP, "light"), (PHONE, "dark")], ids=["wide", "narrow"])
def test_long_labels_stay_whole_and_faces_stand_in_line(browser, tmp_path, shoot, size, scheme):
    served = Served(tmp_path / "long", labels=LONG)
    try:
        with Watched(browser, served.address, size, scheme) as page:
            says(page, "#summary", "32 items")
            give(page, "#find-drop", drawing(1, 2))
            says(page, "#verdict .who", LONG[1])
            faces(page, "#hits img", 24)
            in_line(page, "#hits")
            assert page.evaluate(BROKEN) == []
            page.click("#tab-explore")
            page.wait_for_selector("#map[data-points='32']")
            page.focus("#map")
            page.keyboard.press("Enter")
            says(page, "#selected h3 >> nth=0", "32 items selected")
            faces(page, "#selected .one", 32)
            in_line(page, "#selected .items:not(#around)")
            assert page.evaluate(BROKEN) == []
            box, last = (
                page.locator(one).bounding_box()
                for one in ("#selected .items >> nth=0", "#selected .items >> nth=0 >> .one >> nth=-1")
            )
            assert last["y"] + last["height"] <= box["y"] + box["height"] + 1, "the last row is not cut"
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
            shoot(page, f"long-labels-{size[0]}-{scheme}")
    finally:
        served.stop()


def a_report():
    """Three similar metrics, long names, overlapping clusters: a hard case for a narrow page."""
    names = [*LONG, "001.Brewer_Blackbird", "Chuck-will's-widow"]
    part = {"classes": 429, "smallest": f"{LONG[0]} (41)", "largest": "American_Three_toed_Woodpecker (60)"}
    parts = {"train": {"items": 18_580, **part}, "val": {"items": 960, **part}, "test": {"items": 9_520, **part}}
    history = [
        {"event": "epoch", "epoch": e, "step": e, "best": e < 7, "seconds": 1.0}
        | {"val": {"map@r": 0.05 * e, "recall@1": 0.06 * e, "r_precision": 0.052 * e}}
        for e in range(1, 9)
    ]
    return run_report.page(made(classes=names, history=history, data={"items": 29_060, "parts": parts}))


@pytest.mark.parametrize("size, scheme", [(DESKTOP, "dark"), (PHONE, "light")], ids=["wide", "narrow"])
def test_a_report_breaks_no_word_and_prints_no_name_over_another(browser, tmp_path, monkeypatch, shoot, size, scheme):
    monkeypatch.setitem(sys.modules, "openTSNE", None)
    (tmp_path / "report.html").write_text(a_report(), encoding="utf-8")
    with Watched(browser, (tmp_path / "report.html").as_uri(), size, scheme) as page:
        assert page.evaluate(BROKEN) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.eval_on_selector_all(".charts .plot, .wide .plot, .narrow .plot", MET) == []
        strokes = page.eval_on_selector_all(
            ".plot[aria-label^=Validation] path.line", "(lines) => lines.map((one) => getComputedStyle(one).stroke)"
        )
        assert len(strokes) == 3 == len(set(strokes)), "a colour for each metric"
        shoot(page, f"report-{size[0]}-{scheme}")


# --- languages


@pytest.mark.parametrize(
    "locale, query, language",
    [("en-GB", "", "en"), ("ko-KR", "", "ko"), ("de-DE", "", "en"), ("en-US", "?lang=ko", "ko")],
)
def test_the_page_speaks_the_language_of_the_browser(browser, served, locale, query, language):
    with Watched(browser, served.address + query, locale=locale) as page:
        says(page, "#summary", {"en": "32 items", "ko": "항목 32개"}[language])
        assert page.get_attribute("html", "lang") == language
        says(page, "#tab-find", {"en": "Find", "ko": "찾기"}[language])
        give(page, "#find-drop", strange())
        says(page, "#verdict .who", {"en": "unknown", "ko": "알 수 없음"}[language])
        for tab in ("compare", "explore", "find"):
            page.click(f"#tab-{tab}")
            texts = page.evaluate("document.body.innerText")
            assert (re.search("[가-힣]", texts) is not None) == (language == "ko")
        assert page.evaluate("document.querySelector('meta[name=description]').content")
