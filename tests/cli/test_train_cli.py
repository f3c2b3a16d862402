"""The verbs around training, as a user types them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nearkin
from commands import output_of, photos, run
from nearkin.cli.compare import ComparisonCallback
from nearkin.cli.screen import ProgressCallback, results_table
from nearkin.gallery.items import encoder_info

QUICK = ["training.epochs=2", "training.batches=3", "encoder.width=4", "encoder.dim=8", "sampler.batch=8"]
QUICK += ["sampler.per_class=2", "data.size=16", "data.stored=16", "training.workers=0"]
CONTENDERS = ("baseline", "untrained", "trained")
SETS = [part for text in QUICK for part in ("--set", text)]
UNSTORED = [text for text in QUICK if not text.startswith("data.stored")]


@pytest.fixture(autouse=True)
def _own_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def test_a_folder_becomes_a_run_with_a_report():
    photos(Path("photos"))
    out = output_of(run("train", "photos/", *SETS))
    assert "60 items, 10 classes" in out and "epoch   2/2" in out
    assert "pixels" in out and "untrained" in out and "trained" in out and "map@r" in out
    metadata = re.findall(
        r"epoch   ([12])/2  loss (\S+)  map@r \d+\.\d %  recall@1 \d+\.\d %  r_precision \d+\.\d %  ", out
    )
    lines = map(json.loads, Path("runs/photos/metrics.jsonl").read_text().splitlines())
    losses = [f"{line['loss']:.4g}" for line in lines if line["event"] == "epoch"]
    assert metadata == [("1", losses[0]), ("2", losses[1])] and losses[0] != losses[1], (
        "each epoch its own, in per cent"
    )
    sentence = json.loads(Path("runs/photos/results.json").read_text())["verdict"]["sentence"]
    assert sentence in out
    folder = Path("runs/photos")
    assert f"report: {folder / 'report.html'}" in out
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") or page.lower().startswith("<!doctype")
    assert "Content-Security-Policy" in page and "class" in page
    assert sentence in page.replace("\u202f%", " %")
    again = output_of(run("train", "photos", *SETS, "--quiet"))
    assert again.strip() == "runs/photos-2", "an earlier run is never overwritten"


def test_json_is_nothing_but_json():
    photos(Path("photos"))
    printed = json.loads(output_of(run("train", "photos", *SETS, "--json", "--out", "run")))
    assert printed["test"]["trained"]["recall@1"]["value"] >= 0
    assert printed == json.loads(Path("run/results.json").read_text())


def test_a_run_is_evaluated_embedded_and_resumed():
    photos(Path("photos"))
    output_of(run("train", "photos", *SETS, "--quiet", "--out", "run"))
    results = json.loads(Path("run/results.json").read_text())
    out = output_of(run("evaluate", "run", "--json", "found.json"))
    assert "map@r" in out
    printed = json.loads(Path("found.json").read_text())["results"]["retrieval"]
    assert printed["map@r"] == pytest.approx(results["test"]["trained"]["map@r"]["value"], abs=1e-9)
    for name in ("all.npz", "all.safetensors", "all.parquet"):
        assert "60 × 8" in output_of(run("embed", "run", "photos", "--out", name))
        assert "60 × 8" in output_of(run("evaluate", name))
    assert "× 8" in output_of(run("embed", "run", "photos", "--part", "test", "--views", "4", "--out", "test.npz"))
    with np.load("test.npz") as archive:
        assert len(archive["embeddings"]) == results["items"]["test"] and archive["labels"].dtype.kind == "U"
        np.testing.assert_allclose(np.linalg.norm(archive["embeddings"], axis=1), 1, atol=1e-5)
    other = photos(Path("other"), classes=3)
    assert "18 × 8" in output_of(run("evaluate", "run", other))
    before = Path("run/model.safetensors").read_bytes()
    output_of(run("train", "--resume", "run"))
    assert Path("run/model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_export():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        pytest.skip("ONNX export needs torch 2.11")
    photos(Path("photos"))
    output_of(
        run("train", "photos", *[part for text in UNSTORED for part in ("--set", text)], "--quiet", "--out", "run")
    )
    # As a process of its own: the exporter warns about its own dependencies.
    process = subprocess.run(
        [sys.executable, "-m", "nearkin", "export", "run", "--onnx"], capture_output=True, text=True, env=os.environ
    )
    assert process.returncode == 0, process.stderr
    assert "nowhere does not exist" in output_of(run("export", "run", "--onnx", "--out", "nowhere/model.onnx"), 2)
    assert "equal to the run's encoder within" in process.stdout and Path("run/model.onnx").stat().st_size > 1000
    _embed_by_metadata_alone()


def _embed_by_metadata_alone():
    """The ONNX file says how pictures are prepared: with it, Pillow and onnxruntime alone give what `embed` gives."""
    import onnx
    import onnxruntime

    wide = np.random.default_rng(1).integers(0, 256, (4, 22, 37, 3), dtype=np.uint8)
    Path("wide").mkdir()
    for i, pixels in enumerate(wide):
        Image.fromarray(pixels).save(f"wide/{i}.png")
    output_of(run("embed", "run", "wide", "--out", "wide.npz"))
    metadata = {one.key: one.value for one in onnx.load("run/model.onnx").metadata_props}
    assert metadata["nearkin.fingerprint"] == encoder_info("run").fingerprint
    assert (
        metadata["nearkin.kind"] == "pictures"
        and metadata["nearkin.fit"] == "crop"
        and metadata["nearkin.layout"] == "NCHW"
    )
    assert metadata["nearkin.channel_order"] == "RGB" and metadata["nearkin.value_range"] == "0 to 1 (pixel / 255)"
    assert metadata["nearkin.input_shape"] == "rows,3,16,16" and (
        metadata["nearkin.dim"],
        metadata["nearkin.size"],
    ) == ("8", "16")
    assert len(json.loads(metadata["nearkin.mean"])) == len(json.loads(metadata["nearkin.std"])) == 3
    assert "inside the graph" in metadata["nearkin.mean_and_std"] and metadata["nearkin.unit_length"] == "true"
    side, crop, size = (int(metadata[f"nearkin.{key}"]) for key in ("resize", "crop", "size"))
    assert (side, crop) == (18, size), "no second resize: 18 px are stored for 16, and 7/8 of them are not more than 16"
    seen = []
    for i in range(4):
        image = Image.open(f"wide/{i}.png").convert("RGB")
        middle = ((37 - 22) / 2, 0, (37 + 22) / 2, 22)
        square = np.asarray(image.resize((side, side), Image.Resampling.LANCZOS, middle))
        start = (side - crop) // 2
        seen.append(square[start : start + crop, start : start + crop].transpose(2, 0, 1) / np.float32(255))
    session = onnxruntime.InferenceSession("run/model.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(["embedding"], {"input": np.stack(seen).astype(np.float32)})
    with np.load("wide.npz") as archive:
        np.testing.assert_allclose(got, archive["embeddings"], atol=1e-5)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["train", "nowhere/"], "nowhere"),
        (["train", "gylphs"], 'did you mean "glyphs"?'),
        (["train", "empty"], "empty"),
        (["train", "one"], "at least"),
        (["train", "single"], "single image"),
        (["train", "broken"], "cannot be used"),
        (["train", "photos", "--loss", "arcfase"], 'did you mean "arcface"?'),
        (["train", "photos", "--encoder", "smal-cnn"], 'did you mean "small-cnn"?'),
        (["train", "photos", "--loss", "supcon", "--set", "loss.tempratur=1"], 'did you mean "temperature"?'),
        (["train", "photos", "--set", "training.epochs=many"], "must be a whole number"),
        (["train", "photos", "--recipe", "none.toml"], "there is no such recipe"),
        (["train", "photos", "--out", "photos"], "is not empty"),
        (["train", "photos", "--out", "photos/class0/0.png/run"], "0.png is no folder"),
        (["train", "photos", "--set", "encoder.size=32"], 'in a recipe it is "data.size"'),
        (["train", "photos", "--set", "encoder.width=0"], "encoder.width must be >= 1"),
        (["train", "photos", "--set", "augment.flip=2"], "augment.flip must be <= 1"),
        (["train", "--resume", "photos"], "not a run"),
        (["train", "photos", "--resume", "photos"], "leave all other choices out"),
        (["embed", "photos", "photos", "--out", "x.npz"], "not a finished run"),
        (["embed", "photos", "photos", "--out", "x.txt"], ".npz, .safetensors, .parquet"),
        (["export", "photos"], "--onnx"),
        (["export", "photos", "--onnx"], "not a finished run"),
        (["evaluate", "photos"], "photos"),
        (["tran"], 'did you mean "train"?'),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    photos(Path("photos"))
    Path("empty").mkdir()
    photos(Path("one"), classes=1)
    photos(Path("single"), classes=8, each=1)
    photos(Path("broken"), classes=4, each=3)
    for path in Path("broken").rglob("*.png"):
        path.write_bytes(b"not a picture")
    before = sorted(p for p in Path(".").rglob("*") if "cache" not in p.parts)
    out = output_of(run(*arguments), 2)
    lines = [line for line in out.strip().splitlines() if line.strip()]
    assert sentence in lines[-1], out
    assert "Traceback" not in out
    assert sorted(p for p in Path(".").rglob("*") if "cache" not in p.parts) == before, "nothing is left behind"


def test_a_missing_extra_is_one_sentence(monkeypatch):
    photos(Path("photos"))
    monkeypatch.setitem(sys.modules, "timm", None)
    out = output_of(run("train", "photos", "--encoder", "timm:resnet18"), 2)
    assert "timm:resnet18 needs timm: pip install 'nearkin[vision]'" in out.splitlines()[-1]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_outside_of_the_loop(number, code, monkeypatch):
    """Before there is a run nothing was written; after the training it can be measured again."""
    photos(Path("photos"))
    send = lambda *_, **__: os.kill(os.getpid(), number)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("nearkin.training.run.prepare", send)
        assert "interrupted; nothing was written" in output_of(run("train", "photos", *SETS, "--out", "run"), code)
    assert not Path("run").exists()
    with monkeypatch.context() as patch:
        patch.setattr("nearkin.training.final_test.full_metrics", send)
        out = output_of(run("train", "photos", *SETS, "--out", "run"), code)
    assert "the run is saved; resume it with nearkin train --resume run" in out
    out = output_of(run("train", "--resume", "run"))
    assert "training was finished at step 6; testing its best weights again" in out


def test_a_narrow_screen_cuts_no_figure(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "72")
    figure = {"value": 1.0, "low": 1.0, "high": 1.0}
    names = ("label_distance@1", "label_distance@10", "recall@1")
    results_table({"baseline": "pixels", "test": dict.fromkeys(CONTENDERS, dict.fromkeys(names, figure))})
    out = capsys.readouterr().out
    assert "…" not in out and "label_distance@10" in out and out.count("(100.0–100.0)") == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission():
    folder = photos(Path("photos"))
    folder.chmod(0)
    try:
        assert "photos" in output_of(run("train", "photos"), 2)
    finally:
        folder.chmod(0o755)


def test_unreadable_files_are_named_or_skipped():
    folder = photos(Path("photos"))
    (folder / "class3" / "0.png").write_bytes(b"oops")
    out = output_of(run("train", "photos", *SETS), 2)
    assert "class3/0.png" in out and "--skip-unreadable" in out
    out = output_of(run("train", "photos", *SETS, "--skip-unreadable", "--out", "run"))
    assert "class3/0.png" in out and (Path("run") / "report.html").exists()


def test_lists():
    assert "arcface" in output_of(run("losses")) and "margin=0.5" in output_of(run("losses"))
    assert "small-cnn" in output_of(run("encoders")) and "cub200" in output_of(run("sources"))
    for verb in ("losses", "encoders", "sources"):
        assert len(json.loads(output_of(run(verb, "--json")))) >= 5


def test_help_shows_examples():
    out = output_of(run("train", "--help"))
    assert "nearkin train photos/" in out and "--resume" in out
    named = re.findall(r"recipes/[\w-]+\.toml", out)
    assert named and all((Path(__file__).parents[2] / name).is_file() for name in named)


# --- kill -9: a few here, many in studies/kill_and_resume.py


def command(*arguments):
    return [sys.executable, "-m", "nearkin", *map(str, arguments)]


@pytest.mark.slow
@pytest.mark.parametrize("workers, at", [(0, 3), (2, 7)])
def test_kill_and_resume(workers, at):
    """Killed as soon as a given step is in the log; resumed; the weights are those of the run that was not."""
    photos(Path("photos"))
    sets = [
        *SETS,
        "--set",
        "training.epochs=4",
        "--set",
        "training.log_steps=1",
        "--set",
        "training.save_minutes=0.0001",
    ]
    sets += ["--set", f"training.workers={workers}", "--set", "training.patience=9"]
    output_of(run("train", "photos", *sets, "--quiet", "--out", "whole"))
    process = subprocess.Popen(
        command("train", "photos", *sets, "--quiet", "--out", "run"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    log = Path("run/metrics.jsonl")
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        if log.exists() and len(log.read_text().splitlines()) >= at:
            break
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not Path("run/results.json").exists(), "it was still at work"
    output_of(run("train", "--resume", "run", "--quiet"))
    assert Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    assert not list(Path("run/checkpoints").glob(".*")), "half-written files are gone"


def test_a_table_of_pictures_with_targets():
    """Continuous labels: the log-ratio loss, its sampler, and graded figures, without being asked for."""
    folder = photos(Path("photos"), classes=8)
    lines = [f"{path},{int(path.parent.name[5:]) + int(path.stem) / 10}" for path in sorted(folder.rglob("*.png"))]
    Path("poses.csv").write_text("path,target\n" + "\n".join(lines) + "\n")
    sets = [part for text in QUICK if "per_class" not in text for part in ("--set", text)]
    out = output_of(run("train", "poses.csv", *sets, "--out", "run"))
    assert "logratio, label-neighbours" in out and "ndcg@10" in out
    assert "ndcg@10" in output_of(run("evaluate", "run"))
    assert Path("run/report.html").stat().st_size > 10_000


@pytest.mark.parametrize("callback", [ProgressCallback, ComparisonCallback])
def test_every_event_that_the_bars_show_is_sent(callback):
    """A handler of an event that nobody sends any more would be a bar that stands still."""
    source = Path(nearkin.__file__).parent
    sent = {name for path in source.rglob("*.py") for name in re.findall(r'"event": "(\w+)"', path.read_text("utf-8"))}
    handled = {name.removeprefix("on_") for name in vars(callback) if name.startswith("on_")}
    assert len(handled) > 5 and handled <= sent, handled - sent


def burst_photos(folder, classes=10):
    """Six bursts of two pictures per class."""
    rng = np.random.default_rng(0)
    for c in range(classes):
        (folder / f"class{c}").mkdir(parents=True)
        for burst in range(6):
            pixels = rng.integers(0, 255, (16, 16, 3)).astype(np.uint8)
            pixels[4:12, 4 : 5 + c] = 25 * c
            for copy in range(2):
                Image.fromarray(pixels + np.uint8(copy)).save(folder / f"class{c}" / f"c{c}b{burst}_{copy}.png")


def test_groups_from_file_names_through_all_verbs():
    burst_photos(Path("photos"))
    out = output_of(run("train", "photos", *SETS, "--group-pattern", "{group}_*", "--out", "run"))
    results = json.loads(Path("run/results.json").read_text())
    assert "120 items, 60 groups, 10 classes" in out and "pairs of the same class and group are left out" in out
    assert "minp" in out and results["groups"]["pairs_left_out"] == results["groups"]["test"]
    assert 'group_pattern = "{group}_*"' in Path("run/recipe.toml").read_text()
    grouped = output_of(run("evaluate", "run", "--json", "grouped.json"))
    assert "groups" in grouped and "minp" in grouped
    printed = json.loads(Path("grouped.json").read_text())
    assert printed["groups"] == results["groups"]["test"]
    for name in ("map@r", "minp", "recall@1"):
        assert printed["results"]["retrieval"][name] == pytest.approx(results["test"]["trained"][name]["value"])
    output_of(run("embed", "run", "photos", "--part", "test", "--out", "test.npz"))
    output_of(run("evaluate", "test.npz", "--json", "file.json"))
    assert json.loads(Path("file.json").read_text())["results"]["retrieval"] == printed["results"]["retrieval"]
    output_of(run("evaluate", "test.npz", "--group-column", "none", "--json", "plain.json"))
    plain = json.loads(Path("plain.json").read_text())
    assert plain["groups"] is None and "minp" not in plain["results"]["retrieval"]
    out = output_of(
        run("evaluate", "run", "photos", "--group-pattern", "{group}_*", "--verification", "--clustering", "--one-shot",
            "--ways", "5", "--json", "all.json")
    )  # fmt: skip
    everything = json.loads(Path("all.json").read_text())
    assert everything["results"]["verification"]["left_out"] == 60 == everything["groups"]
    assert everything["notes"] == ["groups are not used by --clustering: all pairs count there."]


def test_groups_beside_embeddings_and_what_is_refused():
    rng = np.random.default_rng(0)
    np.save("x.npy", rng.normal(size=(40, 4)).astype(np.float32))
    np.save("y.npy", np.repeat(np.arange(10), 4))
    Path("g.csv").write_text("\n".join(f"burst {i // 2}" for i in range(40)))
    command = ["evaluate", "x.npy", "--labels", "y.npy", "--groups", "g.csv"]
    assert "20 groups" in output_of(run(*command))
    np.savez("gallery.npz", embeddings=rng.normal(size=(40, 4)).astype(np.float32), labels=np.repeat(np.arange(10), 4))
    assert "20 groups" in output_of(run(*command, "--gallery", "gallery.npz", "--gallery-groups", "g.csv"))
    for words, sentence in (
        ((*command, "--gallery", "gallery.npz"), "gallery.npz: it has no groups, the other set has"),
        ((*command, "--gallery-groups", "g.csv"), "--gallery-groups need --gallery FILE"),
        ((*command, "--group-column", "camera"), "--groups FILE excludes --group-pattern and --group-column"),
        (("evaluate", "x.npy", "--labels", "y.npy", "--group-pattern", "{group}"), "--group-pattern is for the folder"),
        (("evaluate", "gallery.npz", "--group-column", "camera"), 'it has no entry "camera" for group_column'),
        (("train", "gallery.npz", "--group-pattern", "row {group}x"), 'data.group_pattern "row {group}x" must match'),
        (("compare", "gallery.npz", "--losses", "triplet,supcon", "--group-column", "camera"), 'no entry "camera"'),
    ):
        result = run(*words)
        assert result.exit_code != 0 and sentence in " ".join(result.output.split()), result.output


def test_pictures_without_labels_are_pretrained_on():
    photos(Path("photos"))
    sets = ("--set", "unlabelled.epochs=2", "--set", "unlabelled.batch=8", "--set", "unlabelled.projector=[8]")
    out = output_of(run("train", "photos/", "--unlabelled", "photos/", *sets, *SETS))
    assert "pretraining: vicreg," in out and "pretrained in" in out and "epoch   2/2" in out
    assert re.search(
        r"note: pretrains on \d+ pictures without labels, of which \d+ are those of the training part", out
    )
    assert "files that are also in validation or test are left out" in out
    assert "pretraining" in json.loads(Path("runs/photos/results.json").read_text())
    shape = [part for text in QUICK if not text.startswith(("tra", "sam")) for part in ("--set", text)]
    out = output_of(run("train", "--unlabelled", "photos/", *sets, *shape, "--out", "runs/alone"))
    assert "pretraining only" in out and "nothing was tested: there are no labels" in out
    assert "60 × 8" in output_of(run("embed", "runs/alone", "photos/", "--out", "rows.npz"))
    refused = run("train", "--unlabelled", "photos/", "--loss", "triplet")
    assert refused.exit_code == 2 and "loss.name would have no effect: there is no labelled source" in refused.output
    Path("recipe.toml").write_text('[unlabelled]\nfolder = "photos/"\n', encoding="utf-8")
    refused = run("compare", "photos/", "--losses", "supcon,triplet", "--recipe", "recipe.toml")
    assert refused.exit_code == 2 and "unlabelled.folder cannot be set in a comparison" in refused.output
