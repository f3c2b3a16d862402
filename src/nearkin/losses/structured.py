"""Structured losses: an anchor meets its whole batch at once.

`max_memory` (bytes) is what a loss may hold beside its arguments and gradients, in blocks of rows: `core/blockwise.py`.
`impl`: "torch" runs anywhere, "triton" is one kernel a pass (`kernels/pair_ops.py`), "auto" takes it where it serves.
"""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

from typing import Any

import torch
from torch import Tensor, nn

from nearkin.core import blockwise, checks, distances, reduce
from nearkin.core.relations import UNKNOWN, Labels, Relation
from nearkin.kernels import pair_ops as fused
from nearkin.losses.class_routes import given
from nearkin.losses.settings import hold, show

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
    impl: str = "auto",
) -> Tensor:
    r"""Each positive pair against all negatives of both its ends.

    J_ij = log(Σ_k e^{margin - D_ik} + Σ_l e^{margin - D_jl}) + D_ij,   L = mean_{positive pairs} 1/2 [J_ij]_+²

    k: negatives of anchor i; l: anchors to which j is a negative. form="max" takes the largest margin - D instead of
    the log-sum-exp. D: Euclidean distance of raw embeddings. O(B²): the sums belong to rows and columns. Needs two
    items a class and two classes; a pair that meets no negative is a term of 0.
    Song et al. 2016, arXiv:1511.06452, eq. 3 (max) and 4 (smooth); margin 1, no normalisation from its released code.
    """
    references, reference_labels = checks.batch(embeddings, labels, references, reference_labels)
    checks.one_of("form", form, ("smooth", "max"))
    checks.at_least("margin", margin, 0)
    batch = blockwise.Batch(embeddings, labels, references, reference_labels)
    if fused.serves(impl, batch, reduction, max_memory) and form == "smooth":
        return fused.loss("lifted", batch, (margin,), reduction, normalize=normalize)

    def threats(x: Tensor, references: Tensor | None, kin: Relation) -> tuple[Tensor, ...]:
        distance = distances.euclidean(x, references, normalize=normalize)
        return (_threat(margin - distance, kin.negative, form, 1),)

    def paid(distance: Tensor, kin: Relation, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        worst = (torch.logaddexp if form == "smooth" else torch.maximum)(row[:, None], column[None, :])
        sums, counts, active = blockwise.hinges(worst + distance, kin.positive, reduction, squared=True)
        return sums / 2, counts, active

    if blockwise.fits(batch, max_memory):
        distance = distances.euclidean(embeddings, references, normalize=normalize)  # (B, R)
        kin = blockwise.relation(batch)
        row, column = (_threat(margin - distance, kin.negative, form, dim) for dim in (1, 0))  # (B,), (R,)
        sums, counts, active = paid(distance, kin, row, column)
    else:
        (row,) = (column,) = blockwise.run(threats, batch, max_memory=max_memory)
        if references is not None or isinstance(labels, Relation):  # else everyone is a stranger to his strangers
            (column,) = blockwise.run(threats, blockwise.transposed(batch), max_memory=max_memory)

        def rows(x: Tensor, references: Tensor | None, kin: Relation, row: Tensor) -> tuple[Tensor, ...]:
            return paid(distances.euclidean(x, references, normalize=normalize), kin, row, column)

        sums, counts, active = blockwise.run(rows, batch, row, max_memory=max_memory)
    return reduce.total(sums, counts, active, reduction) + reduce.taint(embeddings, references)


def _threat(nearness: Tensor, negative: Tensor, form: str, dim: int) -> Tensor:
    if form == "smooth":
        return reduce.logsumexp(nearness, negative, dim)
    return reduce.largest(nearness, negative, dim)[0]


def npair_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    penalty: float = 0.002,
    reduction: str = "mean",
    max_memory: int | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""An anchor finds its partner among one example of every other class.

    l_i = -1/|P_i| Σ_{p in P_i} log( e^{f_i·f_p} / Σ_r e^{f_i·f_r} )  +  penalty/4 (mean |f_i|² + mean |f_r|²)

    Raw inner products, kept in bounds by the penalty. In a batch alone the first item of each class is the anchor and
    the others are the references, so two items a class give the paper's N-pair-mc loss; several share the target mass.
    With `references` each row is an anchor and meets them all. Anchors without kin do not count.
    Kin: `supcon_loss` (cosines, every item an anchor). Sohn 2016, eq. 7; penalty 0.002 / 4 from TensorFlow's version.
    """
    references, reference_labels = checks.batch(embeddings, labels, references, reference_labels)
    checks.at_least("penalty", penalty, 0)
    batch = blockwise.Batch(embeddings, labels, references, reference_labels)
    if fused.serves(impl, batch, reduction, max_memory):
        return fused.loss("npair", batch, (1.0, 0.0, 0.0, penalty), reduction, normalize=False)
    taint, alone = reduce.taint(embeddings, references), references is None
    if alone and isinstance(labels, Tensor) and labels.dim() == 1 and checks.reads_values(labels):
        # Anchors × references without the rest of the matrix, where that is made in one piece.
        anchors, others = _sides(labels.long()) if blockwise.fits(batch, max_memory) else (labels[:0], labels[:0])
        if anchors.numel():
            value = _between_sides(embeddings, labels, anchors, others, penalty)
            if reduction == "none":
                return value.new_zeros(len(labels)).index_copy(0, anchors, value) + taint
            return reduce.terms(value, torch.ones_like(anchors, dtype=torch.bool), reduction) + taint
    firsts = _firsts(batch, max_memory) if alone and not blockwise.fits(batch, max_memory) else None  # (B,)
    other = embeddings if references is None else references
    used = torch.zeros(other.shape[0], dtype=torch.bool, device=other.device)  # references that an anchor meets

    def rows(x: Tensor, references: Tensor | None, kin: Relation, *own: Tensor) -> tuple[Tensor, ...]:
        logits = distances.dot(x, references)  # (B, R)
        if alone:
            everyone = _first(kin, 0) if firsts is None else firsts
            meets = (own[0] if own else everyone)[:, None] & ~everyone[None, :]
            kin = Relation(kin.positive & meets, kin.negative & meets)
        met, counts = kin.positive | kin.negative, reduce.any_in_row(kin.positive)
        used.logical_or_(
            reduce.any_in_row(met & counts[:, None], 0)
        )  # made again for the gradient, a block adds nothing new
        # The mean over positives of their own log-probability, without a (B, R) matrix of probabilities.
        return reduce.logsumexp(logits, met) - reduce.mean(logits, kin.positive), counts

    value, counts = blockwise.run(rows, batch, *(() if firsts is None else (firsts,)), max_memory=max_memory)
    value = torch.where(counts, value, 0.0)
    if penalty:
        heard = used.clone()  # the pass for the gradient writes to the other
        size = (heard * _size(other)).sum() / heard.sum().clamp(min=1)  # mean square of the references met
        value = torch.where(counts, value + penalty / 4 * (_size(embeddings) + size), 0.0)
    return reduce.terms(value, counts, reduction) + taint


def _sides(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the first item of each class of several, and of all the others of these classes."""
    sorted_ids, order = ids.sort(stable=True)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    known = sorted_ids != UNKNOWN
    several = known & first & ~torch.cat([first[1:], first[:1]])  # the next is not the first of its own
    return order[several], order[known & ~first]


def _between_sides(embeddings: Tensor, labels: Tensor, anchors: Tensor, others: Tensor, penalty: float) -> Tensor:
    """The loss of each of these anchors, all of which have kin among the others, (A,)."""
    x, r = embeddings.index_select(0, anchors), embeddings.index_select(0, others)
    logits = distances.dot(x, r)  # (A, R)
    value = logits.logsumexp(1) - reduce.mean(logits, labels[anchors][:, None] == labels[others][None, :])
    return value + penalty / 4 * (_size(x) + _size(r).mean()) if penalty else value


def _first(kin: Relation, start: int) -> Tensor:
    """Which anchors, from `start` of the batch on, have no kin before them, (B,)."""
    return ~reduce.any_in_row(kin.positive.tril(start - 1))


def _firsts(batch: blockwise.Batch, max_memory: int | None) -> Tensor:
    return torch.cat([_first(kin, start) for start, kin in blockwise.blocks(batch, max_memory)])


def _size(x: Tensor) -> Tensor:
    return distances.upcast(x).square().sum(1)


def supcon_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    temperature: float = 0.1,
    reduction: str = "mean",
    max_memory: int | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""Each anchor classifies its kin against everyone it meets.

    l_i = -1/|P_i| Σ_{p in P_i} log( e^{s_ip/t} / Σ_{r != i} e^{s_ir/t} ),  s = cosine similarity

    embeddings (B, D), labels (B,) or any relation of `relations.of`. Anchors without kin do not count.
    Needs two items a class in the batch. Kin: `infonce_loss` (a positive never meets another), `npair_loss` (dot
    products, one pair a class). Khosla et al. 2020, arXiv:2004.11362, eq. 2; temperature 0.1 from its section 4.
    """
    references, reference_labels = checks.batch(embeddings, labels, references, reference_labels)
    checks.positive("temperature", temperature)
    batch = blockwise.Batch(embeddings, labels, references, reference_labels)
    if fused.serves(impl, batch, reduction, max_memory):
        return fused.loss("supcon", batch, (temperature,), reduction)

    def rows(x: Tensor, references: Tensor | None, kin: Relation) -> tuple[Tensor, ...]:
        logits = distances.cosine(x, references) / temperature  # (B, R), larger is closer
        value = reduce.logsumexp(logits, kin.positive | kin.negative) - reduce.mean(logits, kin.positive)
        return value, reduce.any_in_row(kin.positive)

    value, counts = blockwise.run(rows, batch, max_memory=max_memory)
    return reduce.terms(value, counts, reduction) + reduce.taint(embeddings, references)


def infonce_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    temperature: float = 0.07,
    reduction: str = "mean",
    max_memory: int | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""Each positive pair against the anchor's negatives, other positives left out.

    l_ip = -log( e^{s_ip/t} / (e^{s_ip/t} + Σ_{n in N_i} e^{s_in/t}) ),  s = cosine similarity; mean over positive pairs

    Two views of each item under a label of their own make it NT-Xent. Needs two items a class. Kin: `supcon_loss`.
    van den Oord et al. 2018, arXiv:1807.03748, eq. 4; temperature 0.07 from He et al. 2020 (MoCo).
    """
    references, reference_labels = checks.batch(embeddings, labels, references, reference_labels)
    checks.positive("temperature", temperature)
    batch = blockwise.Batch(embeddings, labels, references, reference_labels)
    if fused.serves(impl, batch, reduction, max_memory):
        return fused.loss("infonce", batch, (temperature,), reduction)

    def rows(x: Tensor, references: Tensor | None, kin: Relation) -> tuple[Tensor, ...]:
        logits = distances.cosine(x, references) / temperature  # (B, R), larger is closer
        strangers = reduce.logsumexp(logits, kin.negative)[:, None]
        return blockwise.sums_and_counts(reduce.softplus(strangers - logits), kin.positive, reduction)

    sums, counts, active = blockwise.run(rows, batch, max_memory=max_memory)
    return reduce.total(sums, counts, active, reduction) + reduce.taint(embeddings, references)


class LiftedStructureLoss(nn.Module):
    """Holds the settings of `lifted_structure_loss`; computes nothing itself."""

    lr_scale = 1.0
    settings: dict[str, Any]

    def __init__(
        self,
        margin: float = 1.0,
        *,
        form: str = "smooth",
        normalize: bool = False,
        reduction: str = "mean",
        max_memory: int | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        hold(
            self,
            lifted_structure_loss,
            margin=margin,
            form=form,
            normalize=normalize,
            reduction=reduction,
            max_memory=max_memory,
            **given(impl),
        )

    extra_repr = show

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
    ) -> Tensor:
        return lifted_structure_loss(embeddings, labels, references, reference_labels, **self.settings)


class NPairLoss(nn.Module):
    """Holds the settings of `npair_loss`; computes nothing itself."""

    lr_scale = 1.0
    settings: dict[str, Any]

    def __init__(
        self,
        penalty: float = 0.002,
        *,
        reduction: str = "mean",
        max_memory: int | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        hold(self, npair_loss, penalty=penalty, reduction=reduction, max_memory=max_memory, **given(impl))

    extra_repr = show

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
    ) -> Tensor:
        return npair_loss(embeddings, labels, references, reference_labels, **self.settings)


class SupConLoss(nn.Module):
    """Holds the settings of `supcon_loss`; computes nothing itself."""

    lr_scale = 1.0
    settings: dict[str, Any]

    def __init__(
        self,
        temperature: float = 0.1,
        *,
        reduction: str = "mean",
        max_memory: int | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        hold(self, supcon_loss, temperature=temperature, reduction=reduction, max_memory=max_memory, **given(impl))

    extra_repr = show

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
    ) -> Tensor:
        return supcon_loss(embeddings, labels, references, reference_labels, **self.settings)


class InfoNCELoss(nn.Module):
    """Holds the settings of `infonce_loss`; computes nothing itself."""

    lr_scale = 1.0
    settings: dict[str, Any]

    def __init__(
        self,
        temperature: float = 0.07,
        *,
        reduction: str = "mean",
        max_memory: int | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        hold(self, infonce_loss, temperature=temperature, reduction=reduction, max_memory=max_memory, **given(impl))

    extra_repr = show

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
    ) -> Tensor:
        return infonce_loss(embeddings, labels, references, reference_labels, **self.settings)
