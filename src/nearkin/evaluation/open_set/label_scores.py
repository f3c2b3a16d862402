"""Scores of searches in a gallery of labels: by the nearest item or by a template, plain or normalised.

All sums are float64, by blocks of searches; a block of scores and its copies stay within `budget`. Scores are rounded
to 12 digits, so that rounding decides no tie.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.core import distances
from nearkin.evaluation.open_set.draws import Draw

__all__ = ["CSLS_NEIGHBOURS", "NORMALIZATIONS", "SCORINGS", "Cohort", "Method", "Searches", "search"]

SCORINGS = ("nearest", "template", "weighted")
NORMALIZATIONS = ("none", "as-norm", "csls")
CSLS_NEIGHBOURS = 10  # of the paper (Conneau et al. 2018, arXiv:1710.04087)
DIGITS = 12
_COPIES = 5  # of a block of scores, at most at a time
_LEAST = 1e-6  # standard deviation of cohort scores: where all are equal, nothing is to be divided


class Method(NamedTuple):
    """How a label is scored, and how scores are normalised."""

    scoring: str
    normalization: str = "none"

    @property
    def name(self) -> str:
        return self.scoring if self.normalization == "none" else f"{self.scoring}+{self.normalization}"


class Cohort(NamedTuple):
    """Templates (C, D) of classes that are neither enrolled nor searched for; the `nearest` of them set the scale.

    center, spread (N,): of all embeddings, mean and standard deviation of the largest cosines with the templates.
    """

    templates: Tensor
    nearest: int
    center: Tensor
    spread: Tensor

    @classmethod
    def of(cls, templates: Tensor, nearest: int, embeddings: Tensor, budget: int) -> "Cohort":
        cells = _COPIES * len(templates) + 2 * embeddings.shape[1]
        parts = [
            _scale(_unit(rows), templates, nearest) for rows in torch.split(embeddings, max(1, budget // (8 * cells)))
        ]
        return cls(templates, nearest, *(torch.cat(column) for column in zip(*parts, strict=True)))


class Searches(NamedTuple):
    """Of each search (P,): the score of its best label, and whether that is its mate, strictly before all others."""

    score: Tensor
    first: Tensor


class _Models(NamedTuple):
    """What stands for the labels: rows (L · E, D) of length 1, E of a label in sequence."""

    rows: Tensor
    each: int
    center: Tensor | None  # (L · E,) mean and standard deviation of the nearest cohort scores
    spread: Tensor | None
    density: Tensor | None  # (L · E,) mean cosine with the nearest other labels


def search(
    embeddings: Tensor, draw: Draw, methods: Sequence[Method], cohort: Cohort | None, budget: int
) -> list[Searches]:
    """The searches of a draw by each method.

    "nearest": the largest cosine with an item of the label. "template": the cosine with the mean of its items of length
    1; "weighted": with the mean of its items as they are, so that longer embeddings (of better quality) count more.

    "as-norm": (s - μ_p) / 2 σ_p + (s - μ_g) / 2 σ_g with the mean and standard deviation of the `cohort.nearest`
    largest cosines of the search, and of the enrolled item or template, with the cohort (adaptive s-norm; Matějka et
    al. 2017). "csls": 2 s - r(p) - r(g), the mean cosine of the search with its 10 nearest labels and of the item or
    template with its 10 nearest other labels. Both are of the gallery: no search knows of another one.
    """
    device = embeddings.device
    scorings = list(dict.fromkeys(method.scoring for method in methods))
    wanted = {scoring: {m.normalization for m in methods if m.scoring == scoring} for scoring in scorings}
    models = {scoring: _models(embeddings, draw, scoring, wanted[scoring], cohort, budget) for scoring in scorings}
    probes, mate = torch.from_numpy(draw.probes).to(device), torch.from_numpy(draw.mate).to(device)
    parts: list[list[Searches]] = [[] for _ in methods]
    for some in torch.split(torch.arange(len(probes), device=device), _step(draw.enrolled.size, embeddings, budget)):
        rows = _unit(embeddings[probes[some]])
        scale = None if cohort is None else (cohort.center[probes[some]], cohort.spread[probes[some]])
        for scoring, model in models.items():
            cosines = rows @ model.rows.T  # (b, L · E)
            for method, part in zip(methods, parts, strict=True):
                if method.scoring == scoring:
                    part.append(_best(_normalized(cosines, model, method.normalization, scale), mate[some]))
    return [Searches(*(torch.cat(column) for column in zip(*part, strict=True))) for part in parts]


def _models(
    embeddings: Tensor, draw: Draw, scoring: str, normalizations: set[str], cohort: Cohort | None, budget: int
) -> _Models:
    enrolled = torch.from_numpy(draw.enrolled).to(embeddings.device)
    labels, examples = enrolled.shape
    items = embeddings[enrolled.ravel()]
    each = examples if scoring == "nearest" else 1
    rows = items.double() if scoring == "weighted" else _unit(items)
    if scoring != "nearest":
        rows = _unit(rows.view(labels, examples, -1).mean(1))
    center = spread = density = None
    if "as-norm" in normalizations:
        assert cohort is not None
        center, spread = cohort.center[enrolled.ravel()], cohort.spread[enrolled.ravel()]
        if scoring != "nearest":
            own = Cohort.of(cohort.templates, cohort.nearest, rows, budget)
            center, spread = own.center, own.spread
    if "csls" in normalizations:
        density = _density(rows, labels, each, budget)
    return _Models(rows, each, center, spread, density)


def _normalized(cosines: Tensor, models: _Models, normalization: str, scale: tuple[Tensor, Tensor] | None) -> Tensor:
    """(b, L): the scores of the labels."""
    if normalization == "none":
        return _of_labels(cosines, models.each)
    if normalization == "csls":
        assert models.density is not None
        nearest = _of_labels(cosines, models.each)
        around = nearest.topk(min(CSLS_NEIGHBOURS, nearest.shape[1]), dim=1).values.mean(1, keepdim=True)
        return _of_labels(2 * cosines - models.density, models.each) - around
    assert scale is not None and models.center is not None and models.spread is not None
    center, spread = (values[:, None] for values in scale)
    slope = 1 / spread + 1 / models.spread
    return _of_labels((cosines * slope - center / spread - models.center / models.spread) / 2, models.each)


def _of_labels(scores: Tensor, each: int) -> Tensor:
    return scores.view(len(scores), -1, each).amax(2)


def _best(scores: Tensor, mate: Tensor) -> Searches:
    """mate (b,): the column of the right label, -1 where there is none."""
    mated = (mate >= 0).nonzero().squeeze(1)
    own = scores.new_full((len(scores),), -torch.inf)
    own[mated] = scores[mated, mate[mated]]
    others = scores.clone()
    others[mated, mate[mated]] = -torch.inf
    own, best = own.round(decimals=DIGITS), others.amax(1).round(decimals=DIGITS)
    return Searches(torch.maximum(own, best), own > best)


def _scale(rows: Tensor, templates: Tensor, nearest: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (n,) of the largest cosines of rows of length 1."""
    near = (rows @ templates.T).topk(nearest, dim=1).values
    return near.mean(1), near.std(1, correction=0).clamp(min=_LEAST)


def _density(rows: Tensor, labels: int, each: int, budget: int) -> Tensor:
    """(L · E,): the mean cosine with the nearest other labels."""
    owner = torch.arange(labels, device=rows.device).repeat_interleave(each)
    parts = []
    for some in torch.split(torch.arange(len(rows), device=rows.device), max(1, budget // (8 * _COPIES * len(rows)))):
        near = _of_labels(rows[some] @ rows.T, each)
        near[torch.arange(len(some), device=rows.device), owner[some]] = -torch.inf
        parts.append(near.topk(min(CSLS_NEIGHBOURS, labels - 1), dim=1).values.mean(1))
    return torch.cat(parts)


def _unit(rows: Tensor) -> Tensor:
    return distances.unit(rows.double())


def _step(columns: int, embeddings: Tensor, budget: int) -> int:
    """Searches at a time."""
    return max(1, budget // (8 * (_COPIES * columns + 2 * embeddings.shape[1])))
