# mypy: ignore-errors
"""The kernel of `facility_ops`: greedy choice and exchange of medoids in one launch. Imported when it is launched.

All programs work on one step together: each scores its share of the candidates, they meet, and each reads what all
found. While exchanges bring nothing, the next medoids are tried at the same time, from the same state; the first that
can be exchanged is, and later ones are tried again. So the choice is that of one medoid after the other.

An item that would move to a candidate is counted out of its cell (cluster, class) and its cluster, and into its class
there, by integer atomics: the changes of n log n with each count add up to the change of the sum, in any order. A cell
goes by the number of one of its items, so a candidate needs three counters per item and no matrix.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin import kernels
from nearkin.core import facility
from nearkin.kernels.launch import CachedLauncher, device_of
from nearkin.kernels.numerics import tl, triton

FAR = tl.constexpr(facility.FAR)
ROUNDING = tl.constexpr(1e-9)  # of NMI, far above that of float64
TILE = 4096  # candidates times items at once
WARPS = 8
SHARES = 128  # of the candidates, a power of two; each program has one or more
TOGETHER = 8  # medoids that are tried at the same time


def search(p, gamma, sweeps):
    size, device = len(p.keys), p.keys.device
    plan = _plan(size, device, kernels.interpreted())
    near = torch.full((2, size), facility.FAR, device=device)
    counts = torch.zeros(plan.counts, dtype=torch.int32, device=device)
    scores = gamma.new_empty(2 * plan.shares)
    with device_of(p.keys):
        plan.launcher(
            (plan.programs, 1, 1),
            p.keys,
            p.kinds,
            p.table,
            plan.table_parts,
            p.num_medoids,
            p.total,
            p.classes,
            gamma,
            p.unit,
            near,
            scores,
            counts,
            size,
            sweeps,
        )
    return near[0]


class _Plan(NamedTuple):
    launcher: CachedLauncher
    programs: int
    shares: int
    counts: int  # entries
    table_parts: Tensor  # (2, B + 1): the growth of n log n from n - 1 to n; log n, of which n make n log n


@functools.lru_cache(maxsize=16)
def _plan(size, device, interpreted):
    items = max(16 if interpreted else 128, triton.next_power_of_2(size))  # no fewer than threads
    if interpreted:  # programs run one after the other, so one does all the shares
        programs, shares, candidates, options = 1, 8, 4, {}
    else:  # one program per multiprocessor, and all at the same time, since they wait for each other
        programs = min(SHARES, torch.cuda.get_device_properties(device).multi_processor_count)
        shares, candidates = SHARES, max(1, min(TILE, items * items // SHARES) // items)
        options = {"launch_cooperative_grid": True, "num_warps": max(4, min(WARPS, candidates * items // 256))}
    launcher = CachedLauncher(
        _search,
        BITS=size.bit_length(),
        C=candidates,
        N=items,
        V=shares,
        TOGETHER=TOGETHER,
        enable_fp_fusion=False,  # a choice must not depend on how a product and a sum are rounded
        **options,
    )
    table = facility.entropy_table(size, device)
    logs = table // torch.arange(size + 1, device=device).clamp(min=1)
    counts = 7 * size + 2 * shares + 1 + programs * (3 * candidates + 2) * size
    return _Plan(launcher, programs, shares, counts, torch.stack([table.diff(prepend=table[:1]), logs]))


@triton.jit
def _search(
    keys, kinds, table, table_parts, num_medoids_at, total_at, classes_at, gamma_at, unit_at, near_at, scores,
    counts, size, sweeps,
    BITS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, V: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """near_at (2, B): keys of the nearest and the second nearest medoid, all FAR. counts: all 0."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    second_at = near_at + size
    places = counts  # (6, B), see `_place`
    picks = places + 6 * size
    winners = picks + size  # (2, V)
    arrivals = winners + 2 * V
    own = arrivals + 1 + program * (3 * C + 2) * size
    i = tl.arange(0, N)
    mask_i = i < size
    share_ids = tl.arange(0, V)
    num_medoids = tl.load(num_medoids_at).to(tl.int32)
    last = num_medoids * (1 + sweeps)
    standing = tl.load(gamma_at) * 0.0
    t = num_medoids * 0
    quiet = t
    together = t + 1
    turn = t
    meetings = t
    while (t < last) & (quiet < num_medoids):
        grows = t < num_medoids
        near = tl.load(near_at + i, mask=mask_i, other=FAR)
        second = tl.load(second_at + i, mask=mask_i, other=FAR)
        tries = tl.where(grows, 1, tl.minimum(together, tl.minimum(last - t, num_medoids - quiet)))
        shares = V // tries
        for v in range(program, V, programs):
            nth = v // shares
            pick = tl.load(picks + (t + nth) % num_medoids, mask=(nth < tries) & (t >= num_medoids), other=-1)
            first = tl.where(nth < tries, (v - nth * shares) * C, size)
            best, score = _best(
                keys, kinds, table, table_parts, total_at, classes_at, gamma_at, unit_at, places, own, near, second,
                pick, standing, first, shares * C, size, BITS, C, N)  # fmt: skip
            tl.store(winners + turn * V + v, best)
            tl.store(scores + turn * V + v, score)
        meetings += programs
        _meet(arrivals, meetings)
        winner = tl.load(winners + turn * V + share_ids)
        score = tl.load(scores + turn * V + share_ids)
        nth = share_ids // shares
        better = (winner >= 0) & ((score > standing) | grows)
        first = tl.min(tl.where(better, nth, tries), 0)
        if first < tries:
            better = better & (nth == first)
            standing = tl.max(tl.where(better, score, float("-inf")), 0)
            best = tl.min(tl.where(better & (score == standing), winner, size), 0)
            slot = (t + first) % num_medoids
            if grows:
                row = tl.load(keys + best * size + i, mask=mask_i, other=FAR)
                second = tl.minimum(tl.maximum(near, row), second)
                near = tl.minimum(near, row)
                if program == 0:
                    tl.store(near_at + i, near, mask=mask_i)
                    tl.store(second_at + i, second, mask=mask_i)
            else:
                _nearest(keys, picks, near_at, second_at, num_medoids, slot, best, program, programs, size, C, N)
                meetings += programs
                _meet(arrivals, meetings)
                near = tl.load(near_at + i, mask=mask_i, other=FAR)
                second = tl.load(second_at + i, mask=mask_i, other=FAR)
            _place(kinds, near, second, places, program, programs, size, BITS, C, N)
            if program == 0:
                tl.store(picks + slot, best)
            meetings += programs
            _meet(arrivals, meetings)
            quiet = num_medoids * 0
            together = quiet + 1
            t += first + 1
        else:
            quiet += tries
            together = tl.minimum(2 * together, TOGETHER)
            t += tries
        turn = 1 - turn  # a program may write its next result while others still read the last


@triton.jit
def _meet(arrivals, number):
    """Waits until all programs have come here, `number` arrivals in all; then each sees what the others have stored."""
    tl.debug_barrier()
    seen = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") + 1
    while seen < number:
        seen = tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def _nearest(
    keys, picks, near_at, second_at, num_medoids, slot, best, program, programs, size,
    C: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The two smallest keys of this program's items, with `best` as the medoid in `slot`."""
    s = tl.arange(0, N)
    medoid = tl.where(s == slot, best, tl.load(picks + s, mask=s < num_medoids, other=0))
    for first in range(program * C, size, programs * C):
        item = first + tl.arange(0, C)
        inside = (item < size)[:, None] & (s < num_medoids)[None, :]
        key = tl.load(keys + medoid[None, :] * size + item[:, None], mask=inside, other=FAR)
        near = tl.min(key, 1)
        second = tl.min(tl.where(key == near[:, None], FAR, key), 1)
        tl.store(near_at + item, near, mask=item < size)
        tl.store(second_at + item, second, mask=item < size)


@triton.jit
def _place(kinds, near, second, places, program, programs, size, BITS: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    """For this program's items: the first item of their cell, the number of items in the cell and in the cluster; then
    the same should their medoid go, except that those who would come with them are not counted."""
    i = tl.arange(0, N)
    mask: tl.constexpr = (1 << BITS) - 1
    kind = tl.load(kinds + i, mask=i < size, other=-1).to(tl.int32)
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
def _best(
    keys, kinds, table, table_parts, total_at, classes_at, gamma_at, unit_at, places, own, near, second, pick,
    standing, first, stride, size, BITS: tl.constexpr, C: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The candidate of the largest score among those from `first` on, of equals the first, and its score; -1 if none.

    pick >= 0: in place of this medoid, and only if the score is above `standing`. Items are counted only for candidates
    whose score may be the best: the distances are exact, and NMI is bounded by how many items move.
    """
    i = tl.arange(0, N)
    r = tl.arange(0, C)
    mask: tl.constexpr = (1 << BITS) - 1
    growth = table_parts
    logs = table_parts + size + 1
    kind = tl.load(kinds + i, mask=i < size, other=-1).to(tl.int32)
    known = kind >= 0
    total_term = tl.load(total_at)
    classes = tl.load(classes_at)
    gamma = tl.load(gamma_at)
    unit = tl.load(unit_at)

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
    best = pick * 0 - 1
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
        lowest = _agreement(joint - number * cell_growth, clusters + arrived, total_term, classes)
        highest = tl.minimum(joint + arrived, classes)
        highest = _agreement(highest, clusters + arrived - number * owner_growth, total_term, classes)
        one = gamma * (1.0 + ROUNDING - lowest)
        other = gamma * (1.0 - ROUNDING - highest)
        most = tl.where(gamma == gamma, tl.maximum(one, other), float("inf")) - cost
        least = tl.where(gamma == gamma, tl.minimum(one, other), float("-inf")) - cost
        bar = tl.max(tl.where(valid, least, float("-inf")), 0)  # one of them reaches this
        hopeless = (most < bar) | ((most <= best_score) & ((best >= 0) | (pick >= 0)))
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
            agreed = _agreement(in_cells, in_clusters, total_term, classes)
            score = gamma * (1.0 - agreed) - cost
            score = tl.where(score == score, score, float("-inf"))
            top = tl.max(tl.where(valid, score, float("-inf")), 0)
            at = tl.min(tl.where(valid & (score == top), c, size), 0)
            takes = (at < size) & ((top > best_score) | ((best < 0) & (pick < 0)))
            best = tl.where(takes, at, best)
            best_score = tl.where(takes, top, best_score)
            tl.debug_barrier()  # all have been counted
            cleared = tl.zeros((C, N), tl.int32)
            tl.store(cell_at, cleared, mask=leaves)
            tl.store(owner_at, cleared, mask=leaves)
            tl.store(kind_at, cleared, mask=moves)
            tl.debug_barrier()  # the counts are 0 again
    return best, best_score


@triton.jit
def _agreement(joint, clusters, total_term, classes):
    """NMI, as in `core.facility.agreement`."""
    shared = (joint - clusters - classes + total_term).to(tl.float64)
    ours = tl.maximum(total_term - clusters, 0).to(tl.float64)
    theirs = tl.maximum(total_term - classes, 0).to(tl.float64)
    split = ours * theirs
    tiny = 1e-6 * total_term.to(tl.float64)
    defined = split > tiny * tiny
    nmi = tl.where(defined, shared, 0.0) * (1.0 / tl.sqrt(tl.where(defined, split, 1.0)))
    nmi = tl.minimum(tl.maximum(nmi, 0.0), 1.0)
    return tl.where(tl.maximum(ours, theirs) <= tiny, 1.0, nmi)
