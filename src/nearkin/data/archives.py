"""Archives read where they lie: .zip and uncompressed .tar, any member at any time, nothing unpacked to disk."""

import os
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

__all__ = ["COMPRESSED", "KINDS", "Archive"]

KINDS = (".zip", ".tar")
COMPRESSED = (".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz", ".tar.zst", ".gz", ".7z", ".rar")
_LOCAL = struct.Struct("<4s22xHH")  # a zip member's own header: signature, …, length of the name, of the extra field


class Entry(NamedTuple):
    """Where a member lies: a zip's `start` is that of its header, a tar's that of its bytes."""

    start: int
    packed: int
    size: int
    deflated: bool = False
    crc: int | None = None


class Archive:
    """The members of an archive by name. A read opens the file anew: threads and processes never share a position."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        name = self.path.name.lower()
        if name.endswith(COMPRESSED):
            raise ValueError(f"{self.path}: one picture cannot be read from a compressed archive; unpack it first")
        try:
            state = self.path.stat()
            self._entries = _zip(self.path) if name.endswith(".zip") else _tar(self.path, state.st_size)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise ValueError(f"{self.path}: not a readable {self.path.suffix} archive ({error})") from None
        except PermissionError:
            raise ValueError(f"{self.path}: its permissions do not allow reading it") from None
        self.stamp = f"{os.path.abspath(self.path)}\n{state.st_size}\n{state.st_mtime_ns}"

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Every file in it, in the order of their bytes."""
        return sorted(self._entries, key=lambda name: name.encode("utf-8", "surrogateescape"))

    def read(self, name: str) -> bytes:
        entry = self._entries[name]
        with self.path.open("rb") as file:
            file.seek(entry.start)
            if entry.crc is not None:
                head = file.read(_LOCAL.size)
                if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
                    raise ValueError(f"{self.path}: {name} is damaged")
                _, name_length, extra_length = _LOCAL.unpack(head)
                file.seek(entry.start + _LOCAL.size + name_length + extra_length)
            content = file.read(entry.packed)
        if entry.deflated:
            try:
                content = zlib.decompressobj(-15).decompress(content, entry.size + 1)  # never more than announced
            except zlib.error:
                content = b""
        wrong = len(content) != entry.size or (entry.crc is not None and zlib.crc32(content) != entry.crc)
        if wrong:
            raise ValueError(f"{self.path}: {name} is damaged")
        return content


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
    with tarfile.open(path, "r:") as archive:
        for info in archive:
            if info.isreg() and not info.issparse():
                if info.offset_data + info.size > length:
                    raise ValueError(f"{path}: it ends in the middle of {info.name}; it is not whole")
                entries[_plain(info.name)] = Entry(info.offset_data, info.size, info.size)
            elif info.islnk() and _plain(info.linkname) in entries:
                entries[_plain(info.name)] = entries[_plain(info.linkname)]
    return entries


def _plain(name: str) -> str:
    while name.startswith("./"):
        name = name[2:]
    return name
