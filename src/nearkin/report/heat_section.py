"""Which part matched, in the retrieval grid: the query and one of its neighbours with their heat maps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin import models
from nearkin.data import augment
from nearkin.report import heatmaps
from nearkin.report.findings import PairHeat
from nearkin.report.format import escape, short
from nearkin.report.thumbnails import encoded

__all__ = ["details", "explainer"]

PAIRS = 8  # explained together
NOTE = (
    "<b>Which part matched?</b> The similarity of two pictures is a sum over the places of either: orange places add "
    "to it, blue ones take from it. Shown for the nearest wrong neighbour, or the nearest one."
)


def explainer(
    run: Path, rows: Any, indices: NDArray[np.int64]
) -> Callable[[Sequence[tuple[int, int]]], list[PairHeat]] | None:
    """Explains pairs of items by the encoder in the folder of a run; None for vectors, and encoders that only the
    user's own code can build. rows: pixels (N, S, S, C) uint8 of all items; indices: of those that pairs count."""
    if not (isinstance(rows, np.ndarray) and rows.dtype == np.uint8 and rows.ndim == 4):
        return None

    def explain(pairs: Sequence[tuple[int, int]]) -> list[PairHeat]:
        try:
            encoder, preparation = models.load(run)
            return [
                heat
                for start in range(0, len(pairs), PAIRS)
                for heat in _explained(encoder, preparation["size"], rows, indices, pairs[start : start + PAIRS])
            ]
        except (ValueError, KeyError, OSError):  # an encoder without places, or of the user's own
            return []

    return explain


def _explained(
    encoder: models.Encoder, size: int, rows: Any, indices: NDArray[np.int64], pairs: Sequence[tuple[int, int]]
) -> list[PairHeat]:
    squares = [torch.from_numpy(np.stack([rows[indices[i]] for i in side])) for side in zip(*pairs, strict=True)]
    inputs = [augment.centre(side, size) for side in squares]
    explained = models.explain(encoder, *inputs)
    shown = [(255 * x).round().to(torch.uint8).permute(0, 2, 3, 1).numpy() for x in inputs]
    return [
        PairHeat(
            float(explained.similarity[i]),
            (_grey_or_colour(shown[0][i]), _grey_or_colour(shown[1][i])),
            (explained.maps[0][i].numpy(), explained.maps[1][i].numpy()),
            (float(explained.missing[0][i]), float(explained.missing[1][i])),
        )
        for i in range(len(pairs))
    ]


def _grey_or_colour(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels


def details(pair: PairHeat, names: tuple[str, str], opened: bool) -> str:
    """Both pictures with their heat maps, behind a line that opens them."""
    scale = heatmaps.scale_of(*pair.heats)
    sides = []
    for picture, heat, missing, name in zip(pair.pictures, pair.heats, pair.missing, names, strict=True):
        what = escape(short(name, 60))
        rest = "" if abs(missing) < 5e-4 else f", missing {missing:+.3f}"
        sides.append(
            f'<figure><span class="heat"><img src="{encoded(heatmaps.faded(picture), 128)}" alt="{what}" '
            f'loading="lazy"><img src="{heatmaps.overlay(heat, scale)}" alt="" class="over"></span>'
            f"<figcaption>{what} <small>sum {heat.sum():.3f}{rest}</small></figcaption></figure>"
        )
    line = f"Which part matched {escape(short(names[1], 60))}? Similarity {pair.similarity:.3f}"
    return f'<details class="why"{" open" if opened else ""}><summary>{line}</summary>{"".join(sides)}</details>'
