"""Matryoshka: any loss, taken of the first dimensions of the embeddings as well, so that they can be used alone."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from nearkin.core import checks, distances
from nearkin.core.relations import Labels
from nearkin.dist.global_batch import GlobalBatch
from nearkin.losses import class_shards
from nearkin.losses.class_shards import Shard
from nearkin.losses.settings import Loss

__all__ = ["MatryoshkaLoss", "check_lengths"]


class MatryoshkaLoss(nn.Module):
    r"""The sum of a loss over several lengths of the embeddings: the first 32 of 128 dimensions become useful alone.

    L = Σ_m c_m loss(z[:m] / |z[:m]|),   m in `dims`, c = `weights` (all 1 unless given)

    loss: any loss of this library. Its parameters are shared: of class weights, proxies and centres (rows, D) the first
    m columns serve length m, and learn from every length they serve; biases and β serve all. Its buffers (the scale of
    AdaCos, centres, steps, statistics) exist once per length, as `scale_64` here, the longest in the loss itself. A
    selection, and sampled classes, are chosen anew for each length. dims: strictly decreasing; the first is the length
    of the embeddings. normalize=False takes z[:m] as it is, for losses on embeddings of free length.

    References are cut alike, so a memory goes around: CrossBatchMemory(MatryoshkaLoss(loss, dims), size, dim). A module
    of your own that has parameters or buffers must list in `along_dim` those whose last axis is the embedding's.
    Kusupati et al. 2022, arXiv:2205.13147, eq. 1, with tied weights (MRL-E); weights of 1 from there.
    """

    def __init__(
        self,
        loss: nn.Module,
        dims: Sequence[int] = (128, 64, 32, 16),
        weights: Sequence[float] | None = None,
        *,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self._dims = check_lengths("dims", dims)
        self._weights = _checked_weights(weights, len(self._dims))
        if not isinstance(normalize, bool):
            raise TypeError(f"normalize must be True or False, got {normalize!r}")
        _check_loss(loss, self._dims[0])
        if normalize and any(getattr(part, "reads_length", False) for part in loss.modules()):
            raise ValueError(f"normalize must be False for {type(loss).__name__}, which reads the length, got True")
        self.loss, self._normalize = loss, normalize
        self._cut = frozenset(_along_dim(loss))  # names of the tensors whose last axis is cut
        self._buffer_names = tuple(name for name, _ in loss.named_buffers())
        for dim in self._dims[1:]:
            for name, buffer in loss.named_buffers():
                self.register_buffer(_own_name(name, dim), self._shortened(name, buffer, dim).clone())
        shares = getattr(loss, "shares", {}) if self.held is not None else {}
        per_length = {name: rows for name, rows in shares.items() if name in self._buffer_names}
        if per_length:
            class_shards.register(self, **{_own_name(n, m): r for n, r in per_length.items() for m in self._dims[1:]})

    @property
    def dims(self) -> tuple[int, ...]:
        """The lengths, longest first. They cannot change after construction."""
        return self._dims

    @property
    def weights(self) -> tuple[float, ...]:
        """What the loss of each length is multiplied by."""
        return self._weights

    @property
    def normalize(self) -> bool:
        """Whether each length is scaled to unit length first."""
        return self._normalize

    @property
    def lr_scale(self) -> float:
        """That of the loss, whose parameters are the only ones."""
        scale: float = getattr(self.loss, "lr_scale", 1.0)
        return scale

    @property
    def takes_references(self) -> bool:
        """Whether the loss does."""
        return checks.has_references(self.loss)

    @property
    def takes_batch_first(self) -> bool:
        """Whether the loss takes the ids of a `CrossBatchMemory`, which start with those of the batch."""
        takes: bool = getattr(self.loss, "takes_batch_first", False)
        return takes

    @property
    def held(self) -> Shard | None:
        """That of the loss, of which each process then has its part of the classes."""
        held: Shard | None = getattr(self.loss, "held", None)
        return held

    @held.setter
    def held(self, held: Shard | None) -> None:
        self.loss.held = held  # type: ignore[assignment]

    def extra_repr(self) -> str:
        weights = "" if set(self.weights) == {1.0} else f", weights={list(self.weights)}"
        return f"dims={list(self.dims)}{weights}" + ("" if self.normalize else ", normalize=False")

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
        *,
        items: Tensor | None = None,
    ) -> Tensor:
        """items: passed on to a loss that learns something per item, as `MarginLoss(num_items=)` does."""
        checks.dimensions("embeddings", checks.rows("embeddings", embeddings), self.dims[0], "dims[0] says")
        if references is None and reference_labels is None:
            rest: tuple[Any, ...] = ()
        else:
            checks.takes_references(self.loss)
            rest = (references, reference_labels)
        if references is not None and references is not embeddings:
            checks.dimensions("references", checks.rows("references", references), self.dims[0], "dims[0] says")
        options = {} if items is None else {"items": items}
        total: Tensor | None = None
        for dim, weight in zip(self.dims, self.weights, strict=True):
            x = self._first(embeddings, dim)
            if rest:
                others = x if references is embeddings else None if references is None else self._first(references, dim)
                rest = (others, reference_labels)
            value = self._loss_at(dim, (x, labels, *rest), options)
            value = value if weight == 1 else value * weight
            total = value if total is None else total + value
        assert total is not None
        return total

    def _first(self, rows: Tensor, dim: int) -> Tensor:
        """The first dimensions of each row, (B, dim)."""
        part = rows[:, :dim]
        return distances.unit(part) if self.normalize else part.contiguous()

    def _loss_at(self, dim: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        """The loss of embeddings of this length, with the columns of its tensors that serve it."""
        if dim == self.dims[0]:
            value: Tensor = self.loss(*arguments, **options)
            return value
        tensors = {n: self._shortened(n, p, dim) for n, p in self.loss.named_parameters() if n in self._cut}
        own = {name: _own_name(name, dim) for name in self._buffer_names}
        tensors |= {name: getattr(self, own_name) for name, own_name in own.items()}
        value = functional_call(self.loss, tensors, arguments, options)
        if self.training:
            for name, own_name in own.items():  # what the loss has put into their places
                setattr(self, own_name, tensors[name])
            class_shards.mark(self)
        return value

    def _shortened(self, name: str, tensor: Tensor, dim: int) -> Tensor:
        """Contiguous, as kernels take it."""
        return tensor[..., :dim].contiguous() if name in self._cut else tensor


def check_lengths(name: str, dims: object) -> tuple[int, ...]:
    """Lengths of embeddings: whole numbers >= 1, strictly decreasing."""
    lengths = tuple(dims) if isinstance(dims, Sequence) and not isinstance(dims, str) else ()
    whole = all(isinstance(dim, int) and not isinstance(dim, bool) and dim >= 1 for dim in lengths)
    if not lengths or not whole or any(a <= b for a, b in pairwise(lengths)):
        raise ValueError(f"{name} must be whole numbers >= 1, strictly decreasing, as [128, 64, 32, 16], got {dims!r}")
    return lengths


def _checked_weights(weights: Sequence[float] | None, number: int) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * number
    if len(weights) != number:
        raise ValueError(f"weights must have one entry per length: {number} lengths, {len(weights)} weights")
    for weight in weights:
        checks.positive("weights", weight)
    return tuple(weights)


def _check_loss(loss: object, dim: int) -> None:
    if not isinstance(loss, nn.Module):
        raise TypeError(f"loss must be a torch module, got {type(loss).__name__}")
    for part in loss.modules():
        if isinstance(part, (GlobalBatch, MatryoshkaLoss)):
            raise TypeError(
                f"loss must be a loss of embeddings of any length, got {type(part).__name__}, which goes around"
            )
        own = getattr(part, "dim", None)
        if isinstance(part, Loss) and own is not None and own != dim:
            raise ValueError(f"dims must begin with the loss's own dim: {type(part).__name__} has {own}, got {dim}")


def _along_dim(loss: nn.Module) -> Iterator[str]:
    """Names of the parameters and buffers whose last axis runs over the dimensions of an embedding."""
    for path, part in loss.named_modules():
        tensors = dict([*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)])
        names = getattr(part, "along_dim", None)
        if names is None and isinstance(part, Loss):
            names = [name for name, tensor in tensors.items() if tensor.dim() == 2]
        if names is None and tensors:
            raise TypeError(
                f"loss must say which of its tensors ({', '.join(tensors)}) have an embedding's dimensions as their "
                f"last axis, in along_dim, got {type(part).__name__}; a memory goes around: "
                "CrossBatchMemory(MatryoshkaLoss(loss, dims), size, dim)"
            )
        for name in names or ():
            yield f"{path}.{name}".lstrip(".")


def _own_name(name: str, dim: int) -> str:
    return f"{name.replace('.', '_')}_{dim}"
