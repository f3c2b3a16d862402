"""The log of the service: `logging` with one JSON object per line, without tokens, queries or contents of requests."""

import json
import logging
import sys
import time
from typing import Any, TextIO

__all__ = ["JsonFormatter", "RepeatFilter", "capture_server_logs", "json_handler", "request_logger"]

REPEAT_SECONDS = 60.0  # in which the same warning is not written again
MAX_REMEMBERED = 1000  # warnings that are remembered


class JsonFormatter(logging.Formatter):
    """Events of the service: {"event": message, **record.fields}; all other records: {"event": "server", "text": …}.

    worker: number of the process, where there are several.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": stamp, "level": record.levelname.lower()} | self._worker
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        if fields is not None:
            line |= {"event": record.getMessage()} | fields
        else:
            line |= {"event": "server", "text": record.getMessage()}
        if repeated := getattr(record, "repeated", 0):
            line["repeated"] = repeated
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RepeatFilter(logging.Filter):
    """The same warning at most once in REPEAT_SECONDS; `record.repeated` counts those that were dropped before it."""

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[str, tuple[float, int]] = {}  # first line → when written, how many dropped since

    def filter(self, record: logging.LogRecord) -> bool:
        first_line, now = record.getMessage().split("\n")[0], time.monotonic()
        written_at, dropped = self._written.get(first_line, (-REPEAT_SECONDS, 0))
        if record.levelno >= logging.WARNING and now - written_at < REPEAT_SECONDS:
            self._written[first_line] = written_at, dropped + 1
            return False
        if len(self._written) >= MAX_REMEMBERED:
            self._written.clear()
        self._written[first_line] = now, 0
        record.repeated = dropped
        return True


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # generic at run time from Python 3.11 on
    def handleError(self, record: logging.LogRecord) -> None:
        """A log that cannot be written costs no request its answer."""


def json_handler(stream: TextIO | None = None, worker: int | None = None) -> logging.Handler:
    """Writes JSON lines to the stream, by default stderr."""
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(worker))
    return handler


def request_logger(stream: TextIO | None = None, quiet: bool = False, worker: int | None = None) -> logging.Logger:
    """The logger of the service: `.info("request", extra={"fields": {…}})`. quiet: warnings and errors only."""
    return _configure("nearkin.web", json_handler(stream, worker), logging.WARNING if quiet else logging.INFO)


def capture_server_logs(stream: TextIO | None = None, quiet: bool = False, worker: int | None = None) -> None:
    """Logs of uvicorn, asyncio and other libraries and all Python warnings go to the same log.

    `GuardMiddleware` logs the requests.
    """
    logging.captureWarnings(True)  # a gallery warns of damaged rows
    handler = json_handler(stream, worker)
    handler.addFilter(RepeatFilter())
    for name in ("uvicorn", "asyncio", "py.warnings"):
        _configure(name, handler, logging.WARNING if quiet else logging.INFO)
    logging.lastResort = handler  # of loggers that have no handler, as the parser of forms


def _configure(name: str, handler: logging.Handler, level: int) -> logging.Logger:
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level)
    return logger
