"""An encoder as an ONNX file that runs without Python or torch, checked before it is handed over."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from nearkin.core import checks, files
from nearkin.models.encoder import Encoder

__all__ = ["export_onnx", "exportable"]

INPUT, OUTPUT = "input", "embedding"


def export_onnx(encoder: Encoder, path: str | Path, batch: Tensor, tolerance: float = 1e-4) -> float:
    """Writes the encoder as ONNX and returns the largest absolute difference to it in onnxruntime on `batch`.

    batch: real inputs as the encoder takes them, (rows, ...), float32. The file takes any number of rows, named
    "input", and gives "embedding"; mean and deviation, pooling and normalisation are inside. Where onnxruntime differs
    by more than `tolerance`, on the batch or on its first row alone, nothing is written. Extra `export`.
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
        content = _graph(encoder, x)
    finally:
        encoder.to(device).train(was)
    worst = max(_difference(content, x, wanted), _difference(content, x[:1], wanted[:1]))
    if not worst <= tolerance:  # NaN too
        raise ValueError(
            f"onnxruntime differs from the encoder by {worst:.2g}, more than {tolerance:g}; nothing written"
        )
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


def _packages() -> None:
    try:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_module(package)
    except ImportError as error:
        raise ModuleNotFoundError(f"ONNX export needs {error.name}: pip install 'nearkin[export]'") from None


def _graph(encoder: Encoder, x: Tensor) -> bytes:
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
            content: bytes = program.model_proto.SerializeToString()
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
