"""Re-ranking as it is published, on dense matrices in float64, loop by loop: what the sparse passes are judged by.

k-reciprocal (arXiv:1701.08398): sets as in its section 3.2, weights as in 3.3, the average as in 3.4. Where the
authors' code differs from the paper it is followed: squared distances over the largest of the row, all queries among
the neighbours, weights of sum 1, "more than" 2/3. Ties: itself first, then the lower index; in the result the nearer
one, then the lower index.
"""

import numpy as np

DIGITS = 11  # equal up to rounding is equal


def squared_distances(rows, kind):
    """(N, N) between all rows; of unit rows for "cosine", where a zero row has cosine 0 with all others."""
    x = np.asarray(rows, np.float64)
    if kind == "cosine":
        length = np.sqrt((x * x).sum(1, keepdims=True))
        x = x / np.where(length > 0, length, 1)
        d = np.array([[2 - 2 * (a * b).sum() for b in x] for a in x])
    else:
        d = np.array([[((a - b) ** 2).sum() for b in x] for a in x])
    d = np.maximum(d, 0)
    np.fill_diagonal(d, 0)
    return d


def neighbours(d):
    """The order of all items by distance from each: itself, then the others."""
    order = []
    for i, row in enumerate(np.round(d, DIGITS)):
        others = sorted((j for j in range(len(row)) if j != i), key=lambda j: (row[j], j))
        order.append([i, *others])
    return order


def k_reciprocal(queries, gallery, k1, k2, share, kind="cosine"):
    """d* (Q, G) and d (Q, G); without a gallery (N, N) of the queries among themselves."""
    rows = np.asarray(queries, np.float64)
    if gallery is not None:
        rows = np.concatenate([rows, np.asarray(gallery, np.float64)])
    squared = squared_distances(rows, kind)
    order, number = neighbours(squared), len(rows)
    largest = squared.max(1, keepdims=True)
    d = squared / np.where(largest > 1e-14, largest, 1)

    def reciprocal(i, k):
        return {j for j in order[i][: k + 1] if i in order[j][: k + 1]}

    v = np.zeros((number, number))
    for i in range(number):
        near = reciprocal(i, k1)
        wide = set(near)
        for j in near:
            candidates = reciprocal(j, round(k1 / 2))
            if 3 * len(candidates & near) > 2 * len(candidates):
                wide |= candidates
        for j in wide:
            v[i, j] = np.exp(-d[i, j])
        v[i] /= v[i].sum()
    v = np.array([v[order[i][:k2]].mean(0) for i in range(number)])
    first, second = (
        (range(number), range(number)) if gallery is None else (range(len(queries)), range(len(queries), number))
    )
    jaccard = np.array(
        [[1 - np.minimum(v[i], v[j]).sum() / np.maximum(v[i], v[j]).sum() for j in second] for i in first]
    )
    d = d[np.ix_(first, second)]
    return (1 - share) * jaccard + share * d, d


def ranking(final, d, itself):
    """Indices by the final distance, then the original one, then by index. itself: a row is not ranked for itself."""
    final, d = np.round(final, DIGITS), np.round(d, DIGITS)
    return [
        sorted((j for j in range(final.shape[1]) if not (itself and i == j)), key=lambda j: (final[i, j], d[i, j], j))
        for i in range(len(final))
    ]


def expanded(queries, gallery, count, alpha):
    """α query expansion of unit rows in float64; without a gallery by the other queries."""
    itself = gallery is None
    x = _unit(np.asarray(queries, np.float64))
    y = x if itself else _unit(np.asarray(gallery, np.float64))
    result = []
    for i, a in enumerate(x):
        cosines = [(a * b).sum() for b in y]
        near = sorted(
            (j for j in range(len(y)) if not (itself and i == j)), key=lambda j: (-round(cosines[j], DIGITS), j)
        )
        result.append(a + sum((max(cosines[j], 0.0) ** alpha * y[j] for j in near[:count]), np.zeros_like(a)))
    return _unit(np.array(result))


def _unit(x):
    length = np.sqrt((x * x).sum(1, keepdims=True))
    return x / np.where(length > 0, length, 1)
