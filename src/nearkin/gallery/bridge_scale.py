"""What a similarity to a bridged row means: a similarity to a row of the new encoder that is as rare, and error rates.

A mapped row is a prediction, so its cosines lie lower and closer together than those of rows that the new encoder made.
A scale, measured on items that played no part in the fit, takes each cosine to the one with the same share of pairs
above it. On that scale both kinds of rows are ranked together, and one threshold serves both. It needs no labels; error
rates do, and are measured for queries of the new encoder against bridged rows, new rows and a mixture of both.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.evaluation.verification import class_rates
from nearkin.evaluation.verification.class_rates import Against
from nearkin.gallery import calibration
from nearkin.gallery.schema import Floats

__all__ = ["Scale", "measure_across", "measure_scale"]

KNOTS = 64
MOST = 3000  # items whose pairs are compared
LARGEST = 1 - 1e-5  # of a bridged row: 1 is for the very same item


class Scale(NamedTuple):
    """Ascending cosines of bridged rows, and the similarities that they stand for; between them a line."""

    cosine: tuple[float, ...]
    similarity: tuple[float, ...]

    def __call__(self, cosine: NDArray[Any]) -> NDArray[Any]:
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


def measure_across(
    new: Floats,
    bridged: Floats,
    labels: Sequence[str],
    scale: Scale,
    seed: int = 0,
    groups: Sequence[str] | None = None,
) -> dict[str, Any]:
    """`calibration.measure` of the new encoder, and under "bridged" the same curves for queries against bridged rows.

    Items and classes must have played no part in the fit of the bridge. Bounds of the FAR hold for either kind of row
    and for labels that have both: they are the largest of the three.
    """
    _, codes = np.unique(np.array(labels, dtype=str), return_inverse=True)
    content = calibration.measure(torch.from_numpy(new), torch.from_numpy(codes), seed, groups)
    bursts = None if groups is None else calibration.numbers(groups)
    rows, classes = calibration.select(new, codes, seed, bursts)
    thresholds = np.array(content["thresholds"])
    mixed = np.random.default_rng([seed, 3]).random(len(new)) < 0.5
    some = np.where(mixed[:, None], bridged, rows)

    def scaled(near: NDArray[np.float32], references: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.where(mixed[references], scale(near), near)

    across = Against(bridged, lambda near, _: scale(near)), Against(some, scaled)
    curves: dict[str, Any] = {}
    for examples, enough in calibration.classes_with(classes, bursts):
        rates = [
            class_rates.impostor_rates(
                class_rates.accepts(rows, enough, thresholds, examples, against), content["confidence"]
            )
            for against in across
        ]
        scores = class_rates.genuine_groups(rows, enough, examples, seed, bursts, across[0])
        plain = content["examples"][str(examples)]
        bound = np.maximum.reduce([np.array(plain["far_bound"]), *(rate.bound for rate in rates)])
        ratio = calibration.log_ratio(rates[0].far, scores, thresholds, len(enough))
        curves[str(examples)] = {
            "far": rates[0].far.tolist(),
            "far_bound": bound.tolist(),
            "tar": class_rates.true_accepts(scores, thresholds).mean(0).tolist(),
            "log_ratio": ratio._asdict(),
        }
    return content | {"bridged": curves}
