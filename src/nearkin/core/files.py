"""Files that are whole or not there: written under another name, flushed to the disk, then renamed."""

import hashlib
import json
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

__all__ = ["TEMPORARY", "Lock", "digest", "explained", "is_link", "read_json", "replacing"]
__all__ += ["write_bytes", "write_json", "write_text"]

TEMPORARY = r"\.(?:%s)\.[0-9a-f]{8}"  # the temporary names of files, whose own names it is given as a pattern
_FAR = 1 << 30  # Windows locks bytes, which nobody else may read then: one far behind the content


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file to write into; on leaving it takes the place of `path`, and whatever goes wrong, the old one stays.

    The temporary file stands beside the final one (a rename must not cross file systems), with a leading dot. An
    `OSError` (no room, no permission) is passed on after the temporary file is gone.
    """
    final = Path(path).resolve()
    part = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, final)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _settle(final.parent)


def is_link(path: Path) -> bool:
    """Whether what stands there is only a link to something elsewhere: a symbolic link, or a junction of Windows."""
    return path.is_symlink() or bool(getattr(path, "is_junction", bool)())  # junctions: Python 3.12 and newer


@contextmanager
def explained(what: str, way_out: str) -> Iterator[None]:
    """A file that cannot be written is one sentence: what, why, and what to do."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what} could not be written ({error.strerror or error}); {way_out}") from None


def write_bytes(path: str | Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> None:
    """JSON as it is defined: a NaN or an infinity in `value` is a ValueError, not an unreadable file."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a file; ValueError where there is none, whatever stands there instead."""
    try:
        found = json.loads(Path(path).read_bytes())
    except RecursionError:
        raise ValueError("lists within lists, too deep to be read") from None
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def digest(content: Mapping[str, Any]) -> str:
    """A checksum of what JSON can hold: the same after writing and reading, whatever the order of the keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _settle(folder: Path) -> None:
    """The new name itself reaches the disk, where folders can be flushed."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


class Lock:
    """Held from here to `close`, which removes the file; ValueError with `taken` and who holds it, where it is held.

    A process that was killed holds nothing: its file is left behind and taken over. On a file system without locks
    nobody is kept out.
    """

    def __init__(self, path: Path, taken: str) -> None:
        self.path = path
        while True:
            # Never through a symbolic link: what it leads to would be written over.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            if not _take(self._file):
                os.close(self._file)
                raise ValueError(f"{taken}{_holder(path)}")
            if _still_there(self._file, path):
                break
            os.close(self._file)  # whoever held it has removed it between our opening and locking it
        os.ftruncate(self._file, 0)
        os.write(self._file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

    def close(self) -> None:
        # While it is still locked, so that nobody locks a file that is about to go; another's in its place stays.
        if os.name != "nt" and _still_there(self._file, self.path):
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        if os.name == "nt":  # where an open file cannot be removed
            with suppress(OSError):
                self.path.unlink()


def _take(file: int) -> bool:
    """Locks the open file, or says that another process has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return _take_on_windows(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[attr-defined,unused-ignore]
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _take_on_windows(file: int) -> bool:
    try:
        import msvcrt
    except ImportError:  # a system without locks
        return True
    os.lseek(file, _FAR, os.SEEK_SET)
    try:
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    finally:
        os.lseek(file, 0, os.SEEK_SET)
    return True


def _still_there(file: int, path: Path) -> bool:
    if os.name == "nt":
        return True
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """As " (process 4711 on otter)", where the file says so."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return f" (process {said['pid']} on {said['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
