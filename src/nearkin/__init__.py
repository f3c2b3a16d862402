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
    from nearkin.gallery.embedder import open_encoder as open

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
    "open",
    "relations",
    "report",
    "samplers",
    "strict",
    "training",
    "web",
]

_ELSEWHERE = {"relations": "nearkin.core.relations"}
_FUNCTIONS = {"open": ("nearkin.gallery.embedder", "open_encoder"), "strict": ("nearkin.core.checks", "strict")}


def __getattr__(name: str) -> Any:
    """A module is imported when it is first asked for: `import nearkin` alone loads nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'nearkin' has no attribute {name!r}")
    if name in _FUNCTIONS:
        room, function = _FUNCTIONS[name]
        value = getattr(importlib.import_module(room), function)
    else:
        value = importlib.import_module(_ELSEWHERE.get(name, f"nearkin.{name}"))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
