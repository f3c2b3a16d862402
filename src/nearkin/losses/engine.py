"""The engine of the pair losses: it checks, relates, measures, reduces and marks NaN, and runs a loss's one formula.

A loss says what a row of pairs costs (`PairLoss.rows`); one that takes several passes says how they follow (`value`).
The formula runs whole, in blocks of rows under `max_memory` (`core/blockwise.py`), or under torch.compile.
"""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, ParamSpec, Protocol

import torch
from torch import Tensor

from nearkin.core import blockwise, checks, distances, reduce
from nearkin.core.labels import Labels, Relation
from nearkin.losses.settings import REDUCTION, Loss, setting

__all__ = ["Call", "Costs", "LossFunction", "PairLoss", "Rows", "function_of"]

P = ParamSpec("P")
# (value, counts): one term per anchor and which anchors count. (sums, counts, active): of several terms per anchor
# their sum, their number and how many are above 0. Each (B,).
Costs = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
MEASURES = ("cosine", "dot", "distance", "squared")


class Rows:
    """Some anchors and all references that they are compared with."""

    def __init__(self, x: Tensor, references: Tensor | None, related: Any, measure: str, normalize: bool) -> None:
        self.x, self.references, self.related = x, references, related
        self.measure, self.normalize = measure, normalize
        self._wide: distances.WideRows | None = None

    @property
    def relation(self) -> Relation:
        related: Relation = self.related
        return related

    @property
    def positive(self) -> Tensor:
        """(b, R) bool: of the anchor's class, and not the anchor itself."""
        return self.relation.positive

    @property
    def negative(self) -> Tensor:
        """(b, R) bool: known to be of another class."""
        return self.relation.negative

    @property
    def pairs(self) -> Tensor:
        """(b, R) bool: positive or negative."""
        return self.relation.positive | self.relation.negative

    def few(self, columns: Tensor) -> bool:
        """Whether picking (b, T) columns of the references takes less than the matrix of all."""
        number = (self.x if self.references is None else self.references).shape[0]
        return columns.shape[1] < number and columns.shape[1] * self.x.shape[1] <= number

    def pick(self, columns: Tensor, measure: str) -> Tensor:
        """The "distance" or "squared" one to (b, T) columns of the references, by differences of the rows."""
        return distances.picked(self.wide(), columns, root=measure == "distance")

    def wide(self) -> distances.WideRows:
        """Anchors and references as distances are taken of them."""
        if self._wide is None:
            self._wide = distances.wide_rows(self.x, self.references, self.normalize)
        return self._wide

    def all(self, measure: str | None = None) -> Tensor:
        """The measure of every pair, (b, R): the loss's own, or another one of `MEASURES`."""
        match measure or self.measure:
            case "cosine":
                return distances.cosine(self.x, self.references)
            case "dot":
                return distances.dot(self.x, self.references)
            case "distance":
                return distances.between(self.wide(), root=True)
            case "squared":
                return distances.between(self.wide(), root=False)
            case unknown:
                raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {unknown!r}")


class Call:
    """One call of a loss: its checked batch, and how its terms become a number."""

    def __init__(
        self,
        loss: PairLoss,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
    ) -> None:
        references, reference_labels = checks.batch(embeddings, labels, references, reference_labels, loss.graded)
        self.batch = blockwise.Batch(embeddings, labels, references, reference_labels)
        self.loss, self.reduction = loss, loss.reduction
        self.addend: Tensor | None = None  # 0, or NaN where what was promised of the batch does not hold

    @property
    def max_memory(self) -> int | None:
        return self.loss.max_memory

    @property
    def alone(self) -> bool:
        """Whether the batch is its own reference."""
        return self.batch.references is None

    def fits(self) -> bool:
        """Whether the matrix is made in one piece."""
        return blockwise.fits(self.batch, self.max_memory)

    def run(self, rows: Callable[..., Any], *per_anchor: Tensor, **how: Any) -> tuple[Tensor, ...]:
        """What `rows` computes of each anchor, in blocks where memory asks for it (`blockwise.run`)."""
        return blockwise.run(
            self._function(rows), self.batch, *per_anchor, max_memory=self.max_memory, graded=self.loss.graded, **how
        )

    def across(self, rows: Callable[..., Any]) -> tuple[Tensor, ...]:
        """The same of each reference, with the anchors as its references."""
        swapped = blockwise.transposed(self.batch)
        return blockwise.run(self._function(rows), swapped, max_memory=self.max_memory)

    def reduced(self, rows: Callable[..., tuple[Tensor, ...]], *per_anchor: Tensor, **how: Any) -> Tensor:
        """The loss of what `rows` computes of each anchor.

        per_anchor: tensors with one entry per anchor, handed to `rows`; if there are any, `rows` gets all that the loss
        has learned in them. how: `all_rows`, `draws` and `generator`, as `blockwise.run` takes them.
        """
        if self.reduction == "none" or how.get("draws") or self.fits():
            value = self.total(*self.run(rows, *per_anchor, **how))
            return value + self.taint_of(*per_anchor) if per_anchor else value
        function = self._function(rows)

        def summed(*arguments: Any) -> tuple[Tensor, ...]:
            return self._sums(*function(*arguments))

        learned = () if per_anchor else tuple(p for p in self.loss.parameters() if p.requires_grad)
        sums, counts, active = blockwise.summed(
            summed,
            self.batch,
            *per_anchor,
            learned=learned,
            max_memory=self.max_memory,
            graded=self.loss.graded,
            all_rows=how.get("all_rows"),
        )
        value = reduce.total(sums, counts, active, self.reduction) + self.taint()
        return value + self.taint_of(*per_anchor) if per_anchor else value

    def total(self, *costs: Tensor) -> Tensor:
        """The loss from the costs of each anchor."""
        first, counts, *active = costs
        if active:
            return reduce.total(first, counts, active[0], self.reduction) + self.taint()
        return reduce.terms(first, counts, self.reduction) + self.taint()

    def taint(self) -> Tensor | float:
        """NaN where the batch or what the loss has learned holds NaN or Inf, else 0."""
        taint = reduce.taint(self.batch.embeddings, self.batch.references, *self.loss.parameters())
        return taint if self.addend is None else taint + self.addend

    def taint_of(self, *tensors: Tensor) -> Tensor | float:
        """The same of other tensors."""
        return reduce.taint(*(t for t in tensors if t.is_floating_point()))

    def _sums(self, value: Tensor, counts: Tensor, active: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if active is not None:
            return value, counts, active
        if self.reduction == "active":
            counts = counts & ~(value <= 0)  # a NaN is never inactive
        return torch.where(counts, value, 0.0), counts, counts

    def _function(self, rows: Callable[..., Any]) -> blockwise.Rows:
        def of_rows(x: Tensor, references: Tensor | None, related: Any, *per_anchor: Tensor) -> Any:
            return rows(Rows(x, references, related, self.loss.measure, self.loss.normalize), *per_anchor)

        return of_rows


class PairLoss(Loss):
    """A loss of anchors × references. `rows` is its formula; everything else is the engine's."""

    measure = "cosine"  # of a pair, what `Rows.all` gives
    normalize = False  # whether distances are of rows scaled to length 1
    graded = False  # labels are real-valued targets

    reduction: str = REDUCTION
    max_memory: int | None = setting(
        default=None,
        optional=True,
        whole=True,
        text="bytes that the loss may use beside its arguments and gradients; None: blocks of about 1 GiB",
    )

    def rows(self, rows: Rows) -> Costs:
        """The cost of each anchor of the rows, and which anchors count."""
        raise NotImplementedError

    def value(self, call: Call) -> Tensor:
        """The loss of a call: `rows` of every anchor, reduced."""
        return call.reduced(self.rows)

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
    ) -> Tensor:
        return self.value(Call(self, embeddings, labels, references, reference_labels))


class LossFunction(Protocol, Generic[P]):
    """A loss as a function: the batch, then the settings of the class by keyword."""

    def __call__(
        self,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
        *settings: P.args,
        **named: P.kwargs,
    ) -> Tensor: ...


def function_of(loss: Callable[P, PairLoss], name: str) -> LossFunction[P]:
    """The function form of a loss class, whose settings it takes by keyword."""
    make: Any = loss
    fields = make.fields
    learned = [key for key, s in fields.items() if s.learned]

    @wraps(loss, updated=())
    def function(
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
        **settings: Any,
    ) -> Tensor:
        for key in learned:
            value = settings.get(key, fields[key].default)
            fields[key].check(key, value)
            device = getattr(embeddings, "device", None)
            settings[key] = value if isinstance(value, Tensor) else torch.full((), float(value), device=device)
        result: Tensor = make(**settings).eval()(embeddings, labels, references, reference_labels)
        return result

    batch = list(inspect.signature(function, follow_wrapped=False).parameters.values())[:4]
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(loss).parameters.values()]
    own = [p for p in own if not fields[p.name].shapes]
    function.__signature__ = inspect.Signature([*batch, *own], return_annotation=Tensor)  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = name
    return function  # type: ignore[return-value]
