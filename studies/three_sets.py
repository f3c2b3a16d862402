"""Three sets for studies of sampling, each divided by class: reduced CUB as frozen features, glyphs, Omniglot.

CUB's pictures pass once through the frozen pretrained EfficientNet-Lite0 at 128 px; what is trained is a head, an MLP
with a hidden layer of 256. The other two train a narrow small CNN (width 8) from random weights: glyphs are 480
characters, half of them to learn from, Omniglot 242. 150 steps, with the rates that `nearkin train` has by default.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ground
import numpy as np
import showing
import torch
from torch import Tensor, nn

from nearkin import data, evaluation, models, samplers
from nearkin.core import files, paths
from nearkin.data.decode import square

DIM, SIDE, STEPS = 128, 128, 150


class Set(NamedTuple):
    """Classes to learn from, and others never seen in training."""

    name: str
    train: ground.Part
    test: ground.Part
    steps: int
    rate: float  # the default of `nearkin train` for such an encoder
    new_encoder: Callable[[int], nn.Module]  # by seed


def load(options: ground.Options, names: Sequence[str] = ("omniglot", "glyphs", "cub")) -> Iterator[Set]:
    makers = {"cub": _cub, "glyphs": _glyphs, "omniglot": _omniglot}
    return (makers[name](options) for name in names)


class Kept:
    """Results of runs by name, each written to NAME.jsonl at once: a stopped study goes on from these."""

    def __init__(self, options: ground.Options, name: str) -> None:
        self.file = options.numbers / f"{name}.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.known = {key: (value, seconds) for key, value, seconds in map(json.loads, lines)}
        self.before = sum(seconds for _, seconds in self.known.values())

    def __call__(self, key: str, measure: Callable[[], Any]) -> Any:
        if key not in self.known:
            began = time.perf_counter()
            self.known[key] = measure(), round(time.perf_counter() - began, 1)
            print(key, self.known[key], flush=True)
            with self.file.open("a") as log:
                log.write(json.dumps([key, *self.known[key]], ensure_ascii=False) + "\n")
        return self.known[key][0]

    def done(self, options: ground.Options) -> ground.Options:
        """The options with the seconds of earlier starts counted; the file is removed."""
        self.file.unlink()
        return options._replace(began=options.began - self.before)


def run(chosen: Set, loss: nn.Module, sampler: Callable[[Tensor, int], Any], seed: int) -> float:
    """MAP@R on the test classes after a training on the others."""
    torch.manual_seed(seed)  # random selections draw from torch's generator
    model = chosen.new_encoder(seed)
    batches: Any = Refreshed(sampler(chosen.train.labels, seed), model, chosen.train, chosen.steps)
    ground.train(model, loss, chosen.train, batches, lr=chosen.rate)
    return ground.scores(model, chosen.test)["map@r"]


class Refreshed:
    """The batches of a training: an epoch of the sampler after the other, refreshed in between where it mines."""

    def __init__(self, sampler: samplers.EpochSampler, model: nn.Module, part: ground.Part, steps: int) -> None:
        self.sampler, self.model, self.part, self.steps = sampler, model, part, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        for step in range(self.steps):
            epoch, index = divmod(step, len(self.sampler))
            if index == 0 and epoch and hasattr(self.sampler, "refresh"):
                self._refresh()
            yield torch.tensor(self.sampler.batch(epoch, index), device=self.part.labels.device)

    def _refresh(self) -> None:
        rows = ground.embed(self.model, self.part)
        if not isinstance(self.sampler, samplers.HardNegatives):
            self.sampler.refresh(rows)  # type: ignore[attr-defined]
            return
        lists = evaluation.nearest_negatives(rows, self.part.labels, k=self.sampler.neighbours).indices
        self.sampler.refresh(rows, lists)


def draw(title: str, scores: dict[str, dict[str, dict[str, list[float]]]], words: dict[str, str]) -> Any:
    """One panel per set; groups of bars per loss, one bar per choice: MAP@R, mean and range of seeds."""
    figure, panels = showing.figure(title, (1, len(scores)), (4.7 * len(scores), 4.6))
    bars: list[Any] = []
    for axes, (name, of_loss) in zip(np.atleast_1d(panels), scores.items(), strict=True):
        showing.panel(axes, name, "", "MAP@R on unseen classes")
        bars = []
        for place, (choice, text) in enumerate(words.items()):
            values = [of_loss[loss][choice] for loss in of_loss]
            means = np.array([np.mean(v) for v in values])
            ends = np.array([[m - min(v), max(v) - m] for m, v in zip(means, values, strict=True)]).T
            xs = np.arange(len(of_loss)) + (place - (len(words) - 1) / 2) * 0.8 / len(words)
            bars.append(axes.bar(xs, means, 0.75 / len(words), yerr=ends, color=showing.INK[place], label=text))
        axes.set(xticks=range(len(of_loss)), xticklabels=list(of_loss))
    figure.legend(handles=bars, loc="outside lower center", ncols=len(words), frameon=False, labelcolor=showing.TEXT)
    return figure


def _cub(options: ground.Options) -> Set:
    features, labels = _features(options)
    part = ground.Part(features.to(options.device), labels.to(options.device))

    def head(seed: int) -> nn.Module:
        settings = {"hidden": [16 if options.quick else 256], "dim": DIM, "normalize": False}
        return models.build("mlp", features=features.shape[1], seed=seed, **settings).to(options.device)  # type: ignore[arg-type]

    return Set("reduced CUB, frozen features", *ground.halves(part), 4 if options.quick else STEPS, 1e-3, head)


def _glyphs(options: ground.Options) -> Set:
    items = data.load("glyphs")
    pictures: Any = items.pictures
    assert items.labels is not None
    classes = 24 if options.quick else 480
    chosen = items.labels < classes
    part = ground._part(pictures.pixels[chosen], items.labels[chosen], 8, options)
    new = lambda seed: ground.encoder(options, part.size, DIM, seed, width=4 if options.quick else 8)  # noqa: E731
    return Set("glyphs", *ground.halves(part), 4 if options.quick else STEPS, 5e-3, new)


def _omniglot(options: ground.Options) -> Set:
    part = ground.omniglot(options)
    new = lambda seed: ground.encoder(options, part.size, DIM, seed, width=4 if options.quick else 8)  # noqa: E731
    return Set("Omniglot", *ground.halves(part), 4 if options.quick else STEPS, 5e-3, new)


@torch.no_grad()
def _features(options: ground.Options) -> tuple[Tensor, Tensor]:
    """Frozen pooled features (N, F) of reduced CUB, kept in the cache, and class ids. Quick: few, untrained."""
    try:
        items = data.load("cub200", root=options.data / "CUB_200_2011", partial=True)
    except (ValueError, OSError) as error:
        sys.exit(f"{error}\nSet the folder of the data sets with --data.")
    pictures: Any = items.pictures
    assert items.labels is not None
    chosen = np.arange(len(items.labels))
    if options.quick:
        chosen = np.concatenate([np.flatnonzero(items.labels == label)[:8] for label in range(24)])
    labels = torch.from_numpy(items.labels[chosen].astype(np.int64))
    stored = paths.cache_dir() / "studies" / f"cub-lite0-{SIDE}.npy"
    if not options.quick and stored.exists():
        return torch.from_numpy(np.load(stored)), labels
    encoder = models.build(
        "efficientnet-lite0", size=32 if options.quick else SIDE, pretrained=not options.quick
    ).eval()
    rows = []
    for start in range(0, len(chosen), 64):
        side = 32 if options.quick else SIDE
        pixels = [square(pictures.read(int(i)), side=side, channels=3) for i in chosen[start : start + 64]]
        rows.append(encoder.features(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255))
    features = torch.cat(rows)
    if not options.quick:
        stored.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(stored) as file:
            np.save(file, features.numpy())
    return features, labels
