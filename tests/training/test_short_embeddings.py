"""`loss.matryoshka` in a recipe, and `--dim` from a run to embeddings, galleries, calibrations and ONNX files."""

import json
import re

import numpy as np
import pytest
import torch

import worlds
from commands import noisy_vectors, output_of, run, separate_runner
from nearkin import evaluation, gallery, losses, models, training
from nearkin.cli import app
from nearkin.core import distances
from nearkin.gallery import Gallery
from nearkin.gallery.items import Encoding, encoder_info
from nearkin.memory import CrossBatchMemory
from nearkin.training.build import build_loss
from nearkin.training.config.recipe import read
from nearkin.training.config.registry import check_keys, matryoshka_dims

SMALL = {"training.epochs": 2, "training.batches": 8, "encoder.hidden": [16], "encoder.dim": 8, "training.workers": 0}
SMALL |= {"sampler.batch": 16, "sampler.per_class": 4, "training.device": "cpu"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with vectors of 32 classes, a run trained for three lengths, and one that was not."""
    folder = tmp_path_factory.mktemp("lengths")
    noisy_vectors(folder / "vectors.npz", 32)
    for name, lengths in (("run", {"loss.matryoshka": [4, 2]}), ("plain", {})):
        settings = {**SMALL, "loss.name": "arcface", **lengths}
        training.train(str(folder / "vectors.npz"), folder / name, settings=settings)
    return folder


@pytest.fixture
def there(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


# --- the recipe


def recipe_of(*sets):
    return read(None, ["encoder.name=mlp", "encoder.dim=8", "encoder.normalize=true", *sets])


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("[2, 4]", r"loss.matryoshka must be whole numbers >= 1, strictly decreasing"),
        ("[4, 4]", r"strictly decreasing, as \[128, 64, 32, 16\], got \[4, 4\]"),
        ("[4, 0]", r"whole numbers >= 1"),
        ("[]", r"whole numbers >= 1"),
        ("[16, 4]", r"loss.matryoshka must be at most the 8 dimensions of encoder.dim, got \[16, 4\]"),
        ("[8]", r"loss.matryoshka would have no effect: 8 is the full length"),
        ("[4.5]", r"loss.matryoshka must be .*, got \[4.5\]"),
        ("4", r"loss.matryoshka must be .*, got 4"),
        ("short", r"loss.matryoshka must be .*, got 'short'"),
    ],
)
def test_bad_lengths_are_one_sentence(value, sentence, there, tmp_path):
    settings = [*(f"{key}={json.dumps(v)}" for key, v in SMALL.items()), f"loss.matryoshka={value}"]
    with pytest.raises(ValueError, match=sentence):
        training.train("vectors.npz", tmp_path / "run", settings=settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["loss.matryoshka_weights=[1]"], r"loss.matryoshka_weights would have no effect: loss.matryoshka is not set"),
        (["loss.matryoshka=[4]", "loss.matryoshka_weights=[1]"], r"one entry per length \[8, 4\], got \[1\]"),
        (["loss.matryoshka=[4]", "loss.matryoshka_weights=[1, 0]"], r"loss.matryoshka_weights must be > 0, got 0"),
        (["loss.matryoshka=[4]", "loss.matryoshka_weights=all"], r"loss.matryoshka_weights must be .*, got 'all'"),
    ],
)
def test_bad_weights_are_one_sentence(sets, sentence, there, tmp_path):
    settings = [*(f"{key}={json.dumps(v)}" for key, v in SMALL.items()), *sets]
    with pytest.raises(ValueError, match=sentence):
        training.train("vectors.npz", tmp_path / "run", settings=settings)
    assert not (tmp_path / "run").exists()


def test_the_full_length_is_added_and_the_key_is_known_without_a_name():
    assert matryoshka_dims(recipe_of("loss.matryoshka=[4, 2]"), 8) == (8, 4, 2)
    assert matryoshka_dims(recipe_of("loss.matryoshka=[8, 2]"), 8) == (8, 2)
    assert matryoshka_dims(recipe_of("loss.matryoshka=none"), 8) is None and matryoshka_dims(recipe_of(), 8) is None
    check_keys(recipe_of("loss.matryoshka=[4]"))
    with pytest.raises(ValueError, match='did you mean "matryoshka"'):
        check_keys(recipe_of("loss.matroshka=[4]"))


def test_the_loss_of_a_recipe():
    loss = build_loss(recipe_of("loss.name=arcface", "loss.matryoshka=[4]"), 5, 8, 0)
    assert isinstance(loss, losses.MatryoshkaLoss) and loss.dims == (8, 4) and loss.normalize
    assert loss.weights == (1, 0.5), "the share of the full length"
    weighted = recipe_of("loss.name=arcface", "loss.matryoshka=[4]", "loss.matryoshka_weights=[1, 2]")
    assert build_loss(weighted, 5, 8, 0).weights == (1, 2)
    free = recipe_of("loss.name=center", "loss.matryoshka=[4]", "encoder.normalize=false")
    assert not build_loss(free, 5, 8, 0).normalize
    memory = build_loss(recipe_of("loss.name=supcon", "loss.matryoshka=[4]", "memory.size=9"), 5, 8, 0)
    assert isinstance(memory, CrossBatchMemory) and isinstance(memory.loss, losses.MatryoshkaLoss)
    with pytest.raises(ValueError, match=r"memory\.size needs a loss that takes references"):
        build_loss(recipe_of("loss.name=arcface", "loss.matryoshka=[4]", "memory.size=9"), 5, 8, 0)
    plain = build_loss(recipe_of("loss.name=arcface"), 5, 8, 0)
    assert torch.equal(plain.weight, loss.loss.weight), "the same start with and without"


def test_a_run_with_a_memory_a_chunk_and_items_learns(there, tmp_path):
    settings = {**SMALL, "loss.name": "margin", "loss.num_items": "all", "loss.matryoshka": [4]}
    settings |= {"memory.size": 32, "training.chunk": 5, "training.keep_start": False}
    outcome = training.train("vectors.npz", tmp_path / "run", settings=settings, report=False)
    assert set(outcome.results["lengths"]) == {"8", "4"}


def trained(rank, size, folder, name, *sets):
    settings = [*(f"{key}={json.dumps(value)}" for key, value in SMALL.items()), "training.log_steps=1", *sets]
    training.train(f"{folder}/vectors.npz", f"{folder}/{name}", settings=settings, report=False)


@pytest.mark.slow
@pytest.mark.parametrize("sets", [("loss.name=adacos",), ("loss.name=arcface", "loss.shard=true")], ids=str)
def test_two_ranks_train_as_one(sets, home):
    lengths = "loss.matryoshka=[4, 2]"
    name = re.sub(r"\W", "", "".join(sets))
    trained(0, 1, home, f"{name}-1", lengths, *[s for s in sets if "shard" not in s])
    worlds.run(2, trained, str(home), f"{name}-2", lengths, *sets)
    curves = []
    for size in (1, 2):
        lines = [json.loads(line) for line in (home / f"{name}-{size}" / "metrics.jsonl").read_text().splitlines()]
        curves.append([line["loss"] for line in lines if line["event"] == "step"])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4)


# --- results and report


def test_results_and_report_have_every_length(there):
    results = json.loads((there / "run" / "results.json").read_text())
    assert [*results["lengths"]] == ["8", "4", "2"]
    assert results["lengths"]["8"] == results["test"]["trained"]
    embedded = training.embed_source("run", dim=2, device="cpu")
    metrics = evaluation.retrieval(embedded.embeddings, torch.from_numpy(embedded.labels), ks=(1,), interval=True)
    for name in ("recall@1", "map@r"):
        figure = results["lengths"]["2"][name]
        assert figure["value"] == pytest.approx(metrics[name])
        assert (figure["low"], figure["high"]) == pytest.approx(metrics.intervals[name])
    page = (there / "run" / "report.html").read_text(encoding="utf-8")
    section = page[page.index('<section id="lengths"') : page.index('<section id="retrieval"')]
    assert re.findall(r'<th scope="row">(\d+)</th>', section) == ["8", "4", "2"]
    assert (
        "keeps of MAP@R" in section and section.count("<svg") == 4 and "100.0\u202f%" in section.replace(" ", "\u202f")
    )
    assert 'id="lengths"' not in (there / "plain" / "report.html").read_text(encoding="utf-8")
    assert "lengths" not in json.loads((there / "plain" / "results.json").read_text())


# --- a shorter encoder


@pytest.mark.parametrize("dim", [8, None])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_shortened_encoder_gives_the_first_dimensions(dim, normalize):
    encoder = models.build("mlp", features=6, hidden=[8], dim=dim, normalize=normalize).eval()
    x = torch.randn(5, 6)
    wanted = encoder(x)[:, :3]
    short = encoder.shorten(3)
    assert short is encoder and short.dim == 3 and short.settings["dim"] == 3
    torch.testing.assert_close(short(x), distances.unit(wanted) if normalize else wanted, rtol=0, atol=1e-6)
    for wrong in (0, 4, 2.5):
        with pytest.raises((TypeError, ValueError), match="dim must be"):
            short.shorten(wrong)


def test_a_shortened_encoder_is_saved_as_a_plain_one(tmp_path):
    encoder = models.build("mlp", features=6, hidden=[8], dim=8).eval().shorten(3)
    models.save(encoder, tmp_path)
    x = torch.randn(5, 6)
    assert torch.equal(models.load(tmp_path)[0](x), encoder(x))


# --- embed, evaluate, export


def test_embed(there, tmp_path):
    short = output_of(
        run("embed", "run", "vectors.npz", "--dim", 4, "--out", tmp_path / "short.npz", "--device", "cpu")
    )
    assert "256 × 4" in short
    run("embed", "run", "vectors.npz", "--out", tmp_path / "full.npz", "--device", "cpu")
    full, short = (np.load(tmp_path / f"{name}.npz")["embeddings"] for name in ("full", "short"))
    cut = full[:, :4] / np.linalg.norm(full[:, :4], axis=1, keepdims=True)
    np.testing.assert_allclose(short, cut, atol=1e-6)
    same = output_of(run("embed", "run", "vectors.npz", "--dim", 8, "--out", tmp_path / "same.npz", "--device", "cpu"))
    assert "256 × 8" in same and np.array_equal(np.load(tmp_path / "same.npz")["embeddings"], full)


@pytest.mark.parametrize(
    ("folder", "dim", "sentence"),
    [
        ("run", 3, "dim must be a length that run was trained for, 8, 4, 2, got 3"),
        ("run", 0, "dim must be >= 1, got 0"),
        ("plain", 4, "dim must be left out for plain, got 4: it was not trained for short embeddings"),
    ],
)
def test_other_lengths_are_refused_where_embeddings_are_put_to_use(folder, dim, sentence, there, tmp_path):
    for command in (
        ("embed", folder, "vectors.npz", "--out", tmp_path / "out.npz"),
        ("enrol", folder, "vectors.npz", "--gallery", tmp_path / "new.gallery"),
        ("export", folder, "--onnx", "--out", tmp_path / "out.onnx"),
        ("gallery", "calibrate", folder),
    ):
        result = separate_runner().invoke(app, [str(a) for a in (*command, "--dim", dim)])
        if command[0] == "export" and result.stderr.startswith("ONNX export needs"):
            continue
        assert result.exit_code == 2 and sentence in " ".join(result.stderr.split()), result.stderr
    assert not [*tmp_path.iterdir()]


def test_evaluate_measures_any_length_and_says_if_it_was_not_trained_for(there):
    for folder, dim, noted in (("run", 4, False), ("run", 3, True), ("plain", 4, True)):
        result = separate_runner().invoke(app, ["evaluate", folder, "--dim", str(dim), "--device", "cpu"])
        assert result.exit_code == 0 and f"× {dim}" in result.stdout
        assert (f"{folder} was not trained for {dim} dimensions" in result.stderr) == noted
    assert "dim must be <= 8" in output_of(run("evaluate", "plain", "--dim", 9), 2)
    assert "--dim: for the folder of a run, got a file" in output_of(run("evaluate", "vectors.npz", "--dim", 4), 2)


def test_export_is_the_short_encoder(there, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        pytest.skip("the exporter of an older torch")
    training.export_onnx("run", tmp_path / "model.onnx", dim=4)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    rows = np.load("vectors.npz")["embeddings"][:9]
    (got,) = session.run(None, {"input": rows})
    encoder, _ = models.load("run")
    wanted = distances.unit(encoder(torch.from_numpy(rows)).detach()[:, :4])
    assert got.shape == (9, 4) and np.abs(got - wanted.numpy()).max() < 1e-6
    facts = session.get_modelmeta().custom_metadata_map
    assert facts["nearkin.dim"] == "4" and facts["nearkin.fingerprint"] == encoder_info("run", 4).fingerprint
    assert facts["nearkin.fingerprint"] != encoder_info("run").fingerprint == encoder_info("run", 8).fingerprint


# --- the gallery


def test_a_gallery_knows_its_length(there, tmp_path):
    place = tmp_path / "short.gallery"
    output_of(run("enrol", "run", "vectors.npz", "--gallery", place, "--dim", 4, "--device", "cpu"))
    rows = np.load("vectors.npz")["embeddings"]
    with Gallery.open(place, "run", device="cpu") as opened:  # nobody says the length
        assert opened.dim == 4 and opened.fingerprint == encoder_info("run", 4).fingerprint
        assert opened.search(rows[7], 1)[0].similarity == pytest.approx(1, abs=1e-6)
    again = output_of(run("enrol", "run", "vectors.npz", "--gallery", place, "--device", "cpu"))
    assert "0 enrolled, 256 already enrolled" in again
    with Gallery.open(place) as opened, pytest.raises(ValueError, match=r"vectors must have 4 dimensions .* got 8"):
        opened.search(np.ones(8, np.float32))
    for options, sentence in (
        ({"run": "run", "dim": 2}, "has 4 dimensions, dim=2 was asked for"),
        ({"run": "plain"}, "was made with another encoder"),
        ({"run": "plain", "dim": 4}, "dim must be left out for plain, got 4"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Gallery.open(place, device="cpu", **options)
    full = tmp_path / "full.gallery"
    output_of(run("enrol", "run", "vectors.npz", "--gallery", full, "--device", "cpu"))
    with Gallery.open(full, "run", device="cpu") as opened:
        assert opened.dim == 8
    np.save(tmp_path / "item.npy", rows[3])
    assert "1.000" in output_of(run("search", tmp_path / "item.npy", "--gallery", place, "--k", 1, "--device", "cpu"))


def test_each_length_has_its_calibration(there, tmp_path):
    with Gallery.open(tmp_path / "short.gallery", "run", dim=4, device="cpu") as opened:
        assert "nearkin gallery calibrate run --dim 4" in opened._note and not opened.stats()["calibrated"]
    output_of(run("gallery", "calibrate", "run", "--dim", 4, "--part", "train", "--device", "cpu"))
    written = json.loads((there / "run" / "calibration-4.json").read_text())
    assert (
        written["encoder"] == encoder_info("run", 4).fingerprint and not (there / "run" / "calibration.json").exists()
    )
    with Gallery.open(tmp_path / "short.gallery", "run", device="cpu") as opened:
        assert opened._calibrator is not None
    with Gallery.open(tmp_path / "short.gallery") as opened:
        assert opened.stats()["calibrated"]
    with Gallery.open(tmp_path / "full.gallery", "run", device="cpu") as opened:
        assert opened._calibrator is None and not opened.stats()["calibrated"]


def enrolled(rank, world, home, place):
    from nearkin import dist

    with dist.ProcessGroup() as ranks:
        if rank:
            return list(gallery.enrol_source(Encoding(f"{home}/run", "cpu"), f"{home}/vectors.npz", group=ranks))
        with Gallery.open(place, f"{home}/run", device="cpu") as opened:
            return list(gallery.enrol_source(opened, f"{home}/vectors.npz", group=ranks))


@pytest.mark.slow
def test_ranks_that_help_to_enrol_learn_the_length(home, tmp_path):
    place = str(tmp_path / "short.gallery")
    Gallery.open(place, home / "run", dim=2, device="cpu").close()
    assert worlds.run(2, enrolled, str(home), place) == [[256, 0, 0, []]] * 2
    with Gallery.open(place, home / "run", device="cpu") as opened:
        assert opened.dim == 2 and opened.stats()["rows"] == 256
