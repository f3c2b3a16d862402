"""The page of a comparison of losses: recommendation, table, ranks, learning curves, settings, protocol."""

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from nearkin.core import files
from nearkin.report import charts, format
from nearkin.report.charts import Line, ticks
from nearkin.report.format import escape, name_html, number, percent, share
from nearkin.report.template import Section, document

__all__ = ["write_comparison"]

MAIN = "map@r"
LINE = 50  # characters of a command after which a line may end
COLOURED = 8  # curves with a colour and a name, of the best losses
_VERDICTS = {"best": "best", "undecided": "not shown worse", "worse": "worse"}
_REFERENCES = {"untrained": "untrained", "baseline": ""}  # the protocol names the baseline
_WIDE, _NARROW = (860, 150, 90), (420, 122, 54)  # width, space for names, space for ranks
_ROW, _FOOT = 26, 26

Results = Mapping[str, Any]  # the content of comparison.json


def write_comparison(path: str | Path, results: Results) -> None:
    """Writes the page atomically, from the content of comparison.json."""
    text = page(results)
    with files.explained(str(path), "make room, then the same command continues"):
        files.write_text(path, text)


def page(results: Results) -> str:
    """The HTML of the page."""
    protocol = results["protocol"]
    kind = "known" if protocol["test"].get("known") else "unseen"
    tested = format.count(protocol["test"]["classes"], f"{kind} class", f"{kind} classes")
    sections: list[Section] = [
        ("advice", "Recommendation", "Every sentence follows from the table below.", _advice(results)),
        ("table", "Table", _table_note(results), _table(results)),
        ("ranks", "Ranks", _ranks_note(), _ranks(results)),
        ("learning", "Learning", _learning_note(results), _learning(results)),
        ("settings", "Settings", _settings_note(results), _settings(results)),
        ("protocol", "Protocol", "The same for every loss; nothing was chosen by test classes.", _protocol(results)),
    ]
    source = Path(str(results["source"])).name or str(results["source"])
    title = f"{source}: {format.count(len(results['table']), 'loss', 'losses')} compared"
    sentence = results["recommendation"]["sentences"][0]
    style = resources("nearkin.report").joinpath("comparison.css").read_text("utf-8")
    return document("nearkin comparison of losses", title, sentence, _lede(results, tested), sections, style)


def _lede(results: Results, tested: str) -> str:
    best = results["table"][0]
    figure = best["separated"][MAIN]
    inside = "" if figure["low"] is None else f"{share(figure['low'], unit=False)}–{share(figure['high'], unit=False)}"
    others = [(row["loss"], share(row["separated"][MAIN]["value"])) for row in results["table"][1:2]]
    others += [(_reference_name(results, row), share(_any_form(row)[MAIN]["value"])) for row in results["references"]]
    return (
        f'<p class="lede"><strong>{escape(share(figure["value"]))}</strong> <span class="where">'
        f"MAP@R of {name_html(best['loss'])} on {escape(tested)}"
        + (f' <span class="soft">95 % interval {escape(inside)}</span>' if inside else "")
        + "</span>"
        + "".join(f' <span class="other"><span>{name_html(who)}</span> <b>{much}</b></span>' for who, much in others)
        + "</p>"
        + _notes([*results["notes"], *(f"{loss} was not finished." for loss in results["unfinished"])])
    )


def _advice(results: Results) -> str:
    advice = results["recommendation"]
    body = "".join(f"<p>{_prose(sentence)}</p>" for sentence in advice["sentences"])
    command = "" if advice["train"] is None else f"<h3>Train with it</h3>{_code(advice['train'])}"
    return f'<div class="advice">{body}</div>{_notes(advice["cautions"])}{command}'


def _notes(lines: Sequence[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{_prose(line)}</li>" for line in lines)}</ul>' if lines else ""


def _prose(sentence: str) -> str:
    text = escape(sentence).replace(" %", "\u202f%")
    return re.sub(r"--[\w-]+", r'<span class="flag">\g<0></span>', text)  # no line break within a flag


def _code(command: str) -> str:
    """A command in several lines, joined by backslashes."""
    lines = [""]
    for word in shlex.split(command):
        if word.startswith("--") and len(lines[-1]) > LINE:
            lines.append("   ")
        lines[-1] += f" {shlex.quote(word)}" if lines[-1] else word
    return (
        '<div class="code"><button type="button" class="copy" hidden>Copy</button>'
        f'<pre tabindex="0"><code>{escape(f" {chr(92)}{chr(10)}".join(lines))}</code></pre></div>'
    )


def _table(results: Results) -> str:
    head = (
        '<th scope="col" class="num">#</th><th scope="col">loss</th><th scope="col">MAP@R</th>'
        '<th scope="col" class="more">R@1</th><th scope="col">joined MAP@R</th>'
        '<th scope="col" class="more">joined R@1</th><th scope="col">to the best</th>'
        '<th scope="col" class="num more">ms per step</th>'
    )
    rows = "".join(_loss_row(results, row) for row in results["table"]) + "".join(
        _reference_row(results, row) for row in results["references"]
    )
    return f'<table class="losses"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _loss_row(results: Results, row: Mapping[str, Any]) -> str:
    against = row["separated"]["against"]
    verdict = f'<span class="verdict {against["verdict"]}">{_VERDICTS[against["verdict"]]}</span>'
    if against["p"] is not None:
        low, high = against["interval"]
        points = f"{share(against['difference'], unit=False)}"
        ends = "" if low is None else f" ({share(low, unit=False)} to {share(high, unit=False)})"
        verdict += f'<small>{points}<span class="more">{ends}</span>, p {_chance(against["p"])}</small>'
    speed = results["timing"][row["loss"]]["ms_per_step"]
    return (
        f'<tr><td class="num">{row["separated"]["rank"]}</td><th scope="row">{escape(row["loss"])}</th>'
        f"{_figure(row['separated'][MAIN])}{_figure(row['separated']['precision@1'], 'more')}"
        f"{_figure(row['concatenated'][MAIN])}{_figure(row['concatenated']['precision@1'], 'more')}"
        f'<td class="wraps">{verdict}</td><td class="num more">{number(speed)}</td></tr>'
    )


def _reference_row(results: Results, row: Mapping[str, Any]) -> str:
    cells = []
    for form in ("separated", "concatenated"):
        for metric, style in ((MAIN, ""), ("precision@1", "more")):
            figures = row.get(form) or (row["concatenated"] if form == "separated" else None)
            cells.append(
                _figure(figures[metric], style) if figures and (form in row or form == "separated") else "<td></td>"
            )
    if "separated" not in row:  # a single embedding: nothing to join
        cells[2:] = ["<td></td>", '<td class="more"></td>']
    name = _reference_name(results, row)
    return (
        f'<tr class="reference"><td></td><th scope="row">{escape(name)}</th>{"".join(cells)}'
        '<td></td><td class="more"></td></tr>'
    )


def _figure(figure: Mapping[str, Any], style: str = "") -> str:
    low, high = figure["low"], figure["high"]
    ends = "" if low is None else f"<small>{share(low, unit=False)}–{share(high, unit=False)}</small>"
    return f'<td class="{style}">{share(figure["value"])}{ends}</td>'


def _any_form(row: Mapping[str, Any]) -> Any:
    return row.get("separated") or row["concatenated"]


def _reference_name(results: Results, row: Mapping[str, Any]) -> str:
    return _REFERENCES.get(row["loss"]) or str(results["protocol"]["baseline"])


def _chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}".rstrip("0").rstrip(".") if p < 1 else "1"


def _ranks(results: Mapping[str, Any]) -> str:
    """One row per loss, best first: interval, mean, joined mean, and range of ranks. For both widths."""
    wide, narrow = _rank_plot(results, *_WIDE), _rank_plot(results, *_NARROW)
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def _rank_plot(results: Mapping[str, Any], width: int, left: int, right: int) -> str:
    rows = results["table"]
    ends = [row[form][MAIN][end] for row in rows for form in ("separated", "concatenated") for end in ("value",)]
    ends += [row["separated"][MAIN][end] for row in rows for end in ("low", "high")]
    known = [end for end in ends if end is not None]
    room = 0.04 * (max(known) - min(known)) or 0.01
    low, high = max(0.0, min(known) - room), min(1.0, max(known) + room)
    base = _ROW * len(rows) + 6

    def x(value: float) -> float:
        return float(left + (value - low) / (high - low) * (width - left - right))

    parts = []
    for value in ticks(low, high, 6 if width > 600 else 4):
        parts.append(f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="2" y2="{base}"/>')
        parts.append(f'<text class="tick mid" x="{x(value):.1f}" y="{base + 16}">{escape(percent(value))}</text>')
    for i, row in enumerate(rows):
        parts.append(_rank_row(row, x, _ROW * i + _ROW / 2 + 2, left, width))
    title = "; ".join(f"{row['loss']} {share(row['separated'][MAIN]['value'])}" for row in rows)
    size = f"0 0 {width} {base + _FOOT}"
    return f'<svg class="plot" viewBox="{size}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _rank_row(row: Mapping[str, Any], x: Any, y: float, left: int, width: int) -> str:
    figure, joined = row["separated"][MAIN], row["concatenated"][MAIN]["value"]
    verdict = row["separated"]["against"]["verdict"]
    span = ""
    if figure["low"] is not None:
        span = f'<line class="span" x1="{x(figure["low"]):.1f}" x2="{x(figure["high"]):.1f}" y1="{y}" y2="{y}"/>'
    first, last = row["separated"]["ranks"]
    span_of_ranks = f"{first}" if first == last else f"{first}–{last}"
    inside = "" if figure["low"] is None else f" ({share(figure['low'])} to {share(figure['high'])})"
    tip = f"{row['loss']}: {share(figure['value'])}{inside}, joined {share(joined)}, rank {span_of_ranks}"
    return (
        f'<g class="rank {escape(verdict)}"><title>{escape(tip)}</title>'
        f'<text class="who end {escape(verdict)}" x="{left - 12}" y="{y + 4}">{escape(row["loss"])}</text>'
        f'{span}<circle class="joined" cx="{x(joined):.1f}" cy="{y}" r="3.6"/>'
        f'<circle class="dot" cx="{x(figure["value"]):.1f}" cy="{y}" r="4.4"/>'
        f'<text class="tick end" x="{width - 2}" y="{y + 4}">{span_of_ranks}</text></g>'
    )


def _learning(results: Results) -> str:
    order = [row["loss"] for row in results["table"]]
    over_steps, over_time = [], []
    for i, loss in reversed(list(enumerate(order))):
        style, name = (f"c{i}", loss) if i < COLOURED else ("rest", "")
        xs, ys = [p[0] for p in results["curves"][loss]], [p[1] for p in results["curves"][loss]]
        over_steps.append(Line(name, xs, ys, style))
        speed = results["timing"][loss]["ms_per_step"]
        if speed:
            over_time.append(Line(name, [x * speed / 1000 for x in xs], ys, style))
    figures = [
        (
            "Validation MAP@R over steps",
            charts.lines(over_steps, title="MAP@R by step", x_label="step", form=format.percent),
        ),
        (
            "The same over seconds of training",
            charts.lines(over_time, title="MAP@R by time", x_label="seconds", form=format.percent),
        ),
    ]
    charts_html = "".join(f"<figure><figcaption>{title}</figcaption>{svg}</figure>" for title, svg in figures if svg)
    return f'<div class="charts">{charts_html}</div><h3>Steps to a validation MAP@R</h3>{_steps_table(results, order)}'


def _steps_table(results: Results, order: Sequence[str]) -> str:
    levels, steps = results["reach"]["levels"], results["reach"]["steps"]
    head = "".join(f'<th scope="col" class="num">{share(level)}</th>' for level in levels)
    rows = "".join(
        f'<tr><th scope="row">{escape(loss)}</th>'
        + "".join(f'<td class="num">{number(step) if step is not None else "never"}</td>' for step in steps[loss])
        + f'<td class="num more">{number(results["timing"][loss]["seconds"])} s</td></tr>'
        for loss in order
    )
    return (
        f'<table class="losses"><thead><tr><th scope="col">loss</th>{head}'
        f'<th scope="col" class="num more">per training</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _settings(results: Results) -> str:
    values = [trial["value"] for trials in results["trials"].values() for trial in trials]
    low, high = min(values), max(values)
    rows = []
    for row in results["table"]:
        chosen = results["choices"][row["loss"]]["trial"]
        setting = "".join(_set(key, value) for key, value in row["setting"].items()) or "nothing to set"
        gain = share(row["validation"] - row["validation_default"], unit=False)
        rows.append(
            f'<tr><th scope="row">{escape(row["loss"])}</th><td class="wraps setting">{setting}</td>'
            f"<td>{share(row['validation'])}<small>{f'+{gain} points' if row['tuned'] else 'the default'}</small></td>"
            f'<td class="trials">{_trials_plot(results["trials"][row["loss"]], chosen, low, high)}</td></tr>'
        )
    head = ("loss", "best setting found", "validation MAP@R", f"all trials, {share(low)} to {share(high)}")
    heads = "".join(f'<th scope="col">{one}</th>' for one in head)
    return f'<table class="losses settings"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _trials_plot(trials: Sequence[Mapping[str, Any]], chosen: int, low: float, high: float) -> str:
    """The validation value of every trial on one strip; the default hollow, the chosen one filled."""
    width, height, span = 200, 22, (high - low) or 1.0
    parts = [f'<line class="strip" x1="6" x2="{width - 6}" y1="{height / 2}" y2="{height / 2}"/>']

    def mark(trial: Mapping[str, Any]) -> str:
        at = 6 + (trial["value"] - low) / span * (width - 12)
        kind = "chosen" if trial["number"] == chosen else "default" if trial["number"] == 0 else ""
        what = "default" if trial["number"] == 0 else f"trial {trial['number']}"
        part = "" if trial["complete"] else ", one fold"
        radius = 4.4 if kind == "chosen" else 3.6
        tip = f"{what}: {share(trial['value'])}{part}"
        shape = f'<circle class="tried {kind}" cx="{at:.1f}" cy="{height / 2}" r="{radius}">'
        return f"{shape}<title>{escape(tip)}</title></circle>"

    ordered = sorted(trials, key=lambda trial: (trial["number"] == chosen, trial["number"] == 0))
    parts += [mark(trial) for trial in ordered]
    best = max(trial["value"] for trial in trials)
    title = f"{len(trials)} trials, the best {share(best)}"
    frame = f'<svg class="plot strip-plot" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
    return f"{frame}{''.join(parts)}</svg>"


def _set(key: str, value: Any) -> str:
    text = number(value, 4) if isinstance(value, (int, float)) else value
    return f"<span>{escape(key.partition('.')[2])} <b>{escape(text)}</b></span> "


def _protocol(results: Results) -> str:
    plan = results["protocol"]
    sampler = plan["sampler"]
    fold = plan["fold_sizes"][0]
    what = "items" if plan.get("closed") else "classes"
    facts = {
        "encoder": plan["encoder"],
        "batches": f"{sampler['name']}, {sampler['batch']} items; the same for every loss",
        "steps per training": number(plan["steps"]),
        "settings per loss": number(plan["trials"]),
        "folds": f"{plan['folds']}, of {fold['train'][what]} training and {fold['validation'][what]} "
        f"validation {what}" + ("" if _even(plan["fold_sizes"], what) else " or some more or less"),
        "seeds per fold": number(plan["seeds"]),
        "test": f"{number(plan['test']['items'])} items of {number(plan['test']['classes'])} classes, opened once",
        "split": plan["split"],
    }
    pairs = "".join(f"<div><dt>{escape(k)}</dt><dd>{format.any_value(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="facts">{pairs}</dl><h3>The command that gives this table</h3>{_code(results["command"])}'


def _even(folds: Sequence[Mapping[str, Any]], what: str) -> bool:
    return len({fold["validation"][what] for fold in folds}) == 1


def _table_note(results: Results) -> str:
    models = results["protocol"]["folds"] * results["protocol"]["seeds"]
    return (
        f"Means over {models} models per loss, one for each fold and seed. Joined: the embeddings of the folds "
        "concatenated. Small figures: 95 % intervals over test classes. Worse: shown over classes (p, corrected for "
        "several comparisons) and over trainings."
    )


def _ranks_note() -> str:
    return (
        "● mean of single models with its 95 % interval, ○ joined folds. Right: the ranks of a loss in 95 of 100 "
        "resamples of the test classes."
    )


def _learning_note(results: Results) -> str:
    more = " Grey: the losses after the eighth." if len(results["table"]) > COLOURED else ""
    return f"Best value so far on validation classes, means over folds and seeds.{more}"


def _settings_note(results: Results) -> str:
    return (
        "Searched on the folds of the training classes. ○ the default setting, ● the chosen one; faint: the others, "
        "including those stopped after one fold."
    )
