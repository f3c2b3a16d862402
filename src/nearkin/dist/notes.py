"""What ranks leave for one another in the store of torch.distributed: counts, signs of life, and why one cannot go on.

Nothing here waits: a rank that looks always gets an answer at once, so nobody can hang because another is gone.
"""

import threading
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from nearkin.core.errors import RankFailed

Seen = dict[int, tuple[int, float]]  # of each rank: its signs of life, and since when there are no more
_BEAT = 1.0  # seconds between two signs of life




def own_store(kind: str) -> Any:
    """The store in which the ranks met, under names not used before, over a connection of its own where torch has one.

    Every rank must ask for one of a kind as often as the others.
    """
    found: Any = distributed_c10d._get_default_store()
    made = found.add(f"nearkin/{kind}/{dist.get_rank()}", 1)
    own = found.clone() if hasattr(found, "clone") else found
    return getattr(dist, "PrefixStore")(f"nearkin/{kind}/of/{made}", own)  # noqa: B009 - which torch does not export


class Notes:
    """The notes of one team of ranks; every rank must make it, as often as the others."""

    def __init__(self, rank: int, size: int, patience: float) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        self._store = own_store("notes")
        self._over = threading.Event()
        self.posted = False
        threading.Thread(target=self._beat, name="nearkin-alive", daemon=True).start()

    def add(self, name: str, number: int) -> int:
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
            raise RankFailed(failure)

    def alive(self, ranks: Iterable[int], seen: Seen) -> None:
        """Raises where one of these ranks has shown no sign of life for too long since it was `seen`."""
        now = time.monotonic()
        for rank in ranks:
            beats = self.add(f"alive/{rank}", 0)
            before, since = seen.get(rank, (-1, now))
            seen[rank] = (beats, since if beats == before else now)
            if beats == before and now - since > self.patience:
                sentence = (
                    f"rank {rank} of {self.size} gave no sign of life for {now - since:.0f} s: killed, or stopped"
                )
                self.post(sentence)
                raise RankFailed(sentence)

    def close(self) -> None:
        self._over.set()

    def _beat(self) -> None:
        while not self._over.is_set():
            try:
                self._store.add(f"alive/{self.rank}", 1)
            except RuntimeError:
                return
            self._over.wait(_BEAT)

    def _lost(self, error: RuntimeError) -> RankFailed:
        """The store lives in the launcher, or in rank 0."""
        return RankFailed(
            f"rank {self.rank} of {self.size} has lost the launcher, or rank 0 ({' '.join(str(error).split())})"
        )
