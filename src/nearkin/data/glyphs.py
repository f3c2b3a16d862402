"""The glyphs set: letters and symbols in twelve typefaces, drawn on this machine; nothing to download.

A class is a character: letters, digits and symbols of Latin, Greek, Cyrillic, Armenian, Georgian, currency, arrows,
mathematics and shapes, in the DejaVu typefaces that come with matplotlib (extra `glyphs`). A sample is one
drawing of it: a random typeface, rotation, scale, shear, shift and noise, each a pure function of (seed, character,
sample). The standard task is `load().split()`: train on one half of the characters, test on the other, unseen half.
"""

import hashlib
import math
import operator
import unicodedata
import warnings
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.core import files
from nearkin.core.paths import cache_dir
from nearkin.core.versions import version_of

if TYPE_CHECKING:
    from PIL import Image, ImageFont

__all__ = ["Glyphs", "characters", "draw", "load", "plain", "script", "typefaces"]

RECIPE = 1  # increase whenever the pictures or the classes change: it is part of the cache file's name
FACES = tuple(
    family + style
    for family, slant in (("DejaVuSans", "Oblique"), ("DejaVuSansMono", "Oblique"), ("DejaVuSerif", "Italic"))
    for style in ("", "-Bold", f"-{slant}", f"-Bold{slant}")
)
BLOCKS = (
    (0x0021, 0x02AF),  # Latin and its phonetic letters
    (0x0370, 0x058F),  # Greek, Cyrillic, Armenian
    (0x10A0, 0x10FF),  # Georgian
    (0x20A0, 0x20CF),  # currency
    (0x2190, 0x22FF),  # arrows, mathematics
    (0x25A0, 0x26FF),  # shapes, signs
    (0x2D00, 0x2D2F),  # Georgian, ecclesiastical
)
SYMBOLS = ((0x2190, 0x21FF, "arrows"), (0x2200, 0x22FF, "mathematics"), (0x25A0, 0x25FF, "shapes"))
CATEGORIES = frozenset({"Lu", "Ll", "Lo", "Nd", "Sm", "Sc", "So"})  # letters, digits, symbols
ENOUGH_FACES = 8  # of the twelve
ALIKE = 0.93  # cosine of two plain renderings from which on they count as one character

INK = 0.65  # the longer side of a plain glyph, as a part of the picture's side
ROTATION = math.radians(25.0)  # either way
SHEAR = 0.25  # either way
SCALE = 1.35  # from 1/SCALE to SCALE
SHIFT = 0.08  # of the picture's side, each way
CONTRAST = 0.4  # the weakest ink, white being 1
NOISE = 0.5  # the strongest standard deviation, the ink being 1


class Glyphs(NamedTuple):
    """Pictures with their classes; label c is `characters[c]`, and the items of a class are consecutive."""

    images: NDArray[np.uint8]  # (N, size, size), ink is bright
    labels: NDArray[np.int64]  # (N,)
    characters: list[str]  # (C,)

    def split(self, seed: int = 0) -> tuple["Glyphs", "Glyphs"]:
        """Two halves that share no class, `(train, unseen)`, labels counted from 0 in each.

        Characters are ordered by a hash of (seed, character), so one character more or less moves at most one other.
        """
        seed = _integer("seed", seed, 0)
        order = sorted(range(len(self.characters)), key=lambda c: _hash(seed, self.characters[c]))
        middle = (len(order) + 1) // 2
        return self._only(sorted(order[:middle])), self._only(sorted(order[middle:]))

    def _only(self, classes: list[int]) -> "Glyphs":
        number = np.full(len(self.characters), -1, np.int64)  # old label → new label
        number[classes] = np.arange(len(classes))
        labels = number[self.labels]
        return Glyphs(self.images[labels >= 0], labels[labels >= 0], [self.characters[c] for c in classes])


def load(
    seed: int = 0, size: int = 32, per_class: int = 20, *, cache: bool = True, progress: bool | None = None
) -> Glyphs:
    """The full set: about 950 characters, `per_class` drawings of each at `size` x `size`.

    Drawn in seconds the first time, then read from `cache_dir()`; a corrupt file there is drawn again, and a folder
    that cannot be written is a warning. progress: a bar on the terminal while drawing; by default if there is one.
    """
    seed, size, per_class = _integer("seed", seed, 0), _integer("size", size, 8), _integer("per_class", per_class, 1)
    path = _cache_file(seed, size, per_class) if cache else None
    cached = _read(path, size, per_class) if path else None
    if cached is None:
        names = characters()
        images = np.empty((len(names) * per_class, size, size), np.uint8)
        for c, character in enumerate(_with_bar(names, progress)):
            for sample in range(per_class):
                images[c * per_class + sample] = draw(character, sample, seed=seed, size=size)
        cached = names, images
        if path:
            _write(path, names, images)
    names, images = cached
    return Glyphs(images, np.repeat(np.arange(len(names), dtype=np.int64), per_class), names)


def draw(character: str, sample: int, *, seed: int = 0, size: int = 32) -> NDArray[np.uint8]:
    """Drawing number `sample` of a character, (size, size), independent of all other drawings."""
    from PIL import Image

    seed, size, sample = _integer("seed", seed, 0), _integer("size", size, 8), _integer("sample", sample, 0)
    faces = typefaces().get(ord(character), ()) if len(character) == 1 else ()
    if not faces:
        raise ValueError(f"character must be a single one that the typefaces hold, got {character!r}")
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, ord(character), sample])))
    face = faces[rng.integers(len(faces))]
    turn, shear, zoom, right, down = rng.uniform(-1.0, 1.0, 5)
    strength, noise = rng.uniform(CONTRAST, 1.0), rng.uniform(0.0, NOISE)

    # Pillow maps the result back to the source: undo the shift, the rotation, the shear, the zoom.
    cos, sin, slope = math.cos(turn * ROTATION), math.sin(turn * ROTATION), shear * SHEAR
    back = np.array([[1.0, -slope], [0.0, 1.0]]) @ np.array([[cos, sin], [-sin, cos]]) / SCALE**zoom
    offset = size - back @ (size * (1.0 + 2.0 * SHIFT * np.array([right, down])))  # at double size the centre is `size`
    affine = (*back[0], offset[0], *back[1], offset[1])
    big = _upright(character, face, 2 * size).transform(
        (2 * size, 2 * size), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR
    )
    ink = np.asarray(big.reduce(2), np.float32) / 255.0
    picture = strength * (ink + noise * rng.standard_normal((size, size), np.float32))
    return (picture.clip(0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)


def plain(character: str, size: int = 32) -> NDArray[np.uint8]:
    """The character upright in DejaVu Sans, centred, its longer side INK of the picture: what `characters` compares."""
    return np.array(_upright(character, FACES[0], 2 * size).reduce(2), np.uint8)


@lru_cache(maxsize=1)
def typefaces() -> dict[int, tuple[str, ...]]:
    """Code point → the typefaces that have it, so that a missing-glyph box is never drawn."""
    paths = {face: _font_file(face) for face in FACES}
    from matplotlib.ft2font import FT2Font  # if it is missing, `_font_file` has said so

    faces_of: dict[int, tuple[str, ...]] = {}
    for face, path in paths.items():
        for code in FT2Font(str(path)).get_charmap():
            faces_of[code] = (*faces_of.get(code, ()), face)
    return faces_of


def characters() -> list[str]:
    """One character per class, in code-point order: in enough typefaces, and unlike all earlier ones."""
    candidates = [chr(code) for first, last in BLOCKS for code in range(first, last + 1) if _is_candidate(code)]
    chosen: list[str] = []
    looks = np.zeros((len(candidates), 32 * 32), np.float32)  # of the chosen ones, unit length
    for character in candidates:
        look = plain(character).astype(np.float32).ravel()
        look /= np.linalg.norm(look)
        if not (looks[: len(chosen)] @ look >= ALIKE).any():
            looks[len(chosen)] = look
            chosen.append(character)
    return chosen


def script(character: str) -> str:
    """What a character belongs to: "Latin", "Greek", "Cyrillic", …, "digits", "currency", "arrows", "mathematics",
    "shapes" or "signs"; the coarser level of the set.
    """
    category, code = unicodedata.category(character), ord(character)
    if category[0] == "L":
        return unicodedata.name(character).split()[0].capitalize()
    if category in ("Nd", "Sc"):
        return "digits" if category == "Nd" else "currency"
    for first, last, name in SYMBOLS:
        if first <= code <= last:
            return name
    return "mathematics" if category == "Sm" else "signs"


def _is_candidate(code: int) -> bool:
    if unicodedata.category(chr(code)) not in CATEGORIES or unicodedata.decomposition(chr(code)):
        return False  # an accented letter is its base letter and a few pixels
    faces = typefaces().get(code, ())
    return len(faces) >= ENOUGH_FACES and FACES[0] in faces


@lru_cache(maxsize=64)
def _upright(character: str, face: str, size: int) -> "Image.Image":
    """The bare glyph, centred: cropped to its ink and resized, so that c and C are the same shape."""
    from PIL import Image, ImageDraw

    font = _font(face, 4 * size)
    left, top, right, bottom = font.getbbox(character)
    canvas = Image.new("L", (math.ceil(right - left) + 2, math.ceil(bottom - top) + 2))
    ImageDraw.Draw(canvas).text((1 - left, 1 - top), character, fill=255, font=font)
    ink = canvas.crop(canvas.getbbox())
    width, height = (max(1, round(side * INK * size / max(ink.size))) for side in ink.size)
    frame = Image.new("L", (size, size))
    frame.paste(ink.resize((width, height), Image.Resampling.BOX), ((size - width) // 2, (size - height) // 2))
    return frame


@lru_cache(maxsize=64)
def _font(face: str, pixels: int) -> "ImageFont.FreeTypeFont":
    from PIL import ImageFont

    return ImageFont.truetype(str(_font_file(face)), pixels, layout_engine=ImageFont.Layout.BASIC)


def _font_file(face: str) -> Path:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the glyphs set needs matplotlib's typefaces: pip install 'nearkin[glyphs]'"
        ) from None
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"


def _with_bar(names: list[str], progress: bool | None) -> Iterable[str]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    hidden = not (console.is_terminal if progress is None else progress)
    return track(names, "drawing glyphs", console=console, transient=True, disable=hidden)


def _cache_file(seed: int, size: int, per_class: int) -> Path | None:
    """Named by everything that decides the content: two renderers never share a file. None without a home folder."""
    made_by = "-".join(f"{package}{version_of(package)}" for package in ("pillow", "matplotlib", "numpy"))
    try:
        return cache_dir() / f"glyphs{RECIPE}-seed{seed}-{size}px-{per_class}each-{made_by}.npz"
    except RuntimeError:
        return None


def _read(path: Path, size: int, per_class: int) -> tuple[list[str], NDArray[np.uint8]] | None:
    """The content of a cache file, or None if it is missing or corrupt."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            codes, images = archive["codes"], archive["images"]
        complete = images.dtype == np.uint8 and images.shape == (len(codes) * per_class, size, size) and len(codes) > 0
        return ([chr(code) for code in codes], images) if complete else None
    except Exception:  # any fault of the file: the set can be drawn again
        return None


def _write(path: Path, names: list[str], images: NDArray[np.uint8]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as file:
            np.savez(file, codes=np.array([ord(name) for name in names], np.int32), images=images)
    except OSError as error:
        warnings.warn(f"glyphs are not kept, so the next load draws them again: {error}", RuntimeWarning, stacklevel=3)


def _hash(seed: int, character: str) -> bytes:
    return hashlib.sha256(f"{seed} {ord(character)}".encode()).digest()


def _integer(name: str, value: int, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return number
