"""One call of a loss over class weights: its batch, the kernel or the pass in plain torch, and its reduction.

Losses over class weights have kernels, and here alone is decided between them and plain torch.
impl: "torch" runs anywhere, "triton" takes a kernel where one serves, "auto" does so where it is faster. What a kernel
can take, `kernels` says; the result is the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nearkin import kernels
from nearkin.core import checks, class_anchors, class_softmax, reduce
from nearkin.core.autograd import traced
from nearkin.core.class_softmax import Rivals
from nearkin.core.relations import Labels
from nearkin.kernels import (
    center_ops,
    class_anchor_ops,
    class_dense_ops,
    class_loss_ops,
    class_softmax_ops,
    eligible,
    proxy_anchor_ops,
    soft_triple_ops,
)
from nearkin.kernels.class_loss_ops import Annealing, Form
from nearkin.losses import class_shards
from nearkin.losses.class_shards import Shard

__all__ = ["KERNEL_FROM", "PLAIN", "Annealing", "ClassCall", "Form", "again_plainly"]
__all__ += ["center_kernel", "center_step_kernel"]
__all__ += ["class_path", "many_in_bfloat16"]

# B · C from which the class kernels that store no scores are taken on a GPU; None: never. At B · C = 10⁷ ArcFace of
# bfloat16 took 2.2 ms on an H200, the dense form in plain torch 5.0; with weights of float32 3.3 and 4.8. Not timed,
# and so to be asked for: other weights, float32 that may be rounded to TF32, and GPUs without float64 on their matrix
# units.
KERNEL_FROM: int | None = 2**23
PLAIN = "plain"  # the impl by which a loss over class weights computes itself again, for a second derivative


class ClassCall:
    """A loss of anchors over class weights (C·K, D), K = `per_class` in a row for each class."""

    ids: Tensor  # (B,) indices among this process's classes
    known: Tensor  # (B,) bool
    addend: Tensor  # (B,) 0, or NaN for an id out of range

    def __init__(
        self,
        embeddings: Tensor,
        labels: Labels,
        weight: Tensor,
        reduction: str,
        impl: str = "auto",
        max_memory: int | None = None,
        shard: Shard | None = None,
        per_class: int = 1,
    ) -> None:
        self.one_node = impl != PLAIN
        impl = impl if self.one_node else "auto"
        kernels.check(impl)
        self.embeddings, self.labels, self.weight, self.reduction = embeddings, labels, weight, reduction
        self.impl, self.max_memory, self.shard, self.per_class = impl, max_memory, shard, per_class

    def kernel(
        self, form: Form, again: class_dense_ops.Again, bias: Tensor | None = None, adapted: Tensor | None = None
    ) -> Tensor | None:
        """The loss by kernels that compute all of it, or None where another path is taken.

        With all scores in memory where they fit (`class_dense_ops`, which knows biases and AdaCos's `adapted` scale),
        else block by block (`class_loss_ops`). again: the loss of embeddings, weights and biases by impl=PLAIN.
        """
        x, labels, weight, impl = self.embeddings, self.labels, self.weight, self.impl
        if not self._takes_kernels() or not isinstance(labels, Tensor):
            return None
        streams = bias is None and adapted is None
        task = (x, labels, weight, form, self.reduction)
        if (
            not (streams and many_in_bfloat16(x, weight, form.centers))
            and class_dense_ops.serves(*task, bias)
            and class_dense_ops.fits(x, weight, self.max_memory)
        ):
            return class_dense_ops.loss(*task, again, bias, adapted)
        if not streams or not class_loss_ops.serves(*task, self.max_memory):
            return None
        if class_path(impl, x, weight, self.max_memory, form.centers) != "triton":
            return None
        return class_loss_ops.loss(*task, self.max_memory)

    def proxy_anchor_kernel(self, scale: float, margin: float, again: class_dense_ops.Again) -> Tensor | None:
        """Proxy-Anchor by kernels, with all similarities in memory (`proxy_anchor_ops`) or over blocks of classes
        (`class_anchor_ops`); None on another path."""
        x, labels, weight, max_memory = self.embeddings, self.labels, self.weight, self.max_memory
        if self._holds_matrix(class_dense_ops.MOST) and not many_in_bfloat16(x, weight):
            return proxy_anchor_ops.loss(x, labels, weight, scale, margin, again)  # type: ignore[arg-type]
        if not self._takes_kernels() or not isinstance(labels, Tensor):
            return None
        if not class_loss_ops.serves(x, labels, weight, Form(), "mean", max_memory):
            return None
        if class_path(self.impl, x, weight, max_memory, dense_first=True) != "triton":
            return None
        return class_anchor_ops.loss(x, labels, weight, margin, scale, max_memory)

    def soft_triple_kernel(
        self, scale: float, gamma: float, margin: float, tau: float, again: class_dense_ops.Again
    ) -> Tensor | None:
        """SoftTriple by kernels with all similarities in memory (`soft_triple_ops`), or None on another path."""
        served = self.reduction in eligible.REDUCTIONS and self.per_class <= soft_triple_ops.MOST_CENTERS
        if not served or not self._holds_matrix(soft_triple_ops.MOST):
            return None
        settings = soft_triple_ops.Settings(self.per_class, scale, gamma, margin, tau, self.reduction)
        return soft_triple_ops.loss(self.embeddings, self.labels, self.weight, settings, again)  # type: ignore[arg-type]

    def _takes_kernels(self) -> bool:
        """Whether a loss that is one node of the graph may be computed by kernels here at all."""
        x, impl = self.embeddings, self.impl
        if self.shard is not None or impl == "torch" or not self.one_node:
            return False
        return isinstance(x, Tensor) and (impl == "triton" or x.is_cuda)

    def _holds_matrix(self, most: int) -> bool:
        """Whether kernels take the batch and all its similarities fit into memory."""
        x, weight = self.embeddings, self.weight
        return (
            self._takes_kernels()
            and eligible.class_weights(self.impl, x, self.labels, weight, self.per_class)
            and class_dense_ops.fits(x, weight, self.max_memory, most)
        )

    def check_labels(self) -> None:
        """Checks the batch and fills `ids`, `known` and `addend`."""
        self.ids, self.known, self.addend = class_shards.local_ids(
            self.embeddings, self.labels, self.weight, self.shard, self.per_class
        )

    def rivals(self, **options: Any) -> Rivals | None:
        """What a pass over blocks of classes tells of the other classes; None where the dense form is small enough."""
        x, weight, shard = self.embeddings, self.weight, self.shard
        path = class_path(self.impl, x, weight, self.max_memory, self.per_class, shard)
        if shard is not None and shard.number == 0:  # none of the sampled classes
            return class_shards.no_rivals(x, weight)
        if path == "dense":
            return None
        stream = class_softmax_ops.class_softmax if path == "triton" else class_softmax.class_softmax
        if self.per_class > 1:
            options["sub_centers"] = self.per_class
        return stream(x, weight, self.ids, max_memory=self.max_memory, **options)

    def join(self, rivals: Rivals, own: Tensor) -> tuple[Rivals, Tensor]:
        """The rivals of all processes, and a term (B,) of the own class from the process that holds it."""
        return class_shards.join_rivals(self.shard, self.ids, rivals, own)

    def streamed(self, rivals: Rivals, target: Tensor) -> Tensor:
        """The loss from the rivals and the own class's logit (B,)."""
        rivals, target = self.join(rivals, target)
        value = class_softmax.cross_entropy(rivals, target.to(rivals.rest.dtype))
        return self.terms(value) + reduce.taint(self.embeddings) + rivals.taint

    def dense(self, value: Tensor) -> Tensor:
        """The loss from one term per anchor, (B,), computed from all classes at once."""
        return self.terms(value) + reduce.taint(self.embeddings, self.weight)

    def terms(self, value: Tensor) -> Tensor:
        """The terms (B,) of the known rows, reduced."""
        if not checks.reads_values(self.known):  # else a bad id has been an error
            value = value + self.addend.to(value.dtype)
        return reduce.terms(value, self.known, self.reduction)

    def anchors(self, scale: float) -> class_anchors.Negatives | None:
        """`class_anchors` of the batch in blocks of classes; None where the dense form is small enough."""
        x, weight, shard = self.embeddings, self.weight, self.shard
        path = class_path(self.impl, x, weight, self.max_memory, shard=shard, dense_first=True)
        if path == "dense":
            return None
        stream = class_anchor_ops.class_anchors if path == "triton" else class_anchors.class_anchors
        return stream(x, weight, self.ids, self.known, scale=scale, max_memory=self.max_memory)


def again_plainly(
    function: Callable[..., Tensor], labels: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, **settings: Any
) -> Tensor:
    """`ClassCall.kernel`'s `again`, from a loss function and its settings."""
    learned = (weight,) if bias is None else (weight, bias)
    return function(x, labels, *learned, impl=PLAIN, **settings)


def center_kernel(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor,
    centers: Tensor,
    pull: float,
    reduction: str,
    impl: str,
    shard: Shard | None,
    again: class_dense_ops.Again,
) -> Tensor | None:
    """Softmax + center by kernels (`center_ops`), or None where plain torch computes it."""
    if impl == PLAIN:
        return None
    kernels.check(impl)
    served = shard is None and reduction in eligible.REDUCTIONS
    if not served or not center_ops.serves(impl, embeddings, labels, weight, bias, centers):
        return None
    return center_ops.loss(embeddings, labels, weight, bias, centers, pull, reduction, again)


def center_step_kernel(
    embeddings: Tensor, labels: Tensor, centers: Tensor, alpha: float, impl: str, shard: Shard | None
) -> Tensor | None:
    """The step of the centres by a kernel, or None where plain torch computes it."""
    kernels.check(impl)
    if shard is not None or centers.dtype != torch.float32 or not center_ops.serves(impl, embeddings, labels, centers):
        return None
    return center_ops.stepped(embeddings, labels, centers, alpha)


def class_path(
    impl: str,
    embeddings: Tensor,
    weight: Tensor,
    max_memory: int | None,
    per_class: int = 1,
    shard: Shard | None = None,
    dense_first: bool = False,
) -> str:
    """Which of "dense", "torch" (blocks of classes) and "triton" a loss over class weights takes.

    impl="torch" and "triton" never hold all logits, and neither does a shard; what the kernel cannot serve, plain torch
    does. "auto" is dense within `max_memory` if that is set; else the kernel from KERNEL_FROM on, dense where small,
    and blocks in plain torch. dense_first: the kernel wins only where the dense form is too large.
    """
    if impl != "auto":
        return impl
    fits = shard is None and class_softmax.fits(embeddings, weight, max_memory)
    if fits and (dense_first or max_memory is not None):
        return "dense"
    if _kernel_wins(embeddings, weight) and class_softmax_ops.serves(embeddings, weight, per_class, max_memory):
        return "triton"
    return "dense" if fits else "torch"


def many_in_bfloat16(embeddings: Tensor, weight: Tensor, centers: int = 1) -> bool:
    """Where products of bfloat16, block by block, take less time than those of float32."""
    return embeddings.dtype == weight.dtype == torch.bfloat16 and (
        centers in class_softmax_ops.CENTERS
        and KERNEL_FROM is not None
        and embeddings.shape[0] * weight.shape[0] >= KERNEL_FROM
    )


def _kernel_wins(embeddings: Tensor, weight: Tensor) -> bool:
    if KERNEL_FROM is None or not embeddings.is_cuda or traced():
        return False
    if embeddings.shape[0] * weight.shape[0] < KERNEL_FROM:
        return False
    if weight.dtype == torch.float32:
        return class_softmax_ops.precision() == "ieee" and kernels.has_float64_units(weight)
    return embeddings.dtype == weight.dtype == torch.bfloat16
