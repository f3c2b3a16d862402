"""One protocol at a time over stored embeddings: the call, and its answer with the intervals beside it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearkin.core.relations import UNKNOWN
from nearkin.data.pair_lists import PairList
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.clustering import clustering
from nearkin.evaluation.diagnosis import diagnose
from nearkin.evaluation.few_shot import one_shot
from nearkin.evaluation.graded import graded
from nearkin.evaluation.retrieval.retrieval_metrics import retrieval
from nearkin.evaluation.statistics import binomial
from nearkin.evaluation.statistics.cluster_bootstrap import too_few
from nearkin.evaluation.verification.all_pairs import all_pairs
from nearkin.evaluation.verification.roc import FARS, OperatingPoint
from nearkin.evaluation.verification.score_calibration import calibrate
from nearkin.evaluation.verification.verification_metrics import pair_scores, verification

_POINTS = 200  # of a curve that is kept


@dataclass(frozen=True)
class Settings:
    """How to evaluate; None leaves the choice to each protocol."""

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


@dataclass(frozen=True)
class Rows:
    """One set on its device; labels are class ids (N,), or bool rows (N, L)."""

    embeddings: Tensor
    labels: Tensor | None
    targets: Tensor | None


@dataclass(frozen=True)
class Task:
    """What a protocol is run on."""

    asked: Rows
    gallery: Rows | None
    pairs: PairList | None
    settings: Settings
    similarity: str
    progress: Callable[[int, int], None] | None
    group: ProcessGroup | None = None


def shared(protocol: str, pairs: PairList | None) -> bool:
    """Whether ranks share the work; the other protocols cost little beside these, and rank 0 runs them."""
    return protocol in ("retrieval", "graded") or (protocol == "verification" and pairs is None)


def _retrieval(task: Task) -> dict[str, Any]:
    assert task.asked.labels is not None
    more: dict[str, Any] = {} if task.settings.ks is None else {"ks": task.settings.ks}
    if task.settings.interval:
        more["interval"] = True
    rows, labels = (None, None) if task.gallery is None else (task.gallery.embeddings, task.gallery.labels)
    own = task.asked.labels
    if own.dim() == 2 and rows is None and own.shape[0] == own.shape[1]:
        own = torch.nn.functional.pad(
            own, (0, 1)
        )  # as many labels as rows: a label nobody has tells it from a relation
    more |= {"similarity": task.similarity, "budget": task.settings.budget, "progress": task.progress}
    more["group"] = task.group
    found = retrieval(task.asked.embeddings, own, rows, labels, **more)
    if found["without_positives"] == found["queries"]:
        where = "the others" if task.gallery is None else "the gallery"
        raise ValueError(f"retrieval needs queries with kin among {where}: none of {found['queries']} has any")
    return _with_intervals(found, task)


def _clustering(task: Task) -> dict[str, Any]:
    assert task.asked.labels is not None
    more: dict[str, Any] = {"normalize": task.similarity == "cosine", "interval": task.settings.interval}
    more |= {"seed": task.settings.seed, "budget": task.settings.budget, "progress": task.progress}
    return _with_intervals(clustering(task.asked.embeddings, task.asked.labels, **more), task)


def _verification(task: Task) -> dict[str, Any]:
    """All pairs, or those of the list, whose scores are calibrated too."""
    settings = task.settings
    more: dict[str, Any] = {"fars": settings.fars or FARS, "similarity": task.similarity, "seed": settings.seed}
    more |= {"interval": settings.interval, "progress": task.progress}
    labels = task.asked.labels
    if task.pairs is None:
        assert labels is not None
        more |= {"budget": settings.budget, "group": task.group}
        found = all_pairs(task.asked.embeddings, labels, points=_POINTS, **more)
        found["roc"] = found["roc"]._asdict()
    else:
        pairs, same, fold = task.pairs.pairs, task.pairs.same, task.pairs.fold
        if fold is not None:
            more["folds"] = fold
        if labels is not None and bool((labels.cpu()[pairs] == -1).any()):
            raise ValueError(f"{task.pairs.name}: pairs must be of rows with a known label, some have -1")
        found = verification(embeddings=task.asked.embeddings, pairs=pairs, same=same, labels=labels, **more)
        if same is None and labels is not None:
            same = labels.cpu()[pairs[:, 0]] == labels.cpu()[pairs[:, 1]]
        if min(found["genuine"], found["impostors"]) > 1:
            scores = pair_scores(task.asked.embeddings, pairs, task.similarity).cpu()
            fitted = calibrate(scores, same, seed=settings.seed)  # type: ignore[arg-type]
            found |= {"calibration_error": fitted.error, "calibration": fitted.to_dict()}
    ready: list[OperatingPoint] = found["operating_points"]
    found["operating_points"] = [one._asdict() for one in ready]
    result = _with_intervals(found, task)
    if settings.fars is not None:
        for one in ready:
            result |= {f"threshold@far={one.wanted_far}": one.threshold, f"seen_far@far={one.wanted_far}": one.far}
            if settings.interval:
                ends = binomial.NONE if math.isnan(found.intervals["eer"][0]) else one.far_interval
                result["intervals"][f"seen_far@far={one.wanted_far}"] = ends
    return result


def _one_shot(task: Task) -> dict[str, Any]:
    assert task.asked.labels is not None
    settings = task.settings
    counts = (settings.ways, settings.shots, settings.episodes, settings.seed)
    more: dict[str, Any] = {"score": "mean" if task.similarity == "cosine" else "nearest", "budget": settings.budget}
    more |= {"interval": settings.interval, "progress": task.progress}
    found = one_shot(task.asked.embeddings, task.asked.labels, *counts, **more)
    result = _with_intervals(found, task)
    result["episode_half_width"] = result.pop("interval")
    return result


def _graded(task: Task) -> dict[str, Any]:
    assert task.asked.targets is not None
    more: dict[str, Any] = {"interval": task.settings.interval, "seed": task.settings.seed, "progress": task.progress}
    if task.settings.ks is not None:
        more["ks"] = task.settings.ks
    if task.gallery is not None:
        more |= {"gallery": task.gallery.embeddings, "gallery_targets": task.gallery.targets}
    labels = task.asked.labels
    if labels is not None and labels.dim() == 1 and bool((labels != labels[0]).any()):
        more["classes"] = labels
    more |= {"distance": task.similarity, "budget": task.settings.budget, "group": task.group}
    found = graded(task.asked.embeddings, task.asked.targets, **more)
    return {"queries": len(task.asked.embeddings)} | _with_intervals(found, task)


def _diagnose(task: Task) -> dict[str, Any]:
    assert task.asked.labels is not None
    return diagnose(task.asked.embeddings, task.asked.labels, budget=task.settings.budget)


def _with_intervals(found: Any, task: Task) -> dict[str, Any]:
    """The answer with its intervals, and in "notes" why there are none."""
    if not task.settings.interval:
        return dict(found)
    result = dict(found) | {"intervals": dict(found.intervals)}
    labels = task.asked.labels
    if labels is not None and all(math.isnan(low) for low, _ in found.intervals.values()):
        classes = len(labels) if labels.dim() == 2 else len(torch.unique(labels[labels != UNKNOWN]))
        result["notes"] = [too_few(classes)]
    return result


RUNS: dict[str, Callable[[Task], dict[str, Any]]] = {
    "retrieval": _retrieval,
    "clustering": _clustering,
    "verification": _verification,
    "one_shot": _one_shot,
    "graded": _graded,
    "diagnose": _diagnose,
}
