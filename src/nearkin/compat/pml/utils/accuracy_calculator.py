"""`AccuracyCalculator` of pytorch-metric-learning over nearkin's exact search and k-means."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nearkin.compat.pml import original
from nearkin.evaluation.kmeans import kmeans
from nearkin.evaluation.retrieval.knn import nearest

_theirs: Any = original("utils.accuracy_calculator")
OVER_THE_CLASS = {"mean_average_precision_at_r", "r_precision"}


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)


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


class AccuracyCalculator(_theirs.AccuracyCalculator):
    """The original's metrics, search and k-means by nearkin unless others are given; MAP@R is right for every `k`."""

    def __init__(
        self,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        avg_of_avgs: bool = False,
        return_per_class: bool = False,
        k: int | str | None = None,
        label_comparison_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        device: torch.device | None = None,
        knn_func: Callable[..., tuple[Tensor, Tensor]] | None = None,
        kmeans_func: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        search, group = knn_func or exact_knn, kmeans_func or seeded_kmeans
        plain = (include, exclude, avg_of_avgs, return_per_class, k, label_comparison_fn, device)
        super().__init__(*plain, search, group)

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
        if self.label_comparison_fn is _theirs.EQUALITY:
            query_labels, reference_labels = _distinct_in_float32(query_labels, reference_labels)
        rest = (reference, reference_labels, ref_includes_query, include, exclude)
        figures: dict[str, Any] = super().get_accuracy(query, query_labels, *rest)
        return figures

    def determine_k(self, bin_counts: Tensor, num_reference_embeddings: int, ref_includes_query: bool) -> int:
        """As many neighbours as the metrics read: MAP@R and R-precision those of the largest class, whatever k is."""
        room = num_reference_embeddings - ref_includes_query
        if not isinstance(self.k, int):
            wanted = super().determine_k(bin_counts, num_reference_embeddings, ref_includes_query)
        elif OVER_THE_CLASS & set(self.get_curr_metrics()):
            wanted = max(self.k, int(bin_counts.max()) - ref_includes_query)
        else:
            wanted = self.k
        return max(min(int(wanted), room), 1)

    def calculate_mean_average_precision(self, knn_labels: Tensor, **given: Any) -> Any:
        """Average precision over the k nearest, over R."""
        return super().calculate_mean_average_precision(knn_labels=self._nearest_k(knn_labels), **given)

    def calculate_mean_reciprocal_rank(self, knn_labels: Tensor, **given: Any) -> Any:
        """1 over the position of the first neighbour of a query's class; 0 without one among the k nearest."""
        return super().calculate_mean_reciprocal_rank(knn_labels=self._nearest_k(knn_labels), **given)

    def _nearest_k(self, knn_labels: Tensor) -> Tensor:
        return knn_labels[:, : self.k] if isinstance(self.k, int) else knn_labels


def _distinct_in_float32(*labels: Any) -> tuple[Any, ...]:
    """The labels, or numbers in their order where float32, in which the original compares, would make some equal."""
    given = [torch.as_tensor(x) for x in labels if x is not None]
    if all(torch.equal(x, x.float().to(x.dtype)) for x in given):
        return labels
    every = torch.cat([x.flatten() for x in given])
    numbers = torch.unique(every, return_inverse=True)[1].split([x.numel() for x in given])
    numbered = iter([number.view(x.shape) for number, x in zip(numbers, given, strict=True)])
    return tuple(None if x is None else next(numbered) for x in labels)
