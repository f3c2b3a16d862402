"""Steps as graphs, as far as a CPU shows it: a "graph" that repeats its function on its own tensors."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import graph_runs
from nearkin.losses.engine import PairLoss
from nearkin.training import step, trainer
from nearkin.training.checkpoint import state as checkpoint_state
from nearkin.training.config.registry import LOSSES
from nearkin.training.cuda_graphs import WARMUP, GraphedStep

CASES = {name: [f"loss.name={name}"] for name in LOSSES} | {
    name: sets for name, sets in graph_runs.VARIANTS.items() if "fp16" not in name
}
STEPS = 8


@pytest.fixture
def replays(monkeypatch):
    """Counts replays."""
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


def trainer_of(folder, sets, graphs=True):
    source = "targets.npz" if "loss.name=logratio" in sets else "vectors.npz"
    made = graph_runs.trainer_of(folder, ["training.device=cpu", *sets], "false", source)
    if graphs:
        made.graphed_step = step.graphed(made)
    return made


def expected(folder, sets, steps=STEPS):
    plain = trainer_of(folder, sets, graphs=False)
    losses = graph_runs.advance(plain, steps)
    return losses, graph_runs.state_of(plain)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_replayed_step_is_a_step(name, sources, replays):
    losses, state = expected(sources, CASES[name])
    graphed = trainer_of(sources, CASES[name])
    graph_runs.advance(graphed, WARMUP)
    addresses = [buffer.data_ptr() for buffer in graphed.loss.buffers()]
    assert graph_runs.advance(graphed, STEPS - WARMUP) == losses[WARMUP:]
    assert len(replays) == STEPS - WARMUP and not graphed.notes
    assert not graph_runs.differences(state, graph_runs.state_of(graphed)[0])
    assert [buffer.data_ptr() for buffer in graphed.loss.buffers()] == addresses  # where a graph looks for them


def test_a_step_that_cannot_be_captured_goes_on_without_and_says_so_once(sources, monkeypatch):
    sets = ["loss.name=sphereface", "training.log_steps=2"]
    losses, state = expected(sources, sets)

    def record(self, inputs):
        raise RuntimeError("no such thing\nC++ stack") from None

    monkeypatch.setattr(GraphedStep, "_record", record)
    monkeypatch.setattr(trainer, "CAPTURABLE", ())
    graphed = trainer_of(sources, sets)
    assert graph_runs.advance(graphed, STEPS) == losses and graphed.graphed_step is None
    assert not graph_runs.differences(state, graph_runs.state_of(graphed)[0])
    sentence = "a step cannot be one CUDA graph, so nothing is: no such thing"
    assert graphed.notes == [sentence]
    embeddings = torch.randn(8, 16)
    assert sentence in graphed.log_line(None, embeddings)["notes"]
    graphed.notes, graphed.state.notes = [sentence], [sentence]  # resumed
    assert sentence not in graphed.log_line(None, embeddings)["notes"]


@pytest.mark.parametrize("name", ["sphereface", "margin", "supcon, memory", "sgd", "rmsprop", "clip, ema"])
@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_runs_resume_to_the_last_bit_with_and_without_graphs(name, first, second, sources, tmp_path, replays):
    losses, _ = expected(sources, CASES[name])
    makers = (partial(trainer_of, sources, CASES[name], graphs) for graphs in (first, second))
    assert graph_runs.interrupted(*makers, WARMUP + 1, STEPS, tmp_path / "checkpoints") == losses


class Counter(nn.Module):
    """Counts calls in a buffer that it replaces, and sums what it sees in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.calls = self.calls + 1
        self.total += x.sum()
        return (x.sum() * self.weight,)


def test_a_batch_of_another_shape_is_run_and_changes_the_same_buffers(replays):
    counter = Counter()
    graphed = GraphedStep(counter, [counter])
    with torch.no_grad():
        for i, size in enumerate([4] * (WARMUP + 2) + [3, 4, 4]):
            assert graphed(torch.full((size,), float(i)))[0] == size * i
            assert counter.calls == i + 1
    assert len(replays) == 4 and counter.total == 4 * sum(range(WARMUP + 2)) + 3 * 5 + 4 * 13


def test_a_change_of_what_learns_or_of_the_mode_is_captured_anew(replays):
    counter = Counter()
    graphed = GraphedStep(counter, [counter])
    x = torch.ones(2)
    changes = [lambda: None, lambda: counter.weight.requires_grad_(False), counter.eval, counter.double]
    for number, change in enumerate(changes):
        change()
        graphed.refresh()
        for _ in range(WARMUP + 1):
            graphed(x)
        graphed.refresh()  # nothing has changed since
        graphed(x)
        assert len(replays) == 2 * (number + 1)


def test_a_buffer_that_grows_ends_the_graph(replays):
    class Grows(Counter):
        def forward(self, x):
            self.total = torch.cat([self.total.reshape(-1), x])
            return (x.sum(),)

    counter = Grows()
    graphed = GraphedStep(counter, [counter])
    for _ in range(WARMUP + 2):
        graphed(torch.ones(2))
    assert not replays and graphed.reason == "buffer total of Grows changes its shape"
    assert len(counter.total) == 1 + 2 * (WARMUP + 2)


def test_a_step_that_raises_leaves_the_buffers_as_they_were(replays):
    counter = Counter()

    def fails(x):
        counter(x)
        raise RuntimeError("a fault")

    graphed, before = GraphedStep(fails, [counter]), counter.calls
    with pytest.raises(RuntimeError, match="a fault"):
        graphed(torch.ones(2))
    assert counter.calls is before


@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop"])
def test_checkpoints_fit_optimisers_that_compute_otherwise(name, sources):
    """Saved by one with flags of a GPU, loaded by one without: its own flags stay, and the next losses are equal."""
    sets = ["loss.name=arcface", f"optimizer.name={name}"]
    losses, _ = expected(sources, sets, 12)
    first = trainer_of(sources, sets, graphs=False)
    graph_runs.advance(first, 6)
    tensors, values = checkpoint_state.collect(first)
    for group in values["optimizer"]["groups"]:
        group |= {key: True for key in ("capturable", "fused") if key in group}

    class Tensors(dict):
        def names(self, prefix):
            return [key.removeprefix(f"{prefix}.") for key in self if key.startswith(f"{prefix}.")]

        def section(self, prefix):
            return {key: self[f"{prefix}.{key}"] for key in self.names(prefix)}

        def rows(self, key):
            return self[key].clone()

    second = trainer_of(sources, sets, graphs=False)
    checkpoint_state.restore(second, Tensors(tensors), values)
    assert not any(group.get("capturable") or group.get("fused") for group in second.optimizer.param_groups)
    assert graph_runs.advance(second, 6) == losses[6:]


def test_rates_on_the_device_are_those_of_the_schedule(sources):
    """An optimiser that reads its rates from tensors: CPU tensors stand for those of a device."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.1}])
    rates = step.DeviceRates(optimizer, torch.device("cpu"))
    for rate in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        rates.update()
        weight.grad = torch.ones(3)
        with rates.in_groups():
            assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(rate))
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == rate and isinstance(optimizer.param_groups[0]["lr"], float)
    assert np.allclose(weight.detach().numpy(), 0.25)


def test_fused_sgd_takes_weights_that_learn_later():
    """As unfrozen ones: torch's own fused step refuses a group of which some weights have momentum and some do not."""
    from nearkin.training.optimizers import _add_momentum

    ends = {}
    for fused in (False, True):
        weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
        optimizer = torch.optim.SGD(weights, lr=0.125, momentum=0.5, fused=fused)
        if fused:
            optimizer.register_step_pre_hook(_add_momentum)
        for learns in (1, 1, 2, 2):
            for weight in weights[:learns]:
                weight.grad = torch.full((3,), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        ends[fused] = torch.stack(weights).tolist()
    assert ends[True] == ends[False]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about tensors that are no leaves
@pytest.mark.parametrize("sets", [[], ["memory.size=32"], ["loss.matryoshka=[8,4]"], ["loss.name=arcface"]], ids=str)
def test_where_a_step_is_no_graph_the_pair_loss_is_compiled_and_named(sets, sources, monkeypatch):
    """On a GPU, as far as a CPU shows it: with a backend that only traces."""
    asked = []

    def compile(self, *how, **options):
        asked.append(type(self).__name__)
        engine_compile(self, backend="aot_eager")

    engine_compile = PairLoss.compile
    wanted = graph_runs.advance(trainer_of(sources, sets, graphs=False), 3)
    monkeypatch.setattr(PairLoss, "compile", compile)
    monkeypatch.setattr(trainer.Trainer, "compiles_loss", property(lambda self: self.graphed_step is None))
    torch._dynamo.reset()
    made = trainer_of(sources, sets, graphs=False)
    pair = "loss.name=arcface" not in sets
    assert asked == (["SupConLoss"] if pair else [])
    assert ("a step is no CUDA graph, so the loss is compiled: SupConLoss" in made.notes) == pair
    for a, b in zip(graph_runs.advance(made, 3), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_deterministic_or_cpu_run_compiles_nothing(sources):
    assert trainer_of(sources, [], graphs=False).compiles_loss is False
