"""Checkpoints of tensors that are spread over ranks: each rank writes its rows, and a manifest makes them one.

    checkpoints/part-step-00000120-5f0c21d8-1-of-4.safetensors   the rows of rank 1
    checkpoints/part-step-00000120-5f0c21d8-whole.safetensors    what all ranks hold alike, and the state
    checkpoints/step-00000120.json                               the manifest: which files, their checksums, whose rows

The manifest is renamed last, so the checkpoint is there as a whole or not at all. It is read by any number of ranks:
each takes the rows that it holds now, out of whichever files have them.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import files
from nearkin.dist.parallel import local

__all__ = ["Kept", "Rows", "held", "is_own_name", "manifest", "part_name", "read_manifest"]

FORMAT = 2
_STEM = r"(?:step|best)-\d{8,}"
_NAME = rf"{_STEM}\.(?:safetensors|json)|part-{_STEM}-[0-9a-f]{{8}}-(?:\d+-of-\d+|whole)\.safetensors"
_OWN = re.compile(rf"{_NAME}|{files.TEMPORARY % _NAME}")


class Rows(NamedTuple):
    """The rows first, first + 1, … of a tensor that has `total` of them over all ranks."""

    tensor: Tensor
    first: int
    total: int


def held(tensor: Tensor, parameter: Tensor | None = None) -> Tensor | Rows:
    """A tensor, or what this rank holds of it. parameter: the one that it belongs to, as an optimiser's moments do."""
    if hasattr(tensor, "to_local"):
        mesh, total = tensor.device_mesh, tensor.shape[0]  # type: ignore[attr-defined]
        each = -(-total // mesh.size())  # as torch divides rows: all alike but the last
        return Rows(local(tensor), min(mesh.get_local_rank() * each, total), total)
    owner = tensor if parameter is None else parameter
    if getattr(owner, "sharded", False) and tensor.dim() and tensor.shape == owner.shape:
        return Rows(tensor, owner.rows[0], owner.total)  # type: ignore[attr-defined]
    return tensor


def is_own_name(name: str) -> bool:
    """Whether a file in `checkpoints/` is named as a run names what it writes there; others are not its own."""
    return _OWN.fullmatch(name) is not None


def part_name(stem: str, token: str, whose: str) -> str:
    return f"part-{stem}-{token}-{whose}.safetensors"


def manifest(path: Path, whole: str, parts: list[dict[str, Any]]) -> None:
    """Writes the manifest of files that are all there. parts: of each rank its file, checksum and rows."""
    content = {"format": FORMAT, "whole": whole, "parts": parts}
    files.write_json(path, content | {"sha256": files.digest(content)})


def read_manifest(path: Path) -> dict[str, Any]:
    """What `manifest` wrote; ValueError with the reason where it is not whole."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not a whole file ({error})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path.name} is no manifest that this version reads")
    if found.pop("sha256", None) != files.digest(found):
        raise ValueError(f"{path.name} does not match its checksum")
    return found


class Kept:
    """The tensors of a checkpoint: those that all ranks hold alike, and those that are spread over files."""

    def __init__(self, whole: Mapping[str, Tensor], folder: Path | None = None, parts: Any = ()) -> None:
        self._whole, self._folder = dict(whole), folder
        self._parts: dict[str, list[tuple[str, int, int, int]]] = {}  # name: file, first, last, total
        for part in parts:
            for name, (first, last, total) in part["rows"].items():
                self._parts.setdefault(name, []).append((part["file"], first, last, total))

    def under(self, prefix: str) -> list[str]:
        """The names that begin with `prefix.`, without it."""
        return [name[len(prefix) + 1 :] for name in (*self._whole, *self._parts) if name.startswith(f"{prefix}.")]

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Some rows of a tensor, or all of it, wherever they are kept."""
        if name in self._whole:
            return self._whole[name] if last is None else self._whole[name][first:last]
        pieces = sorted(self._parts[name], key=lambda piece: piece[1])
        last = pieces[0][3] if last is None else last
        found = [self._piece(file, name, a, b, first, last) for file, a, b, _ in pieces if a < last and b > first]
        return torch.cat(found) if found else self._piece(*pieces[0][:1], name, 0, 0, 0, 0)

    def total(self, name: str) -> int:
        """How many rows a tensor has over all ranks."""
        return self._parts[name][0][3] if name in self._parts else len(self._whole[name])

    def dims(self, name: str) -> int:
        """How many dimensions a tensor has; one that is spread has rows."""
        return 1 if name in self._parts else self._whole[name].dim()

    def into(self, name: str, place: Tensor | Rows) -> None:
        """Writes a tensor, or the rows of it that this rank holds, over what is there."""
        with torch.no_grad():
            if isinstance(place, Rows):
                if self.total(name) != place.total:
                    raise ValueError(f"{name} has {self.total(name)} rows in the checkpoint, {place.total} here")
                place.tensor.copy_(self.rows(name, place.first, place.first + len(place.tensor)))
            else:
                place.copy_(self.rows(name))

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The whole tensors under a prefix."""
        return {name: self.rows(f"{prefix}.{name}") for name in self.under(prefix)}

    def everything(self) -> dict[str, Tensor]:
        """All tensors, put together."""
        return {name: self.rows(name) for name in (*self._whole, *self._parts)}

    def _piece(self, file: str, name: str, begin: int, end: int, first: int, last: int) -> Tensor:
        from safetensors import safe_open

        assert self._folder is not None
        with safe_open(self._folder / file, framework="pt") as opened:
            low, high = max(first, begin) - begin, min(last, end) - begin
            piece: Tensor = opened.get_slice(name)[low:high]
        return piece
