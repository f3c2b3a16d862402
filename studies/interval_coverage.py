"""Coverage of 95 % intervals for new classes, and how often a comparison finds a difference where there is none.

    python studies/interval_coverage.py [--part retrieval|compare|pairs] [--draws 400] [--quick]

Each sample has new classes from a population, and so a new gallery, and calls the functions of the library for their
intervals. The truth is the mean of the metric over samples of as many classes; for verification, the value over
thousands of classes. The populations: `plain`, similar classes; `spread`, heavy-tailed widths of classes; `unequal`,
sizes of 2 to about 20; `families`, classes that come in look-alike groups; `hubs`, centres of unequal length, some of
which are near everything; `easy`, where most classes are perfect and a few are not; `glyphs`, characters as plain
pixels.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from nearkin.data import glyphs
from nearkin.evaluation import all_pairs
from nearkin.evaluation.statistics import cluster_bootstrap

METRICS = ("recall@1", "r_precision", "map@r")
POPULATIONS = ("plain", "spread", "unequal", "families", "hubs", "easy", "glyphs")
NULLS = ("alike", "spread", "unequal", "hubs", "skewed", "rare")
VERIFIED = {"spread": 0.3, "families": 0.25, "flat": 0.3}
# Widths of the first embedding's classes at which both have the same MAP@R, found by bisection.
EQUAL = {
    ("skewed", 10): 0.6435,
    ("skewed", 20): 0.6133,
    ("skewed", 50): 0.5861,
    ("rare", 10): 0.5568,
    ("rare", 20): 0.5334,
    ("rare", 50): 0.4924,
}
SHOWN = ((30, 1e-2), (100, 1e-3), (300, 1e-4), (1000, 1e-5))
_DIM = 16


def drawn(kind: str, classes: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Embeddings and labels of new classes of a population."""
    if kind == "glyphs":
        pixels, size = _pixels()
        taken = rng.choice(len(pixels), classes, replace=False)
        return torch.from_numpy(pixels[taken].reshape(classes * size, -1)), torch.arange(classes).repeat_interleave(
            size
        )
    sizes = np.full(classes, 5)
    centres, noise = rng.normal(size=(classes, _DIM)), rng.normal(size=classes)
    width = {"spread": 0.45 * np.exp(0.6 * noise), "easy": 0.2 * np.exp(0.6 * noise)}.get(kind, np.full(classes, 0.5))
    if kind == "plain":
        width = np.full(classes, 0.62)
    elif kind == "unequal":
        sizes = np.maximum(2, np.round(np.exp(1.6 + 0.7 * rng.normal(size=classes)))).astype(int)
        width = 0.5 * np.exp(0.4 * noise)
    elif kind == "families":
        centres = _families(25)[rng.integers(25, size=classes)] + 0.45 * centres
        width = 0.3 * np.exp(0.4 * noise)
    elif kind == "hubs":
        centres = centres * np.exp(0.5 * rng.normal(size=(classes, 1)))
    return _around(centres, width, sizes, rng)


def pair_drawn(kind: str, classes: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Two embeddings of the same new classes, equally good: of `skewed` and `rare` by MAP@R on the average, since the
    second is better at most classes and very bad at few; of the others by symmetry.
    """
    noise, other = rng.normal(size=(2, classes))
    centres, second_centres, sizes = *rng.normal(size=(2, classes, _DIM)), np.full(classes, 5)
    first, second = 0.55 * np.exp(0.4 * noise), 0.55 * np.exp(0.4 * other)
    if kind in ("spread", "skewed", "rare"):
        second_centres = centres
    if kind == "spread":
        first = second = 0.5 * np.exp(0.6 * noise)
    elif kind == "unequal":
        sizes = np.maximum(2, np.round(np.exp(1.6 + 0.7 * rng.normal(size=classes)))).astype(int)
    elif kind == "hubs":
        centres, second_centres = (c * np.exp(0.5 * rng.normal(size=(classes, 1))) for c in (centres, second_centres))
        first = second = np.full(classes, 0.5)
    elif kind == "skewed":
        first, second = np.full(classes, EQUAL[kind, classes]), 0.4 * np.exp(0.7 * noise)
    elif kind == "rare":
        bad = rng.random(classes) < 0.1
        first, second = EQUAL[kind, classes] * np.exp(0.2 * noise), np.where(bad, 1.5, 0.35)
    a, labels = _around(centres, first, sizes, rng)
    return a, _around(second_centres, second, sizes, rng)[0], labels


def verified(kind: str, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Four items per class; `flat`: most of the variance in few dimensions, so that many look alike."""
    rng = np.random.default_rng([seed, 77])
    centres, width = rng.normal(size=(classes, _DIM)), VERIFIED[kind]
    if kind == "families":
        centres = _families(50)[rng.integers(50, size=classes)] + 0.6 * centres
    elif kind == "flat":
        centres = centres * 2.5 ** (-np.arange(_DIM) / 5)
    spread = {"spread": 0.4, "families": 0.3, "flat": 0.2}[kind]
    return _around(centres, width * np.exp(spread * rng.normal(size=classes)), np.full(classes, 4), rng)


def retrieval_coverage(kind: str, classes: int, draws: int) -> dict[str, tuple[float, float, float]]:
    """Per metric the truth, and the coverage of the intervals: of this library and of plain percentiles."""
    rng = np.random.default_rng([classes, POPULATIONS.index(kind)])
    values, ends, plain = [], [], []
    for draw in range(4 * draws):
        x, labels = drawn(kind, classes, rng)
        scores = per_query(x, labels)
        values.append([float(scores[name].mean()) for name in METRICS])
        if draw < draws:
            ends.append([cluster_bootstrap.share_interval(scores[name], labels) for name in METRICS])
            plain.append([percentiles(scores[name], labels, draw) for name in METRICS])
    truth = np.mean(values, axis=0)
    return {
        name: (truth[i], *(_coverage(np.array(which)[:, i], truth[i]) for which in (ends, plain)))
        for i, name in enumerate(METRICS)
    }


def false_verdicts(kind: str, classes: int, draws: int) -> dict[str, float]:
    """How often `compare` decides where both are equally good on average over all samples, and that average."""
    rng, decided, difference = np.random.default_rng([classes, NULLS.index(kind)]), np.zeros(3), 0.0
    for draw in range(draws):
        a, b, labels = pair_drawn(kind, classes, rng)
        first, second = per_query(a, labels), per_query(b, labels)
        for i, name in enumerate(METRICS):
            comparison = cluster_bootstrap.compare(first[name], second[name], labels, samples=1000, seed=draw)
            decided[i] += comparison["verdict"] != "undecided"
        difference += comparison["difference"] / draws
    return dict(zip(METRICS, decided / draws, strict=True)) | {"difference": difference}


def pair_coverage(kind: str, classes: int, far: float, draws: int, truth: dict[str, float]) -> dict[str, float]:
    """Per rate, the share of intervals that contain the truth."""
    names, inside = ("eer", "auc", f"tar@far={far}"), np.zeros(3)
    for draw in range(draws):
        ends = all_pairs(*verified(kind, classes, draw), fars=(far,), interval=True, seed=draw, samples=500).intervals
        inside += [ends[name][0] <= truth[name] <= ends[name][1] for name in names]
    return dict(zip(names, inside / draws, strict=True))


def per_query(x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The metrics of `retrieval_metrics.per_query`, much faster for small sets."""
    rows = torch.nn.functional.normalize(x, dim=1)
    positives = torch.bincount(labels)[labels] - 1
    near = (rows @ rows.T).fill_diagonal_(-2).topk(int(positives.max()), dim=1).indices
    place = torch.arange(1, near.shape[1] + 1)
    hit = (labels[near] == labels[:, None]) & (place <= positives[:, None])
    precision = hit.cumsum(1) / place
    right = hit[:, 0], hit.sum(1) / positives, (precision * hit).sum(1) / positives
    return {name: value.double() for name, value in zip(METRICS, right, strict=True)}


def percentiles(values: Tensor, labels: Tensor, seed: int) -> tuple[float, float]:
    """The baseline: percentiles of 1,000 resamples of the query classes."""
    means = torch.zeros(int(labels.max()) + 1, 2, dtype=torch.float64)
    means.index_add_(0, labels, torch.stack([values, torch.ones_like(values)], 1))
    times = np.random.default_rng(seed).multinomial(len(means), np.full(len(means), 1 / len(means)), 1000)
    totals = times @ means.numpy()
    return cluster_bootstrap.percentiles(totals[:, 0] / totals[:, 1], 0.95)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("retrieval", "compare", "pairs"))
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="few samples of few classes, to check that it runs")
    options = parser.parse_args(argv)
    draws = 10 if options.quick else options.draws
    parts: dict[str, Callable[[int, bool], Iterator[str]]] = {
        "retrieval": _retrieval_rows,
        "compare": _compare_rows,
        "pairs": _pair_rows,
    }
    for name in [options.part] if options.part else parts:
        for row in parts[name](draws, options.quick):
            print(row, flush=True)


def _retrieval_rows(draws: int, quick: bool) -> Iterator[str]:
    yield (
        "| population | classes | "
        + " | ".join(f"{name}: truth, covered, percentiles covered" for name in METRICS)
        + " |"
    )
    yield "|---|---|" + "---|" * len(METRICS)
    for kind in POPULATIONS[:2] if quick else POPULATIONS:
        for classes in (5, 10) if quick else (10, 30, 100, 5):
            coverage = retrieval_coverage(kind, classes, draws)
            cells = [f"{100 * t:.1f} %, {100 * ours:.1f}, {100 * old:.1f}" for t, ours, old in coverage.values()]
            yield f"| {kind} | {classes} | {' | '.join(cells)} |"


def _compare_rows(draws: int, quick: bool) -> Iterator[str]:
    yield "| population | classes | recall@1: decided, % | map@r: decided, % | mean difference of map@r |"
    yield "|---|---|---|---|---|"
    for kind in NULLS[:2] if quick else NULLS:
        for classes in (10,) if quick else (10, 20, 50):
            rates = false_verdicts(kind, classes, draws)
            first = "" if kind in ("skewed", "rare") else f"{100 * rates['recall@1']:.1f}"
            yield f"| {kind} | {classes} | {first} | {100 * rates['map@r']:.1f} | {rates['difference']:+.4f} |"


def _pair_rows(draws: int, quick: bool) -> Iterator[str]:
    yield "| population | classes | FAR | TAR there, truth | TAR covered, % | EER covered, % | AUC covered, % |"
    yield "|---|---|---|---|---|---|---|"
    shown = SHOWN[:1] if quick else SHOWN
    for kind in tuple(VERIFIED)[: 1 if quick else None]:
        many = [
            all_pairs(*verified(kind, 300 if quick else 3000, 10**6 + i), fars=[f for _, f in shown]) for i in range(4)
        ]
        truth = {
            name: float(np.mean([result[name] for result in many]))
            for name in many[0]
            if name[:3] in ("tar", "eer", "auc")
        }
        for classes, far in shown:
            coverage = pair_coverage(kind, classes, far, max(draws // (1 + classes // 100), 10), truth)
            eer, auc, tar = (f"{100 * coverage[name]:.0f}" for name in ("eer", "auc", f"tar@far={far}"))
            yield f"| {kind} | {classes} | {far:g} | {100 * truth[f'tar@far={far}']:.1f} % | {tar} | {eer} | {auc} |"


def _around(
    centres: np.ndarray, width: np.ndarray, sizes: np.ndarray, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    labels = np.repeat(np.arange(len(centres)), sizes)
    rows = centres[labels] + width[labels][:, None] * rng.normal(size=(len(labels), centres.shape[1]))
    return torch.from_numpy(rows.astype(np.float32)), torch.from_numpy(labels)


@lru_cache(maxsize=2)
def _families(number: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(number, _DIM))


@lru_cache(maxsize=1)
def _pixels() -> tuple[np.ndarray, int]:
    """Four drawings of every character as 16 × 16 pixels less their mean, (classes, 4, 256)."""
    drawings = glyphs.load(size=16, per_class=4)
    rows = drawings.images.reshape(-1, 4, 256).astype(np.float32)
    return rows - rows.mean(axis=(0, 1)), 4


def _coverage(ends: np.ndarray, truth: float) -> float:
    return float(((ends[:, 0] <= truth + 1e-12) & (truth - 1e-12 <= ends[:, 1])).mean())


if __name__ == "__main__":
    main()
