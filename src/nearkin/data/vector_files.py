"""Files of vectors: .npz, .npy, .safetensors and .parquet read, all but .npy written; and text files beside them.

    .npz, .safetensors   `embeddings` (N, D) floats; `labels` (N,) integers or, npz, strings, or 0/1 rows (N, L) where
                         an item has several; `targets` (N,) or (N, K); `groups` (N,) as `labels`; `names` (N,) strings,
                         the names of the rows, in .safetensors as JSON in the header, where `classes` names the label
                         ids and `groups` has the names of the groups; `quality` (N,), the lengths that an encoder of
                         free length gave, is written and not read
    .npy                 the embeddings alone; labels and targets are separate files: .npy, or .csv/.txt, one per line
    .parquet             columns `embedding` (lists of floats), `label`, `target`, `group`, `name`, `quality`

Nothing is ever unpickled, and a file that cannot be used is refused with one sentence that begins with its name.
"""

import csv
import importlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks, files
from nearkin.core.errors import RefusedVectors

__all__ = ["READABLE", "WRITABLE", "arrow", "column_beside", "contents", "lines_of", "numpy_file", "present"]
__all__ += ["entry", "writable", "write"]

READABLE = (".npz", ".npy", ".parquet", ".safetensors")
WRITABLE = (".npz", ".safetensors", ".parquet")
BESIDE = (".npy", ".csv", ".txt")
_UNREADABLE: tuple[type[Exception], ...] = (ValueError, LookupError, EOFError, OSError, SyntaxError)
_UNREADABLE += (NotImplementedError, zipfile.BadZipFile, zlib.error)
_TENSORS = ("embeddings", "labels", "targets", "groups")


def present(path: Path, kinds: Iterable[str], what: str) -> Path:
    """The path, if it is a readable file with one of these endings; otherwise a ValueError."""
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


def contents(path: Path) -> dict[str, Any]:
    """The arrays of a file by name: embeddings, and labels, targets, groups and names if present."""
    kind = path.suffix.lower()
    if kind == ".npy":
        return {"embeddings": numpy_file(path)}
    return _npz(path) if kind == ".npz" else _safetensors(path) if kind == ".safetensors" else _parquet(path)


def entry(path: Path, key: str) -> Any:
    """An entry of a file that `contents` could read, such as "split"; None if there is none of that name."""
    ending = path.suffix.lower()
    if ending == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            try:
                return archive[key] if key in archive.files else None
            except ValueError:
                raise ValueError(
                    f"{path}: {key} holds Python objects, which are not read; store names as str"
                ) from None
    if ending == ".safetensors":
        from safetensors import safe_open

        with safe_open(str(path), framework="np") as file:
            return file.get_tensor(key) if key in file.keys() else None  # noqa: SIM118 - no mapping
    if ending == ".parquet":
        _, parquet = arrow(path, "reading")
        if key in parquet.read_schema(path).names:
            return parquet.read_table(path, columns=[key]).column(key).to_pylist()
    return None


def column_beside(path: Path, what: str, rows: int) -> Any:
    """Labels or targets from a separate file."""
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
        raise ValueError(f"{path}: {what} must be one per line, got {widest} columns")
    names = [line[0] for line in lines]
    try:
        return np.array([int(name) for name in names], dtype=np.int64)
    except (ValueError, OverflowError):
        return np.array(names, dtype=str)


def lines_of(path: Path) -> list[list[str]]:
    """The stripped cells of each line; empty lines are allowed only at the end."""
    try:
        text = path.read_text(encoding="utf-8-sig").rstrip()
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: not a readable text file ({_reason(error)})") from None
    plain = text.splitlines()
    rows = list(csv.reader(plain)) if path.suffix.lower() == ".csv" else [[line] for line in plain]
    for number, row in enumerate(rows, 1):
        if not "".join(row).strip():
            raise ValueError(f"{path}: line {number} is empty")
    return [[cell.strip() for cell in row] for row in rows]


def _npz(path: Path) -> dict[str, Any]:
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not a zip archive")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            keys = list(archive.files)
            _require(path, "embeddings", keys)
            arrays = {key: _member(path, archive, key) for key in _TENSORS if key in keys}
            if "names" in keys:
                with suppress(ValueError):  # Python objects are not names
                    arrays["names"] = archive["names"]
            return arrays
    except RefusedVectors:
        raise
    except _UNREADABLE as error:
        raise ValueError(f"{path}: not a readable .npz file ({_reason(error)})") from None


def _member(path: Path, archive: Any, key: str) -> Any:
    try:
        return archive[key]
    except ValueError as error:
        if "pickle" in str(error):
            raise RefusedVectors(_refuse_objects(path, key)) from None
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
            raise ValueError(_refuse_objects(path, "it")) from None
        why = _reason(error) if numpy_file else "it does not start as one"
        raise ValueError(f"{path}: not a readable .npy file ({why})") from None


def _safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            keys = list(file.keys())
            _require(path, "embeddings", keys)
            arrays: dict[str, Any] = {key: file.get_tensor(key) for key in _TENSORS if key in keys}
            header = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable .safetensors file ({_reason(error)})") from None
    return arrays | _header_arrays(header, arrays.get("labels"))


def _header_arrays(header: dict[str, str], labels: Any) -> dict[str, Any]:
    """Names of rows, and labels by name, from a header that `nearkin embed` wrote; a foreign header is ignored."""
    lists: dict[str, list[str]] = {}
    for key in ("names", "classes", "groups"):
        with suppress(ValueError):
            value = json.loads(header.get(key, ""))
            if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
                lists[key] = value
    arrays: dict[str, Any] = {"names": lists["names"]} if "names" in lists else {}
    arrays |= {"groups": np.array(lists["groups"], dtype=str)} if "groups" in lists else {}
    classes = lists.get("classes", [])
    ids = isinstance(labels, Tensor) and labels.dim() == 1 and labels.dtype == torch.int64 and len(labels) > 0
    if classes and ids and int(labels.min()) >= 0 and int(labels.max()) < len(classes):
        arrays["labels"] = np.array([classes[label] for label in labels.tolist()], dtype=str)
    return arrays


def _parquet(path: Path) -> dict[str, Any]:
    pyarrow, parquet = arrow(path, "reading")
    try:
        keys = list(parquet.read_schema(path).names)
        _require(path, "embedding", keys, "columns")
        columns = ("embedding", "label", "target", "group", "name")
        table = parquet.read_table(path, columns=[key for key in columns if key in keys])
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable .parquet file ({_reason(error)})") from None
    if "name" in keys and (
        table.column("name").null_count or not pyarrow.types.is_string(table.schema.field("name").type)
    ):
        table = table.drop_columns(["name"])  # a foreign column of that name
    return {f"{key}s": _column(path, key, table.column(key).combine_chunks()) for key in table.column_names}


def _column(path: Path, key: str, column: Any) -> Any:
    """A column as an array: (N,), or (N, D) for lists of one length."""
    pyarrow, _ = arrow(path, "reading")
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


def writable(path: Path) -> None:
    """Checks that embeddings can be written there, before the work rather than after it."""
    checks.one_of("ending of the output", path.suffix.lower(), WRITABLE)
    if path.suffix.lower() == ".parquet":
        arrow(path, "writing")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path}: cannot be written there")


def write(
    path: Path,
    embeddings: Tensor,
    labels: NDArray[np.int64] | None,
    targets: NDArray[np.float64] | None,
    names: list[str],
    classes: list[str],
    quality: NDArray[np.float64] | None = None,
    groups: list[str] | None = None,
) -> None:
    """One row per item: its embedding, the name of its class, its targets, its name, its quality and its group.

    A safetensors file has numbers only: labels are ids there, and the header has "classes", "names", "groups" as JSON.
    """
    named = None if labels is None else np.array([classes[i] for i in labels], dtype=str)
    ending = path.suffix.lower()
    rows = embeddings.numpy()
    try:
        if ending == ".npz":
            content: dict[str, Any] = {"embeddings": rows, "names": np.array(names, dtype=str)}
            content |= {} if named is None else {"labels": named}
            content |= {} if targets is None else {"targets": targets}
            content |= {} if quality is None else {"quality": quality}
            content |= {} if groups is None else {"groups": np.array(groups, dtype=str)}
            buffer = io.BytesIO()
            np.savez(buffer, **content)
            files.write_bytes(path, buffer.getvalue())
        elif ending == ".safetensors":
            header = {"names": names, "classes": classes} | ({} if groups is None else {"groups": groups})
            files.write_bytes(path, _safetensors_bytes(embeddings, labels, targets, header, quality))
        else:
            _write_parquet(path, rows, named, targets, names, quality, groups)
    except OSError as error:
        raise ValueError(f"{path}: could not be written ({error.strerror})") from None


def _safetensors_bytes(
    embeddings: Tensor,
    labels: NDArray[np.int64] | None,
    targets: NDArray[np.float64] | None,
    header: dict[str, list[str]],
    quality: NDArray[np.float64] | None,
) -> bytes:
    from safetensors.torch import save

    tensors = {"embeddings": embeddings.contiguous()}
    tensors |= {} if labels is None else {"labels": torch.from_numpy(labels).contiguous()}
    tensors |= {} if targets is None else {"targets": torch.from_numpy(targets).contiguous()}
    tensors |= {} if quality is None else {"quality": torch.from_numpy(quality)}
    return save(tensors, metadata={key: json.dumps(names) for key, names in header.items()})


def _write_parquet(
    path: Path,
    rows: NDArray[Any],
    labels: NDArray[Any] | None,
    targets: NDArray[np.float64] | None,
    names: list[str],
    quality: NDArray[np.float64] | None,
    groups: list[str] | None,
) -> None:
    pyarrow, parquet = arrow(path, "writing")
    flat = pyarrow.array(np.ascontiguousarray(rows).reshape(-1))
    columns = {
        "name": pyarrow.array(names),
        "embedding": pyarrow.FixedSizeListArray.from_arrays(flat, int(rows.shape[1])),
    }
    if labels is not None:
        columns["label"] = pyarrow.array(labels.tolist())
    if targets is not None:
        columns["target"] = pyarrow.array(targets.tolist())
    if quality is not None:
        columns["quality"] = pyarrow.array(quality)
    if groups is not None:
        columns["group"] = pyarrow.array(groups)
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    files.write_bytes(path, buffer.getvalue())


def arrow(name: object, doing: str) -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet, or a ValueError with the pip command."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError(f"{name}: {doing} .parquet needs pyarrow: pip install 'nearkin[parquet]'") from None


def _require(path: Path, key: str, keys: list[str], what: str = "keys") -> None:
    if key not in keys:
        raise RefusedVectors(f'{path}: no "{key}" among its {what}: {", ".join(sorted(keys)) or "there are none"}')


def _refuse_objects(path: Path, what: str) -> str:
    return f"{path}: {what} holds Python objects, which are not read; store plain numbers or np.array(…, dtype=str)"


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
