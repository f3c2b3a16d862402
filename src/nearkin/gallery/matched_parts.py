"""Which part matched: heat maps over two pictures, or over a picture and that of an enrolled row."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin import models
from nearkin.core.errors import MissingRow, NoPicture
from nearkin.data import augment, decode
from nearkin.data.byte_limit import MAX_BYTES as MAX_FILE
from nearkin.data.byte_limit import read_file
from nearkin.gallery.items import Encoding, RawItem, decode_items, hash_items
from nearkin.gallery.schema import row_encoder, unpack
from nearkin.gallery.stores import Store

__all__ = ["Heat", "Matched", "RowPicture", "explain", "explain_row", "original", "row_pictures"]

TOLERANCE = 1e-4  # 1 - cosine to the row's own vector, up to which a picture is taken for the one that was enrolled


class Heat(NamedTuple):
    """A picture as the encoder sees it, and what each place of it adds to the similarity.

    heat.sum() + missing is the similarity. bias: what the bias of the encoder's head adds, spread evenly over heat.
    """

    picture: NDArray[np.uint8]  # (side, side) or (side, side, 3)
    heat: NDArray[np.float64]  # (h, w)
    bias: float
    missing: float


class Matched(NamedTuple):
    """The similarity of two pictures as a sum over the places of either; see `models.explain`.

    exact: nothing but rounding is missing. With a row of a gallery: source says whether its picture is the "original"
    or the "thumbnail", row_similarity is the one that a search finds, and note says why they may differ.
    """

    similarity: float
    a: Heat
    b: Heat
    exact: bool
    source: str = ""
    row_similarity: float | None = None
    note: str = ""


class RowPicture(NamedTuple):
    """A file from which the picture of a row may be read. source: "original" or "thumbnail"."""

    content: bytes
    source: str


def explain(run: str | Path, a: Any, b: Any, *, device: str = "auto", max_pixels: int = decode.MAX_PIXELS) -> Matched:
    """Which part of two pictures matched, by the encoder of a run: a heat map over each, whose sum is the similarity.

    a, b: paths, the bytes of image files, PIL pictures or pixels (H, W[, C]) uint8.
    """
    encoding = Encoding(run, device, max_pixels)
    check_takes_pictures(encoding)
    squares = [_square(name, item) for name, item in zip("ab", _decoded(encoding, (a, b)), strict=True)]
    return _matched(encoding, *squares)[0]


def check_takes_pictures(encoding: Encoding | None) -> None:
    if encoding is None:
        raise ValueError("explain needs an encoder, and the gallery has none")
    if not encoding.takes_pictures:
        raise ValueError(f"{encoding.info.run}: its encoder takes vectors, which have no places to show")


def _decoded(encoding: Encoding, items: Sequence[Any]) -> list[Any]:
    for name, item in zip("ab", items, strict=True):
        if getattr(item, "ndim", 2) < 2:
            raise ValueError(f"{name} must be a picture, got a vector, which has no places to show")
    return list(decode_items(hash_items(items, encoding, encoding.dim), encoding))


def _square(name: str, item: Any) -> NDArray[np.uint8]:
    if not isinstance(item, RawItem) or item.features is None:
        raise ValueError(
            f"{name} must be a picture, got {'a vector' if isinstance(item, RawItem) else 'its embedding'}"
        )
    return item.features


def _matched(encoding: Encoding, a: NDArray[np.uint8], b: NDArray[np.uint8]) -> tuple[Matched, Any]:
    """The explanation, and the unit embeddings (2, D)."""
    encoder = encoding.encoder
    squares = torch.from_numpy(np.stack([a, b])).to(encoding.device)
    inputs = augment.centre(squares, encoding.info.preparation["size"])
    explained = models.explain(encoder, inputs[:1], inputs[1:])
    pixels = (255 * inputs).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    heats = [
        Heat(shown[..., 0] if shown.shape[2] == 1 else shown, heat[0].cpu().numpy(), bias.item(), missing.item())
        for shown, heat, bias, missing in zip(pixels, explained.maps, explained.bias, explained.missing, strict=True)
    ]
    unit = torch.nn.functional.normalize(torch.cat(explained.embeddings).double(), dim=1).cpu().numpy()
    return Matched(explained.similarity.item(), heats[0], heats[1], explained.exact), unit


# --- a row of a gallery


def row_pictures(store: Store, id: int) -> list[RowPicture]:
    """What the picture of a row can be read from, the best first: the file it was enrolled from, its thumbnail.

    The file is that of the row's own name, where this has a folder: names of uploads have none and are never opened.
    """
    rows = store.rows([id])
    if id not in rows:
        raise MissingRow(id)
    content, thumbnail = original(rows[id].name), store.thumbnail(id)
    pictures = [RowPicture(content, "original")] if content else []
    pictures += [RowPicture(thumbnail, "thumbnail")] if thumbnail else []
    if not pictures:
        raise NoPicture(f"row {id} has no picture: it was enrolled as a vector, or its file is gone")
    return pictures


def has_original(name: str) -> bool:
    """Whether the name is the path of a regular file that is not too large."""
    if not os.path.dirname(name) or "\0" in name:
        return False
    with suppress(OSError, ValueError):
        path = Path(name)
        return path.is_file() and path.stat().st_size <= MAX_FILE
    return False


def original(name: str) -> bytes:
    """The content of a regular file; empty where there is none."""
    with suppress(OSError, ValueError):
        return read_file(name) if has_original(name) else b""
    return b""


def explain_row(
    encoding: Encoding, store: Store, item: Any, id: int, pictures: Sequence[tuple[Any, str]] | None = None
) -> Matched:
    """A decoded picture and a row. pictures: of the row, decoded, and their sources; by default all that there are."""
    query, rows = _square("item", item), store.rows([id])
    if pictures is None:
        pictures = _readable(encoding, row_pictures(store, id))
    if id not in rows:
        raise MissingRow(id)
    vector = unpack([rows[id].vector], encoding.dim)[0].astype(np.float64)
    found: tuple[Matched, float] | None = None
    changed = False
    for picture, source in pictures:
        matched, unit = _matched(encoding, query, _square("picture", picture))
        row_similarity = float(unit[0] @ vector)
        found = matched._replace(source=source, row_similarity=row_similarity), float(unit[1] @ vector)
        if found[1] >= 1 - TOLERANCE and source == "original":
            return found[0]
        if source == "original" and row_encoder(rows[id].metadata):
            what = f"row {id} was mapped from an earlier encoder; its picture has a similarity of"
            return found[0]._replace(note=f"{what} {matched.similarity:.4f}, that of the row is {row_similarity:.4f}")
        changed |= source == "original"
    if found is None or found[0].source == "original":
        raise NoPicture(f"row {id} has no picture: its file has changed or cannot be read, and there is no thumbnail")
    return found[0]._replace(note=_thumbnail_note(id, changed, found[0]))


def _thumbnail_note(id: int, changed: bool, matched: Matched) -> str:
    why = "has changed since it was enrolled" if changed else "is not available"
    return (
        f"the original of row {id} {why}, so its thumbnail is shown, whose similarity is {matched.similarity:.4f}; "
        f"that of the row is {matched.row_similarity:.4f}"
    )


def _readable(encoding: Encoding, pictures: Sequence[RowPicture]) -> list[tuple[Any, str]]:
    readable = []
    for content, source in pictures:
        with suppress(ValueError):
            readable.append((RawItem(b"", "", features=encoding.square(content, source)), source))
    return readable
