"""AdaCos finds its scale without tuning.

    python studies/adacos_scale.py

Learns one half of Omniglot's characters and searches among the drawings of the other half, with normalised softmax and
CosFace at fixed scales from 2 to 64, and with AdaCos: its fixed scale √2 ln(C - 1), and the dynamic one that follows
the batch. Same start, batches and steps for all; several seeds. A batch has one drawing of most of the characters: with
a few characters at a time the class weights chase the last batch, and no scale learns anything. AdaCos should reach
the best scale of the sweep, which is unknown before sweeping.

Zhang et al. 2019, arXiv:1905.00292. AdaCos sets the scale alone: normalised softmax is its counterpart, CosFace (with a
margin) is shown beside it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ground
import showing
import torch
from torch import Tensor, nn

from nearkin import losses
from nearkin.data import augment

FULL, QUICK = (3, 250, 96), (1, 6, 8)  # seeds, steps, items in a batch
SCALES, QUICK_SCALES = (2, 4, 8, 16, 32, 64), (4, 16)
DIM, MARGIN = 64, 0.2
NEAR = 0.02  # of MAP@R: how near to the best of the sweep counts as reached


def run(
    options: ground.Options,
    seen: ground.Part,
    unseen: ground.Part,
    make: Callable[[], nn.Module],
    batches: Tensor,
    seed: int,
) -> tuple[dict[str, float], list[float]]:
    """Scores on unseen characters, and the scale at every step where the loss adapts it."""
    torch.manual_seed(seed)  # the class weights
    model = ground.Distorted(ground.encoder(options, seen.size, DIM, seed), augment.preset("glyph"), seed)
    loss, scales = make(), []
    loss.lr_scale = 10.0  # class weights start far from where they end

    def record_scale(step: int, value: Tensor, embeddings: Tensor) -> None:
        if isinstance(loss, losses.AdaCosLoss):
            scales.append(loss.scale.detach().clone())

    ground.train(model, loss, seen, batches, lr=3e-3, callback=record_scale)
    return ground.scores(model, unseen), [float(scale) for scale in scales]


def draw(numbers: dict[str, Any], scales: Sequence[int], curves: Sequence[Sequence[float]], fixed: float) -> Any:
    figure, panels = showing.figure(
        "AdaCos beside a sweep of fixed scales, Omniglot characters never seen", (1, 3), (13, 4.4)
    )
    for axes, metric, name in zip(panels, ("map@r", "recall@1"), ("MAP@R", "R@1"), strict=False):
        showing.panel(axes, f"{name} on unseen characters", "scale (logarithmic)", name)
        for colour, sweep in zip(showing.INK, ("normalised softmax", "CosFace"), strict=False):
            runs = list(zip(*(numbers[sweep][f"{s}"][metric]["runs"] for s in scales), strict=True))
            showing.band(
                axes,
                scales,
                runs,
                colour,
                sweep + (f", m = {MARGIN:g}" if sweep == "CosFace" else ""),
                marker="o",
                markersize=4,
            )
        for colour, mark, kind in ((showing.INK[3], "s", "fixed"), (showing.INK[2], "D", "dynamic")):
            scores = numbers[f"AdaCos {kind}"][metric]
            at = fixed if kind == "fixed" else numbers["AdaCos dynamic"]["last scale"]["mean"]
            error = [[scores["mean"] - scores["low"]], [scores["high"] - scores["mean"]]]
            axes.errorbar(
                [at],
                [scores["mean"]],
                error,
                fmt=mark,
                color=colour,
                markersize=9,
                capsize=3,
                label=f"AdaCos {kind}, s = {at:.1f}",
                zorder=5,
            )
        axes.set(xscale="log", xticks=scales, xticklabels=[str(s) for s in scales])
        axes.minorticks_off()
    showing.legend(panels[0], loc="lower left")
    axes = showing.panel(panels[2], "The scale while training", "step", "scale")
    showing.band(axes, range(len(curves[0])), curves, showing.INK[2], "AdaCos dynamic")
    axes.axhline(fixed, color=showing.INK[3], linewidth=2, label="AdaCos fixed, √2 ln(C - 1)")
    axes.axhline(numbers["best scale"], color=showing.INK[0], linestyle="--", label="best scale of the sweep")
    axes.set_ylim(0, None)
    showing.legend(axes)
    return figure


def spread(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {m: showing.spread(f[m] for f in runs) | {"runs": [f[m] for f in runs]} for m in ("map@r", "recall@1")}


def judge(numbers: dict[str, Any], scales: Sequence[int]) -> dict[str, bool]:
    best = max(numbers["normalised softmax"][f"{s}"]["map@r"]["mean"] for s in scales)
    return {
        f"AdaCos {kind} is within {100 * NEAR:g} points of MAP@R of normalised softmax at its best scale": (
            numbers[f"AdaCos {kind}"]["map@r"]["mean"] > best - NEAR
        )
        for kind in ("fixed", "dynamic")
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    seeds, steps, at_once = QUICK if options.quick else FULL
    scales = QUICK_SCALES if options.quick else SCALES
    seen, unseen = ground.halves(ground.omniglot(options))
    kinds = seen.classes
    arms: dict[tuple[str, str], Callable[[], nn.Module]] = {}
    for s in scales:
        arms["normalised softmax", f"{s}"] = lambda s=s: losses.NormalizedSoftmaxLoss(kinds, DIM, scale=float(s))
        arms["CosFace", f"{s}"] = lambda s=s: losses.CosFaceLoss(kinds, DIM, margin=MARGIN, scale=float(s))
    arms["AdaCos fixed", ""] = lambda: losses.AdaCosLoss(kinds, DIM, dynamic=False)
    arms["AdaCos dynamic", ""] = lambda: losses.AdaCosLoss(kinds, DIM, dynamic=True)
    batches = [ground.balanced(seen, at_once, 1, steps, seed) for seed in range(seeds)]
    numbers: dict[str, Any] = {"normalised softmax": {}, "CosFace": {}}
    for (name, scale), make in arms.items():
        runs = [run(options, seen, unseen, make, batches[seed], seed) for seed in range(seeds)]
        if scale:
            numbers[name][scale] = spread([scores for scores, _ in runs])
        else:
            numbers[name] = spread([scores for scores, _ in runs])
            curves = [curve for _, curve in runs]  # of the dynamic one, which is last
    fixed = float(losses.AdaCosLoss(kinds, DIM).scale)
    numbers["AdaCos dynamic"] |= {"last scale": showing.spread(c[-1] for c in curves), "scale by step": curves}
    numbers["AdaCos fixed"]["scale"] = fixed
    numbers["best scale"] = max(scales, key=lambda s: numbers["normalised softmax"][f"{s}"]["map@r"]["mean"])
    numbers["settings"] = {"classes": kinds, "unseen": unseen.classes, "steps": steps, "seeds": seeds, "batch": at_once}
    showing.save(options, "adacos_scale", draw(numbers, scales, curves, fixed), numbers, judge(numbers, scales))


if __name__ == "__main__":
    main()
