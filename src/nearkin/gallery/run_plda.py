"""The PLDA model of a run: how its own classes scatter, by which the classes of other items are found.

It is fitted on the training classes of the run's own source when it is first asked for, and kept in the run's folder.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from nearkin import evaluation, training
from nearkin.core import files
from nearkin.core.errors import UnfittingWeights
from nearkin.data.sources import PLAIN, Reading
from nearkin.evaluation import PLDA
from nearkin.gallery.gallery import Gallery
from nearkin.gallery.items import EncoderInfo, encoder_info

__all__ = ["plda_of", "plda_of_gallery", "stored_plda"]

FORMAT = 1
Progress = Callable[[int, int], None]


def plda_of(
    run: str | Path,
    dim: int | None = None,
    views: int = 1,
    device: str = "auto",
    progress: Callable[[str], Progress | None] | None = None,
    reading: Reading = PLAIN,
) -> tuple[PLDA | None, str]:
    """The model of a run, and "": from its folder, else fitted and written there; or None, and a sentence why.

    reading: how the run's own source is read, see `data.load`.
    """
    info, told = encoder_info(run, dim), progress or (lambda _: None)
    if info.frozen is not None:
        return None, ""
    if (model := stored_plda(info, views)) is not None:
        return model, ""
    try:
        options: dict[str, Any] = {"dim": dim, "views": views, "device": device, "reading": reading}
        parts = [
            training.embed_source(run, part=part, **options, progress=told(f"embedding its {part} part"))
            for part in ("train", "val")
        ]
        train, val = parts
        if train.labels is None or val.labels is None:
            return None, "the run has learned from targets, not classes, so groups are by cosines alone"
        model = evaluation.fit_plda(
            train.embeddings,
            train.labels,
            validation=val.embeddings,
            validation_labels=val.labels,
            progress=told("fitting the model of its classes"),
        )
    except (OSError, ValueError, UnfittingWeights) as error:
        return None, f"the run's own classes are not used, groups are by cosines alone: {error}"
    try:
        _write(info, views, model)
    except OSError as error:
        return model, f"the model of the run's classes could not be kept in its folder ({error.strerror})"
    return model, ""


def stored_plda(info: EncoderInfo, views: int = 1) -> PLDA | None:
    """The model in the folder of a run; None where there is none of this encoder, length and views, or a link."""
    path = _path(info, views)
    if files.is_link(path):
        return None
    try:
        with np.load(path, allow_pickle=False) as plain:
            if int(plain["format"]) != FORMAT or str(plain["encoder"]) != info.fingerprint:
                return None
            tried = [(float(spread), float(score)) for spread, score in plain["tried"]]
            arrays = [np.asarray(plain[name], np.float64) for name in ("mean", "basis", "between")]
            return PLDA(arrays[0], arrays[1], arrays[2], float(plain["spread"]), tried)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def plda_of_gallery(gallery: Gallery) -> PLDA | None:
    """The model in the folder of the run that a gallery was enrolled with; None where there is none."""
    facts = gallery._store.facts()
    if facts is None or facts.run is None or facts.fingerprint is None:
        return None
    try:
        info = encoder_info(facts.run, facts.dim)
    except (OSError, ValueError):
        return None
    return stored_plda(info) if info.frozen is None and info.fingerprint == facts.fingerprint else None


def _path(info: EncoderInfo, views: int) -> Path:
    ending = ("" if info.short is None else f"-{info.short}") + ("" if views == 1 else f"-views{views}")
    return info.run / f"plda{ending}.npz"


def _write(info: EncoderInfo, views: int, model: PLDA) -> None:
    out = io.BytesIO()
    tried = np.array(model.tried, np.float64).reshape(-1, 2)
    np.savez(
        out,
        format=np.array(FORMAT),
        encoder=np.array(info.fingerprint),
        mean=model.mean,
        basis=model.basis,
        between=model.between,
        spread=np.array(model.spread),
        tried=tried,
    )
    path = _path(info, views)
    files.refuse_link(path)
    files.write_bytes(path, out.getvalue())
