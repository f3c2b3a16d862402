"""Every loss as a slow float64 loop, written from its formula: the judge of the fast code.

x (B, D) are anchors, references (R, D) whom they meet, the batch itself if None; positive and negative (B, R) bool say
positive and negative, self-pairs in neither. Class losses take labels (B,), -1 left out. Values are 0-d float64
tensors on the graph, so that autograd through the loops is the reference gradient. Nothing here comes from the package.
"""

import math
from collections import Counter
from itertools import combinations

import numpy as np
import torch

# ---------------------------------------------------------------- vectors, distances, sums


def squared_distance(u, v):
    return ((u - v) ** 2).sum()


def length(v):
    """|v|, with gradient 0 at 0."""
    square = (v * v).sum()
    return square.sqrt() if square > 0 else square


def distance(u, v):
    """|u - v|, with gradient 0 at 0."""
    return length(u - v)


def unit(v):
    """v / |v|; the zero vector stays zero."""
    return v / length(v) if length(v) > 0 else v * 0


def cosine(u, v):
    return (unit(u) * unit(v)).sum()


def angle(u, v):
    return cosine(u, v).clamp(-1, 1).acos()


def table(function, x, references=None):
    """Nested list [anchor][reference] of function(x_i, r_j)."""
    return [[function(u, v) for v in (x if references is None else references)] for u in x]


def distances(x, references=None, *, squared=False, normalize=False):
    if normalize:
        x, references = units(x), None if references is None else units(references)
    return table(squared_distance if squared else distance, x, references)


def units(x):
    return torch.stack([unit(v) for v in x]) if len(x) else x


def columns(mask, i):
    return [j for j, inside in enumerate(mask[i]) if inside]


def logsumexp(values):
    return torch.logsumexp(torch.stack(values), 0)


def log1p_sum_exp(values):
    """log(1 + Σ e^v)"""
    return logsumexp([torch.zeros((), dtype=torch.float64), *values])


def mean(values):
    return sum(values) / len(values)


def reduced(x, terms, reduction):
    """terms: one list of 0-d tensors an anchor. A loss without any term is 0."""
    zero = x.sum() * 0
    if reduction == "none":
        return torch.stack([sum(own, zero) for own in terms]) if terms else x.sum(1)
    every = [term for own in terms for term in own]
    if reduction == "sum":
        return sum(every, zero)
    if reduction == "active":
        every = [term for term in every if term > 0]
    return sum(every, zero) / max(len(every), 1)


# ---------------------------------------------------------------- selections, ties to the lowest index


def nearest(row, among):
    return min(among, key=lambda j: row[j])


def farthest(row, among):
    return max(among, key=lambda j: row[j])


def mine_hard(distance, positive, negative):
    return [
        (a, p, nearest(row, columns(negative, a)))
        for a, row in enumerate(distance)
        for p in columns(positive, a)
        if columns(negative, a)
    ]


def semihard_negative(row, p, negatives, fallback):
    farther = [n for n in negatives if row[n] > row[p]]
    if farther:
        return nearest(row, farther)
    if not negatives or fallback == "skip":
        return None
    return farthest(row, negatives) if fallback == "farthest" else nearest(row, negatives)


def mine_semihard(distance, positive, negative, fallback="farthest"):
    triplets = []
    for a, row in enumerate(distance):
        for p in columns(positive, a):
            n = semihard_negative(row, p, columns(negative, a), fallback)
            if n is not None:
                triplets.append((a, p, n))
    return triplets


def mine_semihard_or_hardest(distance, positive, negative):
    return mine_semihard(distance, positive, negative, "hardest")


def mine_semihard_or_skip(distance, positive, negative):
    return mine_semihard(distance, positive, negative, "skip")


def farther_negatives(row, p, negatives, margin, squared):
    """Which of these a semi-hard draw is from: within the margin, else farther, else the farthest."""
    own, power = row[p], 2 if squared else 1
    farther = [n for n in negatives if row[n] > own]
    within = [n for n in farther if margin is not None and row[n] ** power < own**power + margin]
    return within or farther or [farthest(row, negatives)]


def mine_batch_hard(distance, positive, negative):
    return [
        (a, farthest(row, columns(positive, a)), nearest(row, columns(negative, a)))
        for a, row in enumerate(distance)
        if columns(positive, a) and columns(negative, a)
    ]


def mine_easy_positive(distance, positive, negative, kind="semihard"):
    """`kind` is `negative` of the fast function; semi-hard falls back on the farthest negative."""
    triplets = []
    for a, row in enumerate(distance):
        positives, negatives = columns(positive, a), columns(negative, a)
        if positives and negatives:
            p = nearest(row, positives)
            hard = nearest(row, negatives)
            triplets.append((a, p, hard if kind == "hard" else semihard_negative(row, p, negatives, "farthest")))
    return triplets


def mine_hard_negatives(distance, positive, negative):
    """Masks: all positive pairs, and as many of the nearest negative ones; of equals the first in reading order."""
    pairs = [(row[n], a, n) for a, row in enumerate(distance) for n in columns(negative, a)]
    number = sum(len(columns(positive, a)) for a in range(len(distance)))
    chosen = torch.zeros_like(torch.as_tensor(negative))
    for _, a, n in sorted(pairs)[:number]:
        chosen[a, n] = True
    return torch.as_tensor(positive), chosen


def mine_multi_similarity(distance, positive, negative, epsilon=0.1):
    """Masks. Distance is 1 - similarity."""
    near, far = torch.zeros_like(torch.as_tensor(positive)), torch.zeros_like(torch.as_tensor(negative))
    for a, row in enumerate(distance):
        positives, negatives = columns(positive, a), columns(negative, a)
        if positives and negatives:
            for p in positives:
                near[a, p] = bool(row[p] > min(row[n] for n in negatives) - epsilon)
            for n in negatives:
                far[a, n] = bool(row[n] < max(row[p] for p in positives) + epsilon)
    return near, far


def distance_weights(row, allowed, dim, clip=0.5, cutoff=1.4):
    """Probability of each entry of one anchor's row: min(1/q(clip), 1/q(d)), uniform if all lie beyond the cutoff."""

    def log_power(base, exponent):
        return exponent * (math.log(base) if base > 0 else -math.inf) if exponent else 0.0

    def rarity(d):  # -log q(d)
        return -log_power(d, dim - 2) - log_power(1 - d * d / 4, (dim - 3) / 2)

    candidates = [j for j, inside in enumerate(allowed) if inside]
    near = [j for j in candidates if cutoff is None or row[j] < cutoff]
    weights = {j: min(rarity(clip), rarity(float(row[j]))) for j in near} or dict.fromkeys(candidates, 0.0)
    top = max(weights.values(), default=0.0)
    total = sum(math.exp(w - top) for w in weights.values())
    return [math.exp(weights[j] - top) / total if j in weights else 0.0 for j in range(len(row))]


def selected(selection, positive, negative, a):
    """Columns of anchor a's positive and negative pairs: of "all", a list of (a, p, n), or a tuple of two masks."""
    if isinstance(selection, list):
        return [p for i, p, _ in selection if i == a], [n for i, _, n in selection if i == a]
    near, far = (positive, negative) if selection == "all" else selection
    return columns(near, a), columns(far, a)


# ---------------------------------------------------------------- pair losses


def contrastive(
    x, positive, negative, references=None, *, margin=1.0, positive_margin=0.0, squared=True, balance=True,
    selection="all", normalize=False, reduction="mean",
):  # fmt: skip
    d = distances(x, references, normalize=normalize)
    power = 2 if squared else 1
    pull, push = [], []
    for a in range(len(x)):
        positives, negatives = selected(selection, positive, negative, a)
        pull.append([(d[a][p] - positive_margin).relu() ** power for p in positives])
        push.append([(margin - d[a][n]).relu() ** power for n in negatives])
    if not balance:
        return reduced(x, [near + far for near, far in zip(pull, push, strict=True)], reduction) / 2
    return reduced(x, pull, reduction) / 2 + reduced(x, push, reduction) / 2


def margin(
    x, positive, negative, references=None, *, beta=1.2, classes=None, margin=0.2, beta_weight=0.0,
    selection="all", normalize=True, reduction="active",
):  # fmt: skip
    """beta: a number, a 0-d tensor, or (C,) with the class of each anchor in `classes`."""
    d = distances(x, references, normalize=normalize)
    beta = torch.as_tensor(beta, dtype=torch.float64)
    sums, pairs, active = [], 0, 0
    for a in range(len(x)):
        positives, negatives = selected(selection, positive, negative, a)
        boundary = beta[classes[a]] if beta.dim() else beta
        terms = [(margin + d[a][p] - boundary).relu() for p in positives]
        terms += [(margin - d[a][n] + boundary).relu() for n in negatives]
        sums.append(sum(terms, x.sum() * 0) + beta_weight * boundary * len(positives))
        pairs += len(terms)
        active += sum(bool(term > 0) for term in terms)
    if reduction in ("sum", "none"):
        return reduced(x, [[own] for own in sums], reduction)
    number = active if reduction == "active" else pairs
    return sum(sums) / number if number else x.sum() * 0


def multi_similarity(
    x, positive, negative, references=None, *, alpha=2.0, beta=50.0, base=0.5, epsilon=0.1,
    selection="multi_similarity", reduction="mean",
):  # fmt: skip
    """selection: "multi_similarity", "all", or a tuple of two masks. Anchors without pairs have no term."""
    s = table(cosine, x, references)
    if selection == "multi_similarity":
        selection = mine_multi_similarity([[1 - v for v in row] for row in s], positive, negative, epsilon)
    terms = []
    for a in range(len(x)):
        positives, negatives = selected(selection, positive, negative, a)
        pull = log1p_sum_exp([-alpha * (s[a][p] - base) for p in positives]) / alpha
        push = log1p_sum_exp([beta * (s[a][n] - base) for n in negatives]) / beta
        terms.append([pull + push] if columns(positive, a) or columns(negative, a) else [])
    return reduced(x, terms, reduction)


def circle(x, positive, negative, references=None, *, margin=0.4, scale=80.0, reduction="mean", at=None):
    """The weights are those at the embeddings `at` (x itself if None) and carry no gradient."""
    s = table(cosine, x, references)
    frozen = table(cosine, (x if at is None else at).detach(), None if references is None else references.detach())
    terms = []
    for a in range(len(x)):
        positives, negatives = columns(positive, a), columns(negative, a)
        pairs = []
        for p in positives:
            for n in negatives:
                pull = (1 + margin - frozen[a][p]).relu() * (s[a][p] - 1 + margin)
                push = (frozen[a][n] + margin).relu() * (s[a][n] - margin)
                pairs.append(scale * (push - pull))
        terms.append([log1p_sum_exp(pairs)] if pairs else [])
    return reduced(x, terms, reduction)


def siamese(x, positive, negative, references=None, *, weight, bias, reduction="mean"):
    z = table(lambda u, v: (weight * (u - v).abs()).sum() + bias, x, references)
    pull = [[log1p_sum_exp([-z[a][p]]) for p in columns(positive, a)] for a in range(len(x))]
    push = [[log1p_sum_exp([z[a][n]]) for n in columns(negative, a)] for a in range(len(x))]
    return reduced(x, pull, reduction) / 2 + reduced(x, push, reduction) / 2


# ---------------------------------------------------------------- triplet losses


def triplet(
    x, positive, negative, references=None, *, margin=0.2, squared=True, swap=False,
    selection="all", normalize=True, reduction="mean",
):  # fmt: skip
    """selection: "all", or a list of (a, p, n)."""
    d = distances(x, references, squared=squared, normalize=normalize)
    between = distances(x if references is None else references, squared=squared, normalize=normalize)
    if selection == "all":
        selection = [(a, p, n) for a in range(len(x)) for p in columns(positive, a) for n in columns(negative, a)]
    terms = [[] for _ in x]
    for a, p, n in selection:
        far = torch.minimum(d[a][n], between[p][n]) if swap else d[a][n]
        gap = d[a][p] - far
        terms[a].append(log1p_sum_exp([gap]) if margin is None else (gap + margin).relu())
    return reduced(x, terms, reduction)


def quadruplet(
    x, positive, negative, references=None, *, classes, margin=0.2, second_margin=0.1, squared=True,
    selection="all", normalize=True, reduction="mean",
):  # fmt: skip
    """classes: of each anchor. The fourth item is the nearest to the negative among the anchors of a third class."""
    d = distances(x, references, squared=squared, normalize=normalize)
    if selection == "all":
        selection = [(a, p, n) for a in range(len(x)) for p in columns(positive, a) for n in columns(negative, a)]
    first, second = [[] for _ in x], [[] for _ in x]
    for a, p, n in selection:
        first[a].append((d[a][p] - d[a][n] + margin).relu())
        third = [m for m in range(len(x)) if negative[m][n] and classes[m] != classes[a]]
        if third:
            second[a].append((d[a][p] - min(d[m][n] for m in third) + second_margin).relu())
    return reduced(x, first, reduction) + reduced(x, second, reduction)


def lossless_triplet(x, positive, negative, references=None, *, sigmoid=True, epsilon=1e-8, reduction="mean"):
    def cube(v):
        return v.sigmoid() if sigmoid else v.clamp(0, 1)

    d = distances(cube(x), None if references is None else cube(references), squared=True)
    dim = x.shape[1]
    terms = [
        [
            -(1 - d[a][p] / dim + epsilon).log() - (1 - (dim - d[a][n]) / dim + epsilon).log()
            for p in columns(positive, a)
            for n in columns(negative, a)
        ]
        for a in range(len(x))
    ]
    return reduced(x, terms, reduction)


def vicreg(
    x, positive, negative, references=None, *, invariance_weight=25.0, variance_weight=25.0, covariance_weight=1.0,
    deviation=1.0, epsilon=1e-4,
):  # fmt: skip
    """Items without a positive do not count; a batch alone is both of its sides."""
    d, dim = distances(x, references, squared=True), x.shape[1]
    pairs = [d[i][j] / dim for i in range(len(x)) for j in columns(positive, i)]
    if not pairs:
        return (x * 0).sum()
    value = invariance_weight * sum(pairs) / len(pairs)
    left = [row for i, row in enumerate(x) if any(positive[i])]
    right = left
    if references is not None:
        right = [row for j, row in enumerate(references) if any(positive[i][j] for i in range(len(x)))]
    for side in (left, right):
        degrees = max(1, len(side) - 1)
        mean = sum(side) / len(side)
        for j in range(dim):
            spread = (sum((row[j] - mean[j]) ** 2 for row in side) / degrees + epsilon).sqrt()
            value = value + variance_weight * (deviation - spread).relu() / dim / 2
            for k in range(dim):
                if k != j:
                    together = sum((row[j] - mean[j]) * (row[k] - mean[k]) for row in side) / degrees
                    value = value + covariance_weight * together**2 / dim
    return value


# ---------------------------------------------------------------- structured losses


def lifted_structure(
    x, positive, negative, references=None, *, margin=1.0, form="smooth", normalize=False, reduction="mean"
):
    """The negatives of j are the anchors l that have j for a negative."""
    d = distances(x, references, normalize=normalize)
    terms = [[] for _ in x]
    for i in range(len(x)):
        for j in columns(positive, i):
            threats = [margin - d[i][k] for k in columns(negative, i)]
            threats += [margin - d[m][j] for m in range(len(x)) if negative[m][j]]
            if not threats:
                terms[i].append(d[i][j] * 0)
                continue
            worst = logsumexp(threats) if form == "smooth" else max(threats)
            terms[i].append((worst + d[i][j]).relu() ** 2 / 2)
    return reduced(x, terms, reduction)


def generalized_lifted(x, positive, negative, references=None, *, margin=1.0, normalize=False, reduction="mean"):
    d = distances(x, references, normalize=normalize)
    terms = [[] for _ in x]
    for i in range(len(x)):
        near, far = columns(positive, i), columns(negative, i)
        if near and far:
            terms[i].append((logsumexp([d[i][j] for j in near]) + logsumexp([margin - d[i][k] for k in far])).relu())
    return reduced(x, terms, reduction)


def npair(x, positive, negative, references=None, *, length_weight=0.002, reduction="mean"):
    """In a batch alone an item without a positive before it is an anchor, any other a reference.

    The penalty stands in the term of each anchor that counts: its own square, and the mean over all references met.
    """
    others = x if references is None else references
    anchors, met = list(range(len(x))), list(range(len(others)))
    if references is None:
        anchors = [i for i in anchors if not any(positive[i][j] for j in range(i))]
        met = [j for j in met if j not in anchors]
    anchors = [i for i in anchors if any(positive[i][j] for j in met)]
    used = [r for r in met if any(positive[i][r] or negative[i][r] for i in anchors)]
    terms = [[] for _ in x]
    for i in anchors:
        meets = [r for r in met if positive[i][r] or negative[i][r]]
        normaliser = logsumexp([x[i] @ others[r] for r in meets])
        likelihood = mean([x[i] @ others[p] - normaliser for p in meets if positive[i][p]])
        size = x[i] @ x[i] + mean([others[r] @ others[r] for r in used])
        terms[i].append(-likelihood + length_weight / 4 * size)
    return reduced(x, terms, reduction)


def supcon(x, positive, negative, references=None, *, temperature=0.1, reduction="mean"):
    s = table(lambda u, v: cosine(u, v) / temperature, x, references)
    terms = []
    for a in range(len(x)):
        positives = columns(positive, a)
        met = positives + columns(negative, a)
        terms.append([-mean([s[a][p] - logsumexp([s[a][r] for r in met]) for p in positives])] if positives else [])
    return reduced(x, terms, reduction)


def infonce(x, positive, negative, references=None, *, temperature=0.07, reduction="mean"):
    s = table(lambda u, v: cosine(u, v) / temperature, x, references)
    terms = []
    for a in range(len(x)):
        negatives = [s[a][n] for n in columns(negative, a)]
        terms.append([logsumexp([s[a][p], *negatives]) - s[a][p] for p in columns(positive, a)])
    return reduced(x, terms, reduction)


def sigmoid(x, positive, negative, references=None, *, log_scale, bias, reduction="mean"):
    """One term per anchor, the sum of its pairs."""
    s = table(cosine, x, references)
    terms = []
    for a in range(len(x)):
        pairs = [(s[a][j], 1) for j in columns(positive, a)] + [(s[a][j], -1) for j in columns(negative, a)]
        costs = [torch.nn.functional.softplus(-z * (log_scale.exp() * v + bias)) for v, z in pairs]
        terms.append([sum(costs)] if costs else [])
    return reduced(x, terms, reduction)


def logratio(x, gaps, references=None, *, epsilon=1e-6, ties="drop", normalize=False, reduction="mean"):
    """gaps (B, R): plain label distances; 0 leaves a reference out."""
    d = distances(x, references, squared=True, normalize=normalize)
    terms = []
    for a in range(len(x)):
        met = [r for r in range(len(d[a])) if gaps[a][r] > 0 and not (references is None and r == a)]
        squares = []
        for i, j in combinations(met, 2):
            if ties == "drop" and gaps[a][i] == gaps[a][j]:
                continue
            embedded = ((d[a][i] + epsilon) / (d[a][j] + epsilon)).log()
            labelled = math.log(float(gaps[a][i]) ** 2 / float(gaps[a][j]) ** 2)
            squares.append((embedded - labelled) ** 2)
        terms.append([mean(squares)] if squares else [])
    return reduced(x, terms, reduction)


# ---------------------------------------------------------------- rank losses


def smooth_ap(x, positive, negative, references=None, *, temperature=0.01, max_positives=None, reduction="mean"):
    s = table(cosine, x, references)
    terms = []
    for a in range(len(x)):
        positives = columns(positive, a)
        met = positives + columns(negative, a)
        precisions = []
        for p in positives:
            before = {r: ((s[a][r] - s[a][p]) / temperature).sigmoid() for r in met if r != p}
            precisions.append((1 + sum(before[q] for q in positives if q != p)) / (1 + sum(before.values())))
        terms.append([1 - mean(precisions)] if positives else [])
    return reduced(x, terms, reduction)


def fastap(x, positive, negative, references=None, *, bins=10, reduction="mean"):
    d = distances(x, references, squared=True, normalize=True)
    width = 4 / bins
    terms = []
    for a in range(len(x)):
        positives = columns(positive, a)
        met = positives + columns(negative, a)

        def histogram(items, row=d[a]):
            return [sum((1 - (row[r] - b * width).abs() / width).relu() for r in items) for b in range(bins + 1)]

        total = 0
        if positives:
            positive_bins, everyone = histogram(positives), histogram(met)
            for b in range(bins + 1):
                if sum(everyone[: b + 1]) > 0:
                    total = total + positive_bins[b] * sum(positive_bins[: b + 1]) / sum(everyone[: b + 1])
        terms.append([1 - total / len(positives)] if positives else [])
    return reduced(x, terms, reduction)


# ---------------------------------------------------------------- facility location


def nmi(a, b):
    """I / sqrt(H H'); 1 if both are one group, 0 if only one of them is."""
    if len(set(a)) == 1 or len(set(b)) == 1:
        return float(len(set(a)) == len(set(b)))
    rows, cols, cells, m = Counter(a), Counter(b), Counter(zip(a, b, strict=True)), len(a)
    entropy_a, entropy_b = (-sum(n / m * math.log(n / m) for n in c.values()) for c in (rows, cols))
    mutual = sum(n / m * math.log(n * m / (rows[i] * cols[j])) for (i, j), n in cells.items())
    return mutual / math.sqrt(entropy_a * entropy_b)


def known_items(labels):
    return [i for i, label in enumerate(torch.as_tensor(labels).tolist()) if label >= 0]


def facility_score(distance, labels, medoids, gamma):
    """F(S) + gamma (1 - NMI(g(S), y)); a medoid belongs to itself, a tie to the lowest medoid."""
    labels, items = torch.as_tensor(labels).tolist(), known_items(labels)
    owner = {i: i if i in medoids else nearest(distance[i], sorted(medoids)) for i in items}
    agreement = nmi([owner[i] for i in items], [labels[i] for i in items])
    return -sum(distance[i][owner[i]] for i in items) + gamma * (1 - agreement)


def facility_oracle(distance, labels):
    """F~ = Σ_classes max_j -Σ_i D_ij, j and i of the class."""
    labels, items = torch.as_tensor(labels).tolist(), known_items(labels)
    total = 0
    for label in sorted({labels[i] for i in items}):
        own = [i for i in items if labels[i] == label]
        total = total + max(-sum(distance[i][j] for i in own) for j in own)
    return total


def best_clustering(distance, labels, gamma):
    """Best score and its medoids S, of all sets of as many items as there are classes; of equals the first."""
    items = known_items(labels)
    distance = [[v.item() if isinstance(v, torch.Tensor) else v for v in row] for row in distance]
    number = len({int(labels[i]) for i in items})
    scored = ((facility_score(distance, labels, s, gamma), s) for s in combinations(items, number))
    return max(scored, key=lambda pair: pair[0]) if items else (0.0, ())


def facility_search(distance, labels, gamma, sweeps, tie=1e-9):
    """Medoids by algorithms 1 and 2 with every score from scratch; of scores within rounding the first."""
    items = known_items(labels)

    def best(others, pick=None):
        top = -math.inf if pick is None else facility_score(distance, labels, [*others, pick], gamma)
        for candidate in items:
            if candidate in others:
                continue
            score = facility_score(distance, labels, [*others, candidate], gamma)
            if score > top + tie:
                pick, top = candidate, score
        return pick

    medoids = []
    for _ in range(len({int(labels[i]) for i in items})):
        medoids.append(best(medoids))
    for _ in range(sweeps):
        for slot, pick in enumerate(medoids):
            medoids[slot] = best(medoids[:slot] + medoids[slot + 1 :], pick)
    return sorted(medoids)


def facility_location(x, labels, *, gamma=1.0, sweeps=5, normalize=True):
    """The bracket of the loss, with the medoids that greedy search and exchange find."""
    if not known_items(labels):
        return x.sum() * 0
    d = distances(x, normalize=normalize)
    medoids = facility_search([[v.item() for v in row] for row in d], labels, gamma, sweeps)
    return (facility_score(d, labels, medoids, gamma) - facility_oracle(d, labels)).relu()


# ---------------------------------------------------------------- class losses


def classified(x, labels, logits, reduction, extra=lambda i, y: 0):
    """Cross-entropy of logits(i, y), a list of C, plus extra(i, y), for each item of a known class."""
    terms = []
    for i, y in enumerate(labels.tolist()):
        scores = logits(i, y) if y >= 0 else []
        terms.append([logsumexp(scores) - scores[y] + extra(i, y)] if y >= 0 else [])
    return reduced(x, terms, reduction)


def normalized_softmax(x, labels, weight, *, scale=20.0, reduction="mean"):
    return classified(x, labels, lambda i, y: [scale * cosine(x[i], w) for w in weight], reduction)


def heated_softmax(x, labels, weight, bias, *, scale=16.0, normalize=True, reduction="mean"):
    def logits(i, y):
        v = unit(x[i]) if normalize else x[i]
        return [scale * (unit(w) @ v) + b for w, b in zip(weight, bias, strict=True)]

    return classified(x, labels, logits, reduction)


def cosface(x, labels, weight, *, margin=0.35, scale=64.0, reduction="mean"):
    def logits(i, y):
        return [scale * (cosine(x[i], w) - (margin if c == y else 0)) for c, w in enumerate(weight)]

    return classified(x, labels, logits, reduction)


def arcface(
    x, labels, weight, *, margin=0.5, scale=64.0, sub_centers=1, straight_through=False, reduction="mean"
):  # fmt: skip
    def speaker(i, c):
        return max(weight[c * sub_centers : (c + 1) * sub_centers], key=lambda w: cosine(x[i], w))

    def logits(i, y):
        scores = [scale * cosine(x[i], speaker(i, c)) for c in range(len(weight) // sub_centers)]
        theta = angle(x[i], speaker(i, y))
        beyond = theta >= math.pi - margin
        target = theta.cos() - margin * math.sin(margin) if beyond else (theta + margin).cos()
        scores[y] = scores[y] + (scale * target - scores[y]).detach() if straight_through else scale * target
        return scores

    return classified(x, labels, logits, reduction)


def sphereface_psi(theta, margin):
    k = min(int(theta.detach() * margin / math.pi), margin - 1)
    return (-1) ** k * (margin * theta).cos() - 2 * k


def sphereface(x, labels, weight, *, margin=4, annealing=5.0, reduction="mean"):
    def logits(i, y):
        scores = [x[i] @ unit(w) for w in weight]  # |x| cos θ, and its slope where |x| = 0
        theta = angle(x[i], weight[y])
        target = (annealing * theta.cos() + sphereface_psi(theta, margin)) / (1 + annealing)
        return [length(x[i]) * target if c == y else score for c, score in enumerate(scores)]

    return classified(x, labels, logits, reduction)


def quality(v, mean, std, concentration):
    """AdaFace's z of one embedding."""
    size = min(max(float(length(v)), 0.001), 100.0)
    return min(max(concentration * (size - float(mean)) / (float(std) + 0.001), -1.0), 1.0)


def adaface(
    x, labels, weight, *, mean=20.0, std=100.0, margin=0.4, concentration=0.333, scale=64.0, reduction="mean", at=None
):  # fmt: skip
    """at: where the lengths, which have no gradient, are taken."""

    def logits(i, y):
        scores = [scale * cosine(x[i], w) for w in weight]
        z = quality((x if at is None else at)[i].detach(), mean, std, concentration)
        theta = (angle(x[i], weight[y]) - margin * z).clamp(0.001, math.pi - 0.001)
        scores[y] = scale * (theta.cos() - (margin * z + margin))
        return scores

    return classified(x, labels, logits, reduction)


def adaface_statistics(x, labels, mean, std, *, momentum=0.01):
    lengths = [
        min(max(float(length(v)), 0.001), 100.0)
        for v, y in zip(x.detach(), labels.tolist(), strict=True)
        if y >= 0 and all(math.isfinite(c) for c in v.tolist())
    ]
    if lengths:
        middle = sum(lengths) / len(lengths)
        mean = momentum * middle + (1 - momentum) * float(mean)
    if len(lengths) > 1:
        variance = sum((size - middle) ** 2 for size in lengths) / (len(lengths) - 1)
        std = momentum * math.sqrt(variance) + (1 - momentum) * float(std)
    return mean, std


def magface(
    x, labels, weight, *, lower_margin=0.45, upper_margin=0.8, scale=64.0, lower_length=10.0, upper_length=110.0,
    length_weight=35.0, reduction="mean",
):  # fmt: skip
    def logits(i, y):
        scores = [scale * cosine(x[i], w) for w in weight]
        part = (length(x[i]).clamp(lower_length, upper_length) - lower_length) / (upper_length - lower_length)
        margin = lower_margin + part * (upper_margin - lower_margin)
        theta = angle(x[i], weight[y])
        beyond = theta >= math.pi - margin
        scores[y] = scale * (theta.cos() - margin * margin.sin() if beyond else (theta + margin).cos())
        return scores

    def drawn(i, y):
        def g(a):
            return a / upper_length**2 + 1 / a

        size = length(x[i])
        if size > upper_length:
            return length_weight * g(upper_length) + 0 * size
        if size >= lower_length:
            return length_weight * g(size)
        slope = 1 / upper_length**2 - 1 / lower_length**2  # the tangent
        return length_weight * (g(lower_length) + slope * (size - lower_length))

    return classified(x, labels, logits, reduction, drawn)


def adacos(x, labels, weight, *, scale=None, reduction="mean"):
    scale = math.sqrt(2) * math.log(len(weight) - 1) if scale is None else scale
    return normalized_softmax(x, labels, weight, scale=scale, reduction=reduction)


def adacos_scale(x, labels, weight, scale):
    """The next scale; the old one where there is no item, or where B_avg <= 1 would make it 0 or negative."""
    scale, weight = float(scale), weight.detach()
    items = [(v.detach(), y) for v, y in zip(x, labels.tolist(), strict=True) if y >= 0]
    others = [math.exp(scale * cosine(v, w)) for v, y in items for c, w in enumerate(weight) if c != y]
    if sum(others) <= len(items):
        return scale
    middle = sorted(float(angle(v, weight[y])) for v, y in items)[(len(items) - 1) // 2]
    return math.log(sum(others) / len(items)) / math.cos(min(math.pi / 4, middle))


def center(x, labels, weight, bias, centers, *, center_weight=0.003, reduction="mean"):
    def logits(i, y):
        return [w @ x[i] + b for w, b in zip(weight, bias, strict=True)]

    def drawn(i, y):
        return center_weight / 2 * squared_distance(x[i], centers[y].detach())

    return classified(x, labels, logits, reduction, drawn)


def center_update(x, labels, centers, *, alpha=0.5):
    moved = []
    for c, old in enumerate(centers):
        own = [v for v, y in zip(x, labels.tolist(), strict=True) if y == c]
        moved.append(old - alpha * sum((old - v for v in own), old * 0) / (1 + len(own)))
    return torch.stack(moved)


# ---------------------------------------------------------------- proxy losses


def proxy_nca(
    x, labels, proxies, *, scale=3.0, form="softmax", assignment="static", proxies_per_class=1, reduction="mean"
):
    """Dynamic: a term for every positive pair with a negative in the batch; each negative adds its proxy."""
    labels = labels.tolist()
    d = table(lambda v, p: squared_distance(scale * unit(v), scale * unit(p)), x, proxies)
    proxy_class = [z // proxies_per_class for z in range(len(proxies))]

    def term(own, others):
        return own + logsumexp([-o for o in others] + ([-own] if form == "softmax" else []))

    terms = [[] for _ in x]
    for a, y in enumerate(labels):
        if y >= 0 and assignment == "static":
            own = nearest(d[a], [z for z, c in enumerate(proxy_class) if c == y])
            others = [d[a][z] for z, c in enumerate(proxy_class) if c != y]
            terms[a] += [term(d[a][own], others)] if others else []
        elif y >= 0:
            stands_for = [nearest(row, range(len(proxies))) for row in d]
            negatives = [d[a][stands_for[n]] for n, other in enumerate(labels) if other >= 0 and other != y]
            positives = [j for j, other in enumerate(labels) if other == y and j != a]
            terms[a] += [term(d[a][stands_for[j]], negatives) for j in positives if negatives]
    return reduced(x, terms, reduction)


def proxy_anchor(x, labels, proxies, *, margin=0.1, scale=32.0):
    labels = labels.tolist()
    pull, push = [], []
    for c, proxy in enumerate(proxies):
        own = [-scale * (cosine(v, proxy) - margin) for v, y in zip(x, labels, strict=True) if y == c]
        others = [scale * (cosine(v, proxy) + margin) for v, y in zip(x, labels, strict=True) if y >= 0 and y != c]
        pull += [log1p_sum_exp(own)] if own else []
        push.append(log1p_sum_exp(others))
    return x.sum() * 0 + (mean(pull) if pull else 0) + mean(push)


def soft_triple(
    x, labels, centers, *, centers_per_class=10, scale=20.0, temperature=0.1, margin=0.01, spread_weight=0.2,
    reduction="mean",
):  # fmt: skip
    """Each distance of two unit centres is sqrt(|w - w'|² + 1e-5)."""
    per = centers_per_class
    classes = [list(range(c * per, (c + 1) * per)) for c in range(len(centers) // per)]
    spread = 0
    for own in classes:
        for k, other in combinations(own, 2):
            gap = squared_distance(unit(centers[k]), unit(centers[other]))
            spread = spread + (gap + 1e-5).sqrt() / (len(classes) * per * (per - 1))

    def logits(i, y):
        scores = []
        for c, own in enumerate(classes):
            s = [cosine(x[i], centers[k]) for k in own]
            total = logsumexp([v / temperature for v in s])
            scores.append(scale * (sum((v / temperature - total).exp() * v for v in s) - (margin if c == y else 0)))
        return scores

    return classified(x, labels, logits, reduction, lambda i, y: spread_weight * spread)


# --- groups


def average_linkage_groups(rows, similarity):
    """Groups by average linkage over all pairs: the two groups of the largest mean cosine are joined, while it reaches
    the similarity. Sets of items, from loops in float64."""
    unit = [row / max(float(np.sqrt((row**2).sum())), 1e-300) for row in np.asarray(rows, np.float64)]
    groups = [{i} for i in range(len(unit))]
    while True:
        best, pair = -2.0, None
        for a in range(len(groups)):
            for b in range(a + 1, len(groups)):
                mean = math.fsum(float(unit[i] @ unit[j]) for i in groups[a] for j in groups[b])
                mean /= len(groups[a]) * len(groups[b])
                if mean > best:
                    best, pair = mean, (a, b)
        if pair is None or best < similarity - 1e-12:
            return {frozenset(group) for group in groups}
        groups[pair[0]] |= groups.pop(pair[1])


def smoothed(rows, neighbours, rounds):
    """Rows moved towards their mutual neighbours, by loops in float64."""
    unit = np.asarray(rows, np.float64)
    unit = unit / np.sqrt((unit**2).sum(1, keepdims=True))
    unit = unit - unit.mean(0)
    unit = unit / np.sqrt((unit**2).sum(1, keepdims=True))
    for _ in range(rounds):
        near = []
        for i in range(len(unit)):
            others = sorted((-float(unit[i] @ unit[j]), j) for j in range(len(unit)) if j != i)
            near.append([j for _, j in others[:neighbours]])
        moved = []
        for i in range(len(unit)):
            row = unit[i].copy()
            for j in near[i]:
                if i in near[j]:
                    row += max(float(unit[i] @ unit[j]), 0.0) ** 3 * unit[j]
            moved.append(row / float(np.sqrt((row**2).sum())))
        unit = np.stack(moved)
    return unit


def graph_components(rows, similarity):
    """Connected components of the graph of all pairs at the similarity, by a search from each item."""
    unit = [row / float(np.sqrt((row**2).sum())) for row in np.asarray(rows, np.float64)]
    left, groups = set(range(len(unit))), set()
    while left:
        group, waiting = set(), [min(left)]
        while waiting:
            item = waiting.pop()
            group.add(item)
            waiting += [j for j in left - group if float(unit[item] @ unit[j]) >= similarity and j not in waiting]
        left -= group
        groups.add(frozenset(group))
    return groups


def bcubed(labels, groups):
    """B-cubed precision, recall and F from sums over pairs of items."""
    precision, recall = [], []
    for i in range(len(labels)):
        in_group = [j for j in range(len(labels)) if groups[j] == groups[i]]
        in_class = [j for j in range(len(labels)) if labels[j] == labels[i]]
        both = len(set(in_group) & set(in_class))
        precision.append(both / len(in_group))
        recall.append(both / len(in_class))
    p, r = math.fsum(precision) / len(labels), math.fsum(recall) / len(labels)
    return {"precision": p, "recall": r, "f": 2 * p * r / (p + r)}


def cosine_places(map_a, map_b, weight, bias):
    """Maps (C, H, W), averaged over their places and projected → the part of each place of a and of b in the cosine."""
    vectors = []
    for features in (map_a, map_b):
        channels, rows, columns = features.shape
        each = torch.zeros(rows, columns, len(weight), dtype=torch.float64)
        for i in range(rows):
            for j in range(columns):
                for d in range(len(weight)):
                    value = float(bias[d])
                    for c in range(channels):
                        value += float(weight[d, c]) * float(features[c, i, j])
                    each[i, j, d] = value / (rows * columns)
        vectors.append(each)
    whole = [each.sum((0, 1)) for each in vectors]
    lengths = [math.sqrt(float((e * e).sum())) for e in whole]
    parts = []
    for each, other in ((vectors[0], whole[1]), (vectors[1], whole[0])):
        parts.append((each * other).sum(2) / (lengths[0] * lengths[1]))
    return parts


# ---- open-set identification


def open_set_searches(x, enrolled, probes, mate, scoring="nearest", normalization="none", cohort=None, nearest=None):
    """Per probe (best score, whether the mate is strictly first), one label and one cosine at a time."""
    unit = lambda v: v / v.norm() if v.norm() > 0 else v  # noqa: E731
    models = []  # per label: its items, or one template
    for items in enrolled:
        rows = [x[i].double() for i in items]
        if scoring == "nearest":
            models.append([unit(row) for row in rows])
        else:
            rows = [unit(row) for row in rows] if scoring == "template" else rows
            models.append([unit(sum(rows) / len(rows))])

    def scale(v):
        near = sorted((float(v @ unit(t.double())) for t in cohort), reverse=True)[:nearest]
        mean = sum(near) / len(near)
        return mean, max(1e-6, math.sqrt(sum((s - mean) ** 2 for s in near) / len(near)))

    def around(v, labels):
        near = sorted((max(float(v @ g) for g in label) for label in labels), reverse=True)[:10]
        return sum(near) / len(near)

    results = []
    for probe, own in zip(probes, mate, strict=True):
        p = unit(x[probe].double())
        scores = []
        for number, label in enumerate(models):
            of_items = []
            for g in label:
                s = float(p @ g)
                if normalization == "as-norm":
                    (a, b), (c, d) = scale(p), scale(g)
                    s = (s - a) / b / 2 + (s - c) / d / 2
                if normalization == "csls":
                    s = 2 * s - around(p, models) - around(g, models[:number] + models[number + 1 :])
                of_items.append(s)
            scores.append(max(of_items))
        first = own >= 0 and all(scores[own] > s + 1e-11 for i, s in enumerate(scores) if i != own)
        results.append((max(scores), first))
    return results


def open_set_rates(scores, first, mated, fpir):
    """(FNIR, FPIR) at the best threshold whose FPIR does not exceed `fpir`, every observed score tried."""
    unknown = [s for s, m in zip(scores, mated, strict=True) if not m]
    known = [(s, f) for s, f, m in zip(scores, first, mated, strict=True) if m]
    best = (1.0, 0.0)  # a threshold above everything
    for t in [*scores, math.inf]:
        accepted = sum(s >= t for s in unknown) / len(unknown)
        missed = sum(not f or s < t for s, f in known) / len(known)
        if accepted <= fpir and missed <= best[0]:
            best = (missed, accepted)
    return best


def auroc(scores, mated):
    """Every search with a mate against every one without."""
    known, unknown = ([s for s, m in zip(scores, mated, strict=True) if bool(m) is kind] for kind in (True, False))
    return sum((a > b) + (a == b) / 2 for a in known for b in unknown) / (len(known) * len(unknown))


def oscr(scores, first, mated):
    """The area under correct answers over accepted unknown ones, every observed score a threshold."""
    known = [(s, f) for s, f, m in zip(scores, first, mated, strict=True) if m]
    unknown = [s for s, m in zip(scores, mated, strict=True) if not m]
    area, before = 0.0, (0.0, 0.0)
    for t in sorted(set(scores), reverse=True):
        point = sum(s >= t for s in unknown) / len(unknown), sum(bool(f) and s >= t for s, f in known) / len(known)
        area += (point[0] - before[0]) * (point[1] + before[1]) / 2
        before = point
    return area


def half_strangers(mated):
    """The weight of each search where half of them are of strangers."""
    known = sum(bool(m) for m in mated)
    return [0.5 / known if m else 0.5 / (len(mated) - known) for m in mated]


def gain(shares, first, mated):
    """Right decisions: the likeliest of the events (right, another label, none) is the answer."""
    total = 0.0
    for share, right, known, weight in zip(shares, first, mated, half_strangers(mated), strict=True):
        event = max(range(3), key=lambda e: (share[e], -e))
        total += weight * ((event == 0 and bool(right)) if known else event == 2)
    return total


def best_gain(scores, first, mated):
    """The gain of the best threshold, from which on all are named; every observed score and none are tried."""
    weights = half_strangers(mated)
    return max(
        sum(
            w * ((s >= t and bool(f)) if m else s < t) for s, f, m, w in zip(scores, first, mated, weights, strict=True)
        )
        for t in [*scores, math.inf]
    )


def calibration_error(stated, came, weights, bins=10):
    """The mean of |stated - came true| over equal bins of the stated probability, each with its weight."""
    total = 0.0
    for b in range(bins):
        inside = [i for i, p in enumerate(stated) if min(int(p * bins), bins - 1) == b]
        total += abs(sum(weights[i] * (stated[i] - float(came[i])) for i in inside))
    return total / sum(weights)
