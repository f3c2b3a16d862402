"""The index file beside a gallery: arrays with checksums that are mapped into memory. Derived, so a bad one is rebuilt.

Arrays follow one another, each at a multiple of 4,096 bytes; then a description in JSON, its sha256, its length and the
magic. The description is written last: a file that was cut short has none. It has the sha256 of every array, and all of
them are verified when the file is opened, by reading, not by mapping, so that this takes no memory of the process.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["IndexWriter", "mapped", "read_head", "verify"]

MAGIC = b"nearkin1"
TAIL = 32 + 8 + len(MAGIC)
ALIGNED = 4096
FORMAT = 1
READ = 1 << 22
MAX_HEAD = 1 << 26


class IndexWriter:
    """Writes arrays, then the description."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sections = file, dict[str, dict[str, Any]]()

    def array(self, name: str, array: NDArray[Any]) -> None:
        self.parts(name, array.dtype, array.shape, [array])

    def parts(self, name: str, dtype: Any, shape: tuple[int, ...], parts: Iterable[NDArray[Any]]) -> None:
        """An array that is made piece by piece."""
        self.file.write(bytes(-self.file.tell() % ALIGNED))
        offset, digest = self.file.tell(), hashlib.sha256()
        for part in parts:
            content = np.ascontiguousarray(part, dtype).reshape(-1).view(np.uint8).data if part.size else b""
            digest.update(content)
            self.file.write(content)
        size = self.file.tell() - offset
        if size != int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize:
            raise AssertionError(f"{name}: {size} bytes for {shape}")
        described = {"dtype": np.dtype(dtype).str, "shape": list(shape), "offset": offset, "sha256": digest.hexdigest()}
        self.sections[name] = described

    def finish(self, description: Mapping[str, Any]) -> dict[str, Any]:
        head = {**description, "format": FORMAT, "sections": self.sections}
        text = json.dumps(head).encode()
        self.file.write(text + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + MAGIC)
        return head


def read_head(file: IO[bytes]) -> dict[str, Any]:
    """The description, or a ValueError that says in a word why the file cannot be used."""
    size = file.seek(0, os.SEEK_END)
    if size < TAIL:
        raise ValueError("damaged")
    file.seek(size - TAIL)
    tail = file.read(TAIL)
    length = int.from_bytes(tail[32:40], "little")
    if tail[40:] != MAGIC or not 2 <= length <= min(size - TAIL, MAX_HEAD):
        raise ValueError("damaged")
    file.seek(size - TAIL - length)
    text = file.read(length)
    if hashlib.sha256(text).digest() != tail[:32]:
        raise ValueError("damaged")
    head: dict[str, Any] = json.loads(text)
    if head.get("format") != FORMAT:
        raise ValueError("of another format")
    return head


def verify(file: IO[bytes], head: Mapping[str, Any]) -> None:
    """Reads every array; a ValueError where one is not as it was written."""
    buffer = bytearray(READ)
    for section in head["sections"].values():
        file.seek(section["offset"])
        left, digest = _size(section), hashlib.sha256()
        while left:
            count = file.readinto(memoryview(buffer)[: min(READ, left)])  # type: ignore[attr-defined]
            if not count:
                raise ValueError("damaged")
            digest.update(memoryview(buffer)[:count])
            left -= count
        if digest.hexdigest() != section["sha256"]:
            raise ValueError("damaged")


def mapped(file: IO[bytes], sections: Mapping[str, Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """The arrays, read from the disk when they are used. Private to this process; nothing is written to the file."""
    file.flush()
    whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _view(whole, section) for name, section in sections.items()}


def _view(whole: mmap.mmap, section: Mapping[str, Any]) -> NDArray[Any]:
    shape, dtype = tuple(section["shape"]), np.dtype(section["dtype"])
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(whole, dtype, count, section["offset"] if count else 0).reshape(shape)


def _size(section: Mapping[str, Any]) -> int:
    size: int = int(np.prod(section["shape"], dtype=np.int64)) * np.dtype(section["dtype"]).itemsize
    return size
