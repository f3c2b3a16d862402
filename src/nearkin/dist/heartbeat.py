"""How ranks watch over one another: a thread in each gives signs of life and looks for those of the others.

A rank that was killed is seen by its process (on the same machine, at once) or by its silence; one that was stopped by
its silence; one that hangs by its steps, which stay behind, or because it alone misses nobody. Then every rank ends
with exit code 4, and one of them says which rank it was. `NEARKIN_RANK_TIMEOUT`: seconds of silence that are allowed,
20 without it.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

__all__ = ["LOST", "Pulse", "Watching", "patience"]

LOST = 4  # exit code: another rank is gone
_BEAT = 0.5  # seconds between two signs of life
_STILL = 40.0  # seconds that a step of one rank may take longer than that of another
_WATCHED = 8  # ranks that each rank looks after


class Pulse:
    """What the thread tells of its rank."""

    moves = 0  # grows with every part of a step
    busy = 0  # > 0: at something that may take any time
    broken = 0.0  # since when an exchange has failed


class Fault(NamedTuple):
    """Why all ranks end, as the first that knew of it has said."""

    sentence: str
    code: int


class Watching:
    """The thread, and what it knows. `leave` when this rank's work is done; `claim` when it has failed."""

    def __init__(self, pulse: Pulse, rank: int, size: int, store: Any) -> None:
        self.pulse, self.rank, self.size, self.store = pulse, rank, size, store
        self.patience = patience()
        # The next few are enough: whoever is gone is missed by those before it, who tell everybody.
        self.others = [(rank + place) % size for place in range(1, min(size, _WATCHED + 1))]
        self.seen: dict[int, tuple[str, float]] = {}  # of each rank: its last sign of life, and when it was new
        self.moved: dict[int, tuple[int, float]] = {}  # its step, and since when
        self.places: dict[int, tuple[str, int, int]] = {}  # machine, process, and when that started
        self.beats, self.left, self.looked = 0, False, time.monotonic()
        self._ended = threading.Event()
        self._lock = threading.Lock()  # the store's connection takes one question at a time
        self._thread = threading.Thread(target=self._run, name="nearkin-watch", daemon=True)

    def start(self) -> None:
        """All ranks are there, since they have met already; each says where it lives."""
        place = [_machine(), os.getpid(), _started(os.getpid())]
        self.store.set(f"place/{self.rank}", json.dumps(place))
        self._beat()
        self.store.wait([f"{key}/{rank}" for rank in self.others for key in ("place", "beat")])
        for rank in self.others:
            host, process, started = json.loads(self.store.get(f"place/{rank}"))
            self.places[rank] = host, process, started
        self._thread.start()

    def leave(self) -> None:
        """This rank is done; nobody will miss it."""
        with self._lock:
            self.left = True
            self._beat()

    def stop(self) -> None:
        self._ended.set()

    def claim(self, sentence: str, code: int) -> bool:
        """Whether this rank is the first to say why all end."""
        with self._lock:
            mine = json.dumps([sentence, code, self.rank])
            with suppress(Exception):  # a store that is gone cannot tell others: then this rank speaks for itself
                return bool(self.store.compare_set("fault", "", mine).decode() == mine)
        return True

    def verdict(self) -> Fault | None:
        """What another rank has said, if any."""
        with self._lock:
            return self._fault()

    def conclude(self, broken: bool) -> None:
        """Ends this process if another rank is at fault. broken: one must be, so there is time to find out which."""
        self.pulse.broken = time.monotonic() if broken else 0.0
        end = time.monotonic() + (self.patience + 10 * _BEAT if broken else 2 * _BEAT)
        while True:
            self._look()
            if time.monotonic() >= end:
                return
            time.sleep(_BEAT / 5)

    def follow(self, fault: Fault | None) -> None:
        """Ends a moment after the rank that has claimed the fault: as soon as one has ended, torchrun ends all."""
        time.sleep(2 * _BEAT)
        self.quit(fault)

    def quit(self, fault: Fault | None) -> None:
        """Ends this process at once: its main thread may wait for ever in an exchange."""
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(fault.code if fault is not None else LOST)

    def _run(self) -> None:
        while not self._ended.wait(_BEAT):
            self._look()

    def _look(self) -> None:
        with self._lock:
            try:
                self._beat()
                fault = self._fault()
                found = None if fault is not None or self.left else self._missing()
            except Exception:
                if self._ended.is_set() or self.left:
                    return
                fault, found = None, self._without_store()
        if fault is not None and not self.left:
            self.follow(fault)
        if found is not None:
            rank, what = found
            name = f"rank {rank}{self._place(rank)} " if rank >= 0 else ""
            sentence = f"{name}{what}; all ranks end, and what was saved stays"
            if self.claim(sentence, LOST):
                sys.stderr.write(f"rank {self.rank}: {sentence}\n")
            self._finish_off(rank)
            self.quit(Fault(sentence, LOST))

    def _beat(self) -> None:
        self.beats += 1
        state = "left" if self.left else "broken" if self.pulse.broken else "busy" if self.pulse.busy else "on"
        self.store.set(f"beat/{self.rank}", f"{self.beats} {self.pulse.moves} {state}")

    def _fault(self) -> Fault | None:
        if not self.store.check(["fault"]):
            return None
        sentence, code, rank = json.loads(self.store.get("fault"))
        return None if rank == self.rank else Fault(sentence, code)

    def _missing(self) -> tuple[int, str] | None:
        """The rank that is gone, if one is, and how that shows."""
        gone = [rank for rank in self.others if not self._lives(rank)]  # asked first: a word of farewell comes before
        now = time.monotonic()
        if now - self.looked > 4 * _BEAT:  # this one was stopped itself, or starved: it has missed signs of life
            self.seen, self.moved = {}, {}
        self.looked = now
        for rank in self.others:
            word = self.store.get(f"beat/{rank}").decode()
            _, moves, state = word.split()
            if self.seen.get(rank, ("", 0.0))[0] != word:
                self.seen[rank] = word, now
            if self.moved.get(rank, (-1, 0.0))[0] != int(moves) or state == "busy" or self.pulse.busy:
                self.moved[rank] = int(moves), now
            if state == "left":
                continue
            if rank in gone:
                if self.store.check(["fault"]):  # it has told why
                    return None
                return rank, "was killed or died"
            silent, still = now - self.seen[rank][1], now - self.moved[rank][1]
            if silent > self.patience:
                return rank, f"has given no sign of life for {silent:.0f} s"
            behind = int(moves) < self.pulse.moves and still > max(_STILL, 2 * self.patience)
            unmoved = state == "on" and self.pulse.broken and now - self.pulse.broken > 8 * _BEAT
            if behind or unmoved:
                return rank, f"has not moved for {still:.0f} s while others wait for it"
        return None

    def _without_store(self) -> tuple[int, str]:
        """Who is gone when the store is: a rank that has held it, or torchrun."""
        for _ in range(10):  # a process takes a moment to die
            for rank in self.others:
                if not self._lives(rank):
                    return rank, "was killed or died"
            time.sleep(_BEAT / 5)
        return -1, "the store in which the ranks meet is gone: torchrun has ended"

    def _lives(self, rank: int) -> bool:
        """Whether its process is there; of one on another machine only its silence tells."""
        machine, process, started = self.places[rank]
        return machine != _machine() or _started(process) == started

    def _finish_off(self, rank: int) -> None:
        """A rank of this machine that hangs would hang on: it is the same process that joined, so it is ours to end."""
        machine, process, started = self.places.get(rank, ("", 0, 0))
        if machine == _machine() and started and _started(process) == started:
            with suppress(OSError):
                os.kill(process, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has no SIGKILL

    def _place(self, rank: int) -> str:
        machine, process, _ = self.places.get(rank, ("", 0, 0))
        return f" (process {process} on {machine.split()[0]})" if machine else ""


def _started(process: int) -> int:
    """When a process started, in ticks of the machine; 0 for one that is gone or only waits to be buried."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        if os.path.isdir("/proc/self"):
            return 0
        if sys.platform == "win32":  # where os.kill(process, 0) is Ctrl-C: only silence tells, and nobody is ended
            return 0
        with suppress(OSError):  # a system without /proc
            os.kill(process, 0)
            return 1
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def _machine() -> str:
    """The machine, or the part of it, in which process numbers mean the same."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def patience() -> float:
    """Seconds for which a rank may be silent."""
    given = os.environ.get("NEARKIN_RANK_TIMEOUT", "20")
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 2 <= seconds <= 3600:
        raise ValueError(f"NEARKIN_RANK_TIMEOUT must be a number of seconds from 2 to 3600, got {given!r}")
    return seconds
