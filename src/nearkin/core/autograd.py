"""Gradients written by hand, and where autograd must see the plain formula instead.

A function with a gradient by hand is one node of the graph: fewer passes and less memory than autograd's own steps. But
torch.compile and torch.func look inside, and what they make of such a node has been wrong without a word: gradients of
exactly 0 (torch 2.11), a saved buffer written over. So every such function has a plain twin, which they get.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def traced() -> bool:
    """Whether torch.compile, torch.export or a transform of torch.func follows what is computed here."""
    return torch.compiler.is_compiling() or transformed()


def transformed() -> bool:
    """Whether a transform of torch.func is at work."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and bool(active())


def refuse_transforms(
    owner: str, because: str = "changes with every training batch", instead: str = "call eval() on it first"
) -> None:
    """For what torch.func cannot follow: it would leave its own tensors behind in buffers."""
    if transformed():
        raise RuntimeError(f"{owner} {because}, which torch.func cannot follow; {instead}")


def device_type(x: Tensor) -> str:
    """The tensor's kind of device, as `torch.autocast` takes it, which knows none for tensors without values."""
    return "cpu" if x.is_meta else x.device.type


def recomputed(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
    """`function` of the arguments, made again for the gradient instead of kept; torch.func cannot, and keeps it."""
    if transformed():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, **({"preserve_rng_state": False} | how))


class HandGradient(torch.autograd.Function):
    """A function with its gradient by hand: called by `call`, and only where nobody follows."""

    @classmethod
    def call(cls, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{cls.__module__}.{cls.__qualname__} has a gradient by hand, which torch.compile may get wrong; "
                "compile the encoder alone, or leave fullgraph=True out"
            )
        return cls.apply(*arguments)  # type: ignore[no-untyped-call]
