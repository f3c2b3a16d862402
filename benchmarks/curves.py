"""Tables and log-log curves of docs/performance.md from the committed result files: python benchmarks/curves.py

Pictures go to docs/pictures, tables between the marks of the page. A result file that is not there yet is named and
left out, and what the page says about it stays as it is. --png FOLDER writes the pictures there too, to look at.
"""

import argparse
import csv
import io
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
PICTURES = HERE.parent / "docs" / "pictures"
INK = "#7d7d7d"  # readable on white and on black, as are the colours
COLOURS = {"auto": "#1f83e0", "compiled": "#c9469a", "peer": "#e0682b", "floor": "#4d9a57"}
NAMES = {"auto": "nearkin", "compiled": "compiled", "peer": "peer", "floor": "floor"}
UNITS = {"ms": "ms", "mib": "MiB"}
CELLS = {"cpu": [(1024, "ms"), (1024, "mib")], "gpu": []}
CLASS_CELLS = [(128, 100), (512, 1000), (2048, 10_000)]  # batch, classes
CLASS_COLUMNS = {  # on the page: a result file and a number of classes for each column
    "cuda": [("cuda", 1_000_000), ("cuda", 10_000_000)],
    "cpu": [("cpu", 200_000)],
}
MANY = ("#1f83e0", "#e0682b", "#4d9a57", "#8a6fd6", "#c9469a", "#b08a1e", "#2a9d9d", "#d64545")


class Line(NamedTuple):
    name: str
    colour: str
    points: list[tuple[float, float]]


class Panel(NamedTuple):
    title: str
    lines: list[Line]
    slope: int  # of the guide: the cost grows as this power


def rows_of(name: str) -> list[dict[str, str]]:
    path = HERE / "results" / name
    if not path.exists():
        print(f"no {path.name} yet: left out")
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def figure(text: str | None) -> float | None:
    """A number above 0, or None for "out of memory" and its like."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if value > 0 else None


def points(rows: Sequence[dict[str, str]], across: str, column: str) -> list[tuple[float, float]]:
    pairs = [(float(row[across]), figure(row.get(column))) for row in rows]
    return sorted((x, y) for x, y in pairs if y is not None)


def loss_panels(rows: Sequence[dict[str, str]], what: str, slope: int) -> list[Panel]:
    """One for each loss: ours, compiled, the peer and the floor against B."""
    by_loss: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        by_loss[row["loss"]].append(row)
    ways = ("floor", "peer", "compiled", "auto") if what == "ms" else ("peer", "compiled", "auto")
    return [
        Panel(
            loss,
            [Line(NAMES[way], COLOURS[way], points(loss_rows, "B", f"{way}_{what}")) for way in ways],
            slope,
        )
        for loss, loss_rows in by_loss.items()
    ]


def class_panels(rows: Sequence[dict[str, str]]) -> list[Panel]:
    """Time and memory against C: ArcFace for all losses, which lie on one another, the peers and the floor."""
    by_way: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        if row["way"].startswith(("arcface, ", "peer", "floor")) and "centres" not in row["way"]:
            by_way[row["way"].replace("arcface, ", "nearkin, ")].append(row)
    panels = []
    for title, column in (("milliseconds against C", "ms"), ("extra MiB against C", "extra_mib")):
        lines = [
            Line(way, MANY[i % len(MANY)], points(loss_rows, "C", column))
            for i, (way, loss_rows) in enumerate(by_way.items())
            if column == "ms" or not way.startswith("floor")
        ]
        panels.append(Panel(title, lines, 1))
    return panels


def draw(panels: Sequence[Panel], columns: int, size: tuple[float, float], caption: str, shared: bool = True) -> Any:
    """Small multiples, on the same axes where `shared`, lines named at their ends."""
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "nearkin", "font.size": 8, "font.family": "sans-serif"}
    )
    down = -(-len(panels) // columns)
    if not any(line.points for panel in panels for line in panel.lines):
        raise SystemExit("a result file without a single number")
    shown, axes = plt.subplots(
        down, columns, figsize=(size[0] * columns, size[1] * down), sharex=True, sharey=shared, squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for i, (panel, axis) in enumerate(zip(panels, axes.flat, strict=False)):
        axis.set(xscale="log", yscale="log")
        for line in panel.lines:
            if line.points:
                axis.plot(*zip(*line.points, strict=True), color=line.colour, lw=1.5, marker="o", ms=2.5)
        axis.set_title(panel.title, color=INK, fontsize=9, loc="left")
        if i + columns >= len(panels):
            axis.tick_params(labelbottom=True)
    places = sorted({x for panel in panels for line in panel.lines for x, _ in line.points})
    for panel, axis in zip(panels, axes.flat, strict=False):
        dress(panel, axis, places)
    shown.text(0.005, 0.002, caption, color=INK, fontsize=7)
    shown.tight_layout(rect=(0, 0.02, 1, 1))
    return shown


def dress(panel: Panel, axis: Any, places: list[float]) -> None:
    """Ink, sizes as ticks, a dotted guide of the growth that is promised, a name beside each line's last point."""
    from matplotlib import ticker

    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(INK)
    axis.tick_params(colors=INK, which="both", labelsize=7, length=2)
    ticks = places if len(places) < 5 else places[:: 2 if len(places) < 9 else 3]
    axis.xaxis.set_major_locator(ticker.FixedLocator(ticks))
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: short(x)))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}" if y < 1e4 else f"{y / 1e3:g}k"))
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    x0, x1 = places[0], places[-1]
    axis.set_xlim(x0 / (x1 / x0) ** 0.06, x1 * (x1 / x0) ** 0.5)  # room for the names
    axis.patch.set_alpha(0)
    bottom, top = axis.get_ylim()
    y0 = (bottom * top) ** 0.5 / (x1 / x0) ** (panel.slope / 2)
    axis.plot([x0, x1], [y0, y0 * (x1 / x0) ** panel.slope], color=INK, lw=0.8, ls=":", zorder=0)
    axis.set_ylim(bottom, top)
    name_lines(panel, axis, bottom, top)


def name_lines(panel: Panel, axis: Any, bottom: float, top: float) -> None:
    """Names at the ends of the lines, pushed apart where they would lie on each other."""
    from math import log

    ends = sorted((line.points[-1][1], line.points[-1][0], line) for line in panel.lines if line.points)
    least = 120 / (axis.get_window_extent().height * 72 / axis.figure.dpi) * 0.085 * log(top / bottom)
    last: dict[float, float] = {}  # lines that end elsewhere are not in the way
    for y, x, line in ends:
        place = max(log(y), last.get(x, float("-inf")) + least)
        last[x] = place
        shift = (place - log(y)) / log(top / bottom) * axis.get_window_extent().height * 72 / axis.figure.dpi
        axis.annotate(
            line.name, (x, y), (4, shift), textcoords="offset points", color=line.colour, fontsize=7, va="center"
        )


def short(number: float) -> str:
    for unit, name in ((1e6, "M"), (1024, "K") if number % 1024 == 0 else (1e3, "k")):
        if number >= unit:
            return f"{number / unit:g}{name}"
    return f"{number:g}"


def save(shown: Any, name: str, png: Path | None) -> None:
    text = io.StringIO()
    shown.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    (PICTURES / f"{name}.svg").write_text(re.sub(r"[ \t]+$", "", text.getvalue(), flags=re.MULTILINE))
    if png is not None:
        shown.savefig(png / f"{name}.png", dpi=110, facecolor="white")
        shown.savefig(png / f"{name}-dark.png", dpi=110, facecolor="#0d1117")
    print(f"docs/pictures/{name}.svg")


def loss_table(rows: Sequence[dict[str, str]], cells: Sequence[tuple[int, str]]) -> str:
    """Ours / compiled, where measured / the peer's: a row a loss that has a peer, a column a size and measure."""
    cell = {(row["loss"], int(row["B"])): row for row in rows}
    heads = [f"B = {size:,}, {UNITS[what]}" for size, what in cells]
    lines = ["| loss | " + " | ".join(heads) + " |", "|---" * (len(cells) + 1) + "|"]
    for loss in dict.fromkeys(row["loss"] for row in rows if row["peer_ms"]):
        texts = []
        for size, what in cells:
            row = cell.get((loss, size), {})
            figures = [row.get(f"{way}_{what}", "") for way in ("auto", "compiled", "peer")]
            texts.append(" / ".join(shortened(text) for text in figures if text))
        lines.append(f"| {loss} | " + " | ".join(texts) + " |")
    order = "Nearkin / compiled / peer" if any(row.get("compiled_ms") for row in rows) else "Nearkin / peer"
    return "\n".join([*lines, "", f"{order}. {provenance(rows)}."])


def class_table(columns: Sequence[tuple[Sequence[dict[str, str]], int]]) -> str:
    """Milliseconds / MiB, one row per contender, one column per number of classes, each from its own rows."""
    heads = [f"C = {size:,}, {rows[0]['dtype']}" for rows, size in columns]
    lines = ["| contender | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    cells = [{row["way"]: row for row in rows if int(row["C"]) == size} for rows, size in columns]
    for way in dict.fromkeys(row["way"] for row in columns[0][0]):
        found = [cell.get(way) for cell in cells]
        texts = [f"{shortened(row['ms'])} / {shortened(row['extra_mib'])}" if row else "" for row in found]
        lines.append(f"| {way} | " + " | ".join(texts) + " |")
    first = columns[0][0][0]
    dates = " and ".join(sorted({row["date"] for row in columns[0][0]}))
    setting = f"Milliseconds / extra MiB. B = {int(first['B']):,}, D = {first['D']}, {first['device']}"
    return "\n".join([*lines, "", f"{setting}, torch {first['torch']}, {dates}."])


def class_loss_table(rows: Sequence[dict[str, str]]) -> str:
    """Ours / the peer's / torch.compile's milliseconds, a row a loss that has a peer, at a few batches and classes."""
    cell = {(row["loss"], int(row["B"]), int(row["C"])): row for row in rows}
    heads = [f"B = {batch:,}, C = {classes:,}" for batch, classes in CLASS_CELLS]
    lines = ["| loss | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for loss in dict.fromkeys(row["loss"] for row in rows if figure(row["peer_ms"])):
        texts = []
        for batch, classes in CLASS_CELLS:
            row = cell[loss, batch, classes]
            names = ("auto", "peer", "compiled")
            texts.append(" / ".join(shortened(row[f"{name}_ms"].replace("-", "")) for name in names))
        lines.append(f"| {loss} | " + " | ".join(texts) + " |")
    first = rows[0]
    return "\n".join(
        [*lines, "", f"D = {first['D']}, float32, {first['machine']}, torch {first['torch']}, {first['date']}."]
    )


def shortened(text: str) -> str:
    value = figure(text)
    if value is None:
        return "–" if text in ("", "nan") else text.split(":")[0]
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def provenance(rows: Sequence[dict[str, str]]) -> str:
    first = rows[0]
    peer = f", pytorch-metric-learning {first['peer_version']}" if first["peer_version"] else ", no peer"
    return f"{first['machine']}, torch {first['torch']}{peer}, {first['date']}"


def put(page: str, mark: str, text: str) -> str:
    """The page with the text between the marks `<!-- mark -->` and `<!-- end -->`."""
    pattern = re.compile(rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"docs/performance.md has no mark <!-- {mark} -->")
    return pattern.sub(lambda pairs: f"{pairs[1]}{text}\n{pairs[2]}", page)


def picture(name: str, words: str) -> str:
    return f"![{words}](pictures/{name}.svg)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, help="a folder for PNG copies, on white and on black")
    png = parser.parse_args().png
    import matplotlib

    matplotlib.use("agg")
    page = PAGE.read_text(encoding="utf-8")
    class_rows = rows_of("class_losses_gpu.csv")
    over_classes = {row["loss"] for row in class_rows}  # on a GPU they have a table of their own
    for device, cells in CELLS.items():
        rows = [row for row in rows_of(f"losses_{device}.csv") if device == "cpu" or row["loss"] not in over_classes]
        drawn = []
        for what, name, slope, words in (
            ("ms", "time", 2, "Milliseconds of a step against B"),
            ("mib", "memory", 1, "Extra MiB of a step against B"),
        ):
            if rows:
                stem = f"performance-{device}-{name}"
                caption = f"{words}, log-log. {provenance(rows)}. Dotted: {'∝ B²' if slope == 2 else '∝ B'}."
                save(draw(loss_panels(rows, what, slope), 4, (2.5, 1.9), caption), stem, png)
                drawn.append(picture(stem, words))
        if rows:
            page = put(page, f"{device} losses", "\n\n".join([*drawn, *([loss_table(rows, cells)] if cells else [])]))
    found = {device: rows_of(f"class_softmax_{device}.csv") for device in ("cuda", "cpu")}
    for device, columns in CLASS_COLUMNS.items():
        if found[device]:
            stem = f"performance-classes-{device}"
            caption = "Softmax over C classes, log-log. Dotted: ∝ C."
            save(draw(class_panels(found[device]), 2, (5, 4), caption, False), stem, png)
            shown = picture(stem, "Time and memory of a class softmax against C")
            table = class_table([(found[name], size) for name, size in columns if found[name]])
            page = put(page, f"classes {device}", f"{shown}\n\n{table}")
    if class_rows:
        page = put(page, "class losses table", class_loss_table(class_rows))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
