"""Losses over class weights on a GPU: the loops' numbers in every type, the same whole, in blocks and in a graph.

Skipped where there is no GPU.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import LOSSES
from test_contract import assert_same, twin_of, value_and_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
every = pytest.mark.parametrize("case", [case for case in LOSSES if not case.pairs], ids=str)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_loop(case, dtype):
    module = case.build(torch.float32)
    x, labels = case.batch(dtype)
    wanted = twin_of(case, module.cpu(), x, labels)
    module.cuda()
    value, gradients = value_and_gradients(module, module, x.cuda(), labels.cuda())
    assert_same((value.cpu(), [g.cpu() for g in gradients]), wanted, 2e-5 if dtype == torch.float32 else 2e-2)


@every
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of learned tensors, first used on the side
def test_in_a_graph(case):
    module = case.build(torch.float32).eval()
    x, labels = case.batch(torch.float32)
    module, x, labels = module.cuda(), x.cuda().requires_grad_(), labels.cuda()
    if "Facility" in case.name:
        pytest.skip("its search waits for the distances")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = None
            module(x, labels).backward()
    torch.cuda.synchronize()
    wanted = value_and_gradients(module, module, x.detach(), labels)
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    module.zero_grad()
    with torch.cuda.graph(graph):
        value = module(x, labels)
        value.backward()
    graph.replay()
    assert_same((value.detach(), [x.grad]), (wanted[0].double(), wanted[1][:1]), 1e-5)
