"""Ranks that share an evaluation, an embedding or an enrolment, and how one failure ends all.

They wait for one another by looking at the notes that the others left, so that a rank that fails, is killed or stands
still ends the others with one sentence that names it.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from nearkin.core import checks
from nearkin.dist import collectives
from nearkin.dist.collectives import Group
from nearkin.core.errors import RankFailed
from nearkin.dist.notes import Notes, Seen
from nearkin.dist.team import Progress, Team

__all__ = ["ProcessGroup"]

T = TypeVar("T")


class ProcessGroup(Team):
    """All processes of an initialised torch.distributed, for the functions that take `group`.

        with dist.ProcessGroup() as group:
            found = evaluation.retrieval(embeddings, labels, group=group)

    All of them must make it, and the same calls with it. Whoever gives no sign of life for `patience` seconds while
    others wait is named, and ends all. They leave together. A world of one, or none, works alone.
    """

    def __init__(self, patience: float = 45.0) -> None:
        checks.positive("patience", patience)
        rank, size = collectives.rank(), collectives.size()
        super().__init__(rank, size, int(os.environ.get("LOCAL_RANK", rank)))
        if size == 1:
            return
        self.notes = self.counts = Notes(rank, size, patience)
        with self.work("joining"):
            pass
        if dist.get_backend() != "gloo":  # what is exchanged lies in main memory
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=300))

    @contextmanager
    def work(self, what: str, progress: Progress | None = None, total: int = 0) -> Iterator[Progress]:
        """As every team's; what goes wrong in it is the sentence of all ranks."""
        with super().work(what, progress, total) as told:
            try:
                yield told
            except Exception as error:
                if self.size == 1 or isinstance(error, RankFailed):
                    raise
                sentence = f"rank {self.rank}: {_said(error)}"
                self.notes.post(sentence)
                if isinstance(error, ValueError | TypeError | OSError):
                    raise RankFailed(sentence) from error
                raise

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.size == 1:
            return
        try:
            if error is None:
                with self.work("leaving"):
                    pass
            elif isinstance(error, Exception) and not isinstance(error, RankFailed) and not self.notes.posted:
                self.notes.post(f"rank {self.rank}: {_said(error)}")
        finally:
            self.notes.close()

    def _exchanged(self, exchange: Callable[[Tensor, Group], T], tensor: Tensor) -> T:
        try:
            return super()._exchanged(exchange, tensor)
        except RuntimeError as error:
            seen: Seen = {}
            end = time.monotonic() + self.notes.patience + 5
            while time.monotonic() < end:  # whoever is gone has a name
                self._look((rank for rank in range(self.size) if rank != self.rank), seen)
                time.sleep(1.0)
            raise RankFailed(f"rank {self.rank}: the exchange failed ({_said(error)})") from None

    def _look(self, awaited: Iterable[int], seen: Seen) -> None:
        self.notes.check()
        self.notes.alive(awaited, seen)


def _said(error: BaseException) -> str:
    """One line; the kind of the error where it is not bad input."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | TypeError | OSError) and text else f"{type(error).__name__} {text}"
