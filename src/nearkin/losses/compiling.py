"""`loss.compile()`: what stays compiled, and what is said where nothing compiles."""

import warnings
from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

__all__ = ["compiled_call"]


def compiled_call(loss: Any, how: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Tensor]:
    """What calling the loss runs from now on: its `forward`, compiled, while it has no hooks and the compiler works."""
    shown = {name: loss.__dict__.get(name) for name in loss.fields} | dict(loss.settings)
    apart = tuple((name, str(value)) for name, value in shown.items() if not isinstance(value, (float, Tensor)))
    kind: Any = type(loss)
    compiled = torch.compile(MethodType(_own_code(kind, apart), loss), *how, **options)

    def call(*arguments: Any, **named: Any) -> Any:
        if loss._forward_hooks or loss._forward_pre_hooks or loss._backward_hooks or loss._backward_pre_hooks:
            return loss._call_impl(*arguments, **named)
        try:
            result: Tensor = compiled(*arguments, **named)
            return result
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"{type(loss).__name__} is not compiled: {reason}", RuntimeWarning, stacklevel=2)
            loss._compiled_call_impl = None
            uncompiled: Tensor = loss(*arguments, **named)
            return uncompiled

    return call


@cache
def _own_code(loss: Any, settings: tuple[tuple[str, str], ...]) -> Callable[..., Tensor]:
    """The class's `forward` with a code object of its own: the compiler's limit of recompilations counts for each."""
    plain: Any = loss.forward
    code, names = plain.__code__.replace(), plain.__globals__
    own = FunctionType(code, names, plain.__name__, plain.__defaults__, plain.__closure__)
    own.__kwdefaults__ = plain.__kwdefaults__
    return own
