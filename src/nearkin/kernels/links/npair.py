# mypy: ignore-errors
"""N-pair: SupCon of dot products with a penalty on squared lengths; in a batch alone the first item of each class is
its anchor and the others are references (ALONE). settings: 1, -, -, penalty; FLAG: the batch is alone.
"""

from nearkin.kernels.links import supcon
from nearkin.kernels.links.link import PAID, TERMS, Link, mean, saved
from nearkin.kernels.numerics import load, store, tl, triton

COUNTED, FIRST = tuple(saved(5))[3:]  # COUNTED is filled by `tally`, FIRST before the pass
SQUARED, MEAN_SQUARED, NUM_REFERENCES = (tl.constexpr(row) for row in range(3, 6))
supcon_init, supcon_add, supcon_close = supcon.init, supcon.add, supcon.close


@triton.jit
def facts(extra, stats, at, settings, SELF: tl.constexpr, BETA: tl.constexpr, M: tl.constexpr):
    return (load(stats, FIRST, at) > 0,)


@triton.jit
def column(extra, at, SELF: tl.constexpr):
    return (load(extra, FIRST, at) == 0,)


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    return supcon_init(M, N), tl.zeros((N,), tl.int32), tl.zeros((N,), tl.float64)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    terms, references, squared = state
    value, positive, negative = tile
    is_reference = reference[0]
    if FLAG:
        is_reference = is_reference & reference[2][0]
        positive = positive & facts[0][:, None] & is_reference[None, :]
        negative = negative & facts[0][:, None] & is_reference[None, :]
    squared += tl.where(is_reference, reference[1], 0.0)
    references += is_reference.to(tl.int32)
    terms = supcon_add(terms, (value, positive, negative), reference, facts, settings, SELF, FLAG, ACTIVE)
    return terms, references, squared


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    terms, references, squared = state
    supcon_close(stats, at, anchor, terms, facts, settings, SELF, FLAG, False)
    used = tl.sum(references, 0)
    store(stats, SQUARED, at, anchor[1])
    # The mean square of the references that anchors meet is the same for all.
    store(stats, MEAN_SQUARED, at, tl.zeros_like(anchor[1]) + tl.sum(squared, 0) / tl.maximum(used, 1))
    store(stats, NUM_REFERENCES, at, tl.zeros_like(anchor[1]) + used)


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    peak, per_positive, share, counted, _first = anchor
    met = (positive | negative) & (counted > 0)
    if FLAG:
        met = met & (reference[4] == 0)
    softmax = share * tl.exp(value / settings[0] - peak) - tl.where(positive, per_positive, 0.0)
    return scales[0] / settings[0] * tl.where(met, softmax, 0.0)


@triton.jit
def row_slope(known, row, scales, settings, ROLE: tl.constexpr):
    """By the penalty, as an anchor and as a reference."""
    factor = tl.zeros(known.shape, tl.float32)
    if ROLE != "references":
        factor += scales[0] * settings[3] * 0.5 * row[3]
    if ROLE == "self":
        factor += tl.where(known & (row[4] == 0), scales[1], 0.0)
    elif ROLE == "references":
        factor += tl.where(known, scales[1], 0.0)
    return factor


@triton.jit
def tally(sums, stats, at, option, REDUCTION: tl.constexpr):
    total, terms, third, fourth = sums
    counted = load(stats, TERMS, at) > 0
    size = load(stats, SQUARED, at).to(tl.float64) + load(stats, MEAN_SQUARED, at).to(tl.float64)
    paid = load(stats, PAID, at).to(tl.float64) + option * 0.25 * size
    if REDUCTION == "active":
        counted = counted & (paid > 0)
    store(stats, COUNTED, at, counted)
    return total + tl.where(counted, paid, 0.0), terms + counted.to(tl.float64), third, fourth


@triton.jit
def mean_penalized(sums, stats, size, option, REDUCTION: tl.constexpr):
    terms = tl.sum(sums[1], 0)
    value, share = mean(tl.sum(sums[0], 0), terms, REDUCTION)
    references = tl.maximum(tl.load(stats + NUM_REFERENCES * size), 1.0)
    return value, share, share * terms * option * 0.5 / references


LINK = Link(init, add, close, slope, saved=5, centred=False, row_slope=row_slope, tally=tally, mean=mean_penalized)
ALONE = LINK._replace(facts=facts, column=column)
