"""The calibration of a gallery by its own labels, where its encoder is frozen: it has learned from none of them.

A label is judged by a calibration without it (`calibration.measure_left_out`). What a similarity means depends on the
pictures, so the calibration belongs to the gallery and not to the encoder. It can be made again, and is kept in a file
beside a gallery that is a file, in the cache for one in PostgreSQL.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nearkin.core import files
from nearkin.core.paths import cache_dir
from nearkin.core.versions import version_of
from nearkin.gallery import calibration, results
from nearkin.gallery.results import Calibrator
from nearkin.gallery.schema import UNLABELLED, Facts
from nearkin.gallery.stores import Store
from nearkin.models.frozen import is_encoder_name

if TYPE_CHECKING:
    from nearkin.gallery.gallery import Gallery

__all__ = ["calibrate_gallery", "calibration_path", "is_current", "load"]

ENDING = ".calibration.json"


def calibration_path(store: Store, facts: Facts) -> Path:
    if store.kind == "sqlite":
        return Path(store.where + ENDING)
    return cache_dir() / "calibrations" / f"{facts.gallery}{ENDING}"


def load(store: Store, facts: Facts) -> tuple[Calibrator | None, str]:
    """The calibration of a gallery; or None, and a sentence that says why."""
    again = f"nearkin gallery calibrate {store.where}"
    path = calibration_path(store, facts)
    missing = "the gallery is not calibrated, so there is only a similarity; nearkin gallery calibrate G does it"
    return results.read_calibration(path, facts.fingerprint or "", again, missing)


def is_current(store: Store, facts: Facts) -> bool:
    """Whether there is a calibration of the rows as they are now."""
    path = calibration_path(store, facts)
    try:
        plain = {} if files.is_link(path) else files.read_json(path)
        return bool(plain.get("state") == _state(facts) and load(store, facts)[0] is not None)
    except (OSError, ValueError):
        return False


def calibrate_gallery(gallery: "Gallery") -> dict[str, Any]:
    """Measures a gallery by its own labels and writes what was measured; from now on `gallery` answers by it."""
    store = gallery._store
    facts = store.facts()
    assert facts is not None
    if facts.run is None or not is_encoder_name(facts.run):
        run = facts.run or "RUN"
        raise ValueError(
            f"{store.where}: only a gallery of a frozen encoder is calibrated by its own labels, which {run} may have "
            f"learned from; calibrate the run: nearkin gallery calibrate {run}"
        )
    vectors, labels = _sample(gallery)
    plain = calibration.measure_left_out(torch.from_numpy(vectors), labels) | {
        "format": results.FORMAT,
        "nearkin": version_of("nearkin"),
        "encoder": facts.fingerprint,
        "part": "own labels",
        "items": len(labels),
        "state": _state(facts),
    }
    plain[results.CHECKSUM] = files.digest(plain)
    path = calibration_path(store, facts)
    with files.explained(f"{path}", "make room, or let it be written there"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(
            path, json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")), follow=False
        )
    gallery.use_calibration(*load(store, facts))
    return plain


def _state(facts: Facts) -> list[Any]:
    """Changes whenever a row is added, removed or relabelled."""
    return [facts.gallery, facts.rows, facts.next_id, facts.changes]


def _sample(gallery: "Gallery", seed: int = 0) -> tuple[np.ndarray[Any, np.dtype[np.float32]], list[str]]:
    """Vectors (n, D) and labels: as many as `calibration` looks at, evenly of all labels, in bounded memory."""
    draw = np.random.default_rng([seed, 2])
    counts = {label: count for label, count in gallery.labels().items() if label != UNLABELLED}
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
