"""An encoder by its name or its run, ready to embed, compare and search pictures: `nearkin.open`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin import data
from nearkin.data import decode, groups
from nearkin.data.sources import PLAIN
from nearkin.gallery import items as item_inputs
from nearkin.gallery import results
from nearkin.gallery.enroll import enrol_source, warn_without_classes
from nearkin.gallery.gallery import Gallery
from nearkin.gallery.items import Encoding
from nearkin.gallery.results import Verification

__all__ = ["ENDING", "Embedder", "gallery_beside", "open_encoder"]

ENDING = ".gallery"


class Embedder:
    """The encoder of a run, or a pretrained one; `nearkin.open` makes it. Threads may share it."""

    def __init__(self, run: str | Path, device: str = "auto", max_pixels: int = decode.MAX_PIXELS) -> None:
        self._encoding = Encoding(run, device, max_pixels)
        self._device, self._max_pixels = device, max_pixels
        self.name = self._encoding.info.shown
        self.fingerprint = self._encoding.info.fingerprint

    @property
    def dim(self) -> int:
        """Dimensions of an embedding."""
        return self._encoding.dim

    def embed(self, items: Any) -> NDArray[np.float32]:
        """(n, D) of length 1: of paths, bytes of image files, PIL pictures or pixels (uint8), one or a list.

        A picture that cannot be read is a ValueError that names it.
        """
        hashed = item_inputs.hash_items(item_inputs.as_list(items), self._encoding, self.dim)
        encoded = item_inputs.encode_items(hashed, self._encoding)
        vectors = [item.vector for item in encoded if item is not None]
        return np.stack(vectors) if vectors else np.empty((0, self.dim), np.float32)

    def verify(self, a: Any, b: Any, *, far: float | None = None) -> Verification:
        """Whether two items are the same, as in `Gallery.verify`; without a calibration, how similar they are."""
        return results.verify_with(self._encoding, a, b, far)

    def gallery(self, place: str | Path) -> Gallery:
        """The gallery in a file or in PostgreSQL, made if needed, with this encoder."""
        run = self._encoding.info.frozen or self._encoding.info.run
        return Gallery.open(place, run, device=self._device, max_pixels=self._max_pixels)

    def enrol(
        self,
        source: str | Path,
        gallery: str | Path | None = None,
        *,
        skip_unreadable: bool = False,
        progress: Callable[[int, int], None] | None = None,
        reading: data.Reading = PLAIN,
    ) -> Gallery:
        """The open gallery of a source: a folder of pictures, with or without class folders, or what `data.load` reads.

        gallery: where; by default beside the source, under its name: photos.gallery of photos/, which `nearkin serve
        photos/` uses too. What is enrolled already is not embedded again. Where there are enough labels, the gallery
        learns from them who is who. `enroll` is the same method. reading: how the files are read, see `data.load`.
        """
        options: dict[str, Any] = {"labelled": False, "group_column": groups.UNUSED, **reading.for_load()}
        items = data.load(source, **options)  # before a gallery is made
        warn_without_classes(items)
        opened = self.gallery(gallery_beside(source) if gallery is None else gallery)
        try:
            options = {"items": items, "skip_unreadable": skip_unreadable, "progress": progress}
            enrol_source(opened, str(source), unlabelled=True, **options)
            opened.calibrate_if_changed()
        except BaseException:
            opened.close()
            raise
        return opened

    enroll = enrol

    def __repr__(self) -> str:
        return f"nearkin.open({self.name!r})"


def open_encoder(run: str | Path, *, device: str = "auto", max_pixels: int = decode.MAX_PIXELS) -> Embedder:
    """An encoder, ready to use: of a run by its folder, or a pretrained one by its name.

    run: "runs/birds", "efficientnet-lite0", "timm:NAME", "hf:NAME". `nearkin.open` is this function.
    """
    return Embedder(run, device, max_pixels)


def gallery_beside(source: str | Path) -> Path:
    """The gallery of a folder of pictures: beside it, under its name."""
    path = Path(source).expanduser().absolute()
    resolved = path.resolve() if path.name in ("", "..") else path
    return resolved.with_name((resolved.name or "photos") + ENDING)
