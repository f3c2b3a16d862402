"""The runs in a folder with their figures, from the files that each has written."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

from nearkin.core import files, toml
from nearkin.core.processes import started_at
from nearkin.training.metrics_log import MetricsLog
from nearkin.training.run_dir import CHECKPOINTS, LOCK

__all__ = ["list_runs"]

DEPTH = 3  # folders below the one that is asked for


def list_runs(folder: str | Path = "runs") -> list[dict[str, Any]]:
    """Every run in the folder or below it, the last one written first; what cannot be read says why in "state"."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: not a folder; runs are written into runs/ unless --out names another")
    return sorted(map(_described, _found(folder, DEPTH)), key=lambda run: -run["written"])


def _found(folder: Path, depth: int) -> list[Path]:
    if (folder / "recipe.toml").is_file():
        return [folder]
    if depth == 0:
        return []
    parts = sorted(part for part in folder.iterdir() if part.is_dir() and not part.is_symlink())
    return [run for part in parts for run in _found(part, depth - 1)]


def _described(folder: Path) -> dict[str, Any]:
    run: dict[str, Any] = {"run": str(folder), "written": _written(folder)}
    run |= {"source": None, "encoder": None, "loss": None, "state": None, "test": {}, "frozen": {}, "seconds": None}
    try:
        recipe = toml.read_file(folder / "recipe.toml")
        run |= {"source": recipe["data"]["source"], "encoder": recipe["encoder"]["name"]}
        unlabelled = recipe.get("unlabelled", {})
        run["loss"] = unlabelled["method"] if unlabelled.get("only") else recipe["loss"]["name"]
        if (folder / "results.json").is_file():
            results = files.read_json(folder / "results.json")
            run |= {"state": "finished", "test": _figures(results, "trained"), "seconds": results.get("seconds")}
            run["frozen"] = _figures(results, "baseline")
        else:
            run["state"] = _progress(folder, recipe)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        run["state"] = f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"
    return run


def _written(folder: Path) -> float:
    last = folder / "results.json"
    return (last if last.is_file() else folder / "recipe.toml").stat().st_mtime


def _figures(results: dict[str, Any], contender: str) -> dict[str, dict[str, float | None]]:
    tested = results["test"] if "pretraining" not in results else results.get("test", {})  # one without labels has none
    measured = tested.get(contender, {})
    return {name: measured[name] for name in ("recall@1", "map@r", "ndcg@10") if name in measured}


def _progress(folder: Path, recipe: dict[str, Any]) -> str:
    lines = MetricsLog(folder / "metrics.jsonl", writes=False).read()
    epoch = max((line["epoch"] for line in lines if line["event"] == "epoch"), default=0)
    unlabelled = recipe.get("unlabelled", {})
    if "method" in unlabelled and not (folder / CHECKPOINTS).is_dir():  # its training has not begun
        lines = MetricsLog(folder / "pretraining.jsonl", writes=False).read()
        epoch = max((line["epoch"] for line in lines if line["event"] == "epoch"), default=0)
        where = f"epoch {epoch} of {unlabelled['epochs']} of its pretraining"
    else:
        where = f"epoch {epoch} of {recipe['training']['epochs']}"
    return f"running, {where}" if _is_running(folder) else f"stopped at {where}; nearkin train --resume {folder}"


def _is_running(folder: Path) -> bool:
    """Whether the process that claimed the folder lives, as far as this machine can tell."""
    try:
        holder = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        here = holder["host"] == socket.gethostname()
        return here and (sys.platform == "win32" or started_at(int(holder["pid"])) > 0)  # there only the lock tells
    except (OSError, ValueError, KeyError, TypeError):
        return False
