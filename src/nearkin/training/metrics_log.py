"""metrics.jsonl: a line of JSON for every few steps and every epoch, also as TensorBoard events on request."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearkin.core import files

__all__ = ["Journal"]


class Journal:
    """Appends lines; a run that goes on from a checkpoint first cuts what came after it.

    writes: whether this process is the one that does; of several ranks only the first is.
    """

    def __init__(self, path: Path, tensorboard: bool = False, writes: bool = True) -> None:
        self.path, self.tensorboard, self.writes = path, tensorboard, writes
        self._board: Any = None
        if tensorboard and find_spec("tensorboard") is None:
            raise ValueError("training.tensorboard needs tensorboard: pip install 'nearkin[track]'")

    def write(self, line: dict[str, Any]) -> None:
        if not self.writes:
            return
        way_out = f"make room, then nearkin train --resume {self.path.parent}"
        with files.explained(f"{self.path}: a line", way_out), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        if not self.tensorboard:
            return
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=line["step"])
        for name, value in _numbers(line):
            self._board.add_scalar(f"{line['event']}/{name}", value, line["step"])
        self._board.flush()

    def read(self) -> list[dict[str, Any]]:
        """The whole lines."""
        return self._read()[0]

    def cut(self, step: int, epochs: int) -> str | None:
        """Only what had happened by this step, and by the end of so many epochs, remains. A sentence on damaged lines.

        A last line that does not end is none of these: a machine that went down may have written half of it.
        """
        if not self.writes:
            return None
        lines, damaged = self._read()
        kept = [
            line for line in lines if line["step"] <= step and (line["event"] != "epoch" or line["epoch"] <= epochs)
        ]
        files.write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        return f"{self.path.name}: {damaged} damaged line{'s' * (damaged > 1)} left out" if damaged else None

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """The whole lines, and how many of those that end are damaged."""
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        *ended, last = text.split("\n")
        found = [_line(part) for part in ended if part.strip()]
        whole = [line for line in (*found, _line(last)) if line is not None]
        return whole, found.count(None)


def _line(text: str) -> dict[str, Any] | None:
    """A line as `write` was given it; None where it is damaged."""
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


def _numbers(line: dict[str, Any], before: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in line.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "epoch"):
            found.append((before + name, float(value)))
    return found
