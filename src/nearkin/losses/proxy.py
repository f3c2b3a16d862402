"""Proxy losses: items meet learned stand-ins of the classes instead of each other."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nearkin.core import checks, distances, reduce, relations
from nearkin.core.relations import Labels
from nearkin.losses.settings import hold, show

__all__ = [
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "SoftTripleLoss",
    "proxy_anchor_loss",
    "proxy_nca_loss",
    "soft_triple_loss",
]


def proxy_nca_loss(
    embeddings: Tensor,
    labels: Labels,
    proxies: Tensor,
    *,
    scale: float = 3.0,
    form: str = "softmax",
    assignment: str = "static",
    proxies_per_class: int = 1,
    reduction: str = "mean",
) -> Tensor:
    r"""An item nearer to its own proxy than to the others.

    l_i = d(x_i, p_y) + log Σ_{z} e^{-d(x_i, p_z)},   d = squared distance of x and p, both scaled to length `scale`

    z runs over the proxies of other classes (form="original": can be negative), and over p_y too (form="softmax":
    Proxy-NCA++, normalised softmax with s = 2·scale²). proxies (C·K, D), K = proxies_per_class in a row for each class;
    p_y is the nearest of the K. assignment="dynamic" ties proxies to no class: each item stands for its nearest proxy,
    and each pair of kin is a term, the anchor meeting the kin's proxy and those of its strangers in the batch, of which
    it needs one; labels may then be any relation.
    Movshovitz-Attias et al. 2017, arXiv:1703.07464, eq. 6; Teh et al. 2020, arXiv:2004.01113; scale 3: temperature 1/9.
    """
    checks.positive("scale", scale)
    checks.one_of("form", form, ("softmax", "original"))
    checks.one_of("assignment", assignment, ("static", "dynamic"))
    checks.whole("proxies_per_class", proxies_per_class, 1)
    if assignment == "dynamic":
        value = _dynamic(embeddings, labels, proxies, scale, form, reduction)
        return value + reduce.taint(embeddings, proxies)
    num_classes = proxies.shape[0] // proxies_per_class
    ids, known, spoilt = checks.classes(embeddings, labels, num_classes, proxies.shape[1])
    distance = _scaled_distance(embeddings, proxies, scale)  # (B, C·K)
    own = ids[:, None] * proxies_per_class + torch.arange(proxies_per_class, device=ids.device)  # (B, K)
    near = distance.gather(1, own).min(1).values
    strangers = torch.ones_like(distance, dtype=torch.bool).scatter(1, own, False)
    push = reduce.logsumexp(-distance, strangers)
    value = reduce.softplus(near + push) if form == "softmax" else near + push
    known = known & strangers.any(1)  # with one class there is nobody to be told from
    value = torch.where(known, value, 0.0) + spoilt.to(value.dtype)
    return reduce.terms(value, known, reduction) + reduce.taint(embeddings, proxies)


def _dynamic(embeddings: Tensor, labels: Labels, proxies: Tensor, scale: float, form: str, reduction: str) -> Tensor:
    checks.batch(embeddings, labels, None, None)
    checks.dimensions("embeddings", embeddings, proxies.shape[1], "the proxies have")
    kin = relations.of(labels)
    distance = _scaled_distance(embeddings, proxies, scale)  # (B, proxies)
    stands_for = distance.detach().argmin(1)  # (B,)
    met = distance[:, stands_for]  # (B, B): anchor to the proxy of each item
    push = reduce.logsumexp(-met, kin.negative)[:, None]
    valid = kin.positive & kin.negative.any(1, keepdim=True)
    value = torch.where(valid, met + push, 0.0)
    return reduce.terms(reduce.softplus(value) if form == "softmax" else value, valid, reduction)


def _scaled_distance(embeddings: Tensor, proxies: Tensor, scale: float) -> Tensor:
    return scale**2 * distances.squared_euclidean(embeddings, proxies, normalize=True)


def proxy_anchor_loss(
    embeddings: Tensor, labels: Tensor, proxies: Tensor, *, margin: float = 0.1, scale: float = 32.0
) -> Tensor:
    r"""Each proxy is an anchor: it draws its items and repels the others, the hardest most.

    L = 1/|P+| Σ_{p in P+} log(1 + Σ_{x of p} e^{-α (s_xp - δ)}) + 1/|P| Σ_p log(1 + Σ_{x not of p} e^{α (s_xp + δ)})

    s = cosine, α = `scale`, δ = `margin`; P: all proxies (C, D), P+: those with an item in the batch. labels (B,) in
    0..C-1, -1 left out. Kim et al. 2020, arXiv:2003.13911, eq. 4; α 32, δ 0.1 from there.
    """
    ids, known, spoilt = checks.classes(embeddings, labels, *proxies.shape)
    checks.number("margin", margin)
    checks.positive("scale", scale)
    similarity = distances.cosine(embeddings, proxies)  # (B, C)
    own = torch.zeros_like(similarity, dtype=torch.bool).scatter(1, ids[:, None], True)
    positive, negative = own & known[:, None], ~own & known[:, None]
    pull = reduce.softplus(reduce.logsumexp(-scale * (similarity - margin), positive, dim=0))  # (C,)
    push = reduce.softplus(reduce.logsumexp(scale * (similarity + margin), negative, dim=0))
    value = pull.sum() / positive.any(0).sum().clamp(min=1) + push.sum() / proxies.shape[0]
    return value + spoilt.sum().to(value.dtype) + reduce.taint(embeddings, proxies)


def soft_triple_loss(
    embeddings: Tensor,
    labels: Tensor,
    centers: Tensor,
    *,
    centers_per_class: int = 10,
    scale: float = 20.0,
    gamma: float = 0.1,
    margin: float = 0.01,
    tau: float = 0.2,
    reduction: str = "mean",
) -> Tensor:
    r"""Softmax over classes of several centres, each item leaning on those near it.

    S_ic = Σ_k softmax_k(s_ick / γ) s_ick,   l_i = -log softmax_y( λ (S_ic - δ [c = y]) )  + τ R,   s = cosine
    R = Σ_c Σ_{k<k'} |w_ck - w_ck'| / (C K (K-1)), which draws the centres of a class together

    centers (C·K, D), K in a row for each class; labels (B,) in 0..C-1, -1 left out. λ = `scale`, δ = `margin`.
    Qian et al. 2019, arXiv:1909.05235, eq. 7-10; K 10, λ 20, γ 0.1, δ 0.01, τ 0.2 from there. Each
    distance in R is √(|w - w'|² + 1e-5), as in the released code; R stands once in each item's term.
    """
    checks.whole("centers_per_class", centers_per_class, 1)
    checks.positive("scale", scale)
    checks.positive("gamma", gamma)
    checks.number("margin", margin)
    checks.at_least("tau", tau, 0)
    num_classes = centers.shape[0] // centers_per_class
    ids, known, spoilt = checks.classes(embeddings, labels, num_classes, centers.shape[1])
    w = distances.unit(centers)
    cosine = distances.dot(distances.unit(embeddings), w).view(len(ids), num_classes, centers_per_class)  # (B, C, K)
    similarity = ((cosine / gamma).softmax(2) * cosine).sum(2)  # (B, C)
    target = similarity.gather(1, ids[:, None]) - margin
    logits = scale * similarity.scatter(1, ids[:, None], target)
    value = cross_entropy(logits, ids, reduction="none") + spoilt.to(logits.dtype)
    if tau and centers_per_class > 1:
        value = value + tau * _within_class(w.view(num_classes, centers_per_class, -1))
    return reduce.terms(value, known, reduction) + reduce.taint(embeddings, centers)


def _within_class(w: Tensor) -> Tensor:
    """Mean distance of unit centres (C, K, D) to the others of their class, halved."""
    classes, centers, _ = w.shape
    with torch.autocast(w.device.type, enabled=False):
        gram = w @ w.mT  # (C, K, K)
    upper = torch.ones(centers, centers, dtype=torch.bool, device=w.device).triu(1)
    square = gram.diagonal(dim1=1, dim2=2)
    squared = (square[:, :, None] + square[:, None, :] - 2 * gram).clamp(min=0)
    apart = torch.where(upper, squared + 1e-5, 1.0).sqrt()
    return torch.where(upper, apart, 0.0).sum() / (classes * centers * (centers - 1))


def _proxies(rows: int, dim: int) -> nn.Parameter:
    checks.whole("num_classes", rows, 1)
    checks.whole("dim", dim, 1)
    proxies = torch.empty(rows, dim)
    return nn.Parameter(nn.init.normal_(proxies, std=math.sqrt(2 / rows)))  # Kaiming, fan out


class ProxyNCALoss(nn.Module):
    """`proxy_nca_loss` with its proxies (C·K, D). `lr_scale` 50 as in Roth et al. 2020; papers go up to 1e5."""

    lr_scale = 50.0
    settings: dict[str, Any]

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 3.0,
        *,
        form: str = "softmax",
        assignment: str = "static",
        proxies_per_class: int = 1,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        checks.whole("proxies_per_class", proxies_per_class, 1)
        self.proxies = _proxies(num_classes * proxies_per_class, dim)
        hold(
            self,
            proxy_nca_loss,
            self.proxies,
            scale=scale,
            form=form,
            assignment=assignment,
            proxies_per_class=proxies_per_class,
            reduction=reduction,
        )

    extra_repr = show

    def forward(self, embeddings: Tensor, labels: Labels) -> Tensor:
        return proxy_nca_loss(embeddings, labels, self.proxies, **self.settings)


class ProxyAnchorLoss(nn.Module):
    """`proxy_anchor_loss` with its proxies (C, D). `lr_scale` 100 from the released code."""

    lr_scale = 100.0
    settings: dict[str, Any]

    def __init__(self, num_classes: int, dim: int, margin: float = 0.1, scale: float = 32.0) -> None:
        super().__init__()
        self.proxies = _proxies(num_classes, dim)
        hold(self, proxy_anchor_loss, self.proxies, margin=margin, scale=scale)

    extra_repr = show

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return proxy_anchor_loss(embeddings, labels, self.proxies, **self.settings)


class SoftTripleLoss(nn.Module):
    """`soft_triple_loss` with its centres (C·K, D). `lr_scale` 100 from the released code."""

    lr_scale = 100.0
    settings: dict[str, Any]

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.01,
        scale: float = 20.0,
        *,
        centers_per_class: int = 10,
        gamma: float = 0.1,
        tau: float = 0.2,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        checks.whole("centers_per_class", centers_per_class, 1)
        self.centers = _proxies(num_classes * centers_per_class, dim)
        hold(
            self,
            soft_triple_loss,
            self.centers,
            centers_per_class=centers_per_class,
            scale=scale,
            gamma=gamma,
            margin=margin,
            tau=tau,
            reduction=reduction,
        )

    extra_repr = show

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return soft_triple_loss(embeddings, labels, self.centers, **self.settings)
