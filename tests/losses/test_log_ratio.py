"""Log-ratio of chosen anchors: every property of a loss, its dense triplets, its sampler."""

import pytest
import torch

import reference
from cases import Case, gaps
from loss_checks import every
from loss_checks.outcome import assert_same, room, run
from nearkin import losses, samplers
from nearkin.core.relations import LabelDistance

ITEMS, DIM, COLUMNS = 7, 5, 20


def loop(module, x, targets, references=None, others=None):
    """The float64 loop over the first anchors; a batch meets itself, less the pairs of an item with itself."""
    n = min(module.anchors, len(x))
    settings = {name: value for name, value in module.settings.items() if name != "anchors"}
    met = x if references is None else references
    return reference.logratio(x[:n], gaps(targets, others)[:n], met, **settings)


FEWER = dict.fromkeys(
    (
        *("order_and_layout_do_not_matter", "blocks_are_one_piece", "blocks_keep_nothing_whole"),
        "a_queue_may_move_on_before_the_gradient_comes_by",
    ),
    "anchors are the first rows alone: their number, not the batch's, makes blocks",
)
ANCHORED = [
    Case(
        f"LogRatioLoss-{n}-{ties}",
        lambda n=n, ties=ties: losses.LogRatioLoss(anchors=n, ties=ties),
        loop,
        True,
        True,
        skips=FEWER,
    )
    for n, ties in ((1, "drop"), (3, "keep"), (40, "drop"))
]


@pytest.mark.parametrize(("check", "case"), every(ANCHORED))
@pytest.mark.filterwarnings("ignore::UserWarning")  # of a compiler
def test_loss(check, case):
    check(case)


@pytest.mark.parametrize("anchors", [1, 3, 40])
def test_blocks_of_chosen_anchors_are_one_piece(anchors):
    """Targets of twenty numbers, alone and against references; the caller's own label distances stay as they are."""
    x, targets = batch()
    apart = torch.cdist(targets, targets) + torch.eye(ITEMS, dtype=torch.float64)  # its diagonal is not heard
    for others in ((targets,), (LabelDistance(apart),), (targets, x[:5] + 0.3, targets[:5] + 0.1)):
        whole = losses.LogRatioLoss(anchors=anchors)
        blocks = losses.LogRatioLoss(anchors=anchors, max_memory=room(1, x, *others[1:2]))
        assert_same(run(blocks, blocks, x, *others), run(whole, whole, x, *others), 1e-12)
    assert bool((apart.diagonal() == 1).all())
    assert float(whole(x, targets)) == pytest.approx(float(whole(x, LabelDistance(apart))), rel=1e-12)


def batch(items=ITEMS):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(items, n, generator=g, dtype=torch.float64) for n in (DIM, COLUMNS)]


def test_one_anchor_is_every_pair_of_the_others():
    """The paper's dense triplet mining, written out: the anchor, and any two of the others in label order."""
    x, targets = batch()
    away, apart = (x[0] - x).square().sum(1), (targets[0] - targets).square().sum(1)
    pairs = [(i, j) for i in range(1, ITEMS) for j in range(1, ITEMS) if apart[i] < apart[j]]
    terms = [((away[i] / away[j]).log() - (apart[i] / apart[j]).log()) ** 2 for i, j in pairs]
    wanted = torch.stack(terms).mean()
    torch.testing.assert_close(losses.logratio_loss(x, targets, anchors=1, epsilon=1e-12), wanted, rtol=1e-8, atol=0)


@pytest.mark.parametrize("anchors, sentence", [(0, "anchors must be >= 1, got 0"), (1.5, "a whole number, got 1.5")])
def test_bad_anchors_are_one_sentence(anchors, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        losses.LogRatioLoss(anchors=anchors)


def test_sampler_and_loss_agree_on_who_is_an_anchor():
    """Every anchor of the loss meets its five nearest labels: what dense triplet mining is for."""
    _, targets = batch(400)
    sampler = samplers.LabelNeighbours(targets, 60, 5, anchors=10)
    for index in range(5):
        rows = torch.tensor(sampler.batch(0, index))
        apart = torch.cdist(targets[rows[:10]], targets)
        nearest = apart.argsort(1)[:, 1:6]
        assert bool(torch.isin(nearest, rows).all())
