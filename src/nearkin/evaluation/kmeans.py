"""k-means, seeded by k-means++, for any number of items and clusters.

Points are centred and held in float32 on their device; nothing of the size items × clusters is ever whole in memory.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.core import checks, distances, random
from nearkin.evaluation.arrays import Array, takes_arrays
from nearkin.evaluation.retrieval.knn import BUDGET

Progress = Callable[[int, int], None]  # rows done, rows in all
_ROUNDING = 2e-6  # of a squared distance taken in float32, in parts of the squared lengths


class Clusters(NamedTuple):
    """What k-means found: assignment (N,), centroids (k, D) in float32, the sum of squared distances, updates made."""

    assignment: Tensor
    centroids: Tensor
    inertia: float
    iterations: int


@takes_arrays
def kmeans(
    embeddings: Array,
    clusters: int,
    *,
    iterations: int = 20,
    starts: int = 1,
    trials: int | None = None,
    seed: int = 0,
    normalize: bool = True,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> Clusters:
    """Lloyd's k-means from k-means++ seeds; of several `starts` the one with the lowest inertia, the first of equals.

    embeddings (N, D) on any device; `normalize` brings rows to length 1 first (centroids stay means). Each seed is the
    best of `trials` draws: 2 + ln k unless given, as scikit-learn has it; 1 is the paper's plain form, faster and
    looser. At most `iterations` updates, fewer once no item moves. An empty cluster is moved to the farthest item;
    fewer than `clusters` come out where there are fewer distinct rows. Working memory beyond the centred float32 copy
    of the embeddings, the centroids and a few numbers an item stays within `budget` bytes. The same seed gives the same
    clusters on the same device: sums are taken in whole numbers, which no order of addition changes. progress(done, of)
    counts rows looked at: `trials` of a seed and each update are a pass, and fewer updates than allowed end it early.
    Arthur and Vassilvitskii 2007, "k-means++", section 2.2; 20 iterations as faiss and pytorch-metric-learning.
    """
    if trials is None:
        trials = 2 + int(math.log(max(clusters, 1)))
    _check(embeddings, clusters, iterations, starts, trials, seed, budget)
    points, centre, scale = _centred(embeddings, normalize, budget)
    best: tuple[float, Tensor, Tensor, int] | None = None
    cost = clusters * (trials + iterations + 1)  # products of a row with a seed or a centroid, of one start
    for start in range(starts):
        told = _Told(progress, len(points), cost, start, starts)
        seeds = _seeds(points, clusters, trials, seed, start, budget, told)
        found = _lloyd(points, seeds, iterations, budget, told)
        told.to(cost)
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None
    inertia, assignment, centroids, made = best
    return Clusters(assignment, (centroids.to(centre.dtype) * scale + centre).float(), inertia * scale**2, made)


class _Told:
    """Says how many rows' worth of the work of all starts is done, in the share of its products."""

    def __init__(self, progress: Progress | None, rows: int, cost: int, start: int, starts: int) -> None:
        self.progress, self.rows, self.cost, self.start, self.starts, self.done = progress, rows, cost, start, starts, 0

    def more(self, products: int) -> None:
        self.to(self.done + products)

    def to(self, products: int) -> None:
        self.done = products
        if self.progress is not None:
            share = self.rows * min(products, self.cost) // self.cost
            self.progress(self.start * self.rows + share, self.starts * self.rows)


def _check(
    embeddings: Tensor, clusters: int, iterations: int, starts: int, trials: int, seed: int, budget: int
) -> None:
    checks.rows("embeddings", embeddings)
    for name, value, low in (
        ("clusters", clusters, 1),
        ("iterations", iterations, 0),
        ("starts", starts, 1),
        ("trials", trials, 1),
        ("seed", seed, 0),
        ("budget", budget, 1),
    ):
        checks.integer(name, value, low)
    checks.enough("embeddings", embeddings.shape[0], clusters, "as many rows as clusters")
    checks.finite("embeddings", embeddings)


def _tiles(items: Tensor, bytes_a_row: int, budget: int) -> Iterator[slice]:
    step = max(1, budget // max(bytes_a_row, 1))
    return (slice(at, at + step) for at in range(0, items.shape[0], step))


def _centred(embeddings: Tensor, normalize: bool, budget: int) -> tuple[Tensor, Tensor, float]:
    """Points (N, D) about their mean with coordinates in -1 … 1, float32; the mean; and what one unit was."""
    wide, dim = distances.wide(embeddings), embeddings.shape[1]

    def raw(rows: slice) -> Tensor:
        x = distances.upcast(embeddings[rows].detach()).to(wide)
        return distances.unit(x) if normalize else x

    centre = torch.zeros(dim, dtype=wide, device=embeddings.device)
    points = torch.empty(embeddings.shape, dtype=torch.float32, device=embeddings.device)
    for rows in _tiles(embeddings, 48 * dim, budget):
        centre += raw(rows).sum(0)
    centre /= embeddings.shape[0]
    for rows in _tiles(embeddings, 48 * dim, budget):
        points[rows] = raw(rows) - centre
    scale = max(float(points.max()), -float(points.min())) or 1.0
    return points.div_(scale), centre, scale


def _seeds(points: Tensor, clusters: int, trials: int, seed: int, start: int, budget: int, told: _Told) -> Tensor:
    """Indices of seeds: of `trials` points drawn in proportion to their squared distance from the seeds so far, the
    one that leaves the smallest sum of squared distances; fewer than `clusters` once every point lies on a seed.
    """
    number = points.shape[0]
    nearest = torch.full((number,), torch.inf, device=points.device)  # squared distance to a seed
    after = torch.empty(number, trials, device=points.device)
    lengths = torch.linalg.vector_norm(points, dim=1, keepdim=True).square()
    chosen: list[Tensor] = []
    for turn in range(clusters):
        words = random.words(trials, seed, random.Stream.KMEANS, start, turn)
        if turn == 0:
            drawn = (words % np.uint64(number)).astype(np.int64)
        else:
            mass = nearest.cpu().numpy().cumsum(dtype=np.float64)
            if not mass[-1] > 0:
                break
            chance = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
            drawn = np.searchsorted(mass, chance * mass[-1], side="right").clip(max=number - 1)
        candidates = torch.from_numpy(drawn).to(points.device)
        for rows in _tiles(points, 20 * trials, budget):
            squared = _squared(points[rows], lengths[rows], points[candidates], lengths[candidates])
            torch.minimum(nearest[rows, None], squared, out=after[rows])
        best = after.sum(0, dtype=distances.wide(points)).argmin(keepdim=True)
        nearest = after.index_select(1, best).squeeze(1)
        chosen.append(candidates[best])
        told.more(trials)
    return torch.cat(chosen)


def _squared(x: Tensor, x_squared: Tensor, y: Tensor, y_squared: Tensor) -> Tensor:
    """Squared distances in float32; what is within rounding of 0 is 0, so that no duplicate becomes a second seed."""
    lengths = x_squared + y_squared.T
    squared = _product(lengths, x, y, -2)
    return squared.masked_fill_(squared <= lengths * _ROUNDING, 0.0)


def _product(added: Tensor, x: Tensor, y: Tensor, factor: float) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return torch.addmm(added, x, y.T, alpha=factor)


def _lloyd(
    points: Tensor, seeds: Tensor, iterations: int, budget: int, told: _Told
) -> tuple[float, Tensor, Tensor, int]:
    centroids, made = points[seeds], 0
    assignment, own = _assign(points, centroids, budget)
    told.more(len(seeds))
    while made < iterations:
        centroids, made = _update(points, centroids, assignment, own, budget), made + 1
        before = assignment
        assignment, own = _assign(points, centroids, budget)
        told.more(len(seeds))
        if torch.equal(before, assignment):
            break
    return float(own.sum()), assignment, centroids, made


def _assign(points: Tensor, centroids: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each point, ties to the lowest, and the squared distance to it in float64: (N,) each."""
    half = centroids.square().sum(1) / 2
    assignment = torch.empty(points.shape[0], dtype=torch.int64, device=points.device)
    own = torch.empty(points.shape[0], dtype=distances.wide(points), device=points.device)
    for rows in _tiles(points, 8 * centroids.shape[0] + 32 * points.shape[1], budget):
        assignment[rows] = _product(half, points[rows], centroids, -1).argmin(1)
        own[rows] = (points[rows] - centroids[assignment[rows]]).to(own.dtype).square().sum(1)
    return assignment, own


def _update(points: Tensor, centroids: Tensor, assignment: Tensor, own: Tensor, budget: int) -> Tensor:
    """Means of the clusters, summed in whole numbers; empty clusters go to the points farthest from their own."""
    number, clusters = points.shape[0], centroids.shape[0]
    unit = 2.0 ** (61 - number.bit_length())  # a sum of N coordinates within -1 … 1 stays below 2^62
    sums = torch.zeros(centroids.shape, dtype=torch.int64, device=points.device)
    for rows in _tiles(points, 32 * points.shape[1], budget):
        sums.index_add_(0, assignment[rows], (points[rows].to(own.dtype) * unit).round().long())
    counts = assignment.bincount(minlength=clusters)
    means = (sums.to(own.dtype) / (counts.clamp(min=1)[:, None] * unit)).float()
    empty = (counts == 0).nonzero().squeeze(1)
    if empty.numel():
        means[empty] = centroids[empty]
        far = own.sort(descending=True, stable=True).indices[: empty.numel()]
        far = far[own[far] > 1e-12]
        means[empty[: far.numel()]] = points[far]
    return means
