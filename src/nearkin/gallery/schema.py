"""What a gallery keeps of an item, byte for byte the same in every store, and the checksum that proves it."""

import json
import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Fields",
    "Filter",
    "Row",
    "bytes_checksum",
    "checksum",
    "fields_of",
    "filter_of",
    "meta_checksum",
    "packed",
    "picture_checksum",
    "unit",
    "unpacked",
]

METADATA = 16_384  # bytes of an item's metadata as JSON: a search returns up to 1,000 items with theirs
NAME = 4096  # characters of an item's name
DEEPEST = 16  # dicts and lists within one another

Floats: TypeAlias = NDArray[np.float32]
SUM = 8  # bytes of a checksum
HEAD, VECTOR_HEAD = struct.Struct(">qiii"), struct.Struct(">hh")


class Fields(NamedTuple):
    """A row before it has an id. vector: float32, big-endian, of length 1; metadata: JSON with sorted keys."""

    content: bytes  # sha256 of the item as it was given: who has it is enrolled already
    label: str
    name: str
    metadata: str
    vector: bytes
    thumbnail: bytes


class Row(NamedTuple):
    """A row as it was read back and found whole; its thumbnail is read apart."""

    id: int
    content: bytes
    label: str
    name: str
    metadata: str
    vector: bytes


class Filter(NamedTuple):
    """Which rows may be found: any of these labels, and of each key any of these values, as JSON; None: all."""

    labels: tuple[str, ...] | None
    keys: dict[str, tuple[str, ...]]


def checksum(id: int, content: bytes, label: str, name: str, metadata: str, vector: bytes) -> bytes:
    """Over every field with its length; PostgreSQL computes the same in `postgres.SUM`."""
    return bytes_checksum(id, content, label.encode(), name.encode(), metadata.encode(), vector)


def bytes_checksum(id: int, content: bytes, label: bytes, name: bytes, metadata: bytes, vector: bytes) -> bytes:
    """The same, of texts as they are stored."""
    head = HEAD.pack(id, len(label), len(name), len(metadata))
    vector_head = VECTOR_HEAD.pack(len(vector) // 4, 0)  # as pgvector sends it
    return sha256(b"".join((head, label, name, metadata, content, vector_head, vector))).digest()[:SUM]


def meta_checksum(said: str) -> bytes:
    return sha256(said.encode()).digest()[:SUM]


def picture_checksum(id: int, picture: bytes) -> bytes:
    return sha256(struct.pack(">q", id) + picture).digest()[:SUM]


def packed(rows: Floats) -> list[bytes]:
    """Each row of (n, D) as bytes."""
    width, content = 4 * rows.shape[1], np.ascontiguousarray(rows, ">f4").tobytes()
    return [content[i : i + width] for i in range(0, len(content), width)] if width else []


def unpacked(vectors: Sequence[bytes], dim: int) -> Floats:
    """(n, D) float32 of this machine."""
    rows: Floats = np.frombuffer(b"".join(vectors), ">f4").reshape(-1, dim).astype(np.float32)
    return rows


def unit(rows: NDArray[Any], what: str = "vectors") -> Floats:
    """Rows (n, D) brought to length 1 in float64, kept in float32."""
    wide = np.asarray(rows, np.float64)
    largest = np.abs(wide).max(1, initial=0.0, keepdims=True)
    wrong = int((~np.isfinite(largest)).sum())
    if wrong:
        raise ValueError(f"{what} must be finite, got NaN or Inf in {wrong} of {len(wide)}")
    if nowhere := int((largest == 0).sum()):
        raise ValueError(f"{what} must not be all 0, which points nowhere; got {nowhere} such")
    # By a power of 2, so that no bit of a usual row changes, and the squares of no row are beyond what float64 has.
    wide = np.ldexp(wide, -np.frexp(largest)[1])
    length = np.sqrt((wide * wide).sum(1, keepdims=True))
    rows_of_1: Floats = (wide / length).astype(np.float32)
    return rows_of_1


def fields_of(content: bytes, label: str, name: str, metadata: object, vector: bytes, thumbnail: bytes) -> Fields:
    """The row of an item, name and metadata checked for what one of the stores could not keep."""
    return Fields(content, label, name_of(name) if name else "", metadata_of(metadata), vector, thumbnail)


def label_of(label: object) -> str:
    if not isinstance(label, str):
        raise TypeError(f"label must be text, got {shortened(label)}")
    if not label.strip() or len(label) > 500:
        raise ValueError(f"label must have 1 to 500 characters, got {len(label.strip())}")
    if not _storable(label):
        raise ValueError(f"label must be text without NUL and broken characters, got {label!r}")
    return label


def name_of(name: str) -> str:
    """Only shown, so what cannot be kept is replaced or left out."""
    return name[:NAME].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def metadata_of(metadata: object) -> str:
    if metadata is None or metadata == {}:
        return "{}"
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) and key for key in metadata):
        raise TypeError(f"metadata must be a dict whose keys are text, got {shortened(metadata)}")
    bounded(metadata, "metadata")
    if "label" in metadata:
        raise ValueError('metadata must not have the key "label": a filter understands the item\'s own label by it')
    try:
        text = json.dumps(dict(metadata), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata must be plain JSON values: {error}") from None
    if "\\u0000" in text or not _storable(text):
        raise ValueError("metadata must be text without NUL and broken characters")
    if len(text.encode()) > METADATA:
        raise ValueError(f"metadata must have at most {METADATA:,} bytes as JSON, got {len(text.encode()):,}")
    return text


def bounded(value: object, what: str, parts: int = METADATA) -> None:
    """Raises where dicts and lists stand deeper within one another than `DEEPEST`, or hold more parts than may be."""
    level: list[Any] = [value]
    count = 0
    for _ in range(DEEPEST + 1):
        level = [one for one in level if isinstance(one, Mapping | list | tuple)]
        if not level:
            return
        inner: list[Any] = []
        for one in level:
            count += len(one)
            if count > parts:
                raise ValueError(f"{what} must have at most {parts:,} parts")
            inner.extend(one.values() if isinstance(one, Mapping) else one)
        level = inner
    raise ValueError(f"{what} must be at most {DEEPEST} deep: dicts and lists within one another")


def shortened(value: object, most: int = 100) -> str:
    """For a sentence; what is nested too deep to be written is only named."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deep {type(value).__name__}"
    return text if len(text) <= most else text[:most] + "…"


def filter_of(filter: object) -> Filter | None:
    """{"label": one or a list, "colour": one or a list}: all keys must hold, of a list any value."""
    if filter is None or filter == {}:
        return None
    if not isinstance(filter, Mapping) or not all(isinstance(key, str) for key in filter):
        raise TypeError(f"filter must be a dict of keys and values, got {shortened(filter)}")
    chosen = {key: value if isinstance(value, list | tuple | set) else [value] for key, value in filter.items()}
    labels = chosen.pop("label", None)
    if labels is not None and not all(isinstance(label, str) for label in labels):
        raise TypeError(f"filter label must be text, got {shortened(filter['label'])}")
    return Filter(
        None if labels is None else tuple(labels),
        {key: tuple(scalar(value, key) for value in values) for key, values in chosen.items()},
    )


def scalar(value: object, key: str = "") -> str:
    """A value as JSON, so that equals are equal: 1 is 1.0 and neither true nor "1"."""
    if not isinstance(value, str | int | float | bool | None):
        raise TypeError(
            f'filter "{key}" must be text, a number, true, false or null, or a list of these, got {shortened(value)}'
        )
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f'filter "{key}" must be finite, got {value}')
        value = int(value) if value.is_integer() else value
    return json.dumps(value, ensure_ascii=False)


def _storable(text: str) -> bool:
    if "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
