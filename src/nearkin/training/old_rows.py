"""The embeddings of all items by the encoder of an old run: computed once, and kept in the folder of the new one."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.core import files
from nearkin.dist.group import ProcessGroup
from nearkin.training.compatible import OldEncoder, open_old
from nearkin.training.loader import ItemStore, embed
from nearkin.training.own_objects import DatasetRows
from nearkin.training.prepare import Prepared, item_rows

__all__ = ["FILE", "OldRows", "old_rows"]

FILE = "old_embeddings.safetensors"
_STORED = ("stored", "fit", "channels")  # what decides the stored pixels of a picture

Callback = Callable[[dict[str, Any]], None]


class OldRows(NamedTuple):
    """rows (N, D) float32, of all items in a part; 0 for others. record: `OldEncoder.record`."""

    rows: Tensor
    record: dict[str, Any]


def old_rows(prepared: Prepared, folder: Path, callback: Callback, group: ProcessGroup) -> OldRows | None:
    """Reads them from the folder, or computes and writes them; None without an old run. All ranks call this.

    A run that resumes has the bits that it began with, and needs the old run no more.
    """
    record = prepared.report.get("compatible")
    if record is None:
        return None
    path, identity = folder / FILE, {"encoder": str(record["encoder"]), "data": prepared.fingerprint}
    if group.on_rank0("looking", lambda: _read(path, identity) is None):
        rows = _embedded(prepared, record, folder, callback, group)
        group.on_rank0("writing", lambda: _write(path, rows, identity))
        return OldRows(rows, record)
    rows_there = _read(path, identity)
    if rows_there is None:
        raise ValueError(f"{path}: rank {group.rank} cannot read what rank 0 can; all ranks need the same folder")
    return OldRows(rows_there, record)


def _embedded(
    prepared: Prepared, record: Mapping[str, Any], folder: Path, callback: Callback, group: ProcessGroup
) -> Tensor:
    recipe = prepared.recipe
    assert recipe.compatible.run is not None
    old = open_old(recipe.compatible.run)
    if old.fingerprint != record["encoder"]:
        raise ValueError(
            f"{old.run}: its encoder has changed since {folder}, which is to be compatible with it, was started; "
            f"start a new run"
        )
    device = group.device(recipe.device)
    pixels = group.first_on_machine("opening", lambda: _stored(old, prepared, callback))
    store = ItemStore(pixels, device, old.preparation.get("size"))
    indices = np.concatenate(list(prepared.part_indices().values()))

    def progress(done: int, total: int) -> None:
        callback({"event": "old_rows", "run": old.run, "done": done, "total": total})

    some = embed(old.encoder.to(device), store, indices, progress=progress, group=group)
    rows = torch.zeros(len(prepared.items), some.shape[1])
    rows[torch.from_numpy(indices)] = some
    return rows


def _stored(old: OldEncoder, prepared: Prepared, callback: Callback) -> Any:
    """The stored rows that the old encoder takes: this run's own, or pictures decoded as the old run decodes them."""
    if isinstance(prepared.rows, DatasetRows) or prepared.items.pictures is None:
        return prepared.rows
    theirs = {key: old.preparation[key] for key in _STORED}
    if all(prepared.preparation[key] == value for key, value in theirs.items()):
        return prepared.rows
    return item_rows(prepared.items, prepared.recipe.with_("data", **theirs), callback)[0]


def _write(path: Path, rows: Tensor, identity: Mapping[str, str]) -> None:
    from safetensors.torch import save as to_bytes

    with files.explained(str(path), f"make room, then nearkin train --resume {path.parent}"):
        files.write_bytes(path, to_bytes({"rows": rows}, {**identity, "sha256": _digest(rows)}))


def _read(path: Path, identity: Mapping[str, str]) -> Tensor | None:
    """The rows of an intact file, made by this old encoder of these items; None otherwise."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts, rows = file.metadata() or {}, file.get_tensor("rows")
    except (SafetensorError, OSError, ValueError):
        return None
    return rows if facts == {**identity, "sha256": _digest(rows)} else None


def _digest(rows: Tensor) -> str:
    return hashlib.sha256(rows.contiguous().numpy().tobytes()).hexdigest()
