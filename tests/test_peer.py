"""Against pytorch-metric-learning 2.9 wherever the definitions agree once its options are set; where nothing makes them
agree, the difference is shown. `docs/migrating.md` says the same in words, and its code is run here."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path

import pytest
import torch
from pytorch_metric_learning import losses as peer
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from pytorch_metric_learning.miners import (
    BatchEasyHardMiner,
    BatchHardMiner,
    DistanceWeightedMiner,
    MultiSimilarityMiner,
    PairMarginMiner,
    TripletMarginMiner,
)
from pytorch_metric_learning.reducers import ClassWeightedReducer, MeanReducer, PerAnchorReducer, SumReducer
from pytorch_metric_learning.regularizers import LpRegularizer, SparseCentersRegularizer
from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_triplets
from torch import Tensor, nn
from torch.nn.functional import normalize

from nearkin import losses, memory, mining, relations
from nearkin.core import distances
from nearkin.core.relations import Relation

DIM, CLASSES = 6, 5
SIZES = {
    "even": [4, 4, 4, 4],
    "uneven": [2, 5, 1, 3, 4],  # one class has a single item
    "pairs": [2, 2, 2, 2, 2],
}
# What the peer calls our `weight`, and whether it keeps it the other way round; β has one name.
WEIGHTS = {"W": True, "proxies": False, "fc": True}
GUIDE = Path(__file__).parents[1] / "docs" / "migrating.md"

raw = partial(LpDistance, normalize_embeddings=False)
squared = partial(LpDistance, power=2)
size = (CLASSES, DIM)
named_size = {"num_classes": CLASSES, "embedding_size": DIM}


def batch(kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Items loosely around class means, in mixed order, with their labels."""
    g = torch.Generator().manual_seed(100 + seed)
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(SIZES[kind])])
    labels = labels[torch.randperm(len(labels), generator=g)]
    means = torch.randn(CLASSES, DIM, generator=g, dtype=torch.float64)
    return means[labels] + 0.9 * torch.randn(len(labels), DIM, generator=g, dtype=torch.float64), labels


def triplets(anchor: Tensor, positive: Tensor, negative: Tensor, rows: int) -> mining.Triplets:
    """The peer's three index tensors as T triplets an anchor."""
    anchor, order = anchor.sort(stable=True)
    count = anchor.bincount(minlength=rows)
    slot = torch.arange(len(anchor)) - (count.cumsum(0) - count)[anchor]
    columns = torch.zeros(2, rows, int(count.max()), dtype=torch.long)
    columns[:, anchor, slot] = torch.stack([positive, negative])[:, order]
    return mining.Triplets(*columns, torch.arange(columns.shape[2]) < count[:, None])


def all_triplets(distance: Tensor, relation: Relation) -> mining.Triplets:
    """Every triplet one by one, as the peer's triplet losses take them."""
    return triplets(
        *(relation.positive[:, :, None] & relation.negative[:, None, :]).nonzero(as_tuple=True), len(distance)
    )


@dataclass(frozen=True)
class Row:
    name: str
    ours: Callable[[], nn.Module]
    theirs: Callable[[], nn.Module]
    tolerance: float = 1e-10
    times: float = 1.0  # the peer's value is so many of ours
    miner: Callable[[], nn.Module] | None = None  # the peer's, for our selection
    batches: tuple[str, ...] = ("even", "uneven")
    references: bool = False  # agrees against references too

    def __str__(self) -> str:
        return self.name

    def build(self) -> tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor, bool]]]:
        """Both in float64; the parameters learned in both, ours copied into theirs."""
        torch.manual_seed(3)
        ours, theirs, shared = self.ours().double(), self.theirs().double(), []
        for name, mine in ours.named_parameters():
            their_name = next((k for k in WEIGHTS if hasattr(theirs, k)), name) if name == "weight" else name
            other, turned = getattr(theirs, their_name), WEIGHTS.get(their_name, False)
            if isinstance(other, nn.Parameter):
                other.data.copy_((mine.detach().T if turned else mine.detach()).reshape(other.shape))
                shared.append((mine, other, turned))
        assert len(shared) == len([*theirs.parameters()])
        return ours, theirs, shared


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Nowhere farther apart than `tolerance` of the largest entry."""
    ours, theirs = ours.detach().double(), theirs.detach().double().reshape(ours.shape)
    assert float((ours - theirs).abs().max()) <= tolerance * max(float(theirs.abs().max()), 1e-3)


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor], shared: list, tolerance: float) -> None:
    """Value, gradient by the inputs, gradient by the learned parameters."""
    assert ours.item() != 0
    assert_close(ours, theirs, tolerance)
    mine = torch.autograd.grad(ours, inputs + [a for a, _, _ in shared])
    other = torch.autograd.grad(theirs, inputs + [b for _, b, _ in shared])
    turned = [False] * len(inputs) + [turn for _, _, turn in shared]
    for a, b, turn in zip(mine, other, turned, strict=True):
        assert_close(a, b.T if turn else b, tolerance)


L, P = losses, peer
ROWS = [
    # The peer's default is linear, over active pairs, of unit vectors; ours halves the sum of the two means.
    Row(
        "Contrastive",
        lambda: L.ContrastiveLoss(squared=False, normalize=True, reduction="active"),
        lambda: P.ContrastiveLoss(),
        times=2,
        references=True,
    ),
    Row(
        "Contrastive-margins-raw-mean",
        lambda: L.ContrastiveLoss(2.5, positive_margin=0.4, squared=False),
        lambda: P.ContrastiveLoss(0.4, 2.5, distance=raw(), reducer=MeanReducer()),
        times=2,
        references=True,
    ),
    Row(
        "Contrastive-sum",
        lambda: L.ContrastiveLoss(squared=False, normalize=True, reduction="sum"),
        lambda: P.ContrastiveLoss(reducer=SumReducer()),
        times=2,
    ),
    Row(
        "Contrastive-batch-hard",
        lambda: L.ContrastiveLoss(squared=False, normalize=True, reduction="active", selection="batch_hard"),
        lambda: P.ContrastiveLoss(),
        times=2,
        miner=BatchHardMiner,
    ),
    Row(
        "Triplet",
        lambda: L.TripletLoss(0.05, squared=False, selection="all", reduction="active"),
        lambda: P.TripletMarginLoss(),
        references=True,
    ),
    Row(
        "Triplet-squared-mean",
        lambda: L.TripletLoss(selection="all"),
        lambda: P.TripletMarginLoss(0.2, distance=squared(), reducer=MeanReducer()),
        references=True,
    ),
    Row(
        "Triplet-batch-hard",
        lambda: L.TripletLoss(squared=False, selection="batch_hard"),
        lambda: P.TripletMarginLoss(0.2, reducer=MeanReducer()),
        miner=BatchHardMiner,
        references=True,
    ),
    Row(
        "Triplet-batch-hard-soft-raw",
        lambda: L.TripletLoss(None, squared=False, normalize=False, selection="batch_hard"),
        lambda: P.TripletMarginLoss(0, smooth_loss=True, distance=raw(), reducer=MeanReducer()),
        miner=lambda: BatchHardMiner(distance=raw()),
    ),
    Row(
        "Triplet-hard",
        lambda: L.TripletLoss(squared=False, selection="hard", reduction="active"),
        lambda: P.TripletMarginLoss(0.2),
        miner=lambda: BatchEasyHardMiner("all", "hard"),
        references=True,
    ),
    Row(
        "Triplet-hard-swap",
        lambda: L.TripletLoss(squared=False, selection="hard", swap=True),
        lambda: P.TripletMarginLoss(0.2, swap=True, reducer=MeanReducer()),
        miner=lambda: BatchEasyHardMiner("all", "hard"),
    ),
    Row(
        "Triplet-easy-positive-hard",
        lambda: L.TripletLoss(squared=False, selection=partial(mining.easy_positive, negative="hard")),
        lambda: P.TripletMarginLoss(0.2, reducer=MeanReducer()),
        miner=lambda: BatchEasyHardMiner("easy", "hard"),
    ),
    Row(
        "Triplet-inside-the-margin",
        lambda: L.TripletLoss(0.2, squared=False, selection="all", reduction="active"),
        lambda: P.TripletMarginLoss(0.2),
        miner=lambda: TripletMarginMiner(0.3, "all"),
        references=True,
    ),
    # 1 - cosine is half the squared distance of unit vectors.
    Row(
        "Triplet-cosine",
        lambda: L.TripletLoss(0.2, selection="all"),
        lambda: P.TripletMarginLoss(0.1, distance=CosineSimilarity(), reducer=MeanReducer()),
        times=0.5,
        references=True,
    ),
    Row("LiftedStructure", lambda: L.LiftedStructureLoss(), lambda: P.LiftedStructureLoss(distance=raw())),
    Row("LiftedStructure-unit", lambda: L.LiftedStructureLoss(normalize=True), lambda: P.LiftedStructureLoss()),
    Row(
        "LiftedStructure-positive-margin",
        lambda: L.LiftedStructureLoss(0.7, normalize=True),
        lambda: P.LiftedStructureLoss(neg_margin=1, pos_margin=0.3),
    ),
    Row(
        "NPair",
        lambda: L.NPairLoss(length_weight=0),
        lambda: P.NPairsLoss(distance=DotProductSimilarity(normalize_embeddings=False)),
        batches=("pairs",),
    ),
    Row(
        "NPair-penalty",
        lambda: L.NPairLoss(),
        lambda: P.NPairsLoss(
            distance=DotProductSimilarity(normalize_embeddings=False),
            embedding_regularizer=LpRegularizer(power=2),
            embedding_reg_weight=0.002 / 2,
        ),
        batches=("pairs",),
    ),
    Row(
        "Margin-batch-hard-fixed",
        lambda: L.MarginLoss(selection="batch_hard"),
        lambda: P.MarginLoss(),
        miner=BatchHardMiner,
        references=True,
    ),
    Row(
        "Margin-batch-hard-learned",
        lambda: L.MarginLoss(selection="batch_hard"),
        lambda: P.MarginLoss(learn_beta=True),
        miner=BatchHardMiner,
        references=True,
    ),
    Row(
        "Margin-every-triplet",
        lambda: L.MarginLoss(selection=all_triplets),
        lambda: P.MarginLoss(learn_beta=True),
        references=True,
    ),
    Row(
        "Margin-classes-nu",
        lambda: L.MarginLoss(num_classes=CLASSES, beta_weight=0.1, selection=all_triplets),
        lambda: P.MarginLoss(num_classes=CLASSES, nu=0.1, learn_beta=True),
    ),
    Row(
        "MultiSimilarity",
        lambda: L.MultiSimilarityLoss(),
        lambda: P.MultiSimilarityLoss(),
        miner=MultiSimilarityMiner,
        references=True,
    ),
    Row(
        "MultiSimilarity-all",
        lambda: L.MultiSimilarityLoss(selection="all"),
        lambda: P.MultiSimilarityLoss(),
        references=True,
    ),
    # torch's softplus, which the peer uses, is linear from 20 on: 2e-9 off.
    Row("Circle", lambda: L.CircleLoss(), lambda: P.CircleLoss(), tolerance=1e-8, references=True),
    Row(
        "Circle-active",
        lambda: L.CircleLoss(0.25, 256.0, reduction="active"),
        lambda: P.CircleLoss(0.25, 256),
        tolerance=1e-8,
    ),
    Row("SupCon", lambda: L.SupConLoss(), lambda: P.SupConLoss(), references=True),
    Row("InfoNCE", lambda: L.InfoNCELoss(), lambda: P.NTXentLoss(), references=True),
    Row("FastAP", lambda: L.FastAPLoss(), lambda: P.FastAPLoss()),
    Row("FastAP-bins", lambda: L.FastAPLoss(25), lambda: P.FastAPLoss(25)),
    Row("ProxyNCA", lambda: L.ProxyNCALoss(*size), lambda: P.ProxyNCALoss(*size, softmax_scale=9)),
    Row("ProxyNCA-unscaled", lambda: L.ProxyNCALoss(*size, scale=1.0), lambda: P.ProxyNCALoss(*size)),
    Row("ProxyAnchor", lambda: L.ProxyAnchorLoss(*size), lambda: P.ProxyAnchorLoss(*size)),
    Row("SoftTriple", lambda: L.SoftTripleLoss(*size, spread_weight=0), lambda: P.SoftTripleLoss(*size)),
    # Ours adds 1e-5 under the root of each distance between centres.
    Row(
        "SoftTriple-regularised",
        lambda: L.SoftTripleLoss(*size, centers_per_class=3),
        lambda: P.SoftTripleLoss(
            *size,
            centers_per_class=3,
            weight_regularizer=SparseCentersRegularizer(CLASSES, 3),
            weight_reg_weight=0.2,
        ),
        tolerance=1e-4,
    ),
    Row("NormalizedSoftmax", lambda: L.NormalizedSoftmaxLoss(*size), lambda: P.NormalizedSoftmaxLoss(*size)),
    Row("SphereFace", lambda: L.SphereFaceLoss(*size, start=0, floor=0), lambda: P.SphereFaceLoss(*size)),
    Row("SphereFace-3", lambda: L.SphereFaceLoss(*size, 3, start=0, floor=0), lambda: P.SphereFaceLoss(*size, 3)),
    Row("CosFace", lambda: L.CosFaceLoss(*size), lambda: P.CosFaceLoss(*size)),
    Row("ArcFace", lambda: L.ArcFaceLoss(*size), lambda: P.ArcFaceLoss(*size, margin=math.degrees(0.5))),
    Row("ArcFace-degrees", lambda: L.ArcFaceLoss(*size, margin=math.radians(28.6)), lambda: P.ArcFaceLoss(*size)),
    Row(
        "SubCenterArcFace",
        lambda: L.ArcFaceLoss(*size, sub_centers=3),
        lambda: P.SubCenterArcFaceLoss(**named_size, margin=math.degrees(0.5)),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_agrees(row):
    for kind in row.batches:
        for seed in range(3):
            x, labels = batch(kind, seed)
            x.requires_grad_()
            ours, theirs, shared = row.build()
            indices = row.miner()(x, labels) if row.miner else None
            value, wanted = row.times * ours(x, labels), theirs(x, labels, indices)
            assert_same(value, wanted, [x], shared, row.tolerance)


@pytest.mark.parametrize("row", [row for row in ROWS if row.references], ids=str)
def test_agrees_against_references(row):
    x, labels = batch("uneven")
    references, others = batch("uneven", 7)
    inputs = [x.requires_grad_(), references.requires_grad_()]
    ours, theirs, shared = row.build()
    indices = row.miner()(x, labels, references, others) if row.miner else None
    value = row.times * ours(x, labels, references, others)
    wanted = theirs(x, labels, indices, references, others)
    assert_same(value, wanted, inputs, shared, row.tolerance)


def test_agrees_beyond_the_margin():
    """Items nearly opposite their own class, where ArcFace goes on falling and SphereFace is in its last turn."""
    for name in ("ArcFace", "SubCenterArcFace", "SphereFace"):
        ours, theirs, shared = next(row for row in ROWS if row.name == name).build()
        labels = torch.arange(CLASSES)
        own = ours.weight.detach().view(CLASSES, -1, DIM).mean(1)
        x = (-own + 0.02 * torch.randn(CLASSES, DIM).double()).requires_grad_()
        assert_same(ours(x, labels), theirs(x, labels), [x], shared, 1e-10)


def test_smooth_ap_agrees_where_an_item_finds_itself():
    """The peer counts each item among its own positives, and reads only batches in order of class, as many classes as
    items per class, in float32."""
    x, _ = batch("even")
    x, labels = x.requires_grad_(), torch.arange(4).repeat_interleave(4)
    for temperature in (0.01, 0.1):
        value = losses.SmoothAPLoss(temperature)(x, labels, x.clone(), labels)
        assert_same(value, peer.SmoothAPLoss(temperature)(x, labels), [x], [], 1e-5)


def test_two_views_agree():
    a, b = batch("even")[0].requires_grad_(), batch("even", 1)[0].requires_grad_()
    ids = torch.arange(len(a))
    wrapped = peer.SelfSupervisedLoss(peer.NTXentLoss())(a, b)
    assert_same(losses.InfoNCELoss()(torch.cat([a, b]), ids.repeat(2)), wrapped, [a, b], [], 1e-10)
    wrapped = peer.SelfSupervisedLoss(peer.NTXentLoss(), symmetric=False)(a, b)
    assert_same(losses.InfoNCELoss()(a, ids, b, ids), wrapped, [a, b], [], 1e-10)


def test_vicreg_of_two_views_agrees():
    a, b = batch("even")[0].requires_grad_(), batch("even", 1)[0].requires_grad_()
    ids = torch.arange(len(a))
    for weights in ((25, 25, 1), (3, 5, 2)):
        ours, theirs = losses.VICRegLoss(*weights), peer.VICRegLoss(*weights)
        assert_same(ours(0.3 * a, ids, 0.3 * b, ids), theirs(0.3 * a, ref_emb=0.3 * b), [a, b], [], 1e-10)


def test_reducers_agree_with_reduction_none():
    x, labels = batch("uneven")
    ours, theirs, _ = next(row for row in ROWS if row.name == "CosFace").build()
    weights = torch.rand(CLASSES).double()
    each = losses.cosface_loss(x, labels, ours.weight, reduction="none")
    theirs.reducer = ClassWeightedReducer(weights)
    assert_close((weights[labels] * each).mean(), theirs(x, labels), 1e-10)
    for loss, other in ((losses.SupConLoss, peer.SupConLoss), (losses.CircleLoss, peer.CircleLoss)):
        each = loss(reduction="none")(x, labels)  # 0 for an anchor without positives
        assert_close(each.mean(), other(reducer=MeanReducer())(x, labels), 1e-10)
    each = losses.InfoNCELoss(reduction="none")(x, labels)
    relation = relations.of(labels).positive.sum(1).clamp(min=1)
    assert_close((each / relation).mean(), peer.NTXentLoss(reducer=PerAnchorReducer())(x, labels), 1e-10)


def test_sphereface_scale_is_the_length_of_the_embeddings():
    x, labels = batch("even")
    ours, theirs, _ = next(row for row in ROWS if row.name == "SphereFace").build()
    theirs.scale = 3
    assert_close(ours(3 * x, labels), theirs(x, labels), 1e-10)


# Miners


def rows_of(*columns: Tensor) -> set[tuple[int, ...]]:
    return {*zip(*map(Tensor.tolist, columns), strict=True)}


@pytest.mark.parametrize("kind", ["even", "uneven"])
@pytest.mark.parametrize(
    "miner, selection",
    [
        (BatchHardMiner(), mining.batch_hard),
        (BatchEasyHardMiner("all", "hard"), mining.hard),
        (BatchEasyHardMiner("easy", "hard"), partial(mining.easy_positive, negative="hard")),
    ],
    ids=["batch_hard", "hard", "easy_positive"],
)
def test_miners_choose_the_same_triplets(miner, selection, kind):
    for seed in range(3):
        x, labels = batch(kind, seed)
        chosen = miner(x, labels)
        if len(chosen) == 4:
            chosen = convert_to_triplets(chosen, labels)
        ours = selection(distances.euclidean(distances.unit(x)), relations.of(labels)).indices()
        assert rows_of(*ours) == rows_of(*chosen)


@pytest.mark.parametrize("kind", ["even", "uneven"])
def test_multi_similarity_miner_chooses_the_same_pairs(kind):
    x, labels = batch(kind)
    chosen = MultiSimilarityMiner(0.1)(x, labels)
    ours = mining.multi_similarity(1 - distances.cosine(x), relations.of(labels), epsilon=0.1)
    for mask, rows, columns in ((ours.positive, *chosen[:2]), (ours.negative, *chosen[2:])):
        assert torch.equal(mask, torch.zeros_like(mask).index_put((rows, columns), torch.tensor(True)))


def test_distance_weighted_miner_draws_from_the_same_weights():
    """How often each negative is drawn; an anchor with none nearer than 1.4 is dropped there and draws evenly here."""
    x, labels = batch("even")
    many, count = 4000, torch.zeros(2, len(x), len(x))
    anchor, _, negative = DistanceWeightedMiner()(x.repeat(many, 1), labels.repeat(many), x, labels)
    count[0].index_put_((anchor % len(x), negative), torch.ones(()), accumulate=True)
    near, relation = distances.euclidean(distances.unit(x)), relations.of(labels)
    often = Relation(*(mask.repeat(many, 1) for mask in relation[:2]))
    anchor, _, negative = mining.distance_weighted(near.repeat(many, 1), often, dim=DIM).indices()
    count[1].index_put_((anchor % len(x), negative), torch.ones(()), accumulate=True)
    reach = (relation.negative & (near < 1.4)).any(1)
    assert bool(reach.any()) and not bool(reach.all())
    theirs, ours = count / count.sum(2, keepdim=True)
    assert (theirs - ours)[reach].abs().max() < 0.03
    assert not count[0, ~reach].any()
    assert (ours - relation.negative / relation.negative.sum(1))[~reach].abs().max() < 0.03


def test_easy_positive_keeps_the_anchor_that_the_miner_drops():
    """No negative is farther than the nearest positive: dropped there; here the farthest negative stands in."""
    degrees = torch.tensor([0.0, 180.0, 60.0, 80.0]).deg2rad()
    x, labels = torch.stack([degrees.cos(), degrees.sin()], 1), torch.tensor([0, 0, 1, 1])
    anchor, positive, _, negative = BatchEasyHardMiner("easy", "semihard")(x, labels)
    theirs = rows_of(anchor, positive, negative)
    ours = rows_of(*mining.easy_positive(distances.euclidean(x), relations.of(labels)).indices())
    assert theirs == {(2, 3, 0), (3, 2, 0)}
    assert ours == {(0, 1, 3), (1, 0, 2), *theirs}
    x, labels = batch("even")
    anchor, positive, _, negative = BatchEasyHardMiner("easy", "semihard")(x, labels)
    ours = mining.easy_positive(distances.euclidean(distances.unit(x)), relations.of(labels)).indices()
    assert rows_of(*ours) == rows_of(anchor, positive, negative)


def test_semihard_takes_one_negative_where_the_miner_takes_all_inside_the_margin():
    x, labels = batch("even")
    near, relation = distances.euclidean(distances.unit(x)), relations.of(labels)
    ours = rows_of(*mining.semihard(near, relation, fallback="skip").indices())
    theirs = rows_of(*TripletMarginMiner(0.2, "semihard")(x, labels))
    assert {t[:2] for t in theirs} < {t[:2] for t in ours}  # ours: with the nearest, be it beyond the margin
    assert len(theirs) > len({t[:2] for t in theirs})  # theirs: several negatives a positive
    for pair in {t[:2] for t in theirs}:
        nearest = min((t for t in theirs if t[:2] == pair), key=lambda t: near[t[0], t[2]])
        assert nearest in ours


@pytest.mark.parametrize("kind", ["semihard", "hard", "all"])
def test_any_indices_tuple_becomes_a_selection_or_a_relation(kind):
    x, labels = batch("uneven")
    x.requires_grad_()
    chosen = TripletMarginMiner(0.2, kind)(x, labels)
    ours = losses.TripletLoss(
        squared=False, selection=lambda d, relation: triplets(*chosen, len(d)), reduction="active"
    )
    assert_same(ours(x, labels), peer.TripletMarginLoss(0.2)(x, labels, chosen), [x], [], 1e-10)
    pairs = PairMarginMiner(0.9, 1.1)(x, labels)
    mask = torch.zeros(len(x), len(x), dtype=torch.bool)
    relation = Relation(*(mask.index_put(pair, torch.tensor(True)) for pair in (pairs[:2], pairs[2:])))
    ours = losses.ContrastiveLoss(squared=False, normalize=True, reduction="active")
    assert_same(2 * ours(x, relation), peer.ContrastiveLoss()(x, labels, pairs), [x], [], 1e-10)


def test_indices_in_the_third_place_are_refused():
    x, labels = batch("even")
    with pytest.raises(TypeError, match="references must be a torch tensor, got tuple"):
        losses.TripletLoss()(x, labels, BatchHardMiner()(x, labels))


def test_a_miner_weighs_the_items_of_a_class_loss():
    x, labels = batch("even")
    ours, theirs, _ = next(row for row in ROWS if row.name == "CosFace").build()
    chosen = BatchHardMiner()(x, labels)
    count = torch.cat(chosen).bincount(minlength=len(x)).double()
    each = losses.cosface_loss(x, labels, ours.weight, reduction="none")
    assert_close((each * count / count.max()).mean(), theirs(x, labels, chosen), 1e-10)


# Where they differ


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (losses.ContrastiveLoss, peer.ContrastiveLoss),
        (losses.TripletLoss, peer.TripletMarginLoss),
        (losses.LiftedStructureLoss, peer.LiftedStructureLoss),
        (losses.NPairLoss, peer.NPairsLoss),
        (losses.MarginLoss, peer.MarginLoss),
        (losses.MultiSimilarityLoss, peer.MultiSimilarityLoss),
        (losses.SmoothAPLoss, peer.SmoothAPLoss),
        (partial(losses.ProxyNCALoss, *size), partial(peer.ProxyNCALoss, *size)),
        (partial(losses.SoftTripleLoss, *size), partial(peer.SoftTripleLoss, *size)),
        (partial(losses.SphereFaceLoss, *size), partial(peer.SphereFaceLoss, *size)),
        (partial(losses.ArcFaceLoss, *size), partial(peer.ArcFaceLoss, *size)),
    ],
)
def test_defaults_differ(ours, theirs):
    x, labels = batch("pairs")
    ours, theirs, _ = Row("defaults", ours, theirs).build()
    assert abs(ours(x, labels).item() - theirs(x, labels).item()) > 1e-4


def test_contrastive_is_linear_there_and_squared_here():
    x, labels = torch.tensor([[0.0, 0.0], [0.5, 0.0]]), torch.tensor([0, 1])
    assert peer.ContrastiveLoss(distance=raw())(x, labels).item() == 0.5  # margin - D
    assert peer.ContrastiveLoss(distance=raw(power=2))(x, labels).item() == 0.75  # margin - D²
    assert losses.ContrastiveLoss()(x, labels).item() == 0.25 / 2  # (margin - D)², halved


def test_npairs_there_is_blind_to_length_and_to_all_but_two_of_a_class():
    x, labels = batch("even")
    pairs, of_pairs = batch("pairs")
    assert_close(
        losses.NPairLoss(length_weight=0)(normalize(pairs), of_pairs), peer.NPairsLoss()(pairs, of_pairs), 1e-10
    )
    value = peer.NPairsLoss()(x, labels)
    assert_close(peer.NPairsLoss()(7 * x, labels), value, 1e-10)
    assert losses.NPairLoss()(7 * x, labels).item() > 2 * losses.NPairLoss()(x, labels).item()
    seen = []
    for loss in (peer.NPairsLoss(), losses.NPairLoss(length_weight=0)):
        (slope,) = torch.autograd.grad(loss(x.requires_grad_(), labels), x)
        seen.append(int(slope.any(1).sum()))
    assert seen == [8, 16]


def test_margin_all_means_every_triplet_there_and_every_pair_here():
    """Four classes of four: a positive pair stands in 12 triplets, a negative pair in 3."""
    x, labels = batch("even")
    relation = relations.of(labels)
    none = torch.zeros_like(relation.positive)
    pairs = partial(losses.margin_loss, beta=1.25, selection="all", reduction="sum")
    counted = 12 * pairs(x, Relation(relation.positive, none)) + 3 * pairs(x, Relation(none, relation.negative))
    assert_close(counted, peer.MarginLoss(beta=1.25, reducer=SumReducer())(x, labels), 1e-10)


def test_margin_nu_there_is_added_whole_or_not_at_all():
    x, labels = batch("even")
    bare = peer.MarginLoss()(x, labels).item()
    assert peer.MarginLoss(nu=0.1)(x, labels).item() == bare  # a fixed β is not penalised
    learned = peer.MarginLoss(nu=0.1, learn_beta=True).double()(x, labels).item()
    assert learned == pytest.approx(bare + 0.1 * 1.2)  # a single β: ν β, whatever the batch
    plain, penalised = (
        losses.MarginLoss(beta_weight=nu, selection=all_triplets).double()(x, labels) for nu in (0, 0.1)
    )
    assert plain.item() == pytest.approx(bare)
    assert penalised.item() > learned  # ours: ν β for each positive pair, over the active pairs
    assert not [*peer.MarginLoss().parameters()] and [*losses.MarginLoss().parameters()]


def test_smooth_ap_there_depends_on_the_order_of_the_batch():
    x, _ = batch("even")
    x, labels, order = x[:15], torch.arange(3).repeat_interleave(5), torch.randperm(15)
    one, other = (peer.SmoothAPLoss()(*b).item() for b in ((x, labels), (x[order], labels[order])))
    assert abs(one - other) > 0.01
    # Five of each of three classes in order: it should be what ours is with each item its own positive, and is not.
    assert abs(one - losses.SmoothAPLoss()(x, labels, x.clone(), labels).item()) > 0.01
    one, other = (losses.SmoothAPLoss()(*b).item() for b in ((x, labels), (x[order], labels[order])))
    assert one == pytest.approx(other)


@pytest.mark.parametrize("name", ["lifted", "swap"])
def test_order_of_references_matters_there(name):
    """Rows of the batch are looked up by the number of a reference."""
    x, labels = batch("even")
    references, others = batch("even", 5)
    order = torch.randperm(len(others))
    if name == "lifted":
        theirs, miner, ours = peer.LiftedStructureLoss(), None, losses.LiftedStructureLoss(normalize=True)
    else:
        theirs, miner = peer.TripletMarginLoss(0.2, swap=True, reducer=MeanReducer()), BatchHardMiner()
        ours = losses.TripletLoss(squared=False, swap=True, selection="batch_hard")
    values = []
    for r, y in ((references, others), (references[order], others[order])):
        indices = miner(x, labels, r, y) if miner else None
        values.append((theirs(x, labels, indices, r, y).item(), ours(x, labels, r, y).item()))
    assert abs(values[0][0] - values[1][0]) > 1e-3
    assert values[0][1] == pytest.approx(values[1][1])


def test_proxy_nca_there_drops_the_hardest_item():
    """The first item stands by another's proxy, opposite its own: the true loss is 32 · 4."""
    labels = torch.tensor([0, 0])
    for loss, value, learns in (
        (peer.ProxyNCALoss(2, 2, softmax_scale=32), 0, [False, False]),
        (losses.ProxyNCALoss(2, 2, scale=32**0.5), 64, [True, False]),
    ):
        (proxies,) = loss.parameters()
        proxies.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        x = torch.tensor([[-1.0, 0.02], [1.0, 0.02]]).requires_grad_()
        got = loss(x, labels)
        got.backward()
        assert got.item() == pytest.approx(value, rel=1e-3)
        assert (x.grad.abs().amax(1) > 1e-3).tolist() == learns


def test_ntxent_there_is_capped_by_underflow():
    """A positive opposite and a negative near, temperature 0.01: the true loss is 200, float32 runs out at e^-87."""
    x, r = torch.tensor([[1.0, 0.02]]), torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    labels, others = torch.tensor([0]), torch.tensor([0, 1])
    assert peer.NTXentLoss(0.01)(x, labels, None, r, others).item() < 88
    assert losses.InfoNCELoss(0.01)(x, labels, r, others).item() == pytest.approx(200, rel=1e-3)


# From torch 2.15 on a clamp has no slope at its bounds, which hides the next two.
CLAMP_HAS_SLOPES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)


def test_arcface_there_is_nan_where_an_item_stands_on_its_class():
    labels = torch.arange(3)
    theirs, ours = peer.ArcFaceLoss(3, 4, scale=8), losses.ArcFaceLoss(3, 4, scale=8.0)
    ours.weight.data, theirs.W.data = torch.eye(3, 4), torch.eye(4, 3)
    for loss, finite in ((theirs, False), (ours, True)):
        x = torch.eye(3, 4).requires_grad_()
        slopes = torch.autograd.grad(loss(x, labels), (x, *loss.parameters()))
        if finite or CLAMP_HAS_SLOPES:
            assert all(bool(slope.isfinite().all()) == finite for slope in slopes)


def test_soft_triple_there_is_nan_where_two_centres_of_a_class_meet():
    x, labels = torch.randn(4, 6), torch.tensor([0, 0, 1, 1])
    regularizer = SparseCentersRegularizer(2, 2)
    theirs = peer.SoftTripleLoss(2, 6, centers_per_class=2, weight_regularizer=regularizer)
    ours = losses.SoftTripleLoss(2, 6, centers_per_class=2)
    ours.weight.data = torch.eye(2, 6).repeat_interleave(2, 0)
    theirs.fc.data = ours.weight.data.T.clone()
    for loss, finite in ((theirs, False), (ours, True)):
        (slope,) = torch.autograd.grad(loss(x, labels), [*loss.parameters()])
        if finite or CLAMP_HAS_SLOPES:
            assert bool(slope.isfinite().all()) == finite


def test_distance_weighted_there_starves_anchors():
    """512 dimensions and one near-duplicate of another class: only those two anchors are left."""
    x, labels = normalize(torch.randn(64, 512)), torch.arange(16).repeat_interleave(4)
    x[4] = normalize(x[0] + 0.01 * torch.randn(512), dim=0)
    anchors, _, _ = DistanceWeightedMiner()(x, labels)
    assert len(anchors.unique()) == 2
    chosen = mining.distance_weighted(distances.euclidean(x), relations.of(labels), dim=512)
    assert bool(chosen.valid.any(1).all())


def test_duplicates_are_apart_there():
    x = normalize(torch.randn(40, 64))
    x[20:] = x[:20]
    assert LpDistance()(x).diagonal(20).max() > 1e-4
    assert not distances.euclidean(x).diagonal(20).any()


def test_half_precision_embeddings_change_the_class_weights_there():
    x, labels = torch.randn(3, 6).bfloat16(), torch.arange(3)
    theirs, ours = peer.CosFaceLoss(3, 6), losses.CosFaceLoss(3, 6)
    assert theirs(x, labels).dtype == torch.bfloat16 and theirs.W.dtype == torch.bfloat16
    assert ours(x, labels).dtype == torch.float32 and ours.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["FastAPLoss", "SmoothAPLoss", "NPairLoss"])
def test_takes_references_which_are_refused_there(name):
    (x, labels), (references, others) = batch("even"), batch("even", 1)
    assert getattr(losses, name)()(x, labels, references, others).item() > 0
    theirs = getattr(peer, {"NPairLoss": "NPairsLoss"}.get(name, name))()
    with pytest.raises(ValueError, match="not supported"):
        theirs(x, labels, None, references, others)


def test_minus_one_is_a_class_there_and_unknown_here():
    x, labels = batch("even")
    unknown = labels.masked_fill(labels == 0, -1)
    assert peer.SupConLoss()(x, unknown).item() == peer.SupConLoss()(x, labels).item()
    left = losses.SupConLoss()(x[labels != 0], labels[labels != 0])
    assert losses.SupConLoss()(x, unknown).item() == pytest.approx(left.item())


def test_labels_are_not_moved_to_the_device():
    x, labels = torch.zeros(4, 6, device="meta"), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match="labels must be on the device of embeddings"):
        losses.SupConLoss()(x, labels)


def test_a_margin_in_degrees_is_refused():
    with pytest.raises(ValueError, match="radians"):
        losses.ArcFaceLoss(*size, margin=28.6)(*batch("even"))


def test_supcon_of_a_single_class_is_nothing_there():
    x = torch.randn(4, 6)
    assert peer.SupConLoss()(x, torch.zeros(4).long()).item() == 0
    assert losses.SupConLoss()(x, torch.zeros(4).long()).item() > 0


def test_class_weights_start_at_other_lengths_there():
    for ours, theirs, length, their_length in (
        (losses.CosFaceLoss(200, 64).weight, peer.CosFaceLoss(200, 64).W.T, 1, 8),
        (losses.ProxyNCALoss(200, 64).weight, peer.ProxyNCALoss(200, 64).proxies, 0.8, 8),
        (losses.ProxyAnchorLoss(200, 64).weight, peer.ProxyAnchorLoss(200, 64).proxies, 0.8, 0.8),
        (losses.SoftTripleLoss(20, 64).weight, peer.SoftTripleLoss(20, 64).fc.T, 0.8, 0.8 / 6**0.5),
    ):
        assert ours.norm(dim=1).mean().item() == pytest.approx(length, rel=0.05)
        assert theirs.norm(dim=1).mean().item() == pytest.approx(their_length, rel=0.05)


# The guide


def test_guide_names_every_loss_of_the_peer():
    text = GUIDE.read_text(encoding="utf-8")
    machinery = {"BaseLossWrapper", "BaseMetricLossFunction", "GenericPairLoss", "MultipleLosses"}
    for name in dir(peer):
        if isinstance(getattr(peer, name), type) and name not in machinery and not name.endswith("Mixin"):
            assert f"`{name}" in text, name


def arguments(thing: type) -> set[str]:
    """Of its own: those of its ancestors that every loss there has are left out."""
    names = set()
    for part in thing.__mro__:
        if part.__module__.startswith("pytorch_metric_learning.losses") and "__init__" in vars(part):
            names |= {n for n, p in signature(part.__init__).parameters.items() if p.kind is not p.VAR_KEYWORD}
    general = {"self", "embedding_regularizer", "embedding_reg_weight", "weight_regularizer", "weight_reg_weight"}
    return names - general - {"weight_init_func", "args", "mat_based_loss", "use_similarity"}


def test_guide_names_what_exists_on_both_sides():
    section = GUIDE.read_text(encoding="utf-8").split("## Names, one by one")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|(.*)\|$", section, re.MULTILINE)
    assert len(rows) == 22
    for theirs, ours, listed in rows:
        there = getattr(peer, theirs)
        here = getattr(memory if ours.startswith("memory.") else losses, ours.split(".")[-1])
        pairs = re.findall(r"`(\w+)` → (?:`(\w+)`|–)", listed)
        assert {a for a, _ in pairs} == arguments(there), theirs
        assert {b for _, b in pairs if b} <= set(signature(here).parameters), theirs
    same = {name for name in dir(peer) if name.endswith("Loss") and hasattr(losses, name)}
    assert same <= {theirs for theirs, _, _ in rows}  # nothing of the same name is left unsaid


UNCHANGED = {
    "SupCon": lambda library: library.SupConLoss(temperature=0.2),
    "Circle": lambda library: library.CircleLoss(0.3, 64),
    "FastAP": lambda library: library.FastAPLoss(8),
    "Proxy-Anchor": lambda library: library.ProxyAnchorLoss(CLASSES, DIM, 0.2, 16),
    "normalised softmax": lambda library: library.NormalizedSoftmaxLoss(CLASSES, DIM),
    "CosFace": lambda library: library.CosFaceLoss(CLASSES, DIM, margin=0.3, scale=50.0),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_the_import_alone_is_enough(name):
    """What the guide says of it: the same line makes and calls the loss, and the number is the same."""
    ours, theirs, _ = Row(name, lambda: UNCHANGED[name](losses), lambda: UNCHANGED[name](peer)).build()
    x, labels = batch("even")
    assert_close(ours(x, labels), theirs(x, labels), 1e-9)


LOGITS = {  # ours, theirs, and what of theirs ours is
    "normalised softmax": (L.NormalizedSoftmaxLoss, P.NormalizedSoftmaxLoss, lambda z: z),
    "CosFace": (L.CosFaceLoss, P.CosFaceLoss, lambda z: z),
    "ArcFace": (L.ArcFaceLoss, P.ArcFaceLoss, lambda z: z),
    "sub-centres": (partial(L.ArcFaceLoss, sub_centers=3), partial(P.SubCenterArcFaceLoss, sub_centers=3), lambda z: z),
    "SphereFace": (L.SphereFaceLoss, P.SphereFaceLoss, lambda z: z),
    "Proxy-Anchor": (L.ProxyAnchorLoss, P.ProxyAnchorLoss, lambda z: 32 * z),
    "SoftTriple": (L.SoftTripleLoss, P.SoftTripleLoss, lambda z: 20 * z),
    "Proxy-NCA": (L.ProxyNCALoss, P.ProxyNCALoss, lambda z: -9 * z),
}


@pytest.mark.parametrize("name", LOGITS)
def test_logits_as_the_guide_says(name):
    mine, other, turned = LOGITS[name]
    ours, theirs, _ = Row(name, lambda: mine(*size), lambda: other(**named_size)).build()
    x, _ = batch("even")
    assert_close(ours.get_logits(x), turned(theirs.get_logits(x)), 1e-9)


def test_guide_runs():
    """Each block after the ones before it, on one batch; what it calls `before` and `after` is the same."""
    x, labels = batch("even")
    names = {"embeddings": x.float(), "labels": labels, "model": nn.Linear(DIM, DIM)}
    compared = 0
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
        if "before" in names and "after" in names:
            assert_close(names.pop("after"), names.pop("before"), 1e-5)
            compared += 1
    assert compared == 4
