"""Two settings of class losses, tried: where center loss begins its centres, and a margin per class for ArcFace.

    python studies/class_settings.py start --seeds 10 --out results.json
    python studies/class_settings.py margins --seeds 10 --out results.json
    python studies/class_settings.py margins --quick                        # seconds; its numbers mean nothing

start: ten classes in two dimensions, ten random characters of glyphs or scikit-learn's digits, half of the items held
out. `start="first"` less `start="zeros"`, same weights and batches: the accuracy of the nearest centre (mean of the
training items) and the scatter (distance to the centre over the distance between centres) of held-out items, and the
epochs until the accuracy is 95 % of what "zeros" ends with. "first" becomes the default if on both sets it is better in
one of them, its interval clear of 0, at one strength, and worse in none.

margins: 100 characters of glyphs with 60 to 4 training items, falling as 1 / rank. ArcFace with `class_margins`, less
the one margin 0.5 and less one margin that is the mean of theirs over the items. In per cent: recall@1 and MAP@R of 100
other characters, 10 items each, and the nearest class weight of 10 held-out items of common (20 training items and
more) and of rare classes (6 and fewer).

Each seed draws other characters, splits, batches and first weights; intervals are 95 %, Student's, of the differences.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import ground
import numpy as np
import showing
import torch
from torch import Tensor, nn

from nearkin import losses, models
from nearkin.data import glyphs
from nearkin.evaluation.statistics.binomial import student

BATCH, CLASSES, UNIFORM = 64, 100, 0.5
PULLS = 0.003, 0.1, 1.0  # the default, and the stronger two of studies/two_dimensions.py
Rows = dict[str, list[float]]  # a value per seed


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What `make` makes, its first weights drawn by the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def network(size: int) -> nn.Module:
    """In two dimensions, small enough for thirty epochs in seconds."""
    layers = [nn.Conv2d(1, 16, 3, 2, 1), nn.PReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.PReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32 * (size // 4) ** 2, 128), nn.PReLU(), nn.Linear(128, 2))


def draws(items: int, steps: int, seed: int) -> Tensor:
    return torch.randint(items, (steps, BATCH), generator=torch.Generator().manual_seed(seed))


def drawn(characters: list[str], samples: list[range]) -> ground.Part:
    """Drawings number `samples[c]` of each character."""
    pixels = [glyphs.draw(c, n) for c, numbers in zip(characters, samples, strict=True) for n in numbers]
    labels = torch.arange(len(characters)).repeat_interleave(torch.tensor([len(numbers) for numbers in samples]))
    return ground.Part(torch.from_numpy(np.stack(pixels))[:, None].float() / 255, labels)


def chosen(number: int, seed: int) -> list[str]:
    return np.random.default_rng(seed).permutation(glyphs.characters())[:number].tolist()


def ten_classes(name: str, seed: int, quick: bool) -> tuple[ground.Part, ground.Part]:
    """What to learn from, and what is held out."""
    if name == "glyphs":
        each = 10 if quick else 100
        characters = chosen(10, seed)
        return drawn(characters, [range(each)] * 10), drawn(characters, [range(each, 2 * each)] * 10)
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(a) for a in (load_digits().images, load_digits().target))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[: 200 if quick else None]
    part = ground.Part(images[order, None].float() / 16, labels[order])
    first = torch.arange(len(order)) < len(order) // 2
    return part.where(first), part.where(~first)


def placed(model: nn.Module, seen: ground.Part, held: ground.Part) -> tuple[float, float]:
    """Accuracy of the nearest centre, and scatter, of held-out items."""
    x, y = ground.embed(model, seen), ground.embed(model, held)
    centres = torch.stack([x[seen.labels == c].mean(0) for c in range(10)])
    right = (torch.cdist(y, centres).argmin(1) == held.labels).double().mean()
    return float(right) * 100, float((y - centres[held.labels]).norm(dim=1).mean() / torch.pdist(centres).mean())


def curve(
    seen: ground.Part, held: ground.Part, pull: float, kind: str, seed: int, quick: bool
) -> list[tuple[float, float]]:
    """`placed` before training and after every epoch."""
    epoch, result = max(1, len(seen.labels) // BATCH), []
    model = seeded(lambda: network(seen.size), seed)
    loss = seeded(lambda: losses.CenterLoss(10, 2, pull, start=kind), seed)
    batches = draws(len(seen.labels), epoch * (2 if quick else 30), seed)

    def measure(*_: object) -> None:
        result.append(placed(model, seen, held))

    ground.train(model, loss, seen, batches, lr=3e-3, callback=measure, every=epoch)
    return result


def start(seeds: int, quick: bool) -> dict[str, Rows]:
    result: dict[str, Rows] = {}
    for seed in range(seeds):
        for name in ("glyphs", "digits"):
            seen, held = ten_classes(name, seed, quick)
            for pull in PULLS:
                curves = {kind: curve(seen, held, pull, kind, seed, quick) for kind in ("zeros", "first")}
                goal = 0.95 * curves["zeros"][-1][0]
                for kind, places in curves.items():
                    reached = next((i for i, (right, _) in enumerate(places) if right >= goal), len(places))
                    rows = result.setdefault(f"{name}, λ = {pull:g}, {kind}", {})
                    for key, value in zip(("accuracy", "scatter", "epochs"), (*places[-1], reached), strict=True):
                        rows.setdefault(key, []).append(value)
    return result


def margins(seeds: int, quick: bool) -> dict[str, Rows]:
    classes, steps, result = 20 if quick else CLASSES, 5 if quick else 400, {}
    counts = [round(60 / (1 + 14 * rank / (classes - 1))) for rank in range(classes)]
    own = losses.class_margins(torch.tensor(counts))
    mean = float((own * torch.tensor(counts)).sum() / sum(counts))
    for seed in range(seeds):
        characters = chosen(2 * classes, seed)
        seen = drawn(characters[:classes], [range(n) for n in counts])
        held = drawn(characters[:classes], [range(100, 110)] * classes)
        other = drawn(characters[classes:], [range(10)] * classes)
        for name, margin in ((f"one margin {UNIFORM}", UNIFORM), ("per class", own), (f"one margin {mean:.3f}", mean)):
            model = models.build("small-cnn", dim=64, size=seen.size, seed=seed, normalize=False, channels=1, width=16)
            loss = seeded(lambda m=margin: losses.ArcFaceLoss(classes, 64, m), seed)
            ground.train(model, loss, seen, draws(len(seen.labels), steps, seed), lr=3e-3)
            right = (loss.get_logits(ground.embed(model, held)).argmax(1) == held.labels).double() * 100
            number = torch.tensor(counts)[held.labels]
            values = {key: value * 100 for key, value in ground.scores(model, other).items()}
            values |= {"common": float(right[number >= 20].mean()), "rare": float(right[number <= 6].mean())}
            for key, value in values.items():
                result.setdefault(name, {}).setdefault(key, []).append(value)
    return result


def paired(result: dict[str, Rows], name: str, beside: str) -> dict[str, list[float]]:
    """`name` less `beside`: mean over the seeds and its interval."""
    lines = {}
    for key, values in result[name].items():
        gaps = np.subtract(values, result[beside][key])
        mean, half = gaps.mean(), student(len(gaps) - 1) * gaps.std(ddof=1) / math.sqrt(len(gaps))
        lines[key] = [round(float(value), 4) for value in (mean, mean - half, mean + half)]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("start", "margins"))
    parser.add_argument("--seeds", type=int, default=10, help="at least 2")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON of all values")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds must be at least 2, an interval needs two differences, got {options.seeds}")
    torch.set_num_threads(1)
    result = (start if options.study == "start" else margins)(2 if options.quick else options.seeds, options.quick)
    for name, rows in result.items():
        print(name, {key: round(sum(values) / len(values), 4) for key, values in rows.items()})
    pairs = [(name, name.replace("first", "zeros")) for name in result if name.endswith("first")]
    pairs += [("per class", name) for name in result if name.startswith("one margin")]
    differences = {f"{name} less {other}": paired(result, name, other) for name, other in pairs}
    for name, lines in differences.items():
        print(name, lines)
    if options.out:
        report = {"study": options.study, "values": result, "differences": differences}
        options.out.write_text(showing.written(showing.rounded(report)), encoding="utf-8")


if __name__ == "__main__":
    main()
