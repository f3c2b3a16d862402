"""Reads MATLAB v5 files: matrices of numbers and text, cells and structs, the lists of some benchmark sets.

The format is MathWorks' "MAT-File Format", level 5: a header of 128 bytes, then elements, each a tag (type, length)
and its bytes up to a multiple of eight; short ones fit into the tag, and a variable may be deflated.

Not `scipy.io.loadmat`, which is not safe with a corrupt download: of 300 files with one changed byte, seven ended the
process with a memory fault (SciPy 1.17).
"""

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["read"]

_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXT = {16: "utf-8", 17: "utf-16", 18: "utf-32"}
_MATRIX, _DEFLATED = 14, 15
_CELL, _STRUCT, _CHAR = 1, 2, 4
_PLAIN = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_MOST = 1 << 30  # bytes that one deflated variable may become


def read(content: bytes, source: str) -> dict[str, Any]:
    """Variable → array in MATLAB's shape; text is a str, a cell array an object array, a struct array one of dicts."""
    if len(content) < 128 or content[126:128] not in (b"IM", b"MI"):
        newer = "; save it with -v7, not -v7.3" if b"7.3" in content[:40] else ""
        raise ValueError(f"{source}: not a MATLAB v5 file{newer}")
    order = "<" if content[126:128] == b"IM" else ">"
    variables = {}
    try:
        for kind, body in _elements(memoryview(content)[128:], order):
            if kind == _DEFLATED:
                ((kind, body),) = _elements(memoryview(_inflated(body)), order)
            if kind == _MATRIX:
                name, value = _matrix(body, order)
                variables[name] = value
    except (struct.error, zlib.error, ValueError, LookupError, StopIteration, OverflowError, RecursionError) as error:
        raise ValueError(f"{source}: a MATLAB v5 file that is corrupt or of an unknown kind ({error})") from None
    return variables


def _inflated(body: memoryview) -> bytes:
    out = zlib.decompressobj().decompress(body, _MOST)
    if len(out) == _MOST:
        raise ValueError("a variable of more than 1 GiB")
    return out


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and bytes of one element after the other."""
    at = 0
    while at + 8 <= len(data):
        kind, length = struct.unpack_from(f"{order}II", data, at)
        if kind >> 16:  # a short element: length and type share four bytes, the content is the other four
            kind, length, start, after = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        else:
            start = at + 8
            after = start + length + (-length % 8 if kind != _DEFLATED else 0)
        if start + length > len(data):
            raise ValueError("it ends in the middle of an element")
        yield kind, data[start : start + length]
        at = after


def _numbers(kind: int, body: memoryview, order: str) -> Any:
    return np.frombuffer(body, np.dtype(order + _NUMBERS[kind]))


def _matrix(body: memoryview, order: str) -> tuple[str, Any]:
    if not len(body):
        return "", np.empty((0, 0))
    parts = _elements(body, order)
    flags = int(_numbers(*next(parts), order)[0])
    shape = tuple(int(side) for side in _numbers(*next(parts), order))
    count = math.prod(shape)
    name = bytes(next(parts)[1]).decode("ascii")
    kind = flags & 0xFF
    if kind == _CHAR:
        return name, _text(*next(parts), order, shape)
    if kind == _CELL:
        cells = [_matrix(part, order)[1] for _, part in parts]
        return name, _objects(cells, shape)
    if kind == _STRUCT:
        width = int(_numbers(*next(parts), order)[0])
        fields = bytes(next(parts)[1])
        keys = [fields[at : at + width].split(b"\0")[0].decode("ascii") for at in range(0, len(fields), width)]
        values = [_matrix(part, order)[1] for _, part in parts]
        if len(values) != count * len(keys):
            raise ValueError("a struct of another size than its header says")
        rows = [values[at : at + len(keys)] for at in range(0, len(values), len(keys) or 1)]
        return name, _objects([dict(zip(keys, row, strict=True)) for row in rows], shape)
    if flags & 0x0800:
        raise ValueError("complex numbers")
    values = _numbers(*next(parts), order).astype(_PLAIN[kind])  # numbers may be stored in a narrower type
    return name, values.reshape(shape, order="F")


def _text(kind: int, body: memoryview, order: str, shape: tuple[int, ...]) -> str:
    if kind in _TEXT:
        suffix = "" if kind == 16 else "-le" if order == "<" else "-be"
        text = bytes(body).decode(_TEXT[kind] + suffix)
    else:
        text = "".join(map(chr, _numbers(kind, body, order)))
    if len(shape) == 2 and shape[0] > 1 and len(text) == shape[0] * shape[1]:  # several lines, stored column by column
        return "\n".join(text[row :: shape[0]].rstrip() for row in range(shape[0]))
    return text


def _objects(values: list[Any], shape: tuple[int, ...]) -> Any:
    array = np.empty(len(values), object)
    for i, value in enumerate(values):  # one by one: NumPy would unpack values that are arrays
        array[i] = value
    return array.reshape(shape, order="F")
