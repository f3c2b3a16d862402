# mypy: ignore-errors
"""The kernel of `facility_ops`: greedy choice and exchange of medoids in one program. Imported when it is launched.

A step compares a few candidates at a time with all items. An item that would move to a candidate is counted out of its
cell (cluster, class) and its cluster, and into its class there, by integer atomics: the changes of n log n with each
count add up to the change of the sum, in any order. There is only one program, so steps need no synchronisation.
"""

import torch

from nearkin import kernels
from nearkin.core import facility
from nearkin.kernels.numerics import tl, triton

FAR = tl.constexpr(facility.FAR)
TILE = 4096  # candidates times items per step; 8 entries per thread
WARPS = 16


def search(p, gamma, sweeps):
    size = len(p.keys)
    items = max(16, triton.next_power_of_2(size))
    candidates = 4 if kernels.interpreted() else max(1, TILE // items)
    scratch = torch.zeros((candidates + 1) * size * (size + 2), dtype=torch.int32, device=p.keys.device)
    near = torch.empty_like(p.kinds)
    steps = p.table.diff(prepend=p.table[:1])
    with torch.cuda.device_of(p.keys):
        _search[(1,)](
            p.keys.contiguous(),
            p.kinds,
            p.table,
            steps,
            p.num_medoids,
            p.total,
            p.classes,
            gamma,
            p.unit,
            scratch,
            near,
            size,
            sweeps,
            BITS=p.bits,
            C=candidates,
            N=items,
            num_warps=WARPS,
            enable_fp_fusion=False,  # a choice must not depend on how a product and a sum are rounded
        )
    return near


@triton.jit
def _search(
    keys, kinds, table, steps, num_medoids_at, total_at, classes_at, gamma_at, unit_at, scratch, out, size, sweeps,
    BITS: tl.constexpr, C: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """`steps`: the growth of n log n from n - 1 to n. `scratch`, all 0: current counts, then counts of a tile."""
    cells = scratch  # (medoid, class)
    sizes = cells + size * size
    picks = sizes + size
    cell_left = picks + size  # (candidate of the tile, medoid, class)
    size_left = cell_left + C * size * size
    kind_come = size_left + C * size
    i = tl.arange(0, N)
    mask_i = i < size
    kind = tl.load(kinds + i, mask=mask_i, other=-1).to(tl.int32)
    known = kind >= 0
    num_medoids = tl.load(num_medoids_at).to(tl.int32)
    total_term = tl.load(total_at)
    classes = tl.load(classes_at)
    gamma = tl.load(gamma_at)
    unit = tl.load(unit_at)
    near = tl.full((N,), FAR, tl.int64)
    t = num_medoids * 0
    quiet = num_medoids * 0
    while (t < num_medoids * (1 + sweeps)) & (quiet < num_medoids):
        slot = t % num_medoids
        pick = num_medoids * 0 - 1
        if t >= num_medoids:
            pick = tl.load(picks + slot)
            fresh = _nearest(keys, picks, num_medoids, slot, i, mask_i, size, C, N)
            _move(cells, sizes, near, fresh, kind, known & (near != fresh), size, BITS)
            near = fresh
        tl.debug_barrier()
        filled = tl.minimum(t, num_medoids)  # of `picks`; the removed one has no items left
        joint, clusters = _standing(cells, sizes, picks, table, filled, size, i, mask_i, C, N)
        best, best_score, own_score = _best(
            keys,
            kinds,
            table,
            steps,
            cells,
            sizes,
            cell_left,
            size_left,
            kind_come,
            near,
            kind,
            known,
            joint,
            clusters,
            total_term,
            classes,
            gamma,
            unit,
            pick,
            size,
            BITS,
            C,
            N,
        )
        if pick >= 0:
            best = tl.where(best_score > own_score, best, pick)
        row = tl.load(keys + best * size + i, mask=mask_i, other=FAR)
        _move(cells, sizes, near, row, kind, known & (row < near), size, BITS)
        near = tl.minimum(near, row)
        tl.store(picks + slot, best)
        tl.debug_barrier()
        quiet = tl.where(best == pick, quiet + 1, 0)
        t += 1
    tl.store(out + i, near, mask=mask_i)


@triton.jit
def _nearest(keys, picks, num_medoids, slot, i, mask_i, size, C: tl.constexpr, N: tl.constexpr):
    """The smallest key of each item, without the medoid in `slot`."""
    near = tl.full((N,), FAR, tl.int64)
    for first in range(0, num_medoids, C):
        s = first + tl.arange(0, C)
        stands = (s < num_medoids) & (s != slot)
        medoid = tl.load(picks + s, mask=stands, other=0)
        at = medoid[:, None] * size + i[None, :]
        key = tl.load(keys + at, mask=stands[:, None] & mask_i[None, :], other=FAR)
        near = tl.minimum(near, tl.min(key, 0))
    return near


@triton.jit
def _move(cells, sizes, old, new, kind, moved, size, BITS: tl.constexpr):
    """Items that `moved` leave the cells and clusters of their `old` keys for those of the `new`."""
    mask: tl.constexpr = (1 << BITS) - 1
    leaves = moved & (old < FAR)
    enters = moved & (new < FAR)
    before = (old & mask).to(tl.int32)
    after = (new & mask).to(tl.int32)
    tl.atomic_add(cells + before * size + kind, -1, mask=leaves, sem="relaxed", scope="cta")
    tl.atomic_add(sizes + before, -1, mask=leaves, sem="relaxed", scope="cta")
    tl.atomic_add(cells + after * size + kind, 1, mask=enters, sem="relaxed", scope="cta")
    tl.atomic_add(sizes + after, 1, mask=enters, sem="relaxed", scope="cta")


@triton.jit
def _standing(cells, sizes, picks, table, filled, size, i, mask_i, C: tl.constexpr, N: tl.constexpr):
    """Σ n log n over the cells and over the clusters of the current medoids."""
    joint = tl.zeros((C, N), tl.int64)
    clusters = tl.zeros((C,), tl.int64)
    for first in range(0, filled, C):
        s = first + tl.arange(0, C)
        stands = s < filled
        medoid = tl.load(picks + s, mask=stands, other=0)
        both = stands[:, None] & mask_i[None, :]
        count = tl.load(cells + medoid[:, None] * size + i[None, :], mask=both, other=0)
        joint += tl.load(table + count, mask=count > 0, other=0)
        count = tl.load(sizes + medoid, mask=stands, other=0)
        clusters += tl.load(table + count)
    return tl.sum(tl.sum(joint, 1), 0), tl.sum(clusters, 0)


@triton.jit
def _best(
    keys, kinds, table, steps, cells, sizes, cell_left, size_left, kind_come, near, kind, known, joint, clusters,
    total_term, classes, gamma, unit, pick, size, BITS: tl.constexpr, C: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The candidate of the largest score, of equals the first; its score; the score of `pick`."""
    i = tl.arange(0, N)
    r = tl.arange(0, C)
    mask: tl.constexpr = (1 << BITS) - 1
    owned = known & (near < FAR)
    owner = tl.where(owned, near & mask, 0).to(tl.int32)
    cell = owner * size + tl.maximum(kind, 0)
    cell_size = tl.load(cells + cell, mask=owned, other=0)
    owner_size = tl.load(sizes + owner, mask=owned, other=0)
    cell_at = cell_left + r[:, None] * (size * size) + cell[None, :]
    size_at = size_left + r[:, None] * size + owner[None, :]
    kind_at = kind_come + r[:, None] * size + kind[None, :]
    lowest = gamma * 0 - float("inf")
    lowest = tl.where(lowest == lowest, lowest, float("-inf"))
    best = pick * 0 - 1
    best_score = lowest
    own_score = lowest
    for first in range(0, size, C):
        c = first + r
        mask_c = c < size
        inside = mask_c[:, None] & known[None, :]
        key = tl.load(keys + c[:, None] * size + i[None, :], mask=inside, other=FAR)
        moves = key < near[None, :]
        leaves = moves & owned[None, :]
        gone = tl.atomic_add(cell_at, 1, mask=leaves, sem="relaxed", scope="cta")
        away = tl.atomic_add(size_at, 1, mask=leaves, sem="relaxed", scope="cta")
        come = tl.atomic_add(kind_at, 1, mask=moves, sem="relaxed", scope="cta")
        grown = tl.load(steps + come + 1, mask=moves, other=0)
        grown -= tl.load(steps + cell_size[None, :] - gone, mask=leaves, other=0)
        shrunk = tl.load(steps + owner_size[None, :] - away, mask=leaves, other=0)
        spent = tl.where(inside, tl.maximum(tl.where(moves, key, near[None, :]) >> BITS, 0), 0)
        number = tl.sum(moves.to(tl.int32), 1)
        in_cells = joint + tl.sum(grown, 1)
        in_clusters = clusters - tl.sum(shrunk, 1) + tl.load(table + number)
        agreed = _agreement(in_cells, in_clusters, total_term, classes)
        score = gamma * (1.0 - agreed) - tl.sum(spent, 1).to(tl.float64) * unit
        score = tl.where(score == score, score, float("-inf"))
        valid = (number > 0) & (tl.load(kinds + c, mask=mask_c, other=-1) >= 0)
        top = tl.max(tl.where(valid, score, float("-inf")), 0)
        at = tl.min(tl.where(valid & (score == top), c, size), 0)
        takes = (at < size) & ((best < 0) | (top > best_score))
        best = tl.where(takes, at, best)
        best_score = tl.where(takes, top, best_score)
        own_score = tl.maximum(own_score, tl.max(tl.where(valid & (c == pick), score, float("-inf")), 0))
        tl.debug_barrier()  # all have been counted
        cleared = tl.zeros((C, N), tl.int32)
        tl.store(cell_at, cleared, mask=leaves)
        tl.store(size_at, cleared, mask=leaves)
        tl.store(kind_at, cleared, mask=moves)
        tl.debug_barrier()  # the counts are 0 again
    return best, best_score, own_score


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
