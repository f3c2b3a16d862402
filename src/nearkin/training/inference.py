"""The encoder of a finished run: embeddings of any source, export to ONNX."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin import data, models
from nearkin.core import checks
from nearkin.data import augment, image_cache
from nearkin.data.item_set import Items
from nearkin.data.levels import Level
from nearkin.data.sources import PLAIN
from nearkin.data.vectors import Vectors
from nearkin.dist.group import ProcessGroup
from nearkin.models.frozen import encoder_folder
from nearkin.models.io import check_length
from nearkin.models.io import fingerprint as encoder_fingerprint
from nearkin.models.onnx_export import check_exportable
from nearkin.training import exclusions, run_dir
from nearkin.training.config import recipe as recipes
from nearkin.training.config.defaults import split_items
from nearkin.training.loader import ItemStore, embed
from nearkin.training.prepare import fingerprint, reading_of
from nearkin.training.run_dir import start_of

__all__ = ["PARTS", "Embedded", "embed_source", "export_onnx", "length_note", "recorded_source", "vectors_of"]

PARTS = ("all", "train", "val", "test", "gallery")
Progress = Callable[[int, int], None]


class Embedded(NamedTuple):
    """Embeddings (n, D) float32 with the labels or targets and names of the items.

    quality: (n,), the length of each embedding, larger is better; None where the encoder scales to unit length.
    """

    embeddings: Tensor
    labels: NDArray[np.int64] | None
    targets: NDArray[np.float64] | None
    classes: list[str]
    names: list[str]
    quality: NDArray[np.float64] | None = None
    groups: list[str] | None = None


class _Opened(NamedTuple):
    encoder: models.Encoder
    store: ItemStore
    items: Items
    indices: NDArray[np.int64]  # of the requested part
    gallery: NDArray[np.int64] | None  # searched by the test part, where the source has a separate one


def embed_source(
    run: str | Path,
    source: str | None = None,
    *,
    root: str | Path | None = None,
    part: str | None = None,
    dim: int | None = None,
    views: int = 1,
    batch: int = 256,
    unreadable: str = "strict",
    device: str = "auto",
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
    reading: data.Reading = PLAIN,
) -> Embedded:
    """The items of a source through the encoder of a run.

    run: its folder, or the name of a pretrained encoder, which needs a source. source None: the run's own. part: "all",
    or the items of a part as the run's recipe divides the source; by default the test part of the run's own source, all
    of another. dim: the first so many dimensions, a length that the run was trained for (`loss.matryoshka`), scaled to
    unit length again. views: the mean over so many crops and flips. group: the processes that share the work, whole
    batches each; all of them get all embeddings. reading: how the files of another source are read, see `data.load`.
    """
    checks.integer("views", views, 1)
    checks.integer("batch", batch, 1)
    opened = _in_turn(group, partial(_opened, run, source, root, part, unreadable, device, dim=dim, reading=reading))
    if views > 1 and opened.store.size is None:
        raise ValueError(f"views must be 1 for vectors, got {views}")
    return _embedded(opened, opened.indices, group, batch=batch, views=views, progress=progress)


def vectors_of(
    run: str | Path,
    source: str | None = None,
    *,
    root: str | Path | None = None,
    dim: int | None = None,
    device: str,
    progress: Any = None,
    group: ProcessGroup | None = None,
    levels: Sequence[str] | None = None,
    part: str | None = None,
    group_pattern: str | None = None,
    group_column: str | None = None,
    per_class: int | None = None,
    reading: data.Reading = PLAIN,
) -> tuple[Vectors, Vectors | None]:
    """As `evaluation.protocols` takes them: the queries, and the gallery of a source that has a separate one.

    dim: the first so many dimensions, of any number: what is measured need not have been trained for. levels: names of
    coarser levels of the source's classes; None: the run's, of its own source. part: as in `embed_source`.
    group_pattern, group_column: as in `data.load`; they change no split. By default the run's own source has the groups
    of its recipe. per_class: embed only the first so many items of each class. reading: as in `embed_source`.
    """
    grouped = {"group_pattern": group_pattern, "group_column": group_column}
    options: dict[str, Any] = {"dim": dim, "measured": True, "grouped": grouped, "levels": levels, "reading": reading}
    opened = _in_turn(group, partial(_opened, run, source, root, part, "strict", device, **options))
    if per_class is not None and opened.items.labels is not None:
        opened = opened._replace(indices=_first_of_classes(opened.items.labels, opened.indices, per_class))
    embedded = _embedded(opened, opened.indices, group, progress=progress)
    measured = source or f"its {part or 'test'} part"
    queries = _vectors(f"{run} on {measured}", embedded, opened.items.levels)
    if opened.gallery is None:
        return queries, None
    searched = _embedded(opened, opened.gallery, group, progress=progress)
    return queries, _vectors(f"{run} on its gallery", searched, opened.items.levels)


def _first_of_classes(labels: NDArray[np.int64], indices: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    order = indices[np.argsort(labels[indices], kind="stable")]
    place = np.arange(len(order)) - np.searchsorted(labels[order], labels[order])
    return np.sort(order[place < number])


def length_note(run: str | Path, dim: int) -> str | None:
    """A sentence where a run was not trained for embeddings of this length; None where it was."""
    try:
        check_length(_description(run), dim, run)
    except ValueError:
        return f"{run} was not trained for {dim} dimensions: these are what is left when the others are cut off"
    return None


def recorded_source(run: str | Path) -> str | None:
    """The source in the recipe of a run; None where there is no recipe."""
    path = Path(run) / "recipe.toml"
    return recipes.read(path, stored=True).data.source if path.is_file() else None


def _description(run: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((encoder_folder(run) / "encoder.json").read_text(encoding="utf-8"))
    return content


def _in_turn(group: ProcessGroup | None, opened: Callable[[], _Opened]) -> _Opened:
    """Images are decoded once per machine, by all its cores; its other ranks find them in the cache."""
    return opened() if group is None else group.first_on_machine("opening", opened)


def _embedded(
    opened: _Opened,
    indices: NDArray[np.int64],
    group: ProcessGroup | None = None,
    *,
    batch: int = 256,
    views: int = 1,
    progress: Progress | None = None,
) -> Embedded:
    chosen = opened.items.take(indices)
    options: dict[str, Any] = {"batch": batch, "views": views, "progress": progress, "group": group}
    rows = embed(opened.encoder, opened.store, indices, **options)
    quality = rows.double().norm(dim=1).cpu().numpy() if opened.encoder.free_length else None
    return Embedded(rows, chosen.labels, chosen.targets, chosen.classes, chosen.names, quality, chosen.groups)


def _vectors(name: str, embedded: Embedded, levels: Sequence[Level] = ()) -> Vectors:
    labels, targets = embedded.labels, embedded.targets
    names = None if labels is None else np.array([embedded.classes[i] for i in labels], dtype=str)
    columns = None
    if labels is not None and levels:
        columns = {level.name: np.array(level.classes, dtype=str)[level.of_class[labels]] for level in levels}
    values = None if targets is None else torch.from_numpy(targets)
    groups = None if embedded.groups is None else np.array(embedded.groups, dtype=str)
    return Vectors(name, embedded.embeddings, names, values, embedded.names, groups, columns)


def export_onnx(
    run: str | Path, path: str | Path, count: int = 32, dim: int | None = None, reading: data.Reading = PLAIN
) -> tuple[float, int]:
    """Writes the encoder of a run as ONNX, checked on its test items: the largest difference, and on how many.

    dim, reading: as in `embed_source`.
    """
    if frozen := _description(run).get("frozen"):
        raise ValueError(
            f"{frozen}: export takes the folder of a run, on whose test items the ONNX file is checked; an encoder's "
            f"name has none"
        )
    check_exportable(path)
    opened = _opened(run, None, None, None, "skip", "cpu", same=False, dim=dim, reading=reading)
    some = opened.indices[:: max(1, len(opened.indices) // count)][:count]
    batch = opened.store.eval_view(opened.store.gather(some))
    description = _description(run)
    short = None if dim == description["settings"].get("dim") else dim
    metadata = {"nearkin.fingerprint": encoder_fingerprint(description, short)}
    metadata |= _preparation_facts(description["preparation"])
    return models.export_onnx(opened.encoder, path, batch, metadata=metadata), len(batch)


def _preparation_facts(preparation: dict[str, Any]) -> dict[str, str]:
    """How a file becomes an input, step by step, for readers of the ONNX file alone."""
    if preparation["kind"] != "pictures":
        return {"nearkin.kind": "vectors"}
    side, size, fit = preparation["stored"], preparation["size"], preparation["fit"]
    crop = augment.crop_side(side, size)
    fitted = {
        "crop": f"shorter side to {side} px, the middle {side} x {side} kept",
        "squash": f"to {side} x {side} px, whatever the aspect",
        "pad": f"longer side to {side} px, padded to {side} x {side} with the mean colour of the edge",
    }
    steps = [
        "upright by EXIF, transparency over white, " + ("grey" if preparation["channels"] == 1 else "RGB"),
        f"resize: {fitted[fit]}; Lanczos to make smaller, bicubic to make larger, rounded to 8 bits",
        f"crop: the middle {crop} x {crop}, from pixel {(side - crop) // 2} on",
    ]
    if crop != size:
        steps.append(f"resize: to {size} x {size}, bilinear, antialiased")
    return {
        "nearkin.kind": "pictures",
        "nearkin.size": str(size),
        "nearkin.resize": str(side),
        "nearkin.fit": fit,
        "nearkin.resize_filter": "lanczos smaller, bicubic larger",
        "nearkin.crop": str(crop),
        "nearkin.steps": "; ".join(f"{i}. {step}" for i, step in enumerate([*steps, "divide by 255"], 1)),
    }


def _recipe(run: str | Path, source: str | None, frozen: str | None, own_source: str | None) -> recipes.Recipe:
    """Of a run its own; of a frozen encoder one that divides the source as `nearkin train` does by default."""
    if frozen is None:
        return run_dir.recipe_of(Path(run), {} if own_source is None else {"data.source": own_source})
    if source is None or own_source is not None:
        raise ValueError(f"{frozen}: an encoder's name has no source of its own; name one after it, as photos/")
    return recipes.Recipe.model_validate({"data": {"source": source}})


def _opened(
    run: str | Path,
    source: str | None,
    root: str | Path | None,
    part: str | None,
    unreadable: str,
    device: str,
    same: bool = True,
    levels: Sequence[str] | None = None,
    dim: int | None = None,
    measured: bool = False,
    grouped: dict[str, Any] | None = None,
    reading: data.Reading = PLAIN,
) -> _Opened:
    """same: the source must be as it was. dim: the first so many dimensions; measured: of any number."""
    folder, description = encoder_folder(run), _description(run)
    frozen = description.get("frozen")
    on = checks.device(device)
    recipe = _recipe(run, source, frozen, reading.own_source)
    if dim is not None and not measured:
        check_length(description, dim, run)
    encoder, preparation = models.load(folder, on)
    if dim is not None:
        encoder.shorten(dim)
    part = part or ("test" if source is None else "all")
    checks.one_of("part", part, PARTS)
    if source is None:
        recipe.check_typed("data.source", str(run))
    source = source or recipe.data.source
    own_source = frozen is None and Path(source) == Path(recipe.data.source)
    root = recipe.data.root if own_source and root is None else root
    if own_source and recipe.data.unreadable is not None and unreadable == "strict":
        unreadable = recipe.data.unreadable  # what training has skipped is skipped again
    labelled = part != "all"
    trained_levels = recipe.data.levels or []
    if own_source and levels is not None and trained_levels and list(levels) != trained_levels:
        raise ValueError(f"{source}: {run} has its own levels, {', '.join(trained_levels)}; leave --levels out")
    if levels is None:
        levels = trained_levels if own_source and labelled else ()
    options: dict[str, Any] = {"root": root, "partial": recipe.data.partial, "labelled": labelled, "levels": levels}
    options |= _reading(recipe, reading, source, run).for_load() if own_source else reading.for_load()
    own_groups: dict[str, Any] = {"group_pattern": recipe.data.group_pattern, "group_column": recipe.data.group_column}
    items = data.load(source, **options, **(own_groups if own_source else {}))
    rows, digests, bad = _rows(items, preparation, recipe, unreadable, source)
    indices = np.setdiff1d(np.arange(len(items), dtype=np.int64), [i for i, _ in bad])
    gallery = None
    if part != "all":
        parts = split_items(items, recipe, bad)
        left = exclusions.again(items, parts, start_of(folder)) if own_source else None
        parts = parts if left is None else left.parts
        trained_on = start_of(folder).get("fingerprint") if own_source and same else None
        known = items if trained_levels else replace(items, levels=[])  # as the run has known them
        if trained_on is not None and trained_on != fingerprint(known, parts, digests):
            raise ValueError(
                f"{source}: it has changed since {run} started, so its {part} part may contain training items; "
                f"measure on a source of its own"
            )
        indices = getattr(parts, part)
        if indices is None:
            raise ValueError(f"{source}: it has no gallery of its own; its test items search one another")
        gallery = parts.gallery if part == "test" else None
    if grouped is not None and any(grouped.values()):  # after the split, which is that of the run
        items = replace(items, groups=data.load(source, **options, **grouped).groups)
    store = ItemStore(rows, on, preparation.get("size"), preparation.get("flip", True))
    return _Opened(encoder, store, items, indices, gallery)


def _reading(recipe: recipes.Recipe, asked: data.Reading, source: str, run: str | Path) -> data.Reading:
    """How a run has read its own source; another way is refused."""
    own = reading_of(recipe, recorded=True)._replace(allow_outside=asked.allow_outside)
    folders = asked.split_folders
    if (
        folders is not None and list(folders) != list(own.split_folders or ())
    ) or asked.leaf_classes > own.leaf_classes:
        raise ValueError(
            f"{source}: {run} has read its folders in its own way; leave split_folders and leaf_classes out"
        )
    return own


def _rows(
    items: Items, preparation: dict[str, Any], recipe: recipes.Recipe, unreadable: str, source: str
) -> tuple[NDArray[Any], list[str], list[tuple[int, str]]]:
    """Rows as the encoder was trained on them, their digests, and the items that could not be read."""
    kind = preparation["kind"]
    if (items.vectors is not None) != (kind == "vectors"):
        raise ValueError(f"{source}: the run's encoder takes {kind}, the source holds the other kind")
    if items.vectors is not None:
        if items.vectors.shape[1] != preparation["features"]:
            raise ValueError(
                f"{source}: vectors must have {preparation['features']} dimensions as the run's encoder takes them, "
                f"got {items.vectors.shape[1]}"
            )
        return items.vectors, [], []
    assert items.pictures is not None
    limit: dict[str, Any] = {} if recipe.data.max_pixels is None else {"max_pixels": recipe.data.max_pixels}
    images = image_cache.store(
        items.pictures,
        items.names,
        side=preparation["stored"],
        fit=preparation["fit"],
        channels=preparation["channels"],
        unreadable=unreadable,
        cache=recipe.data.cache is not False,
        **limit,
    )
    return images.pixels, images.digests, images.bad
