"""Which pairs and triplets a loss uses: pure functions of a distance matrix and a relation.

Each takes `distance` (B, R), Euclidean, larger is farther, and a `Relation`, and returns indices of fixed shape with a
validity mask: no B³ tensor, no loop over anchors, and no value is read back from the device. Ties go to
the lowest index. Any callable of the same form serves as a loss's `selection=`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nearkin.core import checks, distances, reduce, sphere
from nearkin.core.relations import Relation

__all__ = [
    "Pairs",
    "Triplets",
    "all_pairs",
    "as_pairs",
    "batch_hard",
    "distance_weighted",
    "easy_positive",
    "hard",
    "hard_negatives",
    "multi_similarity",
    "pick",
    "random",
    "random_semihard",
    "select",
    "semihard",
]


def __dir__() -> list[str]:
    return __all__


class Triplets(NamedTuple):
    """T triplets per anchor: columns of its positive and its negative, (B, T), and which of them are real."""

    positive: Tensor
    negative: Tensor
    valid: Tensor

    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Anchor, positive and negative of the valid triplets, each (M,). Waits for the device: for use by hand."""
        anchor, slot = self.valid.nonzero(as_tuple=True)
        return anchor, self.positive[anchor, slot], self.negative[anchor, slot]


class Pairs(NamedTuple):
    """Chosen positive and negative pairs: (B, R) masks."""

    positive: Tensor
    negative: Tensor


Selection: TypeAlias = str | Callable[[Tensor, Relation], Triplets | Pairs]
_MOST_FITTED = 4096  # dimensions, where the length of the vectors is not known
FALLBACKS = ("farthest", "hardest", "skip")  # what replaces a semi-hard negative where there is none


def all_pairs(distance: Tensor, relation: Relation) -> Pairs:
    """Every pair: the selection "all". A triplet loss sums all triplets of these by itself, without listing them."""
    return Pairs(relation.positive, relation.negative)


def hard(distance: Tensor, relation: Relation) -> Triplets:
    """Every positive with the nearest negative of its anchor."""
    index = reduce.argmax(-distance.detach(), relation.negative)
    return _every_positive(distance, index[:, None].expand_as(distance), relation)


def semihard(distance: Tensor, relation: Relation, *, fallback: str = "farthest") -> Triplets:
    """Every positive with the nearest negative that is strictly farther than it (Schroff et al. 2015, section 3.2).

    Where there is none: `fallback` = "farthest" takes the farthest negative, the least hard one, as TensorFlow does;
    "hardest" the nearest, so that every pair costs; "skip" leaves the pair out, as the FaceNet code does. By name:
    "semihard", "semihard_or_hardest" and "semihard_or_skip".
    """
    checks.one_of("fallback", fallback, FALLBACKS)
    distance = distance.detach().contiguous()
    near_first, order, number = _near_first(distance, relation)
    position = torch.searchsorted(near_first, distance, right=True)  # the first that is strictly farther
    valid = position < number
    if fallback != "skip":
        other = _farthest(near_first, number) if fallback == "farthest" else torch.zeros_like(number)
        position = torch.where(valid, position, other)
        valid = number > 0
    chosen = order.gather(1, position.clamp(max=max(distance.shape[1] - 1, 0)))
    return Triplets(_columns(distance), chosen, relation.positive & valid)


def batch_hard(distance: Tensor, relation: Relation) -> Triplets:
    """One triplet per anchor: its farthest positive and its nearest negative (Hermans et al. 2017, eq. 5)."""
    distance = distance.detach()
    positive = reduce.argmax(distance, relation.positive)
    negative = reduce.argmax(-distance, relation.negative)
    return Triplets(positive[:, None], negative[:, None], _has_both(relation))


def easy_positive(
    distance: Tensor, relation: Relation, *, negative: str = "semihard", fallback: str = "farthest"
) -> Triplets:
    """One triplet per anchor: its nearest positive, and the "semihard" or "hard" negative of that pair.

    `fallback` as in `semihard`. Xuan, Stylianou, Pless 2020, arXiv:1904.04370.
    """
    checks.one_of("negative", negative, ("semihard", "hard"))
    checks.one_of("fallback", fallback, FALLBACKS)
    distance = distance.detach()
    positive = reduce.argmax(-distance, relation.positive)[:, None]
    if negative == "semihard":
        return _semihard_of(distance, relation, positive, reduce.any_in_row(relation.positive, keepdim=True), fallback)
    chosen = reduce.argmax(-distance, relation.negative)
    return Triplets(positive, chosen[:, None], _has_both(relation))


def random(distance: Tensor, relation: Relation, *, generator: torch.Generator | None = None) -> Triplets:
    """Every positive with a negative of its own, drawn uniformly."""
    number = relation.negative.sum(1, keepdim=True)
    negatives_first = relation.negative.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    draw = torch.rand(distance.shape, generator=generator, device=distance.device, dtype=distances.wide(distance))
    position = torch.minimum((draw * number).long(), (number - 1).clamp(min=0))
    return _every_positive(distance, negatives_first.gather(1, position), relation)


def random_semihard(
    distance: Tensor,
    relation: Relation,
    *,
    margin: float | None,
    squared: bool = False,
    generator: torch.Generator | None = None,
) -> Triplets:
    """Every positive with a negative of its own, drawn uniformly from the farther ones within the margin.

    These are d_ap < d_an < d_ap + margin, or with `squared` d_ap² < d_an² < d_ap² + margin. Where there are none, or
    without a margin, all negatives with d_an > d_ap; where there are none either, the farthest, as in `semihard`.
    By name a triplet or quadruplet loss gives its margin, on its own distance; a pair loss none.
    Schroff et al. 2015, section 3.2: its semi-hard negatives "lie inside the margin"; the draw is ours.
    """
    return _random_semihard(distance, relation, None, margin, squared, generator)


def distance_weighted(
    distance: Tensor,
    relation: Relation,
    *,
    dim: int | str | Tensor,
    clip: float = 0.5,
    cutoff: float | Tensor | None = 1.4,
    generator: torch.Generator | None = None,
) -> Triplets:
    r"""Every positive with a negative of its own, rare distances as often as common ones on a sphere of this `dim`.

    P(n | a) ∝ min(λ, 1/q(d_an)),  q(d) ∝ d^(dim-2) (1 - d²/4)^((dim-3)/2),  λ = 1/q(clip)

    q is the density of distances between uniform points of the unit sphere, so embeddings must be of unit length.
    dim="fitted" takes as many dimensions as these negatives fill, 1 / E cos² (`core/sphere.py`); a scalar tensor stays
    on its device.
    Negatives at `cutoff` or beyond, where the loss is 0, are left out (a number, or (B,) one per anchor; None keeps
    all); an anchor whose negatives are all beyond draws uniformly. Weights are normalised row by row in logarithms: one
    near-duplicate in the batch cannot starve the other rows. Wu et al. 2017, eq. 5; clip 0.5 and cutoff 1.4 from the
    authors' code.
    """
    checks.between("clip", clip, 0, 2)
    distance = distance.detach()
    dim = _sphere(dim, distance, relation)
    most = (2 - dim) * math.log(clip) - (dim - 3) / 2 * math.log(1 - clip**2 / 4)  # log λ
    log_weight = _log_inverse_density(distance, dim).clamp(max=most)
    near = relation.negative
    if cutoff is not None:
        limit = cutoff[:, None] if isinstance(cutoff, Tensor) else cutoff
        near = near & (distance < limit)
    none_near = ~reduce.any_in_row(near, keepdim=True)
    allowed = torch.where(none_near, relation.negative, near)
    log_weight = torch.where(none_near, 0.0, log_weight)
    return _every_positive(distance, _draw(log_weight, allowed, generator), relation)


def hard_negatives(distance: Tensor, relation: Relation) -> Pairs:
    """Every positive pair, and as many of the batch's closest negative pairs as there are positive ones."""
    flat = distance.detach().masked_fill(~relation.negative, torch.inf).flatten()
    order = flat.sort(stable=True).indices
    positions = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    chosen = (positions < relation.positive.sum()).view_as(distance)
    return Pairs(relation.positive, relation.negative & chosen)


def multi_similarity(distance: Tensor, relation: Relation, *, epsilon: float = 0.1) -> Pairs:
    """Negatives nearer than the farthest positive + ε, positives farther than the nearest negative - ε.

    An anchor without positives keeps no negative, and the other way round. Wang et al. 2019, eq. 11 and 12, with
    distance = 1 - similarity; ε = 0.1 from its section 4.
    """
    distance = distance.detach()
    farthest, nearest = reduce.highest(distance, relation.positive), -reduce.highest(-distance, relation.negative)
    negative = relation.negative & (distance < farthest[:, None] + epsilon)
    positive = relation.positive & (distance > nearest[:, None] - epsilon)
    return Pairs(positive, negative)


_SEMIHARD = {"semihard": "farthest", "semihard_or_hardest": "hardest", "semihard_or_skip": "skip"}
_PLAIN: dict[str, Callable[[Tensor, Relation], Triplets | Pairs]] = {
    "all": all_pairs,
    "hard": hard,
    **{name: partial(semihard, fallback=fallback) for name, fallback in _SEMIHARD.items()},
    "batch_hard": batch_hard,
    "easy_positive": easy_positive,
    "hard_negatives": hard_negatives,
    "multi_similarity": multi_similarity,
}
DRAWN = ("random", "random_semihard", "distance_weighted")
TRIPLET_SELECTIONS = ("hard", *_SEMIHARD, "batch_hard", "easy_positive", *DRAWN)
PER_POSITIVE = ("hard", *_SEMIHARD, *DRAWN)  # a triplet for each positive of an anchor
PAIR_SELECTIONS = ("hard_negatives", "multi_similarity")


def check_generator(selection: Selection, generator: torch.Generator | None) -> None:
    """Refuses a generator that nothing would be drawn from."""
    if generator is not None and not (isinstance(selection, str) and selection in DRAWN):
        names = ", ".join(f'"{name}"' for name in DRAWN[:-1]) + f' or "{DRAWN[-1]}"'
        raise ValueError(f"generator must be left out unless selection is {names}, which draw, got a torch.Generator")


def select(
    selection: Selection,
    distance: Tensor,
    relation: Relation,
    *,
    dim: int | Tensor,
    cutoff: float | Tensor | None = 1.4,
    margin: float | None = None,
    squared: bool = False,
    generator: torch.Generator | None = None,
    max_positives: int | None = None,
) -> Triplets | Pairs:
    """Applies a selection, by name with those of the arguments that it needs, or as a callable.

    An anchor's triplets are as many as its positives, where these are few, instead of one per column: on the CPU, which
    counts them, and elsewhere where the caller knows that there are at most `max_positives`.
    """
    if not isinstance(selection, str):
        return selection(distance, relation)
    checks.one_of("selection", selection, ("all", *TRIPLET_SELECTIONS, *PAIR_SELECTIONS))
    few = _few(relation.positive, max_positives) if selection in PER_POSITIVE else None
    if selection in _SEMIHARD and few is not None:
        return _semihard_of(distance.detach(), relation, *few, _SEMIHARD[selection])
    if selection == "random_semihard":
        return _random_semihard(distance, relation, few, margin, squared, generator)
    if selection == "distance_weighted":
        chosen: Triplets | Pairs = distance_weighted(distance, relation, dim=dim, cutoff=cutoff, generator=generator)
    elif selection == "random":
        chosen = random(distance, relation, generator=generator)
    else:
        chosen = _PLAIN[selection](distance, relation)
    if few is None or isinstance(chosen, Pairs):
        return chosen
    columns, valid = few
    return Triplets(columns, chosen.negative.gather(1, columns), valid & chosen.valid.gather(1, columns))


def pick(matrix: Tensor, columns: Tensor) -> Tensor:
    """Entries of (B, R) at (B, T) columns; zeros where R is 0."""
    return matrix.gather(1, columns) if matrix.shape[1] else matrix.sum(1, keepdim=True).expand(columns.shape)


def as_pairs(chosen: Triplets | Pairs, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a pair loss sums over: entries and mask of the chosen positives, then of the chosen negatives."""
    if isinstance(chosen, Pairs):
        return matrix, chosen.positive, matrix, chosen.negative
    return pick(matrix, chosen.positive), chosen.valid, pick(matrix, chosen.negative), chosen.valid


def _columns(distance: Tensor) -> Tensor:
    return torch.arange(distance.shape[1], device=distance.device).expand_as(distance)


def _has_both(relation: Relation) -> Tensor:
    return (reduce.any_in_row(relation.positive) & reduce.any_in_row(relation.negative))[:, None]


@torch.no_grad()
def _few(positive: Tensor, at_most: int | None) -> tuple[Tensor, Tensor] | None:
    """Columns of each anchor's positives, (B, T), and which of them are real, where they are few; None elsewhere.

    T is read from the tensor where that costs no synchronisation; elsewhere it is `at_most`, if given.
    """
    if positive.numel() == 0:
        return None
    if not distances.freely_read(positive):
        if at_most is None:
            return None
        before = torch.arange(positive.shape[1], 0, -1, device=positive.device, dtype=torch.int32)
        first, columns = (positive * before).topk(min(at_most, positive.shape[1]), dim=1)  # those of a row in order
        return columns, first > 0
    number = reduce.count_in_row(positive)
    most = int(number.max())
    if not 0 < most * 8 <= min(positive.shape[1], 128):
        return None
    row, column = positive.nonzero(as_tuple=True)
    slot = torch.arange(len(row)) - (number.cumsum(0) - number)[row]
    columns = torch.zeros(len(number), most, dtype=torch.long).index_put_((row, slot), column)
    return columns, torch.arange(most) < number[:, None]


def _semihard_of(distance: Tensor, relation: Relation, positive: Tensor, valid: Tensor, fallback: str) -> Triplets:
    """`semihard` without sorting: a pass over the row for each of an anchor's few positives, (B, T)."""
    nearest, farther = [], []
    for column in torch.split(positive, 1, 1):
        beyond = relation.negative & (distance > pick(distance, column))
        nearest.append(reduce.argmax(-distance, beyond))
        farther.append(reduce.any_in_row(beyond))
    chosen, semihard = torch.stack(nearest, 1), torch.stack(farther, 1)
    if fallback == "skip":
        return Triplets(positive, chosen, valid & semihard)
    other = reduce.argmax(distance if fallback == "farthest" else -distance, relation.negative)
    chosen = torch.where(semihard, chosen, other[:, None])
    return Triplets(positive, chosen, valid & reduce.any_in_row(relation.negative, keepdim=True))


def _random_semihard(
    distance: Tensor,
    relation: Relation,
    few: tuple[Tensor, Tensor] | None,
    margin: float | None,
    squared: bool,
    generator: torch.Generator | None,
) -> Triplets:
    """`random_semihard` of an anchor's few positives, or of all columns: equal draws in both forms."""
    distance = distance.detach().to(torch.promote_types(distance.dtype, torch.float32)).contiguous()
    near_first, order, number = _near_first(distance, relation)
    draw = torch.rand(distance.shape, generator=generator, device=distance.device, dtype=distances.wide(distance))
    positive, valid = few or (_columns(distance), relation.positive)
    if few is not None:
        distance, draw = distance.gather(1, positive), draw.gather(1, positive)  # (B, T) each
    start = torch.searchsorted(near_first, distance, right=True)  # the first that is strictly farther
    stop = number
    if margin is not None:
        checks.at_least("margin", margin, 0)
        reach = (distance.square() + margin).sqrt() if squared else distance + margin
        inside = torch.searchsorted(near_first, reach)
        stop = torch.where(inside > start, inside, number)
    none_farther, farthest = start >= number, _farthest(near_first, number)
    start, stop = torch.where(none_farther, farthest, start), torch.where(none_farther, farthest + 1, stop)
    position = torch.minimum(start + (draw * (stop - start)).long(), stop - 1)
    chosen = order.gather(1, position.clamp(max=max(near_first.shape[1] - 1, 0)))  # NaN is beyond all places
    return Triplets(positive, chosen, valid & (number > 0))


def _near_first(distance: Tensor, relation: Relation) -> tuple[Tensor, Tensor, Tensor]:
    """Distances of each anchor's negatives in ascending order, infinite beyond them; their columns; their number."""
    near_first, order = distance.masked_fill(~relation.negative, torch.inf).sort(dim=1, stable=True)  # (B, R) each
    return near_first, order, relation.negative.sum(1, keepdim=True)


def _farthest(near_first: Tensor, number: Tensor) -> Tensor:
    """The place of the farthest negative, (B, 1), of equals the first."""
    return torch.searchsorted(near_first, pick(near_first, (number - 1).clamp(min=0)))


def _every_positive(distance: Tensor, negative: Tensor, relation: Relation) -> Triplets:
    return Triplets(_columns(distance), negative, relation.positive & reduce.any_in_row(relation.negative)[:, None])


def _sphere(dim: int | str | Tensor, distance: Tensor, relation: Relation) -> int | Tensor:
    """The dimensions of the sphere: a number, or a scalar tensor in the type of the weights."""
    if isinstance(dim, str):
        checks.one_of("dim", dim, ("fitted",))
        cosine = 1 - distance.to(torch.promote_types(distance.dtype, torch.float32)).square() / 2
        mean, _ = sphere.mean_squared_cosine(cosine, relation.negative)
        return sphere.filled_dim(mean, _MOST_FITTED)
    if isinstance(dim, Tensor):
        return dim.detach().to(torch.promote_types(distance.dtype, torch.float32))
    checks.integer("dim", dim, 2)
    return dim


def _log_inverse_density(distance: Tensor, dim: int | Tensor) -> Tensor:
    """-log q(d) up to a constant; finite at d = 0 and d >= 2, where the caller's clip takes over."""
    distance = distance.to(torch.promote_types(distance.dtype, torch.float32))  # 1e-12 is 0 in half precision
    near = distance.clamp(min=1e-12).log_().mul_(2 - dim)
    if isinstance(dim, Tensor):
        return near.sub_((1 - distance.square() / 4).clamp_(min=1e-12).log_().mul_((dim - 3) / 2))
    return near.sub_((1 - distance.square() / 4).clamp_(min=1e-12).log_(), alpha=(dim - 3) / 2)


def _draw(log_weight: Tensor, allowed: Tensor, generator: torch.Generator | None) -> Tensor:
    """(B, R) columns drawn independently, each row from its own weights, by inverting the row's cumulative sum."""
    if log_weight.shape[1] == 0:
        return torch.zeros_like(log_weight, dtype=torch.long)
    masked = log_weight.masked_fill(~allowed, -torch.inf)
    top = masked.amax(1, keepdim=True)
    shifted = masked.sub_(torch.where(top == -torch.inf, 0.0, top)).exp_()
    mass = shifted.cumsum(1, dtype=distances.wide(shifted))  # (B, R), ends at the row's total
    del masked, shifted
    total = mass[:, -1:].contiguous()
    level = torch.rand(mass.shape, generator=generator, device=mass.device, dtype=mass.dtype).mul_(total)
    # The first column whose cumulative mass exceeds the level has mass itself; rounding may not step past the last.
    last = torch.searchsorted(mass, total, out_int32=True)
    position = torch.searchsorted(mass, level, right=True, out_int32=True)
    del mass, level
    return torch.minimum(position, last).clamp_(max=log_weight.shape[1] - 1).long()
