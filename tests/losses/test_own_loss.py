"""A pair loss of the reader's own: one class of settings and a formula gets everything that ours have."""

import inspect

import pytest
import torch
from torch import nn

import reference
from cases import Case, pair_twin
from loss_checks import every
from nearkin.core import reduce
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


def soft_contrastive(x, positive, negative, references=None, *, margin, sharpness, reduction="mean"):
    """The formula by a loop over pairs."""
    d, terms = reference.distances(x, references), []
    for a in range(len(x)):
        near, far = reference.columns(positive, a), reference.columns(negative, a)
        pull = [(1 + (sharpness * (d[a][p] - margin)).exp()).log() for p in near]
        push = [(1 + (sharpness * (margin - d[a][n])).exp()).log() for n in far]
        terms.append([(reference.mean(pull) + reference.mean(push)) / sharpness] if near and far else [])
    return reference.reduced(x, terms, reduction)


def scaled(x, positive, negative, references=None, *, log_scale, reduction="mean"):
    s, terms = reference.table(reference.cosine, x, references), []
    for a in range(len(x)):
        kin = reference.columns(positive, a)
        terms.append([-log_scale.exp() * reference.mean([s[a][p] for p in kin])] if kin else [])
    return reference.reduced(x, terms, reduction)


OWN = [
    Case("SoftContrastiveLoss", lambda: SoftContrastiveLoss(0.8, sharpness=3.0), pair_twin(soft_contrastive), True),
    Case("ScaledLoss-learned", ScaledLoss, pair_twin(scaled), True),
]


@pytest.mark.parametrize(("check", "case"), every(OWN))
@pytest.mark.filterwarnings("ignore::UserWarning")  # of a compiler
def test_loss(check, case):
    check(case)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize(("check", "case"), every(OWN, on_gpu=True))
def test_loss_on_a_gpu(check, case):
    check(case)


def test_function_help_and_checks_come_from_the_class():
    x, labels = torch.randn(8, 5), torch.arange(8) // 2
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
