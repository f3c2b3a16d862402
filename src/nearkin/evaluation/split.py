"""Work that the processes of a world share: who does what, what all found in order, and how one failure ends all.

Every rank makes the same calls in the same order. Between them ranks work at their own pace: they wait for one another
by looking at the notes that the others left, not in an exchange, so that a rank that fails, is killed or stands still
ends the others with one sentence that names it, and that a long share of the work never runs into a time limit.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nearkin.core import checks, world
from nearkin.core.world import Group
from nearkin.evaluation.notes import Failed, Notes

__all__ = ["Failed", "Ranks"]

T = TypeVar("T")
Progress = Callable[[int, int], None]
_LONGEST = 0.05  # seconds between two looks at the notes while waiting,
_TELL = 0.2  # and while working
_FINE = 10**6  # parts of a share in which progress is counted


class Ranks:
    """All processes of an initialised torch.distributed, for the functions that take `ranks`.

        with evaluation.Ranks() as ranks:
            found = evaluation.retrieval(embeddings, labels, ranks=ranks)

    All of them must make it, and the same calls with it. Whoever gives no sign of life for `patience` seconds while
    others wait is named, and ends all. They leave together. A world of one, or none, works alone.
    """

    def __init__(self, patience: float = 45.0) -> None:
        checks.positive("patience", patience)
        self.rank, self.size = world.rank(), world.size()
        self.local = int(os.environ.get("LOCAL_RANK", self.rank))
        self.group: Group = None
        self._steps = 0
        if self.size == 1:
            return
        self.notes = Notes(self.rank, self.size, patience)
        with self.work("joining"):
            pass
        if dist.get_backend() != "gloo":  # what is exchanged lies in main memory
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=300))

    # --- who does what

    def share(self, number: int, unit: int = 1) -> slice:
        """The part of `number` items that this rank does: whole units, one after another in the order of the ranks."""
        units = -(-number // unit)
        first, last = (units * place // self.size * unit for place in (self.rank, self.rank + 1))
        return slice(min(first, number), min(last, number))

    def first_here(self, what: str, work: Callable[[], T]) -> T:
        """The same work on every rank, on one rank a machine before the others: these find what it left on the disk."""
        if self.size == 1:
            return work()
        found: T | None = None
        for turn in (True, False):
            with self.work(what):
                if (self.local == 0) == turn:
                    found = work()
        return found  # type: ignore[return-value]

    def alone(self, what: str, work: Callable[[], Any]) -> Any:
        """What the work of rank 0 returns, as JSON has it, on every rank."""
        found = None
        with self.work(what):
            if self.rank == 0:
                found = work()
        return self.values(found)[0]

    # --- working

    @contextmanager
    def work(self, what: str, progress: Progress | None = None, total: int = 0) -> Iterator[Progress]:
        """A part in which each rank works by itself; when it ends, all ranks have done theirs.

        Gives `told(done, of)`, to be called often with what is done of this rank's own share. Rank 0 then calls
        `progress(done, total)` for all ranks together.
        """
        if self.size == 1:
            yield progress or (lambda done, of: None)
            return
        step = _Step(self, what, progress, total)
        try:
            yield step.told
        except Failed:
            raise
        except Exception as error:
            sentence = f"rank {self.rank}: {_said(error)}"
            self.notes.post(sentence)
            if isinstance(error, ValueError | TypeError | OSError):
                raise Failed(sentence) from error
            raise
        step.wait()

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of all ranks in the order of the ranks, on the device of this rank's."""
        return tensor if self.size == 1 else self._exchanged(world.gather, tensor.detach().cpu()).to(tensor.device)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of whole numbers over ranks."""
        return tensor if self.size == 1 else self._exchanged(world.total, tensor.cpu()).to(tensor.device)

    def values(self, value: Any) -> list[Any]:
        """What every rank says, as JSON has it."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        counts = self.rows(torch.tensor([len(text)])).tolist()
        return [json.loads(bytes(part.numpy())) for part in torch.split(self.rows(text), counts)]

    def agree(self, **tensors: Tensor | None) -> None:
        """Refuses ranks that were given different things, before they make a wrong number of them."""
        if self.size == 1:
            return
        said = {name: None if one is None else world.digest(one).tolist() for name, one in tensors.items()}
        heard = self.values(said)
        for rank, other in enumerate(heard):
            for name in heard[0]:
                if other.get(name) != heard[0][name]:
                    raise Failed(f"{name} must be the same on all ranks; rank {rank} has others than rank 0")

    # --- ending

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.size == 1:
            return
        try:
            if error is None:
                with self.work("leaving"):
                    pass
            elif isinstance(error, Exception) and not isinstance(error, Failed) and not self.notes.posted:
                self.notes.post(f"rank {self.rank}: {_said(error)}")
        finally:
            self.notes.close()

    def _exchanged(self, exchange: Callable[..., Tensor], tensor: Tensor) -> Tensor:
        """Begins when all ranks are there, so that it lasts as long as the bytes take."""
        with self.work("exchanging"):
            pass
        try:
            return exchange(tensor, self.group)
        except RuntimeError as error:
            end = time.monotonic() + self.notes.patience + 5
            while time.monotonic() < end:  # whoever is gone has a name
                self.notes.check()
                self.notes.alive(rank for rank in range(self.size) if rank != self.rank)
                time.sleep(1.0)
            raise Failed(f"rank {self.rank}: the exchange failed ({_said(error)})") from None


class _Step:
    """One `work`: how far all ranks are, and whether all have come to its end."""

    def __init__(self, ranks: Ranks, what: str, progress: Progress | None, total: int) -> None:
        ranks._steps += 1
        self.rank, self.size, self.notes = ranks.rank, ranks.size, ranks.notes
        self.what, self.progress, self.total = what, progress, total
        self.key, self.own, self.told_at = str(ranks._steps), 0, 0.0

    def told(self, done: int, of: int) -> None:
        """How far this rank is; raises where another has failed meanwhile."""
        now = time.monotonic()
        if now - self.told_at > _TELL:
            self.told_at = now
            self.notes.check()
            self._show(_FINE * done // max(of, 1))

    def wait(self) -> None:
        """Until every rank has come here."""
        self._show(_FINE)
        here = f"{self.key}/{self.what}"
        for name in (f"{here}/{self.rank}", here, f"{self.key}/any"):
            self.notes.add(name, 1)
        self.notes.begin_watch()
        pause, looked = 0.001, time.monotonic()
        while self.notes.add(here) < self.size:
            self.notes.check()
            if self.notes.add(f"{self.key}/any") == self.size and self.notes.add(here) < self.size:
                raise Failed(f'ranks must make the same calls in the same order; rank {self.rank} is at "{self.what}"')
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                self.notes.alive(rank for rank in range(self.size) if not self.notes.add(f"{here}/{rank}"))
                self._show(_FINE)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        self.notes.check()  # the others may have given up on this rank
        self._show(_FINE)

    def _show(self, fine: int) -> None:
        if not self.total:
            return
        more, self.own = fine - self.own, fine
        done = self.notes.add(f"{self.key}/done", more)
        if self.progress is not None and self.rank == 0:
            self.progress(min(self.total, self.total * done // (_FINE * self.size)), self.total)


def _said(error: BaseException) -> str:
    """One line; the kind of the error where it is not bad input."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | TypeError | OSError) and text else f"{type(error).__name__} {text}"
