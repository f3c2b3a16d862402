"""Every public loss keeps to every property of `loss_checks`, each as a test of its own."""

import itertools

import pytest
import torch

import reference
from cases import LOSSES, Case, pair_twin
from loss_checks import check_loss, every
from loss_checks.outcome import covering
from loss_checks.properties import PROPERTIES
from nearkin import losses
from nearkin.core import reduce

# Compilers of every version have something to say of themselves, and so has torch.func.vmap.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "DeprecationWarning")]


@pytest.mark.parametrize(("check", "case"), every(LOSSES))
def test_loss(check, case):
    check(case)


def test_rows_cover_each_value_and_every_two():
    """Of three axes as the properties have them: every value with each case, every two values over all cases."""
    axes = {"situation": range(12), "kind": range(5), "training": range(2)}
    met = {pair: set() for pair in itertools.combinations(axes, 2)}
    for case in LOSSES:
        rows = [*covering(case, **axes)]
        assert all({row[name] for row in rows} == set(values) for name, values in axes.items())
        for a, b in met:
            met[a, b] |= {(row[a], row[b]) for row in rows}
    for (a, b), pairs in met.items():
        assert pairs == set(itertools.product(axes[a], axes[b]))


def test_every_property_has_cases_and_every_reason_a_property():
    for check, when, _, _ in PROPERTIES:
        assert sum(when(case) for case in LOSSES) > 1, check.__name__
    names = {check.__name__ for check, *_ in PROPERTIES}
    assert len(names) == len(PROPERTIES) >= 30
    assert not {name for case in LOSSES for name in case.skips} - names


class Turned(losses.SupConLoss):
    def rows(self, rows):
        value, counts = super().rows(rows)
        return -value, counts


class Counting(losses.SupConLoss):
    def rows(self, rows):
        return super().rows(rows)[0], rows.positive.any(1) | True


class Seeing(losses.SupConLoss):
    def rows(self, rows):
        score = rows.all() / self.temperature
        return reduce.logsumexp(score, rows.pairs | True) - reduce.mean(score, rows.positive), rows.positive.any(1)


class Alone(losses.SupConLoss):
    def forward(self, embeddings, labels, references=None, reference_labels=None):
        if reference_labels is not None:
            references = reference_labels = None
        return super().forward(embeddings, labels, references, reference_labels)


class Untainted(losses.SupConLoss):
    def value(self, call):
        return super().value(call).nan_to_num()


class Reading(losses.SupConLoss):
    def value(self, call):
        value = super().value(call)
        return value if float(value.detach().sum()) > -1 else -value


class Greedy(losses.SupConLoss):
    def value(self, call):
        self.__dict__["max_memory"] = None
        return super().value(call)


@pytest.mark.parametrize("broken", [Turned, Counting, Seeing, Alone, Untainted, Reading, Greedy])
def test_a_broken_loss_is_found(broken):
    """A sign, anchors without kin, pairs of no kind, references, NaN, a value read back, memory without a bound."""
    case = Case("SupConLoss-broken", broken, pair_twin(reference.supcon), pairs=True)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        check_loss(case)


def test_a_right_loss_passes():
    class Right(losses.SupConLoss):
        pass

    torch.manual_seed(0)
    check_loss(Case("SupConLoss-right", Right, pair_twin(reference.supcon), pairs=True))
