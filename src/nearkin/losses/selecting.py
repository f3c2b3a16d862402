"""Losses over a selection of pairs or triplets: which selections a loss takes, and how they draw and measure."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from nearkin import mining
from nearkin.core import blockwise, checks
from nearkin.core.labels import UNKNOWN, BatchFirst
from nearkin.losses import sampling_dim as sampling_dims
from nearkin.losses.engine import Call, PairLoss, Rows
from nearkin.losses.sampling_dim import RunningDim, SamplingDim
from nearkin.losses.settings import Searched, setting

__all__ = ["SamplingDim", "SelectingLoss"]

ALL = ("all", *mining.TRIPLET_SELECTIONS, *mining.PAIR_SELECTIONS)
Select = Callable[..., mining.Triplets | mining.Pairs]


def _selection(name: str, value: Any) -> None:
    if not callable(value):
        checks.one_of(name, value, ALL)


class SelectingLoss(PairLoss):
    """A loss whose `selection` says which pairs or triplets count."""

    takes_pairs: ClassVar[bool] = False
    takes_triplets: ClassVar[bool] = True
    selection: mining.Selection
    normalize = True

    sampling_dim: SamplingDim = setting(
        default=None,
        fixed=True,
        rule=sampling_dims.check,
        text='dimensions that "distance_weighted" supposes; None: the vectors\', "fitted": those that they fill',
    )
    generator: torch.Generator | None = setting(
        default=None, rule=lambda *_: None, text="random generator of selections that draw; None: torch's own"
    )

    @staticmethod
    def states(
        default: str,
        *,
        kw_only: bool = True,
        search: Searched | None = None,
        text: str = 'which pairs or triplets count: "all", a name of `nearkin.mining`, or a function of your own',
    ) -> Any:
        """States the setting `selection`."""
        return setting(default=default, kw_only=kw_only, search=search, rule=_selection, text=text)

    max_positives: int | None = setting(
        default=None,
        optional=True,
        whole=True,
        text="most positives of an anchor, where they cannot be counted without waiting: faster; None: any number",
    )

    def make(self) -> None:
        if isinstance(self.sampling_dim, str):
            self.running_dim = RunningDim()

    def check_together(self) -> None:
        if isinstance(self.selection, str):
            because = self.impossible()
            possible = [name for name in ALL if name not in because]
            if self.selection in because:
                checks.impossible("selection", self.selection, because[self.selection], possible)
        sampling_dims.check_used(self.sampling_dim, self.selection)
        mining.check_generator(self.selection, self.generator)
        if self.max_positives is not None and self.selection not in mining.PER_POSITIVE:
            names = ", ".join(f'"{name}"' for name in mining.PER_POSITIVE)
            raise ValueError(
                f"max_positives must be left out unless selection is one of {names}, got {self.max_positives}"
            )

    def impossible(self) -> dict[str, str]:
        """Names of selections that these settings cannot take, and why."""
        because: dict[str, str] = {}
        if not self.takes_pairs:
            because |= dict.fromkeys(mining.PAIR_SELECTIONS, "it selects pairs")
        if not self.takes_triplets:
            because |= dict.fromkeys(mining.TRIPLET_SELECTIONS, "the loss weighs pairs, not triplets")
        if not self.normalize:
            because["distance_weighted"] = "it needs unit vectors, normalize=True"
        return because

    @property
    def triplet_margin(self) -> float | None:
        """The margin between the two distances of a triplet, which "random_semihard" draws within."""
        return None

    def drawing(self) -> dict[str, Any]:
        """How a selection goes with blocks of rows: `blockwise.run`."""
        all_rows = None
        if not isinstance(self.selection, str):
            all_rows = "a selection of your own may look at every row"
        elif self.selection == "hard_negatives":
            all_rows = 'selection="hard_negatives" ranks the pairs of all rows'
        draws = self.selection in mining.DRAWN
        return {"all_rows": all_rows, "draws": draws, "generator": self.generator}

    def selector(self, call: Call) -> Select:
        """The selection as a function of rows and their plain distances."""
        fitted = self._modules.get("running_dim")
        sphere = self.sampling_dim if fitted is None else fitted
        if self.max_positives is not None:
            call.addend = _crowded(call.batch, self.max_positives)
        dim = sampling_dims.resolve(sphere, self.selection, call.batch.embeddings, call.batch.labels)  # type: ignore[arg-type]

        def select(
            rows: Rows, distance: Tensor, cutoff: float | Tensor = 1.4, squared: bool = False
        ) -> mining.Triplets | mining.Pairs:
            chosen = mining.select(
                self.selection,
                distance,
                rows.relation,
                dim=dim,
                cutoff=cutoff,
                generator=self.generator,
                margin=self.triplet_margin,
                squared=squared,
                max_positives=self.max_positives,
            )
            self.check_chosen(chosen)
            return chosen

        return select

    def check_chosen(self, chosen: object) -> None:
        """Refuses what a selection of the caller's own has returned, where the loss cannot use it."""
        if isinstance(chosen, mining.Pairs) and not self.takes_pairs:
            kind = type(self).__name__.removesuffix("Loss").lower()
            raise TypeError(f"selection must return Triplets for a {kind} loss, got Pairs")
        if isinstance(chosen, mining.Triplets) and not self.takes_triplets:
            possible = ("all", *mining.PAIR_SELECTIONS)
            checks.impossible("selection", self.selection, "the loss weighs pairs, not triplets", possible)


def _crowded(batch: blockwise.Batch, most: int) -> Tensor:
    """NaN if an anchor has more than `most` positives, else 0; where values may be read, an error."""
    ids, others = batch.labels, batch.reference_labels
    alone = batch.references is None or isinstance(others, BatchFirst)
    others = others.ids if isinstance(others, BatchFirst) else ids if alone else others
    if not all(isinstance(each, Tensor) and each.dim() == 1 and each.dtype != torch.bool for each in (ids, others)):
        raise TypeError("max_positives must be left out unless labels are class ids, of which positives are counted")
    assert isinstance(ids, Tensor) and isinstance(others, Tensor)
    ordered = others.sort().values
    number = torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)
    number = torch.where(ids == UNKNOWN, 0, number - (1 if alone else 0))
    if checks.reads_values(number) and number.numel():
        checks.enough("max_positives", most, int(number.max()), "the most positives of an anchor")
    return torch.where((number > most).any(), torch.nan, 0.0)
