"""Groups of a source's items, or a gallery's rows, without labels; and how well they agree with classes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin import data, evaluation, training
from nearkin.core import checks, files
from nearkin.core.spreadsheet import csv_text
from nearkin.data import groups as item_groups
from nearkin.data.sources import PLAIN
from nearkin.evaluation.arrays import Ends
from nearkin.evaluation.grouping import METHODS, SMOOTHED
from nearkin.gallery import results
from nearkin.gallery.gallery import Gallery
from nearkin.gallery.items import encoder_info
from nearkin.gallery.run_plda import plda_of, plda_of_gallery
from nearkin.gallery.schema import UNLABELLED
from nearkin.models.frozen import DEFAULT

__all__ = ["SourceGroups", "group_gallery", "group_source", "group_vectors", "write_groups"]

Progress = Callable[[int, int], None]
COLUMNS = ("group", "name", "size", "similarity", "label")


class SourceGroups(NamedTuple):
    """The groups of a source.

    groups (n,) int64: of each item, 0 the largest. central (n,): the mean cosine of an item with its group, itself
    included, in the space in which they were grouped (plda: as embedded). similarity: from which on items were joined;
    None for hdbscan and plda. method: which was used.
    scores: of each of "bcubed" and "pairwise" their "precision", "recall", "f", with 95 % intervals, where the source
    has classes. notes: sentences. ids: of the rows of a gallery.
    """

    names: list[str]
    groups: NDArray[np.int64]
    central: NDArray[np.float64]
    labels: list[str] | None
    similarity: float | None
    scores: dict[str, dict[str, tuple[float, Ends]]]
    notes: list[str]
    ids: list[int] | None = None
    method: str = "average"


def group_source(
    source: str,
    run: str | Path | None = None,
    *,
    root: str | Path | None = None,
    part: str = "all",
    far: float | None = None,
    similarity: float | None = None,
    method: str | None = None,
    size: int | None = None,
    dim: int | None = None,
    views: int = 1,
    unreadable: str = "strict",
    device: str = "auto",
    progress: Callable[[str], Progress | None] | None = None,
    reading: data.Reading = PLAIN,
) -> SourceGroups:
    """Groups the items of a source by what they show; labels, where it has some, are used only to measure the result.

    run: a run's folder or an encoder's name, efficientnet-lite0 by default; a file of vectors needs none. far: the
    similarity at which the run's calibration guarantees this false-accept rate per pair; similarity: a cosine in its
    place. method: see `evaluation.group`. By default, of a run that was trained on classes, "plda": the model of these
    classes is fitted once and kept in the run's folder. Otherwise, or with far, similarity or size, "average"; without
    far and similarity of `evaluation.smoothed` rows, of which 0.8 is near. size: about how many items a group has, if
    that is known; for smoothed rows, and the fewest items of a cluster of hdbscan. views: the mean over so many crops
    of each picture. progress(what) returns a progress(done, total). reading: how the files are read, see `data.load`.
    """
    _check_choice(far, similarity, method, size)
    told = progress or (lambda _: None)
    items = None
    if run is None:
        options: dict[str, Any] = {"root": root, "labelled": False, "group_column": item_groups.UNUSED}
        items = data.load(source, **options, **reading.for_load())
    if items is not None and items.vectors is not None:
        if far is not None:
            raise ValueError("far needs the calibration of a run: give --run RUN, or --similarity")
        if part != "all":
            raise ValueError(f"{source}: --part needs --run RUN, which divides the source; got {part}")
        model, note = None, ""
        rows, names = torch.from_numpy(np.array(items.vectors)), items.names
        labels, classes = items.labels, items.classes
    else:
        run = DEFAULT if run is None else run
        threshold = None if far is None else _threshold(run, far, dim)
        options = {"root": root, "part": part, "dim": dim, "unreadable": unreadable, "device": device}
        options |= {"views": views, "reading": reading._replace(own_source=None)}
        embedded = training.embed_source(run, source, **options, progress=told("embedding"))
        rows, names = embedded.embeddings, embedded.names
        labels, classes = embedded.labels, embedded.classes
        free = method in (None, "plda") and far is None and similarity is None and size is None
        model, note = plda_of(run, dim, views, device, progress, _of_run(reading)) if free else (None, "")
        similarity = similarity if threshold is None else threshold
    method = _method(method, model, note)
    grouping, central, used = group_vectors(rows, similarity, method, size, told("comparing"), model)
    known = None if labels is None or not classes else [classes[i] for i in labels]
    notes = ([note] if note else []) + _notes(names, grouping)
    return SourceGroups(names, grouping, central, known, used, _scores(known, grouping), notes, method=method)


def _of_run(reading: data.Reading) -> data.Reading:
    """What the run's own source is allowed; which folders are its parts, the run knows."""
    return PLAIN._replace(allow_outside=reading.allow_outside, own_source=reading.own_source)


def group_gallery(
    gallery: Gallery,
    *,
    far: float | None = None,
    similarity: float | None = None,
    method: str | None = None,
    size: int | None = None,
    progress: Callable[[str], Progress | None] | None = None,
) -> SourceGroups:
    """Groups all rows of a gallery, as `group_source` the items of a source; nothing is embedded.

    An enrolment can be stopped and resumed, so this is the way for many pictures. Labels only measure the result; rows
    without one do not count there. "plda" needs the model that `group_source` has left in the run's folder.
    """
    _check_choice(far, similarity, method, size)
    told = progress or (lambda _: None)
    used = similarity if far is None else gallery.similarity_at(far)
    number = sum(gallery.labels().values())
    rows, hits = np.empty((number, gallery.dim), np.float32), list[results.Hit]()
    for hit, row in gallery.rows():
        if len(hits) == number:
            break  # enrolled meanwhile
        rows[len(hits)] = row
        hits.append(hit)
    names = [hit.name or f"row {hit.id}" for hit in hits]
    free = method in (None, "plda") and used is None and size is None
    model = plda_of_gallery(gallery) if free else None
    method = _method(method, model, "there is none in the folder of the run; nearkin group SOURCE --run RUN makes it")
    vectors = torch.from_numpy(rows[: len(hits)])
    grouping, central, used = group_vectors(vectors, used, method, size, told("comparing"), model)
    labels = [hit.label for hit in hits]
    known = labels if any(label != UNLABELLED for label in labels) else None
    scores, notes, ids = _scores(known, grouping), _notes(names, grouping), [hit.id for hit in hits]
    return SourceGroups(names, grouping, central, known, used, scores, notes, ids, method)


def _method(method: str | None, model: evaluation.PLDA | None, why: str) -> str:
    """What the default is; refuses "plda" without a model."""
    if method == "plda" and model is None:
        raise ValueError(f"--method plda needs a model of a run's classes: {why or 'give --run RUN, a trained run'}")
    return method or ("average" if model is None else "plda")


def group_vectors(
    rows: torch.Tensor,
    similarity: float | None = None,
    method: str = "average",
    size: int | None = None,
    progress: Progress | None = None,
    model: evaluation.PLDA | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64], float | None]:
    """Groups (n,) of embeddings, the mean cosine of each item with its group, and the similarity that was used."""
    if method == "hdbscan":
        return *_central(rows, evaluation.group(rows, method=method, least=size or 2)), None
    if method == "plda":
        return *_central(rows, evaluation.group(rows, method=method, model=model, progress=progress)), None
    if similarity is None:
        neighbours = None if size is None else max(1, size)
        rows, similarity = evaluation.smoothed(rows, neighbours=neighbours, progress=progress), SMOOTHED
    grouping = evaluation.group(rows, similarity=similarity, method=method, progress=progress)
    return *_central(rows, grouping), similarity


def write_groups(path: str | Path, groups: SourceGroups) -> None:
    """A table with one line per item, group by group, those nearest to their group first."""
    sizes = np.bincount(groups.groups)
    lines: list[Any] = [COLUMNS[: 5 if groups.labels else 4]]
    for i in np.lexsort((-groups.central, groups.groups)).tolist():
        number = int(groups.groups[i])
        line: list[Any] = [number + 1, groups.names[i], int(sizes[number]), f"{groups.central[i]:.4f}"]
        lines.append(line + ([groups.labels[i]] if groups.labels else []))
    with files.explained(str(path), "make room, or choose another path"):
        files.write_text(path, csv_text(lines))


def _check_choice(far: float | None, similarity: float | None, method: str | None, size: int | None) -> None:
    if method is not None:
        checks.one_of("method", method, METHODS)
    if far is not None and similarity is not None:
        raise ValueError("--far and --similarity both say which items are near; give one of them, got both")
    if method == "hdbscan" and (far is not None or similarity is not None):
        raise ValueError("--method hdbscan finds its own densities; leave --far and --similarity out")
    if method == "plda" and not (far is None and similarity is None and size is None):
        raise ValueError("--method plda decides by itself; leave --far, --similarity and --size out")
    if method == "components" and far is None and similarity is None:
        raise ValueError("--method components needs --similarity, or --far with a calibrated run")
    if size is not None:
        checks.integer("size", size, 2)
        if far is not None or similarity is not None:
            raise ValueError("--size is for smoothed rows and hdbscan; leave it out with --far or --similarity")


def _threshold(run: str | Path, far: float, dim: int | None) -> float:
    """The similarity at which the calibration of a run guarantees a FAR per pair."""
    info = encoder_info(run, dim)
    calibrator, note = results.load_calibration(info.run, info.fingerprint, info.short)
    if calibrator is None:
        raise ValueError(f"--far needs a calibration: {note}")
    return calibrator.similarity_at(far)


def _central(rows: torch.Tensor, grouping: evaluation.Grouping) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    groups = grouping.assignment.numpy()
    unit = torch.nn.functional.normalize(rows.double(), dim=1).numpy()
    sums = np.zeros((int(groups.max(initial=-1)) + 1, unit.shape[1]))
    np.add.at(sums, groups, unit)
    means = sums / np.bincount(groups, minlength=len(sums))[:, None].clip(min=1)
    return groups, np.einsum("nd,nd->n", unit, means[groups])


def _scores(labels: list[str] | None, groups: NDArray[np.int64]) -> dict[str, dict[str, tuple[float, Ends]]]:
    if labels is None:
        return {}
    names = np.array(labels)
    ids = np.where(names == UNLABELLED, -1, np.unique(names, return_inverse=True)[1])
    result = {}
    for name, measure in (("bcubed", evaluation.bcubed), ("pairwise", evaluation.pairwise)):
        scores = measure(ids, groups, interval=True)
        result[name] = {key: (value, scores.intervals[key]) for key, value in scores.items()}
    return result


def _notes(names: list[str], groups: NDArray[np.int64]) -> list[str]:
    sizes = np.bincount(groups)
    if len(names) > 20 and sizes.max() > len(names) / 2:
        return [f"the largest group has {int(sizes.max()):,} of {len(names):,} items; a higher --similarity divides it"]
    return []
