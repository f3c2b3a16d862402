"""Decoding of every odd kind of picture, and the cache: complete or absent, reused, never stale."""

import errno
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from nearkin.core.errors import UnreadablePicture
from nearkin.data import cache_store, decode, image_cache

BIRDS = Path(__file__).parents[3] / "shared" / "data" / "CUB_200_2011" / "cub200_2011_small.tar"
needs_birds = pytest.mark.skipif(not BIRDS.exists(), reason=f"{BIRDS.name} is not beside the repository")


class Folder:
    """A stand-in: files with their stamps, and a count of how often they are read."""

    def __init__(self, paths):
        self.paths, self.reads = list(paths), 0

    def __len__(self):
        return len(self.paths)

    def read(self, i):
        self.reads += 1
        return self.paths[i].read_bytes()

    def stamp(self, i):
        about = self.paths[i].stat()
        return f"{self.paths[i]} {about.st_size} {about.st_mtime_ns}"


class Arrays:
    def __init__(self, array):
        self.array = array

    def __len__(self):
        return len(self.array)

    def read(self, i):
        return self.array[i]

    def stamp(self, i):
        return str(hash(self.array[i].tobytes()))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pictures"


@pytest.fixture
def photos(tmp_path):
    """Forty small colour pictures of different sizes."""
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(40):
        small = rng.integers(0, 256, (6, 6, 3), np.uint8)
        Image.fromarray(small).resize((20 + i % 7, 18 + i % 5), 2).save(folder / f"{i:02}.png")
    return Folder(sorted(folder.iterdir()))


def names(folder):
    return [path.name for path in folder.paths]


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(size=(40, 30)):
    """Distinct at every corner, smooth enough for JPEG."""
    x, y = np.meshgrid(np.linspace(0, 1, size[0]), np.linspace(0, 1, size[1]))
    return Image.fromarray((np.stack([x, y, 1 - x], 2) * 255).astype(np.uint8))


# One picture --------------------------------------------------------------------------------


def test_grey_stays_grey_and_colour_colour():
    assert decode.decode(encoded(gradient().convert("L"))).mode == "L"
    assert decode.decode(encoded(gradient())).mode == "RGB"
    assert np.array_equal(decode.decode(encoded(gradient())), gradient())


def test_one_bit():
    image = Image.fromarray(np.eye(9, dtype=bool))
    assert np.array_equal(decode.decode(encoded(image)), np.eye(9, dtype=np.uint8) * 255)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_and_not_clipped(kind):
    deep = (np.arange(256, dtype=np.uint32).reshape(16, 16) * 257).astype(np.uint16)
    try:
        data = encoded(Image.fromarray(deep), kind)
    except OSError as error:  # Pillow 10 writes no such PPM; `test_big_endian_sixteen_bits` reads one
        pytest.skip(str(error))
    assert np.array_equal(decode.decode(data), deep // 257)


def test_big_endian_sixteen_bits():
    deep = np.arange(256, dtype=">u2").reshape(16, 16) * np.array(257, ">u2")
    data = b"P5 16 16 65535\n" + deep.astype(">u2").tobytes()
    assert np.array_equal(decode.decode(data), (deep // 257).astype(np.uint8))
    assert np.array_equal(decode.decode(deep.astype(">u2")), (deep // 257).astype(np.uint8))


@pytest.mark.parametrize("top", [1.0, 255.0, 65535.0])
def test_float_pictures(top):
    real = np.linspace(0, top, 64, dtype=np.float32).reshape(8, 8)
    got = np.asarray(decode.decode(encoded(Image.fromarray(real), "TIFF")))
    assert np.abs(got - real / top * 255).max() <= 0.5 + 1e-4
    own = np.linspace(-3, 7, 64, dtype=np.float32).reshape(8, 8)
    assert np.array_equal(np.asarray(decode.decode(own))[[0, -1], [0, -1]], [0, 255])
    real[3, 3] = np.nan
    with pytest.raises(UnreadablePicture, match="NaN"):
        decode.decode(encoded(Image.fromarray(real), "TIFF"))


def test_cmyk():
    photo = gradient()
    got = np.asarray(decode.decode(encoded(photo.convert("CMYK"), "JPEG", quality=95)), float)
    assert np.abs(got - np.asarray(photo)).mean() < 4
    assert np.array_equal(decode.decode(encoded(photo.convert("CMYK"), "TIFF")), photo)


def test_transparency_lies_on_white():
    image = gradient((4, 4)).convert("RGBA")
    image.putpixel((1, 1), (200, 0, 0, 0))
    image.putpixel((2, 2), (100, 0, 0, 51))
    got = decode.decode(encoded(image))
    assert got.mode == "RGB" and got.getpixel((1, 1)) == (255, 255, 255) and got.getpixel((2, 2)) == (224, 204, 204)
    assert decode.decode(encoded(image.convert("LA"))).mode == "L"
    assert decode.decode(encoded(image.convert("LA"))).getpixel((1, 1)) == 255


def test_palettes():
    paletted = Image.new("P", (3, 1))
    paletted.putpalette([250, 10, 20, 0, 0, 0, 7, 8, 9])
    for x in range(3):
        paletted.putpixel((x, 0), x)
    colours = [(250, 10, 20), (0, 0, 0), (7, 8, 9)]
    got = decode.decode(encoded(paletted))
    assert [got.getpixel((x, 0)) for x in range(3)] == colours
    for transparency in (1, bytes([255, 0, 255])):
        got = decode.decode(encoded(paletted, transparency=transparency))
        assert [got.getpixel((x, 0)) for x in range(3)] == [colours[0], (255, 255, 255), colours[2]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    upright = gradient()
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that a camera so held would have made
    rotated = upright.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(decode.decode(encoded(rotated, exif=exif)), upright)
    got = np.asarray(decode.decode(encoded(rotated, "JPEG", exif=exif, quality=95, subsampling=0)), float)
    assert np.abs(got - np.asarray(upright)).max() < 12


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # Pillow's; it names no file
def test_spoilt_exif_costs_nothing_else():
    data = encoded(gradient(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert decode.decode(data).size == (40, 30)


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (8, 8), c) for c in ("red", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        got = decode.decode(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))
        assert got.getpixel((3, 3))[0] > 240 and got.getpixel((3, 3))[2] < 15


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP"])
def test_a_truncated_file_is_unreadable_and_never_half_a_picture(kind):
    data = encoded(gradient(), kind)
    stored = np.asarray(decode.decode(data))
    for length in range(0, len(data), max(1, len(data) // 60)):
        try:
            got = np.asarray(decode.decode(data[:length]))
        except UnreadablePicture:
            continue
        assert np.array_equal(got, stored), f"{length} of {len(data)} bytes gave another picture"
    with pytest.raises(UnreadablePicture):
        decode.decode(data[: len(data) // 2])


def test_progressive_jpeg_cut_short():
    data = encoded(gradient((200, 150)), "JPEG", progressive=True, quality=95)
    with pytest.raises(UnreadablePicture, match="truncated"):
        decode.decode(data[: len(data) * 3 // 4])


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", "is empty"),
        (b"To whom it may concern, this is not a picture.\n" * 20, "is not a picture of a known format .*To whom"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "."),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not a picture"),
        (np.zeros((3, 4, 5), np.uint8), r"shape .* got \(3, 4, 5\)"),
        (np.zeros((0, 4), np.uint8), "shape"),
    ],
)
def test_what_is_no_picture_is_said(data, says):
    with pytest.raises(UnreadablePicture, match=says):
        decode.decode(data)


@given(st.binary(max_size=300), st.sampled_from([b"", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"P6 ", b"II*\x00"]))
@settings(max_examples=150, deadline=None)
def test_random_bytes_are_a_picture_or_unreadable(data, magic):
    message = ""
    try:
        assert decode.decode(magic + data, max_pixels=10**6).mode in ("L", "RGB")
    except UnreadablePicture as error:
        message = str(error)
    assert "\n" not in message


def test_the_cap_is_checked_before_decoding():
    header = b"P6 90000 90000 255\n"  # 24 GB if it were decoded; Pillow itself would refuse with its own error
    with pytest.raises(UnreadablePicture, match="has 90000 x 90000 pixels, more than max_pixels = 250000000"):
        decode.decode(header)
    with pytest.raises(UnreadablePicture, match="has 40 x 30"):
        decode.decode(encoded(gradient()), max_pixels=1199)
    assert decode.decode(encoded(gradient()), max_pixels=1200).size == (40, 30)
    before = Image.MAX_IMAGE_PIXELS
    assert decode.decode(encoded(Image.new("1", (10000, 10000)))).size == (10000, 10000)  # no warning of Pillow's
    assert before == Image.MAX_IMAGE_PIXELS


def test_big_jpegs_are_decoded_small():
    data = encoded(gradient((1600, 1200)), "JPEG", quality=95)
    assert decode.decode(data, enough=64).size == (200, 150)
    assert decode.decode(data, enough=400).size == (1600, 1200)
    fast = decode.square(data, side=64).astype(float)
    slow = np.asarray(gradient((1600, 1200)).resize((64, 64), Image.Resampling.LANCZOS, (200, 0, 1400, 1200)), float)
    assert np.abs(fast - slow).max() < 5


def test_fits():
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 200
    assert (decode.square(wide, side=20) == 200).all()
    squashed = decode.square(wide, side=30, fit="squash")
    assert (squashed[:, 12:18] == 200).all() and (squashed[:, :8] == 0).all()
    wide[0] = 90
    padded = decode.square(wide, side=60, fit="pad")
    assert (
        np.array_equal(padded[20:40], wide) and len(np.unique(padded[:20])) == 1 and (padded[:20] == padded[-1]).all()
    )
    tall = decode.square(np.full((1000, 1), 7, np.uint8), side=8, fit="pad", channels=1)
    assert tall.shape == (8, 8, 1) and (tall == 7).all()
    with pytest.raises(ValueError, match='unknown fit "corp"; did you mean "crop"'):
        decode.square(wide, side=8, fit="corp")


def test_a_picture_of_the_right_size_keeps_its_pixels():
    for size in ((32, 32), (37, 32), (32, 51)):
        pixels = np.asarray(gradient(size))
        top, left = (size[1] - 32) // 2, (size[0] - 32) // 2
        assert np.array_equal(decode.square(pixels, side=32), pixels[top : top + 32, left : left + 32])


# The cache --------------------------------------------------------------------------------


def test_store_and_find_again(photos, cache):
    steps = []
    first = image_cache.store(photos, names(photos), side=16, progress=lambda *at: steps.append(at))
    assert first.pixels.shape == (40, 16, 16, 3) and first.bad == [] and steps[-1] == (40, 40) and photos.reads == 40
    for i, path in enumerate(photos.paths):
        assert np.array_equal(first.pixels[i], decode.square(path.read_bytes(), side=16))
    again = image_cache.store(
        photos, names(photos), side=16, progress=lambda *at: pytest.fail("nothing was to be done")
    )
    assert photos.reads == 40 and again.digests == first.digests and again.path == first.path
    assert isinstance(again.pixels, np.memmap) and np.array_equal(again.pixels, first.pixels)
    assert np.array_equal(np.load(first.path, allow_pickle=False), first.pixels)  # a plain .npy file
    again.verify()
    memory = image_cache.store(photos, names(photos), side=16, cache=False)
    assert memory.path is None and np.array_equal(memory.pixels, first.pixels) and memory.digests == first.digests
    assert not [path for path in cache.iterdir() if "-part-" in path.name or path.name.startswith(".")]


def test_settings_have_their_own_caches(photos):
    stored = [
        image_cache.store(photos, names(photos), side=side, fit=fit, channels=channels)
        for side, fit, channels in ((16, "crop", None), (8, "crop", None), (16, "pad", None), (16, "crop", 1))
    ]
    assert len({stored.path for stored in stored}) == 4 and stored[3].pixels.shape[3] == 1
    listed = cache_store.caches()
    assert {cache.path for cache in listed} == {stored.path for stored in stored} and all(
        c.pictures == 40 for c in listed
    )
    assert cache_store.clear() > sum(cache.bytes for cache in listed) and cache_store.caches() == []


def test_a_changed_file_of_the_same_size_is_noticed(photos):
    flat = [photos.paths[3], photos.paths[4]]
    for value, path in enumerate(flat):
        path.write_bytes(b"P5 20 20 255\n" + bytes([value]) * 400)
    before = image_cache.store(photos, names(photos), side=8)
    flat[0].write_bytes(b"P5 20 20 255\n" + bytes([99]) * 400)
    os.utime(flat[0], ns=(1, flat[0].stat().st_mtime_ns + 1))
    photos.reads = 0
    after = image_cache.store(photos, names(photos), side=8)
    assert photos.reads == 1 and (after.pixels[3] == 99).all() and after.path != before.path
    assert np.array_equal(np.delete(after.pixels, 3, 0), np.delete(before.pixels, 3, 0))


def test_a_touched_file_is_read_but_the_cache_stays(photos):
    before = image_cache.store(photos, names(photos), side=8)
    os.utime(photos.paths[7], ns=(1, 1))
    photos.reads = 0
    assert image_cache.store(photos, names(photos), side=8).path == before.path and photos.reads == 1
    image_cache.store(photos, names(photos), side=8)
    assert photos.reads == 1


def test_rows_of_known_pictures_are_not_decoded_again(photos, monkeypatch):
    image_cache.store(photos, names(photos), side=8)
    monkeypatch.setattr(decode, "square", lambda *_, **__: pytest.fail("decoded again"))
    some = Folder(photos.paths[5:30][::-1])
    stored = image_cache.store(some, names(some), side=8)
    assert stored.pixels.shape == (25, 8, 8, 3)


def test_grey_is_decided_over_all(tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (5, 9, 9), np.uint8)
    for cache in (True, False):
        one = image_cache.store(Arrays(grey), list("abcde"), side=9, cache=cache)
        assert one.pixels.shape == (5, 9, 9, 1) and np.array_equal(one.pixels[..., 0], grey)
        as_colour = np.repeat(grey[..., None], 3, 3)
        assert image_cache.store(Arrays(as_colour), list("abcde"), side=9, cache=cache).pixels.shape[3] == 1
        as_colour[4, 0, 0, 2] ^= 1
        three = image_cache.store(Arrays(as_colour), list("abcde"), side=9, cache=cache)
        assert np.array_equal(three.pixels, as_colour)
        assert image_cache.store(Arrays(grey), list("abcde"), side=9, channels=3, cache=cache).pixels.shape[3] == 3
    one.verify()
    assert image_cache.store(Arrays(grey), list("abcde"), side=9).pixels.flags.writeable is False


def test_unreadable(photos):
    photos.paths[2].write_bytes(b"")
    photos.paths[5].write_text("hello")
    photos.paths[9].unlink()
    photos.paths[11].write_bytes(photos.paths[12].read_bytes()[:60])
    for cache in (True, False, True):
        with pytest.raises(
            ValueError, match=r"^4 of 40 pictures cannot be used: 02.png is empty \(0 bytes\); 05.png is "
        ) as e:
            image_cache.store(photos, names(photos), side=8, cache=cache)
        assert "09.png cannot be read (No such file or directory); and 1 more. Use --skip-unreadable" in str(e.value)
        stored = image_cache.store(photos, names(photos), side=8, unreadable="skip", cache=cache)
        assert [i for i, _ in stored.bad] == [2, 5, 9, 11] and (stored.pixels[[2, 5, 9, 11]] == 0).all()
        assert stored.digests[9] == "" and stored.pixels[0].any()
    photos.paths[9].write_bytes(photos.paths[8].read_bytes())
    assert [i for i, _ in image_cache.store(photos, names(photos), side=8, unreadable="skip").bad] == [2, 5, 11]
    broken = Folder([photos.paths[2], photos.paths[5]])
    with pytest.raises(ValueError, match=r"^all 2 of 2 pictures cannot be used: 02.png is empty"):
        image_cache.store(broken, names(broken), side=8, unreadable="skip")


def overwrite(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda path: os.truncate(path, path.stat().st_size - 100),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: overwrite(path, 10, b"\xff"),
        lambda path: overwrite(path, path.stat().st_size // 2, b"\x01\x02\x03\x04"),
        lambda path: os.truncate(path.with_suffix(".json"), 500),
        lambda path: path.with_suffix(".json").write_text(
            path.with_suffix(".json").read_text().replace('"bad": []', '"bad": [[0, ""]]')
        ),
    ],
    ids=["cut", "emptied", "longer", "header", "one row", "table cut", "table changed"],
)
def test_a_damaged_cache_is_noticed_and_made_again(photos, corrupt):
    first = image_cache.store(photos, names(photos), side=16)
    good = np.array(first.pixels)
    path = first.path
    del first
    corrupt(path)
    with pytest.warns(RuntimeWarning, match="is corrupt .* and is rebuilt"):
        again = image_cache.store(photos, names(photos), side=16)
    assert np.array_equal(again.pixels, good) and again.bad == [] and again.path == path
    image_cache.store(photos, names(photos), side=16)


def test_a_damaged_memory_of_names_costs_only_time(photos, cache):
    image_cache.store(photos, names(photos), side=16)
    table = next(cache.glob("names-*.json"))
    table.write_text(table.read_text().replace("a", "b"))
    assert image_cache.store(photos, names(photos), side=16).bad == [] and photos.reads == 80


def test_verify_finds_what_opening_did_not_look_at(photos):
    stored = image_cache.store(photos, names(photos), side=16)
    overwrite(stored.path, 128 + 17 * 768 + 5, b"\x01\x02\x03\x04")
    with pytest.raises(ValueError, match="row 17 is not as it was written"):
        stored.verify()


def test_an_interrupted_start_goes_on_where_it_was(photos, cache):
    def stop(done, total):
        if done >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        image_cache.store(photos, names(photos), side=8, workers=1, progress=stop)
    assert not [c for c in cache_store.caches() if c.finished] and [c.pictures for c in cache_store.caches()] == [16]
    decoded = []
    with pytest.MonkeyPatch.context() as patch:
        square = decode.square
        patch.setattr(decode, "square", lambda *a, **k: decoded.append(1) or square(*a, **k))
        stored = image_cache.store(photos, names(photos), side=8)
    assert len(decoded) == 24 and len(cache_store.caches()) == 1
    assert np.array_equal(stored.pixels, image_cache.store(photos, names(photos), side=8, cache=False).pixels)


KILLED = """
import os, sys, numpy as np
from nearkin.data import cache_store, image_cache
cache_store.SAVED_EVERY = 0.0
class Slow:
    def __len__(self): return 64
    def read(self, i): return np.full((9, 9), i, np.uint8)
    def stamp(self, i): return str(i)
def progress(done, total):
    if done >= 32: os.kill(os.getpid(), 9)
image_cache.store(Slow(), [str(i) for i in range(64)], side=9, progress=progress if len(sys.argv) > 1 else None)
"""


def test_a_killed_process_leaves_nothing_that_is_taken_for_whole():
    assert subprocess.run([sys.executable, "-c", KILLED, "die"], check=False).returncode == -9
    assert [c.finished for c in cache_store.caches()] == [False] and cache_store.caches()[0].pictures > 0
    pixels = np.arange(64, dtype=np.uint8)[:, None, None].repeat(9, 1).repeat(9, 2)
    stored = image_cache.store(Arrays(pixels), [str(i) for i in range(64)], side=9)
    assert np.array_equal(stored.pixels[..., 0], pixels)
    for path in cache_store.folder().glob("*-part-*"):  # it may have an owner yet; after an hour it has not
        os.utime(path, (time.time() - 7200,) * 2)
    image_cache.store(Arrays(pixels[:9]), [str(i) for i in range(9)], side=9)
    assert all(cache.finished for cache in cache_store.caches())


def test_two_processes_at_once(photos):
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        paths = pool.map(_store_in_process, [[str(p) for p in photos.paths]] * 2)
    assert paths[0] == paths[1] and len(cache_store.caches()) == 1
    image_cache.store(photos, names(photos), side=12).verify()


def _store_in_process(paths):
    folder = Folder(Path(p) for p in paths)
    return str(image_cache.store(folder, names(folder), side=12).path)


def test_a_full_disk_is_one_sentence(photos, monkeypatch):
    def full(self, digest, row, reason):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(cache_store.Part, "append", full)
        with pytest.raises(
            OSError, match=r"cannot be written to .* \(No space left on device\); make room, .*--no-cache"
        ):
            image_cache.store(photos, names(photos), side=8)
    assert cache_store.caches() == []
    with monkeypatch.context() as patch:
        patch.setattr(image_cache.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        with pytest.raises(OSError, match=r"0.0 MiB needed, 0.0 MiB free"):
            image_cache.store(photos, names(photos), side=8)
    assert cache_store.caches() == []
    monkeypatch.setenv("NEARKIN_CACHE", str(photos.paths[0]))
    with pytest.raises(OSError, match=r"cannot be written to .*Not a directory"):
        image_cache.store(photos, names(photos), side=8)
    assert image_cache.store(photos, names(photos), side=8, cache=False).pixels.shape == (40, 8, 8, 3)


def test_a_user_without_home(photos, monkeypatch):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NEARKIN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(ValueError, match="there is no cache folder: name one in NEARKIN_CACHE, or use --no-cache"):
        image_cache.store(photos, names(photos), side=8)


def test_rows(photos):
    stored = image_cache.store(photos, names(photos), side=8)
    chosen = np.array([3, 39, 3, 0])
    rows = stored.rows(chosen)
    assert np.array_equal(rows, stored.pixels[chosen]) and rows.flags.writeable and len(stored) == 40
    assert stored.rows([]).shape == (0, 8, 8, 3)
    for wrong in ([True, False], [0.5], [[1]]):
        with pytest.raises(TypeError, match="indices must be whole numbers"):
            stored.rows(wrong)
    with pytest.raises(IndexError):
        stored.rows([40])


@pytest.mark.parametrize(
    "change, says",
    [
        ({"side": 0}, "side must be >= 1, got 0"),
        ({"fit": "corp"}, 'did you mean "crop"'),
        ({"channels": 2}, "channels must be 1, 3 or None, got 2"),
        ({"unreadable": "ignore"}, 'unknown unreadable "ignore"'),
        ({"workers": 0}, "workers must be >= 1"),
        ({"max_pixels": 0}, "max_pixels must be >= 1"),
        ({"names": ["a"]}, "names must have one entry per picture: 40 pictures, 1 names"),
        ({"pictures": Folder([]), "names": []}, "at least one picture"),
    ],
)
def test_bad_arguments(photos, change, says):
    with pytest.raises(ValueError, match=says):
        image_cache.store(**({"pictures": photos, "names": names(photos), "side": 8} | change))


def test_tables_are_json(photos):
    stored = image_cache.store(photos, names(photos), side=8)
    table = json.loads(stored.path.with_suffix(".json").read_text())
    assert table["shape"] == [40, 8, 8, 3] and table["digests"] == stored.digests and len(table["crc"]) == 40


@needs_birds
def test_birds():
    """Real photos, eight of them grey: the set is in colour."""
    with tarfile.open(BIRDS) as archive:
        members = [m for m in archive.getmembers() if m.name.endswith(".jpg")][:300]

    class Birds(Arrays):
        def read(self, i):
            with BIRDS.open("rb") as file:
                file.seek(members[i].offset_data)
                return file.read(members[i].size)

        def stamp(self, i):
            return members[i].name

    birds = Birds(members)
    stored = image_cache.store(birds, [m.name for m in members], side=64)
    assert stored.pixels.shape == (300, 64, 64, 3) and stored.bad == [] and 60 < stored.pixels.mean() < 190
