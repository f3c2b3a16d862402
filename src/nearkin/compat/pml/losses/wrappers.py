"""Losses around losses: a cross-batch memory, two views, a sum of several."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.compat.pml.recording import Recording
from nearkin.compat.pml.utils import loss_and_miner_utils as indexing
from nearkin.core.errors import RefusedArguments

__all__ = ["CrossBatchMemory", "MultipleLosses", "SelfSupervisedLoss"]

WITH_REFERENCES = [
    "AngularLoss",
    "CircleLoss",
    "ContrastiveLoss",
    "GeneralizedLiftedStructureLoss",
    "IntraPairVarianceLoss",
    "LiftedStructureLoss",
    "MultiSimilarityLoss",
    "NCALoss",
    "NTXentLoss",
    "SignalToNoiseRatioContrastiveLoss",
    "SupConLoss",
    "TripletMarginLoss",
    "TupletMarginLoss",
]


class _Wrapper(Recording):
    """Takes losses that are defined against references."""

    def __init__(self, loss: nn.Module, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check_loss_support(type(loss).__name__)
        self.loss = loss

    @staticmethod
    def supported_losses() -> list[str]:
        """The classes it takes."""
        return list(WITH_REFERENCES)

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        """Refuses a loss that takes no references."""
        if loss_name not in cls.supported_losses():
            known = ", ".join(cls.supported_losses())
            raise ValueError(f"{cls.__name__}: loss must take references, got {loss_name}; known: {known}")


class CrossBatchMemory(_Wrapper):
    """Each batch against the last `memory_size` embeddings, itself among them; nothing is compared with itself."""

    def __init__(
        self,
        loss: nn.Module,
        embedding_size: int,
        memory_size: int = 1024,
        miner: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(loss, **kwargs)
        self.miner, self.embedding_size, self.memory_size = miner, embedding_size, memory_size
        self.embedding_memory: Tensor
        self.label_memory: Tensor
        self.reset_queue()

    @staticmethod
    def supported_losses() -> list[str]:
        """The classes it takes."""
        return sorted([*WITH_REFERENCES, "MarginLoss"])

    def reset_queue(self) -> None:
        """An empty memory."""
        self.register_buffer("embedding_memory", torch.zeros(self.memory_size, self.embedding_size))
        self.register_buffer("label_memory", torch.zeros(self.memory_size, dtype=torch.long))
        self.has_been_filled, self.queue_idx = False, 0

    def forward(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None, enqueue_mask: Tensor | None = None
    ) -> Any:
        """The loss of the batch against the memory. enqueue_mask (B,): these go into it, and only the rest costs."""
        labels = labels.to(embeddings.device)
        stored, stored_labels = embeddings, labels
        if enqueue_mask is not None:
            if indices_tuple is not None:
                raise ValueError("indices_tuple and enqueue_mask exclude each other, got both")
            if len(enqueue_mask) != len(embeddings):
                raise RefusedArguments(f"enqueue_mask must have {len(embeddings)} entries, got {len(enqueue_mask)}")
            mask = enqueue_mask.to(embeddings.device)
            stored, stored_labels = embeddings[mask], labels[mask]
            embeddings, labels = embeddings[~mask], labels[~mask]
        if len(stored) > self.memory_size:
            raise RefusedArguments(f"memory_size must be at least the batch, {len(stored)}, got {self.memory_size}")
        self.add_to_memory(stored, stored_labels)
        size = self.memory_size if self.has_been_filled else self.queue_idx
        memory, memory_labels = self.embedding_memory[:size].clone(), self.label_memory[:size].clone()
        chosen = self.create_indices_tuple(
            embeddings, labels, memory, memory_labels, indices_tuple, enqueue_mask is None
        )
        return self.loss(embeddings, labels, chosen, memory, memory_labels)

    def create_indices_tuple(
        self,
        embeddings: Tensor,
        labels: Tensor,
        E_mem: Tensor,
        L_mem: Tensor,
        input_indices_tuple: Any,
        do_remove_self_comparisons: bool,
    ) -> tuple[Tensor, ...]:
        """The pairs or triplets of the batch with the memory, and after them a miner's within the batch."""
        if self.miner is None:
            chosen = indexing.get_all_pairs_indices(labels, L_mem)
        else:
            chosen = self.miner(embeddings, labels, E_mem, L_mem)
        if do_remove_self_comparisons:
            chosen = indexing.remove_self_comparisons(chosen, self.curr_batch_idx)
        return chosen if input_indices_tuple is None else self._with_mined(chosen, input_indices_tuple, labels)

    def _with_mined(self, chosen: tuple[Tensor, ...], mined: Any, labels: Tensor) -> tuple[Tensor, ...]:
        """A miner's indices within the batch, as rows of the memory, after the chosen ones."""
        convert = indexing.convert_to_pairs if len(chosen) == 4 else indexing.convert_to_triplets
        mined = list(convert(tuple(index.to(labels.device) for index in mined), labels))
        for place in (1, 3) if len(mined) == 4 else (1, 2):
            mined[place] = self.curr_batch_idx[mined[place]]
        return tuple(torch.cat(both) for both in zip(chosen, mined, strict=True))

    def add_to_memory(self, embeddings: Tensor, labels: Tensor, batch_size: int | None = None) -> None:
        """The newest replace the oldest; batch_size, the number of rows, need not be given."""
        self.embedding_memory = self.embedding_memory.to(embeddings)
        self.label_memory = self.label_memory.to(labels)
        end = self.queue_idx + len(embeddings)
        self.curr_batch_idx = torch.arange(self.queue_idx, end, device=labels.device) % self.memory_size
        self.embedding_memory[self.curr_batch_idx] = embeddings.detach()
        self.label_memory[self.curr_batch_idx] = labels.detach()
        self.has_been_filled = self.has_been_filled or end >= self.memory_size
        self.queue_idx = end % self.memory_size


class SelfSupervisedLoss(_Wrapper):
    """Two views: row i of one is the only positive of row i of the other; both are anchors unless `symmetric=False`."""

    def __init__(self, loss: nn.Module, symmetric: bool = True, **kwargs: Any) -> None:
        super().__init__(loss, **kwargs)
        self.symmetric = symmetric

    def forward(self, embeddings: Tensor, ref_emb: Tensor) -> Any:
        """The loss of the two views."""
        ids = torch.arange(len(embeddings), device=embeddings.device)
        if self.symmetric:
            return self.loss(torch.cat([embeddings, ref_emb]), ids.repeat(2))
        return self.loss(embeddings, ids, ref_emb=ref_emb, ref_labels=ids.clone())


class MultipleLosses(nn.Module):
    """The weighted sum of losses, each maybe with a miner of its own; a list, or a dictionary by name."""

    def __init__(self, losses: Any, miners: Any = None, weights: Any = None) -> None:
        super().__init__()
        named = losses if isinstance(losses, Mapping) else {str(i): loss for i, loss in enumerate(losses)}
        self.is_dict = isinstance(losses, Mapping)
        self.losses: Any = nn.ModuleDict(named) if self.is_dict else nn.ModuleList(losses)
        self._miners = self._by_name("miners", miners, list(named), complete=not self.is_dict)
        self.miners = nn.ModuleDict({k: miner for k, miner in self._miners.items() if miner is not None})
        self.weights = dict.fromkeys(named, 1) | self._by_name("weights", weights, list(named), complete=True)

    def _by_name(self, argument: str, values: Any, names: list[str], complete: bool) -> dict[str, Any]:
        if values is None:
            return {}
        if isinstance(values, Mapping) != self.is_dict or not isinstance(values, Mapping | Sequence):
            kind = "a dictionary" if self.is_dict else "a list"
            raise TypeError(f"{argument} must be {kind}, as losses is, got {type(values).__name__}")
        named = dict(values) if self.is_dict else {str(i): value for i, value in enumerate(values)}
        if set(named) - set(names) or (complete and set(named) != set(names)):
            raise RefusedArguments(f"{argument} must have the keys of losses, {sorted(names)}, got {sorted(named)}")
        return named

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Any:
        """The weighted sum."""
        if len(self.miners) and indices_tuple is not None:
            raise RefusedArguments("indices_tuple must be None where miners are given: each loss has its own")
        total: Any = 0
        named = self.losses.items() if self.is_dict else ((str(i), loss) for i, loss in enumerate(self.losses))
        for name, loss in named:
            mined = self.miners[name](embeddings, labels) if name in self.miners else indices_tuple
            total = total + loss(embeddings, labels, mined) * self.weights[name]
        return total
