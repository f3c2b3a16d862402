"""The ranks of a training: how they find one another under torchrun, agree on small things, and end together.

A process that no torchrun started is alone, and everything here returns at once. What ranks say to each other about
the run (not tensors) is JSON in the key-value store through which they met. A thread in each rank (`watching`) sees
others die, fall silent or fail, and ends its own.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nearkin.training import meeting
from nearkin.training.watching import LOST, Pulse, Watching, patience

__all__ = ["ALONE", "Ranks", "here", "joined"]

T = TypeVar("T")
_PAUSE = 0.002, 0.25  # seconds between two looks for another rank's word: at first, and at most
_JOIN = 28.0  # seconds that ranks have to find one another: torchrun takes 30 more to end one that hangs
_EXCHANGE = 50.0  # seconds for an exchange of tensors on the CPU
_NCCL = 600.0  # seconds for one on GPUs, the first of which may take minutes


class Ranks:
    """This process among those that train together: `rank` of `size`, `local` on its machine."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0, store: Any = None) -> None:
        self.rank, self.size, self.local = rank, size, local
        self.pulse = Pulse()
        self._store, self._said = store, 0
        self._asked: tuple[torch.Tensor, Any] | None = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes what all share."""
        return self.rank == 0

    def restarted(self) -> bool:
        """Whether torchrun starts any of the ranks anew: it counts on the machine of the one that failed."""
        return any(self.all_say(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0))

    def device(self, wanted: torch.device) -> torch.device:
        """The device of this rank where each has its own."""
        if self.size == 1 or wanted.type != "cuda":
            return wanted
        if self.local >= torch.cuda.device_count():
            raise ValueError(
                f"training.device=cuda needs a GPU for each rank of a machine: it has {torch.cuda.device_count()}, and "
                f"this is rank {self.local} on it; start fewer with --nproc-per-node, or use training.device=cpu"
            )
        return torch.device("cuda", self.local)

    def by_first(self, work: Callable[[], T]) -> T:
        """What rank 0's work returns, which must be JSON, on every rank; the others wait however long it takes."""
        if self.size == 1:
            return work()
        self._said += 1
        with self.busy():
            found = work() if self.first else None
            if self.first:
                self._store.set(f"first/{self._said}", json.dumps(found))
            result: T = json.loads(self._word(f"first/{self._said}"))
        return result

    def all_say(self, value: Any) -> list[Any]:
        """What every rank says, which must be JSON, in the order of ranks."""
        if self.size == 1:
            return [value]
        self._said += 1
        self._store.set(f"all/{self._said}/{self.rank}", json.dumps(value))
        with self.busy():
            return [json.loads(self._word(f"all/{self._said}/{rank}")) for rank in range(self.size)]

    def meet(self) -> None:
        """Waits until all ranks have come here, however long that takes."""
        if self.size == 1:
            return
        self._said += 1
        key = f"meet/{self._said}"
        self._store.add(key, 1)
        with self.busy():
            self._until(lambda: self._store.add(key, 0) == self.size)

    def in_turn(self, work: Callable[[], T]) -> T:
        """Rank 0 first, then the first rank of every other machine, then the rest: who comes later finds it done."""
        if self.size == 1:
            return work()
        mine = 0 if self.first else 1 if self.local == 0 else 2
        result: list[T] = []
        with self.busy():
            for turn in range(3):
                if turn == mine:
                    result.append(work())
                self.meet()
        return result[0]

    def ask(self, stop: int, save: bool) -> None:
        """Begins to ask all ranks whether to stop (a signal's number) or to save (rank 0 decides); see `answer`."""
        flags = torch.tensor([stop, int(save and self.first)])
        if self.size > 1:
            self._asked = flags, dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True)
        else:
            self._asked = flags, None

    def answer(self) -> tuple[int, bool]:
        """The signal that a rank was asked to stop by, or 0; and whether to save: the same on every rank."""
        assert self._asked is not None
        flags, handle = self._asked
        if handle is not None:
            handle.wait()
        stop, save = flags.tolist()
        return stop, bool(save)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Work whose length says nothing about this rank's health: a validation, a file, waiting for another rank."""
        self.pulse.busy += 1
        try:
            yield
        finally:
            self.pulse.busy -= 1

    def _word(self, key: str) -> bytes:
        self._until(lambda: self._store.check([key]))
        said: bytes = self._store.get(key)
        return said

    def _until(self, there: Callable[[], bool]) -> None:
        pause, most = _PAUSE
        while not there():
            time.sleep(pause)
            pause = min(most, pause * 1.3)


ALONE = Ranks()
_here: list[Ranks] = []


def here() -> Ranks:
    """The ranks that this process trains with."""
    return _here[-1] if _here else ALONE


@contextmanager
def joined() -> Iterator[Ranks]:
    """Joins the world that torchrun started, and leaves it; alone without one. Inside of itself it changes nothing.

    gloo for tensors on the CPU, NCCL for those on GPUs. An error on one rank ends them all: it is raised where it
    happened, and the others leave without a word, with its exit code.
    """
    wanted = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if _here or (wanted == 1 and not dist.is_initialized()):
        yield here()
        return
    began = not dist.is_initialized()
    if began:
        _begin()
    world = dist.get_world_size()
    if world == 1:
        yield ALONE
        return
    group: Any = dist.distributed_c10d._get_default_group()
    if torch.device("cpu") not in group._device_types:
        raise ValueError(
            f'ranks must be able to exchange tensors on the CPU: init_process_group("cpu:gloo,cuda:nccl"), got '
            f'"{dist.get_backend()}"'
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    rank = dist.get_rank()
    joins = dist.distributed_c10d._get_default_store().add(f"nearkin/{rank}", 1)  # words of one time are not another's
    ranks = Ranks(rank, world, local, _store(joins))
    watching = Watching(ranks.pulse, rank, world, _store(joins))
    _here.append(ranks)
    try:
        watching.start()
        yield ranks
        ranks.meet()  # all leave together, when rank 0 has written everything
        watching.leave()
        if began:
            dist.destroy_process_group()
    except BaseException as error:
        _end(error, ranks, watching)
        raise
    finally:
        _here.pop()
        watching.stop()


def _store(joins: int) -> Any:
    """The store in which the ranks have met, over a connection of its own where torch can make one."""
    found: Any = dist.distributed_c10d._get_default_store()
    prefix: Any = dist.distributed_c10d.PrefixStore
    return prefix(f"nearkin/{joins}", found.clone() if hasattr(found, "clone") else found)


def _begin() -> None:
    both = torch.cuda.is_available() and dist.is_nccl_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if both and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    store, rank, size = meeting.found(max(_JOIN, 1.4 * patience()))
    limit = timedelta(seconds=max(_EXCHANGE, 2.5 * patience()))
    backends = "cpu:gloo,cuda:nccl" if both else "gloo"
    # Ranks ask each other something at every step over the CPU, so one that hangs is missed there, also by GPUs.
    dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=limit)
    if both:
        group: Any = dist.distributed_c10d._get_default_group()
        group._get_backend(torch.device("cuda"))._set_default_timeout(timedelta(seconds=_NCCL))


def _end(error: BaseException, ranks: Ranks, watching: Watching) -> None:
    """One rank's error becomes everybody's end: whoever is first with it tells the user, the others leave silently."""
    code = _code(error)
    if code == 0:
        return
    if type(error).__name__ == "Stopped":  # all ranks have agreed to stop and have saved
        watching.leave()
        if ranks.first:
            return
        raise SystemExit(code) from None
    sentence = " ".join(str(error).split()) or type(error).__name__
    with _undisturbed():
        if isinstance(error, RuntimeError | KeyboardInterrupt):  # perhaps only an echo of another rank's end
            said = f"{type(error).__name__} {error}"
            broken = any(word in said for word in ("gloo", "Gloo", "NCCL", "Dist", "peer", "socket"))
            watching.conclude(broken and isinstance(error, RuntimeError))
        if not watching.claim(sentence, code):
            watching.follow(watching.verdict())
    kind = OSError if isinstance(error, OSError) else type(error)
    if kind in (ValueError, TypeError, OSError) or kind.__name__ == "Diverged":
        raise kind(f"rank {ranks.rank}: {sentence}") from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without signals: torchrun asks all ranks to end when one has, which they do soon enough."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _code(error: BaseException) -> int:
    """The exit code with which a rank ends: as the command line has them."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else LOST
    if isinstance(error, KeyboardInterrupt):
        return 143 if type(error).__name__ == "_Terminated" else 130
    name = type(error).__name__
    return {"Diverged": 3, "Stopped": 128 + getattr(error, "number", 2)}.get(name, 2 if _input(error) else 1)


def _input(error: BaseException) -> bool:
    return isinstance(error, ValueError | TypeError | OSError)
