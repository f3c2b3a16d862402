"""The ranks of a training: how they find one another under torchrun, agree on small things, and end together.

A process that no torchrun started is alone, and everything here returns at once. Ranks share work and say things to
each other as any `Team` does. A thread in each (`watching`) sees others die, fall silent or fail, and ends its own.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nearkin.core.errors import Diverged, Stopped, Terminated
from nearkin.dist.notes import own_store
from nearkin.dist.team import Progress, Team
from nearkin.dist import rendezvous
from nearkin.dist import environment
from nearkin.dist.heartbeat import LOST, Pulse, Watching, patience

__all__ = ["ALONE", "TrainingGroup", "here", "joined"]

_JOIN = 28.0  # seconds that ranks have to find one another: torchrun takes 30 more to end one that hangs
_EXCHANGE = 50.0  # seconds for an exchange of tensors on the CPU
_NCCL = 600.0  # seconds for one on GPUs, the first of which may take minutes


class TrainingGroup(Team):
    """Those that train together. The thread of `watching` looks for those who are gone, not whoever waits."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0, store: Any = None) -> None:
        super().__init__(rank, size, local, store)
        self.pulse = Pulse()
        self._asked: tuple[torch.Tensor, Any] | None = None

    def restarted(self) -> bool:
        """Whether torchrun starts any of the ranks anew: it counts on the machine of the one that failed."""
        return any(self.values(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0))

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

    @contextmanager
    def work(self, what: str, progress: Progress | None = None, total: int = 0) -> Iterator[Progress]:
        """As every team's; how long it takes says nothing about this rank's health."""
        self.pulse.busy += 1
        try:
            with super().work(what, progress, total) as told:
                yield told
        finally:
            self.pulse.busy -= 1

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


ALONE = TrainingGroup()
_here: list[TrainingGroup] = []


def here() -> TrainingGroup:
    """The ranks that this process trains with."""
    return _here[-1] if _here else ALONE


@contextmanager
def joined() -> Iterator[TrainingGroup]:
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
    ranks = TrainingGroup(rank, world, local, own_store("training"))
    watching = Watching(ranks.pulse, rank, world, own_store("watching"))
    _here.append(ranks)
    try:
        watching.start()
        if sentence := environment.unlike(ranks.values(environment.code())):
            raise ValueError(sentence)
        yield ranks
        with ranks.work("leaving"):  # together, when rank 0 has written everything
            pass
        watching.leave()
        if began:
            dist.destroy_process_group()
    except BaseException as error:
        _end(error, ranks, watching)
        raise
    finally:
        _here.pop()
        watching.stop()


def _begin() -> None:
    both = torch.cuda.is_available() and dist.is_nccl_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if both and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    store, rank, size = rendezvous.found(max(_JOIN, 1.4 * patience()))
    limit = timedelta(seconds=max(_EXCHANGE, 2.5 * patience()))
    backends = "cpu:gloo,cuda:nccl" if both else "gloo"
    # Ranks ask each other something at every step over the CPU, so one that hangs is missed there, also by GPUs.
    dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=limit)
    if both:
        group: Any = dist.distributed_c10d._get_default_group()
        group._get_backend(torch.device("cuda"))._set_default_timeout(timedelta(seconds=_NCCL))


def _end(error: BaseException, group: TrainingGroup, watching: Watching) -> None:
    """One rank's error becomes everybody's end: whoever is first with it tells the user, the others leave silently."""
    code = _code(error)
    if code == 0:
        return
    if isinstance(error, Stopped):  # all ranks have agreed to stop and have saved
        watching.leave()
        if group.first:
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
    if kind in (ValueError, TypeError, OSError) or kind is Diverged:
        raise kind(f"rank {group.rank}: {sentence}") from error


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
        return 143 if isinstance(error, Terminated) else 130
    if isinstance(error, Stopped):
        return 128 + error.number
    return 3 if isinstance(error, Diverged) else 2 if _input(error) else 1


def _input(error: BaseException) -> bool:
    return isinstance(error, ValueError | TypeError | OSError)
