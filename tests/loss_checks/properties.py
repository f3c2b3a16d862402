"""The list of properties: plain functions of a case, each with a sentence as its docstring."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import pytest

from cases import Case


class Property(NamedTuple):
    check: Callable[[Case], None]
    when: Callable[[Case], bool]
    slow: bool
    on_gpu: bool

    def __str__(self) -> str:
        return self.check.__name__


PROPERTIES: list[Property] = []


def holds(
    when: Callable[[Case], bool] = lambda case: True, *, slow: bool = False, on_gpu: bool = False
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Adds a property: of the cases for which `when` is true."""

    def add(check: Callable[[Case], None]) -> Callable[[Case], None]:
        assert check.__doc__, check
        PROPERTIES.append(Property(check, when, slow, on_gpu))
        return check

    return add


def every(cases: list[Case], *, on_gpu: bool = False) -> list[object]:
    """Each property with each case that has it, for `pytest.mark.parametrize("check, case", …)`."""
    return [
        pytest.param(p.check, case, id=f"{p}-{case}", marks=[pytest.mark.slow] if p.slow else [])
        for p in PROPERTIES
        for case in cases
        if p.on_gpu == on_gpu and p.when(case) and str(p) not in case.skips
    ]


def check_loss(case: Case) -> None:
    """Every property of a case that needs neither a GPU nor long."""
    for check, when, slow, on_gpu in PROPERTIES:
        if when(case) and not slow and not on_gpu and check.__name__ not in case.skips:
            check(case)


def pairs(case: Case) -> bool:
    """Takes references."""
    return case.pairs


def has_ids(case: Case) -> bool:
    """Takes references, and labels that are ids."""
    return case.pairs and not case.graded


def in_blocks(case: Case) -> bool:
    """Runs in blocks of rows."""
    return case.pairs and not case.whole and "max_memory" in inspect.signature(type(case.build())).parameters
