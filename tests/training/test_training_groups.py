"""Runs on items with groups: splits, validation, test, report, evaluation of a run, samplers, resuming."""

import json

import numpy as np
import pytest
import torch

from nearkin import evaluation, training
from nearkin.training import read_recipe
from nearkin.training.prepare import prepare

QUICK = ["encoder.hidden=[8]", "encoder.dim=4", "sampler.batch=8", "sampler.per_class=2", "training.workers=0"]
QUICK += ["training.epochs=2", "training.batches=3", "training.log_steps=1"]


@pytest.fixture(scope="module")
def bursts(tmp_path_factory):
    """20 classes of 4 bursts of 3 near-copies."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(20, 1, 1, 6)) + 1.5 * rng.normal(size=(20, 4, 1, 6))
    rows = (centres + 0.05 * rng.normal(size=(20, 4, 3, 6))).reshape(-1, 6).astype(np.float32)
    labels, groups = np.repeat(np.arange(20), 12), np.repeat(np.arange(80), 3)
    path = tmp_path_factory.mktemp("bursts") / "bursts.npz"
    np.savez(path, embeddings=rows, labels=labels, groups=groups, camera=np.arange(240) % 3)
    return path


def recipe_of(path, *sets):
    return read_recipe(None, [f"data.source={json.dumps(str(path))}", *QUICK, *sets])


@pytest.fixture(scope="module")
def outcome(bursts, tmp_path_factory):
    return training.train(recipe_of(bursts), tmp_path_factory.mktemp("run") / "run", report=True)


def test_a_run_measures_without_pairs_of_one_burst(outcome, bursts, tmp_path):
    held_out, groups = outcome.test, outcome.results["groups"]
    ids, labels = torch.from_numpy(held_out.groups), torch.from_numpy(held_out.labels)
    metrics = ("recall", "map@r", "map", "minp")
    expected = evaluation.retrieval(outcome.embeddings, labels, groups=ids, metrics=metrics)
    tested = outcome.results["test"]["trained"]
    for name in ("recall@1", "map@r", "map", "minp"):
        assert tested[name]["value"] == expected[name]
        assert tested[name]["low"] <= expected[name] <= tested[name]["high"]
    plain = evaluation.retrieval(outcome.embeddings, labels)
    assert plain["recall@1"] > expected["recall@1"] + 0.2, "near-copies make it too good"
    assert groups["test"] == len(np.unique(held_out.groups)) == len(labels) // 3
    assert groups["pairs_left_out"] == len(labels) // 3 * 3 and groups["without_positives"] == 0
    assert groups["cmc"]["trained"][0] == expected["recall@1"] and len(groups["cmc"]["untrained"]) == 20
    val = next(line for line in outcome.history if line["event"] == "epoch")["val"]
    assert set(val) >= {"map@r", "recall@1"}
    verdict = outcome.results["verdict"]["against"]["untrained"]
    assert verdict["trained"] == pytest.approx(expected["map@r"])
    again = training.train(recipe_of(bursts, 'data.group_column="none"'), tmp_path / "plain")
    assert "groups" not in again.results and "minp" not in again.results["test"]["trained"]


def test_the_report_says_what_groups_change(outcome):
    text = (outcome.folder / "report.html").read_text("utf-8")
    pairs = outcome.results["groups"]["pairs_left_out"]
    assert f"{pairs} pairs are left out" in text and "CMC: share of queries" in text and "mINP" in text


def test_a_run_is_evaluated_with_its_groups_or_others(outcome, bursts):
    queries, gallery = training.vectors_of(outcome.folder, device="cpu")
    assert gallery is None and len(set(queries.groups)) == outcome.results["groups"]["test"]
    embedded = training.embed_source(outcome.folder, device="cpu")
    assert embedded.groups == queries.groups.tolist()
    by_camera, _ = training.vectors_of(outcome.folder, device="cpu", group_column="camera")
    assert set(by_camera.groups) == {"0", "1", "2"} and by_camera.names == queries.names
    elsewhere, _ = training.vectors_of(outcome.folder, str(bursts), device="cpu", group_column="none")
    assert elsewhere.groups is None


def test_a_changed_group_is_a_changed_source(bursts, tmp_path):
    arrays = dict(np.load(bursts))
    np.savez(tmp_path / "b.npz", **arrays)
    run = training.train(recipe_of(tmp_path / "b.npz"), tmp_path / "run").folder
    arrays["groups"] = arrays["groups"][::-1].copy()
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(ValueError, match="it has changed since"):
        training.embed_source(run, device="cpu")


def test_a_sampler_takes_positives_of_other_groups(bursts, tmp_path):
    prepared = prepare(recipe_of(bursts, "sampler.groups=true"))
    assert prepared.recipe.sampler["groups"] is True
    from nearkin.training.trainer import assemble

    groups = prepared.train_groups()
    for sets, crossed in (([], False), (["sampler.groups=true"], True)):
        sampler = assemble(prepare(recipe_of(bursts, *sets)), tmp_path / "x").sampler
        pairs = np.concatenate([np.array(sampler.batch(e, i)).reshape(-1, 2) for e in range(9) for i in range(3)])
        assert bool((groups[pairs[:, 0]] != groups[pairs[:, 1]]).all()) == crossed
    plain = recipe_of(bursts, "sampler.groups=true", "data.group_column=none")
    with pytest.raises(ValueError, match=r"sampler\.groups needs groups, the source has none"):
        training.train(plain, tmp_path / "run")
    with pytest.raises(ValueError, match=r'unknown key "sampler\.groups" of sampler "class-ratio"'):
        prepare(
            read_recipe(
                None, [f"data.source={json.dumps(str(bursts))}", "sampler.name=class-ratio", "sampler.groups=true"]
            )
        )


def test_a_run_with_grouped_batches_resumes_bit_for_bit(bursts, tmp_path, monkeypatch):
    sets = ["sampler.groups=true", "training.epochs=3"]
    whole = training.train(recipe_of(bursts, *sets), tmp_path / "whole").folder

    def stop(event):
        if event["event"] == "epoch" and event["epoch"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.train(recipe_of(bursts, *sets), tmp_path / "parts", stop)
    resumed = training.resume(tmp_path / "parts").folder
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()


def test_cameras_are_refused_or_kept_within_classes(bursts, tmp_path):
    with pytest.raises(ValueError, match=r"its groups connect its classes .*data.group_scope=class"):
        prepare(recipe_of(bursts, "data.group_column=camera"))
    prepared = prepare(recipe_of(bursts, "data.group_column=camera", "data.group_scope=class"))
    assert "groups whole within each class" in prepared.parts.note and prepared.report["groups"] == 3
