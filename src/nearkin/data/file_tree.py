"""A tree of files, in a folder or in an archive: .zip and uncompressed .tar are read in place, without unpacking."""

import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import ArrayLike

from nearkin.core import checks
from nearkin.data.byte_limit import MAX_BYTES, check_bytes, read_file

__all__ = ["COMPRESSED", "ENDINGS", "KINDS", "Archive", "Files", "Members", "Tree"]
__all__ += ["by_bytes", "is_image", "open_tree", "printable"]

KINDS = (".zip", ".tar")
COMPRESSED = (".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz", ".tar.zst", ".gz", ".7z", ".rar")
_LOCAL = struct.Struct("<4s22xHH")  # the header of a zip member: signature, …, length of the name, of the extra field
# Endings of image files, also of formats that the installed Pillow may not decode: those are reported as unreadable.
# Files with other endings are ignored and counted.
_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif", ".jp2")
_PLAIN = (".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".avif", ".heic", ".heif")
ENDINGS = frozenset((*_JPEG, *_PLAIN, ".pgm", ".ppm", ".pbm", ".pnm"))
_NAMES = {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE}
_LONGEST_NAME = 2**20
_SYSTEM_FILES = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir"})


class Entry(NamedTuple):
    """The position of a member: `start` is that of its header in a zip, that of its bytes in a tar."""

    start: int
    packed: int
    size: int
    deflated: bool = False
    crc: int | None = None


class Archive:
    """The members of an archive by name. Each read opens the file: threads and processes never share a position."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        name = self.path.name.lower()
        if name.endswith(COMPRESSED):
            raise ValueError(f"{self.path}: single pictures cannot be read from a compressed archive; unpack it first")
        try:
            state = self.path.stat()
            self._entries = _zip(self.path) if name.endswith(".zip") else _tar(self.path, state.st_size)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, LookupError, NotImplementedError) as error:
            raise ValueError(f"{self.path}: not a readable {self.path.suffix} archive ({error})") from None
        except PermissionError:
            raise ValueError(f"{self.path}: its permissions do not allow reading it") from None
        self.stamp = f"{os.path.abspath(self.path)}\n{state.st_size}\n{state.st_mtime_ns}"

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Every file in it, sorted by the bytes of its name."""
        return sorted(self._entries, key=lambda name: name.encode("utf-8", "surrogateescape"))

    def read(self, name: str, most: int = MAX_BYTES) -> bytes:
        """The content of a member; a ValueError where it has, or its header promises, more bytes than `most`."""
        entry = self._entries[name]
        try:
            check_bytes(max(entry.size, entry.packed), most)
        except ValueError as error:
            raise ValueError(f"{self.path}: {name} {error}") from None
        with self.path.open("rb") as file:
            file.seek(entry.start)
            if entry.crc is not None:
                head = file.read(_LOCAL.size)
                if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
                    raise ValueError(f"{self.path}: {name} is corrupt")
                _, name_length, extra_length = _LOCAL.unpack(head)
                file.seek(entry.start + _LOCAL.size + name_length + extra_length)
            content = file.read(entry.packed)
        if entry.deflated:
            try:
                content = zlib.decompressobj(-15).decompress(content, entry.size + 1)  # never more than its header says
            except zlib.error:
                content = b""
        wrong = len(content) != entry.size or (entry.crc is not None and zlib.crc32(content) != entry.crc)
        if wrong:
            raise ValueError(f"{self.path}: {name} is corrupt")
        return content


class Files:
    """Image files by their paths."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = [os.fspath(path) for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, i: int) -> bytes:
        return read_file(self.paths[i])

    def stamp(self, i: int) -> str:
        state = os.stat(self.paths[i])
        return f"{os.path.abspath(self.paths[i])}\n{state.st_size}\n{state.st_mtime_ns}"

    def take(self, indices: ArrayLike) -> "Files":
        return Files([self.paths[i] for i in checks.indices(indices, len(self))])


class Members:
    """Image files inside a .zip or an uncompressed .tar, read in place."""

    def __init__(self, archive: str | Path | Archive, names: Sequence[str]) -> None:
        self.archive = archive if isinstance(archive, Archive) else Archive(archive)
        self.names = list(names)
        missing = [name for name in self.names if name not in self.archive]
        if missing:
            raise ValueError(f'{self.archive.path}: {len(missing)} members are not in it, the first "{missing[0]}"')

    def __len__(self) -> int:
        return len(self.names)

    def read(self, i: int) -> bytes:
        return self.archive.read(self.names[i])

    def stamp(self, i: int) -> str:
        return f"{self.archive.stamp}\n{self.names[i]}"

    def take(self, indices: ArrayLike) -> "Members":
        return Members(self.archive, [self.names[i] for i in checks.indices(indices, len(self))])


class Tree:
    """The visible files under a folder, or under a prefix of an archive; names are relative and use "/"."""

    def __init__(self, place: Path | Archive, prefix: str = "") -> None:
        self.place, self.prefix = place, prefix

    def __str__(self) -> str:
        return str(self.place.path if isinstance(self.place, Archive) else self.place)

    @cached_property
    def _listing(self) -> tuple[list[str], int]:
        if not isinstance(self.place, Archive):
            return _walk(self.place)
        inside = [name[len(self.prefix) :] for name in self.place.names() if name.startswith(self.prefix)]
        visible = [name for name in inside if not any(_is_hidden(part) for part in name.split("/"))]
        return visible, len(inside) - len(visible)

    @property
    def files(self) -> list[str]:
        """Every file but hidden and system files, sorted by the bytes of its name, on every file system."""
        return self._listing[0]

    @property
    def hidden(self) -> int:
        """How many hidden or system files and folders were skipped."""
        return self._listing[1]

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.files)

    def inside(self, prefix: str) -> "Tree":
        """The subtree of a folder, `prefix` with its "/"; "" is the tree itself."""
        if not prefix:
            return self
        return Tree(self.place, self.prefix + prefix) if isinstance(self.place, Archive) else Tree(self.place / prefix)

    def has(self, name: str) -> bool:
        return name in self._known

    def read(self, name: str) -> bytes:
        if isinstance(self.place, Archive):
            return self.place.read(self.prefix + name)
        try:
            return read_file(self.place / name)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{self.place / name}: it cannot be read ({reason})") from None

    def pictures(self, names: Sequence[str]) -> Files | Members:
        if isinstance(self.place, Archive):
            return Members(self.place, [self.prefix + name for name in names])
        return Files([os.path.join(self.place, name) for name in names])


def open_tree(path: Path) -> Tree:
    """The tree of a folder or an archive; a ValueError for anything else."""
    return Tree(path) if path.is_dir() else Tree(Archive(path))


def is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in ENDINGS


def by_bytes(name: str) -> bytes:
    """A sort key for names: the same order on every machine and in every locale."""
    return name.encode("utf-8", "surrogateescape")


def printable(name: str) -> str:
    """A name that can be encoded in UTF-8, also if its bytes on the file system cannot be decoded."""
    return by_bytes(name).decode("utf-8", "backslashreplace")


def _is_hidden(part: str) -> bool:
    return part.startswith(".") or part in _SYSTEM_FILES


def _walk(top: Path) -> tuple[list[str], int]:
    """Files under a folder, and how many were skipped.

    Links are followed, and each real folder is entered once, so a loop of links ends.
    """
    files: list[str] = []
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
        inside = [entry for entry in everything if not _is_hidden(entry.name)]
        hidden += len(everything) - len(inside)
        files += [relative + entry.name for entry in inside if _is(entry, "file")]
        folders = sorted((entry for entry in inside if _is(entry, "dir")), key=lambda entry: by_bytes(entry.name))
        waiting += [(f"{relative}{entry.name}/", entry.path) for entry in reversed(folders)]
    return sorted(files, key=by_bytes), hidden


def _is(entry: "os.DirEntry[str]", kind: str) -> bool:
    """False for a link that is broken or leads in a circle."""
    try:
        return entry.is_file() if kind == "file" else entry.is_dir()
    except OSError:
        return False


def _zip(path: Path) -> dict[str, Entry]:
    entries = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if info.flag_bits & 1:
                raise ValueError(f"{path}: {info.filename} is encrypted, which is not read; unpack it first")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{path}: {info.filename} is compressed in an unusual way; unpack it first")
            if info.header_offset < 0:
                raise ValueError(f"{path}: not a readable .zip archive ({info.filename} lies outside it)")
            deflated = info.compress_type == zipfile.ZIP_DEFLATED
            entry = Entry(info.header_offset, info.compress_size, info.file_size, deflated, info.CRC)
            entries[_plain(info.filename)] = entry
    return entries


def _tar(path: Path, length: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for info in _headers(path):
        if info.isreg() and not info.issparse():
            if info.offset_data + info.size > length:
                raise ValueError(f"{path}: it ends in the middle of {info.name}; it is incomplete")
            entries[_plain(info.name)] = Entry(info.offset_data, info.size, info.size)
        elif info.islnk() and _plain(info.linkname) in entries:
            entries[_plain(info.name)] = entries[_plain(info.linkname)]
    return entries


def _headers(path: Path) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(path, "r:", tarinfo=_Header) as archive:
            for info in archive:
                _check_header(info)  # before the next one is looked for, so many bytes on
                yield info
    except (ValueError, LookupError, RecursionError) as error:  # what tarfile does not expect in a header
        raise tarfile.ReadError(str(error)) from None


class _Header(tarfile.TarInfo):
    """A header whose size is looked at before tarfile goes on, or reads so many bytes of names."""

    @classmethod
    def frombuf(cls, *arguments: Any, **options: Any) -> "_Header":
        header = super().frombuf(*arguments, **options)
        _check_header(header)
        return header


def _check_header(header: tarfile.TarInfo) -> None:
    """A negative size would lead back, for ever; the size of a name or of pax records is read into memory."""
    if header.size < 0 or (header.type in _NAMES and header.size > _LONGEST_NAME):
        raise tarfile.ReadError(f"a header of {header.size:,} bytes")


def _plain(name: str) -> str:
    while name.startswith("./"):
        name = name[2:]
    return name
