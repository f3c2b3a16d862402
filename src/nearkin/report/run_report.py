"""The report of a run: one HTML file that needs no other file and makes no requests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.core import files
from nearkin.report import (
    compatible_section,
    heat_section,
    interpolation_section,
    item_sections,
    number_sections,
    pretraining_section,
    rerank_section,
    sampling,
)
from nearkin.report.findings import Findings, NearPair, check
from nearkin.report.format import count, escape, number, short
from nearkin.report.item_sections import Context
from nearkin.report.template import Section, document
from nearkin.report.thumbnails import Thumbnails
from nearkin.training import Outcome
from nearkin.training.config.registry import BY_LENGTH

__all__ = ["Progress", "findings_of", "of_run", "page", "rehearse", "write"]

Progress = Callable[[int, int], None]  # sections done, sections in total
WAY_OUT = "make room, or choose another path"  # where a file cannot be written
_OWN_LINES = (
    "parts",
    "duplicates",
    "split",
    "near_duplicates",
    "left_out",
    "unlabelled",
    "notes",
)  # of the facts about the data
NEAR_SHOWN = 24  # pairs of near-duplicates with their pictures
_REPEATED = ("precision@1",)  # the same number as recall@1
LEVELS = (
    "Items of one class of a level are positives there. Intervals: over the choice of the finest classes, which the "
    "split holds out."
)
LENGTHS = "The first dimensions of each test embedding alone, at the lengths that were trained for (--dim)."
DISTANCES = "All pairs of test items; the farther apart the curves, the better."
WORST = "By R-precision: the share of the R nearest neighbours in the item's class, which has R other items."
CONFUSED = "Pairs of classes that are among each other's nearest neighbours."
SUSPECT = "Items whose neighbours agree on another class: check them before you trust either label."


def of_run(outcome: Outcome, progress: Callable[[int, int], None] | None = None) -> Path:
    """Writes report.html into the folder of the run."""
    path = outcome.folder / "report.html"
    way_out = f"training is done and saved: make room, then nearkin train --resume {outcome.folder}"
    write(path, findings_of(outcome), progress, seed=outcome.recipe.training.seed, way_out=way_out)
    return path


def rehearse() -> None:
    """Makes a small report of random findings and discards it: missing parts show before training, not after.

    Reads the style and the script of the page and lets Pillow encode PNG and JPEG; so few items need no t-SNE.
    """
    embeddings = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    labels, names = torch.arange(8) // 2, [f"{i}.png" for i in range(8)]
    picture = lambda i: np.full((96 if i % 2 else 24, 24), i, np.uint8)  # noqa: E731  # as JPEG and as PNG
    page(Findings("", {}, {}, [], {}, embeddings, labels, None, list("abcd"), names, picture))


def write(
    path: str | Path, findings: Findings, progress: Progress | None = None, *, seed: int = 0, way_out: str = WAY_OUT
) -> None:
    """Writes the report atomically; the same findings and seed give the same file.

    What cannot be shown is left out or a dash: history, validation, pictures and classes are all optional.
    """
    check(findings)
    text = page(findings, progress, seed)
    with files.explained(str(path), way_out):
        files.write_text(path, text)


def page(findings: Findings, progress: Progress | None = None, seed: int = 0) -> str:
    """The HTML of the report."""
    steps = 7
    done = iter(range(1, steps + 1))

    def advance(_: object) -> None:
        if progress is not None:
            progress(next(done), steps)

    context = Context(findings, sampling.draw(findings, seed), Thumbnails(findings), seed)
    advance(context.sample)
    advance(numbers := number_sections.results(findings))
    advance(curves := number_sections.training(findings))
    advance(grid := item_sections.grid(context))
    advance(plane := item_sections.plane(context))
    advance(errors := item_sections.label_errors(context))
    sections: list[Section] = [
        ("results", "Results", _results_note(findings), numbers),
        ("levels", "Levels", LEVELS, number_sections.levels(findings)),
        ("finetuning", "Fine-tuning", interpolation_section.NOTE, interpolation_section.interpolation(findings)),
        ("compatible", "Compatibility", compatible_section.NOTE, compatible_section.compatibility(findings)),
        ("pretraining", "Pretraining", pretraining_section.NOTE, pretraining_section.pretraining(findings)),
        ("lengths", "Short embeddings", LENGTHS, number_sections.short_embeddings(findings)),
        ("groups", "Groups", "", number_sections.groups(findings)),
        ("rerank", "Re-ranking", rerank_section.NOTE, rerank_section.reranking(findings)),
        ("retrieval", "Retrieval", _grid_note(context), grid),
        ("map", "Map", _map_note(context, plane[1]), plane[0]),
        ("training", "Training", _training_note(findings), curves),
        ("distances", "Distances", _sampled(context, DISTANCES), item_sections.distances(context)),
        ("quality", "Quality", _quality_note(findings), item_sections.quality(context)),
        ("worst", "Worst classes", _sampled(context, WORST), item_sections.worst(context)),
        ("confused", "Most confused", _sampled(context, CONFUSED), item_sections.confused(context)),
        ("labels", "Suspect labels", _sampled(context, SUSPECT), errors),
        ("near", "Near-duplicates", _near_note(findings), item_sections.near(context)),
        ("data", "Data", "", number_sections.data(findings)),
        ("recipe", "Recipe", "", number_sections.recipe(findings)),
    ]
    text = _document(context, [section for section in sections if section[3]])
    advance(text)
    return text


def _document(context: Context, sections: list[Section]) -> str:
    sentence, lede = number_sections.headline(context.findings)
    opening = lede + number_sections.verdict(context.findings) + _warnings(context)
    return document("nearkin run report", context.findings.title, sentence, opening, sections)


def _warnings(context: Context) -> str:
    findings, diagnosis = context.findings, context.sample.diagnosis
    alerts = []
    if diagnosis is not None and diagnosis["collapse"]["collapsed"]:
        alerts = [f"<b>Collapsed embedding.</b> {escape('; '.join(diagnosis['collapse']['why']))}."]
    invalid = int((~findings.embeddings.isfinite().all(1)).sum())
    if invalid:
        alerts.append(
            f"<b>NaN or Inf</b> in {number(invalid)} of {count(len(findings.names), 'embedding', 'embeddings')}; "
            "left out below."
        )
    notes = [escape(short(note, 600)) for note in findings.notes]
    if context.thumbnails.bad:
        first = next(iter(context.thumbnails.bad.values()))
        bad = count(len(context.thumbnails.bad), "picture", "pictures")
        notes.append(f"{bad} could not be read ({escape(short(first, 300))}).")
    warnings = f'<div class="alert" role="alert">{"".join(f"<p>{a}</p>" for a in alerts)}</div>' if alerts else ""
    return warnings + (f'<ul class="notes">{"".join(f"<li>{n}</li>" for n in notes)}</ul>' if notes else "")


def _results_note(findings: Findings) -> str:
    note = "On the test items, evaluated once, after training."
    no_interval = findings.results.get("no_interval")
    if no_interval:
        return f"{note} {escape(str(no_interval).capitalize())}."
    figures = [figure for one in (findings.results.get("test") or {}).values() for figure in one.values()]
    with_interval = any(isinstance(figure, dict) and figure.get("low") is not None for figure in figures)
    return note + (" Small figures: 95 % intervals." if with_interval else "")


def _grid_note(context: Context) -> str:
    matched = "" if context.findings.explain is None else f"</p><p>{heat_section.NOTE}"
    return _neighbours_note(context) + matched


def _neighbours_note(context: Context) -> str:
    if context.findings.labels is not None:
        return (
            'Left a query, right its nearest neighbours among all test items. <span class="right">✓ framed</span>: '
            'same class; <span class="wrong">✗ dashed</span>: another class. '
            "Correct and wrong queries are drawn at random; each of the worst classes adds a poor one."
        )
    if context.findings.targets is not None:
        return "Left a query with its target, right its nearest neighbours. Δ is the distance between their targets."
    return "Left a query, right its nearest neighbours with their cosine."


def _map_note(context: Context, method: str) -> str:
    meaning = "the first two principal components"
    if method == "t-SNE":
        meaning = "neighbourhoods are preserved, distances between distant groups mean little"
    name = method.replace("-", "\u2011")  # a non-breaking hyphen
    every_item = count(len(context.sample.items), "test item", "test items")
    text = f"{number(len(context.sample.mapped))} of {every_item} by {name}: {meaning}."
    if context.findings.labels is not None:
        labels = context.findings.labels.cpu().numpy()
        kinds, every = (len(set(labels[items].tolist())) for items in (context.sample.mapped, context.sample.items))
        classes = f"{count(kinds, 'class', 'classes')}{'' if kinds == every else ' drawn at random'}."
        return f"{text} {classes} Point at an item, or choose a class below, to highlight its class."
    if context.findings.targets is None:
        return text
    columns = context.findings.targets.reshape(len(context.findings.names), -1).shape[1]
    return f"{text} Coloured by target{f', the first of {columns}' if columns > 1 else ''}."


def _near_note(findings: Findings) -> str:
    facts = findings.data.get("near-duplicates across parts", "")
    return f"Pictures of an earlier part that are nearly in a later one: {escape(str(facts))}." if facts else ""


def _quality_note(findings: Findings) -> str:
    note = "The length of each test item's embedding: blurred, dark and odd items should have short ones."
    name = (findings.recipe.get("loss") or {}).get("name")
    if name not in BY_LENGTH:
        note = f"The length of each test item's embedding. The loss {escape(str(name))} does not train it as a quality."
    return note


def _training_note(findings: Findings) -> str:
    length = number_sections.length(findings)
    return f"{length}." if length else ""


def _sampled(context: Context, text: str) -> str:
    diagnosed, total = len(context.sample.diagnosed), len(context.sample.items)
    if diagnosed == total:
        return text
    sample = f"Among {number(diagnosed)} of {number(total)} items, drawn by class"
    return f"{text} {sample}; with fewer negatives the task looks easier."


def findings_of(outcome: Outcome) -> Findings:
    """The findings of a finished run."""
    recipe, prepared, held_out = outcome.recipe, outcome.prepared, outcome.test
    items = prepared.items.take(held_out.everything)
    graded = items.labels is None or recipe.loss["name"] == "logratio"
    results = outcome.results | {"baseline_name": outcome.results["baseline"]}
    results["test"] = {
        who: {name: figure for name, figure in figures.items() if name not in _REPEATED}
        for who, figures in outcome.results["test"].items()
    }
    return Findings(
        title=f"{Path(recipe.data.source).name or recipe.data.source}, {recipe.loss['name']}, {recipe.encoder['name']}",
        recipe=recipe.plain(),
        data=_data(prepared.report) | {"closed": prepared.known_classes},
        history=_history(outcome.history),
        results=results,
        embeddings=outcome.embeddings,
        labels=None if items.labels is None or graded else torch.from_numpy(items.labels),
        targets=None if items.targets is None or not graded else torch.from_numpy(items.targets),
        classes=items.classes,
        names=items.names,
        picture=_picture(prepared.rows, held_out.everything) if prepared.baseline != "vectors" else None,
        notes=outcome.notes,
        near=_near_pairs(outcome),
        explain=heat_section.explainer(outcome.folder, prepared.rows, held_out.everything),
        free_length=recipe.encoder.get("normalize") is False,
    )


def _near_pairs(outcome: Outcome) -> list[NearPair]:
    """The first pairs with their pictures."""
    prepared = outcome.prepared
    shown = prepared.report.get("near_duplicates", {}).get("shown", [])[:NEAR_SHOWN]
    place = {name: i for i, name in enumerate(prepared.items.names)} if shown else {}
    pairs = [(entry, place.get(entry["path"]), place.get(entry["copy"])) for entry in shown]
    every = np.arange(len(prepared.items))
    picture = _picture(prepared.rows, every) if shown and prepared.baseline != "vectors" else None
    return [
        NearPair(
            (picture(a), picture(b)),
            (entry["path"], entry["copy"]),
            (entry["part"], entry["copy_part"]),
            entry["similarity"],
            entry["dropped"],
        )
        for entry, a, b in pairs
        if picture is not None and a is not None and b is not None
    ]


def _history(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One learning rate per step, that of the head."""

    def rate(rates: dict[str, float]) -> float:
        return rates["head"] if "head" in rates else max(rates.values())

    return [line | {"lr": rate(line["lr"])} if line["event"] == "step" else line for line in lines]


def _data(report: dict[str, Any]) -> dict[str, Any]:
    """The report on the data in words: extremes by name, duplicates only where there are some."""

    def sizes(part: dict[str, Any]) -> dict[str, Any]:
        extremes = {
            key: f"{one['class']} ({one['items']})" for key, one in part.items() if key in ("smallest", "largest")
        }
        return {key: extremes.get(key, value) for key, value in part.items()}

    facts = {key: value for key, value in sizes(report).items() if key not in _OWN_LINES}
    facts = {key: value for key, value in facts.items() if value not in ([], "", None)}
    facts["split"] = report["split"].split(":")[0]
    facts["parts"] = {name: sizes(part) for name, part in report["parts"].items()}
    for where, duplicates in report.get("duplicates", {}).items():
        pairs = duplicates["pairs"] if isinstance(duplicates, dict) else duplicates
        if pairs:
            names = {"across": "duplicates across parts", "within": "duplicates within parts"}
            facts[names.get(where, "duplicates of another class")] = f"{pairs} pairs"
    near, left = report.get("near_duplicates"), report.get("left_out")
    if near and near["pairs"]:
        between = ", ".join(f"{pairs:,} {both}" for both, pairs in near["between"].items())
        gone = f"; {count(near['dropped'], 'picture', 'pictures')} dropped" if near["dropped"] else ""
        facts["near-duplicates across parts"] = f"{count(near['pairs'], 'pair', 'pairs')} ({between}){gone}"
    if left:
        where = ", ".join(f"{items:,} of {part}" for part, items in left["parts"].items())
        facts["left out"] = f"{count(len(left['items']), 'item', 'items')} ({where})"
    return facts


def _picture(rows: Any, indices: NDArray[np.int64]) -> Callable[[int], NDArray[np.uint8]] | None:
    if hasattr(rows, "pixels"):  # the user's own data set
        return None if rows.pixels(0) is None else lambda i: rows.pixels(int(indices[i]))

    def picture(i: int) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = np.asarray(rows[indices[i]])
        return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels

    return picture
