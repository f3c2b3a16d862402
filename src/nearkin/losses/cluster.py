"""Facility location: the best clustering of the batch should be the true one."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearkin.core import checks, distances, reduce
from nearkin.core.relations import UNKNOWN
from nearkin.losses.settings import hold, show

__all__ = ["FacilityLocationLoss", "facility_location", "facility_location_loss"]


class Clustering(NamedTuple):
    """Where loss-augmented inference ended: chosen items (B,) bool, each item's medoid (B,), score and 1 - NMI."""

    chosen: Tensor
    assignment: Tensor
    score: Tensor
    disagreement: Tensor


def facility_location_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    sweeps: int = 5,
    num_clusters: int | None = None,
    normalize: bool = True,
) -> Tensor:
    r"""The clustering that scores best must not beat the true one.

    L = [ max_S ( F(S) + γ (1 - NMI(g(S), y)) ) - F~ ]_+,   F(S) = -Σ_i min_{j in S} D_ij,
    F~ = Σ_classes max_j -Σ_{i in class} D_ij,   |S| = number of classes in the batch,   g(S): nearest medoid

    labels (B,) class ids, -1 left out. D: Euclidean distance of unit vectors. S comes from `facility_location`; as in
    the paper it is held fixed, so the gradient flows through the distances alone. The sum is not divided by B: γ is
    read against it. Needs a batch of several classes with several items each (`samplers.ClassRatio`).
    Song et al. 2017, arXiv:1612.01213, eq. 5-8, algorithms 1 and 2; 5 sweeps from TensorFlow's version.
    """
    return _solve(embeddings, labels, gamma, sweeps, num_clusters, normalize)[0]


def _solve(
    embeddings: Tensor, labels: Tensor, gamma: float | Tensor, sweeps: int, num_clusters: int | None, normalize: bool
) -> tuple[Tensor, Clustering]:
    checks.rows("embeddings", embeddings)
    checks.class_ids("labels", labels, embeddings)
    if not isinstance(gamma, Tensor):
        checks.at_least("gamma", gamma, 0)
    distance = distances.euclidean(embeddings, normalize=normalize)  # (B, B)
    if isinstance(gamma, Tensor):
        gamma = gamma.to(distance.dtype)
    with torch.no_grad():
        found = facility_location(distance, labels, gamma=gamma, sweeps=sweeps, num_clusters=num_clusters)
    return _bracket(distance, labels, found, gamma) + reduce.taint(embeddings), found


def _bracket(distance: Tensor, labels: Tensor, found: Clustering, gamma: float | Tensor) -> Tensor:
    known = labels != UNKNOWN
    if distance.shape[0] == 0:
        return distance.sum()
    same = (labels[:, None] == labels[None, :]) & known[:, None] & known[None, :]
    with torch.no_grad():  # the member that is nearest to its whole class
        cost = torch.where(same, distance, 0.0).sum(1)
        _, medoid = reduce.largest(-cost.expand_as(distance), same)
    guessed = torch.where(known, distance.gather(1, found.assignment[:, None]).squeeze(1), 0.0).sum()
    true = torch.where(known, distance.gather(1, medoid[:, None]).squeeze(1), 0.0).sum()
    return (gamma * found.disagreement - guessed + true).relu()


def facility_location(
    distance: Tensor,
    labels: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    sweeps: int = 5,
    num_clusters: int | None = None,
) -> Clustering:
    """Loss-augmented inference: medoids S of large F(S) + γ (1 - NMI), |S| = number of classes.

    Greedy (algorithm 1), then `sweeps` rounds in which each medoid may change places with any other item, scored with
    the whole objective and taken only when better, so the best seen is kept. One step scores every candidate at once in
    O(B²). On the CPU the number of classes is read off; elsewhere reading would stall the device, so without
    `num_clusters` (say it if it is constant) B steps run, of which those beyond the number of classes change nothing.
    """
    checks.whole("sweeps", sweeps, 0)
    size = distance.shape[0]
    known = labels != UNKNOWN
    first = _first_of_equals(labels)
    wanted = ((first == torch.arange(size, device=labels.device)) & known).sum()
    steps = size
    if num_clusters is not None:
        checks.whole("num_clusters", num_clusters, 1)
        wanted, steps = wanted.clamp(max=num_clusters), min(num_clusters, size)
    elif checks.reads_values(labels):
        steps = int(wanted)
    chosen = torch.zeros_like(known)
    picks = []
    for step in range(steps):
        score = _scores(distance, first, known, chosen, gamma)
        best = score.argmax()
        grows = step < wanted
        chosen = chosen | (torch.arange(size, device=chosen.device) == best) & grows
        picks.append(torch.where(grows, best, -1))
    for _ in range(sweeps):
        before = chosen
        for slot, pick in enumerate(picks):
            chosen, picks[slot] = _improve(distance, first, known, chosen, pick, gamma)
        if checks.reads_values(labels) and torch.equal(before, chosen):
            break
    return _describe(distance, first, known, chosen, gamma)


def _improve(
    distance: Tensor, first: Tensor, known: Tensor, chosen: Tensor, pick: Tensor, gamma: float | Tensor
) -> tuple[Tensor, Tensor]:
    """One medoid changes places with the item that scores best in its stead."""
    index = torch.arange(chosen.shape[0], device=chosen.device)
    without = chosen & (index != pick)
    score = _scores(distance, first, known, without, gamma)
    current = pick.clamp(min=0)
    best = score.argmax()
    better = score.gather(0, best[None]) > score.gather(0, current[None])
    best = torch.where(better.squeeze(0), best, current)
    moved = without | (index == best)
    idle = pick < 0
    return torch.where(idle, chosen, moved), torch.where(idle, pick, best)


def _scores(distance: Tensor, first: Tensor, known: Tensor, chosen: Tensor, gamma: float | Tensor) -> Tensor:
    """F + γ (1 - NMI) after adding each item to the chosen ones, (B,); -inf for what cannot be added.

    Row i of every (B, B) matrix below is the world in which i has been added. The items that move to i leave their old
    cells (cluster, class) and fill new ones; only sums of n log n over cells are needed, and those follow from the
    number of items that left each cell.
    """
    near, owner = _nearest(distance, chosen)
    itself = torch.eye(chosen.shape[0], dtype=torch.bool, device=chosen.device)
    index = torch.arange(chosen.shape[0], device=chosen.device)
    # Of two medoids equally near the first has the item, as in `_nearest`; a medoid always has itself.
    tied = (distance == near[None, :]) & (index[:, None] < owner[None, :]) & ~chosen[None, :]
    moves = ((distance < near[None, :]) | tied | itself) & known[None, :]  # (B candidates, B items)
    facility = -torch.where(moves, distance, near[None, :].expand_as(distance)).mul(known).sum(1)
    weight = moves.to(distance.dtype)
    cell = _first_of_equals(owner * chosen.shape[0] + first)
    stays = known.to(distance.dtype) * chosen.any()
    joint = _left(cell, stays, weight) + _entropy_sum(_pooled(first, weight))
    clusters = _left(owner, stays, weight) + _entropy_sum(weight.sum(1)[:, None])
    nmi = _nmi(joint, clusters, first, known)
    score = facility + gamma * (1 - nmi).to(facility.dtype)
    return score.masked_fill(chosen | ~known, -torch.inf)


def _left(group: Tensor, stays: Tensor, weight: Tensor) -> Tensor:
    """Σ n log n over groups after the movers of each row have left them, (B,)."""
    before = torch.zeros_like(stays).index_add_(0, group, stays)
    return _entropy_sum((before[None, :] - _pooled(group, weight * stays)).clamp(min=0))


def _pooled(group: Tensor, weight: Tensor) -> Tensor:
    """Row-wise sums of weight by group of the column, (B, B); counts, so exact in any order."""
    return torch.zeros_like(weight).index_add_(1, group, weight)


def _entropy_sum(count: Tensor) -> Tensor:
    """Σ n log n of each row, added up in float64 where the device has it: differences of these are small."""
    return torch.xlogy(count, count).sum(-1, dtype=distances.wide(count))


def _nmi(joint: Tensor, clusters: Tensor, first: Tensor, known: Tensor) -> Tensor:
    """I / sqrt(H H') from Σ n log n of cells and of clusters; 1 if both are one group, 0 if only one of them is."""
    ones = known.to(joint.dtype)
    number = ones.sum()
    classes = _entropy_sum(torch.zeros_like(ones).index_add_(0, first, ones))
    whole = _entropy_sum(number[None])
    shared = joint - clusters - classes + whole  # n times each quantity
    split = (whole - clusters).clamp(min=0) * (whole - classes).clamp(min=0)
    tiny = 1e-6 * whole  # a second group of one item in 100,000 is still far above this
    lone = (whole - clusters <= tiny) & (whole - classes <= tiny)
    defined = split > tiny**2
    nmi = torch.where(defined, shared, 0.0) / torch.where(defined, split, 1.0).sqrt()
    return torch.where(lone, 1.0, nmi.clamp(0, 1))


def _nearest(distance: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Distance to and index of the nearest chosen item, each (B,); a chosen item is its own."""
    far = torch.finfo(distance.dtype).max ** 0.5
    itself = torch.eye(chosen.shape[0], dtype=torch.bool, device=chosen.device)
    masked = distance.masked_fill(itself, -1.0).masked_fill(~chosen[None, :], far)
    near, owner = masked.min(1)
    return near.clamp(min=0), owner


def _first_of_equals(ids: Tensor) -> Tensor:
    """For each entry the index of the first entry equal to it: dense group names without a sort or a dictionary."""
    if ids.shape[0] == 0:
        return ids.long()
    return (ids[:, None] == ids[None, :]).to(torch.uint8).argmax(1)


def _describe(distance: Tensor, first: Tensor, known: Tensor, chosen: Tensor, gamma: float | Tensor) -> Clustering:
    if chosen.shape[0] == 0:
        return Clustering(chosen, chosen.long(), distance.sum(), distance.sum())
    near, owner = _nearest(distance, chosen)
    ones = known.to(distances.wide(distance))
    cell = _first_of_equals(owner * chosen.shape[0] + first)
    joint, clusters = (_entropy_sum(torch.zeros_like(ones).index_add_(0, group, ones)) for group in (cell, owner))
    disagreement = torch.where(known.any(), 1 - _nmi(joint, clusters, first, known), 0.0).to(distance.dtype)
    return Clustering(chosen, owner, gamma * disagreement - (near * known).sum(), disagreement)


class FacilityLocationLoss(nn.Module):
    """`facility_location_loss` with γ that decays as training goes on.

    γ_t = gamma · decay^(t / decay_steps), t the training steps so far (a buffer, so a checkpoint carries it). The paper
    decays γ exponentially at 0.94 and does not say how often; here it is every 1,000 steps. After a call `medoids`
    (B,) bool and `assignment` (B,), each item's medoid, show the clustering found in the last batch.
    """

    lr_scale = 1.0
    settings: dict[str, Any]
    steps: Tensor

    def __init__(
        self,
        gamma: float = 1.0,
        sweeps: int = 5,
        *,
        decay: float = 0.94,
        decay_steps: int = 1000,
        num_clusters: int | None = None,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        hold(self, facility_location_loss, sweeps=sweeps, num_clusters=num_clusters, normalize=normalize)
        checks.at_least("gamma", gamma, 0)
        checks.positive("decay", decay)
        checks.whole("decay_steps", decay_steps, 1)
        self.start, self.rate = gamma, math.log(decay) / decay_steps
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.medoids: Tensor | None = None
        self.assignment: Tensor | None = None

    extra_repr = show

    @property
    def gamma(self) -> Tensor:
        """The weight of the clustering margin now."""
        return self.start * (self.rate * self.steps.to(distances.wide(self.steps))).exp()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        value, found = _solve(embeddings, labels, self.gamma, **self.settings)
        self.medoids, self.assignment = found.chosen, found.assignment
        if self.training:
            self.steps = self.steps + 1
        return value
