"""Lists of pairs to verify: .csv or .npy of row, row[, same][, fold], as LFW has them."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.data import vector_files

__all__ = ["KINDS", "PairList", "read"]

KINDS = (".csv", ".npy")


class PairList(NamedTuple):
    """Pairs of rows of the embeddings (M, 2); whether they match (M,) bool, and their fold (M,), if known."""

    name: str
    pairs: Tensor
    same: Tensor | None = None
    fold: Tensor | None = None


def read(path: str | Path, rows: int) -> PairList:
    """Reads pairs of rows 0 … rows - 1; a heading is optional, and says whether a third column is `same` or `fold`."""
    path = vector_files.present(Path(path), KINDS, "pairs")
    heading: list[str] = []
    if path.suffix.lower() == ".npy":
        table = vector_files.numpy_file(path)
    else:
        heading, table = _text(path)
    if table.dtype.kind not in "biu":
        raise ValueError(f"{path}: pairs must be whole numbers: row, row[, same][, fold], got {table.dtype}")
    if table.ndim != 2 or not 2 <= table.shape[1] <= 4 or not len(table):
        raise ValueError(f"{path}: pairs must have 2 to 4 columns: row, row[, same][, fold], got shape {table.shape}")
    numbers = torch.from_numpy(table.astype(np.int64))
    pairs, columns = numbers[:, :2], list(numbers[:, 2:].unbind(1))
    wrong = ((pairs < 0) | (pairs >= rows)).any(1).nonzero().flatten()
    if len(wrong):
        got = tuple(pairs[wrong[0]].tolist())
        raise ValueError(f"{path}: pairs must be of rows 0 to {rows - 1}, got {got} in pair {int(wrong[0])}")
    same = columns.pop(0) if columns and heading[2:] != ["fold"] else None
    if same is not None and bool(((same != 0) & (same != 1)).any()):
        raise ValueError(f"{path}: same must be 0 or 1, got {int(same[(same != 0) & (same != 1)][0])}")
    fold = columns[0] if columns else None
    if fold is not None and bool((fold == fold[0]).all()):
        raise ValueError(f"{path}: fold must name at least 2 folds, got 1")
    return PairList(str(path), pairs, None if same is None else same.bool(), fold)


def _text(path: Path) -> tuple[list[str], Any]:
    lines = vector_files.lines_of(path)
    heading: list[str] = []
    if lines and not lines[0][0].lstrip("-").isdecimal():
        heading = [cell.lower() for cell in lines.pop(0)]
    if not lines:
        raise ValueError(f"{path}: there are no pairs in it")
    try:
        return heading, np.array([[int(cell) for cell in line] for line in lines], dtype=np.int64).reshape(
            len(lines), -1
        )
    except (ValueError, OverflowError):
        raise ValueError(
            f"{path}: pairs must be whole numbers, as many in each line: row, row[, same][, fold]"
        ) from None
