"""From `nearkin serve photos/` to answers in the browser: seconds from the start of the command on.

    python benchmarks/first_minute.py PHOTOS [--items 1000]

PHOTOS has one folder of pictures per class. Classes are taken in the order of their names until there are `--items`
pictures, copied to a temporary folder, and served twice: the second start finds its gallery. One more picture of the
first class, which is not served, is dropped on the page, in a headless chromium that was opened before.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright import sync_api

WAIT = 300_000  # milliseconds


def copied(photos: Path, items: int, to: Path) -> tuple[Path, int]:
    """The picture that is asked about, and the number of classes that are served."""
    question: Path | None = None
    left, classes = items, 0
    for kind in sorted(p for p in photos.iterdir() if p.is_dir()):
        pictures = sorted(p for p in kind.iterdir() if p.suffix.lower() in (".jpg", ".png"))
        if question is None:
            question = pictures.pop()
        for picture in pictures[:left]:
            (to / kind.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, to / kind.name)
        left, classes = left - len(pictures[:left]), classes + 1
        if left == 0:
            return question, classes
    raise SystemExit(f"{photos}: {items - left} pictures in folders, {items} are asked for")


def wait_for(service: "subprocess.Popen[bytes]", address: str, reached: Callable[[dict[str, Any]], bool]) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"{address}api/stats", timeout=10) as answer:
                if reached(json.load(answer)):
                    return
        except OSError:
            if service.poll() is not None:
                raise SystemExit("the service ended") from None
        time.sleep(0.05)


def is_over(stats: dict[str, Any]) -> bool:
    state = stats["enrolling"]
    return state is None or (not state["running"] and state["done"] >= state["total"])


def seconds_of(browser: Any, folder: Path, question: Path) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, page = f"http://127.0.0.1:{port}/", browser.new_page()
    page.set_default_timeout(WAIT)
    command = [sys.executable, "-m", "nearkin", "serve", str(folder), "--port", str(port), "--no-open"]
    environment = os.environ | {"NEARKIN_CACHE": str(folder.parent / "cache")}
    began = time.monotonic()
    service = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = {}
        wait_for(service, address, lambda stats: True)
        page.goto(address)
        page.wait_for_selector("html[data-ready]")
        found["page"] = time.monotonic() - began
        wait_for(service, address, lambda stats: stats["rows"] > 0)
        page.set_input_files("#find-drop input[type=file]", question)
        page.locator("#hits button").first.wait_for()
        found["first answer"] = time.monotonic() - began
        wait_for(service, address, is_over)
        found["enrolled and calibrated"] = time.monotonic() - began
        page.reload()
        page.wait_for_selector("html[data-ready]")
        page.set_input_files("#find-drop input[type=file]", question)
        page.locator(".sure", has_text="%").wait_for()
        found["answer of all, with its confidence"] = time.monotonic() - began
        return found
    finally:
        page.close()
        service.send_signal(signal.SIGINT)
        service.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--items", type=int, default=1000)
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no chromium: apt install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_api.sync_playwright() as tool:
        question, classes = copied(options.photos, options.items, Path(folder) / "photos")
        print(f"{options.items} pictures of {classes} classes; load {os.getloadavg()[0]:.1f}", flush=True)
        browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for start in ("first start", "second start"):
            found = seconds_of(browser, Path(folder) / "photos", question)
            print(f"{start}: " + "; ".join(f"{what} {value:.1f} s" for what, value in found.items()), flush=True)
        browser.close()


if __name__ == "__main__":
    main()
