"""The protocol: the same items, folds, encoder, batches and number of steps for every loss.

`Setup`, from which everything is decided, contains no test items. `Setup.open_test_set` reads them; only the last stage
calls it.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.core import checks
from nearkin.data import groups
from nearkin.data.item_set import Items
from nearkin.data.splits import LEAST, Parts, class_units, units
from nearkin.training import exclusions
from nearkin.training.build import new_encoder
from nearkin.training.config.defaults import settle, settle_closed, settle_source, split_items
from nearkin.training.config.recipe import Recipe, no_effect
from nearkin.training.config.registry import LOSSES
from nearkin.training.prepare import Prepared, check_recipe, fingerprint, item_rows, load_items
from nearkin.training.validation import HeldOut

__all__ = [
    "MAX_FOLDS",
    "Folds",
    "Job",
    "Setup",
    "TestSet",
    "check_comparable",
    "comparable",
    "make_folds",
    "make_item_folds",
    "open_setup",
]

MAX_FOLDS = 64  # a training's seed is seed · 64 + fold
SAMPLER = "class-balanced"  # suits every loss that learns from classes
_FIXED_KEYS = {
    "training.epochs": "--steps or --budget sets the length",
    "training.batches": "--steps or --budget sets the length",
    "training.every": "validations are spread evenly over the steps",
    "training.patience": "the same rule stops every loss",
    "training.seed": "--seed sets the seed of the comparison",
    "training.workers": "--jobs sets the number of processes",
    "training.deterministic": "the table must be reproducible",
    "training.log_steps": "a comparison logs its validations only",
    "training.tensorboard": "a comparison writes no run folders",
    "training.log": "a comparison writes no run folders",
    "training.save_minutes": "a training is saved when it ends",
    "schedule.frozen_epochs": "a comparison counts steps, not epochs",
    "compatible.run": "it compares losses, each as it is",
    "data.val": "--folds divides the training part",
    "data.levels": "the table has MAP@R, R-precision and R@1 of the finest classes",
    "data.near": "nearkin train lists near-duplicates, whose table data.without takes",
    "levels.weights": "every loss learns the finest classes",
    "memory.size": "not every loss can use a memory",
    "memory.warmup": "not every loss can use a memory",
    "training.keep_start": "the table compares the weights that each loss has trained",
    "finetune.interpolate": "the table compares the weights that each loss has trained",
    "evaluation.ks": "the table has MAP@R, R-precision and R@1",
    "evaluation.interval": "the table always has intervals",
    "evaluation.clustering": "the table has MAP@R, R-precision and R@1",
    "evaluation.views": "the table compares single views",
}


class Job(NamedTuple):
    """One training as plain values; its result is a function of these and the setup alone.

    setting: {"loss.margin": 0.2, "optimizer.lr": 0.001}. bar: per validation the value below which it is hopeless.
    Names and values are hashed into the keys of saved studies.
    """

    stage: str  # "search", "final", "measure", "test"
    loss: str
    setting: dict[str, Any]
    seed: int
    fold: int
    folds: int  # in total
    steps: int
    bar: list[float] | None = None
    data: str = ""  # fingerprint of the test items, in the last stage


class TestSet(NamedTuple):
    """The test items, prepared as for a training."""

    prepared: Prepared
    held_out: HeldOut
    fingerprint: str


class Folds(NamedTuple):
    """Training and validation items per fold, and the recipe with a batch that each fold can fill."""

    parts: list[Parts]
    recipe: Recipe


@dataclass(frozen=True)
class Setup:
    """Everything but the loss. `items` train and validate; of the test items only the number is known (`test_size`).

    recipe: the requested one, completed for these pictures. usable: indices of items that can be used.
    """

    recipe: Recipe
    items: Items
    rows: NDArray[Any]
    usable: NDArray[np.int64]
    fingerprint: str
    split: str
    test_size: dict[str, int]  # "items", "classes"; "known": whether these are trained on
    notes: list[str]
    requested: Recipe
    _folds: dict[int, Folds] = field(default_factory=dict)

    def folds(self, count: int) -> Folds:
        """The classes in `count` folds, or the items of each; a batch that every fold can fill."""
        if count not in self._folds:
            options, labels = self.recipe.data, self.labels
            divided = make_item_folds if options.closed else make_folds
            parts = divided(self.items, self.usable, count, options.seed, options.group_scope or "set")
            smallest = min(parts, key=lambda fold: len(np.unique(labels[fold.train])))
            settled = self._settled(smallest)
            if "per_class" in settled.sampler and not {"batch", "per_class"} & self.recipe.sampler.keys():
                least = min(self._settled(fold).sampler["per_class"] for fold in parts)
                settled = self._settled(smallest, per_class=least)
            recipe = self.recipe.with_("sampler", **settled.sampler)
            if settled.finetune.train is not None:  # all folds train the same part of the encoder
                recipe = recipe.with_("finetune", train=settled.finetune.train)
            self._folds[count] = Folds(parts, recipe)
        return self._folds[count]

    @property
    def labels(self) -> NDArray[np.int64]:
        assert self.items.labels is not None
        return self.items.labels

    def most_folds(self, wanted: int) -> int:
        """The number of folds that the classes, or the items of most of them, allow: from 2 to `wanted`."""
        divided = len(np.unique(self.labels[self.usable]))
        if self.recipe.data.closed:
            scope = self.recipe.data.group_scope or "set"
            divided = int(np.median([len(one) for one in _dealt(self.items, self.usable, 0, scope)]))
        return max(2, min(wanted, divided // LEAST))

    def default_steps_and_lr(self) -> tuple[int, float]:
        """Steps and learning rate of a training on these items, by default or as the user set them."""
        recipe = self._settled(Parts(self.usable, self.usable[:0], self.usable[:0]))
        assert recipe.training.epochs and recipe.training.batches and recipe.optimizer.lr
        return recipe.training.epochs * recipe.training.batches, recipe.optimizer.lr

    def recipe_for(self, job: Job) -> Recipe:
        """The complete recipe of a training."""
        split = self.folds(job.folds)
        recipe = split.recipe.with_("loss", name=job.loss)
        for key, value in job.setting.items():
            section, _, name = key.partition(".")
            recipe = recipe.with_(section, **{name: value})
        seed = job.seed * MAX_FOLDS + job.fold
        recipe = recipe.with_("training", seed=seed, epochs=1, batches=job.steps, workers=0)
        return settle(recipe, self.items, split.parts[job.fold], split=False)

    def prepared(self, job: Job) -> Prepared:
        """What a training of this fold is assembled from; its test part is empty."""
        parts = self.folds(job.folds).parts[job.fold]
        return Prepared(self.recipe_for(job), self.items, parts, self.rows, {}, self.fingerprint, [])

    def _settled(self, parts: Parts, **sampler: Any) -> Recipe:
        recipe = self.recipe.with_("sampler", **{"name": SAMPLER, **self.recipe.sampler, **sampler})
        return settle(recipe.with_("loss", name="contrastive"), self.items, parts, split=False)

    def open_test_set(self) -> TestSet:
        """Reads the test items. Nothing is chosen after this."""
        _, items, parts, _ = _load(self.requested)
        gallery = parts.gallery
        indices = np.union1d(parts.test, np.empty(0, np.int64) if gallery is None else gallery)
        test_items = items.take(indices)
        rows, digests, bad = item_rows(test_items, self.recipe)
        readable = np.setdiff1d(np.arange(len(indices)), [i for i, _ in bad])

        def within(of: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.intersect1d(np.searchsorted(indices, of), readable)

        empty = np.empty(0, np.int64)
        inside = Parts(empty, empty, within(parts.test), None if gallery is None else within(gallery), parts.note)
        digest = fingerprint(test_items, inside, digests)
        prepared = Prepared(self.recipe, test_items, inside, rows, {}, digest, [])
        return TestSet(prepared, prepared.held_out("test"), digest)


def open_setup(recipe: Recipe, callback: Any = lambda _: None) -> Setup:
    """Reads the source without its test items."""
    check_comparable(recipe)
    check_recipe(recipe)
    callback({"event": "loading", "source": recipe.data.source})
    closed, items, parts, split_notes = _load(recipe)
    training_items = items.take(np.union1d(parts.train, parts.val))
    completed, notes = settle_source(closed, training_items)
    notes = [*split_notes, *notes]
    if training_items.pictures is not None:
        every = np.arange(len(training_items))  # errors of the encoder are raised before anything is decoded
        default = completed.with_("sampler", **{"name": SAMPLER, **completed.sampler}).with_("loss", name="contrastive")
        new_encoder(settle(default, training_items, Parts(every, every[:0], every[:0]), split=False), None)
    rows, digests, bad = item_rows(training_items, completed, callback)
    readable = np.setdiff1d(np.arange(len(training_items)), [i for i, _ in bad])
    assert items.labels is not None
    trained, tested = (np.unique(items.labels[of]) for of in (np.union1d(parts.train, parts.val), parts.test))
    test_size = {"items": len(parts.test), "classes": len(tested), "known": bool(np.isin(tested, trained).all())}
    digest = fingerprint(training_items, Parts(readable, readable[:0], readable[:0]), digests)
    if bad:
        notes = [*notes, f"{len(bad)} training items cannot be read, the first {training_items.names[bad[0][0]]}"]
    usable = _without_single_items(training_items, readable)
    return Setup(completed, training_items, rows, usable, digest, parts.note, test_size, notes, recipe)


def make_folds(items: Items, of: NDArray[np.int64], count: int, seed: int, scope: str = "set") -> list[Parts]:
    """Divides the items at the indices `of` into training and validation classes, `count` times; no test part.

    Classes are ordered by a hash of (seed, name): their order in the source does not matter, and one class more changes
    little. Every class validates in exactly one fold (Musgrave et al. 2020, section 3.2).
    """
    _check_count(count)
    assert items.labels is not None
    labels = items.labels[of]
    blocks = groups.class_blocks(items, of, scope)  # classes that share a group are in one fold
    blocks = [block for _, block in sorted((min(_hash(seed, items.classes[c]) for c in b), b) for b in blocks)]
    total = len(np.unique(labels))
    needed = max(LEAST * count, 2 * LEAST)
    if total < needed:
        most = total // LEAST
        way_out = f"use --folds {most}" if most >= 2 else "a comparison needs at least 4 training classes"
        raise ValueError(
            f"{items.name}: {count} folds need at least {needed} training classes, {LEAST} to validate each, "
            f"got {total}; {way_out}"
        )
    parts = []
    for fold in range(count):
        validating = [c for block in blocks[fold::count] for c in block]
        if not LEAST <= len(validating) <= total - LEAST:
            raise ValueError(
                f"{items.name}: its groups connect its classes, so {count} folds that keep groups whole are not to be "
                "had; data.group_scope=class keeps them whole within each class only"
            )
        validation = np.isin(labels, validating)
        note = f"fold {fold + 1} of {count}"
        parts.append(Parts(np.sort(of[~validation]), np.sort(of[validation]), np.empty(0, np.int64), note=note))
    return parts


def make_item_folds(items: Items, of: NDArray[np.int64], count: int, seed: int, scope: str = "set") -> list[Parts]:
    """As `make_folds`, of the items of every class, their groups whole; a class with too few of them only trains."""
    _check_count(count)
    dealt = _dealt(items, of, seed, scope)
    enough = [units for units in dealt if len(units) >= LEAST * count]
    if len(enough) < min(LEAST, len(dealt)):
        what = "items" if items.groups is None else "groups"
        raise ValueError(
            f"{items.name}: {count} folds of the {what} of every class need at least {LEAST} classes of "
            f"{LEAST * count} {what} or more, got {len(enough)}; use fewer --folds, "
            "or --open, whose folds divide the classes"
        )
    parts = []
    for fold in range(count):
        validation = np.sort([i for units in enough for unit in units[fold::count] for i in unit])
        train, note = np.setdiff1d(of, validation), f"fold {fold + 1} of {count}"
        parts.append(Parts(train, validation, np.empty(0, np.int64), note=note))
    return parts


def _check_count(count: int) -> None:
    checks.integer("folds", count, 2)
    if count > MAX_FOLDS:
        raise ValueError(f"folds must be at most {MAX_FOLDS}, got {count}")


def _dealt(items: Items, of: NDArray[np.int64], seed: int, scope: str) -> list[list[list[int]]]:
    """What is dealt to the folds: the items or groups of each class; all groups at once where one spans classes."""
    if scope == "set" and groups.spanning(items, of) is not None:
        return [units(items, of, seed)]
    return [ordered for _, ordered in class_units(items, of, seed)]


def _hash(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"fold {seed} {name}".encode("utf-8", "surrogatepass")).digest()


def check_comparable(recipe: Recipe) -> None:
    """Refuses keys that a comparison sets itself, and batches that would differ between losses."""
    if recipe.loss:
        key = next(iter(recipe.loss))
        raise ValueError(f"loss.{key}: a comparison searches the settings of each loss; use --losses, and leave it out")
    for key in sorted(key for key in recipe.explicit_keys if key.startswith("unlabelled.")):
        raise ValueError(
            f"{key} cannot be set in a comparison: it trains every loss from the same weights; leave it out"
        )
    for key, reason in _FIXED_KEYS.items():
        if key in recipe.explicit_keys:
            raise ValueError(f"{key} cannot be set in a comparison: {reason}; leave it out")
    if recipe.schedule.decay not in ("cosine", "constant"):
        decay = recipe.schedule.decay
        raise ValueError(f"schedule.decay must be cosine or constant in a comparison, which has no epochs, got {decay}")
    if recipe.sampler.get("name", SAMPLER) not in ("class-balanced", "class-ratio"):
        raise ValueError(
            f"sampler.name must be class-balanced or class-ratio in a comparison, which give every loss the same "
            f"batches, got {recipe.sampler['name']}"
        )


def comparable(names: str) -> list[str]:
    """The losses of "triplet,arcface" or "all", in that order; the error for an unknown name suggests the nearest."""
    known = [name for name in LOSSES if name != "logratio"]
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if chosen == ["all"]:
        return known
    for name in chosen:
        if name == "logratio":
            raise ValueError("loss logratio learns from continuous targets, a comparison from classes; leave it out")
        checks.one_of("loss", name, [*known, "all"])
    chosen = list(dict.fromkeys(chosen))
    if len(chosen) < 2:
        raise ValueError(f'losses must be at least 2 names separated by commas, or all, got "{names}"')
    return chosen


def _load(recipe: Recipe) -> tuple[Recipe, Items, Parts, list[str]]:
    """The recipe with its kind of split, the items and their parts, and notes on the split."""
    options = recipe.data
    root = None if options.root is None else Path(options.root)
    items = load_items(recipe, root)
    if items.labels is None:
        raise ValueError(f"{items.name}: a comparison needs classes, the source has continuous targets only")
    if options.group_scope is not None and items.groups is None:
        no_effect("data.group_scope", f"{items.name} has no groups")
    recipe, notes = settle_closed(recipe, items)
    return recipe, items, exclusions.listed(recipe, items, split_items(items, recipe, [])), notes


def _without_single_items(items: Items, of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Without classes that have a single readable item."""
    assert items.labels is not None
    sizes = np.bincount(items.labels[of], minlength=len(items.classes))
    return of[sizes[items.labels[of]] > 1]
