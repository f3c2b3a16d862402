"""Tables as CSV that a spreadsheet may open: no name in them becomes a formula, or ends a line.

A text that a spreadsheet would compute gets a quote in front, and one that began with such a quote gets another.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

__all__ = ["csv_text", "text_of_cell"]

_FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # the last four are wide forms of the first
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """The rows, with texts as `text_of_cell` reads them."""
    lines: list[str] = []
    # Cells with a character of the line ending are quoted: with both, also in the middle of a name.
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
    writer.writerows(
        [f"'{cell}" if isinstance(cell, str) and _computed(cell) else cell for cell in row] for row in rows
    )
    return "".join(f"{line[:-2]}\n" for line in lines)


def text_of_cell(cell: str) -> str:
    """A text as it was before it was written by `csv_text`."""
    return cell[1:] if cell.startswith("'") and _computed(cell[1:]) else cell


def _computed(text: str) -> bool:
    return _FORMULA.match(text) is not None and _NUMBER.fullmatch(text) is None
