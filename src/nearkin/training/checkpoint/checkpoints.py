"""Checkpoints: one file each, whole or not there, that proves its own content when it is read.

A checkpoint is a safetensors file; all that is no tensor is JSON in its header, beside a SHA-256 over everything. A run
keeps the last two and the best. If the newest one is damaged, the previous one is used, with a note. Where
tensors are spread over ranks there are several files and a manifest (`shards`), which is then what is renamed last.
"""

import hashlib
import json
import random
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from nearkin.core import files
from nearkin.core.errors import CorruptCheckpoint, ForeignCheckpoint
from nearkin.dist.group import ALONE, ProcessGroup
from nearkin.training.checkpoint import sharded
from nearkin.training.checkpoint.sharded import Kept, Rows

__all__ = ["Checkpoints", "generators", "load", "optimizer_parts", "restore_generators", "restore_optimizer"]

FORMAT = 1
_KEPT = 2


def save(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> str:
    """Tensors and plain values into one file, whose checksum is returned. Nothing of the caller's is kept."""
    from safetensors.torch import save as to_bytes

    held = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    text = json.dumps(state, allow_nan=False)
    header = {"format": str(FORMAT), "state": text, "sha256": _digest(held, text)}
    files.write_bytes(path, to_bytes(held, metadata=header))
    return header["sha256"]


def load(path: Path, proven: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save` wrote, or `CorruptCheckpoint` with the reason. proven: the checksum it must have, if known."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            # Copies: a tensor that maps the file (an optimizer keeps what it loads) would not let Windows replace it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path.name} is not a whole file ({' '.join(str(error).split())})") from None
    if header.get("format") != str(FORMAT):
        raise CorruptCheckpoint(f"{path.name} has format {header.get('format')}, this version reads {FORMAT}")
    if header.get("sha256") != _digest(tensors, header.get("state", "")) or proven not in (None, header["sha256"]):
        raise CorruptCheckpoint(f"{path.name} does not match its checksum")
    state: dict[str, Any] = json.loads(header["state"])
    return tensors, state


class Checkpoints:
    """The checkpoints of a run: `step-00000120.safetensors`, and the best weights, which a checkpoint refers to.

    Every rank calls `write` and `write_best`; the first one writes what all share. origin: digests of the recipe and
    the data of the run, which every file then carries; one with another origin is refused. Only files that a run names
    itself are ever removed, and nothing is removed or written through a symbolic link.
    """

    def __init__(self, folder: Path, origin: Mapping[str, str] | None = None, group: ProcessGroup = ALONE) -> None:
        self.folder, self.origin, self.group = folder, dict(origin or {}), group

    def write(self, step: int, tensors: Mapping[str, Tensor | Rows], state: Mapping[str, Any]) -> None:
        """Adds one, then drops what neither of the last two needs, and damaged ones of later steps."""
        name = self._written(f"step-{step:08d}", tensors, state)
        if not self.group.first:
            return
        before = [other for other in self._steps() if _number(other) < step]
        kept = [*before[1 - _KEPT :], self.folder / name]
        needed = {other.name for other in kept} | {str(state.get("best_file"))}
        needed |= {_best_of(other) for other in kept[:-1]}
        needed |= {file for other in list(needed) for file in self._files(other)}
        for path in self.folder.iterdir():
            if path.name not in needed and sharded.is_own_name(path.name) and not files.is_link(path):
                with suppress(OSError):  # on Windows somebody may have it open: the next checkpoint tries again
                    path.unlink(missing_ok=True)

    def write_best(self, step: int, tensors: Mapping[str, Tensor | Rows], state: Mapping[str, Any]) -> str:
        """The name to keep in the state of the next checkpoint. The last best stays until that one is written."""
        return self._written(f"best-{step:08d}", tensors, state)

    def _written(self, stem: str, tensors: Mapping[str, Tensor | Rows], state: Mapping[str, Any]) -> str:
        """The name of the one file that it takes, or of the manifest of several."""
        group, state = self.group, {**state, "origin": self.origin}
        if files.is_link(self.folder):
            raise ValueError(f"{self.folder}: has become a symbolic link; a run writes only into its own folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Rows)}
        if len(whole) == len(tensors):
            if group.first:
                save(self.folder / f"{stem}.safetensors", whole, state)
            return f"{stem}.safetensors"
        own = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Rows)}
        # A name of its own for every save: the files of a manifest that stands are never written over.
        token = group.on_rank0("naming", lambda: uuid.uuid4().hex[:8])
        file = sharded.part_name(stem, token, f"{group.rank}-of-{group.size}")
        checksum = save(self.folder / file, {name: rows.tensor for name, rows in own.items()}, {})
        places = {name: [rows.first, rows.first + len(rows.tensor), rows.total] for name, rows in own.items()}
        alike = sharded.part_name(stem, token, "whole")
        if group.first:
            save(self.folder / alike, whole, state)
        parts = group.values({"file": file, "sha256": checksum, "rows": places})
        if group.first:
            sharded.manifest(self.folder / f"{stem}.json", alike, parts)
        return f"{stem}.json"

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
        """The newest whole one, and what was wrong with newer ones."""
        _, kept, state, notes = self.find()
        return kept.everything(), state, notes

    def find(self) -> tuple[str, Kept, dict[str, Any], list[str]]:
        """The newest whole one: name, tensors and state; and what was wrong with newer ones.

        Where only the best weights that it refers to are damaged, its state has a `best_epoch` but no `best_file`. The
        one before would not help: it refers to the same file, or these weights are those of the newest one itself.
        """
        damaged: list[str] = []
        for path in reversed(self._steps()):
            try:
                kept, state = self.open(path.name, prove=True)
            except CorruptCheckpoint as error:
                damaged.append(str(error))
                continue
            notes = [f"{error}; the one before it is used" for error in damaged]
            if lost := self._damage_of_best(state):
                state["best_file"] = None
                notes.append(f"{lost}: the best weights are lost, those of step {state['step']} are measured anew")
            return path.name, kept, state, notes
        why = f": {'; '.join(damaged)}" if damaged else ""
        raise ValueError(f"{self.folder}: there is no whole checkpoint to go on from{why}")

    def open(self, name: str, prove: bool = False) -> tuple[Kept, dict[str, Any]]:
        """The tensors and the state of one. prove: also that those of other ranks are whole."""
        if name.endswith(".safetensors"):
            tensors, state = load(self.folder / name)
            return Kept(tensors), self._checked(name, state)
        try:
            found = sharded.read_manifest(self.folder / name)
        except ValueError as error:
            raise CorruptCheckpoint(str(error)) from None
        for part in found["parts"] if prove else ():
            load(self.folder / part["file"], part["sha256"])
        tensors, state = load(self.folder / found["whole"])
        return Kept(tensors, self.folder, found["parts"]), self._checked(name, state)

    def _checked(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """The state without its origin, which must be that of this run, where both are known."""
        origin = state.pop("origin", {})
        for what, ours in self.origin.items():
            if origin.get(what, ours) != ours:
                raise ForeignCheckpoint(
                    f"{self.folder / name} is a checkpoint of another run: its {what} is not that of this run; "
                    f"put this run's own checkpoints in its place"
                )
        return state

    def _damage_of_best(self, state: Mapping[str, Any]) -> str | None:
        """What is wrong with the best weights that a checkpoint refers to, if anything."""
        try:
            if state.get("best_file") is not None:
                self.open(state["best_file"], prove=True)
        except CorruptCheckpoint as error:
            return str(error)
        return None

    def best(self, name: str) -> tuple[Kept, dict[str, Any]]:
        return self.open(name)

    def begun(self) -> bool:
        """Whether there is any to go on from."""
        return bool(self._steps())

    def _steps(self) -> list[Path]:
        found = self.folder.glob("step-*.*") if self.folder.is_dir() else ()
        return sorted((path for path in found if sharded.is_own_name(path.name)), key=_number)

    def _files(self, name: str) -> list[str]:
        """The other files that a manifest speaks of."""
        if not name.endswith(".json"):
            return []
        try:
            found = sharded.read_manifest(self.folder / name)
        except ValueError:
            return []
        return [found["whole"], *(part["file"] for part in found["parts"])]


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _best_of(path: Path) -> str:
    """The best weights that a checkpoint refers to, read from its header alone."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".json":
            path = path.with_name(sharded.read_manifest(path)["whole"])
        with safe_open(path, framework="pt") as file:
            return str(json.loads((file.metadata() or {})["state"]).get("best_file"))
    except (SafetensorError, OSError, ValueError, KeyError, RecursionError):
        return ""


def optimizer_parts(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimiser: its tensors under names, and the rest as plain values."""
    whole = optimizer.state_dict()
    tensors, rest = {}, {}
    for index, entries in whole["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                rest[f"{index}.{name}"] = value
    return tensors, {"groups": whole["param_groups"], "rest": rest}


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *plain["rest"].items()]:
        index, _, entry = name.partition(".")
        state.setdefault(int(index), {})[entry] = value
    optimizer.load_state_dict({"state": state, "param_groups": plain["groups"]})


def generators(torch_too: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Where every generator stands: torch on each device, NumPy's and Python's own."""
    tensors = {"cpu": torch.get_rng_state()} if torch_too else {}
    if torch_too and torch.cuda.is_available():
        tensors |= {f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    # Other people's code may draw from NumPy's global generator.
    name, words, *place = np.random.get_state(legacy=True)  # noqa: NPY002
    python = random.getstate()
    return tensors, {
        "numpy": [name, np.asarray(words).tolist(), *place],
        "python": [python[0], list(python[1]), python[2]],
    }


def restore_generators(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    if "cpu" in tensors:
        torch.set_rng_state(tensors["cpu"])
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"cuda{i}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda{i}"], i)
    name, words, *place = plain["numpy"]
    np.random.set_state((name, np.array(words, np.uint32), *place))  # noqa: NPY002
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
