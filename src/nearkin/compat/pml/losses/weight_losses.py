"""Losses with weights, or with rows as classes, that nearkin itself does not have."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nearkin.compat.pml.distances import BaseDistance, CosineSimilarity
from nearkin.compat.pml.losses.base_loss import (
    BaseMetricLossFunction,
    already_reduced,
    element_terms,
    refuse_distance,
)
from nearkin.compat.pml.losses.class_losses import WeightLoss
from nearkin.compat.pml.reducers import Terms
from nearkin.core import distances
from nearkin.core.angles import psi
from nearkin.core.errors import RefusedArguments

__all__ = ["InstanceLoss", "LargeMarginSoftmaxLoss", "ManifoldLoss", "P2SGradLoss"]


class LargeMarginSoftmaxLoss(WeightLoss):
    """Softmax of scale |x| |w| cos θ, of the own class ψ(θ), as SphereFace but with weights of free length.

    Liu et al. 2016, arXiv:1612.02295.
    """

    def __init__(
        self, num_classes: int, embedding_size: int, margin: float = 4, scale: float = 1, **kwargs: Any
    ) -> None:
        super().__init__(num_classes, embedding_size, int(margin), scale, **kwargs)

    def _scale(self, embeddings: Tensor, rows: Tensor) -> Tensor:
        return self.scale * distances.length(embeddings)[:, None] * distances.length(rows)

    def per_item(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """From all logits."""
        cosine = distances.cosine(embeddings, rows)
        own = cosine.gather(1, labels[:, None])
        cosine = cosine.scatter(1, labels[:, None], psi(own, int(self.margin)))
        return functional.cross_entropy(cosine * self._scale(embeddings, rows), labels, reduction="none")

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """scale |x| |w| cos of each class, (B, C), without the margin."""
        rows = self._rows(embeddings)
        return distances.cosine(embeddings, rows) * self._scale(embeddings, rows)


class P2SGradLoss(BaseMetricLossFunction):
    """Mean of (cos θ_c - [c is the class])² over items and classes. Zhang et al. 2019, arXiv:1905.02479.

    weight (embedding size, classes) is scaled to unit columns in each call.
    """

    def __init__(self, descriptors_dim: int, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.descriptors_dim, self.num_classes = descriptors_dim, num_classes
        start = torch.empty(descriptors_dim, num_classes).uniform_(-1, 1)
        self.weight = nn.Parameter(start.renorm_(2, 1, 1e-5).mul_(1e5))

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One number."""
        self.need(labels=labels)
        self.need_batch_alone(embeddings, ref_emb)
        self.need_no_indices(indices_tuple)
        with torch.no_grad():
            self.weight.copy_(functional.normalize(self.weight, dim=0))
        rows = distances.unit(embeddings)
        cosine = rows @ self.weight.to(rows)
        target = functional.one_hot(labels, self.num_classes)
        return {"loss": already_reduced((cosine - target).square().mean())}


class InstanceLoss(BaseMetricLossFunction):
    """Softmax of gamma · cos over the rows of the batch. Zheng et al. 2020, arXiv:1711.05535.

    The target of an item is the row whose place is the number of its class, as in the original: itself where every
    item is a class of its own, in order. With other labels that row has nothing to do with the item.
    """

    def __init__(self, gamma: float = 64, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if type(self.distance) is not CosineSimilarity or self.distance.power != 1:
            refuse_distance(self, self.distance, "CosineSimilarity()")
        self.gamma = gamma

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per item."""
        self.need(labels=labels)
        self.need_batch_alone(embeddings, ref_emb)
        self.need_no_indices(indices_tuple)
        target = torch.unique(labels, return_inverse=True)[1]
        logits = self.gamma * self.distance(embeddings)
        return element_terms(functional.cross_entropy(logits, target, reduction="none"))

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()


class ManifoldLoss(BaseMetricLossFunction):
    """Random walks over items and K learned proxies: each item nearest to its own proxy. Aziere, Todorovic 2019.

    Takes no labels: items are dealt out to the proxies at random, or by `indices_tuple`, the proxy of each item.
    """

    def __init__(
        self,
        l: int,  # noqa: E741 the original's name
        K: int = 50,
        lambdaC: float = 1.0,
        alpha: float = 0.8,
        margin: float = 5e-4,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if lambdaC < 0:
            raise ValueError(f"lambdaC must be at least 0, got {lambdaC}")
        self.l, self.K, self.lambdaC, self.alpha, self.margin = l, K, lambdaC, alpha, margin
        self.proxies = nn.Parameter(torch.randn(K, l))

    def forward(self, embeddings: Tensor, labels: Any = None, indices_tuple: Any = None, *references: Any) -> Any:
        """The loss; `indices_tuple`: the proxy of each item."""
        if labels is not None or any(given is not None for given in references):
            raise ValueError("ManifoldLoss takes neither labels nor references, got some")
        return super().forward(embeddings, None, None if indices_tuple is None else (torch.as_tensor(indices_tuple),))

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One number."""
        size = len(embeddings)
        if embeddings.shape[1] != self.l or (indices_tuple is None and size < self.K):
            wanted = f"(at least K={self.K} rows, l={self.l})"
            raise RefusedArguments(f"embeddings must have shape {wanted}, got {tuple(embeddings.shape)}")
        own = (self._proxies_of(size) if indices_tuple is None else indices_tuple[0]).to(embeddings.device)
        walk = self._walk(torch.cat([embeddings, self.proxies.to(embeddings)]))
        items, proxies = functional.normalize(walk[:size], dim=1), functional.normalize(walk[size:], dim=1)
        context = self._excess(items @ proxies.T, own)
        if math.isinf(self.lambdaC):
            return {"loss": already_reduced(context)}
        return {"loss": already_reduced(self._excess(walk[:size, size:], own) + self.lambdaC * context)}

    def _proxies_of(self, size: int) -> Tensor:
        """Every proxy at least once; drawn from torch's generator, as the original does."""
        drawn = torch.randint(0, self.K, (size - self.K,))
        return torch.cat([torch.arange(self.K), drawn])[torch.randperm(size)]

    def _walk(self, rows: Tensor) -> Tensor:
        """(1 - α)(I - α S)⁻¹ of the normalised affinities S."""
        eye = torch.eye(len(rows), device=rows.device, dtype=rows.dtype)
        affinity = (2 * self.distance(rows).clamp(min=0)).exp() * (1 - eye)
        root = affinity.sum(1).rsqrt()
        inverse: Tensor = torch.linalg.inv(eye - self.alpha * root[:, None] * affinity * root)
        return (1 - self.alpha) * inverse

    def _excess(self, values: Tensor, own: Tensor) -> Tensor:
        """Mean of log(1 + Σ e^x) over the proxies that come nearer than the margin to an item's own."""
        x = values - values.gather(1, own[:, None]) + self.margin
        active = (x >= 0).scatter(1, own[:, None], False)
        return (torch.where(active, x, 0.0).exp() * active).sum(1).log1p().mean()

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()
