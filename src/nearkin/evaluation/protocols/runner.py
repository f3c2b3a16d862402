"""Several protocols over one set of stored embeddings: which can be run, and their results."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin.core import checks, devices
from nearkin.core.relations import UNKNOWN
from nearkin.core.versions import version_of
from nearkin.data import vectors
from nearkin.data.levels import levels_of
from nearkin.data.pair_lists import PairList
from nearkin.data.vectors import Vectors
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.protocols.tasks import RUNS, Rows, Settings, Task, is_shared
from nearkin.evaluation.retrieval.rerank_settings import check_similarity, settings_of

__all__ = ["PROTOCOLS", "Settings", "evaluate"]

PROTOCOLS = ("retrieval", "clustering", "verification", "one_shot", "open_set", "graded", "diagnose")
Progress = Callable[[str, int, int], None]  # protocol, done, in all (0: not known)

# What each protocol can compare by; the first is the default.
_SIMILARITIES = {
    "retrieval": ("cosine", "dot", "euclidean"),
    "clustering": ("cosine", "euclidean"),
    "verification": ("cosine", "dot"),
    "one_shot": ("cosine", "euclidean"),
    "open_set": ("cosine",),
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
    cohort: Vectors | None = None,
    validation: Vectors | None = None,
) -> dict[str, Any]:
    """Runs the protocols of the settings; by default verification where there are pairs, else retrieval where there are
    labels and graded where there are targets.

    Checks its input before the first protocol starts. Returns plain values, ready for JSON: "embeddings", "gallery" and
    "pairs" (what was read), "classes" (how many) and "class_names" (of the ids, where labels are strings), "settings",
    "results" by protocol, whose "intervals" are the ends of 95 % intervals, and "notes". `pairs` are verified instead
    of all pairs. group: the processes that share the work, all of which call this with the same arguments and get the
    same result: they divide retrieval, graded and verification of all pairs; rank 0 runs the others. cohort: embeddings
    of other classes, for AS-norm in open-set identification; its classes that are also tested are left out.
    validation: items of other classes, on which the settings of re-ranking are chosen.
    """
    settings = settings or Settings()
    protocols = _chosen(items, gallery, settings, pairs)
    similarity = {name: _similarity(name, settings) for name in protocols}
    device = devices.exact(checks.device(settings.device))
    notes = _lengths([items] if gallery is None else [items, gallery], "cosine" in similarity.values())
    classes: list[str] = []
    ids: list[Tensor] = []
    labelled = [x for x in (items.labels, None if gallery is None else gallery.labels) if x is not None]
    multi_label = any(labels.ndim == 2 for labels in labelled)
    if multi_label:
        ids = _multi_labels(items, gallery, protocols)
    elif labelled and (set(protocols) - {"graded"} or gallery is None):
        ids, classes = vectors.class_ids(*labelled)
        if set(protocols) - {"graded"}:
            _require_two_classes(items.name, classes)
    groups = _groups(items, gallery, protocols, multi_label)
    notes += _group_notes(protocols, items.labels is not None) if groups else []
    levels = _levels(items, gallery, protocols, multi_label, device)
    queries = Rows(
        items.embeddings.to(device),
        _moved(ids[0] if ids else None, device),
        _moved(items.targets, device),
        _moved(groups[0] if groups else None, device),
        levels[0],
    )
    searched = None
    if gallery is not None:
        searched = Rows(
            gallery.embeddings.to(device),
            _moved(ids[1] if len(ids) > 1 else None, device),
            _moved(gallery.targets, device),
            _moved(groups[1] if groups else None, device),
            levels[-1],
        )
    chosen_on = None if validation is None else _validation(validation, items, device)
    others, left_out = _cohort(items, cohort, protocols, device)
    notes += left_out
    results = {}
    for name in protocols:
        report = None
        if progress is not None:
            progress(name, 0, 0)
            report = partial(progress, name)
        task = Task(queries, searched, pairs, settings, similarity[name], report, group, others, chosen_on)
        if group is None or is_shared(name, pairs):
            scores = _run(name, task)
        else:
            scores = group.on_rank0(name, partial(_run, name, task))
        notes += [note for note in scores.pop("notes", []) if note not in notes]
        results[name] = {"similarity": similarity[name]} | _with_names(scores, items.names)
    return {
        "nearkin": version_of("nearkin"),
        "embeddings": _summary(items),
        "gallery": None if gallery is None else _summary(gallery),
        "pairs": None if pairs is None else {"file": pairs.name, "pairs": len(pairs.pairs)},
        "classes": len(classes) or (ids[0].shape[1] if multi_label else None),
        "groups": _group_count(groups) if groups else None,
        "class_names": classes if ids and labelled[0].dtype.kind == "U" else None,
        "settings": _plain(asdict(settings)) | {"protocols": list(protocols), "device": str(device)},
        "results": results,
        "notes": notes,
    }


def _with_names(scores: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
    """The items in the lists of a diagnosis with their names, where the file has them."""
    for key in ("hubs", "label_errors") if names is not None else ():
        if key in scores:
            assert names is not None
            scores[key] = [entry | {"name": names[entry["item"]]} for entry in scores[key]]
    return scores


def _run(name: str, task: Task) -> Any:
    return _plain(RUNS[name](task))


def _chosen(items: Vectors, gallery: Vectors | None, settings: Settings, pairs: PairList | None) -> tuple[str, ...]:
    """The protocols in their order; each has the input that it needs."""
    for name in settings.protocols:
        checks.one_of("protocol", name, PROTOCOLS)
    sets = [items] if gallery is None else [items, gallery]
    labelled, targeted = (all(getattr(x, field) is not None for x in sets) for field in ("labels", "targets"))
    default = ("verification",) if pairs is not None else ("retrieval",) * labelled + ("graded",) * targeted
    chosen = tuple(name for name in PROTOCOLS if name in (settings.protocols or default))
    if "verification" not in chosen and pairs is not None:
        raise ValueError("--pairs is for --verification, which is not asked for")
    if settings.fars is not None and not {"verification", "open_set"} & set(chosen):
        raise ValueError("--far is for --verification and --open-set, which are not asked for")
    if settings.rerank is not None:
        if "retrieval" not in chosen:
            raise ValueError("--rerank is for --retrieval, which is not asked for")
        method = settings_of(settings.rerank)
        check_similarity(method, settings.similarity or _SIMILARITIES["retrieval"][0])
    for name in chosen or ("retrieval",):
        field = "targets" if name == "graded" else "labels"
        if name == "verification" and pairs is not None and pairs.same is not None:
            continue  # the list says which pairs are the same
        for flag, part in zip(("", "gallery-"), sets, strict=False):
            if getattr(part, field) is None:
                advice = f"give --{flag}{field} FILE"
                if not chosen:
                    raise ValueError(
                        f"{part.name}: there are neither labels nor targets; {advice}, or --{flag}targets FILE"
                    )
                raise ValueError(f"{part.name}: {_flag(name)} needs {field}, there are none; {advice}")
        if gallery is not None and name not in _GALLERY:
            raise ValueError(f"{_flag(name)} takes no --gallery; {' and '.join(map(_flag, _GALLERY))} do")
    if gallery is not None and Path(gallery.name).resolve() == Path(items.name).resolve():
        raise ValueError(f"{gallery.name}: as its own gallery each row would find itself; leave --gallery out")
    if gallery is not None and gallery.embeddings.shape[1] != items.embeddings.shape[1]:
        raise ValueError(
            f"{gallery.name}: the gallery must have {items.embeddings.shape[1]} dimensions as {items.name} has, "
            f"got {gallery.embeddings.shape[1]}"
        )
    return chosen


def _similarity(protocol: str, settings: Settings) -> str:
    allowed = _SIMILARITIES[protocol]
    if settings.similarity is None:
        return allowed[0]
    if settings.similarity not in allowed:
        raise ValueError(
            f"{_flag(protocol)} compares by {' or '.join(allowed)}, got --similarity {settings.similarity}"
        )
    return settings.similarity


def _lengths(sets: Sequence[Vectors], cosine: bool) -> list[str]:
    """Cosine divides by the length of each row: none may be 0, and lengths other than 1 get a note."""
    notes: list[str] = []
    if not cosine:
        return notes
    for items in sets:
        lengths = torch.cat([part.double().norm(dim=1) for part in torch.split(items.embeddings, _CHUNK)])
        zero = int((lengths == 0).sum())
        if zero:
            rows = f"{zero} of {len(lengths)} rows {'is' if zero == 1 else 'are'} zero"
            raise ValueError(
                f"{items.name}: {rows}, and cosine needs a direction; use --similarity euclidean to keep them"
            )
        low, high = float(lengths.min()), float(lengths.max())
        if max(1 - low, high - 1) > _UNIT:
            notes.append(f"{items.name}: rows have lengths {low:.4g} to {high:.4g}; cosine takes them as length 1.")
    return notes


def _multi_labels(items: Vectors, gallery: Vectors | None, protocols: Sequence[str]) -> list[Tensor]:
    """Multi-label rows, for the protocols that can use them: rows that share a label are positive."""
    for name in protocols:
        if name not in ("retrieval", "graded"):
            raise ValueError(
                f"{items.name}: {_flag(name)} needs one label per row, got several; --retrieval takes them"
            )
    sets = [items.labels] if gallery is None else [items.labels, gallery.labels]
    result = [torch.from_numpy(labels) for labels in sets if labels is not None]
    shapes = {labels.shape[1:] for labels in result}
    if len(shapes) > 1:
        got = " and ".join("one per row" if not shape else f"{shape[0]} columns" for shape in sorted(shapes))
        raise ValueError(f"labels of embeddings and gallery must have the same columns, got {got}")
    return result


def _cohort(
    items: Vectors, cohort: Vectors | None, protocols: Sequence[str], device: torch.device
) -> tuple[Rows | None, list[str]]:
    """The cohort of open-set identification without the classes that are tested, and a note where there were some."""
    if cohort is None:
        return None, []
    if "open_set" not in protocols:
        raise ValueError(f"{cohort.name}: a cohort is for --open-set, which is not asked for")
    if cohort.embeddings.shape[1] != items.embeddings.shape[1]:
        raise ValueError(
            f"{cohort.name}: the cohort must have {items.embeddings.shape[1]} dimensions as {items.name} has, "
            f"got {cohort.embeddings.shape[1]}"
        )
    if cohort.labels is None or items.labels is None:
        return Rows(cohort.embeddings.to(device), None, None), []
    names, notes = cohort.labels.astype(str), []
    tested = np.isin(names, np.setdiff1d(items.labels.astype(str), [str(UNKNOWN)]))
    if both := len(np.unique(names[tested])):
        notes = [f"{cohort.name}: {both} of its classes are also tested and left out of the cohort"]
    tested |= names == str(UNKNOWN)
    if tested.all():
        return None, [*notes, "there is no cohort left"]
    rows = torch.from_numpy(np.flatnonzero(~tested))
    number = np.unique(names[~tested], return_inverse=True)[1].astype(np.int64)
    ids = torch.from_numpy(number + 2**40)  # apart from the ids of tested classes
    return Rows(cohort.embeddings[rows].to(device), ids.to(device), None), notes


def _levels(
    items: Vectors, gallery: Vectors | None, protocols: Sequence[str], multi_label: bool, device: torch.device
) -> list[dict[str, Tensor] | None]:
    """Class ids of the coarser levels, of the items and of the gallery; each class is in one class of a level."""
    if not items.levels:
        return [None]
    if "retrieval" not in protocols or multi_label or items.labels is None:
        raise ValueError(f"{items.name}: levels are for --retrieval with one label per row, which is not asked for")
    sets = [items] if gallery is None else [items, gallery]
    labels, columns = [part.labels for part in sets], [part.levels or {} for part in sets]
    kinds, of_item = np.unique(np.concatenate([np.asarray(part).astype(str) for part in labels]), return_inverse=True)
    every = {name: np.concatenate([part[name] for part in columns]).tolist() for name in items.levels}
    levels_of(items.name, [str(kind) for kind in kinds], of_item, every)
    result: list[dict[str, Tensor] | None] = [{} for _ in sets]
    for name in items.levels:
        for place, ids in enumerate(vectors.class_ids(*(part[name] for part in columns))[0]):
            own = result[place]
            assert own is not None
            own[name] = ids.to(device)
    return result


def _groups(items: Vectors, gallery: Vectors | None, protocols: Sequence[str], multi_label: bool) -> list[Tensor]:
    """Numbers of the groups of each set, the same in both; [] where there are none."""
    sets = [items] if gallery is None else [items, gallery]
    columns = [part.groups for part in sets if part.groups is not None]
    if not columns:
        return []
    if len(columns) < len(sets):
        missing = next(part.name for part in sets if part.groups is None)
        raise ValueError(f"{missing}: it has no groups, the other set has; give them with --groups or --gallery-groups")
    if multi_label and "retrieval" in protocols:
        raise ValueError(f"{items.name}: groups need one label per row, got several; leave one of both out")
    names = np.concatenate([groups.astype(str) for groups in columns])
    unknown = np.concatenate([(groups == UNKNOWN) if groups.dtype.kind == "i" else groups == "" for groups in columns])
    numbers = np.unique(names, return_inverse=True)[1].astype(np.int64)
    numbers[unknown] = UNKNOWN
    first = torch.from_numpy(numbers[: len(columns[0])])
    return [first] if gallery is None else [first, torch.from_numpy(numbers[len(columns[0]) :])]


def _validation(validation: Vectors, items: Vectors, device: torch.device) -> Rows:
    """Rows on which settings are chosen: of classes that the measured items do not have."""
    width = items.embeddings.shape[1]
    if validation.embeddings.shape[1] != width:
        raise ValueError(
            f"{validation.name}: validation items must have {width} dimensions as {items.name} has, "
            f"got {validation.embeddings.shape[1]}"
        )
    if validation.labels is None or validation.labels.ndim != 1:
        raise ValueError(f"{validation.name}: validation items need one label per row, to choose settings by")
    assert items.labels is not None
    if items.labels.ndim == 1 and items.labels.dtype.kind == validation.labels.dtype.kind:
        common = np.setdiff1d(
            np.intersect1d(items.labels, validation.labels), [UNKNOWN] if items.labels.dtype.kind in "iu" else []
        )
        if len(common):
            raise ValueError(
                f"{validation.name}: settings must not be chosen on classes that are measured; {len(common)} of them "
                f"are in {items.name} too, as {common[0]}"
            )
    groups = _groups(validation, None, ("retrieval",), False)
    ids = vectors.class_ids(validation.labels)[0][0]
    return Rows(validation.embeddings.to(device), ids.to(device), None, _moved(groups[0] if groups else None, device))


def _group_count(groups: Sequence[Tensor]) -> int:
    every = torch.cat(list(groups))
    return len(torch.unique(every[every != UNKNOWN])) + int((every == UNKNOWN).sum())


def _group_notes(protocols: Sequence[str], labelled: bool) -> list[str]:
    unused = [_flag(name) for name in protocols if not labelled or name in ("clustering", "graded", "diagnose")]
    return [f"groups are not used by {', '.join(unused)}: all pairs count there."] if unused else []


def _require_two_classes(name: str, classes: list[str]) -> None:
    if len(classes) < 2:
        only = f' ("{classes[0]}")' if classes else ""
        raise ValueError(f"{name}: labels must hold at least 2 classes, got {len(classes)}{only}")


def _moved(values: Tensor | None, device: torch.device) -> Tensor | None:
    return None if values is None else values.to(device)


def _summary(items: Vectors) -> dict[str, Any]:
    rows, dimensions = items.embeddings.shape
    unknown = None if items.labels is None or items.labels.dtype.kind in "Ub" else int((items.labels == UNKNOWN).sum())
    dtype = str(items.embeddings.dtype).removeprefix("torch.")
    return {"file": items.name, "rows": rows, "dimensions": dimensions, "dtype": dtype, "unknown_labels": unknown}


def _flag(protocol: str) -> str:
    return "--" + protocol.replace("_", "-")


def _plain(value: Any) -> Any:
    """Ready for JSON: text, numbers, lists and dictionaries; NaN and infinities are None."""
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
