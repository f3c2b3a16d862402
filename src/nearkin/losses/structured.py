"""Structured losses: an anchor is compared with the batch as a whole."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import torch
from torch import Tensor

from nearkin.core import blockwise, distances, reduce
from nearkin.core.labels import UNKNOWN, Relation
from nearkin.losses.engine import Call, Costs, PairLoss, Rows, function_of
from nearkin.losses.settings import Choices, Range, setting

__all__ = [
    "GeneralizedLiftedLoss",
    "InfoNCELoss",
    "LiftedStructureLoss",
    "NPairLoss",
    "SupConLoss",
    "generalized_lifted_loss",
    "infonce_loss",
    "lifted_structure_loss",
    "npair_loss",
    "supcon_loss",
]


class SupConLoss(PairLoss):
    r"""Each anchor classifies its positives against all that it is compared with.

    l_i = -1/|P_i| Σ_{p in P_i} log( e^{s_ip/t} / Σ_{r != i} e^{s_ir/t} ),  s = cosine similarity

    embeddings (B, D), labels (B,) or any relation of `relations.of`. Anchors without positives do not count.
    Needs two items per class in the batch. See also `InfoNCELoss` (positives are not compared with each other),
    `NPairLoss` (dot products, one pair per class). Khosla et al. 2020, arXiv:2004.11362, eq. 2; temperature 0.1 from
    its section 4.
    """

    temperature: float = setting(
        default=0.1,
        above=0,
        kw_only=False,
        search=Range(0.02, 0.5, log=True),
        text="t, what similarities are divided by; 0.1: the paper's",
    )

    def rows(self, rows: Rows) -> Costs:
        logits = rows.all() / self.temperature
        value = reduce.logsumexp(logits, rows.pairs) - reduce.mean(logits, rows.positive)
        return value, reduce.any_in_row(rows.positive)


class InfoNCELoss(PairLoss):
    r"""Each positive pair against the anchor's negatives, other positives left out.

    l_ip = -log( e^{s_ip/t} / (e^{s_ip/t} + Σ_{n in N_i} e^{s_in/t}) ),  s = cosine similarity; mean over positive pairs

    Two views of each item under a label of their own make it NT-Xent. Needs two items per class. See also
    `SupConLoss`. van den Oord et al. 2018, arXiv:1807.03748, eq. 4; temperature 0.07 from He et al. 2020 (MoCo).
    """

    temperature: float = setting(
        default=0.07,
        above=0,
        kw_only=False,
        search=Range(0.005, 0.5, log=True),
        text="t, what similarities are divided by; 0.07: MoCo's",
    )

    def rows(self, rows: Rows) -> Costs:
        logits = rows.all() / self.temperature
        negatives = reduce.logsumexp(logits, rows.negative)[:, None]
        return blockwise.sums_and_counts(reduce.softplus(negatives - logits), rows.positive, self.reduction)


class LiftedStructureLoss(PairLoss):
    r"""Each positive pair against all negatives of both its ends.

    J_ij = log(Σ_k e^{margin - D_ik} + Σ_l e^{margin - D_jl}) + D_ij,   L = mean_{positive pairs} 1/2 [J_ij]_+²

    k: negatives of anchor i; l: anchors to which j is a negative. form="max" takes the largest margin - D instead of
    the log-sum-exp. D: Euclidean distance of raw embeddings. O(B²): the sums belong to rows and columns. Needs two
    items per class and two classes; a pair without negatives is a term of 0. See also `GeneralizedLiftedLoss`.
    Song et al. 2016, arXiv:1511.06452, eq. 3 (max) and 4 (smooth); margin 1, no normalisation from its released code.
    """

    measure = "distance"

    margin: float = setting(
        default=1.0,
        at_least=0,
        kw_only=False,
        search=Range(0.3, 2.0),
        text="α, the distance at which a negative starts to count; 1: the released code's",
    )
    form: str = setting(
        default="smooth",
        choices=("smooth", "max"),
        search=Choices(("smooth", "max")),
        text='"smooth": log-sum-exp over negatives (eq. 4); "max": the hardest one (eq. 3)',
    )
    normalize: bool = setting(default=False, text="embeddings are scaled to unit length first")

    def value(self, call: Call) -> Tensor:
        if call.fits():
            return call.reduced(self.whole)
        (row,) = (column,) = call.run(self.negatives)
        if not call.alone or isinstance(call.batch.labels, Relation):  # else being a negative is mutual
            (column,) = call.across(self.negatives)
        return call.total(*call.run(lambda rows, row: self.costs(rows, rows.all(), row, column), row))

    def whole(self, rows: Rows) -> Costs:
        distance = rows.all()
        row, column = (self.worst(self.margin - distance, rows.negative, dim) for dim in (1, 0))
        return self.costs(rows, distance, row, column)

    def negatives(self, rows: Rows) -> tuple[Tensor]:
        return (self.worst(self.margin - rows.all(), rows.negative, 1),)

    def worst(self, nearness: Tensor, negative: Tensor, dim: int) -> Tensor:
        if self.form == "smooth":
            return reduce.logsumexp(nearness, negative, dim)
        return reduce.largest(nearness, negative, dim)[0]

    def costs(self, rows: Rows, distance: Tensor, row: Tensor, column: Tensor) -> Costs:
        both = (torch.logaddexp if self.form == "smooth" else torch.maximum)(row[:, None], column[None, :])
        sums, *counts = blockwise.hinges(both + distance, rows.positive, self.reduction, squared=True)
        return sums / 2, counts[0], counts[1]


class GeneralizedLiftedLoss(PairLoss):
    r"""All positives of an anchor against all its negatives, the hardest of each first.

    l_a = [ log Σ_p e^{D_ap} + log Σ_n e^{margin - D_an} ]_+,   D = Euclidean distance

    `LiftedStructureLoss` with several positives at once: each anchor is one term, and the pair's other end does not
    count. The sums are soft maxima: one triplet of the farthest positive and the nearest negative leads, as in
    `TripletLoss(selection="batch_hard")`. Anchors without positives or without negatives do not count. Needs two items
    per class and two classes. Hermans, Beyer, Leibe 2017, arXiv:1703.07737, eq. 8; margin 1 and raw embeddings as in
    `LiftedStructureLoss`.
    """

    measure = "distance"

    margin: float = setting(
        default=1.0,
        at_least=0,
        kw_only=False,
        search=Range(0.3, 2.0),
        text="m, the distance at which a negative starts to count; 1: ours",
    )
    normalize: bool = setting(default=False, text="embeddings are scaled to unit length first")

    def rows(self, rows: Rows) -> Costs:
        distance = rows.all()
        both = reduce.any_in_row(rows.positive) & reduce.any_in_row(rows.negative)
        pull = reduce.logsumexp(distance, rows.positive)
        push = reduce.logsumexp(self.margin - distance, rows.negative)
        return (pull + push).relu(), both  # 0 where either has no pair


class NPairLoss(PairLoss):
    r"""An anchor finds its partner among one example of every other class.

    l_i = -1/|P_i| Σ_{p in P_i} log( e^{f_i·f_p} / Σ_r e^{f_i·f_r} )  +  w/4 (mean |f_i|² + mean |f_r|²)

    Raw inner products, bounded by w = `length_weight`. In a batch alone the first item of each class is the anchor and
    the others are the references, so two items per class give the paper's N-pair-mc loss; several share the target
    mass. With `references` each row is an anchor, compared with them all. Anchors without positives do not count. See
    also `SupConLoss` (cosines, every item an anchor). Sohn 2016, eq. 7; w 0.002 from TensorFlow's version.
    """

    measure = "dot"

    length_weight: float = setting(
        default=0.002,
        at_least=0,
        kw_only=False,
        search=Range(1e-4, 0.1, log=True),
        was="penalty",
        text="w, the weight of the embeddings' squared lengths; 0.002: TensorFlow's version",
    )

    def value(self, call: Call) -> Tensor:
        x, labels, references, _ = call.batch
        taint = call.taint()
        if call.alone and isinstance(labels, Tensor) and labels.dim() == 1 and distances.freely_read(labels):
            # Anchors × references without the rest of the matrix, where that is made in one piece.
            anchors, others = _sides(labels.long()) if call.fits() else (labels[:0], labels[:0])
            if anchors.numel():
                value = _between_sides(x, labels, anchors, others, self.length_weight)
                if self.reduction == "none":
                    return value.new_zeros(len(labels)).index_copy(0, anchors, value) + taint
                return reduce.terms(value, torch.ones_like(anchors, dtype=torch.bool), self.reduction) + taint
        firsts = _firsts(call.batch, self.max_memory) if call.alone and not call.fits() else None  # (B,)
        other = x if references is None else references
        used = torch.zeros(other.shape[0], dtype=torch.bool, device=other.device)  # references that an anchor meets

        def rows(rows: Rows, *own: Tensor) -> Costs:
            logits, relation = rows.all(), rows.relation
            if call.alone:
                is_first = _first(relation, 0) if firsts is None else firsts
                valid = (own[0] if own else is_first)[:, None] & ~is_first[None, :]
                relation = Relation(relation.positive & valid, relation.negative & valid)
            compared, counts = relation.positive | relation.negative, reduce.any_in_row(relation.positive)
            # In place: a block that is recomputed for the gradient adds nothing new.
            used.logical_or_(reduce.any_in_row(compared & counts[:, None], 0))
            # The mean over positives of their own log-probability, without a (B, R) matrix of probabilities.
            return reduce.logsumexp(logits, compared) - reduce.mean(logits, relation.positive), counts

        value, counts = call.run(rows, *(() if firsts is None else (firsts,)))
        if self.length_weight:
            compared = used if call.fits() else used.clone()  # the pass for the gradient writes to the other
            own = _size(x)
            sizes = own if references is None else _size(references)
            size = (compared * sizes).sum() / compared.sum().clamp(min=1)  # mean square of these references
            value = value + self.length_weight / 4 * (own + size)
        return reduce.terms(value, counts, self.reduction) + taint


supcon_loss = function_of(SupConLoss, "supcon_loss")
infonce_loss = function_of(InfoNCELoss, "infonce_loss")
lifted_structure_loss = function_of(LiftedStructureLoss, "lifted_structure_loss")
generalized_lifted_loss = function_of(GeneralizedLiftedLoss, "generalized_lifted_loss")
npair_loss = function_of(NPairLoss, "npair_loss")


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
