"""The bench on which all losses are tried: the same items, folds, encoder, batches and number of steps for each.

What decides anything (`Bench`) is made of the items that are not tested and holds no others. The test items are opened
by `Bench.opened`, which only the last stage calls.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin import data
from nearkin.compare.folds import MOST, folds
from nearkin.core import checks
from nearkin.data.items import Items
from nearkin.data.splits import Parts
from nearkin.training.build import new_encoder
from nearkin.training.config.defaults import settle, settle_source, split_items
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import LOSSES
from nearkin.training.prepare import Prepared, check_recipe, fingerprint, item_rows
from nearkin.training.validation import HeldOut

__all__ = ["Bench", "Job", "Opened", "Shared", "comparable", "open_bench", "refuse"]

SAMPLER = "class-balanced"  # serves every loss that learns from classes
_NOT_HERE = {
    "training.epochs": "--steps or --budget says how long",
    "training.batches": "--steps or --budget says how long",
    "training.every": "validations are spread evenly over the steps",
    "training.patience": "every loss is stopped by the same rule",
    "training.seed": "--seed is that of the comparison",
    "training.workers": "--jobs says how much is done at a time",
    "training.deterministic": "two people must get the same table",
    "training.log_steps": "it looks at its validations only",
    "training.tensorboard": "a comparison writes no run folders",
    "training.save_minutes": "a training is kept when it is done",
    "schedule.frozen_epochs": "a comparison counts steps, not epochs",
    "data.val": "--folds says how training classes are shared out",
    "data.closed": "a comparison is made on classes never seen",
    "memory.size": "not every loss can use a memory",
    "memory.warmup": "not every loss can use a memory",
    "evaluation.ks": "the table has MAP@R, R-precision and R@1",
    "evaluation.interval": "the table always has intervals",
    "evaluation.clustering": "the table has MAP@R, R-precision and R@1",
}


class Job(NamedTuple):
    """One training, as plain values: what it gives is a function of these and of the bench alone.

    setting: {"loss.margin": 0.2, "optimizer.lr": 0.001}. bar: at each validation the value below which it is hopeless.
    """

    stage: str  # "search", "final", "measure", "test"
    loss: str
    setting: dict[str, Any]
    seed: int
    fold: int
    folds: int  # in all
    steps: int
    bar: list[float] | None = None
    data: str = ""  # fingerprint of the test items, in the last stage


class Opened(NamedTuple):
    """The test items, as a training's own preparation would have them."""

    prepared: Prepared
    held: HeldOut
    fingerprint: str


class Shared(NamedTuple):
    """One way to share out the classes, and the recipe with a batch that each of its folds can fill."""

    parts: list[Parts]
    recipe: Recipe


@dataclass(frozen=True)
class Bench:
    """Everything but the loss. `items` are those that train and validate; `tested` only says how many others there are.

    recipe: what the user asked for, pictures looked at. places: of the items that can be used.
    """

    recipe: Recipe
    items: Items
    rows: NDArray[Any]
    places: NDArray[np.int64]
    fingerprint: str
    protocol: str
    tested: dict[str, int]
    notes: list[str]
    asked: Recipe
    _shared: dict[int, Shared] = field(default_factory=dict)

    def shared(self, count: int) -> Shared:
        """The classes in so many folds; the batch is settled on the fold with the fewest training classes."""
        if count not in self._shared:
            labels, parts = self.labels, folds(self.items, self.places, count, self.recipe.data.seed)
            smallest = min(parts, key=lambda fold: len(np.unique(labels[fold.train])))
            sampler = self._settled(smallest).sampler
            self._shared[count] = Shared(parts, self.recipe.with_("sampler", **sampler))
        return self._shared[count]

    @property
    def labels(self) -> NDArray[np.int64]:
        assert self.items.labels is not None
        return self.items.labels

    def classes(self) -> int:
        """That can be shared out."""
        return len(np.unique(self.labels[self.places]))

    def usual(self) -> tuple[int, float]:
        """Steps and learning rate that a training on such items has, by default or as the user set it."""
        recipe = self._settled(Parts(self.places, self.places[:0], self.places[:0]))
        assert recipe.training.epochs and recipe.training.batches and recipe.optimizer.lr
        return recipe.training.epochs * recipe.training.batches, recipe.optimizer.lr

    def recipe_for(self, job: Job) -> Recipe:
        """The whole recipe of a training."""
        shared = self.shared(job.folds)
        recipe = shared.recipe.with_("loss", name=job.loss)
        for key, value in job.setting.items():
            section, _, name = key.partition(".")
            recipe = recipe.with_(section, **{name: value})
        seed = job.seed * MOST + job.fold
        recipe = recipe.with_("training", seed=seed, epochs=1, batches=job.steps, workers=0)
        return settle(recipe, self.items, shared.parts[job.fold], split=False)

    def prepared(self, job: Job) -> Prepared:
        """What a training of this fold is assembled from; its test part is empty."""
        parts = self.shared(job.folds).parts[job.fold]
        return Prepared(self.recipe_for(job), self.items, parts, self.rows, {}, self.fingerprint, [])

    def _settled(self, parts: Parts) -> Recipe:
        recipe = self.recipe.with_("sampler", **{"name": SAMPLER, **self.recipe.sampler})
        return settle(recipe.with_("loss", name="contrastive"), self.items, parts, split=False)

    def opened(self) -> Opened:
        """The test items. Nothing is chosen after this."""
        items, parts = _loaded(self.asked)
        gallery = parts.gallery
        places = np.union1d(parts.test, np.empty(0, np.int64) if gallery is None else gallery)
        tested = items.take(places)
        rows, digests, bad = item_rows(tested, self.recipe)
        readable = np.setdiff1d(np.arange(len(places)), [i for i, _ in bad])

        def within(of: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.intersect1d(np.searchsorted(places, of), readable)

        nothing = np.empty(0, np.int64)
        inside = Parts(nothing, nothing, within(parts.test), None if gallery is None else within(gallery), parts.note)
        mark = fingerprint(tested, inside, digests)
        prepared = Prepared(self.recipe, tested, inside, rows, {}, mark, [])
        return Opened(prepared, prepared.held_out("test"), mark)


def open_bench(recipe: Recipe, callback: Any = lambda _: None) -> Bench:
    """Reads the source and puts the test items aside."""
    refuse(recipe)
    check_recipe(recipe)
    callback({"event": "loading", "source": recipe.data.source})
    items, parts = _loaded(recipe)
    own = items.take(np.union1d(parts.train, parts.val))
    looked, notes = settle_source(recipe, own)
    if own.pictures is not None:
        every = np.arange(len(own))  # what is wrong with the encoder is said before anything is decoded
        usual = looked.with_("sampler", **{"name": SAMPLER, **looked.sampler}).with_("loss", name="contrastive")
        new_encoder(settle(usual, own, Parts(every, every[:0], every[:0]), split=False), None)
    rows, digests, bad = item_rows(own, looked, callback)
    readable = np.setdiff1d(np.arange(len(own)), [i for i, _ in bad])
    assert items.labels is not None
    tested = {"items": len(parts.test), "classes": len(np.unique(items.labels[parts.test]))}
    mark = fingerprint(own, Parts(readable, readable[:0], readable[:0]), digests)
    if bad:
        notes = [*notes, f"{len(bad)} training items cannot be read, the first {own.names[bad[0][0]]}"]
    return Bench(looked, own, rows, _in_numbers(own, readable), mark, parts.note, tested, notes, recipe)


def refuse(recipe: Recipe) -> None:
    """Keys that a comparison decides itself, and batches that would differ from loss to loss."""
    given = recipe.explicit_keys
    if recipe.loss:
        key = next(iter(recipe.loss))
        raise ValueError(f"loss.{key}: a comparison searches the settings of each loss; say --losses, and leave it out")
    for key, why in _NOT_HERE.items():
        if key in given:
            raise ValueError(f"{key} has no place in a comparison: {why}; leave it out")
    if recipe.schedule.decay not in ("cosine", "constant"):
        decay = recipe.schedule.decay
        raise ValueError(f"schedule.decay must be cosine or constant in a comparison, which has no epochs, got {decay}")
    if recipe.sampler.get("name", SAMPLER) not in ("class-balanced", "class-ratio"):
        raise ValueError(
            f"sampler.name must be class-balanced or class-ratio in a comparison, which give every loss the same "
            f"batches, got {recipe.sampler['name']}"
        )


def comparable(names: str) -> list[str]:
    """The losses of "triplet,arcface" or "all", in the order given; an unknown one is answered with the nearest."""
    known = [name for name in LOSSES if name != "logratio"]
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if asked == ["all"]:
        return known
    for name in asked:
        if name == "logratio":
            raise ValueError("loss logratio learns from continuous targets, a comparison from classes; leave it out")
        checks.one_of("loss", name, [*known, "all"])
    asked = list(dict.fromkeys(asked))
    if len(asked) < 2:
        raise ValueError(f'losses must be at least 2 names with commas between, or all, got "{names}"')
    return asked


def _loaded(recipe: Recipe) -> tuple[Items, Parts]:
    options = recipe.data
    root = None if options.root is None else Path(options.root)
    items = data.load(options.source, root=root, partial=options.partial)
    if items.labels is None:
        raise ValueError(f"{items.name}: a comparison needs classes, the source has continuous targets only")
    return items, split_items(items, recipe, [])


def _in_numbers(items: Items, of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Without classes of which, after unreadable files, a single item is left."""
    assert items.labels is not None
    sizes = np.bincount(items.labels[of], minlength=len(items.classes))
    return of[sizes[items.labels[of]] > 1]
