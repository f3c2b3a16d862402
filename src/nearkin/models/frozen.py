"""A pretrained encoder by its name, in place of a run: built once, kept in the cache as a run keeps its encoder.

The encoder is the backbone with its pretrained weights, its own pooling and no projection, scaled to unit length. Its
folder has encoder.json and model.safetensors, so that whatever reads the encoder of a run reads this one, and its
fingerprint is that of its weights and preparation.
"""

import difflib
import hashlib
import os
import re
import shutil
import uuid
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from nearkin.core.paths import cache_dir
from nearkin.models import efficientnet_lite
from nearkin.models.factory import build, encoders
from nearkin.models.io import DESCRIPTION, save

__all__ = ["DEFAULT", "LITE", "encoder_folder", "full_name", "is_encoder_name", "is_run"]

DEFAULT = "efficientnet-lite0"
FAMILIES = ("timm", "hf")
LITE = tuple(f"efficientnet-lite{number}" for number in efficientnet_lite.VARIANTS)
UNTRAINED = ("small-cnn", "mlp")
POOLED = "avg"  # of the last map, or of the tokens that are patches
FIT = "crop"
_FORMAT = 1  # increase it when the same name would give other embeddings


def is_encoder_name(text: str | os.PathLike[str]) -> bool:
    """Whether the text names an encoder with pretrained weights, and not a folder."""
    name = os.fspath(text)
    return name in LITE or (":" in name and name.partition(":")[0] in FAMILIES)


def is_run(text: str | os.PathLike[str]) -> bool:
    """Whether the text stands for an encoder: the folder of a finished run, or an encoder's name."""
    return is_encoder_name(text) or (Path(text) / DESCRIPTION).is_file()


def full_name(name: str) -> str:
    """The name that means the same in every folder: hf: with the full path of a local model."""
    family, _, rest = name.partition(":")
    if family == "hf" and rest and Path(rest).expanduser().is_dir():
        return f"hf:{Path(rest).expanduser().resolve()}"
    return name


def encoder_folder(run: str | os.PathLike[str]) -> Path:
    """The folder with the encoder of a run, or of an encoder's name; the first use of a name makes it, in the cache."""
    name, folder = os.fspath(run), Path(run)
    if not is_encoder_name(name):
        if (folder / DESCRIPTION).is_file():
            return folder
        raise ValueError(_no_run(name, folder))
    if (folder / DESCRIPTION).is_file():
        warnings.warn(
            f"{name} is taken as the encoder of that name; the run in the folder of that name is ./{name}",
            RuntimeWarning,
            stacklevel=2,
        )
    name = full_name(name)
    place = _place(name)
    if not (place / DESCRIPTION).is_file():
        _make(name, place)
    return place


def _no_run(name: str, folder: Path) -> str:
    """Why the text stands for no encoder, and what would."""
    known = ", ".join(known.name for known in encoders() if known.name not in UNTRAINED)
    if folder.is_dir():
        pictures = (
            "" if (folder / "recipe.toml").is_file() else f"; for a folder of pictures name an encoder: {DEFAULT}"
        )
        return f"{name}: not a finished run: there is no {DESCRIPTION} in it{pictures}"
    if name in UNTRAINED:
        return (
            f"{name}: has no pretrained weights, and random ones answer nothing; train it: nearkin train SOURCE "
            f"--encoder {name}; pretrained: {known}"
        )
    if folder.exists():
        return f"{name}: a file, where the folder of a run or an encoder's name is needed ({known})"
    near = difflib.get_close_matches(name, LITE, 1)
    hint = f'; did you mean "{near[0]}"?' if near else ";"
    return f"{name}: not a finished run, and no encoder has this name{hint} known: {known}"


def _place(name: str) -> Path:
    """Where the encoder is kept: under its name, and what its weights are known by before they are read."""
    try:
        folder = cache_dir() / "encoders"
    except RuntimeError:  # a user without a home folder
        raise ValueError("there is no cache folder for the encoder: name one in NEARKIN_CACHE") from None
    known: list[Any] = [_FORMAT, name]
    if name in LITE:
        known.append(efficientnet_lite.VARIANTS[LITE.index(name)].digest)
    local = Path(name.partition(":")[2])
    if name.startswith("hf:") and local.is_absolute() and local.is_dir():
        known += [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(local.iterdir()) if p.is_file()]
    short = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[-60:].strip("-.")
    return folder / f"{short}-{hashlib.sha256(repr(known).encode()).hexdigest()[:12]}"


def _make(name: str, place: Path) -> None:
    """Complete or absent: written beside its place and renamed. Of two processes the first one's stays."""
    encoder = build(name, dim=None, pooling=POOLED).eval()
    size = int(encoder.shape[-1])
    preparation = {"kind": "pictures", "size": size, "stored": size * 8 // 7, "fit": FIT, "channels": 3, "flip": True}
    part = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}")
    try:
        save(encoder, part, preparation, frozen=name)
        with suppress(OSError):  # another process was first
            part.rename(place)
    except OSError as error:
        raise ValueError(
            f"the encoder {name} cannot be kept in {place.parent} ({error.strerror or error}); make room, or name "
            f"another folder in NEARKIN_CACHE"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
