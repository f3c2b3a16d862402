"""Exact passes over anchors × references in bounded memory: block by block, recomputed for the gradient.

A loss is a function of rows: what it computes for each anchor from that anchor's row of the (B, R) matrix. A small
matrix is computed at once; a large one a block of anchors at a time, each against all references. No block's matrix or
relation is stored: the backward pass recomputes it. The numbers are the same.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import checks, distances, reduce, relations
from nearkin.core.autograd import HandGradient, full_precision, recomputed, traced
from nearkin.core.labels import BatchFirst, LabelDistance, Labels, Relation

__all__ = ["AUTOMATIC", "Batch", "Rows", "block", "blocks", "fits", "gaps", "hinges", "relation", "run"]
__all__ += ["summed", "sums_and_counts", "transposed"]

PAIR = 64  # bytes per pair of anchor and reference: up to 16 float32 matrices, the bound of the memory benchmark
ROW = 48  # bytes per coordinate of anchors and references: wide copies, their gradients, and sums of these
AUTOMATIC = 2**30  # default bytes of matrices at once: 4,096 anchors and references in float32


class Batch(NamedTuple):
    """Arguments that `checks.batch` has accepted. Without references: all pairs of the batch but self-pairs."""

    embeddings: Tensor
    labels: Labels
    references: Tensor | None
    reference_labels: Labels | None


Rows = Callable[..., tuple[Tensor, ...]]  # of (anchors, references, relation, *extra): tensors, one entry per anchor


def run(
    rows: Rows,
    batch: Batch,
    *extra: Tensor,
    max_memory: int | None,
    graded: bool = False,
    all_rows: str | None = None,
    draws: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """`rows` of all anchors, in blocks if that is needed to stay within `max_memory` bytes.

    extra: further tensors with one entry per anchor, passed on. graded: the relation is a function that makes `gaps`,
    so that nothing else stores them. all_rows: why the loss needs all rows at once, if it does. draws: a row's pairs
    are drawn at random, from `generator` or torch's default.
    """
    size = block(batch, max_memory, all_rows)
    if size >= batch.embeddings.shape[0]:
        related = partial(gaps, batch) if graded else relation(batch)
        return rows(batch.embeddings, batch.references, related, *extra)
    part, anchors, references = _parts(rows, batch, graded)
    columns = []
    again: dict[str, Any] = {"preserve_rng_state": draws and generator is None}
    split = (torch.split(t, size) for t in (anchors, *(t.clone() for t in extra)))
    for i, pieces in enumerate(zip(*split, strict=True)):
        if draws and generator is not None:
            again["context_fn"] = _replay(generator)
        columns.append(recomputed(part, i * size, references, *pieces, **again))
    return tuple(torch.cat(column) for column in zip(*columns, strict=True))


def summed(
    rows: Rows,
    batch: Batch,
    *extra: Tensor,
    learned: tuple[Tensor, ...] = (),
    max_memory: int | None,
    graded: bool = False,
    all_rows: str | None = None,
) -> tuple[Tensor, ...]:
    """The sums over all anchors of what `rows` computes, the first of them with a gradient, in blocks.

    Where one sum pulls all rows alike, its gradient is made while a block is there: each block is computed once.
    learned: tensors beside the arguments that `rows` depends on.
    """
    size = block(batch, max_memory, all_rows)
    inputs = (batch.embeddings, batch.references, *extra, *learned)
    if traced() or not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)):
        columns = run(rows, batch, *extra, max_memory=max_memory, graded=graded, all_rows=all_rows)
        return tuple(column.sum() for column in columns)
    part, anchors, references = _parts(rows, batch, graded)
    alone = batch.references is None
    copies = tuple(t.clone() for t in extra)
    result: tuple[Tensor, ...] = _Summed.call(
        part, size, alone, len(extra), anchors, None if alone else references, *copies, *learned
    )
    return result


class _Summed(HandGradient):
    """Sums over blocks of anchors, with the gradient of the first, made block by block in the wide type."""

    @staticmethod
    def forward(ctx: Any, part: Any, size: int, alone: bool, extras: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        slopes = [torch.zeros_like(t) if t is not None and t.requires_grad else None for t in inputs]
        anchors, references, *others = inputs
        learned, by_row, slopes_by_row = others[extras:], (anchors, *others[:extras]), (slopes[0], *slopes[2:][:extras])
        everyone, slope_of_everyone = (anchors, slopes[0]) if alone else (references, slopes[1])
        totals: list[Tensor] = []
        for start in range(0, anchors.shape[0], size):
            rows = slice(start, start + size)
            whole = _leaf(everyone, slope_of_everyone)
            pieces = [_leaf(t[rows], slope) for t, slope in zip(by_row, slopes_by_row, strict=True)]
            own = (slope if slope is None else slope[rows] for slope in slopes_by_row)
            targets = [slope_of_everyone, *own, *slopes[2 + extras :]]
            pulled = [(x, t) for x, t in zip([whole, *pieces, *learned], targets, strict=True) if t is not None]
            with torch.enable_grad():
                sums = [value.sum() for value in part(start, whole, *pieces)]
            if sums[0].requires_grad:
                with full_precision(anchors):  # as in a backward pass
                    found = torch.autograd.grad(sums[0], [x for x, _ in pulled], allow_unused=True)
                for (_, target), slope in zip(pulled, found, strict=True):
                    if slope is not None:
                        target.add_(slope)
            sums = [total.detach() for total in sums]
            totals = sums if not totals else [a + b for a, b in zip(totals, sums, strict=True)]
        ctx.again = part, size, alone, extras
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*totals[1:])
        ctx.save_for_backward(*inputs, *slopes)
        return tuple(totals)

    @staticmethod
    def backward(ctx: Any, slope: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, slopes = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        if slope is None:
            return (None,) * (4 + len(inputs))
        if not torch.is_grad_enabled():
            return *(None,) * 4, *(None if t is None else t * slope for t in slopes)
        part, size, alone, extras = ctx.again

        def once_more(anchors: Any, references: Any, *others: Any) -> Tensor:
            whole, total = anchors if alone else references, slope.new_zeros(())
            for start in range(0, anchors.shape[0], size):
                slices = (t[start : start + size] for t in (anchors, *others))
                total = total + recomputed(part, start, whole, *slices)[0].sum()
            return total

        # Views: an input may have been made from another, and that path is not the function's.
        own = [x if x is None else x.view_as(x) for x in inputs[: 2 + extras]]
        sources = [*own, *inputs[2 + extras :]]
        chosen = [x for x, target in zip(sources, slopes, strict=True) if target is not None]
        found = iter(torch.autograd.grad(once_more(*own), chosen, slope, create_graph=True, allow_unused=True))
        return *(None,) * 4, *(None if target is None else next(found) for target in slopes)


def _leaf(x: Tensor, slope: Tensor | None) -> Tensor:
    """The tensor as the start of a graph, if a gradient by it is wanted."""
    return x.detach().requires_grad_(slope is not None)


def _parts(rows: Rows, batch: Batch, graded: bool) -> tuple[Callable[..., tuple[Tensor, ...]], Tensor, Tensor]:
    """`rows` as a function of (start, references, anchors of a block, *extra), and wide anchors and references."""
    batch, unchanged = _snapshot(batch)
    kind = torch.promote_types(batch.embeddings.dtype, torch.float32)
    anchors = _wide_copy(batch.embeddings)
    references = anchors if batch.references is None else _wide_copy(batch.references)
    other_kind = kind if batch.references is None else torch.promote_types(batch.references.dtype, torch.float32)

    def part(start: int, references: Tensor, x: Tensor, *slices: Tensor) -> tuple[Tensor, ...]:
        unchanged()
        stop = start + x.shape[0]
        related = partial(gaps, batch, start, stop) if graded else relation(batch, start, stop)
        return rows(x.to(kind), references.to(other_kind), related, *slices)

    return part, anchors, references


def block(batch: Batch, max_memory: int | None, all_rows: str | None = None) -> int:
    """Anchors per block, each against all references; the number of anchors or more if everything fits.

    `max_memory` bounds the bytes a loss takes beside its arguments, their gradients and its result: the matrices of a
    block, `PAIR` bytes per pair (twice that in float64), and the copies of anchors and references, `ROW` bytes per
    coordinate. None: blocks of 1 GiB, copies not counted.
    """
    if max_memory is not None:
        checks.integer("max_memory", max_memory, 1)
    other = batch.embeddings if batch.references is None else batch.references
    is_float64 = batch.embeddings.dtype == torch.float64 or other.dtype == torch.float64
    row_bytes = other.shape[0] * PAIR * (2 if is_float64 else 1)
    anchors = batch.embeddings.shape[0]
    if max_memory is None:
        return anchors if all_rows or anchors * row_bytes <= AUTOMATIC else max(1, AUTOMATIC // row_bytes)
    fixed = (anchors + other.shape[0]) * batch.embeddings.shape[1] * ROW
    rows = anchors if all_rows else min(anchors, 1)
    if fixed + rows * row_bytes > max_memory:
        because = f"all rows at once ({all_rows})" if all_rows else "one row of anchors × references"
        checks.enough("max_memory", max_memory, fixed + rows * row_bytes, f"what {because} takes in bytes")
    return (max_memory - fixed) // row_bytes if row_bytes else anchors


def relation(batch: Batch, start: int = 0, stop: int | None = None) -> Relation:
    """The relation of anchors start to stop with all references."""
    labels, references, reference_labels = batch.labels, batch.references, batch.reference_labels
    if stop is None:
        return relations.of(labels, references, reference_labels)
    part = _slice(labels, start, stop)
    if isinstance(part, BatchFirst) or isinstance(reference_labels, BatchFirst):
        sides: list[Any] = [side.ids if isinstance(side, BatchFirst) else side for side in (part, reference_labels)]
        related = relations.of(sides[0], references, sides[1])
        return Relation(_without_self(related.positive, start), _without_self(related.negative, start))
    if references is not None:
        return relations.of(part, references, reference_labels)
    if isinstance(part, Relation):  # the caller's own masks stay as they are
        related = Relation(part.positive.clone(), part.negative.clone())
    else:
        related = relations.of(part, batch.embeddings, labels)
    return Relation(_without_self(related.positive, start), _without_self(related.negative, start))


def gaps(batch: Batch, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
    """Label distances of anchors start to stop with all references, and which of them count, each (b, R)."""
    part = batch.labels if stop is None else _slice(batch.labels, start, stop)
    distance = relations.label_distances(part, batch.labels if batch.references is None else batch.reference_labels)
    valid = distance > 0
    return distance, _without_self(valid, start) if batch.references is None else valid


def fits(batch: Batch, max_memory: int | None) -> bool:
    """Whether the loss of the batch is computed in one block."""
    return block(batch, max_memory) >= batch.embeddings.shape[0]


def blocks(batch: Batch, max_memory: int | None) -> Iterator[tuple[int, Relation]]:
    """The first anchor and the relation of each block, for what needs no distances."""
    number, size = batch.embeddings.shape[0], block(batch, max_memory)
    for start in range(0, number, size):
        yield start, relation(batch, start, min(start + size, number))


def transposed(batch: Batch) -> Batch:
    """References as anchors, and anchors as references."""
    x, labels, references, reference_labels = batch
    if isinstance(labels, Relation):
        labels = Relation(labels.positive.T, labels.negative.T)
    elif reference_labels is not None:
        labels, reference_labels = reference_labels, labels
    elif references is not None:
        assert isinstance(labels, Tensor)
        labels = labels.T
    return Batch(
        x if references is None else references, labels, references if references is None else x, reference_labels
    )


def sums_and_counts(values: Tensor, mask: Tensor, reduction: str = "active") -> tuple[Tensor, Tensor, Tensor]:
    """Of the terms of each anchor, all >= 0: their sum, their number, and how many are active, each (B,).

    Only reduction="active" needs the last; otherwise it is the number again.
    """
    number, sums = reduce.count_in_row(mask), torch.where(mask, values, 0.0).sum(1)
    if reduction != "active":
        return sums, number, number
    return sums, number, reduce.count_in_row(mask & ~(values <= 0))  # a NaN is never inactive


def hinges(values: Tensor, mask: Tensor, reduction: str, **shape: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the hinges of each anchor's masked values, as `reduce.hinges` computes them."""
    sums, hinged = reduce.hinges(values, mask, **shape)
    number = reduce.count_in_row(mask)
    return sums, number, reduce.count_in_row(hinged > 0) if reduction == "active" else number


def _wide_copy(x: Tensor) -> Tensor:
    """A copy in the wide type, in which the gradients of the blocks are summed: rounded once, as in the dense form."""
    return x.to(distances.wide(x), copy=True)


def _snapshot(batch: Batch) -> tuple[Batch, Callable[[], None]]:
    """The batch with a copy of its labels for the backward pass, and a check that the rest has not changed.

    A queue of references may have moved on by then. Masks and label distances are too large to copy: the check raises
    if they were changed in place.
    """
    labels, references, reference_labels = batch.labels, batch.references, batch.reference_labels
    large: tuple[Tensor, ...] = ()
    if isinstance(labels, Relation):
        large = (labels.positive, labels.negative)
    elif isinstance(labels, LabelDistance):
        large = (labels.distance,)
    elif references is not None and reference_labels is None:
        assert isinstance(labels, Tensor)
        large = (labels,)
    else:
        labels = _copied(labels)
    large = tuple(t for t in large if not t.is_inference())
    before = [t._version for t in large]

    def unchanged() -> None:
        if [t._version for t in large] != before:
            raise RuntimeError("labels must not change in place between a loss and its backward, got a changed matrix")

    return Batch(batch.embeddings, labels, references, _copied(reference_labels)), unchanged


def _copied(labels: Any) -> Any:
    if isinstance(labels, BatchFirst):
        return BatchFirst(labels.ids.clone())
    return labels.clone() if isinstance(labels, Tensor) else labels


def _slice(labels: Labels, start: int, stop: int) -> Labels:
    if isinstance(labels, Relation):
        ids = None if labels.ids is None else labels.ids[start:stop]
        return Relation(labels.positive[start:stop], labels.negative[start:stop], ids)
    if isinstance(labels, LabelDistance):
        return LabelDistance(labels.distance[start:stop])
    if isinstance(labels, BatchFirst):
        return BatchFirst(labels.ids[start:stop])
    return labels[start:stop]


def _without_self(mask: Tensor, start: int) -> Tensor:
    """Clears self-pairs: anchor i of the block is reference start + i."""
    mask.diagonal(start).fill_(False)
    return mask


def _replay(
    generator: torch.Generator,
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """Contexts of a block's first and second pass: the second repeats the draws of the first and restores the state."""
    state = generator.get_state()

    @contextmanager
    def again() -> Iterator[None]:
        now = generator.get_state()
        generator.set_state(state)
        try:
            yield
        finally:
            generator.set_state(now)

    return lambda: (nullcontext(), again())
