"""A pair loss of the reader's own: one class of settings and a formula gets everything that ours have."""

import inspect
import math

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from cases import masks
from nearkin import losses, memory, relations
from nearkin.core import blockwise, reduce
from nearkin.losses.engine import PairLoss, function_of
from nearkin.losses.settings import setting


class SoftContrastiveLoss(PairLoss):
    """Positives within the margin, negatives beyond it, each pair softly.

    l_i = mean_p log(1 + e^{b (D_ip - m)}) / b  +  mean_n log(1 + e^{b (m - D_in)}) / b,   D = Euclidean distance

    Anchors without positives or without negatives do not count.
    """

    measure = "distance"

    margin: float = setting(default=1.0, at_least=0, kw_only=False, text="m, where both kinds of pairs cost the same")
    sharpness: float = setting(default=10.0, above=0, text="b, how hard the edge is")

    def rows(self, rows):
        gap = self.sharpness * (rows.all() - self.margin)
        near, far = (reduce.mean(reduce.softplus(v), m) for v, m in ((gap, rows.positive), (-gap, rows.negative)))
        return (near + far) / self.sharpness, rows.positive.any(1) & rows.negative.any(1)


class ScaledLoss(PairLoss):
    """The mean cosine of positives, times a scale that is learned, read by the formula itself.

    l_i = -e^t mean_p s_ip
    """

    def make(self):
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def rows(self, rows):
        return -self.log_scale.exp() * reduce.mean(rows.all(), rows.positive), rows.positive.any(1)


soft_contrastive_loss = function_of(SoftContrastiveLoss, "soft_contrastive_loss")


def loop(x, positive, negative, others=None, margin=1.0, sharpness=10.0):
    """The formula by a loop over pairs, in float64."""
    others, costs = x if others is None else others, []
    for i in range(len(x)):
        near, far = ([(x[i] - others[j]).norm() for j in mask[i].nonzero()[:, 0]] for mask in (positive, negative))
        if near and far:
            pull = sum((1 + (sharpness * (d - margin)).exp()).log() for d in near) / len(near)
            push = sum((1 + (sharpness * (margin - d)).exp()).log() for d in far) / len(far)
            costs.append((pull + push) / sharpness)
    return sum(costs) / max(len(costs), 1)


def batch(rows=13, dim=5):
    g = torch.Generator().manual_seed(2)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 3, 1, -1, 2, 0, 1])[:rows]
    return torch.randn(rows, dim, generator=g, dtype=torch.float64).requires_grad_(), labels


def gradient(value, *inputs):
    return [value.detach(), *torch.autograd.grad(value, inputs)]


def assert_same(got, wanted, tolerance=1e-12):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def in_blocks(x, others=None, rows=3):
    others = x if others is None else others
    return (len(x) + len(others)) * x.shape[1] * blockwise.ROW + rows * len(others) * blockwise.PAIR * 2


def test_value_and_gradient_are_the_loop_s_alone_and_against_references():
    x, labels = batch()
    assert_same(gradient(SoftContrastiveLoss()(x, labels), x), gradient(loop(x, *masks(labels)), x))
    others, their = (x[:7] + 0.5).detach().requires_grad_(), labels[:7].flip(0)
    wanted = gradient(loop(x, *masks(labels, their), others), x, others)
    assert_same(gradient(SoftContrastiveLoss()(x, labels, others, their), x, others), wanted)
    relation = relations.Relation(*masks(labels, their))
    assert_same(gradient(SoftContrastiveLoss()(x, relation, others), x, others), wanted)


@pytest.mark.parametrize("reduction", ["mean", "active", "sum", "none"])
@pytest.mark.parametrize("make", [SoftContrastiveLoss, ScaledLoss])
def test_blocks_are_one_piece_to_the_second_derivative(make, reduction):
    x, labels = batch()
    found = []
    for most in (None, in_blocks(x)):
        loss = make(reduction=reduction, max_memory=most).double()
        inputs = (x, *loss.parameters())
        [*slopes] = torch.autograd.grad(loss(x, labels).sum(), inputs, create_graph=True)
        size = sum(slope.square().sum() for slope in slopes)
        found.append([loss(x, labels), *slopes, *torch.autograd.grad(size, inputs)])
    assert_same(*found, 1e-10)


def test_derivatives():
    x, labels = batch()
    loss = SoftContrastiveLoss(0.8, sharpness=3.0)
    assert gradcheck(lambda y: loss(y, labels), x) and gradgradcheck(lambda y: loss(y, labels), x)


def test_function_help_and_checks_come_from_the_class():
    x, labels = batch()
    assert torch.equal(soft_contrastive_loss(x, labels, margin=0.4), SoftContrastiveLoss(0.4)(x, labels))
    parameters = inspect.signature(soft_contrastive_loss).parameters
    assert [*parameters][:4] == ["embeddings", "labels", "references", "reference_labels"]
    assert parameters["sharpness"].default == 10.0 and parameters["sharpness"].annotation is float
    assert "sharpness=10.0: b, how hard the edge is" in inspect.getdoc(SoftContrastiveLoss)
    loss = SoftContrastiveLoss()
    with pytest.raises(ValueError, match="sharpness must be > 0, got -1"):
        loss.sharpness = -1
    with pytest.raises(TypeError, match='unknown setting "margn"; did you mean "margin"'):
        soft_contrastive_loss(x, labels, margn=1)
    with pytest.raises(TypeError, match="SoftContrastiveLoss takes 1 settings by their place"):
        SoftContrastiveLoss(1.0, 2.0)
    with pytest.raises(TypeError, match="margin of SoftContrastiveLoss is given twice"):
        SoftContrastiveLoss(1.0, margin=2.0)
    assert repr(loss) == "SoftContrastiveLoss(margin=1.0, sharpness=10.0, reduction='mean')"


def test_around_it_goes_what_goes_around_the_library_s_losses():
    x, labels = batch()
    kept = memory.CrossBatchMemory(SoftContrastiveLoss(), 8, 5)
    first, second = (kept(x.float(), labels) for _ in range(2))
    assert not torch.equal(first, second) and bool(second.isfinite())
    lengths = losses.MatryoshkaLoss(SoftContrastiveLoss(), [5, 2], normalize=False)
    wanted = SoftContrastiveLoss()(x, labels) + SoftContrastiveLoss()(x[:, :2], labels)
    torch.testing.assert_close(lengths(x, labels), wanted)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_single_classes_and_what_is_not_finite(kind):
    x, labels = batch()
    x = x.detach().to(kind)
    value = SoftContrastiveLoss()(x, labels)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), loop(x.double(), *masks(labels)), rtol=1e-5, atol=1e-5)
    assert float(SoftContrastiveLoss()(x, torch.arange(13))) == 0
    x[3, 1] = math.inf
    assert bool(SoftContrastiveLoss()(x, labels).isnan())


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("most", [None, "blocks"])
def test_compiled_whole_and_in_blocks(device, most):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    torch._dynamo.reset()
    x, labels = batch()
    x, labels = x.detach().to(device).requires_grad_(), labels.to(device)
    loss = SoftContrastiveLoss(max_memory=None if most is None else in_blocks(x))
    wanted = gradient(loss(x, labels), x)
    loss.compile(fullgraph=True)
    assert_same(gradient(loss(x, labels), x), wanted, 1e-10)
