"""The page of a comparison of losses: what to use, the table behind it, and how everything was found."""

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from nearkin.core import files
from nearkin.report import charts, format, rank_plot
from nearkin.report.charts import Line
from nearkin.report.format import escape, named, number, share
from nearkin.report.template import Section, document

__all__ = ["write_comparison"]

MAIN = "map@r"
LINE = 50  # characters of a command after which a new line may begin
COLOURED = 8  # lines of the best losses that have a colour and a name
_VERDICTS = {"best": "best", "undecided": "not shown worse", "worse": "worse"}
_REFERENCES = {"untrained": "untrained", "baseline": ""}  # the baseline has a name of its own

Said = Mapping[str, Any]  # the content of comparison.json


def write_comparison(path: str | Path, said: Said) -> None:
    """Writes the page there, whole or not at all, from the content of comparison.json."""
    text = page(said)
    with files.explained(str(path), "make room, then the same command goes on"):
        files.write_text(path, text)


def page(said: Said) -> str:
    """The text of the page."""
    protocol = said["protocol"]
    tested = format.count(protocol["test"]["classes"], "unseen class", "unseen classes")
    sections: list[Section] = [
        ("advice", "Recommendation", "Every sentence is read off the table below.", _advice(said)),
        ("table", "Table", _table_note(said), _table(said)),
        ("ranks", "ProcessGroup", _ranks_note(), rank_plot.ranks(said)),
        ("learning", "Learning", _learning_note(said), _learning(said)),
        ("settings", "Settings", _settings_note(said), _settings(said)),
        ("protocol", "Protocol", "The same for every loss; nothing here was chosen by test classes.", _protocol(said)),
    ]
    source = Path(str(said["source"])).name or str(said["source"])
    title = f"{source}: {format.count(len(said['table']), 'loss', 'losses')} compared"
    sentence = said["recommendation"]["sentences"][0]
    style = resources("nearkin.report").joinpath("comparison.css").read_text("utf-8")
    return document("nearkin comparison of losses", title, sentence, _lede(said, tested), sections, style)


def _lede(said: Said, tested: str) -> str:
    best = said["table"][0]
    figure = best["separated"][MAIN]
    inside = "" if figure["low"] is None else f"{share(figure['low'], unit=False)}–{share(figure['high'], unit=False)}"
    others = [(row["loss"], share(row["separated"][MAIN]["value"])) for row in said["table"][1:2]]
    others += [(_called(said, row), share(_some(row)[MAIN]["value"])) for row in said["references"]]
    return (
        f'<p class="lede"><strong>{escape(share(figure["value"]))}</strong> <span class="where">'
        f"MAP@R of {named(best['loss'])} on {escape(tested)}"
        + (f' <span class="soft">95 % interval {escape(inside)}</span>' if inside else "")
        + "</span>"
        + "".join(f' <span class="other"><span>{named(who)}</span> <b>{much}</b></span>' for who, much in others)
        + "</p>"
        + _notes([*said["notes"], *(f"{loss} was not finished." for loss in said["unfinished"])])
    )


def _advice(said: Said) -> str:
    advice = said["recommendation"]
    body = "".join(f"<p>{_prose(sentence)}</p>" for sentence in advice["sentences"])
    return f'<div class="advice">{body}</div>{_notes(advice["cautions"])}<h3>Train with it</h3>{_code(advice["train"])}'


def _notes(lines: Sequence[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{_prose(line)}</li>" for line in lines)}</ul>' if lines else ""


def _prose(sentence: str) -> str:
    whole = escape(sentence).replace(" %", "\u202f%")
    return re.sub(r"--[\w-]+", r'<span class="flag">\g<0></span>', whole)  # a line does not end within a flag


def _code(command: str) -> str:
    """A command in lines that a shell takes as one."""
    lines = [""]
    for word in shlex.split(command):
        if word.startswith("--") and len(lines[-1]) > LINE:
            lines.append("   ")
        lines[-1] += f" {shlex.quote(word)}" if lines[-1] else word
    return (
        '<div class="code"><button type="button" class="copy" hidden>Copy</button>'
        f'<pre tabindex="0"><code>{escape(f" {chr(92)}{chr(10)}".join(lines))}</code></pre></div>'
    )


def _table(said: Said) -> str:
    head = (
        '<th scope="col" class="num">#</th><th scope="col">loss</th><th scope="col">MAP@R</th>'
        '<th scope="col" class="more">R@1</th><th scope="col">joined MAP@R</th>'
        '<th scope="col" class="more">joined R@1</th><th scope="col">to the best</th>'
        '<th scope="col" class="num more">ms a step</th>'
    )
    rows = "".join(_loss_row(said, row) for row in said["table"]) + "".join(
        _reference_row(said, row) for row in said["references"]
    )
    return f'<table class="losses"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _loss_row(said: Said, row: Mapping[str, Any]) -> str:
    against = row["separated"]["against"]
    verdict = f'<span class="verdict {against["verdict"]}">{_VERDICTS[against["verdict"]]}</span>'
    if against["p"] is not None:
        low, high = against["interval"]
        points = f"{share(against['difference'], unit=False)}"
        ends = "" if low is None else f" ({share(low, unit=False)} to {share(high, unit=False)})"
        verdict += f'<small>{points}<span class="more">{ends}</span>, p {_chance(against["p"])}</small>'
    speed = said["timing"][row["loss"]]["ms_per_step"]
    return (
        f'<tr><td class="num">{row["separated"]["rank"]}</td><th scope="row">{escape(row["loss"])}</th>'
        f"{_figure(row['separated'][MAIN])}{_figure(row['separated']['precision@1'], 'more')}"
        f"{_figure(row['concatenated'][MAIN])}{_figure(row['concatenated']['precision@1'], 'more')}"
        f'<td class="wraps">{verdict}</td><td class="num more">{number(speed)}</td></tr>'
    )


def _reference_row(said: Said, row: Mapping[str, Any]) -> str:
    cells = []
    for form in ("separated", "concatenated"):
        for metric, style in ((MAIN, ""), ("precision@1", "more")):
            one = row.get(form) or (row["concatenated"] if form == "separated" else None)
            cells.append(_figure(one[metric], style) if one and (form in row or form == "separated") else "<td></td>")
    if "separated" not in row:  # one embedding: nothing to join
        cells[2:] = ["<td></td>", '<td class="more"></td>']
    name = _called(said, row)
    return (
        f'<tr class="reference"><td></td><th scope="row">{escape(name)}</th>{"".join(cells)}'
        '<td></td><td class="more"></td></tr>'
    )


def _figure(figure: Mapping[str, Any], style: str = "") -> str:
    low, high = figure["low"], figure["high"]
    ends = "" if low is None else f"<small>{share(low, unit=False)}–{share(high, unit=False)}</small>"
    return f'<td class="{style}">{share(figure["value"])}{ends}</td>'


def _some(row: Mapping[str, Any]) -> Any:
    return row.get("separated") or row["concatenated"]


def _called(said: Said, row: Mapping[str, Any]) -> str:
    return _REFERENCES.get(row["loss"]) or str(said["protocol"]["baseline"])


def _chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}".rstrip("0").rstrip(".") if p < 1 else "1"


def _learning(said: Said) -> str:
    order = [row["loss"] for row in said["table"]]
    over_steps, over_time = [], []
    for i, loss in reversed(list(enumerate(order))):
        style, name = (f"c{i}", loss) if i < COLOURED else ("rest", "")
        xs, ys = [p[0] for p in said["curves"][loss]], [p[1] for p in said["curves"][loss]]
        over_steps.append(Line(name, xs, ys, style))
        speed = said["timing"][loss]["ms_per_step"]
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
    made = "".join(f"<figure><figcaption>{title}</figcaption>{svg}</figure>" for title, svg in figures if svg)
    return f'<div class="charts">{made}</div><h3>Steps to a validation MAP@R</h3>{_reached(said, order)}'


def _reached(said: Said, order: Sequence[str]) -> str:
    levels, steps = said["reach"]["levels"], said["reach"]["steps"]
    head = "".join(f'<th scope="col" class="num">{share(level)}</th>' for level in levels)
    rows = "".join(
        f'<tr><th scope="row">{escape(loss)}</th>'
        + "".join(f'<td class="num">{number(step) if step is not None else "never"}</td>' for step in steps[loss])
        + f'<td class="num more">{number(said["timing"][loss]["seconds"])} s</td></tr>'
        for loss in order
    )
    return (
        f'<table class="losses"><thead><tr><th scope="col">loss</th>{head}'
        f'<th scope="col" class="num more">a whole training</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _settings(said: Said) -> str:
    values = [trial["value"] for trials in said["trials"].values() for trial in trials]
    low, high = min(values), max(values)
    rows = []
    for row in said["table"]:
        chosen = said["choices"][row["loss"]]["trial"]
        setting = "".join(_set(key, value) for key, value in row["setting"].items()) or "nothing to set"
        gain = share(row["validation"] - row["validation_default"], unit=False)
        rows.append(
            f'<tr><th scope="row">{escape(row["loss"])}</th><td class="wraps setting">{setting}</td>'
            f"<td>{share(row['validation'])}<small>{f'+{gain} points' if row['tuned'] else 'the default'}</small></td>"
            f'<td class="trials">{rank_plot.tried(said["trials"][row["loss"]], chosen, low, high)}</td></tr>'
        )
    head = ("loss", "best setting found", "validation MAP@R", f"all trials, {share(low)} to {share(high)}")
    heads = "".join(f'<th scope="col">{one}</th>' for one in head)
    return f'<table class="losses settings"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _set(key: str, value: Any) -> str:
    much = number(value, 4) if isinstance(value, (int, float)) else value
    return f"<span>{escape(key.partition('.')[2])} <b>{escape(much)}</b></span> "


def _protocol(said: Said) -> str:
    plan = said["protocol"]
    sampler = plan["sampler"]
    fold = plan["fold_sizes"][0]
    facts = {
        "encoder": plan["encoder"],
        "batches": f"{sampler['name']}, {sampler['batch']} items; the same ones for every loss",
        "steps a training": number(plan["steps"]),
        "settings tried a loss": number(plan["trials"]),
        "folds": f"{plan['folds']}, of {fold['train']['classes']} training and {fold['validation']['classes']} "
        "validation classes" + ("" if _even(plan["fold_sizes"]) else " or one more or less"),
        "seeds a fold": number(plan["seeds"]),
        "test": f"{number(plan['test']['items'])} items of {number(plan['test']['classes'])} classes, opened once",
        "split": plan["split"],
    }
    pairs = "".join(f"<div><dt>{escape(k)}</dt><dd>{format.any_value(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="facts">{pairs}</dl><h3>The command that gives this table</h3>{_code(said["command"])}'


def _even(folds: Sequence[Mapping[str, Any]]) -> bool:
    return len({fold["validation"]["classes"] for fold in folds}) == 1


def _table_note(said: Said) -> str:
    models = said["protocol"]["folds"] * said["protocol"]["seeds"]
    return (
        f"Means over {models} models a loss: one for each fold and seed. Joined: the embeddings of the folds side by "
        "side. Small figures: 95 % intervals over test classes. Worse: shown over classes (p, corrected for "
        "several comparisons) and over trainings."
    )


def _ranks_note() -> str:
    return (
        "● mean of single models with its 95 % interval, ○ joined folds. Right: the places a loss takes in 95 of 100 "
        "resamples of the test classes."
    )


def _learning_note(said: Said) -> str:
    more = " Grey: the losses after the eighth." if len(said["table"]) > COLOURED else ""
    return f"Best value so far on validation classes, means over folds and seeds.{more}"


def _settings_note(said: Said) -> str:
    return (
        "Searched on the folds of the training classes. ○ the default setting, ● the chosen one; faint: others, also "
        "those given up after one fold."
    )
