"""`nearkin group`, as a user types it."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from calibrations import calibration_by_hand
from commands import output_of, run
from nearkin import gallery as room
from nearkin import models
from nearkin.core.spreadsheet import text_of_cell
from nearkin.gallery import Gallery, GroupEditor, results
from nearkin.gallery.items import encoder_info

KINDS, EACH = 4, 6


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """photos/ without classes, labelled/ with them, vectors.npz, and a run with an untrained encoder."""
    folder = tmp_path_factory.mktemp("home")
    encoder = models.build("small-cnn", channels=1, size=16, width=4, dim=8, seed=0)
    preparation = {"kind": "pictures", "size": 16, "stored": 16, "fit": "crop", "channels": 1, "flip": False}
    models.save(encoder, folder / "run", preparation)
    (folder / "run" / "recipe.toml").write_text('[data]\nsource = "elsewhere"\n')
    (folder / "photos").mkdir()
    for kind in range(KINDS):
        (folder / "labelled" / f"kind {kind}").mkdir(parents=True)
        for n in range(EACH):
            pixels = np.zeros((24, 24), np.uint8)
            pixels[3 + 4 * kind : 7 + 4 * kind, 2:22] = 220
            pixels[2:22, 3 + 5 * kind : 6 + 5 * kind] = 140
            image = Image.fromarray(pixels + np.random.default_rng(n).integers(0, 4, (24, 24), dtype=np.uint8))
            image.save(folder / "photos" / f"<{kind}> {n}.png")
            image.save(folder / "labelled" / f"kind {kind}" / f"{n}.png")
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(8), 5)
    rows = draw.normal(size=(8, 16))[labels] + 0.1 * draw.normal(size=(40, 16))
    np.savez(folder / "vectors.npz", embeddings=rows.astype(np.float32), labels=labels)
    return folder


@pytest.fixture(autouse=True)
def _there(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("NEARKIN_CACHE", str(home / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def table(path):
    with Path(path).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def refused(*arguments):
    result = run("group", *arguments)
    assert result.exit_code == 2
    return result.output


def test_photos_without_classes_become_a_table_and_a_page(home):
    out = output_of(run("group", "photos", "--run", "run", "--out", "photos.csv"))
    assert "4 groups of 24 items, 0 alone; the largest has 6" in out
    rows = table("photos.csv")
    assert list(rows[0]) == ["group", "name", "size", "similarity"]
    assert [row["group"] for row in rows] == sorted(row["group"] for row in rows)
    for number in "1234":
        assert len({row["name"][1] for row in rows if row["group"] == number}) == 1
    page = Path("photos.html").read_text("utf-8")
    assert page.count('<img src="data:image/jpeg;base64,') == 24
    assert "&lt;0&gt; 0.png" in page and "<0> 0.png" not in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)  # nothing is fetched
    assert "Agreement" not in page


def test_files_that_come_and_go_meanwhile_cost_their_thumbnails_only(home, tmp_path, monkeypatch):
    shutil.copytree(home / "photos", tmp_path / "p")
    embed = room.group_source

    def slow(*words, **options):
        """As a folder of many pictures is, while someone tidies it."""
        shutil.copy(tmp_path / "p" / "<0> 1.png", tmp_path / "p" / "new.png")
        groups = embed(*words, **options)
        (tmp_path / "p" / "<0> 0.png").unlink()
        return groups

    monkeypatch.setattr(room, "group_source", slow)
    out = tmp_path / "groups.csv"
    result = run("group", tmp_path / "p", "--run", "run", "--similarity", 0.9, "--out", out)
    assert result.exit_code == 0 and "2 pictures could not be shown" in result.output, result.output
    assert len(table(out)) == KINDS * EACH + 1 and (tmp_path / "groups.html").exists()


def test_no_name_in_a_table_is_a_formula(home, tmp_path):
    """Spreadsheets compute cells that begin with = + - @, a tab or a line break."""
    names = ["=1+1", "+1+1", "-x", "@x", "\tx", "\rx", "'=x", "plain", "\uff1dx", "a\r=1", "-7"]
    for name in names:
        (tmp_path / "p" / name).mkdir(parents=True)
        for n in range(2):
            shutil.copy(home / "photos" / f"<0> {n}.png", tmp_path / "p" / name / f"{n}.png")
    out = tmp_path / "groups.csv"
    assert run("group", tmp_path / "p", "--run", "run", "--similarity", 0.9, "--out", out).exit_code == 0
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert not any(row["name"][0] in "=+-@\t\r\uff1d" for row in rows)
    assert {row["label"] for row in rows if row["label"][0] in "=+-@\t\r\uff1d"} == {"-7"}  # a number
    assert {text_of_cell(row["label"]) for row in rows} == set(names)
    assert {text_of_cell(row["name"]) for row in rows} == {f"{name}/{n}.png" for name in names for n in range(2)}


def test_a_run_without_its_source_groups_by_cosines_and_says_so(home):
    result = run("group", "photos", "--run", "run", "--out", "photos.csv")
    assert "note: the run's own classes are not used, groups are by cosines alone: " in result.output


def test_classes_only_measure_the_result(home):
    out = output_of(run("group", "labelled", "--run", "run", "--out", "labelled.csv"))
    assert re.search(r"B-cubed +1\.000 +1\.000 +1\.000", out)  # 4 classes have no interval
    assert table("labelled.csv")[0]["label"].startswith("kind ")
    assert "Agreement" in Path("labelled.html").read_text("utf-8")


def test_vectors_need_no_run_and_json_is_complete(home):
    summary = json.loads(output_of(run("group", "vectors.npz", "--out", "v.csv", "--json")))
    assert (summary["items"], summary["groups"], summary["alone"]) == (40, 8, 0)
    assert summary["bcubed"]["f"]["value"] == 1.0
    assert summary["bcubed"]["f"]["low"] < 1.0
    plain = json.loads(output_of(run("group", "vectors.npz", "--out", "v.csv", "--json", "--similarity", "0.999999")))
    assert plain["alone"] == 40
    dense = json.loads(output_of(run("group", "vectors.npz", "--out", "v.csv", "--json", "--method", "hdbscan")))
    assert dense["similarity"] is None
    larger = json.loads(output_of(run("group", "vectors.npz", "--out", "v.csv", "--json", "--size", "30")))
    assert larger["groups"] < 8
    one = output_of(run("group", "vectors.npz", "--out", "v.csv", "--method", "components", "--similarity", "-1"))
    assert "1 groups of 40 items" in one


def test_the_calibrated_far_is_the_threshold(home):
    assert "--far needs a calibration: run has no calibration.json" in refused(
        "photos", "--run", "run", "--far", "0.01"
    )
    calibration = {"encoder": encoder_info("run").fingerprint} | calibration_by_hand(
        {0.9: (0.005, 0.9), 0.9999: (0.001, 0.5)}, {0.0: -20, 0.99: -4, 0.999: 9, 1.0: 14}
    )
    Path("run", results.FILE).write_text(json.dumps(calibration))
    for far, threshold in (("0.005", 0.9), ("0.001", 0.9999)):
        out = output_of(run("group", "photos", "--run", "run", "--out", "p.csv", "--json", "--far", far))
        assert json.loads(out)["similarity"] == threshold
    assert "far must be at least" in refused("photos", "--run", "run", "--far", "1e-9")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["vectors.npz", "--far", "0.01"], "far needs the calibration of a run"),
        (["vectors.npz", "--far", "0.01", "--similarity", "0.5"], "give one of them, got both"),
        (["vectors.npz", "--similarity", "2"], "similarity must be between -1 and 1"),
        (["vectors.npz", "--size", "1"], "size must be"),
        (["vectors.npz", "--size", "5", "--similarity", "0.5"], "leave it out with --far or --similarity"),
        (["vectors.npz", "--method", "components"], "--method components needs --similarity"),
        (["vectors.npz", "--method", "hdbscan", "--similarity", "0.5"], "leave --far and --similarity out"),
        (["vectors.npz", "--method", "plda"], "--method plda needs a model of a run's classes: give --run RUN"),
        (["photos", "--run", "run", "--method", "plda"], "the run's own classes are not used"),
        (["vectors.npz", "--method", "plda", "--size", "5"], "leave --far, --similarity and --size out"),
        (["vectors.npz", "--part", "test"], "--part needs --run RUN"),
        (["vectors.npz", "--out", "groups.txt"], "--out must end in .csv, got groups.txt"),
        (["vectors.npz", "--out", "no/groups.csv"], "the folder no does not exist"),
        (["nowhere", "--run", "run"], "nowhere"),
        (["vectors.npz", "--run", "run"], "the run's encoder takes pictures"),
    ],
)
def test_bad_arguments_are_one_sentence(home, arguments, sentence):
    out = refused(*arguments)
    assert sentence in out
    assert len(out.strip().splitlines()) == 1


def test_the_rows_of_a_gallery_are_grouped_as_its_source(home):
    output_of(run("enrol", "run", "labelled", "--gallery", "labelled.db"))
    output_of(run("group", "labelled", "--run", "run", "--out", "folder.csv"))
    out = output_of(run("group", "labelled.db", "--out", "rows.csv"))
    assert "4 groups of 24 items, 0 alone; the largest has 6" in out and "B-cubed" in out
    grouped = [{}, {}]
    for groups, path in zip(grouped, ("folder.csv", "rows.csv"), strict=True):
        for row in table(path):
            groups.setdefault(row["group"], set()).add((Path(row["name"]).name, row["label"]))
    assert sorted(map(sorted, grouped[0].values())) == sorted(map(sorted, grouped[1].values()))
    page = Path("rows.html").read_text("utf-8")
    assert page.count('<img src="data:image/jpeg;base64,') == 24


def test_rows_without_a_label_do_not_count_in_the_agreement(home):
    output_of(run("enrol", "run", "photos", "--label", "unlabelled", "--gallery", "some.db"))
    out = output_of(run("group", "some.db", "--out", "some.csv"))
    assert "4 groups of 24 items" in out and "B-cubed" not in out
    assert list(table("some.csv")[0]) == ["group", "name", "size", "similarity"]


def test_what_a_gallery_has_settled_is_refused(home):
    shutil.copytree("run", "plain", ignore=shutil.ignore_patterns("calibration*"))
    output_of(run("enrol", "plain", "photos", "--label", "any", "--gallery", "settled.db"))
    assert "settled.db: a gallery is embedded already; leave --run" in refused("settled.db", "--run", "run")
    assert "far needs a calibration, and" in refused("settled.db", "--far", "0.01")


@pytest.fixture(scope="module")
def trained(home):
    """A run that has learned from 12 classes of vectors, of which 2 are for validation."""
    draw = np.random.default_rng(1)
    labels = np.repeat(np.arange(16), 12)
    rows = draw.normal(size=(16, 16))[labels] + 0.4 * draw.normal(size=(len(labels), 16))
    np.savez(home / "classes.npz", embeddings=rows.astype(np.float32), labels=labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("NEARKIN_CACHE", str(home / "cache"))
        output_of(run("train", "classes.npz", "--out", "trained", "--epochs", "1", "--set", "training.batches=2"))
    return home / "trained"


def test_a_trained_run_groups_by_the_model_of_its_classes(trained):
    how = ["group", "classes.npz", "--run", "trained", "--part", "test", "--out", "t.csv", "--json"]
    first = json.loads(output_of(run(*how)))
    assert first["method"] == "plda" and first["similarity"] is None and first["notes"] == []
    model = trained / "plda.npz"
    written = model.stat().st_mtime_ns
    assert json.loads(output_of(run(*how))) == first
    assert model.stat().st_mtime_ns == written  # fitted once
    model.write_bytes(b"damaged")
    assert json.loads(output_of(run(*how))) == first
    assert json.loads(output_of(run(*how, "--similarity", "0.5")))["method"] == "average"
    output_of(run("enrol", "trained", "classes.npz", "--gallery", "classes.db"))
    rows = json.loads(output_of(run("group", "classes.db", "--out", "t.csv", "--json")))
    assert rows["method"] == "plda"
    with Gallery.open("classes.db") as gallery:  # and so does the page
        state = GroupEditor(gallery).propose(0, scope="all")
    assert (state.similarity, len(state.groups), state.alone) == (None, rows["groups"], rows["alone"])
    model.unlink()
    assert json.loads(output_of(run("group", "classes.db", "--out", "t.csv", "--json")))["method"] == "average"
    assert "nearkin group SOURCE --run RUN makes it" in refused("classes.db", "--method", "plda")
