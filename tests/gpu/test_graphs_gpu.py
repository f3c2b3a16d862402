"""Training through CUDA graphs: the numbers are the encoder's own. Skipped where there is no CUDA device."""

import copy

import pytest
import torch

from nearkin import models
from nearkin.training.cuda_graphs import Graphed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def step(encode, encoder, seen):
    encoder.zero_grad(set_to_none=True)
    embeddings = encode(seen)
    (embeddings.float() * torch.linspace(-1, 1, embeddings.shape[1], device="cuda")).sum().backward()
    return embeddings.detach().clone(), [p.grad.clone() for p in encoder.parameters() if p.grad is not None]


def same(a, b, tolerance):
    return all((x - y).abs().max() <= tolerance * y.abs().max() + 1e-7 for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_graphs_give_what_the_encoder_gives(precision):
    torch.manual_seed(0)
    plain = models.build("small-cnn", dim=16, channels=1, size=32).cuda().train()
    other = copy.deepcopy(plain)
    graphed = Graphed(other, precision)

    def encode(seen):
        with torch.autocast("cuda", precision, enabled=precision is not None):
            return plain(seen)

    for frozen in (False, False, True, False):  # what learns changes: captured anew
        plain.freeze_backbone(frozen), other.freeze_backbone(frozen)
        seen = torch.rand(24, 1, 32, 32, device="cuda")
        found, wanted = step(graphed, other, seen), step(encode, plain, seen)
        tolerance = 1e-4 if precision is None else 3e-2
        assert same([found[0]], [wanted[0]], tolerance) and len(found[1]) == len(wanted[1])
        assert same(found[1], wanted[1], tolerance)
        for mine, theirs in zip(other.buffers(), plain.buffers(), strict=True):  # running statistics moved once
            assert torch.allclose(mine.float(), theirs.float(), rtol=tolerance, atol=tolerance)


def test_graphs_see_weights_that_moved_and_other_shapes():
    torch.manual_seed(0)
    encoder = models.build("small-cnn", dim=16, channels=1, size=32).cuda().train()
    graphed = Graphed(encoder, None)
    seen = torch.rand(8, 1, 32, 32, device="cuda")
    before = graphed(seen).detach().clone()
    with torch.no_grad():
        encoder.head.projection.weight.mul_(-1)
        encoder.head.projection.bias.mul_(-1)
    assert torch.allclose(graphed(seen), -before, atol=1e-5)
    assert graphed(torch.rand(5, 1, 32, 32, device="cuda")).shape == (5, 16)
