# mypy: ignore-errors
"""Smooth-AP by its kernels: how large the tables of positives are, and what is launched.

Most batches need one window of positives. How many an anchor has, only the device knows: so the kernels are launched
for as many windows as there might be, and end at once in those without positives.
"""

import functools
import math
from typing import NamedTuple

import torch

from nearkin import kernels
from nearkin.kernels import row_kernels, smooth_ap_kernels
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.links.link import STATISTICS
from nearkin.kernels.pair_kernels import FINISHED, _finish, _tile
from nearkin.kernels.smooth_ap_kernels import ROWS

ONE_TABLE = 96 * 2**20  # bytes up to which there is one window: all pairs of 2,048 items


class Task(NamedTuple):
    """sizes: B, R and D; slots: an anchor's positives at most.

    alone: the batch is its own references. batch_first: the first references are the batch, and the others have no
    gradient."""

    sizes: tuple[int, int, int]
    alone: bool
    batch_first: bool
    temperature: float
    slots: int
    reduction: str
    room: int  # bytes of tables

    @property
    def windows(self) -> tuple[int, range, int]:
        """Positives in the table that is kept, and the first positives of later windows and their width."""
        size, others, _ = self.sizes
        most = min(self.slots, others - (self.alone or self.batch_first))
        one = _width(most, size, ONE_TABLE)
        if one >= most and 4 * ROWS * size * one <= self.room:
            return one, range(0), 0
        kept, later = _width(most, size, self.room // 3), _width(most, size, self.room * 2 // 3)
        return kept, range(kept, most, later), later

    @property
    def sharpness(self) -> float:
        return math.log2(math.e) / self.temperature


def _width(most, size, room):
    """A multiple of 16, since kernels are compiled for that."""
    return max(16, min(-(-most // 16), room // (64 * ROWS * size)) * 16)


@functools.cache
def _ranking(size, dim, kind, apart, value, later):
    tile, constants = _tile("forward", size, dim, kind)
    start = CachedLauncher(smooth_ap_kernels.ranks, SELF=apart, VALUE=value, LATER=later, **constants)
    return -(-size // tile.rows), start


@functools.cache
def _finishing(dim, alone, reduction):
    choices = {
        "TALLY": smooth_ap_kernels.tally_ranks,
        "MEAN": smooth_ap_kernels.mean_ranks,
        "SELF": alone,
        "REDUCTION": reduction,
    }
    return CachedLauncher(_finish, PAD=row_kernels.padded(dim), N=FINISHED, **choices, **row_kernels.options())


def _rank(task, rows, columns, table, stats, first, width, value):
    apart = task.alone or task.batch_first
    programs, start = _ranking(task.sizes[0], task.sizes[2], rows.dtype, apart, value, first > 0)
    numbers = (first, width, task.sharpness, task.temperature, float(task.slots))
    start((programs, 1, 1), rows, columns, table, stats, *task.sizes, *numbers)


def _table(rows, size, width):
    return torch.empty(ROWS * width * size, device=rows.device, dtype=torch.float32)


def forward(task: Task, rows, columns):
    """The value (), the table of the first window and the statistics."""
    size, others, dim = task.sizes
    kept, later, width = task.windows
    table = _table(rows, size, kept)
    stats = torch.empty(STATISTICS * size + 2, device=rows.device, dtype=torch.float32)
    value = torch.empty((), device=rows.device, dtype=torch.float32)
    _rank(task, rows, columns, table, stats, 0, kept, True)
    if later:
        passing = _table(rows, size, width)
        for first in later:
            _rank(task, rows, columns, passing, stats, first, width, True)
    _finishing(dim, task.alone, task.reduction)((1, 1, 1), rows, columns, stats, value, size, others, 0.0)
    return value, table, stats


@functools.cache
def _last_pass(size, dim, kind, role, apart, later):
    tile, constants = _tile("backward", size, dim, kind)
    chunk = constants["D"]
    start = CachedLauncher(
        smooth_ap_kernels.slopes, ROLE=role, APART=apart, LATER=later, ONE_CHUNK=dim <= chunk, **constants
    )
    return (-(-size // tile.rows), -(-dim // chunk), 1), start


class Side(NamedTuple):
    """A gradient that is wanted: of rows x, prepared too, in a role, from the other rows."""

    role: str
    x: torch.Tensor
    rows: torch.Tensor
    others: torch.Tensor
    sizes: tuple[int, int]


def _sides(task: Task, x, references, rows, columns) -> list[Side]:
    size, others, _ = task.sizes
    if task.alone:
        return [Side("self", x, rows, rows, (size, size))]
    sides = [] if x is None else [Side("anchors", x, rows, columns, (size, others))]
    if task.batch_first:
        return [*sides, Side("references", x, rows, rows, (size, size))]
    return sides if references is None else [*sides, Side("references", references, columns, rows, (others, size))]


def backward(task: Task, x, references, rows, columns, table, stats, upstream):
    """The gradients by anchors x and by references, None where not wanted (None); these prepared in rows, columns."""
    kept, later, width = task.windows
    sides, apart = _sides(task, x, references, rows, columns), task.alone or task.batch_first
    dim = task.sizes[2]
    one_chunk = dim <= _tile("backward", task.sizes[0], dim, rows.dtype)[1]["D"]
    narrow = not (later or task.batch_first or kernels.interpreted())  # stored once, and rounded as it should be
    sums = []
    for side in sides:
        kind = torch.float64 if not one_chunk else side.x.dtype if narrow else torch.float32
        sums.append(torch.empty_like(side.x, dtype=kind))

    def add(first, width, table):
        for side, total in zip(sides, sums, strict=True):
            grid, start = _last_pass(side.sizes[0], dim, rows.dtype, side.role, apart, first > 0)
            operands = (side.x, side.rows, side.others, table, stats, table, stats, upstream, total)
            start(grid, *operands, *side.sizes, dim, first, width, task.sharpness)

    add(0, kept, table)
    if later:
        passing = _table(stats, task.sizes[0], width)
        for first in later:
            _rank(task, rows, columns, passing, stats, first, width, False)
            add(first, width, passing)
    gradients = [_by_x(side, total, one_chunk, narrow) for side, total in zip(sides, sums, strict=True)]
    if task.batch_first:
        return gradients[0].add_(gradients[1]).to(x.dtype), None
    by_role = {side.role: by_x.to(side.x.dtype) for side, by_x in zip(sides, gradients, strict=True)}
    return by_role.get("self", by_role.get("anchors")), by_role.get("references")


def _by_x(side: Side, total, one_chunk, narrow):
    """The gradient by rows of any length from its sums, in the type of the rows if `narrow`."""
    if one_chunk:
        return total
    by_x = torch.empty_like(side.x, dtype=side.x.dtype if narrow else torch.float32)
    row_kernels.long_gradient(side.x, side.rows, total, by_x, True)
    return by_x
