"""The 2-D map of items, by t-SNE or PCA, as SVG."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import distances
from nearkin.report.format import escape, number, short

__all__ = ["HUES", "MIN_TSNE", "Badge", "classes_map", "fit_square", "hues", "pca", "plane", "targets_map"]

Floats = NDArray[np.float64]

WIDTH, HEIGHT, EDGE = 900, 620, 36
BADGE = 30  # a thumbnail's side
HUES = 10
MIN_TSNE = 10  # items for which t-SNE makes sense
_STOPS = ((68, 87, 201), (150, 79, 186), (217, 72, 95), (232, 131, 58), (217, 173, 31))  # visible on white and on black


class Badge:
    """A class on the map: its thumbnail, or its name where there is none."""

    def __init__(self, kind: int, name: str, address: str | None) -> None:
        self.kind, self.name, self.address = kind, name, address


def plane(embeddings: Tensor, seed: int) -> tuple[Floats, str]:
    """Coordinates (N, 2) in [0, 1], and the method: t-SNE where openTSNE is installed, else PCA."""
    x = distances.unit(embeddings.double().cpu())
    if len(x) >= MIN_TSNE and bool((x != x[:1]).any()):
        try:
            import openTSNE  # type: ignore[import-untyped, unused-ignore]
        except Exception:  # not installed, or built for another NumPy, which may raise anything
            pass
        else:
            points = openTSNE.TSNE(
                perplexity=min(30, (len(x) - 1) / 3),
                initialization=pca(x) * 1e-4,
                neighbors="exact",
                negative_gradient_method="bh",  # five times faster than "fft" at this size
                random_state=seed,
                n_jobs=1,  # with several threads the result varies
                verbose=False,
            ).fit(x.numpy())
            return fit_square(np.asarray(points, np.float64)), "t-SNE"
    return fit_square(pca(x)), "PCA"


def pca(x: Tensor) -> Floats:
    """The first two principal components, deviation 1 along the first, signs fixed by the largest coordinate."""
    centred = x - x.mean(0)
    covariance = centred.T @ centred
    directions = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :2]  # (D, 2) or (D, 1)
    largest = directions.abs().argmax(0)
    directions = directions * directions[largest, torch.arange(directions.shape[1])].sign()
    flat = torch.zeros(len(x), 2, dtype=torch.float64)
    flat[:, : directions.shape[1]] = centred @ directions
    spread = float(flat[:, 0].std(correction=0))
    return (flat / spread if spread > 1e-12 else flat * 0).numpy()


def fit_square(flat: Floats) -> Floats:
    """Into the unit square, each axis by itself; an axis without extent becomes 0.5."""
    low, high = flat.min(0), flat.max(0)
    span = np.where(high - low > 1e-12, high - low, 1.0)
    return np.where(high - low > 1e-12, (flat - low) / span, 0.5)


def classes_map(flat: Floats, kinds: Sequence[int], tips: Sequence[str], badges: Sequence[Badge]) -> str:
    """Points coloured by class, a badge at the centre of each class; neighbouring classes have different hues."""
    xy = _on_page(flat)
    label = np.asarray(kinds)
    centres = np.array([_centre(xy[label == badge.kind]) for badge in badges])
    hue = dict(zip([badge.kind for badge in badges], hues(centres), strict=True))
    dots = [
        f'<circle class="k{hue[c]}" data-c="{c}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(tip)}</title></circle>'
        for (x, y), c, tip in zip(xy.tolist(), kinds, tips, strict=True)
    ]
    above = np.array([_above(xy[label == badge.kind], centre) for badge, centre in zip(badges, centres, strict=True)])
    box = (BADGE + 4, BADGE + 4) if any(badge.address for badge in badges) else (100, 15)  # pictures or names
    drawn = [
        _badge(badge, x, y, hue[badge.kind]) for badge, (x, y) in zip(badges, _apart(above, box).tolist(), strict=True)
    ]
    title = f"{len(dots)} items of {len(badges)} classes in two dimensions"
    return _svg(title, f'<g class="dots">{"".join(dots)}</g><g class="badges">{"".join(drawn)}</g>')


def targets_map(flat: Floats, targets: Sequence[float], tips: Sequence[str]) -> str:
    """Points coloured by their target, with the scale beside them."""
    low, high = min(targets), max(targets)
    dots = []
    for (x, y), target, tip in zip(_on_page(flat).tolist(), targets, tips, strict=True):
        colour = _colour((target - low) / (high - low) if high > low else 0.5)
        dots.append(f'<circle fill="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{escape(tip)}</title></circle>')
    stops = "".join(f'<stop offset="{i / 8}" stop-color="{_colour(i / 8)}"/>' for i in range(9))
    scale = (
        f'<defs><linearGradient id="scale">{stops}</linearGradient></defs>'
        f'<rect x="{WIDTH - 210}" y="{HEIGHT - 14}" width="150" height="8" rx="4" fill="url(#scale)"/>'
        f'<text class="tick end" x="{WIDTH - 216}" y="{HEIGHT - 6}">{number(low)}</text>'
        f'<text class="tick" x="{WIDTH - 54}" y="{HEIGHT - 6}">{number(high)}</text>'
    )
    return _svg(
        f"{len(dots)} items in two dimensions, coloured by target", f'<g class="dots">{"".join(dots)}</g>{scale}'
    )


def hues(centres: Floats) -> list[int]:
    """One hue per class, greedily the one whose nearest user is farthest: neighbouring classes differ."""
    nearest = np.full((len(centres), HUES), np.inf)  # distance to the nearest class with that hue
    chosen: list[int] = []
    for i, centre in enumerate(centres):
        hue = int(nearest[i].argmax())
        chosen.append(hue)
        distance = np.sqrt(((centres - centre) ** 2).sum(1))
        nearest[:, hue] = np.minimum(nearest[:, hue], distance)
    return chosen


def _on_page(flat: Floats) -> Floats:
    return EDGE + flat * np.array([WIDTH - 2 * EDGE, HEIGHT - 2 * EDGE], np.float64)


def _centre(points: Floats) -> Floats:
    """The point nearest to the median: on an item of the class, even if the class is in two parts."""
    distance = ((points - np.median(points, axis=0)) ** 2).sum(1)
    return np.array(points[int(distance.argmin())], np.float64)


def _above(points: Floats, centre: Floats, near: float = 40.0) -> Floats:
    """Above the points around the centre, so that the badge hides none of them; below them at the upper edge."""
    close = points[np.abs(points - centre).max(1) < near]
    top, bottom = close[:, 1].min() - BADGE / 2 - 6, close[:, 1].max() + BADGE / 2 + 6
    return np.array([np.median(close[:, 0]), top if top > BADGE / 2 + 2 else bottom])


def _apart(centres: Floats, box: tuple[float, float]) -> Floats:
    """Pushes overlapping badges of that size apart along the shorter axis, step by step, within the page."""
    at, room = centres.copy(), np.array(box, np.float64)
    at += 1e-3 * np.arange(len(at))[:, None]  # two at the same point need a direction
    for _ in range(80):
        offset = at[:, None] - at[None]  # (C, C, 2)
        overlap = room - np.abs(offset)
        hit = (overlap.min(2) > 0) & ~np.eye(len(at), dtype=bool)
        if not hit.any():
            break
        shorter = overlap == overlap.min(2, keepdims=True)
        push = np.where(hit[:, :, None] & shorter, 0.3 * overlap * np.sign(offset), 0.0)
        at = np.clip(at + push.sum(1), room / 2, np.array([WIDTH, HEIGHT]) - room / 2)
    return at


def _badge(badge: Badge, x: float, y: float, hue: int) -> str:
    title = f"<title>{escape(short(badge.name))}</title>"
    half = BADGE / 2
    if badge.address is None:
        return (
            f'<g class="badge k{hue}" data-c="{badge.kind}">{title}'
            f'<text class="name mid" x="{x:.1f}" y="{y + 4:.1f}">{escape(short(badge.name, 14))}</text></g>'
        )
    return (
        f'<g class="badge k{hue}" data-c="{badge.kind}">{title}'
        f'<rect x="{x - half:.1f}" y="{y - half:.1f}" width="{BADGE}" height="{BADGE}" rx="3"/>'
        f'<image href="{badge.address}" x="{x - half + 1:.1f}" y="{y - half + 1:.1f}" width="{BADGE - 2}" '
        f'height="{BADGE - 2}" preserveAspectRatio="xMidYMid slice"/>'
        f'<rect class="frame" x="{x - half:.1f}" y="{y - half:.1f}" width="{BADGE}" height="{BADGE}" rx="3"/></g>'
    )


def _colour(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(_STOPS) - 1)
    i = min(int(place), len(_STOPS) - 2)
    mixed = (round(a + (b - a) * (place - i)) for a, b in zip(_STOPS[i], _STOPS[i + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _svg(title: str, content: str) -> str:
    return (
        f'<svg class="plot map" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{content}</svg>'
    )
