"""nearkin: learn embeddings in which kin stand near."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; at run time `__getattr__` imports what is asked for
    from nearkin import (
        compare,
        data,
        dist,
        evaluation,
        gallery,
        losses,
        memory,
        mining,
        models,
        report,
        samplers,
        training,
        web,
    )
    from nearkin.core import relations
    from nearkin.core.checks import strict

__version__ = "0.1.0"

__all__ = [
    "compare",
    "data",
    "dist",
    "evaluation",
    "gallery",
    "losses",
    "memory",
    "mining",
    "models",
    "relations",
    "report",
    "samplers",
    "strict",
    "training",
    "web",
]

_ELSEWHERE = {"relations": "nearkin.core.relations", "strict": "nearkin.core.checks"}


def __getattr__(name: str) -> Any:
    """A module is imported when it is first asked for: `import nearkin` alone loads nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'nearkin' has no attribute {name!r}")
    module = importlib.import_module(_ELSEWHERE.get(name, f"nearkin.{name}"))
    value = getattr(module, name) if name == "strict" else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
