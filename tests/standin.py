"""A stand-in for pretrained encoders: a small `timm` whose one model, "standin", has fixed weights and BatchNorm.

And pictures for it: the class is a hue, the brightness is chance. The pooled features of the stand-in see both; a
trained encoder can learn to look past the brightness, also in classes that it has not seen.
"""

import sys
import types
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

__all__ = ["SETS", "install", "pictures"]

SETS = ["data.source=hues", "data.size=32", "data.stored=32", "data.val=0.4", "augment.preset=none", "loss.name=supcon"]
SETS += ["encoder.name=timm:standin", "encoder.dim=8", "sampler.batch=32", "sampler.per_class=4", "training.epochs=2"]
SETS += ["training.batches=15", "training.workers=0", "training.device=cpu", "optimizer.lr=0.01"]
SETS += ["finetune.train=all", "finetune.projection=random"]


class StandIn(nn.Module):
    """(B, 3, 32, 32) → (B, 12, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 8, 8), nn.BatchNorm2d(6)
        self.top = nn.Conv2d(6, 12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.top(torch.relu(self.norm(self.stem(x)))))


def _model(name: str, pretrained: bool = False, **_: object) -> nn.Module:
    model = StandIn()
    if pretrained:
        generator = torch.Generator().manual_seed(11)
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5)
        model.norm.running_var.fill_(2.0)
    return model


def install() -> None:
    """Puts it in the place of timm, in this process."""
    config = types.SimpleNamespace(input_size=(3, 32, 32), fixed_input_size=False, mean=(0.5,) * 3, std=(0.3,) * 3)
    sys.modules["timm"] = types.SimpleNamespace(  # type: ignore[assignment]
        create_model=_model,
        is_model=lambda name: name == "standin",
        is_model_pretrained=lambda name: True,
        list_models=lambda: ["standin"],
        get_pretrained_cfg=lambda name: config,
    )


def pictures(folder: Path, classes: int = 40, each: int = 6) -> None:
    """Class folders of 32 x 32 pictures."""
    rng = np.random.default_rng(0)
    plane = np.array([[1, -1, 0], [1, 1, -2]]) / np.array([[2**0.5], [6**0.5]])  # at a right angle to grey
    for kind in range(classes):
        angle = 2 * np.pi * kind / classes
        hue = 45 * (np.cos(angle) * plane[0] + np.sin(angle) * plane[1])
        (folder / f"class{kind:02d}").mkdir(parents=True)
        for i in range(each):
            pixels = 128 + hue + rng.normal(0, 30) + rng.normal(0, 20, (32, 32, 3)) + rng.normal(0, 3, 3)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"class{kind:02d}" / f"{i}.png")
