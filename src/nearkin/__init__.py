"""nearkin: learn embeddings in which kin stand near."""

from nearkin import data, distributed, evaluation, losses, memory, mining, models, samplers
from nearkin.core import relations
from nearkin.core.checks import strict

__version__ = "0.1.0"

__all__ = [
    "data",
    "distributed",
    "evaluation",
    "losses",
    "memory",
    "mining",
    "models",
    "relations",
    "samplers",
    "strict",
]
