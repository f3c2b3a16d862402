"""Refuses pictures whose headers are made to be slow: Pillow reads these parts one by one in Python.

A small file may hold millions of empty comments. The limits are far above what real pictures have; anything else that
is wrong with a file is left to Pillow.
"""

import io
import re
import struct
from collections.abc import Iterator
from itertools import repeat

from nearkin.core.errors import UnreadablePicture

__all__ = ["CountedReads", "check", "check_tags"]

MOST_READS = 8000  # and one more for each READ_BYTES; a segment of a JPEG takes four, a chunk of a PNG three
READ_BYTES = 2048  # libpng writes chunks of 8192
MOST_COMPRESSED = 16  # texts and profiles of a PNG, each of which may expand to a megabyte
MOST_SEGMENTS = 2000  # of a JPEG
MOST_SCANS = 32  # of a progressive JPEG, each of which goes over all pixels; 10 are usual
MOST_TABLES = 2**16  # bytes of a JPEG's tables and frames
MOST_RESOURCES = 2000  # of Photoshop's
MOST_EXIF = 2**20  # bytes in a JPEG; the format has room for 2**16
MOST_TAGS = 1000
SLICE = 2**20  # bytes searched at a time: other threads wait meanwhile

_END, _SCAN, _TABLE, _EXIF, _MP, _RESOURCES = 0xD9, 0xDA, 0xDB, 0xE1, 0xE2, 0xED
_FRAMES = {*range(0xC0, 0xD0), 0xDE} - {0xC4, 0xC8, 0xCC}
_BARE = {0x00, 0xC8, 0xFF, *range(0xD0, 0xDA), *range(0xF0, 0xFE)}  # without a length
_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # an escaped 0xFF and restarts are pixels
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}  # bytes by type
_DECODED = {0x0112, 0x011A, 0x0128}  # the tags of which Pillow makes numbers: orientation and resolution


class CountedReads(io.BytesIO):
    """The bytes of a file for Pillow, which may read so many parts of it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = MOST_READS + len(data) // READ_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise UnreadablePicture("has too many small parts (comments, chunks), as no ordinary picture has")
        return super().read(size)


def check(data: bytes) -> io.BytesIO:
    """The file for Pillow; raises `UnreadablePicture` where the header of a JPEG, PNG or GIF is made to be slow."""
    if data.startswith(b"\xff\xd8\xff"):
        _check_jpeg(data)
    elif data.startswith(b"\x89PNG"):
        _check_png(data)
    elif data.startswith(b"RIFF"):
        _check_webp(data)
    elif not data.startswith(b"GIF8"):
        return io.BytesIO(data)
    return CountedReads(data)


def check_tags(exif: bytes) -> None:
    """Raises `UnreadablePicture` where the first directory of a TIFF structure is long, or its values overlap."""
    exif = re.sub(b"^(Exif\0\0){1,2}", b"", exif)
    order = "<" if exif.startswith(b"II") else ">"
    try:
        (at,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, at)
    except struct.error:
        return
    _limit("tags", count, MOST_TAGS)
    there = exif[at + 2 : at + 2 + 12 * count]
    tags = struct.iter_unpack(order + "HHI4x", there[: len(there) // 12 * 12])
    sizes = [(tag, _SIZES.get(kind, 0) * n) for tag, kind, n in tags]
    inside = [(tag, size) for tag, size in sizes if size <= len(exif)]  # Pillow skips the others
    _limit("bytes of tags", sum(size for _, size in inside), len(exif) + 2**20)
    _limit("bytes of one tag", max((size for tag, size in inside if tag in _DECODED), default=0), 2**16)


def _check_jpeg(data: bytes) -> None:
    """Walks as Pillow does to the first scan, and as libjpeg does from there to the end of the picture."""
    at = 2
    segments = scans = tables = resources = size = 0
    exif: list[bytes] = []
    while (start := _next_marker(data, at, scans)) is not None:
        segments += 1
        _limit("segments", segments, MOST_SEGMENTS)
        marker, at = data[start - 1], start
        if (marker == _END and scans) or 0 < marker < 0xC0:
            break
        if marker in _BARE:
            at -= marker == 0xFF  # the next one may begin here
            continue
        at += max(2, int.from_bytes(data[start : start + 2], "big"))
        if marker == _SCAN:
            scans += 1
            _limit("scans", scans, MOST_SCANS)
        elif marker == _TABLE or marker in _FRAMES:
            tables += at - start
            _limit("bytes of tables", tables, MOST_TABLES)
        elif marker == _RESOURCES:
            resources += data.count(b"8BIM", start, at)
            _limit("Photoshop resources", resources, MOST_RESOURCES)
        elif marker == _EXIF and data.startswith(b"Exif\0\0", start + 2):
            exif.append(data[start + 8 : at])
            size += at - start
            _limit("bytes of EXIF", size, MOST_EXIF)
        elif marker == _MP and data.startswith(b"MPF\0", start + 2):
            check_tags(data[start + 6 : at])
    check_tags(b"".join(exif))


def _next_marker(data: bytes, at: int, scans: int) -> int | None:
    """Where the next marker ends; None at the end of the data."""
    if scans:
        for part in range(at, len(data), SLICE):
            if found := _IN_SCAN.search(data, part, part + SLICE + 1):
                return found.end()
        return None
    place = data.find(b"\xff", at)
    return None if place < 0 or place + 2 > len(data) else place + 2


def _check_png(data: bytes) -> None:
    at, compressed, name = 8, 0, b""
    for _ in _counted(data, "chunks"):
        if at + 8 > len(data) or name == b"IEND":
            return
        length, name = struct.unpack_from(">I4s", data, at)
        at += 12 + length
        compressed += name in (b"iCCP", b"iTXt", b"zTXt")
        _limit("compressed texts and profiles", compressed, MOST_COMPRESSED)


def _check_webp(data: bytes) -> None:
    """libwebp reads its chunks, and no other thread runs meanwhile."""
    at = 12
    for _ in _counted(data, "chunks"):
        if at + 8 > len(data):
            return
        (length,) = struct.unpack_from("<I", data, at + 4)
        at += 8 + length + length % 2


def _counted(data: bytes, name: str) -> Iterator[None]:
    most = MOST_READS + len(data) // READ_BYTES
    yield from repeat(None, most)
    _limit(name, most + 1, most)


def _limit(name: str, count: int, most: int) -> None:
    if count > most:
        raise UnreadablePicture(f"has more than {most:,} {name}, as no ordinary picture has")
