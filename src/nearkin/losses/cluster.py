"""Facility location: the best clustering of the batch should be the true one."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin import kernels
from nearkin.core import checks, distances, facility, facility_cpu, reduce
from nearkin.core.autograd import refuse_transforms
from nearkin.core.relations import UNKNOWN
from nearkin.kernels import facility_ops
from nearkin.losses.settings import Loss, Range, setting

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
    impl: str = "auto",
) -> Tensor:
    r"""The clustering that scores best must not beat the true one.

    L = [ max_S ( F(S) + γ (1 - NMI(g(S), y)) ) - F~ ]_+,   F(S) = -Σ_i min_{j in S} D_ij,
    F~ = Σ_classes max_j -Σ_{i in class} D_ij,   |S| = number of classes in the batch,   g(S): nearest medoid

    labels (B,) class ids, -1 left out. D: Euclidean distance of unit vectors. S comes from `facility_location`; as in
    the paper it is constant, so the gradient flows through the distances alone. The sum is not divided by B: γ is
    read against it. impl: "triton", which "auto" takes on a GPU, searches in one kernel; the choice is the same.
    Needs a batch of several classes with several items each (`samplers.ClassRatio`).
    Song et al. 2017, arXiv:1612.01213, eq. 5-8, algorithms 1 and 2; 5 sweeps from TensorFlow's version.
    """
    return _solve(embeddings, labels, gamma, sweeps, num_clusters, normalize, impl)[0]


def _solve(
    embeddings: Tensor,
    labels: Tensor,
    gamma: float | Tensor,
    sweeps: int,
    num_clusters: int | None,
    normalize: bool,
    impl: str = "auto",
) -> tuple[Tensor, Clustering]:
    checks.rows("embeddings", embeddings)
    checks.class_ids("labels", labels, embeddings)
    if not isinstance(gamma, Tensor):
        checks.at_least("gamma", gamma, 0)
    distance = distances.euclidean(embeddings, normalize=normalize)  # (B, B)
    if isinstance(gamma, Tensor):
        gamma = gamma.to(distance.device, distance.dtype)  # a module that was not moved keeps its own on the CPU
    _check_search(sweeps, num_clusters, impl)
    if facility_kernel(impl, distance):
        value, values, indices, chosen = facility_ops.loss(distance, labels, gamma, sweeps, num_clusters)
        return value + reduce.taint(embeddings), Clustering(chosen, indices[0], values[1], values[2])
    with torch.no_grad():
        clustering = facility_location(
            distance, labels, gamma=gamma, sweeps=sweeps, num_clusters=num_clusters, impl=impl
        )
    return _bracket(distance, labels, clustering, gamma) + reduce.taint(embeddings), clustering


def _check_search(sweeps: int, num_clusters: int | None, impl: str) -> None:
    checks.integer("sweeps", sweeps, 0)
    kernels.check(impl)
    if num_clusters is not None:
        checks.integer("num_clusters", num_clusters, 1)


def _bracket(distance: Tensor, labels: Tensor, clustering: Clustering, gamma: float | Tensor) -> Tensor:
    known = labels != UNKNOWN
    if distance.shape[0] == 0:
        return distance.sum()
    same = (labels[:, None] == labels[None, :]) & known[:, None] & known[None, :]
    with torch.no_grad():  # the member that is nearest to its whole class, of equals the first
        cost = torch.where(same, distance, 0.0).sum(1, dtype=distances.wide(distance))
        costs = torch.where(same, cost, torch.inf)
        near = costs.amin(1, keepdim=True) + len(cost) * facility.step(distance)
        medoid = (same & (costs <= near)).to(torch.uint8).argmax(1)
    guessed = torch.where(known, distance.gather(1, clustering.assignment[:, None]).squeeze(1), 0.0).sum()
    true = torch.where(known, distance.gather(1, medoid[:, None]).squeeze(1), 0.0).sum()
    return (gamma * clustering.disagreement - guessed + true).relu()


def facility_location(
    distance: Tensor,
    labels: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    sweeps: int = 5,
    num_clusters: int | None = None,
    impl: str = "auto",
) -> Clustering:
    """Loss-augmented inference: medoids S of large F(S) + γ (1 - NMI), |S| = number of classes.

    Greedy (algorithm 1), then `sweeps` rounds in which each medoid may change places with any other item, scored with
    the whole objective and taken only when better, so the best so far wins; of equals, B · 2⁻³¹ of the largest distance
    apart or less, the first. One step scores every candidate at once in O(B²). On a GPU one kernel does it all, up to
    4,096 items. Else ("torch" there) nothing may be read, so without `num_clusters` B steps run; those beyond the
    number of classes change nothing.
    """
    _check_search(sweeps, num_clusters, impl)
    size = distance.shape[0]
    if size == 0:
        return Clustering(labels != UNKNOWN, labels.long(), distance.sum(), distance.sum())
    if facility_kernel(impl, distance):
        values, (owner, _), chosen = facility_ops.solve(distance, labels, gamma, sweeps, num_clusters)
        return _clustering(distance, labels, chosen, owner, gamma, values[2])
    with torch.no_grad():
        task = facility.problem(distance, labels, num_clusters)
        weight = torch.ones_like(task.unit) * gamma  # wherever γ is, no device is waited for
        if distance.device.type == "cpu" and checks.reads_values(labels):
            near = facility_cpu.search(task, weight, sweeps)
        else:
            near = facility.search(task, weight, sweeps, size if num_clusters is None else min(num_clusters, size))
        owner = near & (2**task.bits - 1)
        chosen = (owner == torch.arange(size, device=owner.device)) & (near < facility.FAR)
        disagreement = facility.disagreement(task, owner).to(distance.dtype)
    return _clustering(distance, labels, chosen, owner, gamma, disagreement)


def _clustering(
    distance: Tensor, labels: Tensor, chosen: Tensor, owner: Tensor, gamma: float | Tensor, disagreement: Tensor
) -> Clustering:
    cost = torch.where(labels != UNKNOWN, distance.gather(1, owner[:, None]).squeeze(1), 0.0).sum()
    return Clustering(chosen, owner, gamma * disagreement - cost, disagreement)


class FacilityLocationLoss(LossModule, function=facility_location_loss):
    """`facility_location_loss` with γ that decays as training goes on.

    γ_t = gamma · decay^(t / decay_steps), t the training steps so far (a buffer, so a checkpoint carries it). The paper
    decays γ exponentially at 0.94 and does not say how often; here it is every 1,000 steps. After a call `medoids`
    (B,) bool and `assignment` (B,), each item's medoid, show the clustering of the last batch.
    """

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
        impl: str = "auto",
    ) -> None:
        super().__init__()
        self.gamma, self.sweeps, self.decay, self.decay_steps = gamma, sweeps, decay, decay_steps
        self.num_clusters, self.normalize, self.impl = num_clusters, normalize, impl
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.medoids: Tensor | None = None
        self.assignment: Tensor | None = None
        self.finish_init()

    def check_settings(self) -> None:
        checks.at_least("gamma", self._gamma, 0)
        checks.positive("decay", self.decay)
        checks.integer("decay_steps", self.decay_steps, 1)
        super().check_settings()

    @property
    def gamma(self) -> Tensor:
        """The present weight of the clustering margin. Setting it changes that of the first step."""
        rate = math.log(self.decay) / self.decay_steps
        return self._gamma * (rate * self.steps.to(distances.wide(self.steps))).exp()

    @gamma.setter
    def gamma(self, start: float) -> None:
        self._gamma = start

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        refuse_transforms("FacilityLocationLoss", "searches step by step", "call it in a loop")
        value, clustering = _solve(embeddings, labels, self.gamma, **self.arguments())
        self.medoids, self.assignment = clustering.chosen, clustering.assignment
        if self.training:
            self.steps = self.steps + 1
        return value
