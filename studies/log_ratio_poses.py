"""Log-ratio with labels that are vectors: figures in similar poses, found by pictures.

    python studies/log_ratio_poses.py
"""

import math

import torch
from torch import Tensor

# Joints of a figure whose hips are at 0 and whose back is 1 long; y points up.
JOINTS = ("head", "neck", "left elbow", "left hand", "right elbow", "right hand")
JOINTS = (*JOINTS, "left knee", "left foot", "right knee", "right foot")
BONES = ((-1, 1), (1, 0), (1, 2), (2, 3), (1, 4), (4, 5), (-1, 6), (6, 7), (-1, 8), (8, 9))  # -1: the hips


def poses(number: int, generator: torch.Generator) -> Tensor:
    """Joints (N, 10, 2): a walk with its phase and stride, arms lifted by some angle, a lean, and a little of each limb's own."""
    phase, stride, left, right, lean = (torch.rand(number, generator=generator) for _ in range(5))
    own = 0.1 * torch.randn(number, 10, generator=generator)
    swing = (2 * math.pi * phase).sin() * (0.2 + 0.6 * stride)
    back = 0.9 * (lean - 0.5) + own[:, 0]
    angles = {  # from straight down, counter-clockwise; each bone's own
        "arm left": -0.3 - 2.4 * left + 0.4 * swing + own[:, 1],
        "arm right": 0.3 + 2.4 * right - 0.4 * swing + own[:, 2],
        "leg left": -0.15 - swing + own[:, 3],
        "leg right": 0.15 + swing + own[:, 4],
    }
    bend = {
        "arm left": -0.9 * left + own[:, 5],
        "arm right": 0.9 * right + own[:, 6],
        "leg left": 0.7 * (2 * math.pi * phase).cos().clamp(min=0) + own[:, 7],
        "leg right": -0.7 * (-(2 * math.pi * phase).cos()).clamp(min=0) + own[:, 8],
    }

    def away(angle: Tensor, length: float) -> Tensor:
        return length * torch.stack([angle.sin(), -angle.cos()], 1)

    neck = away(math.pi + back, 1.0)
    joints = [neck + away(math.pi + back + own[:, 9], 0.45), neck]
    for limb in angles:
        start, lengths = (neck, (0.55, 0.5)) if limb.startswith("arm") else (torch.zeros_like(neck), (0.7, 0.7))
        turn = angles[limb] + back if limb.startswith("arm") else angles[limb]
        middle = start + away(turn, lengths[0])
        joints += [middle, middle + away(turn + bend[limb], lengths[1])]
    return torch.stack(joints, 1)


def drawn(joints: Tensor, generator: torch.Generator, side: int = 32) -> Tensor:
    """Pictures (N, 1, side, side): place, size, build, thickness, shades, light and two stray lines are chance."""
    number = len(joints)

    def chance(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(number, *shape, generator=generator)

    points = torch.cat([joints, torch.zeros(number, 1, 2)], 1) * chance(0.85, 1.15, 1, 2)  # tall or broad
    points = points * chance(5.0, 7.5, 1, 1) * torch.tensor([1.0, -1.0]) + side / 2 + chance(-3, 3, 1, 2)
    ends = torch.stack([torch.stack([points[:, a], points[:, b]], 1) for a, b in BONES], 1)  # (N, bones, 2, 2)
    stray = chance(0, side, 2, 2, 2)
    ends = torch.cat([ends, stray], 1)
    thick = torch.cat([chance(0.8, 1.6, 1).expand(-1, len(BONES)), chance(0.3, 0.8, 2)], 1)
    shade = torch.tensor([0.9, 0.9, 0.6, 0.6, 1.0, 1.0, 0.6, 0.6, 1.0, 1.0]).expand(number, -1) * chance(0.7, 1.0, 1)
    shade = torch.cat([shade, chance(0.3, 0.8, 2)], 1)
    grid = torch.stack(torch.meshgrid(*[torch.arange(side) + 0.5] * 2, indexing="xy"), -1).view(1, -1, 2)
    light = chance(-0.5, 0.5, 2) / side
    image = ((grid - side / 2) * light[:, None]).sum(-1) + chance(0.0, 0.25, 1)
    for bone in range(ends.shape[1]):
        start, step = ends[:, bone, None, 0], (ends[:, bone, 1] - ends[:, bone, 0])[:, None]
        along = ((grid - start) * step).sum(-1) / step.square().sum(-1).clamp(min=1e-6)
        apart = (grid - start - along.clamp(0, 1)[..., None] * step).norm(dim=-1)
        ink = (thick[:, bone, None] + 0.5 - apart).clamp(0, 1)
        image = image * (1 - ink) + ink * shade[:, bone, None]
    head = (grid - points[:, None, 0]).norm(dim=-1)
    ink = (2.3 - head).clamp(0, 1)
    image = image * (1 - ink) + ink * shade[:, :1]
    image = image + 0.05 * torch.randn(image.shape, generator=generator)
    return image.clamp(0, 1).view(number, 1, side, side)
