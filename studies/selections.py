"""Which distances each selection picks, and how noisy its gradient is: the figures of docs/measured/sampling.md.

    python studies/selections.py

About two minutes on two cores; reads the glyphs set and nothing else. Trains the network of examples/plain_loop.py for
a short while, embeds its training pictures and applies every selection to the same class-balanced batches: the batch
against itself, and against the full training set, as a large memory would provide it. Writes three pictures to
docs/pictures and prints their numbers:

    picked_distances   anchor-negative distances of each selection, beside those of all negative pairs
    gradient_variance  trace of the covariance of (a - n)/|a - n|, the gradient of the plain-distance triplet loss by
                       the negative, when a and n are moved by noise, σ per coordinate, and scaled back to length 1
    variance_distance  the same over the distance of the pair

Wu et al. 2017, arXiv:1706.07567, section 4 and figures 2 and 3, on our embeddings.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor

from nearkin import mining, relations
from nearkin.core import distances
from nearkin.core.relations import Relation
from nearkin.data import glyphs
from nearkin.samplers import ClassBalanced

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import plain_loop  # noqa: E402

DIM, MARGIN, CLASSES, EACH = 128, 0.2, 32, 4
SIGMAS = (0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05)
QUOTED = 0.02  # the σ of the printed table
INK = {  # Okabe and Ito's colours, which colour-blind readers can tell apart
    "all": "#7f7f7f",
    "random": "#7f7f7f",
    "multi_similarity": "#000000",
    "easy_positive": "#e69f00",
    "semihard": "#009e73",
    "hard": "#d55e00",
    "batch_hard": "#d55e00",
    "hard_negatives": "#cc79a7",
    "distance_weighted": "#0072b2",
    "fitted": "#56b4e9",
}
Picks = dict[str, Tensor]  # selection → (picks, 2 + len(SIGMAS)): distance, whether the triplet is active, variances


def embeddings(steps: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Unit embeddings of the training characters after `steps` steps, their labels, and how much jitter moves them.

    The last as a σ: two jittered views of a picture are as far apart, in the median, as two noisy copies would be.
    """
    torch.manual_seed(seed)
    seen, _ = glyphs.load().split()
    images, labels = torch.from_numpy(seen.images)[:, None] / 255, torch.from_numpy(seen.labels)
    model = plain_loop.encoder(dim=DIM)
    plain_loop.train(model, images, labels, steps)
    generator = torch.Generator().manual_seed(seed)
    a, b = (distances.unit(plain_loop.embed(model, plain_loop.jitter(images, generator))) for _ in range(2))
    moved = float((a - b).norm(dim=1).median()) / math.sqrt(2 * DIM)
    return distances.unit(plain_loop.embed(model, images)), labels, moved


def fitted_dimension(x: Tensor, labels: Tensor, batches: list[list[int]]) -> int:
    """The sphere on which uniform points would have these cosines: there the mean of cos² is 1/dimension."""
    squares = [((x[b] @ x[b].T) ** 2)[relations.of(labels[b]).negative].mean() for b in map(torch.tensor, batches)]
    return max(2, round(1 / float(torch.stack(squares).mean())))


def title(name: str, fitted: int) -> str:
    return {"fitted": f"distance_weighted, dim={fitted}"}.get(name, name)


def selections(fitted: int, generator: torch.Generator) -> dict[str, Callable[[Tensor, Relation], object]]:
    def by_name(name: str, distance: Tensor, relation: Relation) -> object:
        if name == "multi_similarity":
            distance = distance.square() / 2  # 1 - cosine of unit vectors, as in its loss
        return mining.select(name, distance, relation, dim=DIM, generator=generator)

    by_selection = {name: partial(by_name, name) for name in INK if name != "fitted"}
    return by_selection | {"fitted": partial(mining.distance_weighted, dim=fitted, generator=generator)}


def variance(anchors: Tensor, negatives: Tensor, sigma: float, draws: int, generator: torch.Generator) -> Tensor:
    """Trace of the covariance of the unit direction from negative to anchor under noise, one per pair, unbiased.

    The trace of a covariance of unit vectors is 1 - |mean|²: 0 for a direction that noise leaves alone, 1 for noise.
    """
    total = torch.zeros_like(anchors)
    for _ in range(draws):
        a, n = (distances.unit(x + sigma * torch.randn(x.shape, generator=generator)) for x in (anchors, negatives))
        total += distances.unit(a - n)
    return (1 - (total / draws).square().sum(1)) * draws / (draws - 1)


def picks(
    x: Tensor, labels: Tensor, batches: list[list[int]], full_set: bool, fitted: int, draws: int, seed: int
) -> tuple[Picks, dict[str, Tensor], float]:
    """The picks of every selection, at most 384 negatives of each per batch.

    Then the number of negatives it picks and the share of anchors that get one, and how often distance-weighted
    sampling picks the same as "hard".
    """
    generator = torch.Generator().manual_seed(seed)
    every = selections(fitted, generator)
    parts: dict[str, list[Tensor]] = {name: [] for name in every}
    count = {name: torch.zeros(2) for name in every}
    agreed = 0.0
    for batch in track(batches, "the full set" if full_set else "in the batch"):
        rows = torch.tensor(batch)
        columns = torch.arange(len(x)) if full_set else rows
        distance = distances.euclidean(x[rows], x[columns])
        relation = relations.of(labels[rows], x[columns], labels[columns])
        relation = Relation(relation.positive & (rows[:, None] != columns), relation.negative)
        all_chosen = {name: selection(distance, relation) for name, selection in every.items()}
        nearest, drawn = all_chosen["hard"], all_chosen["distance_weighted"]
        agreed += float((nearest.negative == drawn.negative)[drawn.valid].float().mean()) / len(batches)
        for name, chosen in all_chosen.items():
            if isinstance(chosen, mining.Triplets):
                anchor, positive, negative = chosen.indices()
                active = (distance[anchor, positive] - distance[anchor, negative] + MARGIN > 0).float()
            else:
                anchor, negative = chosen.negative.nonzero(as_tuple=True)
                active = torch.full(anchor.shape, torch.nan)
            count[name] += torch.tensor([len(anchor), len(anchor.unique()) / len(rows)]) / len(batches)
            some = torch.randperm(len(anchor), generator=generator)[: CLASSES * EACH * (EACH - 1)]
            anchor, negative = anchor[some], negative[some]
            ends = x[rows[anchor]], x[columns[negative]]
            noise = [variance(*ends, sigma, draws, generator) for sigma in SIGMAS]
            parts[name].append(torch.stack([distance[anchor, negative], active[some], *noise], 1))
    return {name: torch.cat(parts) for name, parts in parts.items()}, count, agreed


def density(d: Tensor, dim: int) -> Tensor:
    """q(d), of distances between uniform points of the unit sphere in `dim` dimensions."""
    log_q = (dim - 2) * d.log() + (dim - 3) / 2 * (1 - d.square() / 4).log()
    q = (log_q - log_q.max()).exp()
    return q / torch.trapezoid(q, d)


def draw_distances(figure: Figure, picked: Picks, fitted: int) -> None:
    bins, d = torch.linspace(0, 2, 51), torch.linspace(0.01, 1.99, 400)
    panels = figure.subplots(3, 3, sharex=True, sharey=True).flat
    for axes, name in zip(panels, (name for name in INK if name != "batch_hard"), strict=True):
        axes.hist(picked["all"][:, 0], bins, density=True, color="#d9d9d9")
        if name == "all":
            for dim, line, place in ((DIM, "-", (1.22, 3.2)), (fitted, "--", (0.92, 0.9))):
                axes.plot(d, density(d, dim), line, color="black", linewidth=1)
                axes.text(*place, f"q(d) in {dim}\ndimensions", ha="right")
        else:
            axes.hist(picked[name][:, 0], bins, density=True, histtype="stepfilled", color=INK[name], alpha=0.8)
        axes.set_title("hard, batch_hard" if name == "hard" else title(name, fitted), loc="left", fontweight="bold")
        axes.set(xlim=(0, 2), ylim=(0, 4.5), yticks=[], xticks=[0, 0.5, 1, 1.5, 2])
        axes.spines[["left", "right", "top"]].set_visible(False)
    figure.supxlabel("distance from the anchor to the negative that is picked (grey: all negative pairs)", fontsize=11)


def draw_variance(figure: Figure, batch: Picks, full_set: Picks, size: int, fitted: int) -> None:
    shown = [name for name in INK if name not in ("all", "batch_hard")]
    panels = figure.subplots(1, 2, sharey=True)
    heads = f"batch of {CLASSES * EACH} against itself", f"batch against the whole set, {size:,}"
    for axes, picked, head in zip(panels, (batch, full_set), heads, strict=True):
        ends = {}
        for name in shown:
            means = picked[name][:, 2:].mean(0).tolist()
            ends[name] = means[-1]
            axes.plot(SIGMAS, means, "--" if name == "fitted" else "-", color=INK[name], linewidth=2)
        for name, height in zip(sorted(shown, key=ends.__getitem__), spread(sorted(ends.values()), 0.06), strict=True):
            text = {"hard": "hard, batch_hard", "random": "all, random"}.get(name, title(name, fitted))
            line = {"arrowstyle": "-", "color": INK[name], "linewidth": 1.5, "relpos": (0, 0.5)}
            line |= {"patchA": None, "shrinkA": 3, "shrinkB": 0}
            end, place = (SIGMAS[-1], ends[name]), (SIGMAS[-1] * 1.4, height)
            axes.annotate(text, end, place, va="center", arrowprops=line)
        axes.set_title(head, loc="left", fontweight="bold")
        ticks = (0.002, 0.005, 0.01, 0.02, 0.05)
        axes.set(xscale="log", xlim=(0.002, 0.05), ylim=(0, 1), xticks=ticks, xticklabels=[f"{t:g}" for t in ticks])
        axes.minorticks_off()
        tidy(axes)
    panels[0].set_ylabel("gradient variance")
    figure.supxlabel("noise σ of each of the 128 coordinates of an embedding of length 1", fontsize=11)


def draw_by_distance(figure: Figure, all_picked: list[Picks]) -> None:
    axes, width = figure.subplots(), 0.05
    rows = torch.cat([part for picked in all_picked for part in picked.values()])
    bins = (rows[:, 0] / width).long()
    filled = [b for b in range(40) if int((bins == b).sum()) >= 20]
    for sigma, colour, where in ((0.01, "#56b4e9", 0.45), (0.02, "#0072b2", 0.7), (0.05, "#003f66", 1.0)):
        means = [float(rows[bins == b, 2 + SIGMAS.index(sigma)].mean()) for b in filled]
        axes.plot([(b + 0.5) * width for b in filled], means, color=colour, linewidth=2)
        place = min(range(len(filled)), key=lambda i: abs(filled[i] * width - where))
        axes.text(filled[place] * width, means[place] + 0.015, f"σ = {sigma:g}", va="bottom")
    axes.set(xlim=(0, 2), ylim=(0, 1), xlabel="distance between anchor and negative", ylabel="gradient variance")
    tidy(axes)


def tidy(axes: Axes) -> None:
    axes.spines[["right", "top"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)


def spread(values: list[float], gap: float) -> list[float]:
    """Ascending heights for labels, at least `gap` apart and as near to the values as can be."""
    blocks: list[list[float]] = []  # of values less their offsets: a block whose mean falls joins the previous one
    for place, value in enumerate(values):
        blocks.append([value - place * gap])
        while len(blocks) > 1 and sum(blocks[-2]) / len(blocks[-2]) > sum(blocks[-1]) / len(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    flat = [sum(block) / len(block) for block in blocks for _ in block]
    return [height + place * gap for place, height in enumerate(flat)]


def save(path: Path, size: tuple[float, float], draw: Callable[[Figure], None]) -> None:
    """Under another name first, so that a picture is never incomplete."""
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    figure.savefig(temporary, dpi=110, format="png")
    os.replace(temporary, path)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} kB")


def show(head: str, picked: Picks, count: dict[str, Tensor], agreed: float, fitted: int) -> None:
    print(f"\n{head}; distance_weighted picks what hard does in {agreed:.0%}")
    print("| selection | negatives per batch | anchors | distance: 5 % | median | 95 % | active | variance |")
    print("|---|---|---|---|---|---|---|---|")
    for name, rows in picked.items():
        low, middle, high = rows[:, 0].quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
        active, noise = float(rows[:, 1].mean()), float(rows[:, 2 + SIGMAS.index(QUOTED)].mean())
        share = "" if math.isnan(active) else f"{active:.0%}"
        number, anchors = count[name].tolist()
        cells = title(name, fitted), f"{number:,.0f}", f"{anchors:.0%}", f"{low:.2f}", f"{middle:.2f}", f"{high:.2f}"
        print(f"| {' | '.join(cells)} | {share} | {noise:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--draws", type=int, default=24, help="of noise, for each pair and σ")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder of the pictures")
    arguments = parser.parse_args()
    for name, least in (("steps", 2), ("batches", 1), ("draws", 2), ("seed", 0)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(arguments, name)}")

    x, labels, moved = embeddings(arguments.steps, arguments.seed)
    sampler = ClassBalanced(labels, CLASSES, EACH, arguments.seed, batches=arguments.batches)
    batches = list(sampler)
    fitted = fitted_dimension(x, labels, batches)
    print(f"{len(x):,} embeddings in {DIM} dimensions; mean cos² of negatives as on a sphere in {fitted}")
    print(f"jitter moves an embedding as far as noise of σ = {moved:.3f} does")
    torch.set_num_threads(1)  # small matrices from here on
    measured = [picks(x, labels, batches, w, fitted, arguments.draws, arguments.seed) for w in (False, True)]
    batch, full_set = (result[0] for result in measured)
    for where, result in zip(("In the batch", "Against the whole set"), measured, strict=True):
        show(f"{where}, variance at σ = {QUOTED:g}", *result, fitted)
    print()
    save(arguments.out / "picked_distances.png", (8.5, 6.2), lambda f: draw_distances(f, batch, fitted))
    save(
        arguments.out / "gradient_variance.png",
        (10.5, 4.4),
        lambda f: draw_variance(f, batch, full_set, len(x), fitted),
    )
    save(arguments.out / "variance_distance.png", (6.5, 3.6), lambda f: draw_by_distance(f, [batch, full_set]))


if __name__ == "__main__":
    main()
