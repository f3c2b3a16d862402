"""Logits of the class losses for use after training: the score of each class, without the margin of training."""

import torch
from torch import Tensor, nn

from nearkin.core import checks, distances

__all__ = ["checked", "nan_rows", "nearest", "of_cosines"]


def checked(module: nn.Module, embeddings: Tensor, weight: Tensor) -> Tensor:
    """The embeddings (B, D), in float32 or wider, checked against the class weights (rows, D).

    A row with NaN or Inf becomes NaN.
    """
    checks.dimensions("embeddings", checks.rows("embeddings", embeddings), weight.shape[1], "the class weights have")
    checks.same_device("embeddings", embeddings, weight, "the class weights")
    shard = getattr(module, "held", None)
    if shard is not None and shard.processes > 1:
        raise ValueError(
            f"get_logits needs all classes in one process, got {shard.number} of {shard.total} (shard=True): "
            "load the whole state dict into a loss with shard=False"
        )
    x = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    return torch.where(x.isfinite().all(1, keepdim=True), x, torch.nan)


def of_cosines(
    module: nn.Module, embeddings: Tensor, weight: Tensor, scale: float | Tensor, per_class: int = 1
) -> Tensor:
    """scale · cosine to the nearest of each class's `per_class` weights, (B, C)."""
    x = checked(module, embeddings, weight)
    return nearest(distances.cosine(x, weight), per_class) * scale + nan_rows(x)


def nan_rows(x: Tensor) -> Tensor:
    """NaN for rows with a NaN, else 0, (B, 1): a row without a direction has cosine 0, which would hide it."""
    return (x.detach() * 0).sum(1, keepdim=True)


def nearest(scores: Tensor, per_class: int) -> Tensor:
    """(B, C) from (B, C·K): of each class the largest, which alone has a gradient."""
    return scores if per_class == 1 else scores.view(len(scores), scores.shape[1] // per_class, per_class).max(2).values
