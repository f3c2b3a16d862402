"""The parent of every loss, miner, distance, reducer and regularizer here: refuses what it would have to ignore."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Recording", "device_of", "own_ids", "same_labels"]


class Recording(nn.Module):
    """Takes `collect_stats`, as the original does, and refuses True: nothing is recorded here."""

    def __init__(self, collect_stats: bool | None = None, **unknown: Any) -> None:
        super().__init__()
        if unknown:
            names = ", ".join(sorted(unknown))
            raise TypeError(f"{type(self).__name__} has no argument {names}")
        if collect_stats:
            raise ValueError(
                f"{type(self).__name__}: collect_stats must be False, got {collect_stats!r}; statistics of a batch are "
                "in nearkin.evaluation.diagnosis"
            )


def device_of(labels: Any, like: Tensor) -> Tensor:
    """Labels as a tensor on the device of `like`."""
    return torch.as_tensor(labels, device=like.device)


def own_ids(labels: Tensor) -> Tensor:
    """The same classes without nearkin's -1, which means unknown there and is a class like any other here."""
    return torch.where(labels == -1, torch.iinfo(torch.int64).min, labels.long())


def same_labels(labels: Tensor, reference_labels: Tensor) -> Tensor:
    """Which pairs have one label, (B, R) bool."""
    return labels[:, None] == reference_labels[None, :]
