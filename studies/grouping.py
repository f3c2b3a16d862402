"""How well are the classes of a run's test part found without labels? Beside k-means that is told how many there are.

    python studies/grouping.py RUN

Similarities of the plain ways are those that are best on the validation classes; the smoothed way has its own, 0.8. The
last column is the difference of the B-cubed F from that of k-means with its 95 % interval: the jackknife over classes,
with both groupings unchanged.
"""

import sys

import numpy as np
import torch

from nearkin import evaluation, training
from nearkin.evaluation.clustering import class_intervals
from nearkin.evaluation.kmeans import kmeans
from nearkin.gallery.source_groups import group_vectors

SIMILARITIES = np.arange(0.4, 0.96, 0.05).round(2).tolist()


def embedded(run: str, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    items = training.embed_source(run, part=part, device="cpu")
    assert items.labels is not None
    return items.embeddings, torch.from_numpy(items.labels)


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
    chosen = {method: best_similarity(val, val_labels, method) for method in ("average", "components")}
    print("best on validation:", chosen, flush=True)
    told = kmeans(test, len(labels.unique()), seed=0, starts=3).assignment
    ways = {
        "k-means, told the number": lambda rows: kmeans(rows, len(labels.unique()), seed=0, starts=3).assignment,
        "smoothed, average (default)": lambda rows: torch.from_numpy(group_vectors(rows)[0]),
        "average": lambda rows: evaluation.group(rows, similarity=chosen["average"]).assignment,
        "components": lambda rows: (
            evaluation.group(rows, similarity=chosen["components"], method="components").assignment
        ),
        "hdbscan": lambda rows: evaluation.group(rows, method="hdbscan", least=3).assignment,
    }
    for name, way in ways.items():
        groups = way(test)
        scores, pairs = evaluation.bcubed(labels, groups, interval=True), evaluation.pairwise(labels, groups)
        low, high = scores.intervals["f"]
        apart = difference(labels, groups, told)
        print(
            f"| {name} | {int(groups.max()) + 1} | {scores['precision']:.3f} | {scores['recall']:.3f} | "
            f"{scores['f']:.3f} ({low:.3f}–{high:.3f}) | {pairs['f']:.3f} | "
            f"{apart[0]:+.3f} ({apart[1]:+.3f} to {apart[2]:+.3f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1])
