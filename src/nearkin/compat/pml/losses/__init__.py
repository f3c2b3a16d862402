"""The losses of pytorch-metric-learning: nearkin's own where it has them, else built here from its parts."""

from typing import Any

from nearkin.compat.pml.losses.base_loss import BaseMetricLossFunction
from nearkin.compat.pml.losses.class_losses import (
    ArcFaceLoss,
    CosFaceLoss,
    NormalizedSoftmaxLoss,
    ProxyAnchorLoss,
    ProxyNCALoss,
    SoftTripleLoss,
    SphereFaceLoss,
    SubCenterArcFaceLoss,
)
from nearkin.compat.pml.losses.item_losses import (
    CircleLoss,
    FastAPLoss,
    GeneralizedLiftedStructureLoss,
    MultiSimilarityLoss,
    NCALoss,
    SmoothAPLoss,
    SupConLoss,
    VICRegLoss,
)
from nearkin.compat.pml.losses.pair_losses import (
    AngularLoss,
    ContrastiveLoss,
    IntraPairVarianceLoss,
    LiftedStructureLoss,
    MarginLoss,
    NPairsLoss,
    NTXentLoss,
    SignalToNoiseRatioContrastiveLoss,
    TripletMarginLoss,
    TupletMarginLoss,
)
from nearkin.compat.pml.losses.ranking_losses import (
    DynamicSoftMarginLoss,
    HistogramLoss,
    PNPLoss,
    RankedListLoss,
    ThresholdConsistentMarginLoss,
)
from nearkin.compat.pml.losses.weight_losses import InstanceLoss, LargeMarginSoftmaxLoss, ManifoldLoss, P2SGradLoss
from nearkin.compat.pml.losses.wrappers import CrossBatchMemory, MultipleLosses, SelfSupervisedLoss

__all__ = [
    "AngularLoss",
    "ArcFaceLoss",
    "BaseMetricLossFunction",
    "CircleLoss",
    "ContrastiveLoss",
    "CosFaceLoss",
    "CrossBatchMemory",
    "DynamicSoftMarginLoss",
    "FastAPLoss",
    "GeneralizedLiftedStructureLoss",
    "HistogramLoss",
    "InstanceLoss",
    "IntraPairVarianceLoss",
    "LargeMarginSoftmaxLoss",
    "LiftedStructureLoss",
    "ManifoldLoss",
    "MarginLoss",
    "MultiSimilarityLoss",
    "MultipleLosses",
    "NCALoss",
    "NPairsLoss",
    "NTXentLoss",
    "NormalizedSoftmaxLoss",
    "P2SGradLoss",
    "PNPLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "RankedListLoss",
    "SelfSupervisedLoss",
    "SignalToNoiseRatioContrastiveLoss",
    "SmoothAPLoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
    "SupConLoss",
    "ThresholdConsistentMarginLoss",
    "TripletMarginLoss",
    "TupletMarginLoss",
    "VICRegLoss",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"nearkin.compat.pml.losses has no {name}; known: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
