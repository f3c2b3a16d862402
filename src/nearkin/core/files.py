"""Files that are complete or absent: written under a temporary name, flushed to the disk, then renamed; and locks."""

import errno
import hashlib
import json
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

__all__ = ["TEMPORARY", "Lock", "digest", "explained", "flush_folder", "is_link", "read_json", "refuse_link"]
__all__ += ["replacing", "write_bytes", "write_json", "write_text"]

TEMPORARY = r"\.(?:%s)\.[0-9a-f]{8}"  # pattern of the temporary names of files whose names match %s
_FAR = 1 << 30  # Windows locks bytes, which no other process can read then: one far behind the content


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file to write into, which replaces `path` on leaving; if anything fails, the old file stays.

    The temporary file is in the same folder (a rename must not cross file systems), with a leading dot. An `OSError`
    (no room, no permission) is passed on after the temporary file is removed. A link in place of the file is followed.
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
    flush_folder(final.parent)


def hold(file: IO[bytes]) -> None:
    """Marks a temporary file of `replacing`, still empty, as in use, for `remove_abandoned`."""
    _lock(file.fileno())
    os.ftruncate(file.fileno(), 1)  # one that is empty may not be locked yet


def remove_abandoned(path: Path) -> None:
    """Removes the temporary files of `replacing(path)` that killed processes left, of files that are held."""
    if is_link(path):
        return
    final = path.resolve()
    stem = f".{final.name}."
    for part in final.parent.iterdir():
        if not part.name.startswith(stem) or len(part.name) != len(stem) + 8:
            continue
        with suppress(OSError):
            handle = os.open(part, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            try:
                abandoned = os.fstat(handle).st_size > 0 and _lock(handle)
            finally:
                os.close(handle)
            if abandoned:
                part.unlink()


def is_link(path: Path) -> bool:
    """Whether the path is only a link to somewhere else: a symbolic link, or a junction of Windows."""
    return path.is_symlink() or bool(getattr(path, "is_junction", bool)())  # junctions: Python 3.12 and newer


def refuse_link(path: Path) -> None:
    """Raises an `OSError` for a link: a file that we name ourselves is not written to another place."""
    if is_link(path):
        raise OSError(errno.ELOOP, f"it is a link to {os.path.realpath(path)}, which is not followed")


@contextmanager
def explained(what: str, way_out: str) -> Iterator[None]:
    """Turns an OSError while writing into one sentence: what, why, and what to do."""
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
    """Standard JSON: a NaN or an infinity in `value` is a ValueError, not an unreadable file."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError for any other content."""
    try:
        value = json.loads(Path(path).read_bytes())
    except RecursionError:
        raise ValueError("lists within lists, too deep to be read") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def digest(content: Mapping[str, Any]) -> str:
    """A checksum of JSON values: the same after writing and reading, in any order of the keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def flush_folder(folder: Path) -> None:
    """Flushes the new name to the disk, on systems that can flush folders."""
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
    """A file that one process at a time can lock, until `close`, which removes it, or until the process ends.

    ValueError with `taken` and the process that has it, if another one does. A killed process leaves its file behind,
    unlocked, and the next one takes it over. On a file system without locks no process is kept out.
    """

    def __init__(self, path: Path, taken: str) -> None:
        self.path = path
        while True:
            # Never through a symbolic link: its target would be overwritten.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            if not _lock(self._file):
                os.close(self._file)
                raise ValueError(f"{taken}{_holder(path)}")
            if _is_same_file(self._file, path):
                break
            os.close(self._file)  # its owner removed it after we opened it and before we locked it
        with suppress(OSError):  # a full disk: what is to be written there says so, with its name
            os.ftruncate(self._file, 0)
            os.write(self._file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

    def close(self) -> None:
        # While still locked, so that no process locks a file that is about to go; another's file in its place stays.
        if os.name != "nt" and _is_same_file(self._file, self.path):
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        if os.name == "nt":  # where an open file cannot be removed
            with suppress(OSError):
                self.path.unlink()


def _lock(file: int) -> bool:
    """Locks the open file; False if another process has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return _lock_on_windows(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[attr-defined,unused-ignore]
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _lock_on_windows(file: int) -> bool:
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


def _is_same_file(file: int, path: Path) -> bool:
    if os.name == "nt":
        return True
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """As " (process 4711 on otter)", if the file says so."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f" (process {holder['pid']} on {holder['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
