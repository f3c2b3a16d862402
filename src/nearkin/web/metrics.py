"""Counters of the service in Prometheus's text format; several processes share them through mapped memory.

Every process writes its own row of numbers, and whoever is asked adds the rows. A worker that replaces another one goes
on with its row: no counter ever goes back.
"""

import mmap
import os
import re
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BUCKETS", "CONTENT_TYPE", "Metrics", "nbytes"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds; the last one is +Inf
STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 499, 500, 503)  # others are "other"
ROUTES = 64  # rows of the table; the last one is for addresses that do not exist
OTHER = "other"
COUNTERS = {
    "nearkin_rejected_total": "Requests and connections refused with 503 because the service was full or ending.",
    "nearkin_enrolled_rows_total": "Rows added, by requests and from folders.",
    "nearkin_reloads_total": "Reloads of the run that took place.",
    "nearkin_reloads_refused_total": "Reloads that were refused; the run before went on.",
    "nearkin_worker_restarts_total": "Workers that died and were started again.",
}
QUEUES = ("decoder", "decoder of long files", "decoder of large pictures", "encoder", "writer", "reader", "explorer")
_WIDTH = len(STATUSES) + 1 + len(BUCKETS) + 1 + 1  # per route: statuses, buckets, sum of seconds
_SCALARS = ROUTES * _WIDTH
_ACTIVE = _SCALARS + len(COUNTERS)
_CONNECTIONS = _ACTIVE + 1
_QUEUES = _CONNECTIONS + 1
_PID = _QUEUES + len(QUEUES)
SIZE = _PID + 1


def nbytes(processes: int) -> int:
    """Bytes that so many processes share."""
    return processes * SIZE * 8


class Metrics:
    """The numbers of one process, and the sums over all. number: its row.

    file: a descriptor that all processes share, of `nbytes(processes)`; without it the numbers are this process's only.
    begun: it counts among the processes from now on, else from `begin` on.
    """

    def __init__(self, processes: int = 1, number: int = 0, file: int | None = None, begun: bool = True) -> None:
        self._table: NDArray[np.float64]
        if file is None:
            self._table = np.zeros((processes, SIZE))
        else:
            self._table = np.frombuffer(mmap.mmap(file, nbytes(processes)), np.float64).reshape(processes, SIZE)
        self._own = self._table[number]
        self._lock = threading.Lock()  # of this row's writers: the event loop, and threads that enrol
        self._names: list[str] = []
        self._exact: dict[str, int] = {}
        self._patterns: list[tuple[re.Pattern[str], int]] = []
        self._own[_ACTIVE : _PID + 1] = 0
        if begun:
            self.begin()

    def begin(self) -> None:
        self._own[_PID] = os.getpid()

    def name_routes(self, paths: Iterable[str]) -> None:
        """The addresses of the app: "/api/items/{id}"; those of the page count as one."""
        names = sorted({_shown(path) for path in paths})
        if len(names) >= ROUTES:
            raise ValueError(f"at most {ROUTES - 1} addresses are counted, got {len(names)}")
        self._names = names
        self._exact = {name: i for i, name in enumerate(names) if "{" not in name}
        self._patterns = [
            (re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(name))), i)
            for i, name in enumerate(names)
            if "{" in name
        ]

    def observe(self, path: str, status: int, seconds: float) -> None:
        """One answered request. The time of a 503 is not counted: it says nothing about the work."""
        start = self._route(path) * _WIDTH
        kind = STATUSES.index(status) if status in STATUSES else len(STATUSES)
        with self._lock:
            self._own[start + kind] += 1
            if status == 503:
                self._own[_SCALARS] += 1
                return
            self._own[start + len(STATUSES) + 1 + bisect_left(BUCKETS, seconds)] += 1
            self._own[start + _WIDTH - 1] += seconds

    def add(self, counter: str, amount: int = 1) -> None:
        with self._lock:
            self._own[_SCALARS + list(COUNTERS).index(counter)] += amount

    def count_enrolled(self, rows: int) -> None:
        self.add("nearkin_enrolled_rows_total", rows)

    def gauge(self, active: int, waiting: Mapping[str, int]) -> None:
        """Requests under way, and items that wait in each queue."""
        self._own[_ACTIVE] = active
        for name, items in waiting.items():
            self._own[_QUEUES + QUEUES.index(name)] = items

    def connected(self, connections: int) -> None:
        """Open connections of this process."""
        self._own[_CONNECTIONS] = connections

    def forget(self, number: int) -> None:
        """A process has ended: its counters stay, what was under way does not."""
        self._table[number, _ACTIVE : _PID + 1] = 0

    def text(self, rows: int | None) -> str:
        """All processes together. rows: of the gallery; None where it is unavailable."""
        total = self._table.sum(axis=0)
        lines = [*self._requests(total), *self._latency(total)]
        for i, (name, words) in enumerate(COUNTERS.items()):
            lines += _family(name, "counter", words, [("", total[_SCALARS + i])])
        lines += _family("nearkin_requests_active", "gauge", "Requests under way.", [("", total[_ACTIVE])])
        lines += _family("nearkin_connections", "gauge", "Open connections.", [("", total[_CONNECTIONS])])
        waiting = [(f'{{queue="{name}"}}', total[_QUEUES + i]) for i, name in enumerate(QUEUES)]
        lines += _family("nearkin_queue_length", "gauge", "Items that wait, by queue.", waiting)
        if rows is not None:
            lines += _family("nearkin_gallery_rows", "gauge", "Rows of the gallery.", [("", rows)])
        pids = {number: int(row[_PID]) for number, row in enumerate(self._table) if row[_PID]}
        lines += _family(
            "nearkin_processes", "gauge", "Processes that answer, and their supervisor.", [("", len(pids))]
        )
        memory = [(f'{{process="{number}"}}', size) for number, pid in pids.items() if (size := _resident(pid))]
        words = "Resident memory of each process, shared pages included; 0 is the supervisor where there are workers."
        lines += _family("nearkin_resident_memory_bytes", "gauge", words, memory)
        return "\n".join(lines) + "\n"

    def _route(self, path: str) -> int:
        shown = _shown(path)
        if (exact := self._exact.get(shown)) is not None:
            return exact
        return next((i for pattern, i in self._patterns if pattern.fullmatch(shown)), ROUTES - 1)

    def _rows(self, total: NDArray[np.float64]) -> list[tuple[str, NDArray[np.float64]]]:
        table = total[:_SCALARS].reshape(ROUTES, _WIDTH)
        named = [*enumerate(self._names), (ROUTES - 1, OTHER)]
        return [(name, table[i]) for i, name in named if table[i].any()]

    def _requests(self, total: NDArray[np.float64]) -> list[str]:
        counts = [
            (f'{{route="{name}",status="{status}"}}', row[i])
            for name, row in self._rows(total)
            for i, status in enumerate((*STATUSES, OTHER))
            if row[i]
        ]
        return _family("nearkin_requests_total", "counter", "Requests, by address and status.", counts)

    def _latency(self, total: NDArray[np.float64]) -> list[str]:
        lines: list[tuple[str, Any]] = []
        for name, row in self._rows(total):
            counts = np.cumsum(row[len(STATUSES) + 1 : -1])
            if counts[-1]:
                bounds = [*(f"{bound:g}" for bound in BUCKETS), "+Inf"]
                lines += [
                    (f'_bucket{{route="{name}",le="{le}"}}', n) for le, n in zip(bounds, counts.tolist(), strict=True)
                ]
                lines += [(f'_sum{{route="{name}"}}', row[-1]), (f'_count{{route="{name}"}}', counts[-1])]
        words = "From the head of a request to the end of its answer, by address; without answers of status 503."
        return _family("nearkin_request_seconds", "histogram", words, lines)


def _family(name: str, kind: str, words: str, samples: Sequence[tuple[str, Any]]) -> list[str]:
    head = [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
    return head + [f"{name}{suffix} {_number(value)}" for suffix, value in samples]


def _number(value: Any) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _shown(path: str) -> str:
    return "/page/{file}" if path.startswith("/page/") else path


def _resident(pid: int) -> int:
    """Bytes; 0 where the system does not tell (other than Linux), or the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0
