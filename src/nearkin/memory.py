"""Cross-batch memory: embeddings of past batches as references of the present one."""

import torch
from torch import Tensor, nn

from nearkin.core import checks, reduce, relations
from nearkin.core.autograd import refuse_transforms
from nearkin.core.labels import UNKNOWN, BatchFirst, LabelDistance, Labels, Relation

__all__ = ["CrossBatchMemory"]


def __dir__() -> list[str]:
    return __all__


_KINDS = {"ids": torch.long, "rows": torch.bool, "targets": torch.float32}


class CrossBatchMemory(nn.Module):
    """A pair loss whose batch is also compared with the last `size` embeddings of past batches.

    L = loss(x, labels, [x; memory], [labels; memory's labels]), an item's pair with itself left out

    One relation over the batch and the memory, where the authors add two losses: a selection may take its positive from
    the batch and its negative from the memory, there is no weight to choose, and with an empty memory L is the loss of
    the batch alone. Gradients flow through both sides of the batch's own pairs; the memory is stored without a graph.
    A batch is stored after its loss was taken, and only in training.

    loss: any loss that takes references. dim: dimensions of the embeddings. warmup: training steps before the memory is
    used, while it already fills; embeddings drift fast at first. label_kind: "ids" (B,); "rows" (B, label_dim) bool for
    multi-label; "targets" (B,) or (B, label_dim) real-valued, stored in float32. The memory never grows, follows the
    embeddings' device, and is float32 also under half precision. With class ids no more of the matrix of batch and
    memory is made at a time than the loss's `max_memory` allows, or 1 GiB; with other labels, or a loss that is not of
    this library, the relation is two (B, B + size) masks. A row with NaN or Inf is not stored: its slot stays empty.
    `NPairLoss` takes every item for an anchor here, as it does with any references.
    Wang et al. 2020, arXiv:1912.06798.
    """

    embeddings: Tensor  # (size, D), zeros where empty
    labels: Tensor  # (size,) or (size, K)
    known: Tensor  # (size,) bool: which slots have an item
    cursor: Tensor  # () slot of the next row
    filled: Tensor  # () rows stored so far, at most size
    steps: Tensor  # () training steps so far

    def __init__(
        self,
        loss: nn.Module,
        size: int,
        dim: int,
        *,
        warmup: int = 0,
        label_kind: str = "ids",
        label_dim: int | None = None,
    ) -> None:
        super().__init__()
        checks.takes_references(loss)
        checks.integer("size", size, 1)
        checks.integer("dim", dim, 1)
        checks.integer("warmup", warmup, 0)
        checks.one_of("label_kind", label_kind, _KINDS)
        if label_dim is not None:
            checks.integer("label_dim", label_dim, 1)
        if (label_kind == "rows" and label_dim is None) or (label_kind == "ids" and label_dim is not None):
            rule = "given" if label_kind == "rows" else "left out"
            raise ValueError(f'label_dim must be {rule} where label_kind="{label_kind}", got {label_dim}')
        self.loss, self.warmup, self.label_kind = loss, warmup, label_kind
        shape = (size,) if label_dim is None else (size, label_dim)
        self.register_buffer("embeddings", torch.zeros(size, dim))
        self.register_buffer("labels", torch.full(shape, self._blank, dtype=_KINDS[label_kind]))
        self.register_buffer("known", torch.zeros(size, dtype=torch.bool))
        for name in ("cursor", "filled", "steps"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))

    @property
    def lr_scale(self) -> float:
        """`lr_scale` of the loss, whose parameters are the only ones."""
        return float(getattr(self.loss, "lr_scale", 1.0))

    def extra_repr(self) -> str:
        size, dim = self.embeddings.shape
        return f"size={size}, dim={dim}, warmup={self.warmup}, label_kind={self.label_kind!r}"

    def reset(self) -> None:
        """Empties the memory and restarts the warm-up; the loss keeps what it has learned."""
        for name, buffer in list(self.named_buffers(recurse=False)):
            setattr(self, name, torch.full_like(buffer, self._blank if name == "labels" else 0))

    def forward(
        self, embeddings: Tensor, labels: Tensor, stored: Tensor | None = None, *, items: Tensor | None = None
    ) -> Tensor:
        """The loss of a batch, which in training is then stored.

        stored (B, D): the same items from a momentum encoder, used as references and stored instead of the embeddings
        themselves, without gradient. They are another view, so an item's pair with its own stored embedding counts.
        items (B,): passed on to a loss that learns something per item, as `MarginLoss(num_items=)` does.
        """
        if self.training:
            refuse_transforms("CrossBatchMemory")
        self._follow(embeddings)
        labels = self._checked(embeddings, labels, stored)
        own = embeddings if stored is None else stored.detach()
        references = torch.cat([own, self.embeddings])  # (B + size, D); a copy, which later storing leaves alone
        options = {} if items is None else {"items": items}
        if self.label_kind == "ids" and getattr(self.loss, "takes_batch_first", False):
            ids = torch.cat([labels, torch.where(self._used(), self.labels, UNKNOWN)])
            others = BatchFirst(ids) if stored is None else ids
            value: Tensor = self.loss(embeddings, labels, references, others, **options)
        else:
            value = self.loss(embeddings, self._relation(labels, references, stored is None), references, **options)
        if self.training:
            self._store(own.detach(), labels)
        return value

    @property
    def _blank(self) -> int:
        return UNKNOWN if self.label_kind == "ids" else 0

    def _follow(self, embeddings: Tensor) -> None:
        """Moves the memory to the device of the embeddings, once."""
        if isinstance(embeddings, Tensor) and embeddings.device != self.embeddings.device:
            for name, buffer in list(self.named_buffers(recurse=False)):
                setattr(self, name, buffer.to(embeddings.device))

    def _checked(self, embeddings: Tensor, labels: Tensor, stored: Tensor | None) -> Tensor:
        """Checks the batch; returns labels in the type of the memory."""
        checks.rows("embeddings", embeddings)
        checks.dimensions("embeddings", embeddings, self.embeddings.shape[1], "the memory has")
        if stored is not None:
            checks.rows("stored", stored)
            checks.same_device("stored", stored, embeddings)
            checks.same_shape("stored", stored, embeddings, "embeddings")
        if not isinstance(labels, Tensor) or not self._fits(labels):
            got = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
            shape = ", ".join(map(str, ("rows", *self.labels.shape[1:])))
            raise TypeError(f"labels must be {self.label_kind} of shape ({shape}) as the memory keeps them, got {got}")
        checks.batch(embeddings, labels, self.embeddings, self.labels, graded=self.label_kind == "targets")
        return labels.to(self.labels.dtype)

    def _fits(self, labels: Tensor) -> bool:
        if labels.is_complex() or labels.shape[1:] != self.labels.shape[1:] or labels.dim() == 0:
            return False
        if self.label_kind == "ids":
            return labels.dtype != torch.bool and not labels.is_floating_point()
        return (labels.dtype == torch.bool) == (self.label_kind == "rows")

    def _used(self) -> Tensor:
        """Which slots are references of the present batch, (size,) bool."""
        return self.known & (self.steps >= self.warmup)

    def _relation(self, labels: Tensor, references: Tensor, same: bool) -> Labels:
        """Of the batch with itself and with the memory, (B, B + size); empty slots are neither positive nor negative.

        same: the first B references are the anchors themselves, so that a pair of an item with itself is left out.
        """
        others = torch.cat([labels, self.labels])
        valid = torch.cat([self.known.new_ones(labels.shape[0]), self._used()])  # (B + size,)
        if self.label_kind == "targets":  # pairs at distance 0 are left out, an item with itself too
            return LabelDistance(torch.where(valid, relations.label_distances(labels, others), 0.0))
        relation = relations.of(labels, references, BatchFirst(others) if same else others)
        ids = labels if self.label_kind == "ids" else None
        return Relation(relation.positive & valid, relation.negative & valid, ids)

    @torch.no_grad()
    def _store(self, rows: Tensor, labels: Tensor) -> None:
        """The last `size` rows take the slots from the cursor on, around the end.

        Every buffer becomes a new tensor of the same size: a compiled backward may still read the old one.
        """
        size, number = self.known.shape[0], rows.shape[0]
        skipped = max(number - size, 0)
        rows, labels = rows[skipped:].to(self.embeddings.dtype), labels[skipped:]
        slots = (self.cursor + torch.arange(skipped, number, device=rows.device)) % size
        columns = labels if labels.dim() == 2 else labels[:, None]
        finite = ~(reduce.any_in_row(~rows.isfinite()) | reduce.any_in_row(~columns.isfinite()))
        empty = ~finite if labels.dim() == 1 else ~finite[:, None]
        self.embeddings = self.embeddings.index_copy(0, slots, rows.masked_fill(~finite[:, None], 0.0))
        self.labels = self.labels.index_copy(0, slots, labels.masked_fill(empty, self._blank))
        self.known = self.known.index_copy(0, slots, finite)
        self.cursor = (self.cursor + number) % size
        self.filled = (self.filled + number).clamp(max=size)
        self.steps = self.steps + 1
