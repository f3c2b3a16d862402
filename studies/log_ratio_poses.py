"""Log-ratio loss with labels that are vectors: figures in similar poses, found by their pictures.

    python studies/log_ratio_poses.py

The label of a figure is the position of its ten joints, twenty numbers, relative to its hips in lengths of its back;
the label distance of two figures is Euclidean. Figures walk, lift their arms and lean; the picture, 32 px, also varies
at random in ways that are not in the label: place, size, build, thickness, shades, light, noise, two stray lines.
Learns 2,000 figures and is tested on 500 others, each with its nearest among these. Batches of 60, arms as in
log_ratio.py:

    untrained            the network before training
    log-ratio            one anchor per batch, as published; half groups, groups or random batches, every item an anchor
    binarised triplet    the 30 nearest by label are positives, the others negatives; semi-hard, margin 0.2

Kim et al. 2019, arXiv:1904.09626, learn human poses in this way, from photographs.
"""

import math
from collections.abc import Sequence
from typing import Any

import ground
import log_ratio
import showing
import torch
from torch import Tensor

FULL, QUICK, SHOWN = (2000, 300, 500), (60, 20, 20), 3  # figures to learn, validate, test; queries in the picture
ARMS = {
    name: log_ratio.ARMS[f"log-ratio, {name}"] for name in ("one anchor", "half groups", "groups", "random batches")
}
ARMS = {f"log-ratio, {name}": arm for name, arm in ARMS.items()}
ARMS["binarised triplet"] = log_ratio.ARMS["binarised triplet, random batches"]
BEST, OTHER = "log-ratio, half groups", "binarised triplet"
# Joints of a figure whose hips are at 0 and whose back is 1 long; y points up.
# Head, neck, then elbow and hand, left and right, then knee and foot, left and right.
BONES = ((-1, 1), (1, 0), (1, 2), (2, 3), (1, 4), (4, 5), (-1, 6), (6, 7), (-1, 8), (8, 9))  # -1: the hips


def poses(number: int, generator: torch.Generator) -> Tensor:
    """Joints (N, 10, 2) of random figures: phase and stride of a walk, two lifted arms, a lean, a little jitter."""
    phase, stride, left, right, lean = (torch.rand(number, generator=generator) for _ in range(5))
    jitter = 0.1 * torch.randn(number, 10, generator=generator)
    swing = (2 * math.pi * phase).sin() * (0.2 + 0.6 * stride)
    back = 0.9 * (lean - 0.5) + jitter[:, 0]
    angles = {  # of each bone, from straight down, counter-clockwise
        "arm left": -0.3 - 2.4 * left + 0.4 * swing + jitter[:, 1],
        "arm right": 0.3 + 2.4 * right - 0.4 * swing + jitter[:, 2],
        "leg left": -0.15 - swing + jitter[:, 3],
        "leg right": 0.15 + swing + jitter[:, 4],
    }
    bend = {
        "arm left": -0.9 * left + jitter[:, 5],
        "arm right": 0.9 * right + jitter[:, 6],
        "leg left": 0.7 * (2 * math.pi * phase).cos().clamp(min=0) + jitter[:, 7],
        "leg right": -0.7 * (-(2 * math.pi * phase).cos()).clamp(min=0) + jitter[:, 8],
    }

    def away(angle: Tensor, length: float) -> Tensor:
        return length * torch.stack([angle.sin(), -angle.cos()], 1)

    neck = away(math.pi + back, 1.0)
    joints = [neck + away(math.pi + back + jitter[:, 9], 0.45), neck]
    for limb in angles:
        start, lengths = (neck, (0.55, 0.5)) if limb.startswith("arm") else (torch.zeros_like(neck), (0.7, 0.7))
        turn = angles[limb] + back if limb.startswith("arm") else angles[limb]
        middle = start + away(turn, lengths[0])
        joints += [middle, middle + away(turn + bend[limb], lengths[1])]
    return torch.stack(joints, 1)


def drawn(joints: Tensor, generator: torch.Generator, side: int = 32) -> Tensor:
    """Pictures (N, 1, side, side): place, size, build, thickness, shades, light and two stray lines are random."""
    number = len(joints)

    def chance(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(number, *shape, generator=generator)

    points = torch.cat([joints, torch.zeros(number, 1, 2)], 1) * chance(0.85, 1.15, 1, 2)  # tall or broad
    points = points * chance(5.0, 7.5, 1, 1) * torch.tensor([1.0, -1.0]) + side / 2 + chance(-3, 3, 1, 2)
    ends = torch.stack([torch.stack([points[:, a], points[:, b]], 1) for a, b in BONES], 1)  # (N, bones, 2, 2)
    stray = chance(0, side, 2, 2, 2)
    ends = torch.cat([ends, stray], 1)
    thick = torch.cat([chance(0.8, 1.6, 1).expand(-1, len(BONES)), chance(0.3, 0.8, 2)], 1)
    shade = torch.tensor([0.9, 0.9, 0.6, 0.6, 1.0, 1.0, 0.6, 0.6, 1.0, 1.0]).expand(number, -1) * chance(0.7, 1.0, 1)
    shade = torch.cat([shade, chance(0.3, 0.8, 2)], 1)
    grid = torch.stack(torch.meshgrid(*[torch.arange(side) + 0.5] * 2, indexing="xy"), -1).view(1, -1, 2)
    light = chance(-0.5, 0.5, 2) / side
    image = ((grid - side / 2) * light[:, None]).sum(-1) + chance(0.0, 0.25, 1)
    for bone in range(ends.shape[1]):
        start, step = ends[:, bone, None, 0], (ends[:, bone, 1] - ends[:, bone, 0])[:, None]
        along = ((grid - start) * step).sum(-1) / step.square().sum(-1).clamp(min=1e-6)
        apart = (grid - start - along.clamp(0, 1)[..., None] * step).norm(dim=-1)
        ink = (thick[:, bone, None] + 0.5 - apart).clamp(0, 1)
        image = image * (1 - ink) + ink * shade[:, bone, None]
    head = (grid - points[:, None, 0]).norm(dim=-1)
    ink = (2.3 - head).clamp(0, 1)
    image = image * (1 - ink) + ink * shade[:, :1]
    image = image + 0.05 * torch.randn(image.shape, generator=generator)
    return image.clamp(0, 1).view(number, 1, side, side)


def figures(options: ground.Options) -> log_ratio.Set:
    sizes = QUICK if options.quick else FULL
    generator = torch.Generator().manual_seed(0)
    joints = poses(sum(sizes), generator)
    pictures = drawn(joints, generator).to(options.device)
    every = torch.arange(sum(sizes), device=options.device)
    parts = [ground.Part(pictures[some], some) for some in every.split(sizes)]
    width = 4 if options.quick else log_ratio.WIDTH

    def encoder(seed: int) -> torch.nn.Module:
        return ground.encoder(options, pictures.shape[-1], log_ratio.DIM, seed, width=width)

    return log_ratio.Set(*parts, joints.flatten(1).to(options.device), encoder)


def judge(numbers: dict[str, Any]) -> dict[str, bool]:
    def ends(arm: str, key: str) -> list[float]:
        return [curve[-1] for curve in numbers[arm]["curves"][key]]

    def each(first: Sequence[float], second: Sequence[float]) -> bool:
        return all(a > b for a, b in zip(first, second, strict=True))

    begin = [curve[0] for curve in numbers[BEST]["curves"]["ndcg"]]
    parts = {
        "log-ratio, half groups, ends above the binarised triplet in nDCG@10, every seed": each(
            ends(BEST, "ndcg"), ends(OTHER, "ndcg")
        ),
        "and its ten nearest lie nearer in pose, every seed": each(ends(OTHER, "distance"), ends(BEST, "distance")),
        "one anchor a batch, as published, ends above the binarised triplet, every seed": each(
            ends("log-ratio, one anchor", "ndcg"), ends(OTHER, "ndcg")
        ),
    }
    return {f"{name} ends above the untrained network": each(ends(name, "ndcg"), begin) for name in ARMS} | parts


def draw(dataset: log_ratio.Set, numbers: dict[str, Any]) -> Any:
    figure, panels = showing.figure("Figures in similar poses: labels of twenty numbers", (1, 2), (12, 5.8))
    lines = {"one anchor": (0, (1, 4)), "half groups": "--", "groups": "-", "random batches": ":"}
    for name in ARMS:
        log = name.startswith("log-ratio")
        style = {"linestyle": lines[name.split(", ")[1]] if log else "-"}
        ink = showing.INK[0 if log else 1]
        showing.band(panels[0], numbers["steps"], numbers[name]["curves"]["ndcg"], ink, name, **style)
    showing.panel(panels[0], "Test figures; higher is better", "training step", "nDCG@10")
    showing.legend(panels[0], loc="lower right")
    shown(panels[1], dataset, numbers)
    return figure


def shown(axes: Any, dataset: log_ratio.Set, numbers: dict[str, Any]) -> None:
    """Queries, each with its five nearest figures under two losses and their distances in pose."""
    images, targets = dataset.test.images.cpu(), dataset.targets[dataset.test.labels].cpu()
    side, rows = images.shape[-1], 2 * SHOWN
    axes.set_xlim(-1.1 * side, 6.7 * side)
    axes.set_ylim(rows * 1.35 * side, -0.1 * side)
    axes.set_axis_off()
    axes.set_title("A query and its five nearest, with their distance in pose", loc="left", fontsize=11)
    for row in range(rows):
        query, name = row // 2, (BEST, OTHER)[row % 2]
        top, first = row * 1.35 * side, row % 2  # the query is in the first of its two rows
        chosen = numbers[name]["nearest"][query] if first else [query, *numbers[name]["nearest"][query]]
        for place, item in enumerate(chosen, start=first):
            left = place * 1.06 * side + (0.3 * side if place else 0)
            axes.imshow(
                images[item, 0].numpy(), cmap="gray", vmin=0, vmax=1, extent=(left, left + side, top + side, top)
            )
            words = "query" if item == query else f"{float((targets[item] - targets[query]).norm()):.2f}"
            axes.text(left + side / 2, top + 1.02 * side, words, ha="center", va="top", fontsize=8, color=showing.SOFT)
        words = "triplet" if first else "log-ratio"
        axes.text(-0.1 * side, top + side / 2, words, ha="right", va="center", fontsize=9, color=showing.TEXT)


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    dataset = figures(options)
    numbers = showing.rounded(log_ratio.measured(dataset, options, ARMS, SHOWN))
    showing.save(options, "log_ratio_poses", draw(dataset, numbers), numbers, judge(numbers))


if __name__ == "__main__":
    main()
