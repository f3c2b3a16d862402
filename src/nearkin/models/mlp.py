"""A backbone for vectors: linear layers with LayerNorm, GELU and dropout, residual where the width stays."""

from collections.abc import Sequence

from torch import Tensor, nn

from nearkin.core import checks

__all__ = ["MLP"]


class MLP(nn.Module):
    """(B, features) → (B, hidden[-1]).

    LayerNorm rather than BatchNorm: no cross-sample operations, so a batch encoded in chunks equals the batch encoded
    at once. A layer as wide as its input has a residual connection. `hidden=()` returns the vectors unchanged.
    """

    def __init__(self, features: int, hidden: Sequence[int] = (512,), dropout: float = 0.0) -> None:
        super().__init__()
        checks.integer("features", features, 1)
        if isinstance(hidden, str) or not isinstance(hidden, Sequence):
            raise TypeError(f"hidden must be a list of widths, got {hidden!r}")
        for width in hidden:
            checks.integer("hidden", width, 1)
        checks.number("dropout", dropout)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be >= 0 and < 1, got {dropout}")
        self.widths = (features, *hidden)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(before, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout))
            for before, width in zip(self.widths, self.widths[1:], strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        for before, width, layer in zip(self.widths, self.widths[1:], self.layers, strict=False):
            x = x + layer(x) if before == width else layer(x)
        return x
