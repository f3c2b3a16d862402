# mypy: ignore-errors
"""The launches of the log-ratio loss: blocks of anchors against all references, in bounded memory."""

import functools
from typing import NamedTuple

import torch

from nearkin import kernels
from nearkin.core import blockwise
from nearkin.core.labels import LabelDistance
from nearkin.kernels import digit_kernels, ratio_kernels, row_kernels
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import triton

SLOPES = 2**24  # pairs at a time whose slopes are kept for the gradient: 4 bytes each
PAIRS = 2**22  # pairs at a time whose ties are looked for: 8 bytes each
SORTED_PAIRS = 2**21  # where each row has its own label distances, and sorts them: about 80 bytes each
LARGE = 2**15  # references beyond which that is fewer, since rows and gradients take their room
MANY = 2**21  # pairs that fill a GPU with larger tiles
SHORT = 4096  # references up to which one program takes a whole row, and torch sorts rows at once
FILL = 264  # programs that keep a large GPU busy
CHUNK = 128  # coordinates of a gradient per program
LABELS = (torch.float32, torch.float64, torch.int64, torch.int32)  # as they are; others become float64
# Tiles, as measured on an H200 at B = 4,096 and 65,536. spans: segments that a program takes where rows are long;
# programs: times FILL.
RATIOS = {"rows": 64, "tile": 32, "warps": 8, "stages": 2, "programs": 2}
SEGMENT = {"width": 512, "warps": 8, "spans": 4}
GRADIENT = {"rows": 64, "columns": 32, "stages": 3}


class Task(NamedTuple):
    """Prepared anchors and references, the same where the batch is alone, and how their label distances are told.

    values: labels of the references (R,), sorted as the references are; runs and number as `ratio_kernels` has them.
    gaps: in place of values and runs a batch whose label distances are made block by block.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    size: int
    others: int
    dim: int
    settings: NamedTuple
    values: torch.Tensor
    runs: torch.Tensor
    number: torch.Tensor
    gaps: blockwise.Batch | None = None


def sorted_task(x, references, labels, reference_labels, settings):
    """The task of labels (B,) and (R,); the order of the references in it, and these in that order."""
    alone = references is None
    labels, other_labels = (
        t if t is None or t.dtype in LABELS else t.double() for t in (labels, labels if alone else reference_labels)
    )
    size, others = x.shape[0], other_labels.shape[0]
    total = size if alone else others + size
    values = torch.empty(others, device=x.device, dtype=torch.float64)
    order = torch.empty(others, device=x.device, dtype=torch.int32)
    runs = torch.empty(2 * others, device=x.device, dtype=torch.int32)
    number = torch.empty(size, device=x.device, dtype=torch.int32)
    columns = x if alone else references
    in_order = torch.empty_like(columns)
    _launcher("_ranks", ALONE=alone, M=16, N=128)(
        (-(-total // 16), 1, 1), other_labels.contiguous(), labels.contiguous(), columns, values, order, runs, number,
        in_order, others, total, x.shape[1]
    )  # fmt: skip
    columns = row_kernels.prepare(in_order, values.view(torch.int64), settings.normalize, centre=in_order)
    rows = columns
    if not alone:
        rows = row_kernels.prepare(x, labels.double().view(torch.int64), settings.normalize, centre=in_order)
    return Task(rows, columns, size, others, x.shape[1], settings, values, runs, number), order, in_order


def matrix_task(x, references, labels, reference_labels, settings):
    """The task of labels (B, K), or of label distances (B, R)."""
    size, dim = x.shape
    number = torch.empty(size, device=x.device, dtype=torch.int32)
    rows = columns = row_kernels.prepare(x, number, settings.normalize, centre=x)  # class ids that are not read
    others = size
    if references is not None:
        others = references.shape[0]
        columns = row_kernels.prepare(references, number.new_empty(others), settings.normalize, centre=x)
    batch = blockwise.Batch(x, LabelDistance(labels) if settings.distances else labels, references, reference_labels)
    return Task(rows, columns, size, others, dim, settings, rows, number, number, batch)


class Scratch(NamedTuple):
    """What blocks of anchors write and read; stats are of all anchors."""

    running: torch.Tensor  # (anchors, R) float64
    inverse: torch.Tensor  # (anchors of a larger block, R) float32, later slopes
    sums: torch.Tensor  # (anchors, tiles + 1)
    terms: torch.Tensor  # (anchors, segments, 2)
    stats: torch.Tensor
    tiles: int
    span: int  # references that a program looks for ties of
    segments: int


def _scratch(task, most, block):
    others = task.others
    tiles, width = -(-others // _tile()), _segment()
    span = -(-others // width) * width if others <= SHORT else SEGMENT["spans"] * width
    segments = -(-others // span)

    def empty(size, kind=torch.float64):
        return torch.empty(size, device=task.rows.device, dtype=kind)

    stats = empty(ratio_kernels.STATISTICS * task.size)
    terms = stats if segments == 1 else empty(2 * block * segments)
    sums = empty(block * (tiles + 1))
    return Scratch(
        empty(block * others), empty(most * others, torch.float32), sums, terms, stats, tiles, span, segments
    )


def run(task, weights, wants):
    """Values and numbers of pairs of anchors (`stats`), gradients by prepared anchors and references, float64, where
    wanted, and 0 or NaN if a label distance of a matrix is not finite. weights: a factor for each anchor (B,), or None.

    Where the batch is alone, the first gradient is all there is."""
    size, others, alone = task.size, task.others, task.rows is task.columns
    largest = min(size, task.settings.most)
    pairs = PAIRS if task.gaps is None or others <= SHORT else SORTED_PAIRS * LARGE // max(LARGE, others)
    most, block = (min(largest, max(1, number // others)) for number in (SLOPES, pairs))
    block = min(block, most)
    if task.gaps is not None:  # sorting takes more than the bound on memory counts per pair
        block = min(block, max(1, task.settings.most // 2))
    scratch = _scratch(task, most, block)
    taint = 0.0
    gradients = [None, None]
    for k, rows in enumerate((size, others)):
        if wants[k]:
            empty = torch.empty if alone and most >= size else torch.zeros
            gradients[k] = empty(rows, task.dim, device=task.rows.device, dtype=torch.float64)
    by_anchors, by_references = gradients[0], gradients[0] if alone else gradients[1]
    for start in range(0, size, most):
        stop = min(start + most, size)
        for first in range(start, stop, block):
            addend = _slopes(task, scratch, weights, first, first - start, min(block, stop - first), any(wants))
            taint = taint + addend
        if alone and most >= size and by_anchors is not None:
            _gradient(task, scratch, "self", by_anchors, 0, size)
            continue
        if by_anchors is not None:
            _gradient(task, scratch, "anchors", by_anchors, start, stop - start)
        if by_references is not None:
            _gradient(task, scratch, "references", by_references, start, stop - start)
    return scratch.stats, gradients, taint


def _tile() -> int:
    """References after which running sums start anew."""
    return 16 if kernels.interpreted() else RATIOS["tile"]


def _segment() -> int:
    """References at a time where tied ones are looked for."""
    return 32 if kernels.interpreted() else SEGMENT["width"]


def _slopes(task, scratch, weights, first, skip, count, back):
    """Values, numbers of pairs and slopes of `count` anchors, slopes from row `skip` on; 0 or NaN of a matrix."""
    values = order = task.values
    addend = 0.0
    if task.gaps is None:
        _ratios(task, scratch, None, scratch.running, first, skip, count)
    else:
        values, order, addend = _ratios_of_matrix(task, scratch, first, skip, count)
    whole, weighted = scratch.segments == 1, weights is not None
    weights = weights if weighted else scratch.stats
    if not whole:
        _launcher("_means", N=1024)(
            (count, 1, 1), scratch.sums, task.number, scratch.stats, first, task.size, scratch.tiles
        )
    choices = {"MATRIX": task.gaps is not None, "TIES": task.settings.ties, "BACK": back, "WHOLE": whole}
    choices |= {"WEIGHTED": weighted, "PAD": row_kernels.padded(task.dim), "T": _tile(), "N": _segment()}
    _launcher("_slopes", **choices, num_warps=SEGMENT["warps"])(
        (count, scratch.segments, 1), task.rows, values, order, task.runs, task.number, scratch.running, scratch.sums,
        scratch.inverse, scratch.stats, scratch.terms, weights, first, skip, task.size, task.others, scratch.tiles,
        scratch.span
    )  # fmt: skip
    if not whole:
        _launcher("_close", WEIGHTED=weighted, M=16, N=16)(
            (-(-count // 16), 1, 1), scratch.terms, task.number, scratch.stats, weights, first, count, task.size,
            scratch.segments
        )  # fmt: skip
    return addend


def _ratios(task, scratch, gaps, out, first, skip, count):
    """Ratios of a block into `out`: running sums, or the ratios themselves where each row will be sorted by itself."""
    pad = row_kernels.padded(task.dim)
    m = RATIOS["rows"] if count * task.others >= MANY else 32
    grid = -(-count // m)
    span = -(-scratch.tiles // max(1, RATIOS["programs"] * FILL // grid)) * _tile()
    digits = task.rows.dtype == torch.int8
    long, steps = (digit_kernels.length(task.dim), (32, 64, 128)) if digits else (pad, (16, 32, 64, 128))
    step = max(step for step in steps if long % step == 0)
    choices = {"MATRIX": gaps is not None, "RUNNING": gaps is None or not task.settings.ties, "PAD": pad, "K": step}
    choices |= {"SELF": task.rows is task.columns, "ONCE": step == long, "M": m, "T": _tile()}
    choices |= {"num_warps": RATIOS["warps"], "num_stages": RATIOS["stages"]}
    _launcher("_ratios", **choices)(
        (grid, -(-task.others // span), 1), task.rows, task.columns, task.values if gaps is None else gaps, out,
        scratch.inverse, scratch.sums, first, skip, count, task.size, task.others, task.dim, scratch.tiles, span,
        task.settings.epsilon
    )  # fmt: skip


def _ratios_of_matrix(task, scratch, first, skip, count):
    """The same where each row has its own label distances: these, sorted where ties matter, their order, and 0 or NaN.

    The distances are those of plain torch, to the last bit: a fused multiplication would tell some ties apart."""
    gaps, valid = blockwise.gaps(task.gaps, first, first + count)
    torch.sum(valid, 1, out=task.number[first : first + count])
    addend = (gaps * 0).sum()
    gaps = torch.where(valid, gaps.double(), torch.inf)
    del valid
    if not task.settings.ties:
        _ratios(task, scratch, gaps, scratch.running, first, skip, count)
        return gaps, gaps, addend
    ratios = torch.empty_like(gaps)
    _ratios(task, scratch, gaps, ratios, first, skip, count)
    values, order = gaps.sort(1)
    rows = 2 if kernels.interpreted() else 8
    _launcher("_running", R=rows, T=_tile())(
        (count, -(-scratch.tiles // rows), 1), ratios, order, scratch.running, scratch.sums, task.others, scratch.tiles
    )
    return values, order, addend


def _gradient(task, scratch, role, out, first, count):
    """Adds the gradient of `count` anchors from `first` on, by these or by the references, to `out`; or stores it, that
    of "self". In parts that are summed afterwards where few rows would leave a GPU idle."""
    pad, dim, others = row_kernels.padded(task.dim), task.dim, task.others
    chunk = min(triton.next_power_of_2(pad), 16 if kernels.interpreted() else CHUNK)
    own, passing, at = task.rows, task.columns, (first, count, 0, others, others, 1)
    if role == "references":
        own, passing, at = task.columns, task.rows, (0, others, first, count, 1, others)
    own_first, own_count, _, passing_count, *_ = at
    m, n = GRADIENT["rows"], GRADIENT["columns"]
    if role == "self":
        m, n = (16, 64) if count <= 2048 else (32, 64)
    if kernels.interpreted():
        m, n = 16, 16
    tiles, chunks = -(-own_count // m), -(-dim // chunk)
    parts = 1 if role == "self" else max(1, min(FILL // (tiles * chunks), passing_count // (8 * n)))
    span = -(-passing_count // (parts * n)) * n
    parts = -(-passing_count // span)
    target = out if parts == 1 else torch.empty(parts, own_count, dim, device=out.device, dtype=out.dtype)
    choices = {"ROLE": role, "ADD": parts == 1 and role != "self", "PAD": pad, "M": m, "N": n, "D": chunk}
    _launcher("_gradient", **choices, num_warps=8, num_stages=GRADIENT["stages"] if role != "self" else 2)(
        (tiles, parts, chunks), own, passing, scratch.inverse, scratch.stats, target, *at, span,
        own_first if parts == 1 else 0, own_count, task.size, task.size if role == "references" else others, dim
    )  # fmt: skip
    if parts > 1:
        out[own_first : own_first + own_count] += target.sum(0)


def finish(task, stats, taint):
    """The loss (), and as facts (2,) the factor of its gradient, and 0 or NaN if an input is not finite."""
    loss, facts = (torch.empty(shape, device=stats.device) for shape in ((), (2,)))
    choices = {"MATRIX": task.gaps is not None, "SELF": task.rows is task.columns}
    choices |= {"REDUCTION": task.settings.reduction, "PAD": row_kernels.padded(task.dim)}
    _launcher("_finish", **choices, N=1024)(
        (1, 1, 1), task.rows, task.columns, task.values, stats, loss, facts, task.size, task.others
    )
    if task.gaps is not None:
        loss, facts[1] = loss + taint.float(), facts[1] + taint
    return loss, facts


def anchor_values(task, stats):
    """The value of each anchor (B,), float64."""
    first = ratio_kernels.VALUE.value * task.size
    return stats[first : first + task.size]


def by_input(x, rows, by_rows, order, upstream, facts, normalize):
    """The gradient by x, in its type, from that by its prepared rows. order: in which x and rows are, or None. facts:
    with the factor of the loss's gradient, or None where it has been taken into account, and the upstream."""
    size, dim = x.shape
    # The interpreter cuts numbers to bfloat16 where it should round them.
    out = torch.empty_like(x, dtype=torch.float32 if kernels.interpreted() else x.dtype)
    choices = {"SORTED": order is not None, "SCALED": facts is not None, "NORMALIZE": normalize}
    _launcher("_by_input", **choices, PAD=row_kernels.padded(dim), M=8, D=128)(
        (-(-size // 8), 1, 1), x, rows, by_rows, rows if order is None else order, upstream,
        by_rows if facts is None else facts, out, size, dim
    )  # fmt: skip
    return out if out.dtype == x.dtype else out.to(x.dtype)


@functools.cache
def _launcher(name, **choices):
    return CachedLauncher(getattr(ratio_kernels, name), **choices, **row_kernels.options())
