# mypy: ignore-errors
"""Device functions of `facility_kernels`: how programs meet, the state after a choice, and the best candidate.

An item that would move to a candidate is counted out of its cell (cluster, class) and its cluster, and into its class
there, by integer atomics: the changes of n log n with each count add up to the change of the sum, in any order. A cell
goes by the number of one of its items, so a candidate needs three counters per item and no matrix.
"""

from nearkin.core import facility
from nearkin.kernels.numerics import tl, triton

FAR = tl.constexpr(facility.FAR)
ROUNDING = tl.constexpr(1e-9)  # of NMI, far above that of float64


@triton.jit
def meet(arrivals, number):
    """Waits until all programs have come here, `number` arrivals in all; then each sees what the others have stored."""
    tl.debug_barrier()
    seen = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") + 1
    while seen < number:
        seen = tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def nearest(
    keys, picks, near_at, num_medoids, slot, item, program, programs, size,
    C: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The two smallest keys of this program's items, with `item` as the medoid in `slot`."""
    s = tl.arange(0, N)
    medoid = tl.where(s == slot, item, tl.load(picks + s, mask=s < num_medoids, other=0))
    for first in range(program * C, size, programs * C):
        i = first + tl.arange(0, C)
        inside = (i < size)[:, None] & (s < num_medoids)[None, :]
        key = tl.load(keys + medoid[None, :] * size + i[:, None], mask=inside, other=FAR)
        near = tl.min(key, 1)
        second = tl.min(tl.where(key == near[:, None], FAR, key), 1)
        tl.store(near_at + i, near, mask=i < size)
        tl.store(near_at + size + i, second, mask=i < size)


@triton.jit
def place(kinds, near, second, places, program, programs, size, BITS: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    """For this program's items: the first item of their cell, the number of items in the cell and in the cluster; then
    the same should their medoid go, except that those who would come with them are not counted."""
    i = tl.arange(0, N)
    mask: tl.constexpr = (1 << BITS) - 1
    kind = tl.load(kinds + i, mask=i < size, other=-1)
    known = kind >= 0
    owner = tl.where(known, near & mask, -1).to(tl.int32)
    next_owner = tl.where(known & (second < FAR), second & mask, -2).to(tl.int32)
    for first in range(program * C, size, programs * C):
        item = first + tl.arange(0, C)
        is_item = item[:, None] == i[None, :]
        its_kind = tl.sum(tl.where(is_item, kind[None, :], 0), 1)[:, None]
        its_owner = tl.sum(tl.where(is_item, owner[None, :], 0), 1)[:, None]
        its_next = tl.sum(tl.where(is_item, next_owner[None, :], 0), 1)[:, None]
        alike = kind[None, :] == its_kind
        here = owner[None, :] == its_owner
        there = owner[None, :] == its_next
        comes = alike & here & (next_owner[None, :] == its_next)
        cell = tl.min(tl.where(alike & here, i[None, :], size), 1)
        next_size = tl.sum((alike & there).to(tl.int32), 1)
        next_cell = tl.min(tl.where(tl.where((next_size > 0)[:, None], alike & there, comes), i[None, :], size), 1)
        stands = item < size
        tl.store(places + item, cell, mask=stands)
        tl.store(places + size + item, tl.sum((alike & here).to(tl.int32), 1), mask=stands)
        tl.store(places + 2 * size + item, tl.sum(here.to(tl.int32), 1), mask=stands)
        tl.store(places + 3 * size + item, next_cell, mask=stands)
        tl.store(places + 4 * size + item, next_size, mask=stands)
        tl.store(places + 5 * size + item, tl.sum(there.to(tl.int32), 1), mask=stands)


@triton.jit
def best(
    keys, kinds, table, table_parts, total, classes, gamma, unit, places, own, near, second, pick,
    standing, slack, first, stride, size, BITS: tl.constexpr, C: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The candidate of the largest score among those from `first` on, of equals the first, and its score; -1 if none.

    pick >= 0: in place of this medoid, and only if the score is above `standing`. Items are counted only for candidates
    whose score may be the best: the distances are exact, and NMI is bounded by how many items move.
    """
    i = tl.arange(0, N)
    r = tl.arange(0, C)
    mask: tl.constexpr = (1 << BITS) - 1
    growth = table_parts
    logs = table_parts + size + 1
    kind = tl.load(kinds + i, mask=i < size, other=-1)
    known = kind >= 0
    orphan = known & (near < FAR) & ((near & mask) == pick)
    near = tl.where(orphan, second, near)
    owned = known & (near < FAR)
    owner = tl.where(owned, near & mask, 0).to(tl.int32)
    place_at = places + tl.where(orphan, 3 * size, 0) + i
    cell = tl.load(place_at, mask=owned, other=0)
    cell_size = tl.load(place_at + size, mask=owned, other=0)
    owner_size = tl.load(place_at + 2 * size, mask=owned, other=0)
    if pick >= 0:
        joins = orphan & owned
        tl.atomic_add(own + cell, 1, mask=joins, sem="relaxed", scope="cta")
        tl.atomic_add(own + size + owner, 1, mask=joins, sem="relaxed", scope="cta")
        tl.debug_barrier()
        cell_size += tl.load(own + cell, mask=owned, other=0)
        owner_size += tl.load(own + size + owner, mask=owned, other=0)
        tl.debug_barrier()
        tl.store(own + cell, 0, mask=joins)
        tl.store(own + size + owner, 0, mask=joins)
        tl.debug_barrier()
    joint = tl.sum(tl.load(logs + cell_size, mask=owned, other=0), 0)
    clusters = tl.sum(tl.load(logs + owner_size, mask=owned, other=0), 0)

    cell_at = own + (2 + r[:, None]) * size + cell[None, :]
    owner_at = own + (2 + C + r[:, None]) * size + owner[None, :]
    kind_at = own + (2 + 2 * C + r[:, None]) * size + kind[None, :]
    cell_growth = tl.load(growth + tl.max(cell_size, 0))  # what n log n loses at most when an item leaves
    owner_growth = tl.load(growth + tl.max(owner_size, 0))
    winner = pick * 0 - 1
    best_score = tl.where(pick >= 0, standing, float("-inf"))
    for start in range(first, size, stride):
        c = start + r
        mask_c = c < size
        inside = mask_c[:, None] & known[None, :]
        key = tl.load(keys + c[:, None] * size + i[None, :], mask=inside, other=FAR)
        moves = key < near[None, :]
        number = tl.sum(moves.to(tl.int32), 1)
        spent = tl.where(inside, tl.maximum(tl.where(moves, key, near[None, :]) >> BITS, 0), 0)
        cost = tl.sum(spent, 1).to(tl.float64) * unit
        valid = (number > 0) & (tl.load(kinds + c, mask=mask_c, other=-1) >= 0)
        arrived = tl.load(table + number)
        lowest = agreement(joint - number * cell_growth, clusters + arrived, total, classes)
        highest = tl.minimum(joint + arrived, classes)
        highest = agreement(highest, clusters + arrived - number * owner_growth, total, classes)
        one = gamma * (1.0 + ROUNDING - lowest)
        other = gamma * (1.0 - ROUNDING - highest)
        most = tl.where(gamma == gamma, tl.maximum(one, other), float("inf")) - cost
        least = tl.where(gamma == gamma, tl.minimum(one, other), float("-inf")) - cost
        bar = tl.max(tl.where(valid, least, float("-inf")), 0)  # one of them reaches this
        hopeless = (most < bar - slack) | ((most <= best_score) & ((winner >= 0) | (pick >= 0)))
        valid = valid & (hopeless == 0)
        if tl.max(valid.to(tl.int32), 0) > 0:
            moves = moves & valid[:, None]
            leaves = moves & owned[None, :]
            gone = tl.atomic_add(cell_at, 1, mask=leaves, sem="relaxed", scope="cta")
            away = tl.atomic_add(owner_at, 1, mask=leaves, sem="relaxed", scope="cta")
            come = tl.atomic_add(kind_at, 1, mask=moves, sem="relaxed", scope="cta")
            grown = tl.load(growth + come + 1, mask=moves, other=0)
            grown -= tl.load(growth + cell_size[None, :] - gone, mask=leaves, other=0)
            shrunk = tl.load(growth + owner_size[None, :] - away, mask=leaves, other=0)
            in_cells = joint + tl.sum(grown, 1)
            in_clusters = clusters - tl.sum(shrunk, 1) + arrived
            agreed = agreement(in_cells, in_clusters, total, classes)
            score = gamma * (1.0 - agreed) - cost
            score = tl.where(score == score, score, float("-inf"))
            top = tl.max(tl.where(valid, score, float("-inf")), 0)
            at = tl.min(tl.where(valid & (score >= top - slack), c, size), 0)
            takes = (at < size) & ((top > best_score + slack) | ((winner < 0) & (pick < 0)))
            winner = tl.where(takes, at, winner)
            best_score = tl.where(takes, top, best_score)
            tl.debug_barrier()  # all have been counted
            cleared = tl.zeros((C, N), tl.int32)
            tl.store(cell_at, cleared, mask=leaves)
            tl.store(owner_at, cleared, mask=leaves)
            tl.store(kind_at, cleared, mask=moves)
            tl.debug_barrier()  # the counts are 0 again
    return winner, best_score


@triton.jit
def agreement(joint, clusters, total, classes):
    """NMI, as in `core.facility.agreement`."""
    shared = (joint - clusters - classes + total).to(tl.float64)
    ours = tl.maximum(total - clusters, 0).to(tl.float64)
    theirs = tl.maximum(total - classes, 0).to(tl.float64)
    split = ours * theirs
    tiny = 1e-6 * total.to(tl.float64)
    defined = split > tiny * tiny
    nmi = tl.where(defined, shared, 0.0) * (1.0 / tl.sqrt(tl.where(defined, split, 1.0)))
    nmi = tl.minimum(tl.maximum(nmi, 0.0), 1.0)
    return tl.where(tl.maximum(ours, theirs) <= tiny, 1.0, nmi)
