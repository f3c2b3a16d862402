"""Logs: one line of JSON an event, on stderr."""

import json
import logging
import sys
import time
from contextlib import suppress
from typing import Any, TextIO

__all__ = ["Journal", "config"]

REPEATED = 60.0  # seconds in which a warning is not written again
MOST = 1000  # warnings that are remembered


class Journal:
    """Writes events; never a token, a query or the content of a request."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream, self._quiet = stream, quiet

    def say(self, event: str, level: str = "info", **facts: Any) -> None:
        if self._quiet and level == "info":
            return
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        line = json.dumps({"time": stamp, "level": level, "event": event, **facts}, default=str)
        with suppress(OSError, ValueError):  # nobody reads the log any more; requests are answered all the same
            print(line, file=self._stream or sys.stderr, flush=True)


class _Lines(logging.Handler):
    """What uvicorn says, as lines of the journal; the same warning at most once in a while, however often it comes."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal
        self._told: dict[str, tuple[float, int]] = {}  # first line → when it was written, and how often it came since

    def emit(self, record: logging.LogRecord) -> None:
        text, now = record.getMessage(), time.monotonic()
        first = text.split("\n")[0]
        since, more = self._told.get(first, (-REPEATED, 0))
        if record.levelno >= logging.WARNING and now - since < REPEATED:
            self._told[first] = since, more + 1
            return
        if len(self._told) >= MOST:
            self._told.clear()
        self._told[first] = now, 0
        facts: dict[str, Any] = {"repeated": more} if more else {}
        if record.exc_info:
            facts["trace"] = logging.Formatter().formatException(record.exc_info)
        self._journal.say("server", record.levelname.lower(), text=text, **facts)


def config(journal: Journal) -> None:
    """What uvicorn and asyncio say and all warnings go through the journal; who asks what is told by `limits.Door`."""
    logging.captureWarnings(True)  # a gallery warns of damaged rows
    for name in ("uvicorn", "asyncio", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [_Lines(journal)]
        logger.propagate = False
        logger.setLevel(logging.INFO)
