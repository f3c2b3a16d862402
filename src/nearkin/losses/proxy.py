"""Proxy losses: items are compared with learned proxies of the classes instead of each other."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from nearkin.core import checks, class_anchors, class_dense, class_softmax, distances, reduce, relations
from nearkin.core.relations import Labels
from nearkin.dist import collectives
from nearkin.losses import class_shards, logits
from nearkin.losses.call import ClassCall, Form, again_plainly
from nearkin.losses.class_shards import Shard
from nearkin.losses.module import LossModule

__all__ = ["ProxyAnchorLoss", "ProxyNCALoss", "init_proxies", "proxy_anchor_loss", "proxy_nca_loss"]


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
    shard: Shard | None = None,
) -> Tensor:
    r"""An item nearer to its own proxy than to the others.

    l_i = d(x_i, p_y) + log Σ_{z} e^{-d(x_i, p_z)},   d = squared distance of x and p, both scaled to length `scale`

    z runs over the proxies of other classes (form="original": can be negative), and over p_y too (form="softmax":
    Proxy-NCA++, normalised softmax with s = 2·scale²). proxies (C·K, D), K = proxies_per_class in a row for each class;
    p_y is the nearest of the K. assignment="dynamic" ties proxies to no class: each item is replaced by its nearest
    proxy, and each positive pair is a term, in which the anchor is compared with the positive's proxy and those of its
    negatives in the batch, of which it needs one; labels may then be any relation. impl, max_memory and shard as in
    `normalized_softmax_loss`, the first two for the static assignment with one proxy per class; the others are dense
    and refuse max_memory.
    Movshovitz-Attias et al. 2017, arXiv:1703.07464, eq. 6; Teh et al. 2020, arXiv:2004.01113; scale 3: temperature 1/9.
    """
    checks.positive("scale", scale)
    checks.at_most("scale", scale, 1e15, "distances are multiplied by its square")
    checks.one_of("form", form, ("softmax", "original"))
    checks.one_of("assignment", assignment, ("static", "dynamic"))
    checks.integer("proxies_per_class", proxies_per_class, 1)
    if max_memory is not None and (assignment == "dynamic" or proxies_per_class > 1):
        raise ValueError(
            'max_memory must be left out unless assignment="static" and proxies_per_class=1, of which alone there are '
            f"blocks of classes, got {max_memory}"
        )
    call = ClassCall(embeddings, labels, proxies, reduction, impl, max_memory, shard, proxies_per_class)
    if assignment == "dynamic":
        value = _dynamic(embeddings, labels, proxies, scale, form, reduction, shard)
        return value + reduce.taint(embeddings) + class_shards.taint(shard, proxies)
    single = proxies_per_class == 1
    if single and isinstance(labels, Tensor):
        kernel = Form(2 * scale**2, lost=scale**2, needs_others=True, soft=form == "softmax")
        again = partial(again_plainly, proxy_nca_loss, labels, scale=scale, form=form, reduction=reduction)
        if (fused := call.kernel(kernel, again)) is not None:
            return fused
    call.check_labels()
    ids, num_classes = call.ids, proxies.shape[0] // proxies_per_class if shard is None else shard.total
    call.known = call.known & (num_classes > 1)  # with one class there are no others
    rivals = call.rivals(scale=2 * scale**2, lost=scale**2) if single else None
    if rivals is not None:
        near = (distances.unit(rivals.anchors) - distances.unit(rivals.own)).square().sum(1)
        rivals, near = call.join(rivals, near)
        value = torch.where(call.known, _against_rivals(rivals, near, scale, form), 0.0)
        return call.terms(value) + reduce.taint(embeddings) + rivals.taint
    if single:
        return call.dense(torch.where(call.known, _dense(embeddings, proxies, ids, scale, form), 0.0))
    distance = _scaled_distance(embeddings, proxies, scale)  # (B, C·K)
    own = class_shards.clamped(shard, ids)[:, None] * proxies_per_class
    own = own + torch.arange(proxies_per_class, device=ids.device)  # (B, K)
    near = distance.gather(1, own).min(1).values
    others = torch.arange(distance.shape[1], device=ids.device) // proxies_per_class != ids[:, None]
    push, near = class_shards.join_logsumexp(shard, ids, reduce.logsumexp(-distance, others), near)
    value = reduce.softplus(near + push) if form == "softmax" else near + push
    value = torch.where(call.known, value, 0.0)
    return call.terms(value) + reduce.taint(embeddings) + class_shards.taint(shard, proxies)


def _dense(embeddings: Tensor, proxies: Tensor, ids: Tensor, scale: float, form: str) -> Tensor:
    """d(x, p_y) + log Σ e^{-d(x, p_z)}, (B,), -d = scale² (2 cos - |x|² - |p|²); lengths 1, or 0 for a zero row."""
    x = distances.unit(embeddings)
    p, inverse = distances.units(proxies, torch.promote_types(proxies.dtype, torch.float32))
    if form == "softmax" and distances.freely_read(p) and bool((inverse > 0).all()):
        return class_dense.cross_entropy(x, p, ids, scale=2 * scale**2)  # what all proxies share cancels
    near = (x - p[ids]).square().sum(1)
    target = scale**2 * (1 + reduce.any_in_row(x.detach() != 0) - near)
    return class_dense.cross_entropy(x, p, ids, target, scale=2 * scale**2, lost=scale**2, soft=form == "softmax")


def _against_rivals(rivals: class_softmax.Rivals, near: Tensor, scale: float, form: str) -> Tensor:
    """d(x, p_y) + log Σ e^{-d(x, p_z)}, (B,), where the others were scored as 2·scale² cos; near: |x - p_y|².

    -d = scale² (2 cos - |x|² - |p|²), lengths 1, or 0 for a zero row: what all others share is in the target's term.
    """
    nonzero = reduce.any_in_row(distances.unit(rivals.anchors.detach()) != 0).to(near.dtype)
    logit_gap = rivals.peak - scale**2 * (1 + nonzero - near) + rivals.rest
    return reduce.softplus(logit_gap) if form == "softmax" else logit_gap


def _dynamic(
    embeddings: Tensor,
    labels: Labels,
    proxies: Tensor,
    scale: float,
    form: str,
    reduction: str,
    shard: Shard | None,
) -> Tensor:
    checks.batch(embeddings, labels, None, None)
    checks.dimensions("embeddings", embeddings, proxies.shape[1], "the proxies have")
    relation = relations.of(labels)
    if shard is None:
        distance = _scaled_distance(embeddings, proxies, scale)  # (B, proxies)
        nearest = distance.detach().argmin(1)  # (B,)
        to_proxy = distance[:, nearest]  # (B, B): anchor to the proxy of each item
    else:
        nearest = _nearest_proxies(embeddings, proxies, shard)  # (B, D)
        to_proxy = _scaled_distance(class_shards.replicated(shard, embeddings), nearest, scale)
    push = reduce.logsumexp(-to_proxy, relation.negative)[:, None]
    valid = relation.positive & reduce.any_in_row(relation.negative, keepdim=True)
    value = torch.where(valid, to_proxy + push, 0.0)
    return reduce.terms(reduce.softplus(value) if form == "softmax" else value, valid, reduction)


def _nearest_proxies(embeddings: Tensor, proxies: Tensor, shard: Shard) -> Tensor:
    """The nearest proxy of each item, (B, D), from the process that holds it; of equals the first."""
    if not len(embeddings):
        return proxies[:0]
    with torch.no_grad():
        least, index = _scaled_distance(embeddings, proxies, 1.0).min(1)
        local = least == -collectives.largest(-least, shard.group)
        order = torch.where(local, -shard.first, -shard.total)
        local = order == collectives.largest(order, shard.group)
    return class_shards.sum_over_processes(shard, torch.where(local[:, None], proxies[index], 0.0))[0]


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
    shard: Shard | None = None,
) -> Tensor:
    r"""Each proxy is an anchor: it draws its items and repels the others, the hardest most.

    L = 1/|P+| Σ_{p in P+} log(1 + Σ_{x of p} e^{-α (s_xp - δ)}) + 1/|P| Σ_p log(1 + Σ_{x not of p} e^{α (s_xp + δ)})

    s = cosine, α = `scale`, δ = `margin`; P: all proxies (C, D), P+: those with an item in the batch. labels (B,) in
    0..C-1, -1 left out. impl, max_memory and shard as in `normalized_softmax_loss`. Kim et al. 2020, arXiv:2003.13911,
    eq. 4; α 32, δ 0.1 from there.
    """
    checks.number("margin", margin)
    checks.positive("scale", scale)
    call = ClassCall(embeddings, labels, proxies, "mean", impl, max_memory, shard)
    again = partial(again_plainly, proxy_anchor_loss, labels, margin=margin, scale=scale)
    if (fused := call.proxy_anchor_kernel(scale, margin, again)) is not None:
        return fused
    call.check_labels()
    ids, known, addend = call.ids, call.known, call.addend
    if (others := call.anchors(scale)) is not None:
        local = known & (ids < len(proxies))
        pulls, number = _pull_own(others, class_shards.clamped(shard, ids), local, margin, scale)
        pushes = reduce.softplus(others.peak + scale * margin + others.rest).sum()
        sums = class_shards.sum_over_processes(shard, pulls, number, pushes, others.taint)
        pulls, number, pushes, taint = sums
        value = pulls / number.clamp(min=1) + pushes / (shard.total if shard else len(proxies)) + taint
        return value + addend.sum().to(value.dtype) + reduce.taint(embeddings)
    similarity = distances.cosine(embeddings, proxies)  # (B, C)
    own = torch.zeros_like(similarity, dtype=torch.bool).scatter(1, ids[:, None], True)
    positive, negative = own & known[:, None], ~own & known[:, None]
    pulls = reduce.softplus(reduce.logsumexp(-scale * (similarity - margin), positive, dim=0))  # (C,)
    pushes = reduce.softplus(reduce.logsumexp(scale * (similarity + margin), negative, dim=0))
    value = pulls.sum() / reduce.any_in_row(positive, 0).sum().clamp(min=1) + pushes.sum() / proxies.shape[0]
    return value + addend.sum().to(value.dtype) + reduce.taint(embeddings, proxies)


def _pull_own(
    others: class_anchors.Negatives, ids: Tensor, known: Tensor, margin: float, scale: float
) -> tuple[Tensor, Tensor]:
    """The sum over the proxies with an item of log(1 + Σ_{x of p} e^{-α (s_xp - δ)}), from each item's own proxy, and
    the number of these."""
    own = (distances.unit(others.anchors) * distances.unit(others.own)).sum(1)
    far = torch.where(known, -scale * (own - margin), -torch.inf)  # (B,)
    empty = torch.full_like(others.peak, -torch.inf, dtype=far.dtype)
    top = empty.scatter_reduce(0, ids, far.detach(), "amax")
    present = top > -torch.inf
    level = torch.where(present, top, 0.0)
    parts = torch.where(known, (torch.where(known, far, 0.0) - level[ids]).exp(), 0.0)
    total = torch.zeros_like(level).index_add(0, ids, parts)
    pulls = reduce.softplus(torch.where(present, torch.where(present, total, 1.0).log() + level, 0.0))
    return torch.where(present, pulls, 0.0).sum(), present.sum()


def init_proxies(rows: int, dim: int, shard: Shard | None, per_class: int = 1) -> nn.Parameter:
    """Proxies (rows, dim) from a normal distribution, or the shard's part of them."""

    def fill(empty: Tensor) -> Tensor:
        return nn.init.normal_(empty, std=math.sqrt(2 / rows))  # Kaiming, fan out

    return class_shards.init_weight(rows, dim, fill, shard, per_class)


class ProxyNCALoss(LossModule, function=proxy_nca_loss):
    """`proxy_nca_loss` with its proxies (C·K, D). `lr_scale` 50 as in Roth et al. 2020; papers go up to 1e5.

    shard as in `NormalizedSoftmaxLoss`; the dynamic assignment also exchanges each item's nearest proxy.
    """

    lr_scale = 50.0

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
        shard: bool = False,
    ) -> None:
        super().__init__()
        checks.integer("proxies_per_class", proxies_per_class, 1)
        self.shard = class_shards.make_shard(shard, num_classes)
        self.proxies = init_proxies(num_classes * proxies_per_class, dim, self.shard, proxies_per_class)
        class_shards.register(self, proxies=proxies_per_class)
        self.num_classes, self.dim, self.scale, self.form = num_classes, dim, scale, form
        self.assignment, self.proxies_per_class, self.reduction = assignment, proxies_per_class, reduction
        self.impl, self.max_memory = impl, max_memory
        self.finish_init()

    def forward(self, embeddings: Tensor, labels: Labels) -> Tensor:
        any_relation = self.assignment == "dynamic"
        embeddings, labels, shard = class_shards.gather_batch(
            self.shard, embeddings, labels, self.proxies.shape[1], any_relation
        )
        return proxy_nca_loss(embeddings, labels, self.proxies, shard=shard, **self.arguments())

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """-d to the nearest proxy of every class, (B, C): the scores of the softmax form. Differentiable."""
        if self.assignment == "dynamic":
            raise ValueError('get_logits needs proxies that belong to classes, got assignment="dynamic"')
        x = logits.checked(self, embeddings, self.proxies)
        distance = _scaled_distance(x, self.proxies, self.scale) + logits.nan_rows(x)
        return logits.nearest(-distance, self.proxies_per_class)


class ProxyAnchorLoss(LossModule, function=proxy_anchor_loss):
    """`proxy_anchor_loss` with its proxies (C, D). `lr_scale` 100 from the released code.

    shard as in `NormalizedSoftmaxLoss`.
    """

    lr_scale = 100.0

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.1,
        scale: float = 32.0,
        *,
        impl: str = "auto",
        max_memory: int | None = None,
        shard: bool = False,
    ) -> None:
        super().__init__()
        self.shard = class_shards.make_shard(shard, num_classes)
        self.proxies = init_proxies(num_classes, dim, self.shard)
        class_shards.register(self, proxies=1)
        self.num_classes, self.dim, self.margin, self.scale = num_classes, dim, margin, scale
        self.impl, self.max_memory = impl, max_memory
        self.finish_init()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather_batch(self.shard, embeddings, labels, self.proxies.shape[1])
        return proxy_anchor_loss(embeddings, labels, self.proxies, shard=shard, **self.arguments())

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """α cos to the proxy of every class, (B, C), without the margin; differentiable."""
        return logits.of_cosines(self, embeddings, self.proxies, self.scale)
