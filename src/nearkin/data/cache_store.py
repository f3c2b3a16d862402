"""The picture cache on the disk: files that are whole or not taken, rows found again by the digest of their picture.

In `cache_dir()/pictures` stand, for each set of pictures and settings, `TAG-KEY.npy` with the pixels and
`TAG-KEY.json` with the digest of every picture, a checksum of every row and the unreadable ones; `names-HASH.json`
remembers which file, by its cheap stamp, had which digest. `TAG-part-ID` is one that is still being written, or was
when its process ended: its rows are taken over by the next that needs them.
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
CHECKED = 256 * 2**20  # bytes up to which every row is checked when a cache is opened; beyond it, rows spread over it
SAVED_EVERY = 30.0  # seconds
ABANDONED = 3600.0  # seconds without a sign of life after which an unfinished file has no owner any more


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
    """The cache of exactly these pictures, or None; a damaged one is None too, with a warning unless `quiet`."""
    path = folder() / f"{name_of(settings, digests)}.npy"
    if not path.exists() or not path.with_suffix(".json").exists():
        return None
    try:
        rows = _opened(path, settings)
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
            sentence = f"the picture cache {path} is damaged ({error}) and is made again"
            warnings.warn(sentence, RuntimeWarning, stacklevel=4)
        return None
    return rows


def check(rows: Rows, which: Iterator[int] | range) -> None:
    """Rows as they were written, or a ValueError."""
    for i in which:
        if zlib.crc32(rows.pixels[i]) != rows.crc[i]:
            raise ValueError(f"row {i} is not as it was written")


class Donors:
    """Rows of earlier caches with the same settings, finished or not, by the digest of their picture."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._at: dict[str, tuple[Rows, int]] = {}
        self._over: list[Rows] = []
        for table in sorted(folder().glob(f"{_tag(settings)}-*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                rows = _opened(table.with_suffix(".npy"), settings)
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
        """Removes what was left unfinished and is not needed any more."""
        had = set(digests)
        for rows in self._over:
            if had.issuperset(rows.digests):
                _remove(rows.path)
        for path in folder().glob(f"{_tag(settings)}-part-*.npy"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    _remove(path)


class Part:
    """A cache while it is written, row after row; nobody takes it for a whole one."""

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
        """So much is safe now, whatever becomes of this process; over: and this process will add no more."""
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
        """The whole cache under its final name: first the pixels, then the table without which they do not count."""
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
        _remove(self.path)

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _drop_channels(self) -> None:
        """All pictures are grey: one channel says it all."""
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
        del wide  # the last that maps the file, which Windows would not remove otherwise
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
    """The digests of those pictures whose stamp is as it was when they were last read."""
    try:
        kept = files.read_json(_names_file(names))
        pairs = list(zip(kept["stamps"], kept["digests"], strict=True))
        if files.digest({"stamps": kept["stamps"], "digests": kept["digests"]}) != kept["sum"] or len(pairs) != len(
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
    """An empty digest is a picture that could not be read at all: it is tried again the next time."""
    table = {"stamps": [s if d else None for s, d in zip(stamps, digests, strict=True)], "digests": list(digests)}
    files.write_text(_names_file(names), json.dumps(table | {"sum": files.digest(table)}))


def caches() -> list[Cache]:
    """Every picture cache of the cache folder, the largest first."""
    found = []
    for path in folder().glob("*-*.npy"):
        table: dict[str, Any] = {"digests": [], "settings": {}}
        with suppress(OSError, ValueError, KeyError, TypeError):
            table = _read_table(path.with_suffix(".json"))
        with suppress(OSError):
            size = path.stat().st_size
            found.append(Cache(path, size, len(table["digests"]), table["settings"], "-part-" not in path.name))
    return sorted(found, key=lambda cache: -cache.bytes)


def clear() -> int:
    """Removes all picture caches, also one that another process is writing just now; returns the bytes freed."""
    freed = 0
    for path in [*folder().glob("*-*.npy"), *folder().glob("*-*.json"), *folder().glob(".*-*.json.*")]:
        with suppress(OSError):
            freed += path.stat().st_size
            path.unlink()
    return freed


def _opened(path: Path, settings: dict[str, Any]) -> Rows:
    """A cache or the safe beginning of one, its table checked, its rows not."""
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


def _remove(path: Path) -> None:
    for file in (path, path.with_suffix(".json")):
        with suppress(OSError):
            file.unlink()
