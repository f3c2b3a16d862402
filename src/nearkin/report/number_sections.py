"""Sections of numbers: headline, results, training, data, recipe."""

from collections.abc import Mapping, Sequence
from typing import Any

from nearkin.core import toml
from nearkin.report import charts, format
from nearkin.report.charts import Line, Mark
from nearkin.report.findings import Findings
from nearkin.report.format import escape, finite, metric_value, name_html, number

__all__ = ["data", "groups", "headline", "length", "levels", "recipe", "results", "short_embeddings", "training"]
__all__ += ["verdict"]

_MAIN = ("recall@1", "map@r", "ndcg@10", "ndcg@5", "ndcg@1", "spearman", "accuracy")
_OWN_SECTION = {
    "compatible",
    "groups",
    "interpolation",
    "lengths",
    "levels",
    "rerank",
}  # results that are not of this table
_LENGTH_METRICS = ("recall@1", "map@r", "ndcg@10")  # of short embeddings; the last that there is decides
_ORDER = ("trained", "baseline", "untrained")


def headline(findings: Findings) -> tuple[str, str]:
    """The main figure as a sentence in plain text, and as the page's opening paragraph."""
    test = _by_model(findings.results.get("test"))
    name = _main(test.get("trained", {}))
    if name is None:
        return "No test figures: this run was not tested.", "<p>No test figures: this run was not tested.</p>"
    value, low, high = _value(test["trained"][name])
    where = f"{format.metric_name(name)} on {_test_size(findings)}"
    inside = f"{metric_value(name, low, unit=False)}–{metric_value(name, high, unit=False)}" if low is not None else ""
    others = [
        (_model_name(findings, who), metric_value(name, _value(test[who][name])[0]))
        for who in _ORDER[1:]
        if name in test.get(who, {})
    ]
    sentence = f"{where}: {metric_value(name, value)}" + (f" ({inside})" if inside else "")
    sentence = "; ".join([sentence, *(f"{who} {much}" for who, much in others)]) + "."
    body = (
        f'<p class="lede"><strong>{escape(metric_value(name, value))}</strong> <span class="where">{escape(where)}'
        + (f' <span class="soft">95 % interval {escape(inside)}</span>' if inside else "")
        + "</span>"
        + "".join(f' <span class="other"><span>{name_html(who)}</span> <b>{much}</b></span>' for who, much in others)
        + "</p>"
    )
    return sentence, body


def verdict(findings: Findings) -> str:
    """Whether training helped, in one sentence; where it did not, as a warning."""
    result = findings.results.get("verdict")
    if not isinstance(result, Mapping) or not result.get("sentence"):
        return ""
    poor = result.get("helped") is False or result.get("below")
    style = 'class="alert" role="alert"' if poor else 'class="helped"'
    sentence = escape(format.short(result["sentence"], 600)).replace(" %", "\u202f%")  # a non-breaking space
    return f"<div {style}><p>{sentence}</p></div>"


def results(findings: Findings) -> str:
    """A table per measured part, each row with its intervals on one strip."""
    parts = {name: _by_model(value) for name, value in findings.results.items() if name not in _OWN_SECTION}
    parts = {name: who for name, who in parts.items() if who}
    tables = [
        (f"<h3>{escape(name)}</h3>" if len(parts) > 1 else "") + _table(findings, who) for name, who in parts.items()
    ]
    return "".join(tables)


def levels(findings: Findings) -> str:
    """A table per level of the classes, the finest first; "" where there are none."""
    return "".join(
        f"<h3>{escape(str(level['name']))}, {format.count(level['classes'], 'class', 'classes')}</h3>"
        + _table(findings, _by_model(level["test"]))
        for level in findings.results.get("levels") or []
    )


def groups(findings: Findings) -> str:
    """What the groups change, and the CMC curve of every model; "" without groups."""
    figures = findings.results.get("groups")
    if not isinstance(figures, Mapping) or not isinstance(figures.get("cmc"), Mapping):
        return ""
    test, pairs, without = (
        int(finite(figures.get(key)) or 0) for key in ("test", "pairs_left_out", "without_positives")
    )
    sentences = [
        f"The test items are of {format.count(test, 'group', 'groups')}. An item of the query's class and group counts "
        f"neither as found nor as missed: {format.count(pairs, 'pair is', 'pairs are')} left out."
    ]
    if without:
        sentences.append(
            f"{format.count(without, 'test item has', 'test items have')} no item of its class in another group, "
            "and nothing to find."
        )
    sentences.append("The pictures, distances and lists below show all items.")
    curves = {who: values for who, values in figures["cmc"].items() if isinstance(values, (list, tuple))}
    drawn = [
        Line(_model_name(findings, who), list(range(1, len(curves[who]) + 1)), [finite(y) for y in curves[who]], style)
        for who, style in zip((who for who in _ORDER if who in curves), charts.STYLES, strict=False)
    ]
    title = "Share of queries with a match among the k nearest"
    chart = charts.lines(drawn, title=f"CMC: {title.lower()}", x_label="k", form=format.percent)
    figure = f"<figure><figcaption>CMC: {title.lower()}</figcaption>{chart}</figure>" if chart else ""
    return f'<p>{escape(" ".join(sentences))}</p><div class="charts">{figure}</div>'


def short_embeddings(findings: Findings) -> str:
    """Each length that was trained for: two metrics with their intervals, and what it keeps of the full length."""
    lengths = _by_model(findings.results.get("lengths"))
    dims = sorted((int(dim) for dim in lengths if dim.isdecimal()), reverse=True)
    if not dims:
        return ""
    metrics = [name for name in _LENGTH_METRICS if name in lengths[str(dims[0])]]
    if not metrics:
        return ""
    full = {name: _value(lengths[str(dims[0])][name])[0] for name in metrics}
    rows = []
    for dim in dims:
        values = {name: _value(lengths[str(dim)].get(name)) for name in metrics}
        value, whole = values[metrics[-1]][0], full[metrics[-1]]
        keeps = format.share(value / whole) if value is not None and whole else "–"
        cells = "".join(_cell(name, "trained", *numbers) for name, numbers in values.items())
        strip = charts.intervals([(f"{dim} dimensions", "trained", *values[metrics[-1]])], metrics[-1])
        rows.append(f'<tr><th scope="row">{number(dim)}</th>{cells}<td>{keeps}</td><td class="strip">{strip}</td></tr>')
    heads = [*map(format.metric_name, metrics), f"keeps of {format.metric_name(metrics[-1])}", ""]
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in ("dimensions", *heads))
    drawn = [
        Line(format.metric_name(name), dims[::-1], [_value(lengths[str(d)].get(name))[0] for d in dims[::-1]], style)
        for name, style in zip(metrics, charts.STYLES, strict=False)
    ]
    chart = charts.lines(drawn, title="Metrics over lengths", x_label="dimensions", form=format.percent, from_zero=True)
    return (
        f'<table class="results" style="--who:{len(metrics) + 1}"><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table><div class="charts"><figure><figcaption>By length</figcaption>{chart}'
        "</figure></div>"
    )


def training(findings: Findings) -> str:
    """Small charts over the steps; those without values are left out."""
    steps = [line for line in findings.history if line.get("event") == "step"]
    epochs = [line for line in findings.history if line.get("event") == "epoch"]
    figures = [
        ("Loss", _loss(steps)),
        ("Validation", _validation(epochs)),
        ("Learning rate", _single(steps, "lr", "learning rate")),
        ("Gradient norm", _single(steps, "gradient", "gradient norm")),
        ("Spread of a batch: 0 collapsed, 1 uniform", _single(findings.history, "spread", "spread")),
        ("Effective rank of a batch", _single(findings.history, "effective_rank", "effective rank")),
    ]
    charts_html = [f"<figure><figcaption>{title}</figcaption>{svg}</figure>" for title, svg in figures if svg]
    return f'<div class="charts">{"".join(charts_html)}</div>' if charts_html else ""


def length(findings: Findings) -> str:
    """Epochs, steps and time in one line; "" where they are not known."""
    seconds = max(
        (s for s in (finite(line.get("seconds")) for line in findings.history) if s is not None), default=None
    )
    epochs = max((int(e) for e in (finite(line.get("epoch")) for line in findings.history) if e is not None), default=0)
    steps = max((int(s) for s in (finite(line.get("step")) for line in findings.history) if s is not None), default=0)
    words = [format.count(epochs, "epoch", "epochs")] if epochs else []
    words += [format.count(steps, "step", "steps")] if steps else []
    if seconds is not None:
        words.append(
            f"{seconds:.0f} s"
            if seconds < 120
            else f"{seconds / 60:.0f} min"
            if seconds < 7200
            else f"{seconds / 3600:.1f} h"
        )
    return ", ".join(words)


def data(findings: Findings) -> str:
    """The report on the data: its parts as a table, everything else as a list."""
    facts = dict(findings.data)
    parts = facts.pop("parts", None)
    notes = facts.pop("notes", None)
    body = ""
    if isinstance(parts, Mapping) and parts and all(isinstance(part, Mapping) for part in parts.values()):
        columns = list(dict.fromkeys(str(key) for part in parts.values() for key in part))
        head = "".join(f'<th scope="col">{escape(c.replace("_", " "))}</th>' for c in columns)
        rows = "".join(
            f'<tr><th scope="row">{name_html(name)}</th>'
            + "".join(_part_cell(c, part.get(c)) for c in columns)
            + "</tr>"
            for name, part in parts.items()
        )
        body += (
            f'<table class="parts"><thead><tr><th scope="col">part</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
        )
    elif parts is not None:
        facts["parts"] = parts
    if facts:
        pairs = "".join(
            f"<div><dt>{escape(str(k).replace('_', ' '))}</dt><dd>{format.any_value(v)}</dd></div>"
            for k, v in facts.items()
        )
        body += f'<dl class="facts">{pairs}</dl>'
    if notes:
        lines = notes if isinstance(notes, (list, tuple)) else [notes]
        body += f'<ul class="notes">{"".join(f"<li>{escape(format.short(n, 500))}</li>" for n in lines[:50])}</ul>'
    return body


def _part_cell(column: str, value: object) -> str:
    """A cell of the table of parts; on a narrow screen it is below the others and shows its column's name."""
    kind = "name" if isinstance(value, str) else "figure"
    text = name_html(format.short(value, 40)) if isinstance(value, str) and value else format.any_value(value)
    return f'<td class="{kind}" data-column="{escape(column.replace("_", " "))}">{text}</td>'


def recipe(findings: Findings) -> str:
    if not findings.recipe:
        return ""
    return (
        "<details><summary>All settings, as resolved for this run</summary>"
        '<div class="code"><button type="button" class="copy" hidden>Copy</button>'
        f'<pre tabindex="0"><code>{escape(toml.text(findings.recipe))}</code></pre></div></details>'
    )


def _test_size(findings: Findings) -> str:
    """478 unseen classes, or the number of test items."""
    if findings.labels is None:
        return format.count(len(findings.embeddings), "test item", "test items")
    part = findings.data.get("parts", {})
    part = part.get("test", {}) if isinstance(part, Mapping) else {}
    classes = part.get("classes") if isinstance(part, Mapping) else None
    if classes is None:
        classes = len(set(findings.labels[findings.labels >= 0].tolist()))
    kind = "known " if findings.data.get("closed") else "unseen "
    return format.count(classes, f"{kind}class", f"{kind}classes")


def _by_model(part: object) -> dict[str, dict[str, Any]]:
    """{"trained": {metric: value}} and so on, in the order of the page; {} for anything else."""
    if not isinstance(part, Mapping):
        return {}
    figures = {str(who): dict(v) for who, v in part.items() if isinstance(v, Mapping)}
    if not any(_main(values) for values in figures.values()):
        return {}
    return {who: figures[who] for who in (*_ORDER, *sorted(set(figures) - set(_ORDER))) if who in figures}


def _main(values: Mapping[str, Any]) -> str | None:
    usable = [name for name, value in values.items() if isinstance(value, (int, float)) or _has_value(value)]
    return next((name for name in _MAIN if name in usable), usable[0] if usable else None)


def _has_value(value: object) -> bool:
    return isinstance(value, Mapping) and "value" in value


def _value(entry: object) -> tuple[float | None, float | None, float | None]:
    """Value and interval; None for anything but a number."""
    if isinstance(entry, Mapping):
        value, low, high = (finite(entry.get(key)) for key in ("value", "low", "high"))
        return (value, low, high) if low is not None and high is not None else (value, None, None)
    return finite(entry), None, None


def _model_name(findings: Findings, who: str) -> str:
    return str(findings.results.get("baseline_name") or "baseline") if who == "baseline" else who


def _table(findings: Findings, who: dict[str, dict[str, Any]]) -> str:
    metrics = list(dict.fromkeys(name for values in who.values() for name in values))
    legend = {"trained": "●", "untrained": "○"}
    head = "".join(
        f'<th scope="col"><span class="mark-sign {escape(w)}" aria-hidden="true">{legend.get(w, "■")}</span> '
        f"{name_html(_model_name(findings, w))}</th>"
        for w in who
    )
    rows = []
    for name in metrics:
        entries = [(w, *_value(who[w].get(name))) for w in who]
        drawn = [(_model_name(findings, w), w, value, low, high) for w, value, low, high in entries]
        cells = "".join(_cell(name, w, *numbers) for w, *numbers in entries)
        strip = charts.intervals(drawn, name) if format.is_share(name) or name == "spearman" else ""
        rows.append(
            f'<tr><th scope="row">{escape(format.metric_name(name))}</th>{cells}<td class="strip">{strip}</td></tr>'
        )
    return (
        f'<table class="results" style="--who:{len(who)}"><thead><tr><th scope="col">metric</th>{head}'
        f'<th scope="col" class="strip"><div><span>0</span><span>50\u202f%</span><span>100</span></div></th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(name: str, who: str, value: float | None, low: float | None, high: float | None) -> str:
    ends = (
        ""
        if low is None
        else f"<small>{metric_value(name, low, unit=False)}–{metric_value(name, high, unit=False)}</small>"
    )
    return f'<td class="{"first" if who == "trained" else ""}">{metric_value(name, value)}{ends}</td>'


def _loss(steps: Sequence[Mapping[str, Any]]) -> str:
    xs, ys = _series(steps, "loss")
    if not any(y is not None for y in ys):
        return ""
    smooth = charts.smoothed(ys, len(ys) / 20)
    drawn = [Line("", xs, ys, "faint"), Line("", xs, smooth)] if len(ys) > 20 else [Line("", xs, ys)]
    missing = sum(y is None for y in ys)
    note = (
        f'<p class="small">{format.count(missing, "step", "steps")} without a finite loss not drawn.</p>'
        if missing
        else ""
    )
    return charts.lines(drawn, title=f"Loss over {len(ys)} recorded steps", x_label="step") + note


def _validation(epochs: Sequence[Mapping[str, Any]]) -> str:
    rows = [line for line in epochs if isinstance(line.get("val"), Mapping)]
    metrics = list(dict.fromkeys(name for line in rows for name in line["val"] if format.is_share(str(name))))
    metrics = metrics or list(dict.fromkeys(name for line in rows for name in line["val"]))[:1]
    if not metrics:
        return ""
    xs = [_at(line, "epoch", i) for i, line in enumerate(rows, start=1)]
    drawn = []
    for i, name in enumerate(metrics[: len(charts.STYLES)]):
        ys = [_value(line["val"].get(name))[0] for line in rows]
        drawn.append(Line(format.metric_name(name), xs, ys, charts.STYLES[i]))
    best = [(x, y) for x, y, line in zip(xs, drawn[0].ys, rows, strict=True) if line.get("best") and y is not None]
    marks = [Mark(x, y, f"best: epoch {number(x)}, {format.metric_value(metrics[0], y)}") for x, y in best[-1:]]
    form = format.percent if format.is_share(metrics[0]) else number
    return charts.lines(drawn, title="Validation metrics over epochs", x_label="epoch", form=form, marks=marks)


def _single(lines: Sequence[Mapping[str, Any]], key: str, name: str) -> str:
    xs, ys = _series(lines, key)
    return charts.lines([Line("", xs, ys)], title=f"{name} over steps", x_label="step", from_zero=True)


def _series(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float | None]]:
    rows = [(i, line) for i, line in enumerate(lines, start=1) if key in line]
    return [_at(line, "step", i) for i, line in rows], [finite(line[key]) for _, line in rows]


def _at(line: Mapping[str, Any], key: str, default: int) -> float:
    value = finite(line.get(key))
    return float(default) if value is None else value
