"""A table of pictures: CSV, TSV or Parquet with `path,label[,split][,group]`, or `path` and numeric target columns.

path      relative to the table's folder (or to `root`), or absolute; out of it only with `allow_outside`
label     the class, any text
split     train, val, test, query or gallery
LEVEL     with `levels`: columns of any name that group the classes, from finer to coarser
group     the burst, camera, session, writer of the picture, any text; another column by `group_column`
target…   numbers: `target`, or `target_1`, `target_2`, … Without a `label` and without such columns, every further
          column is a target and must be numeric
"""

import csv
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.core.errors import NotAllowed
from nearkin.core.paths import homes, is_inside
from nearkin.data import vector_files
from nearkin.data.file_tree import Files, printable
from nearkin.data.folders import SPLIT_NAMES, numbered
from nearkin.data.groups import IGNORED, UNUSED
from nearkin.data.item_set import Items
from nearkin.data.levels import Level, levels_of

__all__ = ["KINDS", "read", "some"]

KINDS = (".csv", ".tsv", ".parquet")


class Table(NamedTuple):
    """Columns of text by their lower-case names, and the line number of each row."""

    name: str
    columns: dict[str, list[str]]
    rows: list[int]


def read(
    path: Path,
    name: str,
    root: Path | None = None,
    labelled: bool = True,
    levels: Sequence[str] = (),
    group_column: str | None = None,
    allow_outside: bool = False,
) -> Items:
    """One item per row; a ValueError names the rows that cannot be used.

    group_column: of the groups; None: "group", if there is one; "none": no groups. levels: columns above the classes.
    """
    table = _parquet(path, name) if path.suffix.lower() == ".parquet" else _text(path, name)
    _require(table, "path")
    if not table.rows:
        raise ValueError(f"{name}: it has no rows")
    columns = table.columns
    _refuse(table, "path", "have no path", lambda cell: not cell)
    _unique(table)
    base = path.parent if root is None else root
    paths = [os.path.join(base, cell) for cell in columns["path"]]
    home, path_of = homes(base), dict(zip(columns["path"], paths, strict=True))
    outside = set() if allow_outside else {cell for cell, path in path_of.items() if not is_inside(path, home)}
    there = {cell for cell, path in path_of.items() if cell in outside or os.path.isfile(path)}
    _refuse(table, "path", f"name files that are not there (paths start at {base})", lambda cell: cell not in there)
    if outside:  # of which none is looked at: it may be on another machine
        what = f"name files outside of {base}, which --allow-outside (allow_outside=True) allows"
        try:
            _refuse(table, "path", what, lambda cell: cell in outside)
        except ValueError as error:
            raise NotAllowed(str(error)) from None
    group = _group_column(table, group_column)
    labels, targets = columns.get("label"), _targets(table, group) if labelled else None
    if labels is None and targets is None and labelled:
        raise ValueError(f'{name}: it must have a column "label" or numeric target columns beside "path"')
    if labels is not None:
        _refuse(table, "label", "have no label", lambda cell: not cell)
    classes, ids = numbered(labels) if labels is not None else ([], None)
    used = {"path", "label", "split", *_target_names(table, group)} | ({group} if group else set())
    used |= {level.lower() for level in levels}
    return Items(
        name=name,
        names=[printable(cell) for cell in columns["path"]],
        classes=classes,
        labels=ids,
        targets=targets,
        split=_split(table),
        pictures=Files(paths),
        note=f"{name}: " + ("its own split" if "split" in columns else "no split of its own"),
        groups=None if group is None else columns[group],
        ignored=[f'column "{key}", which is not used' for key in columns if key not in used],
        levels=_levels(table, levels, classes, ids),
    )


def _levels(table: Table, names: Sequence[str], classes: list[str], ids: NDArray[np.int64] | None) -> list[Level]:
    """The columns that group the classes, from finer to coarser."""
    if names and ids is None:
        raise ValueError(f'{table.name}: levels need classes, and there is no column "label"')
    for name in names:
        _require(table, name.lower())
        _refuse(table, name.lower(), f'have no "{name}"', lambda cell: not cell)
    columns = {name: table.columns[name.lower()] for name in names}
    return [] if ids is None else levels_of(table.name, classes, ids, columns)


def some(entries: list[str]) -> str:
    """The first three entries, for a message."""
    return ", ".join(entries[:3]) + (", …" if len(entries) > 3 else "")


def _text(path: Path, name: str) -> Table:
    """Separated by commas or tabs; by semicolons in a .csv whose heading has no comma, as some spreadsheets write."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            mark = "\t" if path.suffix.lower() == ".tsv" else ";" if ";" in first and "," not in first else ","
            reader = csv.reader(file, delimiter=mark, strict=True)
            lines = [(reader.line_num, [cell.strip() for cell in line]) for line in reader if line]
    except PermissionError:
        raise ValueError(f"{name}: its permissions do not allow reading it") from None
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise ValueError(f"{name}: not a readable table ({error})") from None
    if not lines:
        raise ValueError(f"{name}: it is empty; it must begin with the names of its columns, such as path,label")
    heading = _heading(name, lines[0][1])
    for number, line in lines[1:]:
        if len(line) != len(heading):
            raise ValueError(f"{name}: row {number} must have {len(heading)} cells as the heading has, got {len(line)}")
    columns = {key: [line[c] for _, line in lines[1:]] for c, key in enumerate(heading)}
    return Table(name, columns, [number for number, _ in lines[1:]])


def _parquet(path: Path, name: str) -> Table:
    pyarrow, parquet = vector_files.arrow(name, "reading")
    try:
        table = parquet.read_table(path)
    except PermissionError:
        raise ValueError(f"{name}: its permissions do not allow reading it") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{name}: not a readable .parquet file ({' '.join(str(error).split())})") from None
    heading = _heading(name, table.column_names)
    columns = {
        key: ["" if cell is None else str(cell) for cell in table.column(c).to_pylist()]
        for c, key in enumerate(heading)
    }
    return Table(name, columns, list(range(1, table.num_rows + 1)))


def _heading(name: str, cells: list[str]) -> list[str]:
    heading = [cell.strip().lower() for cell in cells]
    twice = [key for key, count in Counter(heading).items() if count > 1]
    if twice:
        raise ValueError(f'{name}: columns must have different names, got "{twice[0]}" twice')
    return heading


def _require(table: Table, key: str) -> None:
    if key not in table.columns:
        raise ValueError(f'{table.name}: no column "{key}" among its columns: {", ".join(table.columns)}')


def _refuse(table: Table, key: str, what: str, wrong: Callable[[str], bool]) -> None:
    bad = [(row, cell) for row, cell in zip(table.rows, table.columns[key], strict=True) if wrong(cell)]
    if bad:
        shown = some([f"row {row}" + (f": {printable(cell)}" if cell else "") for row, cell in bad])
        raise ValueError(f"{table.name}: {len(bad)} of {len(table.rows)} rows {what} ({shown})")


def _unique(table: Table) -> None:
    """Refuses two rows for one file: they would be each other's nearest neighbour, or contradict each other."""
    places: dict[str, list[int]] = {}
    for row, cell in zip(table.rows, table.columns["path"], strict=True):
        places.setdefault(os.path.normpath(cell), []).append(row)
    twice = [f"{printable(cell)} in rows {some([str(r) for r in rows])}" for cell, rows in places.items() if rows[1:]]
    if twice:
        paths = "1 path is" if len(twice) == 1 else f"{len(twice)} paths are"
        raise ValueError(f"{table.name}: {paths} listed more than once ({some(twice)})")


def _group_column(table: Table, asked: str | None) -> str | None:
    """The column of the groups, in which no cell may be empty; None if there is none."""
    if asked == IGNORED and "group" not in table.columns:
        raise ValueError(f'{table.name}: group_column would have no effect: there is no column "group" to ignore')
    if asked in (IGNORED, UNUSED) or (asked is None and "group" not in table.columns):
        return None
    key = (asked or "group").strip().lower()
    _require(table, key)
    if key in ("path", "label", "split"):
        raise ValueError(f'{table.name}: group_column must be a column of its own, got "{key}"')
    _refuse(table, key, f'have no group in column "{key}"', lambda cell: not cell)
    return key


def _target_names(table: Table, group: str | None = None) -> list[str]:
    named = [key for key in table.columns if key != group and (key == "target" or key.startswith("target_"))]
    if named or "label" in table.columns:
        return named
    return [key for key in table.columns if key not in ("path", "split", "group", group)]


def _targets(table: Table, group: str | None) -> NDArray[np.float64] | None:
    names = _target_names(table, group)
    for key in names:
        hint = "" if key.startswith("target") else ', and without a "label" column every further column is a target'
        _refuse(table, key, f'have no finite number in column "{key}"{hint}', lambda cell: not _is_number(cell))
    if not names:
        return None
    numbers = np.array([[float(cell) for cell in table.columns[key]] for key in names], np.float64).T
    return np.ascontiguousarray(numbers[:, 0] if len(names) == 1 else numbers)


def _is_number(cell: str) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except ValueError:
        return False


def _split(table: Table) -> list[str] | None:
    if "split" not in table.columns:
        return None
    known = ", ".join(dict.fromkeys(SPLIT_NAMES.values()))
    _refuse(table, "split", f"have a split that is none of {known}", lambda cell: cell.lower() not in SPLIT_NAMES)
    return [SPLIT_NAMES[cell.lower()] for cell in table.columns["split"]]
