"""A watch for what would make the host wait for a device, on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nearkin.core import checks


@contextmanager
def nothing_read() -> Iterator[None]:
    """As on a device, where no value may be read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "reads_values", lambda tensor: False)
        yield


class Watch(TorchDispatchMode):
    """Counts operations, keeps the size of the largest tensor made, and refuses what waits for a device."""

    STALLS = (
        *("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select"),
        *("_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"),
    )

    def __init__(self, stalls: bool = False) -> None:
        super().__init__()
        self.calls = self.largest = 0
        self.allowed = stalls

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        assert self.allowed or (name not in self.STALLS and not masks), f"{name} waits for the device"
        made = function(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return made
