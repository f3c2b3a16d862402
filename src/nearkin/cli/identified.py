"""What `nearkin identify` says: sentences for one item, a table for many, and rows of a file."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin.cli.screen import echo, print_json, print_note, print_table
from nearkin.cli.verb import is_quiet

if TYPE_CHECKING:
    from nearkin.gallery import Answered, FarStatement, Identity

__all__ = ["check_out", "in_review", "percent", "print_many", "print_one", "promise", "write_rows"]

CANDIDATES = 5  # labels per row of a file, and per item of a folder
PROMISE = 0.5  # a bound above it says nothing
ENDINGS = (".csv", ".jsonl")
COLUMNS = (
    "file",
    "verdict",
    "label",
    "best",
    "p_right",
    "p_unknown",
    "next",
    "p_next",
    "similarity",
    "nearest",
    "note",
)


def print_one(answered: "Answered", json: bool) -> None:
    answer = answered.answer
    assert answer is not None
    if json:
        print_json(_document(answered))
        return
    echo(_sentence(answer))
    if answer.candidates:
        rated = "" if answer.quality is None else f"; quality of the picture {answer.quality:.4g}"
        best = answer.candidates[0]
        echo(f"nearest of {best.label}: {answered.nearest}, similarity {best.similarity:.4f}{rated}")
    _print_promise([answered])


def print_many(rows: "Sequence[Answered]", json: bool, out: Path | None) -> None:
    if json:
        print_json([_document(row, CANDIDATES) for row in rows])
        return
    if out is None:
        names = ("file", "verdict", "best", "probability", "unknown", "nearest")
        print_table(names, [_cells(row) for row in rows], "")
    elif not is_quiet():
        echo(f"{out}: {len(rows):,} rows")
    if not is_quiet():
        echo(_summary(rows))
    _print_promise(rows)


def in_review(rows: "Sequence[Answered]") -> "list[Answered]":
    """The unsure ones first, then what cannot be read, then the others; those with the least certain answer first."""

    def order(row: "Answered") -> tuple[int, float]:
        if row.answer is None:
            return 1, 0.0
        certain = max(row.answer.p_right or 0.0, row.answer.p_unknown or 0.0)
        return (0 if row.answer.verdict == "unsure" else 2), certain

    return sorted(rows, key=order)


def check_out(out: Path | None) -> None:
    """Before the work rather than after it."""
    if out is None:
        return
    if out.suffix.lower() not in ENDINGS:
        raise ValueError(f"--out must end in {' or '.join(ENDINGS)}, got {out}")
    if not out.resolve().parent.is_dir():
        raise ValueError(f"{out}: the folder {out.parent} does not exist")
    if out.is_dir():
        raise ValueError(f"{out}: is a folder; --out names a file")


def write_rows(out: Path, rows: "Sequence[Answered]") -> None:
    """A table or lines of JSON; the old file stays until the new one is complete."""
    from nearkin.core import files

    lines = _csv_lines if out.suffix.lower() == ".csv" else _json_lines
    with files.explained(f"{out}", "make room, or name another file"), files.replacing(out) as file:
        for line in lines(rows):
            file.write(line.encode("utf-8", "backslashreplace"))


def _sentence(answer: "Identity") -> str:
    if answer.p_right is None or answer.p_unknown is None:
        if not answer.candidates:
            return "unsure: no label is near"
        return f"unsure: nearest {answer.candidates[0].label}"
    best, next_ = answer.candidates[0].label, ""
    right, unknown = percent(answer.p_right), percent(answer.p_unknown)
    if answer.verdict == "unsure":
        return f"unsure: {best} {right}, unknown {unknown}"
    if answer.verdict == "unknown":
        likely = f"unknown {unknown}; " if answer.p_unknown >= 0.5 else f"unknown, below the threshold ({unknown}); "
        return f"{likely}nearest {best} {right}"
    if len(answer.candidates) > 1 and (probability := answer.candidates[1].confidence) is not None:
        next_ = f"; next {answer.candidates[1].label} {percent(probability)}"
    how = "probably" if answer.p_right >= 0.5 else "above the threshold"
    return f"{best}, {how} ({right}; unknown {unknown}{next_})"


def _summary(rows: "Sequence[Answered]") -> str:
    """Counts, and how many of the named are expected to be wrong."""
    answers = [row.answer for row in rows if row.answer is not None]
    named = [answer for answer in answers if answer.verdict == "named"]
    parts = [f"{len(named):,} of {len(rows):,} named"]
    if named and (wrong := [1 - answer.p_right for answer in named if answer.p_right is not None]):
        expected = sum(wrong)
        parts[0] += f" ({f'{expected:.1f}' if expected >= 0.05 else 'less than 0.1'} of them expected to be wrong)"
    parts += [
        f"{count:,} {verdict}"
        for verdict in ("unsure", "unknown")
        if (count := sum(answer.verdict == verdict for answer in answers))
    ]
    if len(answers) < len(rows):
        parts.append(f"{len(rows) - len(answers):,} unreadable")
    return ", ".join(parts)


def _print_promise(rows: "Sequence[Answered]") -> None:
    """What holds for all answers: the share of strangers that are named, and notes."""
    answers = [row.answer for row in rows if row.answer is not None]
    for line in dict.fromkeys(_strangers(answer.far) for answer in answers if answer.far and answer.far.classes):
        echo(line)
    for note in dict.fromkeys(answer.note for answer in answers):
        print_note(note)


def _strangers(far: "FarStatement") -> str:
    bound = f"at most {promise(far.at_most)} with 95 % confidence if strangers are like your labels"
    if far.at_most > PROMISE:
        bound = f"{far.classes:,} labels are too few to bound it"
    return f"expected {percent(far.expected, 2)} of strangers named; {bound}"


def promise(bound: float) -> str:
    """A bound, where it says something."""
    return "–" if bound > PROMISE else percent(bound, 2)


def _cells(row: "Answered") -> tuple[str, ...]:
    answer = row.answer
    if answer is None:
        return row.name, "unreadable", "", "", "", row.why.removeprefix(row.name).lstrip(": ")
    best = answer.candidates[0].label if answer.candidates else ""
    right, unknown = ("" if p is None else percent(p) for p in (answer.p_right, answer.p_unknown))
    return row.name, answer.verdict, best, right, unknown, row.nearest


def _document(row: "Answered", candidates: int | None = None) -> dict[str, Any]:
    """As JSON has it. candidates: how many of them."""
    answer = row.answer
    if answer is None:
        return {"file": row.name, "verdict": "unreadable", "label": None, "error": row.why}
    return (
        {"file": row.name}
        | answer._asdict()
        | {"far": None if answer.far is None else answer.far._asdict()}
        | {"candidates": [candidate._asdict() for candidate in answer.candidates[:candidates]]}
        | {"nearest": row.nearest}
    )


def _json_lines(rows: "Sequence[Answered]") -> Iterator[str]:
    for row in rows:
        yield json.dumps(_document(row, CANDIDATES), ensure_ascii=False, allow_nan=False) + "\n"


def _csv_lines(rows: "Sequence[Answered]") -> Iterator[str]:
    from nearkin.core.spreadsheet import csv_text

    yield csv_text([COLUMNS])
    for row in rows:
        yield csv_text([[_number(value) if isinstance(value, float) else value for value in _values(row)]])


def _values(row: "Answered") -> tuple[Any, ...]:
    answer = row.answer
    if answer is None:
        return row.name, "unreadable", "", "", None, None, "", None, None, "", row.why
    best, next_ = (answer.candidates[i] if len(answer.candidates) > i else None for i in (0, 1))
    return (
        *(row.name, answer.verdict, answer.label or "", best.label if best else "", answer.p_right, answer.p_unknown),
        *(next_.label if next_ else "", next_.confidence if next_ else None, answer.similarity),
        *(row.nearest, answer.note),
    )


def _number(value: float) -> float:
    """With six digits."""
    return float(f"{value:.6g}")


def percent(share: float, digits: int | None = None) -> str:
    """In whole per cent, never rounded to certainty; with `digits` so many that count."""
    if digits is not None:
        return f"{100 * share:.{digits}g} %" if share < 0.995 else "100 %"
    if share < 0.005:
        return "< 1 %"
    return "> 99 %" if share > 0.995 else f"{100 * share:.0f} %"
