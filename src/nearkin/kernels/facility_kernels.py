# mypy: ignore-errors
"""The kernel of `facility_ops`: from distances to medoids, greedy choice and exchange, in one launch. Imported then.

All programs work on one step together: each scores its share of the candidates, they meet, and each reads what all
found. While exchanges bring nothing, the next medoids are tried at the same time, from the same state; the first that
can be exchanged is, and later ones are tried again. So the choice is that of one medoid after the other.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin import kernels
from nearkin.core import facility
from nearkin.kernels.facility_search_kernels import agreement, best, meet, nearest, place
from nearkin.kernels.launch import CachedLauncher, device_of
from nearkin.kernels.numerics import tl, triton

FAR = tl.constexpr(facility.FAR)
STEPS = tl.constexpr(facility.STEPS)
SMALLEST = tl.constexpr(facility.smallest(torch.float64))
TILE = 4096  # candidates times items at once
WARPS = 8
SHARES = 128  # of the candidates, a power of two; each program has one or more
TOGETHER = 8  # medoids that are tried at the same time
ALL = 2**30  # medoids at most


def solve(distance, labels, gamma, sweeps, num_clusters):
    """As `facility_ops.solve`; tensors contiguous, gamma a scalar tensor."""
    size, device = len(distance), distance.device
    plan = _plan(size, device, distance.dtype, kernels.interpreted())
    values = distance.new_empty(3)
    indices = torch.empty((2, size), dtype=torch.long, device=device)
    chosen = torch.empty(size, dtype=torch.uint8, device=device)
    with device_of(distance):
        plan.launcher(
            (plan.programs, 1, 1),
            distance,
            labels,
            gamma,
            plan.table,
            plan.table_parts,
            torch.empty(plan.longs, dtype=torch.long, device=device),
            torch.empty(plan.floats, dtype=torch.float64, device=device),
            torch.zeros(plan.ints, dtype=torch.int32, device=device),
            values,
            indices,
            chosen,
            size,
            sweeps,
            ALL if num_clusters is None else min(num_clusters, ALL),
        )
    return values, indices, chosen.view(torch.bool)


def slopes(distance, labels, values, indices, upstream):
    """The gradient of the bracket with respect to the distances, (B, B)."""
    size = len(distance)
    out = torch.empty_like(distance)
    with device_of(distance):
        _slopes_launcher(triton.next_power_of_2(size))((size, 1, 1), labels, values, indices, upstream, out, size)
    return out


@functools.cache
def _slopes_launcher(items):
    return CachedLauncher(_slopes, N=items)


class _Plan(NamedTuple):
    launcher: CachedLauncher
    programs: int
    longs: int  # entries of the buffers
    floats: int
    ints: int
    table: Tensor
    table_parts: Tensor  # (2, B + 1): the growth of n log n from n - 1 to n; log n, of which n make n log n


@functools.lru_cache(maxsize=32)
def _plan(size, device, dtype, interpreted):
    constants, options = choices(size, dtype, interpreted)
    shares, candidates = constants["V"], constants["C"]
    # One program per multiprocessor, so that all run at the same time; the interpreter runs one after the other.
    programs = 1 if interpreted else min(shares, torch.cuda.get_device_properties(device).multi_processor_count)
    table = facility.entropy_table(size, device)
    logs = table // torch.arange(size + 1, device=device).clamp(min=1)
    parts = torch.stack([table.diff(prepend=table[:1]), logs])
    longs, floats = size * (size + 2) + 2 * shares, size + 3 * shares
    ints = 8 * size + 2 * shares + 1 + programs * (3 * candidates + 2) * size
    return _Plan(CachedLauncher(_solve, **constants, **options), programs, longs, floats, ints, table, parts)


def choices(size, dtype, interpreted=False):
    """The constants of `_solve` and the compiler's options."""
    items = max(16 if interpreted else 128, triton.next_power_of_2(size))  # no fewer than threads
    shares = 8 if interpreted else SHARES
    candidates = 4 if interpreted else max(1, min(TILE, items * items // SHARES) // items)
    constants = {"BITS": size.bit_length(), "C": candidates, "N": items, "V": shares, "TOGETHER": TOGETHER}
    options = {"enable_fp_fusion": False}  # a choice must not depend on how a product and a sum are rounded
    if not interpreted:  # programs that wait for each other must all be launched
        options |= {"launch_cooperative_grid": True, "num_warps": max(4, min(WARPS, candidates * items // 256))}
    return constants | {"LARGEST": torch.finfo(dtype).max}, options


@triton.jit(do_not_specialize=["sweeps", "most"])  # one compiled form for all
def _solve(
    distance, labels, gamma_at, table, table_parts, longs, floats, ints, values, indices, chosen, size, sweeps, most,
    BITS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, V: tl.constexpr, TOGETHER: tl.constexpr,
    LARGEST: tl.constexpr):  # fmt: skip
    """longs, floats: space. ints: all 0."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    keys = longs  # (B, B) as in `core.facility.Problem`
    near_at = keys + size * size  # (2, B): keys of the nearest and the second nearest medoid
    sums = near_at + 2 * size  # (2, V)
    costs = floats  # (B,)
    tops = costs + size  # (V,)
    scores = tops + V  # (2, V)
    places = ints  # (6, B), see `place`
    picks = places + 6 * size
    kinds = picks + size  # the first item of each one's class, or -1
    winners = kinds + size  # (2, V)
    arrivals = winners + 2 * V
    own = arrivals + 1 + program * (3 * C + 2) * size
    i = tl.arange(0, N)
    mask_i = i < size
    gamma = tl.load(gamma_at).to(tl.float64)
    _survey(distance, labels, table, near_at, kinds, costs, tops, sums, program, programs, size, C, N, V, LARGEST)
    meet(arrivals, programs)
    j = tl.arange(0, V)
    top = tl.max(tl.load(tops + j, mask=j < programs, other=0.0), 0)
    num_medoids = tl.minimum(tl.sum(tl.load(sums + j, mask=j < programs, other=0), 0), most).to(tl.int32)
    classes = tl.sum(tl.load(sums + V + j, mask=j < programs, other=0), 0)
    known = tl.load(kinds + i, mask=mask_i, other=-1) >= 0
    total = tl.load(table + tl.sum(known.to(tl.int32), 0))
    power = (tl.maximum(top, SMALLEST).to(tl.int64, bitcast=True) >> 52) << 52  # of two, at most the top
    unit = power.to(tl.float64, bitcast=True) / STEPS
    slack = size * unit
    _prepare(distance, kinds, costs, keys, indices + size, unit, slack, program, programs, size, BITS, C, N, LARGEST)
    meetings = 2 * programs
    meet(arrivals, meetings)

    last = num_medoids * (1 + sweeps)
    standing = gamma * 0.0
    t = num_medoids * 0
    quiet = t
    together = t + 1
    turn = t
    while (t < last) & (quiet < num_medoids):
        grows = t < num_medoids
        near = tl.load(near_at + i, mask=mask_i, other=FAR)
        second = tl.load(near_at + size + i, mask=mask_i, other=FAR)
        tries = tl.where(grows, 1, tl.minimum(together, tl.minimum(last - t, num_medoids - quiet)))
        shares = V // tries
        for v in range(program, V, programs):
            nth = v // shares
            pick = tl.load(picks + (t + nth) % num_medoids, mask=(nth < tries) & (t >= num_medoids), other=-1)
            first = tl.where(nth < tries, (v - nth * shares) * C, size)
            winner, score = best(
                keys, kinds, table, table_parts, total, classes, gamma, unit, places, own, near, second, pick,
                standing, slack, first, shares * C, size, BITS, C, N)  # fmt: skip
            tl.store(winners + turn * V + v, winner)
            tl.store(scores + turn * V + v, score)
        meetings += programs
        meet(arrivals, meetings)
        winner = tl.load(winners + turn * V + j)
        score = tl.load(scores + turn * V + j)
        nth = j // shares
        better = (winner >= 0) & ((score > standing + slack) | grows)
        first = tl.min(tl.where(better, nth, tries), 0)
        if first < tries:
            better = better & (nth == first)
            standing = tl.max(tl.where(better, score, float("-inf")), 0)
            item = tl.min(tl.where(better & (score >= standing - slack), winner, size), 0)
            slot = (t + first) % num_medoids
            if grows:
                row = tl.load(keys + item * size + i, mask=mask_i, other=FAR)
                second = tl.minimum(tl.maximum(near, row), second)
                near = tl.minimum(near, row)
                if program == 0:
                    tl.store(near_at + i, near, mask=mask_i)
                    tl.store(near_at + size + i, second, mask=mask_i)
            else:
                nearest(keys, picks, near_at, num_medoids, slot, item, program, programs, size, C, N)
                meetings += programs
                meet(arrivals, meetings)
                near = tl.load(near_at + i, mask=mask_i, other=FAR)
                second = tl.load(near_at + size + i, mask=mask_i, other=FAR)
            place(kinds, near, second, places, program, programs, size, BITS, C, N)
            if program == 0:
                tl.store(picks + slot, item)
            meetings += programs
            meet(arrivals, meetings)
            quiet = num_medoids * 0
            together = quiet + 1
            t += first + 1
        else:
            quiet += tries
            together = tl.minimum(2 * together, TOGETHER)
            t += tries
        turn = 1 - turn  # a program may write its next result while others still read the last
    if program == 0:
        _bracket(
            distance, near_at, places, table_parts, known, total, classes, gamma, values, indices, chosen, size,
            BITS, N)  # fmt: skip


@triton.jit
def _survey(
    distance, labels, table, near_at, kinds, costs, tops, sums, program, programs, size,
    C: tl.constexpr, N: tl.constexpr, V: tl.constexpr, LARGEST: tl.constexpr):  # fmt: skip
    """Classes and distances of this program's items: first item of the class, distance to the whole class; the largest
    distance, how many items lead a class, and n log n of those classes."""
    i = tl.arange(0, N)
    mask_i = i < size
    label = tl.load(labels + i, mask=mask_i, other=-1).to(tl.int64)
    top = tl.zeros((C,), tl.float64)
    leads = tl.zeros((C,), tl.int64)
    classes = tl.zeros((C,), tl.int64)
    for first in range(program * C, size, programs * C):
        item = first + tl.arange(0, C)
        mask_c = item < size
        its_label = tl.load(labels + item, mask=mask_c, other=-1).to(tl.int64)
        same = (its_label != -1)[:, None] & (label[None, :] == its_label[:, None])
        kind = tl.min(tl.where(same, i[None, :], size), 1)
        kind = tl.where(its_label != -1, kind, -1)
        number = tl.sum(same.to(tl.int32), 1)
        tl.store(kinds + item, kind, mask=mask_c)
        leading = mask_c & (kind == item)
        leads += leading.to(tl.int64)
        classes += tl.load(table + number, mask=leading, other=0)
        d = tl.load(distance + item[:, None] * size + i[None, :], mask=mask_c[:, None] & mask_i[None, :], other=0.0)
        tl.store(costs + item, tl.sum(tl.where(same, d.to(tl.float64), 0.0), 1), mask=mask_c)
        top = tl.maximum(top, tl.max(_finite(d, LARGEST), 1))
    tl.store(tops + program, tl.max(top, 0))
    tl.store(sums + program, tl.sum(leads, 0))
    tl.store(sums + V + program, tl.sum(classes, 0))
    if program == 0:
        tl.store(near_at + i, tl.full((N,), FAR, tl.int64), mask=mask_i)
        tl.store(near_at + size + i, tl.full((N,), FAR, tl.int64), mask=mask_i)


@triton.jit
def _finite(d, LARGEST: tl.constexpr):
    """Distances in float64, >= 0; NaN is 0."""
    return tl.minimum(tl.where(d > 0, d, 0.0).to(tl.float64), LARGEST)


@triton.jit
def _prepare(
    distance, kinds, costs, keys, true_medoids, unit, slack, program, programs, size,
    BITS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, LARGEST: tl.constexpr):  # fmt: skip
    """Keys of this program's medoids, and the member nearest to its whole class, the first of equals."""
    i = tl.arange(0, N)
    mask_i = i < size
    kind = tl.load(kinds + i, mask=mask_i, other=-1)
    cost = tl.load(costs + i, mask=mask_i, other=float("inf"))
    for first in range(program * C, size, programs * C):
        item = first + tl.arange(0, C)
        mask_c = item < size
        inside = mask_c[:, None] & mask_i[None, :]
        d = tl.load(distance + i[None, :] * size + item[:, None], mask=inside, other=0.0)
        step = (_finite(d, LARGEST) / unit + 0.5).to(tl.int64)
        step = tl.where(item[:, None] == i[None, :], -1, step)
        tl.store(keys + item[:, None] * size + i[None, :], step * (1 << BITS) + item[:, None], mask=inside)
        its_kind = tl.load(kinds + item, mask=mask_c, other=-1)
        same = (its_kind >= 0)[:, None] & (kind[None, :] == its_kind[:, None])
        lowest = tl.min(tl.where(same, cost[None, :], float("inf")), 1)
        medoid = tl.min(tl.where(same & (cost[None, :] <= lowest[:, None] + slack), i[None, :], size), 1)
        medoid = tl.where(medoid < size, medoid, tl.maximum(its_kind, 0))
        tl.store(true_medoids + item, medoid.to(tl.int64), mask=mask_c)


@triton.jit
def _bracket(
    distance, near_at, places, table_parts, known, total, classes, gamma, values, indices, chosen, size,
    BITS: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The clustering; the loss, the score and 1 - NMI."""
    i = tl.arange(0, N)
    mask_i = i < size
    near = tl.load(near_at + i, mask=mask_i, other=FAR)
    owner = near & ((1 << BITS) - 1)
    owned = known & (near < FAR)
    tl.store(indices + i, owner, mask=mask_i)
    tl.store(chosen + i, ((near < FAR) & (owner == i)).to(tl.uint8), mask=mask_i)
    logs = table_parts + size + 1
    cell_size = tl.load(places + size + i, mask=owned, other=0)
    owner_size = tl.load(places + 2 * size + i, mask=owned, other=0)
    joint = tl.sum(tl.load(logs + cell_size, mask=owned, other=0), 0)
    clusters = tl.sum(tl.load(logs + owner_size, mask=owned, other=0), 0)
    disagreement = tl.where(tl.max(known.to(tl.int32), 0) > 0, 1.0 - agreement(joint, clusters, total, classes), 0.0)
    true_medoid = tl.load(indices + size + i, mask=known, other=0)
    guessed = tl.sum(tl.load(distance + i * size + owner, mask=known, other=0.0).to(tl.float64), 0)
    true = tl.sum(tl.load(distance + i * size + true_medoid, mask=known, other=0.0).to(tl.float64), 0)
    value = gamma * disagreement - guessed + true
    tl.store(values, tl.where(value < 0, 0.0, value))
    tl.store(values + 1, gamma * disagreement - guessed)
    tl.store(values + 2, disagreement)


@triton.jit
def _slopes(labels, values, indices, upstream, out, size, N: tl.constexpr):
    row = tl.program_id(0)
    j = tl.arange(0, N)
    acts = (tl.load(labels + row) != -1) & (tl.load(values) > 0)
    slope = tl.where(acts, tl.load(upstream), 0.0).to(out.dtype.element_ty)
    guessed = tl.where(j == tl.load(indices + row), slope, 0.0)
    true = tl.where(j == tl.load(indices + size + row), slope, 0.0)
    tl.store(out + row * size + j, true - guessed, mask=j < size)
