"""Encoders by name: what there is, and how one is made."""

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
    """A line of `encoders()`: parameters are the encoder's own, with their defaults."""

    name: str
    line: str
    parameters: dict[str, Any]


LARGEST = 4096  # side of a picture, as recipes have it
_HEAD: dict[str, Any] = {"dim": 128, "layer_norm": False, "normalize": True}
_KNOWN = {
    known.name: known
    for known in (
        Known(
            "small-cnn",
            f"for pictures of {small_cnn.SMALLEST} to {small_cnn.LARGEST} px, grey or colour; fast on a CPU",
            {**_HEAD, "pooling": "avg", "channels": 3, "size": 64, "width": small_cnn.WIDTH, "grid": small_cnn.GRID},
        ),
        Known("mlp", "layers for vectors", {**_HEAD, "features": None, "hidden": (512,), "dropout": 0.0}),
        Known(
            "efficientnet-lite0",
            "4 million parameters, ImageNet weights (extra lite)",
            {**_HEAD, "pooling": "avg", "channels": 3, "size": efficientnet_lite.SIZE, "pretrained": True},
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
    """The encoder of that name, on the CPU and in training mode.

    None stands for the encoder's own default. dim None or 0: no projection. pooling: avg, max, gem, avg+max; for timm
    and hf also own, the model's own. layer_norm: False, True, or "plain" without learned scale and shift. pretrained:
    begin with weights of another task where the encoder has any. What is random at the start depends on `seed` alone,
    and no other generator notices. `encoders()` lists the options of each; an option that an encoder does not have is
    an error.
    """
    given = {"pooling": pooling, "channels": channels, "size": size, "features": features} | options
    return _build("cpu", name, dim, layer_norm, normalize, pretrained, seed, **given)


def shapes(settings: Mapping[str, Any], tensors: int) -> dict[str, torch.Size] | None:
    """The names and shapes of what `build(**settings, pretrained=False)` holds, without any memory for it.

    A ValueError where it makes far more tensors than the number that is expected. None where that cannot be told: some
    models of others cannot be made without memory.
    """
    wanted = {"dim": 128, "layer_norm": False, "normalize": True, "seed": 0, **settings, "pretrained": False}
    count = _Count(20 * tensors + 1_000)  # other houses make parts that are thrown away, as the half that reads text
    try:
        with count:
            planned = _build("meta", **wanted)
    except (ValueError, RuntimeError) as error:
        if count.exceeded:
            raise ValueError(f"it has more than {count.most} tensors, {tensors} are stored") from None
        if ":" not in str(settings["name"]):
            raise ValueError(str(error)) from None
        return None
    return {name: tensor.shape for name, tensor in planned.state_dict().items()}


class _Count:
    """Ends the making of modules in this thread when they have registered more than so many tensors."""

    def __init__(self, most: int) -> None:
        self.most, self.seen, self.thread = most, 0, threading.get_ident()

    @property
    def exceeded(self) -> bool:
        return self.seen > self.most

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
        self.seen += 1
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
    **given: Any,
) -> Encoder:
    known = _known(name)
    _check(dim, layer_norm, normalize, pretrained, seed)
    own_default = ("pooling", "channels", "size", "features")
    given = {key: value for key, value in given.items() if value is not None or key not in own_default}
    own = known.parameters | ({"config": None} if known.name.endswith(":NAME") else {})  # config: only in settings
    for key in given:
        if key not in own:
            raise ValueError(f'{known.name} has no setting "{key}"; it has: {", ".join(known.parameters)}, seed')
    chosen = {key: value for key, value in (own | given).items() if key not in (*_HEAD, "pretrained")}
    make = {"small-cnn": _small_cnn, "mlp": _mlp, "efficientnet-lite0": _lite, "timm:NAME": _timm, "hf:NAME": _hf}
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
    """What every encoder has."""
    if dim is not None:
        checks.integer("dim", dim, 0)  # type: ignore[arg-type]
    checks.integer("seed", seed, 0)  # type: ignore[arg-type]
    if not isinstance(layer_norm, bool) and layer_norm != "plain":
        raise ValueError(f'layer_norm must be False, True or "plain", got {layer_norm!r}')
    for argument, flag in (("normalize", normalize), ("pretrained", pretrained)):
        if not isinstance(flag, bool):
            raise TypeError(f"{argument} must be True or False, got {flag!r}")


class _Body(NamedTuple):
    backbone: nn.Module
    pooling: Pooling
    width: int  # of the pooled features; 0: to be found by one pass
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
    """PyTorch's layers draw from the global generator: it is seeded here and put back as it was."""
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
        raise ValueError("features must be given for mlp: how many numbers a vector has")
    backbone = MLP(chosen["features"], chosen["hidden"], chosen["dropout"])
    features = chosen["features"]
    chosen["hidden"] = list(chosen["hidden"])  # as JSON has it
    return _Body(backbone, Pooling(), backbone.widths[-1], (features,), torch.zeros(features), torch.ones(features))


def _lite(name: str, pretrained: bool, chosen: dict[str, Any]) -> _Body:
    channels, size = _picture(chosen)
    backbone = efficientnet_lite.EfficientNetLite0()
    if pretrained:
        backbone.load_state_dict(efficientnet_lite.imagenet_weights())
    return _Body(
        backbone,
        Pooling(chosen["pooling"]),
        efficientnet_lite.HEAD,
        (channels, size, size),
        efficientnet_lite.MEAN,
        efficientnet_lite.STD,
    )


def _timm(name: str, pretrained: bool, chosen: dict[str, Any]) -> _Body:
    channels, size = _picture(chosen)
    found = external.from_timm(
        name.partition(":")[2],
        pretrained=pretrained,
        size=size,
        own=chosen["pooling"] == "own",
        config=chosen["config"],
    )
    return _outside(found, channels, chosen)


def _hf(name: str, pretrained: bool, chosen: dict[str, Any]) -> _Body:
    channels, size = _picture(chosen)
    found = external.from_hf(
        name.partition(":")[2],
        pretrained=pretrained,
        size=size,
        own=chosen["pooling"] == "own",
        config=chosen["config"],
        mean=chosen["mean"],
        std=chosen["std"],
    )
    chosen |= {"mean": list(found.mean), "std": list(found.std)}
    return _outside(found, channels, chosen)


def _outside(found: external.Outside, channels: int, chosen: dict[str, Any]) -> _Body:
    chosen |= {"size": found.size, "config": found.config}
    pool = Pooling("avg" if chosen["pooling"] == "own" else chosen["pooling"])  # vectors pass through it
    return _Body(found.backbone, pool, 0, (channels, found.size, found.size), found.mean, found.std)


def _picture(chosen: dict[str, Any]) -> tuple[int, int]:
    """Grey or colour, and the side, for backbones made for colour pictures."""
    channels, size = chosen["channels"], chosen["size"]
    if channels not in (1, 3) or isinstance(channels, bool):
        raise ValueError(f"channels must be 1 (grey) or 3 (colour) here, got {channels!r}")
    if size is not None:
        checks.integer("size", size, 32)
        if size > LARGEST:
            raise ValueError(f"size must be <= {LARGEST}, got {size}")
    allowed = (*POOLINGS, "own") if "config" in chosen else POOLINGS
    checks.one_of("pooling", chosen["pooling"], allowed)
    return channels, size
