"""Detects NaN, collapse, a loss without gradient and proxies that do not move, and suggests what to try."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.core import devices
from nearkin.core.errors import Diverged
from nearkin.evaluation import diagnosis

__all__ = ["Monitor", "geometry"]

_ROWS = 256  # of a batch, enough to see a collapse
COLLAPSED = 1e-3  # spread of unit rows: 0 all equal, 1 no common direction
FLAT = 0.91  # share of the variance along one direction: everything on a line
_PATIENCE = 5, 100  # checks in a row, and steps, before it counts: early steps may look like anything
STILL = 1e-5  # relative change of the loss's own parameters over an epoch


@torch.no_grad()
def geometry(embeddings: Tensor) -> tuple[float, float, float]:
    """Geometry of the unit rows of a batch: spread 1 - |mean|², effective rank, share of the variance along one line.

    Of at most 256 rows, evenly taken. The effective rank is that of `evaluation.diagnose`; it is no use as a warning,
    since a little noise in many dimensions hides a line from it, which the share shows. Waits for the device; the
    smaller of rows x rows and D x D is decomposed on the CPU, in 2 ms at 128.
    """
    step = max(1, len(embeddings) // _ROWS)
    rows = embeddings.detach()[::step][:_ROWS].to(devices.exact(embeddings.device))
    rows = nn.functional.normalize(rows.double(), dim=1)
    if not bool(rows.isfinite().all()):
        raise Diverged("the embeddings are not finite: try a smaller optimizer.lr, or training.precision=fp32")
    mean = rows.mean(0)
    centred = rows - mean
    square = centred @ centred.T if len(rows) < rows.shape[1] else centred.T @ centred
    variances = torch.linalg.eigvalsh(square.cpu() / len(rows)).clamp(min=0)  # ascending
    total = float(variances.sum())
    line = float(variances[-1]) / total if total > 1e-20 else 1.0
    return max(0.0, 1 - float(mean.square().sum())), diagnosis.effective_rank(variances), line


class Monitor:
    """Checks the numbers that the loop reads anyway, every few steps; gives each warning once."""

    def __init__(self, classes: int | None, dim: int, on_collapse: str) -> None:
        self.flat_possible = (classes is None or classes >= 4) and dim >= 3
        self.on_collapse = on_collapse
        self.streaks: dict[str, tuple[int, int]] = {}  # per problem: checks in a row that saw it, and since which step
        self.warned: list[str] = []

    def finite(self, step: int, loss: float, weights: bool = True) -> None:
        """Raises `Diverged` if the loss or the weights are not finite."""
        if not math.isfinite(loss) or not weights:
            problem = "the weights are not finite" if math.isfinite(loss) else f"the loss is {loss}"
            raise Diverged(
                f"{problem} at step {step}: try a smaller optimizer.lr, optimizer.clip=1, or "
                f"training.precision=fp32; the last checkpoint is from before"
            )

    def check(
        self, step: int, loss: float, gradient: float, spread: float, effective_rank: float, line_share: float
    ) -> list[str]:
        """New warnings at a step; raises `Diverged` if continuing makes no sense."""
        self.finite(step, loss)
        notes = []
        collapsed = spread < COLLAPSED or (self.flat_possible and line_share > FLAT)
        if self._lasts("collapse", collapsed, step):
            sentence = (
                f"the embeddings have collapsed (spread {spread:.1e}, effective rank {effective_rank:.1f}, "
                f"{100 * line_share:.0f} % of the variance along one direction) by step {step}: "
                f"try a smaller optimizer.lr, a longer schedule.warmup, another loss.selection than hard, or a loss "
                f"without mining such as supcon"
            )
            if self.on_collapse == "stop":
                raise Diverged(sentence + "; training.on_collapse=warn continues")
            notes += self._once("collapse", sentence)
        if self._lasts("dead", loss == 0 and gradient == 0, step):
            notes += self._once(
                "dead",
                f"the loss is exactly 0 and has no gradient since before step {step}: nothing is left to learn from; "
                f"try a larger loss.margin, a harder loss.selection, larger batches, or the sampler hard-classes",
            )
        return notes

    def epoch(self, number: int, before: Mapping[str, Tensor], loss: nn.Module) -> list[str]:
        """After an epoch: warns if the loss's own parameters have not moved since `before`."""
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
        return {"seen": {name: list(streak) for name, streak in self.streaks.items()}, "said": self.warned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.streaks = {name: (checks, since) for name, (checks, since) in state["seen"].items()}
        self.warned = list(state["said"])

    def _lasts(self, problem: str, present: bool, step: int) -> bool:
        checks, since = self.streaks.get(problem, (0, step))
        self.streaks[problem] = (checks + 1, since) if present else (0, step)
        return present and checks + 1 >= _PATIENCE[0] and step - since >= _PATIENCE[1]

    def _once(self, topic: str, sentence: str) -> list[str]:
        if topic in self.warned:
            return []
        self.warned.append(topic)
        return [sentence]
