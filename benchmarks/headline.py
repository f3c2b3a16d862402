"""The chart at the top of the README: time and memory of one step against pytorch-metric-learning, over the batch size.

    python benchmarks/headline.py            # benchmarks/results/losses_gpu.csv → docs/pictures/headline.svg

Draws what was measured and nothing else: where the peer ran out of memory or was not run, its line ends, with a cross
where it ran out.
"""

import csv
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOSSES = ["SupCon", "multi-similarity", "triplet, semi-hard", "InfoNCE"]
COLOURS = ["#1f77b4", "#2ca02c", "#d62728", "#9467bd"]


def measured(path: Path) -> dict[str, list[dict[str, str]]]:
    """Rows of each loss by rising B."""
    with open(path, newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["B"]))
    return {loss: [row for row in rows if row["loss"] == loss] for loss in LOSSES}


def points(rows: list[dict[str, str]], column: str) -> tuple[list[int], list[float]]:
    """What was measured; "not run" and "out of memory" are no numbers."""
    good = [(int(row["B"]), float(row[column])) for row in rows if row[column].replace(".", "", 1).isdigit()]
    return [b for b, _ in good], [value for _, value in good]


def draw(source: Path, target: Path) -> None:
    """Two panels: milliseconds and MiB, both on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "headline", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    rows = measured(source)
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 4.0), layout="constrained")
    for axis, kind, title in zip(axes, ("ms", "mib"), ("time of a step, ms", "memory of a step, MiB"), strict=True):
        for loss, colour in zip(LOSSES, COLOURS, strict=True):
            axis.loglog(*points(rows[loss], f"auto_{kind}"), "o-", color=colour, ms=3.5, label=loss)
            sizes, values = points(rows[loss], f"peer_{kind}")
            axis.loglog(sizes, values, "s--", color=colour, ms=3.5, alpha=0.7)
            failed = [int(row["B"]) for row in rows[loss] if row[f"peer_{kind}"] == "out of memory"]
            if failed:
                axis.plot(sizes[-1], values[-1], "x", color=colour, ms=11, mew=2)
        axis.set_title(title)
        axis.set_xlabel("batch size B")
        axis.set_xticks([512, 1024, 2048, 4096], ["512", "1,024", "2,048", "4,096"])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0].plot([], [], "o-", color="grey", label="nearkin")
    axes[0].plot([], [], "s--", color="grey", label="pytorch-metric-learning 2.9")
    axes[0].plot([], [], "x", color="grey", ms=9, mew=2, label="the next size ran out of memory")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    machine = rows[LOSSES[0]][0]
    figure.suptitle(
        f"Forward and backward, D = 128, float32. {machine['machine']}, torch {machine['torch']}, {machine['date']}",
        fontsize=8.5,
    )
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "docs" / "pictures"
    draw(HERE / "results" / "losses_gpu.csv", folder / "headline.svg")
