"""Exports an encoder to ONNX, checked with onnxruntime before it is written."""

import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearkin.core import checks, files
from nearkin.core.versions import version_of
from nearkin.models.adapt import merged
from nearkin.models.encoder import Encoder

__all__ = ["check_exportable", "export_onnx"]

INPUT, OUTPUT = "input", "embedding"
OLDEST = (2, 11)  # oldest torch whose exporter was tested; that of 2.6 fails on our encoders


def export_onnx(
    encoder: Encoder,
    path: str | Path,
    batch: Tensor,
    tolerance: float = 1e-4,
    metadata: Mapping[str, str] | None = None,
) -> float:
    """Writes the encoder as ONNX and returns the largest absolute difference to it in onnxruntime on `batch`.

    batch: real inputs as the encoder takes them, (rows, ...), float32. The graph takes any number of rows, named
    "input", and returns "embedding"; mean and deviation, pooling and normalisation are inside. If onnxruntime differs
    by more than `tolerance`, on the batch or on its first row alone, nothing is written. Extra `export`.

    The file's metadata_props describe the input (`encoder_metadata`); metadata: further ones, as the preprocessing.
    """
    checks.positive("tolerance", tolerance)
    check_exportable(path)
    encoder = merged(encoder)
    was_training = encoder.training
    device = encoder.mean.device
    encoder.eval()
    try:
        x = batch.detach().to("cpu", torch.float32) if isinstance(batch, Tensor) else batch
        encoder.to("cpu")._check(x)
        if len(x) == 0:
            raise ValueError("batch must have at least one row, got none")
        with torch.no_grad():
            expected = encoder(x)
        content = _graph(encoder, x, encoder_metadata(encoder) | dict(metadata or {}))
    finally:
        encoder.to(device).train(was_training)
    worst = max(_difference(content, x, expected), _difference(content, x[:1], expected[:1]))
    if not worst <= tolerance:  # NaN too
        raise ValueError(
            f"onnxruntime differs from the encoder by {worst:.2g}, more than {tolerance:g}; nothing written"
        )
    with files.explained(str(path), "make room, or choose another place"):
        files.refuse_link(Path(path))
        files.write_bytes(path, content)
    return worst


def check_exportable(path: str | Path) -> None:
    """Raises if the file could not be written or a package is missing, before any work is done."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path}: cannot be written there")
    if files.is_link(path):
        raise ValueError(f"{path}: is a link to {os.path.realpath(path)}, which is not followed; name another file")
    _packages()


def encoder_metadata(encoder: Encoder) -> dict[str, str]:
    """Metadata of every exported encoder: its input, and what the graph contains."""
    metadata = {
        "nearkin.version": version_of("nearkin"),
        "nearkin.encoder": str(encoder.settings["name"]),
        "nearkin.dim": str(encoder.dim),
        "nearkin.unit_length": "true" if encoder.settings["normalize"] else "false",
        "nearkin.input_shape": ",".join(["rows", *map(str, encoder.shape)]),
        "nearkin.mean": json.dumps(encoder.mean.flatten().tolist()),
        "nearkin.std": json.dumps(encoder.std.flatten().tolist()),
        "nearkin.mean_and_std": "applied inside the graph; do not apply them again",
    }
    if len(encoder.shape) == 3:
        metadata |= {
            "nearkin.layout": "NCHW",
            "nearkin.channel_order": "RGB" if encoder.shape[0] == 3 else "grey",
            "nearkin.value_range": "0 to 1 (pixel / 255)",
        }
    return metadata


def _packages() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        raise ValueError(f"ONNX export needs torch {OLDEST[0]}.{OLDEST[1]} or newer, got {torch.__version__}")
    try:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_module(package)
    except ImportError as error:
        raise ModuleNotFoundError(f"ONNX export needs {error.name}: pip install 'nearkin[export]'") from None


def _graph(encoder: Encoder, x: Tensor, metadata: Mapping[str, str]) -> bytes:
    """The content of the ONNX file. Traced with at least two rows: the size 1 would be taken for a constant."""
    example = x if len(x) > 1 else x.expand(2, *x.shape[1:]).contiguous()
    try:
        with _quiet():
            program = torch.onnx.export(
                encoder,
                (example,),
                dynamo=True,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: torch.export.Dim("rows")},),
                verbose=False,
            )
            assert program is not None
            model: Any = program.model_proto
            for key, value in metadata.items():
                model.metadata_props.add(key=key, value=value)
            content: bytes = model.SerializeToString()
    except Exception as error:  # the exporter raises many kinds, with pages of advice
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{encoder.settings['name']} cannot be exported to ONNX: {reason[:200]}") from None
    return content


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's notes (torchvision is not installed, ...), which do not matter here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _difference(content: bytes, x: Tensor, expected: Tensor) -> float:
    session = import_module("onnxruntime").InferenceSession(content, providers=["CPUExecutionProvider"])
    (got,) = session.run([OUTPUT], {INPUT: x.numpy()})
    if got.shape != tuple(expected.shape):
        raise ValueError(f"onnxruntime gives {got.shape} for {len(x)} rows, the encoder {tuple(expected.shape)}")
    return float((torch.from_numpy(got) - expected).abs().max())
