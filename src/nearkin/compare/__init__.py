"""The fair comparison of losses: the same protocol for all, settings searched for each, tested once."""

from nearkin.compare.comparison import Comparison, compare
from nearkin.compare.plan import seconds
from nearkin.compare.protocol import comparable

__all__ = ["Comparison", "comparable", "compare", "seconds"]


def __dir__() -> list[str]:
    return __all__
