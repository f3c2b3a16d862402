"""The original's losses with class weights, by nearkin's functions; weights, names and shapes are the original's."""

import math
from typing import Any

import torch
from torch import Tensor

from nearkin import losses
from nearkin.compat.pml import original
from nearkin.compat.pml.distances import is_cosine, is_euclidean, is_product
from nearkin.compat.pml.native import Call, InFloat32, Terms, element, ids_of, is_ours, one_number

_theirs: Any = original("losses")
_indexing: Any = original("utils.loss_and_miner_utils")
_divisor_reducer: Any = original("reducers").DivisorReducer

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


class _ClassLoss:
    """One term per item, times how often a miner took it. Weights follow the embeddings to float64, never to half."""

    anchors_only = False  # whether a miner's positives and negatives count for the weights of items

    learned = "W"  # the original's name of the weights

    def weights(self) -> Any:
        """The learned parameter."""
        return getattr(self, self.learned)

    def rows(self) -> Any:
        """The weights, one class, or one centre of it, per row."""
        return self.weights() if self.learned == "proxies" else self.weights().t()

    def compute_loss(self: Any, embeddings: Tensor, *arguments: Any) -> Terms:
        """Asks `terms` first; where that gives None the original computes."""
        kind = embeddings.dtype if embeddings.dtype == torch.float64 else self.weights().dtype
        if (kind, embeddings.device) != (self.weights().dtype, self.weights().device):
            self.cast_types(kind, embeddings.device)  # never without need: two threads that both assign data can hang
        call = Call(embeddings, *arguments)
        terms: Terms | None = self.terms(call) if is_ours(self) and call.alone() else None
        if terms is not None:
            self.add_weight_regularization_to_loss_dict(terms, self.rows())
            return terms
        wide = embeddings.to(kind)
        call = call._replace(embeddings=wide, ref_emb=wide if call.ref_emb is embeddings else call.ref_emb)
        return super().compute_loss(*call)  # type: ignore[misc, no-any-return]

    def terms(self: Any, call: Call) -> Terms | None:
        """One term per item."""
        values = self.native(call.embeddings, call.labels, self.rows())
        if values is None:
            return None
        options = {"dtype": values.dtype, "using_ref": self.anchors_only}
        return element(values * _indexing.convert_to_weights(call.indices_tuple, call.labels, **options))

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The original's scores of each class, (B, C), in the type of the weights."""
        logits: Tensor = super().get_logits(embeddings.to(self.weights().dtype))  # type: ignore[misc]
        return logits


class NormalizedSoftmaxLoss(_ClassLoss, _theirs.NormalizedSoftmaxLoss):
    """Softmax of cosines; nearkin's scale is 1 / temperature."""

    def native(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor | None:
        """Of free length |x| cos, which is SphereFace without a margin."""
        if not is_product(self.distance):
            return None
        if not self.distance.normalize_embeddings:
            scaled = embeddings / self.temperature
            return losses.sphereface_loss(scaled, labels, rows, margin=1, annealing=0.0, reduction="none")
        return losses.normalized_softmax_loss(embeddings, labels, rows, scale=1 / self.temperature, reduction="none")


class CosFaceLoss(_ClassLoss, _theirs.CosFaceLoss):
    """CosFace."""

    def native(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor | None:
        """A margin on the cosine."""
        if not is_cosine(self.distance):
            return None
        settings: dict[str, Any] = {"margin": self.margin, "scale": self.scale}
        return losses.cosface_loss(embeddings, labels, rows, **settings, reduction="none")


class ArcFaceLoss(_ClassLoss, _theirs.ArcFaceLoss):
    """ArcFace; the margin is given in degrees and kept in radians, as in the original."""

    sub_centers = 1

    def native(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor | None:
        """A margin on the angle, to the nearest of several centres."""
        if not is_cosine(self.distance):
            return None
        settings: dict[str, Any] = {"margin": float(self.margin), "scale": self.scale}
        settings |= {"sub_centers": self.sub_centers, "reduction": "none"}
        return losses.arcface_loss(embeddings, labels, rows, **settings)


class SubCenterArcFaceLoss(_ClassLoss, _theirs.SubCenterArcFaceLoss):
    """ArcFace with several centres per class, of which the nearest counts."""

    native = ArcFaceLoss.native


class SphereFaceLoss(_ClassLoss, _theirs.SphereFaceLoss):
    """SphereFace without annealing; `scale` multiplies the embeddings."""

    def native(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor | None:
        """A margin that multiplies the angle."""
        if not is_cosine(self.distance) or self.scale <= 0:
            return None
        settings: dict[str, Any] = {"margin": self.margin, "annealing": 0.0}
        return losses.sphereface_loss(embeddings * self.scale, labels, rows, **settings, reduction="none")


class SoftTripleLoss(_ClassLoss, _theirs.SoftTripleLoss):
    """SoftTriple without a pull between centres."""

    learned = "fc"

    def native(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor | None:
        """The original keeps 1 / gamma."""
        if not is_cosine(self.distance):
            return None
        settings: dict[str, Any] = {"scale": self.la, "margin": self.margin, "temperature": 1 / self.gamma}
        settings |= {"centers_per_class": self.centers_per_class, "spread_weight": 0.0}
        return losses.soft_triple_loss(embeddings, labels, rows, **settings, reduction="none")


class ProxyNCALoss(_ClassLoss, _theirs.ProxyNCALoss):
    """NCA against proxies; nearkin's scale is the root of softmax_scale."""

    learned, anchors_only = "proxies", True

    def native(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor | None:
        """Of squared distances of unit rows."""
        if not is_euclidean(self.distance, 2, unit=True) or self.softmax_scale <= 0:
            return None
        return losses.proxy_nca_loss(embeddings, labels, rows, scale=math.sqrt(self.softmax_scale), reduction="none")


class ProxyAnchorLoss(InFloat32, _ClassLoss, _theirs.ProxyAnchorLoss):
    """Proxy-Anchor; alpha is nearkin's scale."""

    learned = "proxies"

    def terms(self, call: Call) -> Terms | None:
        """One number, with the original's reducer and without a miner."""
        parts = getattr(self.reducer, "reducers", {})
        usual = all(name in parts and type(parts[name]) is _divisor_reducer for name in self._sub_loss_names())
        if call.indices_tuple is not None or not usual:
            return None
        return one_number(self, self.native(call.embeddings, ids_of(call.labels), self.rows()))

    def native(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> Tensor | None:
        """Over the classes of the batch, and over all classes."""
        if not is_cosine(self.distance):
            return None
        return losses.proxy_anchor_loss(embeddings, labels, rows, margin=self.margin, scale=self.alpha)
