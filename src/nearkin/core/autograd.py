"""Gradients written by hand, and where autograd must see the plain formula instead.

A function with a hand-written gradient is one node of the graph: fewer passes and less memory than autograd's steps.
But torch.compile and torch.func trace into it, and their results have been silently wrong: gradients of exactly 0
(torch 2.11), a saved buffer overwritten. So every such function has a plain twin for them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["HandGradient", "device_type", "recomputed", "refuse_transforms", "traced", "transformed"]


def traced() -> bool:
    """Whether torch.compile, torch.export or a transform of torch.func is tracing."""
    return torch.compiler.is_compiling() or transformed()


def transformed() -> bool:
    """Whether a transform of torch.func is active."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and bool(active())


def refuse_transforms(
    owner: str, because: str = "changes with every training batch", instead: str = "call eval() on it first"
) -> None:
    """For modules that torch.func cannot trace: it would leave its tensors in their buffers."""
    if transformed():
        raise RuntimeError(f"{owner} {because}, which torch.func cannot follow; {instead}")


def device_type(x: Tensor) -> str:
    """The tensor's device type for `torch.autocast`, which does not know "meta"."""
    return "cpu" if x.is_meta else x.device.type


def recomputed(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
    """`function` of the arguments, recomputed for the gradient instead of stored; stored under torch.func."""
    if transformed():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, **({"preserve_rng_state": False} | how))


class HandGradient(torch.autograd.Function):
    """A function with a hand-written gradient: run it with `call`, and never while a compiler is tracing."""

    @classmethod
    def call(cls, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{cls.__module__}.{cls.__qualname__} has a hand-written gradient, which torch.compile may get wrong; "
                "compile the encoder alone, or leave fullgraph=True out"
            )
        return cls.apply(*arguments)  # type: ignore[no-untyped-call]
