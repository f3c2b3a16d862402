"""Structured losses: an anchor is compared with the batch as a whole.

`max_memory` (bytes) is what a loss may hold beside its arguments and gradients, in blocks of rows: `core/blockwise.py`.
"""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import torch
from torch import Tensor

from nearkin.core import blockwise, checks, distances, reduce
from nearkin.core.relations import UNKNOWN, Labels, Relation
from nearkin.losses.call import PairCall
from nearkin.losses.module import LossModule, without_impl

__all__ = [
    "InfoNCELoss",
    "LiftedStructureLoss",
    "NPairLoss",
    "SupConLoss",
    "infonce_loss",
    "lifted_structure_loss",
    "npair_loss",
    "supcon_loss",
]


@without_impl
def lifted_structure_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    margin: float = 1.0,
    form: str = "smooth",
    normalize: bool = False,
    reduction: str = "mean",
    max_memory: int | None = None,
) -> Tensor:
    r"""Each positive pair against all negatives of both its ends.

    J_ij = log(Σ_k e^{margin - D_ik} + Σ_l e^{margin - D_jl}) + D_ij,   L = mean_{positive pairs} 1/2 [J_ij]_+²

    k: negatives of anchor i; l: anchors to which j is a negative. form="max" takes the largest margin - D instead of
    the log-sum-exp. D: Euclidean distance of raw embeddings. O(B²): the sums belong to rows and columns. Needs two
    items per class and two classes; a pair without negatives is a term of 0.
    Song et al. 2016, arXiv:1511.06452, eq. 3 (max) and 4 (smooth); margin 1, no normalisation from its released code.
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    checks.one_of("form", form, ("smooth", "max"))
    checks.at_least("margin", margin, 0)
    references = call.batch.references

    def negative_terms(x: Tensor, references: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        distance = distances.euclidean(x, references, normalize=normalize)
        return (_negative_term(margin - distance, relation.negative, form, 1),)

    def costs(distance: Tensor, relation: Relation, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        worst = (torch.logaddexp if form == "smooth" else torch.maximum)(row[:, None], column[None, :])
        sums, counts, active = blockwise.hinges(worst + distance, relation.positive, reduction, squared=True)
        return sums / 2, counts, active

    if call.fits():
        distance = distances.euclidean(embeddings, references, normalize=normalize)  # (B, R)
        relation = blockwise.relation(call.batch)
        row, column = (_negative_term(margin - distance, relation.negative, form, dim) for dim in (1, 0))  # (B,), (R,)
        sums, counts, active = costs(distance, relation, row, column)
    else:
        (row,) = (column,) = call.run(negative_terms)
        if references is not None or isinstance(labels, Relation):  # else being a negative is mutual
            (column,) = blockwise.run(negative_terms, blockwise.transposed(call.batch), max_memory=max_memory)

        def rows(x: Tensor, references: Tensor | None, relation: Relation, row: Tensor) -> tuple[Tensor, ...]:
            return costs(distances.euclidean(x, references, normalize=normalize), relation, row, column)

        sums, counts, active = call.run(rows, row)
    return call.total(sums, counts, active)


def _negative_term(nearness: Tensor, negative: Tensor, form: str, dim: int) -> Tensor:
    if form == "smooth":
        return reduce.logsumexp(nearness, negative, dim)
    return reduce.largest(nearness, negative, dim)[0]


@without_impl
def npair_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    penalty: float = 0.002,
    reduction: str = "mean",
    max_memory: int | None = None,
) -> Tensor:
    r"""An anchor finds its partner among one example of every other class.

    l_i = -1/|P_i| Σ_{p in P_i} log( e^{f_i·f_p} / Σ_r e^{f_i·f_r} )  +  penalty/4 (mean |f_i|² + mean |f_r|²)

    Raw inner products, bounded by the penalty. In a batch alone the first item of each class is the anchor and
    the others are the references, so two items per class give the paper's N-pair-mc loss; several share the target
    mass. With `references` each row is an anchor, compared with them all. Anchors without positives do not count. See
    also `supcon_loss` (cosines, every item an anchor). Sohn 2016, eq. 7; penalty 0.002 / 4 from TensorFlow's version.
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    checks.at_least("penalty", penalty, 0)
    references = call.batch.references
    alone = references is None
    taint = call.taint()
    if alone and isinstance(labels, Tensor) and labels.dim() == 1 and checks.reads_values(labels):
        # Anchors × references without the rest of the matrix, where that is made in one piece.
        anchors, others = _sides(labels.long()) if call.fits() else (labels[:0], labels[:0])
        if anchors.numel():
            value = _between_sides(embeddings, labels, anchors, others, penalty)
            if reduction == "none":
                return value.new_zeros(len(labels)).index_copy(0, anchors, value) + taint
            return reduce.terms(value, torch.ones_like(anchors, dtype=torch.bool), reduction) + taint
    firsts = _firsts(call.batch, max_memory) if alone and not call.fits() else None  # (B,)
    other = embeddings if references is None else references
    used = torch.zeros(
        other.shape[0], dtype=torch.bool, device=other.device
    )  # references that some anchor is compared with

    def rows(x: Tensor, references: Tensor | None, relation: Relation, *own: Tensor) -> tuple[Tensor, ...]:
        logits = distances.dot(x, references)  # (B, R)
        if alone:
            is_first = _first(relation, 0) if firsts is None else firsts
            valid = (own[0] if own else is_first)[:, None] & ~is_first[None, :]
            relation = Relation(relation.positive & valid, relation.negative & valid)
        compared, counts = relation.positive | relation.negative, reduce.any_in_row(relation.positive)
        # In place: a block that is recomputed for the gradient adds nothing new.
        used.logical_or_(reduce.any_in_row(compared & counts[:, None], 0))
        # The mean over positives of their own log-probability, without a (B, R) matrix of probabilities.
        return reduce.logsumexp(logits, compared) - reduce.mean(logits, relation.positive), counts

    value, counts = call.run(rows, *(() if firsts is None else (firsts,)))
    value = torch.where(counts, value, 0.0)
    if penalty:
        compared = used.clone()  # the pass for the gradient writes to the other
        size = (compared * _size(other)).sum() / compared.sum().clamp(min=1)  # mean square of these references
        value = torch.where(counts, value + penalty / 4 * (_size(embeddings) + size), 0.0)
    return reduce.terms(value, counts, reduction) + taint


def _sides(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the first item of each class of several, and of all the others of these classes."""
    sorted_ids, order = ids.sort(stable=True)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    known = sorted_ids != UNKNOWN
    several = known & first & ~torch.cat([first[1:], first[:1]])  # the next is not the first of its own
    return order[several], order[known & ~first]


def _between_sides(embeddings: Tensor, labels: Tensor, anchors: Tensor, others: Tensor, penalty: float) -> Tensor:
    """The loss of each of these anchors, all of which have positives among the others, (A,)."""
    x, r = embeddings.index_select(0, anchors), embeddings.index_select(0, others)
    logits = distances.dot(x, r)  # (A, R)
    value = logits.logsumexp(1) - reduce.mean(logits, labels[anchors][:, None] == labels[others][None, :])
    return value + penalty / 4 * (_size(x) + _size(r).mean()) if penalty else value


def _first(relation: Relation, start: int) -> Tensor:
    """Which anchors, from `start` of the batch on, have no positive before them, (B,)."""
    return ~reduce.any_in_row(relation.positive.tril(start - 1))


def _firsts(batch: blockwise.Batch, max_memory: int | None) -> Tensor:
    return torch.cat([_first(relation, start) for start, relation in blockwise.blocks(batch, max_memory)])


def _size(x: Tensor) -> Tensor:
    return distances.upcast(x).square().sum(1)


@without_impl
def supcon_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    temperature: float = 0.1,
    reduction: str = "mean",
    max_memory: int | None = None,
) -> Tensor:
    r"""Each anchor classifies its positives against all that it is compared with.

    l_i = -1/|P_i| Σ_{p in P_i} log( e^{s_ip/t} / Σ_{r != i} e^{s_ir/t} ),  s = cosine similarity

    embeddings (B, D), labels (B,) or any relation of `relations.of`. Anchors without positives do not count.
    Needs two items per class in the batch. See also `infonce_loss` (positives are not compared with each other),
    `npair_loss` (dot products, one pair per class). Khosla et al. 2020, arXiv:2004.11362, eq. 2; temperature 0.1 from
    its section 4.
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    checks.positive("temperature", temperature)

    def rows(x: Tensor, references: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        logits = distances.cosine(x, references) / temperature  # (B, R), larger is closer
        value = reduce.logsumexp(logits, relation.positive | relation.negative) - reduce.mean(logits, relation.positive)
        return value, reduce.any_in_row(relation.positive)

    return call.terms(*call.run(rows))


@without_impl
def infonce_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    temperature: float = 0.07,
    reduction: str = "mean",
    max_memory: int | None = None,
) -> Tensor:
    r"""Each positive pair against the anchor's negatives, other positives left out.

    l_ip = -log( e^{s_ip/t} / (e^{s_ip/t} + Σ_{n in N_i} e^{s_in/t}) ),  s = cosine similarity; mean over positive pairs

    Two views of each item under a label of their own make it NT-Xent. Needs two items per class. See also
    `supcon_loss`. van den Oord et al. 2018, arXiv:1807.03748, eq. 4; temperature 0.07 from He et al. 2020 (MoCo).
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    checks.positive("temperature", temperature)

    def rows(x: Tensor, references: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        logits = distances.cosine(x, references) / temperature  # (B, R), larger is closer
        negatives = reduce.logsumexp(logits, relation.negative)[:, None]
        return blockwise.sums_and_counts(reduce.softplus(negatives - logits), relation.positive, reduction)

    return call.total(*call.run(rows))


class LiftedStructureLoss(LossModule, function=lifted_structure_loss):
    """Holds the settings of `lifted_structure_loss`; computes nothing itself."""

    def __init__(
        self,
        margin: float = 1.0,
        *,
        form: str = "smooth",
        normalize: bool = False,
        reduction: str = "mean",
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        self.margin, self.form, self.normalize = margin, form, normalize
        self.reduction, self.max_memory = reduction, max_memory
        self.finish_init()


class NPairLoss(LossModule, function=npair_loss):
    """Holds the settings of `npair_loss`; computes nothing itself."""

    def __init__(self, penalty: float = 0.002, *, reduction: str = "mean", max_memory: int | None = None) -> None:
        super().__init__()
        self.penalty, self.reduction, self.max_memory = penalty, reduction, max_memory
        self.finish_init()


class SupConLoss(LossModule, function=supcon_loss):
    """Holds the settings of `supcon_loss`; computes nothing itself."""

    def __init__(self, temperature: float = 0.1, *, reduction: str = "mean", max_memory: int | None = None) -> None:
        super().__init__()
        self.temperature, self.reduction, self.max_memory = temperature, reduction, max_memory
        self.finish_init()


class InfoNCELoss(LossModule, function=infonce_loss):
    """Holds the settings of `infonce_loss`; computes nothing itself."""

    def __init__(self, temperature: float = 0.07, *, reduction: str = "mean", max_memory: int | None = None) -> None:
        super().__init__()
        self.temperature, self.reduction, self.max_memory = temperature, reduction, max_memory
        self.finish_init()
