"""Training through CUDA graphs: the numbers are those without. Skipped where there is no CUDA device."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import graph_runs
from nearkin import models, training
from nearkin.losses import SphereFaceLoss
from nearkin.training.config.recipe import read
from nearkin.training.config.registry import LOSSES
from nearkin.training.cuda_graphs import WARMUP, GraphedEncoder, GraphedStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def step(encode, encoder, images):
    encoder.zero_grad(set_to_none=True)
    embeddings = encode(images)
    (embeddings.float() * torch.linspace(-1, 1, embeddings.shape[1], device="cuda")).sum().backward()
    return embeddings.detach().clone(), [p.grad.clone() for p in encoder.parameters() if p.grad is not None]


def same(a, b, tolerance):
    return all((x - y).abs().max() <= tolerance * y.abs().max() + 1e-7 for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_graphs_give_what_the_encoder_gives(precision):
    torch.manual_seed(0)
    plain = models.build("small-cnn", dim=16, channels=1, size=32).cuda().train()
    other = copy.deepcopy(plain)
    graphed = GraphedEncoder(other, precision)

    def encode(images):
        with torch.autocast("cuda", precision, enabled=precision is not None):
            return plain(images)

    for frozen in (False, False, True, False):  # what learns changes: captured anew
        plain.freeze_backbone(frozen), other.freeze_backbone(frozen)
        images = torch.rand(24, 1, 32, 32, device="cuda")
        result, expected = step(graphed, other, images), step(encode, plain, images)
        tolerance = 1e-4 if precision is None else 3e-2
        assert same([result[0]], [expected[0]], tolerance) and len(result[1]) == len(expected[1])
        assert same(result[1], expected[1], tolerance)
        for ours, theirs in zip(other.buffers(), plain.buffers(), strict=True):  # running statistics moved once
            assert torch.allclose(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


def test_graphs_see_weights_that_moved_and_other_shapes():
    torch.manual_seed(0)
    encoder = models.build("small-cnn", dim=16, channels=1, size=32).cuda().train()
    graphed = GraphedEncoder(encoder, None)
    images = torch.rand(8, 1, 32, 32, device="cuda")
    before = graphed(images).detach().clone()
    with torch.no_grad():
        encoder.head.projection.weight.mul_(-1)
        encoder.head.projection.bias.mul_(-1)
    assert torch.allclose(graphed(images), -before, atol=1e-5)
    assert graphed(torch.rand(5, 1, 32, 32, device="cuda")).shape == (5, 16)


# --- whole steps

CASES = {name: [f"loss.name={name}"] for name in LOSSES} | graph_runs.VARIANTS
STEPS = 50


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    graph_runs.write_sources(folder)
    return folder


def run(folder, sets, graphs, steps=STEPS):
    source = "targets.npz" if "loss.name=logratio" in sets else "vectors.npz"
    trainer = graph_runs.trainer_of(folder, sets, graphs, source)
    return trainer, graph_runs.advance(trainer, steps)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_same_digit_for_digit(name, sources):
    plain, expected = run(sources, CASES[name], "false")
    graphed, losses = run(sources, CASES[name], "true")
    assert losses == expected
    assert not graph_runs.differences(graph_runs.state_of(plain)[0], graph_runs.state_of(graphed)[0])
    if name == "facility-location":  # searches on the host
        [note] = graphed.notes
        assert graphed.graphed_step is None and "facility.py" in note and "waits for the device" in note
        return
    assert graphed.graphed_step._replay is not None and not graphed.notes  # captured, every other one


@pytest.mark.parametrize(
    ("name", "cut"),
    [("arcface", 1), ("arcface", 11)]
    + [(name, WARMUP + 2) for name in ("margin", "adaface", "supcon, memory", "sgd", "rmsprop", "clip, ema", "fp16")],
)
def test_runs_resume_to_the_last_bit_with_and_without_graphs(name, cut, sources, tmp_path):
    """Stopped after `cut` steps with graphs, resumed without, and the reverse; and with graphs both times."""
    _, expected = run(sources, CASES[name], "true", 20)
    for first, second in (("true", "false"), ("false", "true"), ("true", "true")):
        make_first, make_second = (
            partial(graph_runs.trainer_of, sources, CASES[name], graphs) for graphs in (first, second)
        )
        assert graph_runs.interrupted(make_first, make_second, cut, 20, tmp_path / f"{first}-{second}") == expected


def test_pictures_give_the_same_weights_and_figures(tmp_path):
    """The whole of a training, with the batch norm and the frozen epochs of an encoder, and its test."""
    from PIL import Image

    pixels = torch.randint(0, 256, (24, 8, 20, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for label, images in enumerate(pixels):
        (tmp_path / "photos" / str(label)).mkdir(parents=True)
        for i, image in enumerate(images):
            Image.fromarray(image.numpy()).save(tmp_path / "photos" / str(label) / f"{i}.png")
    sets = [f"data.source={tmp_path / 'photos'}", "encoder.name=small-cnn", "encoder.width=8", "data.size=16"]
    sets += ["encoder.dim=8", "sampler.batch=16", "training.epochs=3", "training.batches=9", "schedule.frozen_epochs=1"]
    sets += ["loss.name=arcface", "training.device=cuda", "training.log_steps=2", "training.on_collapse=warn"]
    outcomes = [
        training.train(read(None, [*sets, f"training.graphs={graphs}"]), tmp_path / graphs)
        for graphs in ("false", "encoder", "true")
    ]
    keys = ("loss", "gradient", "lr", "val")
    lines = [[[line.get(key) for key in keys] for line in outcome.history] for outcome in outcomes]
    assert lines[0] == lines[2] and torch.equal(outcomes[0].embeddings, outcomes[2].embeddings)
    assert not any("CUDA graph" in note for note in outcomes[2].notes)


def test_batches_of_other_shapes_are_run_between_those_of_the_graph():
    """A loss that counts its steps in a buffer, dropout, an optimiser: each goes on from where the other ended."""

    def losses(graphs):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4)).cuda()
        loss = SphereFaceLoss(3, 4).cuda()
        parameters = [*net.parameters(), *loss.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=True)

        def step(x, labels):
            value = loss(net(x), labels)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return (value.detach(),)

        graphed = GraphedStep(step, [net, loss])
        values = []
        for rows in [6] * (WARMUP + 2) + [5, 6, 1, 6, 6]:
            x, labels = torch.linspace(-1, 1, 8 * rows, device="cuda").view(rows, 8), torch.arange(rows).cuda() % 3
            values.append((graphed if graphs else step)(x, labels)[0].clone())
        assert (graphed._replay is not None) == graphs
        return [*torch.stack(values).tolist(), int(loss.steps)]

    assert losses(True) == losses(False)


def test_a_failed_capture_leaves_no_trace():
    """What a graph cannot do ends the graph, not the training: digits, random numbers and later captures are intact."""

    def losses(fault):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4)).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), fused=True, capturable=True)

        def step(x):
            optimizer.zero_grad(set_to_none=True)
            value = net(x).square().mean()
            if fault == "waits" or (fault == "waits at the capture" and torch.cuda.is_current_stream_capturing()):
                value.item()
            if fault == "raises" and torch.cuda.is_current_stream_capturing():
                raise KeyError("nothing")
            value.backward()
            optimizer.step()
            return (value.detach(),)

        graphed = GraphedStep(step, [net])
        values = [graphed(torch.full((6, 8), float(i), device="cuda"))[0].clone() for i in range(WARMUP + 4)]
        assert graphed.reason is None if fault is None else reasons[fault] in graphed.reason
        return torch.stack(values).tolist()

    reasons = {"waits": "waits for the device", "raises": "nothing", "waits at the capture": "captur"}
    expected = losses(None)
    for fault in (*reasons, None):
        assert losses(fault) == expected, fault
