"""Figures for other programs: written once, the same after a resume, and the training does not notice."""

import json
import struct
import subprocess
import sys

import numpy as np
import pytest

from nearkin import training
from nearkin.training import tracking

SETTINGS = {"training.epochs": 2, "training.batches": 5, "training.log_steps": 2, "training.device": "cpu"}
EXPECTED = [("step", 1), ("step", 2), ("step", 4), ("epoch", 5), ("step", 6), ("step", 8), ("step", 10), ("epoch", 10)]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    rng = np.random.default_rng(0)
    labels = np.arange(80) // 5
    path = tmp_path_factory.mktemp("vectors") / "v.npz"
    rows = 3 * rng.normal(size=(16, 8))[labels] + rng.normal(size=(80, 8))
    np.savez(path, embeddings=rows.astype(np.float32), labels=labels)
    return str(path)


@pytest.fixture(scope="module")
def plain(vectors, tmp_path_factory):
    return training.train(vectors, tmp_path_factory.mktemp("plain") / "run", settings=SETTINGS, report=False)


class Listed(training.Tracker):
    """Lists its calls."""

    def __init__(self):
        self.starts, self.lines, self.ends = [], [], []

    def on_start(self, folder, settings, step):
        self.starts.append((folder, settings["loss.name"], step))

    def on_step(self, step, metrics):
        self.lines.append(("step", step, metrics["loss"]))

    def on_epoch(self, epoch, step, metrics):
        self.lines.append(("epoch", step, metrics["val/recall@1"]))

    def on_end(self, metrics, finished):
        self.ends.append((metrics, finished))


class StopAt:
    """Ends the training after this step, as a killed process does: without a checkpoint."""

    def __init__(self, step):
        self.step = step

    def __call__(self, event):
        if event["event"] == "step" and event["step"] == self.step:
            raise ZeroDivisionError


def interrupted_then_resumed(vectors, folder, **settings):
    with pytest.raises(ZeroDivisionError):
        training.train(vectors, folder, StopAt(8), settings=SETTINGS | settings, report=False)
    return training.resume(folder)


def test_the_interface(vectors, plain, tmp_path):
    seen = Listed()
    outcome = training.train(vectors, tmp_path / "run", seen, settings=SETTINGS, report=False)
    assert seen.starts == [(tmp_path / "run", outcome.recipe.loss["name"], 0)]
    assert [line[:2] for line in seen.lines] == EXPECTED
    ((metrics, finished),) = seen.ends
    assert finished and metrics["recall@1"] == outcome.results["test"]["trained"]["recall@1"]["value"]
    logged = [line["loss"] if line["event"] == "step" else line["val"]["recall@1"] for line in outcome.history]
    assert [line[2] for line in seen.lines] == logged
    assert (tmp_path / "run/model.safetensors").read_bytes() == (plain.folder / "model.safetensors").read_bytes()


def test_a_failed_training_ends_it_without_figures(vectors, tmp_path):
    seen, stop = Listed(), StopAt(4)

    class Both(Listed):
        def __call__(self, event):
            super().__call__(event)
            stop(event)

    seen = Both()
    with pytest.raises(ZeroDivisionError):
        training.train(vectors, tmp_path / "run", seen, settings=SETTINGS, report=False)
    assert seen.ends == [({}, False)]


def test_other_ranks_do_not_write():
    from types import SimpleNamespace

    from nearkin.training.run import _of_rank

    tracker, plain_callback = Listed(), lambda event: None
    first, second = SimpleNamespace(first=True), SimpleNamespace(first=False)
    assert _of_rank(tracker, first) is tracker and _of_rank(tracker, second) is None
    assert _of_rank(plain_callback, second) is plain_callback


def test_a_tracker_that_fails_is_left_out_with_a_note(vectors, plain, tmp_path, monkeypatch):
    class Fails(Listed):
        repeats = False

        def on_step(self, step, metrics):
            raise RuntimeError("no room")

    monkeypatch.setitem(tracking.TRACKERS, "tensorboard", Fails)
    monkeypatch.setattr(tracking, "find_spec", lambda name: True)
    settings = SETTINGS | {"training.log": ["tensorboard"]}
    outcome = training.train(vectors, tmp_path / "run", settings=settings, report=False)
    assert "tensorboard is not written from here on: no room" in outcome.notes
    assert (tmp_path / "run/model.safetensors").read_bytes() == (plain.folder / "model.safetensors").read_bytes()


def test_what_is_missing_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"training\.log needs wandb: pip install wandb"):
        training.train("glyphs", tmp_path / "run", settings={"training.log": ["wandb"]})
    with pytest.raises(ValueError, match=r"training\.log.*tensorboard"):
        training.train("glyphs", tmp_path / "run", settings={"training.log": ["comet"]})
    assert not (tmp_path / "run").exists()


def test_tensorboard_after_a_resume(vectors, plain, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    outcome = interrupted_then_resumed(vectors, tmp_path / "run", **{"training.log": ["tensorboard"]})
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("step/loss")]
    assert [step for step, _ in losses] == [step for kind, step in EXPECTED if kind == "step"]
    assert losses == [
        (line["step"], pytest.approx(line["loss"])) for line in outcome.history if line["event"] == "step"
    ]
    assert [event.step for event in events.Scalars("epoch/val/recall@1")] == [5, 10]
    (end,) = events.Scalars("test/recall@1")
    assert end.step == 10 and end.value == pytest.approx(outcome.results["test"]["trained"]["recall@1"]["value"])
    assert outcome.results["test"] == plain.results["test"]
    training.resume(tmp_path / "run")  # tests again, and tracks nothing
    again = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert len(again.Scalars("test/recall@1")) == 1


@pytest.mark.filterwarnings("ignore")
def test_mlflow_after_a_resume(vectors, plain, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    outcome = interrupted_then_resumed(vectors, tmp_path / "run", **{"training.log": ["mlflow"]})
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("nearkin").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params["training.epochs"] == "2" and run.data.params["loss.name"] == plain.recipe.loss["name"]
    history = client.get_metric_history(run.info.run_id, "step/loss")
    expected = [(line["step"], line["loss"]) for line in outcome.history if line["event"] == "step"]
    assert sorted((metric.step, metric.value) for metric in history) == [(s, pytest.approx(v)) for s, v in expected]
    assert run.data.metrics["test/recall_at_1"] == outcome.results["test"]["trained"]["recall@1"]["value"]
    assert (tmp_path / "run/model.safetensors").read_bytes() == (plain.folder / "model.safetensors").read_bytes()


def records(path):
    """The records of a .wandb file: LevelDB's log format after seven bytes."""
    content, at, parts = path.read_bytes(), 7, []
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield b"".join(parts)
            parts = []


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_after_a_resume(vectors, plain, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as messages

    monkeypatch.delenv("WANDB_MODE", raising=False)
    outcome = interrupted_then_resumed(vectors, tmp_path / "run", **{"training.log": ["wandb"]})
    rows, ids, summary = [], set(), {}
    for file in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for content in records(file):
            record = messages.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                row = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                rows.append(row)
            elif record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            elif record.WhichOneof("record_type") == "summary":
                items = record.summary.update
                summary |= {"/".join(item.nested_key) or item.key: item.value_json for item in items}
    assert len(ids) == 1
    losses = [(row["_step"], row["step/loss"]) for row in rows if "step/loss" in row]
    expected = [(line["step"], line["loss"]) for line in outcome.history if line["event"] == "step"]
    assert sorted(losses) == [(step, pytest.approx(value)) for step, value in expected]
    assert [row["_step"] for row in rows if "epoch/val/recall@1" in row] == [5, 10]
    assert float(summary["test/recall@1"]) == outcome.results["test"]["trained"]["recall@1"]["value"]
    assert (tmp_path / "run/model.safetensors").read_bytes() == (plain.folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_several_ranks_write_once(vectors, tmp_path):
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nearkin"]
    command += ["train", vectors, "--out", str(tmp_path / "run"), "--track", "tensorboard", "--quiet"]
    command += [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
