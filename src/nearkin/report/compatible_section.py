"""The section on a run that is compatible with an old one: old among old rows, new among old, new among new."""

from collections.abc import Mapping
from typing import Any

from nearkin.report import format
from nearkin.report.findings import Findings
from nearkin.report.format import escape, finite, metric_value
from nearkin.training.validation import points

__all__ = ["NOTE", "compatibility"]

NOTE = (
    "On the test items: queries by one encoder, searched rows by the same or the other; no query finds its own item. "
    "Small figures: 95\u202f% intervals. Differences are from the old encoder among its own rows, query by query."
)
_SHOWN = ("recall@1", "r_precision", "map@r", "ndcg@10")  # results.json has all
_PAIRS = {"old_old": "old among old rows", "new_old": "new among old rows", "new_new": "new among new rows"}


def compatibility(findings: Findings) -> str:
    """The sentence and a row per pair of encoders; "" where there is no old run."""
    facts = findings.results.get("compatible")
    if not isinstance(facts, Mapping) or not facts.get("sentence"):
        return ""
    sentence = escape(format.short(facts["sentence"], 800)).replace(" %", "\u202f%")
    test, metric = facts["test"], facts["metric"]
    names = [name for name in _SHOWN if name in test["old_old"]]
    gain = f"{format.metric_name(metric)} gained"
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in ("", *map(format.metric_name, names), gain))
    body = "".join(
        f'<tr><th scope="row">{words}</th>'
        + "".join(_cell(name, test[pair].get(name)) for name in names)
        + f'<td class="figure" data-column="{escape(gain)}">{_gain(facts["against"].get(pair))}</td></tr>'
        for pair, words in _PAIRS.items()
    )
    return f'<p>{sentence}</p><table class="parts"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(name: str, figure: Any) -> str:
    value, low, high = ((figure or {}).get(key) for key in ("value", "low", "high"))
    ends = ""
    if finite(low) is not None and finite(high) is not None:
        ends = f"<small>{metric_value(name, low, False)}–{metric_value(name, high, False)}</small>"
    column = escape(format.metric_name(name))
    return f'<td class="figure" data-column="{column}">{metric_value(name, value)}{ends}</td>'


def _gain(figure: Any) -> str:
    value, low, high = (finite((figure or {}).get(key)) for key in ("value", "low", "high"))
    if value is None:
        return format.MISSING
    return points(value) + ("" if low is None or high is None else f"<small>{points(low)} to {points(high)}</small>")
