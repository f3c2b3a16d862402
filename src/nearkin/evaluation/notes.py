"""What ranks leave for one another in the store of torch.distributed: counts, signs of life, and why one cannot go on.

Nothing here waits: a rank that looks always gets an answer at once, so nobody can hang because another is gone.
"""

import threading
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_BEAT = 1.0  # seconds between two signs of life


class Failed(ValueError):
    """A rank failed, and every rank knows: each raises this with the same sentence."""


class Notes:
    """The notes of one team of ranks; every rank must make it, as often as the others."""

    def __init__(self, rank: int, size: int, patience: float) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        store: Any = distributed_c10d._get_default_store()
        made = store.add(f"nearkin/made/{rank}", 1)  # so that no two notebooks share their names
        self._store = getattr(dist, "PrefixStore")(f"nearkin/{made}", store)  # noqa: B009 - which torch does not export
        self._seen: dict[int, tuple[int, float]] = {}
        self._over = threading.Event()
        self.posted = False
        threading.Thread(target=self._beat, name="nearkin-alive", daemon=True).start()

    def add(self, name: str, number: int = 0) -> int:
        """Adds to a count that all ranks see, and returns it."""
        try:
            return int(self._store.add(name, number))
        except RuntimeError as error:
            raise self._lost(error) from None

    def post(self, sentence: str) -> None:
        """Tells the other ranks why one of them cannot go on; the first to say so is heard."""
        self.posted = True
        try:
            if self._store.add("failures", 1) == 1:
                self._store.set("failure", sentence)
        except RuntimeError:
            pass  # nobody is left to be told

    def check(self) -> None:
        """Raises what a rank has posted."""
        try:
            failure = self._store.get("failure").decode() if self._store.check(["failure"]) else None
        except RuntimeError as error:
            raise self._lost(error) from None
        if failure is not None:
            raise Failed(failure)

    def alive(self, ranks: Iterable[int]) -> None:
        """Raises where one of these ranks has shown no sign of life for too long."""
        now = time.monotonic()
        for rank in ranks:
            beats = self.add(f"alive/{rank}")
            before, since = self._seen.get(rank, (-1, now))
            self._seen[rank] = (beats, since if beats == before else now)
            if beats == before and now - since > self.patience:
                sentence = (
                    f"rank {rank} of {self.size} gave no sign of life for {now - since:.0f} s: killed, or stopped"
                )
                self.post(sentence)
                raise Failed(sentence)

    def begin_watch(self) -> None:
        """What was seen before counts no more."""
        self._seen.clear()

    def close(self) -> None:
        self._over.set()

    def _beat(self) -> None:
        while not self._over.is_set():
            try:
                self._store.add(f"alive/{self.rank}", 1)
            except RuntimeError:
                return
            self._over.wait(_BEAT)

    def _lost(self, error: RuntimeError) -> Failed:
        """The store lives in the launcher, or in rank 0."""
        return Failed(
            f"rank {self.rank} of {self.size} has lost the launcher, or rank 0 ({' '.join(str(error).split())})"
        )
