"""Clustering metrics: k-means of the embeddings, and how well its clusters agree with the classes."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin.core import checks, random
from nearkin.core.relations import UNKNOWN
from nearkin.evaluation.arrays import Array, Counts, Ends, Ids, Progress, Scores, takes_arrays
from nearkin.evaluation.kmeans import kmeans
from nearkin.evaluation.retrieval.knn import BUDGET
from nearkin.evaluation.statistics import binomial
from nearkin.evaluation.statistics.cluster_bootstrap import explain_missing

__all__ = ["agreement", "class_intervals", "clustering", "contingency"]


@takes_arrays
def clustering(
    embeddings: Array,
    labels: Ids,
    seed: int = 0,
    *,
    clusters: int | None = None,
    iterations: int = 20,
    starts: int = 1,
    trials: int | None = None,
    normalize: bool = True,
    budget: int = BUDGET,
    interval: bool = False,
    progress: Progress | None = None,
) -> Scores[float]:
    """k-means with as many clusters as classes (or `clusters`), compared with the classes.

    embeddings (N, D), labels (N,) class ids; items of label -1 are left out. Settings as in `kmeans`. Returns what
    `agreement` returns, and "clusters" (those not empty), "inertia" and "iterations" of the best start. The protocol of
    Song et al. 2016, arXiv:1511.06452, section 6, whose NMI is "nmi" here. `interval` adds 95 % intervals of the
    agreement over the choice of classes, as `.intervals`; `.notes` says why there are none. progress(done, total) as in
    `kmeans`.
    """
    checks.rows("embeddings", embeddings)
    known = checks.class_ids("labels", labels, embeddings) != UNKNOWN
    if not bool(known.all()):
        embeddings, labels = embeddings[known], labels[known]
    if labels.numel() == 0:
        raise ValueError("labels must hold at least one class id other than -1 (unknown), got none")
    number = _distinct(labels) if clusters is None else clusters
    options: dict[str, Any] = {"iterations": iterations, "starts": starts, "trials": trials, "normalize": normalize}
    partition = kmeans(embeddings, number, seed=seed, budget=budget, progress=progress, **options)
    result = Scores(agreement(labels, partition.assignment))
    if interval:
        result.intervals = class_intervals(agreement, labels, partition.assignment, result, seed)
        explain_missing(result, labels)
    result["clusters"] = float(_distinct(partition.assignment))
    result["inertia"] = partition.inertia
    result["iterations"] = float(partition.iterations)
    return result


def class_intervals(
    measure: Callable[[Tensor, Tensor], Mapping[str, float]],
    labels: Tensor,
    assignment: Tensor,
    scores: Mapping[str, float],
    seed: int,
    parts: int = 40,
) -> dict[str, Ends]:
    """95 % intervals of what `measure(labels, assignment)` returns: a fortieth of the classes is left out at a time,
    with the clustering unchanged.

    A bootstrap would draw classes twice, and a class twice in one cluster agrees with itself too well: for an F1 of
    0.205 it gave [0.22, 0.30]. The jackknife has no such copies; its variance is (g - 1)/g Σ (value without a part -
    mean)². Perfect agreement has no spread and gets a one-sided interval; fewer than 5 classes get none.
    """
    classes, class_of = np.unique(labels.cpu().numpy(), return_inverse=True)
    parts = min(parts, len(classes))
    if len(classes) < binomial.MIN_CLASSES:
        return dict.fromkeys(scores, binomial.NONE)
    order = random.shuffled(random.words(len(classes), seed, random.Stream.CLUSTERING_PARTS, 0))
    part = np.empty(len(classes), np.int64)
    part[order] = np.arange(len(classes)) % parts
    without = []
    for number in range(parts):
        rest = torch.from_numpy(part[class_of] != number).to(labels.device)
        without.append(measure(labels[rest], assignment[rest]))
    intervals = {}
    for name, value in scores.items():
        values = np.array([each[name] for each in without])
        variance = (parts - 1) / parts * float(((values - values.mean()) ** 2).sum())
        if value == 1:
            intervals[name] = binomial.share(value, variance, freedom=parts - 1, classes=len(classes))
            continue
        reach = binomial.student(parts - 1) * math.sqrt(variance)
        intervals[name] = (max(value - reach, -1.0 if name == "ami" else 0.0), min(value + reach, 1.0))
    return intervals


@takes_arrays
def agreement(labels: Ids, assignment: Ids) -> dict[str, float]:
    """How well two partitions of the same items agree, from their contingency table, in float64 and 64-bit integers.

    "nmi" = 2 I / (H_1 + H_2), "nmi_geometric" = I / sqrt(H_1 H_2), "ami" = (I - E[I]) / ((H_1 + H_2) / 2 - E[I]) with
    the exact expectation under random partitions of the same sizes (Vinh, Epps, Bailey 2010, JMLR 11, eq. 24a);
    "f1", "precision" and "recall" of the pairs that share a cluster for the pairs that share a class.
    Partitions that are the same up to names score 1 in all; where only one of them is a single block, NMI and AMI
    are 0. Where no pair shares a class, or none a cluster, recall or precision is 0, unless both is the case.
    """
    if labels.dim() != 1 or labels.shape != assignment.shape or labels.numel() == 0:
        raise ValueError(
            "labels and assignment must be (N,) of the same N >= 1, "
            f"got {tuple(labels.shape)} and {tuple(assignment.shape)}"
        )
    table = contingency(labels, assignment)
    joint, rows, columns, sizes, cluster_sizes = table
    if joint.size == sizes.size == cluster_sizes.size:  # one block of each in every block of the other
        return dict.fromkeys(("nmi", "nmi_geometric", "ami", "f1", "precision", "recall"), 1.0)
    number = int(sizes.sum())
    scores = {"nmi": 0.0, "nmi_geometric": 0.0, "ami": 0.0}
    if sizes.size > 1 and cluster_sizes.size > 1:
        ratio = (number * joint) / (sizes[rows] * cluster_sizes[columns])
        shared = max(float((joint / number * np.log(ratio)).sum()), 0.0)
        first, second = _entropy(sizes), _entropy(cluster_sizes)
        expected, mean = _expected_information(sizes, cluster_sizes), (first + second) / 2
        scores = {
            "nmi": shared / mean,
            "nmi_geometric": shared / float(np.sqrt(first * second)),
            "ami": (shared - expected) / (mean - expected),
        }
    clustered, same, both = (int((n * (n - 1) // 2).sum()) for n in (cluster_sizes, sizes, joint))  # pairs
    scores["f1"] = 2 * both / (clustered + same)
    return {**scores, "precision": both / clustered if clustered else 0.0, "recall": both / same if same else 0.0}


def _distinct(ids: Tensor) -> int:
    return int(torch.unique(ids).numel())


def contingency(labels: Tensor, assignment: Tensor) -> tuple[Counts, Counts, Counts, Counts, Counts]:
    """Counts of the cells that are not 0, their rows and columns, and the sizes of classes and of clusters."""
    _, a, sizes = np.unique(labels.cpu().numpy(), return_inverse=True, return_counts=True)
    _, b, cluster_sizes = np.unique(assignment.cpu().numpy(), return_inverse=True, return_counts=True)
    cells, joint = np.unique(a * cluster_sizes.size + b, return_counts=True)
    return joint, cells // cluster_sizes.size, cells % cluster_sizes.size, sizes, cluster_sizes


def _entropy(sizes: Counts) -> float:
    share = sizes / sizes.sum()
    return float(-(share * np.log(share)).sum())


def _expected_information(sizes: Counts, cluster_sizes: Counts) -> float:
    """Mean mutual information over all partitions of these sizes: cells are hypergeometric.

    Probabilities are built from the ratios of neighbours, (a-n)(b-n) / ((n+1)(N-a-b+n+1)), and normalised to sum to 1,
    which keeps the digits that differences of large log-factorials lose. Equal sizes are counted once: at most N terms
    at a time, whatever the partitions.
    """
    number = int(sizes.sum())
    few, many = sorted(
        (np.unique(sizes, return_counts=True), np.unique(cluster_sizes, return_counts=True)), key=lambda u: u[0].size
    )
    b, weight = many[0].astype(np.int64), many[1]
    total = 0.0
    for a, times in zip(few[0].tolist(), few[1].tolist(), strict=True):
        low, high = np.maximum(0, a + b - number), np.minimum(a, b)
        length = high - low + 1
        begin = np.cumsum(length) - length
        block = np.repeat(np.arange(b.size), length)
        n = np.arange(int(length.sum())) - begin[block] + low[block]  # (sum of lengths,)
        size = b[block]
        step = np.zeros(n.size)
        last = n[:-1]
        with np.errstate(divide="ignore", invalid="ignore"):  # between two blocks the ratio has no meaning
            up = np.log((a - last) * (size[:-1] - last) / ((last + 1) * (number - a - size[:-1] + last + 1)))
        step[1:] = np.where(block[1:] == block[:-1], up, 0.0)
        step[begin[1:]] = -np.add.reduceat(step, begin)[:-1]  # every block starts near 0
        logs = np.cumsum(step)
        chance = np.exp(logs - np.maximum.reduceat(logs, begin)[block])
        value = n / number * np.log(number * np.maximum(n, 1) / (a * size))
        mean = np.add.reduceat(chance * value, begin) / np.add.reduceat(chance, begin)
        total += times * float((weight * mean).sum())
    return total
