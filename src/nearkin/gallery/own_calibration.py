"""The calibration of a gallery by pairs of its own rows, where its encoder is frozen: it has learned from no label.

What a similarity means depends on the pictures, so the calibration belongs to the gallery and not to the encoder: it is
a note of its store.
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nearkin.core import files
from nearkin.core.versions import version_of
from nearkin.gallery import calibration, results
from nearkin.gallery.results import Calibrator
from nearkin.gallery.schema import UNLABELLED, Facts
from nearkin.gallery.stores import Store

if TYPE_CHECKING:
    from nearkin.gallery.gallery import Gallery

__all__ = ["KEY", "load", "measure_gallery"]

KEY = "calibration"


def load(store: Store, facts: Facts) -> tuple[Calibrator | None, str]:
    """The calibration of a gallery; or None, and a sentence that says why."""
    text, again = store.note(KEY), f"nearkin gallery calibrate {store.where}"
    if not text:
        return None, "the gallery is not calibrated, so there is only a similarity; nearkin gallery calibrate G does it"
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{store.where}: its calibration is damaged ({error}); {again} makes it again") from None
    return results.parse_calibration(plain, f"the calibration of {store.where}", facts.fingerprint or "", again)


def measure_gallery(gallery: "Gallery", facts: Facts) -> dict[str, Any]:
    """Measures pairs of a gallery's own rows, and keeps what was measured."""
    store = gallery._store
    vectors, labels = _sample(gallery)
    _, codes = np.unique(np.array(labels, dtype=str), return_inverse=True)
    plain = calibration.measure(torch.from_numpy(vectors), torch.from_numpy(codes)) | {
        "format": results.FORMAT,
        "nearkin": version_of("nearkin"),
        "encoder": facts.fingerprint,
        "part": "own labels",
        "items": len(labels),
    }
    plain[results.CHECKSUM] = files.digest(plain)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    store.edit(KEY, lambda _, labels_of: ({}, text))
    return plain


def _sample(gallery: "Gallery", seed: int = 0) -> tuple[np.ndarray[Any, np.dtype[np.float32]], list[str]]:
    """Vectors (n, D) and labels: as many as `calibration` looks at, evenly of all labels, in bounded memory."""
    draw = np.random.default_rng([seed, 2])
    counts = {label: count for label, count in gallery._store.stored_counts().items() if label != UNLABELLED}
    chosen = sorted(counts)
    if len(chosen) > calibration.CLASSES:
        chosen = [chosen[i] for i in draw.permutation(len(chosen))[: calibration.CLASSES]]
    most = max(2, calibration.ITEMS // max(1, len(chosen)))
    wanted = {label: set(draw.permutation(counts[label])[:most].tolist()) for label in chosen}
    seen = dict.fromkeys(chosen, 0)
    vectors, labels = [], []
    for hit, vector in gallery.rows():
        if hit.label not in wanted or hit.bridged:
            continue
        if seen[hit.label] in wanted[hit.label]:
            vectors.append(vector)
            labels.append(hit.label)
        seen[hit.label] += 1
    if not vectors:
        raise ValueError("none of the gallery's items has a label, so there is nothing to calibrate by")
    return np.stack(vectors), labels
