"""A small network for images of up to 64 px, made for training on a few CPU cores."""

import torch
from torch import Tensor, nn

from nearkin.core import checks

__all__ = ["GRID", "LARGEST", "SMALLEST", "WIDTH", "SmallCNN"]

SMALLEST, LARGEST = 8, 64
WIDTH, GRID = 24, 2
FLAT = 0.05  # smallest deviation of an image, on a scale of [0, 1]: a blank one stays blank


class SmallCNN(nn.Module):
    """(B, channels, size, size) → (B, 8 * width, size/16, size/16), sides rounded up.

    Brightness and contrast of each image are normalized first: what is left to learn is shape.
    """

    def __init__(self, channels: int = 3, size: int = LARGEST, width: int = WIDTH) -> None:
        super().__init__()
        checks.integer("channels", channels, 1)
        checks.integer("size", size, SMALLEST)
        checks.integer("width", width, 1)
        if size > LARGEST:
            raise ValueError(f"size must be <= {LARGEST} for small-cnn, got {size}; larger: efficientnet-lite0")
        self.width = 8 * width
        self.layers = nn.Sequential(
            _convolution(channels, width, kernel=5, stride=2),
            *(_halving(width * 2**i, width * 2 ** (i + 1)) for i in range(3)),
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(_normalized(x).contiguous(memory_format=torch.channels_last))
        return result


def _normalized(x: Tensor) -> Tensor:
    """Each image with mean 0 and deviation 1."""
    y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    y = y - y.mean((1, 2, 3), keepdim=True)
    return (y * (y.square().mean((1, 2, 3), keepdim=True) + FLAT**2).rsqrt()).to(x.dtype)


def _convolution(before: int, after: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )


def _halving(before: int, after: int) -> nn.Sequential:
    """Convolution, then max pooling; strides with residual layers instead were no better for the same time."""
    return nn.Sequential(_convolution(before, after), nn.MaxPool2d(2, ceil_mode=True))
