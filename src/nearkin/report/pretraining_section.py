"""The section on pretraining: its loss over the epochs, and the test of the encoder before it saw a label."""

from collections.abc import Mapping
from typing import Any

from nearkin.report import charts, format
from nearkin.report.charts import Line
from nearkin.report.findings import Findings
from nearkin.report.format import escape, finite, metric_value, number

__all__ = ["NOTE", "pretraining"]

NOTE = (
    "Before the training, on pictures whose labels were not read. The loss of InfoNCE rises while its queue of past "
    "views fills. Whether it helped cannot be told from one run: train once more without it."
)
_METRICS = ("recall@1", "map@r", "ndcg@10")  # those that are shown, where they were measured
_METHODS = {"infonce": "InfoNCE", "vicreg": "VICReg"}


def pretraining(findings: Findings) -> str:
    """A sentence, the loss of each epoch, and the test beside that of the trained encoder; "" where there was none."""
    facts = findings.results.get("pretraining")
    if not isinstance(facts, Mapping):
        return ""
    losses = [finite(value) for value in facts.get("loss") or ()]
    title = "Loss of the pretraining over its epochs"
    drawn = [Line("", list(range(1, len(losses) + 1)), losses)]
    svg = charts.lines(drawn, title=title, x_label="epoch") if losses else ""
    figure = f"<figure><figcaption>{title}</figcaption>{svg}</figure>" if svg else ""
    return f'<p>{_sentence(facts)}</p><div class="charts beside">{figure}{_table(findings, facts)}</div>'


def _sentence(facts: Mapping[str, Any]) -> str:
    method = _METHODS.get(str(facts.get("method")), escape(facts.get("method")))
    text = f"{method} on two views of {format.count(facts.get('pictures'), 'picture', 'pictures')}"
    text += f", {format.count(facts.get('epochs'), 'epoch', 'epochs')}, {number(facts.get('steps'))} steps."
    held = finite(facts.get("held_out_files"))
    if held:
        kept = " were seen all the same" if facts.get("held_out_kept") else " were left out"
        text += f" {format.count(held, 'file', 'files')} of the folder that are also in validation or test{kept}."
    return text


def _table(findings: Findings, facts: Mapping[str, Any]) -> str:
    """The test of the encoder as it was, pretrained and trained."""
    tests = findings.results.get("test") or {}
    rows = {"untrained": tests.get("untrained"), "pretrained": facts.get("test"), "trained": tests.get("trained")}
    shown = {who: values for who, values in rows.items() if isinstance(values, Mapping)}
    if "pretrained" not in shown:
        return ""
    metrics = [name for name in _METRICS if name in shown["pretrained"]]
    head = "".join(f'<th scope="col">{name}</th>' for name in ("test", *map(format.metric_name, metrics)))
    body = []
    for who, values in shown.items():
        cells = "".join(
            f'<td class="figure" data-column="{format.metric_name(name)}">{_figure(name, values.get(name))}</td>'
            for name in metrics
        )
        body.append(f'<tr><th scope="row">{who}</th>{cells}</tr>')
    return f'<table class="parts"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def _figure(metric: str, figure: Any) -> str:
    if not isinstance(figure, Mapping) or finite(figure.get("value")) is None:
        return format.MISSING
    low, high = finite(figure.get("low")), finite(figure.get("high"))
    ends = f"<small>{metric_value(metric, low, False)}–{metric_value(metric, high, False)}</small>"
    return metric_value(metric, figure["value"]) + ("" if low is None else ends)
