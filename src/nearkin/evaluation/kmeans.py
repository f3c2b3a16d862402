"""k-means, seeded by k-means++, for any number of items and clusters.

Points are centred and stored in float32 on their device; no matrix of items × clusters is ever in memory.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.core import checks, distances, random
from nearkin.evaluation.arrays import Array, Progress, takes_arrays
from nearkin.evaluation.retrieval.knn import BUDGET

__all__ = ["Clusters", "kmeans"]

_ROUNDING = 2e-6  # of a squared distance in float32, relative to the squared lengths


class Clusters(NamedTuple):
    """Result of k-means: assignment (N,), centroids (k, D) in float32, sum of squared distances, number of updates."""

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
    """Lloyd's k-means from k-means++ seeds; of several `starts` the one with the lowest inertia, the first of ties.

    embeddings (N, D) on any device; `normalize` scales rows to length 1 first (centroids stay means). Each seed is the
    best of `trials` draws: by default 2 + ln k as in scikit-learn; 1 is the plain form of the paper, faster and less
    accurate. At most `iterations` updates, fewer once no item moves. An empty cluster is moved to the farthest item;
    the result has fewer than `clusters` where there are fewer distinct rows. Working memory beyond the centred float32
    copy of the embeddings, the centroids and a few numbers per item stays within `budget` bytes. The same seed gives
    the same clusters on the same device: sums are over integers, so their order does not matter. progress(done, total)
    counts rows: the `trials` of a seed and each update are a pass, and fewer updates than allowed end it early.
    Arthur and Vassilvitskii 2007, "k-means++", section 2.2; 20 iterations as faiss and pytorch-metric-learning.
    """
    if trials is None:
        trials = 2 + int(math.log(max(clusters, 1)))
    checks.rows("embeddings", embeddings)
    counts = {"clusters": (clusters, 1), "iterations": (iterations, 0), "starts": (starts, 1), "trials": (trials, 1)}
    for name, (value, low) in {**counts, "seed": (seed, 0), "budget": (budget, 1)}.items():
        checks.integer(name, value, low)
    checks.enough("embeddings", embeddings.shape[0], clusters, "as many rows as clusters")
    checks.finite("embeddings", embeddings)
    points, centre, scale = _centred(embeddings, normalize, budget)
    best: tuple[float, Tensor, Tensor, int] | None = None
    cost = clusters * (trials + iterations + 1)  # products of a row with a seed or a centroid, of one start
    for start in range(starts):
        report = _Reporter(progress, len(points), cost, start, starts)
        seeds = _seeds(points, clusters, trials, seed, start, budget, report)
        run = _lloyd(points, seeds, iterations, budget, report)
        report.to(cost)
        if best is None or run[0] < best[0]:
            best = run
    assert best is not None
    inertia, assignment, centroids, updates = best
    return Clusters(assignment, (centroids.to(centre.dtype) * scale + centre).float(), inertia * scale**2, updates)


class _Reporter:
    """Reports the progress of all starts in rows, by the share of their products that is done."""

    def __init__(self, progress: Progress | None, rows: int, cost: int, start: int, starts: int) -> None:
        self.progress, self.rows, self.cost, self.start, self.starts, self.done = progress, rows, cost, start, starts, 0

    def advance(self, products: int) -> None:
        self.to(self.done + products)

    def to(self, products: int) -> None:
        self.done = products
        if self.progress is not None:
            share = self.rows * min(products, self.cost) // self.cost
            self.progress(self.start * self.rows + share, self.starts * self.rows)


def _tiles(items: Tensor, row_bytes: int, budget: int) -> Iterator[slice]:
    step = max(1, budget // max(row_bytes, 1))
    return (slice(at, at + step) for at in range(0, items.shape[0], step))


def _centred(embeddings: Tensor, normalize: bool, budget: int) -> tuple[Tensor, Tensor, float]:
    """Points (N, D) relative to their mean with coordinates in -1 … 1, float32; the mean; and the scale."""
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


def _seeds(points: Tensor, clusters: int, trials: int, seed: int, start: int, budget: int, report: _Reporter) -> Tensor:
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
        report.advance(trials)
    return torch.cat(chosen)


def _squared(x: Tensor, x_squared: Tensor, y: Tensor, y_squared: Tensor) -> Tensor:
    """Squared distances in float32; those within rounding of 0 are 0, so that no duplicate becomes a second seed."""
    lengths = x_squared + y_squared.T
    squared = _product(lengths, x, y, -2)
    return squared.masked_fill_(squared <= lengths * _ROUNDING, 0.0)


def _product(added: Tensor, x: Tensor, y: Tensor, factor: float) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return torch.addmm(added, x, y.T, alpha=factor)


def _lloyd(
    points: Tensor, seeds: Tensor, iterations: int, budget: int, report: _Reporter
) -> tuple[float, Tensor, Tensor, int]:
    centroids, updates = points[seeds], 0
    assignment, squared = _assign(points, centroids, budget)
    report.advance(len(seeds))
    while updates < iterations:
        centroids, updates = _update(points, centroids, assignment, squared, budget), updates + 1
        previous = assignment
        assignment, squared = _assign(points, centroids, budget)
        report.advance(len(seeds))
        if torch.equal(previous, assignment):
            break
    return float(squared.sum()), assignment, centroids, updates


def _assign(points: Tensor, centroids: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each point, ties to the lowest, and the squared distance to it in float64: (N,) each."""
    half = centroids.square().sum(1) / 2
    assignment = torch.empty(points.shape[0], dtype=torch.int64, device=points.device)
    squared = torch.empty(points.shape[0], dtype=distances.wide(points), device=points.device)
    for rows in _tiles(points, 8 * centroids.shape[0] + 32 * points.shape[1], budget):
        assignment[rows] = _product(half, points[rows], centroids, -1).argmin(1)
        squared[rows] = (points[rows] - centroids[assignment[rows]]).to(squared.dtype).square().sum(1)
    return assignment, squared


def _update(points: Tensor, centroids: Tensor, assignment: Tensor, squared: Tensor, budget: int) -> Tensor:
    """Means of the clusters, summed in integers; empty clusters move to the points farthest from their centroid."""
    number, clusters = points.shape[0], centroids.shape[0]
    unit = 2.0 ** (61 - number.bit_length())  # a sum of N coordinates within -1 … 1 stays below 2^62
    sums = torch.zeros(centroids.shape, dtype=torch.int64, device=points.device)
    for rows in _tiles(points, 32 * points.shape[1], budget):
        sums.index_add_(0, assignment[rows], (points[rows].to(squared.dtype) * unit).round().long())
    counts = assignment.bincount(minlength=clusters)
    means = (sums.to(squared.dtype) / (counts.clamp(min=1)[:, None] * unit)).float()
    empty = (counts == 0).nonzero().squeeze(1)
    if empty.numel():
        means[empty] = centroids[empty]
        far = squared.sort(descending=True, stable=True).indices[: empty.numel()]
        far = far[squared[far] > 1e-12]
        means[empty[: far.numel()]] = points[far]
    return means
