"""Which gallery items are positive for each query: from class ids, multi-label rows or a relation.

With groups beside class ids, an item of the query's class *and* group is neither positive nor negative: not ranked.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.core import checks, relations
from nearkin.core.relations import UNKNOWN, Labels, Relation
from nearkin.evaluation.arrays import group_numbers
from nearkin.evaluation.retrieval.exact import Space, slices

__all__ = ["Relevance", "Sets", "check_groups", "with_known_labels"]


class Sets(NamedTuple):
    """Queries and what they search, with labels; without a gallery the queries search one another."""

    queries: Tensor
    labels: Labels
    gallery: Tensor | None
    gallery_labels: Tensor | None
    groups: Tensor | None = None
    gallery_groups: Tensor | None = None


def check_groups(
    embeddings: Tensor, labels: Labels, gallery: Tensor | None, groups: Tensor | None, gallery_groups: Tensor | None
) -> None:
    """Refuses groups that do not fit: they stand beside class ids, one per row, of the queries and of the gallery."""
    if groups is None and gallery_groups is None:
        return
    if not isinstance(labels, Tensor) or labels.dim() != 1:
        kind = "multi-label rows" if isinstance(labels, Tensor) else "a relation, which can leave pairs out itself"
        raise ValueError(f"groups need class ids as labels, one per row, got {kind}")
    if gallery is None and gallery_groups is not None:
        raise ValueError("gallery_groups need a gallery, got none")
    if groups is None or (gallery is not None and gallery_groups is None):
        missing = "groups" if groups is None else "gallery_groups"
        raise ValueError(f"groups and gallery_groups must come together, got no {missing}")
    checks.class_ids("groups", groups, embeddings)
    if gallery is not None:
        assert gallery_groups is not None
        checks.class_ids("gallery_groups", gallery_groups, gallery, "gallery")


def with_known_labels(
    embeddings: Tensor,
    labels: Labels,
    gallery: Tensor | None,
    gallery_labels: Labels | None,
    groups: Tensor | None = None,
    gallery_groups: Tensor | None = None,
) -> tuple[Sets, Tensor]:
    """The sets without the items of unknown class, and the indices of the remaining queries."""
    index = torch.arange(len(embeddings), device=embeddings.device)
    assert gallery_labels is None or isinstance(gallery_labels, Tensor)
    if isinstance(labels, Tensor) and labels.dtype == torch.bool and gallery is not None and gallery_labels is None:
        labels = relations.explicit(labels)
    if not isinstance(labels, Tensor) or labels.dtype == torch.bool:
        return Sets(embeddings, labels, gallery, gallery_labels), index
    if gallery is not None and gallery_labels is not None:
        known = gallery_labels != UNKNOWN
        if not bool(known.all()):
            gallery, gallery_labels = gallery[known], gallery_labels[known]
            gallery_groups = None if gallery_groups is None else gallery_groups[known]
    known = labels != UNKNOWN
    if bool(known.all()):
        return Sets(embeddings, labels, gallery, gallery_labels, groups, gallery_groups), index
    groups = None if groups is None else groups[known]
    return Sets(embeddings[known], labels[known], gallery, gallery_labels, groups, gallery_groups), index[known]


class Relevance:
    """Positives and negatives of some queries or pairs at a time.

    counts (Q,): positives of each query. junk (Q,): gallery items of its class and group, itself included; None without
    groups. list_bytes, mask_bytes: memory that lists and masks of one query need.
    """

    def __init__(self, sets: Sets, space: Space) -> None:
        self.self_search, self.size, self.labels = space.self_search, len(space.gallery), sets.labels
        self.gallery_labels = sets.labels if sets.gallery_labels is None else sets.gallery_labels
        self.mask_bytes = 0
        self.junk: Tensor | None = None
        self._step = max(1, space.budget // (8 * 32 * max(self.size, 1)))  # queries whose masks are made at a time
        if isinstance(self.labels, Tensor) and self.labels.dtype != torch.bool:
            assert isinstance(self.gallery_labels, Tensor)
            classes, self.sorted = self.gallery_labels.long().sort(stable=True)  # items, class after class
            ids = self.labels.long().contiguous()
            self.first = torch.searchsorted(classes, ids)
            self.counts = torch.searchsorted(classes, ids, right=True) - self.first - int(self.self_search)
            if sets.groups is not None:
                self._set_groups(sets.groups, sets.groups if sets.gallery_groups is None else sets.gallery_groups)
        else:
            self.mask_bytes = 24 * self.size
            rows = torch.arange(len(space.queries), device=space.queries.device)
            parts = [self._mask(rows[part]).sum(1) for part in slices(len(rows), self._step)]
            self.counts = torch.cat([rows.new_zeros(0), *parts])
        self.list_bytes = 64 * (int(self.counts.max()) + 1 if len(self.counts) else 1)

    def _set_groups(self, groups: Tensor, gallery_groups: Tensor) -> None:
        """Sorts the items of each class by group: the items of a query's class and group then lie side by side."""
        size, number = self.size, group_numbers(torch.cat([gallery_groups.long(), groups.long()]))
        self.gallery_groups, self.groups = number[:size], number[:size] if self.self_search else number[size:]
        assert isinstance(self.labels, Tensor) and isinstance(self.gallery_labels, Tensor)
        class_number = torch.unique(torch.cat([self.gallery_labels, self.labels]), return_inverse=True)[1]
        key = class_number * (2 * len(number)) + torch.cat([self.gallery_groups, self.groups])  # of class and group
        pairs, self.sorted = key[:size].sort(stable=True)
        mine = key[size:].contiguous()
        self.junk_first = torch.searchsorted(pairs, mine)
        self.junk = torch.searchsorted(pairs, mine, right=True) - self.junk_first
        self.counts = self.counts + int(self.self_search) - self.junk
        self.mask_bytes = 4 * size

    def positives(self, rows: Tensor) -> Tensor:
        """(q, m) the positive items of some queries, -1 where there are no more."""
        most = int(self.counts[rows].max()) if len(rows) else 0
        if not isinstance(self.labels, Tensor) or self.labels.dtype == torch.bool:
            parts = [self._listed(rows[part], most) for part in slices(len(rows), self._step)]
            return torch.cat([rows.new_zeros(0, most), *parts])
        if self.junk is not None:
            place = torch.arange(most, device=rows.device).expand(len(rows), -1)
            real = place < self.counts[rows, None]
            place = place + self.first[rows, None]
            place = place + self.junk[rows, None] * (place >= self.junk_first[rows, None])  # past the query's group
            return self.sorted[place.clamp_(max=max(self.size - 1, 0))].masked_fill_(~real, -1)
        place = torch.arange(most + int(self.self_search), device=rows.device)
        items = self.sorted[(self.first[rows, None] + place).clamp_(max=max(self.size - 1, 0))]
        real = place < (self.counts[rows, None] + int(self.self_search))
        if self.self_search:
            real = real & (items != rows[:, None])
        return items.masked_fill_(~real, -1)

    def is_negative(self, rows: Tensor, items: Tensor) -> Tensor:
        """(P,) whether an item is ranked for a query and is not positive."""
        if isinstance(self.labels, Relation):
            result = self.labels.negative[rows, items] & ~self.labels.positive[rows, items]
        elif self.labels.dtype == torch.bool:  # type: ignore[union-attr]
            assert isinstance(self.labels, Tensor) and isinstance(self.gallery_labels, Tensor)
            step = max(1, 2**24 // max(self.labels.shape[1], 1))
            parts = zip(torch.split(rows, step), torch.split(items, step), strict=True)
            result = torch.cat([(self.labels[r] & self.gallery_labels[i]).any(1).logical_not_() for r, i in parts])
        else:
            assert isinstance(self.labels, Tensor) and isinstance(self.gallery_labels, Tensor)
            return self.labels[rows] != self.gallery_labels[items]  # a query has its own class
        return result & (rows != items) if self.self_search else result

    def left_out(self, rows: Tensor) -> Tensor | None:
        """(q, G) which pairs are neither positive nor negative; None where there are none."""
        if self.junk is not None:
            assert isinstance(self.labels, Tensor) and isinstance(self.gallery_labels, Tensor)
            same_class = self.labels[rows, None] == self.gallery_labels
            return same_class.logical_and_(self.groups[rows, None] == self.gallery_groups)
        if not isinstance(self.labels, Relation):
            return None
        return ~(self.labels.positive[rows] | self.labels.negative[rows])

    def _mask(self, rows: Tensor) -> Tensor:
        """(q, G) bool."""
        if isinstance(self.labels, Relation):
            positive = self.labels.positive[rows]
        else:
            assert isinstance(self.labels, Tensor) and isinstance(self.gallery_labels, Tensor)
            positive = relations.multilabel(self.labels[rows], self.gallery_labels).positive
        return positive.scatter_(1, rows[:, None], False) if self.self_search else positive

    def _listed(self, rows: Tensor, most: int) -> Tensor:
        positive = self._mask(rows).to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :most]
        return positive.masked_fill(torch.arange(most, device=rows.device) >= self.counts[rows, None], -1)
