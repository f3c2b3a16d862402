"""Logs: one line of JSON an event, on stderr."""

import json
import logging
import sys
import time
from contextlib import suppress
from typing import Any, TextIO

__all__ = ["Journal", "config"]


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
        line = line.replace("\x7f", "\\u007f")  # the one control character that JSON lets pass
        with suppress(OSError, ValueError):  # nobody reads the log any more; requests are answered all the same
            print(line, file=self._stream or sys.stderr, flush=True)


class _Lines(logging.Handler):
    """What uvicorn says, as lines of the journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        more = {"trace": logging.Formatter().formatException(record.exc_info)} if record.exc_info else {}
        self._journal.say("server", record.levelname.lower(), text=record.getMessage(), **more)


def config(journal: Journal) -> None:
    """uvicorn's own words and all warnings go through the journal; who asks what is told by `limits.Door`."""
    logging.captureWarnings(True)  # a gallery warns of damaged rows
    for name in ("uvicorn", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [_Lines(journal)]
        logger.propagate = False
        logger.setLevel(logging.INFO)
