"""Class softmax on the sphere without a margin: normalised, heated-up, and with an adaptive scale."""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from nearkin.core import checks, class_dense, class_softmax, distances, reduce
from nearkin.core.autograd import differentiable_once, refuse_transforms
from nearkin.losses import class_sampling, class_shards, logits
from nearkin.losses.call import ClassCall, Form, again_plainly
from nearkin.losses.class_shards import Shard
from nearkin.losses.module import LossModule

__all__ = [
    "AdaCosLoss",
    "HeatedSoftmaxLoss",
    "NormalizedSoftmaxLoss",
    "adacos_loss",
    "adacos_scale",
    "heated_softmax_loss",
    "normalized_softmax_loss",
]

_ADAPTED = "AdaCosLoss in training, whose scale is a constant in its gradient,"


def normalized_softmax_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    scale: float | Tensor = 20.0,
    reduction: str = "mean",
    impl: str = "auto",
    max_memory: int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    r"""Softmax over scaled cosines to the class weights.

    l_i = -log( e^{s cos_iy} / Σ_c e^{s cos_ic} )

    embeddings (B, D), labels (B,) in 0..C-1, -1 left out, weight (C, D). See also `proxy_nca_loss`, whose
    softmax form is this with s = 2·scale². Beyond `max_memory` bytes (without it, beyond a modest size) the logits are
    never stored: blocks of classes pass by, in plain torch (impl="torch") or in a kernel ("triton"); "auto" chooses.
    shard: where processes share the classes, which of them `weight` has; the batch is then that of all processes. Wang
    et al. 2017 (NormFace), Zhai and Wu 2018, arXiv:1811.12649; scale 20 = their temperature 0.05.
    """
    if not isinstance(scale, Tensor):
        checks.positive("scale", scale)
    call = ClassCall(embeddings, labels, weight, reduction, impl, max_memory, shard)
    again = partial(again_plainly, normalized_softmax_loss, labels, scale=scale, reduction=reduction)
    if (value := call.kernel(Form(scale), again)) is not None:
        return value
    call.check_labels()
    if (rivals := call.rivals(scale=scale)) is not None:
        return call.streamed(rivals, scale * class_softmax.own_cosine(rivals))
    return call.dense(class_dense.cross_entropy(embeddings, weight, call.ids, scale=scale, normalize=True))


def heated_softmax_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    scale: float | Tensor = 16.0,
    normalize: bool = True,
    reduction: str = "mean",
    impl: str = "auto",
    shard: Shard | None = None,
) -> Tensor:
    r"""Normalised softmax with biases, trained warm and finished hot (a smaller scale).

    l_i = -log softmax_y( α <w_c/|w_c|, x> + b_c ),   x of unit length (normalize=True), or as it is

    shard as in `normalized_softmax_loss`, of the biases too, and impl; all logits are in memory either way.
    Zhang et al. 2018, arXiv:1809.04157; scale 16, then 4 for the last quarter, from its released code.
    """
    if not isinstance(scale, Tensor):
        checks.positive("scale", scale)
    call = ClassCall(embeddings, labels, weight, reduction, impl, shard=shard)
    again = partial(again_plainly, heated_softmax_loss, labels, scale=scale, normalize=normalize, reduction=reduction)
    if (value := call.kernel(Form(scale, raw=not normalize), again, bias)) is not None:
        return value
    ids, known, addend = class_shards.local_ids(embeddings, labels, weight, shard)
    x = distances.unit(embeddings) if normalize else embeddings
    scores = scale * distances.dot(x, distances.unit(weight)) + bias  # (B, C)
    value = class_shards.cross_entropy(shard, scores, ids) + addend.to(scores.dtype)
    return reduce.terms(value, known, reduction) + reduce.taint(embeddings) + class_shards.taint(shard, weight, bias)


def adacos_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    scale: float | Tensor | None = None,
    reduction: str = "mean",
    impl: str = "auto",
    max_memory: int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    r"""Normalised softmax whose scale follows from the number of classes, or from the batch.

    l_i = -log( e^{s cos_iy} / Σ_c e^{s cos_ic} ),   s = √2 ln(C - 1) by default

    `adacos_scale` gives the dynamic scale. Needs three classes or more: two give scale 0. impl, max_memory and shard as
    in `normalized_softmax_loss`.
    Zhang et al. 2019, arXiv:1905.00292, eq. 12 (fixed) and 15 (dynamic).
    """
    fixed = _fixed_scale(weight.shape[0] if shard is None else shard.total)
    scale = fixed if scale is None else scale
    return normalized_softmax_loss(
        embeddings, labels, weight, scale=scale, reduction=reduction, impl=impl, max_memory=max_memory, shard=shard
    )


@torch.no_grad()
def adacos_scale(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    impl: str = "auto",
    max_memory: int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    r"""The next dynamic scale: ln(B_avg) / cos(min(π/4, θ_med)).

    B_avg = 1/N Σ_i Σ_{c != y_i} e^{s cos_ic} with the last scale s; θ_med: lower median of the angles to the own class.
    A batch without known items leaves the scale as it was.
    """
    call = ClassCall(embeddings, labels, weight, "mean", impl, max_memory, shard)
    call.check_labels()
    ids, known = call.ids, call.known
    if (rivals := call.rivals(scale=scale)) is not None:
        rivals, own_cosine = call.join(rivals, class_softmax.own_cosine(rivals))
        present = known & (rivals.rest > reduce.log_zero(rivals.rest))
        flat = reduce.logsumexp((rivals.peak + rivals.rest)[None], present[None])
    else:
        cosine = distances.cosine(embeddings, weight)  # (B, C)
        own = torch.zeros_like(cosine, dtype=torch.bool).scatter_(1, ids[:, None], True)
        flat = reduce.logsumexp((scale * cosine).flatten()[None], (known[:, None] & ~own).flatten()[None])
        own_cosine = cosine.gather(1, ids[:, None]).squeeze(1)
    angle = own_cosine.clamp(-1, 1).acos()
    middle = torch.where(known, angle, torch.nan).nanmedian()
    following = (flat.squeeze(0) - known.sum().clamp(min=1).to(angle.dtype).log()) / middle.clamp(max=math.pi / 4).cos()
    return torch.where(following.isfinite() & (following > 0), following, scale).to(scale.dtype)


def _fixed_scale(num_classes: int) -> float:
    checks.integer("num_classes", num_classes, 3)  # two would have scale 0
    return math.sqrt(2) * math.log(num_classes - 1)


def class_weight(rows: int, dim: int, shard: Shard | None = None, per_class: int = 1) -> nn.Parameter:
    """Class weights in random directions."""
    return class_shards.init_weight(rows, dim, lambda empty: empty.normal_() / math.sqrt(dim), shard, per_class)


class NormalizedSoftmaxLoss(LossModule, function=normalized_softmax_loss):
    """`normalized_softmax_loss` with its class weights (C, D).

    sample_rate below 1: each training step compares with the classes of the batch and others drawn at random, together
    that part of all (Partial FC, An et al. 2022, arXiv:2203.15565). Evaluation compares with all.

    shard=True: each process of torch.distributed holds its part of the classes, and calls the loss with its own items,
    all processes together; loss and gradients are those of one process with all of them (the embeddings' times the
    number of processes, over which DistributedDataParallel averages). `losses/class_shards.py` says what is exchanged.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 20.0,
        *,
        reduction: str = "mean",
        sample_rate: float = 1.0,
        impl: str = "auto",
        max_memory: int | None = None,
        shard: bool = False,
    ) -> None:
        super().__init__()
        self.shard = class_shards.make_shard(shard, num_classes)
        self.weight = class_weight(num_classes, dim, self.shard)
        class_shards.register(self, weight=1)
        self.num_classes, self.dim, self.scale, self.reduction = num_classes, dim, scale, reduction
        self.sample_rate, self.impl, self.max_memory = sample_rate, impl, max_memory
        self.finish_init()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather_batch(self.shard, embeddings, labels, self.weight.shape[1])
        labels, weight, shard = class_sampling.sample(self, embeddings, labels, shard)
        return normalized_softmax_loss(embeddings, labels, weight, shard=shard, **self.arguments())

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """s cos of every class, (B, C): softmax of it is the probability of each; differentiable."""
        return logits.of_cosines(self, embeddings, self.weight, self.scale)


class HeatedSoftmaxLoss(LossModule, function=heated_softmax_loss):
    """`heated_softmax_loss` with class weights and biases, and its schedule.

    After `heat_after` training steps the scale drops from `scale` to `heated_scale` for good (the paper: the last
    quarter of training, at a tenth of the learning rate); None never does. Steps are counted in a buffer.
    norm="batch" standardises the embeddings over the batch instead of scaling them to unit length, and divides the
    scale by √D, about the length of such an embedding. shard as in `NormalizedSoftmaxLoss`.
    """

    along_dim = ("weight", "running_mean", "running_var")
    steps: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 16.0,
        heated_scale: float = 4.0,
        heat_after: int | None = None,
        *,
        norm: str = "l2",
        reduction: str = "mean",
        impl: str = "auto",
        shard: bool = False,
    ) -> None:
        super().__init__()
        self.shard = class_shards.make_shard(shard, num_classes)
        self.weight = class_weight(num_classes, dim, self.shard)
        self.bias = nn.Parameter(torch.zeros(len(self.weight)))
        class_shards.register(self, weight=1, bias=1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))
        self.num_classes, self.dim, self.scale, self.heated_scale = num_classes, dim, scale, heated_scale
        self.heat_after, self.norm, self.reduction, self.impl = heat_after, norm, reduction, impl
        self.finish_init()

    def check_settings(self) -> None:
        checks.positive("scale", self._scale)
        checks.positive("heated_scale", self.heated_scale)
        checks.one_of("norm", self.norm, ("l2", "batch"))
        if self.heat_after is not None:
            checks.integer("heat_after", self.heat_after, 0)
        super().check_settings()

    @property
    def scale(self) -> Tensor:
        """The scale now: warm before the heat, hot after it. Setting it changes the warm one."""
        heated = torch.zeros_like(self.steps, dtype=torch.bool)
        if self.heat_after is not None:
            heated = self.steps >= self.heat_after
        return torch.where(heated, self.heated_scale, self._scale).to(distances.wide(self.steps))

    @scale.setter
    def scale(self, warm: float) -> None:
        self._scale = warm

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather_batch(self.shard, embeddings, labels, self.weight.shape[1])
        total, dim = self.num_classes, self.weight.shape[1]
        checks.class_batch(embeddings, labels, total, dim)  # before anything is learned from a bad batch
        scale: float | Tensor = self._scale if self.heat_after is None else self.scale
        taint: float | Tensor = 0.0
        x, normalize = embeddings, self.norm == "l2"
        if not normalize:
            scale, taint = scale / math.sqrt(dim), reduce.taint(embeddings)
            x = self._standardised(embeddings)
        if self.training:
            self.steps = self.steps + 1
        value = heated_softmax_loss(
            x, labels, self.weight, self.bias, scale=scale, normalize=normalize, shard=shard, **self.arguments()
        )
        return value if normalize else value + taint

    def _standardised(self, embeddings: Tensor) -> Tensor:
        if self.training:
            refuse_transforms(
                'HeatedSoftmaxLoss(norm="batch")', "changes with every training batch", "call eval() on it first"
            )
        x = distances.upcast(embeddings)
        learns = False
        if self.training and x.shape[0] > 1:  # a single row has no spread to learn from
            learns = True  # set apart for a compiler, to which the number of rows may be a symbol
        mean, var = self.running_mean.to(x.dtype, copy=True), self.running_var.to(x.dtype, copy=True)
        y = batch_norm(x, mean, var, training=learns)
        if learns:
            self.running_mean, self.running_var = mean.to(self.running_mean), var.to(self.running_var)
        return y

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """α cos + b of every class, (B, C), with the present scale; norm="batch" by the statistics learned so far."""
        x = logits.checked(self, embeddings, self.weight)
        scale = self.scale.to(x.dtype)
        if self.norm == "l2":
            return logits.of_cosines(self, x, self.weight, scale) + self.bias
        y = batch_norm(distances.upcast(x), self.running_mean.to(x.dtype), self.running_var.to(x.dtype))
        return scale / math.sqrt(self.weight.shape[1]) * distances.dot(y, distances.unit(self.weight)) + self.bias


class AdaCosLoss(LossModule, function=adacos_loss):
    """`adacos_loss` with its class weights (C, D); dynamic=True adapts the scale, part of the state dict, to each batch
    in training. shard as in `NormalizedSoftmaxLoss`."""

    scale: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        dynamic: bool = True,
        reduction: str = "mean",
        impl: str = "auto",
        max_memory: int | None = None,
        shard: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(_fixed_scale(num_classes)))
        self.shard = class_shards.make_shard(shard, num_classes)
        self.weight = class_weight(num_classes, dim, self.shard)
        class_shards.register(self, weight=1)
        self.num_classes, self.dim, self.dynamic = num_classes, dim, dynamic
        self.reduction, self.impl, self.max_memory = reduction, impl, max_memory
        self.finish_init()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather_batch(self.shard, embeddings, labels, self.weight.shape[1])
        if self.dynamic and self.training:
            refuse_transforms("AdaCosLoss")
            call = ClassCall(embeddings, labels, self.weight, self.reduction, self.impl, self.max_memory, shard)
            following = torch.empty_like(self.scale)
            again = partial(again_plainly, adacos_loss, labels, scale=following, reduction=self.reduction)
            if (value := call.kernel(Form(self.scale), again, adapted=following)) is not None:
                self.scale = following
                return differentiable_once(value, _ADAPTED)
            self.scale = adacos_scale(
                embeddings, labels, self.weight, self.scale, impl=self.impl, max_memory=self.max_memory, shard=shard
            )
        value = adacos_loss(embeddings, labels, self.weight, scale=self.scale, shard=shard, **self.arguments())
        return differentiable_once(value, _ADAPTED) if self.dynamic and self.training else value

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """s cos of every class, (B, C), with the present scale; differentiable."""
        return logits.of_cosines(self, embeddings, self.weight, self.scale)
