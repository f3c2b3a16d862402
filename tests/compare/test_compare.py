"""The comparison of losses: the same for all, chosen without the test, the same table after any kill."""

import csv
import hashlib
import inspect
import json
import math
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import commands
from nearkin import compare, models, report, training
from nearkin.cli import app
from nearkin.compare import final_evaluation, loss_search, plan, significance, trial
from nearkin.compare.executor import ProcessPool, Schedule, _WorkerArguments, make_executor
from nearkin.compare.plan import Plan
from nearkin.compare.protocol import Job, comparable, make_folds, make_item_folds, open_setup
from nearkin.compare.study import Study
from nearkin.core.errors import OutOfTime
from nearkin.data.item_set import Items
from nearkin.evaluation import retrieval
from nearkin.losses.settings import Choices, ranges_of
from nearkin.training import read_recipe
from nearkin.training.config.registry import LOSSES
from nearkin.training.loader import ItemStore, embed
from nearkin.training.trainer import assemble

TRIPLET_RANGES = ranges_of(LOSSES["triplet"].make)

LOSSES_HERE = ["triplet", "proxy-anchor"]
SMALL = {"steps": 12, "trials": 3, "folds": 2, "seeds": 2}
TINY = Plan(12, 3, 2, 2, 0)
EXTRA = ["encoder.dim=8", "encoder.hidden=[16]", "sampler.batch=16", "sampler.per_class=4"]


def vectors(path, poison=0):
    """24 classes, the last 8 for the test; poison: other vectors and shuffled labels for these."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(24), 8)
    x = rng.normal(size=(24, 4))[labels] @ rng.normal(size=(4, 12)) + 1.2 * rng.normal(size=(len(labels), 12))
    tested = labels >= 16
    split = np.where(tested, "test", "train")
    if poison:
        chance = np.random.default_rng(poison)
        labels = labels.copy()
        labels[tested] = chance.permutation(labels[tested])
        x[tested] = 100 * chance.normal(size=x[tested].shape)
    np.savez(path, embeddings=x.astype(np.float32), labels=labels, split=split)
    return path


def recipe(path, *sets):
    return read_recipe(None, [f"data.source={json.dumps(str(path))}", *EXTRA, *sets])


def digests(folder):
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*.s*"))
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return vectors(tmp_path_factory.mktemp("source") / "v.npz")


@pytest.fixture(scope="module")
def setup(source):
    return open_setup(recipe(source))


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    """An undisturbed comparison, and its events."""
    out, events = tmp_path_factory.mktemp("finished") / "out", []
    comparison = compare.compare(recipe(source), LOSSES_HERE, out, jobs=1, callback=events.append, **SMALL)
    return comparison, events


# Folds


def items(classes, each=3):
    labels = np.repeat(np.arange(classes), each)
    names = [f"item {i}" for i in range(len(labels))]
    x = np.zeros((len(labels), 2), np.float32)
    return Items("toy", names, [f"c{i}" for i in range(classes)], labels.astype(np.int64), vectors=x)


@pytest.mark.parametrize("classes, count", [(4, 2), (11, 4), (40, 5)])
def test_every_class_validates_once_and_never_where_it_trains(classes, count):
    one = items(classes)
    parts = make_folds(one, np.arange(len(one)), count, 0)
    validated = [set(one.labels[part.val]) for part in parts]
    assert sorted(c for kinds in validated for c in kinds) == list(range(classes))
    for part, kinds in zip(parts, validated, strict=True):
        assert not kinds & set(one.labels[part.train])
        assert len(part.train) + len(part.val) == len(one) and not len(part.test)
    assert max(map(len, validated)) - min(map(len, validated)) <= 1


def test_folds_go_by_names_and_seed():
    one, two = items(12), items(12)
    two.classes.reverse()
    first = [{one.classes[c] for c in one.labels[part.val]} for part in make_folds(one, np.arange(36), 3, 0)]
    again = [{two.classes[c] for c in two.labels[part.val]} for part in make_folds(two, np.arange(36), 3, 0)]
    other = [{one.classes[c] for c in one.labels[part.val]} for part in make_folds(one, np.arange(36), 3, 1)]
    assert first == again != other


def test_folds_keep_groups_whole():
    """Classes that share a group validate together; cameras of all classes need the scope of a class."""
    one = items(12)
    alone = replace(one, groups=[str(i) for i in range(36)])
    assert all(
        (a.val == b.val).all()
        for a, b in zip(make_folds(one, np.arange(36), 3, 0), make_folds(alone, np.arange(36), 3, 0), strict=True)
    )
    shared = [str(i) for i in range(36)]
    shared[0], shared[3], shared[33], shared[9] = "a", "a", "b", "b"  # classes 0 and 1, 11 and 3
    for part in make_folds(replace(one, groups=shared), np.arange(36), 3, 0):
        kinds = set(one.labels[part.val].tolist())
        assert len(kinds & {0, 1}) != 1 and len(kinds & {3, 11}) != 1
    cameras = replace(one, groups=[f"camera {i % 3}" for i in range(36)])
    with pytest.raises(ValueError, match=r"its groups connect its classes.*data\.group_scope=class"):
        make_folds(cameras, np.arange(36), 3, 0)
    assert len(make_folds(cameras, np.arange(36), 3, 0, "class")) == 3


@pytest.mark.parametrize("groups", [None, "pairs", "writers"])
def test_items_of_every_class_validate_once_with_their_groups_whole(groups):
    one = items(5, each=12)
    names = {"pairs": [str(i // 2) for i in range(60)], "writers": [str(i % 12) for i in range(60)]}
    one = replace(one, groups=names.get(groups))
    parts = make_item_folds(one, np.arange(60), 3, 0)
    assert sorted(i for part in parts for i in part.val) == list(range(60))
    for part in parts:
        assert sorted([*part.train, *part.val]) == list(range(60)) and set(one.labels[part.val]) == set(range(5))
        if groups:
            apart = [{one.groups[i] for i in of} for of in (part.train, part.val)]
            assert not apart[0] & apart[1]
    with pytest.raises(ValueError, match=r"7 folds of the (items|groups) of every class need .*--open, whose folds"):
        make_item_folds(one, np.arange(60), 7, 0)


def test_few_classes_are_compared_by_new_items_of_each(tmp_path):
    """As a training holds them out; the batch is filled alike, and up to the smallest class of every fold."""
    commands.noisy_vectors(tmp_path / "v.npz", 6, per_class=20)
    sets = [f"data.source={json.dumps(str(tmp_path / 'v.npz'))}", "encoder.dim=4", "encoder.hidden=[8]"]
    options = {"steps": 4, "trials": 1, "folds": 2, "seeds": 1, "jobs": 1}
    events = []
    base = read_recipe(None, sets)
    results = compare.compare(base, LOSSES_HERE, tmp_path / "c", callback=events.append, **options).results
    assert results["protocol"]["test"] == {"items": 30, "classes": 6, "known": True} and results["protocol"]["closed"]
    validated = [fold["validation"] for fold in results["protocol"]["fold_sizes"]]
    assert validated == [{"items": 48, "classes": 6}, {"items": 42, "classes": 6}]
    [planned] = [event for event in events if event["event"] == "planned"]
    assert planned["sampler"]["per_class"] == 7 and planned["sampler"]["batch"] == 42, "15 - 8 items in one fold"
    assert any("6 classes are too few to hold some of them out" in note for note in results["notes"])
    assert "on new items of 6 known classes" in results["recommendation"]["sentences"][0]
    report.write_comparison(tmp_path / "page.html", results)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "6 known classes" in page and "validation items" in page and "unseen" not in page
    tested = training.prepare.prepare(base).parts.test
    assert len(tested) == 30, "the same items as those of a training"
    opened = compare.compare(read_recipe(None, [*sets, "data.closed=false"]), LOSSES_HERE, tmp_path / "o", **options)
    assert opened.results["protocol"]["test"] == {"items": 40, "classes": 2, "known": False}
    assert "2 unseen classes" in opened.results["recommendation"]["sentences"][0]


def test_models_are_tested_without_pairs_of_one_group(tmp_path):
    path = vectors(tmp_path / "v.npz")
    arrays = dict(np.load(path))
    np.savez(path, **arrays, groups=np.arange(192) // 2)
    figures = {}
    for sets in ((), ("data.group_column=none",)):
        setup = open_setup(recipe(path, *sets))
        test_set = setup.open_test_set()
        rows = torch.from_numpy(test_set.prepared.rows[test_set.held_out.everything])
        grouped = final_evaluation._per_query(rows, test_set.held_out, torch.device("cpu"))
        groups = None if sets else torch.from_numpy(test_set.held_out.groups)
        labels = torch.from_numpy(test_set.held_out.labels)
        expected = retrieval(rows, labels, groups=groups)
        assert grouped[:, 0].mean() == pytest.approx(expected["map@r"])
        figures[sets] = expected["map@r"]
    assert len(set(figures.values())) == 2
    with pytest.raises(ValueError, match=r"data\.group_scope would have no effect"):
        open_setup(recipe(path, "data.group_column=none", "data.group_scope=class"))


def test_too_few_classes_for_folds_is_one_sentence():
    with pytest.raises(ValueError, match=r"4 folds need at least 8 training classes, .* got 5; use --folds 2"):
        make_folds(items(5), np.arange(15), 4, 0)
    with pytest.raises(ValueError, match="needs at least 4 training classes"):
        make_folds(items(3), np.arange(9), 2, 0)


# What is searched


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_has_ranges_that_it_accepts(loss):
    choice = LOSSES[loss]
    needs = {"num_classes": 5, "dim": 4} if "num_classes" in inspect.signature(choice.make).parameters else {}
    needs = {"dim": 4} if loss == "siamese" else {} if loss == "margin" else needs
    for name, one in ranges_of(LOSSES[loss].make).items():
        if name == "loss_scale":
            assert any(True for _ in choice.make(**needs).parameters()), "nothing to scale"
            continue
        for value in one.values if isinstance(one, Choices) else (one.low, one.high):
            choice.make(**needs, **{name: value})
        default = choice.settings[name].default
        assert default in one.values if isinstance(one, Choices) else one.low <= default <= one.high
    learns = any(True for _ in choice.make(**needs).parameters())
    assert learns == ("loss_scale" in ranges_of(LOSSES[loss].make))


def test_suggestions_are_functions_of_what_was_tried(setup):
    space = loss_search.search_space("triplet", setup.recipe, 1e-3)
    start = loss_search.default_setting("triplet", space, 1e-3)
    assert start == {"loss.margin": 0.2, "loss.selection": "semihard", "optimizer.lr": 1e-3}
    tried = [loss_search.Observation(start, 0.0)]
    for score in (0.2, -0.1, 0.4, 0.0, 0.1):
        (new,) = loss_search.suggest("triplet", space, tried, 1, 0)
        tried.append(loss_search.Observation(new, score))
    first = loss_search.suggest("triplet", space, tried, 4, 0)
    assert (
        first
        == loss_search.suggest("triplet", space, tried, 4, 0)
        != loss_search.suggest("triplet", space, tried, 4, 1)
    )
    assert len({json.dumps(one) for one in first}) > 1
    for one in first:
        assert 0.02 <= one["loss.margin"] <= 0.6 and one["loss.selection"] in TRIPLET_RANGES["selection"].values
        assert 2e-4 <= one["optimizer.lr"] <= 5e-3


def test_a_rate_that_was_given_is_not_searched(source):
    fixed = open_setup(recipe(source, "optimizer.lr=0.01", "optimizer.loss_scale=3.0"))
    assert set(loss_search.search_space("arcface", fixed.recipe, 0.01)) == {"loss.margin", "loss.scale"}


def test_search_rounds_keep_the_default_and_the_better_half():
    results = iter(range(100))

    def answer(jobs):
        return [
            {"value": (next(results) * 37 % 100) / 100, "step": 1, "curve": [[1, 0.5]], "ended": "end"} for _ in jobs
        ]

    space = {"loss.margin": TRIPLET_RANGES["margin"]}
    search = loss_search.search("triplet", space, {"loss.margin": 0.2}, Plan(10, 6, 3, 2, 0))
    counts, jobs = [], next(search)
    result = None
    while result is None:
        counts.append((len(jobs), sorted({job.fold for job in jobs}), jobs[0].stage))
        try:
            jobs = search.send(answer(jobs))
        except StopIteration as end:
            result = end.value
    assert counts == [
        (4, [0], "search"),
        (6, [1, 2], "search"),
        (2, [1], "search"),
        (2, [0, 2], "search"),
        (6, [0, 1, 2], "final"),
    ]
    assert sum(n for n, _, _ in counts) == plan.training_count(Plan(10, 6, 3, 2, 0))
    assert len(result.trials[0].folds) == 3, "the default sees every fold, to be compared with"
    complete = [one for one in result.trials if len(one.folds) == 3]
    assert len(complete) == 4 and result.best.value == max(one.value for one in complete)
    assert {seed for seed, _ in result.finals} == {1, 2}, "final seeds are not the one searched with"


# A training


def job(loss="triplet", **more):
    return Job(**{"stage": "search", "loss": loss, "setting": {}, "seed": 0, "fold": 0, "folds": 2, "steps": 12} | more)


def test_every_loss_meets_the_same_batches_and_first_weights(setup):
    batches_by_loss, weights = [], []
    for loss in comparable("all"):
        trainer = assemble(setup.prepared(job(loss)), Path("nowhere"))
        batches_by_loss.append([batch.items.tolist() for batch in trainer.loader.epoch(0, 0)])
        weights.append(torch.cat([p.flatten() for p in trainer.encoder.parameters()]))
    assert len(batches_by_loss[0]) == 12 and all(batches == batches_by_loss[0] for batches in batches_by_loss)
    assert all(torch.equal(one, weights[0]) for one in weights)
    other = assemble(setup.prepared(job(seed=1)), Path("nowhere"))
    assert [batch.items.tolist() for batch in other.loader.epoch(0, 0)] != batches_by_loss[0]


def test_no_training_sees_a_validation_or_test_class(setup):
    assert set(setup.labels) == set(range(16)), "test classes are not on the setup"
    for fold in range(2):
        parts = setup.prepared(job(fold=fold)).parts
        assert not set(setup.labels[parts.train]) & set(setup.labels[parts.val]) and not len(parts.test)


def test_a_training_is_a_function_of_its_job(setup):
    one, two = trial.train(setup, job("arcface")), trial.train(setup, job("arcface"))
    clock = {"seconds": 0}
    assert one | clock == two | clock
    assert one["steps"] == 12 and [step for step, _ in one["curve"]] == trial.validation_steps(12)
    assert one["value"] == max(value for _, value in one["curve"]) and one["ended"] == "end"
    other = trial.train(setup, job("arcface", setting={"loss.margin": 0.1, "optimizer.lr": 0.01}))
    assert other["curve"] != one["curve"]


def test_hopeless_and_early_and_broken_trainings_end(setup, monkeypatch):
    below = trial.train(setup, job(bar=[0.0, 0.0, 1.0, 1.0]))
    assert below["ended"] == "hopeless" and len(below["curve"]) == 3
    values = iter([0.3, 0.5, 0.4, 0.4, 0.5, 0.1])
    monkeypatch.setattr(trial, "_validate", lambda trainer: next(values))
    early = trial.train(setup, job(steps=175))
    assert early["ended"] == "early" and early["value"] == 0.5 and early["step"] == 50 and early["steps"] == 150
    monkeypatch.undo()
    broken = trial.train(setup, job(setting={"optimizer.lr": 1e30}))
    assert "at step" in broken["ended"] and broken["value"] == 0.0


@pytest.mark.parametrize("steps, count", [(1, 1), (3, 3), (7, 4), (105, 4), (150, 6), (1001, 10)])
def test_marks_are_spread_and_end_with_the_last_step(steps, count):
    validated = trial.validation_steps(steps)
    assert validated[-1] == steps and len(validated) == count == len(set(validated)) and validated == sorted(validated)


# The plan


def test_times_are_read():
    assert [compare.seconds(text) for text in ("90s", "20m", "1.5h", "1h30m")] == [90, 1200, 5400, 5400]
    for text in ("20", "m", "20 minutes", "", "-3m", "0s"):
        with pytest.raises(ValueError, match="budget must be"):
            compare.seconds(text)


RATES = {loss: {"setup": 0.1, "step": 0.02, "validation": 0.1, "test": 0.3} for loss in ("a", "b", "c")}
USUAL = Plan(1000, 8, 4, 3, 0)
FREE = {"steps": None, "trials": None, "folds": None, "seeds": None, "seed": 0}


@pytest.mark.parametrize("minutes", [2, 5, 20, 60, 600])
def test_a_plan_keeps_its_budget_and_uses_it(minutes):
    fitted = plan.fit_to_budget(60 * minutes, USUAL, FREE, RATES, 2)
    expected = plan.predicted_seconds(fitted, RATES, 2)
    assert expected <= 0.8 * 60 * minutes
    assert expected > 0.3 * 60 * minutes or (fitted.steps == 1000 and fitted.trials == 48)
    larger = plan.fit_to_budget(120 * minutes, USUAL, FREE, RATES, 2)
    assert plan.predicted_seconds(larger, RATES, 2) >= expected


def test_what_the_user_fixed_stays():
    fitted = plan.fit_to_budget(3600, USUAL, FREE | {"trials": 5, "seeds": 1}, RATES, 2)
    assert fitted.trials == 5 and fitted.seeds == 1
    assert plan.fit_to_budget(3600, USUAL, FREE | {"steps": 77}, RATES, 2).steps == 77
    with pytest.raises(ValueError, match=r"budget must be at least .* for these losses on this machine, got 5s"):
        plan.fit_to_budget(5, USUAL, FREE, RATES, 2)
    with pytest.raises(ValueError, match="budget must be at least"):
        plan.fit_to_budget(60, USUAL, FREE | {"steps": 100_000}, RATES, 2)


def test_the_plan_is_a_command():
    command = plan.command("my photos/", ["a", "b"], Plan(9, 8, 4, 3, 0), {"set": ["x.y=1"], "partial": True})
    numbers = "--steps 9 --trials 8 --folds 4 --seeds 3"
    assert command == f"nearkin compare 'my photos/' --losses a,b {numbers} --set x.y=1 --partial"


# The order in which trainings end


@pytest.mark.slow
def test_a_worker_without_its_source_says_so_and_a_pool_closes_in_the_middle(setup, source, tmp_path):
    missing = ProcessPool(2, _WorkerArguments({"data": {"source": str(tmp_path / "none.npz")}}, str(tmp_path), False))
    missing.submit(job())
    with pytest.raises(ValueError, match=r"none\.npz"):
        missing.wait(None)
    missing.close()
    pool, count = make_executor(setup, tmp_path / "models", 2)
    assert isinstance(pool, ProcessPool) and count == pool.free() == 2
    pool.submit(job(steps=10**6))
    with pytest.raises(OutOfTime):
        pool.wait(time.monotonic() + 0.1)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 60, "a training of hours was not waited for"


class Disorder:
    """An executor that finishes its jobs in any order, with as many at a time as it likes."""

    def __init__(self, seed, most, stop_after=math.inf):
        self.chance, self.most, self.jobs, self.left = random.Random(seed), most, [], stop_after

    def submit(self, job):
        self.jobs.append(job)

    def free(self):
        return self.most - len(self.jobs)

    def wait(self, deadline):
        if self.left <= 0:
            raise OutOfTime
        self.left -= 1
        one = self.jobs.pop(self.chance.randrange(len(self.jobs)))
        value = int.from_bytes(hashlib.sha256(repr(one).encode()).digest()[:4], "big") / 2**32
        curve = [[step, value * i / 10] for i, step in enumerate(trial.validation_steps(one.steps), start=1)]
        return [(one, {"value": value, "step": one.steps, "curve": curve, "steps": one.steps, "ended": "end"})]

    def close(self):
        pass


def walked(folder, executor):
    small = Plan(20, 6, 3, 2, 0)
    folder.mkdir(exist_ok=True)
    space = {"loss.margin": TRIPLET_RANGES["margin"], "optimizer.lr": loss_search.Range(1e-4, 1e-2, log=True)}
    start = {"loss.margin": 0.2, "optimizer.lr": 1e-3}
    searches = {loss: loss_search.search(loss, space, start, small) for loss in ("one", "two")}
    study = Study(folder)
    try:
        schedule = Schedule(searches, study, 2 * plan.training_count(small), lambda _: None)
        return schedule.run(executor, None), schedule.finished
    finally:
        study.close()


def test_neither_order_nor_number_of_workers_nor_interruptions_change_what_is_chosen(tmp_path):
    done, expected = walked(tmp_path / "plain", Disorder(0, 1))
    assert done and set(expected) == {"one", "two"}
    for seed, most in ((1, 3), (2, 40)):
        assert walked(tmp_path / f"w{seed}", Disorder(seed, most)) == (True, expected)
    chance, done, stops = random.Random(5), False, 0
    while not done:
        done, chosen = walked(tmp_path / "stopped", Disorder(chance.random(), 3, chance.randrange(1, 15)))
        stops += 1
    assert chosen == expected and stops >= 3


# All of it


def table(folder):
    with (folder / "comparison.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_comparison_says_everything(finished):
    comparison, events = finished
    results = comparison.results
    assert {p.name for p in comparison.folder.iterdir()} >= {"study.db", "comparison.json", "comparison.csv", "models"}
    assert json.loads((comparison.folder / "comparison.json").read_text()) == results
    rows = table(comparison.folder)
    assert sorted(row["loss"] for row in rows) == sorted([*LOSSES_HERE, "untrained", "baseline"])
    for row in rows[:2]:
        low, value, high = (float(row[f"separated_map@r{end}"]) for end in ("_low", "", "_high"))
        assert 0 <= low <= value <= high <= 1
    assert rows[0]["separated_verdict"] == "best" and float(rows[0]["rank"]) == 1
    best = results["recommendation"]["loss"]
    assert [p.name for p in (comparison.folder / "models").iterdir()] == [best]
    assert len(digests(comparison.folder / "models")) == 4
    assert results["protocol"]["test"] == {"items": 64, "classes": 8, "known": False}
    trained = [event for event in events if event["event"] == "trained"]
    assert len(trained) == trained[-1]["total"] == 2 * plan.training_count(TINY)
    names = [event["event"] for event in events]
    assert names.index("testing") > max(i for i, name in enumerate(names) if name == "trained")


def test_separated_and_concatenated_are_what_they_say(source, finished, setup):
    results = finished[0].results
    best, test_set = results["recommendation"]["loss"], setup.open_test_set()
    store = ItemStore(test_set.prepared.rows, torch.device("cpu"))
    labels, single, joined = torch.from_numpy(test_set.held_out.labels), [], []
    for seed in (1, 2):
        parts = []
        for fold in range(2):
            folder = final_evaluation.model_folder(finished[0].folder / "models", job(best, seed=seed, fold=fold))
            parts.append(embed(models.load(folder)[0], store, test_set.held_out.everything))
            single.append(retrieval(parts[-1], labels)["map@r"])
        both = torch.cat([torch.nn.functional.normalize(x, dim=1) for x in parts], dim=1)
        joined.append(retrieval(both, labels)["map@r"])
    row = results["table"][0]
    assert row["separated"]["map@r"]["value"] == pytest.approx(sum(single) / 4, abs=1e-12)
    assert row["concatenated"]["map@r"]["value"] == pytest.approx(sum(joined) / 2, abs=1e-12)
    assert row["models"] == pytest.approx(significance.student_interval(single))


def test_the_file_has_every_trial(finished):
    saved = json.loads((finished[0].folder / "comparison.json").read_text())
    for loss in LOSSES_HERE:
        trials = saved["trials"][loss]
        best = next(row for row in saved["table"] if row["loss"] == loss)
        complete = [one for one in trials if one["complete"]]
        assert len(trials) == 3 and max(one["value"] for one in complete) == best["validation"]
        assert next(one["setting"] for one in complete if one["value"] == best["validation"]) == best["setting"]


def test_no_test_class_influences_any_choice(finished, tmp_path, monkeypatch):
    """Other test items under shuffled labels: every choice, curve and weight stays; only the test figures move."""
    expected = finished[0].results
    monkeypatch.setattr(sys.modules["nearkin.compare.comparison"], "_drop_models", lambda *_: None)
    bad = vectors(tmp_path / "bad.npz", poison=1)
    results = compare.compare(recipe(bad), LOSSES_HERE, tmp_path / "out", jobs=1, **SMALL).results
    for part in ("choices", "trials", "curves", "reach", "rising"):
        assert results[part] == expected[part], part
    weights = digests(tmp_path / "out" / "models")
    assert len(weights) == 8 and digests(finished[0].folder / "models").items() <= weights.items()
    figures = [[row["separated"]["map@r"]["value"] for row in one["table"]] for one in (results, expected)]
    assert figures[0] != figures[1], "the poison did not arrive"


def command(source, out, *more):
    sets = [part for text in EXTRA for part in ("--set", text)]
    numbers = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    losses = ",".join(LOSSES_HERE)
    return ["compare", str(source), "--losses", losses, *numbers, *sets, "--out", str(out), *more]


def trainings_in(folder):
    try:
        with closing(sqlite3.connect(f"file:{folder / 'study.db'}?mode=ro", uri=True)) as db:
            return db.execute("SELECT COUNT(*) FROM trainings").fetchone()[0]
    except sqlite3.Error:
        return 0


@pytest.mark.slow
def test_killed_three_times_the_table_is_the_same(source, finished, tmp_path):
    """Kill -9 in the middle, three times, then two workers instead of one process."""
    out, saved = tmp_path / "out", 0
    for jobs in (1, 1, 1):
        arguments = [sys.executable, "-m", "nearkin", *command(source, out, "--quiet", "--jobs", str(jobs))]
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and trainings_in(out) < saved + 3:
            time.sleep(0.002)
        assert process.poll() is None, "it ended before it could be killed"
        process.kill()
        process.wait()
        saved = trainings_in(out)
        assert not (out / "comparison.csv").exists()
    printed = CliRunner().invoke(app, command(source, out, "--jobs", "2"))
    assert printed.exit_code == 0, printed.output
    assert f"resuming: {saved} of at most" in printed.output
    assert (out / "comparison.csv").read_bytes() == (finished[0].folder / "comparison.csv").read_bytes()
    page = (out / "comparison.html").read_text()
    assert all(loss in page for loss in LOSSES_HERE) and "http" not in page.replace("http-equiv", "")
    again = CliRunner().invoke(app, command(source, out, "--json", "--jobs", "1"))
    assert json.loads(again.output)["table"] == finished[0].results["table"], "nothing is trained or tested twice"


def test_another_comparison_in_the_same_folder_is_refused(source, finished, tmp_path):
    folder = finished[0].folder
    with pytest.raises(ValueError, match="begun with other losses; choose another --out"):
        compare.compare(recipe(source), ["triplet", "arcface"], folder, jobs=1, **SMALL)
    with pytest.raises(ValueError, match="begun with --steps 12, got 13; leave it out to continue"):
        compare.compare(recipe(source), LOSSES_HERE, folder, jobs=1, **SMALL | {"steps": 13})
    with pytest.raises(ValueError, match="begun with other settings"):
        compare.compare(recipe(source, "optimizer.clip=1.0"), LOSSES_HERE, folder, jobs=1, **SMALL)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="not empty and contains no comparison"):
        compare.compare(recipe(source), LOSSES_HERE, tmp_path / "full", jobs=1, **SMALL)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "study.db").write_bytes(b"no database" * 100)
    with pytest.raises(ValueError, match="not a readable study"):
        compare.compare(recipe(source), LOSSES_HERE, tmp_path / "broken", jobs=1, **SMALL)
    study = Study(folder)
    with pytest.raises(ValueError, match="a comparison is already running in it"):
        compare.compare(recipe(source), LOSSES_HERE, folder, jobs=1, **SMALL)
    study.close()


@pytest.mark.slow
def test_a_budget_is_measured_kept_and_can_be_gone_on_from(source, finished, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(plan, "fit_to_budget", lambda *_: TINY)
    with pytest.raises(
        ValueError, match=r"used up before any loss was finished; [0-9]+ of at most 18 trainings are saved"
    ):
        compare.compare(recipe(source), LOSSES_HERE, out, jobs=1, budget=1.0)
    monkeypatch.undo()
    comparison = compare.compare(recipe(source), LOSSES_HERE, out, jobs=1)
    assert comparison.results["table"] == finished[0].results["table"]


def test_losses_that_a_budget_leaves_unfinished_are_named(source, finished, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    with (
        closing(sqlite3.connect(finished[0].folder / "study.db")) as old,
        closing(sqlite3.connect(out / "study.db")) as new,
    ):
        old.backup(new)
        new.execute("DELETE FROM trainings WHERE loss = 'proxy-anchor' AND stage = 'final'")
        new.commit()
    events = []
    comparison = compare.compare(recipe(source), LOSSES_HERE, out, jobs=1, budget=1e-6, callback=events.append)
    assert comparison.results["unfinished"] == ["proxy-anchor"]
    assert [row["loss"] for row in comparison.results["table"]] == ["triplet"]
    assert any("proxy-anchor not finished" in event.get("text", "") for event in events)
    assert any("could be trained" in line for line in comparison.results["recommendation"]["cautions"])
    report.write_comparison(out / "page.html", comparison.results)


def test_trainings_that_break_off_count_as_what_they_had_learned(source, tmp_path):
    fast = recipe(source, "optimizer.lr=1e30")
    results = compare.compare(fast, LOSSES_HERE, tmp_path / "o", jobs=1, steps=6, trials=1, folds=2, seeds=1).results
    for row in results["table"]:
        assert len(row["broken"]) == 2 and row["separated"]["map@r"] == results["references"][0]["separated"]["map@r"]
    cautions = results["recommendation"]["cautions"]
    assert sum("failed" in line for line in cautions) == 2
    assert any("No loss beats the untrained encoder" in line for line in cautions)
    assert any("so no command is suggested. What may help: more --steps; more classes" in line for line in cautions)
    assert results["recommendation"]["train"] is None
    report.write_comparison(tmp_path / "page.html", results)
    assert "Train with it" not in (tmp_path / "page.html").read_text(encoding="utf-8")


# Numbers that say how sure they are


def test_spread_is_students_interval():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for n in (2, 3, 12, 31, 40):
        values = rng.normal(size=n)
        low, high = stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values))
        assert significance.student_interval(values.tolist()) == pytest.approx([low, high], rel=2e-3)
    assert significance.student_interval([0.3]) == [None, None]


def test_holm_by_hand():
    assert significance._holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert significance._holm({}) == {} and significance._holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


def judged(shift, noise, models=4):
    """Two losses on 30 classes of 5 queries; the second lower by `shift` in every class, models apart by `noise`."""
    rng = np.random.default_rng(0)
    groups = torch.arange(30).repeat_interleave(5)
    base = rng.uniform(0.3, 0.7, size=(150, 1))

    def tests(less):
        figures = []
        for _ in range(models // 2):
            folds = np.stack(
                [base - less + noise * rng.normal() + 0.01 * rng.normal(size=base.shape) for _ in range(2)]
            )
            figures.append(
                {"separated": np.repeat(folds, 3, axis=2), "concatenated": np.repeat(folds.mean(0), 3, axis=1)}
            )
        return figures

    figures = {"good": tests(0.0), "bad": tests(shift)}
    values = {loss: significance.mean_of(figures[loss], "separated")[:, 0] for loss in figures}
    rows = [{"loss": name, "separated": {"map@r": {"value": significance.plain_mean(v)}}} for name, v in values.items()]
    significance.against_best(rows, values, figures, groups, "separated")
    significance.ranks(rows, list(values.values()), groups, "separated")
    return {row["loss"]: row["separated"] for row in rows}


def test_worse_needs_classes_and_trainings_to_agree():
    clear = judged(0.1, 0.001)
    assert clear["good"]["against"]["verdict"] == "best" and clear["bad"]["against"]["verdict"] == "worse"
    assert clear["bad"]["against"]["difference"] == pytest.approx(-0.1, abs=0.01)
    assert clear["good"]["ranks"] == [1, 1] and clear["bad"]["ranks"] == [2, 2] and clear["bad"]["rank"] == 2
    lucky = judged(0.05, 0.2)  # over classes beyond doubt, but models differ more among themselves
    assert {one["against"]["verdict"] for one in lucky.values()} == {"best", "undecided"}
    low, high = judged(0.1, 0.001)["bad"]["against"]["interval"]
    assert low < -0.1 < high < 0 or low <= high < 0
    assert {one["against"]["verdict"] for one in judged(0.0, 0.001).values()} == {"best", "undecided"}


# The page and the command


def test_the_page_of_many_losses_with_names_that_bite(finished):
    results = json.loads(json.dumps(finished[0].results))
    row, loss = results["table"][0], results["table"][0]["loss"]
    for i in range(22):
        name = f"loss<{i}>"
        results["table"].append(json.loads(json.dumps(row)) | {"loss": name})
        for part in ("curves", "choices", "trials", "timing", "rising"):
            results[part][name] = results[part][loss]
        results["reach"]["steps"][name] = [None, 3, 4]
    results["source"] = "<script>alert(1)</script>"
    results["table"][1]["separated"]["map@r"] |= {"low": None, "high": None}
    results["timing"][loss]["ms_per_step"] = None
    text = report.comparison_page.page(results)
    assert "<script>alert" not in text and "loss<3>" not in text and "loss&lt;3&gt;" in text
    assert "never" in text and text.count("<section") == 6


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--losses", "triplet,arcfase"], 'unknown loss "arcfase"; did you mean "arcface"?'),
        (["--losses", "triplet"], "losses must be at least 2 names"),
        (["--losses", "triplet,logratio"], "logratio learns from continuous targets"),
        (["--losses", "all", "--folds", "9"], "9 folds need at least 18 training classes"),
        (["--losses", "all", "--folds", "1"], "folds must be >= 2, got 1"),
        (["--losses", "all", "--budget", "soon"], 'budget must be a time as 90s, 20m or 1h30m, got "soon"'),
        (["--losses", "all", "--set", "loss.margin=1"], "a comparison searches the settings of each loss"),
        (["--losses", "all", "--set", "training.epochs=1"], "training.epochs cannot be set in a comparison"),
        (
            ["--losses", "all", "--set", "sampler.name=hard-classes"],
            "sampler.name must be class-balanced or class-ratio",
        ),
        (
            ["--losses", "all", "--set", "finetune.interpolate=true"],
            "finetune.interpolate cannot be set in a comparison",
        ),
        (["--losses", "all", "--set", "training.seed=1"], "training.seed cannot be set in a comparison: --seed"),
        (["--losses", "all", "--set", "schedule.decay=step"], "schedule.decay must be cosine or constant"),
        (["--losses", "all", "--folds", "65"], "folds must be at most 64, got 65"),
        (["--losses", "all", "--encoder", "small-cnn"], 'encoder "small-cnn" takes pictures'),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(source, tmp_path, arguments, sentence):
    printed = CliRunner().invoke(app, ["compare", str(source), "--out", str(tmp_path / "out"), *arguments])
    assert printed.exit_code == 2 and sentence in printed.output and len(printed.output.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_source_without_classes_is_one_sentence(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "t.npz", embeddings=rng.normal(size=(40, 4)).astype(np.float32), targets=rng.normal(size=40))
    printed = CliRunner().invoke(app, ["compare", str(tmp_path / "t.npz"), "--losses", "all"])
    assert printed.exit_code == 2 and "a comparison needs classes" in printed.output


def test_missing_optuna_is_one_sentence(source, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    printed = CliRunner().invoke(app, ["compare", str(source), "--losses", "all", "--out", str(tmp_path / "o")])
    assert printed.exit_code == 2
    assert printed.output.strip() == "nearkin compare needs optuna: pip install 'nearkin[compare]'"


def test_interrupted_says_how_to_go_on(source, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "train", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    printed = CliRunner().invoke(app, command(source, tmp_path / "o", "--jobs", "1"))
    assert printed.exit_code == 130 and "the same command resumes" in printed.output
