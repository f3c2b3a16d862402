"""What the studies of docs/claims.md share: arguments, data, a plain training loop, scores.

A study is a script with `main(argv)`. It reads its options here, trains with nearkin's samplers, losses and models in
the loop below, and ends with `showing.save`.

    options = ground.options(__doc__)
    seen, unseen = ground.halves(ground.omniglot(options))
    model = ground.encoder(options, seen.size, dim=64, seed=0)
    ground.train(model, losses.TripletLoss(), seen, ground.balanced(seen, 32, 4, steps=500), lr=1e-3)
    ground.scores(model, unseen)["map@r"]
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nearkin import data, evaluation, models, samplers
from nearkin.core import checks
from nearkin.data import augment
from nearkin.data.decode import square

ROOT = Path(__file__).resolve().parent.parent


class Options(NamedTuple):
    """How to run a study. figures and numbers: the folders of the picture and of the JSON."""

    data: Path
    device: torch.device
    quick: bool
    figures: Path
    numbers: Path
    began: float


class Part(NamedTuple):
    """Pictures (N, 1, size, size) in [0, 1] and their classes (N,), both on the device."""

    images: Tensor
    labels: Tensor

    @property
    def size(self) -> int:
        return int(self.images.shape[-1])

    @property
    def classes(self) -> int:
        return len(self.labels.unique())

    def where(self, chosen: Tensor) -> "Part":
        """The items of a mask or of indices, classes numbered anew from 0."""
        return Part(self.images[chosen], self.labels[chosen].unique(return_inverse=True)[1])


def options(description: str | None, argv: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(os.environ.get("NEARKIN_DATA") or ROOT.parent / "shared" / "data")
    parser.add_argument(
        "--data", type=Path, default=home, help="folder of the sets, default NEARKIN_DATA or %(default)s"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--quick", action="store_true", help="seconds on a CPU; its numbers mean nothing")
    parser.add_argument(
        "--out", type=Path, help="folder of picture and JSON, default docs/pictures and studies/results"
    )
    arguments = parser.parse_args(argv)
    # A quick run must not replace the figures of the documentation.
    out = arguments.out or (Path(tempfile.gettempdir()) / "nearkin-studies" if arguments.quick else None)
    try:
        device = checks.device(arguments.device, "--device")
    except ValueError as error:
        parser.error(str(error))
    torch.backends.cudnn.deterministic = True
    if arguments.quick or device.type == "cuda":
        torch.set_num_threads(1)  # small work here, and several studies may share the machine
    pictures, numbers = (out, out) if out else (ROOT / "docs" / "pictures", ROOT / "studies" / "results")
    return Options(arguments.data.resolve(), device, arguments.quick, pictures, numbers, time.perf_counter())


def fashion(options: Options) -> tuple[Part, Part]:
    """Fashion-MNIST: the official training and test pictures, 28 px; a tenth and less of them in a quick run."""
    pixels, labels, test = _fashion(options.data)
    each = (40, 10) if options.quick else (6000, 1000)
    parts = [_part(pixels[m], labels[m], n, options) for m, n in zip((~test, test), each, strict=True)]
    return parts[0], parts[1]


def omniglot(options: Options, size: int = 28) -> Part:
    """Omniglot's two small background sets: 242 characters of 8 alphabets, 20 drawings each; ink is 1."""
    pixels, labels = _omniglot(options.data, size, 24 if options.quick else 242)
    return _part(255 - pixels, labels, 20, options)


def coil(options: Options) -> Part:
    """COIL-20: object 72·o + k is object o turned by 5·k degrees, 32 px."""
    items = data.load("coil20", root=options.data / "coil20")
    assert items.labels is not None and items.pictures is not None
    pixels = np.stack([np.asarray(items.pictures.read(i)) for i in range(len(items.names))])
    return _part(pixels, items.labels, 72, options)


def halves(part: Part) -> tuple[Part, Part]:
    """The first half of the classes, to learn from, and the other half, never seen in training."""
    first = part.labels < (int(part.labels.max()) + 1) // 2
    return part.where(first), part.where(~first)


def some(part: Part, each: int, skip: int = 0) -> Part:
    """At most `each` items of each class, in order, after skipping `skip`."""
    place = torch.zeros_like(part.labels)
    for kind in part.labels.unique():
        members = part.labels == kind
        place[members] = torch.arange(int(members.sum()), device=place.device)
    return part.where((place >= skip) & (place < skip + each))


def encoder(options: Options, size: int, dim: int = 64, seed: int = 0, **settings: Any) -> models.Encoder:
    """The small CNN with raw output: each loss normalises as it was published, and the scores use cosines."""
    settings = {"normalize": False, "channels": 1, "width": 4 if options.quick else 24} | settings
    return models.build("small-cnn", dim=dim, size=size, seed=seed, **settings).to(options.device)


def balanced(part: Part, classes: int, each: int, steps: int, seed: int = 0) -> Tensor:
    """(steps, classes × each) places of the items of every batch, from nearkin's class-balanced sampler."""
    return batches(samplers.ClassBalanced(part.labels.cpu(), classes, each, seed, batches=steps), part)


def batches(sampler: Iterable[list[int]], part: Part) -> Tensor:
    """All batches of one epoch of a sampler, on the device of the items: the loop then never waits for a copy."""
    return torch.tensor(list(sampler), device=part.labels.device)


def train(
    model: nn.Module,
    loss: nn.Module,
    part: Part,
    batches: Tensor,
    *,
    lr: float,
    decay: bool = True,
    clip: float | None = None,
    callback: Callable[[int, Tensor, Tensor], None] | None = None,
    every: int = 1,
) -> Tensor:
    """One step of AdamW per batch; the loss of every step, (steps,).

    The rate rises over the first twentieth and, with `decay`, falls to 0 on a cosine. Parameters of the loss learn with
    its `lr_scale`. callback(steps done, loss, embeddings of the batch) is called before the first step (with 0 done),
    after every `every` steps and at the end.
    """
    loss = loss.to(part.images.device)
    groups = [(list(model.parameters()), lr), (list(loss.parameters()), lr * getattr(loss, "lr_scale", 1.0))]
    param_groups = [{"params": weights, "lr": rate, "base": rate} for weights, rate in groups if weights]
    optimizer = torch.optim.AdamW(param_groups, weight_decay=1e-4, fused=part.images.is_cuda or None)
    model.train()
    steps, history = len(batches), []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * rate(step, steps, decay)
        embeddings = model(part.images[batch])
        value = loss(embeddings, part.labels[batch])
        if callback is not None and step % every == 0:
            callback(step, value.detach(), embeddings.detach())
            model.train()
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        history.append(value.detach())
    if callback is not None:
        callback(steps, history[-1], embeddings.detach())
    return torch.stack(history).float()


def rate(step: int, steps: int, decay: bool) -> float:
    """The factor on the learning rate."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / (warm + 1)
    return (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2 if decay else 1.0


@torch.no_grad()
def embed(model: nn.Module, part: Part) -> Tensor:
    training = model.training
    model.eval()
    rows = torch.cat([model(rows) for rows in part.images.split(2048)])
    model.train(training)
    return rows


def scores(model: nn.Module, part: Part, nmi: bool = False, seed: int = 0) -> dict[str, float]:
    """recall@1 and map@r of the items among themselves, by cosine; with `nmi` also that of k-means."""
    return judged(embed(model, part), part.labels, nmi, seed)


def judged(embeddings: Tensor, labels: Tensor, nmi: bool = False, seed: int = 0) -> dict[str, float]:
    """As `scores`, for embeddings. Embeddings with NaN or infinities score 0."""
    if not bool(embeddings.isfinite().all()):
        return {"recall@1": 0.0, "map@r": 0.0} | ({"nmi": 0.0} if nmi else {})
    metrics = evaluation.retrieval(embeddings, labels, ks=(1,), metrics=("recall", "map@r"))
    result = {"recall@1": float(metrics["recall@1"]), "map@r": float(metrics["map@r"])}
    return result | ({"nmi": float(evaluation.clustering(embeddings, labels, seed)["nmi"])} if nmi else {})


def _part(pixels: Any, labels: Any, each: int, options: Options) -> Part:
    """On the device; a quick run keeps the first `each` items of each class."""
    pixels, labels = np.asarray(pixels), np.asarray(labels, np.int64)
    if options.quick:
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == kind)[:each] for kind in np.unique(labels)]))
        pixels, labels = pixels[chosen], labels[chosen]
    images = torch.from_numpy(np.ascontiguousarray(pixels)).to(options.device)
    return Part(images[:, None].float() / 255, torch.from_numpy(labels).to(options.device))


@lru_cache
def _fashion(home: Path) -> tuple[Any, Any, Any]:
    items = _load("fashion-mnist", home)
    return items.pictures.pixels, items.labels, np.asarray(items.split) == "test"


@lru_cache
def _omniglot(home: Path, size: int, classes: int) -> tuple[Any, Any]:
    items = _load("omniglot", home, partial=True)
    chosen = np.flatnonzero(items.labels < classes)
    pixels = [square(items.pictures.read(i), side=size, channels=1)[..., 0] for i in chosen.tolist()]
    return np.stack(pixels), items.labels[chosen]


def _load(name: str, home: Path, partial: bool = False) -> Any:
    try:
        return data.load(name, root=home / name, partial=partial)
    except (ValueError, OSError) as error:
        sys.exit(f"{error}\nSet the folder of the data sets with --data.")


class Distorted(nn.Module):
    """An encoder whose pictures, in training only, are warped at random, differently at each step."""

    def __init__(self, model: nn.Module, augmentation: augment.Augmentation, seed: int = 0) -> None:
        super().__init__()
        self.model, self.augmentation, self.seed, self.steps = model, augmentation, seed, 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            places = torch.arange(len(images))  # on the CPU: no wait for the device
            keys, self.steps = augment.keys(0, self.steps, places), self.steps + 1
            pixels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
            images = augment.warp(pixels, keys, size=images.shape[-1], augmentation=self.augmentation, seed=self.seed)
        result: Tensor = self.model(images)
        return result
