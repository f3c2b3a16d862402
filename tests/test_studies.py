"""The studies of docs/claims.md: the quick form of each runs, draws its figure and reports what it measured."""

import importlib
import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytestmark = pytest.mark.slow

STUDIES = Path(__file__).parents[1] / "studies"
sys.path.insert(0, str(STUDIES))
ground, showing = (importlib.import_module(name) for name in ("ground", "showing"))
NAMES = sorted(
    path.stem for path in STUDIES.glob("*.py") if "ground.options(" in path.read_text() and path.stem != "ground"
)


@pytest.mark.parametrize("name", NAMES)
def test_a_study_runs_and_says_what_it_measured(name, shared_data, tmp_path, capsys):
    for folder in ("fashion-mnist", "omniglot", "coil20", "CUB_200_2011"):
        home = shared_data(folder).parent
    study = importlib.import_module(name)
    study.main(["--quick", "--device", "cpu", "--data", str(home), "--out", str(tmp_path)])
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert report["study"] == name and report["verdict"] in showing.WORDS and report["numbers"] and report["parts"]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"verdict: {report['verdict']}" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_a_study_is_in_the_document(name):
    page = (STUDIES.parent / "docs" / "claims.md").read_text()
    assert f"python studies/{name}.py" in page and f"pictures/{name}.png" in page
    report = json.loads((STUDIES / "results" / f"{name}.json").read_text())
    assert report["study"] == name and "quick" not in report["command"]
    assert f"`python studies/{name}.py --data DATA`, {report['seconds']:.0f} s" in page


def test_training_is_the_same_twice_and_learns(tmp_path):
    options = ground.options("", ["--quick", "--device", "cpu", "--out", str(tmp_path)])
    images = torch.rand(4, 1, 16, 16).repeat_interleave(8, 0) + 0.1 * torch.randn(32, 1, 16, 16)
    part = ground.Part(images, torch.arange(4).repeat_interleave(8))
    result = []
    for _ in range(2):
        model = ground.encoder(options, 16, dim=8, seed=3)
        loss = importlib.import_module("nearkin").losses.TripletLoss(0.2)
        history = ground.train(model, loss, part, ground.balanced(part, 4, 4, 12, seed=5), lr=3e-3)
        result.append((history, ground.embed(model, part)))
    assert torch.equal(result[0][0], result[1][0]) and torch.equal(result[0][1], result[1][1])
    assert result[0][0][-1] < result[0][0][0]


def test_watch_sees_the_beginning_and_the_end(tmp_path):
    options = ground.options("", ["--quick", "--device", "cpu", "--out", str(tmp_path)])
    part = ground.Part(torch.rand(8, 1, 16, 16), torch.arange(2).repeat_interleave(4))
    steps = []
    loss = importlib.import_module("nearkin").losses.TripletLoss(0.2)
    places = ground.balanced(part, 2, 4, 5)
    model = ground.encoder(options, 16, dim=8)
    ground.train(model, loss, part, places, lr=1e-3, callback=lambda step, value, x: steps.append(step), every=2)
    assert steps == [0, 2, 4, 5]


def test_parts_of_a_set():
    part = ground.Part(torch.arange(12.0).view(12, 1, 1, 1), torch.tensor([0, 1, 2, 3] * 3))
    first, other = ground.halves(part)
    assert first.images.flatten().tolist() == [0, 1, 4, 5, 8, 9] and other.labels.tolist() == [0, 1] * 3
    assert ground.some(part, 1, skip=1).images.flatten().tolist() == [4, 5, 6, 7]


def test_a_verdict_follows_from_its_parts():
    assert showing.verdict({"a": True, "b": True}) == "holds"
    assert showing.verdict({"a": True, "b": False}) == "holds partly"
    assert showing.verdict({"a": False}) == "does not hold here"


def test_numbers_become_plain_json():
    value = {1: torch.tensor([1.23456, math.nan]), "b": [math.inf, 2], "c": {"d": 0.00012345678}}
    assert showing.rounded(value) == {"1": [1.235, None], "b": [None, 2], "c": {"d": 0.0001235}}


def test_a_curve_is_one_line_of_json():
    value = {"name": "a [1, 2]", "curves": [[1.5, None, 3.0], [4]], "empty": [], "texts": ["b", "c"]}
    text = showing.written(value)
    assert json.loads(text) == value and "[ 1.5, null, 3.0 ]" in text


def test_a_lighter_picture_is_the_same_to_the_eye():
    drawn, axes = showing.figure("Title")
    for colour in showing.INK:
        axes.plot(torch.rand(50).numpy(), color=colour)
    original = io.BytesIO()
    drawn.savefig(original, format="png", dpi=100)
    small = showing.lighter(original.getvalue())
    before, after = (
        np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), int) for png in (original.getvalue(), small)
    )
    assert len(small) < len(original.getvalue()) and np.abs(before - after).mean() < 1


def test_embeddings_that_are_no_numbers_score_nothing():
    assert ground.judged(torch.full((4, 2), math.nan), torch.tensor([0, 0, 1, 1]))["map@r"] == 0


def test_where_a_curve_reaches_a_target():
    reached = importlib.import_module("proxies_converge").reached
    assert reached([0, 10, 20], [0.0, 0.4, 0.8], 0.6) == 15
    assert reached([0, 10], [0.7, 0.8], 0.6) == 0
    assert reached([0, 10], [0.1, 0.2], 0.6) is None


def test_the_cells_of_the_fine_tuning_study_share_no_class_with_the_test(shared_data, tmp_path):
    study = importlib.import_module("finetune_rule")
    study.tables("orl", shared_data("orl-faces").parent, tmp_path)
    parts, tested = {}, []
    for share, count in (("all", 30), ("quarter", 8), ("twentieth", 4)):
        rows = [line.split(",") for line in (tmp_path / "tables" / f"orl-{share}.csv").read_text().split()[1:]]
        parts[share] = {label for _, label, split in rows if split == "train"}
        tested.append({label for _, label, split in rows if split == "test"})
        assert len(parts[share]) == count and len(tested[-1]) == 10 and not parts[share] & tested[-1]
        assert all((tmp_path / "tables" / path).is_file() for path, _, _ in rows)
    assert parts["twentieth"] < parts["quarter"] < parts["all"] and tested[0] == tested[1] == tested[2]


def test_a_cell_below_the_frozen_encoder_is_named(tmp_path):
    study = importlib.import_module("finetune_rule")
    run = tmp_path / "runs" / "orl-all"
    run.mkdir(parents=True)
    (run / "recipe.toml").write_text('[finetune]\ntrain = "all"\n')
    against = {"other": 0.5, "trained": 0.4, "difference": -0.1, "low": -0.15, "high": -0.05}
    values = {name: {"recall@1": {"value": 0.9}} for name in ("baseline", "trained")}
    results = {"test": values, "verdict": {"against": {"baseline": against}}, "classes": {"train": 24}}
    for high, below in ((-0.05, True), (0.01, False), (None, False)):
        against["high"] = high
        (run / "results.json").write_text(json.dumps(results))
        row = study.figures(study.Cell("orl", "all"), run)
        assert row["below"] is below and row["difference"] == -10 and row["kept"] == "as trained"


def test_the_rule_of_interpolation_is_studied_with_few_classes():
    """Of an encoder that is no better than the frozen one, the mean chooses wrongly more often than the interval."""
    study = importlib.import_module("interpolation_rule")
    labels = torch.arange(40).repeat_interleave(6)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(40, 8, generator=generator)[labels]
    rows = {name: centres + 1.5 * torch.randn(240, 8, generator=generator) for name in ("frozen", "untrained", 0.5)}
    rows[1.0] = centres + 0.8 * torch.randn(240, 8, generator=generator)
    truth, *results = study.study(rows, labels, draws=20)
    assert truth["truth"]["1.0"] > truth["truth"]["frozen"]
    by = {(row["classes"], row["rule"]): row for row in results}
    assert set(by) == {(number, rule) for number in study.NUMBERS for rule in ("interval", "mean")}
    assert by[20, "interval"]["frozen"] == 0 and by[20, "interval"]["gain"] > 0, "twenty classes are proof enough"
    assert by[2, "interval"]["frozen"] > by[2, "mean"]["frozen"]


@pytest.mark.parametrize("share, classes", [(5, 10), (20, 20), (100, 20)])
def test_labels_of_the_unlabelled_study_are_two_per_class_at_least(share, classes):
    study = importlib.import_module("unlabelled_pretraining")
    labels = np.repeat(np.arange(20), 20)
    names = [f"{i}.png" for i in range(len(labels))]
    chosen = study.labelled(labels, names, share, 0)
    counts = np.bincount(labels[chosen], minlength=20)
    assert len(chosen) == len(set(chosen.tolist())) == share * len(labels) // 100
    assert (counts > 0).sum() == classes and counts[counts > 0].min() >= 2 and np.ptp(counts[counts > 0]) <= 1
    assert share == 100 or not np.array_equal(chosen, study.labelled(labels, names, share, 1))
    cells = study.every_cell()
    assert len(cells) == len({cell.name for cell in cells}) == 54 and cells[0].subject == "glyphs"


@pytest.mark.parametrize("name, beside", [("start", "digits, λ = 1, zeros"), ("margins", "one margin 0.5")])
def test_the_settings_of_class_losses_are_tried_in_pairs(name, beside, tmp_path, monkeypatch):
    study = importlib.import_module("class_settings")
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "argv", ["", name, "--quick", "--out", str(tmp_path / "out.json")])
    study.main()
    report = json.loads((tmp_path / "out.json").read_text())
    first = "digits, λ = 1, first" if name == "start" else "per class"
    gaps = report["differences"][f"{first} less {beside}"]
    for key, values in report["values"][first].items():
        each = np.subtract(values, report["values"][beside][key])
        assert gaps[key][0] == pytest.approx(each.mean(), abs=0.02) and gaps[key][1] <= gaps[key][0] <= gaps[key][2]


def test_the_interval_of_paired_differences_is_students():
    paired = importlib.import_module("class_settings").paired
    rows = {"a": {"x": [1.0, 2.0, 6.0]}, "b": {"x": [0.0, 0.0, 3.0]}}
    assert paired(rows, "a", "b")["x"] == pytest.approx([2, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5], abs=1e-3)
