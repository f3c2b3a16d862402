"""Steps as graphs, as far as a CPU shows it: a graph that repeats its function on its own tensors."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nearkin.training.config.registry import LOSSES
from nearkin.training.cuda_graphs import WARMUP, GraphedStep

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import graph_runs

SLOW = {"facility-location"}
CASES = {name: [f"loss.name={name}"] for name in LOSSES if name not in SLOW} | {
    name: sets for name, sets in graph_runs.VARIANTS.items() if "fp16" not in name
}


@pytest.fixture
def replays(monkeypatch):
    """How often a graph was replayed."""
    counted = []

    def record(self, inputs):
        def replay():
            counted.append(1)
            return self._step_in_place(*inputs)

        return replay

    monkeypatch.setattr(GraphedStep, "_record", record)
    return counted


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    graph_runs.write_sources(folder)
    return folder


def trainer_of(folder, sets, graphs):
    source = "targets.npz" if "loss.name=logratio" in sets else "vectors.npz"
    trainer = graph_runs.trainer_of(folder, ["training.device=cpu", *sets], "false", source)
    if graphs:
        trainer.graphed_step = trainer._step_graph()
    return trainer


@pytest.mark.parametrize("name", CASES)
def test_a_replayed_step_is_a_step(name, sources, replays):
    losses, states = {}, {}
    for graphs in (False, True):  # one after the other: assembling seeds the generators that a loss may draw from
        trainer = trainer_of(sources, CASES[name], graphs)
        losses[graphs] = graph_runs.advance(trainer, 8)
        states[graphs], _ = graph_runs.state_of(trainer)
    assert losses[True] == losses[False]
    assert len(replays) == 8 - WARMUP and not trainer.notes
    assert not graph_runs.differences(states[False], states[True])
