"""What is shown and kept of an evaluation: the lines of its table, and a JSON file that is whole or not there."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.core import files

__all__ = ["Row", "table", "writable", "write"]

_COUNTS = {"queries", "without_positives", "unknown", "genuine", "impostors", "classes", "clusters", "iterations"}
_COUNTS |= {"spearman_skipped", "items", "k"}
_PLAIN = {"spearman", "inertia"}  # neither a count nor a share


class Row(NamedTuple):
    """One line of the printed table."""

    protocol: str
    metric: str
    value: str
    interval: str


def table(report: Mapping[str, Any]) -> list[Row]:
    """What is printed of a report: shares in per cent, counts whole, anything else as a number."""
    rows = []
    for protocol, found in report["results"].items():
        ends = found.get("intervals", {})
        for name, value in found.items():
            if isinstance(value, bool | str | list | dict):
                continue
            pair = ends.get(name)
            interval = "" if pair is None else "–"  # asked for, but there is none
            if pair is not None and pair[0] is not None:
                interval = f"{_shown(protocol, name, pair[0])} – {_shown(protocol, name, pair[1])}"
            rows.append(Row(protocol.replace("_", "-"), name, _shown(protocol, name, value), interval))
        if protocol == "diagnose":
            rows += _findings(found, report["class_names"])
    return rows


def writable(path: Path) -> None:
    """A report can be written there; said before the work rather than after it."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: must be a plain file, got {'a folder' if path.is_dir() else 'something else'}")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{path}: the folder {path.parent} is not writable")


def write(path: Path, report: Mapping[str, Any]) -> None:
    """JSON in one piece: the whole new file or, whatever happens, the old one. A number that is NaN is null."""
    try:
        files.write_json(path, report)
    except OSError as error:
        raise ValueError(f"{path}: could not be written ({error.strerror})") from None


def _findings(found: Mapping[str, Any], names: list[str] | None) -> Iterator[Row]:
    """The lists of a diagnosis, each in a line."""
    collapse = found["collapse"]
    yield Row("diagnose", "collapsed", "yes" if collapse["collapsed"] else "no", "")
    for one in found["worst_classes"][:3]:
        value = f"{_named(one['class'], names)}: r_precision {_shown('', 'r_precision', one['r_precision'])}"
        yield Row("diagnose", "worst class", value, "")
    for one in found["confused_pairs"][:3]:
        pair = " and ".join(_named(number, names) for number in one["classes"])
        yield Row("diagnose", "confused", f"{pair}: {_shown('', 'share', one['share'])}", "")
    yield Row("diagnose", "suspect labels", f"{len(found['label_errors']):,}", "")
    for one in [error for error in found["label_errors"][:3] if "name" in error]:
        told, instead = (_named(one[key], names) for key in ("class", "suggested"))
        yield Row("diagnose", "suspect label", f"{one['name']}: {told}, perhaps {instead}", "")


def _named(number: int, names: list[str] | None) -> str:
    return str(number) if names is None else names[number]


def _shown(protocol: str, name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name in _COUNTS:
        return f"{round(value):,}"
    if protocol == "diagnose" or name in _PLAIN or "distance" in name or "threshold" in name:
        return f"{value:.4g}"
    if name.startswith("seen_far"):  # may be one in a million
        return f"{100 * value:.3g} %"
    return f"{100 * value:.2f} %"
