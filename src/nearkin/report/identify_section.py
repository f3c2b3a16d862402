"""How right `identify` is, in the page of open-set identification: figures, verdicts, reliability, rates asked."""

from collections.abc import Mapping, Sequence
from typing import Any

from nearkin.report import charts, format
from nearkin.report.charts import Line
from nearkin.report.format import escape, name_html

__all__ = ["IDENTIFY", "figure", "identify", "prose", "table"]

Figures = Mapping[str, Any]
IDENTIFY = (
    "Galleries of half of the classes have learned from their own rows, as identify does, and answer for all other "
    "items. Gain: right decisions where half of the items is of strangers and the likeliest answer counts; beside it "
    "that of the best threshold on the same score. ECE: stated less true probability, in the mean."
)
_ANSWERS = (
    "At the defaults: named or unknown from a probability of {sure:g} on, where {prior} of the items are expected "
    "to be of strangers."
)
_RELIABLE = (
    "Of all answers with about the same stated probability, the share that is true; on the thin line both are equal. "
    "Half of the items is of strangers. Whiskers: 95 % intervals over classes, of the most examples."
)
_KINDS = {"unknown": "“Nobody who is enrolled”", "named": "“It is this label”"}


def identify(identified: Figures, fpirs: Sequence[float]) -> str:
    """The section; "" where nothing was measured."""
    entries = identified["examples"]
    if not entries:
        return ""
    spoken = [f"{_examples(entry)} per label: {entry['sentence']}" for entry in entries] + [identified["sentence"]]
    answers = _ANSWERS.format(sure=identified["sure"], prior=f"{100 * identified['prior']:g} %")
    right = {"gain": "gain", "oracle": "best threshold", "ece_unknown": "ECE of unknown", "ece_named": "ECE of named"}
    found = {f"dir@fpir={fpir:g}": f"DIR at FPIR {fpir:g}" for fpir in fpirs} | {"oscr": "OSCR"}
    return (
        f'<ul class="notes">{"".join(f"<li>{prose(sentence)}</li>" for sentence in spoken)}</ul>'
        f"{_columns(entries, right)}{_columns(entries, found)}"
        f"<h3>Answers</h3><p>{prose(answers)}</p>{_verdicts(entries)}{_reliability(entries)}{_rates(entries)}"
    )


def _columns(entries: Sequence[Figures], names: Mapping[str, str]) -> str:
    shown = {key: name for key, name in names.items() if any(entry[key] is not None for entry in entries)}
    return table(
        "labels × examples", list(shown.values()), [(_gallery(e), [figure(e, key) for key in shown]) for e in entries]
    )


def _verdicts(entries: Sequence[Figures]) -> str:
    rows = []
    for entry in entries:
        known, strangers = entry["known"], entry["strangers"]
        rows.append(
            (f"{_gallery(entry)}, known", [figure(known, name) for name in ("right", "wrong", "unsure", "unknown")])
        )
        rest = [figure(strangers, name) for name in ("named", "unsure", "unknown")]
        rows.append((f"{_gallery(entry)}, strangers", ["–", *rest]))
    return table("labels × examples", ["named rightly", "wrongly", "unsure", "unknown"], rows)


def _reliability(entries: Sequence[Figures]) -> str:
    drawn = [(title, _diagram(entries, kind, title)) for kind, title in _KINDS.items()]
    body = "".join(f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in drawn if svg)
    return f'<h3>Reliability</h3><p>{prose(_RELIABLE)}</p><div class="charts">{body}</div>' if body else ""


def _diagram(entries: Sequence[Figures], kind: str, title: str) -> str:
    """The share that came true over the stated probability, of each number of examples; whiskers on the last one."""
    series = []
    for entry, style in zip(entries[-len(charts.STYLES) :], charts.STYLES, strict=False):
        bins = entry["reliability"][kind]
        bins = [one for one in bins if _ends(one["interval"])] or bins  # a handful of answers would draw a spike
        ends = [_ends(one["interval"]) if entry is entries[-1] else None for one in bins]
        xs, ys = [one["stated"] for one in bins], [one["observed"] for one in bins]
        series += [Line(_examples(entry), xs, ys, style, ends)] if bins else []
    if not series:
        return ""
    equal = Line("", [0.0, 1.0], [0.0, 1.0], "faint")
    return charts.lines(
        [equal, *series], title=f"Reliability of {title}", x_label="stated", form=format.percent, from_zero=True,
        x_form=format.percent,
    )  # fmt: skip


def _rates(entries: Sequence[Figures]) -> str:
    rows, notes = [], []
    for entry in entries:
        for rate in entry["far"]:
            observed = figure(rate | {"intervals": {"observed": rate["interval"]}}, "observed")
            expected, right = (escape(format.share(rate[key])) for key in ("expected", "right"))
            cells = [expected, observed, right, rate["verdict"] or "–"]
            rows.append((f"{_gallery(entry)}, far {rate['asked']:g}", cells))
            notes += [rate["note"]] if rate["note"] else []
    said = "".join(f"<li>{prose(note)}</li>" for note in dict.fromkeys(notes))
    body = table("labels × examples", ["expected", "strangers named", "known named rightly", "verdict"], rows)
    return "<h3>Rates asked</h3>" + body + (f'<ul class="notes">{said}</ul>' if said else "")


def _examples(entry: Figures) -> str:
    return format.count(entry["examples"], "example", "examples")


def _gallery(entry: Figures) -> str:
    return f"{entry['labels']:,} × {entry['examples']}"


def _ends(interval: Sequence[float | None] | None) -> tuple[float, float] | None:
    low, high = interval or (None, None)
    return None if low is None or high is None else (low, high)


def figure(figures: Figures, key: str, plain: bool = False) -> str:
    """A cell: a share, or a plain number, with its interval below."""
    value = figures[key]
    if value is None:
        return "–"
    text, ends, around = (
        f"{value:.4f}" if plain else format.share(value),
        "",
        _ends((figures.get("intervals") or {}).get(key)),
    )
    if around is not None:
        low, high = around
        ends = f"{low:.4f}–{high:.4f}" if plain else f"{100 * low:.1f}–{100 * high:.1f}"
    return f"<span>{escape(text)}{f'<br><small>{ends}</small>' if ends else ''}</span>"


def table(first: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
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


def prose(sentence: str) -> str:
    return escape(sentence).replace(" %", "\u202f%")
