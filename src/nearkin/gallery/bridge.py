"""A bridge from the embeddings of an old encoder to those of a new one, fitted on items that both have seen.

Old rows are mapped into the new space, where renewed rows are too: one search, one length of vectors. Every kind
predicts the new embedding of an item from its old one, and the prediction is scaled to length 1:

    identity    as it is: for a run that was trained to be compatible with the old one
    procrustes  both sides whitened, then a rotation: z ↦ C_new R W_old (z - mean_old) + mean_new
    ridge       least squares with a penalty
    kernel      ridge on Gaussian similarities to some of the pairs: local, so it follows a bent space
    mlp         ridge and one hidden layer for what is left, trained on the cosine

The choice is made on held-out classes, by how well new queries find mapped old rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.core import checks
from nearkin.gallery.schema import Floats, unit

__all__ = ["KINDS", "Bridge", "Choice", "choose", "fit", "of_share", "per_query", "quality"]

Wide: TypeAlias = NDArray[np.float64]
Map = Callable[[Wide], Wide]
KINDS: dict[str, tuple[tuple[float, ...], ...]] = {  # the settings that are tried of each kind
    "identity": ((),),
    "procrustes": ((0.01,), (0.1,)),
    "ridge": ((0.03,), (0.1,), (0.3,), (1.0,)),
    "kernel": tuple((width, penalty) for width in (0.3, 1.0, 3.0) for penalty in (0.1, 0.3, 1.0)),
    "mlp": ((512, 0.3),),
}
LANDMARKS = 2000  # pairs that a kernel compares with
BLOCK = 4096  # rows mapped at a time
JUDGED = 1024  # queries compared at a time
EPOCHS, BATCH, RATE, DECAY = 30, 128, 1e-3, 0.01  # of the mlp
INNER = 0.75  # share of the classes that the choice fits on
TIE = 0.98  # of the best MAP@R: from this share on the simpler kind is taken
MOST_CHOICE = 4000  # pairs that the choice fits on, and judges by


class Bridge(NamedTuple):
    """The map of old embeddings; settings as in `KINDS`."""

    kind: str
    settings: tuple[float, ...]
    apply: Map

    def __call__(self, rows: NDArray[np.floating]) -> Floats:
        """(n, D_old) to (n, D_new) of length 1."""
        parts = [
            unit(self.apply(np.asarray(rows[i : i + BLOCK], np.float64)), "bridged rows")
            for i in range(0, len(rows), BLOCK)
        ]
        return np.concatenate(parts) if parts else unit(self.apply(np.zeros((0, rows.shape[1]))))


class Choice(NamedTuple):
    """The chosen bridge, fitted on all pairs; of every kind the best quality, and the settings that have it."""

    bridge: Bridge
    tried: dict[str, float]
    best: dict[str, tuple[float, ...]]


def fit(kind: str, settings: Sequence[float], old: Floats, new: Floats, seed: int = 0) -> Bridge:
    """A bridge by pairs (n, D_old) and (n, D_new) of unit embeddings."""
    checks.one_of("kind", kind, KINDS)
    if len(old) != len(new):
        raise ValueError(f"a bridge needs as many old as new embeddings, got {len(old)} and {len(new)}")
    x, y = np.asarray(old, np.float64), np.asarray(new, np.float64)
    return Bridge(kind, tuple(settings), _FITS[kind](x, y, tuple(settings), seed))


def choose(old: Floats, new: Floats, classes: NDArray[np.int64], labelled: bool = True, seed: int = 0) -> Choice:
    """The best kind and settings on a quarter of the classes, fitted on the others; then fitted again on all.

    labelled: the classes are labels; otherwise every item is its own class, and must be found by itself.
    """
    draw = np.random.default_rng([seed, 1])
    order = draw.permutation(np.unique(classes))
    inside = of_share(classes, order, lambda count: int(count * INNER))
    fitted, judged = (draw.permutation(np.flatnonzero(part))[:MOST_CHOICE] for part in (inside, ~inside))
    kinds = {kind: KINDS[kind] for kind in KINDS if kind != "identity" or old.shape[1] == new.shape[1]}
    tried = dict.fromkeys(kinds, -1.0)
    best: dict[str, tuple[float, ...]] = {}
    for kind, several in kinds.items():
        for settings in several:
            mapped = fit(kind, settings, old[fitted], new[fitted], seed)(old[judged])
            value = quality(new[judged], mapped, classes[judged] if labelled else None)["map@r"]
            if value > tried[kind]:
                tried[kind], best[kind] = value, settings
    kind = next(kind for kind in kinds if tried[kind] >= TIE * max(tried.values()))
    return Choice(fit(kind, best[kind], old, new, seed), tried, best)


def of_share(classes: NDArray[np.int64], order: NDArray[np.int64], share: Callable[[int], int]) -> NDArray[np.bool_]:
    """The items of the first classes in this order: so many of those with several items, which can be judged by one
    another, and so many of the others."""
    several = np.bincount(classes)[order] > 1
    chosen = [part[: max(1, share(len(part)))] for part in (order[several], order[~several])]
    return np.isin(classes, np.concatenate(chosen))


def quality(queries: Floats, rows: Floats, classes: NDArray[np.int64] | None) -> dict[str, float]:
    """The means of `per_query`."""
    first, precision, _ = per_query(queries, rows, classes)
    return {"recall@1": float(np.mean(first)) if len(first) else 0.0, "map@r": float(np.mean(precision or [0.0]))}


def per_query(
    queries: Floats, rows: Floats, classes: NDArray[np.int64] | None
) -> tuple[list[float], list[float], list[int]]:
    """Recall@1 and MAP@R of each query (n, D) among rows (n, D) of the same items, without the own one; and its place.

    Queries without another item of their class are left out. classes None: of finding the own row instead, and MAP@R is
    1 over its place.
    """
    own = np.arange(len(queries))
    sizes = np.ones(len(own), np.int64) if classes is None else np.bincount(classes)[classes] - 1
    first: list[float] = []
    precision: list[float] = []
    for i in range(0, len(queries), JUDGED):
        near = queries[i : i + JUDGED] @ rows.T
        at = own[i : i + len(near)]
        if classes is None:
            place = (near > near[np.arange(len(at)), at][:, None]).sum(1)
            first += (place == 0).astype(float).tolist()
            precision += (1 / (1 + place)).tolist()
            continue
        near[np.arange(len(at)), at] = -np.inf
        size = sizes[at]
        most = max(1, int(size.max()))
        top = np.argsort(-near, axis=1, kind="stable")[:, :most]
        hit = (classes[top] == classes[at][:, None]) & (np.arange(most) < size[:, None])
        values = (hit * hit.cumsum(1) / np.arange(1, most + 1)).sum(1) / np.maximum(size, 1)
        first += hit[size > 0, 0].astype(float).tolist()
        precision += values[size > 0].tolist()
    return first, precision, own[sizes > 0].tolist()


# --- the kinds


def _identity(x: Wide, y: Wide, settings: tuple[float, ...], seed: int) -> Map:
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"identity needs embeddings of one length, got {x.shape[1]} and {y.shape[1]}")
    return lambda rows: rows


def _whitening(rows: Wide, penalty: float) -> tuple[Wide, Wide]:
    """W and its inverse for centred rows; small variances are raised by a share of the mean one."""
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    root = np.sqrt(np.maximum(values, 0) + penalty * values.mean() + 1e-12)
    return vectors / root @ vectors.T, vectors * root @ vectors.T


def _procrustes(x: Wide, y: Wide, settings: tuple[float, ...], seed: int) -> Map:
    mean_x, mean_y = x.mean(0), y.mean(0)
    into, _ = _whitening(x - mean_x, settings[0])
    from_y, back = _whitening(y - mean_y, settings[0])
    left, _, right = np.linalg.svd(((x - mean_x) @ into).T @ ((y - mean_y) @ from_y), full_matrices=False)
    matrix = into @ left @ right @ back
    return lambda rows: mean_y + (rows - mean_x) @ matrix


def _ridge(x: Wide, y: Wide, settings: tuple[float, ...], seed: int) -> Map:
    mean_x, mean_y = x.mean(0), y.mean(0)
    gram = (x - mean_x).T @ (x - mean_x)
    penalty = settings[0] * np.trace(gram) / len(gram) + 1e-12
    matrix = np.linalg.solve(gram + penalty * np.eye(len(gram)), (x - mean_x).T @ (y - mean_y))
    return lambda rows: mean_y + (rows - mean_x) @ matrix


def _gaussian(rows: Wide, landmarks: Wide, factor: float) -> Wide:
    square = (rows**2).sum(1)[:, None] + (landmarks**2).sum(1) - 2 * rows @ landmarks.T
    return np.asarray(np.exp(-factor * np.maximum(square, 0)))


def _kernel(x: Wide, y: Wide, settings: tuple[float, ...], seed: int) -> Map:
    """Nyström: as many weights as landmarks. The width is relative to the median distance of two rows."""
    draw = np.random.default_rng([seed, 2])
    landmarks, mean_y = x[np.sort(draw.permutation(len(x))[:LANDMARKS])], y.mean(0)
    some = landmarks[:500]
    square = 2 - 2 * (some @ some.T)[np.triu_indices(len(some), 1)]
    factor = settings[0] / max(float(np.median(square)), 1e-9)
    features = _gaussian(x, landmarks, factor)
    penalty = settings[1] * len(x) / len(landmarks) * _gaussian(landmarks, landmarks, factor)
    system = features.T @ features + penalty + 1e-6 * np.eye(len(landmarks))
    weights = np.linalg.solve(system, features.T @ (y - mean_y))
    return lambda rows: mean_y + _gaussian(rows, landmarks, factor) @ weights


def _mlp(x: Wide, y: Wide, settings: tuple[float, ...], seed: int) -> Map:
    """Adds to the prediction of a ridge; a pure function of the pairs, the seed and the settings."""
    hidden, drop = int(settings[0]), settings[1]
    base, mean, spread = _ridge(x, y, (0.1,), seed), x.mean(0), float(x.std()) + 1e-12
    noise = torch.Generator().manual_seed(seed)
    layers = [
        torch.randn(x.shape[1], hidden, generator=noise) / x.shape[1] ** 0.5,
        torch.zeros(hidden),
        torch.zeros(hidden, y.shape[1]),
        torch.zeros(y.shape[1]),
    ]
    inputs, targets, start = (torch.from_numpy(rows).float() for rows in ((x - mean) / spread, y, base(x)))
    for layer in layers:
        layer.requires_grad_()
    optimizer = torch.optim.AdamW(layers, RATE, weight_decay=DECAY)
    batches = -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * batches)
    with torch.enable_grad():
        for _ in range(EPOCHS):
            for part in torch.split(torch.randperm(len(x), generator=noise), BATCH):
                inner = torch.nn.functional.gelu(inputs[part] @ layers[0] + layers[1])
                inner = inner * (torch.rand(inner.shape, generator=noise) >= drop) / (1 - drop)
                mapped = torch.nn.functional.normalize(start[part] + inner @ layers[2] + layers[3], dim=1)
                optimizer.zero_grad()
                torch.autograd.backward((1 - (mapped * targets[part]).sum(1)).mean())
                optimizer.step()
                schedule.step()
    first, bias, second, shift = (layer.detach() for layer in layers)

    def apply(rows: Wide) -> Wide:
        inner = torch.nn.functional.gelu(torch.from_numpy((rows - mean) / spread).float() @ first + bias)
        return np.asarray(base(rows) + (inner @ second + shift).double().numpy())

    return apply


_FITS: dict[str, Callable[[Wide, Wide, tuple[float, ...], int], Map]] = {
    "identity": _identity,
    "procrustes": _procrustes,
    "ridge": _ridge,
    "kernel": _kernel,
    "mlp": _mlp,
}
