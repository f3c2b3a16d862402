"""Verification over all pairs of a labelled set, exact, without holding the pairs.

A score is read as a whole number in the order of the scores, 16 binary digits at a time: one pass over the similarity
matrix counts genuine and impostor pairs by their first digits, which shows in which block of 65,536 each wanted order
statistic lies; the next pass counts the next digits within these blocks only. After 2 passes (float32; 4 in float64)
a block is one single score, and the counts above it are exact, however many pairs and ties there are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks, distances
from nearkin.core.relations import UNKNOWN
from nearkin.evaluation.verification import FARS, Counts, at_fars, both, crossed, eer, measurable, most_accepted, point

__all__ = ["all_pairs"]

_TILE = 1024  # rows a side; fixed, since a matrix product rounds differently in another shape
_DIGITS = 16
_BINS = 1 << _DIGITS
_TABLE = 2 * 2 * _BINS * 8  # bytes to count one block and to read the counts


@dataclass
class _Search:
    """The highest score at which `reached(tp, fp)` is true of the genuine and impostors counted from the top."""

    reached: Callable[[Counts, Counts], NDArray[np.bool_]]
    block: int = 0  # the leading digits of the score, in the end all of them
    above: tuple[int, int] = (0, 0)  # genuine and impostors above the block
    within: tuple[int, int] = (0, 0)  # the same, with those of the block

    def enter(self, table: Counts, first: bool) -> None:
        """Narrows the block, by the genuine and impostors of its parts: table (2, 65536)."""
        counts = np.cumsum(table[:, ::-1], axis=1) + np.array(self.above)[:, None]  # from the highest down
        place = int(np.argmax(self.reached(counts[0], counts[1])))
        if place:
            self.above = int(counts[0, place - 1]), int(counts[1, place - 1])
        self.within = int(counts[0, place]), int(counts[1, place])
        digit = _BINS - 1 - place
        self.block = digit - _BINS // 2 if first else (self.block << _DIGITS) + digit


def all_pairs(
    embeddings: Tensor,
    labels: Tensor,
    *,
    similarity: str = "cosine",
    fars: Sequence[float] = FARS,
    confidence: float = 0.95,
    budget: int = 512 << 20,
) -> dict[str, Any]:
    """Verifies every pair i < j of embeddings (N, D): genuine where labels (N,) are equal; label -1 is left out.

    `similarity` is "cosine" or "dot", computed in float32, or in float64 for float64 embeddings. Returns "genuine",
    "impostors", "eer", "tar@far=…", "not_measurable" and "operating_points" as `verification` does from the list of
    all these scores, and equal to it; more `fars` trace more of the ROC. Area and accuracy over folds are left to
    `verification`: the one needs every score, the other is a protocol of pair lists.

    `budget` bounds the bytes of working memory beside the embeddings; a smaller one means more passes, never another
    result. Pairs that share an item are not independent, so the intervals are narrower than the truth.
    """
    checks.rows("embeddings", embeddings)
    checks.class_ids("labels", labels, embeddings)
    checks.one_of("similarity", similarity, ("cosine", "dot"))
    checks.finite("embeddings", embeddings)
    tile = _tile_bytes(embeddings.shape[1])
    checks.enough("budget", budget, tile + _TABLE, "a tile and a table, in bytes")
    labels = labels.long()
    sizes = torch.unique(labels[labels != UNKNOWN], return_counts=True)[1].tolist()
    genuine = sum(size * (size - 1) // 2 for size in sizes)
    impostors = sum(sizes) * (sum(sizes) - 1) // 2 - genuine
    both(genuine, impostors)
    wanted = measurable(fars, impostors)
    crossing = _Search(lambda tp, fp: crossed(tp, fp, genuine, impostors))
    refusals = [_Search(partial(_too_many, most_accepted(far, impostors))) for far in wanted]
    for group in _groups([crossing, *refusals], (budget - tile) // _TABLE):
        _run(group, embeddings.detach(), labels, similarity)
    points = [
        point(far, _next_above(search.block, embeddings.dtype), *search.above, genuine, impostors, confidence)
        for far, search in zip(wanted, refusals, strict=True)
    ]
    tp, fp = zip(crossing.above, crossing.within, strict=True)
    found = {"genuine": genuine, "impostors": impostors, "eer": eer(tp, fp, genuine, impostors)}
    return found | at_fars(fars, points)


def _tile_bytes(dim: int) -> int:
    """Rows and columns in float64 with what scaling them takes, and an entry's score, number, place and masks."""
    return _TILE * (64 * dim + 128 * _TILE)


def _too_many(most: int, tp: Counts, fp: Counts) -> NDArray[np.bool_]:
    return np.asarray(fp > most)


def _groups(searches: list[_Search], at_once: int) -> Iterator[list[_Search]]:
    for start in range(0, len(searches), at_once):
        yield searches[start : start + at_once]


def _run(searches: list[_Search], embeddings: Tensor, labels: Tensor, similarity: str) -> None:
    """Takes all searches down to a single score, one pass over the matrix for each 16 digits."""
    width = 64 if embeddings.dtype == torch.float64 else 32
    for shift in range(width - _DIGITS, -1, -_DIGITS):
        first = shift == width - _DIGITS
        blocks = torch.tensor(sorted({search.block for search in searches}), device=embeddings.device)
        table = torch.zeros(len(blocks), 2, _BINS, dtype=torch.long, device=embeddings.device)
        for scores, impostor in _tiles(embeddings, labels, similarity):
            key = _ordered(scores).long()
            if first:
                place = (key >> shift) + _BINS // 2
            else:
                parent = key >> (shift + _DIGITS)
                slot = torch.searchsorted(blocks, parent).clamp_(max=len(blocks) - 1)
                inside = blocks[slot] == parent
                key, impostor = key[inside], impostor[inside]
                place = slot[inside] * (2 * _BINS) + ((key >> shift) & (_BINS - 1))
            place += impostor * _BINS
            table.view(-1).index_add_(0, place, torch.ones_like(place))
        counts, order = table.cpu().numpy(), blocks.tolist()
        for search in searches:
            search.enter(counts[order.index(search.block)], first)


def _tiles(embeddings: Tensor, labels: Tensor, similarity: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of all pairs i < j of labelled rows, tile by tile, and which are impostors: flat, of one length."""
    ready = distances.unit if similarity == "cosine" else distances.upcast
    known = (labels != UNKNOWN).nonzero().squeeze(1)
    starts = range(0, len(known), _TILE)
    for top in starts:
        rows = known[top : top + _TILE]
        x = ready(embeddings[rows])
        for left in starts:
            if left < top:
                continue
            columns = known[left : left + _TILE]
            scores = distances.dot(x, x if left == top else ready(embeddings[columns]))  # (B, R)
            impostor = labels[rows][:, None] != labels[columns][None, :]
            if left == top:
                i, j = torch.triu_indices(len(rows), len(rows), 1, device=scores.device)
                yield scores[i, j], impostor[i, j]
            else:
                yield scores.flatten(), impostor.flatten()


def _ordered(scores: Tensor) -> Tensor:
    """Whole numbers in the order of the scores; -0 and 0 are one."""
    kind = torch.int64 if scores.dtype == torch.float64 else torch.int32
    bits = (scores + 0.0).view(kind)
    return torch.where(bits < 0, bits ^ torch.iinfo(kind).max, bits)


def _next_above(key: int, kind: torch.dtype) -> float:
    """The next score above the one of this number, in the type of the scores."""
    whole, real = (np.int64, np.float64) if kind == torch.float64 else (np.int32, np.float32)
    bits = key if key >= 0 else key ^ int(np.iinfo(whole).max)
    return float(np.nextafter(np.array([bits], dtype=whole).view(real)[0], np.inf, dtype=real))
