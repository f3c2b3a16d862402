"""What tests of the command line share: a call, its output, and a folder of small photos."""

from inspect import signature
from pathlib import Path

import numpy as np
from PIL import Image
from typer.testing import CliRunner

from nearkin.cli import app


def separate_runner():
    """With stdout and stderr apart, also where click mixes them by default."""
    apart = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner.__init__).parameters else {}
    return CliRunner(**apart)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def output_of(result, code=0):
    assert result.exit_code == code, result.output + str(result.exception)
    return result.output


def noisy_vectors(path: Path, classes: int, per_class: int = 8, dim: int = 12) -> None:
    """An .npz file of classes, each a random centre with noise around it."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), per_class)
    rows = rng.normal(size=(classes, dim))[labels] + 0.7 * rng.normal(size=(len(labels), dim))
    np.savez(path, embeddings=rows.astype(np.float32), labels=labels)


def photos(folder: Path, classes: int = 10, each: int = 6, seed: int = 0, contrast: int = 20) -> Path:
    """A bar of another place and brightness for each class, on noise."""
    rng = np.random.default_rng(seed)
    for c in range(classes):
        (folder / f"class{c}").mkdir(parents=True)
        for i in range(each):
            pixels = rng.integers(0, 60, (20, 20, 3)).astype(np.uint8)
            pixels[2 + c : 5 + c, 3:12] += np.uint8(contrast * c)
            Image.fromarray(pixels).save(folder / f"class{c}" / f"{i}.png")
    return folder
