"""metrics.jsonl: one line of JSON every few steps and every epoch."""

import json
from pathlib import Path
from typing import Any

from nearkin.core import files

__all__ = ["MetricsLog"]


class MetricsLog:
    """Appends lines; a run that resumes from a checkpoint first cuts the lines after it.

    writes: whether this process writes; of several ranks only the first does.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.cut_lines: set[tuple[str, int]] = set()  # event and step of those that come again

    def write(self, line: dict[str, Any]) -> None:
        if not self.writes:
            return
        way_out = f"make room, then nearkin train --resume {self.path.parent}"
        with files.explained(f"{self.path}: a line", way_out), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """The intact lines."""
        return self._read()[0]

    def cut(self, step: int, epochs: int) -> str | None:
        """Keeps the lines up to this step and this many epochs; returns a sentence about corrupt lines, if any.

        A last line without an end does not count as corrupt: a machine that went down may have written half of it.
        """
        if not self.writes:
            return None
        lines, corrupt = self._read()
        remaining = [
            line for line in lines if line["step"] <= step and (line["event"] != "epoch" or line["epoch"] <= epochs)
        ]
        self.cut_lines = {(line["event"], line["step"]) for line in lines if line not in remaining}
        files.write_text(self.path, "".join(json.dumps(line) + "\n" for line in remaining))
        return f"{self.path.name}: {corrupt} corrupt line{'s' * (corrupt > 1)} left out" if corrupt else None

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """The intact lines, and how many of those that end are corrupt."""
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        *ended, last = text.split("\n")
        lines = [_line(part) for part in ended if part.strip()]
        return [line for line in (*lines, _line(last)) if line is not None], lines.count(None)


def _line(text: str) -> dict[str, Any] | None:
    """A line as `write` received it; None where it is corrupt."""
    try:
        line = json.loads(text)
        json.dumps(line, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or line.get("event") not in ("step", "epoch"):
        return None
    counts = all(type(line.get(key)) is int for key in ("step", "epoch"))
    rates = line.get("lr") if line["event"] == "step" else {"": 0.0}
    sound = isinstance(rates, dict) and rates and all(isinstance(rate, int | float) for rate in rates.values())
    return line if counts and sound else None
