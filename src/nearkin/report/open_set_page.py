"""The page of open-set identification: how right `identify` is, FNIR over FPIR, and the best method."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearkin.core import files
from nearkin.report import charts, format
from nearkin.report.charts import Line
from nearkin.report.format import escape
from nearkin.report.identify_section import IDENTIFY, figure, identify, prose, table
from nearkin.report.template import Section, document

__all__ = ["write_open_set"]

Results = Mapping[str, Any]  # what `nearkin evaluate --open-set --json` writes
PLAIN = "nearest"
USUAL = 0.01
_DRAWN = ("nearest", "template", "nearest+as-norm")  # and identify: as many as a chart has styles
_CURVES = (
    "Searches of unknown items that get a label, and searches of enrolled ones that miss theirs at rank 1, at every "
    "threshold. Lower is better. Whiskers: 95 % intervals over identities."
)
_METHODS = (
    "FNIR at rank 1, its 95 % interval below. A method is called better than the nearest item where two paired tests "
    "over classes agree, with their level divided by the number of methods."
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
        ("identify", "identify", IDENTIFY, identify(scores["identify"], scores["fpirs"])),
        ("curves", "FNIR over FPIR", _CURVES, _curves(scores)),
        ("methods", "Methods", _METHODS, _methods(scores)),
        ("protocol", "Protocol", "", _protocol(scores)),
    ]
    sentence = _headline(scores)
    notes = "".join(f"<li>{prose(note)}</li>" for note in [*scores.get("notes", []), *results.get("notes", [])])
    opening = _lede(scores) + (f'<ul class="notes">{notes}</ul>' if notes else "")
    return document("nearkin open set", title, sentence, opening, [section for section in sections if section[3]])


def _headline(scores: Results) -> str:
    _, figures, fpir = _chief(scores)
    if fpir is None:
        return "The searches are too few to quote any FPIR."
    found = 100 * figures[f"dir@fpir={fpir:g}"]
    return f"{found:.1f} % of searches for an enrolled label find it when {100 * fpir:g} % of unknown items get one"


def _chief(scores: Results) -> tuple[Results, Results, float | None]:
    """The most examples, as identify answers, or else the nearest item; their figures, and the strictest FPIR that is
    quoted for them, but no stricter than 0.01."""
    entries = scores["identify"]["examples"]
    entry = entries[-1] if entries else scores["examples"][-1]
    figures = entry if entries else entry["methods"][PLAIN]
    quoted = [f for f in scores["fpirs"] if figures[f"fnir@fpir={f:g}"] is not None]
    return entry, figures, min((f for f in quoted if f >= USUAL), default=max(quoted, default=None))


def _lede(scores: Results) -> str:
    entry, figures, fpir = _chief(scores)
    if fpir is None:
        return f"<p>{escape(_headline(scores))}</p>"
    low, high = (figures.get("intervals") or {}).get(f"dir@fpir={fpir:g}") or (None, None)
    ends = "" if low is None or high is None else f"95 % interval {100 * low:.1f}–{100 * high:.1f}"
    inside = f' <span class="soft">{ends}</span>' if ends else ""
    by = " by identify" if entry is figures else ""
    where = (
        f"found at FPIR {fpir:g}{by}, with {format.count(entry['examples'], 'example', 'examples')} per label, "
        f"{entry['labels']:,} labels"
    )
    return (
        f'<p class="lede"><strong>{escape(format.share(figures[f"dir@fpir={fpir:g}"]))}</strong> '
        f'<span class="where">{escape(where)}{inside}</span> <span class="other"><span>OSCR</span> '
        f"<b>{figures['oscr']:.3f}</b></span></p>"
    )


def _curves(scores: Results) -> str:
    by_examples = [
        _line(entry["methods"][PLAIN], format.count(entry["examples"], "example", "examples"), scores["fpirs"], style)
        for entry, style in zip(scores["examples"], charts.STYLES, strict=False)
    ]
    last = scores["examples"][-1]
    answers = {e["examples"]: e for e in scores["identify"]["examples"]}
    compared = {"identify": answers[last["examples"]]} if last["examples"] in answers else {}
    compared |= {name: last["methods"][name] for name in _DRAWN if name in last["methods"]}
    by_method = [
        _line(figures, name, (), style) for (name, figures), style in zip(compared.items(), charts.STYLES, strict=False)
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


def _line(figures: Mapping[str, Any], name: str, fpirs: Sequence[float], style: str) -> Line:
    """A curve over the logarithm of FPIR; at the rates that are quoted, with their intervals."""
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
        columns = [*(f"FPIR {fpir:g}" for fpir in fpirs), "AUROC", "OSCR"]
        names = [*(f"fnir@fpir={fpir:g}" for fpir in fpirs), "auroc", "oscr"]
        rows = [
            (name, [figure(figures, key, key in ("auroc", "oscr")) for key in names])
            for name, figures in entry["methods"].items()
        ]
        title = f"{format.count(entry['examples'], 'example', 'examples')} per label, {entry['labels']:,} labels"
        verdicts = "".join(f"<li>{prose(choice['sentence'])}</li>" for choice in entry["choices"])
        body += f"<h3>{escape(title)}</h3>{table('method', columns, rows)}"
        body += f'<ul class="notes">{verdicts}</ul>' if verdicts else ""
    return body


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
        "mate that is not at rank 1 or does not reach it. DIR = 1 - FNIR. AUROC: how often a search with a mate scores "
        "higher than one without; OSCR: where it is at rank 1 as well.",
        cohort,
    ]
    return "".join(f"<p>{prose(line)}</p>" for line in lines if line)
