"""pytorch-metric-learning's own classes with nearkin's path in front; needs the extra `pml`.

    from nearkin.compat.pml import losses, miners      # was: from pytorch_metric_learning import losses, miners

What is not here comes from that package: `losses.AngularLoss`, `reducers`, `utils.distributed` are its own.
docs/migrating.md says what is computed here, and where a number differs.
"""

import importlib
from typing import Any

__all__ = ["distances", "losses", "miners", "samplers", "utils"]
OLDEST = (2, 9)


def original(name: str) -> Any:
    """A module of pytorch-metric-learning."""
    return importlib.import_module(f"pytorch_metric_learning.{name}")


def _check_installed() -> None:
    try:
        version = importlib.import_module("pytorch_metric_learning").__version__
    except ImportError as error:
        raise ModuleNotFoundError(
            f"nearkin.compat.pml needs pytorch-metric-learning ({error}): pip install 'nearkin[pml]'"
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"nearkin.compat.pml needs pytorch-metric-learning 2.9 or later, got {version}: pip install 'nearkin[pml]'"
        )


_check_installed()

from nearkin.compat.pml import distances, losses, miners, samplers, utils  # noqa: E402  # where PML is known to be there


def __getattr__(name: str) -> Any:
    try:
        return original(name)
    except ModuleNotFoundError:
        raise AttributeError(f"nearkin.compat.pml has no {name}, and pytorch_metric_learning neither") from None
