"""How well are the classes of a run's test part found without labels? Beside k-means that is told how many there are.

    python studies/grouping.py RUN

Similarities of the plain ways are those that are best on the validation classes; the smoothed way has its own, 0.8, and
PLDA none: its model is fitted on the training classes. The last column is the difference of the B-cubed F from that of
k-means with its 95 % interval: the jackknife over classes, with both groupings unchanged.
"""

import sys

import numpy as np
import torch

from nearkin import evaluation, training
from nearkin.evaluation.clustering import class_intervals
from nearkin.evaluation.kmeans import kmeans
from nearkin.gallery.run_plda import plda_of
from nearkin.gallery.source_groups import group_vectors

VIEWS = 5
SIMILARITIES = np.arange(0.4, 0.96, 0.05).round(2).tolist()


def embedded(run: str, part: str, views: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    items = training.embed_source(run, part=part, views=views, device="cpu")
    assert items.labels is not None
    return items.embeddings, torch.from_numpy(items.labels)


def by_plda(run: str, rows: torch.Tensor, views: int = 1) -> torch.Tensor:
    """As `nearkin group --run RUN` does; the spread of the model is chosen on the validation classes."""
    model, note = plda_of(run, views=views, device="cpu")
    if model is None:
        raise SystemExit(note)
    print(f"views {views}: spread {model.spread:g} of", {c: round(f, 3) for c, f in model.tried}, flush=True)
    return evaluation.group(rows, method="plda", model=model).assignment


def best_similarity(rows: torch.Tensor, labels: torch.Tensor, method: str) -> float:
    scores = {
        t: evaluation.bcubed(labels, evaluation.group(rows, similarity=t, method=method).assignment)["f"]
        for t in SIMILARITIES
    }
    return max(scores, key=lambda t: scores[t])


def difference(labels: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[float, float, float]:
    """Of the B-cubed F of two groupings, with its interval."""

    def measure(known: torch.Tensor, item: torch.Tensor) -> dict[str, float]:
        """From 0 to 1, as intervals of shares are."""
        return {"f": (1 + evaluation.bcubed(known, first[item])["f"] - evaluation.bcubed(known, second[item])["f"]) / 2}

    items = torch.arange(len(labels))
    value = measure(labels, items)
    low, high = class_intervals(measure, labels, items, value, seed=0)["f"]
    return 2 * value["f"] - 1, 2 * low - 1, 2 * high - 1


def main(run: str) -> None:
    val, val_labels = embedded(run, "val")
    test, labels = embedded(run, "test")
    five, _ = embedded(run, "test", VIEWS)
    number = len(labels.unique())
    chosen = {method: best_similarity(val, val_labels, method) for method in ("average", "components")}
    print("best on validation:", chosen, flush=True)
    told = kmeans(test, number, seed=0, starts=3).assignment
    ways = {
        "k-means, told the number": lambda: told,
        f"k-means, told the number, {VIEWS} views": lambda: kmeans(five, number, seed=0, starts=3).assignment,
        "plda (default with a run)": lambda: by_plda(run, test),
        f"plda, {VIEWS} views": lambda: by_plda(run, five, VIEWS),
        "smoothed, average (default without)": lambda: torch.from_numpy(group_vectors(test)[0]),
        f"smoothed, average, {VIEWS} views": lambda: torch.from_numpy(group_vectors(five)[0]),
        "average": lambda: evaluation.group(test, similarity=chosen["average"]).assignment,
        "components": lambda: evaluation.group(test, similarity=chosen["components"], method="components").assignment,
        "hdbscan": lambda: evaluation.group(test, method="hdbscan", least=3).assignment,
    }
    for name, way in ways.items():
        groups = way()
        scores, pairs = evaluation.bcubed(labels, groups, interval=True), evaluation.pairwise(labels, groups)
        low, high = scores.intervals["f"]
        apart = difference(labels, groups, told)
        alone = int((groups.bincount() == 1).sum())
        print(
            f"| {name} | {int(groups.max()) + 1}, {alone} of one | {scores['precision']:.3f} | "
            f"{scores['recall']:.3f} | {scores['f']:.3f} ({low:.3f}–{high:.3f}) | {pairs['f']:.3f} | "
            f"{apart[0]:+.3f} ({apart[1]:+.3f} to {apart[2]:+.3f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1])
