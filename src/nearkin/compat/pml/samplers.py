"""The original's samplers; `MPerClassSampler` with a seed."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nearkin import samplers
from nearkin.compat.pml import original

_theirs: Any = original("samplers")


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)


class MPerClassSampler(_theirs.MPerClassSampler):
    """m items of a class in a row, by `nearkin.samplers.ClassBalanced`: items of a pass come once, as far as m divides.

    What an epoch draws is a function of (arguments, seed, epoch); the original reads NumPy's global generator. Each
    `for` is the next epoch, and `set_epoch` goes to any of them.
    """

    def __init__(
        self, labels: Any, m: int, batch_size: int | None = None, length_before_new_iter: int = 100000, seed: int = 0
    ) -> None:
        super().__init__(labels, m, batch_size, length_before_new_iter)
        given = labels.cpu().numpy() if hasattr(labels, "cpu") else np.asarray(labels)
        ids = np.unique(given, return_inverse=True)[1].astype(np.int64)  # no label means unknown here
        size = self.length_of_single_pass if self.batch_size is None else self.batch_size
        each, batches = self.m_per_class, -(-self.list_size // size)
        self._batches = samplers.ClassBalanced(ids, size // each, each, seed, batches=batches)

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(itertools.chain.from_iterable(self._batches), self.list_size)

    def set_epoch(self, epoch: int) -> None:
        """The next `for` draws this epoch."""
        self._batches.set_epoch(epoch)
