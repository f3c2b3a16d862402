"""What all samplers share: epochs, resuming, and the division of a batch over ranks."""

import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from nearkin.core import checks
from nearkin.core.random import Ints, Stream, shuffled, words
from nearkin.samplers.arguments import Split


class EpochSampler(Sampler[list[int]]):
    """A torch batch sampler whose batches are a pure function of (arguments, epoch, index).

    **Epochs.** A pass draws every item that the composition can reach at least once; an epoch is one pass unless
    `batches=` sets its length: then epochs continue through pass after pass. Each `for` over the sampler or its
    DataLoader is one epoch and the next `for` is the next epoch, also after a `break`; `set_epoch` chooses one.

    **Resuming.** `state_dict()` holds the position after the last batch drawn; a sampler that loads it continues with
    the next one. A DataLoader with workers draws batches ahead of the training loop, so pass the number of batches of
    this epoch, counted from its first, that were trained on:

        for step, batch in enumerate(loader, start=sampler.start):
            ...
            state = sampler.state_dict(batches_done=step + 1)

    States are tensors only, and fit any number of ranks: the ranks share one global batch.

    **Ranks.** Each of `world_size` ranks gets its part of the same global batch; the parts together are the batch of a
    single process. `split="classes"` puts each class on one rank, as many on each; `split="items"` spreads every
    class over the ranks, as many items on each.
    """

    def __init__(
        self,
        data: Ints | NDArray[np.float64],
        pass_batches: int,
        batches: int | None,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        split: Split = "items",
    ) -> None:
        checks.integer("seed", seed, 0)
        checks.no_more("seed", seed, 2**63 - 1, "the largest allowed")
        if batches is not None:
            checks.integer("batches", batches, 1)
        self.seed, self.rank, self.world_size, self.split = seed, rank, world_size, split
        self._pass_batches = pass_batches
        self._batches = pass_batches if batches is None else batches
        self._fingerprint = zlib.crc32(data.astype(data.dtype.newbyteorder("<"), order="C").data)
        self._add_to_fingerprint(type(self).__name__, seed, self._batches)
        self._epoch = self._drawn = 0
        self._resumed = False
        self._orders: dict[Stream, tuple[tuple[int, ...], Ints]] = {}

    def __len__(self) -> int:
        """Batches per epoch."""
        return self._batches

    @property
    def epoch(self) -> int:
        """The epoch of the last batch drawn; the one after it as soon as all its batches are."""
        return self._epoch + self._drawn // self._batches

    @property
    def start(self) -> int:
        """The first batch of the next iteration: 0, or where it was resumed."""
        return self._drawn if self._resumed else 0

    def batch(self, epoch: int, index: int) -> list[int]:
        """This rank's part of batch `index` of an epoch; does not change the position of the sampler."""
        checks.integer("epoch", epoch, 0)
        checks.integer("index", index, 0)
        checks.no_more("index", index, self._batches - 1, "the last batch of an epoch")
        items, sizes = self._global_batch(*divmod(epoch * self._batches + index, self._pass_batches))
        part: list[int] = self._rank_part(items, sizes).tolist()
        return part

    def __iter__(self) -> Iterator[list[int]]:
        # Runs at the first next(), not at iter(): a DataLoader with workers takes two iterators and uses one.
        if self._drawn and not self._resumed:
            self._epoch, self._drawn = self._epoch + 1, 0
        self._resumed = False
        epoch = self._epoch
        for index in range(self._drawn, self._batches):
            self._drawn = index + 1
            yield self.batch(epoch, index)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch: from its first batch, or from where it was just resumed."""
        if not (self._resumed and epoch == self._epoch):
            self.resume(epoch, 0)

    def resume(self, epoch: int, batch: int) -> None:
        """The next iteration begins with this batch of this epoch."""
        checks.integer("epoch", epoch, 0)
        checks.integer("batch", batch, 0)
        checks.no_more("batch", batch, self._batches, "the batches of an epoch")
        self._epoch, self._drawn = epoch + batch // self._batches, batch % self._batches
        self._resumed = self._drawn > 0

    def state_dict(self, batches_done: int | None = None) -> dict[str, Tensor]:
        """Where to continue: after the last batch drawn, or after `batches_done` of the last iterated epoch."""
        done = self._drawn if batches_done is None else batches_done
        checks.integer("batches_done", done, 0)
        checks.no_more("batches_done", done, self._batches, "the batches of an epoch")
        place = {"epoch": self._epoch + done // self._batches, "batch": done % self._batches}
        return {name: torch.tensor(value) for name, value in {**place, "fingerprint": self._fingerprint}.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if int(state["fingerprint"]) != self._fingerprint:
            origin = f"a {type(self).__name__} with the same labels, seed and settings"
            raise ValueError(f"state must come from {origin}, got the state of a different one")
        self.resume(int(state["epoch"]), int(state["batch"]))

    def _add_to_fingerprint(self, *settings: str | int) -> None:
        """Adds settings that a loaded state must share, besides the data."""
        self._fingerprint = zlib.crc32(repr(settings).encode(), self._fingerprint)

    def _shuffled(self, count: int, stream: Stream, *place: int) -> Ints:
        """A shuffled order of 0 … count - 1, stored until another one of the same stream is needed."""
        stored = self._orders.get(stream)
        if stored is None or stored[0] != place:  # threads may both compute it: to the same order
            stored = place, shuffled(words(count, self.seed, stream, *place))
            self._orders[stream] = stored
        return stored[1]

    def _window(self, count: int, size: int, stream: Stream, pass_index: int, position: int) -> Ints:
        """`size` of 0 … count - 1, drawn evenly: shuffled orders of all, used up piece by piece."""
        piece, start = divmod(position, count // size)
        return self._shuffled(count, stream, pass_index, piece)[start * size : (start + 1) * size]

    def _global_batch(self, pass_index: int, position: int) -> tuple[Ints, Ints]:
        """The items of a batch of pass `pass_index` over all ranks, group by group, and the sizes of the groups."""
        raise NotImplementedError

    def _rank_part(self, items: Ints, sizes: Ints) -> Ints:
        """This rank's part of a global batch."""
        if self.split == "items" or self.world_size == 1:
            return items[self.rank :: self.world_size]
        owner, load = np.empty_like(sizes), np.zeros(self.world_size, np.int64)
        for group in np.argsort(-sizes, kind="stable").reshape(-1, self.world_size):  # from the largest classes down
            emptiest = np.argsort(load, kind="stable")
            owner[group] = emptiest
            load[emptiest] += sizes[group]
        part: Ints = items[np.repeat(owner, sizes) == self.rank]
        return part
