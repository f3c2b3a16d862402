# mypy: ignore-errors
"""Where and how kernels are launched: on the device of the batch, by the form that was compiled before.

Triton's own search for a compiled form reads the environment, binds every argument by name and compares the constants
of the module: several times as long as the launch itself, and with a batch of a thousand longer than the kernel runs.
`CachedLauncher` looks it up by what triton compiles for: the types of arguments, whether addresses and integers divide
by 16, and ones. That a compiled form takes the arguments in their order, constants last, is no promise of triton's: it
holds in the versions of TESTED (`tests/gpu/test_launch_gpu.py`), in others it is tried once (`launch_probe`), and where
it does not hold, triton searches.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nearkin import kernels
from nearkin.core.autograd import refuse_second_derivative

__all__ = ["CachedLauncher", "device_of", "enter_thread", "once"]

TESTED = ("3.6",)
DESCRIPTORS = set()  # classes of tensor descriptors, added by the kernels that take them: triton is not imported here
_THREAD = threading.local()


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels run on the current device, which need not be that of the batch."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


class CachedLauncher:
    """kernel: a `triton.jit` function whose constants come last; choices: these, and the compiler's options."""

    def __init__(self, kernel, **choices):
        self.kernel, self.choices = kernel, choices
        names = [name for name in inspect.signature(kernel.fn).parameters if name in choices]
        self.constants = tuple(choices[name] for name in names)
        self.compiled = {}

    def __call__(self, grid, *arguments, key=None):
        """grid: three numbers. key: what decides the form where the caller knows, for a shorter search."""
        values = arguments
        if key is None:
            key, values = self._form(arguments)
        compiled = self.compiled.get(key)
        if compiled is not None:
            compiled[grid](*values, *self.constants)
            return
        compiled = self.kernel[grid](*arguments, **self.choices)
        if _compiled_forms_launch():
            self.compiled[key] = compiled

    @staticmethod
    def _form(arguments):
        """What triton compiles for, and the values that the compiled form takes: of a tensor only its address."""
        first = arguments[0]
        if type(first) in DESCRIPTORS:
            first = first.base
            enter_thread(first)
        key, values = [first.get_device()], []
        for value in arguments:
            kind = type(value)
            if kind is int:
                key.append((value == 1) + 2 * (value % 16 == 0) + 4 * (-(2**31) <= value < 2**31))
            elif kind in DESCRIPTORS:
                key.append((value.base.dtype, *value.block_shape))
            elif kind is not float:
                address = value.data_ptr()
                key.append((value.dtype, address % 16, value.get_device()))  # triton refuses those of another device
                value = address
            values.append(value)
        return tuple(key), values


def enter_thread(tensor: Tensor) -> None:
    """A thread of autograd has no context of the device before its first launch; descriptors and cuBLAS need one."""
    if tensor.is_cuda and not getattr(_THREAD, "entered", False):
        torch.zeros(1, device=tensor.device)
        _THREAD.entered = True


@functools.cache
def _compiled_forms_launch() -> bool:
    """Whether this triton's compiled forms may be launched by themselves."""
    if kernels.interpreted():
        return False
    from nearkin.kernels import launch_probe

    return launch_probe.version() in TESTED or launch_probe.succeeds()


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward by kernels, which cannot be differentiated again."""

    @functools.wraps(backward)
    def chosen(ctx: Any, *upstream: Tensor) -> Any:
        refuse_second_derivative("a gradient by Triton kernels", 'impl="torch" computes the loss without them')
        return backward(ctx, *upstream)

    return chosen
