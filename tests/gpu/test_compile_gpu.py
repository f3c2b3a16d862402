"""Compiled losses on a GPU equal eager ones there, kernels or not: values and every gradient."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import test_compile as judge
from cases import DIM
from test_contract import value_and_gradients

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    *judge.pytestmark,
]
every = pytest.mark.parametrize("case", judge.COMPILED, ids=str)


def compiled_and_eager(case, backend, dynamic=None, sizes=(19,)):
    torch._dynamo.reset()
    eager, module = case.build(torch.float32).cuda(), case.build(torch.float32).cuda()
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in sizes:
        for x, labels in judge.batches(case, rows=rows):
            x, labels = x.cuda(), labels.cuda()
            yield value_and_gradients(compiled, module, x, labels), value_and_gradients(eager, eager, x, labels)


@every
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_equals_eager(case, backend):
    for got, expected in compiled_and_eager(case, backend):
        judge.assert_close(got, expected, 1e-5)


@every
def test_any_number_of_rows(case):
    for got, expected in compiled_and_eager(case, "aot_eager", True, (19, 26, 7)):
        judge.assert_close(got, expected, 1e-5)


@pytest.mark.parametrize("case", [c for c in judge.COMPILED if "-" not in c.name], ids=str)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_encoder_and_loss_in_one_graph_under_autocast(case, kind):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, DIM)).cuda()
        loss = case.build(torch.float32).cuda()

        def step(x, labels, encoder=encoder, loss=loss):
            with torch.autocast("cuda", dtype=kind):
                return loss(encoder(x), labels)

        step = torch.compile(step, fullgraph=True) if compiled else step
        labels = next(judge.batches(case))[1].cuda()
        value = step(torch.randn(19, 5, device="cuda"), labels)
        value.backward()
        results.append((value.detach(), [p.grad for p in (*encoder.parameters(), *loss.parameters())]))
    # A compiler leaves out roundings of the encoder that eager mode makes: by those the two may differ.
    judge.assert_close(results[1], results[0], 5e-2)
    assert bool(results[1][1][0].any())
