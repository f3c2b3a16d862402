"""Checkpoint files: one file each, or one per rank and a manifest, complete or absent, and verified when read.

A checkpoint is a safetensors file; what is no tensor is JSON in its header, beside a SHA-256 over everything. A run
keeps the last two and the best. If the newest checkpoint is corrupt, the previous one is used, with a note. Tensors
that are sharded over ranks take several files, and a manifest that is renamed last:

    checkpoints/part-step-00000120-5f0c21d8-1-of-4.safetensors   the rows of rank 1
    checkpoints/part-step-00000120-5f0c21d8-whole.safetensors    what all ranks have in common, and the state
    checkpoints/step-00000120.json                               the manifest: which files, their checksums, whose rows

Any number of ranks can read it: each takes the rows that it holds now, from the files that have them.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import files
from nearkin.core.errors import CorruptCheckpoint, ForeignCheckpoint
from nearkin.dist.group import ALONE, ProcessGroup

__all__ = ["CheckpointTensors", "Checkpoints", "LocalRows", "is_checkpoint_file", "load", "save"]

FORMAT = 1
MANIFEST_FORMAT = 2
_RETAINED = 2
_STEM = r"(?:step|best)-\d{8,}"
_NAME = rf"{_STEM}\.(?:safetensors|json)|part-{_STEM}-[0-9a-f]{{8}}-(?:\d+-of-\d+|whole)\.safetensors"
_CHECKPOINT_FILE = re.compile(rf"{_NAME}|{files.TEMPORARY % _NAME}")


class LocalRows(NamedTuple):
    """The rows first, first + 1, … of a tensor that has `total` of them over all ranks."""

    tensor: Tensor
    first: int
    total: int


def save(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> str:
    """Writes tensors and plain values into one file, and returns its checksum. Keeps no reference to either."""
    from safetensors.torch import save as to_bytes

    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    text = json.dumps(state, allow_nan=False)
    header = {"format": str(FORMAT), "state": text, "sha256": _digest(copies, text)}
    files.write_bytes(path, to_bytes(copies, metadata=header))
    return header["sha256"]


def load(path: Path, checksum: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save` wrote, or `CorruptCheckpoint` with the reason. checksum: the one it must have, if known."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            # Copies: a tensor that maps the file (an optimizer keeps what it loads) would not let Windows replace it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path.name} is corrupt or incomplete ({' '.join(str(error).split())})") from None
    if header.get("format") != str(FORMAT):
        raise CorruptCheckpoint(f"{path.name} has format {header.get('format')}, this version reads {FORMAT}")
    if header.get("sha256") != _digest(tensors, header.get("state", "")) or checksum not in (None, header["sha256"]):
        raise CorruptCheckpoint(f"{path.name} does not match its checksum")
    state: dict[str, Any] = json.loads(header["state"])
    return tensors, state


def is_checkpoint_file(name: str) -> bool:
    """Whether a file in `checkpoints/` has a name that runs give; others belong to the user."""
    return _CHECKPOINT_FILE.fullmatch(name) is not None


class Checkpoints:
    """The checkpoints of a run: `step-00000120.safetensors`, and the best weights, which a checkpoint refers to.

    Every rank of the group calls `write` and `write_best`; the first one writes what all have in common. origin:
    digests of the recipe and the data of the run, stored in every file; a file with another origin is refused. Only
    files that have a run's own names are ever removed, and nothing is removed or written through a symbolic link.
    """

    def __init__(self, folder: Path, origin: Mapping[str, str] | None = None, group: ProcessGroup = ALONE) -> None:
        self.folder, self.origin, self.group = folder, dict(origin or {}), group

    def write(self, step: int, tensors: Mapping[str, Tensor | LocalRows], state: Mapping[str, Any]) -> None:
        """Adds one, then removes what neither of the last two needs, and corrupt ones of later steps."""
        name = self._write(f"step-{step:08d}", tensors, state)
        if not self.group.first:
            return
        previous = [path for path in self._step_files() if _step(path) < step]
        retained = [*previous[1 - _RETAINED :], self.folder / name]
        needed = {path.name for path in retained} | {str(state.get("best_file"))}
        needed |= {_best_of(path) for path in retained[:-1]}
        needed |= {part for name in list(needed) for part in self._parts_of(name)}
        for path in self.folder.iterdir():
            if path.name not in needed and is_checkpoint_file(path.name) and not files.is_link(path):
                with suppress(OSError):  # on Windows another program may have it open: the next checkpoint tries again
                    path.unlink(missing_ok=True)

    def write_best(self, step: int, tensors: Mapping[str, Tensor | LocalRows], state: Mapping[str, Any]) -> str:
        """The name to store in the next checkpoint. The previous best stays until that one is written."""
        return self._write(f"best-{step:08d}", tensors, state)

    def _write(self, stem: str, tensors: Mapping[str, Tensor | LocalRows], state: Mapping[str, Any]) -> str:
        """The name of the one file that it takes, or of the manifest of several."""
        group, state = self.group, {**state, "origin": self.origin}
        if files.is_link(self.folder):
            raise ValueError(f"{self.folder}: has become a symbolic link; a run writes only into its own folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        common = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, LocalRows)}
        if len(common) == len(tensors):
            if group.first:
                save(self.folder / f"{stem}.safetensors", common, state)
            return f"{stem}.safetensors"
        sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, LocalRows)}
        # A new name for every save: the files of a manifest in use are never overwritten.
        token = group.on_rank0("naming", lambda: uuid.uuid4().hex[:8])
        file = f"part-{stem}-{token}-{group.rank}-of-{group.size}.safetensors"
        checksum = save(self.folder / file, {name: rows.tensor for name, rows in sharded.items()}, {})
        places = {name: [rows.first, rows.first + len(rows.tensor), rows.total] for name, rows in sharded.items()}
        common_file = f"part-{stem}-{token}-whole.safetensors"
        if group.first:
            save(self.folder / common_file, common, state)
        parts = group.values({"file": file, "sha256": checksum, "rows": places})
        if group.first:
            content = {"format": MANIFEST_FORMAT, "whole": common_file, "parts": parts}
            files.write_json(self.folder / f"{stem}.json", content | {"sha256": files.digest(content)})
        return f"{stem}.json"

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
        """All tensors and the state of the newest intact one, and what was wrong with newer ones."""
        _, tensors, state, notes = self.find_newest()
        return tensors.all(), state, notes

    def find_newest(self) -> tuple[str, "CheckpointTensors", dict[str, Any], list[str]]:
        """The newest intact one: name, tensors and state; and what was wrong with newer ones.

        If only the best weights that it refers to are corrupt, its state has a `best_epoch` but no `best_file`. The
        previous one would not help: it refers to the same file, or these weights are those of the newest one itself.
        """
        problems: list[str] = []
        for path in reversed(self._step_files()):
            try:
                tensors, state = self.open(path.name, verify=True)
            except CorruptCheckpoint as error:
                problems.append(str(error))
                continue
            notes = [f"{problem}; the previous one is used" for problem in problems]
            if problem := self._problem_of_best(state):
                state["best_file"] = None
                notes.append(f"{problem}: the best weights are lost, those of step {state['step']} are measured again")
            return path.name, tensors, state, notes
        why = f": {'; '.join(problems)}" if problems else ""
        raise ValueError(f"{self.folder}: there is no intact checkpoint to resume from{why}")

    def open(self, name: str, verify: bool = False) -> tuple["CheckpointTensors", dict[str, Any]]:
        """The tensors and the state of one. verify: also the files of other ranks."""
        if name.endswith(".safetensors"):
            tensors, state = load(self.folder / name)
            return CheckpointTensors(tensors), self._without_origin(name, state)
        manifest = _read_manifest(self.folder / name)
        for part in manifest["parts"] if verify else ():
            load(self.folder / part["file"], part["sha256"])
        tensors, state = load(self.folder / manifest["whole"])
        return CheckpointTensors(tensors, self.folder, manifest["parts"]), self._without_origin(name, state)

    def any_written(self) -> bool:
        """Whether there is any to resume from."""
        return bool(self._step_files())

    def _without_origin(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """The state without its origin, which must be that of this run, where both are known."""
        origin = state.pop("origin", {})
        for what, ours in self.origin.items():
            if origin.get(what, ours) != ours:
                raise ForeignCheckpoint(
                    f"{self.folder / name} is a checkpoint of another run: its {what} is not that of this run; "
                    f"put this run's own checkpoints in its place"
                )
        return state

    def _problem_of_best(self, state: Mapping[str, Any]) -> str | None:
        """What is wrong with the best weights that a checkpoint refers to, if anything."""
        try:
            if state.get("best_file") is not None:
                self.open(state["best_file"], verify=True)
        except CorruptCheckpoint as error:
            return str(error)
        return None

    def _step_files(self) -> list[Path]:
        paths = self.folder.glob("step-*.*") if self.folder.is_dir() else ()
        return sorted((path for path in paths if is_checkpoint_file(path.name)), key=_step)

    def _parts_of(self, name: str) -> list[str]:
        """The other files that a manifest lists."""
        if not name.endswith(".json"):
            return []
        try:
            manifest = _read_manifest(self.folder / name)
        except CorruptCheckpoint:
            return []
        return [manifest["whole"], *(part["file"] for part in manifest["parts"])]


class CheckpointTensors:
    """The tensors of a checkpoint: those that all ranks have in common, and those that are sharded over files."""

    def __init__(self, common: Mapping[str, Tensor], folder: Path | None = None, parts: Any = ()) -> None:
        self._common, self._folder = dict(common), folder
        self._parts: dict[str, list[tuple[str, int, int, int]]] = {}  # name: file, first, last, total
        for part in parts:
            for name, (first, last, total) in part["rows"].items():
                self._parts.setdefault(name, []).append((part["file"], first, last, total))

    def names(self, prefix: str) -> list[str]:
        """The names that begin with `prefix.`, without it."""
        return [name[len(prefix) + 1 :] for name in (*self._common, *self._parts) if name.startswith(f"{prefix}.")]

    def section(self, prefix: str) -> dict[str, Tensor]:
        """The complete tensors under a prefix."""
        return {name: self.rows(f"{prefix}.{name}") for name in self.names(prefix)}

    def all(self) -> dict[str, Tensor]:
        """All tensors, complete."""
        return {name: self.rows(name) for name in (*self._common, *self._parts)}

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Some rows of a tensor, or all of it, from the files that have them."""
        if name in self._common:
            return self._common[name] if last is None else self._common[name][first:last]
        parts = sorted(self._parts[name], key=lambda part: part[1])
        last = parts[0][3] if last is None else last
        pieces = [self._piece(file, name, a, b, first, last) for file, a, b, _ in parts if a < last and b > first]
        return torch.cat(pieces) if pieces else self._piece(parts[0][0], name, 0, 0, 0, 0)

    def dims(self, name: str) -> int:
        """How many dimensions a tensor has; a sharded one has rows."""
        return 1 if name in self._parts else self._common[name].dim()

    def copy_to(self, name: str, target: Tensor | LocalRows) -> None:
        """Copies a tensor, or the rows of it that this rank holds, into `target`."""
        with torch.no_grad():
            if not isinstance(target, LocalRows):
                target.copy_(self.rows(name))
                return
            total = self._parts[name][0][3] if name in self._parts else len(self._common[name])
            if total != target.total:
                raise ValueError(f"{name} has {total} rows in the checkpoint, {target.total} in this run")
            target.tensor.copy_(self.rows(name, target.first, target.first + len(target.tensor)))

    def _piece(self, file: str, name: str, begin: int, end: int, first: int, last: int) -> Tensor:
        from safetensors import safe_open

        assert self._folder is not None
        with safe_open(self._folder / file, framework="pt") as opened:
            low, high = max(first, begin) - begin, min(last, end) - begin
            piece: Tensor = opened.get_slice(name)[low:high]
        return piece


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path.name} is corrupt or incomplete ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        raise CorruptCheckpoint(f"{path.name} is no manifest that this version reads")
    if manifest.pop("sha256", None) != files.digest(manifest):
        raise CorruptCheckpoint(f"{path.name} does not match its checksum")
    return manifest


def _step(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _best_of(path: Path) -> str:
    """The best weights that a checkpoint refers to, read from its header alone."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".json":
            path = path.with_name(_read_manifest(path)["whole"])
        with safe_open(path, framework="pt") as file:
            return str(json.loads((file.metadata() or {})["state"]).get("best_file"))
    except (SafetensorError, OSError, ValueError, KeyError, RecursionError):
        return ""


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
