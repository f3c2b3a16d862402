"""What every store keeps, byte for byte the same: rows and facts with their checksums, labels, metadata, filters."""

import json
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from operator import index
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "UNLABELLED",
    "Facts",
    "Filter",
    "Floats",
    "KnownRows",
    "NewRow",
    "Renewed",
    "Row",
    "StoredRow",
    "bounded",
    "bridged_metadata",
    "bytes_checksum",
    "check_label",
    "checksum",
    "facts_of_text",
    "metadata_json",
    "new_row",
    "note_checksum",
    "ours",
    "pack",
    "parse_filter",
    "parse_metadata",
    "read_facts",
    "read_metadata",
    "renewed_metadata",
    "row_encoder",
    "scalar_json",
    "shortened",
    "thumbnail_checksum",
    "unit",
    "unpack",
]

FORMAT = 1  # increase it, with a step in `migration`, when the readers of today could not understand a gallery
UNLABELLED = "unlabelled"  # the label of items that have none: they are found, and no answer of `identify`
QUALITY = "nearkin.quality"  # the key of the metadata under which a row has the quality of its item, where it is known
ENCODER = (
    "nearkin.encoder"  # the key under which a row of an earlier encoder, mapped into the space of today's, names it
)
MAX_METADATA = 16_384  # bytes of an item's metadata as JSON: a search returns up to 1,000 items with theirs
MAX_NAME = 4096  # characters of an item's name
LENGTH = 1e-3  # that the squared length of a stored vector may differ from 1
UNIT_ROWS = 4096  # brought to length 1 at a time
MAX_DEPTH = 16  # levels of nested dicts and lists

Floats: TypeAlias = NDArray[np.float32]
KnownRows: TypeAlias = dict[bytes, tuple[int, str]]  # id and label of enrolled items, by content
CHECKSUM_BYTES = 8
HEAD, VECTOR_HEAD = struct.Struct(">qiii"), struct.Struct(">hh")


@contextmanager
def ours(what: str) -> Iterator[None]:
    """One sentence for what has parts that nearkin does not write: a checksum does not say who wrote it."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"{what} is none that nearkin wrote") from None


# --- rows


class NewRow(NamedTuple):
    """A row before it has an id. vector: float32, big-endian, of length 1; metadata: JSON with sorted keys."""

    content: bytes  # sha256 of the item as it came in: equal content is the same item
    label: str
    name: str
    metadata: str
    vector: bytes
    thumbnail: bytes


class Row(NamedTuple):
    """A row that was read and matches its checksum; its thumbnail is read separately."""

    id: int
    content: bytes
    label: str
    name: str
    metadata: str
    vector: bytes


class StoredRow(NamedTuple):
    """A row as backup, restore and copy move it: texts as bytes, with its checksum and its thumbnail."""

    id: int
    content: bytes
    label: bytes
    name: bytes
    metadata: bytes
    vector: bytes
    sum: bytes
    thumbnail: bytes


class Renewed(NamedTuple):
    """The embedding of an enrolled item by the encoder of today, for the row that has this id and content."""

    id: int
    content: bytes
    vector: bytes
    quality: float | None


def checksum(id: int, content: bytes, label: str, name: str, metadata: str, vector: bytes) -> bytes:
    """Over every field with its length; PostgreSQL computes the same in `postgres.CHECKSUM`."""
    return bytes_checksum(id, content, label.encode(), name.encode(), metadata.encode(), vector)


def bytes_checksum(id: int, content: bytes, label: bytes, name: bytes, metadata: bytes, vector: bytes) -> bytes:
    """The same, with texts as they are stored."""
    head = HEAD.pack(id, len(label), len(name), len(metadata))
    vector_head = VECTOR_HEAD.pack(len(vector) // 4, 0)  # as pgvector sends it
    return sha256(b"".join((head, label, name, metadata, content, vector_head, vector))).digest()[:CHECKSUM_BYTES]


def thumbnail_checksum(id: int, thumbnail: bytes) -> bytes:
    return sha256(struct.pack(">q", id) + thumbnail).digest()[:CHECKSUM_BYTES]


def note_checksum(key: str, text: str) -> bytes:
    return sha256(f"{len(key)} {key}{text}".encode()).digest()[:CHECKSUM_BYTES]


def pack(rows: Floats) -> list[bytes]:
    """Each row of (n, D) as bytes."""
    width, content = 4 * rows.shape[1], np.ascontiguousarray(rows, ">f4").tobytes()
    return [content[i : i + width] for i in range(0, len(content), width)] if width else []


def unpack(vectors: Sequence[bytes], dim: int) -> Floats:
    """(n, D) float32 in this machine's byte order."""
    content = b"".join(vectors)
    if len(content) != 4 * dim * len(vectors):
        raise ValueError(f"a row of the gallery has no vector of {dim} numbers, and is none that nearkin wrote")
    rows: Floats = np.frombuffer(content, ">f4").reshape(-1, dim).astype(np.float32)
    if not (np.abs(np.einsum("nd,nd->n", rows, rows) - 1) < LENGTH).all():  # also where it is NaN
        raise ValueError("a row of the gallery has a vector that is not of length 1, and is none that nearkin wrote")
    return rows


def unit(rows: NDArray[Any], what: str = "vectors") -> Floats:
    """Rows (n, D) divided by their length in float64, returned in float32."""
    rows = np.asarray(rows)
    parts = [slice(start, start + UNIT_ROWS) for start in range(0, len(rows), UNIT_ROWS)]  # small temporary arrays
    largest = np.zeros((len(rows), 1))
    for part in parts:
        largest[part] = np.abs(rows[part].astype(np.float64)).max(1, initial=0.0, keepdims=True)
    infinite = int((~np.isfinite(largest)).sum())
    if infinite:
        raise ValueError(f"{what} must be finite, got NaN or Inf in {infinite} of {len(rows)}")
    if zeros := int((largest == 0).sum()):
        raise ValueError(f"{what} must not be all 0, which has no direction; got {zeros} such")
    normalized: Floats = np.empty(rows.shape, np.float32)
    for part in parts:
        # Scaled by a power of 2: no bit of an ordinary row changes, and no square overflows float64.
        wide = np.ldexp(rows[part].astype(np.float64), -np.frexp(largest[part])[1])
        normalized[part] = wide / np.sqrt((wide * wide).sum(1, keepdims=True))
    return normalized


# --- labels, names, metadata, filters


def new_row(
    content: bytes,
    label: str,
    name: str,
    metadata: object,
    vector: bytes,
    thumbnail: bytes,
    quality: float | None = None,
    text: str | None = None,
) -> NewRow:
    """The row of an item; name and metadata are limited to what both stores can keep. text: the metadata as JSON, where
    it is known already."""
    text = metadata_json(metadata, quality) if text is None else text
    return NewRow(content, label, _storable_name(name) if name else "", text, vector, thumbnail)


def parse_metadata(text: str) -> dict[str, Any]:
    """The metadata of a row, with the keys that are ours."""
    with suppress(ValueError, RecursionError):
        metadata = json.loads(text)
        if isinstance(metadata, dict):
            return metadata
    raise ValueError(f"a row of the gallery has metadata that nearkin did not write ({shortened(text)})")


def read_metadata(text: str) -> tuple[dict[str, Any], float | None]:
    """The metadata of a row as they came in, and the quality of its item; None in a gallery that does not know it."""
    metadata = parse_metadata(text)
    quality = metadata.pop(QUALITY, None)
    metadata.pop(ENCODER, None)
    known = isinstance(quality, int | float) and not isinstance(quality, bool)
    return metadata, float(quality) if known else None


def row_encoder(text: str) -> str:
    """The earlier encoder that made a row, from its metadata; "" for the encoder of the gallery."""
    return str(parse_metadata(text).get(ENCODER, "")) if ENCODER in text else ""


def bridged_metadata(text: str, encoder: str) -> str:
    """Metadata of a row that is mapped from another encoder's space; its quality was that encoder's, and goes."""
    metadata = parse_metadata(text)
    metadata.pop(QUALITY, None)
    return _sorted_json({ENCODER: encoder} | metadata)  # a row that was mapped before keeps its encoder


def renewed_metadata(text: str, quality: float | None) -> str:
    """Metadata of a row that was embedded again."""
    metadata = {key: value for key, value in parse_metadata(text).items() if key not in (ENCODER, QUALITY)}
    return _sorted_json(metadata | ({} if quality is None else {QUALITY: float(f"{quality:.6g}")}))


def _sorted_json(plain: Mapping[str, Any]) -> str:
    return json.dumps(plain, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def check_label(label: object) -> str:
    if not isinstance(label, str):
        raise TypeError(f"label must be text, got {shortened(label)}")
    if not label.strip() or len(label) > 500:
        raise ValueError(f"label must have 1 to 500 characters, got {len(label.strip())}")
    if not _storable(label):
        raise ValueError(f"label must be text without NUL and broken characters, got {label!r}")
    return label


def _storable_name(name: str) -> str:
    """Names are only shown, so what cannot be stored is replaced or cut off."""
    return name[:MAX_NAME].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def metadata_json(metadata: object, quality: float | None = None) -> str:
    """With the quality of the item among them, to six digits, where it is known."""
    own = {} if quality is None else {QUALITY: float(f"{quality:.6g}")}
    if metadata is None or metadata == {}:
        return json.dumps(own, separators=(",", ":"))
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) and key for key in metadata):
        raise TypeError(f"metadata must be a dict whose keys are text, got {shortened(metadata)}")
    bounded(metadata, "metadata")
    if "label" in metadata:
        raise ValueError('metadata must not have the key "label": in a filter it means the label of the item')
    for key in (QUALITY, ENCODER):
        if key in metadata:
            raise ValueError(f'metadata must not have the key "{key}", which the gallery itself writes')
    try:
        text = _sorted_json(dict(metadata) | own)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata must be plain JSON values: {error}") from None
    if "\\u0000" in text or not _storable(text):
        raise ValueError("metadata must be text without NUL and broken characters")
    if len(text.encode()) > MAX_METADATA:
        raise ValueError(f"metadata must have at most {MAX_METADATA:,} bytes as JSON, got {len(text.encode()):,}")
    return text


def bounded(value: object, what: str, parts: int = MAX_METADATA) -> None:
    """Raises where dicts and lists are nested deeper than `MAX_DEPTH`, or have more parts than allowed."""
    level: list[Any] = [value]
    count = 0
    for _ in range(MAX_DEPTH + 1):
        level = [container for container in level if isinstance(container, Mapping | list | tuple)]
        if not level:
            return
        inner: list[Any] = []
        for container in level:
            count += len(container)
            if count > parts:
                raise ValueError(f"{what} must have at most {parts:,} parts")
            inner.extend(container.values() if isinstance(container, Mapping) else container)
        level = inner
    raise ValueError(f"{what} must be at most {MAX_DEPTH} deep: dicts and lists within one another")


def shortened(value: object, most: int = 100) -> str:
    """For an error message; a value nested too deep for `repr` is described by its type."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deep {type(value).__name__}"
    return text if len(text) <= most else text[:most] + "…"


class Filter(NamedTuple):
    """Which rows may be returned: any of these labels, and per key any of these values, as JSON; None: all."""

    labels: tuple[str, ...] | None
    keys: dict[str, tuple[str, ...]]

    def passes(self, row: Row) -> bool:
        if self.labels is not None and row.label not in self.labels:
            return False
        metadata = parse_metadata(row.metadata) if self.keys else {}
        values = {key: metadata[key] for key in self.keys if key in metadata}
        scalars = {key: scalar_json(value) for key, value in values.items() if not isinstance(value, list | dict)}
        return all(scalars.get(key) in allowed for key, allowed in self.keys.items())


def parse_filter(filter: object) -> Filter | None:
    """{"label": one or a list, "colour": one or a list}: every key must match, of a list any value."""
    if filter is None or filter == {}:
        return None
    if not isinstance(filter, Mapping) or not all(isinstance(key, str) for key in filter):
        raise TypeError(f"filter must be a dict of keys and values, got {shortened(filter)}")
    values = {key: value if isinstance(value, list | tuple | set) else [value] for key, value in filter.items()}
    labels = values.pop("label", None)
    if labels is not None and not all(isinstance(label, str) for label in labels):
        raise TypeError(f"filter label must be text, got {shortened(filter['label'])}")
    return Filter(
        None if labels is None else tuple(labels),
        {key: tuple(scalar_json(value, key) for value in several) for key, several in values.items()},
    )


def scalar_json(value: object, key: str = "") -> str:
    """A value as JSON, so that equal values are equal texts: 1 is 1.0, and neither true nor "1"."""
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


# --- facts


@dataclass(frozen=True)
class Facts:
    """One JSON text with a checksum, rewritten by every writing transaction together with the rows.

    fingerprint: of the encoder; None for a gallery of vectors without one. run: the folder of that encoder. sources:
    what was enrolled from, as it was typed. next_id: an id is never used twice, not even after a removal. rows: how
    many there must be. changes: the number of the last change to an existing row. beyond: the data of a store.
    """

    dim: int
    fingerprint: str | None = None
    run: str | None = None
    sources: list[str] = field(default_factory=list)
    gallery: str = field(default_factory=lambda: uuid.uuid4().hex)
    next_id: int = 1
    rows: int = 0
    changes: int = 0
    beyond: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def serialized(self) -> tuple[str, bytes]:
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)
        return text, _facts_checksum(text)

    @property
    def index_id(self) -> str:
        """Of the vectors: an index of others belongs to another gallery, or was made before they were renewed."""
        return self.gallery if "rewritten" not in self.beyond else f"{self.gallery} {self.beyond['rewritten']}"

    def rewritten(self) -> "Facts":
        """After vectors of rows have changed."""
        return replace(self, beyond=self.beyond | {"rewritten": self.beyond.get("rewritten", 0) + 1})

    def replace(self, **changed: Any) -> "Facts":
        return replace(self, **changed)


def read_facts(where: str, copies: Sequence[tuple[object, object]]) -> Facts:
    """The first undamaged one of several copies."""
    for text, total in copies[:-1]:
        with suppress(ValueError):
            return _parse_facts(where, text, total)
    return _parse_facts(where, *(copies[-1] if copies else (None, None)))


def _parse_facts(where: str, text: object, total: object) -> Facts:
    if not isinstance(text, str) or not isinstance(total, bytes) or _facts_checksum(text) != total:
        raise ValueError(f"{where}: the description of the gallery is damaged, both copies")
    with ours(f"{where}: the description of the gallery"):
        fields = json.loads(text)
        number = index(fields["format"])
        facts = _checked(Facts(**fields)) if 1 <= number <= FORMAT else None  # of a later one, the fields may be others
    if facts is None:
        raise ValueError(f"{where}: has format {number}, this version of nearkin reads format {FORMAT}")
    return facts


def _checked(facts: Facts) -> Facts:
    numbers = [index(number) for number in (facts.dim, facts.next_id, facts.rows, facts.changes)]
    texts = [facts.gallery, facts.fingerprint or "", facts.run or "", *facts.sources]
    kinds = isinstance(facts.sources, list) and isinstance(facts.beyond, dict)
    if not kinds or not all(isinstance(text, str) for text in texts) or min(numbers[:2]) < 1:
        raise TypeError
    if not 0 <= min(numbers) <= max(numbers) < 2**62:
        raise OverflowError
    return facts


def facts_of_text(where: str, text: str) -> Facts:
    """Of a text whose integrity was verified otherwise."""
    return _parse_facts(where, text, _facts_checksum(text))


def _facts_checksum(text: str) -> bytes:
    return sha256(text.encode()).digest()[:CHECKSUM_BYTES]
