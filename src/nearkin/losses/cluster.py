"""Facility location: the best clustering of the batch should be the true one."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import checks, devices, distances, facility, reduce
from nearkin.core.autograd import refuse_transforms
from nearkin.core.relations import UNKNOWN
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
) -> Tensor:
    r"""`FacilityLocationLoss` of a given γ."""
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
        gamma = gamma.to(distance.device, distance.dtype)  # a module that was not moved keeps its own on the CPU
    with torch.no_grad():
        clustering = facility_location(distance, labels, gamma=gamma, sweeps=sweeps, num_clusters=num_clusters)
    return _bracket(distance, labels, clustering, gamma) + reduce.taint(embeddings), clustering


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
) -> Clustering:
    """Loss-augmented inference: medoids S of large F(S) + γ (1 - NMI), |S| = number of classes.

    Greedy (algorithm 1), then `sweeps` rounds in which each medoid may change places with any other item, scored with
    the whole objective and taken only when better, so the best so far wins; of equals, B · 2⁻³¹ of the largest distance
    apart or less, the first. Runs on the host: distances on a GPU are waited for, and a CUDA graph cannot capture it.
    """
    refuse_transforms("facility_location", "searches step by step", "call it in a loop")
    checks.integer("sweeps", sweeps, 0)
    if num_clusters is not None:
        checks.integer("num_clusters", num_clusters, 1)
    if devices.is_capturing(distance):
        raise RuntimeError("facility_location searches on the host, so a CUDA graph cannot capture it; run it without")
    if distance.shape[0] == 0 or distance.is_meta:
        return Clustering(labels != UNKNOWN, labels.long(), distance.sum(), distance.sum())
    search: Any = facility.search
    if torch.compiler.is_compiling():
        search = torch._dynamo.disable(search)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        chosen, owner, disagreement = search(distance, labels, gamma, sweeps, num_clusters)
    cost = torch.where(labels != UNKNOWN, distance.gather(1, owner[:, None]).squeeze(1), 0.0).sum()
    return Clustering(chosen, owner, gamma * disagreement - cost, disagreement)


class FacilityLocationLoss(Loss):
    r"""The clustering that scores best must not beat the true one.

    L = [ max_S ( F(S) + γ (1 - NMI(g(S), y)) ) - F~ ]_+,   F(S) = -Σ_i min_{j in S} D_ij,
    F~ = Σ_classes max_j -Σ_{i in class} D_ij,   |S| = number of classes in the batch,   g(S): nearest medoid

    labels (B,) class ids, -1 left out. D: Euclidean distance of unit vectors. S comes from `facility_location`; as in
    the paper it is constant, so the gradient flows through the distances alone. The sum is not divided by B: γ is
    read against it. Its γ decays as training goes on, γ_t = gamma · decay^(t / decay_steps), t the training steps so
    far (a buffer, so a checkpoint carries it): `loss.gamma` is the present one, setting it changes that of the first
    step. The paper decays γ exponentially at 0.94 and does not say how often; here it is every 1,000 steps. After a
    call `medoids` (B,) bool and `assignment` (B,), each item's medoid, show the clustering of the last batch.
    The search runs on the host: a step on a GPU waits for the distances, and a CUDA graph cannot capture it.
    Needs a batch of several classes with several items each (`samplers.ClassRatio`).
    Song et al. 2017, arXiv:1612.01213, eq. 5-8, algorithms 1 and 2; 5 sweeps from TensorFlow's version.
    """

    compiles = False
    steps: Tensor

    gamma: float = setting(
        default=1.0,
        at_least=0,
        kw_only=False,
        now=lambda loss: loss.present_gamma(),
        search=Range(0.05, 5.0, log=True),
        text="γ, the weight of 1 - NMI at the first step; 1: ours",
    )
    sweeps: int = setting(
        default=5,
        rule=lambda name, value: checks.integer(name, value, 0),
        kw_only=False,
        text="rounds in which medoids may change places; 5: TensorFlow's version",
    )
    decay: float = setting(default=0.94, above=0, text="factor of γ every `decay_steps` steps; 0.94: the paper's")
    decay_steps: int = setting(default=1000, whole=True, text="training steps per decay; 1,000: ours")
    num_clusters: int | None = setting(
        default=None, optional=True, whole=True, text="the most medoids; None: as many as the batch has classes"
    )
    normalize: bool = setting(default=True, text="embeddings are scaled to unit length first")

    def make(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.medoids: Tensor | None = None
        self.assignment: Tensor | None = None

    def present_gamma(self) -> Tensor:
        """The weight of the clustering margin after `steps` training steps."""
        start: float = self.__dict__["gamma"]
        rate = math.log(self.decay) / self.decay_steps
        return start * (rate * self.steps.to(distances.wide(self.steps))).exp()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        refuse_transforms("FacilityLocationLoss", "searches step by step", "call it in a loop")
        value, clustering = _solve(
            embeddings, labels, self.present_gamma(), self.sweeps, self.num_clusters, self.normalize
        )
        self.medoids, self.assignment = clustering.chosen, clustering.assignment
        if self.training:
            self.steps = self.steps + 1
        return value
