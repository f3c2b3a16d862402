"""The input of a report, checked once: later code relies on its shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks
from nearkin.core.relations import UNKNOWN

__all__ = ["Findings", "NearPair", "PairHeat", "check", "usable"]


class NearPair(NamedTuple):
    """Two pictures that are nearly the same, as pixels where they can be shown, and what is said of each."""

    pictures: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    names: tuple[str, str]
    parts: tuple[str, str]
    similarity: float
    dropped: bool


class PairHeat(NamedTuple):
    """Which part of two items matched: both as the encoder sees them, and what each place adds to the similarity."""

    similarity: float
    pictures: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    heats: tuple[NDArray[np.float64], NDArray[np.float64]]  # (h, w)
    missing: tuple[float, float]  # similarity minus the sum of each


@dataclass(frozen=True)
class Findings:
    """A run: its recipe and data, its history and results, and the embeddings of the test items.

    `labels` where there are classes (-1 is unknown), `targets` where there are only continuous labels; with both, the
    classes are shown. `history` has the lines of metrics.jsonl, `results` the content of results.json.
    `data["closed"]`: the test classes were trained on, so the page does not call them unseen.
    """

    title: str
    recipe: dict[str, Any]
    data: dict[str, Any]
    history: list[dict[str, Any]]
    results: dict[str, Any]
    embeddings: Tensor  # (N, D)
    labels: Tensor | None  # (N,)
    targets: Tensor | None  # (N,) or (N, K)
    classes: list[str]  # label c is classes[c]
    names: list[str]  # (N,)
    picture: Callable[[int], NDArray[np.uint8]] | None = None  # item i as (H, W) or (H, W, 3)
    notes: list[str] = field(default_factory=list)
    near: list[NearPair] = field(default_factory=list)  # near-duplicates across parts, the most similar first
    explain: Callable[[Sequence[tuple[int, int]]], list[PairHeat]] | None = None  # pairs of items; or [] if it cannot
    free_length: bool = False  # embeddings are not scaled to unit length: their lengths are shown as quality


def check(findings: Findings) -> None:
    """Raises if shapes do not match."""
    x = checks.rows("embeddings", findings.embeddings)
    if len(findings.names) != len(x):
        raise ValueError(f"names must have one entry per row of embeddings: {len(x)} rows, {len(findings.names)} names")
    if findings.labels is not None:
        checks.class_ids("labels", findings.labels, x)
        checks.in_range(findings.labels.cpu(), len(findings.classes))
    if findings.targets is not None:
        targets = findings.targets
        if targets.dim() not in (1, 2) or len(targets) != len(x):
            raise ValueError(
                f"targets must be (rows,) or (rows, K), one entry per row of embeddings: {len(x)} rows, "
                f"got {tuple(targets.shape)}"
            )


def usable(findings: Findings) -> Tensor:
    """Items that can be shown: with a finite embedding, and a known label or a finite target where there are any."""
    keep = findings.embeddings.isfinite().all(1).cpu()
    if findings.labels is not None:
        keep &= (findings.labels != UNKNOWN).cpu()
    elif findings.targets is not None:
        keep &= findings.targets.reshape(len(keep), -1).double().isfinite().all(1).cpu()
    return torch.nonzero(keep).squeeze(1)
