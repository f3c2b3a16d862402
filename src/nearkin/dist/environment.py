"""What the results of a run depend on beside its recipe: threads, processor, versions; and the code of its ranks."""

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nearkin.core.versions import version_of

__all__ = ["code", "difference", "numerics", "unlike"]

_VARIABLES = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")  # which instructions libraries choose
_PACKAGES = ("nearkin", "torch", "numpy", "safetensors")


def numerics(device: torch.device, ranks: int) -> dict[str, Any]:
    """What may change the last bits of a result: the order of summation depends on these."""
    return {
        "ranks": ranks,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "CPU threads": torch.get_num_threads(),
        "CPU instructions": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
    } | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """One sentence if a run continues with other numerics than its checkpoint was written with."""
    names = [name for name in (*before, *(set(now) - set(before))) if before.get(name) != now.get(name)]
    if not names:
        return None
    both = (", ".join(f"{name} {facts.get(name, 'not set')}" for name in names) for facts in (before, now))
    return (
        "the checkpoint was written with {}, this process has {}: the run goes on, but to the last bit it may not end "
        "as if it had never stopped".format(*both)
    )


@cache
def code() -> dict[str, str]:
    """The versions that this rank runs, and a digest of nearkin's own source."""
    versions = {name: version_of(name).partition("+")[0] for name in _PACKAGES}  # without "+cpu", "+cu128"
    versions["Python"] = ".".join(platform.python_version_tuple()[:2])
    home, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(home.rglob("*.py"), key=lambda path: path.relative_to(home).as_posix()):
        digest.update(f"{path.relative_to(home).as_posix()}\n".encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return versions | {"nearkin's source": digest.hexdigest()[:12]}


def unlike(all_ranks: list[Any]) -> str | None:
    """One sentence if ranks do not run the same code. all_ranks: `code()` of each."""
    first = all_ranks[0]
    for rank, other in enumerate(all_ranks):
        if other == first:
            continue
        if not isinstance(other, dict) or not isinstance(
            first, dict
        ):  # of a version that exchanges something else here
            return f"all ranks must run the same version of nearkin; rank {rank} runs another one than rank 0"
        what = next(name for name in (*first, *other) if first.get(name) != other.get(name))
        return (
            f"all ranks must run the same code and versions; {what} is {other.get(what)} on rank {rank} and "
            f"{first.get(what)} on rank 0"
        )
    return None
