"""From a source to what can be trained on: items read, pictures stored, parts divided, open choices settled."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin import data, models
from nearkin.data import augment, decode, image_cache
from nearkin.data.item_set import Items, Pairs
from nearkin.data.splits import Parts
from nearkin.training.build import augmentation_of, encoder_settings, new_encoder
from nearkin.training.config import defaults, precheck
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.refusals import check_augment, check_data
from nearkin.training.objective import loss_settings, takes_targets
from nearkin.training.own_objects import NONE, DatasetRows, Own, is_own, items_of
from nearkin.training.validation import Held

__all__ = [
    "Prepared",
    "augmentation_of",
    "build_encoder",
    "divided",
    "fingerprint",
    "looked_at",
    "prepare",
    "rows_of",
    "settled",
]

_STANDARDIZED = 2048  # training items whose mean and deviation stand for all
_SAMPLED = 16  # pictures whose size is looked at


@dataclass(frozen=True)
class Prepared:
    """Everything about the data of a run, and the recipe with nothing left open."""

    recipe: Recipe
    items: Items  # those that could not be read are in no part
    parts: Parts
    rows: NDArray[Any] | DatasetRows  # pixels (N, S, S, C) uint8, vectors (N, F) float32, or a dataset of the user's
    report: dict[str, Any]  # what `data.inspect` found
    fingerprint: str
    notes: list[str]
    own: Own = NONE

    @property
    def preparation(self) -> dict[str, Any]:
        """What a new item must go through before the encoder; saved beside its weights."""
        options = self.recipe.data
        if isinstance(self.rows, DatasetRows):
            return {"kind": "own", "shape": list(self.rows.shape[1:])}
        if self.items.vectors is not None:
            return {"kind": "vectors", "features": int(self.rows.shape[1])}
        kept = {"size": options.size, "stored": options.stored, "fit": options.fit, "channels": options.channels}
        augmentation = augmentation_of(self.recipe)
        return {"kind": "pictures", **kept, "flip": augmentation is not None and augmentation.flip > 0}

    @property
    def baseline(self) -> str:
        """What could be had without training."""
        if self.items.vectors is not None or len(self.rows.shape) == 2:
            return "vectors"
        return "frozen backbone" if pretrained(self.recipe) else "pixels"

    def held(self, part: str) -> Held:
        """The items of the validation or the test part, for judging."""
        chosen = getattr(self.parts, part)
        labels, targets = self.items.labels, self.items.targets
        gallery = self.parts.gallery if part == "test" else None
        return Held(
            chosen,
            None if labels is None else labels[chosen],
            None if targets is None else targets[chosen],
            gallery,
            None if gallery is None or labels is None else labels[gallery],
            None if gallery is None or targets is None else targets[gallery],
        )

    def sizes(self) -> dict[str, NDArray[np.int64]]:
        named = {"train": self.parts.train, "val": self.parts.val, "test": self.parts.test}
        return named if self.parts.gallery is None else named | {"gallery": self.parts.gallery}

    def class_counts(self) -> dict[str, int]:
        if self.items.labels is None:
            return {}
        return {name: len(np.unique(self.items.labels[part])) for name, part in self.sizes().items()}

    def test_pairs(self) -> Pairs | None:
        """The pairs of the source's verification protocol among the test items, places counted within these."""
        pairs = self.items.pairs
        if pairs is None or not len(pairs.items):
            return None
        place = np.full(len(self.items), -1, np.int64)
        tested = self.held("test").everything
        place[tested] = np.arange(len(tested))
        moved = place[pairs.items]
        both = (moved >= 0).all(1)
        return Pairs(moved[both], pairs.same[both], pairs.fold[both]) if both.any() else None


def prepare(recipe: Recipe, watch: Any = lambda _: None, own: Own = NONE) -> Prepared:
    """Reads, stores, divides, settles. Everything that can be wrong with the data or the recipe is said here."""
    options = recipe.data
    root = None if options.root is None else Path(options.root)
    own.check(recipe)
    precheck.check_recipe(recipe)
    watch({"event": "loading", "source": options.source})
    rows: NDArray[Any] | DatasetRows
    digests: list[str] = []
    bad: list[tuple[int, str]] = []
    notes: list[str] = []
    if own.dataset is not None:
        items, rows = items_of(own.dataset, options.source), DatasetRows(own.dataset)
        recipe = defaults.settle_dataset(recipe, rows.shape[1:])
        own = own.wrap(rows.take(np.array([0, len(rows) - 1])))
    else:
        items = data.load(options.source, root=root, partial=options.partial)
        recipe, notes = looked_at(recipe, items)
        own = own.wrap(_example(recipe, items))
        if items.pictures is not None and _glances(items):  # files that are no pictures have their own sentence
            _rehearsed(recipe, items, own)
        rows, digests, bad = rows_of(items, recipe, watch)
    parts = divided(items, recipe, bad)
    check_data(recipe, items, parts)
    recipe = defaults.settle_parts(recipe, items, parts)
    report = data.inspect(items, parts, digests=digests or None, bad=bad)
    watch({"event": "data", "report": report, "lines": data.lines(report)})
    recipe = settled(recipe, items, parts)
    watch({"event": "settled", "recipe": recipe})
    return Prepared(recipe, items, parts, rows, report, fingerprint(items, parts, digests), notes, own)


def _example(recipe: Recipe, items: Items) -> torch.Tensor:
    """Two items in the shape in which the encoder will see them."""
    if items.vectors is not None:
        return torch.from_numpy(items.vectors[[0, -1]])
    options = recipe.data
    assert options.channels is not None and options.size is not None
    return torch.zeros(2, options.channels, options.size, options.size)


def _rehearsed(recipe: Recipe, items: Items, own: Own) -> None:
    """What is wrong whichever pictures can be read is said before they are."""
    parts = divided(items, recipe, [])
    check_data(recipe, items, parts)
    precheck.rehearse(settled(defaults.settle_parts(recipe, items, parts), items, parts), items, parts, own)


def looked_at(recipe: Recipe, items: Items) -> tuple[Recipe, list[str]]:
    """Encoder and sizes settled by what the pictures look like; and notes on it."""
    side, grey = (None, False) if items.pictures is None else _look(items)
    return defaults.settle_pictures(recipe, side, grey, defaults.device(recipe))


def settled(recipe: Recipe, items: Items, parts: Parts) -> Recipe:
    """Everything that the training part decides, after `looked_at`; a recipe that cannot be trained by is refused."""
    facts = _facts(recipe, items, parts)
    recipe = defaults.settle(recipe, facts, items.labels is None, defaults.device(recipe))
    recipe = recipe.with_("encoder", **encoder_settings(recipe))
    loss_settings(recipe)
    _refuse(recipe, items)
    return recipe


def divided(items: Items, recipe: Recipe, bad: list[tuple[int, str]]) -> Parts:
    """The parts of the readable items. The others keep their place: to close the gaps would copy every pixel."""
    options = recipe.data
    kept = np.setdiff1d(np.arange(len(items)), [i for i, _ in bad])
    readable = items.take(kept) if bad else items
    parts = data.divide(
        readable,
        seed=options.seed,
        closed=options.closed,
        val=options.val or defaults.validation_share(items),
        test=options.test or defaults.TEST,
        skip_single=options.skip_single,
        official=options.official,
    )
    return parts.among(kept) if bad else parts


def pretrained(recipe: Recipe) -> bool:
    name = str(recipe.encoder["name"])
    return name not in ("small-cnn", "mlp") and not is_own(name) and bool(recipe.encoder.get("pretrained", True))


def build_encoder(prepared: Prepared) -> models.Encoder:
    """The encoder as it is before training: a function of the recipe and the training items alone."""
    if prepared.own.wrapped is not None:
        return prepared.own.wrapped.untrained()
    shape = prepared.rows.shape[1:] if prepared.items.pictures is None else None
    encoder = new_encoder(prepared.recipe, shape)
    if not encoder.pretrained:
        encoder.standardize(_typical(prepared))
    return encoder


def _typical(prepared: Prepared) -> torch.Tensor:
    """Training items, evenly taken, as the encoder sees them."""
    part = prepared.parts.train
    chosen = part[np.unique(np.linspace(0, len(part) - 1, _STANDARDIZED).astype(np.int64))]
    if isinstance(prepared.rows, DatasetRows):
        return prepared.rows.take(chosen)
    rows = torch.from_numpy(np.ascontiguousarray(prepared.rows[chosen]))
    return rows if prepared.recipe.data.size is None else augment.centre(rows, prepared.recipe.data.size)


def _refuse(recipe: Recipe, items: Items) -> None:
    """What would only come to light after hours, said before anything long begins."""
    check_augment(recipe, augmentation_of(recipe))
    if recipe.evaluation.clustering and items.labels is None:
        raise ValueError("evaluation.clustering needs class labels, the source has none")
    if takes_targets(recipe) and items.targets is None:
        raise ValueError(f'loss "{recipe.loss["name"]}" needs continuous targets, {items.name} has none')
    if not takes_targets(recipe) and items.labels is None:
        raise ValueError(f'loss "{recipe.loss["name"]}" needs class labels, {items.name} has none; use logratio')


def _look(items: Items) -> tuple[int, bool]:
    """The usual shorter side of the pictures, and whether those looked at are all grey."""
    seen = _glances(items)
    if not seen:
        return defaults.SMALL, False
    return int(np.median([side for side, _ in seen])), all(grey for _, grey in seen)


def _glances(items: Items) -> list[tuple[int, bool]]:
    """Shorter side and greyness of some pictures, from their headers; none of those that cannot be read."""
    assert items.pictures is not None
    seen = []
    for i in np.unique(np.linspace(0, len(items) - 1, _SAMPLED).astype(int)):
        with suppress(OSError, ValueError):  # named when all are decoded
            seen.append(decode.glance(items.pictures.read(int(i))))
    return seen


def rows_of(
    items: Items, recipe: Recipe, watch: Any = lambda _: None
) -> tuple[NDArray[Any], list[str], list[tuple[int, str]]]:
    """The items as rows, the digests of their files, and which could not be read and why."""
    if items.vectors is not None:
        return items.vectors, [], []
    options = recipe.data
    assert items.pictures is not None and options.stored is not None
    more: dict[str, Any] = {} if options.max_pixels is None else {"max_pixels": options.max_pixels}
    found = image_cache.store(
        items.pictures,
        items.names,
        side=options.stored,
        fit=options.fit or "crop",
        channels=options.channels,
        unreadable=options.unreadable or "strict",
        cache=options.cache is not False,
        progress=lambda done, total: watch({"event": "storing", "done": done, "total": total}),
        **more,
    )
    return found.pixels, found.digests, found.bad


def _facts(recipe: Recipe, items: Items, parts: Parts) -> defaults.Facts:
    classes = smallest = None
    if items.labels is not None:
        counts = np.unique(items.labels[parts.train], return_counts=True)[1]
        classes, smallest = len(counts), int(counts.min())
    return defaults.Facts(len(parts.train), classes, smallest, pretrained(recipe))


def fingerprint(items: Items, parts: Parts, digests: list[str]) -> str:
    """Of all that a resumed run relies on: which items, how labelled, in which part."""
    found = hashlib.sha256("\n".join([*items.names, *items.classes, *digests]).encode())
    columns = [items.labels, items.targets, items.vectors, parts.train, parts.val, parts.test, parts.gallery]
    for column in columns:
        found.update(b"-" if column is None else np.ascontiguousarray(column).tobytes())
    return found.hexdigest()
