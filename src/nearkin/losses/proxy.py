"""Proxy losses: items are compared with learned proxies of the classes instead of each other."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import math
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.core import checks, class_blocks, class_scores, distances, reduce, relations
from nearkin.core.class_blocks import Form
from nearkin.core.class_scores import Rivals
from nearkin.dist import collectives
from nearkin.losses import class_shards, logits
from nearkin.losses.class_shards import Shard
from nearkin.losses.classes import ClassCall, ClassLoss, function_of
from nearkin.losses.settings import Range, setting

__all__ = ["PROXIES", "ProxyAnchorLoss", "ProxyLoss", "ProxyNCALoss", "proxy_anchor_loss", "proxy_nca_loss"]

PROXIES = Range(5.0, 1000.0, log=True)  # how much faster than the encoder proxies learn


class ProxyLoss(ClassLoss):
    """A loss whose class weights start as proxies do."""

    search_rate = PROXIES

    def fill(self, empty: Tensor) -> Tensor:
        """From a normal distribution."""
        rows = self.num_classes * self.per_class
        return nn.init.normal_(empty, std=math.sqrt(2 / rows))  # Kaiming, fan out


def _proxy_scale(name: str, value: Any) -> None:
    checks.positive(name, value)
    checks.at_most(name, value, 1e15, "distances are multiplied by its square")


class ProxyNCALoss(ProxyLoss):
    r"""An item nearer to its own proxy than to the others.

    l_i = d(x_i, p_y) + log Σ_{z} e^{-d(x_i, p_z)},   d = squared distance of x and p, both scaled to length `scale`

    z runs over the proxies of other classes (form="original": can be negative), and over p_y too (form="softmax":
    Proxy-NCA++, normalised softmax with s = 2·scale²). Proxies (C·K, D), K = proxies_per_class in a row for each class;
    p_y is the nearest of the K. assignment="dynamic" ties proxies to no class: each item is replaced by its nearest
    proxy, and each positive pair is a term, in which the anchor is compared with the positive's proxy and those of its
    negatives in the batch, of which it needs one; labels may then be any relation. All else as in
    `NormalizedSoftmaxLoss`; the dynamic assignment has neither blocks of classes nor sampled ones. `lr_scale` 50 as in
    Roth et al. 2020; papers go up to 1e5.
    Movshovitz-Attias et al. 2017, arXiv:1703.07464, eq. 6; Teh et al. 2020, arXiv:2004.01113; scale 3: temperature 1/9.
    """

    lr_scale = 50.0
    weight_was = "proxies"

    scale: float = setting(
        default=3.0,
        rule=_proxy_scale,
        kw_only=False,
        search=Range(1.0, 30.0, log=True),
        text="length to which embeddings and proxies are scaled; 3: temperature 1/9 of Proxy-NCA++",
    )
    form: str = setting(
        default="softmax",
        choices=("softmax", "original"),
        text='"softmax": the own proxy is in the sum (Proxy-NCA++); "original": it is not',
    )
    assignment: str = setting(
        default="static",
        choices=("static", "dynamic"),
        text='"static": proxies belong to classes; "dynamic": an item is replaced by its nearest proxy',
    )
    proxies_per_class: int = setting(default=1, whole=True, fixed=True, text="K; 1: the paper's")

    @property
    def per_class(self) -> int:  # type: ignore[override]
        return self.proxies_per_class

    @property
    def by_relation(self) -> bool:  # type: ignore[override]
        return self.assignment == "dynamic"

    def check_together(self) -> None:
        if self.assignment == "dynamic":
            for name, default in (("max_memory", None), ("sample_rate", 1.0)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f'{name} must be left out unless assignment="static", of which alone there are blocks of '
                        f"classes and sampled ones, got {getattr(self, name)}"
                    )

    def value(self, call: ClassCall) -> Tensor:
        if self.assignment == "dynamic":
            return self._dynamic(call)
        # -d = scale² (2 cos - |x|² - |p|²), lengths 1, or 0 for a zero row: what all proxies share cancels.
        rivals = call.rivals(2 * self.scale**2, lost=self.scale**2, several="sum")
        call.known = call.known & (call.number > 1)  # with one class there are no others
        value = call.entropy(rivals, rivals.own, soft=self.form == "softmax")
        return call.reduced(torch.where(call.known, value, 0.0))

    def _dynamic(self, call: ClassCall) -> Tensor:
        x, proxies, shard, scale = call.embeddings, call.weight, call.shard, self.scale
        checks.batch(x, call.labels, None, None)
        checks.dimensions("embeddings", x, proxies.shape[1], "the proxies have")
        relation = relations.of(call.labels)
        if shard is None:
            distance = _scaled_distance(x, proxies, scale)  # (B, proxies)
            to_proxy = distance[:, distance.detach().argmin(1)]  # (B, B): anchor to the proxy of each item
        else:
            nearest = _nearest_proxies(x, proxies, shard)  # (B, D)
            to_proxy = _scaled_distance(class_shards.replicated(shard, x), nearest, scale)
        push = reduce.logsumexp(-to_proxy, relation.negative)[:, None]
        valid = relation.positive & reduce.any_in_row(relation.negative, keepdim=True)
        value = torch.where(valid, to_proxy + push, 0.0)
        call.taint = class_shards.taint(shard, proxies)
        value = reduce.softplus(value) if self.form == "softmax" else value
        return call.tainted(reduce.terms(value, valid, self.reduction))

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """-d to the nearest proxy of every class, (B, C): the scores of the softmax form. Differentiable."""
        if self.assignment == "dynamic":
            raise ValueError('get_logits needs proxies that belong to classes, got assignment="dynamic"')
        x = logits.checked(self, embeddings, self.weight)
        distance = _scaled_distance(x, self.weight, self.scale) + logits.nan_rows(x)
        return logits.nearest(-distance, self.proxies_per_class)


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


class ProxyAnchorLoss(ProxyLoss):
    r"""Each proxy is an anchor: it draws its items and repels the others, the hardest most.

    L = 1/|P+| Σ_{p in P+} log(1 + Σ_{x of p} e^{-α (s_xp - δ)}) + 1/|P| Σ_p log(1 + Σ_{x not of p} e^{α (s_xp + δ)})

    s = cosine, α = `scale`, δ = `margin`; P: all proxies (C, D), or the sampled ones, P+: those with an item in the
    batch. labels (B,) in 0..C-1, -1 left out. All else as in `NormalizedSoftmaxLoss`. `lr_scale` 100 from the released
    code. Kim et al. 2020, arXiv:2003.13911, eq. 4; α 32, δ 0.1 from there.
    """

    lr_scale = 100.0
    weight_was = "proxies"
    reduction = None  # type: ignore[assignment]  # its terms are those of proxies
    kernel = None  # type: ignore[assignment]  # whose pass is that of items

    margin: float = setting(default=0.1, kw_only=False, search=Range(0.02, 0.5), text="δ; 0.1: the paper's")
    scale: float = setting(
        default=32.0, above=0, kw_only=False, search=Range(8.0, 64.0, log=True), text="α; 32: the paper's"
    )

    def value(self, call: ClassCall) -> Tensor:
        rivals = self._rivals(call)
        pulls, number = self._pulled(call, rivals.own)
        pushes = reduce.softplus(rivals.peak + self.scale * self.margin + rivals.rest).sum()
        sums = class_shards.sum_over_processes(call.shard, pulls, number, pushes, torch.as_tensor(call.taint))
        pulls, number, pushes, call.taint = sums
        value = pulls / number.clamp(min=1) + pushes / call.number
        if not checks.reads_values(call.ids):
            value = value + call.addend.sum().to(value.dtype)
        return call.tainted(value)

    def _rivals(self, call: ClassCall) -> Rivals:
        """Of each proxy the log-sum-exp over the items of other classes, (C,); of each item its own cosine, (B,)."""
        ids = torch.where(call.known, call.ids, -1)
        if call.fits():
            x, rows = call.rows
            return class_scores.rivals(
                class_scores.product(x, rows), ids, self.scale, some=call.shard is not None, by_class=True
            )
        x, form = call.anchors.to(torch.promote_types(call.anchors.dtype, call.weight.dtype)), Form(by_class=True)
        task = (self.scale * x, call.weight, None, ids, call.local[:, None], form, self.max_memory)
        peak, rest, own, call.taint = class_blocks.scan(*task)
        return Rivals(peak, rest, (x * distances.unit(own[:, 0])).sum(1))

    def _pulled(self, call: ClassCall, own: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over the proxies with an item of log(1 + Σ_{x of p} e^{-α (s_xp - δ)}), and how many these are."""
        ids, here = call.local, call.known & (call.ids < call.weight.shape[0])
        far = torch.where(here, self.scale * (self.margin - own), -torch.inf)  # (B,)
        none = torch.zeros_like(call.weight[:, 0], dtype=far.dtype, requires_grad=False)  # (C,)
        level = none.scatter_reduce(0, ids, far.detach(), "amax")  # 0 at the least
        total = none.index_add(0, ids, (far - level.index_select(0, ids)).exp())
        number = none.scatter_reduce(0, ids, here.to(far.dtype), "amax").sum()
        return ((total + (-level).expm1()).log1p() + level).sum(), number

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """α cos to the proxy of every class, (B, C), without the margin; differentiable."""
        return super().get_logits(embeddings)


proxy_nca_loss = function_of(ProxyNCALoss, "proxy_nca_loss")
proxy_anchor_loss = function_of(ProxyAnchorLoss, "proxy_anchor_loss")
