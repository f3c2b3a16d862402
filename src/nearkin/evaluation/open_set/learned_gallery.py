"""A gallery of the enrolled half, in memory: learned from its own rows and asked as `nearkin.gallery` does."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import distances
from nearkin.evaluation.arrays import Counts, Floats
from nearkin.evaluation.open_set.draws import Draw
from nearkin.evaluation.recognition import NEAREST, Hits, LabelSums, Part, Recogniser, fit

__all__ = ["LearnedGallery"]

COMPETE = 100_000  # enrolled rows up to which all labels compete, as in a gallery; beyond, those of the nearest rows
ROWS = 4096  # enrolled, at a time


class LearnedGallery:
    """The enrolled rows of a draw, and what has been learned from them."""

    def __init__(self, embeddings: Tensor, draw: Draw) -> None:
        labels, examples = draw.enrolled.shape
        self._codes = np.repeat(np.arange(labels), examples)
        self._rows = _unit(embeddings, draw.enrolled.ravel())
        self._only_near = len(self._rows) > COMPETE
        counts = np.full(labels, examples, np.int64)
        self.recogniser: Recogniser = fit(self._parts, counts, only_near=self._only_near)
        sums = LabelSums.none(labels, self.recogniser.basis.shape[1])
        for part in self._parts():
            sums.add(self.recogniser.rows(part.vectors), part.codes)
        self._scores = self.recogniser.scores(sums.counts, sums.sums)

    def _parts(self) -> Iterator[Part]:
        ids = np.arange(1, len(self._rows) + 1)
        for start in range(0, len(self._rows), ROWS):
            some = slice(start, start + ROWS)
            yield Part(self._rows[some], self._codes[some], ids[some])

    def answers(self, embeddings: Tensor, probes: Counts, budget: int) -> tuple[Counts, Floats, Floats]:
        """(n,) the best label, (n, 3) shares of the events at even prior, (n,) scores; some searches at a time."""
        enrolled, parts = torch.from_numpy(self._rows), []
        cells = 2 * len(self._rows) + 6 * len(self._scores.counts) + 4 * embeddings.shape[1]  # of 8 bytes, per search
        step = max(1, budget // (8 * cells))
        for some in (probes[start : start + step] for start in range(0, len(probes), step)):
            rows = _unit(embeddings, some)
            near = (torch.from_numpy(rows) @ enrolled.T).topk(min(NEAREST, len(enrolled)), dim=1)
            hits = Hits(near.values.double().numpy(), self._codes[near.indices.numpy()])
            coordinates = self.recogniser.rows(rows).astype(np.float64)
            found = self.recogniser.answer(coordinates, hits, self._scores, only_near=self._only_near)
            parts.append((found.best, found.shares, found.score))
        best, shares, score = (np.concatenate(column) for column in zip(*parts, strict=True))
        return best, shares, score


def _unit(embeddings: Tensor, rows: Counts) -> NDArray[Any]:
    """Rows of length 1, as a gallery stores them."""
    some = embeddings[torch.from_numpy(rows).to(embeddings.device)]
    return distances.unit(some.double()).float().cpu().numpy()
