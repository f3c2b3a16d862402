"""Training through CUDA graphs: the numbers are the encoder's own. Skipped where there is no CUDA device."""

import copy

import pytest
import torch

from nearkin import models
from nearkin.training.cuda_graphs import GraphedEncoder

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
