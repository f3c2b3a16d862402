"""Siamese L1 + sigmoid on Omniglot: 20-way one-shot recognition within an alphabet, the official runs.

    python studies/siamese_one_shot.py

Learns the 242 characters of Omniglot's two small background sets with the affine distortions of Koch et al., and then
answers the official runs: 20 runs, each with 20 characters drawn once by one person and 20 drawings by another. The
siamese head scores each pair. For comparison: the same encoder trained with triplet, ArcFace and SupCon, which compare
by cosine, and two methods without training: nearest pixels, and the modified Hausdorff distance of the data set's demo
(38.8 % error). First it is checked that no drawing of the runs is in the training set; the alphabets of the runs are of
the evaluation set, those of training of the background set.

Koch, Zemel, Salakhutdinov 2015 report 92.0 % right (8 % error) after 150,000 pairs of 30 alphabets and 964 characters:
about four times the characters available here. People err in 4.5 % (Lake et al. 2015).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import ground
import showing
import torch
from torch import Tensor, nn

from nearkin import losses
from nearkin.core.distances import unit
from nearkin.data import augment
from nearkin.evaluation.few_shot import OneShotRun, omniglot_runs
from nearkin.losses.siamese import weighted_l1

FULL, QUICK = (2, 1500, 32), (1, 4, 8)  # seeds, steps, characters in a batch, four drawings of each
SIZE, DIM = 56, 256
DEMO, PAPER, PEOPLE = 0.388, 0.08, 0.045  # errors: the demo's Hausdorff distance, Koch et al., people
# Koch et al., section 3.3: turned by up to 10 degrees, sheared by up to 0.3, scaled by 0.8 to 1.2, shifted by 2 px.
KOCH = augment.Augmentation(
    scale_low=1 / 1.2**2, scale_high=1 / 0.8**2, aspect=1.2, rotation=math.radians(10), shear=0.3, shift=2 / 105,
    flip=0.0, brightness=0.0, contrast=0.0, saturation=0.0, erase=0.0,
)  # fmt: skip
MAKE: dict[str, Callable[[int], nn.Module]] = {
    "siamese": lambda classes: losses.SiameseLoss(DIM),
    "triplet": lambda classes: losses.TripletLoss(0.2),
    "ArcFace": lambda classes: losses.ArcFaceLoss(classes, DIM, margin=0.3, scale=16.0),
    "SupCon": lambda classes: losses.SupConLoss(temperature=0.1),
}
TITLES = {
    "pixels": "nearest pixels",
    "Hausdorff": "modified Hausdorff",
    "siamese": "siamese, L1 + sigmoid",
    "siamese cosine": "siamese, by cosine instead",
}


def reduced(images: Tensor) -> Tensor:
    """(N, 105, 105) to (N, 1, SIZE, SIZE), both with ink 1."""
    return nn.functional.interpolate(images[:, None], (SIZE, SIZE), mode="bilinear", antialias=True).clamp(0, 1)


def by_hausdorff(run: OneShotRun, every: int = 1) -> Tensor:
    """Minus the modified Hausdorff distance of the ink (Dubuisson and Jain 1994), centred as in the demo, (20, 20).

    Of every `every`-th row and column of pixels.
    """
    queries, supports = (inked(images[:, ::every, ::every]) for images in (run.queries, run.supports))
    every, sizes = torch.cat(queries), [len(query) for query in queries]
    columns = []
    for support in supports:
        parts = torch.cdist(every, support).split(sizes)  # of each query: (its ink, the support's ink)
        columns.append(torch.stack([torch.maximum(p.amin(1).mean(), p.amin(0).mean()) for p in parts]))
    return -torch.stack(columns, 1)


def inked(images: Tensor) -> list[Tensor]:
    """The coordinates of each picture's ink, relative to their mean."""
    places = [image.nonzero().float() for image in images > 0.5]
    return [some - some.mean(0) for some in places]


def right(scores: Tensor, run: OneShotRun) -> float:
    """The share of queries, rows of (20, 20) scores, whose best support is the right one."""
    return float((scores.argmax(1).cpu() == run.answers).double().mean())


def cosines(queries: Tensor, supports: Tensor) -> Tensor:
    return unit(queries) @ unit(supports).T


def answered(
    model: nn.Module, loss: nn.Module, runs: Sequence[OneShotRun], device: torch.device
) -> dict[str, list[float]]:
    """Right answers in every run, by the comparison of the method; the siamese one also by cosine."""
    right_answers: dict[str, list[float]] = {"own": [], "cosine": []}
    model.eval()
    for run in runs:
        with torch.no_grad():
            queries, supports = (model(reduced(images).to(device)) for images in (run.queries, run.supports))
            right_answers["cosine"].append(right(cosines(queries, supports), run))
            if isinstance(loss, losses.SiameseLoss):
                right_answers["own"].append(right(weighted_l1(queries, supports, loss.weight) + loss.bias, run))
    return right_answers


def shared(images: Tensor, runs: Sequence[OneShotRun]) -> int:
    """How many drawings of the runs are, pixel for pixel, among the training drawings."""
    known = {image.numpy().tobytes() for image in (images * 255).round().byte().cpu()}
    drawings = (image for run in runs for image in (*run.supports, *run.queries))
    return sum((image * 255).round().byte().numpy().tobytes() in known for image in drawings)


def summed(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Error of each run, means over seeds, and its mean with a 95 % interval over runs."""
    each = 1 - torch.tensor(rows, dtype=torch.float64).mean(0)
    half = 1.96 * float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    seeds = [1 - sum(row) / len(row) for row in rows]
    return {"error": float(each.mean()), "half": half, "seeds": seeds, "runs": each.tolist()}


def draw(numbers: dict[str, Any], curves: dict[str, list[list[float]]], marks: Sequence[int]) -> Any:
    figure, (left, middle) = showing.figure(
        "Twenty characters, each seen once: how often the answer is wrong", (1, 2), (12, 4.6)
    )
    names = list(numbers["methods"])[::-1]
    for height, name in enumerate(names):
        summary = numbers["methods"][name]
        colour = (
            showing.INK[9]
            if name in ("pixels", "Hausdorff")
            else showing.INK[0]
            if "siamese" in name
            else showing.INK[1]
        )
        left.barh(
            height,
            100 * summary["error"],
            xerr=100 * summary["half"],
            color=colour,
            ecolor=showing.TEXT,
            capsize=3,
            height=0.62,
        )
        left.text(
            100 * (summary["error"] + summary["half"]) + 1.2,
            height,
            f"{100 * summary['error']:.1f}",
            va="center",
            color=showing.TEXT,
        )
    for at in (PEOPLE, PAPER, DEMO):
        left.axvline(100 * at, color=showing.TEXT, linestyle=":", linewidth=1)
    for at, words in ((PAPER, "people 4.5,\nKoch et al. 8.0"), (DEMO, "published demo,\nHausdorff 38.8")):
        left.text(100 * at + 0.8, len(names) - 0.5, words, va="bottom", fontsize=8.5, color=showing.SOFT)
    showing.panel(left, "", "error in the 20 official runs, %; bars: 95 % over runs", "")
    left.grid(axis="y", visible=False)
    left.set(yticks=range(len(names)), yticklabels=[TITLES.get(name, name) for name in names], xlim=(0, 100))
    left.set_ylim(-0.6, len(names) + 0.4)
    showing.panel(middle, "", "training step", "error in the official runs, %")
    for colour, (name, runs) in zip(showing.INK, curves.items(), strict=False):
        showing.band(middle, marks, [[100 * value for value in run] for run in runs], colour, name)
    middle.axhline(
        100 * numbers["methods"]["Hausdorff"]["error"], color=showing.SOFT, linestyle=":", label="modified Hausdorff"
    )
    middle.set_ylim(0, None)
    showing.legend(middle, loc="upper right")
    return figure


def judge(numbers: dict[str, Any]) -> dict[str, bool]:
    siamese = numbers["methods"]["siamese"]
    beaten = {
        name: summed([[1 - (a - b) for a, b in zip(numbers["methods"][name]["runs"], siamese["runs"], strict=True)]])
        for name in ("pixels", "Hausdorff")
    }
    return {
        "siamese errs less than nearest pixels and than the Hausdorff distance, 95 % over runs": all(
            gain["error"] - gain["half"] > 0 for gain in beaten.values()
        ),
        "siamese errs in no more than the 8 % that Koch et al. report, within its 95 % interval": siamese["error"]
        - siamese["half"]
        <= PAPER,
    }


def learned(
    options: ground.Options, name: str, seen: ground.Part, runs: Sequence[OneShotRun], seed: int
) -> tuple[dict[int, float], dict[str, list[float]]]:
    """The error in all runs by the steps done, and the right answers in each run at the end."""
    _, steps, at_once = QUICK if options.quick else FULL
    # ArcFace gets more characters, fewer drawings of each: with few characters its weights chase the last batch.
    shape = (min(seen.classes, 4 * at_once), 1) if name == "ArcFace" else (at_once, 4)
    torch.manual_seed(seed)  # the class weights
    body, loss = ground.encoder(options, SIZE, DIM, seed), MAKE[name](seen.classes)
    loss.lr_scale = 10.0 if name == "ArcFace" else 1.0
    model = ground.Distorted(nn.Sequential(body, nn.Sigmoid()) if name == "siamese" else body, KOCH, seed)
    curve: dict[int, float] = {}

    def record(step: int, value: Tensor, embeddings: Tensor) -> None:
        right_answers = answered(model, loss, runs, options.device)
        curve[step] = 1 - sum(right_answers["own"] or right_answers["cosine"]) / len(runs)

    batches = ground.balanced(seen, *shape, steps, seed)
    rate, every = 1e-2 if name == "siamese" else 3e-3, max(1, steps // 8)
    ground.train(model, loss, seen, batches, lr=rate, callback=record, every=every)
    return curve, answered(model, loss, runs, options.device)


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    seeds, steps, at_once = QUICK if options.quick else FULL
    runs = omniglot_runs(options.data / "omniglot" / "all_runs.zip")[: 2 if options.quick else None]
    part = ground.omniglot(options, 105)
    overlap = shared(part.images[:, 0], runs)
    seen = ground.Part(reduced(part.images[:, 0]), part.labels)
    methods: dict[str, list[list[float]]] = {
        "pixels": [[right(cosines(run.queries.flatten(1), run.supports.flatten(1)), run) for run in runs]],
        "Hausdorff": [[right(by_hausdorff(run, 4 if options.quick else 1), run) for run in runs]],
    }
    curves: dict[str, list[list[float]]] = {name: [] for name in MAKE}
    for name in MAKE:
        for seed in range(seeds):
            curve, right_answers = learned(options, name, seen, runs, seed)
            curves[name].append(list(curve.values()))
            methods.setdefault(name, []).append(right_answers["own"] or right_answers["cosine"])
            if right_answers["own"]:
                methods.setdefault("siamese cosine", []).append(right_answers["cosine"])
    numbers: dict[str, Any] = {"methods": {name: summed(rows) for name, rows in methods.items()}}
    numbers["settings"] = {"characters": seen.classes, "steps": steps, "seeds": seeds, "batch": 4 * at_once}
    numbers["settings"] |= {"pixels": SIZE, "drawings of the runs among those learned": overlap}
    numbers["others"] = {"Koch et al. 2015": PAPER, "people": PEOPLE, "demo, Hausdorff": DEMO}
    marks = list(curve)  # the same for all
    numbers |= {"steps": marks, "error by step": curves}
    showing.save(options, "siamese_one_shot", draw(numbers, curves, marks), numbers, judge(numbers))


if __name__ == "__main__":
    main()
