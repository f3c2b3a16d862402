"""`nearkin.open`: an encoder by its name or its run, three lines to the first neighbours."""

import numpy as np
import pytest
from PIL import Image

import nearkin
import tiny_vit
from commands import photos
from nearkin import models
from nearkin.gallery import Embedder


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tiny_vit.save(tmp_path / "vit")
    photos(tmp_path / "photos", classes=7, each=4)
    return tmp_path


def test_three_lines_to_the_first_neighbours(place):
    encoder = nearkin.open("hf:vit")
    with encoder.enrol("photos/") as gallery:
        hits = gallery.search("photos/class3/1.png", k=2)
    assert hits[0].label == "class3" and hits[0].similarity == pytest.approx(1) and hits[0].id != hits[1].id
    assert (place / "photos.gallery").is_file() and isinstance(encoder, Embedder)
    assert repr(encoder) == f"nearkin.open({f'hf:{place}/vit'!r})"
    (place / "photos" / "class3" / "new.png").write_bytes((place / "photos" / "class4" / "1.png").read_bytes() + b"\0")
    shown = []
    with encoder.enrol("photos", progress=lambda *n: shown.append(n)) as gallery:
        assert gallery.stats()["rows"] == 29 and gallery.stats()["calibrated"]
    assert shown[-1] == (29, 29)


def test_it_embeds_whatever_a_gallery_takes_and_in_order(place):
    encoder = nearkin.open("hf:vit", device="cpu")
    files = sorted((place / "photos").rglob("*.png"))
    rows = encoder.embed(files)
    assert rows.shape == (28, encoder.dim) and np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    for item in (files[5], files[5].read_bytes(), Image.open(files[5]), np.asarray(Image.open(files[5]))):
        np.testing.assert_allclose(encoder.embed(item)[0], rows[5], atol=1e-6)
    assert encoder.embed([]).shape == (0, 16)
    (place / "bad.png").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"bad\.png is not a picture"):
        encoder.embed([files[0], place / "bad.png"])
    with pytest.raises(ValueError, match="cannot be read"):
        encoder.embed("missing.png")


def test_two_pictures_are_compared(place):
    encoder = nearkin.open("hf:vit")
    same = encoder.verify("photos/class1/0.png", "photos/class1/0.png")
    assert same.similarity == pytest.approx(1) and same.same is None and "alone has no calibration" in same.note


def test_a_run_is_opened_by_its_folder(place):
    preparation = {"kind": "pictures", "size": 16, "stored": 16, "fit": "crop", "channels": 3, "flip": True}
    models.save(models.build("small-cnn", dim=4, size=16), place / "run", preparation)
    encoder = nearkin.open(place / "run")
    assert encoder.dim == 4 and encoder.embed("photos/class1/0.png").shape == (1, 4)
    with encoder.enrol("photos", "own.gallery") as gallery:
        stats = gallery.stats()
        assert stats["rows"] == 28 and stats["learned"]["labels"] == 7, "it has learned from its labels, as any other"
        assert gallery.identify("photos/class1/0.png").label == "class1" and not stats["calibrated"]
        same = gallery.verify("photos/class1/0.png", "photos/class2/0.png")
        assert "calibration.json" in same.note, "what pairs mean is the run's"
    with pytest.raises(ValueError, match="was made with another encoder"):
        nearkin.open("hf:vit").gallery("own.gallery")


def test_a_broken_enrolment_closes_the_gallery_and_keeps_what_was_enrolled(place):
    (place / "photos" / "class6" / "9.png").write_bytes(b"no picture")
    encoder = nearkin.open("hf:vit")
    with pytest.raises(ValueError, match=r"class6/9\.png is not a picture"):
        encoder.enrol("photos")
    with encoder.enrol("photos", skip_unreadable=True) as gallery:
        assert gallery.stats()["rows"] == 28


def test_what_is_no_encoder_is_one_sentence(place):
    for name, words in (
        ("efficientnet-lite9", "did you mean"),
        ("photos", "not a finished run"),
        ("mlp", "random ones"),
    ):
        with pytest.raises(ValueError, match=words):
            nearkin.open(name)
    with pytest.raises(ValueError, match="unknown source"):
        nearkin.open("hf:vit").enrol("phots")
    assert not (place / "phots.gallery").exists()
