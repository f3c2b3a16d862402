"""The section on fine-tuning: validation from the pretrained to the trained weights, and which of them were saved."""

from collections.abc import Mapping
from typing import Any

from nearkin.report import charts, format
from nearkin.report.charts import Line, Mark
from nearkin.report.findings import Findings
from nearkin.report.format import escape, finite, metric_value, number
from nearkin.training.validation import points

__all__ = ["NOTE", "interpolation"]

NOTE = (
    "On the validation items: the backbone from the pretrained weights (a = 0) to the trained ones (a = 1), with the "
    "trained head, beside the frozen encoder, whose embeddings are its pooled features. Small figures are intervals: "
    "95\u202f% of a value, 80\u202f% of a gain (95\u202f% with fewer than 6 classes). The bars are those of the gains: "
    "one that crosses the line of the frozen encoder proves none."
)


def interpolation(findings: Findings) -> str:
    """The sentence, the curve over a, and the figures; "" where weights were not interpolated."""
    facts = findings.results.get("interpolation")
    if not isinstance(facts, Mapping) or not facts.get("sentence"):
        return ""
    sentence = escape(format.short(facts["sentence"], 800)).replace(" %", "\u202f%")
    curve = [point for point in facts.get("curve") or () if finite(point.get("value")) is not None]
    if not curve:
        return f"<p>{sentence}</p>"
    return f'<p>{sentence}</p><div class="charts beside">{_chart(facts, curve)}{_table(facts, curve)}</div>'


def _chart(facts: Mapping[str, Any], curve: list[Mapping[str, Any]]) -> str:
    """The curve and the line of the frozen encoder; nothing for a single point, which the table has."""
    frozen, metric = finite(facts["frozen"]["value"]), facts["metric"]
    if frozen is None or len(curve) < 2:
        return ""
    shares = [point["a"] for point in curve]
    ends = [_shifted(point["gain"], frozen) for point in curve]
    drawn = [
        Line("fine-tuned", shares, [point["value"] for point in curve], "main", ends),
        Line("frozen", shares, [frozen] * len(curve), "other"),
    ]
    saved = [point for point in curve if _is_saved(facts, point)]
    marks = [Mark(point["a"], point["value"], f"saved: {metric_value(metric, point['value'])}") for point in saved]
    name = format.metric_name(metric)
    svg = charts.lines(drawn, title=f"{name} over a", x_label="a", form=format.percent, marks=marks, x_ticks=shares)
    return f"<figure><figcaption>{name} over a</figcaption>{svg}</figure>"


def _shifted(gain: Mapping[str, Any], frozen: float) -> tuple[float, float] | None:
    """The interval of the gain as values of the metric: it crosses the frozen encoder's line where it contains 0."""
    low, high = finite(gain["low"]), finite(gain["high"])
    return None if low is None or high is None else (frozen + low, frozen + high)


def _is_saved(facts: Mapping[str, Any], point: Mapping[str, Any]) -> bool:
    return bool(facts["chosen"] == "finetuned" and point["a"] == facts["a"])


def _table(facts: Mapping[str, Any], curve: list[Mapping[str, Any]]) -> str:
    rows: list[tuple[str, Mapping[str, Any], Mapping[str, Any] | None, bool]] = [
        ("frozen encoder", facts["frozen"], None, facts["chosen"] == "frozen"),
        ("untrained head", facts["untrained"], None, False),
    ]
    rows += [(f"a = {number(point['a'])}", point, point["gain"], _is_saved(facts, point)) for point in curve]
    name = escape(format.metric_name(facts["metric"]))
    columns = "".join(f'<th scope="col">{text}</th>' for text in ("weights", name, "gain over frozen"))
    body = "".join(
        f'<tr><th scope="row">{who}{" (saved)" if saved else ""}</th>'
        f'<td class="figure" data-column="{name}">{_share(facts["metric"], one)}</td>'
        f'<td class="figure" data-column="gain over frozen">{format.MISSING if gain is None else _gain(gain)}</td></tr>'
        for who, one, gain, saved in rows
    )
    return f'<table class="parts"><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>'


def _share(metric: str, figure: Mapping[str, Any]) -> str:
    low, high = (finite(figure[key]) for key in ("low", "high"))
    ends = (
        "" if low is None else f"<small>{metric_value(metric, low, False)}–{metric_value(metric, high, False)}</small>"
    )
    return metric_value(metric, figure["value"]) + ends


def _gain(figure: Mapping[str, Any]) -> str:
    value, low, high = (finite(figure[key]) for key in ("value", "low", "high"))
    if value is None:
        return format.MISSING
    return points(value) + ("" if low is None or high is None else f"<small>{points(low)} to {points(high)}</small>")
