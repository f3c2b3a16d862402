"""Every public loss keeps to every property of `loss_checks`, each as a test of its own."""

import itertools

import pytest

from cases import LOSSES
from loss_checks import every
from loss_checks.outcome import covering
from loss_checks.properties import PROPERTIES

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
