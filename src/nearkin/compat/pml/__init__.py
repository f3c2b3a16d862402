"""The names, arguments and call forms of pytorch-metric-learning 2.9, over nearkin's losses, distances and evaluation.

    from nearkin.compat.pml import losses, miners      # was: from pytorch_metric_learning import losses, miners

docs/migrating.md says where a number differs from the original, and why. That package is not needed.
"""

from nearkin.compat.pml import distances, losses, miners, reducers, regularizers, samplers, utils

__all__ = ["distances", "losses", "miners", "reducers", "regularizers", "samplers", "utils"]


def __dir__() -> list[str]:
    return __all__
