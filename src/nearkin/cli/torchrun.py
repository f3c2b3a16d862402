"""Verbs under torchrun: the ranks that share the work, of which only the first writes and prints."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nearkin.dist.group import ProcessGroup


@contextmanager
def shared() -> "Iterator[ProcessGroup | None]":
    """The ranks that torchrun started, all at the same verb; None in a process by itself.

    If one fails, is killed or stands still, all end, and one sentence says which it was.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield None
        return
    from nearkin.dist import torchrun as world
    from nearkin.dist.group import ProcessGroup

    with world.joined(), ProcessGroup() as group:
        yield group


def alone(verb: str, instead: str) -> None:
    """Refuses to do under torchrun, once a rank, what one process is to do."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and "RANK" in os.environ:
        raise ValueError(f"nearkin {verb} must be started without torchrun ({instead}), got {size} ranks")


def first(group: "ProcessGroup | None") -> bool:
    """Whether this process writes and prints."""
    return group is None or group.first
