"""Exact passes over anchors × references in bounded memory: a few rows at a time, made again for the gradient.

A loss gives a function of rows: what it knows of each anchor from that anchor's row of the (B, R) matrix. While the
matrix is small it is called once, with everything; beyond, a block of anchors at a time against all references. No
block's matrix or relation is kept: autograd makes it again when the gradient comes by. The numbers are the same.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import checks, distances, reduce, relations
from nearkin.core.autograd import recomputed
from nearkin.core.labels import LabelDistance, Labels, Relation

PAIR = (
    64  # bytes a pair of anchor and reference: at most 16 float32 matrices, which the memory benchmark holds losses to
)
ROW = 48  # bytes a coordinate of anchors and references: wide copies, their gradients, and sums of these
AUTOMATIC = 2**30  # bytes of matrices at once where nobody said: 4,096 anchors and references in float32


class Batch(NamedTuple):
    """What `checks.batch` has found sound. Without references the batch meets itself, less its self-pairs."""

    embeddings: Tensor
    labels: Labels
    references: Tensor | None
    reference_labels: Labels | None


Rows = Callable[..., tuple[Tensor, ...]]  # of (anchors, references, relation, *more): tensors, an entry an anchor


def run(
    rows: Rows,
    batch: Batch,
    *more: Tensor,
    max_memory: int | None,
    graded: bool = False,
    whole: str | None = None,
    draws: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """What `rows` says of each anchor, in blocks where that is needed to stay within `max_memory` bytes.

    more: further tensors with an entry an anchor, handed on. graded: the relation is a function that makes `gaps`, so
    that nobody else holds them. whole: why the loss must see all rows at once, where it must. draws: a row's pairs are
    drawn at random, from `generator` or torch's own.
    """
    size = block(batch, max_memory, whole)
    if size >= batch.embeddings.shape[0]:
        kin = partial(gaps, batch) if graded else relation(batch)
        return rows(batch.embeddings, batch.references, kin, *more)
    batch, unchanged = _kept(batch)
    kind = torch.promote_types(batch.embeddings.dtype, torch.float32)
    anchors = _held(batch.embeddings)
    others = anchors if batch.references is None else _held(batch.references)
    other_kind = kind if batch.references is None else torch.promote_types(batch.references.dtype, torch.float32)

    def part(start: int, x: Tensor, *slices: Tensor) -> tuple[Tensor, ...]:
        unchanged()
        stop = start + x.shape[0]
        kin = partial(gaps, batch, start, stop) if graded else relation(batch, start, stop)
        return rows(x.to(kind), others.to(other_kind), kin, *slices)

    found = []
    again: dict[str, Any] = {"preserve_rng_state": draws and generator is None}
    split = (torch.split(t, size) for t in (anchors, *(t.clone() for t in more)))
    for i, pieces in enumerate(zip(*split, strict=True)):
        if draws and generator is not None:
            again["context_fn"] = _replay(generator)
        found.append(recomputed(part, i * size, *pieces, **again))
    return tuple(torch.cat(column) for column in zip(*found, strict=True))


def block(batch: Batch, max_memory: int | None, whole: str | None = None) -> int:
    """Anchors that may meet all references at once; at least all of them where everything fits.

    `max_memory` bounds the bytes a loss holds beside its arguments, their gradients and what it returns: the matrices
    of a block, `PAIR` bytes a pair (twice that in float64), and the copies of anchors and references, `ROW` bytes a
    coordinate. None: blocks of 1 GiB, copies not counted.
    """
    if max_memory is not None:
        checks.integer("max_memory", max_memory, 1)
    other = batch.embeddings if batch.references is None else batch.references
    wide = batch.embeddings.dtype == torch.float64 or other.dtype == torch.float64
    a_row = other.shape[0] * PAIR * (2 if wide else 1)
    number = batch.embeddings.shape[0]
    if max_memory is None:
        return number if whole or number * a_row <= AUTOMATIC else max(1, AUTOMATIC // a_row)
    fixed = (number + other.shape[0]) * batch.embeddings.shape[1] * ROW
    rows = number if whole else min(number, 1)
    if fixed + rows * a_row > max_memory:
        because = f"all rows at once ({whole})" if whole else "one row of anchors × references"
        checks.enough("max_memory", max_memory, fixed + rows * a_row, f"what {because} takes in bytes")
    return (max_memory - fixed) // a_row if a_row else number


def relation(batch: Batch, start: int = 0, stop: int | None = None) -> Relation:
    """The relation of anchors start to stop with all references."""
    labels, references, reference_labels = batch.labels, batch.references, batch.reference_labels
    if stop is None:
        return relations.of(labels, references, reference_labels)
    part = _slice(labels, start, stop)
    if references is not None:
        return relations.of(part, references, reference_labels)
    if isinstance(part, Relation):  # the caller's own masks stay as they are
        kin = Relation(part.positive.clone(), part.negative.clone())
    else:
        kin = relations.of(part, batch.embeddings, labels)
    return Relation(_own(kin.positive, start), _own(kin.negative, start))


def gaps(batch: Batch, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
    """Label distances of anchors start to stop with all references, and which of them say something, each (b, R)."""
    part = batch.labels if stop is None else _slice(batch.labels, start, stop)
    distance = relations.label_distances(part, batch.labels if batch.references is None else batch.reference_labels)
    valid = distance > 0
    return distance, _own(valid, start) if batch.references is None else valid


def fits(batch: Batch, max_memory: int | None) -> bool:
    """Whether the loss of the batch is computed in one piece."""
    return block(batch, max_memory) >= batch.embeddings.shape[0]


def blocks(batch: Batch, max_memory: int | None) -> Iterator[tuple[int, Relation]]:
    """The first anchor of each block and the block's relation, for what needs no distances."""
    number, size = batch.embeddings.shape[0], block(batch, max_memory)
    for start in range(0, number, size):
        yield start, relation(batch, start, min(start + size, number))


def turned(batch: Batch) -> Batch:
    """References as anchors, and the other way round."""
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


def counted(values: Tensor, mask: Tensor, reduction: str = "active") -> tuple[Tensor, Tensor, Tensor]:
    """Of an anchor's terms, none below 0: their sum, their number, and how many are active, each (B,).

    Only reduction="active" asks for the last; else it is the number again.
    """
    number, sums = reduce.count_in_row(mask), torch.where(mask, values, 0.0).sum(1)
    if reduction != "active":
        return sums, number, number
    return sums, number, reduce.count_in_row(mask & ~(values <= 0))  # a NaN is never inactive


def hinges(values: Tensor, mask: Tensor, reduction: str, **shape: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the hinges that `reduce.hinges` makes of an anchor's masked values."""
    sums, kept = reduce.hinges(values, mask, **shape)
    number = reduce.count_in_row(mask)
    return sums, number, reduce.count_in_row(kept > 0) if reduction == "active" else number


def _held(x: Tensor) -> Tensor:
    """In the wide type, in which the gradients of the blocks are summed: rounded once, as the dense form's are."""
    return x.to(distances.wide(x), copy=True)


def _kept(batch: Batch) -> tuple[Batch, Callable[[], None]]:
    """The batch with labels of its own, which the pass for the gradient will find as they were.

    A queue of references may move on before the gradient comes by. Masks and label distances are too large to copy:
    the function says whether they are still what they were.
    """
    labels, references, others = batch.labels, batch.references, batch.reference_labels
    large: tuple[Tensor, ...] = ()
    if isinstance(labels, Relation):
        large = (labels.positive, labels.negative)
    elif isinstance(labels, LabelDistance):
        large = (labels.distance,)
    elif references is not None and others is None:
        large = (labels,)
    else:
        labels = labels.clone()
    large = tuple(t for t in large if not t.is_inference())
    before = [t._version for t in large]

    def unchanged() -> None:
        if [t._version for t in large] != before:
            raise RuntimeError("labels must not change in place between a loss and its backward, got a changed matrix")

    others = others.clone() if isinstance(others, Tensor) else others
    return Batch(batch.embeddings, labels, references, others), unchanged


def _slice(labels: Labels, start: int, stop: int) -> Labels:
    if isinstance(labels, Relation):
        ids = None if labels.ids is None else labels.ids[start:stop]
        return Relation(labels.positive[start:stop], labels.negative[start:stop], ids)
    if isinstance(labels, LabelDistance):
        return LabelDistance(labels.distance[start:stop])
    return labels[start:stop]


def _own(mask: Tensor, start: int) -> Tensor:
    """Nobody meets himself: anchor i of the block is reference start + i."""
    mask.diagonal(start).fill_(False)
    return mask


def _replay(
    generator: torch.Generator,
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """Contexts of a block's first and second pass: the second draws what the first drew, and leaves no trace."""
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
