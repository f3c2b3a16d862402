"""The dimension of the sphere that distance-weighted sampling supposes: the vectors' own, a number, or a fitted one."""

from typing import TypeAlias

import torch
from torch import Tensor, nn

from nearkin.core import checks, distances, relations, sphere
from nearkin.core.autograd import full_precision, refuse_transforms
from nearkin.core.relations import Labels, Relation

__all__ = ["RunningDim", "SamplingDim", "check", "check_used", "resolve"]

_DECAY = 0.9  # of past batches: a mean over about ten
_ROWS = 1024  # items of a batch that are compared with one another, evenly spaced


def check(name: str, value: object) -> None:
    """Refuses what is no number of dimensions: None, "fitted", a whole number, or a scalar tensor."""
    if isinstance(value, Tensor):
        if value.dim() or not value.is_floating_point():
            raise ValueError(f"{name} must be a scalar of a float type, got {value.dtype} {tuple(value.shape)}")
    elif isinstance(value, str):
        checks.one_of(name, value, ("fitted",))
    elif value is not None:
        checks.integer(name, value, 2)  # type: ignore[arg-type]


def check_used(value: object, selection: object) -> None:
    """Refuses a number of dimensions that no selection would use."""
    if value is not None and selection != "distance_weighted":
        raise ValueError(f'sampling_dim must be left out unless selection="distance_weighted", got {value!r}')


def resolve(value: "SamplingDim", selection: object, embeddings: Tensor, labels: Labels) -> int | Tensor:
    """The number of dimensions that a selection supposes. After the checks of the batch."""
    if value is None or selection != "distance_weighted":
        return embeddings.shape[1]
    if isinstance(value, RunningDim):
        dim: Tensor = value(embeddings, labels)
        return dim
    if isinstance(value, str):  # "fitted", by this batch alone
        return sphere.filled_dim(_moment(embeddings, labels)[0], embeddings.shape[1])
    return value.detach() if isinstance(value, Tensor) else value


class RunningDim(nn.Module):
    """The dimension that the embeddings of past batches fill, by `sphere`: updated in training, stored in a buffer."""

    along_dim = ()  # no tensor of it has the dimensions of an embedding: `MatryoshkaLoss`
    moments: Tensor  # (2,): decayed sums of the batches' mean squared cosines, and of 1

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moments", torch.zeros(2))

    def forward(self, embeddings: Tensor, labels: Labels) -> Tensor:
        """The dimension, (), with this batch; in evaluation without it, unless there was no batch before."""
        if self.training:
            refuse_transforms("a fitted dimension")
        if self.moments.device != embeddings.device:
            self.moments = self.moments.to(embeddings.device)
        mean, valid = _moment(embeddings, labels)
        past = self.moments.to(torch.promote_types(self.moments.dtype, torch.float32))
        batch = torch.stack([mean.to(past.dtype), torch.ones_like(past[0])])
        if self.training:
            past = torch.where(valid, _DECAY * past + (1 - _DECAY) * batch, past)
            with torch.no_grad():
                self.moments.copy_(past)
        total = torch.where(past[1] > 0, past, batch)
        return sphere.filled_dim(total[0] / total[1], embeddings.shape[1])


SamplingDim: TypeAlias = int | str | Tensor | RunningDim | None


@torch.no_grad()
def _moment(embeddings: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """The mean squared cosine of the batch's items of different classes, and whether there are any.

    Of at most `_ROWS` items, so that time and memory do not grow with the square of the batch. Where labels are a
    relation to other references, which does not tell who of the batch is of whose class, all pairs of the batch count.
    """
    number = embeddings.shape[0]
    rows = torch.arange(0, number, max(1, -(-number // _ROWS)), device=embeddings.device)
    unit = distances.unit(embeddings.detach()[rows])
    with full_precision(unit):
        cosine = unit @ unit.T
    if isinstance(labels, Relation) and labels.ids is None:
        negative = ~torch.eye(len(rows), dtype=torch.bool, device=unit.device)
        if labels.negative.shape[1] == number:  # of the batch with itself
            negative = negative & labels.negative[rows][:, rows]
    else:
        ids = labels.ids if isinstance(labels, Relation) else labels
        assert isinstance(ids, Tensor)
        negative = relations.of(ids[rows]).negative
    return sphere.mean_squared_cosine(cosine, negative)
