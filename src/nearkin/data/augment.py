"""Pictures as the encoder sees them: one affine warp per batch with colour and erasing, or plain crops for evaluation.

Every random number is an integer hash of (seed, key of the item, which number): the same on every device and in every
batch, and never drawn from a generator.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nearkin.core import checks
from nearkin.core.random import GOLDEN, Salt, mix, salted, signed

__all__ = ["PRESETS", "Augmentation", "centre", "crop_side", "keys", "preset", "uniforms", "views", "warp"]

CROP = 7 / 8  # the part of a picture's side that evaluation uses, if the size leaves the choice
CACHED = 3 * 2**20  # bytes of pixels per CPU thread at once
SHRINK, SHRUNK = 2.0, 1.5  # stored pixels per pixel of the result: above the first, pictures are reduced to the second
LUMA = (0.299, 0.587, 0.114)
ERASED_LEAST, ERASED_ASPECT = 0.02, 2.0  # the smallest part of a picture erased; how far from square that part may be
AREA, ASPECT, X, Y, FLIP, TURN, SHEAR, RIGHT, DOWN, LIGHT, CONTRAST, SATURATION, GREY, ERASE = range(14)
NUMBERS = ERASE + 5  # erasing takes five: whether, how much, its shape, where (two)


@dataclass(frozen=True)
class Augmentation:
    """The limits of a random warp; the defaults suit photos.

    scale_low, scale_high: the part of the picture's area in the crop, uniform; above 1 the picture shrinks. aspect:
    width / height of the crop, from 1/aspect to aspect. flip: probability of a mirror image. rotation: ± radians.
    shear: ±. shift: ± a part of the side, besides the position of the crop. brightness, contrast, saturation: each a
    factor of 1 - v to 1 + v. grey: probability of no colour. erase: probability that a rectangle of up to erase_area of
    the area becomes the picture's mean colour.
    """

    scale_low: float = 0.3
    scale_high: float = 1.0
    aspect: float = 4 / 3
    flip: float = 0.5
    rotation: float = 0.1
    shear: float = 0.0
    shift: float = 0.0
    brightness: float = 0.2
    contrast: float = 0.2
    saturation: float = 0.2
    grey: float = 0.0
    erase: float = 0.1
    erase_area: float = 0.2

    def __post_init__(self) -> None:
        for field in fields(self):
            checks.at_least(field.name, getattr(self, field.name), 0)
        checks.positive("scale_low", self.scale_low)
        checks.at_least("scale_high", self.scale_high, self.scale_low)
        checks.at_least("aspect", self.aspect, 1)
        checks.angle("rotation", self.rotation)
        for name in ("flip", "brightness", "contrast", "saturation", "grey", "erase", "erase_area"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be <= 1, got {getattr(self, name)}")

    @staticmethod
    def none() -> "Augmentation":
        """No change: `warp` is then `centre`."""
        return replace(_STILL)

    @property
    def still(self) -> bool:
        return replace(self, erase_area=_STILL.erase_area) == _STILL

    @property
    def colours(self) -> bool:
        return self.brightness > 0 or self.contrast > 0 or self.saturation > 0 or self.grey > 0


_STILL = Augmentation(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
PRESETS = {
    "none": _STILL,
    "light": replace(_STILL, scale_low=0.7, flip=0.5),
    "photo": Augmentation(),
    # A mirrored letter is another letter, and a cropped one may be.
    "glyph": replace(
        _STILL, scale_low=0.7, scale_high=1.35, aspect=1.2, rotation=0.3, shear=0.2, shift=0.06, contrast=0.3
    ),
}


def preset(name: str) -> Augmentation:
    checks.one_of("augmentation", name, PRESETS)
    return PRESETS[name]


def keys(epoch: int, step: int, items: Tensor) -> Tensor:
    """A key for each item of a batch, int64 (B,): an item that occurs twice gets two different keys."""
    if not isinstance(items, Tensor) or items.dtype != torch.int64 or items.dim() != 1:
        raise TypeError("items must be int64 of shape (B,)")
    ordered, order = items.sort(stable=True)
    places = torch.arange(len(items), device=items.device)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    occurrence = torch.empty_like(items)
    occurrence[order] = places - torch.where(first, places, 0).cummax(0).values
    key = mix(items + salted(epoch, Salt.EPOCH))
    return mix(mix(key + salted(step, Salt.STEP)) + occurrence)


def uniforms(seed: int, keys: Tensor, count: int) -> Tensor:
    """(B, count) numbers in [0, 1), each from its (seed, key, column) alone and with 24 random bits."""
    columns = torch.arange(1, count + 1, device=keys.device) * signed(GOLDEN)
    mixed = mix(mix(keys + salted(seed, Salt.SEED))[:, None] + columns)
    return ((mixed >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def warp(images: Tensor, keys: Tensor, *, size: int, augmentation: Augmentation | None = None, seed: int = 0) -> Tensor:
    """Pictures uint8 (B, S, S, C) changed at random to float32 (B, C, size, size) in [0, 1].

    keys: int64 (B,), one per picture, from `keys`; on the CPU, so that nothing waits for the device. Crop, flip,
    rotation, shear and shift are one bilinear sampling from the stored pixels to the result; outside the picture is
    its mirror image. Bilinear sampling is accurate down to half the size: pictures whose largest crop would shrink more
    than that are first reduced, with averaging, to where it shrinks 1.5 times.
    """
    augmentation = Augmentation() if augmentation is None else augmentation
    _check(images, size)
    if not isinstance(keys, Tensor) or keys.dtype != torch.int64 or keys.shape != images.shape[:1]:
        raise ValueError(f"keys must be int64 of shape ({len(images)},), one per picture")
    if augmentation.still or len(images) == 0:
        return centre(images, size)
    numbers = uniforms(seed, keys, NUMBERS)
    affine = _affine(numbers, augmentation).to(images.device, non_blocking=True)
    together = _together(images, size)
    if together >= len(images):
        return _warped(images, affine, numbers, size, augmentation)
    result = torch.empty((len(images), images.shape[3], size, size), device=images.device)
    for i in range(0, len(images), together):
        part = slice(i, i + together)
        result[part] = _warped(images[part], affine[part], numbers[part], size, augmentation)
    return result


def centre(images: Tensor, size: int) -> Tensor:
    """Pictures uint8 (B, S, S, C) as evaluation sees them, float32 (B, C, size, size) in [0, 1].

    S = size: the picture as it is. S > size: its centre, `size` pixels wide if that is at least 7/8 of the side, and
    otherwise 7/8 of the side reduced to `size`. S < size: the full picture enlarged.
    """
    _check(images, size)
    side = images.shape[1]
    width = crop_side(side, size)
    start = (side - width) // 2
    return _resampled(images[:, start : start + width, start : start + width], size)


def views(images: Tensor, size: int, n: int, *, flip: bool = True) -> Iterator[Tensor]:
    """n views of each picture, always the same and in this order, each shaped as that of `centre`; n = 1 is `centre`.

    The centre; four corners (top left, top right, bottom left, bottom right), as wide as the centre but at most 7/8
    of the side; nine places of a 3 x 3 grid, row by row, 3/4 of the side wide. Each of these 14 is followed by its
    mirror image, which makes 28.
    flip: False leaves the mirror images out, for letters and other things that a mirror changes.
    """
    _check(images, size)
    most = 28 if flip else 14
    checks.integer("n", n, 1)
    if n > most:
        raise ValueError(f"n must be <= {most}{'' if flip else ' without mirror images'}, got {n}")
    return _views(images, size, n, flip)


def _views(images: Tensor, size: int, n: int, flip: bool) -> Iterator[Tensor]:
    side = images.shape[1]
    middle = crop_side(side, size)
    corner, tile = min(middle, max(1, round(CROP * side))), max(1, round(0.75 * side))
    boxes = [((side - middle) // 2, (side - middle) // 2, middle)]
    boxes += [(y, x, corner) for y in (0, side - corner) for x in (0, side - corner)]
    steps = (0, (side - tile) // 2, side - tile)
    boxes += [(y, x, tile) for y in steps for x in steps]
    for i in range(n):
        y, x, width = boxes[i // 2 if flip else i]
        view = _resampled(images[:, y : y + width, x : x + width], size)
        yield view.flip(3) if flip and i % 2 else view


def crop_side(side: int, size: int) -> int:
    """The side of the crop of `centre` in pixels of a picture of `side`, before it is resized to `size`."""
    return min(side, max(size, round(CROP * side))) if side > size else side


def _resampled(images: Tensor, size: int) -> Tensor:
    pixels = images.permute(0, 3, 1, 2).contiguous().to(torch.float32)
    if len(pixels) == 0:
        return pixels.new_empty((0, pixels.shape[1], size, size))
    if pixels.shape[2] != size:
        pixels = F.interpolate(pixels, (size, size), mode="bilinear", align_corners=False, antialias=True)
    return pixels.div_(255).clamp_(0, 1)


def _check(images: Tensor, size: int) -> None:
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        got = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images must be a torch tensor of uint8, got {got}")
    if images.dim() != 4 or images.shape[1] != images.shape[2] or images.shape[3] not in (1, 3) or not images.shape[1]:
        raise ValueError(f"images must have shape (B, side, side, 1 or 3), got {tuple(images.shape)}")
    checks.integer("size", size, 1)


def _together(images: Tensor, size: int) -> int:
    """How many pictures to warp at once: on a CPU as many as fit its caches, which is twice as fast as all at once."""
    if images.device.type != "cpu":
        return len(images)
    each = 4 * images.shape[3] * max(images.shape[1], size) ** 2
    return torch.get_num_threads() * max(1, CACHED // each)


def _warped(images: Tensor, affine: Tensor, numbers: Tensor, size: int, augmentation: Augmentation) -> Tensor:
    pixels = images.permute(0, 3, 1, 2).contiguous().to(torch.float32)  # transposed as uint8: a quarter of the bytes
    widest = math.sqrt(augmentation.scale_high)
    if images.shape[1] * widest > SHRINK * size:
        smaller = math.ceil(SHRUNK * size / widest)
        pixels = F.interpolate(pixels, (smaller, smaller), mode="bilinear", align_corners=False, antialias=True)
    grid = _grid(affine, size)
    warped = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    warped = _coloured(warped, numbers, augmentation)
    if augmentation.erase > 0:
        _erase(warped, numbers, augmentation)
    return warped


def _affine(numbers: Tensor, a: Augmentation) -> Tensor:
    """(B, 2, 3): maps positions in the result to positions in the picture, both from -1 to 1."""
    either = 2 * numbers - 1  # (B, numbers), -1 to 1
    area = a.scale_low + (a.scale_high - a.scale_low) * numbers[:, AREA]
    aspect = torch.exp(either[:, ASPECT] * (0.5 * math.log(a.aspect)))  # its root
    limit = area.sqrt().clamp(min=1)  # the aspect alone makes no side of a crop longer than the picture
    width, height = (area.sqrt() * aspect).minimum(limit), (area.sqrt() / aspect).minimum(limit)
    mirror = torch.where(numbers[:, FLIP] < a.flip, -1.0, 1.0)
    angle = a.rotation * either[:, TURN]
    cos, sin, slope = angle.cos(), angle.sin(), a.shear * either[:, SHEAR]
    right = either[:, X] * (1 - width).abs() + 2 * a.shift * either[:, RIGHT]
    down = either[:, Y] * (1 - height).abs() + 2 * a.shift * either[:, DOWN]
    across, along = width * mirror, height  # rotation · shear · cut
    rows = [cos * across, (cos * slope - sin) * along, right, sin * across, (sin * slope + cos) * along, down]
    return torch.stack(rows, 1).view(-1, 2, 3)


def _grid(affine: Tensor, size: int) -> Tensor:
    """(B, size, size, 2), by sums that do not depend on the batch: `F.affine_grid` multiplies matrices."""
    places = (torch.arange(size, device=affine.device, dtype=torch.float32) * 2 + 1) / size - 1  # pixel centres
    across = affine[:, :, 0, None] * places  # (B, 2, size)
    along = affine[:, :, 1, None] * places + affine[:, :, 2, None]
    return across.transpose(1, 2)[:, None, :, :] + along.transpose(1, 2)[:, :, None, :]


def _coloured(pixels: Tensor, numbers: Tensor, a: Augmentation) -> Tensor:
    """From 0..255 to 0..1: brightness, then contrast about the mean luma, then saturation, clamped once at the end.

    All three are linear, so each pixel becomes gain · itself + shared · its luma + rest, in place.
    """
    if not a.colours:
        return pixels.div_(255).clamp_(0, 1)

    def factor(number: int, strength: float) -> Tensor:
        return 1 + strength * (2 * numbers[:, number] - 1)

    light, contrast = factor(LIGHT, a.brightness) / 255, factor(CONTRAST, a.contrast)
    saturation = torch.where(numbers[:, GREY] < a.grey, 0.0, factor(SATURATION, a.saturation))
    table = torch.stack([light * contrast * saturation, light * contrast * (1 - saturation), light * (1 - contrast)])
    gain, shared, rest = table.to(pixels.device, non_blocking=True)[:, :, None, None, None]
    if pixels.shape[1] == 1:
        rest = rest * pixels.mean((1, 2, 3), keepdim=True)
        return pixels.mul_(gain + shared).add_(rest).clamp_(0, 1)
    red, green, blue = pixels[:, 0:1], pixels[:, 1:2], pixels[:, 2:3]
    luma = (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])  # (B, 1, size, size)
    rest = rest * luma.mean((1, 2, 3), keepdim=True)
    if a.saturation == 0 and a.grey == 0:
        return pixels.mul_(gain).add_(rest).clamp_(0, 1)
    return pixels.mul_(gain).add_(luma.mul_(shared).add_(rest)).clamp_(0, 1)


def _erase(pixels: Tensor, numbers: Tensor, a: Augmentation) -> None:
    """Erases a rectangle of the chosen pictures in place."""
    chosen = (numbers[:, ERASE] < a.erase).nonzero()[:, 0]
    _, area, aspect, x, y = numbers[chosen][:, ERASE:].unbind(1)
    least = min(ERASED_LEAST, a.erase_area)
    side = (least + (a.erase_area - least) * area).sqrt()
    stretch = torch.exp((2 * aspect - 1) * (0.5 * math.log(ERASED_ASPECT)))
    width, height = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
    box = torch.stack([x * (1 - width), x * (1 - width) + width, y * (1 - height), y * (1 - height) + height])
    left, right, top, bottom = box.to(pixels.device, non_blocking=True)[:, :, None]
    chosen = chosen.to(pixels.device, non_blocking=True)
    places = (torch.arange(pixels.shape[2], device=pixels.device) + 0.5) / pixels.shape[2]
    columns, rows = (left <= places) & (places < right), (top <= places) & (places < bottom)
    inside = (rows[:, :, None] & columns[:, None, :])[:, None]  # (chosen, 1, size, size)
    touched = pixels[chosen]
    pixels[chosen] = torch.where(inside, touched.mean((2, 3), keepdim=True), touched)
