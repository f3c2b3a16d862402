"""The output of an evaluation: the lines of its table, and a JSON file that is written in full or not at all."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.core import files
from nearkin.core.spreadsheet import csv_text

__all__ = ["Row", "check_error_list", "sentences", "table", "writable", "write", "write_label_errors"]

_COUNTS = {"queries", "without_positives", "unknown", "genuine", "impostors", "classes", "clusters", "iterations"}
_COUNTS |= {"spearman_skipped", "items", "k", "left_out", "repeats", "cohort"}
_PLAIN = {"spearman", "inertia"}  # neither a count nor a share


class Row(NamedTuple):
    """One line of the printed table."""

    protocol: str
    metric: str
    value: str
    interval: str


def table(report: Mapping[str, Any]) -> list[Row]:
    """The lines to print of a report: shares in per cent, counts as integers, anything else as a number."""
    rows = []
    for protocol, scores in report["results"].items():
        intervals = scores.get("intervals", {})
        for name, value in scores.items():
            if isinstance(value, bool | str | list | dict) or (protocol == "open_set" and name == "rank"):
                continue
            ends = intervals.get(name)
            interval = "" if ends is None else "–"  # requested, but there is none
            if ends is not None and ends[0] is not None:
                interval = f"{_formatted(protocol, name, ends[0])} – {_formatted(protocol, name, ends[1])}"
            rows.append(Row(protocol.replace("_", "-"), name, _formatted(protocol, name, value), interval))
        for level, figures in scores.get("levels", {}).items():
            for name in ("recall@1", "map@r", "classes"):
                ends = figures.get("intervals", {}).get(name)
                interval = "" if ends is None else "–"
                if ends is not None and ends[0] is not None:
                    interval = f"{_formatted(protocol, name, ends[0])} – {_formatted(protocol, name, ends[1])}"
                value = _formatted(protocol, name, figures[name])
                rows.append(Row(protocol.replace("_", "-"), f"{level}: {name}", value, interval))
        if "rerank" in scores:
            rows += _reranked(protocol, scores["rerank"])
        if protocol == "open_set":
            rows += _open_set(scores)
        if protocol == "diagnose":
            rows += _findings(scores, report["class_names"])
    return rows


def _reranked(protocol: str, scores: Mapping[str, Any]) -> Iterator[Row]:
    """The figures after re-ranking, and the paired differences to the plain ones."""
    settings = ", ".join(f"{key} {value:g}" for key, value in scores["settings"].items())
    yield Row("re-ranking", scores["method"], settings, "")
    for name, value in [*scores.items(), *_level_figures(scores)]:
        if isinstance(value, bool | str | list | dict) or (value is None and name == "chosen"):
            continue
        ends = scores.get("intervals", {}).get(name)
        interval = "" if ends is None else "–"
        if ends is not None and ends[0] is not None:
            interval = f"{_formatted(protocol, name, ends[0])} – {_formatted(protocol, name, ends[1])}"
        yield Row("re-ranking", name, _formatted(protocol, name, value), interval)
    for name, test in scores["against"].items():
        interval = "–" if test["low"] is None else f"{_points(test['low'])} – {_points(test['high'])}"
        yield Row("re-ranking", f"gain in {name}", f"{_points(test['difference'])} ({test['verdict']})", interval)


def _level_figures(scores: Mapping[str, Any]) -> list[tuple[str, Any]]:
    levels = scores.get("levels", {})
    return [(f"{level}: {name}", figures[name]) for level, figures in levels.items() for name in ("recall@1", "map@r")]


def _points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.2f}"


def writable(path: Path) -> None:
    """Checks before the work that a report can be written there."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: must be a plain file, got {'a folder' if path.is_dir() else 'something else'}")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{path}: the folder {path.parent} is not writable")


def write(path: Path, report: Any) -> None:
    """Replaces the file atomically: the complete new one or, whatever happens, the old one. NaN becomes null."""
    try:
        files.write_json(path, report)
    except OSError as error:
        raise ValueError(f"{path}: could not be written ({error.strerror})") from None


def check_error_list(path: Path) -> None:
    if path.suffix.lower() not in (".csv", ".json"):
        got = f'"{path.suffix}"' if path.suffix else "no ending"
        raise ValueError(f"{path}: a table of label errors must end in .csv or .json, got {got}")


def write_label_errors(path: Path, report: Mapping[str, Any]) -> None:
    """The likely label errors of a diagnosis, surest first: path, label, suggested, score."""
    names = report["class_names"]
    rows = [
        {
            "path": entry.get("name", f"row {entry['item']}"),
            "label": _name(entry["class"], names),
            "suggested": _name(entry["suggested"], names),
            "score": round(entry["agreement"], 4),
        }
        for entry in report["results"]["diagnose"]["label_errors"]
    ]
    if path.suffix.lower() == ".json":
        write(path, rows)
        return
    columns = ("path", "label", "suggested", "score")
    try:
        files.write_text(path, csv_text([columns, *([row[key] for key in columns] for row in rows)]))
    except OSError as error:
        raise ValueError(f"{path}: could not be written ({error.strerror})") from None


def _findings(diagnosis: Mapping[str, Any], names: list[str] | None) -> Iterator[Row]:
    """The lists of a diagnosis, one line per entry."""
    yield Row("diagnose", "collapsed", "yes" if diagnosis["collapse"]["collapsed"] else "no", "")
    for entry in diagnosis["worst_classes"][:3]:
        value = f"{_name(entry['class'], names)}: r_precision {_formatted('', 'r_precision', entry['r_precision'])}"
        yield Row("diagnose", "worst class", value, "")
    for entry in diagnosis["confused_pairs"][:3]:
        pair = " and ".join(_name(number, names) for number in entry["classes"])
        yield Row("diagnose", "confused", f"{pair}: {_formatted('', 'share', entry['share'])}", "")
    yield Row("diagnose", "suspect labels", f"{len(diagnosis['label_errors']):,}", "")
    for entry in [error for error in diagnosis["label_errors"][:3] if "name" in error]:
        label, suggested = (_name(entry[key], names) for key in ("class", "suggested"))
        yield Row("diagnose", "suspect label", f"{entry['name']}: {label}, perhaps {suggested}", "")


def _open_set(scores: Mapping[str, Any]) -> Iterator[Row]:
    """Per number of examples the nearest item at each FPIR; then what `identify` states and what was observed."""
    for entry in scores["examples"]:
        figures, number = entry["methods"]["nearest"], entry["examples"]
        of = f"{number} example{'s' * (number > 1)}"
        yield Row("open-set", f"{of}: labels enrolled", f"{entry['labels']:,}", "")
        for name in [*(f"fnir@fpir={fpir:g}" for fpir in scores["fpirs"]), "auroc"]:
            ends = figures.get("intervals", {}).get(name) or (None, None)
            inside = "–" if ends[0] is None else f"{_formatted('', name, ends[0])} – {_formatted('', name, ends[1])}"
            yield Row("open-set", f"{of}: {name}", _formatted("", name, figures[name]), inside)
    for rate in (scores.get("identify") or {}).get("rates", []):
        if rate["verdict"] is not None:
            low, high = rate["interval"]
            inside = "–" if low is None else f"{100 * low:.2f} % – {100 * high:.2f} %"
            where = f"identify, {rate['labels']} × {rate['examples']}, stated {100 * rate['stated']:.2g} %"
            yield Row("open-set", where, f"{100 * rate['observed']:.2f} %", inside)


def sentences(report: Mapping[str, Any]) -> list[str]:
    """What is printed below the table: the best methods of open-set identification, and what identify keeps."""
    scores = report["results"].get("open_set")
    if scores is None:
        return []
    lines = []
    for entry in scores["examples"]:
        number = entry["examples"]
        of = f"{number} example{'s' * (number > 1)} per label"
        lines += [f"{of}: {choice['sentence']}" for choice in entry["choices"]]
    checked = scores.get("identify")
    return lines if checked is None else [*lines, checked["sentence"]]


def _name(number: int, names: list[str] | None) -> str:
    return str(number) if names is None else names[number]


def _formatted(protocol: str, name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name in _COUNTS:
        return f"{round(value):,}"
    if protocol == "diagnose" or name in _PLAIN or "distance" in name or "threshold" in name:
        return f"{value:.4g}"
    if name.startswith("seen_far"):  # may be one in a million
        return f"{100 * value:.3g} %"
    return f"{100 * value:.2f} %"
