"""Proxy losses: items meet learned stand-ins of the classes instead of each other."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from nearkin import kernels
from nearkin.core import checks, class_anchors, class_softmax, distances, reduce, relations
from nearkin.core.relations import Labels
from nearkin.kernels import class_anchors as fused_anchors
from nearkin.kernels.class_loss import Form
from nearkin.losses.classes import given, roads, route, whole
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
    impl: str = "auto",
    max_memory: int | None = None,
) -> Tensor:
    r"""An item nearer to its own proxy than to the others.

    l_i = d(x_i, p_y) + log Σ_{z} e^{-d(x_i, p_z)},   d = squared distance of x and p, both scaled to length `scale`

    z runs over the proxies of other classes (form="original": can be negative), and over p_y too (form="softmax":
    Proxy-NCA++, normalised softmax with s = 2·scale²). proxies (C·K, D), K = proxies_per_class in a row for each class;
    p_y is the nearest of the K. assignment="dynamic" ties proxies to no class: each item stands for its nearest proxy,
    and each pair of kin is a term, the anchor meeting the kin's proxy and those of its strangers in the batch, of which
    it needs one; labels may then be any relation. impl and max_memory as in `normalized_softmax_loss`, for the static
    assignment with one proxy a class; the others are dense.
    Movshovitz-Attias et al. 2017, arXiv:1703.07464, eq. 6; Teh et al. 2020, arXiv:2004.01113; scale 3: temperature 1/9.
    """
    checks.positive("scale", scale)
    checks.one_of("form", form, ("softmax", "original"))
    checks.one_of("assignment", assignment, ("static", "dynamic"))
    checks.whole("proxies_per_class", proxies_per_class, 1)
    kernels.check(impl)
    if assignment == "dynamic":
        value = _dynamic(embeddings, labels, proxies, scale, form, reduction)
        return value + reduce.taint(embeddings, proxies)
    num_classes = proxies.shape[0] // proxies_per_class
    if proxies_per_class == 1 and isinstance(labels, Tensor):
        told = Form(2 * scale**2, lost=scale**2, told=True, soft=form == "softmax")
        found_whole = whole(impl, embeddings, labels, proxies, told, reduction, max_memory)
        if found_whole is not None:
            return found_whole
    ids, known, spoilt = checks.classes(embeddings, labels, num_classes, proxies.shape[1])
    streams = route(impl, embeddings, proxies, max_memory)
    if streams is not None and proxies_per_class == 1:
        found = streams(embeddings, proxies, ids, scale=2 * scale**2, lost=scale**2, max_memory=max_memory)
        known = known & (num_classes > 1)
        value = torch.where(known, _told_from(found, scale, form), 0.0) + spoilt.to(found.rest.dtype)
        return reduce.terms(value, known, reduction) + reduce.taint(embeddings) + found.taint
    distance = _scaled_distance(embeddings, proxies, scale)  # (B, C·K)
    own = ids[:, None] * proxies_per_class + torch.arange(proxies_per_class, device=ids.device)  # (B, K)
    near = distance.gather(1, own).min(1).values
    strangers = torch.ones_like(distance, dtype=torch.bool).scatter(1, own, False)
    push = reduce.logsumexp(-distance, strangers)
    value = reduce.softplus(near + push) if form == "softmax" else near + push
    known = known & strangers.any(1)  # with one class there is nobody to be told from
    value = torch.where(known, value, 0.0) + spoilt.to(value.dtype)
    return reduce.terms(value, known, reduction) + reduce.taint(embeddings, proxies)


def _told_from(found: class_softmax.Rivals, scale: float, form: str) -> Tensor:
    """d(x, p_y) + log Σ e^{-d(x, p_z)}, (B,), where the others have passed by as 2·scale² cos.

    -d = scale² (2 cos - |x|² - |p|²), lengths 1, or 0 for a zero row: what all others share stands with the target.
    """
    x, own = distances.unit(found.anchors), distances.unit(found.own)
    near = (x - own).square().sum(1)
    there = x.detach().any(1).to(near.dtype)
    apart = found.peak - scale**2 * (1 + there - near) + found.rest
    return reduce.softplus(apart) if form == "softmax" else apart


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
    embeddings: Tensor,
    labels: Tensor,
    proxies: Tensor,
    *,
    margin: float = 0.1,
    scale: float = 32.0,
    impl: str = "auto",
    max_memory: int | None = None,
) -> Tensor:
    r"""Each proxy is an anchor: it draws its items and repels the others, the hardest most.

    L = 1/|P+| Σ_{p in P+} log(1 + Σ_{x of p} e^{-α (s_xp - δ)}) + 1/|P| Σ_p log(1 + Σ_{x not of p} e^{α (s_xp + δ)})

    s = cosine, α = `scale`, δ = `margin`; P: all proxies (C, D), P+: those with an item in the batch. labels (B,) in
    0..C-1, -1 left out. impl and max_memory as in `normalized_softmax_loss`. Kim et al. 2020, arXiv:2003.13911, eq. 4;
    α 32, δ 0.1 from there.
    """
    ids, known, spoilt = checks.classes(embeddings, labels, *proxies.shape)
    checks.number("margin", margin)
    checks.positive("scale", scale)
    road = roads(impl, embeddings, proxies, max_memory)
    if road != "dense":
        streams = fused_anchors.class_anchors if road == "triton" else class_anchors.class_anchors
        found = streams(embeddings, proxies, ids, known, scale=scale, max_memory=max_memory)
        pull = _drawn(found, ids, known, margin, scale)
        push = reduce.softplus(found.peak + scale * margin + found.rest).sum() / proxies.shape[0]
        value = pull + push + found.taint
        return value + spoilt.sum().to(value.dtype) + reduce.taint(embeddings)
    similarity = distances.cosine(embeddings, proxies)  # (B, C)
    own = torch.zeros_like(similarity, dtype=torch.bool).scatter(1, ids[:, None], True)
    positive, negative = own & known[:, None], ~own & known[:, None]
    pulls = reduce.softplus(reduce.logsumexp(-scale * (similarity - margin), positive, dim=0))  # (C,)
    pushes = reduce.softplus(reduce.logsumexp(scale * (similarity + margin), negative, dim=0))
    value = pulls.sum() / positive.any(0).sum().clamp(min=1) + pushes.sum() / proxies.shape[0]
    return value + spoilt.sum().to(value.dtype) + reduce.taint(embeddings, proxies)


def _drawn(found: class_anchors.Strangers, ids: Tensor, known: Tensor, margin: float, scale: float) -> Tensor:
    """The mean over the proxies with an item of log(1 + Σ_{x of p} e^{-α (s_xp - δ)}), from each item's own proxy."""
    own = (distances.unit(found.anchors) * distances.unit(found.own)).sum(1)
    far = torch.where(known, -scale * (own - margin), -torch.inf)  # (B,)
    nobody = torch.full_like(found.peak, -torch.inf, dtype=far.dtype)
    top = nobody.scatter_reduce(0, ids, far.detach(), "amax")
    present = top > -torch.inf
    level = torch.where(present, top, 0.0)
    parts = torch.where(known, (torch.where(known, far, 0.0) - level[ids]).exp(), 0.0)
    total = torch.zeros_like(level).index_add(0, ids, parts)
    pulls = reduce.softplus(torch.where(present, torch.where(present, total, 1.0).log() + level, 0.0))
    return torch.where(present, pulls, 0.0).sum() / present.sum().clamp(min=1)


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
    max_memory: int | None = None,
) -> Tensor:
    r"""Softmax over classes of several centres, each item leaning on those near it.

    S_ic = Σ_k softmax_k(s_ick / γ) s_ick,   l_i = -log softmax_y( λ (S_ic - δ [c = y]) )  + τ R,   s = cosine
    R = Σ_c Σ_{k<k'} |w_ck - w_ck'| / (C K (K-1)), which draws the centres of a class together

    centers (C·K, D), K in a row for each class; labels (B,) in 0..C-1, -1 left out. λ = `scale`, δ = `margin`.
    Qian et al. 2019, arXiv:1909.05235, eq. 7-10; K 10, λ 20, γ 0.1, δ 0.01, τ 0.2 from there. Each
    distance in R is √(|w - w'|² + 1e-5), as in the released code; R stands once in each item's term. Beyond
    `max_memory` bytes (without it, beyond a modest size) blocks of classes pass by, and again for the gradient.
    """
    checks.whole("centers_per_class", centers_per_class, 1)
    checks.positive("scale", scale)
    checks.positive("gamma", gamma)
    checks.number("margin", margin)
    checks.at_least("tau", tau, 0)
    num_classes = centers.shape[0] // centers_per_class
    ids, known, spoilt = checks.classes(embeddings, labels, num_classes, centers.shape[1])
    if not class_softmax.fits(embeddings, centers, max_memory):
        size = class_softmax.block(embeddings, centers, centers_per_class, max_memory)
        value, drawn = _leaning_blocks(embeddings, ids, centers, centers_per_class, scale, gamma, margin, size)
        value = value + spoilt.to(value.dtype)
    else:
        w = distances.unit(centers)
        similarity = _leaning(distances.unit(embeddings), w, centers_per_class, gamma)  # (B, C)
        target = similarity.gather(1, ids[:, None]) - margin
        logits = scale * similarity.scatter(1, ids[:, None], target)
        value = cross_entropy(logits, ids, reduction="none") + spoilt.to(logits.dtype)
        drawn = _within_class(w.view(num_classes, centers_per_class, -1)) if centers_per_class > 1 else w.new_zeros(())
    if tau and centers_per_class > 1:
        value = value + tau * drawn
    return reduce.terms(value, known, reduction) + reduce.taint(embeddings, centers)


def _leaning(x: Tensor, w: Tensor, each: int, gamma: float) -> Tensor:
    """S_ic of `soft_triple_loss`, (B, C), from unit rows."""
    cosine = distances.dot(x, w).view(len(x), len(w) // each, each)  # (B, C, K)
    return ((cosine / gamma).softmax(2) * cosine).sum(2)


def _leaning_blocks(
    embeddings: Tensor, ids: Tensor, centers: Tensor, each: int, scale: float, gamma: float, margin: float, size: int
) -> tuple[Tensor, Tensor]:
    """The terms (B,) and R of `soft_triple_loss`; what a block has is made again when its gradient is wanted."""
    x, classes = distances.unit(embeddings), len(centers) // each

    def pass_by(x: Tensor, part: Tensor, start: int) -> tuple[Tensor, Tensor]:
        w = distances.unit(part)
        logits = scale * _leaning(x, w, each, gamma)
        others = (ids - start)[:, None] != torch.arange(logits.shape[1], device=ids.device)
        parts = w.view(-1, each, w.shape[1])
        drawn = _within_class(parts) * (len(parts) / classes) if each > 1 else w.new_zeros(())
        return reduce.logsumexp(logits, others), drawn

    found, start = [], 0
    for part in torch.split(centers, size):
        found.append(checkpoint(pass_by, x, part, start, use_reentrant=False, preserve_rng_state=False))
        start += len(part) // each
    push = torch.stack([rivals for rivals, _ in found], 1)  # (B, blocks)
    push = reduce.logsumexp(push, push.detach() > reduce.nothing(push))
    rows = (ids[:, None] * each + torch.arange(each, device=ids.device)).flatten()
    cosine = (distances.unit(centers[rows]).view(len(ids), each, -1) * x[:, None, :]).sum(2)  # (B, K)
    target = scale * (((cosine / gamma).softmax(1) * cosine).sum(1) - margin)
    return reduce.softplus(push - target), torch.stack([drawn for _, drawn in found]).sum()


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
        impl: str = "auto",
        max_memory: int | None = None,
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
            max_memory=max_memory,
            **given(impl),
        )

    extra_repr = show

    def forward(self, embeddings: Tensor, labels: Labels) -> Tensor:
        return proxy_nca_loss(embeddings, labels, self.proxies, **self.settings)


class ProxyAnchorLoss(nn.Module):
    """`proxy_anchor_loss` with its proxies (C, D). `lr_scale` 100 from the released code."""

    lr_scale = 100.0
    settings: dict[str, Any]

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.1,
        scale: float = 32.0,
        *,
        impl: str = "auto",
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        self.proxies = _proxies(num_classes, dim)
        hold(
            self,
            proxy_anchor_loss,
            self.proxies,
            margin=margin,
            scale=scale,
            max_memory=max_memory,
            **given(impl),
        )

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
        max_memory: int | None = None,
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
            max_memory=max_memory,
        )

    extra_repr = show

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return soft_triple_loss(embeddings, labels, self.centers, **self.settings)
