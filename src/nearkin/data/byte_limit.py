"""The most bytes that a picture may have, in every source: looked at before any of them is read."""

import os

from nearkin.core.errors import UnreadablePicture

__all__ = ["MAX_BYTES", "check_bytes", "read_file"]

MAX_BYTES = 256 * 2**20  # a JPEG of 200 million pixels has about 80; a 16-bit TIFF of 40 million 240


def check_bytes(size: int, most: int = MAX_BYTES) -> None:
    """Raises `UnreadablePicture` for more."""
    if size > most:
        raise UnreadablePicture(f"has {size:,} bytes, and at most {most:,} are read; make it smaller")


def read_file(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """The content of a file; `UnreadablePicture` for a larger one, also for one that grows meanwhile."""
    with open(path, "rb") as file:
        check_bytes(os.fstat(file.fileno()).st_size, most)
        content = file.read(most + 1)
    check_bytes(len(content), most)
    return content
