"""Faults around a training: files of others stay, corrupt ones are reported, runs are not confused."""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import worlds
from commands import noisy_vectors
from nearkin import dist, training
from nearkin.dist import rendezvous
from nearkin.training import run_dir
from nearkin.training.config.recipe import read

pytestmark = pytest.mark.slow

SMALL = ["training.epochs=3", "training.batches=4", "sampler.batch=16", "sampler.per_class=4", "encoder.hidden=[16]"]
SMALL += ["encoder.dim=8", "training.log_steps=2", "training.workers=0", "evaluation.interval=false"]
ROUNDS = 12 * int(os.environ.get("NEARKIN_FAULTS", "1"))


def train(home, out, *sets, callback=lambda event: None):
    return training.train(read(None, [f'data.source="{home}/vectors.npz"', *SMALL, *sets]), home / out, callback)


def stop_in(epoch):
    """A callback that ends the run after the checkpoint of this epoch."""

    def callback(event):
        if event["event"] == "step_end" and event["epoch"] == epoch + 1:
            raise KeyboardInterrupt

    return callback


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A set of vectors; `done`, a run that was never stopped; `cut`, one that was after its second epoch."""
    place = tmp_path_factory.mktemp("runs")
    noisy_vectors(place / "vectors.npz", 24)
    train(place, "done")
    with pytest.raises(KeyboardInterrupt):
        train(place, "cut", callback=stop_in(2))
    return place


@pytest.fixture
def run(home, tmp_path):
    """A copy of the run that was cut."""
    return Path(shutil.copytree(home / "cut", tmp_path / "run"))


def resume(run):
    """What a resumed run says, and that it ends."""
    notes = []
    training.resume(run, lambda event: notes.append(event["text"]) if event["event"] == "note" else None)
    return notes


def weights(run):
    return (run / "model.safetensors").read_bytes()


def steps(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def flip(path, at=-5):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def everything(place):
    return {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}


# --- what is not its own


def test_a_resumed_run_removes_only_files_of_its_own(run, home):
    inside = run / "checkpoints"
    names = [
        "thesis.pdf",
        ".env",
        "step-00000004.safetensors.bak",
        "step-4.safetensors",
        "best.safetensors",
        "notes.json",
    ]
    names += ["step-00000004 (copy).safetensors", ".step-00000004.safetensors.swp"]
    for name in names:
        (inside / name).write_bytes(b"mine")
    (inside / "folder").mkdir()
    (inside / ".step-00000004.safetensors.0a1b2c3d").write_bytes(b"half")  # of a process that was killed
    assert resume(run) == []
    assert all((inside / name).read_bytes() == b"mine" for name in names) and (inside / "folder").is_dir()
    assert not (inside / ".step-00000004.safetensors.0a1b2c3d").exists()
    assert len(list(inside.glob("step-????????.safetensors"))) == 2
    assert weights(run) == weights(home / "done")


LINKS = ["checkpoints", "checkpoints/step-00000008.safetensors", "checkpoints/best-99999999.json", ".lock"]
LINKS += ["recipe.toml", "data.json", "metrics.jsonl", "model.safetensors", "encoder.json", "results.json"]
LINKS += ["report.html", "tensorboard"]


@pytest.mark.parametrize("name", LINKS)
def test_nothing_is_written_or_removed_through_a_link(name, run, tmp_path):
    """What stands elsewhere may be another's: a link in place of a run's file is refused before anything is done."""
    outside, inside = tmp_path / "outside", run / name
    outside.mkdir()
    if inside.exists():
        inside.rename(outside / "target")
    else:
        (outside / "target").write_bytes(b"mine")
    if name == "checkpoints":
        (outside / "target" / "key.pem").write_bytes(b"mine")
    inside.symlink_to(outside / "target")
    before = everything(outside)
    with pytest.raises(ValueError, match=rf"{inside.name}: is a link to .*target; a run writes only into files of its"):
        training.resume(run)
    assert everything(outside) == before and inside.is_symlink()


def test_a_folder_that_becomes_a_link_while_a_run_goes_on(home, tmp_path):
    """The next checkpoint is not written, and what the link leads to stays."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "step-00000000.safetensors").write_bytes(b"another's")

    def callback(event):
        if event["event"] == "step_end" and event["step"] == 2:
            (tmp_path / "run" / "checkpoints").rename(tmp_path / "away")
            (tmp_path / "run" / "checkpoints").symlink_to(outside)

    recipe = read(None, [f'data.source="{home}/vectors.npz"', *SMALL])
    with pytest.raises(ValueError, match="has become a symbolic link"):
        training.train(recipe, tmp_path / "run", callback)
    assert [path.read_bytes() for path in outside.iterdir()] == [b"another's"]


def test_a_whole_run_may_stand_behind_a_link(run, home, tmp_path):
    (tmp_path / "link").symlink_to(run)
    resume(tmp_path / "link")
    assert weights(run) == weights(home / "done")


def test_a_restart_removes_only_half_written_files(tmp_path):
    from nearkin.training.run import _is_restart

    for name in (".env", ".recipe.toml.0a1b2c3d", ".recipe.toml.swp", ".gitignore"):
        (tmp_path / name).write_text("x")
    assert not _is_restart(tmp_path, restarted=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".env", ".gitignore", ".recipe.toml.swp"]


# --- damaged and missing files


@pytest.mark.parametrize("damage", ["flipped", "gone", "empty"])
def test_damaged_best_weights_are_measured_anew(damage, run):
    (best,) = (run / "checkpoints").glob("best-*")
    {"flipped": flip, "gone": Path.unlink, "empty": lambda path: path.write_bytes(b"")}[damage](best)
    (note,) = resume(run)
    assert best.name in note and "the best weights are lost, those of step 8 are measured again" in note
    results = json.loads((run / "results.json").read_text())
    assert results["notes"] == [note] and results["val"]["step"] in (8, 12)
    assert resume(run) == []  # a whole best stands again


def test_best_weights_of_the_newest_checkpoint_itself_are_not_lost(home, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(home, tmp_path / "run", callback=stop_in(1))
    flip(tmp_path / "run" / "checkpoints" / "best-00000004.safetensors")
    assert "those of step 4 are measured again" in resume(tmp_path / "run")[0]
    assert weights(tmp_path / "run") == weights(home / "done")


def test_a_finished_run_without_its_best_weights(home, tmp_path):
    run = Path(shutil.copytree(home / "done", tmp_path / "run"))
    for path in (run / "checkpoints").glob("best-*"):
        flip(path)
    assert "those of step 12 are measured again" in resume(run)[0]
    assert resume(run) == [] and json.loads((run / "results.json").read_text())["val"]["step"] == 12


LINES = ["{}", '{"event": "step"}', '{"event": "step", "step": "two", "epoch": 1, "lr": {"head": 1}}', "[1, 2]"]
LINES += ['{"event": "step", "step": 2, "epoch": 1, "lr": {}}', '{"event": "epoch", "step": 4, "epoch": null}']
LINES += [
    '{"event": "epoch", "step": 4, "epoch": 1, "loss": 1e999}',
    "\x00\x07",
    "NaN",
    "[" * 100_000,
    '{"a":' * 100_000,
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_damaged_line_of_the_metrics_is_left_out(line, run, home):
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")
    file.write_text("\n".join([lines[0], line, *lines[1:]]))
    assert resume(run) == ["metrics.jsonl: 1 corrupt line left out"]
    assert steps(run) == steps(home / "done") and weights(run) == weights(home / "done")


@pytest.mark.parametrize("left", ["all", "metrics.jsonl", "model.safetensors", "results.json", "checkpoints"])
def test_all_checkpoints_gone_is_said(left, home, tmp_path):
    run = Path(shutil.copytree(home / "done", tmp_path / "run"))
    for path in (run / "checkpoints").iterdir():
        if path.name.startswith("step-") or left not in ("all", "checkpoints"):
            path.unlink()
    for path in run.iterdir():
        if left != "all" and path.is_file() and path.name not in (left, "recipe.toml", "data.json"):
            path.unlink()
    before = everything(run)
    sentence = (
        r"all checkpoints of this run are missing, although \S+ shows that it had reached .*new run with --recipe"
    )
    with pytest.raises(ValueError, match=sentence):
        training.resume(run)
    assert everything(run) == before


def test_a_run_without_its_first_checkpoint_begins_anew_and_says_so(home, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("recipe.toml", "data.json"):
        shutil.copy(home / "done" / name, tmp_path / "run")
    assert resume(tmp_path / "run") == ["this run ended before its first checkpoint, so it starts again"]
    assert weights(tmp_path / "run") == weights(home / "done")


def test_random_damage_is_survived_or_one_sentence(home, tmp_path):
    """Bytes changed, cut off or put in, in one file of a run: it ends, or says which file; never a traceback."""
    chance = random.Random(0)
    for count in range(ROUNDS):
        run = Path(shutil.copytree(home / "cut", tmp_path / str(count)))
        files = sorted(path for path in run.rglob("*") if path.is_file())
        path = chance.choice(files)
        before = path.read_bytes()
        content = bytearray(before)
        at = chance.randrange(len(content))
        how = chance.choice(("change", "cut", "insert"))
        content[at : {"change": at + 1, "cut": len(content), "insert": at}[how]] = (
            b"" if how == "cut" else chance.randbytes(1 if how == "change" else 8)
        )
        path.write_bytes(content)
        try:
            notes = resume(run)
        except ValueError as error:
            named = [run.name, path.name, "recipe", "unknown"]
            if "\n" in str(error) or not any(name in str(error) for name in named):
                raise AssertionError(f"{path}, {how} at {at}: {error}") from error
            continue
        if path.name == "step-00000008.safetensors" and content != before:
            assert notes, (path, how, at)


# --- one run is not taken for another, one machine not for another


def test_a_checkpoint_of_another_run_is_refused(run, home, tmp_path):
    train(home, tmp_path / "other", "training.seed=1")
    stranger = sorted((tmp_path / "other" / "checkpoints").glob("step-*"))[-1]
    shutil.copy(stranger, run / "checkpoints")
    before = everything(run)
    sentence = r"step-00000012.safetensors is a checkpoint of another run: its recipe is not that of this run; put this"
    with pytest.raises(ValueError, match=sentence):
        training.resume(run)
    assert everything(run) == before
    (run / "checkpoints" / stranger.name).unlink()
    assert resume(run) == []


def test_best_weights_of_another_run_are_refused(run, home, tmp_path):
    train(home, tmp_path / "other", "loss.name=contrastive")
    own = sorted((run / "checkpoints").glob("best-*"))[-1]
    shutil.copy(sorted((tmp_path / "other" / "checkpoints").glob("best-*"))[-1], own)
    with pytest.raises(ValueError, match=rf"{own.name} is a checkpoint of another run: its recipe"):
        training.resume(run)


def test_a_checkpoint_of_other_data_is_refused(run, home, tmp_path):
    """The same recipe on another file of the same name."""
    with np.load(home / "vectors.npz") as results:
        np.savez(tmp_path / "vectors.npz", embeddings=results["embeddings"] + 1, labels=results["labels"])
    train(tmp_path, "other")
    shutil.copy(tmp_path / "other" / "checkpoints" / "step-00000012.safetensors", run / "checkpoints")
    with pytest.raises(ValueError, match="is a checkpoint of another run: its data is not that of this run"):
        training.resume(run)


def test_other_threads_are_said(run, home):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        notes = resume(run)
    finally:
        torch.set_num_threads(before)
    assert notes == [
        f"the checkpoint was written with CPU threads {before}, this process has CPU threads {before + 1}: the run "
        f"resumes, but its last bits may differ from those of a run that was never stopped"
    ]
    assert notes[0] in json.loads((run / "results.json").read_text())["notes"]


def test_other_instructions_are_said(run, monkeypatch):
    known = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    (notes,) = resume(run)
    assert f"{known}, MKL_CBWR not set, this process has CPU instructions" in notes
    assert "DEFAULT, MKL_CBWR COMPATIBLE: the run resumes" in notes


def test_a_second_training_in_a_folder_is_refused(run):
    claim = run_dir.Claim(run, new=False)
    before = everything(run)
    try:
        with pytest.raises(ValueError, match=rf"a training is running in it already \(process {os.getpid()} on"):
            training.resume(run)
    finally:
        claim.close()
    before.pop(Path(".lock"))
    assert everything(run) == before


def two_epochs(rank, size, home, out):
    with pytest.raises((training.Stopped, SystemExit)):
        train(Path(home), out, "loss.name=arcface", "loss.shard=true", callback=stop_together(rank))


def stop_together(rank):
    """A callback that asks this rank to stop in the third epoch, as Ctrl-C does; all stop."""

    def callback(event):
        if event["event"] == "step_end" and event["step"] == 9:
            os.kill(os.getpid(), signal.SIGINT)

    return callback


def said_by(rank, size, out):
    return resume(Path(out))


def test_ranks_measure_lost_best_weights_anew(home, tmp_path):
    """The rows of class weights are spread over files; one of the best ones is damaged."""
    run = tmp_path / "run"
    worlds.run(2, two_epochs, str(home), str(run))
    inside = run / "checkpoints"
    (inside / "part-of-a-thesis.safetensors").write_bytes(b"mine")
    flip(sorted(inside.glob("part-best-*-1-of-2.safetensors"))[-1])
    first, second = worlds.run(2, said_by, str(run))
    assert len(first) == 1 and "the best weights are lost, those of step" in first[0] and first == second
    assert (inside / "part-of-a-thesis.safetensors").read_bytes() == b"mine"
    assert resume(run) == []  # also by one process, as the run has ended


def unlike(rank, size):
    known = rendezvous.code_versions()
    if rank == 1:
        rendezvous.code_versions = lambda: known | {"torch": "1.0.0"}
    with dist.join():
        raise AssertionError("they have not noticed")


def test_ranks_with_other_versions_are_noticed():
    notes = "all ranks must run the same code and versions; torch is 1.0.0 on rank 1 and .* on rank 0"
    with pytest.raises(worlds.RankFailed, match=notes):
        worlds.run(2, unlike)


def test_other_source_is_other_code():
    ours = rendezvous.code_versions()
    assert rendezvous.difference([ours, dict(ours)]) is None
    assert "nearkin's source is 0123 on rank 2" in rendezvous.difference(
        [ours, ours, ours | {"nearkin's source": "0123"}]
    )
    assert "rank 1 runs another one than rank 0" in rendezvous.difference([ours, 0])
