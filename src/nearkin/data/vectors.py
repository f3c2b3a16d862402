"""Embeddings that somebody has stored: .npz, .npy, .safetensors or .parquet, with labels or targets beside them.

    .npz, .safetensors   `embeddings` (N, D) floats; `labels` (N,) whole numbers or, npz, strings, or 0/1 rows (N, L)
                         where an item has several; `targets` (N,) or (N, K); `names` (N,) strings, what each row is
                         called, in .safetensors as JSON in the header, where `classes` names the label ids
    .npy                 the embeddings alone; labels and targets are files of their own: .npy, or .csv/.txt, one a line
    .parquet             columns `embedding` (lists of floats), `label`, `target`, `name`

Nothing is ever unpickled, and a file that cannot be used is answered with one sentence that begins with its name.
"""

import csv
import importlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core.errors import RefusedVectors
from nearkin.core.relations import UNKNOWN

__all__ = ["KINDS", "Vectors", "class_ids", "read"]

KINDS = (".npz", ".npy", ".parquet", ".safetensors")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BESIDE = (".npy", ".csv", ".txt")
_UNREADABLE = (ValueError, KeyError, EOFError, OSError, SyntaxError, zipfile.BadZipFile, zlib.error)
_TENSORS = ("embeddings", "labels", "targets")
_CHUNK = 1 << 14  # rows looked at in one go

Labels = NDArray[Any]  # (N,), int64 or strings; (N, L) bool


class Vectors(NamedTuple):
    """Embeddings (N, D), finite floats; labels (N,) int64 or strings, (N, L) bool; targets (N,) or (N, K) float64.

    names (N,): what each row is called, where the file says so.
    """

    name: str
    embeddings: Tensor
    labels: Labels | None = None
    targets: Tensor | None = None
    names: list[str] | None = None


def read(
    path: str | Path, labels: str | Path | None = None, targets: str | Path | None = None, *, several: bool = False
) -> Vectors:
    """Reads embeddings and what is said of them; `labels` and `targets` are files that go before those in `path`.

    several: 0/1 rows of labels, (N, L), are welcome too.
    """
    path = present(Path(path), KINDS, "embeddings")
    found = _READERS[path.suffix.lower()](path)
    embeddings = _embeddings(path, found["embeddings"])
    rows = len(embeddings)
    names, numbers = found.get("labels"), found.get("targets")
    source = target_source = str(path)
    if labels is not None:
        names, source = _beside(Path(labels), "labels", rows), str(labels)
    if targets is not None:
        numbers, target_source = _beside(Path(targets), "targets", rows), str(targets)
    return Vectors(
        str(path),
        embeddings,
        None if names is None else _labels(source, names, rows, several),
        None if numbers is None else _targets(target_source, numbers, rows),
        _names(found["names"], rows) if "names" in found else None,
    )


def class_ids(*several: Labels) -> tuple[list[Tensor], list[str]]:
    """Class ids (N,) of each set of labels, and the names of the classes.

    Strings become their place in the sorted order of all the strings there are, the same in each set. Whole numbers
    stay as they are; -1 is unknown, and no class.
    """
    kinds = {"strings" if names.dtype.kind == "U" else "whole numbers" for names in several}
    if len(kinds) > 1:
        raise ValueError("labels of embeddings and gallery must be of one kind, got strings and whole numbers")
    everyone = np.unique(np.concatenate(several))
    if kinds == {"strings"}:
        ids = [torch.from_numpy(np.searchsorted(everyone, names).astype(np.int64)) for names in several]
        return ids, [str(name) for name in everyone]
    return [torch.from_numpy(names) for names in several], [str(name) for name in everyone if name != UNKNOWN]


def present(path: Path, kinds: Iterable[str], what: str) -> Path:
    """The path, if there is a file of one of these kinds that can be read."""
    if path.is_dir():
        raise ValueError(f"{path}: {what} must be a file, got a folder")
    if path.suffix.lower() not in kinds:
        got = f'"{path.suffix}"' if path.suffix else "no ending"
        raise ValueError(f"{path}: {what} must be a file that ends in {', '.join(kinds)}, got {got}")
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{path}: its permissions do not allow reading it")
    return path


def _npz(path: Path) -> dict[str, Any]:
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no zip archive")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            keys = list(archive.files)
            _needs(path, "embeddings", keys)
            found = {key: _member(path, archive, key) for key in _TENSORS if key in keys}
            if "names" in keys:
                with suppress(ValueError):  # Python objects are no names
                    found["names"] = archive["names"]
            return found
    except RefusedVectors:
        raise
    except _UNREADABLE as error:
        raise ValueError(f"{path}: not a readable .npz file ({_why(error)})") from None


def _member(path: Path, archive: Any, key: str) -> Any:
    try:
        return archive[key]
    except ValueError as error:
        if "pickle" in str(error):
            raise RefusedVectors(_objects(path, key)) from None
        raise


def numpy_file(path: Path) -> Any:
    """The array of a .npy file, without unpickling anything."""
    try:
        with path.open("rb") as file:
            return np.load(file, allow_pickle=False)
    except _UNREADABLE as error:
        with path.open("rb") as file:
            numpy_file = file.read(6) == b"\x93NUMPY"
        if numpy_file and "allow_pickle" in str(error):
            raise ValueError(_objects(path, "it")) from None
        why = _why(error) if numpy_file else "it does not begin as one"
        raise ValueError(f"{path}: not a readable .npy file ({why})") from None


def _safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            keys = list(file.keys())
            _needs(path, "embeddings", keys)
            found: dict[str, Any] = {key: file.get_tensor(key) for key in _TENSORS if key in keys}
            header = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable .safetensors file ({_why(error)})") from None
    return found | _said_in(header, found.get("labels"))


def _said_in(header: dict[str, str], labels: Any) -> dict[str, Any]:
    """Names of rows and classes that `nearkin embed` puts into the header; one of somebody else's may say anything."""
    said: dict[str, list[str]] = {}
    for key in ("names", "classes"):
        with suppress(ValueError):
            value = json.loads(header.get(key, ""))
            if isinstance(value, list) and all(isinstance(one, str) for one in value):
                said[key] = value
    found: dict[str, Any] = {"names": said["names"]} if "names" in said else {}
    classes = said.get("classes", [])
    ids = isinstance(labels, Tensor) and labels.dim() == 1 and labels.dtype == torch.int64 and len(labels) > 0
    if classes and ids and int(labels.min()) >= 0 and int(labels.max()) < len(classes):
        found["labels"] = np.array([classes[label] for label in labels.tolist()], dtype=str)
    return found


def _parquet(path: Path) -> dict[str, Any]:
    try:
        pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        raise ValueError(
            f"{path}: reading .parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    try:
        keys = list(parquet.read_schema(path).names)
        _needs(path, "embedding", keys, "columns")
        wanted = ("embedding", "label", "target", "name")
        table = parquet.read_table(path, columns=[key for key in wanted if key in keys])
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable .parquet file ({_why(error)})") from None
    if "name" in keys and (
        table.column("name").null_count or not pyarrow.types.is_string(table.schema.field("name").type)
    ):
        table = table.drop_columns(["name"])  # somebody else's column
    return {f"{key}s": _column(path, key, table.column(key).combine_chunks()) for key in table.column_names}


def _column(path: Path, key: str, column: Any) -> Any:
    """A column as an array: (N,), or (N, D) for lists of one length."""
    pyarrow = importlib.import_module("pyarrow")
    if isinstance(column, pyarrow.ChunkedArray):  # older versions leave some chunked
        column = pyarrow.concat_arrays(column.chunks)
    if column.null_count:
        raise ValueError(f"{path}: column {key} must have a value in every row, {column.null_count} have none")
    kinds = pyarrow.types
    if kinds.is_list(column.type) or kinds.is_large_list(column.type) or kinds.is_fixed_size_list(column.type):
        lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) > 1:
            raise ValueError(f"{path}: rows of {key} must have one length, got {lengths.min()} to {lengths.max()}")
        values = column.flatten()
        return values.to_numpy(zero_copy_only=False).reshape(len(column), -1 if len(values) else 0)
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kinds.is_string(column.type) or kinds.is_large_string(column.type):
        return np.array(column.to_pylist(), dtype=str)
    return column.to_numpy(zero_copy_only=False)


_READERS: dict[str, Any] = {
    ".npz": _npz,
    ".npy": lambda path: {"embeddings": numpy_file(path)},
    ".safetensors": _safetensors,
    ".parquet": _parquet,
}


def _beside(path: Path, what: str, rows: int) -> Any:
    """Labels or targets from a file of their own."""
    present(path, BESIDE, what)
    if path.suffix.lower() == ".npy":
        return numpy_file(path)
    lines = lines_of(path)
    if len(lines) == rows + 1 and lines[0][0].lower() in (what, what[:-1]):
        lines = lines[1:]  # a heading
    if what == "targets":
        try:
            return np.array([[float(part) for cell in line for part in cell.split()] for line in lines])
        except ValueError:
            raise ValueError(f"{path}: targets must be numbers, as many in each line") from None
    widest = max((len(line) for line in lines), default=1)
    if widest > 1:
        raise ValueError(f"{path}: labels must be one a line, got {widest} columns")
    names = [line[0] for line in lines]
    try:
        return np.array([int(name) for name in names], dtype=np.int64)
    except (ValueError, OverflowError):
        return np.array(names, dtype=str)


def lines_of(path: Path) -> list[list[str]]:
    """The cells of each line, without the space around them; empty lines are allowed at the end only."""
    try:
        text = path.read_text(encoding="utf-8-sig").rstrip()
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: not a readable text file ({_why(error)})") from None
    plain = text.splitlines()
    rows = list(csv.reader(plain)) if path.suffix.lower() == ".csv" else [[line] for line in plain]
    for number, row in enumerate(rows, 1):
        if not "".join(row).strip():
            raise ValueError(f"{path}: line {number} is empty")
    return [[cell.strip() for cell in row] for row in rows]


def _embeddings(path: Path, value: Any) -> Tensor:
    rows = _tensor(value)
    if rows is None or rows.dtype not in FLOATS:
        known = ", ".join(str(kind).removeprefix("torch.") for kind in FLOATS)
        raise ValueError(f"{path}: embeddings must be {known}, got {str(value.dtype).removeprefix('torch.')}")
    if rows.dim() != 2 or 0 in rows.shape:
        raise ValueError(f"{path}: embeddings must have shape (rows, dimensions), got {tuple(rows.shape)}")
    bad = [i for at in range(0, len(rows), _CHUNK) for i in _not_finite(rows[at : at + _CHUNK], at)]
    if bad:
        raise ValueError(f"{path}: embeddings must be finite, got NaN or Inf in {_some(bad, len(rows))}")
    return rows


def _labels(source: str, value: Any, rows: int, several: bool) -> Labels:
    names = np.asarray(value.tolist() if isinstance(value, Tensor) else value)
    if names.dtype.kind == "S":
        names = np.char.decode(names, "utf-8", "replace")
    if names.dtype.kind not in "biuU":
        got = str(value.dtype).removeprefix("torch.")
        way = "; real-valued ones are called targets" if names.dtype.kind == "f" else ""
        raise ValueError(f"{source}: labels must be whole numbers or strings, got {got}{way}")
    if several and names.ndim == 2 and names.dtype.kind in "biu" and ((names == 0) | (names == 1)).all():
        _one_a_row(source, "labels", len(names), rows)
        return names.astype(bool)
    if names.ndim != 1:
        rows_too = ", or be 0/1 rows (rows, labels)" if several else ""
        raise ValueError(f"{source}: labels must have shape (rows,){rows_too}, got {names.shape}")
    _one_a_row(source, "labels", len(names), rows)
    if names.dtype.kind == "u" and int(names.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{source}: labels must be below 2**63, got {int(names.max())}")
    return names if names.dtype.kind == "U" else names.astype(np.int64)


def _targets(source: str, value: Any, rows: int) -> Tensor:
    numbers = _tensor(value)
    if numbers is None or numbers.dtype == torch.bool or numbers.is_complex():
        raise ValueError(f"{source}: targets must be numbers")
    if numbers.dim() == 2 and numbers.shape[1] == 1:
        numbers = numbers[:, 0]
    if numbers.dim() not in (1, 2) or 0 in numbers.shape[1:]:
        raise ValueError(f"{source}: targets must have shape (rows,) or (rows, K), got {tuple(numbers.shape)}")
    _one_a_row(source, "targets", len(numbers), rows)
    bad = _not_finite(numbers.double().reshape(rows, -1), 0)
    if bad:
        raise ValueError(f"{source}: targets must be finite, got NaN or Inf in {_some(bad, rows)}")
    return numbers.double()


def _names(value: Any, rows: int) -> list[str] | None:
    """What the rows are called. Something else that somebody has stored under this key is nothing to us."""
    names = np.asarray(value)
    if names.dtype.kind == "S":
        names = np.char.decode(names, "utf-8", "replace")
    return [str(name) for name in names.tolist()] if names.dtype.kind in "Uiu" and names.shape == (rows,) else None


def _one_a_row(source: str, what: str, got: int, rows: int) -> None:
    if got != rows:
        raise ValueError(f"{source}: {what} must have one entry per row of embeddings: {rows} rows, {got} {what}")


def _tensor(value: Any) -> Tensor | None:
    """What torch can hold of an array, in the byte order of this machine."""
    if isinstance(value, Tensor):
        return value
    if value.dtype.kind not in "biufc" or (value.dtype.itemsize > 8 and value.dtype.kind == "f"):
        return None
    return torch.from_numpy(np.require(value, value.dtype.newbyteorder("="), ["C", "W"]))


def _not_finite(rows: Tensor, first: int) -> list[int]:
    return [first + int(i) for i in (~rows.isfinite()).any(1).nonzero().flatten()]


def _some(places: list[int], rows: int) -> str:
    """How many rows, and the first of them, counted from 0."""
    shown = ", ".join(str(place) for place in places[:3]) + (", …" if len(places) > 3 else "")
    return f"{len(places)} of {rows} rows ({'row' if len(places) == 1 else 'rows'} {shown}, counted from 0)"


def _needs(path: Path, key: str, keys: list[str], what: str = "keys") -> None:
    if key not in keys:
        raise RefusedVectors(f'{path}: no "{key}" among its {what}: {", ".join(sorted(keys)) or "there are none"}')


def _objects(path: Path, what: str) -> str:
    return f"{path}: {what} holds Python objects, which are not read; store plain numbers or np.array(…, dtype=str)"


def _why(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
