"""The page of open-set identification: FNIR over FPIR, the best method, and whether `identify` keeps its FAR."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearkin.core import files
from nearkin.report import charts, format
from nearkin.report.charts import Line
from nearkin.report.format import escape, name_html
from nearkin.report.template import Section, document

__all__ = ["write_open_set"]

Results = Mapping[str, Any]  # what `nearkin evaluate --open-set --json` writes
PLAIN = "nearest"
USUAL = 0.01
_DRAWN = ("nearest", "template", "nearest+as-norm", "template+as-norm")  # as many as a chart has styles
_VERDICTS = {"kept": "kept", "not shown": "not shown", "exceeded": "exceeded", None: "–"}
_CURVES = (
    "Searches of unknown items that get a label, and searches of enrolled ones that miss theirs at rank 1, at every "
    "threshold. Lower is better. Whiskers: 95 % intervals over identities."
)
_METHODS = (
    "FNIR at rank 1, its 95 % interval below. A method is called better than the nearest item where two paired tests "
    "over classes agree, with their level divided by the number of methods."
)
_IDENTIFY = (
    "The FAR per query that identify states for a gallery of so many labels, and the share of items of unknown classes "
    "that it accepted."
)


def write_open_set(path: str | Path, results: Results) -> None:
    """Writes the page atomically, from the results of `nearkin evaluate --open-set`."""
    text = page(results)
    with files.explained(str(path), "make room, or choose another path"):
        files.write_text(path, text)


def page(results: Results) -> str:
    """The HTML of the page."""
    scores = results["results"]["open_set"]
    title = f"{Path(results['embeddings']['file']).name}: open-set identification"
    sections: list[Section] = [
        ("curves", "FNIR over FPIR", _CURVES, _curves(scores)),
        ("methods", "Methods", _METHODS, _methods(scores)),
        ("identify", "identify", _IDENTIFY, _identify(scores.get("identify") or {})),
        ("protocol", "Protocol", "", _protocol(scores)),
    ]
    sentence = _headline(scores)
    notes = "".join(f"<li>{_prose(note)}</li>" for note in [*scores.get("notes", []), *results.get("notes", [])])
    opening = _lede(scores) + (f'<ul class="notes">{notes}</ul>' if notes else "")
    return document("nearkin open set", title, sentence, opening, [section for section in sections if section[3]])


def _headline(scores: Results) -> str:
    entry, fpir = _chief(scores)
    value = entry["methods"][PLAIN][f"dir@fpir={fpir:g}"] if fpir is not None else None
    if value is None or fpir is None:
        return "The searches are too few to quote any FPIR."
    return (
        f"{100 * value:.1f} % of searches for an enrolled label find it when {100 * fpir:g} % of unknown items get one"
    )


def _chief(scores: Results) -> tuple[Mapping[str, Any], float | None]:
    """The most examples, and the strictest FPIR that is quoted for them, but no stricter than 0.01."""
    entry = scores["examples"][-1]
    quoted = [f for f in scores["fpirs"] if entry["methods"][PLAIN][f"fnir@fpir={f:g}"] is not None]
    return entry, min((f for f in quoted if f >= USUAL), default=max(quoted, default=None))


def _lede(scores: Results) -> str:
    entry, fpir = _chief(scores)
    if fpir is None:
        return f"<p>{escape(_headline(scores))}</p>"
    figures = entry["methods"][PLAIN]
    low, high = (figures.get("intervals") or {}).get(f"dir@fpir={fpir:g}") or (None, None)
    ends = "" if low is None or high is None else f"95 % interval {100 * low:.1f}–{100 * high:.1f}"
    inside = f' <span class="soft">{ends}</span>' if ends else ""
    where = (
        f"found at FPIR {fpir:g}, with {format.count(entry['examples'], 'example', 'examples')} per label, "
        f"{entry['labels']:,} labels"
    )
    return (
        f'<p class="lede"><strong>{escape(format.share(figures[f"dir@fpir={fpir:g}"]))}</strong> '
        f'<span class="where">{escape(where)}{inside}</span> <span class="other"><span>AUROC</span> '
        f"<b>{figures['auroc']:.3f}</b></span></p>"
    )


def _curves(scores: Results) -> str:
    by_examples = [
        _line(entry, PLAIN, format.count(entry["examples"], "example", "examples"), scores["fpirs"], style)
        for entry, style in zip(scores["examples"], charts.STYLES, strict=False)
    ]
    last = scores["examples"][-1]
    by_method = [
        _line(last, name, name, (), style)
        for name, style in zip((n for n in _DRAWN if n in last["methods"]), charts.STYLES, strict=False)
    ]
    count = format.count(last["examples"], "example", "examples")
    figures = [("By examples per label, nearest item", by_examples), (f"By method, {count} per label", by_method)]
    drawn = [
        (title, _chart(title, series)) for title, series in figures if len(series) > 1 or title.startswith("By ex")
    ]
    body = "".join(f"<figure><figcaption>{title}</figcaption>{svg}</figure>" for title, svg in drawn if svg)
    return f'<div class="charts">{body}</div>' if body else ""


def _chart(title: str, series: Sequence[Line]) -> str:
    exponents = [x for line in series for x in line.xs]
    if not exponents:
        return ""
    powers = list(range(math.ceil(min(exponents) - 1e-9), 1))
    return charts.lines(
        series, title=f"FNIR over FPIR. {title}", x_label="FPIR", form=format.percent, from_zero=True,
        x_ticks=powers or None, x_form=lambda x: f"{10**x:.3g}",
    )  # fmt: skip


def _line(entry: Mapping[str, Any], method: str, name: str, fpirs: Sequence[float], style: str) -> Line:
    """A curve over the logarithm of FPIR; at the rates that are quoted, with their intervals."""
    figures = entry["methods"][method]
    points: dict[float, tuple[float, tuple[float, float] | None]] = {
        math.log10(point["fpir"]): (point["fnir"], None) for point in figures["curve"] if point["fpir"] > 0
    }
    for fpir in fpirs:
        value = figures[f"fnir@fpir={fpir:g}"]
        low, high = (figures.get("intervals") or {}).get(f"fnir@fpir={fpir:g}") or (None, None)
        if value is not None:
            points[math.log10(fpir)] = value, None if low is None or high is None else (low, high)
    xs = sorted(points)
    return Line(name, xs, [points[x][0] for x in xs], style, [points[x][1] for x in xs])


def _methods(scores: Results) -> str:
    fpirs = scores["fpirs"]
    body = ""
    for entry in scores["examples"]:
        columns = [*(f"FPIR {fpir:g}" for fpir in fpirs), "AUROC"]
        names = [*(f"fnir@fpir={fpir:g}" for fpir in fpirs), "auroc"]
        rows = [
            (name, [_figure(figures, key, key == "auroc") for key in names])
            for name, figures in entry["methods"].items()
        ]
        title = f"{format.count(entry['examples'], 'example', 'examples')} per label, {entry['labels']:,} labels"
        verdicts = "".join(f"<li>{_prose(choice['sentence'])}</li>" for choice in entry["choices"])
        body += f"<h3>{escape(title)}</h3>{_table('method', columns, rows)}"
        body += f'<ul class="notes">{verdicts}</ul>' if verdicts else ""
    return body


def _figure(figures: Mapping[str, Any], key: str, plain: bool) -> str:
    value = figures[key]
    if value is None:
        return "–"
    low, high = (figures.get("intervals") or {}).get(key) or (None, None)
    text = f"{value:.4f}" if plain else format.share(value)
    ends = ""
    if low is not None and high is not None:
        ends = f"{low:.4f}–{high:.4f}" if plain else f"{100 * low:.1f}–{100 * high:.1f}"
    return f"{escape(text)}{f'<br><small>{ends}</small>' if ends else ''}"


def _identify(checked: Mapping[str, Any]) -> str:
    if not checked:
        return ""
    rows = []
    for rate in checked["rates"]:
        asked = "likeliest" if rate["requested"] is None else f"far {rate['requested']:g}"
        cells = [format.share(rate[key]) if rate[key] is not None else "–" for key in ("stated", "observed")]
        low, high = rate["interval"] or (None, None)
        inside = "" if low is None or high is None else f"<br><small>{100 * low:.2f}–{100 * high:.2f}</small>"
        found = "–" if rate["recognised"] is None else format.share(rate["recognised"])
        name = f"{rate['labels']:,} × {rate['examples']}, {asked}"
        if rate["verdict"] is not None:
            rows.append((name, [escape(cells[0]), escape(cells[1]) + inside, found, _VERDICTS[rate["verdict"]]]))
    refused = [rate for rate in checked["rates"] if rate["stated"] is None and rate["requested"] is not None]
    notes = "".join(f"<li>{_prose(note)}</li>" for note in dict.fromkeys(rate["note"] for rate in refused[:6]))
    text = f"<p>{_prose(checked['sentence'])} The calibration: {escape(checked['calibration'])}.</p>"
    table = _table("labels × examples", ["stated", "observed", "recognised", ""], rows) if rows else ""
    return text + table + (f'<ul class="notes">{notes}</ul>' if notes else "")


def _protocol(scores: Results) -> str:
    sizes = ", ".join(
        f"{entry['examples']}: {entry['mated']:,} with a mate and {entry['nonmated']:,} without"
        for entry in scores["examples"]
    )
    cohort = f"{scores['cohort']:,} training classes are the cohort of AS-norm." if scores["cohort"] else ""
    lines = [
        f"{scores['classes']:,} classes of {scores['items']:,} items; {scores['repeats']} random halves, one enrolled, "
        "the other unknown.",
        f"Searches per half, by examples per label: {sizes}.",
        "FPIR: share of searches without a mate whose best label reaches the threshold. FNIR: share of searches with a "
        "mate that is not at rank 1 or does not reach it. DIR = 1 - FNIR.",
        cohort,
    ]
    return "".join(f"<p>{_prose(line)}</p>" for line in lines if line)


def _table(first: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Cells are HTML."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in (first, *columns))
    body = "".join(
        f'<tr><th scope="row">{name_html(name)}</th>'
        + "".join(
            f'<td class="figure" data-column="{escape(column)}">{cell}</td>'
            for column, cell in zip(columns, cells, strict=True)
        )
        + "</tr>"
        for name, cells in rows
    )
    return f'<table class="parts"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _prose(sentence: str) -> str:
    return escape(sentence).replace(" %", "\u202f%")
