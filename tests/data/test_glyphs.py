"""The glyphs set: what is drawn, that each drawing stands alone, and that its cache can be lost or broken."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fontTools.ttLib import TTFont
from matplotlib import get_data_path

from nearkin.data import glyphs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test touches the user's own cache."""
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def drawn() -> tuple[glyphs.Glyphs, set[tuple[str, str]]]:
    """The standard set, and which (character, typeface) pairs were drawn for it."""
    pairs: set[tuple[str, str]] = set()
    upright = glyphs._upright

    def noting(character: str, face: str, size: int):
        pairs.add((character, face))
        return upright(character, face, size)

    chosen = glyphs.characters()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glyphs, "characters", lambda: chosen)
        patch.setattr(glyphs, "_upright", noting)
        glyph_set = glyphs.load(cache=False)
    return glyph_set, pairs


@pytest.fixture(scope="module")
def glyph_set(drawn) -> glyphs.Glyphs:
    return drawn[0]


def assert_same(a: glyphs.Glyphs, b: glyphs.Glyphs) -> None:
    np.testing.assert_array_equal(a.images, b.images)
    np.testing.assert_array_equal(a.labels, b.labels)
    assert a.characters == b.characters


@pytest.mark.slow
def test_counts_shapes_and_types(glyph_set):
    classes = len(glyph_set.characters)
    assert 900 <= classes <= 1000
    assert glyph_set.images.shape == (classes * 20, 32, 32)
    assert glyph_set.images.dtype == np.uint8
    assert glyph_set.labels.dtype == np.int64
    np.testing.assert_array_equal(glyph_set.labels, np.repeat(np.arange(classes), 20))
    assert len(set(glyph_set.characters)) == classes
    assert all(len(character) == 1 for character in glyph_set.characters)


def test_every_picture_shows_something(glyph_set):
    smooth = glyph_set.images.reshape(len(glyph_set.images), 8, 4, 8, 4).mean((2, 4))  # noise averages out, ink stays
    assert (smooth.max((1, 2)) - smooth.min((1, 2))).min() > 20


def test_drawings_of_a_class_differ(glyph_set):
    assert len(np.unique(glyph_set.images.reshape(len(glyph_set.images), -1), axis=0)) == len(glyph_set.images)


def test_no_two_characters_look_alike(glyph_set):
    looks = np.stack([glyphs.plain(character).ravel() for character in glyph_set.characters]).astype(np.float64)
    looks /= np.linalg.norm(looks, axis=1, keepdims=True)
    cosine = looks @ looks.T
    np.fill_diagonal(cosine, -1.0)
    assert cosine.max() < 0.93 + 1e-6


@pytest.mark.parametrize("twins", ["AΑА", "oOοо", "cCс", "HНΗ", "∆Δ"])
def test_twins_of_other_scripts_are_one_class(glyph_set, twins):
    assert sum(character in twins for character in glyph_set.characters) == 1


def test_a_missing_glyph_box_is_never_drawn(drawn):
    glyph_set, pairs = drawn
    fonts = Path(get_data_path()) / "fonts" / "ttf"
    code_points = {}
    for face in glyphs.FACES:
        with TTFont(fonts / f"{face}.ttf") as font:
            code_points[face] = font.getBestCmap()
    assert {face for _, face in pairs} == set(glyphs.FACES)
    assert {character for character, _ in pairs} == set(glyph_set.characters)
    assert [pair for pair in sorted(pairs) if ord(pair[0]) not in code_points[pair[1]]] == []

    boxes = {face: glyphs._upright("\ufffe", face, 64).tobytes() for face in glyphs.FACES}  # held by no typeface
    assert [pair for pair in sorted(pairs) if glyphs._upright(*pair, 64).tobytes() == boxes[pair[1]]] == []


def test_a_drawing_does_not_depend_on_the_others(glyph_set):
    chosen = np.random.default_rng(0).choice(len(glyph_set.images), 60, replace=False)  # another order, most left out
    for item in chosen:
        character = glyph_set.characters[glyph_set.labels[item]]
        np.testing.assert_array_equal(glyphs.draw(character, item % 20), glyph_set.images[item])


def test_fewer_samples_are_the_first_of_more(glyph_set):
    few = glyphs.load(per_class=2, cache=False)
    assert few.characters == glyph_set.characters
    np.testing.assert_array_equal(few.images, glyph_set.images[np.arange(len(glyph_set.images)) % 20 < 2])


def test_fewer_characters_are_the_same_pictures(glyph_set, monkeypatch):
    monkeypatch.setattr(glyphs, "characters", lambda: ["Ж", "A"])
    two = glyphs.load(cache=False)
    for c, character in enumerate(two.characters):
        np.testing.assert_array_equal(
            two.images[two.labels == c], glyph_set.images[glyph_set.labels == glyph_set.characters.index(character)]
        )


def test_seeds_and_samples_differ():
    pictures = [glyphs.draw("g", sample, seed=seed).tobytes() for seed in range(4) for sample in range(4)]
    assert len(set(pictures)) == 16


def test_another_size_is_the_same_pose(monkeypatch):
    monkeypatch.setattr(glyphs, "NOISE", 0.0)
    assert glyphs.draw("g", 0, size=8).shape == (8, 8)
    for sample in range(5):
        large, small = glyphs.draw("g", sample, size=64), glyphs.draw("g", sample, size=32)
        shrunk = large.reshape(32, 2, 32, 2).mean((1, 3))
        assert np.corrcoef(shrunk.ravel(), small.ravel())[0, 1] > 0.97


def test_drawings_stand_in_the_middle(monkeypatch):
    monkeypatch.setattr(glyphs, "NOISE", 0.0)
    ink = np.stack([glyphs.draw("O", sample) for sample in range(100)]).astype(np.float64)
    rows, columns = (np.average(np.arange(32), weights=ink.sum(axis)) for axis in ((0, 2), (0, 1)))
    assert abs(rows - 15.5) < 0.5
    assert abs(columns - 15.5) < 0.5
    frame = ink.sum() - ink[:, 1:-1, 1:-1].sum()
    assert frame / ink.sum() < 0.01  # hardly anything is cut off


def test_split_is_disjoint_and_complete(glyph_set):
    train, unseen = glyph_set.split()
    assert not set(train.characters) & set(unseen.characters)
    assert set(train.characters) | set(unseen.characters) == set(glyph_set.characters)
    assert 0 <= len(train.characters) - len(unseen.characters) <= 1
    for part in (train, unseen):
        np.testing.assert_array_equal(part.labels, np.repeat(np.arange(len(part.characters)), 20))
        for c in (0, len(part.characters) - 1):
            there = glyph_set.images[glyph_set.labels == glyph_set.characters.index(part.characters[c])]
            np.testing.assert_array_equal(part.images[part.labels == c], there)


def test_split_is_the_same_every_time_and_hardly_moved_by_one_character(glyph_set):
    train = glyph_set.split()[0].characters
    assert glyph_set.split()[0].characters == train
    assert glyph_set.split(seed=1)[0].characters != train
    fewer = glyph_set._only([c for c, character in enumerate(glyph_set.characters) if character != train[0]])
    assert len(set(fewer.split()[0].characters) ^ set(train)) <= 2


def test_pixels_are_a_poor_embedding(glyph_set):
    unseen = glyph_set.split()[1]
    pixels = unseen.images.reshape(len(unseen.images), -1).astype(np.float32)
    pixels /= np.linalg.norm(pixels, axis=1, keepdims=True)
    queries = np.arange(0, len(pixels), 7)
    cosine = pixels[queries] @ pixels.T
    cosine[np.arange(len(queries)), queries] = -1.0
    recall = (unseen.labels[cosine.argmax(1)] == unseen.labels[queries]).mean()
    assert 0.15 < recall < 0.25


def test_cache_round_trip(folder, monkeypatch):
    first = glyphs.load(per_class=1)
    (file,) = folder.iterdir()
    monkeypatch.setattr(glyphs, "draw", None)  # nothing is drawn a second time
    second = glyphs.load(per_class=1)
    assert_same(first, second)
    second.images[0] = 0  # what is handed out is the caller's own
    assert_same(first, glyphs.load(per_class=1))
    with np.load(file, allow_pickle=False) as archive:
        assert sorted(archive) == ["codes", "images"]


def test_cache_file_is_named_by_what_decides_its_content(monkeypatch):
    names = {glyphs._cache_file(*arguments) for arguments in [(0, 32, 20), (1, 32, 20), (0, 16, 20), (0, 32, 2)]}
    monkeypatch.setattr(glyphs, "RECIPE", glyphs.RECIPE + 1)
    names.add(glyphs._cache_file(0, 32, 20))
    monkeypatch.setattr(glyphs, "version_of", lambda package: "0")
    names.add(glyphs._cache_file(0, 32, 20))
    assert len(names) == 6


def broken(whole_file: bytes) -> dict[str, bytes]:
    middle = len(whole_file) // 2
    flipped = whole_file[:middle] + bytes([whole_file[middle] ^ 0xFF]) + whole_file[middle + 1 :]
    return {"empty": b"", "cut": whole_file[:middle], "flipped": flipped, "other": b"not an archive at all"}


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other", "shape"])
def test_a_damaged_cache_is_drawn_again(folder, damage, monkeypatch):
    monkeypatch.setattr(glyphs, "characters", lambda: list("abcdefgh"))
    first = glyphs.load(per_class=3)
    (file,) = folder.iterdir()
    good = file.read_bytes()
    if damage == "shape":
        np.savez(file, codes=np.array([97], np.int32), images=first.images)
    else:
        file.write_bytes(broken(good)[damage])
    assert_same(glyphs.load(per_class=3), first)
    assert_same(glyphs.Glyphs(*_stored(file, first)), first)


def _stored(file: Path, like: glyphs.Glyphs):
    with np.load(file, allow_pickle=False) as archive:
        return archive["images"], like.labels, [chr(code) for code in archive["codes"]]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(glyphs, "characters", lambda: list("ab"))
    with pytest.warns(RuntimeWarning, match="glyphs are not kept"):
        built = glyphs.load(per_class=2)
    assert_same(built, glyphs.load(per_class=2, cache=False))


def test_a_failed_write_leaves_nothing_behind(folder, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(glyphs, "characters", lambda: list("ab"))
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        glyphs.load(per_class=2)
    assert list(folder.iterdir()) == []


def test_a_user_without_home_is_served(monkeypatch):
    def nowhere(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NEARKIN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", nowhere)
    monkeypatch.setattr(glyphs, "characters", lambda: list("ab"))
    assert glyphs.load(per_class=2).images.shape == (4, 32, 32)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"size": 7}, "size must be a whole number >= 8, got 7"),
        ({"size": 32.0}, "size must be a whole number >= 8, got 32.0"),
        ({"per_class": 0}, "per_class must be a whole number >= 1, got 0"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"seed": "a"}, "seed must be a whole number >= 0, got 'a'"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments, sentence):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole sentence is compared
        glyphs.load(**arguments)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("character", ["", "ab", "\ufffe", "漢"])
def test_a_character_without_typeface_is_refused(character):
    with pytest.raises(ValueError, match="character must be a single one that the typefaces hold, got "):
        glyphs.draw(character, 0)


def test_importing_the_room_is_cheap():
    code = "import sys, nearkin.data; print(*sorted({'PIL', 'matplotlib', 'rich'} & set(sys.modules)))"
    heavy = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert heavy.split() == []


def test_without_matplotlib_the_set_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    glyphs.typefaces.cache_clear()
    with pytest.raises(
        ModuleNotFoundError, match=r"glyphs set needs matplotlib's typefaces: pip install 'nearkin\[gly"
    ):
        glyphs.load(cache=False)
