"""The heartbeat: a thread in every process that shows the others it is alive, and notices when one of them is not.

One rule: a rank is lost when what it shows stands still. A beat may do so for `patience` seconds, and not at all if the
process is gone (known of the same machine only); progress for longer, and only while others are ahead and wait. What
happens then is the group's choice. If it raises, the failure is kept for the main thread to raise. If it exits, this
thread ends the process with exit code 4, because the main thread may hang in an exchange; one rank prints which rank
was lost.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from nearkin.core.processes import started_at

__all__ = ["RANK_LOST", "Failure", "Heartbeat", "seconds_of_patience"]

RANK_LOST = 4  # exit code: another rank is lost
_INTERVAL = 0.5  # seconds between two beats
_WAIT = 4.0  # seconds without progress after which a rank takes itself for waiting
_MAX_LAG = 40.0  # seconds that a training step of one rank may take longer than that of another
_WATCHED = 8  # ranks that each rank watches


def seconds_of_patience() -> float:
    """Seconds for which a rank may be silent, unless a group says so: `NEARKIN_RANK_TIMEOUT`, or 20."""
    text = os.environ.get("NEARKIN_RANK_TIMEOUT", "20")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 2 <= seconds <= 3600:
        raise ValueError(f"NEARKIN_RANK_TIMEOUT must be a number of seconds from 2 to 3600, got {text!r}")
    return seconds


class Failure(NamedTuple):
    """Why all ranks end, in the words of the first that knew, and the exit code."""

    sentence: str
    code: int


class _Beat(NamedTuple):
    """What a rank shows. Process numbers may be reused, so the start of the process belongs to it."""

    number: int = 0
    progress: int = 0
    left: bool = False
    machine: str = ""
    process: int = 0
    started: int = 0


class Heartbeat:
    """The thread of one process, and what it knows. store: its own, over a connection of its own.

    exits: whether this thread ends the process when a rank fails, or keeps `failure` for the main thread.
    """

    def __init__(self, rank: int, size: int, store: Any, patience: float, exits: bool) -> None:
        self.rank, self.size, self.patience, self.exits = rank, size, patience, exits
        self.progress = 0  # grows with every part of a training step, and with every call that all have ended
        self.failure: Failure | None = None  # of another rank
        # The next few are enough: those before a lost rank notice, and tell all.
        self._watched = [(rank + place) % size for place in range(1, min(size, _WATCHED + 1))]
        self._shown: dict[tuple[int, str], tuple[int, float]] = {}  # what each rank has shown last, and since when
        self._beats: dict[int, _Beat] = {}  # the last of each
        self._own = _Beat(0, 0, False, _machine(), os.getpid(), started_at(os.getpid()))
        self._looked_at, self._store = time.monotonic(), store
        self._stopped = threading.Event()
        self._lock = threading.RLock()  # the store's connection takes one request at a time
        self._thread = threading.Thread(target=self._run, name="nearkin-heartbeat", daemon=True)

    def start(self, seconds: float | None) -> None:
        """Waits until all watched ranks have started theirs, at most so many seconds or as long as the store waits."""
        self._beat()
        keys = [f"beat/{rank}" for rank in self._watched]
        self._store.wait(keys) if seconds is None else self._store.wait(keys, timedelta(seconds=seconds))
        self._read()
        self._thread.start()

    def absent(self) -> list[int]:
        """The watched ranks that have not started."""
        return [rank for rank in self._watched if not self._store.check([f"beat/{rank}"])]

    def leave(self) -> None:
        """This rank has finished; the others do not wait for its beats any more."""
        with self._lock:
            self._beat(left=True)

    def stop(self) -> None:
        """No more beats. Without `leave` before it, the others take this rank for lost."""
        self._stopped.set()

    def report(self, sentence: str, code: int) -> bool:
        """Tells all ranks why they end; whether this rank is the first to do so."""
        with self._lock:
            message = json.dumps([sentence, code, self.rank])
            with suppress(Exception):  # without a store no other rank can report: then this one does
                return bool(self._store.compare_set("failure", "", message).decode() == message)
        return True

    def reported(self) -> Failure | None:
        """What another rank has reported, if any."""
        with self._lock:
            if not self._store.check(["failure"]):
                return None
            sentence, code, rank = json.loads(self._store.get("failure"))
        return None if rank == self.rank else Failure(sentence, code)

    def await_failure(self, exchange_failed: bool) -> None:
        """Looks for the failure of another rank, of which an error here may be an echo; exits, or sets `failure`.

        exchange_failed: another rank must have failed, so there is time to find out which; one that has not come to
        the exchange stays behind this one.
        """
        self.progress += exchange_failed and self.exits
        patience = self._max_lag if self.exits else self.patience
        end = time.monotonic() + (patience + 10 * _INTERVAL if exchange_failed else 2 * _INTERVAL)
        while True:
            self._look()
            if time.monotonic() >= end or self.failure is not None:
                return
            time.sleep(_INTERVAL / 5)

    def exit_after(self, failure: Failure | None) -> None:
        """Exits a moment after the rank that has reported: as soon as one has ended, torchrun ends all."""
        time.sleep(2 * _INTERVAL)
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(RANK_LOST if failure is None else failure.code)  # at once: the main thread may hang in an exchange

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL):
            self._look()

    def _look(self) -> None:
        """One beat, and a look at the others."""
        with self._lock:
            try:
                self._beat()
                failure = self.reported()
                lost = None if failure is not None or self._own.left or self.failure else self._lost_rank()
            except Exception:
                if self._stopped.is_set() or self._own.left:
                    return
                failure, lost = None, self._lost_store()
            if failure is not None and not self._own.left:
                self.failure = failure
                if self.exits:
                    self.exit_after(failure)
            if lost is not None:
                self._lose(*lost)

    def _lose(self, rank: int, reason: str) -> None:
        at = self._beats.get(rank, _Beat())
        where = f" (process {at.process} on {at.machine.split()[0]})" if at.machine else ""
        sentence = f"rank {rank}{where} {reason}" if rank >= 0 else reason
        sentence += "; all ranks end, and what was saved stays" if self.exits else ""
        failure, first = Failure(sentence, RANK_LOST), self.report(sentence, RANK_LOST)
        if not self.exits:
            self.failure = (None if first else self.reported()) or failure
            return
        if first:
            sys.stderr.write(f"rank {self.rank}: {sentence}\n")
        _kill(at)
        self.exit_after(failure)

    def _beat(self, left: bool = False) -> None:
        self._own = self._own._replace(number=self._own.number + 1, progress=self.progress, left=self._own.left or left)
        self._store.set(f"beat/{self.rank}", json.dumps(self._own))

    def _read(self) -> None:
        self._beats = {rank: _Beat(*json.loads(self._store.get(f"beat/{rank}"))) for rank in self._watched}

    def _lost_rank(self) -> tuple[int, str] | None:
        """The rank that is lost, if one is, and how that shows."""
        dead = [rank for rank, beat in self._beats.items() if not _lives(beat)]  # first: a farewell comes before
        now = time.monotonic()
        if now - self._looked_at > 4 * _INTERVAL:  # this process was stopped or starved, and has missed beats
            self._shown = {}
        self._looked_at = now
        self._read()
        waits = self._still(self.rank, "progress", self.progress) > _WAIT
        last = self.progress, 0.0, self.rank
        for rank, beat in self._beats.items():
            silent = self._still(rank, "number", beat.number)
            still = self._still(rank, "progress", beat.progress)
            if beat.left:
                continue
            if rank in dead:  # perhaps it has reported why
                return None if self._store.check(["failure"]) else (rank, "was killed or died")
            if silent > self.patience:
                return rank, f"gave no sign of life for {silent:.0f} s"
            last = min(last, (beat.progress, -still, rank))
        progress, still, rank = last[0], -last[1], last[2]  # one that is only late has come further than one that hangs
        if progress < self.progress and waits and still > self._max_lag:
            return rank, f"has not moved for {still:.0f} s while others wait for it"
        return None

    def _lost_store(self) -> tuple[int, str]:
        """Which rank is lost with the store: the one that served it, or torchrun."""
        for _ in range(10):  # a process takes a moment to die
            for rank, beat in self._beats.items():
                if not _lives(beat):
                    return rank, "was killed or died"
            time.sleep(_INTERVAL / 5)
        return -1, "the store in which the ranks meet is gone: torchrun has ended"

    def _still(self, rank: int, what: str, value: int) -> float:
        """Seconds for which a rank has shown the same."""
        if self._shown.get((rank, what), (None, 0.0))[0] != value:
            self._shown[rank, what] = value, self._looked_at
        return self._looked_at - self._shown[rank, what][1]

    @property
    def _max_lag(self) -> float:
        return max(_MAX_LAG, 2 * self.patience)


def _lives(beat: _Beat) -> bool:
    """Whether its process exists; of one on another machine only its silence tells."""
    return beat.machine != _machine() or started_at(beat.process) == beat.started


def _kill(beat: _Beat) -> None:
    """Ends a rank of this machine that would hang on; it is the same process that joined."""
    if beat.machine == _machine() and beat.started and _lives(beat):
        with suppress(OSError):
            os.kill(beat.process, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has no SIGKILL


def _machine() -> str:
    """The machine, or the part of it, in which process numbers mean the same."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
