"""Every public loss as a case: how to build it, a batch it can learn from, and its float64 twin in `reference.py`.

A new loss adds a row and gets every property of `loss_checks`; one without a row fails `test_rooms.py`. A case says
what it takes and, in `skips`, which properties it has not and why.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import reference
from nearkin import losses, mining

DIM, CLASSES, EACH = 6, 4, 3


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    make: Callable[[], nn.Module]
    twin: Callable[..., Tensor]
    pairs: bool = False  # takes references
    graded: bool = False  # takes real-valued targets
    smooth: bool = True  # the value's own finite differences are its gradient: no stop-gradient inside
    ordered: bool = False  # the order within a class carries meaning
    compiles: bool = True
    by_class: bool = False  # needs class ids, beyond positive and negative
    whole: bool = False  # its selection looks at all rows: no blocks
    skips: dict[str, str] = field(default_factory=dict)  # properties it has not, and why

    def __str__(self) -> str:
        return self.name

    def build(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(7)
        return self.make().to(dtype)

    def batch(self, dtype: torch.dtype = torch.float64, spread: float = 1.0) -> tuple[Tensor, Tensor]:
        """Items loosely around class means, so that every loss has something to say, and their labels, mixed."""
        g = torch.Generator().manual_seed(11)
        means = torch.randn(CLASSES, DIM, generator=g, dtype=torch.float64)
        labels = torch.arange(CLASSES).repeat(EACH)
        noise = torch.randn(len(labels), DIM, generator=g, dtype=torch.float64)
        x = means[labels] + spread * noise
        return x.to(dtype), self.targets(labels)

    def references(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """More items than the batch has, of the same classes, near and not equal to it."""
        g = torch.Generator().manual_seed(13)
        noise = 0.3 * torch.randn(len(x) + 4, x.shape[1], generator=g, dtype=torch.float64).to(x.dtype)
        others = torch.cat([labels.flip(0), labels[:4]])
        return torch.cat([x.flip(0) * 1.1, x[:4]]) + noise, others + 0.05 if self.graded else others

    def targets(self, labels: Tensor) -> Tensor:
        """Labels as this loss takes them: ids, or positions on a line where positives are close."""
        if not self.graded:
            return labels
        return labels.double() + 0.1 * torch.arange(len(labels)).double() / max(len(labels), 1)


def masks(labels: Tensor, reference_labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Positives and negatives by a double loop over ids: no item to itself, none to an unknown."""
    other = labels if reference_labels is None else reference_labels
    positive = torch.zeros(len(labels), len(other), dtype=torch.bool)
    negative = positive.clone()
    for i, a in enumerate(labels.tolist()):
        for j, b in enumerate(other.tolist()):
            if (reference_labels is None and i == j) or a == -1 or b == -1:
                continue
            (positive if a == b else negative)[i, j] = True
    return positive, negative


def gaps(targets: Tensor, reference_targets: Tensor | None = None) -> Tensor:
    other = targets if reference_targets is None else reference_targets
    return torch.tensor([[abs(float(a) - float(b)) for b in other] for a in targets], dtype=torch.float64)


def _plain(module: nn.Module, *leave: str) -> dict[str, Any]:
    return {k: v for k, v in module.settings.items() if k not in ("generator", "selection", "kernel", *leave)}


def _euclidean(x: Tensor, references: Tensor | None, normalize: bool) -> Tensor:
    rows = [reference.unit(v) if normalize else v for v in x]
    others = rows if references is None else [reference.unit(v) if normalize else v for v in references.detach()]
    return torch.tensor([[float((a - b).norm()) for b in others] for a in rows], dtype=torch.float64)


def pair_twin(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The float64 loop of a pair loss, its selection made by the float64 loop of the same name."""

    def twin(
        module: nn.Module, x: Tensor, labels: Tensor, references: Any = None, reference_labels: Any = None
    ) -> Tensor:
        positive, negative = masks(labels, reference_labels)
        settings = _plain(module, "epsilon") if "selection" in module.settings else _plain(module)
        selection = module.settings.get("selection", "all")
        if isinstance(selection, str) and selection != "all":
            mine = getattr(reference, f"mine_{selection}")
            cosine = function is reference.multi_similarity
            distance = _euclidean(x.detach(), references, cosine or settings["normalize"])
            if cosine:
                distance = distance.square() / 2  # 1 - cosine
            settings["selection"] = mine(distance, positive, negative)
        elif "selection" in module.settings:
            settings["selection"] = "all"
        settings |= {name: getattr(module, name) for name, _ in module.named_parameters()}
        if function is reference.margin:
            settings |= {"beta": module.beta, "classes": labels if module.beta.dim() else None}
        if function is reference.quadruplet:
            settings["classes"] = labels.tolist()
        return function(x, positive, negative, references, **settings)

    return twin


def graded_twin(module: nn.Module, x: Tensor, targets: Tensor, references: Any = None, others: Any = None) -> Tensor:
    return reference.logratio(x, gaps(targets, others), references, **_plain(module))


def class_twin(
    function: Callable[..., Tensor], *parts: str, **more: Callable[[nn.Module], Any]
) -> Callable[..., Tensor]:
    def twin(module: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        extra = {name: get(module) for name, get in more.items()}
        return function(x, labels, *(getattr(module, part) for part in parts), **_plain(module), **extra)

    return twin


def facility_twin(module: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    settings = {"sweeps": module.sweeps, "normalize": module.normalize}
    return reference.facility_location(x, labels, gamma=float(module.gamma), **settings)


def heated_twin(module: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    scale, normalize = float(module.scale), True
    if module.norm == "batch":
        x = torch.stack([(c - c.mean()) / (c.var(correction=0) + 1e-5).sqrt() for c in x.T], 1)
        scale, normalize = scale / x.shape[1] ** 0.5, False
    return reference.heated_softmax(
        x, labels, module.weight, module.bias, scale=scale, normalize=normalize, **_plain(module, "scale")
    )


def adacos_twin(module: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    scale = module.scale
    if module.dynamic and module.training:
        scale = reference.adacos_scale(x.detach(), labels, module.weight.detach(), float(scale))
    return reference.normalized_softmax(x, labels, module.weight, scale=float(scale), **_plain(module))


def adaface_twin(module: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    mean, std = module.mean, module.std
    if module.training:
        mean, std = reference.adaface_statistics(x, labels, mean, std, momentum=module.momentum)
    return reference.adaface(x, labels, module.weight, mean=mean, std=std, **_plain(module))


def _pair(name: str, make: Callable[[], nn.Module], function: Callable[..., Tensor], **more: Any) -> Case:
    return Case(name, make, pair_twin(function), pairs=True, **more)


C, R, size = losses, reference, (CLASSES, DIM)
LOSSES = [
    _pair("ContrastiveLoss", lambda: C.ContrastiveLoss(margin=3.0), R.contrastive),
    _pair(
        "ContrastiveLoss-linear",
        lambda: C.ContrastiveLoss(0.9, positive_margin=0.3, squared=False, normalize=True, reduction="active"),
        R.contrastive,
    ),
    _pair("ContrastiveLoss-all-pairs", lambda: C.ContrastiveLoss(margin=3.0, balance=False), R.contrastive),
    _pair(
        "ContrastiveLoss-all-active",
        lambda: C.ContrastiveLoss(0.9, balance=False, normalize=True, reduction="active", selection="semihard"),
        R.contrastive,
    ),
    _pair(
        "ContrastiveLoss-hard", lambda: C.ContrastiveLoss(3.0, selection="hard_negatives"), R.contrastive, whole=True
    ),
    _pair("ContrastiveLoss-batch-hard", lambda: C.ContrastiveLoss(3.0, selection="batch_hard"), R.contrastive),
    _pair("MarginLoss", lambda: C.MarginLoss(selection="all"), R.margin),
    _pair(
        "MarginLoss-classes", lambda: C.MarginLoss(num_classes=CLASSES, beta_weight=0.1, selection="semihard"), R.margin
    ),
    _pair("MultiSimilarityLoss", lambda: C.MultiSimilarityLoss(), R.multi_similarity),
    _pair("MultiSimilarityLoss-all", lambda: C.MultiSimilarityLoss(selection="all"), R.multi_similarity),
    _pair("CircleLoss", lambda: C.CircleLoss(), R.circle, smooth=False),
    _pair("TripletLoss", lambda: C.TripletLoss(), R.triplet),
    _pair("TripletLoss-all", lambda: C.TripletLoss(selection="all", reduction="active"), R.triplet),
    _pair("TripletLoss-all-plain", lambda: C.TripletLoss(0.5, squared=False, selection="all"), R.triplet),
    _pair("TripletLoss-hard-swap", lambda: C.TripletLoss(swap=True, selection="hard"), R.triplet, whole=True),
    _pair(
        "TripletLoss-batch-hard",
        lambda: C.TripletLoss(None, squared=False, normalize=False, selection="batch_hard"),
        R.triplet,
    ),
    _pair("TripletLoss-hardest", lambda: C.TripletLoss(selection="semihard_or_hardest"), R.triplet),
    _pair("TripletLoss-easy", lambda: C.TripletLoss(selection="easy_positive"), R.triplet),
    _pair("QuadrupletLoss", lambda: C.QuadrupletLoss(), R.quadruplet, by_class=True),
    _pair(
        "QuadrupletLoss-all",
        lambda: C.QuadrupletLoss(selection="all", reduction="active"),
        R.quadruplet,
        by_class=True,
    ),
    _pair(
        "QuadrupletLoss-plain",
        lambda: C.QuadrupletLoss(0.5, 0.4, squared=False, normalize=False, selection="batch_hard"),
        R.quadruplet,
        by_class=True,
    ),
    _pair("LosslessTripletLoss", lambda: C.LosslessTripletLoss(), R.lossless_triplet),
    _pair(
        "LosslessTripletLoss-active",
        lambda: C.LosslessTripletLoss(epsilon=0.4, reduction="active"),
        R.lossless_triplet,
    ),
    _pair("LiftedStructureLoss", lambda: C.LiftedStructureLoss(), R.lifted_structure),
    _pair("LiftedStructureLoss-max", lambda: C.LiftedStructureLoss(form="max", normalize=True), R.lifted_structure),
    _pair("GeneralizedLiftedLoss", lambda: C.GeneralizedLiftedLoss(), R.generalized_lifted),
    _pair(
        "GeneralizedLiftedLoss-active",
        lambda: C.GeneralizedLiftedLoss(0.3, normalize=True, reduction="active"),
        R.generalized_lifted,
    ),
    _pair("NPairLoss", lambda: C.NPairLoss(), R.npair, ordered=True),
    _pair("SupConLoss", lambda: C.SupConLoss(), R.supcon),
    _pair("InfoNCELoss", lambda: C.InfoNCELoss(), R.infonce),
    _pair("SmoothAPLoss", lambda: C.SmoothAPLoss(0.1), R.smooth_ap),
    _pair("FastAPLoss", lambda: C.FastAPLoss(), R.fastap),
    _pair("FastAPLoss-active", lambda: C.FastAPLoss(bins=4, reduction="active"), R.fastap),
    _pair("SiameseLoss", lambda: C.SiameseLoss(DIM), R.siamese),
    _pair("SigmoidLoss", lambda: C.SigmoidLoss(), R.sigmoid),
    _pair("SigmoidLoss-active", lambda: C.SigmoidLoss(1.0, 0.5, reduction="active"), R.sigmoid),
    _pair("VICRegLoss", lambda: C.VICRegLoss(), R.vicreg),
    _pair("VICRegLoss-wide", lambda: C.VICRegLoss(3.0, 5.0, 2.0, deviation=4.0, epsilon=0.1), R.vicreg),
    Case("LogRatioLoss", lambda: C.LogRatioLoss(), graded_twin, pairs=True, graded=True),
    Case(
        "LogRatioLoss-keep", lambda: C.LogRatioLoss(ties="keep", normalize=True), graded_twin, pairs=True, graded=True
    ),
    Case("FacilityLocationLoss", lambda: C.FacilityLocationLoss(), facility_twin, compiles=False),
    Case("ProxyNCALoss", lambda: C.ProxyNCALoss(*size), class_twin(R.proxy_nca, "weight")),
    Case("ProxyNCALoss-original", lambda: C.ProxyNCALoss(*size, form="original"), class_twin(R.proxy_nca, "weight")),
    Case(
        "ProxyNCALoss-several",
        lambda: C.ProxyNCALoss(*size, proxies_per_class=3),
        class_twin(R.proxy_nca, "weight"),
    ),
    Case(
        "ProxyNCALoss-dynamic",
        lambda: C.ProxyNCALoss(*size, assignment="dynamic", form="original"),
        class_twin(R.proxy_nca, "weight"),
    ),
    Case("ProxyAnchorLoss", lambda: C.ProxyAnchorLoss(*size), class_twin(R.proxy_anchor, "weight")),
    Case("SoftTripleLoss", lambda: C.SoftTripleLoss(*size), class_twin(R.soft_triple, "weight")),
    Case(
        "CenterLoss", lambda: C.CenterLoss(*size, center_weight=0.5), class_twin(R.center, "weight", "bias", "centers")
    ),
    Case("NormalizedSoftmaxLoss", lambda: C.NormalizedSoftmaxLoss(*size), class_twin(R.normalized_softmax, "weight")),
    Case("HeatedSoftmaxLoss", lambda: C.HeatedSoftmaxLoss(*size), heated_twin),
    Case("HeatedSoftmaxLoss-batch", lambda: C.HeatedSoftmaxLoss(*size, norm="batch"), heated_twin),
    Case(
        "SphereFaceLoss",
        lambda: C.SphereFaceLoss(*size, start=1.0, floor=0.5),
        class_twin(R.sphereface, "weight", annealing=lambda m: float(m.annealing)),
    ),
    Case("CosFaceLoss", lambda: C.CosFaceLoss(*size), class_twin(R.cosface, "weight")),
    Case("ArcFaceLoss", lambda: C.ArcFaceLoss(*size), class_twin(R.arcface, "weight")),
    Case("ArcFaceLoss-sub", lambda: C.ArcFaceLoss(*size, sub_centers=3), class_twin(R.arcface, "weight")),
    Case("AdaFaceLoss", lambda: C.AdaFaceLoss(*size), adaface_twin, smooth=False),
    Case(
        "AdaFaceLoss-spread",
        lambda: C.AdaFaceLoss(*size, 0.5, 16.0, concentration=0.8, momentum=1.0),
        adaface_twin,
        smooth=False,
    ),
    Case("MagFaceLoss", lambda: C.MagFaceLoss(*size), class_twin(R.magface, "weight")),
    Case(
        "MagFaceLoss-within",
        lambda: C.MagFaceLoss(*size, scale=16.0, lower_length=2.5, upper_length=4.5, length_weight=3.0),
        class_twin(R.magface, "weight"),
    ),
    Case("AdaCosLoss", lambda: C.AdaCosLoss(*size), adacos_twin),
    Case("AdaCosLoss-fixed", lambda: C.AdaCosLoss(*size, dynamic=False), adacos_twin),
]
SELECTIONS = (*mining.TRIPLET_SELECTIONS, *mining.PAIR_SELECTIONS)
