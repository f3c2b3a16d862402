"""Verbs under torchrun: the ranks that share the work, of which only the first writes and prints."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nearkin.dist.group import ProcessGroup

__all__ = ["end_rank", "first", "joined", "refuse_torchrun"]


@contextmanager
def joined() -> "Iterator[ProcessGroup | None]":
    """The ranks that torchrun started, all at the same verb; None in a process by itself.

    If one fails, is killed or hangs, all end, and one sentence says which it was.
    """
    if _ranks() == 1:
        yield None
        return
    from nearkin import dist

    with dist.join() as group:
        yield group


def refuse_torchrun(verb: str, instead: str) -> None:
    """Refuses to do under torchrun, once per rank, what one process is to do."""
    if _ranks() > 1:
        raise ValueError(f"nearkin {verb} must be started without torchrun ({instead}), got {_ranks()} ranks")


def first(group: "ProcessGroup | None") -> bool:
    """Whether this process writes and prints."""
    return group is None or group.first


def end_rank(code: object) -> None:
    """Ends a rank at once where there are several, without Python's own long way out.

    A rank that has left its group is watched by none: if it were stopped on that way, torchrun would wait for ever.
    """
    if _ranks() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
