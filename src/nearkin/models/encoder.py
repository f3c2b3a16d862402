"""The encoder: normalized input, backbone, pooling, projection, unit length; and a module of the user's own as one."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nearkin.core import checks, distances
from nearkin.models.pooling import Pooling

__all__ = ["PREFIX", "Encoder", "Head", "OwnEncoder", "is_lora"]

PREFIX = "own:"  # before the class name, where a recipe names an encoder, a loss or a source of the user's own


def is_lora(name: str) -> bool:
    """Whether a parameter of that name is A or B of a LoRA layer."""
    return name.rpartition(".")[2] in ("lora_a", "lora_b")


class Head(nn.Module):
    """Pooling, LayerNorm, projection, unit length: the layers after a backbone of `width` features.

    layer_norm: on the pooled features, before the projection, as in public normalised-softmax code; True with
    learned scale and shift, "plain" without. dim None or 0: no projection. Returns float32 (float64 from float64).
    """

    def __init__(self, width: int, pooling: Pooling, dim: int | None, layer_norm: bool | str, normalize: bool) -> None:
        super().__init__()
        self.width, self.pooling, self.normalize = width, pooling, normalize
        self.norm = nn.LayerNorm(width, elementwise_affine=layer_norm is True) if layer_norm else nn.Identity()
        self.projection = nn.Linear(width, dim) if dim else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pooling(x)
        if isinstance(self.norm, nn.LayerNorm) and self.norm.weight is not None:
            x = x.to(self.norm.weight.dtype)  # pooling returns float32, and the model may be in half precision
        x = self.norm(x)
        if not isinstance(self.projection, nn.Identity):  # linear, or layers that a user has put in its place
            x = self.projection(x.to(next(self.projection.parameters()).dtype))
        if self.normalize:
            return distances.unit(x)
        return x if x.dtype == torch.float64 else x.float()


class Encoder(nn.Module):
    """Images (B, channels, size, size) with values in [0, 1], or vectors (B, features) → embeddings (B, dim).

    `models.build` makes one. Mean and deviation of the input are buffers. `backbone` and `head` together hold every
    parameter once, so that each can have its own learning rate. `settings` are the arguments with which `build` makes
    the same architecture; `pretrained`: whether training started from weights of another task.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        head: Head,
        *,
        shape: Sequence[int],
        mean: Sequence[float] | Tensor,
        std: Sequence[float] | Tensor,
        settings: dict[str, Any],
        pretrained: bool = False,
    ) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.shape = tuple(shape)  # of one item: (channels, size, size) or (features,)
        self.settings, self.pretrained = settings, pretrained
        ones = (1,) * (len(self.shape) - 1)
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.float32).reshape(-1, *ones))
        self.register_buffer("std", torch.as_tensor(std, dtype=torch.float32).reshape(-1, *ones))
        self.backbone_frozen = self.norms_frozen = False
        # Names of weights that their model does not train, as position embeddings by a formula.
        self.fixed = frozenset(name for name, p in backbone.named_parameters() if not p.requires_grad)

    @property
    def dim(self) -> int:
        """Dimensions of an embedding."""
        return int(self.settings["dim"] or self.head.width)

    @property
    def free_length(self) -> bool:
        """Whether embeddings keep their length, which may say how good an item is, or have length 1."""
        return not self.settings.get("normalize", True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self._map(x))
        return result

    def features(self, x: Tensor) -> Tensor:
        """Pooled features of the backbone, (B, width), not normalised, without the head."""
        result: Tensor = self.head.pooling(self._map(x))
        return result

    def pooled(self) -> "Encoder":
        """The pooled features as an encoder of its own, of `head.width` dimensions: without LayerNorm and projection.

        Of length 1, also where this one's embeddings are not: nothing has taught their length a meaning. It shares
        backbone and pooling with this one.
        """
        head = Head(self.head.width, self.head.pooling, None, False, True)
        settings = self.settings | {"dim": None, "layer_norm": False, "normalize": True}
        mean, std = self.mean.flatten(), self.std.flatten()
        options: dict[str, Any] = {"shape": self.shape, "settings": settings, "pretrained": self.pretrained}
        return Encoder(self.backbone, head, mean=mean, std=std, **options).train(self.training)

    def _map(self, x: Tensor) -> Tensor:
        self._check(x)
        # The mean of three channels broadcasts over a grey image and makes it an image of three equal channels.
        x = (x.to(self.mean.dtype) - self.mean) / self.std
        result: Tensor = self.backbone(x)
        return result

    def _check(self, x: object) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"input must be a torch tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"input must be floating point, images in [0, 1], got {x.dtype}")
        if x.dim() != 1 + len(self.shape) or tuple(x.shape[1:]) != self.shape:
            expected = ", ".join(map(str, self.shape))
            raise ValueError(f"input must have shape (rows, {expected}), got {tuple(x.shape)}")

    @torch.no_grad()
    def standardize(self, x: Tensor) -> "Encoder":
        """Takes mean and deviation of each feature or channel from these inputs, the training items; constant ones are
        only centred. Call it before training."""
        self._check(x)
        if len(x) == 0:
            raise ValueError("input must have at least one row, got none")
        if self.mean.shape[0] != self.shape[0]:
            raise ValueError("standardize is for encoders without pretrained weights, which bring their own mean")
        rows = x.to(distances.wide(x)).movedim(1, -1).flatten(0, -2)  # (items or pixels, features or channels)
        checks.finite("input", rows)
        mean, std = rows.mean(0), rows.std(0, correction=0)
        std = torch.where(std > 1e-6 * mean.abs().clamp(min=1e-30), std, 1.0)
        self.mean.copy_(mean.reshape(self.mean.shape))
        self.std.copy_(std.reshape(self.std.shape))
        return self

    @torch.no_grad()
    def shorten(self, dim: int) -> "Encoder":
        """Keeps the first `dim` dimensions of the embeddings, scaled to unit length again where they were.

        The projection loses its other rows, so this becomes a plain encoder of that dim. An encoder without a
        projection gets one that selects.
        """
        checks.integer("dim", dim, 1)
        checks.at_most("dim", dim, self.dim, "the dimensions of the encoder")
        if dim == self.dim:
            return self
        full, width = self.head.projection, self.head.width
        if not isinstance(full, nn.Linear | nn.Identity):
            raise ValueError(f"dim must be {self.dim} for a head with layers of one's own, got {dim}")
        short = nn.Linear(width, dim, device=self.mean.device)
        if isinstance(full, nn.Linear):
            short.to(full.weight.dtype)
            short.weight.copy_(full.weight[:dim])
            short.bias.copy_(full.bias[:dim])
        else:
            short.weight.copy_(torch.eye(dim, width))
            short.bias.zero_()
        self.head.projection = short.requires_grad_(any(p.requires_grad for p in full.parameters()))
        self.settings = self.settings | {"dim": dim}
        return self

    def freeze_backbone(self, frozen: bool = True) -> "Encoder":
        """Freezes or unfreezes the backbone: no gradient, no update of statistics, no dropout.

        Of a backbone with LoRA (`models.add_lora`) only A and B are unfrozen.
        """
        self.backbone_frozen = frozen
        parameters = dict(self.backbone.named_parameters())
        learn = {name for name in parameters if is_lora(name)} or parameters.keys() - self.fixed
        for name, parameter in parameters.items():
            parameter.requires_grad_(not frozen and name in learn)
        return self.train(self.training)

    def freeze_norms(self, frozen: bool = True) -> "Encoder":
        """BatchNorm uses its stored statistics and does not update them, also in training; scale and shift learn."""
        self.norms_frozen = frozen
        return self.train(self.training)

    def train(self, mode: bool = True) -> "Encoder":
        super().train(mode)
        if self.backbone_frozen:
            self.backbone.eval()
        if self.norms_frozen:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self


class OwnEncoder(Encoder):
    """Wraps a module of the user's own (B, …) → (B, D), whose output is the embedding; `initial`: its first weights."""

    def __init__(self, module: nn.Module, example: Tensor) -> None:
        name = f"{PREFIX}{type(module).__name__}"
        dim = _width(module, example, type(module).__name__)
        settings = {"name": name, "dim": dim, "normalize": False}
        head = Head(dim, Pooling(), None, False, False)
        super().__init__(module, head, shape=(), mean=[], std=[], settings=settings)
        self.initial = {key: value.detach().clone().cpu() for key, value in module.state_dict().items()}

    def _map(self, x: Tensor) -> Tensor:
        result: Tensor = self.backbone(x)
        return result

    def standardize(self, x: Tensor) -> "Encoder":
        """Does nothing: the module takes items as they are."""
        return self

    def untrained(self) -> "OwnEncoder":
        """A copy with the initial weights."""
        encoder = copy.deepcopy(self)
        encoder.backbone.load_state_dict(self.initial)
        return encoder


def _width(module: nn.Module, example: Tensor, name: str) -> int:
    """Dimensions of an embedding, by one forward pass without side effects."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            rows = module(example.to(device))
    finally:
        module.train(was_training)
    if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != len(example) or not rows.is_floating_point():
        got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        expected = f"({len(example)}, dimensions)"
        raise ValueError(f"encoder {name} must give floats of shape {expected} for {len(example)} items, got {got}")
    return int(rows.shape[1])
