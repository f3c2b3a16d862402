"""Pools a feature map or tokens to one vector: average, max, GeM, average + max; computed in float32."""

import torch
from torch import Tensor, nn

from nearkin.core import checks

__all__ = ["POOLINGS", "Pooling"]

POOLINGS = ("avg", "max", "gem", "avg+max")
SMALLEST = 1e-6  # GeM clamps its inputs to this, as its authors do: a power needs positive numbers
POWER = 3.0  # initial p of GeM


class Pooling(nn.Module):
    """(B, C, H, W), tokens (B, T, C) or vectors (B, C) → (B, F); half precision is pooled in float32.

    avg, max; gem: (mean x^p)^(1/p) of x clamped to 1e-6, p learned, 3 at first, never below 1 (p = 1 is the average,
    p → ∞ the max; Radenović et al. 2018, arXiv:1711.02512, eq. 3); avg+max: the sum of both, as Proxy-Anchor has it.
    grid: a map is pooled in each cell of grid x grid and the cells are concatenated, so F = C * grid^2 and the vector
    keeps the layout. Vectors are returned unchanged.
    """

    def __init__(self, kind: str = "avg", grid: int = 1) -> None:
        super().__init__()
        checks.one_of("pooling", kind, POOLINGS)
        checks.integer("grid", grid, 1)
        self.kind, self.grid = kind, grid
        if kind == "gem":
            self.p = nn.Parameter(torch.tensor(POWER))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        if x.dim() == 2:
            return x
        if x.dim() == 3:
            return self._pool(x.transpose(1, 2))  # (B, C, T)
        return torch.cat([self._pool(cell.flatten(2)) for cell in self._cells(x)], 1)

    def _cells(self, x: Tensor) -> list[Tensor]:
        """The grid x grid cells of the map, row by row; where a side does not divide, cells overlap by a line."""
        rows, columns = (
            [(i * side // self.grid, -(-(i + 1) * side // self.grid)) for i in range(self.grid)] for side in x.shape[2:]
        )
        return [x[:, :, top:bottom, left:right] for top, bottom in rows for left, right in columns]

    def _pool(self, x: Tensor) -> Tensor:
        """Over the last axis."""
        if self.kind == "avg":
            return x.mean(-1)
        if self.kind == "max":
            return x.amax(-1)
        if self.kind == "avg+max":
            return x.mean(-1) + x.amax(-1)
        return _gem(x, self.p)

    def extra_repr(self) -> str:
        return f"{self.kind}, grid={self.grid}"


def _gem(x: Tensor, p: Tensor) -> Tensor:
    """Relative to the largest value, so that no power overflows or underflows; the result does not depend on it."""
    with torch.autocast(x.device.type, enabled=False):
        p = p.to(x.dtype).clamp(min=1.0)
        x = x.clamp(min=SMALLEST)
        top = x.detach().amax(-1, keepdim=True)
        mean = (x / top).pow(p).mean(-1)  # between 1/n and 1
        return top.squeeze(-1) * mean.pow(1 / p)
