"""Pictures whose headers take long to read: refused in one sentence before Pillow reads them, and nobody waits.

Each case is small here. At 15 MiB one upload of it held all searches of the service for seconds.
"""

import io
import struct
import threading
import zlib

import numpy as np
import pytest
from PIL import Image

from nearkin.core.errors import UnreadablePicture
from nearkin.data import decode


def encoded(kind: str, size: int = 32, **options) -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((size, size)).convert("P" if kind == "GIF" else "RGB").save(out, kind, **options)
    return out.getvalue()


JPEG, PNG, GIF, WEBP = (encoded(kind) for kind in ("JPEG", "PNG", "GIF", "WEBP"))
FRAME = 13 + (3 << (GIF[10] & 7) + 1)  # where the blocks of the GIF begin


def in_jpeg(content: bytes) -> bytes:
    return JPEG[:2] + content + JPEG[2:]


def segment(marker: int, content: bytes = b"") -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def in_png(content: bytes) -> bytes:
    return PNG[:33] + content + PNG[33:]


def chunk(name: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def in_gif(content: bytes) -> bytes:
    return GIF[:FRAME] + content + GIF[FRAME:]


def in_webp(content: bytes) -> bytes:
    return WEBP[:4] + struct.pack("<I", len(WEBP) - 8 + len(content)) + WEBP[8:] + content


def tags(count: int, *entries: bytes) -> bytes:
    """A directory of EXIF whose entries are of one byte each, after those that are given."""
    plain = (struct.pack("<HHII", 0xC000 + n, 7, 1, 0) for n in range(count - len(entries)))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", count) + b"".join((*entries, *plain)) + bytes(4)


def scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    whole = encoded("JPEG", progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * (count - whole.count(b"\xff\xda")) + b"\xff\xd9"


def hidden_in(name: bytes) -> bytes:
    profile = zlib.compress(bytes(2**19))
    return in_png(chunk(name, b"x\0\0" + profile) * 17)


LONG = struct.pack("<HHII", 0x0112, 5, 2**14, 8)  # an orientation of 16,384 fractions
OVERLAPPING = [struct.pack("<HHII", 0xB000 + n, 7, 2**15, 8) for n in range(40)]  # all of the same bytes
TEXT = tags(2000).hex()
CASES = {
    "empty comments of a JPEG": (in_jpeg(segment(0xFE) * 2001), "segments"),
    "padding of a JPEG": (in_jpeg(b"\xff" * 2001), "segments"),
    "bytes between the segments of a JPEG": (in_jpeg(segment(0xFE) + bytes(9000)), "small parts"),
    "tables of a JPEG": (in_jpeg(segment(0xDB, (b"\0" + bytes(64)) * 1000) * 2), "bytes of tables"),
    "components of a JPEG": (in_jpeg(segment(0xC0, b"\x08\0\x20\0\x20\3" + b"\1\x11\0" * 21_000) * 2), "of tables"),
    "Photoshop's resources": (
        in_jpeg(segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\0" * 2001)),
        "Photoshop resources",
    ),
    "scans of a JPEG": (scans(33), "32 scans"),
    "scans behind a comment that looks like the end": (
        scans(33).replace(b"\xff\xda", segment(0xFE, b"\xff\xd9") + b"\xff\xda"),
        "32 scans",
    ),
    "EXIF in many segments": (in_jpeg(segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 17), "bytes of EXIF"),
    "tags of a JPEG": (in_jpeg(segment(0xE1, b"Exif\0\0" + tags(1001))), "1,000 tags"),
    "tags of a WebP": (encoded("WEBP", exif=b"Exif\0\0" + tags(1001)), "1,000 tags"),
    "tags of a PNG": (in_png(chunk(b"eXIf", tags(1001))), "1,000 tags"),
    "tags in a text of a PNG": (
        in_png(chunk(b"tEXt", f"Raw profile type exif\0\nexif\n{len(TEXT) // 2:8}\n{TEXT}\n".encode())),
        "1,000 tags",
    ),
    "a long orientation": (encoded("WEBP", exif=b"Exif\0\0" + tags(1, LONG) + bytes(2**17)), "bytes of one tag"),
    "tags that overlap": (encoded("WEBP", exif=b"Exif\0\0" + tags(40, *OVERLAPPING) + bytes(2**15)), "bytes of tags"),
    "pictures in a JPEG": (in_jpeg(segment(0xE2, b"MPF\0" + tags(1001))), "1,000 tags"),
    "chunks of a PNG": (in_png(chunk(b"abCd") * 8100), "chunks"),
    "empty data of a PNG": (in_png(chunk(b"IDAT") * 8100), "chunks"),
    "chunks behind the data of a PNG": (PNG[:-12] + chunk(b"abCd") * 8100 + PNG[-12:], "chunks"),
    "profiles of a PNG": (hidden_in(b"iCCP"), "compressed texts and profiles"),
    "texts of a PNG": (hidden_in(b"zTXt"), "compressed texts and profiles"),
    "comments of a GIF": (in_gif(b"!\xfe\1x\0" * 3000), "small parts"),
    "extensions of a GIF": (in_gif(b"!\xff" + b"\1x" * 5000 + b"\0"), "small parts"),
    "bytes between the blocks of a GIF": (in_gif(bytes(9000)), "small parts"),
    "chunks of a WebP": (in_webp(b"abcd\0\0\0\0" * 8100), "chunks"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_header_made_to_be_slow_is_refused(name):
    data, words = CASES[name]
    with pytest.raises(UnreadablePicture, match=f"{words}.*, as no ordinary picture has"):
        decode.square(data, side=8)


@pytest.mark.parametrize("data", [JPEG, PNG, GIF, WEBP, encoded("JPEG", progressive=True), encoded("BMP")])
def test_ordinary_pictures_pass(data):
    assert decode.square(data, side=8).shape == (8, 8, 3)


def test_many_parts_of_an_honest_picture_pass():
    """A profile in 255 segments, 64 KiB of EXIF, bytes behind the end, chunks of 4 KiB."""
    exif = segment(0xE1, b"Exif\0\0" + tags(200) + bytes(60_000))
    profile = b"".join(segment(0xE2, b"ICC_PROFILE\0" + bytes([n + 1, 255]) + bytes(1000)) for n in range(255))
    video = np.random.default_rng(0).bytes(2**21)
    pixels = np.asarray(decode.decode(JPEG))
    assert np.array_equal(decode.decode(in_jpeg(exif + profile) + video), pixels)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (800, 800, 3), np.uint8))
    out = io.BytesIO()
    noise.save(out, "PNG")
    whole = out.getvalue()
    body, at = b"", 33
    while at < len(whole):
        length, kind = struct.unpack_from(">I4s", whole, at)
        body += whole[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    parts = b"".join(chunk(b"IDAT", body[i : i + 4096]) for i in range(0, len(body), 4096))
    cut = whole[:33] + parts + whole[-12:] + bytes(10**6)
    assert np.array_equal(decode.decode(cut), noise)


def test_headers_are_read_side_by_side_and_pillows_limit_comes_back(monkeypatch):
    """One header that hangs does not stop another from being read."""
    gate, inside, before, limit = threading.Event(), threading.Event(), Image.open, Image.MAX_IMAGE_PIXELS

    def slow(file, **options):
        if file.getvalue() == PNG:
            inside.set()
            assert gate.wait(60)
        return before(file, **options)

    monkeypatch.setattr(Image, "open", slow)
    thread = threading.Thread(target=decode.opened, args=(PNG,))
    thread.start()
    try:
        assert inside.wait(60)
        other = threading.Thread(target=decode.opened, args=(JPEG,), daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive() and Image.MAX_IMAGE_PIXELS is None
    finally:
        gate.set()
        thread.join()
    assert limit == Image.MAX_IMAGE_PIXELS
