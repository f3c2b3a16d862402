"""From a source to what can be trained on: items loaded, images decoded, split made, recipe settled."""

import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin import data, models
from nearkin.data import augment, image_cache
from nearkin.data.groups import group_ids
from nearkin.data.item_set import Items, Pairs
from nearkin.data.sources import AS_BEFORE
from nearkin.data.splits import Parts
from nearkin.training import compatible, exclusions, level_loss, tracking
from nearkin.training.build import adapted, build_loss, build_sampler, new_encoder
from nearkin.training.config import defaults
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import augmentation_of, check_keys
from nearkin.training.config.unlabelled import check_unlabelled, settle_unlabelled
from nearkin.training.optimizers import parameter_groups
from nearkin.training.own_objects import NONE, DatasetRows, Own, items_of
from nearkin.training.unlabelled_items import UnlabelledItems, gather_items, load_folder, note
from nearkin.training.validation import HeldOut

__all__ = ["Prepared", "build_encoder", "check_recipe", "fingerprint", "item_rows", "load_items", "prepare"]
__all__ += ["reading_of"]

_MANY = 100_000  # classes; weights for more are not built twice
_STANDARDIZED = 2048  # training items from which mean and deviation of the input are taken
_FITTED_LEAST, _FITTED_MOST = 512, 2048  # and from which a projection is fitted


@dataclass(frozen=True)
class Prepared:
    """Everything about the data of a run, and the settled recipe."""

    recipe: Recipe
    items: Items  # those that could not be read are in no part
    parts: Parts
    rows: NDArray[Any] | DatasetRows  # pixels (N, S, S, C) uint8, vectors (N, F) float32, or a dataset of the user's
    report: dict[str, Any]  # the result of `data.inspect`
    fingerprint: str
    notes: list[str]
    own: Own = NONE
    unlabelled: UnlabelledItems | None = None  # what a pretraining sees; None: there is none, or it is done
    memo: dict[str, torch.Tensor] = field(default_factory=dict)  # what is computed from the training items once

    @property
    def origin(self) -> dict[str, str]:
        """What a checkpoint records of its run."""
        return {"recipe": self.recipe.digest(), "data": self.fingerprint}

    @property
    def preparation(self) -> dict[str, Any]:
        """How a new item is prepared for the encoder; saved beside its weights."""
        options = self.recipe.data
        if isinstance(self.rows, DatasetRows):
            return {"kind": "own", "shape": list(self.rows.shape[1:])}
        if self.items.vectors is not None:
            return {"kind": "vectors", "features": int(self.rows.shape[1])}
        keys = {"size": options.size, "stored": options.stored, "fit": options.fit, "channels": options.channels}
        augmentation = augmentation_of(self.recipe)
        return {"kind": "pictures", **keys, "flip": augmentation is not None and augmentation.flip > 0}

    @property
    def baseline(self) -> str:
        """What is to be had without training."""
        if self.items.vectors is not None or len(self.rows.shape) == 2:
            return "vectors"
        return "frozen backbone" if self.recipe.pretrained else "pixels"

    def held_out(self, part: str) -> HeldOut:
        """The items of the validation or the test part."""
        indices = getattr(self.parts, part)
        labels, targets = self.items.labels, self.items.targets
        gallery = self.parts.gallery if part == "test" else None
        groups = group_ids(self.items)
        return HeldOut(
            indices,
            None if labels is None else labels[indices],
            None if targets is None else targets[indices],
            gallery,
            None if gallery is None or labels is None else labels[gallery],
            None if gallery is None or targets is None else targets[gallery],
            None if groups is None else groups[indices],
            None if gallery is None or groups is None else groups[gallery],
        )

    def train_groups(self) -> NDArray[np.int64] | None:
        """The groups of the training items, for a sampler that asks for them."""
        groups = group_ids(self.items)
        return None if groups is None else groups[self.parts.train]

    def part_indices(self) -> dict[str, NDArray[np.int64]]:
        parts = {"train": self.parts.train, "val": self.parts.val, "test": self.parts.test}
        return parts if self.parts.gallery is None else parts | {"gallery": self.parts.gallery}

    @property
    def known_classes(self) -> bool:
        """Whether the test asks about new items of classes that are trained on, by the recipe or by the source."""
        labels = self.items.labels
        if labels is None or self.recipe.data.closed:
            return labels is not None
        return bool(np.isin(labels[self.parts.test], labels[self.parts.train]).all())

    def class_counts(self) -> dict[str, int]:
        if self.items.labels is None:
            return {}
        return {name: len(np.unique(self.items.labels[indices])) for name, indices in self.part_indices().items()}

    def test_pairs(self) -> Pairs | None:
        """The pairs of the source's verification protocol among the test items, as positions within these."""
        pairs = self.items.pairs
        if pairs is None or not len(pairs.items):
            return None
        position = np.full(len(self.items), -1, np.int64)
        tested = self.held_out("test").everything
        position[tested] = np.arange(len(tested))
        positions = position[pairs.items]
        both = (positions >= 0).all(1)
        return Pairs(positions[both], pairs.same[both], pairs.fold[both]) if both.any() else None


def prepare(
    recipe: Recipe,
    callback: Any = lambda _: None,
    own: Own = NONE,
    start: Mapping[str, Any] | None = None,
    pretrained: bool = False,
) -> Prepared:
    """Loads, decodes, splits, settles. Everything that can be wrong with the data or the recipe is refused here.

    start: what a run that resumes has recorded (data.json): it leaves out what it left out when it began. pretrained:
    its pretraining has ended, so pictures without labels are not read again.
    """
    options = recipe.data
    own.check(recipe)
    check_recipe(recipe)
    if recipe.unlabelled.only:
        return _prepare_unlabelled(recipe, callback, own)
    callback({"event": "loading", "source": options.source})
    rows: NDArray[Any] | DatasetRows
    digests: list[str] = []
    folder: Items | None = None
    bad: list[tuple[int, str]] = []
    if own.dataset is not None:
        items, rows = items_of(own.dataset, options.source), DatasetRows(own.dataset)
        recipe, split_notes = defaults.settle_closed(recipe, items)
        recipe, old = _old_encoder(recipe, "own", rows.shape[1:], start)
        recipe, notes = defaults.settle_source(recipe, items, rows.shape[1:])
        own = own.wrap(rows.take(np.array([0, len(rows) - 1])))
        check_unlabelled(recipe, items)
    else:
        root = None if options.root is None else Path(options.root)
        items = load_items(recipe, root, resumed=start is not None)
        recipe, split_notes = defaults.settle_closed(recipe, items)
        kind, shape = ("pictures", None) if items.vectors is None else ("vectors", items.vectors.shape[1:])
        recipe, old = _old_encoder(recipe, kind, shape, start)
        recipe, notes = defaults.settle_source(recipe, items)
        own = own.wrap(_example(recipe, items))
        check_unlabelled(recipe, items)
        folder = load_folder(recipe) if recipe.unlabelled.folder is not None and not pretrained else None
        if items.pictures is not None and defaults.sample_headers(items):  # else none is an image, as decoding says
            parts = defaults.split_items(items, recipe, [])
            parts = _known_exclusions(recipe, items, parts, start)
            settled = defaults.settle(recipe, items, parts)
            level_loss.check_levels(settled, items)
            _check_build(settled, items, parts, own, old)
        rows, digests, bad = item_rows(items, recipe, callback)
    parts = defaults.split_items(items, recipe, bad)
    left = None if start is None else exclusions.again(items, parts, start)
    if items.pictures is not None:
        recipe = recipe.with_("data", near=exclusions.near_setting(recipe, len(items)))
    if left is None:
        pixels = None if items.pictures is None or isinstance(rows, DatasetRows) else rows
        left = exclusions.exclude(recipe, items, parts, pixels, digests, callback)
    parts = left.parts
    notes = [*split_notes, *notes, *defaults.finetune_note(recipe, items, parts)]
    recipe = defaults.settle(recipe, items, parts)
    chosen = True if start is None else start.get("keep_start")  # None: the run began before there was this key
    if not recipe.pretrained and recipe.compatible.run is None and recipe.training.keep_start is None:
        recipe = recipe.with_("training", keep_start=chosen)
    level_loss.check_levels(recipe, items)
    report = data.inspect(items, parts, digests=digests or None, bad=bad) | left.record
    if old is not None:
        report["compatible"] = old
        if items.pictures is None:  # of pictures it was looked at before they were decoded
            compatible.check_dim(new_encoder(recipe, rows.shape[1:], own).dim, old)
    callback({"event": "data", "report": report, "lines": data.lines(report)})
    unlabelled = None
    if recipe.pretrains:
        record = (start or {}).get("unlabelled") if pretrained else None
        if record is None:
            assert not isinstance(rows, DatasetRows)
            read = None if folder is None else (folder, *item_rows(folder, recipe, callback))
            unlabelled = gather_items(recipe, read, (items, parts, rows, digests))
            record = unlabelled.record
        recipe, report = settle_unlabelled(recipe, int(record["pictures"])), report | {"unlabelled": record}
        notes = [*notes, note(record, recipe.pretrained)]
    callback({"event": "settled", "recipe": recipe})
    notes = (start or {}).get("notes", notes)  # a recipe that is settled no longer tells what was left open
    report |= {"notes": notes}
    return Prepared(recipe, items, parts, rows, report, fingerprint(items, parts, digests), notes, own, unlabelled)


def _prepare_unlabelled(recipe: Recipe, callback: Any, own: Own) -> Prepared:
    """`prepare` of a run that has no labelled source and ends with its pretraining: all items are to train on."""
    callback({"event": "loading", "source": recipe.data.source})
    items = replace(
        load_folder(recipe), labels=None, classes=[], split=None, closed_split=None, groups=None, pairs=None
    )
    recipe, notes = defaults.settle_source(recipe, items)
    own = own.wrap(_example(recipe, items))
    check_unlabelled(recipe, items)
    rows, digests, bad = item_rows(items, recipe, callback)
    unlabelled = gather_items(recipe, (items, rows, digests, bad), None)
    recipe = defaults.settle_without_labels(recipe, len(unlabelled.rows))
    none = np.empty(0, np.int64)
    parts = Parts(np.setdiff1d(np.arange(len(items)), [i for i, _ in bad]), none, none, note="no labels: no test")
    report = data.inspect(items, parts, digests=digests, bad=bad) | {"unlabelled": unlabelled.record}
    callback({"event": "data", "report": report, "lines": data.lines(report)})
    callback({"event": "settled", "recipe": recipe})
    return Prepared(recipe, items, parts, rows, report, fingerprint(items, parts, digests), notes, own, unlabelled)


def _old_encoder(
    recipe: Recipe, kind: str, shape: tuple[int, ...] | None, start: Mapping[str, Any] | None
) -> tuple[Recipe, dict[str, Any] | None]:
    """The recipe with the dimensions of the old encoder, unless it has others; and what is recorded of that encoder.

    A run that resumes has recorded it, and does not need the old run any more. kind, shape: of the items.
    """
    if recipe.compatible.run is None or (start is not None and "compatible" in start):
        return recipe, None if start is None else start.get("compatible")
    old = compatible.open_old(recipe.compatible.run)
    compatible.check_items(old, kind, shape)
    if "dim" not in recipe.encoder and not recipe.is_own("encoder"):
        recipe = recipe.with_("encoder", dim=old.encoder.dim)
    return recipe, old.record


def _known_exclusions(recipe: Recipe, items: Items, parts: Parts, start: Mapping[str, Any] | None) -> Parts:
    """The parts without what is known to be left out before a picture is decoded."""
    left = None if start is None else exclusions.again(items, parts, start)
    return exclusions.listed(recipe, items, parts) if left is None else left.parts


def load_items(recipe: Recipe, root: Path | None, resumed: bool = False) -> Items:
    """The items of the recipe's source, with their groups and levels."""
    options = recipe.data
    recipe.check_typed("data.source", "the run")
    grouped: dict[str, Any] = {"group_pattern": options.group_pattern, "group_column": options.group_column}
    grouped |= reading_of(recipe, resumed).for_load()
    try:
        return data.load(options.source, root=root, partial=options.partial, levels=options.levels or (), **grouped)
    except ValueError as error:
        keys = r"\b(group_pattern|group_column|split_folders|leaf_classes)\b"
        raise ValueError(re.sub(keys, r"data.\1", str(error))) from None


def reading_of(recipe: Recipe, recorded: bool = False) -> data.Reading:
    """How the recipe's source is read. recorded: by a run, which read it as it could then where no key says more."""
    split_folders = recipe.data.split_folders or (AS_BEFORE if recorded else None)
    return data.Reading(split_folders, bool(recipe.data.leaf_classes), recipe.allow_outside)


def check_recipe(recipe: Recipe) -> None:
    """Refuses what is wrong whatever the data are: names, keys, types, the device, missing packages."""
    check_keys(recipe)
    _ = recipe.device
    tracking.check_installed(recipe)


def _check_build(recipe: Recipe, items: Items, parts: Parts, own: Own, old: Mapping[str, Any] | None) -> None:
    """Builds encoder, loss and sampler of a settled recipe once: what cannot be built is refused before decoding.

    parts: as they are if every image can be read. old: as `compatible.check_dim` takes it.
    """
    encoder = adapted(recipe, new_encoder(recipe, None if items.vectors is None else items.vectors.shape[1:], own))
    compatible.check_dim(encoder.dim, old)
    labels = classes = targets = None
    if recipe.takes_targets:
        assert items.targets is not None  # `defaults.settle` has refused it otherwise
        targets = items.targets[parts.train]
    elif items.labels is not None:
        present, labels = np.unique(items.labels[parts.train], return_inverse=True)
        labels, classes = labels.astype(np.int64), len(present)
    width = None if targets is None else (1 if targets.ndim == 1 else targets.shape[1])
    unsharded = {key: value for key, value in recipe.loss.items() if key != "shard"}  # ranks prepare one by one
    alone = recipe.model_copy(update={"loss": unsharded})
    few = classes and min(classes, _MANY)
    if recipe.levels.weights is None:
        loss = build_loss(alone, few, encoder.dim, recipe.training.seed, width, len(parts.train), own)
    else:
        ids = level_loss.training_labels(recipe, items, parts.train)
        loss = level_loss.loss_of_levels(alone, ids, encoder.dim, recipe.training.seed, items=len(parts.train))
    parameter_groups(recipe, encoder.backbone, encoder.head, loss)
    with warnings.catch_warnings():  # noted when the sampler is built for the run
        warnings.simplefilter("ignore")
        groups = group_ids(items)
        build_sampler(recipe, labels, targets, None if groups is None else groups[parts.train])


def _example(recipe: Recipe, items: Items) -> torch.Tensor:
    """Two items in the shape in which the encoder will see them."""
    if items.vectors is not None:
        return torch.from_numpy(items.vectors[[0, -1]])
    options = recipe.data
    assert options.channels is not None and options.size is not None
    return torch.zeros(2, options.channels, options.size, options.size)


def item_rows(
    items: Items, recipe: Recipe, callback: Any = lambda _: None
) -> tuple[NDArray[Any], list[str], list[tuple[int, str]]]:
    """Pixels or vectors of the items, the digests of their files, and which could not be read and why."""
    if items.vectors is not None:
        return items.vectors, [], []
    options = recipe.data
    assert items.pictures is not None and options.stored is not None
    limit: dict[str, Any] = {} if options.max_pixels is None else {"max_pixels": options.max_pixels}
    images = image_cache.store(
        items.pictures,
        items.names,
        side=options.stored,
        fit=options.fit or "crop",
        channels=options.channels,
        unreadable=options.unreadable or "strict",
        cache=options.cache is not False,
        progress=lambda done, total: callback({"event": "storing", "done": done, "total": total}),
        **limit,
    )
    return images.pixels, images.digests, images.bad


def build_encoder(prepared: Prepared) -> models.Encoder:
    """The encoder as it is before training: a function of the recipe and the training items alone."""
    if prepared.own.wrapped is not None:
        return prepared.own.wrapped.untrained()
    shape = prepared.rows.shape[1:] if prepared.items.pictures is None else None
    encoder = new_encoder(prepared.recipe, shape)
    if not encoder.pretrained:
        [items] = _typical(prepared, _STANDARDIZED, batch=_STANDARDIZED)
        encoder.standardize(items)
    elif prepared.recipe.finetune.projection == "pca":
        models.fit_projection(encoder, _features(prepared, encoder), prepared.recipe.training.seed)
    return encoder


def _features(prepared: Prepared, encoder: models.Encoder) -> torch.Tensor:
    """Pooled features (N, F) of training items, evenly taken, by the encoder before training; computed once per run."""
    if "features" not in prepared.memo:
        count, device = max(_FITTED_LEAST, min(_FITTED_MOST, 8 * encoder.dim)), prepared.recipe.device
        encoder.to(device).eval()
        with torch.no_grad():
            parts = [encoder.features(x.to(device)).float().cpu() for x in _typical(prepared, count, batch=64)]
        encoder.to("cpu").train()
        prepared.memo["features"] = torch.cat(parts)
    return prepared.memo["features"]


def _typical(prepared: Prepared, count: int, batch: int) -> Iterator[torch.Tensor]:
    """At most `count` training items, evenly taken, as the encoder sees them, in batches."""
    train, size = prepared.parts.train, prepared.recipe.data.size
    indices = train[np.unique(np.linspace(0, len(train) - 1, count).astype(np.int64))]
    for start in range(0, len(indices), batch):
        some = indices[start : start + batch]
        if isinstance(prepared.rows, DatasetRows):
            yield prepared.rows.take(some)
        else:
            rows = torch.from_numpy(np.ascontiguousarray(prepared.rows[some]))
            yield rows if size is None else augment.centre(rows, size)


def fingerprint(items: Items, parts: Parts, digests: list[str]) -> str:
    """Of all that a resumed run relies on: which items, how labelled, in which part."""
    digest = hashlib.sha256("\n".join([*items.names, *items.classes, *digests]).encode())
    columns = [items.labels, items.targets, items.vectors, parts.train, parts.val, parts.test, parts.gallery]
    for column in columns:
        digest.update(b"-" if column is None else np.ascontiguousarray(column).tobytes())
    for level in items.levels:
        digest.update("\n".join([level.name, *level.classes]).encode() + level.of_class.tobytes())
    if items.groups is not None:
        digest.update("\n".join(items.groups).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
