"""Index tuples: triplets (anchor, positive, negative) and pairs (anchor, positive, anchor, negative), and between them.

Without `ref_labels`, or with the very tensor `labels`, no item is paired with itself.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from nearkin.compat.pml.recording import same_labels
from nearkin.core import reduce

__all__ = [
    "convert_to_pairs",
    "convert_to_pos_pairs_with_unique_labels",
    "convert_to_triplets",
    "convert_to_weights",
    "get_all_pairs_indices",
    "get_all_triplets_indices",
    "get_matches_and_diffs",
    "get_random_triplet_indices",
    "logsumexp",
    "remove_self_comparisons",
]

Indices: TypeAlias = tuple[Tensor, ...]


def __dir__() -> list[str]:
    return __all__


def get_matches_and_diffs(labels: Tensor, ref_labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Positive and negative pairs, each (B, R) bool."""
    same = same_labels(labels, labels if ref_labels is None else ref_labels)
    different = ~same
    if ref_labels is None or ref_labels is labels:
        same.fill_diagonal_(False)
    return same, different


def get_all_pairs_indices(labels: Tensor, ref_labels: Tensor | None = None) -> Indices:
    """Every positive pair (anchor, positive), then every negative pair (anchor, negative)."""
    positive, negative = get_matches_and_diffs(labels, ref_labels)
    return *positive.nonzero(as_tuple=True), *negative.nonzero(as_tuple=True)


def get_all_triplets_indices(labels: Tensor, ref_labels: Tensor | None = None) -> Indices:
    """Every triplet, in order of anchor, positive, negative."""
    return convert_to_triplets(get_all_pairs_indices(labels, ref_labels), labels, ref_labels)


def convert_to_pairs(indices_tuple: Any, labels: Tensor | None, ref_labels: Tensor | None = None) -> Indices:
    """Pairs of whatever was given; None is every pair."""
    if indices_tuple is None:
        assert labels is not None
        return get_all_pairs_indices(labels, ref_labels)
    if len(indices_tuple) == 4:
        return tuple(indices_tuple)
    if len(indices_tuple) != 3:
        raise ValueError(f"indices_tuple must have 3 or 4 tensors, got {len(indices_tuple)}")
    anchor, positive, negative = indices_tuple
    return anchor, positive, anchor, negative


def convert_to_triplets(
    indices_tuple: Any, labels: Tensor, ref_labels: Tensor | None = None, t_per_anchor: int | str = 100
) -> Indices:
    """Triplets of whatever was given; None is every triplet with "all", else `t_per_anchor` random ones per anchor.

    Of pairs, every positive with every negative of its anchor, without a matrix of pairs with pairs.
    """
    if indices_tuple is None:
        if t_per_anchor == "all":
            return get_all_triplets_indices(labels, ref_labels)
        assert isinstance(t_per_anchor, int)
        return get_random_triplet_indices(labels, ref_labels, t_per_anchor=t_per_anchor)
    if len(indices_tuple) == 3:
        return tuple(indices_tuple)
    if len(indices_tuple) != 4:
        raise ValueError(f"indices_tuple must have 3 or 4 tensors, got {len(indices_tuple)}")
    a1, p, a2, n = indices_tuple
    a2, order = a2.sort(stable=True)
    n = n[order]
    rows = 1 + max([int(a.max()) for a in (a1, a2) if a.numel()], default=0)
    count = a2.bincount(minlength=rows)  # negatives of each anchor
    first = count.cumsum(0) - count
    repeats = count[a1]  # triplets of each positive pair
    pair = torch.repeat_interleave(torch.arange(len(a1), device=a1.device), repeats)
    place = torch.arange(len(pair), device=a1.device) - (repeats.cumsum(0) - repeats)[pair]
    return a1[pair], p[pair], n[first[a1[pair]] + place]


def get_random_triplet_indices(
    labels: Tensor, ref_labels: Tensor | None = None, t_per_anchor: int | None = None, weights: Tensor | None = None
) -> Indices:
    """Random triplets by torch's generator: `t_per_anchor` of each anchor, or as many as its class has items.

    weights (B, R): odds of the negatives; an anchor whose negatives all have 0 gets none.
    """
    own = ref_labels is None or ref_labels is labels
    references = labels if ref_labels is None else ref_labels
    positive, negative = get_matches_and_diffs(labels, ref_labels)
    odds = negative.float() if weights is None else weights.float() * negative
    usable = positive.any(1) & (odds.sum(1) > 0)
    size = same_labels(labels, references).sum(1)
    draws = torch.where(usable, size if t_per_anchor is None else torch.full_like(size, t_per_anchor), 0)
    order = labels.argsort(stable=True) if own else torch.arange(len(labels), device=labels.device)
    anchor = torch.repeat_interleave(order, draws[order])
    if not anchor.numel():
        empty = torch.empty(0, dtype=torch.long, device=labels.device)
        return empty, empty.clone(), empty.clone()
    return anchor, _draw(positive.float(), anchor), _draw(odds, anchor)


def _draw(odds: Tensor, rows: Tensor) -> Tensor:
    """One column for each row of `rows`, by that row's odds."""
    return torch.multinomial(odds[rows], 1).squeeze(1)


def convert_to_weights(indices_tuple: Any, labels: Tensor, dtype: torch.dtype, using_ref: bool = False) -> Tensor:
    """A weight per item: how often it was mined over the largest such count, (B,); 1 for all without indices."""
    ones = torch.ones(len(labels), dtype=dtype, device=labels.device)
    if indices_tuple is None or all(len(index) == 0 for index in indices_tuple):
        return ones
    if using_ref:  # only the anchors are of the batch
        indices_tuple = indices_tuple[:1] if len(indices_tuple) == 3 else indices_tuple[::2]
    count = torch.cat([index.to(labels.device) for index in indices_tuple]).bincount(minlength=len(labels))
    return count.to(dtype) / count.max()


def convert_to_pos_pairs_with_unique_labels(indices_tuple: Any, labels: Tensor) -> Indices:
    """The first positive pair of each class, in order of class."""
    anchor, positive, _, _ = convert_to_pairs(indices_tuple, labels)
    classes, inverse = torch.unique(labels[anchor], return_inverse=True)
    place = torch.arange(len(anchor), device=anchor.device)
    first = torch.full_like(classes, len(anchor)).scatter_reduce(0, inverse, place, "amin")
    return anchor[first], positive[first]


def logsumexp(x: Tensor, keep_mask: Tensor | None = None, add_one: bool = True, dim: int = 1) -> Tensor:
    """log Σ exp over the kept entries along `dim`, and of 1 more with `add_one`; 0 where none is kept."""
    mask = torch.ones_like(x, dtype=torch.bool) if keep_mask is None else keep_mask
    value = reduce.logsumexp(x, mask, dim).unsqueeze(dim)
    if add_one:
        return reduce.softplus(value)
    return torch.where(mask.any(dim, keepdim=True), value, 0.0)


def remove_self_comparisons(
    indices_tuple: Indices, curr_batch_idx: Tensor, ref_size: int | None = None, ref_is_subset: bool = False
) -> Indices:
    """Leaves out the positives that are their own anchor: row i of the batch is reference `curr_batch_idx[i]`.

    ref_is_subset: reference i is row `curr_batch_idx[i]` of the batch. ref_size is not needed.
    """
    anchor, positive = indices_tuple[:2]
    other = anchor != curr_batch_idx[positive] if ref_is_subset else positive != curr_batch_idx[anchor]
    if len(indices_tuple) == 3:
        return anchor[other], positive[other], indices_tuple[2][other]
    return anchor[other], positive[other], *indices_tuple[2:]
