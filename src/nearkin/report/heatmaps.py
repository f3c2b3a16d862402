"""Heat maps over pictures: which part matched. Orange adds to the similarity, blue takes from it."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.report.thumbnails import INK, save_figure

__all__ = ["colours", "draw_heat", "faded", "overlay", "scale_of", "write_heat_maps"]

Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8]
# Told apart by readers with any colour vision, and by lightness where there is none.
ADDS, TAKES = (240, 110, 0), (20, 70, 200)
DENSEST = 0.85  # opacity of the largest value
FADED = 0.35  # share of white in the grey picture below


def scale_of(*heats: Floats) -> float:
    """The value of the densest colour: the largest of all maps, so that their colours can be compared."""
    return max((float(np.abs(heat).max(initial=0.0)) for heat in heats), default=0.0) or 1.0


def colours(heat: Floats, scale: float) -> Pixels:
    """(h, w) → RGBA (h, w, 4): orange where a place adds, blue where it takes, the denser the more."""
    share = np.clip(np.asarray(heat, np.float64) / scale, -1, 1)
    rgba = np.empty((*share.shape, 4), np.uint8)
    rgba[..., :3] = np.where(share[..., None] >= 0, ADDS, TAKES)
    rgba[..., 3] = np.round(255 * DENSEST * np.abs(share))
    return rgba


def overlay(heat: Floats, scale: float) -> str:
    """The map as a data: address, one pixel per place: laid over a picture, a browser enlarges it smoothly."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(colours(heat, scale)).save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def faded(picture: Pixels) -> Pixels:
    """In light grey, so that only the map has colour."""
    grey = picture.astype(np.float64)
    if grey.ndim == 3:
        grey = grey[..., :3] @ np.array([0.299, 0.587, 0.114])
    return np.round(grey + FADED * (255 - grey)).astype(np.uint8)


def write_heat_maps(
    path: str | Path,
    pictures: Sequence[Pixels],
    heats: Sequence[Floats],
    titles: Sequence[str],
    captions: Sequence[str],
    headline: str,
) -> None:
    """Two pictures as they are, and below them their heat maps with one scale of colours, as one PNG."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("heat maps need matplotlib: pip install 'nearkin[report]'") from None
    figure, scale = Figure(figsize=(6.6, 7.1), layout="constrained"), scale_of(*heats)
    axes = figure.subplots(2, len(pictures), squeeze=False)
    for i, (picture, heat) in enumerate(zip(pictures, heats, strict=True)):
        _plain(axes[0, i], picture, titles[i])
        draw_heat(axes[1, i], picture, heat, scale)
        axes[1, i].set_xlabel(captions[i], fontsize=9, color=INK, parse_math=False)
    figure.suptitle(headline, fontsize=11, color=INK, fontweight="bold", parse_math=False)
    _scale_bar(figure, axes[1].tolist(), scale)
    save_figure(path, figure)


def _plain(axes: Any, picture: Pixels, title: str) -> None:
    axes.set(xticks=[], yticks=[])
    axes.imshow(picture, cmap="gray", vmin=0, vmax=255)
    axes.set_title(title, fontsize=9, color=INK, parse_math=False)


def draw_heat(axes: Any, picture: Pixels, heat: Floats, scale: float) -> None:
    """The faded picture and the map over it, on axes of matplotlib."""
    height, width = picture.shape[:2]
    axes.set(xticks=[], yticks=[])
    axes.imshow(faded(picture), cmap="gray", vmin=0, vmax=255)
    smooth = _enlarged(colours(heat, scale), width, height)
    axes.imshow(smooth, extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="nearest")


def _enlarged(rgba: Pixels, width: int, height: int) -> Pixels:
    """Bilinear, as a browser does it: colours are mixed by their opacity."""
    from PIL import Image

    factor = max(1, -(-480 // max(width, height)))
    size = (width * factor, height * factor)
    premultiplied = Image.fromarray(rgba).convert("RGBa").resize(size, Image.Resampling.BILINEAR)
    return np.asarray(premultiplied.convert("RGBA"))


def _scale_bar(figure: Any, axes: Any, scale: float) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    stops = np.array([TAKES, (255, 255, 255), ADDS]) / 255 * DENSEST + 1 - DENSEST
    shades = LinearSegmentedColormap.from_list("heat", stops)
    bar = figure.colorbar(
        ScalarMappable(Normalize(-scale, scale), shades), ax=axes, orientation="horizontal", aspect=50, pad=0.03
    )
    bar.set_label("what a place adds to the similarity", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8)
