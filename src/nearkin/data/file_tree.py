"""A tree of files, in a folder or in an archive, seen in one way."""

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from nearkin.data.archives import Archive
from nearkin.data.items import Files, Members, Pictures

__all__ = ["ENDINGS", "Tree", "by_bytes", "is_image", "open_tree", "printable"]

# What people keep photos in, also where a decoder may be missing: then they are named as unreadable.
# A file with another ending is left out and counted.
_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif", ".jp2")
_PLAIN = (".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".avif", ".heic", ".heif")
ENDINGS = frozenset((*_JPEG, *_PLAIN, ".pgm", ".ppm", ".pbm", ".pnm"))
_LITTER = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir"})


class Tree:
    """The visible files under a folder, or under a prefix of an archive; names are relative and use "/"."""

    def __init__(self, place: Path | Archive, prefix: str = "") -> None:
        self.place, self.prefix = place, prefix

    def __str__(self) -> str:
        return str(self.place.path if isinstance(self.place, Archive) else self.place)

    @cached_property
    def _found(self) -> tuple[list[str], int]:
        if not isinstance(self.place, Archive):
            return _walk(self.place)
        inside = [name[len(self.prefix) :] for name in self.place.names() if name.startswith(self.prefix)]
        visible = [name for name in inside if not any(_unwanted(part) for part in name.split("/"))]
        return visible, len(inside) - len(visible)

    @property
    def files(self) -> list[str]:
        """Every file but hidden ones and litter, in the order of their bytes, whatever the file system says."""
        return self._found[0]

    @property
    def hidden(self) -> int:
        """How many files and folders were passed over: hidden ones and what systems leave behind."""
        return self._found[1]

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.files)

    def inside(self, prefix: str) -> "Tree":
        """The part of it under a folder, named with its "/"; "" is all of it."""
        if not prefix:
            return self
        return Tree(self.place, self.prefix + prefix) if isinstance(self.place, Archive) else Tree(self.place / prefix)

    def has(self, name: str) -> bool:
        return name in self._known

    def read(self, name: str) -> bytes:
        if isinstance(self.place, Archive):
            return self.place.read(self.prefix + name)
        try:
            return (self.place / name).read_bytes()
        except OSError as error:
            raise ValueError(f"{self.place / name}: it cannot be read ({error.strerror or error})") from None

    def pictures(self, names: Sequence[str]) -> Pictures:
        if isinstance(self.place, Archive):
            return Members(self.place, [self.prefix + name for name in names])
        return Files([os.path.join(self.place, name) for name in names])


def open_tree(path: Path) -> Tree:
    """A folder, or an archive; what is neither is answered with one sentence."""
    return Tree(path) if path.is_dir() else Tree(Archive(path))


def is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in ENDINGS


def by_bytes(name: str) -> bytes:
    """The order of names: the same on every machine and in every language."""
    return name.encode("utf-8", "surrogateescape")


def printable(name: str) -> str:
    """A name that can be written in UTF-8, also where the file system holds bytes that are none."""
    return by_bytes(name).decode("utf-8", "backslashreplace")


def _unwanted(part: str) -> bool:
    return part.startswith(".") or part in _LITTER


def _walk(top: Path) -> tuple[list[str], int]:
    """Files under a folder, and how many were passed over.

    Links are followed, and each real folder is entered once, so a loop of links ends.
    """
    found: list[str] = []
    hidden = 0
    entered: set[tuple[int, int]] = set()
    waiting = [("", str(top))]
    while waiting:
        relative, folder = waiting.pop()
        try:
            state = os.stat(folder)
            if (state.st_dev, state.st_ino) in entered:
                continue
            entered.add((state.st_dev, state.st_ino))
            with os.scandir(folder) as entries:
                everything = list(entries)
        except PermissionError:
            raise ValueError(f"{folder}: its permissions do not allow reading it") from None
        inside = [entry for entry in everything if not _unwanted(entry.name)]
        hidden += len(everything) - len(inside)
        found += [relative + entry.name for entry in inside if _is(entry, "file")]
        folders = sorted((entry for entry in inside if _is(entry, "dir")), key=lambda entry: by_bytes(entry.name))
        waiting += [(f"{relative}{entry.name}/", entry.path) for entry in reversed(folders)]
    return sorted(found, key=by_bytes), hidden


def _is(entry: "os.DirEntry[str]", kind: str) -> bool:
    """False for a link that leads nowhere or in a circle."""
    try:
        return entry.is_file() if kind == "file" else entry.is_dir()
    except OSError:
        return False
