"""Lists of items to leave out, as `nearkin train --without FILE` takes them.

    .csv, .tsv   a heading with a column `path`; other columns, as label, suggested and score, are not read
    .json        a list of paths, or of objects with a "path"

A path is the name of an item: relative to the folder or as the table has it, "row 17" of a file of vectors. In tables
a path that a spreadsheet would compute begins with a quote, as nearkin writes it: '=1.png.
"""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.core.spreadsheet import text_of_cell
from nearkin.data.item_set import Items

__all__ = ["KINDS", "positions", "read"]

KINDS = (".csv", ".tsv", ".json")


def read(path: str | Path) -> list[str]:
    """The paths that a list names, each once, in its order."""
    file = Path(path).expanduser()
    if file.suffix.lower() not in KINDS:
        got = f'"{file.suffix}"' if file.suffix else "no ending"
        raise ValueError(f"{path}: a list of items to leave out must end in {', '.join(KINDS)}, got {got}")
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable ({getattr(error, 'strerror', None) or error})") from None
    paths = _from_json(path, text) if file.suffix.lower() == ".json" else _from_table(path, text, file.suffix.lower())
    if not paths:
        raise ValueError(f"{path}: it names no item to leave out")
    return list(dict.fromkeys(paths))


def positions(items: Items, paths: Sequence[str], source: str | Path) -> NDArray[np.int64]:
    """Where the items of these names are; a ValueError names those that the set does not have."""
    place = {name: i for i, name in enumerate(items.names)}
    unknown = [path for path in paths if path not in place]
    if unknown:
        shown = ", ".join(unknown[:3]) + (", …" if len(unknown) > 3 else "")
        raise ValueError(
            f"{source}: {len(unknown)} of {len(paths)} paths are no items of {items.name} ({shown}); "
            f"its items are named as {items.names[0]}"
        )
    return np.array(sorted(place[path] for path in paths), np.int64)


def _from_table(name: str | Path, text: str, ending: str) -> list[str]:
    try:
        lines = [
            line
            for line in csv.reader(io.StringIO(text, newline=""), delimiter="\t" if ending == ".tsv" else ",")
            if line
        ]
    except csv.Error as error:
        raise ValueError(f"{name}: not a readable table ({error})") from None
    heading = [cell.strip().lower() for cell in lines[0]] if lines else []
    if "path" not in heading:
        got = ", ".join(heading) or "it is empty"
        raise ValueError(f'{name}: its first line must name a column "path", got {got}')
    column = heading.index("path")
    paths = [text_of_cell(line[column].strip()) if len(line) > column else "" for line in lines[1:]]
    if "" in paths:
        raise ValueError(f"{name}: row {paths.index('') + 2} has no path")
    return paths


def _from_json(name: str | Path, text: str) -> list[str]:
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not valid JSON ({error})") from None
    if not isinstance(content, list):
        raise ValueError(
            f'{name}: it must be a list of paths, or of objects with a "path", got {type(content).__name__}'
        )
    paths: list[Any] = [entry.get("path") if isinstance(entry, dict) else entry for entry in content]
    for number, path in enumerate(paths):
        if not isinstance(path, str) or not path:
            raise ValueError(f"{name}: entry {number} has no path")
    return paths
