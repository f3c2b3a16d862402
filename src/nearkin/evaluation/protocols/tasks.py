"""One protocol at a time over stored embeddings: the call, and its result with the intervals beside it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core.relations import UNKNOWN
from nearkin.data.pair_lists import PairList
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Progress
from nearkin.evaluation.clustering import clustering
from nearkin.evaluation.diagnosis import diagnose
from nearkin.evaluation.few_shot import one_shot
from nearkin.evaluation.graded import graded
from nearkin.evaluation.open_set.identification import FARS as RATES
from nearkin.evaluation.open_set.identification import identification
from nearkin.evaluation.open_set.open_set_metrics import EXAMPLES, FPIRS, in_part, open_set
from nearkin.evaluation.retrieval import rerank_choice, rerank_settings
from nearkin.evaluation.retrieval.level_metrics import by_level
from nearkin.evaluation.retrieval.retrieval_metrics import DEFAULT, retrieval
from nearkin.evaluation.statistics import binomial
from nearkin.evaluation.verification.all_pairs import all_pairs
from nearkin.evaluation.verification.roc import FARS, OperatingPoint
from nearkin.evaluation.verification.score_calibration import calibrate
from nearkin.evaluation.verification.verification_metrics import of_other_groups, pair_scores, verification

__all__ = ["RUNS", "Rows", "Settings", "Task", "is_shared"]

_POINTS = 200  # of the curve in a result
_UNCHOSEN = "there are no validation items to choose them on; --rerank-validation FILE gives some"


@dataclass(frozen=True)
class Settings:
    """How to evaluate; None means the default of each protocol. fars: per pair in verification, per query in what
    identify names of an open set."""

    protocols: tuple[str, ...] = ()
    ks: tuple[int, ...] | None = None
    similarity: str | None = None
    ways: int = 20
    shots: int = 1
    episodes: int = 600
    seed: int = 0
    interval: bool = False
    budget: int = 512 << 20
    device: str = "auto"
    fars: tuple[float, ...] | None = None
    examples: tuple[int, ...] = EXAMPLES
    fpirs: tuple[float, ...] = FPIRS
    repeats: int | None = None
    rerank: str | None = None


@dataclass(frozen=True)
class Rows:
    """One set on its device; labels are class ids (N,), or bool rows (N, L); groups are numbers (N,)."""

    embeddings: Tensor
    labels: Tensor | None
    targets: Tensor | None
    groups: Tensor | None = None
    levels: dict[str, Tensor] | None = None  # class ids (N,) of coarser levels


@dataclass(frozen=True)
class Task:
    """The input of a protocol."""

    queries: Rows
    gallery: Rows | None
    pairs: PairList | None
    settings: Settings
    similarity: str
    progress: Progress | None
    group: ProcessGroup | None = None
    cohort: Rows | None = None
    validation: Rows | None = None  # on which the settings of re-ranking are chosen


def is_shared(protocol: str, pairs: PairList | None) -> bool:
    """Whether the processes share the work; the other protocols cost little beside these, and rank 0 runs them."""
    return protocol in ("retrieval", "graded") or (protocol == "verification" and pairs is None)


def _retrieval(task: Task) -> dict[str, Any]:
    assert task.queries.labels is not None
    options: dict[str, Any] = {} if task.settings.ks is None else {"ks": task.settings.ks}
    if task.settings.interval:
        options["interval"] = True
    rows, labels = (None, None) if task.gallery is None else (task.gallery.embeddings, task.gallery.labels)
    query_labels = task.queries.labels
    if query_labels.dim() == 2 and rows is None and query_labels.shape[0] == query_labels.shape[1]:
        # As many labels as rows: a label that no row has tells it from a relation.
        query_labels = torch.nn.functional.pad(query_labels, (0, 1))
    options |= {"similarity": task.similarity, "budget": task.settings.budget, "progress": task.progress}
    options["group"] = task.group
    if task.queries.groups is not None:
        options |= {"groups": task.queries.groups, "metrics": (*DEFAULT, "map", "minp")}
        options["gallery_groups"] = None if task.gallery is None else task.gallery.groups
    scores = retrieval(task.queries.embeddings, query_labels, rows, labels, **options)
    if scores["without_positives"] == scores["queries"]:
        where = "the others" if task.gallery is None else "the gallery"
        where += "" if task.queries.groups is None else " in another group"
        raise ValueError(f"retrieval needs queries with positives among {where}: none of {scores['queries']} has any")
    result = _with_intervals(scores, task)
    method = None if task.settings.rerank is None else _rerank(task)
    if method is not None:
        given = {key: value for key, value in options.items() if key != "interval"}
        sides = task.queries.embeddings, query_labels, rows, labels
        result["rerank"] = rerank_choice.figures(*sides, method.settings, interval=task.settings.interval, **given)
        result["rerank"]["chosen"] = method.chosen
        result["notes"] = [*result.get("notes", []), *method.notes]
    if task.queries.levels:
        gallery_levels = None if task.gallery is None else task.gallery.levels
        shared: dict[str, Any] = {"similarity": task.similarity, "budget": task.settings.budget, "group": task.group}
        shared |= {"progress": task.progress, "interval": task.settings.interval}
        shared |= {key: options[key] for key in ("groups", "gallery_groups") if key in options}
        result["levels"] = by_level(
            task.queries.embeddings, query_labels, task.queries.levels, rows, gallery_levels, **shared
        )
        if method is not None:
            shared["rerank"] = method.settings
            result["rerank"]["levels"] = by_level(
                task.queries.embeddings, query_labels, task.queries.levels, rows, gallery_levels, **shared
            )
    return result


class _Method(NamedTuple):
    settings: rerank_settings.Rerank
    chosen: dict[str, Any] | None  # how, where validation items have chosen it
    notes: list[str]


def _rerank(task: Task) -> _Method:
    """The method with its settings: as requested, else chosen on the validation items, else as published."""
    text, part = task.settings.rerank, task.validation
    assert text is not None
    settings = rerank_settings.settings_of(text)
    if rerank_settings.has_settings(text):
        return _Method(settings, None, [])
    if part is None or part.labels is None or part.labels.dim() != 1:
        return _Method(settings, None, [f"re-ranking has its published settings: {_UNCHOSEN}"])
    options: dict[str, Any] = {"similarity": task.similarity, "budget": task.settings.budget, "group": task.group}
    options["groups"] = part.groups if task.queries.groups is not None else None
    best = rerank_choice.choose_rerank(part.embeddings, part.labels, settings.name, **options)
    tried = [rerank_settings.fields(one) | {"map@r": value} for one, value in best.tried]
    classes = len(torch.unique(part.labels[part.labels != UNKNOWN]))
    chosen = {"items": len(part.embeddings), "classes": classes, "plain": best.plain, "tried": tried}
    return _Method(best.settings, chosen, [])


def _clustering(task: Task) -> dict[str, Any]:
    assert task.queries.labels is not None
    options: dict[str, Any] = {"normalize": task.similarity == "cosine", "interval": task.settings.interval}
    options |= {"seed": task.settings.seed, "budget": task.settings.budget, "progress": task.progress}
    return _with_intervals(clustering(task.queries.embeddings, task.queries.labels, **options), task)


def _verification(task: Task) -> dict[str, Any]:
    """All pairs, or those of the list, whose scores are also calibrated."""
    settings = task.settings
    options: dict[str, Any] = {"fars": settings.fars or FARS, "similarity": task.similarity, "seed": settings.seed}
    options |= {"interval": settings.interval, "progress": task.progress}
    labels = task.queries.labels
    if labels is not None:
        options["groups"] = task.queries.groups
    if task.pairs is None:
        assert labels is not None
        options |= {"budget": settings.budget, "group": task.group}
        options["seed"] = settings.seed if settings.interval else None
        scores = all_pairs(task.queries.embeddings, labels, points=_POINTS, **options)
        scores["roc"] = scores["roc"]._asdict()
    else:
        pairs, same, fold = task.pairs.pairs, task.pairs.same, task.pairs.fold
        if fold is not None:
            options["folds"] = fold
        if labels is not None and bool((labels.cpu()[pairs] == -1).any()):
            raise ValueError(f"{task.pairs.name}: pairs must be of rows with a known label, some have -1")
        scores = verification(embeddings=task.queries.embeddings, pairs=pairs, same=same, labels=labels, **options)
        if same is None and labels is not None:
            same = labels.cpu()[pairs[:, 0]] == labels.cpu()[pairs[:, 1]]
        if min(scores["genuine"], scores["impostors"]) > 1:
            similarities = pair_scores(task.queries.embeddings, pairs, task.similarity).cpu()
            if labels is not None and task.queries.groups is not None:
                counted = of_other_groups(task.queries.embeddings, pairs, labels.cpu()[pairs], task.queries.groups)
                similarities, same = similarities[counted], same[counted]  # type: ignore[index]
            fitted = calibrate(similarities, same, seed=settings.seed)  # type: ignore[arg-type]
            scores |= {"calibration_error": fitted.error, "calibration": fitted.to_dict()}
    points: list[OperatingPoint] = scores["operating_points"]
    scores["operating_points"] = [point._asdict() for point in points]
    result = _with_intervals(scores, task)
    if settings.fars is not None:
        for point in points:
            far = point.wanted_far
            result |= {f"threshold@far={far}": point.threshold, f"seen_far@far={far}": point.far}
            if settings.interval:
                ends = binomial.NONE if math.isnan(scores.intervals["eer"][0]) else point.far_interval
                result["intervals"][f"seen_far@far={far}"] = ends
    return result


def _one_shot(task: Task) -> dict[str, Any]:
    assert task.queries.labels is not None
    settings = task.settings
    counts = (settings.ways, settings.shots, settings.episodes, settings.seed)
    options: dict[str, Any] = {"score": "mean" if task.similarity == "cosine" else "nearest", "budget": settings.budget}
    options |= {"interval": settings.interval, "progress": task.progress, "groups": task.queries.groups}
    scores = one_shot(task.queries.embeddings, task.queries.labels, *counts, **options)
    result = _with_intervals(scores, task)
    result["episode_half_width"] = result.pop("interval")
    return result


def _open_set(task: Task) -> dict[str, Any]:
    """The methods by cosine, and in "identify" what a gallery answers that has learned from its rows."""
    assert task.queries.labels is not None
    settings, items, labels = task.settings, task.queries.embeddings, task.queries.labels
    options: dict[str, Any] = {"examples": settings.examples, "fpirs": settings.fpirs, "repeats": settings.repeats}
    options |= {"seed": settings.seed, "budget": settings.budget, "groups": task.queries.groups}
    halves = [None if task.progress is None else in_part(task.progress, at, 2) for at in range(2)]
    others: dict[str, Any] = {}
    if task.cohort is not None:
        others = {"cohort": task.cohort.embeddings, "cohort_labels": task.cohort.labels}
    scores = open_set(items, labels, **options, **others, progress=halves[0])
    scores["identify"] = identification(items, labels, **options, fars=settings.fars or RATES, progress=halves[1])
    scores["notes"] += [note for note in scores["identify"].pop("notes") if note not in scores["notes"]]
    return scores


def _graded(task: Task) -> dict[str, Any]:
    assert task.queries.targets is not None
    interval, labels = task.settings.interval, task.queries.labels
    options: dict[str, Any] = {"interval": interval, "progress": task.progress}
    if task.settings.ks is not None:
        options["ks"] = task.settings.ks
    if task.gallery is not None:
        options |= {"gallery": task.gallery.embeddings, "gallery_targets": task.gallery.targets}
    if interval:
        options["seed"] = task.settings.seed
        if labels is not None and labels.dim() == 1 and bool((labels != labels[0]).any()):
            options["classes"] = labels
    options |= {"distance": task.similarity, "budget": task.settings.budget, "group": task.group}
    scores = graded(task.queries.embeddings, task.queries.targets, **options)
    return {"queries": len(task.queries.embeddings)} | _with_intervals(scores, task)


def _diagnose(task: Task) -> dict[str, Any]:
    assert task.queries.labels is not None
    return diagnose(task.queries.embeddings, task.queries.labels, budget=task.settings.budget)


def _with_intervals(scores: Any, task: Task) -> dict[str, Any]:
    """The scores with their intervals, and in "notes" why there are none."""
    if not task.settings.interval:
        return dict(scores)
    notes = {"notes": scores.notes} if scores.notes else {}
    return dict(scores) | {"intervals": dict(scores.intervals)} | notes


RUNS: dict[str, Callable[[Task], dict[str, Any]]] = {
    "retrieval": _retrieval,
    "clustering": _clustering,
    "verification": _verification,
    "one_shot": _one_shot,
    "open_set": _open_set,
    "graded": _graded,
    "diagnose": _diagnose,
}
