"""The loader: rows of images or vectors by their index, gathered ahead of the training loop; and embedding them."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearkin.core import cpu_pool, devices
from nearkin.data import augment
from nearkin.dist.group import ALONE, ProcessGroup
from nearkin.samplers import EpochSampler
from nearkin.training.own_objects import DatasetRows

__all__ = ["Batch", "BatchLoader", "ItemStore", "embed", "on_device"]

_RESIDENT = 0.25  # share of a GPU's free memory that all rows may take, so that no batch crosses the bus
_AHEAD = 4  # batches gathered before they are needed
_LARGE = 128  # side of pictures that a CPU encodes a few at a time


class ItemStore:
    """Items as tensors: pixels (N, S, S, C) uint8, perhaps on disk, vectors (N, F) float32, or those of a dataset."""

    def __init__(
        self, rows: NDArray[Any] | DatasetRows, device: torch.device, size: int | None = None, flip: bool = True
    ) -> None:
        self.rows, self.device, self.size = rows, device, size
        self.flip = flip  # whether a mirror image shows the same
        self.resident: Tensor | None = None
        if isinstance(rows, DatasetRows) or device.type != "cuda":
            return
        if rows.nbytes <= _RESIDENT * torch.cuda.mem_get_info(device)[0]:
            self.resident = copy_to_device(rows, device)

    def gather(self, indices: NDArray[np.int64]) -> Tensor:
        """Rows on the CPU, or on the device where all rows are."""
        if self.resident is not None:
            return self.resident[torch.from_numpy(indices).to(self.device, non_blocking=True)]
        if isinstance(self.rows, DatasetRows):
            rows = self.rows.take(indices)
        else:
            rows = torch.from_numpy(np.take(self.rows, indices, axis=0))
        return rows.pin_memory() if self.device.type == "cuda" else rows

    def eval_view(self, rows: Tensor) -> Tensor:
        """Gathered rows as the encoder gets them in evaluation: the centre, without augmentation."""
        rows = on_device(rows, self.device)
        return rows if self.size is None else augment.centre(rows, self.size)


def on_device(rows: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it; float64 in float32 where the device has no float64."""
    if rows.dtype == torch.float64 and not devices.has_float64(device):
        rows = rows.float()
    return rows.to(device, non_blocking=True)


def copy_to_device(rows: NDArray[Any], device: torch.device, step: int = 4096) -> Tensor:
    """All rows on the device, copied step by step: torch takes no array that is mapped read-only."""
    dtype = torch.from_numpy(np.empty(0, rows.dtype)).dtype
    copy = torch.empty(rows.shape, dtype=dtype, device=device)
    for start in range(0, len(rows), step):
        copy[start : start + step] = torch.from_numpy(np.array(rows[start : start + step]))
    return copy


class Batch(NamedTuple):
    """One batch: which of the training items, and the stored rows of this rank's part of it."""

    number: int
    items: NDArray[np.int64]  # of all ranks, in the order of one process
    rows: Tensor
    counts: tuple[int, ...]  # rows of each rank; its parts follow one another
    part: slice  # this rank's


class BatchLoader:
    """The batches of an epoch in order, while `workers` threads gather the next ones.

    A batch is a pure function of (seed, epoch, number), so threads change nothing but the time. Each rank of a group
    loads its own part: concatenated in the order of the ranks, the parts are the batch of one process.
    """

    def __init__(
        self,
        store: ItemStore,
        indices: NDArray[np.int64],
        sampler: EpochSampler,
        workers: int,
        group: ProcessGroup = ALONE,
    ) -> None:
        self.store, self.indices, self.sampler, self.workers, self.group = store, indices, sampler, workers, group

    def epoch(self, number: int, start: int) -> Iterator[Batch]:
        """From batch `start` of an epoch to its last."""
        self.sampler.resume(number, start)
        if not self.workers or self.store.resident is not None:
            for batch in range(start, len(self.sampler)):
                yield self._load(batch, np.array(self.sampler.batch(number, batch)))
            return
        with ThreadPoolExecutor(self.workers, thread_name_prefix="nearkin-loader") as pool:
            ahead: deque[Future[Batch]] = deque()
            try:
                for batch in range(start, len(self.sampler)):
                    ahead.append(pool.submit(self._load, batch, np.array(self.sampler.batch(number, batch))))
                    if len(ahead) > max(_AHEAD, self.workers):
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for waiting in ahead:
                    waiting.cancel()

    def _load(self, number: int, items: NDArray[np.int64]) -> Batch:
        counts, part = self.group.share_sizes(len(items)), self.group.share(len(items))
        return Batch(number, items, self.store.gather(self.indices[items[part]]), counts, part)


@torch.no_grad()
def embed(
    encoder: nn.Module,
    store: ItemStore,
    indices: NDArray[np.int64],
    *,
    batch: int = 256,
    precision: torch.dtype | None = None,
    views: int = 1,
    features: bool = False,
    progress: Any = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Embeddings (n, D) float32 on the CPU of the items at `indices`, the encoder in evaluation mode meanwhile.

    views: the mean over several crops and flips, scaled to length 1 if the encoder normalises. features: the pooled
    backbone instead, before any projection. Each rank of a group embeds its share in whole batches, so that batches do
    not depend on the number of ranks; all ranks return all rows.
    """
    if group is None or group.size == 1:
        return _embed_alone(encoder, store, indices, batch, precision, views, features, progress)
    share, rows = indices[group.share(len(indices), batch)], torch.empty(0, 0)
    with group.work("embedding", progress, len(indices)) as report:
        if len(share):
            rows = _embed_alone(encoder, store, share, batch, precision, views, features, report)
    dim = max(group.values(rows.shape[1]))  # which a rank without items does not know
    return group.rows(rows if len(share) else rows.new_empty(0, dim))


def _embed_alone(
    encoder: nn.Module,
    store: ItemStore,
    indices: NDArray[np.int64],
    batch: int,
    precision: torch.dtype | None,
    views: int,
    features: bool,
    progress: Any = None,
) -> Tensor:
    """`embed` by this process alone."""

    def forward(rows: Tensor) -> Tensor:
        inputs = [store.eval_view(rows)]
        if views > 1 and store.size is not None:
            inputs = list(augment.views(rows.to(store.device), store.size, views, flip=store.flip))
        with torch.no_grad(), torch.autocast(store.device.type, precision, enabled=precision is not None):
            outputs = [encoder.features(view) if features else encoder(view) for view in inputs]  # type: ignore[operator]
        mean = torch.stack([part.float() for part in outputs]).mean(0)
        if views > 1 and not features and getattr(encoder, "settings", {}).get("normalize"):
            mean = nn.functional.normalize(mean, dim=1)
        return mean.cpu()

    was_training = encoder.training
    encoder.eval()
    embeddings: list[Tensor] = []
    large = store.device.type == "cpu" and store.size is not None and store.size >= _LARGE
    try:
        for start in range(0, len(indices), batch):
            rows = store.gather(indices[start : start + batch])
            embeddings += cpu_pool.mapped(forward, torch.split(rows, cpu_pool.BATCH)) if large else [forward(rows)]
            if progress is not None:
                progress(min(start + batch, len(indices)), len(indices))
    finally:
        encoder.train(was_training)
    return torch.cat(embeddings)
