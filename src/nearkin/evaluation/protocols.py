"""Several protocols over one set of stored embeddings: which can be run, and what they say."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.core.relations import UNKNOWN
from nearkin.data import vectors
from nearkin.data.vectors import Vectors
from nearkin.evaluation.allpairs import all_pairs
from nearkin.evaluation.clustering import clustering
from nearkin.evaluation.diagnosis import diagnose
from nearkin.evaluation.few_shot import one_shot
from nearkin.evaluation.graded import graded
from nearkin.evaluation.ranking import retrieval

__all__ = ["PROTOCOLS", "Settings", "evaluate"]

PROTOCOLS = ("retrieval", "clustering", "verification", "one_shot", "graded", "diagnose")
Progress = Callable[[str, int, int], None]  # protocol, rows done, rows in all (0: not known)

# What each protocol can compare by; the first is its own choice.
_SIMILARITIES = {
    "retrieval": ("cosine", "dot", "euclidean"),
    "clustering": ("cosine", "euclidean"),
    "verification": ("cosine", "dot"),
    "one_shot": ("cosine", "euclidean"),
    "graded": ("euclidean", "cosine"),
    "diagnose": ("cosine",),
}
_GALLERY = ("retrieval", "graded")
_UNIT = 1e-2  # how far from 1 the length of a row in half precision may be by rounding
_CHUNK = 1 << 14


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


class _Set(NamedTuple):
    embeddings: Tensor
    labels: Tensor | None
    targets: Tensor | None


def evaluate(
    items: Vectors, gallery: Vectors | None = None, settings: Settings | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Runs the protocols that are asked for; without any, retrieval where there are labels and graded where targets.

    What the files show to be wrong is said before the first protocol starts. Returns plain values, as JSON has them:
    "embeddings" and "gallery" (what was read), "classes" (how many) and "class_names" (of the ids, where labels are
    strings), "settings", "results" by protocol, where "intervals" holds the ends of 95 % intervals, and "notes".
    """
    settings = settings or Settings()
    protocols = _chosen(items, gallery, settings)
    similarity = {name: _similarity(name, settings) for name in protocols}
    device = _device(settings.device)
    notes = _lengths([items] if gallery is None else [items, gallery], "cosine" in similarity.values())
    classes: list[str] = []
    ids: list[Tensor] = []
    named = [known for known in (items.labels, None if gallery is None else gallery.labels) if known is not None]
    if set(protocols) - {"graded"}:
        ids, classes = vectors.class_ids(*named)
        _two_classes(items.name, classes)
    asked = _Set(items.embeddings.to(device), ids[0].to(device) if ids else None, _moved(items.targets, device))
    other = None
    if gallery is not None:
        theirs = ids[1].to(device) if len(ids) > 1 else None
        other = _Set(gallery.embeddings.to(device), theirs, _moved(gallery.targets, device))
    results = {}
    for name in protocols:
        if progress is not None:
            progress(name, 0, 0)
        found = _RUNS[name](asked, other, settings, similarity[name], progress)
        results[name] = {"similarity": similarity[name]} | _plain(found)
    return {
        "nearkin": version("nearkin"),
        "embeddings": _said_of(items),
        "gallery": None if gallery is None else _said_of(gallery),
        "classes": len(classes) or None,
        "class_names": classes if ids and named[0].dtype.kind == "U" else None,
        "settings": _plain(asdict(settings)) | {"protocols": list(protocols), "device": str(device)},
        "results": results,
        "notes": notes,
    }


def _chosen(items: Vectors, gallery: Vectors | None, settings: Settings) -> tuple[str, ...]:
    """The protocols in their order, all of which have what they need."""
    for name in settings.protocols:
        checks.one_of("protocol", name, PROTOCOLS)
    every = [items] if gallery is None else [items, gallery]
    labelled, targeted = (all(getattr(one, what) is not None for one in every) for what in ("labels", "targets"))
    default = ("retrieval",) * labelled + ("graded",) * targeted
    chosen = tuple(name for name in PROTOCOLS if name in (settings.protocols or default))
    for name in chosen or ("retrieval",):
        what = "targets" if name == "graded" else "labels"
        for flag, one in zip(("", "gallery-"), every, strict=False):
            if getattr(one, what) is None:
                way = f"give --{flag}{what} FILE"
                if not chosen:
                    raise ValueError(
                        f"{one.name}: there are neither labels nor targets; {way}, or --{flag}targets FILE"
                    )
                raise ValueError(f"{one.name}: {_flag(name)} needs {what}, there are none; {way}")
        if gallery is not None and name not in _GALLERY:
            able = " and ".join(map(_flag, _GALLERY))
            raise ValueError(f"{_flag(name)} takes no --gallery; {able} do")
    if gallery is not None and Path(gallery.name).resolve() == Path(items.name).resolve():
        raise ValueError(f"{gallery.name}: as its own gallery each row would find itself; leave --gallery out")
    if gallery is not None and gallery.embeddings.shape[1] != items.embeddings.shape[1]:
        raise ValueError(
            f"{gallery.name}: the gallery must have {items.embeddings.shape[1]} dimensions as {items.name} has, "
            f"got {gallery.embeddings.shape[1]}"
        )
    return chosen


def _similarity(protocol: str, settings: Settings) -> str:
    able = _SIMILARITIES[protocol]
    if settings.similarity is None:
        return able[0]
    if settings.similarity not in able:
        raise ValueError(f"{_flag(protocol)} compares by {' or '.join(able)}, got --similarity {settings.similarity}")
    return settings.similarity


def _device(name: str) -> torch.device:
    checks.one_of("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda is not available here; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _lengths(sets: Sequence[Vectors], cosine: bool) -> list[str]:
    """Cosine divides by the length of each row: none may be 0, and if they are not 1 this is worth a note."""
    notes: list[str] = []
    if not cosine:
        return notes
    for one in sets:
        lengths = torch.cat([part.double().norm(dim=1) for part in torch.split(one.embeddings, _CHUNK)])
        zero = int((lengths == 0).sum())
        if zero:
            rows = f"{zero} of {len(lengths)} rows {'is' if zero == 1 else 'are'} zero"
            raise ValueError(
                f"{one.name}: {rows}, and cosine needs a direction; use --similarity euclidean to keep them"
            )
        low, high = float(lengths.min()), float(lengths.max())
        if max(1 - low, high - 1) > _UNIT:
            notes.append(f"{one.name}: rows have lengths {low:.4g} to {high:.4g}; cosine takes them as length 1.")
    return notes


def _two_classes(name: str, classes: list[str]) -> None:
    if len(classes) < 2:
        only = f' ("{classes[0]}")' if classes else ""
        raise ValueError(f"{name}: labels must hold at least 2 classes, got {len(classes)}{only}")


def _retrieval(
    asked: _Set, gallery: _Set | None, settings: Settings, similarity: str, progress: Progress | None
) -> dict[str, Any]:
    assert asked.labels is not None
    more: dict[str, Any] = {} if settings.ks is None else {"ks": settings.ks}
    if progress is not None:
        more["progress"] = lambda done, total: progress("retrieval", done, total)
    if settings.interval:
        more |= {"interval": True, "seed": settings.seed}
    rows, labels = (None, None) if gallery is None else (gallery.embeddings, gallery.labels)
    budget = settings.budget
    found = retrieval(asked.embeddings, asked.labels, rows, labels, similarity=similarity, budget=budget, **more)
    if found["without_kin"] == found["queries"]:
        where = "the others" if gallery is None else "the gallery"
        raise ValueError(f"retrieval needs queries with kin among {where}: none of {found['queries']} has any")
    return dict(found) | ({"intervals": found.intervals} if settings.interval else {})


def _clustering(asked: _Set, _: object, settings: Settings, similarity: str, __: object) -> dict[str, Any]:
    assert asked.labels is not None
    more: dict[str, Any] = {"normalize": similarity == "cosine", "interval": settings.interval}
    found = clustering(asked.embeddings, asked.labels, seed=settings.seed, budget=settings.budget, **more)
    return dict(found) | ({"intervals": found.intervals} if settings.interval else {})


def _verification(asked: _Set, _: object, settings: Settings, similarity: str, __: object) -> dict[str, Any]:
    assert asked.labels is not None
    found = all_pairs(asked.embeddings, asked.labels, similarity=similarity, budget=settings.budget)
    found["operating_points"] = [point._asdict() for point in found["operating_points"]]
    if settings.interval:
        ends = {f"tar@far={point['wanted_far']}": point["tar_interval"] for point in found["operating_points"]}
        found["intervals"] = ends
    return found


def _one_shot(asked: _Set, _: object, settings: Settings, similarity: str, __: object) -> dict[str, Any]:
    assert asked.labels is not None
    counts = (settings.ways, settings.shots, settings.episodes, settings.seed)
    score = "mean" if similarity == "cosine" else "nearest"
    found: dict[str, Any] = one_shot(asked.embeddings, asked.labels, *counts, score=score, budget=settings.budget)
    half = found.pop("interval")
    if settings.interval:
        ends = max(found["accuracy"] - half, 0.0), min(found["accuracy"] + half, 1.0)
        found["intervals"] = {"accuracy": ends}
    return found


def _graded(asked: _Set, gallery: _Set | None, settings: Settings, similarity: str, _: object) -> dict[str, Any]:
    assert asked.targets is not None
    more: dict[str, Any] = {"interval": settings.interval, "seed": settings.seed}
    if settings.ks is not None:
        more["ks"] = settings.ks
    if gallery is not None:
        more |= {"gallery": gallery.embeddings, "gallery_targets": gallery.targets}
    found = graded(asked.embeddings, asked.targets, distance=similarity, budget=settings.budget, **more)
    ends = {"intervals": found.intervals} if settings.interval else {}
    return {"queries": len(asked.embeddings)} | dict(found) | ends


def _diagnose(asked: _Set, _: object, settings: Settings, __: object, ___: object) -> dict[str, Any]:
    assert asked.labels is not None
    return diagnose(asked.embeddings, asked.labels, budget=settings.budget)


_RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "retrieval": _retrieval,
    "clustering": _clustering,
    "verification": _verification,
    "one_shot": _one_shot,
    "graded": _graded,
    "diagnose": _diagnose,
}


def _moved(targets: Tensor | None, device: torch.device) -> Tensor | None:
    return None if targets is None else targets.to(device)


def _said_of(one: Vectors) -> dict[str, Any]:
    rows, dimensions = one.embeddings.shape
    unknown = None if one.labels is None or one.labels.dtype.kind == "U" else int((one.labels == UNKNOWN).sum())
    kind = str(one.embeddings.dtype).removeprefix("torch.")
    return {"file": one.name, "rows": rows, "dimensions": dimensions, "dtype": kind, "unknown_labels": unknown}


def _flag(protocol: str) -> str:
    return "--" + protocol.replace("_", "-")


def _plain(value: Any) -> Any:
    """As JSON has it: text, numbers, lists and dictionaries; NaN and infinities are None."""
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, str | int) else str(value)
