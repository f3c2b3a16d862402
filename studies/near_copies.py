"""Which descriptor finds near-duplicates: planted copies of real pictures against the real pictures themselves.

    python studies/near_copies.py glyphs orl=../shared/data/orl-faces cub200=../shared/data/CUB_200_2011

Of 200 pictures per set four copies are made: JPEG of quality 40, a window of 85 to 97 % of the side anywhere, half the
size, and 1.3 times as bright. A copy is found if its similarity with its original reaches the threshold. "pairs" are
pictures of two random halves of the set that reach it too; some of these are real: sets have bursts and neighbouring
poses, and Fashion-MNIST has copies.
"""

import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from nearkin import data, models
from nearkin.data import image_cache, near_duplicates

COPIED, PICTURES, SIDE = 200, 2000, 128


def copies_of(picture: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    image = Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture)
    side = image.width
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=40)
    window = side * rng.uniform(0.85, 0.97)
    left, top = rng.uniform(0, side - window, 2)
    made = {
        "jpeg": Image.open(buffer),
        "crop": image.resize((side, side), Image.Resampling.BICUBIC, (left, top, left + window, top + window)),
        "resize": image.resize((side // 2, side // 2), Image.Resampling.BOX).resize((side, side)),
        "brightness": image.point(lambda value: min(255, round(1.3 * value))),
    }
    return {kind: np.asarray(copy).reshape(picture.shape) for kind, copy in made.items()}


def hash_bits(pixels: np.ndarray) -> np.ndarray:
    """A perceptual hash of 64 bits, as +1 and -1: signs of the low frequencies about their median."""
    grey = torch.nn.functional.interpolate(
        torch.from_numpy(pixels.astype(np.float32)).mean(3)[:, None], size=(32, 32), mode="area"
    )[:, 0].numpy()
    wave = np.cos(np.pi * (2 * np.arange(32) + 1) * np.arange(8)[:, None] / 64)
    low = (wave @ grey @ wave.T).reshape(len(grey), -1)
    return np.where(low > np.median(low, axis=1, keepdims=True), 1.0, -1.0).astype(np.float32) / 8


def pooled(pixels: np.ndarray) -> np.ndarray:
    """Features of efficientnet-lite0 with ImageNet weights, before its projection."""
    encoder = models.build("efficientnet-lite0", dim=0, channels=3, size=SIDE, seed=0).eval()
    rows = torch.from_numpy(np.repeat(pixels, 3, 3) if pixels.shape[3] == 1 else pixels).permute(0, 3, 1, 2)
    parts = []
    with torch.no_grad():
        for part in rows.split(64):
            sized = torch.nn.functional.interpolate(part.float() / 255, size=(SIDE, SIDE), mode="bilinear")
            parts.append(torch.nn.functional.normalize(encoder.features(sized), dim=1))
    return torch.cat(parts).numpy()


KINDS = {"windows": None, "hash": hash_bits, "encoder": pooled}
THRESHOLDS = {"windows": (0.95, 0.96, 0.97, 0.98, 0.99), "hash": (0.75, 0.8, 0.85, 0.9)}
THRESHOLDS["encoder"] = (0.8, 0.85, 0.9, 0.95)


def measure(name: str, pixels: np.ndarray, kinds: list[str]) -> list[dict]:
    """Copies are the first part and the set the second: who finds its original, and who anything else?"""
    rng = np.random.default_rng(0)
    chosen = rng.choice(len(pixels), min(COPIED, len(pixels)), replace=False)
    made = [copies_of(pixels[i], rng) for i in chosen]
    ways = list(made[0])
    planted = np.concatenate([np.stack([copy[way] for copy in made]) for way in ways])
    every, original = np.concatenate([planted, pixels]), np.tile(chosen, len(ways)) + len(planted)
    lines = []
    for kind in kinds:
        began = time.process_time()
        for threshold, copy_of, (pairs, items) in found_by(kind, every, len(planted), original):
            recall = {way: float(copy_of[k * len(chosen) : (k + 1) * len(chosen)].mean()) for k, way in enumerate(ways)}
            lines.append({"set": name, "by": kind, "threshold": threshold, **recall, "pairs": pairs, "items": items})
            lines[-1] |= {"pictures": len(pixels), "seconds": round(time.process_time() - began, 2)}
            print(json.dumps(lines[-1]), flush=True)
    return lines


def found_by(kind: str, every: np.ndarray, planted: int, original: np.ndarray) -> Iterator[tuple]:
    """Per threshold: which copies find their original, and how many pairs of real pictures are as similar."""
    count, half = len(every), (len(every) - planted) // 2
    if kind == "windows":
        parts = [np.arange(planted), np.arange(planted, count)]
        copies = near_duplicates.find(every, parts, threshold=min(THRESHOLDS[kind]))
        order = planted + np.random.default_rng(1).permutation(count - planted)  # two random halves of the set
        real = near_duplicates.find(every, [order[:half], order[half:]], threshold=min(THRESHOLDS[kind]))
    else:
        rows = KINDS[kind](every)
    for threshold in THRESHOLDS[kind]:
        if kind == "windows":
            right = copies.pairs[
                (copies.similarity >= threshold) & (original[copies.pairs[:, 0]] == copies.pairs[:, 1])
            ]
            hits, pairs = np.isin(np.arange(planted), right[:, 0]), real.pairs[real.similarity >= threshold]
            yield threshold, hits, (len(pairs), len(np.unique(pairs)))
        else:
            order = planted + np.random.default_rng(1).permutation(count - planted)
            near = rows[order[:half]] @ rows[order[half:]].T >= threshold
            hits = (rows[:planted] * rows[original]).sum(1) >= threshold
            yield threshold, hits, (int(near.sum()), int(near.any(1).sum() + near.any(0).sum()))


def main() -> None:
    lines = []
    kinds = [text[3:] for text in sys.argv[1:] if text.startswith("by=")] or list(KINDS)
    for text in [text for text in sys.argv[1:] if not text.startswith("by=")]:
        source, _, root = text.partition("=")
        items = data.load(source, root=root or None, partial=bool(root))
        few = items.take(np.arange(0, len(items), max(1, len(items) // PICTURES)))
        side = 32 if source in ("glyphs", "fashion-mnist", "coil20") else SIDE
        pixels = np.asarray(image_cache.store(few.pictures, few.names, side=side, cache=False).pixels)
        lines += measure(source, pixels, [kind for kind in kinds if kind != "encoder" or side == SIDE])
    Path(__file__).with_name("results").joinpath("near_copies.json").write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
