"""Encoders: a backbone by name, pooling, projection, unit length; saved as safetensors and JSON, exported as ONNX."""

from nearkin.models.adapt import add_lora, merge_lora
from nearkin.models.encoder import Encoder
from nearkin.models.explain import Explanation, explain
from nearkin.models.factory import Known, build, encoders
from nearkin.models.io import load, save
from nearkin.models.onnx_export import export_onnx
from nearkin.models.pooling import POOLINGS, Pooling
from nearkin.models.projection import fit_projection

__all__ = [
    "POOLINGS",
    "Encoder",
    "Explanation",
    "Known",
    "Pooling",
    "add_lora",
    "build",
    "encoders",
    "explain",
    "export_onnx",
]
__all__ += ["fit_projection", "load", "merge_lora", "save"]


def __dir__() -> list[str]:
    return __all__
