"""Claim 3: distances between points of the unit sphere concentrate at √2 as the dimension grows.

    python studies/sphere_distances.py [--data FOLDER] [--device auto] [--quick] [--out FOLDER]

First uniform points, sampled and compared with the density q(d) ∝ d^(n-2) (1 - d²/4)^((n-3)/2), whose deviation is
about 1/√(2n). Then the embeddings of real pictures, after training in as many dimensions: Fashion-MNIST's test pictures
and the unseen half of Omniglot, pairs of different classes, with the triplet loss and with Proxy-Anchor. Their
effective dimension is that of the sphere on which uniform points would have the same mean squared cosine, 1/mean(cos²);
if it does not grow with the dimension, the distances do not concentrate, whatever the formula says about uniform
points.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import ground
import numpy as np
import showing
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nearkin import losses

DIMS, TRAINED = (2, 4, 8, 16, 32, 64, 128, 256, 512), (4, 16, 64, 128, 512)
STEPS, SEEDS, PAIRS = 200, (0, 1), 1_000_000
LOSSES: dict[str, Callable[[int, int], nn.Module]] = {
    "triplet": lambda classes, dim: losses.TripletLoss(0.2),
    "Proxy-Anchor": lambda classes, dim: losses.ProxyAnchorLoss(classes, dim),
}
INK = {"triplet": showing.INK[1], "Proxy-Anchor": showing.INK[2]}


def density(d: Any, dim: int) -> Any:
    """q(d) of uniform points, integrating to 1 over these distances; on the circle it has no end at 2."""
    log_q = (dim - 2) * np.log(d) + (dim - 3) / 2 * np.log(1 - d**2 / 4)
    q = np.exp(log_q - log_q.max())
    return q / (np.diff(d) * (q[1:] + q[:-1]) / 2).sum()


def uniform(dim: int, pairs: int, options: ground.Options) -> Tensor:
    """Distances of independent pairs of uniform points."""
    generator = torch.Generator(options.device).manual_seed(dim)
    parts = []
    for start in range(0, pairs, 50_000):
        count = min(50_000, pairs - start)
        a, b = (normalize(torch.randn(count, dim, generator=generator, device=options.device), dim=1) for _ in range(2))
        parts.append((a - b).norm(dim=1))
    return torch.cat(parts)


def misfit(d: Tensor, dim: int) -> float:
    """The largest gap between the empirical distribution and that of the formula (Kolmogorov and Smirnov)."""
    angle = np.linspace(0, math.pi, 20_001)  # by the angle the density is sin^(n-2): smooth in every dimension
    q = np.sin(angle) ** (dim - 2)
    below = np.concatenate([[0.0], np.cumsum((q[1:] + q[:-1]) / 2)])
    ordered = np.sort(d.double().cpu().numpy())
    expected = np.interp(2 * np.arcsin(np.clip(ordered / 2, 0, 1)), angle, below / below[-1])
    return float(np.abs(expected - np.arange(1, len(ordered) + 1) / len(ordered)).max())


def real(model: nn.Module, part: ground.Part) -> tuple[Tensor, float]:
    """Distances between unit embeddings of different classes, and their effective dimension."""
    x = normalize(ground.embed(model, part), dim=1)
    cosine = (x @ x.T)[part.labels[:, None] != part.labels]
    return (2 - 2 * cosine).clamp(min=0).sqrt(), float(1 / cosine.square().mean())


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    dims, steps, seeds, pairs = ((2, 16), 3, SEEDS[:1], 2000) if options.quick else (DIMS, STEPS, SEEDS, PAIRS)
    learned = dims if options.quick else TRAINED
    drawn = {}
    for dim in dims:
        d = uniform(dim, pairs, options)
        drawn[dim] = {"mean": float(d.mean()), "std": float(d.std()), "misfit": misfit(d, dim)}
    train, test = ground.fashion(options)
    seen, unseen = ground.halves(ground.omniglot(options))
    sets = {
        "Fashion-MNIST": (train, ground.some(test, 200), (10, 12)),
        "Omniglot": (seen, ground.some(unseen, 10), (12, 4) if options.quick else (32, 4)),
    }
    statistics: dict[Any, dict[str, float]] = {}
    shown: dict[Any, Any] = {}
    for name, (learn, judge, batch) in sets.items():
        for loss, make in LOSSES.items():
            for dim in learned:
                each = []
                for seed in seeds:
                    torch.manual_seed(seed)  # initial proxies
                    model = ground.encoder(options, learn.size, dim, seed)
                    places = ground.balanced(learn, *batch, steps, seed)
                    ground.train(model, make(learn.classes, dim), learn, places, lr=3e-3)
                    d, effective = real(model, judge)
                    each.append([float(d.mean()), float(d.std()), effective, ground.scores(model, judge)["map@r"]])
                statistics[name, loss, dim] = dict(
                    zip(("mean", "std", "effective", "map@r"), np.mean(each, 0), strict=True)
                )
                if dim == (128 if 128 in learned else learned[-1]):
                    shown[name, loss] = d[:: max(1, len(d) // 200_000)].cpu().numpy()
    numbers = {"uniform": drawn, "trained": {", ".join(map(str, key)): value for key, value in statistics.items()}}
    figure = draw(dims, drawn, statistics, shown)
    showing.save(options, "sphere_distances", figure, numbers, verdict(dims, drawn, statistics))


def verdict(dims: Sequence[int], drawn: Any, statistics: Any) -> dict[str, bool]:
    wide = [dim for dim in dims if dim >= 16]
    trained = {(name, loss) for name, loss, _ in statistics}
    last = dims[-1]
    return {
        "uniform points follow the formula: no gap between the distributions above 0.005": (
            all(sample["misfit"] < 0.005 for sample in drawn.values())
        ),
        "uniform points: from 16 dimensions on the mean is within 2 % of √2 and the deviation within 5 % of 1/√(2n)": (
            all(
                abs(drawn[n]["mean"] / math.sqrt(2) - 1) < 0.02 and abs(drawn[n]["std"] * math.sqrt(2 * n) - 1) < 0.05
                for n in wide
            )
        ),
        "trained embeddings: the mean is within 10 % of √2 in the highest dimension, in every case": (
            all(abs(statistics[(*case, last)]["mean"] / math.sqrt(2) - 1) < 0.1 for case in trained)
        ),
        "trained embeddings: there the deviation is at most twice that of uniform points, in every case": (
            all(statistics[(*case, last)]["std"] <= 2 * drawn[last]["std"] for case in trained)
        ),
    }


def draw(dims: Sequence[int], drawn: Any, statistics: Any, shown: Any) -> Any:
    figure, panels = showing.figure(
        "Distances on the unit sphere: uniform points and trained embeddings", (1, 3), (14, 5)
    )
    places = np.linspace(1e-3, 2 - 1e-3, 1000)
    first, middle, last = panels
    shown_dim = 128 if 128 in dims else dims[-1]
    showing.panel(first, f"Distances; embeddings of {shown_dim} dimensions", "distance", "density")
    blues = {4: "#9cc3e6", 16: "#5b97d1", 64: "#2f6fb7", shown_dim: "#173e6b"}
    for dim, colour in blues.items():
        first.plot(places, density(places, dim), color=colour, linewidth=1.8, label=f"uniform, {dim} dimensions")
    first.axvline(math.sqrt(2), color=showing.SOFT, linewidth=1, linestyle=":")
    first.annotate(
        "√2 ", (math.sqrt(2), 0.98), xycoords=("data", "axes fraction"), ha="right", va="top", color=showing.SOFT
    )
    styles = {"Fashion-MNIST": "-", "Omniglot": (0, (3, 1.5))}
    for (name, loss), d in shown.items():
        height, edges = np.histogram(d, 60, (0, 2), density=True)
        first.plot((edges[1:] + edges[:-1]) / 2, height, color=INK[loss], linestyle=styles[name], linewidth=2)
    first.set(xlim=(0, 2), ylim=(0, None))
    showing.panel(middle, "Deviation of the distances", "dimensions of the embedding", "standard deviation")
    formula = [1 / math.sqrt(2 * n) for n in dims]
    middle.plot(dims, formula, color=showing.SOFT, linewidth=1.2, linestyle=":", label="1/√(2n), and n on the right")
    middle.plot(dims, [drawn[n]["std"] for n in dims], "o", color=showing.INK[0], markersize=5, label="uniform, drawn")
    showing.panel(last, "Effective dimension, 1/mean(cos²)", "dimensions of the embedding", "effective dimension")
    last.plot(dims, dims, color=showing.SOFT, linewidth=1.2, linestyle=":")
    lines = []
    for name, loss in shown:
        look = {"color": INK[loss], "linestyle": styles[name], "linewidth": 2, "label": f"{name}, {loss}"}
        trained_dims = [n for n in dims if (name, loss, n) in statistics]
        middle.plot(trained_dims, [statistics[name, loss, n]["std"] for n in trained_dims], **look)
        lines += last.plot(trained_dims, [statistics[name, loss, n]["effective"] for n in trained_dims], **look)
    for axes, ticks in ((middle, (0.03, 0.05, 0.1, 0.2, 0.3, 0.5)), (last, (1, 2, 5, 10, 20, 50, 100, 200, 500))):
        axes.set(xscale="log", yscale="log", xticks=dims, xticklabels=dims, yticks=ticks, yticklabels=ticks)
        axes.minorticks_off()
    shared = {"loc": "outside lower center", "ncols": 5, "frameon": False, "labelcolor": showing.TEXT, "fontsize": 9}
    figure.legend(handles=[*first.lines[: len(blues)], *middle.lines[:2], *lines], **shared)
    return figure


if __name__ == "__main__":
    main()
