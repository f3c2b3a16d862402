"""The README's code runs as it stands, and every file the docs point to is there."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_readme_code_runs():
    class Pictures(torch.utils.data.Dataset):
        targets = torch.arange(40).repeat(8)

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, i):
            return torch.randn(16), self.targets[i]

    encoder = torch.nn.Linear(16, 8)
    names = {
        "dataset": Pictures(),
        "encoder": encoder,
        "optimizer": torch.optim.SGD(encoder.parameters(), 0.1),
        "queries": torch.randn(6, 8),
        "references": torch.randn(9, 8),
        "reference_labels": torch.arange(9) % 3,
        "embeddings": torch.randn(6, 128),
        "poses": torch.randn(6),
    }
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 3
    before = encoder.weight.detach().clone()
    exec(blocks[0], names)
    assert not torch.equal(before, encoder.weight)
    exec(blocks[1], names | {"labels": torch.arange(6) % 3})
    exec(blocks[2], names | {"labels": torch.arange(6) % 3})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page):
    for name in re.findall(r"`((?:benchmarks|studies|tests|examples|docs)/[\w./]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_evaluation_page_runs():
    labels = torch.arange(60) % 6
    x = torch.randn(60, 8)
    names = {
        "embeddings": x,
        "labels": labels,
        "queries": x[:10],
        "query_labels": labels[:10],
        "gallery": x[10:],
        "gallery_labels": labels[10:],
        "scores": torch.rand(60),
        "same": labels > 2,
        "targets": torch.rand(60),
        "embeddings_a": x,
        "embeddings_b": torch.randn(60, 4),
    }
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "evaluation.md").read_text(), re.S)
    for line in block.splitlines():
        exec(line, names)
