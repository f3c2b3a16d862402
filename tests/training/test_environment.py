"""What `nearkin doctor` and `nearkin runs` say."""

import json
import os
import socket
from pathlib import Path

import pytest

from nearkin import kernels
from nearkin.core import toml, versions
from nearkin.training import environment, run_list

EXTRAS = toml.read_file(Path(__file__).parents[2] / "pyproject.toml")["project"]["optional-dependencies"]


@pytest.fixture(autouse=True)
def metadata(monkeypatch):
    """As an installation of this tree has it; the one that the tests run in may be older."""
    lines = [f'{need}; extra == "{extra}"' for extra, needs in EXTRAS.items() for need in needs if ";" not in need]
    monkeypatch.setattr(versions, "requires", lambda _: lines)


def test_every_extra_for_users_is_listed():
    assert set(environment.EXTRAS) == set(EXTRAS) - {"demo", "test", "dev", "docs"}


def test_the_state_is_json_and_true(tmp_path):
    state = environment.examine(tmp_path)
    assert json.loads(json.dumps(state)) == state
    assert state["packages"]["torch"].startswith("2.")
    assert state["devices"][0]["name"] == "cpu"
    assert state["kernels"]["available"] == kernels.installed()
    extras = {extra["name"]: extra for extra in state["extras"]}
    assert extras["report"]["packages"] == ["scikit-learn", "openTSNE", "matplotlib"]
    for extra in extras.values():
        assert (extra["install"] is None) == (extra["missing"] == [])
    assert state["disk"][0]["free_bytes"] > 0


def test_what_is_missing_comes_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "is_installed", lambda package: package != "fastapi")
    monkeypatch.setattr(kernels, "installed", lambda: False)
    monkeypatch.setattr(environment, "_free", lambda folder: 5 * 2**20)
    state = environment.examine(tmp_path)
    notes = environment.sentences(state)
    assert "nearkin serve: pip install 'nearkin[serve]'" in notes
    assert f"runs: only 5 MiB are free in {tmp_path}" in notes
    assert not state["kernels"]["available"] and "triton" in state["kernels"]["why"]
    state["devices"].append({"name": "cuda:0", "line": "a card"})
    assert any(
        note.startswith("the kernel of very many classes is not used: triton") for note in environment.sentences(state)
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("no folder")
    state = environment.examine(file / "runs")
    assert state["disk"][0]["free_bytes"] is None
    assert f"runs: {file / 'runs'} cannot be written" in environment.sentences(state)


def _run(folder, epochs=0, results=None):
    folder.mkdir(parents=True)
    recipe = {"data": {"source": "photos"}, "encoder": {"name": "small-cnn"}, "loss": {"name": "triplet"}}
    (folder / "recipe.toml").write_text(toml.text(recipe | {"training": {"epochs": 4}}))
    lines = [{"event": "epoch", "epoch": epoch + 1, "step": 10 * epoch + 10, "loss": 1.0} for epoch in range(epochs)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if results is not None:
        (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_runs_with_their_figures_the_last_first(tmp_path):
    figure = {"value": 0.5, "low": 0.4, "high": 0.6}
    finished = _run(tmp_path / "a", 4, {"test": {"trained": {"recall@1": figure}}, "seconds": 7.0})
    stopped = _run(tmp_path / "deeper" / "b", 2)
    running = _run(tmp_path / "c", 3)
    corrupt = _run(tmp_path / "d", 1)
    (corrupt / "recipe.toml").write_text("= nothing")
    (running / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    (stopped / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": "another machine"}))
    for age, run in enumerate((finished / "results.json", stopped / "recipe.toml", running / "recipe.toml")):
        os.utime(run, (1e9 - age, 1e9 - age))
    os.utime(corrupt / "recipe.toml", (1, 1))
    runs = run_list.list_runs(tmp_path)
    assert [run["run"] for run in runs] == list(map(str, (finished, stopped, running, corrupt)))
    states = [run["state"] for run in runs]
    assert states[:3] == [
        "finished",
        f"stopped at epoch 2 of 4; nearkin train --resume {stopped}",
        "running, epoch 3 of 4",
    ]
    assert states[3].startswith("cannot be read: ")
    assert runs[0]["test"] == {"recall@1": figure}
    assert (runs[0]["source"], runs[0]["encoder"], runs[0]["loss"]) == ("photos", "small-cnn", "triplet")


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a folder; runs are written into runs/"):
        run_list.list_runs(tmp_path / "none")
