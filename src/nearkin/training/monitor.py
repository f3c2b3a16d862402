"""Watches a training: NaN, collapse, a loss with nothing left to do, proxies that stand still. Says what to try."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Diverged", "Monitor", "spread_and_rank"]

_ROWS = 256  # of a batch, enough to see a collapse
COLLAPSED = 1e-3  # spread of unit rows: 0 all in one spot, 1 no common direction
FLAT = 1.2  # effective rank: everything on a line
_PATIENCE = 5, 100  # looks in a row, and steps, before it counts: early steps may look like anything
STILL = 1e-5  # relative change of the loss's own parameters over an epoch


class Diverged(ValueError):
    """Training cannot go on; the message says why and what to try."""


@torch.no_grad()
def spread_and_rank(embeddings: Tensor) -> Tensor:
    """(2,) on the device: 1 - |mean unit row|², and the effective rank (Σλ)² / Σλ² of the covariance of unit rows.

    Of at most 256 rows, evenly taken. Nothing is decomposed and nothing waits: λ is never needed by itself.
    """
    step = max(1, len(embeddings) // _ROWS)
    rows = nn.functional.normalize(embeddings.detach()[::step][:_ROWS].float(), dim=1)
    mean = rows.mean(0)
    centred = rows - mean
    total, squares = centred.square().sum(), (centred @ centred.T).square().sum()
    rank = torch.where(squares > 1e-20, total.square() / squares.clamp(min=1e-20), 0.0)
    return torch.stack([(1 - mean.square().sum()).clamp(min=0), rank])


class Monitor:
    """Looks at the numbers that the loop reads anyway, every few steps; keeps what it has said, so says it once."""

    def __init__(self, classes: int | None, dim: int, on_collapse: str) -> None:
        self.flat_possible = (classes is None or classes >= 4) and dim >= 3
        self.on_collapse = on_collapse
        self.seen: dict[str, tuple[int, int]] = {}  # of each trouble: looks in a row that saw it, and since which step
        self.said: list[str] = []

    def finite(self, step: int, loss: float, weights: bool = True) -> None:
        """Raises `Diverged` where the loss is no number, or the weights are not finite."""
        if not math.isfinite(loss) or not weights:
            what = "the weights are not finite" if math.isfinite(loss) else f"the loss is {loss}"
            raise Diverged(
                f"{what} at step {step}: try a smaller optimizer.lr, optimizer.clip=1, or "
                f"training.precision=fp32; the last checkpoint is from before"
            )

    def look(self, step: int, loss: float, gradient: float, spread: float, rank: float) -> list[str]:
        """Warnings that are new at a step; raises `Diverged` where going on makes no sense."""
        self.finite(step, loss)
        notes = []
        gone = spread < COLLAPSED or (self.flat_possible and rank < FLAT)
        if self._lasts("collapse", gone, step):
            sentence = (
                f"the embeddings have collapsed (spread {spread:.1e}, effective rank {rank:.1f}) by step {step}: try "
                f"a smaller optimizer.lr, a longer schedule.warmup, another loss.selection than hard, or a loss "
                f"without mining such as supcon"
            )
            if self.on_collapse == "stop":
                raise Diverged(sentence + "; training.on_collapse=warn goes on")
            notes += self._once("collapse", sentence)
        if self._lasts("dead", loss == 0 and gradient == 0, step):
            notes += self._once(
                "dead",
                f"the loss is exactly 0 and has no gradient since before step {step}: nothing is left to learn from; "
                f"try a larger loss.margin, a harder loss.selection, larger batches, or the sampler hard-classes",
            )
        return notes

    def epoch(self, number: int, before: Mapping[str, Tensor], loss: nn.Module) -> list[str]:
        """After an epoch: whether the loss's own parameters, those that `before` has, have moved since then."""
        still = []
        for name, parameter in loss.named_parameters():
            start = before.get(name)
            if start is None:
                continue
            moved = float((parameter.detach() - start).norm() / start.norm().clamp(min=1e-12))
            if moved < STILL:
                still.append(name)
        if not still:
            return []
        return self._once(
            "still",
            f"{', '.join(still)} of the loss did not move in epoch {number}: raise optimizer.loss_scale, or check that "
            f"the loss gives them a gradient",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {name: list(place) for name, place in self.seen.items()}, "said": self.said}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = {name: (looks, since) for name, (looks, since) in state["seen"].items()}
        self.said = list(state["said"])

    def _lasts(self, trouble: str, there: bool, step: int) -> bool:
        looks, since = self.seen.get(trouble, (0, step))
        self.seen[trouble] = (looks + 1, since) if there else (0, step)
        return there and looks + 1 >= _PATIENCE[0] and step - since >= _PATIENCE[1]

    def _once(self, topic: str, sentence: str) -> list[str]:
        if topic in self.said:
            return []
        self.said.append(topic)
        return [sentence]
