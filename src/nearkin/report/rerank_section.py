"""The section on re-ranking: the test's figures before and after, the paired verdict, how settings were found."""

from collections.abc import Mapping
from typing import Any

from nearkin.report import format
from nearkin.report.findings import Findings
from nearkin.report.format import escape, finite, metric_value

__all__ = ["NOTE", "reranking"]

NOTE = (
    "The order of the neighbours made again from the neighbours of both, without labels. Settings are chosen on the "
    "validation classes. Small figures: 95\u202f% intervals."
)


def reranking(findings: Findings) -> str:
    """The sentence, how the settings were chosen, and a table of both orders; "" where nothing was re-ranked."""
    facts = findings.results.get("rerank")
    if not isinstance(facts, Mapping) or not facts.get("sentence"):
        return ""
    settings = ", ".join(f"{key} {value:g}" for key, value in facts["settings"].items())
    words = f"{facts['method']} with {settings}{_chosen(facts)}."
    plain = (findings.results.get("test") or {}).get("trained") or {}
    ends = facts.get("intervals") or {}
    rows = []
    for name, figure in plain.items():
        value = finite(facts.get(name))
        if value is None:
            continue
        before = _cell(name, finite(figure.get("value")), (finite(figure.get("low")), finite(figure.get("high"))))
        low, high = ends.get(name) or (None, None)
        row = f'<th scope="row">{escape(format.metric_name(name))}</th>'
        rows.append(f"<tr>{row}{before}{_cell(name, value, (finite(low), finite(high)))}</tr>")
    head = '<th scope="col">metric</th><th scope="col">plain</th><th scope="col">re-ranked</th>'
    table = f'<table class="results"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f"<p>{_text(facts['sentence'])}</p><p>{_text(words)}</p>{table}"


def _chosen(facts: Mapping[str, Any]) -> str:
    chosen = facts.get("chosen")
    if not isinstance(chosen, Mapping):
        return ", as the recipe has it"
    key = next(iter(facts["settings"]))
    tried = ", ".join(f"{key} {one[key]}: {100 * one['map@r']:.1f} %" for one in chosen["tried"])
    of = format.count(chosen["classes"], "validation class", "validation classes")
    return f", chosen by MAP@R on {of} (plain: {100 * chosen['plain']:.1f} %; {tried})"


def _cell(name: str, value: float | None, ends: tuple[float | None, float | None]) -> str:
    low, high = ends
    small = ""
    if low is not None and high is not None:
        small = f"<small>{metric_value(name, low, unit=False)}–{metric_value(name, high, unit=False)}</small>"
    return f"<td>{metric_value(name, value)}{small}</td>"


def _text(words: str) -> str:
    return escape(format.short(words, 800)).replace(" %", "\u202f%")
