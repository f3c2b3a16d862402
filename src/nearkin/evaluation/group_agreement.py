"""How well groups agree with classes: B-cubed and pairwise precision, recall and F, with intervals over the classes."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from nearkin.core import checks
from nearkin.core.relations import UNKNOWN
from nearkin.evaluation.arrays import Floats, Ids, Scores, takes_arrays
from nearkin.evaluation.clustering import class_intervals, contingency
from nearkin.evaluation.statistics.cluster_bootstrap import explain_missing

__all__ = ["bcubed", "bcubed_values", "pairwise"]


@takes_arrays
def bcubed(labels: Ids, assignment: Ids, *, interval: bool = False, seed: int = 0) -> Scores[float]:
    """B-cubed "precision", "recall" and "f" of groups for classes.

    Precision is the mean over all items of the share of an item's group that is of its class, recall that of the share
    of its class that is in its group; an item counts itself. F = 2 P R / (P + R). labels (N,) class ids; items of label
    -1 are left out. assignment (N,): the group of each item, whatever its number. Bagga and Baldwin 1998, "Algorithms
    for scoring coreference chains".

    interval: 95 % intervals over the choice of classes, with the groups unchanged, as `.intervals`; how they are made
    and how often they hold is in docs/grouping.md.
    """
    return _scores(_bcubed, labels, assignment, interval, seed)


@takes_arrays
def pairwise(labels: Ids, assignment: Ids, *, interval: bool = False, seed: int = 0) -> Scores[float]:
    """ "precision", "recall" and "f" of the pairs in one group for the pairs of one class; settings as in `bcubed`.

    Without a pair in a group precision is 1, without a pair of one class recall is 1: nothing was claimed wrongly,
    nothing missed. A group of n items counts as n (n - 1) / 2 pairs, so that the large ones decide.
    """
    return _scores(_pairwise, labels, assignment, interval, seed)


@takes_arrays
def bcubed_values(labels: Ids, assignment: Ids) -> tuple[Floats, Floats]:
    """B-cubed precision and recall of each item (N,), NaN where its label is -1: to compare two groupings in pairs."""
    known = _checked(labels, assignment)
    precision, recall = np.full(len(labels), np.nan), np.full(len(labels), np.nan)
    if bool(known.any()):
        at = known.cpu().numpy()
        precision[at], recall[at] = _shares(labels[known], assignment[known])
    return precision, recall


def _scores(
    measure: Callable[[Tensor, Tensor], dict[str, float]], labels: Tensor, assignment: Tensor, interval: bool, seed: int
) -> Scores[float]:
    checks.integer("seed", seed, 0)
    known = _checked(labels, assignment)
    labels, assignment = labels[known], assignment[known]
    if not len(labels):
        raise ValueError("labels must hold at least one class id other than -1 (unknown), got none")
    result = Scores(measure(labels, assignment))
    if interval:
        result.intervals = class_intervals(measure, labels, assignment, result, seed)
        explain_missing(result, labels)
    return result


def _checked(labels: Tensor, assignment: Tensor) -> Tensor:
    """(N,): whether the class of an item is known."""
    for name, ids in (("labels", labels), ("assignment", assignment)):
        if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"{name} must be whole numbers or names of shape (N,), got {got}")
    if len(labels) != len(assignment):
        raise ValueError(f"assignment must have one entry per label: {len(labels)} labels, {len(assignment)} entries")
    return labels != UNKNOWN


def _shares(labels: Tensor, assignment: Tensor) -> tuple[Floats, Floats]:
    """Of each item, the share of its group that is of its class, and of its class that is in its group."""
    _, classes, class_sizes = np.unique(labels.cpu().numpy(), return_inverse=True, return_counts=True)
    _, groups, group_sizes = np.unique(assignment.cpu().numpy(), return_inverse=True, return_counts=True)
    _, cell, both = np.unique(classes * len(group_sizes) + groups, return_inverse=True, return_counts=True)
    return both[cell] / group_sizes[groups], both[cell] / class_sizes[classes]


def _bcubed(labels: Tensor, assignment: Tensor) -> dict[str, float]:
    joint, rows, columns, class_sizes, group_sizes = contingency(labels, assignment)
    squares, number = joint.astype(np.float64) ** 2, float(joint.sum())
    precision = float((squares / group_sizes[columns]).sum()) / number
    recall = float((squares / class_sizes[rows]).sum()) / number
    return {"precision": precision, "recall": recall, "f": 2 * precision * recall / (precision + recall)}


def _pairwise(labels: Tensor, assignment: Tensor) -> dict[str, float]:
    joint, _, _, class_sizes, group_sizes = contingency(labels, assignment)
    both, same, grouped = (int((n * (n - 1) // 2).sum()) for n in (joint, class_sizes, group_sizes))
    precision, recall = both / grouped if grouped else 1.0, both / same if same else 1.0
    return {"precision": precision, "recall": recall, "f": 2 * both / (same + grouped) if same + grouped else 1.0}
