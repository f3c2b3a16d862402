"""Samplers of pytorch-metric-learning: what an epoch draws is a pure function of (arguments, seed, epoch).

The original reads NumPy's global generator. Here `seed=` fixes every epoch; each `for` is the next one, and
`set_epoch` goes to any of them.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from nearkin import samplers
from nearkin.compat.pml.utils.loss_and_miner_utils import convert_to_weights
from nearkin.core.errors import RefusedArguments
from nearkin.core.random import Ints, Stream, Words, shuffled, words

__all__ = ["FixedSetOfTriplets", "HierarchicalSampler", "MPerClassSampler", "TuplesToWeightsSampler"]


def __dir__() -> list[str]:
    return __all__


def _array(labels: Any) -> NDArray[Any]:
    return labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)


def _class_ids(labels: Any) -> Ints:
    """Classes as 0, 1, …: no label means unknown here."""
    ids: Ints = np.unique(_array(labels), return_inverse=True)[1].astype(np.int64)
    return ids


def _rows_of_classes(ids: Ints) -> list[Ints]:
    return np.split(np.argsort(ids, kind="stable"), np.cumsum(np.bincount(ids))[:-1])


def _drawn(rows: Ints, number: int, keys: Words) -> Ints:
    """`number` of the rows in a random order, again from the first where there are too few; one key per row."""
    return np.resize(rows[shuffled(keys[: len(rows)])], number)


class _Epochs:
    """Counts the epochs: each `for` is the next."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next `for` draws this epoch."""
        self.epoch = epoch

    def _next(self) -> int:
        self.epoch += 1
        return self.epoch - 1


class MPerClassSampler(Sampler[int]):
    """m items of a class in a row, by `nearkin.samplers.ClassBalanced`: items of a pass come once, as far as m divides.

    With `batch_size` each batch has batch_size / m different classes; without, m items of every class in turn.
    """

    def __init__(
        self, labels: Any, m: int, batch_size: int | None = None, length_before_new_iter: int = 100000, seed: int = 0
    ) -> None:
        ids, m, length = _class_ids(labels), int(m), int(length_before_new_iter)
        one_pass = m * len(np.unique(ids))
        self.m_per_class, self.batch_size = m, None if batch_size is None else int(batch_size)
        size = one_pass if self.batch_size is None else self.batch_size
        for wrong, sentence in (
            (size % m, f"batch_size must be a multiple of m={m}, got {batch_size}"),
            (size > one_pass, f"batch_size must be at most m * (number of classes) = {one_pass}, got {batch_size}"),
            (size > length and batch_size, f"length_before_new_iter must be at least batch_size={size}, got {length}"),
        ):
            if wrong:
                raise RefusedArguments(sentence)
        self.list_size = length - length % size if size <= length else length
        batches = -(-self.list_size // size)
        self._batches = samplers.ClassBalanced(ids, size // m, m, seed, batches=batches)

    def __len__(self) -> int:
        return self.list_size

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(itertools.chain.from_iterable(self._batches), self.list_size)

    def set_epoch(self, epoch: int) -> None:
        """The next `for` draws this epoch."""
        self._batches.set_epoch(epoch)


class FixedSetOfTriplets(_Epochs, Sampler[int]):
    """`num_triplets` triplets, drawn once, in a new order each epoch: anchor, positive, negative, and so on."""

    def __init__(self, labels: Any, num_triplets: int, seed: int = 0) -> None:
        rows, self.seed = _rows_of_classes(_class_ids(labels)), seed
        if num_triplets < 1 or len(rows) < 2:
            raise ValueError(f"needs at least 1 triplet of 2 classes, got {num_triplets} of {len(rows)}")
        size, triplets = max(len(rows), *map(len, rows)), []
        for i in range(int(num_triplets)):
            keys = words(3 * size, seed, Stream.FIXED_TRIPLETS, 0, i).reshape(3, size)
            own, other = _drawn(np.arange(len(rows)), 2, keys[0])
            triplets.append([*_drawn(rows[own], 2, keys[1]), *_drawn(rows[other], 1, keys[2])])
        self.fixed_set_of_triplets = np.array(triplets)

    def __len__(self) -> int:
        return self.fixed_set_of_triplets.size

    def __iter__(self) -> Iterator[int]:
        keys = words(len(self.fixed_set_of_triplets), self.seed, Stream.FIXED_TRIPLETS, 1, self._next())
        return iter(self.fixed_set_of_triplets[shuffled(keys)].flatten().tolist())


class HierarchicalSampler(_Epochs, Sampler[list[int]]):
    """Batches of a few super classes each: a batch sampler. labels (N, levels)."""

    def __init__(
        self,
        labels: Any,
        batch_size: int,
        samples_per_class: int | str,
        batches_per_super_tuple: int = 4,
        super_classes_per_batch: int = 2,
        inner_label: int = 0,
        outer_label: int = 1,
        seed: int = 0,
    ) -> None:
        if batch_size % super_classes_per_batch:
            raise RefusedArguments(f"batch_size must be a multiple of {super_classes_per_batch}, got {batch_size}")
        self.sub_batch_len = batch_size // super_classes_per_batch
        whole = isinstance(samples_per_class, int) and samples_per_class > 0
        if samples_per_class != "all" and not (whole and self.sub_batch_len % int(samples_per_class) == 0):
            allowed = f'"all" or a divisor of {self.sub_batch_len}'
            raise RefusedArguments(f"samples_per_class must be {allowed}, got {samples_per_class!r}")
        self.batch_size, self.samples_per_class, self.seed = batch_size, samples_per_class, seed
        levels = _array(labels)
        inner, outer = _class_ids(levels[:, inner_label]), _class_ids(levels[:, outer_label])
        self.classes = []  # of each super class, the rows of each of its classes
        for rows in _rows_of_classes(outer):
            self.classes.append([rows[group] for group in _rows_of_classes(_class_ids(inner[rows]))])
        tuples = itertools.combinations(range(len(self.classes)), super_classes_per_batch)
        self.super_tuples = [combination for combination in tuples for _ in range(batches_per_super_tuple)]

    def __len__(self) -> int:
        return len(self.super_tuples)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._next()
        order = shuffled(words(len(self), self.seed, Stream.SUPER_CLASSES, epoch, 0))
        for position, place in enumerate(order):
            batch: list[int] = []
            for number, outer in enumerate(self.super_tuples[place]):
                batch += self._sub_batch(outer, epoch, 1 + position, 1 + number)
            keys = words(len(batch), self.seed, Stream.SUPER_CLASSES, epoch, 1 + position, 0)
            yield [batch[i] for i in shuffled(keys)]

    def _sub_batch(self, outer: int, *place: int) -> list[int]:
        classes, rows = self.classes[outer], np.empty(0, np.int64)
        keys = words(len(classes) + sum(map(len, classes)), self.seed, Stream.SUPER_CLASSES, *place)
        order, keys = shuffled(keys[: len(classes)]), keys[len(classes) :]
        for one in order:
            size = len(classes[one])
            number = size if isinstance(self.samples_per_class, str) else self.samples_per_class
            if len(rows) + number <= self.sub_batch_len:
                rows = np.concatenate([rows, _drawn(classes[one], number, keys)])
            keys = keys[size:]
        return [int(row) for row in rows]


class TuplesToWeightsSampler(_Epochs, Sampler[int]):
    """Items by how often a miner takes them: each epoch embeds the set, or `subset_size` of it, mines and draws.

    dataset: of (input, label). The original takes the arguments of its tester; here only `batch_size` remains.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        miner: torch.nn.Module,
        dataset: Any,
        subset_size: int | None = None,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        self.model, self.miner, self.dataset, self.subset_size = model, miner, dataset, subset_size
        self.batch_size, self.seed = batch_size, seed
        self.weights: Tensor | None = None

    def __len__(self) -> int:
        return self.subset_size or len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        epoch, rows = self._next(), np.arange(len(self.dataset))
        if self.subset_size:
            rows = _drawn(rows, self.subset_size, words(len(rows), self.seed, Stream.MINED_WEIGHTS, epoch, 0))
        embeddings, labels = self._embedded(rows)
        self.weights = torch.zeros(len(self.dataset), dtype=torch.float64)
        self.weights[torch.from_numpy(rows)] = convert_to_weights(self.miner(embeddings, labels), labels, torch.float64)
        edges = self.weights.cumsum(0).numpy()
        share = (words(len(self), self.seed, Stream.MINED_WEIGHTS, epoch, 1) >> np.uint64(11)) / 2**53
        return iter(np.searchsorted(edges, share * edges[-1], side="right").tolist())

    @torch.no_grad()
    def _embedded(self, rows: Ints) -> tuple[Tensor, Tensor]:
        training, first = self.model.training, next(self.model.parameters(), None)
        device = "cpu" if first is None else first.device
        subset = torch.utils.data.Subset(self.dataset, rows.tolist())
        self.model.eval()
        try:
            loader = torch.utils.data.DataLoader(subset, self.batch_size)
            parts = [(self.model(inputs.to(device)).cpu(), labels.flatten()) for inputs, labels in loader]
        finally:
            self.model.train(training)
        return torch.cat([x for x, _ in parts]), torch.cat([labels for _, labels in parts])
