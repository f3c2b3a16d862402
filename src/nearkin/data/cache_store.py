"""The picture cache on the disk: only complete files are used, and rows are found by the digest of their picture.

`cache_dir()/pictures` has, for each set of pictures and settings, `TAG-KEY.npy` with the pixels and `TAG-KEY.json` with
the digest of every picture, a checksum of every row and the unreadable ones; `names-HASH.json` records which file, by
its cheap stamp, had which digest. `TAG-part-ID` is a cache that is being written, or was when its process ended.

Rows of earlier caches with the same settings are reused, finished or not. One changed picture among 400 photos of
500 × 375 pixels then costs 0.04 s of CPU time instead of 1.2 s, and an interrupted start continues where it was.
"""

import hashlib
import io
import json
import os
import time
import uuid
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from nearkin.core import files
from nearkin.core.paths import cache_dir

__all__ = ["Cache", "Part", "Rows", "caches", "clear", "find", "recall", "remember"]

Pixels = NDArray[np.uint8]
HEADER = 128  # bytes of an .npy file before its data
CHECKED = 256 * 2**20  # on opening, every row of a cache up to so many bytes is checked; of a larger one, a sample
SAVED_EVERY = 30.0  # seconds
ABANDONED = 3600.0  # seconds without a change after which an unfinished file counts as abandoned


class Rows(NamedTuple):
    """An opened cache."""

    pixels: Pixels  # (N, side, side, C), mapped, read-only
    digests: list[str]
    crc: list[int]
    bad: list[tuple[int, str]]
    path: Path


class Cache(NamedTuple):
    """One cache as `caches` lists it."""

    path: Path
    bytes: int
    pictures: int
    settings: dict[str, Any]
    finished: bool


def folder() -> Path:
    return cache_dir() / "pictures"


def name_of(settings: dict[str, Any], digests: Sequence[str]) -> str:
    content = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return f"{_tag(settings)}-{content[:32]}"


def find(settings: dict[str, Any], digests: Sequence[str], quiet: bool = False) -> Rows | None:
    """The cache of exactly these pictures, or None; None for a corrupt one too, with a warning unless `quiet`."""
    path = folder() / f"{name_of(settings, digests)}.npy"
    if not path.exists() or not path.with_suffix(".json").exists():
        return None
    try:
        rows = _open(path, settings)
        if rows.digests != list(digests):
            raise ValueError("it is of other pictures")
        if path.stat().st_size != HEADER + rows.pixels.size:
            raise ValueError("its size is wrong")
        with path.open("rb") as file:
            if file.read(HEADER) != _header(rows.pixels.shape):
                raise ValueError("its header is wrong")
        count = len(rows.digests)
        step = 1 if rows.pixels.size <= CHECKED else -(-rows.pixels.size // CHECKED)
        check(rows, range(0, count, step))
        check(rows, range(count - 1, count))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not quiet:
            sentence = f"the picture cache {path} is corrupt ({error}) and is rebuilt"
            warnings.warn(sentence, RuntimeWarning, stacklevel=4)
        return None
    return rows


def check(rows: Rows, which: Iterator[int] | range) -> None:
    """Compares rows with their checksums; a ValueError names the first that differs."""
    for i in which:
        if zlib.crc32(rows.pixels[i]) != rows.crc[i]:
            raise ValueError(f"row {i} is not as it was written")


class EarlierRows:
    """Rows of earlier caches with the same settings, finished or not, by the digest of their picture."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._at: dict[str, tuple[Rows, int]] = {}
        self._over: list[Rows] = []
        for table in sorted(folder().glob(f"{_tag(settings)}-*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                rows = _open(table.with_suffix(".npy"), settings)
                left_out = {i for i, _ in rows.bad}
                self._at.update(
                    (d, (rows, i)) for i, d in enumerate(rows.digests[: len(rows.pixels)]) if i not in left_out
                )
                if "-part-" in table.name and _read_table(table)["over"]:
                    self._over.append(rows)

    def row(self, digest: str | None, channels: int) -> Pixels | None:
        if digest is None or digest not in self._at:
            return None
        rows, i = self._at[digest]
        row: Pixels = np.array(rows.pixels[i])
        if zlib.crc32(row.data) != rows.crc[i]:
            return None
        return row if row.shape[2] == channels else np.repeat(row, channels, axis=2)

    def sweep(self, settings: dict[str, Any], digests: Sequence[str]) -> None:
        """Deletes unfinished caches that are no longer needed."""
        digests_built = set(digests)
        for rows in self._over:
            if digests_built.issuperset(rows.digests):
                _delete(rows.path)
        for path in folder().glob(f"{_tag(settings)}-part-*.npy"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    _delete(path)


class Part:
    """A cache while it is written, row by row, under a name that no reader mistakes for a finished one."""

    def __init__(self, settings: dict[str, Any], side: int, channels: int, auto: bool) -> None:
        folder().mkdir(parents=True, exist_ok=True)
        self.settings, self.shape, self.auto = settings, (side, side, channels), auto
        self.path = folder() / f"{_tag(settings)}-part-{uuid.uuid4().hex[:12]}.npy"
        self.digests: list[str] = []
        self.crc: list[int] = []
        self.bad: list[tuple[int, str]] = []
        self._grey = auto
        self._file: IO[bytes] = self.path.open("xb")
        self._file.write(bytes(HEADER))
        self._saved, self._wait = time.monotonic(), SAVED_EVERY

    def append(self, digest: str, row: Pixels, reason: str | None) -> None:
        if reason is not None:
            self.bad.append((len(self.digests), reason))
        self._grey = self._grey and is_grey(row)
        data = row.tobytes()
        self._file.write(data)
        self.crc.append(zlib.crc32(data))
        self.digests.append(digest)
        if time.monotonic() - self._saved > self._wait:
            self.save()

    def save(self, over: bool = False) -> None:
        """Makes the rows so far reusable, even if this process is killed. over: this process will add no more."""
        if self._file.closed:
            return
        begun = time.monotonic()
        self._flush()
        self._write_table(self.path.with_suffix(".json"), self.shape[2], over=over)
        self._saved = time.monotonic()
        self._wait = max(SAVED_EVERY, 20 * (self._saved - begun))
        if over:
            self._file.close()

    def finish(self) -> Rows:
        """Moves the cache to its final name: first the pixels, then the table that makes them valid."""
        if self._grey:
            self._drop_channels()
        shape = (len(self.digests), *self.shape)
        self._file.seek(0)
        self._file.write(_header(shape))
        self._flush()
        self._file.close()
        final = folder() / f"{name_of(self.settings, self.digests)}.npy"
        os.replace(self.path, final)
        self._write_table(final.with_suffix(".json"), self.shape[2], over=True)
        self.path.with_suffix(".json").unlink(missing_ok=True)
        return Rows(_mapped(final, shape), self.digests, self.crc, self.bad, final)

    def discard(self) -> None:
        with suppress(OSError):  # closing flushes, and a full disk refuses that too
            self._file.close()
        _delete(self.path)

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _drop_channels(self) -> None:
        """Keeps one of three equal channels: all pictures are grey."""
        self._file.flush()
        wide = _mapped(self.path, (len(self.digests), *self.shape))
        narrow = self.path.with_name(f"{_tag(self.settings)}-part-{uuid.uuid4().hex[:12]}.npy")
        self.crc = []
        with narrow.open("xb") as file:
            file.write(bytes(HEADER))
            for i in range(len(wide)):
                data = wide[i, ..., :1].tobytes()
                file.write(data)
                self.crc.append(zlib.crc32(data))
        del wide  # the last mapping of the file, which Windows would not delete otherwise
        self.discard()
        self.path, self.shape, self._file = narrow, (*self.shape[:2], 1), narrow.open("r+b")

    def _write_table(self, path: Path, channels: int, over: bool) -> None:
        table = {
            "settings": self.settings,
            "shape": [len(self.digests), *self.shape[:2], channels],
            "digests": self.digests,
            "crc": self.crc,
            "bad": self.bad,
            "over": over,
        }
        files.write_text(path, json.dumps(table | {"sum": files.digest(table)}))


def is_grey(row: Pixels) -> bool:
    return bool((row[..., 0] == row[..., 1]).all() and (row[..., 0] == row[..., 2]).all())


def recall(names: Sequence[str], stamps: Sequence[str | None]) -> list[str | None]:
    """The digests of the pictures whose stamps have not changed since they were last read."""
    try:
        table = files.read_json(_names_file(names))
        pairs = list(zip(table["stamps"], table["digests"], strict=True))
        if files.digest({"stamps": table["stamps"], "digests": table["digests"]}) != table["sum"] or len(pairs) != len(
            stamps
        ):
            return [None] * len(stamps)
        return [
            digest if stamp is not None and stamp == was else None
            for stamp, (was, digest) in zip(stamps, pairs, strict=True)
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return [None] * len(stamps)


def remember(names: Sequence[str], stamps: Sequence[str | None], digests: Sequence[str]) -> None:
    """Records stamps and digests. An empty digest is a picture that could not be read: it is read again next time."""
    table = {"stamps": [s if d else None for s, d in zip(stamps, digests, strict=True)], "digests": list(digests)}
    files.write_text(_names_file(names), json.dumps(table | {"sum": files.digest(table)}))


def caches() -> list[Cache]:
    """Every picture cache of the cache folder, largest first."""
    listed = []
    for path in folder().glob("*-*.npy"):
        table: dict[str, Any] = {"digests": [], "settings": {}}
        with suppress(OSError, ValueError, KeyError, TypeError):
            table = _read_table(path.with_suffix(".json"))
        with suppress(OSError):
            size = path.stat().st_size
            listed.append(Cache(path, size, len(table["digests"]), table["settings"], "-part-" not in path.name))
    return sorted(listed, key=lambda cache: -cache.bytes)


def clear() -> int:
    """Deletes all picture caches, also one that another process is writing; returns the bytes freed."""
    freed = 0
    for path in [*folder().glob("*-*.npy"), *folder().glob("*-*.json"), *folder().glob(".*-*.json.*")]:
        with suppress(OSError):
            freed += path.stat().st_size
            path.unlink()
    return freed


def _open(path: Path, settings: dict[str, Any]) -> Rows:
    """A cache, or the saved beginning of one: its table is checked, its rows are not."""
    table = _read_table(path.with_suffix(".json"))
    if table["settings"] != settings:
        raise ValueError("it was made with other settings")
    shape = tuple(table["shape"])
    there = (path.stat().st_size - HEADER) // max(1, int(np.prod(shape[1:])))
    if there < shape[0]:
        shape = (max(0, there), *shape[1:])
    bad = [(int(i), str(reason)) for i, reason in table["bad"]]
    return Rows(_mapped(path, shape), table["digests"], table["crc"], bad, path)


def _read_table(path: Path) -> dict[str, Any]:
    table = files.read_json(path)
    if table.pop("sum") != files.digest(table):
        raise ValueError("its table is not as it was written")
    return table


def _mapped(path: Path, shape: tuple[int, ...]) -> Pixels:
    if shape[0] == 0:
        return np.zeros(shape, np.uint8)
    return np.memmap(path, np.uint8, "r", HEADER, shape)


def _header(shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    npy.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": tuple(int(n) for n in shape)})
    assert buffer.tell() == HEADER
    return buffer.getvalue()


def _tag(settings: dict[str, Any]) -> str:
    return files.digest(settings)[:10]


def _names_file(names: Sequence[str]) -> Path:
    return folder() / f"names-{hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:32]}.json"


def _delete(path: Path) -> None:
    for file in (path, path.with_suffix(".json")):
        with suppress(OSError):
            file.unlink()
