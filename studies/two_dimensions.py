"""Softmax features separate but do not cluster; center loss tightens them; angular margins widen the gaps.

    python studies/two_dimensions.py

Embeds Fashion-MNIST in two dimensions, so that the embedding itself is the picture, with softmax, softmax and center
loss at three strengths, and the softmax losses on the circle with and without their margins. In a plane classes cannot
pass one another once they look the same way, and losses on the circle begun from nothing get stuck. So class weights
begin evenly spaced, and the losses share the first part of training and part from there, with the same batches: center
loss from plain softmax, the others from softmax with unit weights and no bias. Measured on the official test pictures.
Two figures: the features (two_dimensions), and where each loss asks a picture of class 1 to lie, in the
angles to two class weights (two_dimensions_boundaries).

    scatter      mean distance of a picture to the centre of its class, over the mean distance between centres
    width        angle that contains the middle 80 % of a class, seen from the origin; mean over classes
    gap          angle between the ends of those ranges of two neighbouring classes, below 0 where they overlap; median
                 over the ten pairs of neighbours

Ten classes round a circle are 36 degrees apart, which bounds the margins: the published 0.35 and 0.5 cannot be met.
Wen et al. 2016 (center loss), Liu et al. 2017 (SphereFace), Wang et al. 2018 (CosFace), Deng et al. 2019 (ArcFace).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import ground
import numpy as np
import showing
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from nearkin import losses
from nearkin.core.angles import psi

FULL, QUICK = (3, 800, 200, 25), (1, 3, 3, 4)  # seeds, steps together, steps apart, pictures of a class in a batch
CLASSES, SCALE = 10, 20.0
COS, ARC, SPHERE = 0.1, 0.25, 4  # margins: of the cosine, of the angle in radians, multiple of the angle
PULLS = 0.01, 0.1, 1.0
GARMENTS = "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"
MAKE: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: losses.CenterLoss(CLASSES, 2, center_weight=0.0),
    **{f"center λ = {p:g}": lambda p=p: losses.CenterLoss(CLASSES, 2, center_weight=p) for p in PULLS},
    "unit weights": lambda: losses.SphereFaceLoss(CLASSES, 2, margin=1),
    "SphereFace": lambda: losses.SphereFaceLoss(CLASSES, 2, margin=SPHERE, start=5.0),  # λ = 5, its floor, at once
    "normalised": lambda: losses.NormalizedSoftmaxLoss(CLASSES, 2, scale=SCALE),
    "CosFace": lambda: losses.CosFaceLoss(CLASSES, 2, margin=COS, scale=SCALE),
    "ArcFace": lambda: losses.ArcFaceLoss(CLASSES, 2, margin=ARC, scale=SCALE),
}
TITLES = {
    "unit weights": "unit weights, no bias (m = 1)",
    "SphereFace": f"SphereFace, m = {SPHERE}",
    "normalised": f"normalised softmax, s = {SCALE:g}",
    "CosFace": f"CosFace, m = {COS:g}",
    "ArcFace": f"ArcFace, m = {ARC:g}",
}
BRANCHES = {
    "softmax": [name for name in MAKE if name == "softmax" or "center" in name],
    "unit weights": ["unit weights", "SphereFace", "normalised", "CosFace", "ArcFace"],
}
PLANES = tuple(name for name in MAKE if name not in TITLES)  # drawn as they lie; the others as directions


def angles(x: Tensor) -> Tensor:
    return torch.atan2(x[:, 1], x[:, 0])


def wrapped(angle: Tensor) -> Tensor:
    """The same angle in [-π, π)."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def ranges(x: Tensor, labels: Tensor) -> Tensor:
    """(classes, 3): the mean direction of each class, and the 10 % and 90 % points of its angles around that."""
    rows, unit = [], nn.functional.normalize(x, dim=1)
    for kind in range(CLASSES):
        members = unit[labels == kind]
        middle = angles(members.mean(0, keepdim=True))
        around = wrapped(angles(members) - middle)
        rows.append(torch.cat([middle, around.quantile(around.new_tensor([0.1, 0.9]))]))
    return torch.stack(rows)


def measured(x: Tensor, labels: Tensor, loss: nn.Module) -> dict[str, float]:
    weight = loss.weight.detach()
    bias = loss.bias.detach() if isinstance(loss, losses.CenterLoss) else 0.0
    unit = nn.functional.normalize(weight, dim=1)
    logits = x @ (weight if isinstance(loss, losses.CenterLoss) else unit).T + bias
    centres = torch.stack([x[labels == kind].mean(0) for kind in range(CLASSES)])
    within = torch.stack([(x[labels == k] - centres[k]).norm(dim=1).mean() for k in range(CLASSES)])
    apart = torch.pdist(centres).mean()
    middle, low, high = ranges(x, labels).T
    order = middle.argsort()
    step = (middle[order].roll(-1) - middle[order]) % (2 * math.pi)
    gap = step + low[order].roll(-1) - high[order]
    cosine = (nn.functional.normalize(x, dim=1) * unit[labels]).sum(1)
    return {
        "accuracy": float((logits.argmax(1) == labels).float().mean()),
        "scatter": float(within.mean() / apart),
        "width": math.degrees(float((high - low).mean())),
        "gap": math.degrees(float(gap.median())),
        "neighbours apart": int((gap > 0).sum()),
        "angle to own weight": math.degrees(float(cosine.clamp(-1, 1).acos().mean())),
    }


def draw_plane(axes: Axes, x: Tensor, labels: Tensor, title: str) -> None:
    points, kinds = x.cpu().numpy()[::2], labels.tolist()[::2]  # enough to show a cloud
    axes.scatter(*points.T, s=1.2, c=[showing.INK[k] for k in kinds], alpha=0.35, linewidths=0, rasterized=True)
    low, high = np.quantile(np.append(points, [[0, 0]], 0), (0.001, 0.999), axis=0)
    axes.plot(0, 0, "+", color=showing.TEXT, markersize=8)
    frame(axes, float((high - low).max()) / 2 * 1.1, title, (low + high) / 2)


def draw_circle(axes: Axes, x: Tensor, labels: Tensor, title: str) -> None:
    """The density of each class by direction, outside the unit circle; class weights as spokes would hide it."""
    turn = np.linspace(-math.pi, math.pi, 721)
    axes.plot(np.cos(turn), np.sin(turn), color=showing.SOFT, linewidth=0.8)
    middle = (turn[1:] + turn[:-1]) / 2
    for kind in range(CLASSES):
        count = np.histogram(angles(x[labels == kind]).cpu().numpy(), turn)[0]
        kernel = np.exp(-0.5 * (np.arange(-15, 16) / 3.0) ** 2)
        dense = np.convolve(np.concatenate([count[-15:], count, count[:15]]), kernel / kernel.sum(), "valid")
        radius = 1 + 1.4 * np.sqrt(dense / max(count.sum(), 1) / 0.12)
        shown = np.where(dense / max(count.sum(), 1) > 2e-4, radius, np.nan)
        ring, outer = (np.append(values, values[0]) for values in (middle, radius))  # closed, or it shows a seam
        edges = [np.append(outer * f(ring), f(ring[::-1])) for f in (np.cos, np.sin)]
        axes.fill(*edges, color=showing.INK[kind], alpha=0.3, linewidth=0)
        axes.plot(shown * np.cos(middle), shown * np.sin(middle), color=showing.INK[kind], linewidth=1)
    frame(axes, 2.35, title)


def frame(axes: Axes, reach: float, title: str, middle: Sequence[float] = (0.0, 0.0)) -> None:
    wide, high = ((centre - reach, centre + reach) for centre in middle)
    axes.set(xlim=wide, ylim=high, xticks=[], yticks=[], aspect="equal")
    axes.set_title(title, loc="left", fontsize=10, color=showing.TEXT)
    axes.spines[:].set_color(showing.RULE)


def draw_features(features: dict[str, tuple[Tensor, Tensor]], numbers: dict[str, Any]) -> Any:
    figure, panels = showing.figure(
        "Ten kinds of clothes in two dimensions, pictures not seen in training", (3, 3), (8.4, 9.8)
    )
    for axes, name in zip(panels.flat, (*PLANES, *TITLES), strict=True):
        mean = {key: value["mean"] for key, value in numbers[name].items()}
        summary = (
            f"scatter {mean['scatter']:.2f}"
            if name in PLANES
            else f"width {mean['width']:.0f}°, gap {mean['gap']:+.0f}°"
        )
        title = f"{TITLES.get(name, name)}\n{summary}, {mean['accuracy']:.0%} right"
        (draw_plane if name in PLANES else draw_circle)(axes, *features[name], title)
    dots = [
        panels[0, 0].plot([], [], "o", color=colour, label=name)[0]
        for name, colour in zip(GARMENTS, showing.INK, strict=True)
    ]
    figure.legend(handles=dots, loc="outside lower center", ncols=5, frameon=False, labelcolor=showing.TEXT)
    return figure


def bound(name: str, theta: Tensor, loss: nn.Module, pair: Sequence[int]) -> Tensor:
    """The smallest θ2, radians, at which a picture at θ1 = `theta` is class 1 by the criterion of the loss."""
    cos = theta.cos()
    if name == "CosFace":
        cos = cos - COS
    elif name == "ArcFace":
        cos = (theta + ARC).clamp(max=math.pi).cos()
    elif name == "SphereFace":
        relaxed = float(loss.annealing)
        cos = (relaxed * cos + psi(cos, SPHERE)) / (1 + relaxed)
    else:  # lengths of the two weights; the bias moves it too, by an amount that depends on the length of x
        long, other = (float(loss.weight[k].detach().norm()) for k in pair)
        cos = cos * long / other
    return torch.where(cos >= -1, cos.clamp(-1, 1).acos(), torch.nan)


def draw_boundaries(features: dict[str, tuple[Tensor, Tensor]], trained: dict[str, nn.Module]) -> Any:
    names = "softmax", "SphereFace", "CosFace", "ArcFace"
    title = "Where a loss wants class 1: the boundary it trains with, and the test pictures of two neighbouring classes"
    figure, panels = showing.figure(title, (1, 4), (14, 4.4))
    theta_1 = torch.linspace(0, math.pi, 361)
    for axes, name in zip(panels, names, strict=True):
        (x, labels), loss = features[name], trained[name]
        middle = ranges(x, labels)[:, 0]
        order = middle.argsort().tolist()
        steps = [
            float((middle[b] - middle[a]) % (2 * math.pi)) for a, b in zip(order, order[1:] + order[:1], strict=True)
        ]
        first = int(np.argsort(steps)[len(steps) // 2])  # the pair of neighbours at the median distance
        pair = order[first], (order[1:] + order[:1])[first]
        unit = nn.functional.normalize(loss.weight.detach(), dim=1)
        for place, (kind, colour) in enumerate(zip(pair, showing.INK, strict=False)):
            some = nn.functional.normalize(x[labels == kind], dim=1)[:400]
            theta = (some @ unit[list(pair)].T).clamp(-1, 1).acos().rad2deg().cpu()
            axes.scatter(*theta.T, s=4, color=colour, alpha=0.5, linewidths=0, label=f"{place + 1}: {GARMENTS[kind]}")
        least = bound(name, theta_1, loss, pair).rad2deg()
        least_2 = bound(name, theta_1, loss, pair[::-1]).rad2deg()
        axes.plot(theta_1.rad2deg(), torch.where(least > 0, least, torch.nan), color=showing.INK[0], linewidth=1.8)
        axes.fill_between(theta_1.rad2deg(), least, 180, color=showing.INK[0], alpha=0.10, linewidth=0)
        axes.plot(torch.where(least_2 > 0, least_2, torch.nan), theta_1.rad2deg(), color=showing.INK[1], linewidth=1.8)
        axes.fill_betweenx(theta_1.rad2deg(), least_2, 180, color=showing.INK[1], alpha=0.10, linewidth=0)
        axes.plot([0, 180], [0, 180], ":", color=showing.SOFT, linewidth=1)
        showing.panel(
            axes,
            TITLES.get(name, name),
            "θ1, degrees to weight 1",
            "θ2, degrees to weight 2" if axes is panels[0] else "",
        )
        axes.set(xlim=(0, 90), ylim=(0, 90), xticks=[0, 30, 60, 90], yticks=[0, 30, 60, 90], aspect="equal")
        showing.legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, markerscale=2.5)
    return figure


def judge(n: dict[str, Any], each: dict[str, dict[str, list[float]]]) -> dict[str, bool]:
    """Means over seeds; the gaps must be wider with every seed."""

    def mean(name: str, what: str) -> float:
        return float(n[name][what]["mean"])

    def wider(name: str, than: str) -> bool:
        return all(a > b for a, b in zip(each[name]["gap"], each[than]["gap"], strict=True))

    tight = min(mean(f"center λ = {p:g}", "scatter") for p in PULLS)
    best = max(mean(name, "accuracy") for name in MAKE)
    chain = ["softmax", *(f"center λ = {p:g}" for p in PULLS)]
    return {
        "softmax separates: its accuracy is within 3 points of the best of all": mean("softmax", "accuracy")
        > best - 0.03,
        "softmax does not cluster: scatter at least 1.5 times that of the tightest center loss": mean(
            "softmax", "scatter"
        )
        > 1.5 * tight,
        "center loss tightens: scatter falls with every larger λ": all(
            mean(a, "scatter") > mean(b, "scatter") for a, b in pairwise(chain)
        ),
        "SphereFace: wider gaps than without its margin (m = 1), every seed": wider("SphereFace", "unit weights"),
        "CosFace: wider gaps than normalised softmax, every seed": wider("CosFace", "normalised"),
        "ArcFace: wider gaps than normalised softmax, every seed": wider("ArcFace", "normalised"),
    }


def spaced(loss: nn.Module, seed: int) -> nn.Module:
    """The loss with class weights evenly round the circle, in a random order fixed by the seed."""
    turn = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(seed)) * (2 * math.pi / CLASSES)
    with torch.no_grad():
        loss.weight.copy_(torch.stack([turn.cos(), turn.sin()], 1))
    return loss


def trained(options: ground.Options, seen: ground.Part, seed: int) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Every loss with its model: the losses of a branch continue from one shared training."""
    _, together, apart, each = QUICK if options.quick else FULL
    batches = ground.balanced(seen, CLASSES, each, together + apart, seed)
    for trunk, names in BRANCHES.items():
        first, start = ground.encoder(options, seen.size, dim=2, seed=seed), spaced(MAKE[trunk](), seed)
        start.lr_scale = 10.0  # class weights learn faster than the encoder can turn every picture of a class
        ground.train(first, start, seen, batches[:together], lr=3e-3)
        for name in names:
            model, loss = deepcopy(first), MAKE[name]()
            loss.load_state_dict(
                {key: value for key, value in start.state_dict().items() if key != "steps"}, strict=False
            )
            loss.lr_scale = 10.0
            ground.train(model, loss, seen, batches[together:], lr=1e-3)
            yield name, model, loss


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    seen, unseen = ground.fashion(options)
    seeds, together, apart, each_class = QUICK if options.quick else FULL
    each: dict[str, dict[str, list[float]]] = {name: {} for name in MAKE}
    shown, losses_shown = {}, {}
    for seed in range(seeds):
        for name, model, loss in trained(options, seen, seed):
            x = ground.embed(model, unseen)
            for key, value in measured(x, unseen.labels, loss).items():
                each[name].setdefault(key, []).append(value)
            if seed == 0:
                shown[name], losses_shown[name] = (x.cpu(), unseen.labels.cpu()), loss.cpu()
    numbers: dict[str, Any] = {name: {k: showing.spread(v) for k, v in rows.items()} for name, rows in each.items()}
    parts = judge(numbers, each)
    numbers["settings"] = {"steps together": together, "steps apart": apart, "seeds": seeds}
    numbers["settings"] |= {"batch": CLASSES * each_class, "scale": SCALE, "sphere_lambda": 5.0}
    showing.save(options, "two_dimensions", draw_features(shown, numbers), numbers, parts)
    showing.picture(options, "two_dimensions_boundaries", draw_boundaries(shown, losses_shown))


if __name__ == "__main__":
    main()
