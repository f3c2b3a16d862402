"""Every loss of the canon: a function, and a thin module that holds its settings or its learned parameters.

`loss(embeddings, labels)` in a batch; pair losses also take `references, reference_labels`: a memory, the embeddings of
other processes, another view.
"""

from nearkin.losses.angular import (
    ArcFaceLoss,
    CosFaceLoss,
    SphereFaceLoss,
    arcface_loss,
    class_margins,
    cosface_loss,
    sphereface_loss,
)
from nearkin.losses.center import (
    CenterLoss,
    center_loss,
    center_update,
)
from nearkin.losses.cluster import (
    FacilityLocationLoss,
    facility_location,
    facility_location_loss,
)
from nearkin.losses.hierarchy import (
    HierarchyLoss,
)
from nearkin.losses.matryoshka import (
    MatryoshkaLoss,
)
from nearkin.losses.pairs import (
    CircleLoss,
    ContrastiveLoss,
    MarginLoss,
    MultiSimilarityLoss,
    SigmoidLoss,
    circle_loss,
    contrastive_loss,
    margin_loss,
    multi_similarity_loss,
    sigmoid_loss,
)
from nearkin.losses.proxy import (
    ProxyAnchorLoss,
    ProxyNCALoss,
    proxy_anchor_loss,
    proxy_nca_loss,
)
from nearkin.losses.quadruplet import (
    QuadrupletLoss,
    quadruplet_loss,
)
from nearkin.losses.quality_margin import (
    AdaFaceLoss,
    MagFaceLoss,
    adaface_loss,
    adaface_statistics,
    magface_loss,
)
from nearkin.losses.rank import (
    FastAPLoss,
    SmoothAPLoss,
    fastap_loss,
    smooth_ap_loss,
)
from nearkin.losses.ratio import (
    LogRatioLoss,
    logratio_loss,
)
from nearkin.losses.siamese import (
    SiameseLoss,
    siamese_loss,
)
from nearkin.losses.soft_triple import (
    SoftTripleLoss,
    soft_triple_loss,
)
from nearkin.losses.softmax import (
    AdaCosLoss,
    HeatedSoftmaxLoss,
    NormalizedSoftmaxLoss,
    adacos_loss,
    adacos_scale,
    heated_softmax_loss,
    normalized_softmax_loss,
)
from nearkin.losses.structured import (
    GeneralizedLiftedLoss,
    InfoNCELoss,
    LiftedStructureLoss,
    NPairLoss,
    SupConLoss,
    generalized_lifted_loss,
    infonce_loss,
    lifted_structure_loss,
    npair_loss,
    supcon_loss,
)
from nearkin.losses.triplet import (
    LosslessTripletLoss,
    TripletLoss,
    lossless_triplet_loss,
    triplet_loss,
)
from nearkin.losses.vicreg import (
    VICRegLoss,
    vicreg_loss,
)

__all__ = [
    "AdaCosLoss",
    "AdaFaceLoss",
    "ArcFaceLoss",
    "CenterLoss",
    "CircleLoss",
    "ContrastiveLoss",
    "CosFaceLoss",
    "FacilityLocationLoss",
    "FastAPLoss",
    "GeneralizedLiftedLoss",
    "HeatedSoftmaxLoss",
    "HierarchyLoss",
    "InfoNCELoss",
    "LiftedStructureLoss",
    "LogRatioLoss",
    "LosslessTripletLoss",
    "MagFaceLoss",
    "MarginLoss",
    "MatryoshkaLoss",
    "MultiSimilarityLoss",
    "NPairLoss",
    "NormalizedSoftmaxLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "QuadrupletLoss",
    "SiameseLoss",
    "SigmoidLoss",
    "SmoothAPLoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SupConLoss",
    "TripletLoss",
    "VICRegLoss",
    "adacos_loss",
    "adacos_scale",
    "adaface_loss",
    "adaface_statistics",
    "arcface_loss",
    "center_loss",
    "center_update",
    "circle_loss",
    "class_margins",
    "contrastive_loss",
    "cosface_loss",
    "facility_location",
    "facility_location_loss",
    "fastap_loss",
    "generalized_lifted_loss",
    "heated_softmax_loss",
    "infonce_loss",
    "lifted_structure_loss",
    "logratio_loss",
    "lossless_triplet_loss",
    "magface_loss",
    "margin_loss",
    "multi_similarity_loss",
    "normalized_softmax_loss",
    "npair_loss",
    "proxy_anchor_loss",
    "proxy_nca_loss",
    "quadruplet_loss",
    "siamese_loss",
    "sigmoid_loss",
    "smooth_ap_loss",
    "soft_triple_loss",
    "sphereface_loss",
    "supcon_loss",
    "triplet_loss",
    "vicreg_loss",
]


def __dir__() -> list[str]:
    return __all__
