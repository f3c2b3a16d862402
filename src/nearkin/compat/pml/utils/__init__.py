"""The original's tools; `accuracy_calculator` is ours."""

from typing import Any

from nearkin.compat.pml import original
from nearkin.compat.pml.utils import accuracy_calculator

__all__ = ["accuracy_calculator"]


def __getattr__(name: str) -> Any:
    try:
        return original(f"utils.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"nearkin.compat.pml.utils has no {name}, and pytorch_metric_learning neither") from None
