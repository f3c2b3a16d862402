"""The study: one SQLite file with the plan and every finished training. What is in it is never trained again.

A row is added in one transaction when its training is done, so that a kill at any moment loses the trainings that were
under way and nothing else. Only the main process writes.
"""

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.compare.protocol import Job
from nearkin.core.files import Lock

__all__ = ["Study"]

FORMAT = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trainings (
  key TEXT PRIMARY KEY, stage TEXT NOT NULL, loss TEXT NOT NULL, seed INTEGER NOT NULL, fold INTEGER NOT NULL,
  setting TEXT NOT NULL, result TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tests (
  key TEXT PRIMARY KEY, loss TEXT NOT NULL, seed INTEGER NOT NULL, shapes TEXT NOT NULL, numbers BLOB NOT NULL);
"""


class Study:
    """A folder's study.db; opening it twice at once is refused."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "study.db"
        self._lock = Lock(folder / "study.lock", f"{folder}: a comparison is running in it already")
        self._db = sqlite3.connect(self.path, isolation_level=None, timeout=10)
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            self.close()
            raise ValueError(f"{self.path}: not a study that can be read ({error}); choose another --out") from None

    def _open(self) -> None:
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_TABLES)
        made = self.fact("format")
        if made is None:
            self.note("format", FORMAT)
        elif made != FORMAT:
            self.close()
            raise ValueError(f"{self.path}: it has format {made}, this version reads {FORMAT}; choose another --out")

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def fact(self, name: str) -> Any:
        """A plain value, or None."""
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def note(self, name: str, value: Any) -> None:
        self._write("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def result(self, job: Job) -> Any:
        """What a finished training gave, or None."""
        row = self._db.execute("SELECT result FROM trainings WHERE key = ?", (key(job),)).fetchone()
        return None if row is None else json.loads(row[0])

    def keep(self, job: Job, result: Any) -> None:
        values = (key(job), job.stage, job.loss, job.seed, job.fold, json.dumps(job.setting), json.dumps(result))
        self._write("INSERT OR REPLACE INTO trainings VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def tested(self, job: Job) -> dict[str, NDArray[np.float64]] | None:
        """The figures of a finished test, query by query, or None."""
        row = self._db.execute("SELECT shapes, numbers FROM tests WHERE key = ?", (key(job),)).fetchone()
        if row is None:
            return None
        flat, found, start = np.frombuffer(zlib.decompress(row[1]), "<f8"), {}, 0
        for name, shape in json.loads(row[0]).items():
            size = int(np.prod(shape))
            found[name] = flat[start : start + size].reshape(shape)
            start += size
        return found

    def keep_test(self, job: Job, figures: dict[str, NDArray[np.float64]]) -> None:
        shapes = {name: list(values.shape) for name, values in figures.items()}
        flat = np.concatenate([np.asarray(values, "<f8").reshape(-1) for values in figures.values()])
        row = (key(job), job.loss, job.seed, json.dumps(shapes), zlib.compress(flat.tobytes()))
        self._write("INSERT OR REPLACE INTO tests VALUES (?, ?, ?, ?, ?)", row)

    def finished(self) -> int:
        """How many trainings are in it."""
        return int(self._db.execute("SELECT COUNT(*) FROM trainings").fetchone()[0])

    def _write(self, statement: str, values: Iterable[Any]) -> None:
        try:
            self._db.execute(statement, tuple(values))
        except sqlite3.OperationalError as error:
            way_out = "make room, then the same command goes on"
            raise ValueError(f"{self.path}: could not be written ({error}); {way_out}") from None


def key(job: Job) -> str:
    """Of everything that the result depends on."""
    return hashlib.sha256(json.dumps(job._asdict(), sort_keys=True).encode()).hexdigest()
