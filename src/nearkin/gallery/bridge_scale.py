"""What a similarity to a bridged row means: a similarity to a row of the new encoder that is as rare.

A mapped row is a prediction, so its cosines lie lower and closer together than those of rows that the new encoder made.
A scale, measured on items that played no part in the fit, takes each cosine to the one with the same share of pairs
above it. On that scale both kinds of rows are ranked together, and one threshold serves both. It needs no labels.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.gallery.schema import Floats

__all__ = ["Scale", "measure_scale", "read_scale"]

KNOTS = 64
MOST = 3000  # items whose pairs are compared
LARGEST = 1 - 1e-5  # of a bridged row: 1 is for the very same item


class Scale(NamedTuple):
    """Ascending cosines of bridged rows, and the similarities that they stand for; between them a line."""

    cosine: tuple[float, ...]
    similarity: tuple[float, ...]

    def __call__(self, cosine: Any) -> NDArray[Any]:
        """Strictly ascending, so that the order among bridged rows stays."""
        return np.asarray(np.interp(cosine, self.cosine, self.similarity), cosine.dtype)


def measure_scale(new: Floats, bridged: Floats) -> Scale:
    """From items that the bridge was not fitted on: embeddings (n, D) by the new encoder, and their mapped old ones.

    Equal quantiles of all pairs of different items, dense where they are rare.
    """
    new, bridged = new[:MOST], bridged[:MOST]
    other = ~np.eye(len(new), dtype=bool)
    cosines, similarities = (new @ bridged.T)[other], (new @ new.T)[other]
    shares = 1 - np.geomspace(0.98, 1 / len(cosines), KNOTS)
    ends = ([-1.0], [1.0]), ([-1.0], [LARGEST])
    columns = [
        np.concatenate([low, np.quantile(values, shares).astype(np.float64), high])
        for values, (low, high) in zip((cosines, similarities), ends, strict=True)
    ]
    x, y = columns
    rising = np.concatenate([[True], np.diff(np.maximum.accumulate(x)) > 1e-9])
    x, y = x[rising], np.maximum.accumulate(y[rising])
    y = np.minimum(y + 1e-12 * np.arange(len(y)), LARGEST)
    return Scale(tuple(x.tolist()), tuple(y.tolist()))


def read_scale(knots: Any) -> Scale:
    """From what a gallery keeps; a ValueError where that is no scale."""
    x, y = np.array(knots, np.float64)
    if not x.size or not np.isfinite([x, y]).all() or (np.diff([x, y]) < 0).any():
        raise ValueError("a scale must be finite and ascending")
    return Scale(tuple(x.tolist()), tuple(y.tolist()))
