"""From an item to a row: a path, picture or vector is hashed, looked up, encoded by the run's encoder and added."""

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin import models
from nearkin.core import checks, cpu_pool, files
from nearkin.core.errors import EncoderChanged, LabelConflict, UnreadablePicture
from nearkin.data import augment, decode
from nearkin.data.byte_limit import read_file
from nearkin.gallery.schema import Floats, KnownRows, NewRow, new_row, pack, shortened, unit
from nearkin.gallery.stores import Added, Store
from nearkin.models.frozen import encoder_folder
from nearkin.models.io import check_length, fingerprint

__all__ = [
    "Batch",
    "EncoderInfo",
    "Encoding",
    "RawItem",
    "Seen",
    "as_list",
    "decode_items",
    "encode_items",
    "encoder_info",
    "enrol_batch",
    "hash_items",
    "is_embedding",
    "is_encoded",
]

ENCODER_BATCH = 128
SIMPLE = (str, int, bool, type(None))  # of metadata: no float, of which -0.0 equals 0.0
THUMBNAIL = 96  # pixels of its longer side
LONGEST_NAME = 300  # of a path in a message


class Seen(NamedTuple):
    """An encoded item; every method takes it in place of the item, and does not encode it again."""

    vector: Floats  # (D,), of length 1
    content: bytes  # sha256: equal for equal items
    name: str
    thumbnail: bytes  # PNG or JPEG; empty for vectors
    quality: float | None = None  # the length of the embedding, where the encoder leaves it free
    encoder: str | None = None  # the fingerprint of the encoder that made it; None for a vector that came as such


class RawItem(NamedTuple):
    """A hashed item that is not encoded yet: a picture, the input of the encoder, or a vector."""

    content: bytes
    name: str
    picture: bytes | NDArray[Any] | decode.Opened | None = None
    features: NDArray[Any] | None = None
    vector: NDArray[Any] | None = None


# --- the encoder of a run


class EncoderInfo(NamedTuple):
    """The content of encoder.json, read without the weights.

    fingerprint: of weights, architecture and preparation; whatever changes an embedding changes it. lengths: to which
    embeddings may be cut. short: the length to which they are cut, None: the full one.
    """

    run: Path
    fingerprint: str
    preparation: dict[str, Any]
    dim: int | None
    free_length: bool = False  # embeddings are not scaled to unit length: the length is the quality of an item
    lengths: tuple[int, ...] = ()
    short: int | None = None
    frozen: str | None = None  # the name of a pretrained encoder that stands in place of a run
    compatible: str | None = None  # the fingerprint of an old encoder whose rows it was trained to search

    @property
    def shown(self) -> str:
        """As the user has written it."""
        return self.frozen or str(self.run)


def encoder_info(run: str | Path, dim: int | None = None) -> EncoderInfo:
    """run: a folder, or an encoder's name. dim: of embeddings that are cut to a length that it was trained for."""
    folder = encoder_folder(run)
    path = folder / "encoder.json"
    try:
        plain = files.read_json(path)
        lengths = tuple(plain.get("lengths") or ())
        full = plain["settings"].get("dim") or (lengths[0] if lengths else None)
        short = None if dim == full else dim
        identity, preparation = fingerprint(plain, short), plain["preparation"]
        free_length = plain["settings"].get("normalize") is False
        kind = preparation.get("kind")
        old = plain.get("compatible", {}).get("encoder")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: not the description of an encoder ({error})") from None
    if kind not in ("pictures", "vectors"):
        raise ValueError(
            f"{path}: does not say how items are prepared for the encoder; it must come from nearkin train"
        )
    if short is not None:
        check_length(plain, short, run)
    frozen = plain.get("frozen")
    return EncoderInfo(folder, identity, preparation, short or full, free_length, lengths, short, frozen, old)


class Encoding:
    """The encoder of a run: pictures or features to vectors of length 1; the first item loads the weights.

    dim: keeps so many dimensions, a length that the run was trained for.
    """

    def __init__(
        self, run: str | Path, device: str = "auto", max_pixels: int = decode.MAX_PIXELS, dim: int | None = None
    ) -> None:
        self.device = checks.device(device)
        checks.integer("max_pixels", max_pixels, 1)
        self.info, self.max_pixels = encoder_info(run, dim), max_pixels
        self._encoder: models.Encoder | None = None

    def shorten(self, dim: int) -> None:
        """Keeps so many dimensions from now on, as `dim` does."""
        if dim != self.dim:
            self.info, self._encoder = encoder_info(self.info.run, dim), None

    @property
    def takes_pictures(self) -> bool:
        return bool(self.info.preparation["kind"] == "pictures")

    @property
    def dim(self) -> int:
        return self.info.dim or self._loaded().dim

    def square(self, data: bytes | NDArray[Any] | decode.Opened, name: str) -> NDArray[np.uint8]:
        """One picture as the encoder takes it: (side, side, channels)."""
        preparation = self.info.preparation
        options = {"side": preparation["stored"], "fit": preparation["fit"], "channels": preparation["channels"]}
        try:
            return decode.square(data, max_pixels=self.max_pixels, **options)
        except UnreadablePicture as error:
            raise ValueError(f"{name} {error}") from None

    @torch.inference_mode()
    def embed(self, rows: Sequence[NDArray[Any]]) -> tuple[Floats, list[float | None]]:
        """Squares, or vectors of features, to (n, D) of length 1, and the quality of each."""
        encoder, parts = self._loaded(), []
        for start in range(0, len(rows), ENCODER_BATCH):
            batch = torch.from_numpy(np.stack(list(rows[start : start + ENCODER_BATCH]))).to(self.device)
            if self.takes_pictures:
                batch = augment.centre(batch, self.info.preparation["size"])
            parts.append(encoder(batch).float().cpu().numpy())
        if not parts:
            return np.empty((0, self.dim), np.float32), []
        embeddings = np.concatenate(parts)
        quality: list[float | None] = [None] * len(embeddings)
        if self.info.free_length:
            quality = np.linalg.norm(embeddings.astype(np.float64), axis=1).tolist()
        return unit(embeddings, "embeddings"), quality

    def load(self) -> None:
        """Loads the weights now, and not with the first item."""
        self._loaded()

    @property
    def encoder(self) -> models.Encoder:
        """The encoder itself."""
        return self._loaded()

    @torch.inference_mode(False)  # weights of inference mode could never be used for a gradient
    def _loaded(self) -> models.Encoder:
        if self._encoder is None:
            self._encoder, _ = models.load(self.info.run, self.device)
            if self.info.short is not None:
                self._encoder.shorten(self.info.short)
        return self._encoder


# --- hashing and encoding


def as_list(items: Any) -> list[Any]:
    """Items one by one, from a path, bytes, a picture, a vector, a matrix of vectors, or a list of these."""
    if isinstance(items, torch.Tensor):
        items = items.detach().cpu().numpy()
    if isinstance(items, np.ndarray) and items.ndim == 2 and items.dtype.kind == "f":
        return list(items)
    if isinstance(items, Seen | RawItem | str | bytes | os.PathLike | np.ndarray) or _is_image(items):
        return [items]
    if isinstance(items, list | tuple):
        if items and all(isinstance(item, int | float) for item in items):
            raise TypeError(f"a vector must be an array, as np.array(…), got a {type(items).__name__} of numbers")
        return list(items)
    raise TypeError(
        f"items must be paths, pictures (PIL, bytes or uint8 arrays) or vectors, got {type(items).__name__}"
    )


def hash_items(items: Sequence[Any], encoding: Encoding | None, dim: int) -> "list[Seen | RawItem]":
    """Reads and hashes each; nothing is decoded or encoded."""
    return [item if isinstance(item, Seen | RawItem) else _hashed(item, encoding, dim) for item in items]


def decode_items(
    items: "Sequence[Seen | RawItem]", encoding: Encoding | None, unreadable: list[str] | None = None
) -> "list[Seen | RawItem | None]":
    """Pictures as the encoder takes them. An unreadable one is an error, or a sentence in `unreadable` and None."""
    decoded: list[Seen | RawItem | None] = list(items)
    for i, item in enumerate(items):
        if isinstance(item, RawItem) and item.picture is not None:
            assert encoding is not None
            try:
                square = encoding.square(item.picture, item.name or "the picture")
                decoded[i] = item._replace(picture=None, features=square)
            except ValueError as error:
                if unreadable is None:
                    raise
                unreadable.append(str(error))
                decoded[i] = None
    return decoded


def encode_items(
    items: "Sequence[Seen | RawItem]", encoding: Encoding | None, unreadable: list[str] | None = None
) -> list[Seen | None]:
    """All of them. An unreadable picture is an error, or a sentence in `unreadable` and None."""
    size = len(items) or 1
    if encoding is not None and encoding.takes_pictures:
        encoding.load()
        size = cpu_pool.BATCH if encoding.device.type == "cpu" else ENCODER_BATCH
    strict, encoded = unreadable is None, list[Seen | None]()
    pieces = [items[start : start + size] for start in range(0, len(items), size)]
    for piece, sentences in cpu_pool.mapped(lambda piece: _encode(piece, encoding, strict), pieces):
        encoded += piece
        if unreadable is not None:
            unreadable += sentences
    return encoded


def _encode(
    items: "Sequence[Seen | RawItem]", encoding: Encoding | None, strict: bool
) -> tuple[list[Seen | None], list[str]]:
    """These items, encoded together; and a sentence for each unreadable picture."""
    encoded: list[Seen | None] = [None] * len(items)
    inputs: list[tuple[int, RawItem, NDArray[Any]]] = []
    unreadable: list[str] = []
    for i, item in enumerate(decode_items(items, encoding, None if strict else unreadable)):
        if item is None or isinstance(item, Seen):
            encoded[i] = item
        elif item.vector is not None:
            encoded[i] = Seen(item.vector, item.content, item.name, b"")
        else:
            assert item.features is not None
            inputs.append((i, item, item.features))
    if inputs:
        assert encoding is not None
        embedded = encoding.embed([features for _, _, features in inputs])
        for (i, item, features), vector, quality in zip(inputs, *embedded, strict=True):
            thumbnail = _thumbnail(features) if encoding.takes_pictures else b""
            encoded[i] = Seen(vector, item.content, item.name, thumbnail, quality, encoding.info.fingerprint)
    return encoded, unreadable


def is_embedding(item: Any, encoding: Encoding | None) -> bool:
    """Whether the item needs no encoder: it is encoded already, or is a vector of the gallery's own space."""
    if isinstance(item, Seen):
        return True
    return getattr(item, "ndim", 0) == 1 and (encoding is None or encoding.takes_pictures)


def is_encoded(item: Any) -> bool:
    """Whether the item is encoded, or a vector, which a gallery that was opened without a run takes as an embedding."""
    return item.vector is not None if isinstance(item, RawItem) else is_embedding(item, None)


def _from_vectors(rows: NDArray[Any], dim: int) -> list[Seen]:
    """Embeddings (n, D), all at once: faster than `encode_items`, with the same result."""
    vectors = unit(_check_vectors(rows, dim))
    return [
        Seen(vector, hashlib.sha256(b"vector" + content).digest(), "", b"")
        for vector, content in zip(vectors, pack(vectors), strict=True)
    ]


def _hashed(item: Any, encoding: Encoding | None, dim: int) -> RawItem:
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu().numpy()
    if isinstance(item, np.ndarray) and item.ndim == 1:
        return _hashed_vector(item, encoding, dim)
    if not isinstance(item, str | bytes | os.PathLike | np.ndarray | decode.Opened) and not _is_image(item):
        raise TypeError(f"an item must be a path, a picture or a vector, got {type(item).__name__}")
    if isinstance(item, np.ndarray) and item.dtype.kind not in "buif":
        raise TypeError(f"a picture must be of numbers, got {item.dtype}")
    if encoding is None:
        raise ValueError(
            f"{_described(item)} needs an encoder, and the gallery has none: it takes vectors of {dim} numbers"
        )
    if not encoding.takes_pictures:
        features = encoding.info.preparation["features"]
        raise ValueError(
            f"items must be vectors of {features} numbers as the run's encoder takes them, got {_described(item)}"
        )
    name, picture = "", item
    if isinstance(item, str | os.PathLike):
        name, picture = os.fspath(item), _file_bytes(item)
    elif _is_image(item):
        picture = _pixels(item)
    return RawItem(_picture_digest(picture), name, picture)


def _hashed_vector(item: NDArray[Any], encoding: Encoding | None, dim: int) -> RawItem:
    """The features of an encoder that takes vectors, otherwise an embedding."""
    if encoding is None or encoding.takes_pictures:
        vector = unit(_check_vectors(item[None], dim))
        return RawItem(hashlib.sha256(b"vector" + pack(vector)[0]).digest(), "", vector=vector[0])
    numbers = _check_vectors(item[None], encoding.info.preparation["features"], "as the run's encoder takes them")[0]
    if not np.isfinite(numbers).all():
        raise ValueError("vectors must be finite, got NaN or Inf")
    if np.abs(numbers).max() > np.finfo(np.float32).max:
        raise ValueError(
            "vectors must be within float32, as the run's encoder takes them (up to 3.4e38), got "
            f"{np.abs(numbers).max():g}"
        )
    features = numbers.astype(np.float32)
    return RawItem(hashlib.sha256(b"features" + pack(features[None])[0]).digest(), "", features=features)


def _check_vectors(rows: NDArray[Any], dim: int, owner: str = "as the gallery has") -> NDArray[Any]:
    if rows.dtype.kind not in "fiu":
        raise TypeError(f"vectors must be numbers, got {rows.dtype}")
    if rows.shape[1] != dim:
        raise ValueError(f"vectors must have {dim} dimensions {owner}, got {rows.shape[1]}")
    return rows


def _file_bytes(path: str | os.PathLike[str]) -> bytes:
    try:
        return read_file(path)
    except (OSError, ValueError) as error:  # ValueError: a text that no file system takes for a path
        raise ValueError(f"{_described(path)}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _is_image(item: Any) -> bool:
    return type(item).__module__.startswith("PIL.")


def _pixels(image: Any) -> NDArray[Any]:
    """A PIL picture as an array that `decode.square` takes."""
    if image.mode not in ("L", "RGB", "RGBA", "I;16"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    return np.asarray(image)


def _picture_digest(picture: bytes | NDArray[Any] | decode.Opened) -> bytes:
    if isinstance(picture, decode.Opened):
        picture = picture.data
    if isinstance(picture, bytes):
        return hashlib.sha256(picture).digest()
    head = f"{picture.dtype.str} {picture.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(picture).tobytes()).digest()


def _thumbnail(square: NDArray[np.uint8]) -> bytes:
    """The encoder's input, small: PNG where that costs little, else JPEG."""
    from PIL import Image

    image = Image.fromarray(square[..., 0] if square.shape[2] == 1 else square)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    out = io.BytesIO()
    if max(image.size) <= 64:
        image.save(out, "PNG")
    else:
        image.save(out, "JPEG", quality=85)
    return out.getvalue()


def _described(item: Any) -> str:
    if isinstance(item, np.ndarray):
        return f"an array of shape {item.shape}"
    if not isinstance(item, str | os.PathLike):
        return f"an item of type {type(item).__name__}"
    text = os.fspath(item)
    return text if 0 < len(text) <= LONGEST_NAME else shortened(text)


# --- adding


class Batch(NamedTuple):
    """Items that are added in one transaction, one entry per item; name None: the item's own. keep: `Gallery.enrol`."""

    items: list[Any]
    labels: list[str]
    metadata: list[Any]
    names: list[str | None]
    keep: bool


def enrol_batch(
    store: Store, encoding: Encoding | None, dim: int, batch: Batch, known: KnownRows | None = None
) -> list[Added]:
    """The row of each item. An enrolled item is not encoded again.

    known: the enrolled ones by content, where the caller has looked them up. Otherwise that is done here, once; not for
    vectors, which need no encoder. Items that are new by then are looked up once more inside the transaction.
    """
    first = batch.items[0]
    if known is None and all(
        isinstance(item, np.ndarray) and item.shape == first.shape and is_embedding(item, encoding)
        for item in batch.items
    ):
        known, encoded = {}, list[Any](_from_vectors(np.stack(batch.items), dim))
    else:
        hashed = hash_items(batch.items, encoding, dim)
        if known is None:
            known = store.look_up([item.content for item in hashed])
        new_items = iter(encode_items([item for item in hashed if item.content not in known], encoding))
        encoded = [item if item.content in known else next(new_items) for item in hashed]
    added: dict[int, Added] = {}
    for i, item in enumerate(encoded):
        if item.content in known:
            id, label = known[item.content]
            if label != batch.labels[i] and not batch.keep:
                raise LabelConflict(batch.names[i] or item.name, id, label, batch.labels[i])
            added[i] = Added(id, False, label)
    new = [i for i in range(len(encoded)) if i not in added]
    if new:
        made = {encoded[i].encoder or (None if encoding is None else encoding.info.fingerprint) for i in new}
        if len(made) > 1:
            raise EncoderChanged(store.where)
        rows = store.add(_new_rows(encoded, batch, new), batch.keep, encoder=made.pop())
        added.update(zip(new, rows, strict=True))
    return [added[i] for i in range(len(encoded))]


def _new_rows(encoded: list[Seen], batch: Batch, new: list[int]) -> list[NewRow]:
    rows, texts = [], dict[Any, str]()
    for i, vector in zip(new, pack(np.stack([encoded[i].vector for i in new])), strict=True):
        item, name = encoded[i], batch.names[i]
        name = item.name if name is None else name
        facts = (item.content, batch.labels[i], name, batch.metadata[i], vector, item.thumbnail)
        key = _metadata_key(batch.metadata[i]) if item.quality is None else None
        if key is None or key not in texts:
            rows.append(new_row(*facts, item.quality))
        else:
            rows.append(new_row(*facts, text=texts[key]))
        if key is not None:
            texts[key] = rows[-1].metadata
    return rows


def _metadata_key(metadata: Any) -> tuple[Any, ...] | None:
    """Equal for metadata with the same JSON; None where that is not simple to tell."""
    if type(metadata) is not dict or not all(type(value) in SIMPLE for value in metadata.values()):
        return None
    return tuple((key, type(value), value) for key, value in metadata.items())
