"""Which loss is best on one's own data: the same for all, searched for each, tested once."""

from nearkin.comparing.bench import comparable
from nearkin.comparing.compare import Comparison, compare
from nearkin.comparing.plan import seconds

__all__ = ["Comparison", "comparable", "compare", "seconds"]


def __dir__() -> list[str]:
    return __all__
