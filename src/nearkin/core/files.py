"""Files that are whole or not there: written under another name, flushed to the disk, then renamed."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = ["TEMPORARY", "digest", "explained", "is_link", "read_json", "replacing"]
__all__ += ["write_bytes", "write_json", "write_text"]

TEMPORARY = r"\.(?:%s)\.[0-9a-f]{8}"  # the temporary names of files, whose own names it is given as a pattern


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
