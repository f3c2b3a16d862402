"""A gallery that is opened without a run finds the encoder of its rows, once a picture must be encoded."""

import shutil

import numpy as np
import pytest
import torch
from test_gallery import a_run, pictures

from nearkin import gallery as room
from nearkin import models
from nearkin.gallery import Gallery, items


@pytest.fixture
def made(tmp_path):
    """A gallery of six pictures, made by a run."""
    files = pictures(tmp_path / "photos")
    with Gallery.open(tmp_path / "g", a_run(tmp_path / "run", 0), device="cpu") as gallery:
        gallery.enrol(files, [f"class {i // 2}" for i in range(6)])
    return files


def test_its_answers_are_those_with_the_run(tmp_path, made):
    with Gallery.open(tmp_path / "g", tmp_path / "run") as told, Gallery.open(tmp_path / "g") as found:
        for ask in (
            lambda gallery: gallery.search(made[1], 3),
            lambda gallery: gallery.identify(made[1].read_bytes()),
            lambda gallery: gallery.verify(made[1], made[2]),
            lambda gallery: gallery.explain(made[1], 3).similarity,
            lambda gallery: gallery.known([made[4], b"another"]),
        ):
            assert ask(found) == ask(told)
        assert found._encoding.device.type == told._encoding.device.type


def test_a_picture_is_enrolled_without_naming_the_run(tmp_path, made):
    more = pictures(tmp_path / "more", 8)[6:]
    with Gallery.open(tmp_path / "g") as gallery:
        assert gallery.enrol(more, "new").ids == [7, 8]
    with Gallery.open(tmp_path / "g") as gallery:
        assert room.enrol_source(gallery, str(tmp_path / "more"), label="new")[:2] == (0, 8)


def test_no_encoder_is_opened_for_what_needs_none(tmp_path, made, monkeypatch):
    def refuse(*_):
        raise AssertionError("an encoder was opened")

    monkeypatch.setattr(items.Encoding, "__init__", refuse)
    with Gallery.open(tmp_path / "g") as gallery:
        row = gallery.vectors([2])[0]
        assert gallery.search(row, 1)[0].id == 2 and gallery.identify(row).label == "class 0"
        assert gallery.verify(row, torch.from_numpy(row)).same, "by the calibration of its run"
        gallery.calibrate()
        gallery.relabel(1, "other")
        gallery.remove(3)
        assert gallery.stats()["calibrated"] and gallery.check().whole and gallery.vacuum()
        assert gallery.export(tmp_path / "all.npz") == 5
        with pytest.raises(AssertionError, match="an encoder was opened"):
            gallery.search(made[0])


def test_a_run_that_is_gone_is_named_and_vectors_need_none(tmp_path, made):
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    with Gallery.open(tmp_path / "g") as gallery:
        for use in (gallery.search, gallery.identify, lambda item: gallery.enrol(item, "a")):
            with pytest.raises(ValueError, match=r"its run is not at .*run any more; pass its folder with --run RUN"):
                use(made[0])
        assert gallery.search(gallery.vectors([2])[0], 1)[0].id == 2
    with Gallery.open(tmp_path / "g", tmp_path / "elsewhere") as gallery:
        assert gallery.search(made[0], 1)[0].id == 1


def test_a_run_that_was_trained_again_is_refused(tmp_path, made):
    a_run(tmp_path / "run", 1)
    with Gallery.open(tmp_path / "g") as gallery:
        with pytest.raises(ValueError, match=r"was made with another encoder .* re-embed it with: nearkin enrol"):
            gallery.identify(made[0])
        assert gallery.stats()["rows"] == 6


def test_a_gallery_that_was_upgraded_meanwhile_finds_the_encoder_of_today(tmp_path, made):
    with Gallery.open(tmp_path / "g") as gallery:
        vector = gallery.vectors([1])[0]
        room.upgrade(tmp_path / "g", a_run(tmp_path / "new", 1))
        with pytest.raises(room.StoreUnavailable, match="was upgraded to another encoder; open it again"):
            gallery.search(vector)
        assert gallery.search(made[0], 1)[0].id == 1
        assert gallery.fingerprint == items.encoder_info(tmp_path / "new").fingerprint


def test_the_length_of_its_rows_is_taken(tmp_path):
    files = pictures(tmp_path / "photos")
    encoder = models.build("small-cnn", channels=1, size=16, width=4, dim=8, seed=0)
    preparation = {"kind": "pictures", "size": 16, "stored": 16, "fit": "crop", "channels": 1, "flip": False}
    models.save(encoder, tmp_path / "run", preparation, lengths=(8, 4))
    with Gallery.open(tmp_path / "g", tmp_path / "run", dim=4) as gallery:
        gallery.enrol(files, "a")
    with Gallery.open(tmp_path / "g") as gallery:
        assert gallery.search(files[3], 1)[0].similarity == pytest.approx(1) and gallery.dim == 4


def test_an_encoder_of_vectors_must_be_named(tmp_path):
    """Without it vectors are embeddings, as long as they have the gallery's length: with it they would be encoded."""
    models.save(models.build("mlp", features=5, dim=4), tmp_path / "run", {"kind": "vectors", "features": 5})
    features = np.random.default_rng(0).normal(size=(3, 5))
    with Gallery.open(tmp_path / "g", tmp_path / "run") as gallery:
        gallery.enrol(features, "a")
    with Gallery.open(tmp_path / "g") as gallery:
        assert gallery.search(gallery.vectors([2])[0], 1)[0].id == 2
        with pytest.raises(ValueError, match="vectors must have 4 dimensions as the gallery has, got 5"):
            gallery.search(features[0])
        for use in (lambda: gallery.enrol(gallery.vectors([1])[0], "b"), lambda: gallery.search("x.png")):
            with pytest.raises(ValueError, match=r"takes vectors of 5 numbers; open it with run=RUN to encode them"):
                use()


# ---- what is no item


@pytest.fixture
def wrong(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.jpg").write_text("hello")
    np.save(tmp_path / "five.npy", np.ones(5))
    return tmp_path


@pytest.mark.parametrize("encoder", [True, False], ids=["pictures", "vectors"])
@pytest.mark.parametrize(
    "item, sentence",
    [
        (None, "items must be paths, pictures .* or vectors, got NoneType"),
        (3, "got int"),
        ({"a": 1}, "got dict"),
        ([], "one item, got 0|two items, got 0"),
        ([None], "an item must be a path, a picture or a vector, got NoneType"),
        ([0.5, 1], r"a vector must be an array, as np.array\(…\), got a list of numbers"),
        (
            "nosuch.jpg",
            "nosuch.jpg: cannot be read .No such file|nosuch.jpg needs an encoder, and the gallery has none",
        ),
        ("a text", "a text: cannot be read|a text needs an encoder"),
        ("", "'': cannot be read .No such file|'' needs an encoder"),
        ("x" * 5000, "x{90,99}…: cannot be read|x{90,99}… needs an encoder"),
        ("a\0b", "cannot be read .embedded null byte|needs an encoder"),
        ("empty", "empty: cannot be read .Is a directory|empty needs an encoder"),
        ("text.jpg", "text.jpg is not a picture of a known format|text.jpg needs an encoder"),
        ("five.npy", "five.npy is not a picture of a known format|five.npy needs an encoder"),
        (b"", "the picture is empty|an item of type bytes needs an encoder"),
        (np.ones(5), "vectors must have 8 dimensions as the gallery has, got 5"),
        (
            np.ones((2, 3, 8)),
            r"the picture must have shape .* got \(2, 3, 8\)|an array of shape \(2, 3, 8\) needs an enc",
        ),
        (np.full((4, 4), "a"), "a picture must be of numbers, got <U1"),
        (np.ones((4, 4, 3), complex), "a picture must be of numbers, got complex128"),
        (np.full(8, np.nan), "vectors must be finite"),
        (np.array(["a"] * 8), "vectors must be numbers, got <U1"),
    ],
    ids=[str(i) for i in range(21)],
)
def test_what_is_no_item_is_one_sentence(wrong, made, monkeypatch, encoder, item, sentence):
    monkeypatch.chdir(wrong)
    with Gallery.open("g") if encoder else Gallery.open("v", dim=8) as gallery:
        for ask in (gallery.search, gallery.identify, lambda item: gallery.verify(item, item)):
            with pytest.raises((ValueError, TypeError), match=sentence) as error:
                ask(item)
            assert "\n" not in str(error.value) and len(str(error.value)) < 300
