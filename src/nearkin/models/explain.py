"""Which part matched: the cosine of two pictures as a sum over the places of each, by gradient × input."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from nearkin.core import checks
from nearkin.models.encoder import Encoder

__all__ = ["Explanation", "explain"]

# Layers that are affine once the deviation of LayerNorm is held: after them the bias of the head is known.
_AFFINE = (nn.Identity, nn.Linear, nn.LayerNorm, nn.BatchNorm1d, nn.Dropout)
# Outputs of these inside a backbone are no feature maps: projections of one, weights of an attention, copies.
_NO_MAPS = (nn.Linear, nn.Dropout, nn.Softmax, nn.Identity)
NO_PLACES = "explain needs an encoder with a feature map, whose places can be shown; this one has none"


class Explanation(NamedTuple):
    """Heat maps of B pairs of pictures. All numbers are float64.

    Each of the two maps of a pair alone adds up to the similarity: similarity = map.sum() + missing. The bias of the
    head is part of the maps: each of P places has bias / P of it. exact: average pooling and layers that are affine for
    one picture (linear, LayerNorm, BatchNorm in evaluation mode), so that only rounding is missing.
    """

    similarity: Tensor  # (B,), the cosine of the encoder's embeddings
    maps: tuple[Tensor, Tensor]  # (B, h, w), over the first and over the second pictures
    bias: tuple[Tensor, Tensor]  # (B,), what the bias of the head adds to the sum of each map
    missing: tuple[Tensor, Tensor]  # (B,), similarity - map.sum() of each
    embeddings: tuple[Tensor, Tensor]  # (B, D), as the encoder returns them
    exact: bool


class _Traced(NamedTuple):
    """Feature maps, and the pooled features and embeddings that were computed from them."""

    maps: list[Tensor]  # (N, C, H, W) or (N, T, C), the last computed one last
    pooled: Tensor  # (N, F) float64
    embeddings: Tensor  # (N, D), of the encoder itself
    inside: bool = False  # the backbone itself goes on from the map to a vector


def explain(encoder: Encoder, a: Tensor, b: Tensor) -> Explanation:
    r"""Heat maps over pictures a and b (B, channels, size, size), values in [0, 1], pair by pair: which part matched.

    With x_p the features at place p of a, e the embedding before it is scaled to unit length and ê its direction:

    map_a(p) = sum_c x_pc · ∂<e_a, ê_b>/∂x_pc / |e_a| + <bias, ê_b> / (|e_a| · P),   likewise for b

    Lengths are held: |e| of both, and the deviation in a LayerNorm. Otherwise nothing would be left, since a cosine
    does not change when its input is scaled. For average pooling and a linear head this is the exact decomposition of
    the cosine; max and GeM pooling lose nothing either, because scaling their input scales their output (Euler's
    theorem; values that GeM clamps count as 0). Where a head or the layers after the map are not linear, `missing` says
    by how much the map is off.

    The map is the output of the backbone, or the input of a max pooling that ends it, which has more places. A backbone
    that pools by itself or returns its class token is searched for the last map on which its output depends.
    """
    pictures = _checked(encoder, a, b)
    with torch.inference_mode(False), torch.enable_grad():
        encoder = _twin(encoder)
        traced = _traced(encoder, pictures.clone())
        layers = [*_flat(encoder.head.norm), *_flat(encoder.head.projection)]
        scales: dict[int, Tensor] = {}
        e = _embed(layers, traced.pooled, scales)  # (2B, D) float64, not of unit length
        length = e.detach().norm(dim=1, keepdim=True)
        _check_lengths(length)
        towards = (e.detach() / length).roll(len(a), 0) / length  # of each row the other's direction
        gradients = torch.autograd.grad((e * towards).sum(), traced.maps, allow_unused=True)
        places = _last_map(encoder.backbone, traced, gradients)  # (2B, h, w)
        affine = all(_is_affine(layer) for layer in layers)
        bias = length.new_zeros(len(e))
        if affine:
            bias = (_embed(layers, torch.zeros_like(traced.pooled), scales).detach() * towards).sum(1)
    maps = places + bias[:, None, None] / places[0].numel()
    first, second = _halves(traced.embeddings.detach())
    similarity = F.cosine_similarity(first.double(), second.double(), dim=1, eps=0)
    missing = similarity.repeat(2) - maps.sum((1, 2))
    exact = affine and encoder.head.pooling.kind == "avg" and not traced.inside
    return Explanation(similarity, _halves(maps), _halves(bias), _halves(missing), (first, second), exact)


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def _checked(encoder: Encoder, a: Tensor, b: Tensor) -> Tensor:
    """Both batches as one, (2B, …)."""
    if not isinstance(encoder, Encoder):
        raise TypeError(f"encoder must be a nearkin.models.Encoder, got {type(encoder).__name__}")
    if len(encoder.shape) == 1:
        raise ValueError(f"explain needs an encoder of pictures; this one takes vectors of {encoder.shape[0]} numbers")
    for name, pictures in (("a", a), ("b", b)):
        if not isinstance(pictures, Tensor) or not pictures.is_floating_point() or pictures.dim() < 2:
            raise TypeError(f"{name} must be a batch of pictures, floating point in [0, 1], got {_described(pictures)}")
    if a.shape != b.shape or len(a) == 0:
        raise ValueError(
            f"a and b must be batches of one shape with at least one picture, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    checks.finite("a and b", torch.stack([a.detach().float().sum(), b.detach().float().sum()])[None])
    return torch.cat([a.detach(), b.detach()])


def _described(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _check_lengths(length: Tensor) -> None:
    if not bool(length.isfinite().all()) or bool((length == 0).any()):
        raise ValueError("embeddings must be finite and not all 0 to have a cosine; those of a or b are not")


def _twin(encoder: Encoder) -> Encoder:
    """The same weights in modules of its own, in evaluation mode: other threads may use the encoder meanwhile, and see
    neither hooks nor another mode."""
    shared: dict[int, Any] = {id(x): x for x in (*encoder.parameters(), *encoder.buffers())}
    twin = copy.copy(encoder)
    twin._modules = {name: copy.deepcopy(module, shared) for name, module in encoder._modules.items()}
    return twin.eval()


# --- the feature map


def _traced(encoder: Encoder, pictures: Tensor) -> _Traced:
    """The map that the head pools, as a leaf, in float64; of a backbone that returns vectors every map inside it."""
    with torch.no_grad(), _watched(encoder.backbone, nn.MaxPool2d) as calls:
        output = encoder._map(pictures)
        embeddings = encoder.head(output)
    if output.dim() == 2:
        return _traced_inside(encoder, pictures)
    last = next((call for call in reversed(calls) if call[2] is output), None)
    leaf = (output if last is None else last[1]).detach().double().requires_grad_()
    return _Traced([leaf], encoder.head.pooling(leaf if last is None else last[0](leaf)), embeddings)


def _traced_inside(encoder: Encoder, pictures: Tensor) -> _Traced:
    norms = [layer.register_forward_hook(_held_norm) for layer in encoder.backbone.modules() if _is_norm(layer)]
    try:
        with _watched(encoder.backbone, nn.Module) as calls:
            pooled = encoder.head.pooling(encoder._map(pictures.requires_grad_()))
    finally:
        for hook in norms:
            hook.remove()
    maps = [output for layer, _, output in calls if not isinstance(layer, _NO_MAPS)]
    maps = [x for x in maps if isinstance(x, Tensor) and x.dim() in (3, 4) and x.requires_grad]
    if not maps:
        raise ValueError(NO_PLACES)
    with torch.no_grad():
        embeddings = encoder(pictures)
    return _Traced(maps, pooled.double(), embeddings, inside=True)


@contextmanager
def _watched(module: nn.Module, kind: type[nn.Module]) -> Iterator[list[tuple[nn.Module, Any, Any]]]:
    """Layer, first input and (first) output of every call of a layer of that kind, in their order."""
    calls: list[tuple[nn.Module, Any, Any]] = []

    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        calls.append((layer, inputs[0] if inputs else None, first))

    hooks = [layer.register_forward_hook(note) for layer in module.modules() if isinstance(layer, kind)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _last_map(backbone: nn.Module, traced: _Traced, gradients: Any) -> Tensor:
    """Gradient × input of the last map on several places of which the embedding depends, (N, h, w)."""
    for x, gradient in zip(reversed(traced.maps), reversed(gradients), strict=True):
        places = (
            None if gradient is None else _laid_out(backbone, x.detach().double() * gradient.double(), traced.inside)
        )
        if places is not None and (not traced.inside or bool(((places != 0).flatten(1).sum(1) > 1).all())):
            return places
    raise ValueError(NO_PLACES)


def _laid_out(backbone: nn.Module, x: Tensor, inside: bool) -> Tensor | None:
    """The sum over channels as (N, h, w); tokens that are no patches are left out. None: not square.

    inside: of the model, where these tokens are still there; the backbone's own output is without them.
    """
    if x.dim() == 4:
        channels_last = inside and getattr(backbone, "channels_last", False) and x.shape[1] == x.shape[2]
        return x.sum(3 if channels_last else 1)
    tokens = x.shape[1]
    patches = getattr(backbone, "patches", 0) or tokens - (int(getattr(backbone, "prefix", 0)) if inside else 0)
    side = isqrt(patches if patches <= tokens else tokens)
    if side * side != patches and tokens - side * side > _EXTRA_TOKENS:
        return None
    return x[:, tokens - side * side :].sum(2).reshape(-1, side, side)


_EXTRA_TOKENS = 8  # class token and registers


# --- the head


def _flat(module: nn.Module) -> list[nn.Module]:
    return [layer for part in module for layer in _flat(part)] if isinstance(module, nn.Sequential) else [module]


def _is_affine(layer: nn.Module) -> bool:
    return isinstance(layer, _AFFINE) and not (isinstance(layer, _BatchNorm) and layer.running_mean is None)


def _is_norm(layer: nn.Module) -> bool:
    return isinstance(layer, nn.LayerNorm)


def _embed(layers: list[nn.Module], x: Tensor, scales: dict[int, Tensor]) -> Tensor:
    """Pooled features through the layers of the head, in float64. scales: held by LayerNorms, filled at first."""
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.LayerNorm):
            x = _layer_norm(layer, x, scales.setdefault(i, _scale(layer, x)))
        elif isinstance(layer, nn.Linear):
            x = F.linear(x, _wide(layer.weight), None if layer.bias is None else _wide(layer.bias))
        elif not isinstance(layer, nn.Identity | nn.Dropout):
            x = copy.deepcopy(layer).double()(x)
    return x


def _wide(weight: Tensor) -> Tensor:
    return weight.detach().clone().double()


def _scale(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """1 / deviation over the normalized axes, without a gradient."""
    axes = tuple(range(-len(layer.normalized_shape), 0))
    return (x.detach().var(axes, correction=0, keepdim=True) + layer.eps).rsqrt()


def _layer_norm(layer: nn.LayerNorm, x: Tensor, scale: Tensor) -> Tensor:
    x = (x - x.mean(tuple(range(-len(layer.normalized_shape), 0)), keepdim=True)) * scale
    if layer.weight is not None:
        x = x * layer.weight.detach().clone().to(x.dtype)
    return x if layer.bias is None else x + layer.bias.detach().clone().to(x.dtype)


def _held_norm(layer: Any, inputs: Any, output: Tensor) -> Tensor:
    """In place of a LayerNorm's own output: the same value, with the deviation held.

    A subclass that normalizes other axes, as those for maps with the channels first, keeps its own output.
    """
    x = inputs[0]
    if tuple(x.shape[-len(layer.normalized_shape) :]) != tuple(layer.normalized_shape):
        return output
    held = _layer_norm(layer, x, _scale(layer, x)).to(output.dtype)
    return held if torch.allclose(held, output, rtol=0.05, atol=0.05) else output
