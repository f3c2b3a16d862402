"""Who is kin to each query: class ids, multi-label rows or a relation, for a few queries or pairs at a time."""

from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.core import relations
from nearkin.core.relations import UNKNOWN, Labels, Relation
from nearkin.evaluation.retrieval.exact import Space, slices


class Asked(NamedTuple):
    queries: Tensor
    labels: Labels
    gallery: Tensor | None
    gallery_labels: Tensor | None


def known(
    embeddings: Tensor, labels: Labels, gallery: Tensor | None, gallery_labels: Labels | None
) -> tuple[Asked, Tensor]:
    """What remains without the items of unknown class, and the indices of the remaining queries."""
    everyone = torch.arange(len(embeddings), device=embeddings.device)
    assert gallery_labels is None or isinstance(gallery_labels, Tensor)
    if isinstance(labels, Tensor) and labels.dtype == torch.bool and gallery is not None and gallery_labels is None:
        labels = relations.explicit(labels)
    if not isinstance(labels, Tensor) or labels.dtype == torch.bool:
        return Asked(embeddings, labels, gallery, gallery_labels), everyone
    if gallery is not None and gallery_labels is not None:
        there = gallery_labels != UNKNOWN
        if not bool(there.all()):
            gallery, gallery_labels = gallery[there], gallery_labels[there]
    here = labels != UNKNOWN
    if bool(here.all()):
        return Asked(embeddings, labels, gallery, gallery_labels), everyone
    return Asked(embeddings[here], labels[here], gallery, gallery_labels), everyone[here]


class Kinship:
    """number (Q,): how many kin each query has. cost and masked: bytes that lists and masks of one query need."""

    def __init__(self, asked: Asked, space: Space) -> None:
        self.own, self.size, self.labels = space.own, len(space.gallery), asked.labels
        self.others = asked.labels if asked.gallery_labels is None else asked.gallery_labels
        self.masked = 0
        self._step = max(1, space.budget // (8 * 32 * max(self.size, 1)))  # queries whose masks are held at a time
        if isinstance(self.labels, Tensor) and self.labels.dtype != torch.bool:
            assert isinstance(self.others, Tensor)
            classes, self.sorted = self.others.long().sort(stable=True)  # items, class after class
            ids = self.labels.long().contiguous()
            self.first = torch.searchsorted(classes, ids)
            self.number = torch.searchsorted(classes, ids, right=True) - self.first - int(self.own)
        else:
            self.masked = 24 * self.size
            rows = torch.arange(len(space.queries), device=space.queries.device)
            parts = [self._mask(rows[part]).sum(1) for part in slices(len(rows), self._step)]
            self.number = torch.cat([rows.new_zeros(0), *parts])
        self.cost = 64 * (int(self.number.max()) + 1 if len(self.number) else 1)

    def items(self, rows: Tensor) -> Tensor:
        """(q, m) the kin of some queries, -1 where there are no more."""
        most = int(self.number[rows].max()) if len(rows) else 0
        if not isinstance(self.labels, Tensor) or self.labels.dtype == torch.bool:
            parts = [self._listed(rows[part], most) for part in slices(len(rows), self._step)]
            return torch.cat([rows.new_zeros(0, most), *parts])
        place = torch.arange(most + int(self.own), device=rows.device)
        items = self.sorted[(self.first[rows, None] + place).clamp_(max=max(self.size - 1, 0))]
        real = place < (self.number[rows, None] + int(self.own))
        if self.own:
            real = real & (items != rows[:, None])
        return items.masked_fill_(~real, -1)

    def strangers(self, rows: Tensor, items: Tensor) -> Tensor:
        """(P,) whether an item is ranked with the kin of a query and is not one of them."""
        if isinstance(self.labels, Relation):
            result = self.labels.negative[rows, items] & ~self.labels.positive[rows, items]
        elif self.labels.dtype == torch.bool:  # type: ignore[union-attr]
            assert isinstance(self.labels, Tensor) and isinstance(self.others, Tensor)
            step = max(1, 2**24 // max(self.labels.shape[1], 1))
            parts = zip(torch.split(rows, step), torch.split(items, step), strict=True)
            result = torch.cat([(self.labels[r] & self.others[i]).any(1).logical_not_() for r, i in parts])
        else:
            assert isinstance(self.labels, Tensor) and isinstance(self.others, Tensor)
            return self.labels[rows] != self.others[items]  # a query is of its own class
        return result & (rows != items) if self.own else result

    def left_out(self, rows: Tensor) -> Tensor | None:
        """(q, G) which pairs are neither kin nor strangers, if there may be any."""
        if not isinstance(self.labels, Relation):
            return None
        return ~(self.labels.positive[rows] | self.labels.negative[rows])

    def _mask(self, rows: Tensor) -> Tensor:
        """(q, G) bool."""
        if isinstance(self.labels, Relation):
            kin = self.labels.positive[rows]
        else:
            assert isinstance(self.labels, Tensor) and isinstance(self.others, Tensor)
            kin = relations.multilabel(self.labels[rows], self.others).positive
        return kin.scatter_(1, rows[:, None], False) if self.own else kin

    def _listed(self, rows: Tensor, most: int) -> Tensor:
        kin = self._mask(rows).to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :most]
        return kin.masked_fill(torch.arange(most, device=rows.device) >= self.number[rows, None], -1)
