"""Damage in SQLite's write-ahead log, which SQLite itself would answer by dropping all later transactions in silence.

The log is a header and frames: a page each, with two salts and a checksum that continues that of the frame before. When
SQLite opens a file whose last process was killed, it reads frames up to the first that does not match. Here the log is
read first. The checksum is linear in the 32-bit words of a frame, modulo 2^32, so one damaged word can be computed from
it, exactly; frames with more damage stay as they are, and the checksums of the rows tell what was hit. The log is
written again with the transactions that SQLite would have dropped; the damaged one is kept.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.core import files

__all__ = ["repair_log"]

HEADER, FRAME = 32, 24  # bytes: of the log's head, and before each page
MAGIC, VERSION = 0x377F0682, 3007000  # the last bit of the magic number: words of checksums are big-endian
MODULUS = 1 << 32
SHARED_FIRST, SHARED_SIZE = 0x40000002, 510  # bytes of a file that each of SQLite's connections locks
VERSION_OFFSET = 60  # of user_version in a file and in its first page, see `sqlite_file`
CHUNK = 256  # frames summed at a time
Pair = tuple[int, int]
Words = NDArray[np.uint32]


class _Weights(NamedTuple):
    """Of a checksum over n words: result = power · start + Σ word · (first, second)."""

    first: Words
    second: Words
    power: tuple[Pair, Pair]


def repair_log(path: Path) -> str:
    """Corrects the log beside a file that no process has open; returns a sentence about it, or "" if it is sound."""
    log = Path(f"{path}-wal")
    if _Log.damage(log, path) is None:
        return ""
    with _alone(path) as alone:
        damaged = _Log.damage(log, path) if alone else None
        if damaged is None:
            return ""  # a process was writing to it, or has it open and knows where it ends
        with files.explained(f"{log}: is damaged; a copy of it", "make room: nothing was opened"):
            aside = _keep(log)
            sentence = damaged.repaired()
    return f"{path}: {sentence}; the damaged log is kept in {aside.name}"


# --- checksums


@lru_cache(maxsize=8)
def _weights(words: int) -> _Weights:
    """SQLite adds two words at a time: a += x + b; b += y + a. So the weights are Fibonacci numbers."""
    first, second = [0] * words, [0] * words
    rows = (1, 0), (0, 1)  # the matrix ((1, 1), (1, 2)) to the power of the pairs that follow
    for at in range(words - 2, -1, -2):
        (p, q), (r, s) = rows
        first[at], second[at] = (p + q) % MODULUS, (r + s) % MODULUS
        first[at + 1], second[at + 1] = q, s
        rows = ((p + q) % MODULUS, (p + 2 * q) % MODULUS), ((r + s) % MODULUS, (r + 2 * s) % MODULUS)
    return _Weights(np.array(first, np.uint32), np.array(second, np.uint32), rows)


def _products(words: Words) -> Words:
    """(n, 2): what each row of words adds to a checksum."""
    weights = _weights(words.shape[1])
    return np.stack([(words * column).sum(1, dtype=np.uint32) for column in weights[:2]], 1)


def _continued(start: Pair, product: Any, words: int) -> Pair:
    (p, q), (r, s) = _weights(words).power
    a, b = start
    return (p * a + q * b + int(product[0])) % MODULUS, (r * a + s * b + int(product[1])) % MODULUS


def _single_words(words: Words, computed: Pair, stored: Pair) -> list[tuple[int, int]]:
    """Position and value of every one word that, changed, makes the checksum right.

    The highest bits of a word have few different effects on the checksum, so several words may do.
    """
    first, second, _ = _weights(len(words))
    missing = [(stored[n] - computed[n]) % MODULUS for n in (0, 1)]
    solutions = []
    for at, (a, b) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        # Neighbours of the Fibonacci sequence: one of the two is odd, and can be divided by.
        odd, wanted = (a, missing[0]) if a % 2 else (b, missing[1])
        difference = wanted * pow(odd, -1, MODULUS) % MODULUS
        if (a * difference % MODULUS, b * difference % MODULUS) == (missing[0], missing[1]):
            solutions.append((at, (int(words[at]) + difference) % MODULUS))
    return solutions


def _with_word(words: Words, at: int, value: int) -> Words:
    changed = words.copy()
    changed[at] = value
    return changed


def _half_right(computed: Pair, stored: Pair) -> bool:
    """As where one word of the checksum itself is damaged."""
    return (computed[0] == stored[0]) != (computed[1] == stored[1])


# --- the log


class _LogBytes:
    """The content of a log, read part by part; ValueError where another process has cut it meanwhile.

    Not a mapped file: the kernel ends a process that reads a page behind the end (SIGBUS), and SQLite cuts its log.
    """

    def __init__(self, log: Path) -> None:
        self._log, self._size = log, log.stat().st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self._size)
        with self._log.open("rb") as file:
            file.seek(start)
            content = file.read(stop - start)
        if len(content) != stop - start:
            raise ValueError(f"{self._log} was cut while it was read")
        return content


class _Log:
    """A log with damage in it. last: the last frame of a transaction that had ended."""

    def __init__(self, log: Path, path: Path) -> None:
        self.log, self.path = log, path
        self._bytes = _LogBytes(log)
        header = self._bytes[:HEADER]
        self.header_sound = _header_sum(header) == _pair(header, 24) and _plausible(header)
        self.header: bytes = header if self.header_sound else _fixed_header(header) or self._made_header()
        self.page_size = struct.unpack_from(">I", self.header, 8)[0]
        self.order = ">u4" if self.header[3] & 1 else "<u4"
        self.count = (len(self._bytes) - HEADER) // (FRAME + self.page_size)
        self._read_frames()

    @classmethod
    def damage(cls, log: Path, path: Path) -> "_Log | None":
        """None where SQLite reads all that was committed."""
        committed = _committed(Path(f"{path}-shm"))  # first: a log that grows meanwhile has more, not less
        with suppress(FileNotFoundError, ValueError):
            if log.stat().st_size <= HEADER + FRAME:
                return None
            read = cls(log, path)
            salts, frames, in_file = committed
            known, in_file = (frames, in_file) if salts == read.header[16:24] else (0, 0)
            read.missing = max(0, known - read.count)
            ends = np.flatnonzero(read.related & (read.sizes != 0))
            read.last = max(int(ends[-1]) if len(ends) else -1, min(known, read.count) - 1)
            read.written_back = 0 <= read.last < in_file
            if read.last >= read.first_bad or read.missing:
                return read
        return None

    def _read_frames(self) -> None:
        size, count = FRAME + self.page_size, self.count
        self.numbers, self.sizes = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        self.stored = np.zeros((count, 2), np.uint32)
        self.products, salts = np.zeros((count, 2), np.uint32), np.zeros((count, 2), ">u4")
        for start in range(0, count, CHUNK):
            part = slice(start, min(start + CHUNK, count))
            raw = np.frombuffer(self._bytes[HEADER + part.start * size : HEADER + part.stop * size], np.uint8)
            heads = raw.reshape(-1, size)[:, :FRAME].copy().view(">u4")
            self.numbers[part], self.sizes[part] = heads[:, 0], heads[:, 1]
            salts[part], self.stored[part] = heads[:, 2:4], heads[:, 4:6]
            covered = np.delete(raw.reshape(-1, size), np.s_[8:FRAME], 1)
            self.products[part] = _products(covered.view(self.order).astype(np.uint32))
        equal = salts == np.frombuffer(self.header, ">u4", 2, 16)
        # Both salts change when the log is begun anew: a frame with one of them is of this log, and damaged.
        self.related, self.salted = equal.any(1), equal.all(1)
        starts = np.concatenate([np.array([_pair(self.header, 24)], np.uint32), self.stored[:-1]])
        (p, q), (r, s) = np.array(_weights((8 + self.page_size) // 4).power, np.uint32)
        with np.errstate(over="ignore"):
            expected = np.stack([p * starts[:, 0] + q * starts[:, 1], r * starts[:, 0] + s * starts[:, 1]], 1)
        self.sound = self.salted & (expected + self.products == self.stored).all(1)
        unsound = np.flatnonzero(~self.sound)
        self.first_bad = int(unsound[0]) if len(unsound) else count
        if not self.header_sound:
            self.first_bad = 0
        self.missing = self.left_out = 0
        self.written_back = False
        self.last = -1

    def _made_header(self) -> bytes:
        """For one that cannot be corrected: of the size of the file's pages and the salts of the first frame."""
        with self.path.open("rb") as file:
            file.seek(16)
            size = int.from_bytes(file.read(2), "big")
        size = 65536 if size == 1 else size
        if size < 512 or size & (size - 1) or len(self._bytes) < HEADER + FRAME + size:
            raise ValueError("the size of a page is unknown")
        salts, stored = bytes(self._bytes[HEADER + 8 : HEADER + 16]), bytes(self._bytes[24:32])
        content = bytes(self._bytes[HEADER : HEADER + 8] + self._bytes[HEADER + FRAME : HEADER + FRAME + size])
        big = np.frombuffer(content, ">u4").astype(np.uint32)
        matches = _continued(_pair(stored, 0), _products(big[None])[0], len(big)) == _pair(
            self._bytes[HEADER + 16 : HEADER + 24], 0
        )
        return struct.pack(">4I", MAGIC | matches, VERSION, size, 0) + salts + stored

    # --- writing it again

    def repaired(self) -> str:
        """Replaces the log by one that SQLite reads to its end; returns what was done."""
        if self.written_back:
            files.write_bytes(self.log, b"")
            return "its write-ahead log was damaged after all of it was in the file, nothing is lost"
        head = self.header[:24] + struct.pack(">2I", *_header_sum(self.header))
        words, checksum = (8 + self.page_size) // 4, _pair(head, 24)
        for _ in self._frames():
            pass
        self._leave_out_last()
        with files.replacing(self.log) as file:
            file.write(head)
            for content in self._frames():
                product = _products(np.frombuffer(content, self.order).astype(np.uint32)[None])[0]
                checksum = _continued(checksum, product, words)
                file.write(content[:8] + head[16:24] + struct.pack(">2I", *checksum) + content[8:])
        return self._sentence()

    def _frames(self) -> Iterator[bytes]:
        """All up to the last committed one, each corrected as far as possible; those of unknown pages are left out."""
        start, unfixed_before = _pair(self.header, 24), 0
        self.fixed = self.unfixed = 0
        self.ends, self.hit = [], []  # frames that end a transaction, from the damage on, and whether it was corrected
        for at in range(self.last + 1):
            content = self._content(at)
            commits = content[4:8] != bytes(4)
            if at >= self.first_bad:
                content, start = self._checked(at, content, start)
                if commits or content[4:8].strip(b"\0"):
                    self.ends.append(at)
                    self.hit.append(self.unfixed > unfixed_before)
                    unfixed_before = self.unfixed
            else:
                start = self._stored(at)
            if content:
                yield content

    def _leave_out_last(self) -> None:
        """Where no undamaged transaction follows the damaged ones, these are left out, and the state before is whole.

        Not so if SQLite had begun to write them into the file: without their pages in the log it would be a mixture.
        """
        if not any(self.hit) or not all(self.hit[self.hit.index(True) :]):
            return
        first = self.hit.index(True)
        end = self.ends[first - 1] if first else self._end_before(self.first_bad)
        with self.path.open("rb") as file:
            file.seek(VERSION_OFFSET)
            in_file = file.read(4)
        later = (at for at in range(end + 1, self.last + 1) if self.numbers[at] == 1)
        if any(self._content(at)[8 + VERSION_OFFSET :][:4] == in_file for at in later):
            return
        self.left_out, self.last = len(self.hit) - first, end

    def _end_before(self, at: int) -> int:
        ends = np.flatnonzero(self.sizes[:at])
        return int(ends[-1]) if len(ends) else -1

    def _checked(self, at: int, content: bytes, start: Pair) -> tuple[bytes, Pair]:
        """The content as it was written, if that can be known, and the checksum that the next frame continues."""
        words = np.frombuffer(content, self.order).astype(np.uint32)
        computed, stored = _continued(start, self.products[at], len(words)), self._stored(at)
        if computed == stored:
            self.fixed += not self.salted[at]
            return content, stored
        follows = at < self.last and bool(self.related[at + 1])
        if follows and _continued(computed, self.products[at + 1], len(words)) == self._stored(at + 1):
            self.fixed += 1  # of the checksum alone
            return content, computed
        confirmed = follows and _continued(stored, self.products[at + 1], len(words)) == self._stored(at + 1)
        solutions = _single_words(words, computed, stored)
        if len(solutions) == 1 and (confirmed or not _half_right(computed, stored)):
            self.fixed += 1
            return _with_word(words, *solutions[0]).astype(self.order).tobytes(), stored
        if not solutions and not confirmed and _half_right(computed, stored):
            self.fixed += 1
            return content, computed
        if solutions and solutions[0][0] > 1 and self._written_later(at):
            self.fixed += 1  # by a later frame: the page is known, and its damaged content is of no account
            return content, stored
        self.unfixed += 1
        return content if self.salted[at] and content[:4] != bytes(4) else b"", stored

    def _written_later(self, at: int) -> bool:
        """Whether the same page is in a later transaction of this log, undamaged."""
        later = (self.numbers[at + 1 : self.last + 1] == self.numbers[at]) & self.sound[at + 1 : self.last + 1]
        return bool(later.any())

    def _sentence(self) -> str:
        log, parts = "its write-ahead log", []
        if self.missing:
            parts.append(f"{log} is cut short, and {_count(self.missing, 'page')} of committed transactions are lost")
        if self.left_out:
            are = "transaction is" if self.left_out == 1 else f"{self.left_out:,} transactions are"
            parts.append(f"{log} is damaged, and the last {are} lost")
        if self.unfixed:
            kept = len(self.hit) - sum(self.hit)
            parts.append(
                f"{log} is damaged: {_count(sum(self.hit), 'transaction')} cannot be read as written "
                f"({_count(self.unfixed, 'page')}), rows of it may be lost, which nearkin gallery check tells, and "
                f"{_count(kept, 'other')} from there on {'is' if kept == 1 else 'are'} kept"
            )
        if not parts:
            what = _count(self.fixed, "page") if self.fixed else "the head"
            parts.append(f"{what} of {log} {'were' if self.fixed > 1 else 'was'} damaged, nothing is lost")
        return "; ".join(parts)

    def _content(self, at: int) -> bytes:
        start = HEADER + at * (FRAME + self.page_size)
        head: bytes = self._bytes[start : start + 8]
        return head + bytes(self._bytes[start + FRAME : start + FRAME + self.page_size])

    def _stored(self, at: int) -> Pair:
        return int(self.stored[at, 0]), int(self.stored[at, 1])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _pair(content: Any, at: int) -> Pair:
    first, second = struct.unpack_from(">2I", content, at)
    return first, second


def _header_sum(header: bytes) -> Pair:
    """Over all but the checksum itself."""
    words = np.frombuffer(header[:24], ">u4" if header[3] & 1 else "<u4").astype(np.uint32)
    return _continued((0, 0), _products(words[None])[0], 6)


def _plausible(header: bytes) -> bool:
    magic, version, page_size = struct.unpack_from(">3I", header)
    return magic | 1 == MAGIC | 1 and version == VERSION and 512 <= page_size <= 65536 and not page_size & page_size - 1


def _fixed_header(header: bytes) -> bytes | None:
    """With one word corrected, or its checksum; None where that is not enough."""
    stored = _pair(header, 24)
    for order in ("<u4", ">u4"):
        words = np.frombuffer(header[:24], order).astype(np.uint32)
        computed = _continued((0, 0), _products(words[None])[0], 6)
        candidates = [_with_word(words, *solution) for solution in _single_words(words, computed, stored)]
        candidates += [words] if _half_right(computed, stored) else []
        contents = [candidate.astype(order).tobytes() for candidate in candidates]
        right = [content for content in contents if _plausible(content) and (content[3] & 1) == (order == ">u4")]
        if len(right) == 1:
            return right[0] + struct.pack(">2I", *_header_sum(right[0]))
    return None


def _committed(shared: Path) -> tuple[bytes, int, int]:
    """What the last process knew of the log: its salts, frames that were committed, frames that are in the file too.

    Two copies of 48 bytes, then the number of frames that were written back, in this machine's byte order.
    """
    with suppress(OSError):
        content = shared.read_bytes()[:100]
        if len(content) == 100 and content[:48] == content[48:96]:
            frames, in_file = struct.unpack_from("=I", content, 16)[0], struct.unpack_from("=I", content, 96)[0]
            return content[32:40], frames, in_file
    return b"", 0, 0


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether no other process has the file open; while this holds, none can open it."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield False
        return
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        yield False
        return
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, SHARED_SIZE, SHARED_FIRST)
        alone = True
    except OSError:
        alone = False
    try:
        yield alone
    finally:
        os.close(handle)


def _keep(log: Path) -> Path:
    """A copy beside it; one that was made before a kill is found again."""
    content = log.read_bytes()
    names = (log.with_name(f"{log.name}.damaged-{n}") for n in range(1, 10_000))
    for aside in names:
        if not aside.exists():
            files.write_bytes(aside, content)
            return aside
        if aside.stat().st_size == len(content) and aside.read_bytes() == content:
            return aside
    raise OSError("10,000 damaged logs lie there")
