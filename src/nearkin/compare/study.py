"""The study: one SQLite file with the plan and every finished training, none of which is ever trained again.

A row is added in one transaction when its training ends: a kill loses the trainings under way and nothing else. Only
the main process writes.
"""

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.compare.plan import Plan
from nearkin.compare.protocol import Job
from nearkin.core.files import Lock
from nearkin.training.config.recipe import Recipe

__all__ = ["Request", "Study", "load_plan", "requested_settings", "save_plan"]

FORMAT = 2  # 1: trained in other batches where classes are few
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trainings (
  key TEXT PRIMARY KEY, stage TEXT NOT NULL, loss TEXT NOT NULL, seed INTEGER NOT NULL, fold INTEGER NOT NULL,
  setting TEXT NOT NULL, result TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tests (
  key TEXT PRIMARY KEY, loss TEXT NOT NULL, seed INTEGER NOT NULL, shapes TEXT NOT NULL, numbers BLOB NOT NULL);
"""


class Study:
    """A folder's study.db; only one process may open it at a time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "study.db"
        self._lock = Lock(folder / "study.lock", f"{folder}: a comparison is already running in it")
        self._db = sqlite3.connect(self.path, isolation_level=None, timeout=10)
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            self.close()
            raise ValueError(f"{self.path}: not a readable study ({error}); choose another --out") from None

    def _open(self) -> None:
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_TABLES)
        version = self.fact("format")
        if version is None:
            self.set_fact("format", FORMAT)
        elif version != FORMAT:
            self.close()
            raise ValueError(f"{self.path}: it has format {version}, this version reads {FORMAT}; choose another --out")

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def fact(self, name: str) -> Any:
        """A plain value, or None."""
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_fact(self, name: str, value: Any) -> None:
        self._write("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def result(self, job: Job) -> Any:
        """The result of a finished training, or None."""
        row = self._db.execute("SELECT result FROM trainings WHERE key = ?", (key(job),)).fetchone()
        return None if row is None else json.loads(row[0])

    def add_result(self, job: Job, result: Any) -> None:
        values = (key(job), job.stage, job.loss, job.seed, job.fold, json.dumps(job.setting), json.dumps(result))
        self._write("INSERT OR REPLACE INTO trainings VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def test_figures(self, job: Job) -> dict[str, NDArray[np.float64]] | None:
        """The figures of a finished test, per query, or None."""
        row = self._db.execute("SELECT shapes, numbers FROM tests WHERE key = ?", (key(job),)).fetchone()
        if row is None:
            return None
        flat, figures, start = np.frombuffer(zlib.decompress(row[1]), "<f8"), {}, 0
        for name, shape in json.loads(row[0]).items():
            size = int(np.prod(shape))
            figures[name] = flat[start : start + size].reshape(shape)
            start += size
        return figures

    def add_test(self, job: Job, figures: dict[str, NDArray[np.float64]]) -> None:
        shapes = {name: list(values.shape) for name, values in figures.items()}
        flat = np.concatenate([np.asarray(values, "<f8").reshape(-1) for values in figures.values()])
        row = (key(job), job.loss, job.seed, json.dumps(shapes), zlib.compress(flat.tobytes()))
        self._write("INSERT OR REPLACE INTO tests VALUES (?, ?, ?, ?, ?)", row)

    def _write(self, statement: str, values: Iterable[Any]) -> None:
        try:
            self._db.execute(statement, tuple(values))
        except sqlite3.OperationalError as error:
            raise ValueError(
                f"{self.path}: cannot be written ({error}); make room, then the same command continues"
            ) from None


def key(job: Job) -> str:
    """A hash of everything that the result depends on."""
    return hashlib.sha256(json.dumps(job._asdict(), sort_keys=True).encode()).hexdigest()


class Request(NamedTuple):
    """What a comparison compares: its settings and the fingerprint of its items. Saved with its plan."""

    asked: dict[str, Any]
    items: str


def requested_settings(recipe: Recipe, losses: list[str]) -> dict[str, Any]:
    """Paths and devices may change between two commands, settings may not."""
    settings = recipe.model_dump(exclude_unset=True, mode="json")
    for section, names in (("training", ("device", "workers")), ("data", ("source", "root"))):
        for name in names:
            settings.get(section, {}).pop(name, None)
    return {"recipe": {section: part for section, part in settings.items() if part}, "losses": losses}


def load_plan(study: Study, request: Request, numbers: dict[str, int | None]) -> Plan | None:
    """The plan of a comparison that was begun here, None for a new one; another comparison is refused."""
    before, folder = study.fact("begun"), study.path.parent
    if before is None:
        return None
    if before["asked"] != request.asked:
        what = "other losses" if before["asked"]["recipe"] == request.asked["recipe"] else "other settings"
        raise ValueError(f"{folder}: its comparison was begun with {what}; choose another --out")
    if before["items"] != request.items:
        raise ValueError(f"{folder}: its comparison was begun with other items; choose another --out")
    plan = Plan(**before["plan"])
    for name, value in numbers.items():
        if value is not None and value != getattr(plan, name):
            raise ValueError(
                f"{folder}: its comparison was begun with --{name} {getattr(plan, name)}, got {value}; "
                f"leave it out to continue, or choose another --out"
            )
    return plan


def save_plan(study: Study, request: Request, plan: Plan) -> None:
    """From now on the study belongs to this comparison."""
    study.set_fact("begun", request._asdict() | {"plan": plan._asdict()})
