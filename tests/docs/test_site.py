"""The site: built strict, complete, readable without a network, searchable, formulas without scripts."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import nearkin
from nearkin import losses

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FOREIGN = re.compile(
    r"""<(?:script|img|iframe|source|video)[^>]*\ssrc=["']?(?:https?:)?//|<link(?![^>]*canonical)[^>]*\shref=["']?(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("material", "mkdocstrings", "latex2mathml", "fastapi"):
        pytest.importorskip(package, reason=f"no {package} here: pip install 'nearkin[docs]'")
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def page(site, name):
    return (site / name).read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference(site):
    for module in nearkin.__all__:
        thing = getattr(nearkin, module)
        if inspect.ismodule(thing):
            text = page(site, f"reference/{module}.html")
            missing = [name for name in thing.__all__ if f'id="nearkin.{module}.{name}"' not in text]
            assert not missing, f"nearkin.{module}: {missing}"
        else:
            assert f'id="nearkin.{module}"' in page(site, "reference/nearkin.html")


def test_reference_has_the_options_keys_and_addresses(site):
    command_line, recipe, http = (page(site, f"reference/{name}.html") for name in ("cli", "recipe", "http"))
    assert (
        "<code>--budget</code>" in command_line and "8765" in command_line and "nearkin gallery restore" in command_line
    )
    assert "<code>optimizer.backbone_scale</code>" in recipe and "≥ 8 ≤ 4096" in recipe
    assert "POST /api/identify" in http and "GET /api/health" in http
    settings = page(site, "reference/losses.html")
    assert "<code>margin=0.2</code>" in settings  # of TripletLoss, as `help` says it


def test_nothing_foreign_is_requested(site):
    for path in site.rglob("*.html"):
        assert not FOREIGN.search(path.read_text(encoding="utf-8")), path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", path.read_text(encoding="utf-8")), path.name


def test_formulas_are_set_and_every_loss_has_one(site):
    text = page(site, "losses.html")
    assert "arithmatex" not in text and "$$" not in text
    sections = dict(re.findall(r'<h3 id="\w+"><code>(\w+)</code>.*?</h3>(.*?)(?=<h[23])', text, re.S))
    classes = [name for name in losses.__all__ if inspect.isclass(getattr(losses, name))]
    assert not [name for name in classes if "<math" not in sections.get(name, "")]
    for path in site.rglob("*.html"):
        drawn = "".join(re.findall(r"<math.*?</math>", path.read_text(encoding="utf-8"), re.S))
        assert not re.search(r"<merror|\\", drawn), path.name  # a command that was not known


def test_pages_open_from_files_and_are_found(site):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium here: apt install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        requests, errors = [], []
        view = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
        view.on("request", lambda request: requests.append(request.url))
        view.on("pageerror", lambda error: errors.append(str(error)))
        for name in ("index", "losses", "start/train", "reference/cli", "benchmarks"):
            view.goto((site / f"{name}.html").as_uri())
            assert view.evaluate("document.body.getAttribute('data-md-color-scheme')") == "slate"
            assert view.evaluate("document.documentElement.scrollWidth") <= 390, (
                name
            )  # wide tables scroll by themselves
        view.set_viewport_size({"width": 1300, "height": 800})
        found(view, (site / "index.html").as_uri())
        with served(site) as address:
            found(view, address)
        foreign = [url for url in requests if not url.startswith(("file:", "data:", "blob:", "http://127.0.0.1"))]
        browser.close()
    assert not foreign and not errors


def found(view, address):
    """Types a word into the search and sees the page that has it."""
    view.goto(address)
    view.locator("input.md-search__input").click()
    view.keyboard.type("semihard")
    view.wait_for_selector(".md-search-result__link", timeout=60_000)
    assert view.locator(".md-search-result__link").count() > 0


class served:
    """The site over HTTP on this machine."""

    def __init__(self, folder):
        quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder)))

    def __enter__(self):
        Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}/index.html"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
