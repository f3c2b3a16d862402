"""nearkin in Lightning: a module that trains an encoder with any loss, and a callback that measures it exactly.

Needs the package `lightning` (2.2 or later). See docs/howto/lightning.md.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nearkin import evaluation

__all__ = ["ExactEvaluation", "MetricLearning", "in_order"]

try:
    _pytorch: Any = importlib.import_module("lightning.pytorch")
except ImportError:
    raise ImportError("nearkin.compat.lightning needs the package lightning: pip install lightning") from None


class MetricLearning(_pytorch.LightningModule):  # type: ignore[misc]  # the package may be absent
    """Trains `encoder` (inputs → (B, D)) with `loss(embeddings, labels)` on batches of (inputs, labels).

    miner: of `nearkin.compat.pml.miners`, whose indices the loss then gets. The loss's own parameters (proxies, class
    weights) learn with it, at lr times its `lr_scale`. Each process computes the loss of its own batch.
    """

    def __init__(
        self,
        encoder: nn.Module,
        loss: nn.Module,
        *,
        lr: float = 1e-3,
        weight_decay: float = 1e-4,
        miner: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.loss, self.miner = encoder, loss, miner
        self.lr, self.weight_decay = lr, weight_decay

    def forward(self, inputs: Any) -> Tensor:
        """Embeddings, (B, D)."""
        rows: Tensor = self.encoder(inputs)
        return rows

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """The loss of a batch, logged as train_loss."""
        inputs, labels = batch[:2]
        embeddings = self(inputs)
        mined = () if self.miner is None else (self.miner(embeddings, labels),)
        value: Tensor = self.loss(embeddings, labels, *mined)
        self.log("train_loss", value.detach(), prog_bar=True, batch_size=len(labels))
        return value

    def validation_step(self, batch: Any, batch_index: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Embeddings and labels, for `ExactEvaluation`."""
        return {"embeddings": self(batch[0]), "labels": batch[1]}

    test_step = validation_step

    def predict_step(self, batch: Any, batch_index: int, dataloader_idx: int = 0) -> Tensor:
        """Embeddings."""
        rows: Tensor = self(batch[0] if isinstance(batch, list | tuple) else batch)
        return rows

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; the loss's parameters at their own rate and without decay."""
        groups: list[dict[str, Any]] = [{"params": list(self.encoder.parameters()), "weight_decay": self.weight_decay}]
        if learned := list(self.loss.parameters()):
            rate = self.lr * float(getattr(self.loss, "lr_scale", 1.0))
            groups.append({"params": learned, "lr": rate, "weight_decay": 0.0})
        return torch.optim.AdamW(groups, lr=self.lr)


class ExactEvaluation(_pytorch.Callback):  # type: ignore[misc]
    """Retrieval over the whole validation set after each validation, by `nearkin.evaluation.retrieval`.

    Logs `val_recall@1`, `val_map@r`, … (`test_…` in trainer.test), for checkpoints and early stopping too. Not a mean
    over batches: every item searches all others. On several processes the embeddings are gathered, and the copies with
    which Lightning's sampler fills up the last batch are left out; they would find one another.

    Takes any LightningModule whose validation step returns {"embeddings", "labels"}, or that gives embeddings when it
    is called with the inputs of a batch (inputs, labels). options: of `evaluation.retrieval`.
    """

    def __init__(self, ks: Sequence[int] | None = None, **options: Any) -> None:
        super().__init__()
        self.ks, self.options = None if ks is None else tuple(ks), options
        self.scores: dict[str, float] = {}  # of the last validation
        self._rows: list[Tensor] = []
        self._labels: list[Tensor] = []

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Forgets the last one."""
        self._rows, self._labels = [], []

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keeps the embeddings of a batch, in float32."""
        if dataloader_idx:
            raise ValueError(f"ExactEvaluation takes one validation loader, got a batch of number {dataloader_idx}")
        if isinstance(outputs, dict) and "embeddings" in outputs:
            rows, labels = outputs["embeddings"], outputs["labels"]
        else:
            rows, labels = pl_module(batch[0]), batch[1]
        self._rows.append(rows.detach().float())
        self._labels.append(labels.detach())

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measures and logs."""
        self._measure(trainer, pl_module, "val", trainer.val_dataloaders)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measures and logs."""
        self._measure(trainer, pl_module, "test", trainer.test_dataloaders)

    def _measure(self, trainer: Any, pl_module: Any, prefix: str, loader: Any) -> None:
        if trainer.sanity_checking or not self._rows:
            return
        rows, labels = torch.cat(self._rows), torch.cat(self._labels)
        if trainer.world_size > 1:
            size = len(loader.dataset)
            rows, labels = (in_order(pl_module.all_gather(part), size) for part in (rows, labels))
        self.scores = dict(evaluation.retrieval(rows, labels, ks=self.ks, **self.options))
        pl_module.log_dict({f"{prefix}_{name}": value for name, value in self.scores.items()}, rank_zero_only=False)
        self._rows, self._labels = [], []


def in_order(parts: Tensor, size: int) -> Tensor:
    """The rows of a set of `size` from what each process saw, (processes, rows, …): process r has rows r, r + W, ….

    So torch's DistributedSampler deals them out without shuffling, and repeats the first ones at the end.
    """
    processes, rows = parts.shape[:2]
    if -(-size // processes) != rows:
        raise ValueError(
            f"a set of {size} on {processes} processes must give {-(-size // processes)} rows each, got {rows}; "
            "do not shuffle or drop the last batch of the validation loader"
        )
    return parts.transpose(0, 1).flatten(0, 1)[:size]
