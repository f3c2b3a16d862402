"""A call that all ranks make: counted in a store, where ranks wait for one another however long it takes."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nearkin.core.errors import RankFailed

if TYPE_CHECKING:
    from nearkin.dist.group import ProcessGroup

__all__ = ["Call", "Progress"]

Progress = Callable[[int, int], None]
_POLL = 0.05  # seconds between two looks at the counts while waiting
_REPORT = 0.2  # seconds between two counts of this rank's progress
_PARTS = 10**6  # parts of a share in which progress is counted


class Call:
    """How far all ranks are with one call, and whether all have come to its end. number: which call it is."""

    def __init__(self, group: "ProcessGroup", number: int, what: str, progress: Progress | None, total: int) -> None:
        self.group, self.what, self.progress, self.total = group, what, progress, total
        self.number, self.counted, self.reported_at = number, 0, 0.0

    def report(self, done: int, of: int) -> None:
        """How far this rank is; raises where another has failed meanwhile."""
        now = time.monotonic()
        if now - self.reported_at > _REPORT:
            self.reported_at = now
            self.group.check()
            self._count(_PARTS * done // max(of, 1))

    def wait(self) -> None:
        """Until every rank has come here."""
        group, this, any_call = self.group, f"{self.number}/{self.what}", f"{self.number}/any"
        self._count(_PARTS)
        for name in (this, any_call):
            group.count(name, 1)
        pause = 0.001
        while group.count(this, 0) < group.size:
            group.check()
            if group.count(any_call, 0) == group.size and group.count(this, 0) < group.size:
                raise RankFailed(
                    f'ranks must make the same calls in the same order; rank {group.rank} is at "{self.what}"'
                )
            if time.monotonic() - self.reported_at > 1:
                self.reported_at = time.monotonic()
                self._count(_PARTS)
            time.sleep(pause)
            pause = min(2 * pause, _POLL)
        group.check()  # the others may have given up on this rank
        self._count(_PARTS)

    def _count(self, parts: int) -> None:
        """Adds what this rank has done since the last time; rank 0 shows the sum."""
        if not self.total:
            return
        added, self.counted = parts - self.counted, parts
        done = self.group.count(f"{self.number}/done", added)
        if self.progress is not None and self.group.first:
            self.progress(min(self.total, self.total * done // (_PARTS * self.group.size)), self.total)
