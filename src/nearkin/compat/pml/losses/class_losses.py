"""Losses with learned class weights, under the original's names, shapes and start, so that its checkpoints load."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nearkin import losses
from nearkin.compat.pml.distances import BaseDistance, CosineSimilarity, DotProductSimilarity, LpDistance
from nearkin.compat.pml.losses.base_loss import (
    BaseMetricLossFunction,
    already_reduced,
    element_terms,
    refuse_distance,
)
from nearkin.compat.pml.losses.item_losses import NCALoss
from nearkin.compat.pml.recording import own_ids
from nearkin.compat.pml.reducers import BaseReducer, DivisorReducer, Terms
from nearkin.compat.pml.utils import loss_and_miner_utils as indexing
from nearkin.core import distances, reduce

__all__ = [
    "ArcFaceLoss",
    "CosFaceLoss",
    "NormalizedSoftmaxLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
]


class _ClassLoss(BaseMetricLossFunction):
    """Takes `weight_regularizer` and `weight_init_func`; each item's loss times how often a miner took it."""

    allowed: tuple[type, ...] = (CosineSimilarity,)
    anchors_only = False  # whether a miner's positives and negatives count for the weights of items

    def __init__(
        self,
        weight_init_func: Callable[[Tensor], Any] | None = None,
        weight_regularizer: nn.Module | None = None,
        weight_reg_weight: float = 1,
        **kwargs: Any,
    ) -> None:
        self._with_weight_term = weight_regularizer is not None  # its name is asked for while the parent is made
        super().__init__(**kwargs)
        self.weight_regularizer, self.weight_reg_weight = weight_regularizer, weight_reg_weight
        self.weight_init_func = weight_init_func or self.get_default_weight_init_func()
        self._check_distance()

    def _check_distance(self) -> None:
        plain = self.distance.power == 1 and self.distance.normalize_embeddings
        if type(self.distance) not in self.allowed or not plain:
            refuse_distance(self, self.distance, " or ".join(f"{kind.__name__}()" for kind in self.allowed))

    def sub_loss_names(self) -> list[str]:
        """The kinds of terms of this loss, its regularizers among them."""
        return [*super().sub_loss_names(), *(["weight_reg_loss"] if self._with_weight_term else [])]

    def get_default_weight_init_func(self) -> Callable[[Tensor], Any]:
        """How the weights start."""
        return nn.init.normal_

    def _parameter(self, *shape: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(*shape))
        self.weight_init_func(weight)
        return weight

    def class_rows(self) -> Tensor:
        """The weights, one class per row."""
        raise NotImplementedError

    def _rows(self, embeddings: Tensor) -> Tensor:
        rows = self.class_rows().to(embeddings.device)
        return rows.to(embeddings.dtype) if embeddings.dtype == torch.float64 else rows

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per item."""
        self.need(labels=labels)
        self.need_batch_alone(embeddings, ref_emb)
        values = self.per_item(embeddings, labels, self._rows(embeddings))
        mined = indexing.convert_to_weights(indices_tuple, labels, values.dtype, using_ref=self.anchors_only)
        return self.with_weight_term(element_terms(values * mined))

    def with_weight_term(self, terms: Terms) -> Terms:
        """And the regularizer of the weights, where there is one."""
        if self.weight_regularizer is not None:
            value = self.weight_regularizer(self.class_rows()) * self.weight_reg_weight
            terms["weight_reg_loss"] = already_reduced(value)
        return terms

    def per_item(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """One value per item."""
        raise NotImplementedError

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()


class WeightLoss(_ClassLoss):
    """Class weights W (embedding size, classes)."""

    def __init__(
        self, num_classes: int, embedding_size: int, margin: float, scale: float, centers: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.num_classes, self.margin, self.scale = num_classes, margin, scale
        self.W = self._parameter(embedding_size, num_classes * centers)

    def class_rows(self) -> Tensor:
        """W, turned."""
        return self.W.t()

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """scale · cos of each class, (B, C), without the margin."""
        return self.scale * distances.cosine(embeddings, self._rows(embeddings))


class NormalizedSoftmaxLoss(WeightLoss):
    """`nearkin.losses.normalized_softmax_loss`; its scale is 1 / temperature."""

    allowed = (DotProductSimilarity, CosineSimilarity)

    def __init__(self, num_classes: int, embedding_size: int, temperature: float = 0.05, **kwargs: Any) -> None:
        super().__init__(num_classes, embedding_size, 0.0, 1 / temperature, **kwargs)
        self.temperature = temperature

    def _check_distance(self) -> None:
        if type(self.distance) is DotProductSimilarity and self.distance.power == 1:
            return  # also of embeddings as long as they are
        super()._check_distance()

    def per_item(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """By nearkin; of free length |x| cos, which is SphereFace without a margin."""
        if not self.distance.normalize_embeddings:
            scaled = embeddings / self.temperature
            return losses.sphereface_loss(scaled, labels, rows, margin=1, annealing=0.0, reduction="none")
        return losses.normalized_softmax_loss(embeddings, labels, rows, scale=1 / self.temperature, reduction="none")

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The similarity of each class over the temperature, (B, C)."""
        cosines = super().get_logits(embeddings)
        return cosines if self.distance.normalize_embeddings else cosines * distances.length(embeddings)[:, None]

    def get_default_distance(self) -> BaseDistance:
        """Inner products of unit rows."""
        return DotProductSimilarity()


class CosFaceLoss(WeightLoss):
    """`nearkin.losses.cosface_loss`."""

    def __init__(
        self, num_classes: int, embedding_size: int, margin: float = 0.35, scale: float = 64, **kwargs: Any
    ) -> None:
        super().__init__(num_classes, embedding_size, margin, scale, **kwargs)

    def per_item(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """By nearkin."""
        options: dict[str, Any] = {"margin": self.margin, "scale": self.scale}
        return losses.cosface_loss(embeddings, labels, rows, **options, reduction="none")


class ArcFaceLoss(WeightLoss):
    """`nearkin.losses.arcface_loss`; the margin is given in degrees and kept in radians, as in the original."""

    def __init__(
        self, num_classes: int, embedding_size: int, margin: float = 28.6, scale: float = 64, **kwargs: Any
    ) -> None:
        super().__init__(num_classes, embedding_size, math.radians(margin), scale, **kwargs)

    sub_centers = 1

    def per_item(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """By nearkin."""
        options: dict[str, Any] = {"margin": self.margin, "scale": self.scale, "sub_centers": self.sub_centers}
        return losses.arcface_loss(embeddings, labels, rows, **options, reduction="none")


class SubCenterArcFaceLoss(ArcFaceLoss):
    """ArcFace with several centers per class, of which the nearest counts; W (embedding size, classes · centers)."""

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 28.6,
        scale: float = 64,
        sub_centers: int = 3,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes, embedding_size, margin, scale, centers=sub_centers, **kwargs)
        self.sub_centers = sub_centers

    def _center_cosines(self, embeddings: Tensor) -> Tensor:
        cosines = distances.cosine(embeddings, self._rows(embeddings))
        return cosines.view(len(embeddings), self.num_classes, self.sub_centers)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """scale · cos of the nearest center of each class, (B, C), without the margin."""
        return self.scale * self._center_cosines(embeddings).amax(2)

    @torch.no_grad()
    def get_outliers(
        self, embeddings: Tensor, labels: Tensor, threshold: float = 75, return_dominant_centers: bool = True
    ) -> Any:
        """Items farther than `threshold` degrees from their class's most used center, and those centers (D, C)."""
        labels = labels.to(embeddings.device)
        own = self._center_cosines(embeddings)[torch.arange(len(labels), device=labels.device), labels]  # (B, K)
        used = own.new_zeros(self.num_classes, self.sub_centers)
        used.index_put_((labels, own.argmax(1)), own.new_ones(()), accumulate=True)
        dominant = used.argmax(1)  # (C,)
        far = own.gather(1, dominant[labels][:, None]).squeeze(1) < math.cos(math.radians(threshold))
        outliers = far.nonzero().squeeze(1)
        outliers = outliers[labels[outliers].argsort(stable=True)]
        if not return_dominant_centers:
            return outliers
        rows = self._rows(embeddings).view(self.num_classes, self.sub_centers, -1)
        return outliers, rows[torch.arange(self.num_classes, device=rows.device), dominant].T


class SphereFaceLoss(WeightLoss):
    """`nearkin.losses.sphereface_loss` without annealing; `scale` multiplies the embeddings."""

    def __init__(
        self, num_classes: int, embedding_size: int, margin: float = 4, scale: float = 1, **kwargs: Any
    ) -> None:
        super().__init__(num_classes, embedding_size, int(margin), scale, **kwargs)

    def per_item(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """By nearkin."""
        scaled = embeddings * self.scale
        return losses.sphereface_loss(scaled, labels, rows, margin=int(self.margin), annealing=0.0, reduction="none")

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """scale · |x| cos of each class, (B, C), without the margin."""
        return super().get_logits(embeddings) * distances.length(embeddings)[:, None]


class SoftTripleLoss(_ClassLoss):
    """`nearkin.losses.soft_triple_loss` without its pull; centers fc (embedding size, classes · centers)."""

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        centers_per_class: int = 10,
        la: float = 20,
        gamma: float = 0.1,
        margin: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_classes, self.centers_per_class = num_classes, centers_per_class
        self.la, self.gamma, self.margin = la, 1 / gamma, margin
        self.fc = self._parameter(embedding_size, num_classes * centers_per_class)

    def get_default_weight_init_func(self) -> Callable[[Tensor], Any]:
        """As in the paper's code."""
        return lambda weight: nn.init.kaiming_uniform_(weight, a=math.sqrt(5))

    def class_rows(self) -> Tensor:
        """The centers, one per row."""
        return self.fc.t()

    def per_item(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """By nearkin."""
        options: dict[str, Any] = {
            "scale": self.la,
            "temperature": 1 / self.gamma,
            "margin": self.margin,
            "spread_weight": 0.0,
        }
        centers = self.centers_per_class
        return losses.soft_triple_loss(embeddings, labels, rows, centers_per_class=centers, **options, reduction="none")

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The weighed cosine of each class, (B, C)."""
        cosines = distances.cosine(embeddings, self._rows(embeddings))
        cosines = cosines.view(len(embeddings), self.num_classes, self.centers_per_class)
        return ((cosines * self.gamma).softmax(2) * cosines).sum(2)


class ProxyNCALoss(_ClassLoss, NCALoss):
    """NCA against one proxy per class, `nearkin.losses.proxy_nca_loss`: its scale is the root of softmax_scale."""

    anchors_only = True

    def __init__(self, num_classes: int, embedding_size: int, softmax_scale: float = 1, **kwargs: Any) -> None:
        super().__init__(softmax_scale=softmax_scale, **kwargs)
        self.num_classes = num_classes
        self.proxies = self._parameter(num_classes, embedding_size)

    def _check_distance(self) -> None:
        return

    def get_default_distance(self) -> BaseDistance:
        """Squared, of unit rows."""
        return LpDistance(power=2)

    def class_rows(self) -> Tensor:
        """The proxies."""
        return self.proxies

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per item; by nearkin for squared distances of unit rows."""
        distance = self.distance
        if type(distance) is LpDistance and (distance.p, distance.power, distance.normalize_embeddings) == (2, 2, True):
            return _ClassLoss.compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.need(labels=labels)
        self.need_batch_alone(embeddings, ref_emb)
        ids = torch.arange(self.num_classes, device=embeddings.device)
        return self.with_weight_term(self.shares(embeddings, labels, indices_tuple, self._rows(embeddings), ids))

    def per_item(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """By nearkin."""
        return losses.proxy_nca_loss(embeddings, labels, rows, scale=math.sqrt(self.softmax_scale), reduction="none")

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The distance of each proxy, (B, C): larger is farther, as in the original."""
        matrix: Tensor = self.distance(embeddings, self._rows(embeddings))
        return matrix


class ProxyAnchorLoss(_ClassLoss):
    """`nearkin.losses.proxy_anchor_loss`; alpha is its scale."""

    def __init__(
        self, num_classes: int, embedding_size: int, margin: float = 0.1, alpha: float = 32, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.num_classes, self.margin, self.alpha = num_classes, margin, alpha
        self.proxies = self._parameter(num_classes, embedding_size)

    def _check_distance(self) -> None:
        return

    def get_default_weight_init_func(self) -> Callable[[Tensor], Any]:
        """As in the paper's code."""
        return lambda weight: nn.init.kaiming_normal_(weight, mode="fan_out")

    def get_default_reducer(self) -> BaseReducer:
        """Over the classes of the batch, and over all classes."""
        return DivisorReducer()

    def _sub_loss_names(self) -> list[str]:
        return ["pos_loss", "neg_loss"]

    def class_rows(self) -> Tensor:
        """The proxies."""
        return self.proxies

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """By nearkin in one number, or one term per proxy with a miner, another reducer or another distance."""
        self.need(labels=labels)
        self.need_batch_alone(embeddings, ref_emb)
        rows = self._rows(embeddings)
        reducers = getattr(self.reducer, "reducers", {})
        usual = all(type(reducers[k]) is DivisorReducer for k in self._sub_loss_names() if k in reducers) and reducers
        cosines = type(self.distance) is CosineSimilarity and self.distance.power == 1
        if usual and cosines and indices_tuple is None:
            value = losses.proxy_anchor_loss(embeddings, own_ids(labels), rows, margin=self.margin, scale=self.alpha)
            return self.with_weight_term({"pos_loss": already_reduced(value), "neg_loss": self.zero_loss()})
        matrix = self.distance(embeddings, rows)
        mined = indexing.convert_to_weights(indices_tuple, labels, matrix.dtype)[:, None] - 1
        own = labels[:, None] == torch.arange(self.num_classes, device=labels.device)
        pull = self.alpha * self.distance.margin(matrix, self.margin) + mined
        push = self.alpha * self.distance.margin(-self.margin, matrix) + mined
        terms: Terms = {}
        for name, values, mask in (("pos_loss", pull, own), ("neg_loss", push, ~own)):
            losses_of_proxies = reduce.softplus(reduce.logsumexp(values, mask, 0))
            divisor = own.any(0).sum() if name == "pos_loss" else self.num_classes
            terms |= {name: element_terms(losses_of_proxies)["loss"] | {"divisor": divisor}}
        return self.with_weight_term(terms)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The similarity of each proxy, (B, C)."""
        matrix: Tensor = self.distance(embeddings, self._rows(embeddings))
        return matrix
