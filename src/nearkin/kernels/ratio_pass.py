# mypy: ignore-errors
"""The launches of the log-ratio loss: blocks of anchors against all references, in bounded memory."""

import functools
from typing import NamedTuple

import torch

from nearkin import kernels
from nearkin.core import blockwise
from nearkin.core.labels import LabelDistance
from nearkin.kernels import ratio_kernels, row_kernels
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import triton

PAIRS = 2**23  # anchors × references at a time: 12 bytes each
MATRIX_PAIRS = 2**20  # where each row has its own label distances, in float64, and sorts them: about 100 bytes each
FILL = 264  # programs that keep a large GPU busy
CHUNK = 128  # coordinates of a gradient per program
RATIOS = {"rows": 32, "stages": 2}
SEGMENT = {"width": 512, "warps": 4}
GRADIENT = {"rows": 64, "columns": 32, "stages": 3}


class Task(NamedTuple):
    """Prepared anchors and references, the same where the batch is alone, and how their label distances are told.

    values: labels of the references (R,), sorted as the references are; starts, ends: the run of each one's equals
    among them, and from `shift` on that of each anchor. gaps: in place of these a batch whose label distances are made
    block by block. number: how many references count for each anchor (B,).
    """

    rows: torch.Tensor
    columns: torch.Tensor
    size: int
    others: int
    dim: int
    epsilon: float
    ties: bool
    values: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    number: torch.Tensor
    shift: int = 0
    gaps: blockwise.Batch | None = None
    most: int = 2**31  # anchors per block


def sorted_task(x, references, labels, reference_labels, settings):
    """The task of labels (B,) and (R,); and the order (R,) of the references, in which the task has them."""
    alone = references is None
    labels = labels.double().contiguous()
    values, order = (labels if alone else reference_labels.double()).sort()
    columns = row_kernels.prepare(
        (x if alone else references).index_select(0, order), _bits(values), settings.normalize
    )
    rows = columns if alone else row_kernels.prepare(x, _bits(labels), settings.normalize)
    size, others = x.shape[0], values.shape[0]
    queries, shift = (values, 0) if alone else (torch.cat([values, labels]), others)
    total = queries.shape[0]
    starts, ends = (torch.empty(total, device=x.device, dtype=torch.int32) for _ in range(2))
    number = torch.empty(size, device=x.device, dtype=torch.int32)
    _launcher("_runs", N=128)(
        (-(-total // 128), 1, 1), queries, values, starts, ends, number, total, shift, others, others.bit_length()
    )  # fmt: skip
    labelled = (values, starts, ends, number, shift, None, settings.most)
    return Task(rows, columns, size, others, x.shape[1], settings.epsilon, settings.ties, *labelled), order


def matrix_task(x, references, labels, reference_labels, settings):
    """The task of labels (B, K), or of label distances (B, R)."""
    number = torch.empty(x.shape[0], device=x.device, dtype=torch.int32)
    rows = columns = row_kernels.prepare(x, number, settings.normalize)  # class ids that are not read
    others = x.shape[0]
    if references is not None:
        others = references.shape[0]
        columns = row_kernels.prepare(references, number.new_empty(others), settings.normalize)
    batch = blockwise.Batch(x, LabelDistance(labels) if settings.distances else labels, references, reference_labels)
    labelled = (rows, number, number, number, 0, batch, max(1, settings.most // 2))
    return Task(rows, columns, x.shape[0], others, x.shape[1], settings.epsilon, settings.ties, *labelled)


def run(task, weights, by_anchors, by_references):
    """Values and numbers of pairs (B,) in float64, and 0, or NaN if a label distance of a matrix is not finite.

    by_anchors, by_references: where gradients by prepared rows are added, float64, or None; the same tensor where the
    batch is alone. weights: a factor for each anchor's (B,), or None."""
    size, others = task.size, task.others
    block = min(size, max(1, (PAIRS if task.gaps is None else MATRIX_PAIRS) // others), task.most)
    scratch = Scratch.of(task, block)
    back = by_anchors is not None or by_references is not None
    taint = 0.0
    for first in range(0, size, block):
        count = min(block, size - first)
        values = order = task.values
        if task.gaps is None:
            _ratios(task, scratch, None, scratch.running, first, count)
        else:
            values, order, addend = _ratios_of_matrix(task, scratch, first, count)
            taint = taint + addend
        _close(task, scratch, values, order, weights, first, count, back)
        if by_anchors is not None:
            at = (first, count, 0, others, others, 1)
            _gradient(task.rows, task.columns, scratch, by_anchors, *at, task.dim, True)
        if by_references is not None:
            at = (0, others, first, count, 1, others)
            _gradient(task.columns, task.rows, scratch, by_references, *at, task.dim, False)
    return scratch.value, scratch.pairs, taint


class Scratch(NamedTuple):
    """What a block of anchors writes and reads; value and pairs (B,) are of all anchors."""

    running: torch.Tensor  # (block, R)
    inverse: torch.Tensor  # (block, R), later slopes
    sums: torch.Tensor  # (block, tiles + 1)
    mean: torch.Tensor  # (block,)
    terms: torch.Tensor  # (block, segments, 2)
    factor: torch.Tensor  # (block,)
    value: torch.Tensor
    pairs: torch.Tensor
    tiles: int
    segments: int

    @classmethod
    def of(cls, task, block):
        tiles, segments = -(-task.others // _tile()), -(-task.others // _segment())

        def empty(*shape, kind=torch.float64):
            return torch.empty(shape, device=task.rows.device, dtype=kind)

        matrices = empty(block, task.others), empty(block, task.others, kind=torch.float32)
        numbers = empty(block, tiles + 1), empty(block), empty(block, segments, 2), empty(block)
        return cls(*matrices, *numbers, empty(task.size), empty(task.size), tiles, segments)


def _tile() -> int:
    """References after which running sums start anew."""
    return 16 if kernels.interpreted() else 64


def _segment() -> int:
    """References per program where tied ones are looked for."""
    return 64 if kernels.interpreted() else SEGMENT["width"]


def _ratios(task, scratch, gaps, out, first, count):
    """Ratios of a block into `out`: running sums, or the ratios themselves where each row will be sorted by itself."""
    pad = row_kernels.padded(task.dim)
    running = gaps is None or not task.ties
    m = 16 if count <= 16 else RATIOS["rows"]
    grid_m = -(-count // m)
    span = -(-scratch.tiles // max(1, 4 * FILL // grid_m)) * _tile()
    step = max(step for step in (16, 32, 64, 128) if pad % step == 0)
    choices = {"MATRIX": gaps is not None, "RUNNING": running, "PAD": pad, "K": step, "ONCE": step == pad}
    start = _launcher("_ratios", **choices, M=m, T=_tile(), num_warps=8, num_stages=RATIOS["stages"])
    start((grid_m, -(-task.others // span), 1), task.rows, task.columns, scratch.mean if gaps is None else gaps, out,
          scratch.inverse, scratch.sums, first, count, task.size, task.others, task.dim, scratch.tiles, span,
          task.epsilon)  # fmt: skip


def _ratios_of_matrix(task, scratch, first, count):
    """The same where each row has its own label distances: these, sorted where ties matter, their order, and 0 or NaN.

    The distances are those of plain torch, to the last bit: a fused multiplication would tell some ties apart."""
    gaps, valid = blockwise.gaps(task.gaps, first, first + count)
    task.number[first : first + count] = valid.sum(1)
    addend = (gaps * 0).sum()
    gaps = torch.where(valid, gaps.double(), torch.inf)
    del valid
    if not task.ties:
        _ratios(task, scratch, gaps, scratch.running, first, count)
        return gaps, gaps, addend
    ratios = torch.empty_like(gaps)
    _ratios(task, scratch, gaps, ratios, first, count)
    values, order = gaps.sort(1)
    rows = 2 if kernels.interpreted() else 8
    start = _launcher("_running", R=rows, T=_tile(), num_warps=4)
    start((count, -(-scratch.tiles // rows), 1), ratios, order, scratch.running, scratch.sums, task.others,
          scratch.tiles)  # fmt: skip
    return values, order, addend


def _close(task, scratch, values, order, weights, first, count, back):
    """Values, numbers of pairs and slopes of a block."""
    matrix, pad = task.gaps is not None, row_kernels.padded(task.dim)
    _launcher("_offsets", N=1024, num_warps=4)(
        (count, 1, 1), scratch.sums, scratch.mean, task.number, first, scratch.tiles
    )
    choices = {"MATRIX": matrix, "TIES": task.ties, "BACK": back, "PAD": pad, "T": _tile(), "N": _segment()}
    _launcher("_slopes", **choices, num_warps=SEGMENT["warps"])(
        (count, scratch.segments, 1), task.rows, values, order, task.starts, task.ends, scratch.running, scratch.sums,
        scratch.mean, task.number, scratch.inverse, scratch.terms, first, task.shift, task.size, task.others,
        scratch.tiles, task.others.bit_length()
    )  # fmt: skip
    weighted = weights is not None
    _launcher("_close", WEIGHTED=weighted, M=16, N=16, num_warps=4)(
        (-(-count // 16), 1, 1), scratch.terms, task.number, weights if weighted else scratch.mean, scratch.value,
        scratch.pairs, scratch.factor, first, count, scratch.segments
    )  # fmt: skip


def _gradient(
    own, passing, scratch, out, first, count, passing_first, passing_count, stride, other_stride, dim, own_are_anchors
):
    """Adds the gradient by `count` own rows to `out`; in parts, summed afterwards, where few rows leave a GPU idle."""
    pad = row_kernels.padded(dim)
    chunk = min(triton.next_power_of_2(pad), 16 if kernels.interpreted() else CHUNK)
    m, n = (16, 16) if kernels.interpreted() else (GRADIENT["rows"], GRADIENT["columns"])
    tiles, chunks = -(-count // m), -(-dim // chunk)
    parts = max(1, min(FILL // (tiles * chunks), passing_count // (8 * n)))
    span = -(-passing_count // (parts * n)) * n
    parts = -(-passing_count // span)
    choices = {"ANCHORS": own_are_anchors, "ADD": parts == 1, "PAD": pad, "M": m, "N": n, "D": chunk}
    target = out
    if parts > 1:
        target = torch.empty(parts, count, dim, device=out.device, dtype=out.dtype)
    _launcher("_gradient", **choices, num_warps=8, num_stages=GRADIENT["stages"])(
        (tiles, parts, chunks), own, passing, scratch.inverse, scratch.factor, target, first, count, passing_first,
        passing_count, stride, other_stride, span, first if parts == 1 else 0, count, dim
    )  # fmt: skip
    if parts > 1:
        out[first : first + count] += target.sum(0)


def finish(task, value, pairs, taint, reduction):
    """The loss (), and as facts (2,) the factor of its gradient, and 0 or NaN if an input is not finite."""
    loss, facts = (torch.empty(shape, device=task.rows.device) for shape in ((), (2,)))
    choices = {"MATRIX": task.gaps is not None, "SELF": task.rows is task.columns, "REDUCTION": reduction}
    _launcher("_finish", **choices, PAD=row_kernels.padded(task.dim), N=1024)(
        (1, 1, 1), task.rows, task.columns, task.values, value, pairs, loss, facts, task.size, task.others
    )  # fmt: skip
    if task.gaps is not None:
        loss, facts[1] = loss + taint.float(), facts[1] + taint
    return loss, facts


def _bits(labels):
    """Labels in place of class ids: prepared rows have room for 64 bits."""
    return labels.view(torch.int64)


@functools.cache
def _launcher(name, **choices):
    return CachedLauncher(getattr(ratio_kernels, name), **choices, **row_kernels.options())
