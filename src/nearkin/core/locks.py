"""A file that one process at a time may hold. The system lets go of it when that process ends, however it ends."""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["Lock"]

_FAR = 1 << 30  # Windows locks bytes, which nobody else may read then: one far behind the content


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
