"""Embeddings into a file that `nearkin evaluate` and others read: .npz, .safetensors or .parquet."""

import importlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks, files

__all__ = ["KINDS", "writable", "write"]

KINDS = (".npz", ".safetensors", ".parquet")


def writable(path: Path) -> None:
    """Embeddings can be written there; said before the work rather than after it."""
    checks.one_of("ending of the output", path.suffix.lower(), KINDS)
    if path.suffix.lower() == ".parquet":
        _pyarrow(path)
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
) -> None:
    """One row an item: its embedding, its class by name, its targets, and what it is called.

    A safetensors file holds numbers only: labels are ids there, and the header has "classes" and "names" as JSON.
    """
    named = None if labels is None else np.array([classes[i] for i in labels], dtype=str)
    ending = path.suffix.lower()
    rows = embeddings.numpy()
    try:
        if ending == ".npz":
            content: dict[str, Any] = {"embeddings": rows, "names": np.array(names, dtype=str)}
            content |= {} if named is None else {"labels": named}
            content |= {} if targets is None else {"targets": targets}
            buffer = io.BytesIO()
            np.savez(buffer, **content)
            files.write_bytes(path, buffer.getvalue())
        elif ending == ".safetensors":
            files.write_bytes(path, _safetensors(embeddings, labels, targets, names, classes))
        else:
            _parquet(path, rows, named, targets, names)
    except OSError as error:
        raise ValueError(f"{path}: could not be written ({error.strerror})") from None


def _safetensors(
    embeddings: Tensor,
    labels: NDArray[np.int64] | None,
    targets: NDArray[np.float64] | None,
    names: list[str],
    classes: list[str],
) -> bytes:
    import torch
    from safetensors.torch import save

    tensors = {"embeddings": embeddings.contiguous()}
    tensors |= {} if labels is None else {"labels": torch.from_numpy(labels).contiguous()}
    tensors |= {} if targets is None else {"targets": torch.from_numpy(targets).contiguous()}
    return save(tensors, metadata={"names": json.dumps(names), "classes": json.dumps(classes)})


def _parquet(
    path: Path, rows: NDArray[Any], labels: NDArray[Any] | None, targets: NDArray[np.float64] | None, names: list[str]
) -> None:
    pyarrow = _pyarrow(path)
    flat = pyarrow.array(np.ascontiguousarray(rows).reshape(-1))
    columns = {
        "name": pyarrow.array(names),
        "embedding": pyarrow.FixedSizeListArray.from_arrays(flat, int(rows.shape[1])),
    }
    if labels is not None:
        columns["label"] = pyarrow.array(labels.tolist())
    if targets is not None:
        columns["target"] = pyarrow.array(targets.tolist())
    buffer = io.BytesIO()
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.table(columns), buffer)
    files.write_bytes(path, buffer.getvalue())


def _pyarrow(path: Path) -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise ValueError(f"{path}: writing .parquet needs pyarrow: pip install 'nearkin[parquet]'") from None
