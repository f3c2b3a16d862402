"""From a recipe to a trained, measured encoder, in one loop that can stop and go on anywhere."""

from nearkin.training.loop import Stopped
from nearkin.training.monitor import Diverged
from nearkin.training.ranks import Ranks, joined
from nearkin.training.recipe import Recipe
from nearkin.training.recipe import read as read_recipe
from nearkin.training.run import Outcome
from nearkin.training.start import resume, train
from nearkin.training.using import Embedded, embed_source, export_onnx, vectors_of

__all__ = [
    "Diverged",
    "Embedded",
    "Outcome",
    "Ranks",
    "Recipe",
    "Stopped",
    "embed_source",
    "export_onnx",
    "joined",
    "read_recipe",
    "resume",
    "train",
    "vectors_of",
]


def __dir__() -> list[str]:
    return __all__
