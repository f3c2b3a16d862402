"""Pair losses: every pair of an anchor and a reference is a term of its own, or weighted by the anchor's other pairs.

`max_memory` (bytes) is what a loss may hold beside its arguments and gradients, in blocks of rows: `core/blockwise.py`.
"""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

from typing import Any

import torch
from torch import Tensor, nn

from nearkin import mining
from nearkin.core import blockwise, checks, distances, reduce
from nearkin.core.autograd import differentiable_once
from nearkin.core.relations import Labels, Relation
from nearkin.losses import sampling_dim as sampling_dims
from nearkin.losses.call import PairCall
from nearkin.losses.module import LossModule, without_impl
from nearkin.losses.sampling_dim import SamplingDim

__all__ = [
    "CircleLoss",
    "ContrastiveLoss",
    "MarginLoss",
    "MultiSimilarityLoss",
    "circle_loss",
    "contrastive_loss",
    "margin_loss",
    "multi_similarity_loss",
]


@without_impl
def contrastive_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    margin: float = 1.0,
    positive_margin: float = 0.0,
    squared: bool = True,
    balance: bool = True,
    selection: mining.Selection = "all",
    normalize: bool = False,
    reduction: str = "mean",
    sampling_dim: SamplingDim = None,
    generator: torch.Generator | None = None,
    max_memory: int | None = None,
) -> Tensor:
    r"""Positives are pulled together, negatives pushed out to the margin.

    L = 1/2 mean_{positive pairs} D²  +  1/2 mean_{negative pairs} [margin - D]_+²,   D = Euclidean distance

    `balance=False` is the paper's own sum, 1/2 mean over all pairs of D² or [margin - D]_+²: a batch has many more
    negative pairs than positive ones, so these then have little weight. Balanced, both kinds weigh the same.

    embeddings (B, D), labels (B,) or any relation of `relations.of`. Needs two items per class. `positive_margin` m
    turns D into [D - m]_+; `squared=False` drops both squares. Two equal embeddings do not repel each other.
    `selection`: "all", or a pair or triplet selection of `mining`; `sampling_dim`: as in `margin_loss`. See also
    `margin_loss` (learned boundary).
    Hadsell, Chopra, LeCun 2006, eq. 4; margin 1 and raw embeddings from there. `reduction` applies to each half, or
    without balance to all pairs together.
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    checks.at_least("margin", margin, 0)
    checks.at_least("positive_margin", positive_margin, 0)
    if not isinstance(balance, bool):
        raise TypeError(f"balance must be True or False, got {balance!r}")
    dim = sampling_dims.resolve(sampling_dim, selection, embeddings, labels)
    mining.check_generator(selection, generator)

    def rows(x: Tensor, references: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        distance = distances.euclidean(x, references, normalize=normalize)  # (B, R)
        pairs = _select(selection, distance, relation, normalize, dim, margin, generator)
        near, positive, far, negative = mining.as_pairs(pairs, distance)
        pull = blockwise.hinges(near, positive, reduction, start=positive_margin, squared=squared)
        push = blockwise.hinges(far, negative, reduction, start=margin, falling=True, squared=squared)
        return *pull, *push

    pull, positives, pulled, push, negatives, pushed = call.run(rows, selection=selection, generator=generator)
    if balance:
        both = reduce.total(pull, positives, pulled, reduction) + reduce.total(push, negatives, pushed, reduction)
    else:
        both = reduce.total(pull + push, positives + negatives, pulled + pushed, reduction)
    return both / 2 + call.taint()


@without_impl
def margin_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    beta: Tensor | float = 1.2,
    item_beta: Tensor | None = None,
    items: Tensor | None = None,
    margin: float = 0.2,
    nu: float = 0.0,
    selection: mining.Selection = "distance_weighted",
    normalize: bool = True,
    reduction: str = "active",
    sampling_dim: SamplingDim = None,
    generator: torch.Generator | None = None,
    max_memory: int | None = None,
) -> Tensor:
    r"""Positives nearer than a boundary β, negatives farther, each by the margin; β may be learned.

    l_ap = [margin + D_ap - β_a]_+,  l_an = [margin - D_an + β_a]_+,  L = (Σ l_ap + Σ l_an + ν Σ_ap β_a) / active terms

    D: Euclidean distance of unit vectors. β_a = β of all or of a's class + β of the item a: beta, a number, a scalar
    tensor, or (C,) one per class of the anchor; item_beta (N,), one per item, where items (B,) says which of the N each
    anchor is. Together they are the paper's β_0 + β_class + β_img, and ν Σ β_a holds all three back. The normaliser
    counts active pairs ("active"; none active, no loss), "mean" counts all, "sum" does not divide; a pair of a triplet
    selection counts as often as it was drawn. Needs two items per class.

    sampling_dim: dimensions of the sphere that "distance_weighted" supposes; None: those of the vectors. "fitted": as
    many as the batch's items of different classes fill, 1 / E cos² (`core/sphere.py`); the Module takes a running mean.

    Wu et al. 2017, arXiv:1706.07567, eq. 6-8; margin 0.2, β 1.2, ν 0 and the normaliser from the authors' code.
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    references = call.batch.references
    checks.at_least("margin", margin, 0)
    checks.at_least("nu", nu, 0)
    dim = sampling_dims.resolve(sampling_dim, selection, embeddings, labels)
    mining.check_generator(selection, generator)
    of_item = _of_items(item_beta, items, embeddings)  # (B,) or None
    edges = _boundary(beta, of_item, labels, embeddings, references)  # (B, 1)

    def rows(x: Tensor, references: Tensor | None, relation: Relation, boundary: Tensor) -> tuple[Tensor, ...]:
        distance = distances.euclidean(x, references, normalize=normalize)  # (B, R)
        cutoff = (boundary.detach() + margin).squeeze(1)
        pairs = _select(selection, distance, relation, normalize, dim, cutoff, generator)
        near, positive, far, negative = mining.as_pairs(pairs, distance)
        pull = torch.where(positive, (margin + near - boundary).relu(), 0.0)
        push = torch.where(negative, (margin - far + boundary).relu(), 0.0)
        sums = pull.sum(1) + push.sum(1)
        if nu:
            sums = sums + nu * boundary.squeeze(1) * positive.sum(1)
        return sums, positive.sum(1) + negative.sum(1), (pull > 0).sum(1) + (push > 0).sum(1)

    return call.total(*call.run(rows, edges, selection=selection, generator=generator), edges)


@without_impl
def multi_similarity_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    epsilon: float = 0.1,
    selection: mining.Selection = "multi_similarity",
    reduction: str = "mean",
    max_memory: int | None = None,
) -> Tensor:
    r"""Pairs are weighted by how hard they are among the anchor's other pairs.

    l_i = 1/α log(1 + Σ_{p} e^{-α (s_ip - λ)}) + 1/β log(1 + Σ_{n} e^{β (s_in - λ)}),   s = cosine, λ = `base`

    p and n run over the pairs that the paper's own mining leaves (ε), or over all with `selection="all"`. Anchors
    without any pair do not count. See also `supcon_loss`. Wang et al. 2019, arXiv:1904.06627, eq. 15; α 2, β 50, ε 0.1
    from its section 4, λ 0.5 from its released code (the paper prints 1).
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    checks.positive("alpha", alpha)
    checks.positive("beta", beta)
    checks.number("base", base)
    checks.number("epsilon", epsilon)
    mined = selection == "multi_similarity"
    if not mined and epsilon != 0.1:  # the default
        raise ValueError(f'epsilon must be left out unless selection="multi_similarity", got {epsilon}')

    def rows(x: Tensor, references: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        similarity = distances.cosine(x, references)  # (B, R), larger is closer
        pairs: mining.Triplets | mining.Pairs = mining.Pairs(relation.positive, relation.negative)
        if mined:
            pairs = mining.multi_similarity(1 - similarity, relation, epsilon=epsilon)
        elif selection != "all":
            pairs = mining.select(selection, 1 - similarity, relation, dim=x.shape[1])
        if isinstance(pairs, mining.Triplets):
            known = ("all", *mining.PAIR_SELECTIONS)
            checks.impossible("selection", selection, "the loss weighs pairs, not triplets", known)
        pull = reduce.softplus(reduce.logsumexp(-alpha * (similarity - base), pairs.positive)) / alpha
        push = reduce.softplus(reduce.logsumexp(beta * (similarity - base), pairs.negative)) / beta
        return pull + push, reduce.any_in_row(relation.positive | relation.negative)

    return call.terms(*call.run(rows, selection=selection))


@without_impl
def circle_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    margin: float = 0.4,
    scale: float = 80.0,
    reduction: str = "mean",
    max_memory: int | None = None,
) -> Tensor:
    r"""Each similarity is pulled as strongly as it is far from its own optimum, towards a circular boundary.

    l_i = log(1 + Σ_n e^{γ α_n (s_n - m)} Σ_p e^{-γ α_p (s_p - 1 + m)}),  α_p = [1 + m - s_p]_+, α_n = [s_n + m]_+

    s = cosine, γ = `scale`, m = `margin`; the weights α carry no gradient, as in the paper. Only anchors
    with both positives and negatives count. Sun et al. 2020, arXiv:2002.10857, eq. 6-8; m 0.4 and γ 80 from its
    retrieval experiments (faces: 0.25 and 256).
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    checks.number("margin", margin)
    checks.positive("scale", scale)

    def rows(x: Tensor, references: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        similarity = distances.cosine(x, references)  # (B, R), larger is closer
        weight = similarity.detach()
        pull = -scale * (1 + margin - weight).relu() * (similarity - (1 - margin))
        push = scale * (weight + margin).relu() * (similarity - margin)
        both = reduce.any_in_row(relation.positive) & reduce.any_in_row(relation.negative)
        value = reduce.logsumexp(pull, relation.positive) + reduce.logsumexp(push, relation.negative)
        value = reduce.softplus(torch.where(both, value, 0.0))
        return differentiable_once(value, "CircleLoss, whose weights are constants in its gradient,"), both

    return call.terms(*call.run(rows))


class ContrastiveLoss(LossModule, function=contrastive_loss):
    """Holds the settings of `contrastive_loss`; computes nothing itself."""

    def __init__(
        self,
        margin: float = 1.0,
        *,
        positive_margin: float = 0.0,
        squared: bool = True,
        balance: bool = True,
        selection: mining.Selection = "all",
        normalize: bool = False,
        reduction: str = "mean",
        sampling_dim: int | str | None = None,
        generator: torch.Generator | None = None,
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        self.sampling_dim = sampling_dim
        self.margin, self.positive_margin, self.squared, self.balance = margin, positive_margin, squared, balance
        self.selection, self.normalize, self.reduction, self.generator = selection, normalize, reduction, generator
        self.max_memory = max_memory
        self.finish_init()


class MarginLoss(LossModule, function=margin_loss, learned=("beta",)):
    """`margin_loss` with a learned boundary β: one for all, or one per class with `num_classes`.

    `num_items` adds one per training item, which starts at 0: the loss is then called with `items=`, (B,), which of the
    0..num_items-1 each row of the batch is. `lr_scale` 7: the authors' β learns at 0.1, divided by their batch of 140,
    beside an encoder at 1e-4.
    """

    lr_scale = 7.0

    def __init__(
        self,
        margin: float = 0.2,
        beta: float = 1.2,
        num_classes: int | None = None,
        nu: float = 0.0,
        selection: mining.Selection = "distance_weighted",
        *,
        num_items: int | None = None,
        normalize: bool = True,
        reduction: str = "active",
        sampling_dim: int | str | None = None,
        generator: torch.Generator | None = None,
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        if num_classes is not None:
            checks.integer("num_classes", num_classes, 1)
        if num_items is not None:
            checks.integer("num_items", num_items, 1)
        self.sampling_dim = sampling_dim
        self.num_classes, self.num_items, self.margin, self.nu = num_classes, num_items, margin, nu
        self.selection, self.normalize, self.reduction, self.generator = selection, normalize, reduction, generator
        self.max_memory = max_memory
        self.beta = nn.Parameter(torch.full(() if num_classes is None else (num_classes,), float(beta)))
        self.item_beta = None if num_items is None else nn.Parameter(torch.zeros(num_items))
        self.finish_init()

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
        *,
        items: Tensor | None = None,
    ) -> Tensor:
        learned: dict[str, Any] = {"beta": self.beta, "item_beta": self.item_beta, "items": items}
        return margin_loss(embeddings, labels, references, reference_labels, **learned, **self.arguments())


class MultiSimilarityLoss(LossModule, function=multi_similarity_loss):
    """Holds the settings of `multi_similarity_loss`; computes nothing itself."""

    def __init__(
        self,
        alpha: float = 2.0,
        beta: float = 50.0,
        base: float = 0.5,
        *,
        epsilon: float = 0.1,
        selection: mining.Selection = "multi_similarity",
        reduction: str = "mean",
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        self.alpha, self.beta, self.base, self.epsilon = alpha, beta, base, epsilon
        self.selection, self.reduction, self.max_memory = selection, reduction, max_memory
        self.finish_init()


class CircleLoss(LossModule, function=circle_loss):
    """Holds the settings of `circle_loss`; computes nothing itself."""

    def __init__(
        self,
        margin: float = 0.4,
        scale: float = 80.0,
        *,
        reduction: str = "mean",
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        self.margin, self.scale = margin, scale
        self.reduction, self.max_memory = reduction, max_memory
        self.finish_init()


def _select(
    selection: mining.Selection,
    distance: Tensor,
    relation: Relation,
    normalize: bool,
    dim: int | Tensor,
    cutoff: float | Tensor,
    generator: torch.Generator | None,
) -> mining.Triplets | mining.Pairs:
    if selection == "distance_weighted" and not normalize:
        possible = ("all", *mining.TRIPLET_SELECTIONS[:-1], *mining.PAIR_SELECTIONS)
        checks.impossible("selection", selection, "it needs unit vectors, normalize=True", possible)
    return mining.select(selection, distance, relation, dim=dim, cutoff=cutoff, generator=generator)


def _boundary(
    beta: Tensor | float, of_item: Tensor | None, labels: Labels, embeddings: Tensor, references: Tensor | None
) -> Tensor:
    """β of each anchor, (B, 1), in the type of the distances."""
    both = embeddings.dtype if references is None else torch.promote_types(embeddings.dtype, references.dtype)
    kind = torch.promote_types(both, torch.float32)
    if of_item is not None:
        return _boundary(beta, None, labels, embeddings, references) + of_item.to(kind)[:, None]
    if not isinstance(beta, Tensor):
        return torch.full((embeddings.shape[0], 1), beta, dtype=kind, device=embeddings.device)
    beta = beta.to(kind)
    if beta.dim() == 0:
        return beta.expand(embeddings.shape[0], 1)
    classes = labels.ids if isinstance(labels, Relation) else labels
    if not isinstance(classes, Tensor) or classes.dtype == torch.bool:
        raise TypeError(
            "labels must be integer class ids, or a Relation with ids, where β is one per class (num_classes)"
        )
    ids, _, addend = checks.in_range(classes, beta.shape[0])
    return (beta[ids] + addend.to(beta.dtype))[:, None]


def _of_items(item_beta: Tensor | None, items: Tensor | None, embeddings: Tensor) -> Tensor | None:
    """The part of β that is each anchor's own, (B,); None where there is none."""
    if item_beta is None:
        if items is not None:
            raise ValueError("items must be left out without a β per item (num_items), got items")
        return None
    number = item_beta.shape[0]
    if items is None:
        raise ValueError(f"items must be given where β is one per item (num_items={number}): (B,) ids, got None")
    ids = checks.class_ids("items", items, embeddings).long()
    checks.same_device("item_beta", item_beta, embeddings)
    if checks.reads_values(ids) and ids.numel():
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < 0 or high >= number:
            raise ValueError(f"items must be in 0..{number - 1}, got {low if low < 0 else high}")
        return item_beta[ids]
    beyond = (ids < 0) | (ids >= number)
    return item_beta[ids.clamp(0, number - 1)].masked_fill(beyond, torch.nan)
