"""How a loss module holds the settings of its function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def hold(module: nn.Module, function: Callable[..., Tensor] | None = None, **settings: Any) -> None:
    """Keeps the settings on the module. Given the function, tries them on an empty batch: bad ones fail here."""
    if function is not None and not any(map(callable, settings.values())):
        function(torch.empty(0, 2), torch.empty(0, dtype=torch.long), **settings)
    module.settings = settings  # type: ignore[assignment]


def show(module: nn.Module) -> str:
    """The settings as `print(module)` shows them."""
    settings: dict[str, Any] = module.settings  # type: ignore[assignment]
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
