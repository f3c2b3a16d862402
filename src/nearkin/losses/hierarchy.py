"""A loss summed over the levels of a hierarchy of classes."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

from torch import Tensor, nn

from nearkin.core import checks

__all__ = ["HierarchyLoss"]


class HierarchyLoss(nn.Module):
    """The sum of a loss over levels of classes, as species, genus and family, each with its weight.

        L = Σ_l w_l L_l(embeddings, labels[:, l])

        loss = HierarchyLoss(losses.SupConLoss(), weights=(1.0, 0.3))
        loss = HierarchyLoss([losses.ArcFaceLoss(200, 128), losses.ArcFaceLoss(30, 128)], weights=(1.0, 0.3))
        loss(embeddings, labels)  # labels (B, 2): the class of each item, and the coarser class

    losses: one loss per level, the finest first; or a single one for all levels, which must have neither learned
    weights nor buffers, since class weights, centres and memories belong to the classes of one level. Levels may have
    different losses. weights: one number > 0 per level; their number is the number of levels. labels: (B, L) class ids,
    -1 where an item's class of a level is unknown. References, and items of a loss that learns something per item, are
    handed to every level, reference_labels (R, L) column by column. A `CrossBatchMemory` goes inside, one per level.
    """

    def __init__(self, losses: nn.Module | Sequence[nn.Module], weights: Sequence[float]) -> None:
        super().__init__()
        self._weights = _checked_weights(weights)
        levels = len(self._weights)
        modules = [losses] * levels if isinstance(losses, nn.Module) else list(losses)
        for loss in modules:
            if not isinstance(loss, nn.Module):
                raise TypeError(f"losses must be torch modules, got {type(loss).__name__}")
        if len(modules) != levels:
            raise ValueError(f"losses must be one per weight: {levels} weights, {len(modules)} losses")
        for number, loss in enumerate(modules):
            if any(loss is other for other in modules[:number]) and loss.state_dict():
                raise ValueError(
                    f"losses must be one {type(loss).__name__} per level, since it keeps something for its classes, "
                    f"got the same one for level {modules.index(loss)} and level {number}"
                )
        self.losses = nn.ModuleList(modules)
        # `stored` is what a memory calls its references.
        self._with_references = [
            "stored" in signature(loss.forward).parameters or checks.has_references(loss) for loss in modules
        ]

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each level, the finest first."""
        return self._weights

    @weights.setter
    def weights(self, weights: Sequence[float]) -> None:
        values = _checked_weights(weights)
        if len(values) != len(self.losses):
            raise ValueError(f"weights must be one per level: {len(self.losses)} levels, {len(values)} weights")
        self._weights = values

    @property
    def lr_scale(self) -> float:
        """The largest of the losses that have parameters."""
        learned = [loss for loss in self.losses if any(True for _ in loss.parameters())]
        scale: float = max((getattr(loss, "lr_scale", 1.0) for loss in learned), default=1.0)
        return scale

    def extra_repr(self) -> str:
        return f"weights={self._weights}"

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
        *,
        items: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum; with reduction="none" of the losses, one value per anchor."""
        columns = self._columns("labels", labels, embeddings, "embeddings")
        others: list[Any] = [None] * len(columns)
        if reference_labels is labels:
            others = columns  # a batch that is its own reference is known by identity
        elif reference_labels is not None:
            if references is None:
                raise ValueError("reference_labels need references, got None")
            others = self._columns("reference_labels", reference_labels, references, "references")
        options = {} if items is None else {"items": items}
        terms = []
        every = zip(self.losses, self._weights, columns, others, self._with_references, strict=True)
        for loss, weight, ids, other_ids, takes in every:
            arguments = [embeddings, ids]
            if references is not None:
                if not takes:
                    checks.takes_references(loss)
                arguments += [references] if other_ids is None else [references, other_ids]
            terms.append(weight * loss(*arguments, **options))
        total: Tensor = sum(terms[1:], start=terms[0])
        return total

    def _columns(self, name: str, labels: Any, items: Tensor, of_name: str) -> list[Tensor]:
        """The class ids of each level."""
        checks.rows(of_name, items)
        levels = len(self.losses)
        if not isinstance(labels, Tensor):
            raise TypeError(f"{name} must be a torch tensor of class ids (rows, {levels}), got {type(labels).__name__}")
        if labels.dim() != 2 or labels.shape[1] != levels:
            shape = f"(rows, {levels}), one column per level, the finest first"
            raise ValueError(f"{name} must have shape {shape}, got {tuple(labels.shape)}")
        columns = list(labels.unbind(1))
        checks.class_ids(name, columns[0], items, of_name)
        return columns


def _checked_weights(weights: Any) -> tuple[float, ...]:
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise TypeError(f"weights must be a list of numbers, one per level, got {weights!r}")
    if len(weights) < 2:
        raise ValueError(f"weights must be at least 2, one per level, the finest first, got {len(weights)}")
    for weight in weights:
        checks.positive("weights", weight)
    return tuple(1.0 * weight for weight in weights)
