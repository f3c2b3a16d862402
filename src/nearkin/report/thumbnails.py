"""Thumbnails in the page, and the retrieval grid as one picture."""

import base64
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.core import checks, files
from nearkin.report import sampling
from nearkin.report.findings import Findings, check
from nearkin.report.format import plain, short

__all__ = ["Thumbnails", "encoded", "save_figure", "write_picture"]

SIDE = 96  # pixels of a thumbnail's longer side
SMALL = 48  # up to here lossless PNG; above, JPEG has a fifth of its size
RIGHT, WRONG, INK = "#00705a", "#c03a11", "#1b1f24"


class Thumbnails:
    """Pictures of items as data: addresses, each made once; an unreadable one is counted, not fatal."""

    def __init__(self, findings: Findings) -> None:
        self._picture, self._names = findings.picture, findings.names
        self._cache: dict[tuple[int, int], str | None] = {}
        self.bad: dict[int, str] = {}  # item → error

    def __bool__(self) -> bool:
        return self._picture is not None

    def address(self, item: int, side: int = SIDE) -> str | None:
        """A data: address, or None where there is no picture."""
        if (item, side) not in self._cache:
            pixels = self.pixels(item)
            self._cache[item, side] = None if pixels is None else encoded(pixels, side)
        return self._cache[item, side]

    def pixels(self, item: int) -> NDArray[np.uint8] | None:
        if self._picture is None:
            return None
        try:
            pixels = np.asarray(self._picture(item))
        except Exception as error:  # a missing file must not cost the report
            self.bad.setdefault(item, f"{plain(self._names[item])}: {error}")
            return None
        if pixels.ndim == 3 and pixels.shape[2] == 1:
            pixels = pixels[:, :, 0]
        if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
            raise ValueError(
                "picture(i) must be uint8 of shape (height, width) or (height, width, 3), "
                f"got {pixels.dtype} {pixels.shape} for {plain(self._names[item])}"
            )
        return pixels if pixels.size else None


def encoded(pixels: NDArray[np.uint8], side: int = SIDE) -> str:
    """A picture as a data: address."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    scale = side / max(image.size)
    if scale < 1:
        image = image.resize(
            (max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.Resampling.BOX
        )
    out, small = io.BytesIO(), max(image.size) <= SMALL
    if small:
        image.save(out, "PNG", optimize=True)
    else:
        image.save(out, "JPEG", quality=82, optimize=True)
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


def write_picture(path: str | Path, findings: Findings, *, seed: int = 0, rows: int = 3) -> None:
    """The retrieval grid as one PNG: at most `rows` queries of each group, the same ones that the page shows."""
    check(findings)
    checks.integer("rows", rows, 1)
    if findings.picture is None:
        raise ValueError("findings.picture must be given to draw the retrieval grid, got None")
    groups = sampling.draw(findings, seed).groups
    if not groups:
        raise ValueError(f"embeddings must have at least 2 items that can be shown, got {len(findings.names)} in total")
    figure = _figure(findings, [(group.title, group.rows[:rows]) for group in groups])
    save_figure(path, figure)


def save_figure(path: str | Path, figure: Any) -> None:
    """A figure of matplotlib as PNG, the same bytes each time."""
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the font may lack a script
        figure.savefig(out, format="png", dpi=130, facecolor="white", metadata={"Software": None})
    with files.explained(str(path), "make room, or choose another path"):
        files.write_bytes(path, out.getvalue())


def _figure(findings: Findings, groups: list[tuple[str, list[sampling.Row]]]) -> Any:
    """Layout in inches: cells of one size, a gap after the query, a line of text above each group."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("the retrieval grid needs matplotlib: pip install 'nearkin[report]'") from None
    cell, step, gap, text, side = 0.74, 0.86, 0.22, 0.36, 0.2
    columns = 1 + max(len(row.neighbours) for _, rows in groups for row in rows)
    width = 2 * side + columns * step + gap
    height = 0.1 + sum(text + len(rows) * (step + 0.16) + 0.1 for _, rows in groups)
    figure, thumbnails = Figure(figsize=(width, height)), Thumbnails(findings)
    top = height - 0.1
    for title, rows in groups:
        figure.text(side / width, (top - 0.22) / height, title, fontsize=10, fontweight="bold", color=INK)
        top -= text
        for row in rows:
            for column, item in enumerate([row.query, *row.neighbours]):
                left = side + column * step + (gap if column else 0)
                axes = figure.add_axes((left / width, (top - cell) / height, cell / width, cell / height))
                _cell(axes, findings, thumbnails, row, column, item)
            top -= step + 0.16
        top -= 0.1
    return figure


def _cell(axes: Any, findings: Findings, thumbnails: Thumbnails, row: sampling.Row, column: int, item: int) -> None:
    pixels = thumbnails.pixels(item)
    axes.set(xticks=[], yticks=[])
    if pixels is not None:
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255)
    label = ""
    if findings.labels is not None:
        label = short(findings.classes[int(findings.labels[item])], 11)
    colour, width = INK, 0.8
    line: Any = "-"
    if column == 0:
        label = label or "query"
    elif findings.labels is not None:
        correct = bool(findings.labels[item] == findings.labels[row.query])
        colour, line, width = (RIGHT if correct else WRONG), ("-" if correct else (0, (2.5, 1.2))), 2.2
        label = f"{'✓' if correct else '✗'} {label}"
    elif row.label_distance:
        label = f"Δ {row.label_distance[column - 1]:.3g}"
    for spine in axes.spines.values():
        spine.set(color=colour, linestyle=line, linewidth=width, capstyle="butt")
    axes.set_xlabel(label, color=colour, fontsize=8, labelpad=2.5, parse_math=False)
