"""`AccuracyCalculator` and the index functions of pytorch-metric-learning, under its paths."""

from nearkin.compat.pml.utils import accuracy_calculator, loss_and_miner_utils

__all__ = ["accuracy_calculator", "loss_and_miner_utils"]


def __dir__() -> list[str]:
    return __all__
