"""Encoders: a backbone by name, pooling, projection, length 1; saved as safetensors and JSON, exported as ONNX."""

from nearkin.models.choice import Known, build, encoders
from nearkin.models.encoder import Encoder
from nearkin.models.export import export_onnx
from nearkin.models.pooling import POOLINGS, Pooling
from nearkin.models.stored import load, save

__all__ = ["POOLINGS", "Encoder", "Known", "Pooling", "build", "encoders", "export_onnx", "load", "save"]


def __dir__() -> list[str]:
    return __all__
