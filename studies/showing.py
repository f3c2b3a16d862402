"""The output of the studies of docs/claims.md: figures in one style, the numbers as JSON, the verdict.

A study ends with `save`: one figure, one JSON with the measurements, and a verdict that follows from the numbers by a
criterion that the script states.
"""

import io
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ground import Options
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from nearkin.core import files

PAPER, TEXT, SOFT, RULE = "#ffffff", "#1a1f25", "#57616c", "#dbe0e5"
# The colours of report/page.css.
INK = "#2f6fb7", "#d0650f", "#2a8a4a", "#c7344f", "#7a52c7", "#0b8794", "#96621f", "#c94a9b", "#6f7b10", "#5c6773"
WORDS = "holds", "holds partly", "does not hold here"


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean and range over seeds."""
    every = [float(value) for value in values]
    return {"mean": sum(every) / len(every), "low": min(every), "high": max(every)}


def figure(title: str, panels: tuple[int, int] = (1, 1), size: tuple[float, float] = (10, 4.2)) -> tuple[Figure, Any]:
    """A figure with a title in plain words and its panels: one, or an array of them."""
    drawn = Figure(figsize=size, layout="constrained", facecolor=PAPER)
    drawn.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=TEXT)
    return drawn, drawn.subplots(*panels)


def panel(axes: Axes, title: str = "", x: str = "", y: str = "") -> Axes:
    axes.set_title(title, loc="left", fontsize=11, color=TEXT)
    axes.set_xlabel(x, color=SOFT)
    axes.set_ylabel(y, color=SOFT)
    axes.spines[["right", "top"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=SOFT)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def legend(axes: Axes, **settings: Any) -> None:
    axes.legend(**({"frameon": False, "fontsize": 9, "labelcolor": TEXT} | settings))


def band(
    axes: Axes, xs: Sequence[float], runs: Sequence[Sequence[float]], colour: str, label: str, **line: Any
) -> None:
    """The mean of several seeds as a line, their range as a shade."""
    every = np.asarray(runs, float)
    axes.plot(xs, every.mean(0), color=colour, linewidth=2, label=label, **line)
    axes.fill_between(xs, every.min(0), every.max(0), color=colour, alpha=0.15, linewidth=0)


def verdict(parts: Mapping[str, bool]) -> str:
    """The verdict on a claim from its parts, each a sentence with its criterion: all hold, some do, none does."""
    return WORDS[0] if all(parts.values()) else WORDS[1] if any(parts.values()) else WORDS[2]


def save(options: Options, name: str, figure: Figure, numbers: Mapping[str, Any], parts: Mapping[str, bool]) -> None:
    """Writes NAME.png and NAME.json, and prints the numbers and the proposed verdict. parts: as in `verdict`."""
    for folder in (options.figures, options.numbers):
        folder.mkdir(parents=True, exist_ok=True)
    picture(options, name, figure)
    seconds = round(time.perf_counter() - options.began, 1)
    where = torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "CPU"
    facts = {"command": f"python studies/{name}.py{' --quick' * options.quick}", "device": where, "seconds": seconds}
    judgement = {"verdict": verdict(parts), "parts": {text: bool(holds) for text, holds in parts.items()}}
    result = {"study": name, **facts, "torch": torch.__version__, **judgement, "numbers": rounded(numbers)}
    files.write_text(options.numbers / f"{name}.json", written(result))
    for line in lines(result["numbers"]):
        print(line)
    for text, holds in parts.items():
        print(f"{'yes' if holds else 'no ':3} {text}")
    print(f"verdict: {judgement['verdict']} ({seconds:.0f} s on {where}; {options.figures / name}.png)", flush=True)


def written(value: Any) -> str:
    """JSON with one line for each list of plain numbers, so that a curve is one line."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda match: re.sub(r"\s+", " ", match[0]), text) + "\n"


def rounded(value: Any) -> Any:
    """Plain JSON: four significant digits, and None for NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(key): rounded(entry) for key, entry in value.items()}
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def lines(value: Any, name: str = "") -> Iterable[str]:
    """One line for each group of numbers; long lists, which are curves, are in the JSON only."""
    plain = {k: v for k, v in value.items() if not isinstance(v, dict) and not (isinstance(v, list) and len(v) > 4)}
    if plain:
        yield f"{name:40} " + "  ".join(f"{key} {entry}" for key, entry in plain.items())
    for key, entry in value.items():
        if isinstance(entry, dict):
            yield from lines(entry, f"{name} / {key}" if name else key)


def picture(options: Options, name: str, figure: Figure) -> None:
    """One more figure of a study, NAME.png, beside that of `save`."""
    options.figures.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=160, facecolor=PAPER)
    files.write_bytes(options.figures / f"{name}.png", lighter(drawn.getvalue()))


def lighter(png: bytes) -> bytes:
    """The same picture with a palette of 256 colours: a third of the bytes, and no difference to the eye."""
    small = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()
