"""The report of a run that `training` has finished."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.report.findings import Findings
from nearkin.report.page import write
from nearkin.training import Outcome

__all__ = ["findings_of", "of_run"]

_REPEATED = ("precision@1",)  # the same number as recall@1


def of_run(outcome: Outcome, progress: Callable[[int, int], None] | None = None) -> Path:
    """Writes report.html into the folder of the run."""
    path = outcome.folder / "report.html"
    write(path, findings_of(outcome), progress, seed=outcome.recipe.training.seed)
    return path


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
        data=prepared.report | {"closed": recipe.data.closed},
        history=[_with_one_rate(line) for line in outcome.history],
        results=results,
        embeddings=outcome.embeddings,
        labels=None if items.labels is None or graded else torch.from_numpy(items.labels),
        targets=None if items.targets is None or not graded else torch.from_numpy(items.targets),
        classes=items.classes,
        names=items.names,
        picture=_picture(prepared.rows, held.everything) if prepared.items.vectors is None else None,
        notes=outcome.notes,
    )


def _with_one_rate(line: dict[str, Any]) -> dict[str, Any]:
    """The log has a rate a part; the page shows the head's."""
    rates = line.get("lr")
    return line | {"lr": rates["head"] if "head" in rates else max(rates.values())} if isinstance(rates, dict) else line


def _picture(rows: NDArray[Any], indices: NDArray[np.int64]) -> Callable[[int], NDArray[np.uint8]]:
    def picture(i: int) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = np.asarray(rows[indices[i]])
        return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels

    return picture
