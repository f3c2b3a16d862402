"""Several protocols over one set of stored embeddings: which can be run, and what they say."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.core.relations import UNKNOWN
from nearkin.core.versions import version_of
from nearkin.data import vectors
from nearkin.data.pair_lists import PairList
from nearkin.data.vectors import Vectors
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.protocols.tasks import RUNS, Rows, Settings, Task, shared

__all__ = ["PROTOCOLS", "Settings", "evaluate"]

PROTOCOLS = ("retrieval", "clustering", "verification", "one_shot", "graded", "diagnose")
Progress = Callable[[str, int, int], None]  # protocol, how much is done, of how much (0: not known)

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


def evaluate(
    items: Vectors,
    gallery: Vectors | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
    pairs: PairList | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Runs the protocols that are asked for; without any, verification where there are pairs, else retrieval where
    there are labels and graded where there are targets.

    What the files show to be wrong is said before the first protocol starts. Returns plain values, as JSON has them:
    "embeddings", "gallery" and "pairs" (what was read), "classes" (how many) and "class_names" (of the ids, where
    labels are strings), "settings", "results" by protocol, where "intervals" holds the ends of 95 % intervals, and
    "notes". `pairs` are verified in place of all pairs. group: the processes that share the work, all of which call
    this with the same arguments and get the same: retrieval, graded and verification of all pairs are divided among
    them, the others are run by rank 0.
    """
    settings = settings or Settings()
    protocols = _chosen(items, gallery, settings, pairs)
    similarity = {name: _similarity(name, settings) for name in protocols}
    device = checks.device(settings.device)
    notes = _lengths([items] if gallery is None else [items, gallery], "cosine" in similarity.values())
    classes: list[str] = []
    ids: list[Tensor] = []
    named = [known for known in (items.labels, None if gallery is None else gallery.labels) if known is not None]
    several = any(labels.ndim == 2 for labels in named)
    if several:
        ids = _several(items, gallery, protocols)
    elif named and (set(protocols) - {"graded"} or gallery is None):
        ids, classes = vectors.class_ids(*named)
        if set(protocols) - {"graded"}:
            _two_classes(items.name, classes)
    asked = Rows(items.embeddings.to(device), _moved(ids[0] if ids else None, device), _moved(items.targets, device))
    other = None
    if gallery is not None:
        theirs = _moved(ids[1] if len(ids) > 1 else None, device)
        other = Rows(gallery.embeddings.to(device), theirs, _moved(gallery.targets, device))
    results = {}
    for name in protocols:
        told = None
        if progress is not None:
            progress(name, 0, 0)
            told = partial(progress, name)
        task = Task(asked, other, pairs, settings, similarity[name], told, group)
        if group is None or shared(name, pairs):
            found = _run(name, task)
        else:
            found = group.on_rank0(name, partial(_run, name, task))
        notes += [note for note in found.pop("notes", []) if note not in notes]
        results[name] = {"similarity": similarity[name]} | _named(found, items.names)
    return {
        "nearkin": version_of("nearkin"),
        "embeddings": _said_of(items),
        "gallery": None if gallery is None else _said_of(gallery),
        "pairs": None if pairs is None else {"file": pairs.name, "pairs": len(pairs.pairs)},
        "classes": len(classes) or (ids[0].shape[1] if several else None),
        "class_names": classes if ids and named[0].dtype.kind == "U" else None,
        "settings": _plain(asdict(settings)) | {"protocols": list(protocols), "device": str(device)},
        "results": results,
        "notes": notes,
    }


def _named(found: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
    """Items that a diagnosis points at, with what they are called, where the file says so."""
    for entries in ("hubs", "label_errors") if names is not None else ():
        if entries in found:
            assert names is not None
            found[entries] = [one | {"name": names[one["item"]]} for one in found[entries]]
    return found


def _run(name: str, task: Task) -> Any:
    return _plain(RUNS[name](task))


def _chosen(items: Vectors, gallery: Vectors | None, settings: Settings, pairs: PairList | None) -> tuple[str, ...]:
    """The protocols in their order, all of which have what they need."""
    for name in settings.protocols:
        checks.one_of("protocol", name, PROTOCOLS)
    every = [items] if gallery is None else [items, gallery]
    labelled, targeted = (all(getattr(one, what) is not None for one in every) for what in ("labels", "targets"))
    default = ("verification",) if pairs is not None else ("retrieval",) * labelled + ("graded",) * targeted
    chosen = tuple(name for name in PROTOCOLS if name in (settings.protocols or default))
    if "verification" not in chosen and (pairs is not None or settings.fars is not None):
        raise ValueError(f"{'--pairs' if pairs is not None else '--far'} is for --verification, which is not asked for")
    for name in chosen or ("retrieval",):
        what = "targets" if name == "graded" else "labels"
        if name == "verification" and pairs is not None and pairs.same is not None:
            continue  # who is the same stands in the list
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


def _several(items: Vectors, gallery: Vectors | None, protocols: Sequence[str]) -> list[Tensor]:
    """Rows of several labels, for the protocols that can use them: kin share a label."""
    for name in protocols:
        if name not in ("retrieval", "graded"):
            raise ValueError(f"{items.name}: {_flag(name)} needs one label a row, got several; --retrieval takes them")
    every = [items.labels] if gallery is None else [items.labels, gallery.labels]
    found = [torch.from_numpy(labels) for labels in every if labels is not None]
    shapes = {labels.shape[1:] for labels in found}
    if len(shapes) > 1:
        got = " and ".join("one a row" if not shape else f"{shape[0]} columns" for shape in sorted(shapes))
        raise ValueError(f"labels of embeddings and gallery must have the same columns, got {got}")
    return found


def _two_classes(name: str, classes: list[str]) -> None:
    if len(classes) < 2:
        only = f' ("{classes[0]}")' if classes else ""
        raise ValueError(f"{name}: labels must hold at least 2 classes, got {len(classes)}{only}")


def _moved(values: Tensor | None, device: torch.device) -> Tensor | None:
    return None if values is None else values.to(device)


def _said_of(one: Vectors) -> dict[str, Any]:
    rows, dimensions = one.embeddings.shape
    unknown = None if one.labels is None or one.labels.dtype.kind in "Ub" else int((one.labels == UNKNOWN).sum())
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
