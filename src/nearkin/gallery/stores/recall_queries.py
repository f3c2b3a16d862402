"""Queries that measure the recall of a search index: like new items of the gallery.

A row with a little noise is found too easily: its own links, or its own list, lead to its neighbours. Measured by such
rows, the index of a million rows in PostgreSQL had a recall of 1.00; new items of its classes had 0.93.
"""

from collections.abc import Callable

import numpy as np

from nearkin.gallery.schema import Floats, unit

__all__ = ["NEAR", "like_new_items"]

_SIGNS = (1, 1, 1, 1, 1, 1, -1, -1, -1)
NEAR = len(_SIGNS)  # rows that make a query


def like_new_items(rows: Floats, nearest: Callable[[Floats], Floats], draw: np.random.Generator) -> Floats:
    """Queries (n, D): of the `NEAR` rows nearest to each of the rows (n, D), six are added and three taken away.

    The weights are ±1/3, so where these rows scatter about a centre, the sum scatters about it as far as they do.
    nearest: the `NEAR` rows nearest to one; where it returns fewer, the row itself is the query.
    """
    queries = []
    for row in rows:
        near = nearest(row)
        queries.append(row if len(near) < NEAR else draw.permutation(_SIGNS) @ near)
    return unit(np.stack(queries))
