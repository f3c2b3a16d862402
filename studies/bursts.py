"""How much too good retrieval looks where pictures come in bursts, and what groups make of it.

    python studies/bursts.py [--quick] [--out studies/results]

Glyphs, each drawing of a character photographed four times: shifted by at most a pixel, brighter or darker, with
fresh noise. The four are a burst, and a group. An encoder is trained (SupCon) and tested on unseen characters, and with
--closed on new pictures of known ones. R@1 and MAP@R of the same embeddings are measured three ways:

    all pairs   every other picture of the class counts, near-copies too
    groups      pictures of the query's class and burst are left out
    one each    one picture of each burst, and all pairs: what a search among new drawings finds

sampler.groups: batches whose positives come from other bursts.
"""

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from nearkin import evaluation, training
from nearkin.core import files
from nearkin.data import glyphs
from nearkin.training import read_recipe

COPIES = 4
PATTERN = "{group}_*"  # U+0041-3_2.png: the third picture of the fourth drawing


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args(arguments)
    classes, drawings, steps, seeds = (24, 8, 6, 1) if chosen.quick else (300, 8, 500, 2)
    report: dict[str, Any] = {"study": "bursts", "classes": classes, "drawings": drawings, "copies": COPIES}
    report |= {"steps": steps, "rows": []}
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "bursts"
        write(photos, classes, drawings)
        for seed, closed, sampler in product(range(seeds), (False, True), (False, True)):
            rows = run(photos, Path(folder) / f"{seed}{closed}{sampler}", steps, seed, closed, sampler)
            print(*(json.dumps(row) for row in rows), sep="\n", flush=True)
            report["rows"] += rows
            files.write_json(chosen.out / "bursts.json", report)


def write(folder: Path, classes: int, drawings: int) -> None:
    """A folder of class folders, each drawing as a burst of pictures."""
    names = glyphs.characters()
    for c in np.linspace(0, len(names) - 1, classes).astype(int):
        home = folder / f"U+{ord(names[c]):04X}"
        home.mkdir(parents=True)
        for sample in range(drawings):
            picture = glyphs.draw(names[c], sample)
            for copy in range(COPIES):
                Image.fromarray(shot(picture, [int(c), sample, copy])).save(home / f"{home.name}-{sample}_{copy}.png")


def shot(picture: NDArray[np.uint8], seed: list[int]) -> NDArray[np.uint8]:
    """The same drawing, photographed once more."""
    draw = np.random.default_rng(seed)
    moved = np.roll(picture, draw.integers(-1, 2, 2), axis=(0, 1)).astype(np.float64)
    return (moved * draw.uniform(0.9, 1.1) + draw.normal(0, 8, moved.shape)).clip(0, 255).astype(np.uint8)


def run(photos: Path, out: Path, steps: int, seed: int, closed: bool, sampler: bool) -> list[dict[str, Any]]:
    """Trained, and pixels, on the test part."""
    outcome = train(photos, out, steps, seed, [f"data.closed={str(closed).lower()}"] * closed, sampler)
    held_out = outcome.test
    pixels = torch.from_numpy(outcome.prepared.rows[held_out.indices].reshape(len(held_out.indices), -1)).float()
    facts = {"test": "known classes" if closed else "unseen classes", "seed": seed, "sampler": sampler}
    labels, groups = torch.from_numpy(held_out.labels), torch.from_numpy(held_out.groups)
    models = {"trained": outcome.embeddings} | ({} if sampler else {"pixels": pixels})
    return [facts | {"model": name} | three_ways(x, labels, groups) for name, x in models.items()]


def train(photos: Path, out: Path, steps: int, seed: int, sets: list[str], sampler: bool) -> Any:
    settings = [f"data.source={json.dumps(str(photos))}", "loss.name=supcon", f"training.seed={seed}", *sets]
    settings += [
        f"training.batches={max(1, steps // 5)}",
        "training.epochs=5",
        "sampler.per_class=4",
        "sampler.batch=48",
    ]
    settings += ["data.cache=false", "evaluation.interval=false", f"data.group_pattern={json.dumps(PATTERN)}"]
    settings += ["sampler.groups=true"] if sampler else []
    return training.train(read_recipe(None, settings), out)


def three_ways(x: torch.Tensor, labels: torch.Tensor, groups: torch.Tensor) -> dict[str, Any]:
    first = torch.from_numpy(np.unique(groups.numpy(), return_index=True)[1])
    ways: dict[str, Any] = {
        "all pairs": evaluation.retrieval(x, labels, ks=(1,)),
        "groups": evaluation.retrieval(x, labels, ks=(1,), metrics=("recall", "map@r", "minp"), groups=groups),
        "one each": evaluation.retrieval(x[first], labels[first], ks=(1,)),
    }
    names = ("recall@1", "map@r", "minp")
    return {way: {name: values[name] for name in names if name in values} for way, values in ways.items()}


if __name__ == "__main__":
    main()
