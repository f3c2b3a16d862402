"""The losses of pytorch-metric-learning that nearkin has, or that are built here from its parts."""

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
from nearkin.compat.pml.losses.wrappers import CrossBatchMemory, MultipleLosses, SelfSupervisedLoss

__all__ = [
    "AngularLoss",
    "ArcFaceLoss",
    "BaseMetricLossFunction",
    "CircleLoss",
    "ContrastiveLoss",
    "CosFaceLoss",
    "CrossBatchMemory",
    "FastAPLoss",
    "GeneralizedLiftedStructureLoss",
    "IntraPairVarianceLoss",
    "LiftedStructureLoss",
    "MarginLoss",
    "MultiSimilarityLoss",
    "MultipleLosses",
    "NCALoss",
    "NPairsLoss",
    "NTXentLoss",
    "NormalizedSoftmaxLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "SelfSupervisedLoss",
    "SignalToNoiseRatioContrastiveLoss",
    "SmoothAPLoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
    "SupConLoss",
    "TripletMarginLoss",
    "TupletMarginLoss",
    "VICRegLoss",
]

# What is not offered, and what comes nearest here.
NOT_OFFERED = {
    "DynamicSoftMarginLoss": "TripletMarginLoss(smooth_loss=True)",
    "HistogramLoss": "FastAPLoss",
    "InstanceLoss": "NormalizedSoftmaxLoss",
    "LargeMarginSoftmaxLoss": "SphereFaceLoss",
    "ManifoldLoss": "ProxyAnchorLoss",
    "P2SGradLoss": "NormalizedSoftmaxLoss",
    "PNPLoss": "SmoothAPLoss",
    "RankedListLoss": "MultiSimilarityLoss",
    "ThresholdConsistentMarginLoss": "ContrastiveLoss",
}


def __getattr__(name: str) -> Any:
    if name in NOT_OFFERED:
        raise AttributeError(f"nearkin.compat.pml.losses has no {name}; the nearest here is {NOT_OFFERED[name]}")
    raise AttributeError(f"nearkin.compat.pml.losses has no {name}; known: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
