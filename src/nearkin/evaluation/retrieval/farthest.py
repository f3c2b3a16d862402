"""The farthest item of each query, exactly: the search of `knn` with the order turned round."""

import torch
from torch import Tensor

from nearkin.evaluation.retrieval.exact import CELL, Space, slices
from nearkin.evaluation.retrieval.knn import entries_above

__all__ = ["Farthest"]


class Farthest:
    """Called as `knn.Searcher`, with k = 1; in a set that searches itself the query takes part."""

    def __init__(self, space: Space) -> None:
        self.space = space

    def __call__(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(q, 1) each: the farthest items of the queries `rows` and their similarities."""
        proposed = self._propose(rows)
        if proposed is None:
            halves = [self(half, k) for half in rows.chunk(2)]
            return torch.cat([items for items, _ in halves]), torch.cat([values for _, values in halves])
        items, valid = self.space.items(proposed), proposed >= 0
        score = torch.full(items.shape, torch.inf, dtype=torch.float64, device=items.device)
        score[valid] = self.space.exact(rows[:, None].expand_as(items)[valid], items[valid])
        values, slot = score.min(dim=1, keepdim=True)
        return items.gather(1, slot), values

    def _propose(self, rows: Tensor) -> Tensor | None:
        """Columns that may be the farthest, (q, w), -1 where none; None where they are beyond the budget."""
        space = self.space
        size, error, left = space.size, 2 * space.error[rows, None], space.left(rows)
        width = max(1, min(size, space.budget // 2 // (CELL * max(len(rows), 1))))
        highest = left.new_full((len(rows), 1), -torch.inf)
        values, cols = left.new_zeros(len(rows), 0), rows.new_zeros(len(rows), 0)
        for piece in slices(size, width):
            tile = left.new_empty(len(rows), piece.stop - piece.start)
            space.tile(left, space.right(piece), tile).neg_()
            highest = torch.maximum(highest, tile.amax(1, keepdim=True))
            entries = entries_above(tile, highest - error, space.budget)
            if entries is None:
                return None
            values = torch.cat([values, entries[0]], 1)
            cols = torch.cat([cols, entries[1] + piece.start * (entries[1] >= 0)], 1)
        return torch.where(values >= highest - error, cols, -1)
