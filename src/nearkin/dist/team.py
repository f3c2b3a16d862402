"""Processes that work together: who does what, what all found in order, and how they wait for one another.

Every rank makes the same calls in the same order. Between them ranks work at their own pace: they wait for one another
by counting in the store in which they met, not in an exchange, so that a long share never runs into a time limit.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from nearkin.dist import collectives
from nearkin.dist.collectives import Group
from nearkin.core.errors import RankFailed
from nearkin.dist.notes import Seen

__all__ = ["Progress", "Team"]

T = TypeVar("T")
Progress = Callable[[int, int], None]
_LONGEST = 0.05  # seconds between two looks at the counts while waiting,
_TELL = 0.2  # and while working
_FINE = 10**6  # parts of a share in which progress is counted


class Team:
    """This process among those that work together: `rank` of `size`, `local` on its machine. Alone it waits for nobody.

    What becomes of ranks when one is gone is the one thing in which teams differ. `dist.ProcessGroup` look while they
    wait, and raise what a caller may catch; those of a training may stand amid the exchanges of a step, or be on the
    GPU, so a thread looks for them and ends the process.

    counts: add(name, number) to a number that all see. `group`: a process group that exchanges what is in main memory.
    """

    def __init__(self, rank: int, size: int, local: int, counts: Any = None) -> None:
        self.rank, self.size, self.local, self.counts = rank, size, local, counts
        self.group: Group = None
        self.steps = 0

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes what all share."""
        return self.rank == 0

    # --- who does what

    def share(self, number: int, unit: int = 1) -> slice:
        """The part of `number` items that this rank does: whole units, one after another in the order of the ranks."""
        units = -(-number // unit)
        first, last = (units * place // self.size * unit for place in (self.rank, self.rank + 1))
        return slice(min(first, number), min(last, number))

    def first_here(self, what: str, work: Callable[[], T], once: bool = False) -> T:
        """The same work on every rank, on one rank a machine before the others: these find what it left on the disk.

        once: on rank 0 before those, for a disk that the machines share.
        """
        if self.size == 1:
            return work()
        found: T | None = None
        mine = (once and not self.first) + (self.local > 0)
        for turn in range(2 + once):
            with self.work(what):
                if turn == mine:
                    found = work()
        return found  # type: ignore[return-value]

    def alone(self, what: str, work: Callable[[], T]) -> T:
        """What the work of rank 0 returns, as JSON has it, on every rank; the others wait however long it takes."""
        found: Any = None
        with self.work(what):
            if self.first:
                found = work()
        result: T = self.values(found)[0]
        return result

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
        yield step.told
        step.wait()

    # --- what all have found

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of all ranks in the order of the ranks, on the device of this rank's."""
        return tensor if self.size == 1 else self._exchanged(collectives.gather, tensor.detach().cpu()).to(tensor.device)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of whole numbers over ranks."""
        return tensor if self.size == 1 else self._exchanged(collectives.total, tensor.cpu()).to(tensor.device)

    def values(self, value: Any) -> list[Any]:
        """What every rank says, as JSON has it, in the order of the ranks."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(part.numpy())) for part in self._exchanged(_apart, text)]

    def agree(self, **tensors: Tensor | None) -> None:
        """Refuses ranks that were given different things, before they make a wrong number of them."""
        if self.size == 1:
            return
        said = {name: None if one is None else collectives.digest(one).tolist() for name, one in tensors.items()}
        heard = self.values(said)
        for rank, other in enumerate(heard):
            for name in heard[0]:
                if other.get(name) != heard[0][name]:
                    raise RankFailed(f"{name} must be the same on all ranks; rank {rank} has others than rank 0")

    def _exchanged(self, exchange: Callable[[Tensor, Group], T], tensor: Tensor) -> T:
        """Begins when all ranks are there, so that it lasts as long as the bytes take."""
        with self.work("exchanging"):
            pass
        return exchange(tensor, self.group)

    def _look(self, awaited: Iterable[int], seen: Seen) -> None:
        """Raises where a rank has failed, or one of those awaited is gone; where a thread looks, nothing."""


def _apart(text: Tensor, group: Group) -> tuple[Tensor, ...]:
    counts = collectives.counts(text, group)
    return torch.split(collectives.gather(text, group, counts), list(counts))


class _Step:
    """One `work`: how far all ranks are, and whether all have come to its end."""

    def __init__(self, team: Team, what: str, progress: Progress | None, total: int) -> None:
        team.steps += 1
        self.team, self.rank, self.size, self.add = team, team.rank, team.size, team.counts.add
        self.what, self.progress, self.total = what, progress, total
        self.key, self.own, self.told_at = str(team.steps), 0, 0.0

    def told(self, done: int, of: int) -> None:
        """How far this rank is; raises where another has failed meanwhile."""
        now = time.monotonic()
        if now - self.told_at > _TELL:
            self.told_at = now
            self.team._look((), {})
            self._show(_FINE * done // max(of, 1))

    def wait(self) -> None:
        """Until every rank has come here."""
        self._show(_FINE)
        here = f"{self.key}/{self.what}"
        for name in (f"{here}/{self.rank}", here, f"{self.key}/any"):
            self.add(name, 1)
        seen: Seen = {}
        pause, looked = 0.001, time.monotonic()
        while self.add(here, 0) < self.size:
            self.team._look((), seen)
            if self.add(f"{self.key}/any", 0) == self.size and self.add(here, 0) < self.size:
                raise RankFailed(f'ranks must make the same calls in the same order; rank {self.rank} is at "{self.what}"')
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                self.team._look((rank for rank in range(self.size) if not self.add(f"{here}/{rank}", 0)), seen)
                self._show(_FINE)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        self.team._look((), seen)  # the others may have given up on this rank
        self._show(_FINE)

    def _show(self, fine: int) -> None:
        if not self.total:
            return
        more, self.own = fine - self.own, fine
        done = self.add(f"{self.key}/done", more)
        if self.progress is not None and self.rank == 0:
            self.progress(min(self.total, self.total * done // (_FINE * self.size)), self.total)
