"""The report of a run that `training` has finished."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.report.findings import Findings
from nearkin.report.page import page, write
from nearkin.training import Outcome

__all__ = ["findings_of", "of_run", "rehearse"]

_REPEATED = ("precision@1",)  # the same number as recall@1


def of_run(outcome: Outcome, progress: Callable[[int, int], None] | None = None) -> Path:
    """Writes report.html into the folder of the run."""
    path = outcome.folder / "report.html"
    way_out = f"training is done and saved: make room, then nearkin train --resume {outcome.folder}"
    write(path, findings_of(outcome), progress, seed=outcome.recipe.training.seed, way_out=way_out)
    return path


def rehearse() -> None:
    """Makes a small report of invented findings and drops it: what this machine lacks shows before training, not after.

    The style and the script of the page are read, and Pillow encodes PNG and JPEG. So few items need no t-SNE.
    """
    embeddings = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    labels, names = torch.arange(8) // 2, [f"{i}.png" for i in range(8)]
    picture = lambda i: np.full((96 if i % 2 else 24, 24), i, np.uint8)  # noqa: E731  # as JPEG and as PNG
    page(Findings("", {}, {}, [], {}, embeddings, labels, None, list("abcd"), names, picture))


def findings_of(outcome: Outcome) -> Findings:
    """What a report shows of a finished run."""
    recipe, prepared, held = outcome.recipe, outcome.prepared, outcome.test
    items = prepared.items.take(held.everything)
    graded = items.labels is None or recipe.loss["name"] == "logratio"
    results = outcome.results | {"baseline_name": outcome.results["baseline"]}
    results["test"] = {
        who: {name: figure for name, figure in figures.items() if name not in _REPEATED}
        for who, figures in outcome.results["test"].items()
    }
    return Findings(
        title=f"{Path(recipe.data.source).name or recipe.data.source}, {recipe.loss['name']}, {recipe.encoder['name']}",
        recipe=recipe.plain(),
        data=_data(prepared.report) | {"closed": recipe.data.closed},
        history=_history(outcome.history),
        results=results,
        embeddings=outcome.embeddings,
        labels=None if items.labels is None or graded else torch.from_numpy(items.labels),
        targets=None if items.targets is None or not graded else torch.from_numpy(items.targets),
        classes=items.classes,
        names=items.names,
        picture=_picture(prepared.rows, held.everything) if prepared.baseline != "vectors" else None,
        notes=outcome.notes,
    )


def _history(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One learning rate per step, the head's."""

    def rate(rates: dict[str, float]) -> float:
        return rates["head"] if "head" in rates else max(rates.values())

    return [line | {"lr": rate(line["lr"])} if line["event"] == "step" else line for line in lines]


def _data(report: dict[str, Any]) -> dict[str, Any]:
    """What there was, in words: extremes by name, duplicates only where there are some."""

    def sizes(part: dict[str, Any]) -> dict[str, Any]:
        extremes = {
            key: f"{one['class']} ({one['items']})" for key, one in part.items() if key in ("smallest", "largest")
        }
        return {key: extremes.get(key, value) for key, value in part.items()}

    shown = {key: value for key, value in sizes(report).items() if key not in ("parts", "duplicates", "split")}
    shown = {key: value for key, value in shown.items() if value not in ([], "", None)}
    shown["split"] = report["split"].split(":")[0]
    shown["parts"] = {name: sizes(part) for name, part in report["parts"].items()}
    for where, found in report.get("duplicates", {}).items():
        pairs = found["pairs"] if isinstance(found, dict) else found
        if pairs:
            names = {"across": "duplicates across parts", "within": "duplicates within parts"}
            shown[names.get(where, "duplicates of another class")] = f"{pairs} pairs"
    return shown


def _picture(rows: Any, indices: NDArray[np.int64]) -> Callable[[int], NDArray[np.uint8]] | None:
    if hasattr(rows, "pixels"):  # a dataset of the user's own
        return None if rows.pixels(0) is None else lambda i: rows.pixels(int(indices[i]))

    def picture(i: int) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = np.asarray(rows[indices[i]])
        return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels

    return picture
