"""Runs with levels, with lists of items to leave out, and with near-duplicates: what they learn, record and resume."""

import csv
import json
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image

import commands
import worlds
from nearkin import losses, report, training
from nearkin.training.config.recipe import read
from nearkin.training.prepare import prepare

SMALL = ["encoder.hidden=[8]", "encoder.dim=4", "sampler.batch=8", "sampler.per_class=2", "training.workers=0"]
SMALL += ["training.epochs=2", "training.batches=4", "training.log_steps=1", "training.device=cpu"]
PHOTOS = ["encoder.name=small-cnn", "encoder.width=4", "encoder.dim=4", "sampler.batch=8", "sampler.per_class=2"]
PHOTOS += ["training.epochs=1", "training.batches=3", "training.workers=0", "training.device=cpu"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def vectors(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 6)
    rows = (rng.normal(size=(20, 5))[labels] + 0.4 * rng.normal(size=(120, 5))).astype(np.float32)
    np.savez(tmp_path / "vectors.npz", embeddings=rows, labels=labels, family=labels % 5, order=labels % 5 // 3)
    return tmp_path / "vectors.npz"


def run(source, out, *sets, callback=lambda event: None):
    return training.train(read(None, [f'data.source="{source}"', *sets]), out, callback)


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def stop_at(step):
    def callback(event):
        if event["event"] == "step_end" and event["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return callback


LEVELS = ['data.levels=["family","order"]', "levels.weights=[1,0.5,0.2]"]


# --- levels


@pytest.mark.parametrize("loss", ["supcon", "arcface", "margin", "contrastive"])
def test_a_run_with_levels_resumes_to_the_same_weights(loss, vectors, tmp_path):
    sets = [*SMALL, *LEVELS, f"loss.name={loss}", *(["memory.size=16"] if loss == "contrastive" else [])]
    reference = run(vectors, tmp_path / "reference", *sets)
    with pytest.raises(training.Stopped):
        run(vectors, tmp_path / "run", *sets, callback=stop_at(5))
    again = training.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(tmp_path / "reference")
    assert again.results["levels"] == reference.results["levels"]
    alone = run(vectors, tmp_path / "alone", *SMALL, f"loss.name={loss}", *sets[len(SMALL) + 3 :])
    assert weights(tmp_path / "alone") != weights(tmp_path / "reference") and "levels" not in alone.results


def test_results_have_every_level(vectors, tmp_path):
    """Against retrieval with the coarser ids: the same figures; the finest level is the test itself."""
    from nearkin import evaluation

    outcome = run(vectors, tmp_path / "run", *SMALL, LEVELS[0])
    first, family, order = outcome.results["levels"]
    assert [first["name"], family["name"], order["name"]] == ["class", "family", "order"]
    assert first["test"]["trained"]["map@r"] == outcome.results["test"]["trained"]["map@r"]
    labels = outcome.prepared.items.labels[outcome.test.indices]
    for entry, ids in ((family, labels % 5), (order, labels % 5 // 3)):
        wanted = evaluation.retrieval(outcome.embeddings, torch.from_numpy(ids), ks=(1,))
        for name in ("recall@1", "map@r"):
            figure = entry["test"]["trained"][name]
            assert figure["value"] == wanted[name] and figure["low"] <= figure["value"] <= figure["high"]
        assert entry["classes"] == len(set(ids.tolist())) and set(entry["test"]) == {"trained", "untrained", "baseline"}
    assert json.loads((tmp_path / "run" / "results.json").read_text())["levels"] == outcome.results["levels"]
    page = report.of_run(outcome).read_text(encoding="utf-8")
    assert f"family, {family['classes']} classes" in page and f"order, {order['classes']} classes" in page


def test_each_level_has_class_weights_of_its_own_and_the_finest_starts_as_without(vectors, tmp_path):
    from nearkin.training.trainer import assemble

    base = [f'data.source="{vectors}"', *SMALL, "loss.name=arcface"]
    plain = assemble(prepare(read(None, base)), tmp_path / "a")
    trainer = assemble(prepare(read(None, [*base, *LEVELS])), tmp_path / "b")
    assert isinstance(trainer.loss, losses.HierarchyLoss) and trainer.loss.weights == (1.0, 0.5, 0.2)
    sizes = [len(level.weight) for level in trainer.loss.losses]
    assert sizes[0] == len(plain.loss.weight) and sizes[1:] == [5, 2]
    assert torch.equal(trainer.loss.losses[0].weight, plain.loss.weight)
    assert not torch.equal(trainer.loss.losses[1].weight[:2], plain.loss.weight[:2])
    assert trainer.labels.shape == (len(plain.labels), 3) and torch.equal(trainer.labels[:, 0], plain.labels)
    some = assemble(prepare(read(None, [*base, LEVELS[0], "levels.weights=[1,0,0.2]"])), tmp_path / "c")
    assert len(some.loss.losses) == 2 and some.labels.shape[1] == 2
    short = assemble(prepare(read(None, [*base, *LEVELS, "loss.matryoshka=[4,2]"])), tmp_path / "d")
    assert [type(level) for level in short.loss.losses] == 3 * [losses.MatryoshkaLoss]


@pytest.mark.parametrize(
    "sets, sentence",
    [
        (
            ["levels.weights=[1,0.5]"],
            "levels.weights must be 3 numbers, of the classes, family, order, the finest first",
        ),
        (["levels.weights=[0,1,1]"], "levels.weights must be > 0 for the classes themselves"),
        (["levels.weights=[1,-1,1]"], "levels.weights.1 must be >= 0"),
        (["levels.weights=[1,1,1]", "loss.name=arcface", "loss.shard=true"], "loss.shard must be false with levels"),
        (['data.levels=["genus"]'], 'no "genus" in it for the level of that name'),
        (["data.levels=[]"], "data.levels must be a list of at least 1"),
        (["data.levels=family"], "data.levels must be a list, got 'family'"),
    ],
)
def test_bad_levels_are_one_sentence(sets, sentence, vectors, tmp_path):
    with pytest.raises(ValueError, match=sentence.replace("[", r"\[")):
        run(vectors, tmp_path / "run", *SMALL, LEVELS[0], *sets)
    assert not (tmp_path / "run").exists()


def on_ranks(rank, size, source, out):
    run(source, out, *SMALL, *LEVELS, "loss.name=arcface", "evaluation.interval=false")


@pytest.mark.slow
def test_ranks_learn_levels_as_one_process_does(vectors, tmp_path):
    from safetensors.torch import load_file

    on_ranks(0, 1, str(vectors), tmp_path / "one")
    worlds.run(2, on_ranks, str(vectors), str(tmp_path / "two"), timeout=120)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


def test_evaluate_measures_the_levels_of_a_run_and_of_a_file(vectors, tmp_path):
    run(vectors, tmp_path / "run", *SMALL, LEVELS[0])
    result = commands.run("evaluate", tmp_path / "run", "--interval", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    levels = json.loads((tmp_path / "r.json").read_text())["results"]["retrieval"]["levels"]
    saved = json.loads((tmp_path / "run" / "results.json").read_text())["levels"]
    for entry in saved[1:]:
        assert levels[entry["name"]]["map@r"] == pytest.approx(entry["test"]["trained"]["map@r"]["value"])
        assert levels[entry["name"]]["intervals"]["map@r"][0] == pytest.approx(entry["test"]["trained"]["map@r"]["low"])
    assert "family: map@r" in result.output
    result = commands.run("evaluate", vectors, "--levels", "family,order", "--json", tmp_path / "f.json")
    assert result.exit_code == 0 and "order: recall@1" in result.output
    run(vectors, tmp_path / "plain", *SMALL)
    later = commands.run("evaluate", tmp_path / "plain", "--levels", "order")
    assert later.exit_code == 0 and "order: map@r" in later.output, later.output
    other = commands.run("evaluate", tmp_path / "run", "--levels", "order")
    assert other.exit_code != 0 and "has its own levels, family, order; leave --levels out" in other.output
    refused = commands.run("evaluate", vectors, "--levels", "family", "--clustering")
    assert refused.exit_code != 0 and "levels are for --retrieval" in refused.output


# --- what is left out


def test_a_list_is_obeyed_recorded_and_kept_by_a_resume(vectors, tmp_path):
    names = [f"row {i}" for i in (0, 1, 7, 30)]
    (tmp_path / "errors.csv").write_text("path,label\n" + "".join(f"{name},x\n" for name in names), encoding="utf-8")
    sets = [*SMALL, f'data.without="{tmp_path}/errors.csv"']
    reference = run(vectors, tmp_path / "reference", *sets)
    parts = reference.prepared.parts
    every = np.concatenate([parts.train, parts.val, parts.test])
    assert not set(every.tolist()) & {0, 1, 7, 30} and len(every) == 116
    recorded = json.loads((tmp_path / "reference" / "data.json").read_text())["left_out"]
    assert sorted(recorded["items"]) == sorted(names) and recorded["by"] == {"listed": 4} and recorded["alone"] == 0
    assert recorded["file"] == f"{tmp_path}/errors.csv" and sum(recorded["parts"].values()) == 4
    with pytest.raises(training.Stopped):
        run(vectors, tmp_path / "run", *sets, callback=stop_at(5))
    (tmp_path / "errors.csv").unlink()
    again = training.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(tmp_path / "reference")
    assert again.prepared.report["left_out"] == reference.prepared.report["left_out"]
    whole = run(vectors, tmp_path / "whole", *SMALL)
    assert len(whole.prepared.parts.train) > len(parts.train)
    embedded = training.embed_source(tmp_path / "run", part="train")
    assert embedded.names == [reference.prepared.items.names[i] for i in parts.train]


@pytest.mark.parametrize(
    "text, sentence",
    [("path\nrow 500\n", "1 of 1 paths are no items of"), ("path\n", "it names no item to leave out")],
)
def test_a_bad_list_leaves_nothing_behind(text, sentence, vectors, tmp_path):
    (tmp_path / "errors.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        run(vectors, tmp_path / "run", *SMALL, f'data.without="{tmp_path}/errors.csv"')
    assert not (tmp_path / "run").exists()


def test_a_comparison_obeys_a_list_and_refuses_the_rest(vectors, tmp_path):
    from nearkin.compare.protocol import check_comparable, open_setup

    (tmp_path / "errors.json").write_text('["row 0", "row 7", "row 30"]', encoding="utf-8")
    base = [f'data.source="{vectors}"']
    whole = open_setup(read(None, base))
    fewer = open_setup(read(None, [*base, f'data.without="{tmp_path}/errors.json"']))
    assert len(whole.items) + whole.test_size["items"] == len(fewer.items) + fewer.test_size["items"] + 3
    for key in ('data.levels=["family"]', "levels.weights=[1,1]", "data.near=drop"):
        with pytest.raises(ValueError, match=f"{key.partition('=')[0]} cannot be set in a comparison"):
            check_comparable(read(None, [*base, key]))


def test_a_corrupt_record_is_one_sentence(vectors, tmp_path):
    (tmp_path / "errors.csv").write_text("path\nrow 3\n", encoding="utf-8")
    run(vectors, tmp_path / "run", *SMALL, f'data.without="{tmp_path}/errors.csv"')
    record = json.loads((tmp_path / "run" / "data.json").read_text())
    (tmp_path / "run" / "data.json").write_text(json.dumps(record | {"left_out": {"items": 3}}), encoding="utf-8")
    with pytest.raises(ValueError, match='"left_out" must list its items by name; start a new run'):
        training.resume(tmp_path / "run")


def test_likely_label_errors_are_a_table_that_training_obeys(tmp_path):
    """Six planted wrong labels among well separated classes: the list is exactly these, and a run goes without them."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 12)
    rows = (4 * rng.normal(size=(20, 8))[labels] + 0.2 * rng.normal(size=(240, 8))).astype(np.float32)
    split = np.where(labels < 12, "train", np.where(labels < 15, "val", "test"))
    given, planted = labels.copy(), [3, 20, 41, 60, 77, 130]
    given[planted] = (labels[planted] + 5) % 12
    np.savez(tmp_path / "noisy.npz", embeddings=rows, labels=given, split=split)
    run(tmp_path / "noisy.npz", tmp_path / "run", *SMALL)
    errors = tmp_path / "errors.csv"
    result = commands.run("evaluate", tmp_path / "run", "--part", "train", "--label-errors", errors)
    assert result.exit_code == 0, result.output
    with errors.open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert {line["path"] for line in table} == {f"row {i}" for i in planted}
    assert {line["path"]: line["suggested"] for line in table} == {f"row {i}": str(labels[i]) for i in planted}
    assert all(0.8 <= float(line["score"]) <= 1 for line in table)
    clean = run(tmp_path / "noisy.npz", tmp_path / "clean", *SMALL, f'data.without="{errors}"')
    assert clean.results["items"]["train"] == 144 - 6
    as_json = commands.run("evaluate", tmp_path / "run", "--part", "train", "--label-errors", tmp_path / "e.json")
    assert as_json.exit_code == 0 and {e["path"] for e in json.loads((tmp_path / "e.json").read_text())} == {
        line["path"] for line in table
    }
    bad = commands.run("evaluate", tmp_path / "run", "--label-errors", tmp_path / "e.txt")
    assert bad.exit_code != 0 and "must end in .csv or .json" in bad.output


# --- near-duplicates


@pytest.fixture
def photos(tmp_path):
    """Twelve classes of five pictures; 0.png of the first training classes are copies of test pictures."""
    from nearkin import data

    folder, rng = tmp_path / "photos", np.random.default_rng(0)
    for c in range(12):
        (folder / f"class{c:02d}").mkdir(parents=True)
        for i in range(5):
            cells = Image.fromarray(rng.integers(0, 255, (7, 7, 3)).astype(np.uint8))
            cells.resize((40, 40), Image.Resampling.BICUBIC).save(folder / f"class{c:02d}" / f"{i}.png")
    items = data.load(folder)
    parts = data.divide(items)
    copies = []
    for copy, original in zip(parts.train[::5][:3], parts.test[::5][:3], strict=True):
        Image.open(folder / items.names[original]).save(folder / items.names[copy], "JPEG", quality=70)
        copies.append((items.names[copy], items.names[original]))
    return folder, copies


def test_near_duplicates_are_listed_and_shown(photos, tmp_path):
    folder, copies = photos
    events = []
    outcome = training.train(str(folder), tmp_path / "run", events.append, settings=[*PHOTOS], report=True)
    near = outcome.prepared.report["near_duplicates"]
    assert near["pairs"] == 3 and near["between"] == {"train-test": 3} and near["dropped"] == 0
    assert {(e["path"], e["copy"]) for e in near["shown"]} == set(copies)
    assert "left_out" not in outcome.prepared.report and outcome.recipe.data.near == "list"
    with (tmp_path / "run" / "near_duplicates.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert {(line["path"], line["copy"]) for line in table} == set(copies)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Near-duplicates" in page and copies[0][0] in page
    lines = next(event["lines"] for event in events if event["event"] == "data")
    assert any("3 pairs of near-duplicates in different parts" in line for line in lines)
    assert any(event["event"] == "near" and event["total"] for event in events)


def test_dropping_takes_the_training_side_and_keeps_the_test_whole(photos, tmp_path):
    folder, copies = photos
    whole = run(folder, tmp_path / "whole", *PHOTOS)
    reference = run(folder, tmp_path / "reference", *PHOTOS, "data.near=drop")
    before, after = whole.prepared.parts, reference.prepared.parts
    gone = {whole.prepared.items.names[i] for i in np.setdiff1d(before.train, after.train)}
    assert gone == {copy for copy, _ in copies}
    np.testing.assert_array_equal(before.test, after.test)
    np.testing.assert_array_equal(before.val, after.val)
    record = json.loads((tmp_path / "reference" / "data.json").read_text())
    assert record["left_out"]["by"] == {"near-duplicates": 3} and set(record["left_out"]["items"]) == gone
    with pytest.raises(training.Stopped):
        run(folder, tmp_path / "run", *PHOTOS, "data.near=drop", callback=stop_at(2))
    again = training.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(tmp_path / "reference")
    assert again.prepared.report["near_duplicates"] == reference.prepared.report["near_duplicates"]
    listed = run(folder, tmp_path / "listed", *PHOTOS, f'data.without="{tmp_path}/reference/near_duplicates.csv"')
    np.testing.assert_array_equal(listed.prepared.parts.train, after.train)


def test_the_command_takes_the_flags(photos, tmp_path):
    folder, copies = photos
    sets = [part for text in PHOTOS for part in ("--set", text)]
    result = commands.run("train", folder, "--drop-near", "--out", tmp_path / "run", "--json", *sets)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "run" / "data.json").read_text())
    assert set(record["left_out"]["items"]) == {copy for copy, _ in copies}
