"""The report: one HTML file that needs nothing beside it, and asks nobody for anything."""

from collections.abc import Callable
from pathlib import Path

from nearkin.core import files
from nearkin.report import item_sections, number_sections, sampling
from nearkin.report.findings import Findings, check
from nearkin.report.format import count, escape, number, short
from nearkin.report.item_sections import Shown
from nearkin.report.template import Section, document
from nearkin.report.thumbnails import Thumbnails

__all__ = ["Progress", "write"]

Progress = Callable[[int, int], None]  # sections done, sections in all
ROOM = "make room, or choose another place"  # what to do where a file cannot be written


def write(
    path: str | Path, findings: Findings, progress: Progress | None = None, *, seed: int = 0, way_out: str = ROOM
) -> None:
    """Writes the report there, whole or not at all; the same findings and seed give the same file.

    What cannot be shown is left out or a dash: a run without history, validation, pictures or classes has its page too.
    """
    check(findings)
    text = page(findings, progress, seed)
    with files.explained(str(path), way_out):
        files.write_text(path, text)


def page(findings: Findings, progress: Progress | None = None, seed: int = 0) -> str:
    """The text of the report."""
    steps = 7
    done = iter(range(1, steps + 1))

    def told(value: str | tuple[str, str] | sampling.Choice) -> None:
        if progress is not None:
            progress(next(done), steps)

    shown = Shown(findings, sampling.choose(findings, seed), Thumbnails(findings), seed)
    told(shown.choice)
    told(numbers := number_sections.results(findings))
    told(curves := number_sections.training(findings))
    told(grid := item_sections.grid(shown))
    told(plane := item_sections.plane(shown))
    told(errors := item_sections.label_errors(shown))
    sections: list[Section] = [
        ("results", "Results", _results_note(findings), numbers),
        ("retrieval", "Retrieval", _grid_note(shown), grid),
        ("map", "Map", _map_note(shown, plane[1]), plane[0]),
        ("training", "Training", _training_note(findings), curves),
        (
            "distances",
            "Distances",
            _sampled(shown, "All pairs of test items; far apart curves are good."),
            item_sections.distances(shown),
        ),
        (
            "worst",
            "Worst classes",
            _sampled(shown, "By R-precision: of the nearest, as many as it has kin, the share that is kin."),
            item_sections.worst(shown),
        ),
        (
            "confused",
            "Most confused",
            _sampled(shown, "Pairs of classes that stand among each other's neighbours."),
            item_sections.confused(shown),
        ),
        (
            "labels",
            "Suspect labels",
            _sampled(shown, "Items whose neighbours agree on another class: look before you trust either."),
            errors,
        ),
        ("data", "Data", "", number_sections.data(findings)),
        ("recipe", "Recipe", "", number_sections.recipe(findings)),
    ]
    text = _document(shown, [section for section in sections if section[3]])
    told(text)
    return text


def _document(shown: Shown, sections: list[Section]) -> str:
    sentence, lede = number_sections.headline(shown.findings)
    opening = lede + number_sections.verdict(shown.findings) + _warnings(shown)
    return document("nearkin run report", shown.findings.title, sentence, opening, sections)


def _warnings(shown: Shown) -> str:
    findings, found = shown.findings, shown.choice.diagnosis
    alerts = []
    if found is not None and found["collapse"]["collapsed"]:
        alerts = [f"<b>Collapsed embedding.</b> {escape('; '.join(found['collapse']['why']))}."]
    broken = int((~findings.embeddings.isfinite().all(1)).sum())
    if broken:
        alerts.append(
            f"<b>NaN or Inf</b> in {number(broken)} of {count(len(findings.names), 'embedding', 'embeddings')}; "
            "left out below."
        )
    notes = [escape(short(note, 600)) for note in findings.notes]
    if shown.thumbnails.bad:
        first = next(iter(shown.thumbnails.bad.values()))
        bad = count(len(shown.thumbnails.bad), "picture", "pictures")
        notes.append(f"{bad} could not be read ({escape(short(first, 300))}).")
    made = f'<div class="alert" role="alert">{"".join(f"<p>{a}</p>" for a in alerts)}</div>' if alerts else ""
    return made + (f'<ul class="notes">{"".join(f"<li>{n}</li>" for n in notes)}</ul>' if notes else "")


def _results_note(findings: Findings) -> str:
    said = "On the test items, asked once, after training."
    without = findings.results.get("no_interval")
    if without:
        return f"{said} {escape(str(without).capitalize())}."
    figures = [figure for one in (findings.results.get("test") or {}).values() for figure in one.values()]
    drawn = any(isinstance(figure, dict) and figure.get("low") is not None for figure in figures)
    return said + (" Small figures: 95 % intervals." if drawn else "")


def _grid_note(shown: Shown) -> str:
    if shown.findings.labels is not None:
        return (
            'Left a query, right its nearest among all test items. <span class="right">✓ framed</span>: same class; '
            '<span class="wrong">✗ dashed</span>: another. '
            "Right and wrong ones are drawn by chance; of the worst classes, a poor item each."
        )
    if shown.findings.targets is not None:
        return "Left a query with its target, right its nearest. Δ is the distance of their targets."
    return "Left a query, right its nearest, with their cosine."


def _map_note(shown: Shown, by: str) -> str:
    how = "the two main directions"
    if by == "t-SNE":
        how = "neighbourhoods are kept, distances between far groups mean little"
    name = by.replace("-", "\u2011")  # not to be broken there
    every_item = count(len(shown.choice.items), "test item", "test items")
    text = f"{number(len(shown.choice.mapped))} of {every_item} by {name}: {how}."
    if shown.findings.labels is not None:
        labels = shown.findings.labels.cpu().numpy()
        kinds, every = (len(set(labels[items].tolist())) for items in (shown.choice.mapped, shown.choice.items))
        of = f"{count(kinds, 'class', 'classes')}{'' if kinds == every else ' drawn by chance'}."
        return f"{text} {of} Point at one, or choose below, to see its kin."
    if shown.findings.targets is None:
        return text
    columns = shown.findings.targets.reshape(len(shown.findings.names), -1).shape[1]
    return f"{text} Coloured by target{f', the first of {columns}' if columns > 1 else ''}."


def _training_note(findings: Findings) -> str:
    lasted = number_sections.lasted(findings)
    return f"{lasted}." if lasted else ""


def _sampled(shown: Shown, text: str) -> str:
    seen, of = len(shown.choice.diagnosed), len(shown.choice.items)
    if seen == of:
        return text
    return f"{text} Among {number(seen)} of {number(of)} items, drawn by class; fewer strangers make it look easier."
