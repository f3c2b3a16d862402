# mypy: ignore-errors
"""What a link is: the functions and facts by which one pair loss differs from another in the pair pass.

Statistics are rows of a float32 buffer with one entry per anchor. The first three are the sum of an anchor's terms,
their number and how many are active; three more hold the same of negatives where these are reduced by themselves. From
SAVED on follows what the gradient needs, which each link fills in its own way and receives as a tuple in this order. Or
a link has a table, whose rows follow the two scales, and gathers from it by pair.
"""

from collections.abc import Callable
from typing import NamedTuple

from nearkin.kernels.numerics import load, row_sum, store, tl, triton

PAID, TERMS, ACTIVE_TERMS = (tl.constexpr(row) for row in range(3))
NEGATIVE_PAID, NEGATIVE_TERMS, NEGATIVE_ACTIVE_TERMS = (tl.constexpr(row) for row in range(3, 6))
SAVED = 6
STATISTICS = 12  # rows of the buffer; the two scales of the gradient follow them
SCALES = tl.constexpr(STATISTICS)
HIGH = tl.constexpr(2**16)  # two counts share a slot: one counts by 1, the other by this


def saved(count: int):
    """The rows of statistics that the gradient needs, in order."""
    return (tl.constexpr(SAVED + k) for k in range(count))


@triton.jit
def valid_pairs(references, row_ids, SELF: tl.constexpr):
    """The number of references (M,) that an anchor makes a pair with, from the counts of a pass (N,)."""
    valid = tl.sum(references, 0)
    if SELF:
        valid -= 1
    return tl.where(row_ids != -1, valid, 0)


@triton.jit
def store_term(stats, at, counted, paid, ACTIVE: tl.constexpr):
    """Stores one term per anchor, where it is counted; returns where it is."""
    active = counted & (paid > 0)
    if ACTIVE:
        counted = active
    store(stats, PAID, at, tl.where(counted, paid, 0.0))
    store(stats, TERMS, at, counted)
    store(stats, ACTIVE_TERMS, at, active)
    return counted


@triton.jit
def store_pairs(stats, at, paid, pairs):
    """Stores the terms of an anchor's pairs: slots of their sum, and of their number with active ones counted HIGH."""
    store(stats, PAID, at, row_sum(paid))
    store(stats, TERMS, at, tl.sum(pairs & (HIGH - 1), 1))
    store(stats, ACTIVE_TERMS, at, tl.sum(pairs // HIGH, 1))


@triton.jit
def tally(sums, stats, at, option, REDUCTION: tl.constexpr):
    """Adds the terms of some anchors, and their number, to the sums of all."""
    total, terms, third, fourth = sums
    total += load(stats, PAID, at).to(tl.float64)
    if REDUCTION == "active":
        terms += load(stats, ACTIVE_TERMS, at).to(tl.float64)
    else:
        terms += load(stats, TERMS, at).to(tl.float64)
    return total, terms, third, fourth


@triton.jit
def mean(total, terms, REDUCTION: tl.constexpr):
    """The value of a sum of `terms` terms, and the factor of a term's slope."""
    share = tl.where(terms > 0, 1.0 / tl.maximum(terms, 1.0), 0.0)
    if REDUCTION == "sum":
        share = share * 0.0 + 1.0
    return total * share, share


@triton.jit
def one_mean(sums, stats, size, option, REDUCTION: tl.constexpr):
    """The value, and the two scales of the gradient, from the sums over all anchors."""
    total, terms, _third, _fourth = sums
    value, share = mean(tl.sum(total, 0), tl.sum(terms, 0), REDUCTION)
    return value, share, share


class Survey(NamedTuple):
    """A pass before the main one, which makes the facts of an anchor. `init` and `add` as in Link."""

    init: Callable
    add: Callable
    close: Callable  # (state, settings) -> facts


class Link(NamedTuple):
    """Device functions. `state` is a tuple of the link's own making, with slots of a tile (M, N) or of references (N,).

    tile: value, positive, negative, each (M, N). reference: which are known (N,), squared lengths (N,), and what
    `column` made. facts: what `facts` or the survey made of anchors. settings: four numbers, which each link names;
    FLAG is its yes or no, or its number of bins; ACTIVE: whether reduction is "active". anchor in `close`: class ids
    and squared lengths (M,).
    """

    init: Callable  # (M, N) -> state
    add: Callable  # (state, tile, reference, facts, settings, SELF, FLAG, ACTIVE) -> state
    close: Callable  # (stats, at, anchor, state, facts, settings, SELF, FLAG, ACTIVE), stores statistics
    slope: Callable  # (tile, anchor, reference, scales, settings, SELF, FLAG) -> derivative by each value
    saved: (
        int  # rows of statistics that `slope` receives as `anchor`, and as `reference` in a batch alone or if `paired`
    )
    measure: str = "similarity"  # or "product" (similarity in float64), "distance", "squared" distance
    facts: Callable | None = None  # (extra, stats, at, settings, SELF, BETA, M) -> tuple
    column: Callable | None = None  # (extra, at, SELF) -> tuple
    survey: Survey | None = None
    positives_only: bool = False  # the main pass skips tiles without a positive pair
    symmetric: bool = False  # the slope is the same with anchor and reference exchanged
    paired: bool = False
    centred: bool = True  # a loss of distances, or of unit rows: digits of rows may be less a centre
    table: int = 0  # rows, a power of 2; `slope` receives it (M, rows) with indices (M, 1), or (rows, N) with (1, N)
    row_slope: Callable | None = None  # (known, row, scales, settings, ROLE) -> derivative along each row itself
    tally: Callable = tally  # (sums, stats, at, option, REDUCTION) -> sums
    mean: Callable = one_mean  # (sums, stats, size, option, REDUCTION) -> value and scales
