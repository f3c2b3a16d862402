"""Decodes one picture: from the bytes of a file to a small square of grey or colour pixels, or a reason why not."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.core import checks
from nearkin.core.errors import UnreadablePicture
from nearkin.data import headers
from nearkin.data.byte_limit import check_bytes

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["FITS", "MAX_PIXELS", "Opened", "decode", "glance", "opened", "square", "weight"]

DECODER = 1  # increase whenever the same file would give other pixels: it is part of the key of every cache
MAX_PIXELS = 250_000_000  # today's largest phone pictures have 200 million
FITS = ("crop", "squash", "pad")
# Only formats of pixels: others start programs (EPS) or draw (WMF), which an untrusted file must not do.
FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "AVIF", "HEIF", "JPEG2000", "PPM", "ICO")
DRAFT = 2  # a JPEG is decoded at the smallest of 1/1, 1/2, 1/4, 1/8 that has at least so many times the pixels needed

_GREY = ("1", "L", "LA", "La")  # modes of Pillow
_ORIENTATION = 0x0112  # the tag of EXIF; from its value 2 on, what undoes it
_UNDO = "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"
_opening = threading.Lock()
_open_count, _pixel_limit = 0, None


class Opened(NamedTuple):
    """A picture of which only the header is read; `decode` and `square` take it once in place of its bytes."""

    data: bytes
    image: "Image.Image"


def decode(
    data: bytes | NDArray[Any] | Opened, *, max_pixels: int = MAX_PIXELS, enough: int | None = None
) -> "Image.Image":
    """The picture upright in mode "L" (grey) or "RGB", 8 bits per channel; raises `UnreadablePicture`.

    data: the bytes of a file, what `opened` gave for them, or pixels (H, W), (H, W, 1), (H, W, 3) or (H, W, 4).
    - A truncated file is unreadable, never a picture with a grey rest. Corruption in the middle of a JPEG that the
      format cannot detect is not detected here either.
    - max_pixels is checked from the header, before anything is decoded.
    - enough: no side needs more pixels than this, so that a big JPEG may be decoded at 1/2, 1/4 or 1/8.
    - Transparency is composited over white. An animation gives its first frame. EXIF orientation is applied.
    - 16 bits per channel are scaled by 1/257. The range of other integers and floats is the smallest of 0..1, 0..255
      and 0..65535 that contains the picture, or else its minimum to its maximum.
    """
    if isinstance(data, np.ndarray):
        return _from_array(data, max_pixels)
    if not data:
        raise UnreadablePicture("is empty (0 bytes)")
    image = data.image if isinstance(data, Opened) else opened(data, max_pixels).image
    try:
        if enough is not None:
            image.draft(None, (DRAFT * enough, DRAFT * enough))
        image.load()
        return _plain(_upright(image))
    except UnreadablePicture:
        raise
    except MemoryError:
        width, height = image.size
        raise UnreadablePicture(f"does not fit in memory ({width} x {height} pixels)") from None
    except Exception as error:  # decoders raise all kinds of exceptions
        if "truncated" in str(error).lower():
            raise UnreadablePicture("is truncated: the file ends before the picture does") from None
        raise UnreadablePicture(f"is corrupt ({_short(error)})") from None


def glance(data: bytes | NDArray[Any]) -> tuple[int, bool]:
    """The shorter side, and whether `decode` would give a grey picture: from the header, without decoding."""
    if isinstance(data, np.ndarray):
        return min(data.shape[:2]), data.ndim == 2 or data.shape[2] == 1
    image = opened(data, MAX_PIXELS).image
    return min(image.size), image.mode in _GREY or image.mode.startswith(("I", "F"))


def weight(data: bytes | Opened, max_pixels: int = MAX_PIXELS) -> int:
    """Bytes of all pixels once decoded: width × height × bytes per pixel, from the header."""
    image = (data if isinstance(data, Opened) else opened(data, max_pixels)).image
    raw = str(getattr(image, "tile", ""))  # the only place where Pillow tells 16 bits of a PNG
    wide = 4 if image.mode in ("I", "F") else 2 if ";16" in image.mode + raw else 1
    return image.width * image.height * len(image.getbands()) * wide


def square(
    data: bytes | NDArray[Any] | Opened,
    *,
    side: int,
    fit: str = "crop",
    channels: int = 3,
    max_pixels: int = MAX_PIXELS,
) -> NDArray[np.uint8]:
    """The picture decoded and resized to (side, side, channels).

    fit: "crop" resizes the short side to `side` and crops the long one; "squash" changes the aspect; "pad" fills the
    rest of the square with the mean colour of the picture's edge. Lanczos to reduce, bicubic to enlarge; a picture that
    has the size already is copied.
    """
    checks.one_of("fit", fit, FITS)
    image = decode(data, max_pixels=max_pixels, enough=side)
    if channels == 1 and image.mode != "L":
        image = image.convert("L")
    pixels = np.asarray(_resized(image, side, fit), np.uint8)
    return pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], channels, axis=2)


def opened(data: bytes, max_pixels: int = MAX_PIXELS) -> Opened:
    """Reads the header only; raises `UnreadablePicture`."""
    from PIL import Image, UnidentifiedImageError

    check_bytes(len(data))
    file = headers.check(data)
    with _no_pixel_limit():
        try:
            Image.init()
            image = Image.open(file, formats=[f for f in FORMATS if f in Image.OPEN])
        except UnreadablePicture:
            raise
        except UnidentifiedImageError:
            raise UnreadablePicture(f"is not a picture of a known format (its first bytes are {data[:8]!r})") from None
        except Exception as error:
            raise UnreadablePicture(f"is corrupt ({_short(error)})") from None
    _check_pixels(*image.size, max_pixels)
    return Opened(data, image)


@contextmanager
def _no_pixel_limit() -> Iterator[None]:
    """Pillow's pixel limit is a global; ours is an argument, so Pillow's is off while any thread reads a header."""
    global _open_count, _pixel_limit
    from PIL import Image

    with _opening:
        if not _open_count:
            _pixel_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        _open_count += 1
    try:
        yield
    finally:
        with _opening:
            _open_count -= 1
            if not _open_count:
                Image.MAX_IMAGE_PIXELS = _pixel_limit


def _upright(image: "Image.Image") -> "Image.Image":
    """The picture turned as its EXIF says; `ImageOps.exif_transpose` would also write all of the EXIF again."""
    from PIL import Image

    exif, text = image.info.get("exif"), image.info.get("Raw profile type exif")
    if not exif and isinstance(text, str):
        with suppress(ValueError):
            exif = bytes.fromhex("".join(text.split("\n")[3:]))
    if isinstance(exif, bytes):
        headers.check_tags(exif)
    with suppress(Exception):  # unreadable metadata costs the rotation, not the picture
        turn = dict(enumerate(_UNDO, 2)).get(image.getexif().get(_ORIENTATION, 1))
        return image if turn is None else image.transpose(Image.Transpose[turn])
    return image


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise UnreadablePicture(f"has {width} x {height} pixels, more than max_pixels = {max_pixels}")


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:100] or type(error).__name__


def _plain(image: "Image.Image") -> "Image.Image":
    """Any mode of Pillow as "L" or "RGB"."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(np.asarray(image)))
    if image.has_transparency_data:
        grey = image.mode in _GREY
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("L" if grey else "RGB")
    if image.mode in _GREY:
        return image.convert("L")
    return image.convert("RGB")


def _from_array(pixels: NDArray[Any], max_pixels: int) -> "Image.Image":
    from PIL import Image

    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)) or pixels.size == 0:
        raise UnreadablePicture(f"must have shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), got {pixels.shape}")
    _check_pixels(pixels.shape[1], pixels.shape[0], max_pixels)
    return _plain(Image.fromarray(np.ascontiguousarray(_eight_bits(pixels))))


def _eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Numbers of any type as 0..255."""
    if values.dtype == np.uint8:
        return values
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * np.uint8(255)
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:  # of either byte order
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    real = values.astype(np.float64)
    if not np.isfinite(real).all():
        raise UnreadablePicture("has pixels that are NaN or infinite")
    low, high = float(real.min()), float(real.max())
    integers = not np.issubdtype(values.dtype, np.floating)
    tops = (65535.0,) if integers else (1.0, 255.0, 65535.0)  # Pillow widens 16-bit files to 32-bit integers
    top = next((top for top in tops if low >= 0 and high <= top), None)
    if top is not None:
        low, high = 0.0, top
    return np.rint((real - low) * (255.0 / max(high - low, 1e-300))).clip(0, 255).astype(np.uint8)


def _resized(image: "Image.Image", side: int, fit: str) -> "Image.Image":
    from PIL import Image

    width, height = image.size
    if fit == "pad" and width != height:
        return _padded(image, side)
    short = min(width, height)
    left, top = ((width - short) / 2, (height - short) / 2) if fit == "crop" else (0.0, 0.0)
    box = (left, top, left + short, top + short) if fit == "crop" else (0.0, 0.0, width, height)
    if short == side:
        box = tuple(float(int(edge)) for edge in box)  # type: ignore[assignment]  # whole pixels: an exact copy
    filter_ = Image.Resampling.LANCZOS if short > side else Image.Resampling.BICUBIC
    return image.resize((side, side), filter_, box, reducing_gap=3.0)


def _padded(image: "Image.Image", side: int) -> "Image.Image":
    from PIL import Image

    long = max(image.size)
    size = tuple(max(1, round(length * side / long)) for length in image.size)
    filter_ = Image.Resampling.LANCZOS if long > side else Image.Resampling.BICUBIC
    inner = image.resize((size[0], size[1]), filter_, reducing_gap=3.0)
    pixels = np.asarray(inner, np.float64)
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    fill = np.rint(edge.mean(0)).astype(int).tolist()
    frame = Image.new(image.mode, (side, side), fill if isinstance(fill, int) else tuple(fill))
    frame.paste(inner, ((side - size[0]) // 2, (side - size[1]) // 2))
    return frame
