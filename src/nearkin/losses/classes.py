"""The engine of the losses over class weights: it checks, shares, samples, scores, reduces and marks NaN.

A loss says how the own class's cosine is bent (`ClassLoss.own`), or what a call costs (`value`). The scores of all
classes are made whole (`core/class_scores.py`), or in blocks of classes under `max_memory` (`core/class_blocks.py`).
"""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import inspect
import math
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from nearkin import kernels
from nearkin.core import angles, checks, class_blocks, class_scores, distances, reduce
from nearkin.core.class_blocks import Form
from nearkin.core.class_scores import Rivals
from nearkin.core.labels import Labels
from nearkin.losses import class_sampling, class_shards, logits
from nearkin.losses.class_shards import Shard
from nearkin.losses.settings import REDUCTION, Loss, Range, setting

__all__ = ["LEARNED", "ClassCall", "ClassLoss", "Own", "function_of"]

LEARNED = Range(1.0, 100.0, log=True)  # how much faster than the encoder class weights learn


class ClassCall:
    """One call of a loss: its checked batch, the class weights it is compared with, and how terms become a number.

    ids (B,): indices among these classes, their number where an anchor's class is another process's; known (B,) bool.
    given: what the loss's training steps, or the arguments of its function, tell the formula.
    """

    ids: Tensor
    known: Tensor
    addend: Tensor  # (B,) 0, or NaN for an id out of range
    own_row: Callable[[], Tensor]  # the row of each anchor's own class as it is compared, (B, D); after `rivals`

    def __init__(
        self,
        loss: ClassLoss,
        embeddings: Tensor,
        labels: Labels,
        tensors: Mapping[str, Tensor],
        shard: Shard | None = None,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.loss, self.embeddings, self.shard, self.given = loss, embeddings, shard, dict(given)
        self.labels: Any = labels
        self.weight, self.bias, self.tensors = tensors["weight"], tensors.get("bias"), tensors
        if loss.by_relation:
            checks.rows("embeddings", embeddings)
        else:
            task = (embeddings, labels, self.weight, shard, loss.per_class)
            self.ids, self.known, self.addend = class_shards.local_ids(*task)
        self.x = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        self.reduction = loss.reduction
        self.taint: Tensor | float = 0.0  # of the class weights
        self._anchors: Tensor | None = None
        self._rows: tuple[Tensor, Tensor] | None = None

    @property
    def number(self) -> int:
        """How many classes there are, in all processes."""
        return self.weight.shape[0] // self.loss.per_class if self.shard is None else self.shard.total

    @property
    def local(self) -> Tensor:
        """`ids` that are safe to index with."""
        return class_shards.clamped(self.shard, self.ids)

    def fits(self) -> bool:
        """Whether all scores are made in one piece."""
        return class_blocks.fits(self.embeddings, self.weight, self.loss.max_memory)

    @property
    def anchors(self) -> Tensor:
        """The embeddings as they are compared: of unit length, or as they are."""
        if self._anchors is None:
            unit = self.given.get("normalize", self.loss.unit_anchors)
            self._anchors = distances.unit(self.x) if unit else distances.upcast(self.x)
        return self._anchors

    @anchors.setter
    def anchors(self, anchors: Tensor) -> None:
        self._anchors = anchors

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Anchors and class weights as they are multiplied, of one type."""
        if self._rows is None:
            self._rows = self._alike()
        return self._rows

    def _alike(self) -> tuple[Tensor, Tensor]:
        rows = distances.unit(self.weight) if self.loss.unit_weights else distances.upcast(self.weight)
        kind = torch.promote_types(self.anchors.dtype, rows.dtype)
        self.taint = reduce.taint(self.weight, self.bias)
        return self.anchors.to(kind), rows.to(kind)

    def rivals(self, scale: float | Tensor = 1.0, **how: Any) -> Rivals:
        """How the other classes score at scale · <x, w> + bias. how: `several`, `temperature` and `lost` of a `Form`.

        `own` is the own class's score before the scale, and the whole score where there are biases or `lost`.
        """
        form = Form(self.loss.unit_weights, self.loss.per_class, **how)
        if self.shard is not None and self.shard.number == 0:  # none of the sampled classes
            self.own_row = lambda: torch.zeros_like(self.anchors)
            return class_shards.no_rivals(self.anchors, self.weight)
        run = self._run(form)
        return self._whole(scale, form) if self.fits() and not run else self._blocks(scale, form, run)

    def _run(self, form: Form) -> int:
        """Class weights at a time of the kernel, which beats all scores in memory; 0 where it is not taken."""
        if not self.loss.kernel or form.centers > 1 or (self.loss.max_memory is not None and self.fits()):
            return 0
        return kernels.run(self.embeddings, self.weight, self.loss.max_memory)

    def _whole(self, scale: float | Tensor, form: Form) -> Rivals:
        x, rows = self.rows
        local, bias = self.local, self.bias
        if form.lost:
            bias = torch.where(reduce.any_in_row(rows.detach() != 0), 0.0, form.lost).to(x.dtype)
        if bias is not None:
            x, scale = scale * x, 1.0
        self.own_row = lambda: rows.index_select(0, local)
        if form.centers == 1:
            scores = class_scores.product(x, rows)
            scores = scores if bias is None else scores + bias
            return class_scores.rivals(scores, self.ids, scale, some=self.shard is not None)
        products = class_scores.cosines(x, rows, form.centers)  # (B, K, C)
        if bias is not None:
            products = products + bias.view(-1, form.centers).T
        scores = class_scores.of_classes(products, form.several, form.temperature)
        rivals = class_scores.rivals(scores, self.ids, scale, some=self.shard is not None)
        if form.several == "soft":
            return rivals
        column = local[:, None, None].expand(-1, form.centers, 1)
        own = products.gather(2, column).squeeze(2).max(1)  # of the own class's the nearest
        self.own_row = lambda: rows.index_select(0, local * form.centers + own.indices)
        return rivals if form.several == "max" else rivals._replace(own=own.values)

    def _blocks(self, scale: float | Tensor, form: Form, run: int) -> Rivals:
        x = self.anchors.to(torch.promote_types(self.anchors.dtype, self.weight.dtype))
        picks = class_blocks.own_rows(scale * x, self.weight, self.ids, form)
        passed = form
        if form.several == "soft":  # of cosines that have been scaled
            passed = form._replace(temperature=form.temperature * scale)  # type: ignore[arg-type]
        peak, rest, own, weights_taint = self._scanned(scale * x, picks, passed, run)
        self.taint = weights_taint + reduce.taint(self.bias)
        own = own.flatten(0, 1)
        own = (distances.unit(own) if form.normalize else distances.upcast(own)).view(*picks.shape, x.shape[1])
        self.own_row = lambda: own[:, 0]
        score = (own * x[:, None, :]).sum(2)  # (B, P)
        score = class_scores.soft_maximum(score[:, :, None], form.temperature) if form.several == "soft" else score
        score = score.squeeze(1)
        if self.bias is not None:
            score = scale * score + self.bias[self.local]
        if form.lost:
            score = scale * score + torch.where(reduce.any_in_row(own[:, 0].detach() != 0), 0.0, form.lost)
        return Rivals(peak, rest, score)

    def _scanned(self, x: Tensor, picks: Tensor, form: Form, run: int) -> class_blocks.Pass:
        """The pass over blocks of classes, in plain torch or in the kernel."""
        if not run:
            return class_blocks.scan(x, self.weight, self.bias, self.ids, picks, form, self.loss.max_memory)
        from nearkin.kernels import many_classes

        task = (self.embeddings, x, self.weight, self.ids, form.normalize, form.lost, run)
        peak, rest, own, taint = many_classes.rivals(*task)
        return class_blocks.Pass(peak, rest, own[:, None], taint)

    def entropy(self, rivals: Rivals, target: Tensor, soft: bool = True) -> Tensor:
        """-log of the own class's part of the softmax over the classes of all processes, (B,), from its score."""
        joined = class_shards.join(self.shard, self.ids, rivals.peak, rivals.rest, target, self.taint)
        peak, rest, target, self.taint = joined
        return class_scores.cross_entropy(peak, rest, target.to(rest.dtype), soft)

    def reduced(self, value: Tensor) -> Tensor:
        """The loss of one term per anchor, (B,)."""
        if not checks.reads_values(self.known):  # else a bad id has been an error
            value = value + self.addend.to(value.dtype)
        return self.tainted(reduce.terms(value, self.known, self.reduction))

    def tainted(self, value: Tensor) -> Tensor:
        """NaN where the batch or a class weight is not finite."""
        taint = reduce.taint(self.embeddings) + self.taint
        return value if isinstance(taint, float) and taint == 0 else value + taint


class Own:
    """What a margin may know of each anchor and its own class, (B,) each."""

    def __init__(self, call: ClassCall, rivals: Rivals) -> None:
        self.call, self.rivals = call, rivals

    @property
    def length(self) -> Tensor:
        """Of the embedding."""
        return distances.length(self.call.x, distances.wide(self.call.x)).to(self.rivals.rest.dtype)

    @property
    def cos(self) -> Tensor:
        """The cosine of their angle, as the scores have it."""
        return self.rivals.own

    @property
    def sin(self) -> Tensor:
        """The sine of their angle."""
        return angles.sine(self.cos, self.call.anchors, self.call.own_row())


class Kept:
    """What losses over class weights keep beside their settings."""

    weight: Tensor
    bias: Tensor
    centers: Tensor
    seen: Tensor
    steps: Tensor
    running_mean: Tensor
    running_var: Tensor
    held: Shard | None  # the classes of this process


class ClassLoss(Kept, Loss):
    """A loss of anchors over class weights (C·K, D). `own` or `value` is its formula; all else is the engine's."""

    search_rate = LEARNED
    tensors: ClassVar[tuple[str, ...]] = ("weight",)  # what the function form takes after the labels
    weight_was: ClassVar[str | None] = None  # the name that `weight` had
    unit_anchors = unit_weights = True  # whether these are scaled to length 1
    per_class = 1  # K, rows of the weights for each class
    by_relation = False  # labels may be any relation of the items

    num_classes: int = setting(
        whole=True, shapes=True, kw_only=False, text="number of classes C; labels are 0..C-1, or -1 for unknown"
    )
    dim: int = setting(whole=True, shapes=True, kw_only=False, text="dimensions D of the embeddings")
    reduction: str = REDUCTION
    sample_rate: float = setting(
        default=1.0,
        only="class",
        rule=class_sampling.check_rate,
        text="share of the classes in a training step (Partial FC); 1: all",
    )
    max_memory: int | None = setting(
        default=None,
        optional=True,
        whole=True,
        text="bytes of scores at once; beyond it blocks of classes pass by. None: a modest size",
    )
    kernel: bool = setting(
        default=True,
        text="very many class weights of bfloat16 on a GPU pass by in a Triton kernel; False: in plain torch",
    )
    shard: bool = setting(
        default=False,
        only="class",
        fixed=True,
        text="each process of torch.distributed holds its own part of the classes",
    )

    def make(self) -> None:
        self.held = class_shards.make_shard(self.shard, self.num_classes)
        self.weight = class_shards.init_weight(
            self.num_classes * self.per_class, self.dim, self.fill, self.held, self.per_class
        )
        class_shards.register(self, weight=self.per_class)

    @classmethod
    def bare(cls, **settings: Any) -> Any:
        """The loss without class weights, in evaluation: for a call that brings its own."""
        loss = cls.__new__(cls)
        loss.settle(num_classes=1, dim=1, **settings)
        loss.check_together()
        return loss.eval()

    def fill(self, empty: Tensor) -> Tensor:
        """Class weights as they start: in random directions."""
        return empty.normal_() / math.sqrt(self.dim)

    def own(self, own: Own) -> Tensor:
        """The cosine of each anchor's own class with the margin, (B,): a plain function of `Own`'s numbers."""
        return own.cos

    def value(self, call: ClassCall) -> Tensor:
        """The cross-entropy of the scaled cosines, the own class's bent by `own`."""
        scale = call.given.get("scale", self.__dict__.get("scale", 1.0))
        rivals = call.rivals(scale)
        return call.reduced(call.entropy(rivals, scale * self.own(Own(call, rivals))))

    def prepare(self, call: ClassCall) -> None:
        """Fills `call.given` from the steps so far, before the formula; in training it may learn from the batch."""

    def learn(self, call: ClassCall) -> None:
        """Counts a training step, after the formula."""

    def forward(self, embeddings: Tensor, labels: Labels) -> Tensor:
        dim, tensors = self.weight.shape[1], {name: getattr(self, name) for name in self.tensors}
        embeddings, labels, shard = class_shards.gather_batch(self.held, embeddings, labels, dim, self.by_relation)
        given: dict[str, Any] = {"labels": labels, "shard": shard}  # before classes are sampled
        labels, rows, shard = class_sampling.sample(self, embeddings, labels, shard)
        if rows is not None:
            tensors |= {name: tensors[name].index_select(0, rows) for name in ("weight", "bias") if name in tensors}
        call = ClassCall(self, embeddings, labels, tensors, shard, given)
        self.prepare(call)
        value = self.value(call)
        if self.training:
            self.learn(call)
        return value

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """s cos of every class, (B, C), without the margin; of several centres the nearest counts. Differentiable."""
        scale: Any = getattr(self, "scale", 1.0)
        return logits.of_cosines(self, embeddings, self.weight, scale, self.per_class)

    def before(self) -> dict[str, str | None]:
        """What entries of a state dict of earlier versions are called now; None: nobody reads it."""
        return {} if self.weight_was is None else {self.weight_was: "weight"}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        for was, now in self.before().items():
            entry = state_dict.pop(f"{prefix}{was}", None)
            if entry is not None and now is not None:
                state_dict[f"{prefix}{now}"] = entry
        super()._load_from_state_dict(state_dict, prefix, *others)


def function_of(loss: type[ClassLoss], name: str) -> Callable[..., Tensor]:
    """The function form of a loss class: the batch, its class weights, then the settings by keyword."""
    make: Any = loss
    own = {key: s for key, s in make.fields.items() if not s.shapes and s.only is None}
    told = dict(make.given)

    @wraps(loss, updated=())
    def function(
        embeddings: Tensor, labels: Labels, *learned: Tensor, shard: Shard | None = None, **settings: Any
    ) -> Tensor:
        if make.weight_was in settings:
            raise TypeError(f"{make.weight_was} of {name} is weight now")
        named = dict(zip(make.tensors, learned, strict=False))
        tensors = named | {key: settings[key] for key in make.tensors if key in settings and key not in named}
        missing = [key for key in make.tensors if key not in tensors]
        if missing or len(learned) > len(make.tensors):
            wanted = ", ".join(("embeddings", "labels", *make.tensors))
            raise TypeError(f"{name} takes {wanted} and settings by keyword, got {2 + len(tensors)} tensors")
        given = {key: settings.get(key, s.default) for key, s in told.items()}
        for key, s in told.items():
            s.check(key, given[key])
        others = {key: value for key, value in settings.items() if key not in told and tensors.get(key) is not value}
        kind = make.bare(**others)
        call = ClassCall(kind, embeddings, labels, tensors, shard, given | {"labels": labels, "shard": shard})
        value: Tensor = kind.value(call)
        return value

    batch = [inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
             for key in ("embeddings", "labels", *make.tensors)]  # fmt: skip
    hints = inspect.signature(loss).parameters
    named = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=s.default,
                          annotation=hints[key].annotation if key in hints else Any)
        for key, s in {**told, **own}.items()
    ]  # fmt: skip
    named.append(inspect.Parameter("shard", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Shard | None))
    function.__signature__ = inspect.Signature([*batch, *named], return_annotation=Tensor)  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = name
    return function
