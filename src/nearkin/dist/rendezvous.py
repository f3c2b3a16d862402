"""How ranks find one another in the store that torchrun gives them.

After a restart that store may still hold the addresses of processes that are gone, and the number of the restart is not
the same on all machines. So the ranks first agree on a word that none of the dead can know, and use keys under it.
"""

import json
import time
import uuid
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

__all__ = ["found"]

_PAUSE = 0.02  # seconds between two looks


def found(seconds: float) -> tuple[Any, int, int]:
    """A store that only the processes of this start share, this one's rank, and how many there are."""
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    shared, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=seconds))))
    word = _lead(shared, size, seconds) if rank == 0 else _follow(shared, rank, seconds)
    prefix: Any = dist.distributed_c10d.PrefixStore
    return prefix(f"nearkin/{word}", shared), rank, size


def _lead(store: Any, size: int, seconds: float) -> str:
    """Rank 0 says a new word to whoever has called, until all of them have answered it."""
    others, end = range(1, size), time.monotonic() + seconds
    called: dict[str, str] = {}
    word = ""
    while True:
        now = {str(rank): store.get(f"call/{rank}").decode() for rank in others if store.check([f"call/{rank}"])}
        if now != called or not word:
            called, word = now, uuid.uuid4().hex
            store.set("word", json.dumps([word, called]))
        silent = [rank for rank in others if not store.check([f"heard/{word}/{rank}"])]
        if not silent:
            store.set(f"go/{word}", "")
            return word
        if time.monotonic() > end:
            _missed(0, f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}", seconds)
        time.sleep(_PAUSE)


def _follow(store: Any, rank: int, seconds: float) -> str:
    """Another rank calls, and takes a word only from the one who has heard this very call."""
    call, last, end = uuid.uuid4().hex, "", time.monotonic() + seconds
    store.set(f"call/{rank}", call)
    while True:
        if store.check(["word"]):
            word, called = json.loads(store.get("word"))
            if called.get(str(rank)) == call and word != last:
                store.set(f"heard/{word}/{rank}", "")
                last = word
        if last and store.check([f"go/{last}"]):
            return last
        if time.monotonic() > end:
            _missed(rank, "rank 0 or another" if last else "rank 0", seconds)
        time.sleep(_PAUSE)


def _missed(rank: int, whom: str, seconds: float) -> NoReturn:
    raise ValueError(
        f"rank {rank}: {whom} did not come within {seconds:.0f} s; a longer NEARKIN_RANK_TIMEOUT, of which this is 1.4 "
        f"times, gives it more time"
    )
