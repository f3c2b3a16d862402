"""Encoders by name: the list of known ones, and `build`."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as modules

from nearkin.core import checks
from nearkin.models import efficientnet_lite, external, small_cnn
from nearkin.models.encoder import Encoder, Head
from nearkin.models.mlp import MLP
from nearkin.models.pooling import POOLINGS, Pooling

__all__ = ["Known", "build", "encoders", "shapes"]


class Known(NamedTuple):
    """An entry of `encoders()`: name, one line of description, parameters with their defaults."""

    name: str
    line: str
    parameters: dict[str, Any]


LARGEST = 4096  # side of an image, as in recipes
MAX_DIM = 2**20
_HEAD: dict[str, Any] = {"dim": 128, "layer_norm": False, "normalize": True}
_KNOWN = {
    known.name: known
    for known in (
        Known(
            "small-cnn",
            f"for images of {small_cnn.SMALLEST} to {small_cnn.LARGEST} px, grey or colour; fast on a CPU",
            {**_HEAD, "pooling": "avg", "channels": 3, "size": 64, "width": small_cnn.WIDTH, "grid": small_cnn.GRID},
        ),
        Known("mlp", "layers for vectors", {**_HEAD, "features": None, "hidden": (512,), "dropout": 0.0}),
        *(
            Known(
                f"efficientnet-lite{number}",
                f"{millions} million parameters, {variant.size} px, ImageNet weights (extra lite{number or ''})",
                {**_HEAD, "pooling": "avg", "channels": 3, "size": variant.size, "pretrained": True},
            )
            for (number, variant), millions in zip(efficientnet_lite.VARIANTS.items(), (3.4, 4.1, 4.8), strict=True)
        ),
        Known(
            "timm:NAME",
            "any model of timm, e.g. timm:resnet50 (extra vision)",
            {**_HEAD, "pooling": "avg", "channels": 3, "size": None, "pretrained": True},
        ),
        Known(
            "hf:NAME",
            "any vision model of transformers, from a folder or the hub (extra hf)",
            {**_HEAD, "pooling": "avg", "channels": 3, "size": None, "pretrained": True} | {"mean": None, "std": None},
        ),
    )
}


def encoders() -> list[Known]:
    """Every encoder: its name, one line, its parameters with their defaults."""
    return list(_KNOWN.values())


def build(
    name: str,
    *,
    dim: int | None = 128,
    pooling: str | None = None,
    layer_norm: bool | str = False,
    normalize: bool = True,
    channels: int | None = None,
    size: int | None = None,
    features: int | None = None,
    pretrained: bool = True,
    seed: int = 0,
    **options: Any,
) -> Encoder:
    """Builds the encoder of that name, on the CPU and in training mode.

    None stands for the encoder's own default. dim None or 0: no projection. pooling: avg, max, gem, avg+max; for timm
    and hf also own, the model's own, and cls, the class token. layer_norm: False, True, or "plain" without learned
    scale and shift. pretrained: start from weights of another task where the encoder has any. Random initial weights
    depend on `seed` alone, and no other generator is affected. `encoders()` lists the options of each; an option that
    an encoder does not have is an error.
    """
    options |= {"pooling": pooling, "channels": channels, "size": size, "features": features}
    return _build("cpu", name, dim, layer_norm, normalize, pretrained, seed, **options)


def shapes(settings: Mapping[str, Any], tensors: int) -> dict[str, torch.Size] | None:
    """Names and shapes of the tensors of `build(**settings, pretrained=False)`, without memory for them.

    Raises ValueError if it makes far more tensors than expected. None if unknown: some external models cannot be built
    without memory.
    """
    arguments = {"dim": 128, "layer_norm": False, "normalize": True, "seed": 0, **settings, "pretrained": False}
    limit = _TensorLimit(20 * tensors + 1_000)  # external models build parts that are dropped, as the text half
    try:
        with limit:
            planned = _build("meta", **arguments)
    except (ValueError, RuntimeError) as error:
        if limit.exceeded:
            raise ValueError(f"it has more than {limit.most} tensors, {tensors} are stored") from None
        if ":" not in str(settings["name"]):
            raise ValueError(str(error)) from None
        return None
    return {name: tensor.shape for name, tensor in planned.state_dict().items()}


class _TensorLimit:
    """Stops the building of modules in this thread when they have registered more than `most` tensors."""

    def __init__(self, most: int) -> None:
        self.most, self.count, self.thread = most, 0, threading.get_ident()

    @property
    def exceeded(self) -> bool:
        return self.count > self.most

    def __enter__(self) -> None:
        self._hooks = [
            modules.register_module_parameter_registration_hook(self._count),
            modules.register_module_buffer_registration_hook(self._count),
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _count(self, *_: object) -> None:
        if threading.get_ident() != self.thread:
            return
        self.count += 1
        if self.exceeded:
            raise ValueError(f"more than {self.most} tensors")


def _build(
    device: str,
    name: str,
    dim: int | None,
    layer_norm: bool | str,
    normalize: bool,
    pretrained: bool,
    seed: int,
    **options: Any,
) -> Encoder:
    known = _known(name)
    _check(dim, layer_norm, normalize, pretrained, seed)
    own_default = ("pooling", "channels", "size", "features")
    options = {key: value for key, value in options.items() if value is not None or key not in own_default}
    defaults = known.parameters | ({"config": None} if known.name.endswith(":NAME") else {})  # config: only in settings
    for key in options:
        if key not in defaults:
            raise ValueError(f'{known.name} has no setting "{key}"; it has: {", ".join(known.parameters)}, seed')
    chosen = {key: value for key, value in (defaults | options).items() if key not in (*_HEAD, "pretrained")}
    make = {
        "small-cnn": _small_cnn,
        "mlp": _mlp,
        **{f"efficientnet-lite{number}": _lite for number in efficientnet_lite.VARIANTS},
        "timm:NAME": _external,
        "hf:NAME": _external,
    }
    with _own_generator(seed, device):
        body = make[known.name](name, pretrained, chosen)
        width = body.width or external.feature_width(body.backbone, name, body.shape[-1], body.pooling)
        head = Head(width, body.pooling, dim or None, layer_norm, normalize)
    settings = {"name": name, "dim": dim or None, "layer_norm": layer_norm, "normalize": normalize, "seed": seed}
    return Encoder(
        body.backbone,
        head,
        shape=body.shape,
        mean=body.mean,
        std=body.std,
        settings=settings | chosen,
        pretrained=pretrained and "pretrained" in known.parameters,
    )


def _check(dim: object, layer_norm: object, normalize: object, pretrained: object, seed: object) -> None:
    """Arguments that every encoder has."""
    if dim is not None:
        checks.integer("dim", dim, 0)  # type: ignore[arg-type]
        if dim > MAX_DIM:  # type: ignore[operator]
            raise ValueError(f"dim must be at most {MAX_DIM:,}, got {dim:,}")
    checks.integer("seed", seed, 0)  # type: ignore[arg-type]
    if not isinstance(layer_norm, bool) and layer_norm != "plain":
        raise ValueError(f'layer_norm must be False, True or "plain", got {layer_norm!r}')
    for argument, flag in (("normalize", normalize), ("pretrained", pretrained)):
        if not isinstance(flag, bool):
            raise TypeError(f"{argument} must be True or False, got {flag!r}")


class _Body(NamedTuple):
    backbone: nn.Module
    pooling: Pooling
    width: int  # of the pooled features; 0: unknown before a forward pass
    shape: tuple[int, ...]
    mean: Any
    std: Any


def _known(name: str) -> Known:
    if not isinstance(name, str):
        raise TypeError(f"encoder must be a name, got {name!r}")
    family, colon, rest = name.partition(":")
    if colon and family in ("timm", "hf"):
        if not rest or rest == "NAME":
            raise ValueError(f'encoder "{name}" names no model; write {family}: and its name')
        return _KNOWN[f"{family}:NAME"]
    checks.one_of("encoder", name, _KNOWN)
    return _KNOWN[name]


@contextmanager
def _own_generator(seed: int, device: str) -> Iterator[None]:
    """Seeds the global generator, from which PyTorch's layers draw, and restores it."""
    before = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reach the accelerators'
        with torch.device(device):
            yield
    finally:
        torch.default_generator.set_state(before)


def _small_cnn(name: str, pretrained: bool, chosen: dict[str, Any]) -> _Body:
    channels, size, width, grid = (chosen[key] for key in ("channels", "size", "width", "grid"))
    backbone = small_cnn.SmallCNN(channels, size, width)
    pool = Pooling(chosen["pooling"], grid)
    mean, std = torch.zeros(channels), torch.ones(channels)
    return _Body(backbone, pool, backbone.width * grid**2, (channels, size, size), mean, std)


def _mlp(name: str, pretrained: bool, chosen: dict[str, Any]) -> _Body:
    if chosen["features"] is None:
        raise ValueError("features must be given for mlp: the dimensions of a vector")
    backbone = MLP(chosen["features"], chosen["hidden"], chosen["dropout"])
    features = chosen["features"]
    chosen["hidden"] = list(chosen["hidden"])  # as in JSON
    return _Body(backbone, Pooling(), backbone.widths[-1], (features,), torch.zeros(features), torch.ones(features))


def _lite(name: str, pretrained: bool, chosen: dict[str, Any]) -> _Body:
    channels, size = _channels_and_size(chosen)
    number = int(name.removeprefix("efficientnet-lite"))
    backbone = efficientnet_lite.EfficientNetLite(number)
    if pretrained:
        backbone.load_state_dict(efficientnet_lite.imagenet_weights(number))
    return _Body(
        backbone,
        Pooling(chosen["pooling"]),
        efficientnet_lite.HEAD,
        (channels, size, size),
        efficientnet_lite.MEAN,
        efficientnet_lite.STD,
    )


def _external(name: str, pretrained: bool, chosen: dict[str, Any]) -> _Body:
    channels, size = _channels_and_size(chosen)
    family, _, model = name.partition(":")
    arguments: dict[str, Any] = {"pretrained": pretrained, "size": size, "config": chosen["config"]}
    arguments["pooling"] = chosen["pooling"]
    if family == "hf":
        source = external.from_hf(model, mean=chosen["mean"], std=chosen["std"], **arguments)
        chosen |= {"mean": list(source.mean), "std": list(source.std)}
    else:
        source = external.from_timm(model, **arguments)
    chosen |= {"size": source.size, "config": source.config}
    pool = Pooling("avg" if chosen["pooling"] in ("own", "cls") else chosen["pooling"])  # vectors pass through it
    return _Body(source.backbone, pool, 0, (channels, source.size, source.size), source.mean, source.std)


def _channels_and_size(chosen: dict[str, Any]) -> tuple[int, int]:
    """Channels and size, for backbones made for colour images."""
    channels, size = chosen["channels"], chosen["size"]
    if channels not in (1, 3) or isinstance(channels, bool):
        raise ValueError(f"channels must be 1 (grey) or 3 (colour) here, got {channels!r}")
    if size is not None:
        checks.integer("size", size, 32)
        if size > LARGEST:
            raise ValueError(f"size must be <= {LARGEST}, got {size}")
    allowed = (*POOLINGS, "own", "cls") if "config" in chosen else POOLINGS
    checks.one_of("pooling", chosen["pooling"], allowed)
    return channels, size
