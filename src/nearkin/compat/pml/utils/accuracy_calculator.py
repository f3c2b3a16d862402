"""`AccuracyCalculator` of pytorch-metric-learning over nearkin's exact search and k-means.

A subclass adds a metric as there: a method `calculate_NAME(self, knn_labels, query_labels, **kwargs)`. MAP@R and
R-precision are right for every `k`: as many neighbours are searched as the largest class needs. Labels keep their
type, where the original rounds them to float32.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nearkin.evaluation.clustering import agreement
from nearkin.evaluation.kmeans import kmeans
from nearkin.evaluation.retrieval.knn import nearest

__all__ = [
    "AccuracyCalculator",
    "get_label_match_counts",
    "get_lone_query_labels",
    "mean_average_precision",
    "mean_reciprocal_rank",
    "precision_at_k",
    "r_precision",
]

Compare = Callable[[Tensor, Tensor], Tensor]
EQUALITY: Compare = torch.eq


def __dir__() -> list[str]:
    return __all__


def exact_knn(query: Tensor, k: int, reference: Tensor, ref_includes_query: bool = False) -> tuple[Tensor, Tensor]:
    """Euclidean distances and indices of the k nearest references, (Q, k) each; exact, ties by the lower index.

    ref_includes_query: reference i is query i, and is left out by its index.
    """
    if ref_includes_query and len(query) == len(reference):
        found = nearest(query, k=k, similarity="euclidean")
    else:
        found = nearest(query, reference, k=k + ref_includes_query, similarity="euclidean")
    indices, distance = found.indices, (-found.similarity).clamp(min=0).sqrt()
    if indices.shape[1] > k:
        own = indices == torch.arange(len(query), device=indices.device)[:, None]
        own[:, -1] |= ~own.any(1)  # not among the nearest: the last is one too many
        indices, distance = (x[~own].view(len(query), k) for x in (indices, distance))
    return distance, indices


def seeded_kmeans(embeddings: Tensor, clusters: int) -> Tensor:
    """The cluster of each row, (N,): k-means of raw rows, 20 iterations, seed 0."""
    return kmeans(embeddings, clusters, normalize=False).assignment


class AccuracyCalculator:
    """`get_accuracy(query, query_labels, reference, reference_labels, ref_includes_query)` gives a dictionary.

    include, exclude: names of metrics. avg_of_avgs: the mean over classes. return_per_class: a list per class. k: how
    many neighbours, None for all, "max_bin_count" for the largest class. label_comparison_fn(labels, other labels):
    which are the same. knn_func(query, k, reference, ref_includes_query) and kmeans_func(rows, clusters) replace ours.
    """

    def __init__(
        self,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        avg_of_avgs: bool = False,
        return_per_class: bool = False,
        k: int | str | None = None,
        label_comparison_fn: Compare | None = None,
        device: torch.device | str | None = None,
        knn_func: Callable[..., tuple[Tensor, Tensor]] | None = None,
        kmeans_func: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        names = sorted(name.removeprefix("calculate_") for name in dir(self) if name.startswith("calculate_"))
        self.original_function_dict = {name: getattr(self, f"calculate_{name}") for name in names}
        for argument, values in (("include", include), ("exclude", exclude)):
            if not isinstance(values, tuple | list):
                raise TypeError(f"{argument} must be a tuple or list of names, got {type(values).__name__}")
            if unknown := sorted(set(values) - set(names)):
                raise ValueError(f"{argument} must be of {', '.join(names)}, got {', '.join(unknown)}")
        if avg_of_avgs and return_per_class:
            raise ValueError("avg_of_avgs and return_per_class exclude each other, got True for both")
        if k is not None and k != "max_bin_count" and (not isinstance(k, int) or k < 1):
            raise ValueError(f'k must be a whole number >= 1, None or "max_bin_count", got {k!r}')
        self.original_function_dict = self.get_function_dict(include, exclude)
        self.curr_function_dict = self.get_function_dict()
        self.avg_of_avgs, self.return_per_class, self.k = avg_of_avgs, return_per_class, k
        cuda = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(cuda if device is None else device)
        self.knn_func = exact_knn if knn_func is None else knn_func
        self.kmeans_func = seeded_kmeans if kmeans_func is None else kmeans_func
        self.label_comparison_fn = torch.eq if label_comparison_fn is None else label_comparison_fn
        if label_comparison_fn is not None and set(self.requires_clustering()) & set(self.curr_function_dict):
            raise NotImplementedError("label_comparison_fn goes with retrieval only: exclude=('NMI', 'AMI')")

    def get_function_dict(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> dict[str, Any]:
        """The functions of these metrics; all without `include`."""
        chosen = [name for name in (include or self.original_function_dict) if name not in exclude]
        return {name: function for name, function in self.original_function_dict.items() if name in chosen}

    def get_curr_metrics(self) -> list[str]:
        """The metrics of the last call."""
        return list(self.curr_function_dict)

    def requires_clustering(self) -> list[str]:
        """The metrics that need clusters; a subclass may add its own."""
        return ["NMI", "AMI"]

    def requires_knn(self) -> list[str]:
        """The metrics that need neighbours; a subclass may add its own."""
        return [
            "precision_at_1",
            "mean_average_precision",
            "mean_average_precision_at_r",
            "mean_reciprocal_rank",
            "r_precision",
        ]

    def calculate_NMI(self, query_labels: Tensor, cluster_labels: Tensor, **_: Any) -> float:
        """Normalised mutual information of classes and clusters."""
        return agreement(query_labels.flatten(), cluster_labels)["nmi"]

    def calculate_AMI(self, query_labels: Tensor, cluster_labels: Tensor, **_: Any) -> float:
        """Adjusted mutual information of classes and clusters."""
        return agreement(query_labels.flatten(), cluster_labels)["ami"]

    def calculate_precision_at_1(self, **given: Any) -> Any:
        """Share of queries whose nearest neighbour is of their class."""
        return self._mean(lambda same, _: same[:, :1].double().mean(1), **given)

    def calculate_r_precision(self, **given: Any) -> Any:
        """Share of a query's R nearest that are of its class; R: how many there are of it."""
        return self._mean(lambda same, r: _within(same, r).sum(1) / r, **given)

    def calculate_mean_average_precision_at_r(self, **given: Any) -> Any:
        """Average precision over a query's R nearest."""
        return self._mean(lambda same, r: _average_precision(_within(same, r), r), **given)

    def calculate_mean_average_precision(self, **given: Any) -> Any:
        """Average precision over the k nearest, over R."""
        return self._mean(lambda same, r: _average_precision(same, r), cut=True, **given)

    def calculate_mean_reciprocal_rank(self, **given: Any) -> Any:
        """1 over the position of the first neighbour of a query's class; 0 without one among the k nearest."""
        return self._mean(lambda same, _: _reciprocal(same), cut=True, **given)

    def _mean(
        self,
        metric: Callable[[Tensor, Tensor], Tensor],
        *,
        knn_labels: Tensor,
        query_labels: Tensor,
        not_lone_query_mask: Tensor,
        label_counts: tuple[Any, Any],
        ref_includes_query: bool,
        num_k: int | None = None,
        cut: bool = False,
        **_: Any,
    ) -> Any:
        """Over the queries that have a positive among the references; NaN without any. num_k: None for all columns."""
        known = not_lone_query_mask
        labels = query_labels[known]
        same = _same(self.label_comparison_fn, labels, knn_labels[known][:, : num_k if cut else None])
        if not len(labels):
            return [math.nan] * len(label_counts[0]) if self.return_per_class else math.nan
        positives = _positives(labels, label_counts, ref_includes_query, self.label_comparison_fn)
        return averaged(metric(same, positives), labels, self.avg_of_avgs, self.return_per_class)

    def get_cluster_labels(self, query: Tensor, query_labels: Tensor, **_: Any) -> Tensor:
        """As many clusters as classes."""
        return self.kmeans_func(query, len(torch.unique(query_labels.flatten())))

    def get_accuracy(
        self,
        query: Any,
        query_labels: Any,
        reference: Any = None,
        reference_labels: Any = None,
        ref_includes_query: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The metrics by name. Without reference the queries search one another."""
        if reference is None:
            reference, reference_labels, ref_includes_query = query, query_labels, True
        query, reference = (torch.as_tensor(x).to(self.device).float() for x in (query, reference))
        query_labels, reference_labels = (torch.as_tensor(x).to(self.device) for x in (query_labels, reference_labels))
        _check(query, query_labels, reference, reference_labels, ref_includes_query)
        self.curr_function_dict = self.get_function_dict(include, exclude)
        given = {
            "query": query,
            "reference": reference,
            "query_labels": query_labels,
            "reference_labels": reference_labels,
            "ref_includes_query": ref_includes_query,
            "label_comparison_fn": self.label_comparison_fn,
        }
        if set(self.curr_function_dict) - {"NMI", "AMI"}:
            given |= self._neighbours(query, query_labels, reference, reference_labels, ref_includes_query)
        if set(self.curr_function_dict) & set(self.requires_clustering()):
            given["cluster_labels"] = self.get_cluster_labels(**given)
        return self._get_accuracy(self.curr_function_dict, **given)

    def _get_accuracy(self, function_dict: dict[str, Any], **given: Any) -> dict[str, Any]:
        return {name: function(**given) for name, function in function_dict.items()}

    def _neighbours(
        self, query: Tensor, query_labels: Tensor, reference: Tensor, reference_labels: Tensor, own: bool
    ) -> dict[str, Any]:
        """What the retrieval metrics take."""
        label_counts = get_label_match_counts(query_labels, reference_labels, self.label_comparison_fn)
        lone, known = get_lone_query_labels(query_labels, label_counts, own, self.label_comparison_fn)
        positives = _positives(query_labels, label_counts, own, self.label_comparison_fn)
        room = len(reference) - own
        num_k = min(self.determine_k(label_counts[1], len(reference), own), room)
        ranked = {"r_precision", "mean_average_precision_at_r"} & set(self.curr_function_dict)
        searched = max(num_k, min(int(positives.max()), room)) if ranked else num_k
        distance, indices = self.knn_func(query, max(searched, 1), reference, own)
        return {
            "label_counts": label_counts,
            "knn_labels": reference_labels[indices],
            "knn_distances": distance,
            "lone_query_labels": lone,
            "not_lone_query_mask": known,
            "num_k": num_k,
        }

    def determine_k(self, bin_counts: Tensor, num_reference_embeddings: int, ref_includes_query: bool) -> int:
        """How many neighbours MAP and MRR read."""
        if self.k == "max_bin_count":
            return int(bin_counts.max()) - ref_includes_query
        return num_reference_embeddings - ref_includes_query if self.k is None else int(self.k)

    def description(self) -> str:
        """For a caller's log."""
        return "avg_of_avgs" if self.avg_of_avgs else ""


def _check(query: Tensor, labels: Tensor, reference: Tensor, reference_labels: Tensor, own: bool) -> None:
    for name, rows, values in (("query", query, labels), ("reference", reference, reference_labels)):
        if len(rows) != len(values):
            raise ValueError(f"{name}_labels must have one entry per row: {len(rows)} rows, {len(values)} labels")
    first = slice(len(query))
    if own and not (torch.equal(query, reference[first]) and torch.equal(labels, reference_labels[first])):
        raise ValueError("with ref_includes_query=True the first rows of reference must be those of query, labels too")


def _same(compare: Compare, labels: Tensor, others: Tensor) -> Tensor:
    """(Q, K) bool of labels (Q, …) with others (Q, K, …); labels of several columns are the same if all are."""
    same = compare(labels[:, None], others)
    return same.flatten(2).all(2) if same.dim() > 2 else same


def get_label_match_counts(
    query_labels: Tensor, reference_labels: Tensor, label_comparison_fn: Compare = torch.eq
) -> tuple[Tensor, Tensor]:
    """The classes of the queries, and how many references are of each."""
    kinds = torch.unique(query_labels, dim=0)
    return kinds, torch.stack([_same(label_comparison_fn, one[None], reference_labels[None]).sum() for one in kinds])


def get_lone_query_labels(
    query_labels: Tensor,
    label_counts: tuple[Any, Any],
    ref_includes_query: bool,
    label_comparison_fn: Compare = torch.eq,
) -> tuple[Tensor, Tensor]:
    """Classes of queries without a positive among the references; which queries have one, (Q,) bool."""
    known = _positives(query_labels, label_counts, ref_includes_query, label_comparison_fn) > 0
    return torch.unique(query_labels[~known], dim=0), known


def _positives(labels: Tensor, label_counts: tuple[Any, Any], own: bool, compare: Compare = torch.eq) -> Tensor:
    """How many references are of each query's class, (Q,), itself left out; 0 for a class that has no count."""
    kinds, counts = (torch.as_tensor(x, device=labels.device) for x in label_counts)
    itself = _same(compare, kinds, kinds[:, None]).squeeze(1).long() if own else torch.zeros_like(counts)
    every, place = torch.unique(torch.cat([kinds, labels]), dim=0, return_inverse=True)
    number = counts.new_zeros(len(every)).index_copy(0, place[: len(kinds)], counts - itself)
    return number[place[len(kinds) :]]


def _within(same: Tensor, number: Tensor) -> Tensor:
    return same & (torch.arange(same.shape[1], device=same.device) < number[:, None])


def _average_precision(same: Tensor, number: Tensor) -> Tensor:
    place = torch.arange(1, same.shape[1] + 1, device=same.device, dtype=torch.float64)
    return (same.cumsum(1) / place * same).sum(1) / number


def _reciprocal(same: Tensor) -> Tensor:
    first = same.double().argmax(1)
    return torch.where(same.any(1), 1 / (first + 1).double(), 0.0)


def averaged(values: Tensor, labels: Tensor, avg_of_avgs: bool, return_per_class: bool) -> Any:
    """The mean, the mean of the means of classes, or these in a list, in order of class."""
    if not (avg_of_avgs or return_per_class):
        return values.double().mean().item()
    inverse = torch.unique(labels, dim=0, return_inverse=True)[1].flatten()
    total = torch.zeros(int(inverse.max()) + 1, dtype=torch.float64, device=values.device)
    means = total.index_add(0, inverse, values.double()) / inverse.bincount()
    return means.tolist() if return_per_class else means.mean().item()


def precision_at_k(
    knn_labels: Tensor,
    gt_labels: Tensor,
    k: int,
    avg_of_avgs: bool,
    return_per_class: bool,
    label_comparison_fn: Compare = torch.eq,
) -> Any:
    """Share of the k nearest that are of the query's class; gt_labels (Q, 1), as a subclass's metric has them."""
    labels = gt_labels.squeeze(1)
    same = _same(label_comparison_fn, labels, knn_labels[:, :k])
    return averaged(same.sum(1).double() / k, labels, avg_of_avgs, return_per_class)


def r_precision(
    knn_labels: Tensor,
    gt_labels: Tensor,
    ref_includes_query: bool,
    label_counts: tuple[Tensor, Tensor],
    avg_of_avgs: bool,
    return_per_class: bool,
    label_comparison_fn: Compare = torch.eq,
) -> Any:
    """As the method of the same name, of labels that are given."""
    labels = gt_labels.squeeze(1)
    number = _positives(labels, label_counts, ref_includes_query)
    values = _within(_same(label_comparison_fn, labels, knn_labels), number).sum(1) / number
    return averaged(values, labels, avg_of_avgs, return_per_class)


def mean_average_precision(
    knn_labels: Tensor,
    gt_labels: Tensor,
    ref_includes_query: bool,
    label_counts: tuple[Tensor, Tensor],
    avg_of_avgs: bool,
    return_per_class: bool,
    label_comparison_fn: Compare = torch.eq,
    at_r: bool = False,
) -> Any:
    """As the method of the same name, of labels that are given."""
    labels = gt_labels.squeeze(1)
    number = _positives(labels, label_counts, ref_includes_query)
    same = _same(label_comparison_fn, labels, knn_labels)
    values = _average_precision(_within(same, number) if at_r else same, number)
    return averaged(values, labels, avg_of_avgs, return_per_class)


def mean_reciprocal_rank(
    knn_labels: Tensor,
    gt_labels: Tensor,
    avg_of_avgs: bool,
    return_per_class: bool,
    label_comparison_fn: Compare = torch.eq,
) -> Any:
    """As the method of the same name, of labels that are given."""
    labels = gt_labels.squeeze(1)
    values = _reciprocal(_same(label_comparison_fn, labels, knn_labels))
    return averaged(values, labels, avg_of_avgs, return_per_class)
