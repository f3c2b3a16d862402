"""What may be handed to a gallery, and what becomes of it: a vector, the hash of its content, a name, a thumbnail."""

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.gallery.encoding import Encoding
from nearkin.gallery.schema import Floats, packed, unit

__all__ = ["Raw", "Seen", "contents", "decoded", "encoded", "listed", "vectors"]

THUMBNAIL = 96  # pixels of its longer side


class Seen(NamedTuple):
    """An item as a gallery sees it; every method takes it in place of the item, and the encoder is not asked again."""

    vector: Floats  # (D,), of length 1
    content: bytes  # sha256: the same item has the same
    name: str
    thumbnail: bytes  # PNG or JPEG; empty for vectors


class Raw(NamedTuple):
    """An item that was looked at but not encoded: a picture, what the encoder is fed, or a vector."""

    content: bytes
    name: str
    picture: bytes | NDArray[Any] | None = None
    features: NDArray[Any] | None = None
    vector: NDArray[Any] | None = None


def listed(items: Any) -> tuple[list[Any], bool]:
    """Items one by one, and whether there was a single one: a path, bytes, a picture, a vector, a matrix of vectors."""
    if isinstance(items, torch.Tensor):
        items = items.detach().cpu().numpy()
    if isinstance(items, np.ndarray) and items.ndim == 2 and items.dtype.kind == "f":
        return list(items), False
    if isinstance(items, Seen | Raw | str | bytes | os.PathLike | np.ndarray) or _is_image(items):
        return [items], True
    if isinstance(items, list | tuple):
        return list(items), False
    raise TypeError(
        f"items must be paths, pictures (PIL, bytes or uint8 arrays) or vectors, got {type(items).__name__}"
    )


def contents(items: Sequence[Any], encoding: Encoding | None, dim: int) -> "list[Seen | Raw]":
    """The hash of each, before anything is encoded."""
    return [item if isinstance(item, Seen | Raw) else _raw(item, encoding, dim) for item in items]


def decoded(
    raws: "Sequence[Seen | Raw]", encoding: Encoding | None, bad: list[str] | None = None
) -> "list[Seen | Raw | None]":
    """Pictures as the encoder is fed. One that cannot be read is an error, or a line in `bad` and None."""
    done: list[Seen | Raw | None] = list(raws)
    for i, raw in enumerate(raws):
        if isinstance(raw, Raw) and raw.picture is not None:
            assert encoding is not None
            try:
                square = encoding.square(raw.picture, raw.name or "the picture")
                done[i] = raw._replace(picture=None, features=square)
            except ValueError as error:
                if bad is None:
                    raise
                bad.append(str(error))
                done[i] = None
    return done


def encoded(raws: "Sequence[Seen | Raw]", encoding: Encoding | None, bad: list[str] | None = None) -> list[Seen | None]:
    """All of them, encoded together. A picture that cannot be read is an error, or a line in `bad` and None."""
    done: list[Seen | None] = [None] * len(raws)
    fed: list[tuple[int, Raw, NDArray[Any]]] = []
    for i, raw in enumerate(decoded(raws, encoding, bad)):
        if raw is None or isinstance(raw, Seen):
            done[i] = raw
        elif raw.vector is not None:
            done[i] = Seen(raw.vector, raw.content, raw.name, b"")
        else:
            assert raw.features is not None
            fed.append((i, raw, raw.features))
    if fed:
        assert encoding is not None
        vectors = encoding.embed([row for _, _, row in fed])
        for (i, raw, row), vector in zip(fed, vectors, strict=True):
            picture = _thumbnail(row) if encoding.takes_pictures else b""
            done[i] = Seen(vector, raw.content, raw.name, picture)
    return done


def vectors(rows: NDArray[Any], dim: int) -> list[Seen]:
    """Embeddings (n, D), all at once: as `see` does for each, without its cost."""
    ready = unit(_fits(rows, dim, "vectors"))
    return [
        Seen(vector, hashlib.sha256(b"vector" + content).digest(), "", b"")
        for vector, content in zip(ready, packed(ready), strict=True)
    ]


def _raw(item: Any, encoding: Encoding | None, dim: int) -> Raw:
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu().numpy()
    if isinstance(item, np.ndarray) and item.ndim == 1:
        return _vector(item, encoding, dim)
    if encoding is None:
        raise ValueError(
            f"{_said(item)} needs an encoder: open the gallery with run=RUN (only vectors of {dim} do without)"
        )
    if not encoding.takes_pictures:
        features = encoding.said.preparation["features"]
        raise ValueError(
            f"items must be vectors of {features} numbers as the run's encoder takes them, got {_said(item)}"
        )
    name, picture = "", item
    if isinstance(item, str | os.PathLike):
        name, picture = os.fspath(item), _file(Path(item))
    elif _is_image(item):
        picture = _pixels(item)
    elif not isinstance(item, bytes | np.ndarray):
        raise TypeError(f"an item must be a path, a picture or a vector, got {type(item).__name__}")
    return Raw(_digest(picture), name, picture)


def _vector(item: NDArray[Any], encoding: Encoding | None, dim: int) -> Raw:
    """Features where the encoder takes vectors, an embedding else."""
    if encoding is None or encoding.takes_pictures:
        vector = unit(_fits(item[None], dim, "vectors"))
        return Raw(hashlib.sha256(b"vector" + packed(vector)[0]).digest(), "", vector=vector[0])
    wanted = encoding.said.preparation["features"]
    numbers = _fits(item[None], wanted, "vectors", "as the run's encoder takes them")[0]
    if not np.isfinite(numbers).all():
        raise ValueError("vectors must be finite, got NaN or Inf")
    if np.abs(numbers).max() > np.finfo(np.float32).max:
        raise ValueError(
            "vectors must be within float32, as the run's encoder takes them (up to 3.4e38), got "
            f"{np.abs(numbers).max():g}"
        )
    features = numbers.astype(np.float32)
    return Raw(hashlib.sha256(b"features" + packed(features[None])[0]).digest(), "", features=features)


def _fits(rows: NDArray[Any], dim: int, what: str, owner: str = "as the gallery has") -> NDArray[Any]:
    if rows.dtype.kind not in "fiu":
        raise TypeError(f"{what} must be numbers, got {rows.dtype}")
    if rows.shape[1] != dim:
        raise ValueError(f"{what} must have {dim} dimensions {owner}, got {rows.shape[1]}")
    return rows


def _file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None


def _is_image(item: Any) -> bool:
    return type(item).__module__.startswith("PIL.")


def _pixels(image: Any) -> NDArray[Any]:
    """A PIL picture as the array that `pictures.decode` takes."""
    kept = (
        image
        if image.mode in ("L", "RGB", "RGBA", "I;16")
        else image.convert("RGBA" if image.has_transparency_data else "RGB")
    )
    return np.asarray(kept)


def _digest(picture: bytes | NDArray[Any]) -> bytes:
    if isinstance(picture, bytes):
        return hashlib.sha256(picture).digest()
    head = f"{picture.dtype.str} {picture.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(picture).tobytes()).digest()


def _thumbnail(square: NDArray[np.uint8]) -> bytes:
    """What the encoder was shown, small: PNG where that costs little, else JPEG."""
    from PIL import Image

    image = Image.fromarray(square[..., 0] if square.shape[2] == 1 else square)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    out = io.BytesIO()
    if max(image.size) <= 64:
        image.save(out, "PNG")
    else:
        image.save(out, "JPEG", quality=85)
    return out.getvalue()


def _said(item: Any) -> str:
    if isinstance(item, np.ndarray):
        return f"an array of shape {item.shape}"
    return str(item) if isinstance(item, str | os.PathLike) else f"an item of type {type(item).__name__}"
