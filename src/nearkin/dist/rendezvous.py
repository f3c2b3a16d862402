"""How processes that torchrun started find one another, and become a process group.

After a restart torchrun's store may still hold the addresses of processes that are gone, and the number of the restart
is not the same on all machines. So the ranks first agree on a new token that none of the dead can know, and use keys
under it.
"""

import hashlib
import json
import os
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nearkin.core.versions import version_of
from nearkin.dist.group import ALONE, ProcessGroup
from nearkin.dist.heartbeat import seconds_of_patience

__all__ = ["code_versions", "difference", "join"]

_JOIN = 24.0  # seconds that ranks have at least to find one another: torchrun takes 30 more to end one that hangs
_EXCHANGE = 50.0  # seconds for an exchange of tensors on the CPU
_NCCL = 600.0  # seconds for one on GPUs, the first of which may take minutes
_POLL = 0.02  # seconds between two looks at the store


@contextmanager
def join() -> Iterator[ProcessGroup]:
    """The group of the processes that torchrun started; without torchrun, a group of one.

        with dist.join() as group:
            training.train("photos/", group=group)

    gloo for tensors on the CPU, NCCL for those on GPUs; a torch.distributed that is initialised already is used as it
    is. An error on one rank ends all: it is raised where it happened, and the others exit silently with its exit code.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    initialised = dist.is_initialized()
    if not initialised and ranks > 1:
        _initialise()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield ALONE
        return
    world: Any = dist.distributed_c10d._get_default_group()
    if torch.device("cpu") not in world._device_types:
        raise ValueError(
            f'ranks must be able to exchange tensors on the CPU: init_process_group("cpu:gloo,cuda:nccl"), got '
            f'"{dist.get_backend()}"'
        )
    with ProcessGroup(on_failure="exit") as group:
        if sentence := difference(group.values(code_versions())):
            raise ValueError(sentence)
        yield group
    if not initialised:
        dist.destroy_process_group()


def _initialise() -> None:
    patience, both = seconds_of_patience(), torch.cuda.is_available() and dist.is_nccl_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if both and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
    store, rank, size = _meet(max(_JOIN, 1.4 * patience))
    limit = timedelta(seconds=max(_EXCHANGE, 2.5 * patience))
    backends = "cpu:gloo,cuda:nccl" if both else "gloo"
    # Ranks ask each other something at every step over the CPU, so one that hangs is missed there, also by GPUs.
    dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=limit)
    if both:
        world: Any = dist.distributed_c10d._get_default_group()
        world._get_backend(torch.device("cuda"))._set_default_timeout(timedelta(seconds=_NCCL))


def _meet(seconds: float) -> tuple[Any, int, int]:
    """A store that only the processes of this start share, this one's rank, and how many there are."""
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    shared, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=seconds))))
    steps, end = _lead(shared, size) if rank == 0 else _follow(shared, rank), time.monotonic() + seconds
    for token, missing in steps:
        if not missing:
            prefix: Any = dist.distributed_c10d.PrefixStore
            return prefix(f"nearkin/{token}", shared), rank, size
        if time.monotonic() > end:
            break
        time.sleep(_POLL)
    raise ValueError(
        f"rank {rank}: {missing} did not come within {seconds:.0f} s; a longer NEARKIN_RANK_TIMEOUT, of which this is "
        f"1.4 times, gives it more time"
    )


def _lead(store: Any, size: int) -> Iterator[tuple[str, str]]:
    """Rank 0 offers a new token to all that have called, until all of them have confirmed it."""
    calls: dict[str, str] | None = None
    token, others = "", range(1, size)
    while True:
        now = {str(rank): store.get(f"call/{rank}").decode() for rank in others if store.check([f"call/{rank}"])}
        if now != calls:
            calls, token = now, uuid.uuid4().hex
            store.set("token", json.dumps([token, calls]))
        silent = [str(rank) for rank in others if not store.check([f"confirmed/{token}/{rank}"])]
        if not silent:
            store.set(f"go/{token}", "")
        yield token, f"rank{'s' * (len(silent) > 1)} {', '.join(silent)}" if silent else ""


def _follow(store: Any, rank: int) -> Iterator[tuple[str, str]]:
    """Another rank calls, and accepts a token only from a rank 0 that has received this very call."""
    call, last = uuid.uuid4().hex, ""
    store.set(f"call/{rank}", call)
    while True:
        token, calls = json.loads(store.get("token")) if store.check(["token"]) else ("", {})
        if calls.get(str(rank)) == call and token != last:
            store.set(f"confirmed/{token}/{rank}", "")
            last = token
        goes = last and store.check([f"go/{last}"])
        yield last, "" if goes else "rank 0 or another" if last else "rank 0"


@cache
def code_versions() -> dict[str, str]:
    """The versions that this rank runs, and a digest of nearkin's own source."""
    names = "nearkin", "torch", "numpy", "safetensors"
    versions = {name: version_of(name).partition("+")[0] for name in names}  # without "+cpu", "+cu128"
    versions["Python"] = ".".join(platform.python_version_tuple()[:2])
    home, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(home.rglob("*.py"), key=lambda path: path.relative_to(home).as_posix()):
        digest.update(f"{path.relative_to(home).as_posix()}\n".encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return versions | {"nearkin's source": digest.hexdigest()[:12]}


def difference(all_ranks: list[Any]) -> str | None:
    """One sentence if ranks do not run the same code. all_ranks: `code_versions()` of each."""
    first = all_ranks[0]
    for rank, other in enumerate(all_ranks):
        if other == first:
            continue
        if not isinstance(other, dict) or not isinstance(first, dict):  # of a version that exchanges something else
            return f"all ranks must run the same version of nearkin; rank {rank} runs another one than rank 0"
        what = next(name for name in (*first, *other) if first.get(name) != other.get(name))
        return (
            f"all ranks must run the same code and versions; {what} is {other.get(what)} on rank {rank} and "
            f"{first.get(what)} on rank 0"
        )
    return None
