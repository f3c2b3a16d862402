"""How a loss module holds the settings of its function, and what a selection asks of the tiles."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nearkin import mining


def hold(module: nn.Module, function: Callable[..., Tensor], *tensors: Tensor, **settings: Any) -> None:
    """Keeps the settings on the module, after trying them on an empty batch, so that bad ones fail here.

    `tensors`: the class weights and what else the function takes by place. Settings with a callable are not tried:
    somebody else's function need not know what to do with an empty batch.
    """
    if not any(map(callable, settings.values())):
        dim = tensors[0].shape[1] if tensors else 2
        with torch.no_grad():
            function(torch.empty(0, dim), torch.empty(0, dtype=torch.long), *tensors, **settings)
    if settings.get("max_memory") is None:  # a bound that nobody set is not a setting
        settings.pop("max_memory", None)
    module.settings = settings  # type: ignore[assignment]


def show(module: nn.Module) -> str:
    """The settings as `print(module)` shows them."""
    settings: dict[str, Any] = module.settings  # type: ignore[assignment]
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def tiling(selection: mining.Selection) -> dict[str, Any]:
    """Whether a selection needs the whole matrix at once, and whether it draws: arguments of `tiles.over`."""
    if not isinstance(selection, str):
        return {"all_rows": "a selection of your own may look at every row"}
    if selection == "hard_negatives":
        return {"all_rows": 'selection="hard_negatives" ranks the pairs of all rows'}
    return {"draws": selection in ("random", "distance_weighted")}
