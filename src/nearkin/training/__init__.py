"""From a recipe to a trained, measured encoder, in one loop that can be stopped and resumed at any step."""

from nearkin.core.errors import Diverged, Stopped
from nearkin.training.class_weights import ClassWeightOptimizer
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.recipe import read as read_recipe
from nearkin.training.inference import Embedded, embed_source, export_onnx, vectors_of
from nearkin.training.run import Outcome, resume, train
from nearkin.training.tracking import Tracker

__all__ = [
    "ClassWeightOptimizer",
    "Diverged",
    "Embedded",
    "Outcome",
    "Recipe",
    "Stopped",
    "Tracker",
    "embed_source",
    "export_onnx",
    "read_recipe",
    "resume",
    "train",
    "vectors_of",
]


def __dir__() -> list[str]:
    return __all__
