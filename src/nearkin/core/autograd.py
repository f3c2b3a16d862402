"""Gradients written by hand, and where autograd must see the plain formula instead.

A function with a hand-written gradient is one node of the graph: fewer passes and less memory than autograd's steps.
But torch.compile and torch.func trace into it, and their results have been silently wrong: gradients of exactly 0
(torch 2.11), a saved buffer overwritten. So every such function has a plain twin for them.

A second derivative is right or refused: autograd would follow a gradient made of constants, and be silently wrong.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["HandGradient", "device_type", "differentiable_once", "full_precision", "gradients_again", "recomputed"]
__all__ += ["refuse_second_derivative", "refuse_transforms", "traced", "transformed"]


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


def refuse_second_derivative(what: str, instead: str = "take its gradient without create_graph=True") -> None:
    """To begin a backward that makes its gradient of constants."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} has no second derivative; {instead}")


def differentiable_once(x: Tensor, what: str) -> Tensor:
    """`x`, made with constants that are none, so that its gradient is refused to whoever would differentiate it."""
    if transformed():
        if _derivatives() > 1:
            raise RuntimeError(f"{what} has no second derivative; take its gradient alone, by one torch.func.grad")
    elif x.requires_grad and not torch.compiler.is_compiling():  # what is compiled cannot be differentiated twice
        x.register_hook(lambda _: refuse_second_derivative(what))  # type: ignore[no-untyped-call]
    return x


def _derivatives() -> int:
    """How many derivatives torch.func is taking."""
    functorch = torch._C._functorch
    kinds = functorch.TransformType.Grad, functorch.TransformType.Jvp
    return sum(level.key() in kinds for level in functorch.get_interpreter_stack() or ())


def gradients_again(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], wanted: Sequence[bool], upstream: Any
) -> list[Tensor | None]:
    """The gradients of a function by the inputs that are wanted, by autograd, to be differentiated once more.

    Of views of the inputs: one may have been made from another, and that path is not the function's.
    """
    own = [x.view_as(x) if wants and x is not None else x for x, wants in zip(inputs, wanted, strict=True)]
    chosen = [x for x, wants in zip(own, wanted, strict=True) if wants and x is not None]
    gradients = iter(torch.autograd.grad(function(*own), chosen, upstream, create_graph=True))
    return [next(gradients) if wants and x is not None else None for x, wants in zip(own, wanted, strict=True)]


def device_type(x: Tensor) -> str:
    """The tensor's device type for `torch.autocast`, which does not know "meta"."""
    return "cpu" if x.is_meta else x.device.type


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Outside of autocast, where that is on: to leave it takes as long as two operations."""
    kind = device_type(x)
    if traced() or torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


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
