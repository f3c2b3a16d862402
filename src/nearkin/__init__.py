"""nearkin: learn embeddings in which kin stand near."""

from nearkin import evaluation, losses, memory, mining, samplers
from nearkin.core import relations
from nearkin.core.checks import strict

__version__ = "0.1.0"

__all__ = ["evaluation", "losses", "memory", "mining", "relations", "samplers", "strict"]
