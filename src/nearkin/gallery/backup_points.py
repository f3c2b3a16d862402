"""The files of a backup, one per point in time: what changed since the point before, under one chain of checksums.

    FOLDER/point-000001.full    every row
    FOLDER/point-000002.part    rows removed, changed and added since point 1

A file is a line with the format, then blocks: a letter, the length of the content (8 bytes), the content, and the
sha256 of the checksum before, letter, length and content. The first block of a part continues the last checksum of the
point before, so a point fits to one predecessor only, and nothing can be changed, left out or moved unnoticed.

    H  JSON: gallery, number of the point, checksum of the previous point, time
    D  ids of rows that are gone or replaced, 8 bytes each
    R  rows: their number, ids, checksums and lengths of six fields, then the fields
    E  JSON: the description of the gallery, how many rows there are now; the end
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from nearkin.core.errors import CorruptBackup
from nearkin.gallery.schema import StoredRow
from nearkin.gallery.stores import IdArray, SumArray, sum_array

__all__ = ["Point", "PointWriter", "as_written", "chain_to", "last_checksum"]
__all__ += ["parse_head", "parse_rows", "parse_sums", "points", "read"]

FORMAT = b"nearkin backup, format 1\n"
NAME = re.compile(r"point-(\d{6,})\.(full|part)")
HEAD = struct.Struct(">cQ")
START = bytes(32)  # the checksum before a full point
MAX_BLOCK = 1 << 30  # a longer one was never written
ROW_BYTES = 1 << 23  # rows of a block, about
IDS = 1 << 20  # ids of a block
LENGTHS = 6  # fields of a row whose lengths differ


class Point(NamedTuple):
    """One file of a backup."""

    number: int
    path: Path
    full: bool


def points(folder: Path) -> list[Point]:
    """Those of a folder, by number."""
    matches = ((path, NAME.fullmatch(path.name)) for path in folder.iterdir())
    return sorted(Point(int(match[1]), path, match[2] == "full") for path, match in matches if match)


def chain_to(listed: Sequence[Point], number: int) -> list[Point]:
    """The points that make up the state of point `number`: the last full one, and all since."""
    by_number = {point.number: point for point in listed}
    if number not in by_number:
        raise ValueError(f"point must be one of {', '.join(map(str, by_number))}, got {number}")
    chain = [by_number[number]]
    while not chain[0].full:
        if chain[0].number - 1 not in by_number:
            raise CorruptBackup(f"{chain[0].path}: point {chain[0].number - 1}, which it continues, is missing")
        chain.insert(0, by_number[chain[0].number - 1])
    return chain


# --- writing


class PointWriter:
    """Blocks into an open file. previous: the last checksum of the point before; None for a full point."""

    def __init__(self, file: IO[bytes], previous: bytes | None, head: dict[str, Any]) -> None:
        self._file, self.checksum = file, previous or START
        self._rows: list[StoredRow] = []
        self._bytes = 0
        file.write(FORMAT)
        self._json(b"H", head | {"previous": None if previous is None else previous.hex()})

    def remove(self, ids: IdArray) -> None:
        for start in range(0, len(ids), IDS):
            self._block(b"D", ids[start : start + IDS].astype(">i8").tobytes())

    def add(self, rows: Sequence[StoredRow]) -> None:
        for row in rows:
            self._rows.append(row)
            self._bytes += 100 + len(row.label) + len(row.name) + len(row.metadata) + len(row.vector)
            self._bytes += len(row.thumbnail)
            if self._bytes >= ROW_BYTES:
                self._write_rows()

    def end(self, end: dict[str, Any]) -> None:
        self._write_rows()
        self._json(b"E", end)

    def _write_rows(self) -> None:
        if not self._rows:
            return
        ids, content, label, name, metadata, vector, sums, thumbnail = zip(*self._rows, strict=True)
        fields = (content, label, name, metadata, vector, thumbnail)
        lengths = np.array([[len(value) for value in values] for values in fields], ">u4")  # (6, n)
        parts = [struct.pack(">I", len(ids)), np.array(ids, ">i8").tobytes(), b"".join(sums), lengths.tobytes()]
        self._block(b"R", b"".join([*parts, *(value for values in fields for value in values)]))
        self._rows, self._bytes = [], 0

    def _json(self, kind: bytes, content: dict[str, Any]) -> None:
        self._block(kind, json.dumps(content, sort_keys=True, ensure_ascii=False).encode())

    def _block(self, kind: bytes, content: bytes) -> None:
        head = HEAD.pack(kind, len(content))
        self.checksum = _next(self.checksum, head, content)
        for part in (head, content, self.checksum):
            self._file.write(part)


def _next(checksum: bytes, head: bytes, content: bytes) -> bytes:
    digest = hashlib.sha256(checksum + head)
    digest.update(content)
    return digest.digest()


# --- reading


def read(point: Point, previous: bytes | None) -> Iterator[tuple[bytes, bytes, int]]:
    """Letter, content and bytes read so far of every block, each verified; the last is E, at the end of the file.

    previous: the last checksum of the point before, where this is no full one.
    """
    checksum = START if point.full or previous is None else previous
    try:
        size = point.path.stat().st_size
        with point.path.open("rb") as file:
            if file.read(len(FORMAT)) != FORMAT:
                raise CorruptBackup(f"{point.path}: is damaged in its first line, or of another format")
            kind = b""
            while kind != b"E":
                start = file.tell()
                head = file.read(HEAD.size)
                kind, length = HEAD.unpack(head) if len(head) == HEAD.size else (b"", -1)
                if not 0 <= length <= min(size - file.tell() - 32, MAX_BLOCK):
                    raise CorruptBackup(f"{point.path}: is damaged or cut short at byte {start:,} of {size:,}")
                content = file.read(length)
                checksum = _next(checksum, head, content)
                if file.read(32) != checksum:
                    raise CorruptBackup(f"{point.path}: is damaged between bytes {start:,} and {file.tell():,}")
                yield kind, content, file.tell()
            if file.tell() != size:
                raise CorruptBackup(f"{point.path}: has {size - file.tell():,} bytes after its end")
    except OSError as error:
        raise CorruptBackup(f"{point.path}: cannot be read ({error.strerror or error})") from None


def last_checksum(point: Point) -> bytes:
    """As the file has it, unverified."""
    with suppress(OSError), point.path.open("rb") as file:
        file.seek(-32, 2)
        return file.read(32)
    raise CorruptBackup(f"{point.path}: is cut short or cannot be read")


@contextmanager
def as_written(point: Point) -> Iterator[None]:
    """Around the parsing of its blocks: a checksum does not say that nearkin wrote them."""
    try:
        yield
    except CorruptBackup:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error) as error:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise CorruptBackup(f"{point.path}: is no point that nearkin wrote ({why})") from None


def parse_head(content: bytes) -> dict[str, Any]:
    """The first block: facts and notes, and what else it says."""
    head: dict[str, Any] = json.loads(content)
    if not isinstance(head["facts"], str) or not isinstance(head["notes"], dict):
        raise TypeError("facts and notes")
    return head


def parse_rows(content: bytes) -> list[StoredRow]:
    ids, sums, count = _front(content)
    start = 4 + 16 * count
    lengths = np.frombuffer(content, ">u4", LENGTHS * count, start).astype(np.int64)
    ends = np.cumsum(lengths) + start + 4 * LENGTHS * count
    begins = (ends - lengths).tolist()
    values = [content[a:b] for a, b in zip(begins, ends.tolist(), strict=True)]
    fields = [values[n * count : (n + 1) * count] for n in range(LENGTHS)]
    totals = [sums[8 * n : 8 * n + 8] for n in range(count)]
    return [StoredRow(*row) for row in zip(ids.tolist(), *fields[:5], totals, fields[5], strict=True)]


def parse_sums(content: bytes) -> tuple[IdArray, SumArray]:
    """Ids and checksums of a block of rows."""
    ids, sums, _ = _front(content)
    return ids, sum_array([sums]) if len(ids) == 1 else np.frombuffer(sums, ">u8").astype(np.uint64)


def _front(content: bytes) -> tuple[IdArray, bytes, int]:
    (count,) = struct.unpack_from(">I", content)
    ids = np.frombuffer(content, ">i8", count, 4).astype(np.int64)
    return ids, content[4 + 8 * count : 4 + 16 * count], count
