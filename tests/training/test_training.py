"""The loop: exact gradients in chunks, exact resuming from anywhere, checkpoints that prove themselves, warnings."""

import json
import math
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from nearkin import evaluation, losses, relations, training
from nearkin.core import files
from nearkin.core.errors import CorruptCheckpoint, Stopped
from nearkin.training import grad_cache, loader, loop, monitor, run
from nearkin.training.checkpoint import checkpoints
from nearkin.training.checkpoint.checkpoints import Checkpoints
from nearkin.training.config.recipe import Recipe, read
from nearkin.training.config.registry import LOSSES
from nearkin.training.final_test import verdict
from nearkin.training.optimizers import LRSchedule, build_optimizer, parameter_groups
from nearkin.training.prepare import prepare
from nearkin.training.validation import HeldOut

SMALL = ["training.epochs=3", "training.batches=4", "sampler.batch=16", "sampler.per_class=4", "encoder.hidden=[16]"]
SMALL += ["encoder.dim=8", "training.log_steps=2", "training.workers=0"]


@pytest.fixture
def vectors(tmp_path):
    """An .npz of 24 classes of 8 noisy vectors."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(24), 8)
    rows = rng.normal(size=(24, 12))[labels] + 0.7 * rng.normal(size=(len(labels), 12))
    path = tmp_path / "vectors.npz"
    np.savez(path, embeddings=rows.astype(np.float32), labels=labels)
    return path


def quickly(source, out, *sets, callback=lambda event: None):
    return training.train(read(None, [f'data.source="{source}"', *SMALL, *sets]), out, callback)


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


class Cut(BaseException):
    """The machine goes down: nothing of ours may catch this."""


def cut_at(count):
    """A callback that cuts the run at the count-th event, whatever it is."""
    seen = [0]

    def callback(event):
        seen[0] += 1
        if seen[0] == count:
            raise Cut

    return callback


# --- cached gradients


class Dropping(nn.Module):
    def __init__(self, norm: nn.Module | None = None):
        super().__init__()
        layers = [nn.Linear(6, 10), *([norm] if norm else []), nn.Tanh(), nn.Dropout(0.3), nn.Linear(10, 4)]
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 100])
@pytest.mark.parametrize(
    "make",
    [
        lambda: losses.SupConLoss(),
        lambda: losses.ProxyAnchorLoss(4, 4),
        lambda: losses.TripletLoss(selection="batch_hard"),
        lambda: losses.FacilityLocationLoss(),
    ],
)
def test_chunks_give_the_gradient_of_the_whole_batch(make, chunk):
    torch.manual_seed(1)
    x = torch.randn(16, 6, dtype=torch.float64)
    labels = torch.arange(4).repeat_interleave(4)
    encoder, loss = Dropping(nn.LayerNorm(10)).double().eval(), make().double()
    loss(encoder(x), labels).backward()
    parameters = [*encoder.parameters(), *loss.parameters()]
    reference = [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    value, embeddings = grad_cache.backward(
        lambda some: encoder(x[some]), 16, chunk, lambda e: loss(e, labels), encoder
    )
    assert torch.equal(embeddings, encoder(x).detach()) or torch.allclose(embeddings, encoder(x), rtol=0, atol=1e-14)
    assert torch.isfinite(value)
    for p, g in zip(parameters, reference, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=1e-10)


def test_chunks_replay_dropout():
    """Both passes must drop the same units: the gradient is that of the chunked forward with the same chance."""
    x, labels = torch.randn(12, 6, dtype=torch.float64), torch.arange(4).repeat_interleave(3)
    encoder, loss = Dropping().double().train(), losses.SupConLoss()
    torch.manual_seed(5)
    loss(torch.cat([encoder(x[:5]), encoder(x[5:10]), encoder(x[10:])]), labels).backward()
    after = torch.rand(())
    reference = [p.grad.clone() for p in encoder.parameters()]
    encoder.zero_grad()
    torch.manual_seed(5)
    grad_cache.backward(lambda some: encoder(x[some]), 12, 5, lambda e: loss(e, labels), encoder)
    assert torch.equal(torch.rand(()), after), "the generator stands where one pass would have left it"
    for p, g in zip(encoder.parameters(), reference, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=1e-10)


def test_chunks_update_batch_statistics_once():
    x, labels = torch.randn(12, 6), torch.arange(4).repeat_interleave(3)
    encoder, loss = Dropping(nn.BatchNorm1d(10)).train(), losses.SupConLoss()
    assert grad_cache.uses_batch_statistics(encoder)
    norm = encoder.net[1]
    grad_cache.backward(lambda some: encoder(x[some]), 12, 4, lambda e: loss(e, labels), encoder)
    assert int(norm.num_batches_tracked) == 3 and norm.track_running_stats
    encoder.eval()
    assert not grad_cache.uses_batch_statistics(encoder)


def test_a_chunked_run_is_the_whole_run(vectors, tmp_path):
    """The encoder for vectors has no batch norm: chunks may change rounding only."""
    reference = quickly(vectors, tmp_path / "a").embeddings
    chunked = quickly(vectors, tmp_path / "b", "training.chunk=5").embeddings
    torch.testing.assert_close(reference, chunked, rtol=0, atol=2e-4)


def test_a_boundary_per_item_is_told_which_items(vectors, tmp_path, monkeypatch):
    """Items of the training part, each always with its own label; with a memory and in chunks too."""
    seen, plain = {}, losses.MarginLoss.forward

    def forward(module, embeddings, labels, references=None, reference_labels=None, *, items=None):
        ids = labels.ids if isinstance(labels, relations.Relation) else labels
        for item, label in zip(items.tolist(), ids.tolist(), strict=True):
            assert seen.setdefault(item, label) == label and item < len(module.item_beta)
        seen["beta"] = module.item_beta
        return plain(module, embeddings, labels, references, reference_labels, items=items)

    monkeypatch.setattr(losses.MarginLoss, "forward", forward)
    quickly(vectors, tmp_path / "a", "loss.name=margin", "loss.num_items=all", "memory.size=32", "training.chunk=6")
    beta = seen.pop("beta").detach()
    assert bool((beta[list(seen)] != 0).any()) and len(seen) > 8
    for bad in ("1", "some"):
        with pytest.raises(ValueError, match=r"loss.num_items must be a whole number of at least the \d+ training"):
            quickly(vectors, tmp_path / bad, "loss.name=margin", f"loss.num_items={bad}")


# --- resuming


CONFIGURATIONS = {
    "plain": [],
    "workers": ["training.workers=2"],
    "ema, plateau": ["training.ema=0.9", "schedule.decay=plateau", "schedule.patience=1"],
    "proxies, sgd": ["loss.name=proxy-anchor", "optimizer.name=sgd", "optimizer.clip=1"],
    "chance": ["loss.name=margin", "loss.num_classes=all", "encoder.dropout=0.2", "optimizer.name=rmsprop"],
    "memory, chunk": ["loss.name=contrastive", "memory.size=64", "training.chunk=6"],
    "mined classes": ["sampler.name=hard-classes", "training.epochs=4"],
    "mined pairs": ["loss.name=npair", "sampler.name=pair-per-class", "sampler.per_class=none"],
    "mined negatives": ["loss.name=lifted-structure", "sampler.name=hard-negatives", "sampler.per_class=none"],
    "negatives of the whole set": [
        "loss.name=triplet",
        "sampler.name=hard-negatives",
        "sampler.per_class=none",
        "sampler.every=2",
        "training.epochs=5",
        "training.patience=9",
    ],
    "fp16": ["training.precision=fp16"],
    "short embeddings": ["loss.name=adacos", "loss.matryoshka=[4, 2]"],
}
NO_CLASSES = ("mined pairs", "mined negatives", "negatives of the whole set")  # samplers without sampler.per_class


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_run_cut_anywhere_ends_in_the_same_weights(name, vectors, tmp_path):
    sets = [s for s in CONFIGURATIONS[name] if s != "sampler.per_class=none"]
    if name in NO_CLASSES:
        base = [s for s in SMALL if "per_class" not in s]
        start = lambda out, callback: training.train(  # noqa: E731
            read(None, [f'data.source="{vectors}"', *base, *sets]), out, callback
        )
    else:
        start = lambda out, callback: quickly(vectors, out, *sets, callback=callback)  # noqa: E731
    events = []
    reference = start(tmp_path / "reference", events.append)
    for number in range(3):
        folder = tmp_path / f"cut{number}"
        at = 5 + (number * (len(events) - 6)) // 2
        with pytest.raises(Cut):
            start(folder, cut_at(at))
        with pytest.raises(Cut):
            training.resume(folder, cut_at(6))
        again = training.resume(folder)
        assert weights(folder) == weights(tmp_path / "reference"), f"cut at event {at}"
        assert torch.equal(again.embeddings, reference.embeddings)
        lines = [(line["event"], line["step"], line.get("loss"), line.get("val")) for line in again.history]
        assert lines == [(line["event"], line["step"], line.get("loss"), line.get("val")) for line in reference.history]


WHOLE_SET = ["sampler.name=hard-negatives", *[s for s in SMALL if "per_class" not in s], "training.patience=9"]


def test_negatives_of_the_whole_set_are_mined_every_so_many_epochs(vectors, tmp_path, monkeypatch):
    """With progress; the state has embeddings and lists, and a run cut between two minings, in the middle of an epoch,
    goes on with the lists that it had."""
    seen, plain = [], evaluation.nearest_negatives

    def search(rows, labels, **options):
        assert options["k"] == 7
        seen.append(rows.clone())
        return plain(rows, labels, **options)

    monkeypatch.setattr(evaluation, "nearest_negatives", search)
    sets = [*WHOLE_SET, "training.epochs=7", "sampler.every=3", "sampler.neighbours=7", "encoder.dropout=0.3"]
    recipe = read(None, [f'data.source="{vectors}"', *sets, "loss.name=proxy-anchor"])
    events = []
    training.train(recipe, tmp_path / "run", events.append)
    assert len(seen) == 2, "after epochs 3 and 6 of 7"
    mining = [(e["what"], e["done"], e["total"]) for e in events if e["event"] == "mining"]
    assert mining == 2 * [("embedding", 112, 112), ("search", 112, 112)]

    with pytest.raises(training.Stopped):
        training.train(recipe, tmp_path / "cut", stop_at(4 * 4 + 2))  # in epoch 5, lists of epoch 3
    tensors = Checkpoints(tmp_path / "cut" / "checkpoints").newest()[0]
    rows = seen[2]
    assert torch.equal(rows, seen[0]) and tensors["sampler.item_embeddings"].shape == rows.shape
    lists = tensors["sampler.neighbours"]
    assert lists.dtype == torch.int32 and lists.shape == (112, 7)
    training.resume(tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "run")
    assert len(seen) == 4 and torch.equal(seen[3], seen[1]), "mined once more, after epoch 6"


@pytest.mark.parametrize("loss", ["arcface", "supcon", "lifted-structure"])
def test_class_and_pair_losses_take_negatives_of_the_whole_set(loss, vectors, tmp_path):
    recipe = read(None, [f'data.source="{vectors}"', *WHOLE_SET, f"loss.name={loss}"])
    outcome = training.train(recipe, tmp_path / "run")
    sampler = outcome.recipe.sampler
    assert (sampler["neighbours"], sampler["guard"], sampler["every"]) == (32, 0.05, 1)
    assert "candidates" not in sampler and outcome.results["steps"] == 12


@pytest.mark.parametrize(
    "sets, sentence",
    [
        (["sampler.every=0"], "sampler.every must be >= 1, got 0"),
        (["sampler.every=3"], "sampler.every must be below training.epochs=3, or nothing is mined, got 3"),
        (["sampler.every=often"], "sampler.every must be a whole number, got 'often'"),
        (["sampler.neighbours=-1"], "sampler.neighbours must be >= 0, got -1"),
        (["sampler.guard=-1.0"], "sampler.guard must be >= 0, got -1.0"),
        (
            ["sampler.neighbours=5", "sampler.candidates=100"],
            "sampler.candidates would have no effect: sampler.neighbours is 5, from the whole set; leave it out",
        ),
        (["sampler.name=class-balanced", "sampler.every=2"], 'unknown key "sampler.every" of sampler "class-balanced"'),
        (["sampler.name=hard-classes", "sampler.every=3"], "sampler.every must be below training.epochs=3"),
    ],
)
def test_bad_settings_of_mining_are_refused(sets, sentence, vectors, tmp_path):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        training.train(read(None, [f'data.source="{vectors}"', *WHOLE_SET, *sets]), tmp_path / "run")


def test_the_margin_loss_is_told_the_dimension_that_the_data_fill(vectors, tmp_path):
    """By default, in the saved recipe; "none" is the vector's own, and other selections have none."""
    sets = {"a": [], "b": ["loss.sampling_dim=none"], "c": ["loss.sampling_dim=3"], "d": ["loss.selection=hard"]}
    runs = {name: quickly(vectors, tmp_path / name, "loss.name=margin", *extra) for name, extra in sets.items()}
    chosen = {name: run.recipe.loss.get("sampling_dim") for name, run in runs.items()}
    assert chosen == {"a": "fitted", "b": "none", "c": 3, "d": None}
    assert len({weights(tmp_path / name) for name in sets}) == 4
    tensors = Checkpoints(tmp_path / "a" / "checkpoints").newest()[0]
    assert float(tensors["loss.running_dim.moments"][1]) > 0.5
    assert "loss.running_dim.moments" not in Checkpoints(tmp_path / "b" / "checkpoints").newest()[0]
    with pytest.raises(ValueError, match=r'loss.sampling_dim must be left out unless selection="distance_weighted"'):
        quickly(vectors, tmp_path / "e", "loss.name=triplet", "loss.sampling_dim=fitted")


def test_continuous_labels_have_no_hard_negatives(tmp_path):
    rows = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    np.savez(tmp_path / "graded.npz", embeddings=rows, targets=rows[:, :2].astype(np.float64))
    recipe = read(None, [f'data.source="{tmp_path / "graded.npz"}"', *WHOLE_SET])
    with pytest.raises(ValueError, match='sampler "hard-negatives" needs class labels, the source has none; use label'):
        training.train(recipe, tmp_path / "run")


def test_candidates_and_other_guards_have_their_effect(vectors, tmp_path):
    runs = {}
    for sets in (
        ["sampler.candidates=16"],
        ["sampler.guard=none"],
        ["sampler.guard=0.5"],
        ["sampler.neighbours=1"],
        [],
    ):
        runs[str(sets)] = tmp_path / str(len(runs))
        training.train(read(None, [f'data.source="{vectors}"', *WHOLE_SET, *sets]), runs[str(sets)])
    # The best weights may be those of the first epoch, before anything is mined: the losses of the steps tell.
    assert len({losses_of(folder) for folder in runs.values()}) == 5


def losses_of(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return tuple(line["loss"] for line in lines if "loss" in line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(number, vectors, tmp_path):
    quickly(vectors, tmp_path / "reference")

    def callback(event):
        if event["event"] == "step_end" and event["step"] == 6:
            os.kill(os.getpid(), number)

    with pytest.raises(training.Stopped) as stopped:
        quickly(vectors, tmp_path / "stopped", callback=callback)
    assert stopped.value.number == number and "--resume" in str(stopped.value)
    assert Checkpoints(tmp_path / "stopped" / "checkpoints").newest()[1]["step"] == 6, "in the middle of an epoch"
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)
    training.resume(tmp_path / "stopped")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "reference")


def stop_at(step):
    """A callback that asks the run to stop at a step, as a job scheduler does."""

    def callback(event):
        if event["event"] == "step_end" and event["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return callback


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("step", [6, 8], ids=["mid-epoch", "last batch of an epoch"])
def test_a_run_stopped_within_an_epoch_ends_the_same(name, step, vectors, tmp_path):
    """Weights, figures, log lines and warnings: nothing tells that it was stopped."""
    base = [s for s in SMALL if name not in NO_CLASSES or "per_class" not in s]
    sets = [s for s in CONFIGURATIONS[name] if s != "sampler.per_class=none"]
    recipe = read(None, [f'data.source="{vectors}"', *base, *sets])
    reference = training.train(recipe, tmp_path / "reference")
    with pytest.raises(training.Stopped):
        training.train(recipe, tmp_path / "run", stop_at(step))
    again = training.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(tmp_path / "reference")
    assert again.results["test"] == reference.results["test"] and again.notes == reference.notes
    lines = [(line["event"], line["step"], line.get("loss"), line.get("val")) for line in again.history]
    assert lines == [(line["event"], line["step"], line.get("loss"), line.get("val")) for line in reference.history]


@pytest.mark.parametrize("there", [["recipe.toml"], ["recipe.toml", "data.json"]])
def test_a_run_that_died_before_its_first_checkpoint_begins_anew(there, vectors, tmp_path):
    quickly(vectors, tmp_path / "reference")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / ".step-00000000.safetensors.0a1b2c3d").write_bytes(b"half")
    for name in there:
        (tmp_path / "run" / name).write_bytes((tmp_path / "reference" / name).read_bytes())
    training.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(tmp_path / "reference")


def test_a_torn_line_of_the_journal_is_dropped(vectors, tmp_path):
    """A line may end anywhere, also where it looks whole."""
    reference = quickly(vectors, tmp_path / "reference")
    with pytest.raises(Cut):
        quickly(vectors, tmp_path / "run", callback=cut_at(16))
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "epoch": 3, "step": 2, "lr": {"head": 0.1}')
    again = training.resume(tmp_path / "run")
    assert [line["step"] for line in again.history] == [line["step"] for line in reference.history]


def test_a_thread_may_train(vectors, tmp_path):
    """Signals belong to the main thread; elsewhere the loop goes without."""
    done = []
    thread = threading.Thread(target=lambda: done.append(quickly(vectors, tmp_path / "run")))
    thread.start()
    thread.join()
    assert done and done[0].results["steps"] == 12


def test_a_finished_run_resumes_to_the_same_results(vectors, tmp_path):
    first = quickly(vectors, tmp_path / "run")
    again = training.resume(tmp_path / "run")
    assert first.results["test"] == again.results["test"]


def test_a_changed_recipe_is_not_resumed(vectors, tmp_path):
    """Not to be guessed: more epochs of a run that has finished, other layers than the checkpoint has."""
    quickly(vectors, tmp_path / "run")
    file = tmp_path / "run" / "recipe.toml"
    text = file.read_text()
    file.write_text(text.replace("epochs = 3", "epochs = 4"))
    with pytest.raises(ValueError, match=r"recipe.toml has changed since the run started: undo the change, or"):
        training.resume(tmp_path / "run")
    file.write_text(text.replace("workers = 0", "workers = 1"))
    training.resume(tmp_path / "run")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_data_json_is_named(content, vectors, tmp_path):
    quickly(vectors, tmp_path / "run")
    (tmp_path / "run" / "data.json").write_text(content)
    with pytest.raises(ValueError, match=r"data.json: corrupt \(.*\); start a new run"):
        training.resume(tmp_path / "run")


def test_a_run_finds_its_source_from_anywhere(vectors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = quickly(vectors.name, "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert training.resume("../run").results["test"] == first.results["test"]
    assert len(training.embed_source("../run").names) == first.results["items"]["test"]


def test_a_part_of_a_changed_source_is_not_measured(vectors, tmp_path):
    """A class more moves others: what the run trained on would be tested."""
    quickly(vectors, tmp_path / "run")
    with np.load(vectors) as archive:
        rows, labels = archive["embeddings"], archive["labels"]
    np.savez(vectors, embeddings=np.concatenate([rows, rows[:8]]), labels=np.concatenate([labels, np.full(8, 24)]))
    with pytest.raises(ValueError, match=r"has changed since .* started, so its test part may contain"):
        training.embed_source(tmp_path / "run")
    assert len(training.embed_source(tmp_path / "run", str(vectors), part="all").names) == 200


def test_a_batch_that_was_asked_for_comes_out_even(vectors, tmp_path):
    sets = [s for s in SMALL if "sampler" not in s]
    for batch, each in ((64, 8), (24, 4), (10, 5), (6, 3)):  # of 14 classes, usually 4 items each
        recipe = read(None, [f'data.source="{vectors}"', *sets, f"sampler.batch={batch}"])
        assert prepare(recipe).recipe.sampler["per_class"] == each


def test_what_a_sampler_warns_of_is_a_note(vectors, tmp_path):
    events = []
    result = quickly(vectors, tmp_path / "run", "sampler.per_class=16", "sampler.batch=32", callback=events.append)
    notes = [note for note in result.notes if "their items are repeated in a batch" in note]
    assert len(notes) == 1 and {"event": "note", "text": notes[0]} in events
    assert training.resume(tmp_path / "run").notes == result.notes


def test_a_changed_source_is_not_resumed(vectors, tmp_path):
    with pytest.raises(Cut):
        quickly(vectors, tmp_path / "run", callback=cut_at(8))
    with np.load(vectors) as result:
        rows, labels = result["embeddings"], result["labels"]
    np.savez(vectors, embeddings=rows + 1, labels=labels)
    with pytest.raises(ValueError, match="has changed since the run started"):
        training.resume(tmp_path / "run")


def test_resuming_nothing_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="not a run"):
        training.resume(tmp_path)


# --- checkpoints


def test_checkpoints_keep_two_and_the_best(vectors, tmp_path):
    quickly(vectors, tmp_path / "run", "training.epochs=5", "training.patience=50")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    steps = [name for name in names if name.startswith("step")]
    assert steps == ["step-00000016.safetensors", "step-00000020.safetensors"]
    assert 1 <= len([name for name in names if name.startswith("best")]) <= 2


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "text"])
def test_a_damaged_newest_checkpoint_falls_back(damage, vectors, tmp_path):
    quickly(vectors, tmp_path / "reference")
    with pytest.raises(Cut):
        quickly(vectors, tmp_path / "run", callback=cut_at(18))
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    content = bytearray(newest.read_bytes())
    if damage == "flipped":
        content[-5] ^= 1
    newest.write_bytes({"short": content[:-100], "empty": b"", "text": b"hello" * 50}.get(damage, content))
    notes = []
    training.resume(tmp_path / "run", lambda e: notes.append(e["text"]) if e["event"] == "note" else None)
    assert any(newest.name in note and "the previous one is used" in note for note in notes)
    assert weights(tmp_path / "run") == weights(tmp_path / "reference")


def test_a_damaged_checkpoint_does_not_count_as_one_of_two(vectors, tmp_path):
    """After falling back, two whole ones stand again before the damaged one's step is reached."""
    with pytest.raises(training.Stopped):
        quickly(vectors, tmp_path / "run", callback=stop_at(11))
    folder = tmp_path / "run" / "checkpoints"
    newest = sorted(folder.glob("step-*"))[-1]
    newest.write_bytes(b"")
    with pytest.raises(training.Stopped):
        training.resume(tmp_path / "run", stop_at(10))
    steps = sorted(folder.glob("step-*"))
    assert len(steps) == 2 and newest not in steps
    for path in steps:
        checkpoints.load(path)


def test_when_all_checkpoints_are_damaged_it_is_said(vectors, tmp_path):
    with pytest.raises(Cut):
        quickly(vectors, tmp_path / "run", callback=cut_at(15))
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no intact checkpoint"):
        training.resume(tmp_path / "run")


def test_a_checkpoint_proves_tensors_and_state(tmp_path):
    path = tmp_path / "c.safetensors"
    tensors = {"a": torch.randn(3, 2), "b": torch.tensor(7), "c": torch.zeros(0, 4), "d": torch.ones(2).bfloat16()}
    checkpoints.save(path, tensors, {"step": 3, "x": [1.5, None]})
    result, state = checkpoints.load(path)
    assert state == {"step": 3, "x": [1.5, None]}
    assert all(torch.equal(result[k], v) and result[k].dtype == v.dtype for k, v in tensors.items())
    content = path.read_bytes()
    path.write_bytes(content.replace(b'\\"step\\": 3', b'\\"step\\": 4'))
    assert path.read_bytes() != content
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        checkpoints.load(path)


@pytest.mark.parametrize(
    "file, sentence",
    [
        ("step-00000008", "checkpoint of step 8"),
        ("best-00000004", "best weights of step 4"),
        ("model.safetensors", "encoder"),
        ("results.json", "results.json"),
    ],
)
def test_a_full_disk_loses_nothing(file, sentence, vectors, tmp_path, monkeypatch):
    reference = quickly(vectors, tmp_path / "reference")
    real = files.write_bytes

    def full(path, content):
        if file in str(path):
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(files, "write_bytes", full)
    with pytest.raises(ValueError, match=rf"{sentence} could not be written \(No space left on device\).*--resume"):
        quickly(vectors, tmp_path / "run")
    monkeypatch.undo()
    training.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(reference.folder)


def test_no_temporary_file_is_left_behind(vectors, tmp_path):
    quickly(vectors, tmp_path / "run")
    assert not list((tmp_path / "run").rglob(".*"))


def test_an_existing_folder_is_not_touched(vectors, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"run: is not empty; choose another --out$"):
        quickly(vectors, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious.txt"]


# --- rates and groups


def test_rates_over_time():
    def factors(batches, epochs, **schedule):
        recipe = Recipe().with_("schedule", **schedule)
        rate = LRSchedule(recipe, batches, epochs)
        return [rate.factor(step) for step in range(batches * epochs)]

    cosine = factors(10, 10, decay="cosine", warmup=0.1, floor=0.2)
    assert cosine[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert cosine[10:] == pytest.approx([0.2 + 0.8 * (1 + math.cos(math.pi * i / 90)) / 2 for i in range(90)])
    step = factors(10, 4, decay="step", warmup=0.0, every=2, factor=0.1)
    assert step == pytest.approx([1.0] * 20 + [0.1] * 20)
    assert factors(5, 2, decay="constant", warmup=0.0) == [1.0] * 10


def test_a_warm_up_is_at_least_one_step():
    """A run of a few steps must not round it away."""
    rate = LRSchedule(Recipe().with_("schedule", decay="constant", warmup=0.05), 3, 2)
    assert [rate.factor(step) for step in range(3)] == [0.5, 1, 1]


def test_plateau_cuts_after_its_patience():
    rate = LRSchedule(Recipe().with_("schedule", decay="plateau", warmup=0.0, factor=0.5, patience=2), 10, 10)
    seen = []
    for value in (0.1, 0.2, 0.2, 0.1, 0.3, 0.3, 0.3, 0.3, 0.3):
        rate.measured(value)
        seen.append(rate.factor(50))
    assert seen == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_parts_have_their_own_rates_and_only_matrices_decay():
    backbone = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    head, loss = nn.Linear(3, 2), losses.ProxyAnchorLoss(4, 2)
    recipe = Recipe().with_("optimizer", lr=0.1, backbone_scale=0.5, head_scale=2.0, weight_decay=0.3)
    result = parameter_groups(recipe, backbone, head, loss)
    table = {(g["part"], g["weight_decay"]): (g["base"], [tuple(p.shape) for p in g["params"]]) for g in result}
    assert table == {
        ("backbone", 0.3): (0.05, [(3, 3)]),
        ("backbone", 0.0): (0.05, [(3,), (3,), (3,)]),
        ("head", 0.3): (0.2, [(2, 3)]),
        ("head", 0.0): (0.2, [(2,)]),
        ("loss", 0.3): (10.0, [(4, 2)]),
    }
    steps = build_optimizer(recipe, result)
    LRSchedule(recipe, 10, 10).set(steps, 0)
    assert [g["lr"] / g["base"] for g in steps.param_groups] == pytest.approx([1 / 6] * 5)


# --- the monitor


def test_nan_stops_the_run_and_says_what_to_try(vectors, tmp_path):
    with pytest.raises(training.Diverged, match=r"loss is (nan|inf).*smaller optimizer\.lr"):
        quickly(vectors, tmp_path / "run", "optimizer.lr=1e30", "optimizer.name=sgd", "encoder.normalize=false")
    training_state = Checkpoints(tmp_path / "run" / "checkpoints").newest()[0]
    assert all(bool(t.isfinite().all()) for name, t in training_state.items() if name.startswith("encoder"))


@pytest.mark.parametrize("callback", [lambda event: None, stop_at(3)], ids=["to the end of an epoch", "stopped"])
def test_nan_between_two_log_lines_is_noticed(callback, vectors, tmp_path):
    """Before anything is measured or kept, and never as if the run had been saved."""
    sets = ["optimizer.lr=1e30", "optimizer.name=sgd", "encoder.normalize=false", "training.log_steps=100"]
    with pytest.raises(training.Diverged, match=r"loss is (nan|inf).*smaller optimizer\.lr"):
        quickly(vectors, tmp_path / "run", *sets, callback=callback)


@pytest.mark.parametrize("callback", [lambda event: None, stop_at(1)], ids=["to the end of an epoch", "stopped"])
def test_weights_that_are_no_numbers_are_not_kept(callback, vectors, tmp_path):
    """The loss was still finite, the step after it was not: a checkpoint of that would be the end of the run."""
    sets = ["optimizer.lr=3e38", "optimizer.name=sgd", "training.batches=1", "training.log_steps=100"]
    sets += ["loss.name=contrastive", "encoder.normalize=false", "optimizer.momentum=0.0", "optimizer.weight_decay=100"]
    with pytest.raises(training.Diverged, match=r"weights are not finite at step 1: try a smaller optimizer\.lr"):
        quickly(vectors, tmp_path / "run", *sets, callback=callback)
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest()[1]["step"] == 0


def test_collapse_is_noticed():
    watcher = monitor.Monitor(classes=10, dim=8, on_collapse="stop")
    spot = monitor.geometry(torch.ones(32, 8) + 1e-4 * torch.randn(32, 8))
    for step in [*range(0, 100, 20), *range(90, 99)]:
        watcher.check(step, 1.0, 1.0, *spot)  # neither a few looks nor a few steps are enough
    with pytest.raises(training.Diverged, match="collapsed"):
        watcher.check(100, 1.0, 1.0, *spot)
    warned = monitor.Monitor(classes=10, dim=8, on_collapse="warn")
    notes = [note for step in range(0, 300, 20) for note in warned.check(step, 1.0, 1.0, *spot)]
    assert len(notes) == 1 and "collapsed" in notes[0]


def test_spread_rank_and_line():
    """Against the singular values themselves, and at known places."""
    spread, rank, line = monitor.geometry(torch.eye(6).repeat(20, 1))
    assert spread == pytest.approx(1 - 1 / 6) and rank == pytest.approx(5) and line == pytest.approx(1 / 5)
    two = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(10, 1)
    assert monitor.geometry(two) == pytest.approx((1.0, 1.0, 1.0))
    assert monitor.geometry(torch.ones(5, 3)) == pytest.approx((0.0, 0.0, 1.0), abs=1e-5)
    rows = nn.functional.normalize(torch.randn(60, 7, dtype=torch.float64) * torch.arange(1, 8), dim=1)
    shares = torch.linalg.svdvals(rows - rows.mean(0))
    shares = shares / shares.sum()
    result = monitor.geometry(rows)
    assert result[1] == pytest.approx(float(torch.exp(-(shares * shares.log()).sum())))
    assert result[2] == pytest.approx(float(shares[0] ** 2 / shares.square().sum()))


@pytest.mark.parametrize("dim", [8, 40])
def test_one_effective_rank_on_every_page(dim):
    """The rank of a batch in the log and that of the test items in the report are one formula: equal on equal rows."""
    rows, labels = torch.randn(24, dim) * torch.linspace(0.1, 2, dim), torch.arange(24) % 6
    assert monitor.geometry(rows)[1] == pytest.approx(evaluation.diagnose(rows, labels)["effective_rank"], rel=1e-5)


def test_collapse_to_a_line_is_noticed_through_noise():
    """A hundredth of noise in 128 dimensions: the effective rank is large, and the batch is a line all the same."""
    ends = torch.randn(200, 1).sign() * torch.eye(128)[:1] + 0.01 * torch.randn(200, 128)
    result = monitor.geometry(ends)
    watcher = monitor.Monitor(classes=10, dim=128, on_collapse="stop")
    for step in range(0, 100, 20):
        watcher.check(step, 1.0, 1.0, *result)
    with pytest.raises(training.Diverged, match="% of the variance along one direction"):
        watcher.check(100, 1.0, 1.0, *result)
    with pytest.raises(training.Diverged, match="embeddings are not finite"):
        monitor.geometry(torch.full((4, 3), torch.nan))


def test_an_epoch_tells_its_own_loss(vectors, tmp_path):
    """The mean over its steps, with fewer of them than log_steps, and after a stop in the middle as well."""
    every = quickly(vectors, tmp_path / "every", "training.log_steps=1").history
    rare = quickly(vectors, tmp_path / "rare", "training.log_steps=100").history
    steps = [line["loss"] for line in every if line["event"] == "step"]
    for lines in (every, rare):
        events = [line["loss"] for line in lines if line["event"] == "epoch"]
        assert events == pytest.approx([sum(steps[i : i + 4]) / 4 for i in (0, 4, 8)], rel=1e-5)
    with pytest.raises(Stopped):
        quickly(vectors, tmp_path / "stopped", "training.log_steps=100", callback=stop_at(6))
    again = training.resume(tmp_path / "stopped").history
    assert [line["loss"] for line in again if line["event"] == "epoch"] == [
        line["loss"] for line in rare if line["event"] == "epoch"
    ]


def test_a_dead_loss_and_still_proxies_are_said_once():
    watcher = monitor.Monitor(classes=10, dim=8, on_collapse="stop")
    notes = [note for step in range(0, 300, 20) for note in watcher.check(step, 0.0, 0.0, 0.9, 6.0, 0.3)]
    assert len(notes) == 1 and "loss.margin" in notes[0]
    loss = losses.ProxyAnchorLoss(4, 8)
    before = {name: p.detach().clone() for name, p in loss.named_parameters()}
    assert "weight of the loss did not move in epoch 1" in watcher.epoch(1, before, loss)[0]
    assert watcher.epoch(2, before, loss) == []
    with torch.no_grad():
        loss.weight += 1
    assert monitor.Monitor(10, 8, "stop").epoch(1, before, loss) == []


# --- the whole


def test_a_set_goes_to_the_device_without_a_warning(tmp_path):
    """Pixels are mapped read-only; torch warns of such an array, and warnings are errors here."""
    pixels = np.random.default_rng(0).integers(0, 255, (9, 4, 4, 3)).astype(np.uint8)
    pixels.tofile(tmp_path / "pixels")
    mapped = np.memmap(tmp_path / "pixels", np.uint8, "r", shape=pixels.shape)
    assert np.array_equal(loader.copy_to_device(mapped, torch.device("cpu"), step=4).numpy(), pixels)


def test_training_helps_and_everything_is_in_the_folder(vectors, tmp_path):
    outcome = quickly(vectors, tmp_path / "run", "training.epochs=10", "training.batches=10")
    names = {path.name for path in outcome.folder.iterdir()}
    assert names == {
        "recipe.toml",
        "model.safetensors",
        "encoder.json",
        "metrics.jsonl",
        "results.json",
        "data.json",
        "checkpoints",
    }
    results = json.loads((outcome.folder / "results.json").read_text())
    assert set(results["test"]) == {"trained", "untrained", "baseline"}
    for figures in results["test"].values():
        assert {"recall@1", "map@r"} <= set(figures)
        for figure in figures.values():
            assert figure["low"] <= figure["value"] <= figure["high"]
    assert results["baseline"] == "vectors"
    assert read(outcome.folder / "recipe.toml").plain() == outcome.recipe.plain(), "the saved recipe is the settled one"
    epochs = [line for line in outcome.history if line["event"] == "epoch"]
    best = max(line["val"]["map@r"] for line in epochs)
    contenders = results["start"]["trained"], results["start"]["start"]
    assert contenders[0] == pytest.approx(best) and results["val"]["map@r"] == pytest.approx(max(contenders))


def test_a_verdict_says_whether_training_helped():
    """One that helps, one that does harm, and one that no figure of theirs tells apart from what is free."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 5)
    good, middling, poor = (
        torch.from_numpy(rng.normal(size=(12, 8))[labels] + noise * rng.normal(size=(60, 8))) for noise in (0.3, 1, 3)
    )
    held_out = HeldOut(np.arange(60), labels.astype(np.int64), None)

    def judged(trained, untrained, baseline, held_out=held_out, graded=False):
        rows = {"trained": trained, "untrained": untrained, "baseline": baseline}
        return verdict(rows, held_out, graded, torch.device("cpu"), baseline="pixels", seed=0)

    result = judged(good, poor, middling)
    assert result["helped"] is True and result["sentence"].startswith("Training helped: MAP@R ")
    right = evaluation.compare(good, middling, torch.from_numpy(labels), samples=1000)
    beside = result["against"]["baseline"]
    assert (beside["difference"], beside["low"], beside["high"]) == (right["difference"], *right["interval"])
    assert f"{100 * right['b']:.1f} % of the pixels" in result["sentence"], "the better of the two that are free"
    assert f"{100 * right['interval'][0]:+.1f} to {100 * right['interval'][1]:+.1f}" in result["sentence"]
    result = judged(poor, middling, good)
    assert result["helped"] is False and result["sentence"].startswith("Training did not help: MAP@R ")
    assert judged(middling, poor, good)["helped"] is False, "better than untrained, worse than pixels"
    result = judged(good, good.clone(), poor)
    assert result["helped"] is None and "cannot be told whether training helped" in result["sentence"]
    assert "the untrained encoder" in result["sentence"]
    two = HeldOut(np.arange(10), held_out.labels[:10], None)
    result = judged(good[:10], poor[:10], poor[:10], two)
    assert result["helped"] is None and "2 test classes are too few to tell" in result["sentence"]
    targets = HeldOut(np.arange(60), None, good.numpy())
    assert judged(good, poor, middling, targets, graded=True)["helped"] is True


def test_a_run_that_did_not_help_says_so(tmp_path):
    """In results.json, whole: the vectors were perfect, the encoder has two dimensions and learns nothing."""
    labels = np.repeat(np.arange(40), 6)
    rows = np.eye(40)[labels] + 0.05 * np.random.default_rng(0).normal(size=(240, 40))
    np.savez(tmp_path / "v.npz", embeddings=rows.astype(np.float32), labels=labels)
    quickly(tmp_path / "v.npz", tmp_path / "run", "training.epochs=1", "optimizer.lr=1e-9", "encoder.dim=2")
    result = json.loads((tmp_path / "run" / "results.json").read_text())["verdict"]
    assert result["helped"] is False and result["against"]["baseline"]["verdict"] == "worse"
    assert 0 <= result["against"]["baseline"]["trained"] <= 1, "JSON holds fractions"
    assert "did not help" in result["sentence"] and "100.0 % of the vectors" in result["sentence"]


def test_the_saved_recipe_repeats_the_run(vectors, tmp_path):
    first = quickly(vectors, tmp_path / "a")
    training.train(read(first.folder / "recipe.toml"), tmp_path / "b")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_early_stopping(vectors, tmp_path):
    sets = ["training.epochs=50", "training.patience=2", "optimizer.lr=1e-12"]
    outcome = quickly(vectors, tmp_path / "run", *sets)
    assert outcome.results["epochs"] < 50
    assert any("stopped early" in note for note in outcome.notes)


def test_continuous_targets(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 6)).astype(np.float32)
    np.savez(tmp_path / "t.npz", embeddings=rows, targets=rows[:, :2] ** 2)
    sets = [s for s in SMALL if "per_class" not in s]
    recipe = read(None, [f'data.source="{tmp_path / "t.npz"}"', *sets])
    outcome = training.train(recipe, tmp_path / "run")
    assert outcome.recipe.loss["name"] == "logratio" and outcome.recipe.sampler["name"] == "label-neighbours"
    assert "ndcg@10" in outcome.results["test"]["trained"]
    assert outcome.recipe.sampler["neighbours"] == 0 and "anchors" not in outcome.recipe.loss
    with pytest.raises(ValueError, match="needs class labels"):
        training.train(read(None, [f'data.source="{tmp_path / "t.npz"}"', "loss.name=triplet"]), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "sets, neighbours, anchors, of_the_loss",
    [
        ([], 0, 1, None),  # random batches, and every item is an anchor
        (["loss.anchors=1"], 5, 1, 1),  # the paper's
        (["sampler.neighbours=5"], 5, 12, None),  # half of the batch is anchors with their neighbours
        (["sampler.anchors=25", "loss.anchors=25"], 5, 25, 25),
        (["loss.anchors=1000", "sampler.batch=60"], 5, 10, 1000),  # no more than have room for their neighbours
    ],
)
def test_anchors_of_log_ratio(sets, neighbours, anchors, of_the_loss, tmp_path):
    """Every anchor of the loss that the recipe asks for has its nearest labels in the batch."""
    from nearkin.training.build import build_loss, build_sampler
    from nearkin.training.prepare import prepare

    rows = np.random.default_rng(0).normal(size=(400, 6)).astype(np.float32)
    np.savez(tmp_path / "t.npz", embeddings=rows, targets=rows[:, :2] ** 2)
    recipe = prepare(read(None, [f'data.source="{tmp_path / "t.npz"}"', *sets])).recipe
    targets = rows[:200, :2].astype(np.float64)
    sampler, loss = build_sampler(recipe, None, targets), build_loss(recipe, None, 4, 0, 2)
    assert (sampler.neighbours, sampler.anchors, loss.settings.get("anchors")) == (neighbours, anchors, of_the_loss)
    batch = sampler.batch(0, 0)
    for anchor in batch[:anchors]:
        apart = ((targets - targets[anchor]) ** 2).sum(1)
        assert set(np.argsort(apart)[1 : neighbours + 1]) <= set(batch)
    assert float(loss(torch.randn(len(batch), 4), torch.from_numpy(targets[batch]))) > 0


def test_a_tiny_validation_part_of_targets(tmp_path):
    """Two items have one distance each: no rank correlation, and no NaN in a log line either."""
    rows = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    np.savez(tmp_path / "t.npz", embeddings=rows, targets=rows[:, 0])
    sets = [s for s in SMALL if "sampler" not in s]
    outcome = training.train(read(None, [f'data.source="{tmp_path / "t.npz"}"', *sets]), tmp_path / "run")
    assert outcome.results["items"]["val"] == 2
    assert set(outcome.results["val"]) == {"ndcg@10", "label_distance@10", "epoch", "step"}


def test_targets_with_a_gallery_of_their_own(tmp_path):
    rows = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    split = np.repeat(["train", "val", "query", "gallery"], [30, 6, 10, 14])
    np.savez(tmp_path / "t.npz", embeddings=rows, targets=rows[:, :2], split=split)
    sets = [s for s in SMALL if "sampler" not in s]
    outcome = training.train(read(None, [f'data.source="{tmp_path / "t.npz"}"', *sets]), tmp_path / "run")
    asked, result, targets = outcome.embeddings[:10], outcome.embeddings[10:], torch.from_numpy(rows[36:, :2])
    right = evaluation.graded(asked, targets[:10], gallery=result, gallery_targets=targets[10:])
    assert outcome.results["test"]["trained"]["ndcg@10"]["value"] == pytest.approx(right["ndcg@10"])


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_trains(name, vectors, tmp_path):
    sets = [s for s in SMALL if "per_class" not in s]
    if name == "logratio":
        pytest.skip("needs continuous targets: see test_continuous_targets")
    outcome = training.train(read(None, [f'data.source="{vectors}"', *sets, f"loss.name={name}"]), tmp_path / "run")
    assert outcome.results["steps"] == 12


def test_the_loop_waits_for_the_device_only_when_it_looks(vectors, tmp_path):
    """Every other step must not read a value back; a stand-in for the synchronisation check on a GPU."""
    assert loop.fit.__doc__ and run.train.__doc__
    seen = []
    quickly(vectors, tmp_path / "run", "training.log_steps=5", callback=lambda e: seen.append(e["event"]))
    assert seen.count("step") == 3  # steps 1, 5, 10


def test_time_based_checkpoints(vectors, tmp_path, monkeypatch):
    now = [0.0]

    def later():
        now[0] += 61.0
        return now[0]

    monkeypatch.setattr(time, "monotonic", later)
    saved = []
    quickly(
        vectors,
        tmp_path / "run",
        "training.save_minutes=1",
        callback=lambda e: saved.append(e["step"]) if e["event"] == "saved" else None,
    )
    assert len(saved) >= 10
