"""Adapts a pretrained encoder: LoRA on layers that a pattern names, and the depth of each weight for its learning rate.

LoRA (Hu et al. 2021, arXiv:2106.09685, eq. 3): W is fixed, and W + (alpha / rank) · B A is used in its place; A (rank,
in) is Kaiming-uniform, B (out, rank) is 0 at first. The sum is computed in every forward pass, so a merged encoder
computes the very same weights.
"""

import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearkin.core import checks, random
from nearkin.core.autograd import full_precision
from nearkin.models.encoder import Encoder, is_lora

__all__ = ["ALPHA", "AUTO", "RANK", "add_lora", "depths", "merge_lora", "merged", "plain_state"]

RANK, ALPHA = 8, 16.0
AUTO = "auto"  # layers: those of the attention; of an encoder without attention the 1x1 convolutions

# Projections to query, key and value and back, as timm and transformers name them.
_ATTENTION = re.compile(
    r"(^|\.)(attn\.(qkv|q|k|v|kv|proj|[qkvo]_proj|out_proj)"
    r"|(attention|self_attn|self|self_attention)\.(query|key|value|[qkvo]_proj|out_proj|qkv|proj|projection)"
    r"|attention\.output\.dense)$"
)
# blocks.3, encoder.layer.3, layer1.0, stages.1.blocks.2, blocks.2.0: what a forward pass goes through in turn.
_BLOCK = re.compile(r"^(.*?\b(?:blocks|layers?\d*|stages)\.\d+(?:\.(?:blocks\.|layers?\.)?\d+)?)\.")


class _LoRA(nn.Module):
    """Makes W + (alpha / rank) · B A the weight of a layer, of whose class it becomes a subclass (`_with_lora`)."""

    original: nn.Parameter
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float
    plain: Any  # the class without LoRA

    @property
    def weight(self) -> Tensor:
        with full_precision(self.original):  # as merged ones: in full precision
            matrix = self.original.flatten(1)
            return torch.addmm(matrix, self.lora_b, self.lora_a, alpha=self.lora_scale).view_as(self.original)


@functools.cache
def _with_lora(plain: Any) -> Any:
    """The class of a layer with LoRA; `plain` is its class without."""
    return type(f"LoRA{plain.__name__}", (_LoRA, plain), {"plain": plain})


def _start(shape: tuple[int, int], seed: int, place: int) -> Tensor:
    """A (rank, in), as nn.init.kaiming_uniform_(a=sqrt(5)) draws it, by words that are the same on every machine."""
    words = random.words(shape[0] * shape[1], seed, random.Stream.LORA, place)
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0  # in [-1, 1)
    return torch.from_numpy((uniform.reshape(shape) / shape[1] ** 0.5).astype(np.float32))


def add_lora(encoder: Encoder, rank: int = RANK, alpha: float = ALPHA, layers: str = AUTO, seed: int = 0) -> Encoder:
    """Adds LoRA to the backbone, in place: from now on only A and B of these layers and the head learn.

    layers: a regular expression that is searched in the names of the backbone's linear and 1x1 convolution layers;
    "auto": query, key, value and output projections of every attention block, or, where there is no attention, every
    1x1 convolution. Batch norm keeps its statistics. A depends on `seed` and the layer alone.
    """
    checks.integer("rank", rank, 1)
    checks.positive("alpha", alpha)
    checks.integer("seed", seed, 0)
    if any(is_lora(name) for name, _ in encoder.backbone.named_parameters()):
        raise ValueError("the encoder has LoRA layers already; merge_lora makes it a plain one")
    for place, (_, layer) in enumerate(_chosen(encoder.backbone, layers)):
        weight, rest = layer._parameters.pop("weight"), dict(layer._parameters)
        assert weight is not None
        plain: Any = type(layer)
        layer.__class__ = _with_lora(plain)
        a = _start((rank, weight[0].numel()), seed, place).to(weight)
        new = {
            "original": weight,
            "lora_a": nn.Parameter(a),
            "lora_b": nn.Parameter(weight.new_zeros(len(weight), rank)),
        }
        layer._parameters.clear()
        layer._parameters.update({**new, **rest})
        layer.lora_scale = alpha / rank  # type: ignore[assignment]
    return encoder.freeze_norms().freeze_backbone(encoder.backbone_frozen)


def _chosen(backbone: nn.Module, layers: str) -> list[tuple[str, nn.Module]]:
    """The layers that get LoRA, in the order of the backbone."""
    able: list[tuple[str, nn.Module]] = [(name, part) for name, part in backbone.named_modules() if _is_matrix(part)]
    if layers == AUTO:
        attention = [(name, layer) for name, layer in able if _ATTENTION.search(name) and _BLOCK.match(name)]
        chosen = attention or [pair for pair in able if isinstance(pair[1], nn.Conv2d)] or able
    else:
        try:
            pattern = re.compile(layers)
        except (re.error, TypeError) as error:
            raise ValueError(f"layers must be a regular expression, got {layers!r}: {error}") from None
        chosen = [(name, layer) for name, layer in able if pattern.search(name)]
    if not chosen:
        some = ", ".join(name for name, _ in able[:3]) or "none"
        raise ValueError(
            f"layers must name linear or 1x1 convolution layers of the backbone ({some}, …), got {layers!r}"
        )
    return chosen


def _is_matrix(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.kernel_size == (1, 1) and layer.groups == 1
    return isinstance(layer, nn.Linear)


def _adapted(module: nn.Module) -> Iterator[tuple[str, _LoRA]]:
    for name, layer in module.named_modules():
        if isinstance(layer, _LoRA):
            yield name, layer


@torch.no_grad()
def merge_lora(encoder: Encoder) -> Encoder:
    """Makes a plain encoder of one with LoRA, in place: the same outputs, the names of an encoder without."""
    adapted = list(_adapted(encoder))
    for _, layer in adapted:
        layer.original.copy_(layer.weight)
        rest = {name: p for name, p in layer._parameters.items() if name not in ("lora_a", "lora_b", "original")}
        plain = {"weight": layer.original, **rest}
        layer._parameters.clear()
        layer._parameters.update(plain)
        del layer.lora_scale
        layer.__class__ = layer.plain
    return encoder.freeze_backbone(encoder.backbone_frozen) if adapted else encoder


def merged(encoder: Encoder) -> Encoder:
    """The encoder itself, or a plain copy of one with LoRA."""
    return merge_lora(copy.deepcopy(encoder)) if any(True for _ in _adapted(encoder)) else encoder


@torch.no_grad()
def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of the merged encoder, which is not changed."""
    state = dict(module.state_dict())
    for name, layer in _adapted(module):
        for key in ("original", "lora_a", "lora_b"):
            del state[f"{name}.{key}"]
        state[f"{name}.weight"] = layer.weight
    return state


def depths(backbone: nn.Module) -> tuple[dict[str, int], int]:
    """The depth l of each parameter by its name, and the depth L of the head, for learning rates lr · decay^(L − l).

    What comes before the first block has depth 0, block i has depth i + 1. What follows the blocks is one layer more,
    or, where it is only a norm, as deep as the head, as usual for transformers. Raises where there are no blocks.
    """
    parameters = list(backbone.named_parameters())
    blocks: dict[str, int] = {}
    depth: dict[str, int] = {}
    after: list[Tensor] = []
    for name, parameter in parameters:
        match = _BLOCK.match(name)
        if match is not None:
            depth[name] = blocks.setdefault(match[1], len(blocks) + 1)
        elif blocks:
            after.append(parameter)
        else:
            depth[name] = 0
    if not blocks:
        raise ValueError("the backbone has no numbered blocks, as blocks.0, so its layers have no order")
    last = len(blocks) + 1
    depth |= {name: last for name, _ in parameters if name not in depth}
    return depth, last + 1 if any(p.dim() > 1 for p in after) else last
