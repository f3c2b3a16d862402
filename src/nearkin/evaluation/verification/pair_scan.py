"""Passes over all pairs of a labelled set, tile by tile: exact order statistics of their scores, and the ROC curve.

A score is read as an integer key that sorts like the scores.

Order statistics (`Search`): 16 binary digits of the key at a time. One pass over the similarity matrix counts genuine
and impostor pairs by their first digits, which shows in which block of 65,536 keys each order statistic lies; the next
pass counts the next digits within these blocks only. After 2 passes (float32; 4 in float64) a block is one single
score, and the counts above it are exact, however many pairs and ties there are.

The curve (`sweep`): TAR changes at the scores of genuine pairs only, so area and best accuracy follow from the
impostors between them. The distinct genuine scores are collected from the lowest up, as many as memory allows, in one
pass over the tiles with genuine pairs; one pass over all pairs then counts the impostors below, at and between these
scores. If there are more, the next range follows.

Equal rows: products round by the place of a row in its tile, so tiles are made of different rows alone, and pairs of
their copies have the very scores of these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import distances
from nearkin.core.relations import UNKNOWN
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Counts, Progress, group_numbers
from nearkin.evaluation.retrieval.duplicate_rows import first_copies
from nearkin.evaluation.verification.roc import Roc

__all__ = ["KEY_BYTES", "TABLE", "TILE", "Levels", "Scan", "Search", "passes_of", "run", "sweep", "tile_bytes"]

TILE = 1024  # rows per side at most; no budget changes it, since a matrix product rounds differently in another shape
_ROWS = 256 << 20  # bytes for the rows and columns of a tile: with long rows it has fewer
_DIGITS = 16
_BINS = 1 << _DIGITS
TABLE = 2 * 2 * _BINS * 8  # bytes to count one block and to read the counts
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1  # keys that no finite score has
KEY_BYTES = 160  # working memory per distinct genuine score, merging and counting included


def tile_bytes(dim: int) -> int:
    """Rows and columns in float64 with the memory to scale them, and per entry the score, key, index and masks."""
    side = tile_side(dim)
    return side * (64 * dim + 128 * side)


def tile_side(dim: int) -> int:
    """How many rows of this many numbers a tile has on each side."""
    side = TILE
    while side > 1 and 64 * dim * side > _ROWS:
        side = (side + 1) // 2
    return side


class Block(NamedTuple):
    """Some different rows, and all rows equal to one of them, these included, by their place in the scan."""

    rows: Tensor  # (n,)
    copies: Tensor  # (m,)
    place: Tensor  # (m,) of the one in `rows` that each copy is equal to, rising
    lowest: int  # class of a copy
    highest: int


class Scan:
    """The labelled rows in the order of their classes, so that genuine pairs lie near the diagonal.

    groups: pairs of the same class and group are left out.
    """

    def __init__(
        self,
        embeddings: Tensor,
        labels: Tensor,
        similarity: str,
        progress: Progress | None = None,
        group: ProcessGroup | None = None,
        groups: Tensor | None = None,
    ) -> None:
        known = (labels != UNKNOWN).nonzero().squeeze(1)
        order = known[labels[known].argsort(stable=True)]
        self.embeddings, self.order, self.labels = embeddings.detach(), order, labels[order]
        self.classes, self.number = torch.unique(
            self.labels, return_inverse=True
        )  # number: the class of each row, from 0
        self.cosine = similarity == "cosine"
        self.prepare = distances.unit if self.cosine else distances.upcast
        self.dtype = torch.float64 if embeddings.dtype == torch.float64 else torch.float32
        sizes = torch.bincount(self.number).tolist()
        self.genuine = sum(size * (size - 1) // 2 for size in sizes)
        self.pairs = len(order) * (len(order) - 1) // 2
        self.impostors = self.pairs - self.genuine
        self.left_out, self.groups = 0, None
        if groups is not None:
            self.groups = group_numbers(groups[order])
            sizes = torch.unique(self.number * (2 * len(order)) + self.groups, return_counts=True)[1].tolist()
            self.left_out = sum(size * (size - 1) // 2 for size in sizes)
            self.genuine -= self.left_out
        self.blocks = self._blocks(tile_side(embeddings.shape[1]))
        self.progress, self.done, self.passes = progress, 0, 0
        self.group = group if group is not None and group.size > 1 else None

    def _blocks(self, side: int) -> list[Block]:
        same = torch.unique(first_copies(self.embeddings, self.prepare)[self.order], return_inverse=True)[1]
        at = torch.arange(len(same), device=same.device)
        first = torch.full_like(at, len(at)).scatter_reduce_(0, same, at, "amin")[same]  # of the rows equal to each
        rows = (first == at).nonzero().squeeze(1)
        place, copies = torch.searchsorted(rows, first).sort(stable=True)
        blocks = []
        for top in range(0, len(rows), side):
            low, high = torch.searchsorted(place, torch.tensor([top, top + side], device=place.device)).tolist()
            lowest, highest = torch.aminmax(self.number[copies[low:high]])
            ends = int(lowest), int(highest)
            blocks.append(Block(rows[top : top + side], copies[low:high], place[low:high] - top, *ends))
        return blocks

    def tiles(self, genuine_only: bool = False) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """As `_all_tiles`, without the pairs of the same class and group."""
        for key, left, right in self._all_tiles(genuine_only):
            if self.groups is None:
                yield key, left, right
                continue
            counted = self.is_impostor(left, right) | (self.groups[left] != self.groups[right])
            yield key[counted], left[counted], right[counted]

    def _all_tiles(self, genuine_only: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Keys of all pairs i < j, and both rows: flat, of one length.

        genuine_only: skips the tiles without a genuine pair. Otherwise the processes of a group take turns at the
        tiles, and counts over them go through `summed`.
        """
        number = 0
        for top, rows in enumerate(self.blocks):
            x = self.prepare(self.embeddings[self.order[rows.rows]])
            for columns in self.blocks[top:]:
                if genuine_only and (rows.highest < columns.lowest or columns.highest < rows.lowest):
                    continue
                number += 1
                if self.group is not None and not genuine_only and number % self.group.size != self.group.rank:
                    continue
                y = x if columns is rows else self.prepare(self.embeddings[self.order[columns.rows]])
                for key, left, right in self._pairs(distances.dot(x, y), rows, columns):
                    yield key, left, right
                    if not genuine_only:
                        self._report(len(key))

    def _pairs(self, scores: Tensor, rows: Block, columns: Block) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Keys of the pairs of all copies of these rows with those of these columns, a tile of them at a time."""
        diagonal = columns is rows
        if diagonal:  # one score either way round, and exactly 1 for two copies
            scores = scores.triu() + scores.triu(1).T
            own = scores.diagonal()
            own.copy_(torch.where(own > 0.5, 1.0, own) if self.cosine else own)
        side = tile_side(self.embeddings.shape[1])
        for top in range(0, len(rows.copies), side):
            first, of_row = rows.copies[top : top + side], scores[rows.place[top : top + side]]
            for left in range(top if diagonal else 0, len(columns.copies), side):
                second, tile = columns.copies[left : left + side], of_row[:, columns.place[left : left + side]]
                if diagonal and left == top:
                    i, j = torch.triu_indices(len(first), len(first), 1, device=tile.device)
                    yield _keys(tile[i, j]).long(), first[i], second[j]
                else:
                    yield _keys(tile).long().flatten(), first.repeat_interleave(len(second)), second.repeat(len(first))

    def summed(self, table: Tensor) -> Counts:
        """Counts over `tiles()`, added over all processes."""
        return np.asarray((table if self.group is None else self.group.total(table)).cpu().numpy())

    def is_impostor(self, first: Tensor, second: Tensor) -> Tensor:
        """Which of these pairs are impostors."""
        return torch.ne(self.number[first], self.number[second])

    def score(self, key: int) -> float:
        """The score of a key."""
        return float(self._score(key))

    def next_above(self, key: int) -> float:
        """The next score above the one of this key, in the type of the scores."""
        value = self._score(key)
        return float(np.nextafter(value, np.inf, dtype=value.dtype))

    def key(self, score: float) -> int:
        """The key of a score."""
        return int(_keys(torch.tensor([score], dtype=self.dtype)))

    def _score(self, key: int) -> np.floating[Any]:
        integer, real = (np.int64, np.float64) if self.dtype == torch.float64 else (np.int32, np.float32)
        bits = key if key >= 0 else key ^ int(np.iinfo(integer).max)
        value: np.floating[Any] = np.array([bits], dtype=integer).view(real)[0]
        return value

    def _report(self, pairs: int) -> None:
        self.done += pairs
        if self.progress is not None:
            processes = 1 if self.group is None else self.group.size
            self.progress(self.done, max(self.passes * self.pairs // processes, self.done))


@dataclass
class Search:
    """The highest score at which `reached(tp, fp)` is true of the genuine and impostors counted from the top."""

    reached: Callable[[Counts, Counts], NDArray[np.bool_]]
    block: int = 0  # the leading digits of the key, at the end all of them
    above: tuple[int, int] = (0, 0)  # genuine and impostors above the block
    within: tuple[int, int] = (0, 0)  # the same, including those of the block

    def enter(self, table: Counts, first: bool) -> None:
        """Narrows the block, by the genuine and impostors of its parts: table (2, 65536)."""
        counts = np.cumsum(table[:, ::-1], axis=1) + np.array(self.above)[:, None]  # from the highest down
        at = int(np.argmax(self.reached(counts[0], counts[1])))
        if at:
            self.above = int(counts[0, at - 1]), int(counts[1, at - 1])
        self.within = int(counts[0, at]), int(counts[1, at])
        digit = _BINS - 1 - at
        self.block = digit - _BINS // 2 if first else (self.block << _DIGITS) + digit


def passes_of(scan: Scan, searches: int, at_once: int) -> int:
    """How many passes over all pairs this many searches take."""
    width = 64 if scan.dtype == torch.float64 else 32
    return -(-searches // at_once) * (width // _DIGITS)


def run(scan: Scan, searches: list[Search], at_once: int) -> None:
    """Narrows all searches to a single score, `at_once` of them in one pass over the matrix for each 16 digits."""
    width = 64 if scan.dtype == torch.float64 else 32
    for start in range(0, len(searches), at_once):
        for shift in range(width - _DIGITS, -1, -_DIGITS):
            _narrow(scan, searches[start : start + at_once], shift, shift == width - _DIGITS)


def _narrow(scan: Scan, searches: list[Search], shift: int, first: bool) -> None:
    device = scan.order.device
    blocks = torch.tensor(sorted({search.block for search in searches}), device=device)
    table = torch.zeros(len(blocks), 2, _BINS, dtype=torch.long, device=device)
    for key, left, right in scan.tiles():
        impostor = scan.is_impostor(left, right)
        if first:
            cell = (key >> shift) + _BINS // 2
        else:
            parent = key >> (shift + _DIGITS)
            slot = torch.searchsorted(blocks, parent).clamp_(max=len(blocks) - 1)
            inside = blocks[slot] == parent
            key, impostor = key[inside], impostor[inside]
            cell = slot[inside] * (2 * _BINS) + ((key >> shift) & (_BINS - 1))
        cell += impostor * _BINS
        table.view(-1).index_add_(0, cell, torch.ones_like(cell))
    counts, order = scan.summed(table), blocks.tolist()
    for search in searches:
        search.enter(counts[order.index(search.block)], first)


def _keys(scores: Tensor) -> Tensor:
    """Integers that sort like the scores; -0 and 0 are equal."""
    integer = torch.int64 if scores.dtype == torch.float64 else torch.int32
    bits = (scores + 0.0).view(integer)
    return torch.where(bits < 0, bits ^ torch.iinfo(integer).max, bits)


class Stretch(NamedTuple):
    """A part of the curve: keys of distinct genuine scores, rising; pairs of both kinds at each, and from each up."""

    key: Counts
    genuine: Counts
    impostors: Counts
    tp: Counts
    fp: Counts


class Curve(NamedTuple):
    """Area under the curve; the best balanced accuracy and the key of the score from which on to accept for it."""

    auc: float
    balanced: float
    key: int


class Levels:
    """Picks scores along the curve as its stretches pass: half of them even in TAR, half even in log FAR."""

    def __init__(self, points: int, genuine: int, impostors: int) -> None:
        half = max(points // 2, 1)
        self.tar = np.ceil(np.linspace(1 / half, 1, half) * genuine)  # accepted at least
        self.far = np.floor(np.geomspace(1, impostors, max(points - half, 1)))  # accepted at most
        self.points = np.zeros((3, len(self.tar) + len(self.far)), np.int64)  # key, tp, fp
        self.known = np.zeros(self.points.shape[1], dtype=bool)

    def update(self, stretch: Stretch) -> None:
        table = np.stack([stretch.key, stretch.tp, stretch.fp])
        split = len(self.tar)
        at = np.searchsorted(-stretch.tp, -self.tar, side="right") - 1  # the highest score that accepts enough
        new = np.flatnonzero(at >= 0)
        self.points[:, new], self.known[new] = table[:, at[new]], True
        at = np.searchsorted(-stretch.fp, -self.far, side="left")  # the lowest that accepts no more
        new = np.flatnonzero((at < len(stretch.key)) & ~self.known[split:])
        self.points[:, split + new], self.known[split + new] = table[:, at[new]], True

    def keys(self) -> Counts:
        """The keys of the scores, rising."""
        return np.unique(self.points[0, self.known])

    def roc(self, scan: Scan) -> Roc:
        """The curve at these scores, falling, after a first point (0, 0) at +inf, until all genuine are accepted."""
        picked = np.unique(self.points[:, self.known], axis=1)[:, ::-1]
        threshold = np.array([np.inf, *(scan.score(int(key)) for key in picked[0])])
        tar, far = (np.append(0, row) / of for row, of in ((picked[1], scan.genuine), (picked[2], scan.impostors)))
        return Roc(threshold, far, tar)


def sweep(scan: Scan, capacity: int, levels: list[Levels]) -> Curve:
    """Goes through the curve once, `capacity` distinct genuine scores at a time.

    The best accuracy is always reached at a genuine score, since a higher threshold only loses genuine pairs and a
    lower one down to the next only accepts impostors; of equally good scores the highest is taken.
    """
    area, best = 0.0, (-1, 0)  # best: TAR - FAR in units of 1 / (genuine · impostors), and its key
    for stretch in _stretches(scan, capacity):
        for level in levels:
            level.update(stretch)
        below = scan.impostors - stretch.fp + stretch.impostors / 2  # ties count half
        area += float((stretch.genuine * below).sum())
        gain = stretch.tp / scan.genuine - stretch.fp / scan.impostors
        for at in np.flatnonzero(gain >= gain.max() - 1e-12):  # floats choose a few, integers decide among them
            exact = int(stretch.tp[at]) * scan.impostors - int(stretch.fp[at]) * scan.genuine
            best = max(best, (exact, int(stretch.key[at])))
    pairs = scan.genuine * scan.impostors
    return Curve(area / pairs, 0.5 + best[0] / (2 * pairs), best[1])


def _stretches(scan: Scan, capacity: int) -> Iterator[Stretch]:
    low, genuine_below, impostors_below = _LOWEST, 0, 0
    while low < _HIGHEST:
        if low != _LOWEST:
            scan.passes += 1
        keys, counts, high = _collect(scan, low, capacity)
        table = _between(scan, keys, low, high)
        genuine, impostors = counts.cpu().numpy(), table[1::2]
        tp = scan.genuine - genuine_below - np.cumsum(genuine) + genuine
        fp = scan.impostors - impostors_below - np.cumsum(table)[:-1:2]
        yield Stretch(keys.cpu().numpy(), genuine, impostors, tp, fp)
        low, genuine_below = high, genuine_below + int(genuine.sum())
        impostors_below += int(table.sum())


def _collect(scan: Scan, low: int, capacity: int) -> tuple[Tensor, Tensor, int]:
    """The lowest distinct genuine keys from `low` on, how many pairs have each, and where the next would begin."""
    keys = counts = torch.empty(0, dtype=torch.long, device=scan.order.device)
    high, waiting, size = _HIGHEST, [keys], 0

    def merged() -> tuple[Tensor, Tensor, int]:
        new = torch.cat(waiting)
        every, index = torch.unique(torch.cat([keys, new]), return_inverse=True)
        total = torch.zeros_like(every).index_add_(0, index, torch.cat([counts, torch.ones_like(new)]))
        if len(every) <= capacity:
            return every, total, high
        return every[:capacity].clone(), total[:capacity].clone(), int(every[capacity])

    for key, left, right in scan.tiles(genuine_only=True):
        key = key[~scan.is_impostor(left, right)]
        key = key[(key >= low) & (key < high)]
        waiting.append(key)
        size += len(key)
        if size > capacity:
            keys, counts, high = merged()
            waiting, size = [], 0
    return merged() if waiting else (keys, counts, high)


def _between(scan: Scan, keys: Tensor, low: int, high: int) -> Counts:
    """Impostors below the first key, at it, between it and the second, …, above the last: (2 K + 1,)."""
    table = torch.zeros(2 * len(keys) + 1, dtype=torch.long, device=keys.device)
    for key, left, right in scan.tiles():
        key = key[scan.is_impostor(left, right)]
        if low != _LOWEST or high != _HIGHEST:
            key = key[(key >= low) & (key < high)]
        cell = torch.searchsorted(keys, key)
        cell = 2 * cell + (keys[cell.clamp(max=len(keys) - 1)] == key)
        table.index_add_(0, cell, torch.ones_like(cell))
    return scan.summed(table)
