"""The encoder of a run as a gallery uses it: who it is, what it takes, and from pictures to vectors of length 1."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin import models
from nearkin.core import checks, files
from nearkin.core.errors import UnreadablePicture
from nearkin.data import augment, decode
from nearkin.gallery.schema import Floats, unit
from nearkin.models.io import fingerprint

__all__ = ["Described", "Encoding", "described"]

BATCH = 128


class Described(NamedTuple):
    """What encoder.json says, without the weights being read.

    fingerprint: of the weights, the architecture and the preparation; whatever changes an embedding changes it.
    """

    run: Path
    fingerprint: str
    preparation: dict[str, Any]
    dim: int | None


def described(run: str | Path) -> Described:
    folder = Path(run)
    path = folder / "encoder.json"
    if not path.is_file():
        raise ValueError(f"{run}: not a finished run: there is no encoder.json in it")
    try:
        said = files.read_json(path)
        identity, preparation = fingerprint(said), said["preparation"]
        dim = said["settings"].get("dim") or None
        kind = preparation.get("kind")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: not the description of an encoder ({error})") from None
    if kind not in ("pictures", "vectors"):
        raise ValueError(
            f"{path}: does not say how items are prepared for the encoder; it must come from nearkin train"
        )
    return Described(folder, identity, preparation, dim)


class Encoding:
    """Loads the weights when the first item comes."""

    def __init__(self, run: str | Path, device: str = "auto", max_pixels: int = decode.MAX_PIXELS) -> None:
        self.device = checks.device(device)
        checks.integer("max_pixels", max_pixels, 1)
        self.said, self.max_pixels = described(run), max_pixels
        self._encoder: models.Encoder | None = None

    @property
    def takes_pictures(self) -> bool:
        return bool(self.said.preparation["kind"] == "pictures")

    @property
    def dim(self) -> int:
        return self.said.dim or self._loaded().dim

    def square(self, data: bytes | NDArray[Any], name: str) -> NDArray[np.uint8]:
        """One picture as the encoder is fed: (side, side, channels)."""
        wanted = self.said.preparation
        options = {"side": wanted["stored"], "fit": wanted["fit"], "channels": wanted["channels"]}
        try:
            return decode.square(data, max_pixels=self.max_pixels, **options)
        except UnreadablePicture as error:
            raise ValueError(f"{name} {error}") from None

    @torch.inference_mode()
    def embed(self, rows: Sequence[NDArray[Any]]) -> Floats:
        """Squares, or vectors of features, to (n, D) of length 1."""
        encoder, parts = self._loaded(), []
        for start in range(0, len(rows), BATCH):
            batch = torch.from_numpy(np.stack(list(rows[start : start + BATCH]))).to(self.device)
            if self.takes_pictures:
                batch = augment.centre(batch, self.said.preparation["size"])
            parts.append(encoder(batch).float().cpu().numpy())
        return unit(np.concatenate(parts), "embeddings") if parts else np.empty((0, self.dim), np.float32)

    def _loaded(self) -> models.Encoder:
        if self._encoder is None:
            self._encoder, _ = models.load(self.said.run, self.device)
        return self._encoder
