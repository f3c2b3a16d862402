"""What came out of the canon's comparison: tables in Markdown, CSV and JSON, a picture, and recipes."""

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import canon_plan
from canon_plan import BEST, FROZEN, Done, Options
from canon_rows import FOUR, PAPERS, PEER, Row, rows_of
from canon_work import Job, content_of, key
from nearkin.core import files, toml

__all__ = ["recipes", "summary", "write"]

METRICS = ("recall@1", "recall@2", "recall@4", "recall@8", "map@r", "nmi")
SHORT = {"recall@1": "R@1", "recall@2": "R@2", "recall@4": "R@4", "recall@8": "R@8", "map@r": "MAP@R", "nmi": "NMI"}
OURS, THEIRS, INK = "#1f83e0", "#e0682b", "#7d7d7d"  # readable on white and on black
_COMMAND = "nearkin train cub200 --root data/CUB_200_2011 --recipe recipes/"


def summary(subject: str, options: Options, done: Done) -> list[dict[str, Any]]:
    """One dictionary per row that has been tested, in percent: the mean over seeds, of interval ends too.

    {"name", "setting", "seeds", "figures": {metric: {"value", "low", "high", "seeds": […]}}, "peer", "paper",
    "images_per_second", "searched": [{"setting", "map@r"}]}
    """
    table = []
    if subject != "best":
        frozen = [job for job in map(_job, done) if job.stage == "frozen" and job.subject == subject]
        table += [_line(FROZEN, frozen[:1], done, "frozen" if subject == "cub200" else None)] if frozen else []
    rows: tuple[Row | None, ...] = (None,) if subject == "best" else rows_of(subject)
    for row in rows:
        jobs = [job for job in canon_plan.finals(subject, row, options, done) if "test" in done.get(key(job), {})]
        if not jobs:
            continue
        with_peer = row is not None and subject == "cub200"
        line = _line(jobs[0].row, jobs, done, row.peer if row is not None and with_peer else None)
        line["paper"] = PAPERS.get(row.paper or "") if row is not None and with_peer else None
        tried = canon_plan.searched(subject, row, options, done)
        line["searched"] = [{"setting": job.setting, "of": job.row, "map@r": 100 * value} for job, value in tried]
        speed = [done[key(one)] for one in [jobs[0]._replace(stage="speed", seed=0)] if key(one) in done]
        line["images_per_second"] = speed[0].get("images_per_second") if speed else None
        table.append(line)
    return table


def _job(text: str) -> Job:
    import json

    return Job(**json.loads(text))


def _line(name: str, jobs: list[Job], done: Done, peer: str | None) -> dict[str, Any]:
    results = [done[key(job)] for job in jobs]
    figures = {}
    for metric in METRICS:
        each = [result["test"][metric] for result in results]
        ends = {
            end: 100 * fmean(one[end] for one in each) for end in ("value", "low", "high") if each[0][end] is not None
        }
        figures[metric] = {"low": None, "high": None} | ends | {"seeds": [100 * one["value"] for one in each]}
    line: dict[str, Any] = {"name": name, "seeds": len(jobs), "figures": figures}
    line |= {"setting": {} if name == FROZEN else jobs[0].setting, "peer": None, "paper": None}
    if peer is not None:
        line["peer"] = dict(zip(FOUR, PEER[peer], strict=True))
    exact = [result["exact"] for result in results if "exact" in result]
    line["exact"] = {metric: 100 * fmean(one[metric] for one in exact) for metric in FOUR} if exact else None
    seconds = [result["training_seconds"] for result in results if "training_seconds" in result]
    line |= {"training_seconds": fmean(seconds) if seconds else None, "peak_bytes": results[0].get("peak_bytes")}
    line |= {"device": results[0].get("device"), "torch": results[0].get("torch"), "images_per_second": None}
    return line | {"searched": []}


def write(subject: str, options: Options, done: Done, folder: Path) -> None:
    """SUBJECT.md, .csv, .json, .svg and .png; nothing where nothing was tested."""
    lines = summary(subject, options, done)
    if not lines:
        print("nothing is tested yet: no tables")
        return
    files.write_json(folder / f"{subject}.json", {"subject": subject, "rows": lines})
    files.write_text(folder / f"{subject}.md", markdown(lines))
    files.write_text(folder / f"{subject}.csv", table(lines))
    if subject != "best":
        picture(subject, lines, folder)
    print(markdown(lines))


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table, and below it what was chosen."""
    peers, papers = (any(line[who] for line in lines) for who in ("peer", "paper"))
    speeds = any(line["images_per_second"] for line in lines)
    heads = ["", *SHORT.values()]
    exact = any(line["exact"] for line in lines)
    heads += (
        ["exact crop: R@1, R@8, MAP@R, NMI"] * exact
        + ["peer: R@1, R@8, MAP@R, NMI"] * peers
        + ["paper: R@1, MAP@R"] * papers
        + ["images/s"] * speeds
    )
    out = [heads, ["---"] * len(heads)]
    for line in lines:
        cells = [line["name"], *(_cell(line["figures"][metric], metric) for metric in METRICS)]
        cells += [_plain(line["exact"].values() if line["exact"] else ())] * exact
        cells += [_plain(line["peer"].values() if line["peer"] else ())] * peers
        cells += [_plain(line["paper"] or ())] * papers
        cells += [f"{line['images_per_second']:,.0f}" if line["images_per_second"] else ""] * speeds
        out.append(cells)
    chosen = [["", "chosen", "MAP@R where it was chosen (of all tried)"], ["---"] * 3]
    for line in lines:
        if line["searched"]:
            values = sorted((one["map@r"] for one in line["searched"]), reverse=True)
            values_text = ", ".join(f"{value:.1f}" if value >= 0 else "diverged" for value in values)
            chosen.append(
                [
                    line["name"],
                    _setting(line["setting"]),
                    f"**{values_text.replace(', ', '**, ', 1)}" if "," in values_text else values_text,
                ]
            )
    return (
        "\n".join("| " + " | ".join(row) + " |" for row in out)
        + "\n\n"
        + "\n".join("| " + " | ".join(row) + " |" for row in chosen)
        + "\n"
    )


def _cell(figure: Mapping[str, Any], metric: str) -> str:
    """Mean ± half the range over seeds (interval over classes, the mean of the seeds' own)."""
    text = f"{figure['value']:.1f}"
    if len(figure["seeds"]) > 1 and metric in FOUR:
        text += f" ± {(max(figure['seeds']) - min(figure['seeds'])) / 2:.1f}"
    if metric in ("recall@1", "map@r", "nmi") and figure["low"] is not None:
        text += f" ({figure['low']:.1f}–{figure['high']:.1f})"
    return text


def _plain(values: Any) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _setting(setting: Mapping[str, Any]) -> str:
    short = {name.removeprefix("loss.").removeprefix("optimizer."): value for name, value in setting.items()}
    return ", ".join(f"{name} {value}" for name, value in short.items() if name not in ("name", "training.batches"))


def table(lines: list[dict[str, Any]]) -> str:
    """The same as CSV, every seed's figures and every interval."""
    ends = [f"{SHORT[metric]}{end}" for metric in METRICS for end in ("", " low", " high", " seeds")]
    theirs = [f"{who} {SHORT[metric]}" for who in ("exact crop", "peer") for metric in FOUR]
    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    out.writerow(
        ["loss", *ends, *theirs, "paper R@1", "paper MAP@R", "images/s", "seeds", "setting", "device", "torch"]
    )
    for line in lines:
        cells: list[Any] = [line["name"]]
        for metric in METRICS:
            figure = line["figures"][metric]
            cells += [_number(figure["value"]), _number(figure["low"]), _number(figure["high"])]
            cells.append(" ".join(f"{value:.3f}" for value in figure["seeds"]))
        cells += [_number((line["exact"] or {}).get(metric)) for metric in FOUR]
        cells += [(line["peer"] or {}).get(metric, "") for metric in FOUR]
        cells += list(line["paper"] or ("", ""))
        speed = line["images_per_second"]
        cells += [
            f"{speed:.0f}" if speed else "",
            line["seeds"],
            _setting(line["setting"]),
            line["device"],
            line["torch"],
        ]
        out.writerow(cells)
    return file.getvalue()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def picture(subject: str, lines: list[dict[str, Any]], folder: Path) -> None:
    """R@1 and MAP@R, a row a loss, best first: interval, mean, the seeds; the peer's as diamonds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "canon"  # the same picture is the same file
    frozen = [line for line in lines if line["name"] == FROZEN]
    ordered = sorted(
        (line for line in lines if line["name"] != FROZEN), key=lambda one: one["figures"]["map@r"]["value"]
    )
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(9, 1.2 + 0.27 * max(3, len(ordered))))
    for panel, metric in zip(panels, ("recall@1", "map@r"), strict=True):
        for i, line in enumerate(ordered):
            one = line["figures"][metric]
            if one["low"] is not None:
                panel.plot([one["low"], one["high"]], [i, i], color=OURS, linewidth=1.4, alpha=0.45)
            panel.plot(one["seeds"], [i] * len(one["seeds"]), "|", color=OURS, markersize=8)
            panel.plot(one["value"], i, "o", color=OURS, markersize=5, label=None if i else "nearkin")
            if line["peer"]:
                panel.plot(line["peer"][metric], i, "D", color=THEIRS, markersize=4.5)
        for line in frozen:
            panel.axvline(
                line["figures"][metric]["value"], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="frozen"
            )
        panel.set_xlabel(f"{SHORT[metric]}, %", color=INK)
        panel.grid(axis="x", color=INK, alpha=0.2)
        panel.tick_params(colors=INK, length=0)
        for spine in panel.spines.values():
            spine.set_visible(False)
    panels[0].set_yticks(range(len(ordered)), [line["name"] for line in ordered])
    panels[0].set_ylim(-0.7, len(ordered) - 0.3)
    if any(line["peer"] for line in ordered):
        panels[0].plot([], [], "D", color=THEIRS, markersize=4.5, label="peer")
    marks, names = panels[0].get_legend_handles_labels()
    figure.legend(marks, names, ncols=3, frameon=False, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_size_inches()[1]))
    for kind in ("svg", "png"):
        file = io.BytesIO()
        options: dict[str, Any] = {"metadata": {"Date": None}, "transparent": True} if kind == "svg" else {"dpi": 130}
        figure.savefig(file, format=kind, **options)
        files.write_bytes(folder / f"{subject}.{kind}", file.getvalue())
    plt.close(figure)


def recipes(subject: str, options: Options, done: Done, folder: Path) -> None:
    """The chosen settings as recipes: of every loss that learns from class names, and the best."""
    rows: tuple[Row | None, ...] = (None,) if subject == "best" else rows_of(subject)
    written = {line["name"]: line for line in summary(subject, options, done)}
    for row in rows:
        jobs = canon_plan.finals(subject, row, options, done)
        name = BEST if row is None else row.name
        if name not in written or name.endswith(("defaults", "on attributes")):
            continue
        place = "cub200-128.toml" if row is None else f"cub200-96/{_slug(row.name)}.toml"
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        content = content_of(jobs[0])
        files.write_text(folder / place, _head(place, written[name]) + "\n" + toml.text(content))
        print(folder / place)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z]+", "-", name.lower()).strip("-")


def _head(place: str, line: Mapping[str, Any]) -> str:
    """Command, cost, expected result."""

    def mean_and_interval(metric: str) -> str:
        one = line["figures"][metric]
        return f"{one['seeds'][0] / 100:.3f} ({one['low'] / 100:.3f}-{one['high'] / 100:.3f})"

    mean = {metric: line["figures"][metric]["value"] / 100 for metric in ("recall@1", "map@r")}
    memory = f", {line['peak_bytes'] / 2**30:.1f} GiB of its memory" if line["peak_bytes"] else ""
    lines = [
        f"{_COMMAND}{place}",
        f"{line['training_seconds']:.0f} s of training on {line['device']} shared by several runs{memory}; expect R@1 "
        f"{mean_and_interval('recall@1')}, MAP@R {mean_and_interval('map@r')}",
        f"on the 100 unseen birds of the reduced photos (short side 112 px); mean of {line['seeds']} seeds: "
        f"{mean['recall@1']:.3f} and {mean['map@r']:.3f}. Needs nearkin[lite].",
    ]
    return "".join(f"# {text}\n" for text in lines)
