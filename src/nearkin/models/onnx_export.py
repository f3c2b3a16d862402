"""An encoder as an ONNX file that runs without Python or torch, checked before it is handed over."""

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
from nearkin.models.encoder import Encoder

__all__ = ["export_onnx", "exportable"]

INPUT, OUTPUT = "input", "embedding"
OLDEST = (2, 11)  # torch, whose exporter was tried: that of 2.6 fails on our encoders


def export_onnx(
    encoder: Encoder,
    path: str | Path,
    batch: Tensor,
    tolerance: float = 1e-4,
    metadata: Mapping[str, str] | None = None,
) -> float:
    """Writes the encoder as ONNX and returns the largest absolute difference to it in onnxruntime on `batch`.

    batch: real inputs as the encoder takes them, (rows, ...), float32. The file takes any number of rows, named
    "input", and gives "embedding"; mean and deviation, pooling and normalisation are inside. Where onnxruntime differs
    by more than `tolerance`, on the batch or on its first row alone, nothing is written. Extra `export`.

    The file's metadata_props say what the input is (`facts`); metadata: more of them, as how pictures are prepared.
    """
    checks.positive("tolerance", tolerance)
    exportable(path)
    was = encoder.training
    device = encoder.mean.device
    encoder.eval()
    try:
        x = batch.detach().to("cpu", torch.float32) if isinstance(batch, Tensor) else batch
        encoder.to("cpu")._check(x)
        if len(x) == 0:
            raise ValueError("batch must have at least one row, got none")
        with torch.no_grad():
            wanted = encoder(x)
        content = _graph(encoder, x, facts(encoder) | dict(metadata or {}))
    finally:
        encoder.to(device).train(was)
    worst = max(_difference(content, x, wanted), _difference(content, x[:1], wanted[:1]))
    if not worst <= tolerance:  # NaN too
        raise ValueError(
            f"onnxruntime differs from the encoder by {worst:.2g}, more than {tolerance:g}; nothing written"
        )
    with files.explained(str(path), "make room, or choose another place"):
        files.write_bytes(path, content)
    return worst


def exportable(path: str | Path) -> None:
    """Raises where the file could not be written, or a package is missing: said before the work rather than after."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path}: cannot be written there")
    _packages()


def facts(encoder: Encoder) -> dict[str, str]:
    """What the metadata of an ONNX file says of every encoder: its input, and what is inside the graph."""
    picture = len(encoder.shape) == 3
    found = {
        "nearkin.version": version_of("nearkin"),
        "nearkin.encoder": str(encoder.settings["name"]),
        "nearkin.dim": str(encoder.dim),
        "nearkin.unit_length": "true" if encoder.settings["normalize"] else "false",
        "nearkin.input_shape": ",".join(["rows", *map(str, encoder.shape)]),
        "nearkin.mean": json.dumps(encoder.mean.flatten().tolist()),
        "nearkin.std": json.dumps(encoder.std.flatten().tolist()),
        "nearkin.mean_and_std": "applied inside the graph; do not apply them again",
    }
    if picture:
        found |= {
            "nearkin.layout": "NCHW",
            "nearkin.channel_order": "RGB" if encoder.shape[0] == 3 else "grey",
            "nearkin.value_range": "0 to 1 (pixel / 255)",
        }
    return found


def _packages() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        raise ValueError(f"ONNX export needs torch {OLDEST[0]}.{OLDEST[1]} or newer, got {torch.__version__}")
    try:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_module(package)
    except ImportError as error:
        raise ModuleNotFoundError(f"ONNX export needs {error.name}: pip install 'nearkin[export]'") from None


def _graph(encoder: Encoder, x: Tensor, metadata: Mapping[str, str]) -> bytes:
    """The ONNX file's content. Traced with two rows at least: one row would be taken for the only number there is."""
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
    """The exporter's notes (torchvision is not installed, ...) concern nobody here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _difference(content: bytes, x: Tensor, wanted: Tensor) -> float:
    session = import_module("onnxruntime").InferenceSession(content, providers=["CPUExecutionProvider"])
    (got,) = session.run([OUTPUT], {INPUT: x.numpy()})
    if got.shape != tuple(wanted.shape):
        raise ValueError(f"onnxruntime gives {got.shape} for {len(x)} rows, the encoder {tuple(wanted.shape)}")
    return float((torch.from_numpy(got) - wanted).abs().max())
