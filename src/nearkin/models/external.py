"""Backbones of other libraries: `timm:NAME` (extra `vision`) and `hf:NAME` (extra `hf`, a local folder or the hub).

Nothing is downloaded unless pretrained weights are requested: a saved encoder contains what its architecture needs.
"""

import difflib
import inspect
import json
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearkin.core import checks

__all__ = ["ExternalBackbone", "feature_width", "from_hf", "from_timm"]

NO_CLASS_TOKEN = "pooling cls needs a class token, which this model does not have; use avg, max, gem, avg+max or own"
# Of most networks trained on ImageNet; used where a model names none.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ExternalBackbone(NamedTuple):
    """A backbone, and the size, mean and deviation of its input."""

    backbone: nn.Module  # (B, 3, size, size) → a map (B, C, H, W), tokens (B, T, C) or vectors (B, C)
    size: int
    mean: Sequence[float]
    std: Sequence[float]
    config: dict[str, Any]  # JSON that builds the same architecture without a download


class _Timm(nn.Module):
    """Moves channels to the front where a model has them last; leaves tokens that are no patch out of the pooling.

    pooling "cls": the class token alone.
    """

    def __init__(self, model: nn.Module, pooling: str) -> None:
        super().__init__()
        self.model, self.cls = model, pooling == "cls"
        self.prefix = int(getattr(model, "num_prefix_tokens", 0))
        self.channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        if self.cls and (y.dim() != 3 or not self.prefix):
            raise ValueError(NO_CLASS_TOKEN)
        if y.dim() == 3:
            return y[:, 0] if self.cls else y[:, self.prefix :]
        return y.permute(0, 3, 1, 2) if y.dim() == 4 and self.channels_last else y


def from_timm(
    name: str, *, pretrained: bool, size: int | None, pooling: str, config: dict[str, Any] | None
) -> ExternalBackbone:
    """`timm.create_model(NAME)` without its classifier; pooling "own": as the model itself pools."""
    try:
        timm = import_module("timm")
    except ImportError as error:
        raise ModuleNotFoundError(f"timm:{name} needs timm: pip install 'nearkin[vision]' ({error})") from None
    if not timm.is_model(name):
        near = difflib.get_close_matches(name.split(".")[0], timm.list_models(), 3)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists what there is"
        raise ValueError(f'unknown timm model "{name}"; {hint}')
    if pretrained and not timm.is_model_pretrained(name):
        raise ValueError(f"timm:{name} has no pretrained weights: pretrained=False, or another model")
    known = config or _timm_config(timm.get_pretrained_cfg(name))
    side = int(size or known["size"])
    arguments: dict[str, Any] = {"num_classes": 0, "pretrained": pretrained}
    if pooling != "own":
        arguments["global_pool"] = ""
    if known["fixed"] and side != known["size"]:
        arguments["img_size"] = side
    try:
        model = timm.create_model(name, **arguments)
    except Exception as error:  # any error of the download or the model
        raise ValueError(f"timm:{name} could not be made{_offline(pretrained)}: {_first_line(error)}") from None
    return ExternalBackbone(_Timm(model, pooling), side, known["mean"], known["std"], known)


def _timm_config(config: Any) -> dict[str, Any]:
    """What timm knows of a model's input, as JSON."""
    size = getattr(config, "input_size", None) or (3, 224, 224)
    return {
        "size": int(size[-1]),
        "fixed": bool(getattr(config, "fixed_input_size", False)),
        "mean": [float(v) for v in getattr(config, "mean", None) or IMAGENET_MEAN],
        "std": [float(v) for v in getattr(config, "std", None) or IMAGENET_STD],
    }


class _Hf(nn.Module):
    """The last hidden state without the tokens that are no patch, its class token, or the model's own pooled vector."""

    def __init__(self, model: nn.Module, size: int, pooling: str) -> None:
        super().__init__()
        self.model, self.pooling = model, pooling
        config: Any = model.config
        patch = getattr(config, "patch_size", None)
        self.patches = (size // patch) ** 2 if isinstance(patch, int) else 0
        accepts = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        trained_at = getattr(config, "image_size", size)
        self.extra = {"interpolate_pos_encoding": True} if accepts and trained_at != size else {}

    def forward(self, x: Tensor) -> Tensor:
        output = self.model(pixel_values=x, **self.extra)
        state: Tensor = output.last_hidden_state
        if self.pooling != "own":
            first = max(state.shape[1] - self.patches, 0) if state.dim() == 3 and self.patches else 0
            if self.pooling == "cls":
                if not first:
                    raise ValueError(NO_CLASS_TOKEN)
                return state[:, 0]
            return state[:, first:] if state.dim() == 3 else state
        pooled: Tensor | None = getattr(output, "pooler_output", None)
        if pooled is None:
            raise ValueError("the model has no pooled output of its own; pooling may be avg, max, gem, avg+max")
        return pooled.flatten(1)


def from_hf(
    name: str,
    *,
    pretrained: bool,
    size: int | None,
    pooling: str,
    config: dict[str, Any] | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> ExternalBackbone:
    """A vision model of transformers; weights are read from safetensors only, and no code of the hub is run."""
    if (mean is None) != (std is None):
        raise ValueError("mean and std must be given together, got one of them")
    for value in (*(mean or ()), *(std or ())):
        checks.at_least("mean and std", value, 0)
    if std is not None and min(std) <= 0:
        raise ValueError(f"std must be > 0, got {min(std)}")
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ModuleNotFoundError(f"hf:{name} needs transformers: pip install 'nearkin[hf]' ({error})") from None
    try:
        if config is not None:
            plan = transformers.AutoConfig.for_model(**config)
        else:
            plan = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        _refuse_kernels(plan)
        if pretrained:
            options: dict[str, Any] = {"use_safetensors": True, "dtype": torch.float32, "trust_remote_code": False}
            model = transformers.AutoModel.from_pretrained(name, config=plan, **options)
        else:
            model = transformers.AutoModel.from_config(plan, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # no such folder, no network, corrupt files: transformers raises many kinds
        where = "is neither a local folder nor available from the hub" if not Path(name).is_dir() else "cannot be read"
        raise ValueError(f"hf:{name} {where}: {_first_line(error)}") from None
    model = getattr(model, "vision_model", model)  # of a model of images and text, the image half
    side = size or _side(model.config)
    if side is None:
        raise ValueError(f"size must be given for hf:{name}, whose configuration names none")
    pooler = getattr(model, "pooler", None)
    if pooling != "own" and isinstance(pooler, nn.Module) and next(pooler.parameters(), None) is not None:
        model.pooler = None  # it would never be trained
    mean, std = (mean, std) if mean is not None and std is not None else _hf_preparation(name)
    return ExternalBackbone(_Hf(model, side, pooling), side, mean, std, json.loads(plan.to_json_string(use_diff=False)))


def _refuse_kernels(plan: Any) -> None:
    """Refuses a configuration that names a repository of compiled kernels, which transformers would fetch and run."""
    for part in (plan, *(getattr(plan, name, None) for name in getattr(plan, "sub_configs", {}))):
        for key in ("_attn_implementation", "_experts_implementation"):
            if "/" in str(getattr(part, key, "")):
                raise ValueError(f"it asks for code of {getattr(part, key)}, and no code of a model is run")


def _side(config: Any) -> int | None:
    size = getattr(config, "image_size", None)
    if isinstance(size, (list, tuple)):
        size = size[0] if len(set(size)) == 1 else None
    return size if isinstance(size, int) else None


def _hf_preparation(name: str) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and deviation from preprocessor_config.json beside the weights."""
    try:
        path = import_module("transformers.utils").cached_file(name, "preprocessor_config.json")
        config = json.loads(Path(path).read_text("utf-8"))
        return [float(v) for v in config["image_mean"]], [float(v) for v in config["image_std"]]
    except (OSError, ValueError, KeyError, TypeError):
        warnings.warn(
            f"hf:{name} does not name the mean and std of its images; ImageNet's are used, or give mean= and std=",
            RuntimeWarning,
            stacklevel=5,
        )
        return IMAGENET_MEAN, IMAGENET_STD


def _offline(pretrained: bool) -> str:
    return " (its weights are downloaded; pretrained=False starts without)" if pretrained else ""


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def feature_width(backbone: nn.Module, name: str, size: int, pool: nn.Module) -> int:
    """Number of features for an image of this size, by one forward pass."""
    backbone.eval()
    try:
        with torch.no_grad():
            width = int(pool(backbone(torch.zeros(1, 3, size, size))).shape[1])
    except Exception as error:  # models raise many kinds
        if str(error) == NO_CLASS_TOKEN:
            raise
        raise ValueError(f"{name} does not take images of {size} x {size}: {_first_line(error)}") from None
    backbone.train()
    return width
