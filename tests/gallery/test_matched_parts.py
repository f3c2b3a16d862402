"""Which part matched: two pictures by a run, a picture and a row; from the original, the thumbnail, or neither."""

import io
import os

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin import gallery as room
from nearkin import models
from nearkin.core.errors import MissingRow, NoPicture
from nearkin.gallery import Gallery, matched_parts


def pixels(n, side=80):
    draw = np.random.default_rng(n)
    small = draw.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC))


def file_of(n, kind="PNG"):
    out = io.BytesIO()
    Image.fromarray(pixels(n)).save(out, kind)
    return out.getvalue()


def made_run(folder, **changes):
    encoder = models.build("efficientnet-lite0", pretrained=False, size=160, dim=6, **changes).eval()
    some = torch.stack([torch.from_numpy(pixels(100 + n, 160).copy()) for n in range(16)]).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        models.fit_projection(encoder, encoder.features(some))  # so that different pictures are not near
    # Stored larger than a thumbnail, and the encoder sees only the middle.
    preparation = {"kind": "pictures", "size": 160, "stored": 192, "fit": "crop", "channels": 3, "flip": True}
    models.save(encoder, folder, preparation)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return made_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    for n in range(4):
        (folder / f"kind{n % 2}").mkdir(parents=True, exist_ok=True)
        (folder / f"kind{n % 2}" / f"{n}.png").write_bytes(file_of(n))
    return folder


@pytest.fixture
def gallery(run, photos, tmp_path):
    with Gallery.open(tmp_path / "g.gallery", run, device="cpu") as opened:
        room.enrol_source(opened, str(photos))
        yield opened


def id_of(gallery, name):
    return next(hit.id for hit, _ in gallery.rows() if hit.name.endswith(name))


def check_sums(matched, within=1e-5):
    for side in (matched.a, matched.b):
        assert side.heat.ndim == 2 and abs(side.heat.sum() + side.missing - matched.similarity) < 1e-12
        assert abs(side.missing) <= within


def test_two_pictures_by_a_run(run, photos):
    a, b = photos / "kind0" / "0.png", photos / "kind1" / "1.png"
    matched = room.explain(run, a, b, device="cpu")
    check_sums(matched)
    assert matched.exact and matched.source == "" and matched.row_similarity is None
    assert matched.similarity == pytest.approx(room.verify(run, a, b, device="cpu").similarity, abs=1e-6)
    assert matched.a.picture.shape == (160, 160, 3) and matched.a.heat.shape == (5, 5)
    same = room.explain(run, file_of(0), Image.fromarray(pixels(1)), device="cpu")  # as bytes, and as a PIL picture
    assert np.allclose(same.a.heat, matched.a.heat, atol=1e-6)


def test_the_picture_shown_is_what_the_encoder_sees(run):
    whole = np.zeros((192, 192, 3), np.uint8)
    whole[12:-12, 12:-12] = 200  # 7/8 of the side
    matched = room.explain(run, whole, whole, device="cpu")
    assert (matched.a.picture > 150).all()


def test_a_row_is_explained_from_its_original(gallery, photos):
    id = id_of(gallery, "kind1/1.png")
    matched = gallery.explain(photos / "kind0" / "2.png", id)
    check_sums(matched)
    hit = next(h for h in gallery.search(photos / "kind0" / "2.png", 4) if h.id == id)
    assert matched.source == "original" and matched.note == ""
    assert matched.similarity == pytest.approx(hit.similarity, abs=1e-5)
    assert matched.row_similarity == pytest.approx(hit.similarity, abs=1e-5)


@pytest.mark.parametrize("fate", ["gone", "changed", "broken", "folder", "fifo"])
def test_otherwise_from_its_thumbnail_and_says_so(gallery, photos, fate):
    path, id = photos / "kind1" / "1.png", id_of(gallery, "kind1/1.png")
    path.unlink()
    if fate == "changed":
        path.write_bytes(file_of(77))
    elif fate == "broken":
        path.write_bytes(b"no picture")
    elif fate == "folder":
        path.mkdir()
    elif fate == "fifo":
        os.mkfifo(path)  # must not be waited for
    matched = gallery.explain(photos / "kind0" / "0.png", id)
    check_sums(matched)
    why = "has changed since it was enrolled" if fate == "changed" else "is not available"
    assert (
        matched.source == "thumbnail" and f"the original of row {id} {why}, so its thumbnail is shown" in matched.note
    )
    hit = next(h for h in gallery.search(photos / "kind0" / "0.png", 4) if h.id == id)
    assert matched.row_similarity == pytest.approx(hit.similarity, abs=1e-5)
    assert f"{matched.similarity:.4f}" in matched.note and str(photos) not in matched.note


def test_a_file_saved_again_embeds_as_before_and_is_taken(gallery, photos):
    path = photos / "kind1" / "1.png"
    path.write_bytes(file_of(1, "BMP"))  # other bytes, the same pixels
    assert gallery.explain(photos / "kind0" / "0.png", id_of(gallery, "kind1/1.png")).source == "original"


def test_names_of_uploads_are_never_opened(gallery, photos, monkeypatch):
    monkeypatch.chdir(photos / "kind0")
    (enrolled,) = gallery.enrol([file_of(9)], "new", names=["0.png"]).ids  # 0.png is in this folder
    opened = []
    monkeypatch.setattr(matched_parts.Path, "read_bytes", lambda path: opened.append(path) or b"")
    assert gallery.explain(file_of(3), enrolled).source == "thumbnail"
    assert opened == []


def test_too_large_a_file_is_not_read(gallery, photos, monkeypatch):
    monkeypatch.setattr(matched_parts, "MAX_FILE", 10)
    assert gallery.explain(file_of(3), id_of(gallery, "kind1/1.png")).source == "thumbnail"


def test_rows_without_a_picture(gallery):
    (id,) = gallery.enrol(np.arange(1.0, 7.0), "vector").ids
    with pytest.raises(NoPicture, match=f"row {id} has no picture"):
        gallery.explain(file_of(1), id)
    with pytest.raises(NoPicture, match=f"row {id} has no picture"):
        gallery.explain(file_of(1), id, [])
    with pytest.raises(MissingRow, match="no row has the id 999"):
        gallery.explain(file_of(1), 999)


def test_bad_input_gets_one_sentence(run, gallery, tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.png: cannot be read \(No such file"):
        room.explain(run, tmp_path / "nothing.png", file_of(1), device="cpu")
    with pytest.raises(ValueError, match="the picture is not a picture of a known format"):
        room.explain(run, b"no picture", file_of(1), device="cpu")
    with pytest.raises(ValueError, match="b must be a picture, got a vector, which has no places to show"):
        room.explain(run, file_of(1), np.ones(6), device="cpu")
    with pytest.raises(ValueError, match="item must be a picture, got a vector"):
        gallery.explain(np.ones(6), 1)
    with pytest.raises(ValueError, match="item must be a picture, got its embedding"):
        gallery.explain(gallery.see(file_of(1))[0], 1)
    with pytest.raises(ValueError, match="not a finished run"):
        room.explain(tmp_path, file_of(1), file_of(2), device="cpu")


def test_an_encoder_of_vectors_is_refused(tmp_path):
    models.save(models.build("mlp", features=5, dim=4), tmp_path, {"kind": "vectors", "features": 5})
    with pytest.raises(ValueError, match="its encoder takes vectors, which have no places to show"):
        room.explain(tmp_path, file_of(1), file_of(2), device="cpu")


def test_a_gallery_without_an_encoder_is_refused(tmp_path):
    with Gallery.open(tmp_path / "v.gallery", dim=4) as opened:
        opened.enrol(np.eye(4)[:1], "a")
        with pytest.raises(ValueError, match="explain needs an encoder, and the gallery has none"):
            opened.explain(file_of(1), 1)


def test_half_precision_run(tmp_path):
    folder = tmp_path / "half"
    encoder = models.build("efficientnet-lite0", pretrained=False, size=64, dim=6).bfloat16()
    preparation = {"kind": "pictures", "size": 64, "stored": 64, "fit": "crop", "channels": 3, "flip": True}
    models.save(encoder, folder, preparation)
    check_sums(room.explain(folder, file_of(1), file_of(2), device="cpu"), within=0.05)
