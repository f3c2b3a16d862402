"""The warp against a loop over pixels in float64; its chance is a function of seed and key alone."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.data import augment
from nearkin.data.augment import Augmentation
from nearkin.training.config import defaults, recipe

HEAVY = Augmentation(0.2, 1.5, 1.5, 0.5, 0.6, 0.3, 0.1, 0.4, 0.5, 0.6, 0.3, 0.5, 0.3)
MASK = 2**64 - 1


def pictures(count=6, side=20, channels=3, seed=0):
    rng = np.random.default_rng(seed)
    smooth = rng.integers(0, 256, (count, side // 4, side // 4, channels), np.uint8).repeat(4, 1).repeat(4, 2)
    return torch.from_numpy(smooth)


def mix(x):
    """splitmix64's finaliser on Python's own whole numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def draws(seed, key, count):
    start = mix((key + seed * 0x9E3779B97F4A7C15 + 3 * 0xD1342543DE82EF95) & MASK)
    return [(mix((start + c * 0x9E3779B97F4A7C15) & MASK) >> 40) / 2**24 for c in range(1, count + 1)]


def reflected(i, side):
    """Mirror at the edges: … 1 0 | 0 1 2 … side-1 | side-1 side-2 …"""
    i %= 2 * side
    return i if i < side else 2 * side - 1 - i


def reference(image, key, size, a, seed):
    """One picture by hand, (size, size, C) float64."""
    u = draws(seed, key, 18)
    e = [2 * v - 1 for v in u]
    side, _, channels = image.shape
    area = a.scale_low + (a.scale_high - a.scale_low) * u[0]
    root, limit = a.aspect ** (e[1] / 2), max(1.0, math.sqrt(area))
    width, height = min(math.sqrt(area) * root, limit), min(math.sqrt(area) / root, limit)
    turn = a.rotation * e[5]
    matrix = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    matrix = matrix @ np.array([[1, a.shear * e[6]], [0, 1]]) @ np.diag([-width if u[4] < a.flip else width, height])
    offset = np.array([e[2] * abs(1 - width) + 2 * a.shift * e[7], e[3] * abs(1 - height) + 2 * a.shift * e[8]])
    out = np.zeros((size, size, channels))
    for i in range(size):
        for j in range(size):
            x, y = matrix @ np.array([(2 * j + 1) / size - 1, (2 * i + 1) / size - 1]) + offset
            x, y = (x + 1) * side / 2 - 0.5, (y + 1) * side / 2 - 0.5
            left, top = math.floor(x), math.floor(y)
            for dy, wy in ((0, top + 1 - y), (1, y - top)):
                for dx, wx in ((0, left + 1 - x), (1, x - left)):
                    out[i, j] += wy * wx * image[reflected(top + dy, side), reflected(left + dx, side)]
    return erased(coloured(out / 255, u, e, a), u, a)


def luma(out):
    return out @ np.array([0.299, 0.587, 0.114]) if out.shape[2] == 3 else out[..., 0]


def coloured(out, u, e, a):
    out = out * (1 + a.brightness * e[9])
    mean = luma(out).mean()
    out = mean + (1 + a.contrast * e[10]) * (out - mean)
    grey = luma(out)[..., None]
    saturation = 0 if u[12] < a.grey else 1 + a.saturation * e[11]
    return (grey + saturation * (out - grey)).clip(0, 1)


def erased(out, u, a):
    if u[13] >= a.erase:
        return out
    size = len(out)
    side = math.sqrt(min(0.02, a.erase_area) + (a.erase_area - min(0.02, a.erase_area)) * u[14])
    stretch = math.sqrt(2) ** (2 * u[15] - 1)
    width, height = min(1, side * stretch), min(1, side / stretch)
    left, top, mean = u[16] * (1 - width), u[17] * (1 - height), out.mean((0, 1))
    for i in range(size):
        for j in range(size):
            if left <= (j + 0.5) / size < left + width and top <= (i + 0.5) / size < top + height:
                out[i, j] = mean
    return out


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "augmentation, size",
    [
        (HEAVY, 13),
        (HEAVY, 20),
        (HEAVY, 33),
        (Augmentation(), 16),
        (augment.preset("glyph"), 20),
        (augment.preset("light"), 18),
    ],
)
def test_warp_is_the_reference(augmentation, size, channels):
    images = pictures(8, channels=channels)
    keys = augment.keys(3, 5, torch.arange(8))
    got = augment.warp(images, keys, size=size, augmentation=augmentation, seed=7)
    assert got.shape == (8, channels, size, size) and got.dtype == torch.float32 and got.is_contiguous()
    for picture, image, key in zip(got, images.double().numpy(), keys.tolist(), strict=True):
        expected = reference(image, key, size, augmentation, 7)
        assert np.abs(picture.permute(1, 2, 0).double().numpy() - expected).max() < 2e-5


@pytest.mark.parametrize("name", [f.name for f in fields(Augmentation) if f.name not in ("scale_low", "erase_area")])
def test_each_setting_alone_is_the_reference(name):
    """So that no setting is accepted and then ignored."""
    value = {"aspect": 1.4, "scale_high": 1.3}.get(name, 0.5)
    a = replace(Augmentation.none(), **{name: value})
    images, keys = pictures(6), augment.keys(0, 0, torch.arange(6))
    got = augment.warp(images, keys, size=20, augmentation=a)
    assert not torch.allclose(got, augment.centre(images, 20), atol=1e-3)
    for picture, image, key in zip(got, images.double().numpy(), keys.tolist(), strict=True):
        assert np.abs(picture.permute(1, 2, 0).double().numpy() - reference(image, key, 20, a, 0)).max() < 2e-5


@given(st.integers(0, 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_uniforms_are_the_hash_of_whole_numbers(seed, key):
    got = augment.uniforms(seed, torch.tensor([key]), 18)[0].tolist()
    assert got == draws(seed, key, 18) and all(0 <= v < 1 for v in got)


def test_uniforms_are_uniform_and_independent():
    u = augment.uniforms(0, augment.keys(0, 0, torch.arange(40000)), 18).double()
    assert (u.mean(0) - 0.5).abs().max() < 0.006 and (u.var(0) - 1 / 12).abs().max() < 0.002
    assert torch.corrcoef(u.T).fill_diagonal_(0).abs().max() < 0.025
    other = augment.uniforms(1, augment.keys(0, 0, torch.arange(40000)), 18).double()
    assert abs(torch.corrcoef(torch.stack([u[:, 0], other[:, 0]]))[0, 1]) < 0.02
    later = augment.uniforms(0, augment.keys(1, 0, torch.arange(40000)), 18).double()
    assert abs(torch.corrcoef(torch.stack([u[:, 0], later[:, 0]]))[0, 1]) < 0.02


@pytest.mark.parametrize("side, size", [(72, 64), (64, 64), (40, 64), (160, 32)])
def test_a_picture_alone_is_the_picture_in_a_batch(side, size):
    """Bit for bit: the batch is no part of the result, and neither is how many threads there are."""
    images, keys = pictures(100, side), augment.keys(0, 0, torch.arange(100))
    batch = augment.warp(images, keys, size=size, augmentation=HEAVY)
    for i in range(0, 100, 9):
        assert torch.equal(augment.warp(images[i : i + 1], keys[i : i + 1], size=size, augmentation=HEAVY)[0], batch[i])
    order = torch.randperm(100)
    assert torch.equal(augment.warp(images[order], keys[order], size=size, augmentation=HEAVY), batch[order])
    torch.set_num_threads(2)
    try:
        assert torch.equal(augment.warp(images, keys, size=size, augmentation=HEAVY), batch)
    finally:
        torch.set_num_threads(1)


def test_key_and_seed_decide():
    images, keys = pictures(1).repeat(3, 1, 1, 1), torch.tensor([5, 5, 6])
    got = augment.warp(images, keys, size=20)
    assert torch.equal(got[0], got[1]) and not torch.equal(got[0], got[2])
    assert not torch.equal(augment.warp(images, keys, size=20, seed=1), got)
    state = torch.get_rng_state()
    augment.warp(images, keys, size=20)
    assert torch.equal(state, torch.get_rng_state())


def test_keys():
    items = torch.tensor([4, 9, 4, 0, 4, 9])
    keys = augment.keys(2, 3, items)
    assert len(set(keys.tolist())) == 6
    assert keys[0] == augment.keys(2, 3, torch.tensor([4]))[0]  # the first occurrence does not know the batch
    every = [augment.keys(e, s, torch.arange(50).repeat(2)) for e in range(10) for s in range(10)]
    assert len(set(torch.cat(every).tolist())) == 10000
    assert augment.keys(0, 0, torch.tensor([], dtype=torch.int64)).shape == (0,)
    with pytest.raises(TypeError, match="items must be int64"):
        augment.keys(0, 0, torch.arange(3.0))
    with pytest.raises(ValueError, match="epoch must be >= 0"):
        augment.keys(-1, 0, items)


def test_range_and_nothing():
    white = torch.full((50, 16, 16, 3), 255, dtype=torch.uint8)
    got = augment.warp(white, torch.arange(50), size=16, augmentation=HEAVY)
    assert got.min() >= 0 and got.max() <= 1 and got.isfinite().all()
    images = pictures()
    assert torch.equal(
        augment.warp(images, torch.arange(6), size=20, augmentation=Augmentation.none()),
        images.permute(0, 3, 1, 2) / 255,
    )
    assert augment.warp(images[:0], torch.arange(0), size=9).shape == (0, 3, 9, 9)
    assert augment.warp(pictures(1, 4)[:, :1, :1], torch.arange(1), size=5).shape == (1, 3, 5, 5)


def test_large_pictures_are_averaged_and_do_not_alias():
    """A chequerboard of single pixels is grey from afar."""
    board = (torch.arange(512)[:, None] + torch.arange(512)) % 2 * 255
    images = board.to(torch.uint8)[None, :, :, None].repeat(4, 1, 1, 1)
    got = augment.warp(images, torch.arange(4), size=64, augmentation=augment.preset("light"))
    assert (got - 0.5).abs().max() < 0.03
    assert (augment.centre(images, 64) - 0.5).abs().max() < 0.03


def test_centre():
    images = pictures(2, 64)
    floats = images.permute(0, 3, 1, 2) / 255
    assert torch.equal(augment.centre(images, 64), floats)
    assert torch.equal(augment.centre(images, 56), floats[:, :, 4:60, 4:60])  # 7/8: the very pixels
    flat = torch.full((1, 64, 64, 1), 77, dtype=torch.uint8)
    for size in (1, 7, 32, 55, 63, 65, 224):
        got = augment.centre(flat, size)
        assert got.shape == (1, 1, size, size) and torch.allclose(got, torch.tensor(77 / 255))
    ramp = torch.arange(64, dtype=torch.uint8).expand(1, 64, 64)[..., None].contiguous()
    small, large = augment.centre(ramp, 28)[0, 0, 0] * 255, augment.centre(ramp, 128)[0, 0, 0] * 255
    assert torch.allclose(small[5:-5], 4.5 + 2 * torch.arange(28.0)[5:-5], atol=0.05)  # the middle 56 columns
    assert torch.allclose(large[1:-1], torch.arange(128.0)[1:-1] / 2 - 0.25, atol=0.01)  # all of them
    assert augment.centre(images[:0], 9).shape == (0, 3, 9, 9)


@pytest.mark.parametrize("side, size", [(64, 64), (64, 56), (64, 24), (20, 32)])
def test_views(side, size):
    images = pictures(2, side)
    every = list(augment.views(images, size, 28))
    assert torch.equal(every[0], augment.centre(images, size)) and all(v.shape == (2, 3, size, size) for v in every)
    for i in range(0, 28, 2):
        assert torch.equal(every[i].flip(3), every[i + 1])
    assert len({view.numpy().tobytes() for view in every}) == 28
    for n in (1, 2, 11):
        assert all(torch.equal(a, b) for a, b in zip(augment.views(images, size, n), every[:n], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(augment.views(images, size, 14, flip=False), every[::2], strict=True))


def test_corner_views_are_the_corners():
    images = pictures(1, 64)
    floats = images.permute(0, 3, 1, 2) / 255
    corners = list(augment.views(images, 56, 10))[2::2]
    boxes = [(0, 0), (0, 8), (8, 0), (8, 8)]
    assert all(torch.equal(c, floats[:, :, y : y + 56, x : x + 56]) for c, (y, x) in zip(corners, boxes, strict=True))


@pytest.mark.parametrize(
    "change, says",
    [
        ({"scale_low": 0}, "scale_low must be > 0, got 0"),
        ({"scale_low": 0.9, "scale_high": 0.5}, "scale_high must be >= 0.9, got 0.5"),
        ({"aspect": 0.5}, "aspect must be >= 1, got 0.5"),
        ({"flip": 1.5}, "flip must be <= 1, got 1.5"),
        ({"rotation": 4}, r"rotation must be an angle in \[0, π\) radians, got 4"),
        ({"shift": -1}, "shift must be >= 0, got -1"),
        ({"erase": float("nan")}, "erase must be finite, got nan"),
    ],
)
def test_bad_settings(change, says):
    with pytest.raises(ValueError, match=says):
        Augmentation(**change)


def test_bad_arguments():
    images, keys = pictures(), torch.arange(6)
    with pytest.raises(TypeError, match=r"images must be a torch tensor of uint8, got torch.float32"):
        augment.warp(images.float(), keys, size=8)
    with pytest.raises(ValueError, match=r"images must have shape .* got \(6, 3, 20, 20\)"):
        augment.centre(images.permute(0, 3, 1, 2), 8)
    with pytest.raises(ValueError, match=r"keys must be int64 of shape \(6,\)"):
        augment.warp(images, keys[:5], size=8)
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        augment.warp(images, keys, size=0)
    with pytest.raises(ValueError, match="seed must be >= 0"):
        augment.warp(images, keys, size=8, seed=-1)
    with pytest.raises(ValueError, match="n must be <= 28, got 29"):
        augment.views(images, 8, 29)
    with pytest.raises(ValueError, match="n must be <= 14 without mirror images, got 15"):
        augment.views(images, 8, 15, flip=False)
    with pytest.raises(ValueError, match='unknown augmentation "foto"; did you mean "photo"'):
        augment.preset("foto")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_on_the_device():
    images, keys = pictures(64, 72), augment.keys(1, 2, torch.arange(64))
    assert torch.equal(augment.uniforms(3, keys.cuda(), 18).cpu(), augment.uniforms(3, keys, 18))
    assert torch.equal(augment.keys(1, 2, torch.arange(64).cuda()).cpu(), keys)
    cpu = augment.warp(images, keys, size=64, augmentation=HEAVY)
    on_device = images.cuda()
    for where in (keys, keys.cuda()):
        assert (augment.warp(on_device, where, size=64, augmentation=HEAVY).cpu() - cpu).abs().max() < 1e-4


@pytest.mark.parametrize("encoder", ["small-cnn", "efficientnet-lite0"])
def test_of_pictures_stored_by_default_evaluation_sees_a_plain_crop(encoder):
    """Whatever the size: none of the pixels is interpolated a second time."""
    for size in [*range(32, 65), 96, 100, 128, 224, 225, 300]:
        if encoder == "small-cnn" and size > 64:
            continue
        asked = recipe.read(None, ['data.source="x"', f"encoder.name={encoder}", f"data.size={size}"])
        settled, _ = defaults.settle_images(asked, 1000, False, torch.device("cpu"))
        stored = settled.data.stored
        images = torch.randint(0, 256, (1, stored, stored, 3), dtype=torch.uint8)
        first = (stored - size) // 2
        plain = images[:, first : first + size, first : first + size].permute(0, 3, 1, 2) / 255
        assert stored >= 1.1 * size, "augmentation has something to move in"
        assert torch.equal(augment.centre(images, size), plain)
