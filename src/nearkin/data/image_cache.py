"""All pictures of a set, decoded and resized once into one array of uint8 that later runs map from the disk."""

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearkin.core import checks
from nearkin.core.errors import UnreadablePicture
from nearkin.core.versions import version_of
from nearkin.data import cache_store
from nearkin.data import decode as decoding
from nearkin.data.item_set import Pictures

__all__ = ["Stored", "store"]

Pixels = NDArray[np.uint8]
Done = tuple[str, Pixels, str | None]  # digest, row, why the row is empty
CHUNK = 16  # pictures per task: few enough to stop soon, many enough that tasks cost nothing
POLICIES = ("strict", "skip")


@dataclass(frozen=True, eq=False)
class Stored:
    """Pictures of one size, with their digests. Rows of unreadable pictures are zeros."""

    pixels: Pixels  # (N, side, side, C), mapped from `path`, or in memory
    digests: list[str]  # (N,) sha256 of each picture's content; "" where it could not be read at all
    bad: list[tuple[int, str]]  # index and reason of the unreadable
    path: Path | None  # the cache file
    crc: list[int] | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def rows(self, indices: ArrayLike) -> Pixels:
        """A copy of the chosen pictures, (B, side, side, C), as fast as from memory once the file has been read."""
        chosen = np.asarray(indices)
        if chosen.ndim != 1 or not (np.issubdtype(chosen.dtype, np.integer) or chosen.size == 0):
            raise TypeError(f"indices must be whole numbers of shape (B,), got {chosen.dtype} {chosen.shape}")
        taken: Pixels = np.take(np.asarray(self.pixels), chosen.astype(np.int64), axis=0)
        return taken

    def verify(self) -> None:
        """Reads every row and compares it with what was written; a ValueError names the first that differs."""
        if self.path is not None and self.crc is not None:
            rows = cache_store.Rows(self.pixels, self.digests, self.crc, self.bad, self.path)
            try:
                cache_store.check(rows, range(len(self)))
            except ValueError as error:
                raise ValueError(f"the picture cache {self.path} is corrupt ({error}); remove the file") from None


def store(
    pictures: Pictures,
    names: Sequence[str],
    *,
    side: int,
    fit: str = "crop",
    channels: int | None = None,
    unreadable: str = "strict",
    max_pixels: int = decoding.MAX_PIXELS,
    workers: int | None = None,
    cache: bool = True,
    progress: Callable[[int, int], object] | None = None,
) -> Stored:
    """Decodes and resizes every picture, or maps the cache of an earlier run.

    names: of the pictures, for messages. channels: 1, 3, or None for 1 if all pictures are grey and 3 otherwise.
    unreadable: "strict" refuses the set, naming the first of them; "skip" lists them in `bad`. workers: threads, by
    default one per core. cache: False leaves the pixels in memory and writes nothing. progress: called as
    progress(done, total) from the calling thread, but not if there is nothing to do.

    The cache is in `core.paths.cache_dir()`, under a hash of the content of all pictures, the size and the decoder.
    Files are not read again while their stamps are unchanged. If the work is interrupted, the next call continues it.
    """
    checks.integer("side", side, 1)
    checks.integer("max_pixels", max_pixels, 1)
    checks.one_of("fit", fit, decoding.FITS)
    checks.one_of("unreadable", unreadable, POLICIES)
    if channels not in (None, 1, 3):
        raise ValueError(f"channels must be 1, 3 or None, got {channels!r}")
    workers = _cores() if workers is None else workers
    checks.integer("workers", workers, 1)
    if len(names) != len(pictures):
        raise ValueError(f"names must have one entry per picture: {len(pictures)} pictures, {len(names)} names")
    if len(pictures) == 0:
        raise ValueError("pictures must have at least one picture, got none")
    settings = {
        "side": side,
        "fit": fit,
        "channels": channels or "auto",
        "max_pixels": max_pixels,
        "decoder": f"{decoding.DECODER} pillow {version_of('pillow')}",
    }
    if not cache:
        stored = _in_memory(pictures, settings, workers, progress)
    else:
        stored = _cached(pictures, names, settings, workers, progress)
    _refuse_unreadable(stored, names, unreadable)
    return stored


def _cached(
    pictures: Pictures,
    names: Sequence[str],
    settings: dict[str, Any],
    workers: int,
    progress: Callable[[int, int], object] | None,
) -> Stored:
    try:
        folder = cache_store.folder()
    except RuntimeError:  # a user without a home folder
        raise ValueError(
            "there is no cache folder: name one in NEARKIN_CACHE, or use --no-cache (cache=False)"
        ) from None
    stamps = [_stamp(pictures, i) for i in range(len(pictures))]
    known = cache_store.recall(names, stamps)
    digests = [digest for digest in known if digest]
    rows = cache_store.find(settings, digests) if len(digests) == len(known) else None
    if rows is None:
        try:
            rows = _build(pictures, known, settings, workers, progress)
            cache_store.remember(names, stamps, rows.digests)
        except OSError as error:  # never from reading a picture: see `_decode_one`
            raise OSError(
                f"the picture cache cannot be written to {folder} ({error.strerror or error}); make room, "
                "name another folder in NEARKIN_CACHE, or use --no-cache (cache=False) to keep the pictures in memory"
            ) from error
    return Stored(rows.pixels, rows.digests, rows.bad, rows.path, rows.crc)


def _build(
    pictures: Pictures,
    known: list[str | None],
    settings: dict[str, Any],
    workers: int,
    progress: Callable[[int, int], object] | None,
) -> cache_store.Rows:
    """A new cache; rows of earlier ones are copied."""
    channels, auto = _working_channels(settings)
    side = settings["side"]
    part = cache_store.Part(settings, side, channels, auto)
    try:
        _require_room(len(pictures) * side * side * channels)
        earlier = cache_store.EarlierRows(settings)
        with closing(_decoded(pictures, known, earlier, settings, workers)) as decoded:
            for done, row in enumerate(decoded, 1):
                part.append(*row)
                if progress is not None and (done % CHUNK == 0 or done == len(pictures)):
                    progress(done, len(pictures))
        # Built meanwhile by another process, or earlier under other names; if corrupt, there was a warning already.
        rows = cache_store.find(settings, part.digests, quiet=all(known))
        if rows is None:
            rows = part.finish()
        else:
            part.discard()
    except OSError:
        part.discard()
        raise
    except BaseException:  # Ctrl-C: the next start continues from here
        with suppress(OSError):
            part.save(over=True)
        raise
    earlier.sweep(settings, rows.digests)
    return rows


def _in_memory(
    pictures: Pictures, settings: dict[str, Any], workers: int, progress: Callable[[int, int], object] | None
) -> Stored:
    channels, grey = _working_channels(settings)
    side = settings["side"]
    pixels = np.zeros((len(pictures), side, side, channels), np.uint8)
    digests: list[str] = []
    bad = []
    for i, (digest, row, reason) in enumerate(_decoded(pictures, [None] * len(pictures), None, settings, workers)):
        pixels[i] = row
        digests.append(digest)
        grey = grey and cache_store.is_grey(row)
        if reason is not None:
            bad.append((i, reason))
        if progress is not None and ((i + 1) % CHUNK == 0 or i + 1 == len(pictures)):
            progress(i + 1, len(pictures))
    return Stored(np.ascontiguousarray(pixels[..., :1]) if grey else pixels, digests, bad, None)


def _decoded(
    pictures: Pictures,
    known: list[str | None],
    earlier: cache_store.EarlierRows | None,
    settings: dict[str, Any],
    workers: int,
) -> Generator[Done, None, None]:
    """Every picture in order; only a few chunks are decoded ahead."""

    def chunk(start: int) -> list[Done]:
        return [
            _decode_one(pictures, i, known[i], earlier, settings) for i in range(start, min(start + CHUNK, len(known)))
        ]

    pool = ThreadPoolExecutor(workers, "nearkin-decode")
    waiting: deque[Future[list[Done]]] = deque()
    try:
        for start in range(0, len(known), CHUNK):
            waiting.append(pool.submit(chunk, start))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _decode_one(
    pictures: Pictures, i: int, known: str | None, earlier: cache_store.EarlierRows | None, settings: dict[str, Any]
) -> Done:
    channels, _ = _working_channels(settings)
    side, fit, max_pixels = settings["side"], settings["fit"], settings["max_pixels"]
    empty = np.zeros((side, side, channels), np.uint8)
    row = earlier.row(known, channels) if earlier and known else None
    if known and row is not None:
        return known, row, None
    try:
        data = pictures.read(i)
    except Exception as error:  # a missing file, a folder without permission, a broken archive
        return "", empty, f"cannot be read ({getattr(error, 'strerror', None) or error or type(error).__name__})"
    digest = _digest(data)
    row = earlier.row(digest, channels) if earlier else None
    if row is not None:
        return digest, row, None
    try:
        return digest, decoding.square(data, side=side, fit=fit, channels=channels, max_pixels=max_pixels), None
    except UnreadablePicture as error:
        return digest, empty, str(error)


def _refuse_unreadable(stored: Stored, names: Sequence[str], unreadable: str) -> None:
    if not stored.bad or (unreadable == "skip" and len(stored.bad) < len(stored)):
        return
    first = "; ".join(f"{names[i]} {reason}" for i, reason in stored.bad[:3])
    others = f"; and {len(stored.bad) - 3} more" if len(stored.bad) > 3 else ""
    count = f"{len(stored.bad)} of {len(stored)} pictures" if len(stored) > 1 else "the only picture"
    if len(stored.bad) == len(stored):
        raise ValueError(f"{'all ' if len(stored) > 1 else ''}{count} cannot be used: {first}{others}")
    raise ValueError(
        f'{count} cannot be used: {first}{others}. Use --skip-unreadable (unreadable="skip") to leave them out'
    )


def _working_channels(settings: dict[str, Any]) -> tuple[int, bool]:
    """Channels while decoding, and whether grey pictures may reduce them to one at the end."""
    auto = settings["channels"] == "auto"
    return (3, True) if auto else (settings["channels"], False)


def _digest(data: bytes | NDArray[Any]) -> str:
    if isinstance(data, np.ndarray):
        head = f"{data.dtype.str} {data.shape} ".encode()
        return hashlib.sha256(head + np.ascontiguousarray(data).tobytes()).hexdigest()
    return hashlib.sha256(data).hexdigest()


def _stamp(pictures: Pictures, i: int) -> str | None:
    try:
        return pictures.stamp(i)
    except Exception:  # reading it will tell why
        return None


def _require_room(size: int) -> None:
    free = shutil.disk_usage(cache_store.folder()).free
    if size > free:
        raise OSError(f"{size / 2**20:,.1f} MiB needed, {free / 2**20:,.1f} MiB free")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
