"""`nearkin identify` of an item and of a folder, and `nearkin gallery calibrate` of a gallery."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from commands import output_of, photos, run, separate_runner
from nearkin import models
from nearkin.cli import app, identified
from nearkin.gallery import Answered, Candidate, FarStatement, Gallery, Identity, items

LABELS, STRANGERS, DIM = 30, 10, 16


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A gallery of vectors with new ones of another day; a gallery of pictures with its run, and a folder to ask."""
    folder = tmp_path_factory.mktemp("home")
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(LABELS + STRANGERS, DIM))

    def rows(classes, each, noise):
        labels = np.repeat(classes, each)
        return (centres[labels] + noise * draw.normal(size=(len(labels), DIM))).astype(np.float32), labels

    with Gallery.open(folder / "v.gallery", dim=DIM) as gallery:
        vectors, labels = rows(range(LABELS), 6, 0.6)
        gallery.enrol(vectors, [f"rug-{i}" for i in labels], names=[f"row {i}" for i in range(len(labels))])
    vectors, labels = rows(range(LABELS + STRANGERS), 3, 0.9)
    np.savez(folder / "new.npz", embeddings=vectors, labels=np.array([f"rug-{i}" for i in labels]))
    for i, vector in enumerate(vectors):
        np.save(folder / f"{i}.npy", vector)
    encoder = models.build("small-cnn", channels=3, size=16, width=4, dim=8, seed=0)
    preparation = {"kind": "pictures", "size": 16, "stored": 16, "fit": "crop", "channels": 3, "flip": False}
    models.save(encoder, folder / "run", preparation)
    with Gallery.open(folder / "g", folder / "run") as gallery:
        files = sorted(photos(folder / "photos", classes=5, each=4).rglob("*.png"))
        gallery.enrol(files, [file.parent.name for file in files])
    inbox = photos(folder / "inbox", classes=5, each=2, seed=9)
    (inbox / "class1" / "1.png").write_bytes(b"\x89PNG broken")
    (inbox / "empty.jpg").write_bytes(b"")
    (inbox / "notes.txt").write_text("no picture")
    (inbox / "=1+1.png").write_bytes((inbox / "class0" / "0.png").read_bytes())
    (folder / "nothing").mkdir()
    np.save(folder / "cube.npy", np.ones((2, 3, DIM)))
    np.save(folder / "short.npy", np.ones(3))
    return folder


@pytest.fixture(autouse=True)
def _there(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("COLUMNS", "200")


def ask(*words, code=0):
    """stdout and stderr."""
    result = separate_runner().invoke(app, ["identify", *map(str, words)])
    assert result.exit_code == code, result.output + str(result.exception)
    return result.stdout, result.stderr


def percent(share):
    return f"{100 * share:.0f} %"


# ---- one item


def test_each_verdict_has_its_sentence_and_its_reason():
    seen = set()
    with Gallery.open("v.gallery") as gallery:
        for i in range(0, 120, 5):
            answer = gallery.identify(np.load(f"{i}.npy"))
            first, second = answer.candidates[:2]
            right, unknown = (percent(p) for p in (answer.p_right, answer.p_unknown))
            if answer.verdict in seen or min(second.confidence, answer.p_unknown, answer.p_right) < 0.01:
                continue
            seen.add(answer.verdict)
            sentence = {
                "named": f"{first.label}, probably ({right}; unknown {unknown}; "
                f"next {second.label} {percent(second.confidence)})",
                "unsure": f"unsure: {first.label} {right}, unknown {unknown}",
                "unknown": f"unknown {unknown}; nearest {first.label} {right}",
            }[answer.verdict]
            name = f"row {first.id - 1}, similarity {first.similarity:.4f}"
            out, err = ask(f"{i}.npy", "--gallery", "v.gallery")
            assert out == f"{sentence}\nnearest of {first.label}: {name}\n" and err == ""
            document = json.loads(ask(f"{i}.npy", "--gallery", "v.gallery", "--json")[0])
            assert document["verdict"] == answer.verdict and document["label"] == answer.label
            assert document["nearest"] == f"row {first.id - 1}" and document["far"] is None
    assert seen == {"named", "unsure", "unknown"}


def test_what_is_asked_moves_the_answer():
    with Gallery.open("v.gallery") as gallery:
        wanted = gallery.identify(np.load("3.npy"), far=0.2, unknown_prior=0.6, filter={"label": ["rug-1", "rug-2"]})
    words = ["3.npy", "--gallery", "v.gallery", "--filter", "label=rug-1", "--filter", "label=rug-2", "--json"]
    given = json.loads(ask(*words, "--far", 0.2, "--unknown-prior", 0.6)[0])
    assert given["p_right"] == wanted.p_right and given["threshold"] == wanted.threshold and given["prior"] == 0.6
    assert given["far"] == wanted.far._asdict() and {c["label"] for c in given["candidates"]} == {"rug-1", "rug-2"}
    counts = [ask("new.npz", "--gallery", "v.gallery", "--sure", s)[0].splitlines()[-1] for s in (0.5, 0.7, 0.95)]
    named = [int(count.partition(" of 120 named")[0]) for count in counts]
    assert named[0] > named[1] > named[2] > 0


def test_the_share_of_strangers_is_stated_and_what_is_not_proven_said():
    with Gallery.open("v.gallery") as gallery:
        far = gallery.identify(np.load("3.npy"), far=0.1).far
    out, err = ask("3.npy", "--gallery", "v.gallery", "--far", 0.1)
    bound = f"at most {100 * far.at_most:.2g} % with 95 % confidence if strangers are like your labels"
    assert out.endswith(f"\nexpected {100 * far.expected:.2g} % of strangers named; {bound}\n") and err == ""
    out, err = ask("3.npy", "--gallery", "v.gallery", "--far", 0.001)
    assert (
        err == "note: not proven: 30 labels can show 3.2 % at the least; you asked 0.1 %\n" and "expected 3.2 %" in out
    )
    out, err = ask("3.npy", "--gallery", "v.gallery", "--far", 0.05, "--strict", code=2)
    assert err.startswith("far must be a rate that the labels can bound: 30 labels can show") and err.count("\n") == 1
    strict, _ = ask("3.npy", "--gallery", "v.gallery", "--far", 0.2, "--strict")
    at_most = float(strict.partition("at most ")[2].partition(" %")[0])
    assert at_most <= 20 and "expected" in strict


def identity(verdict, right, unknown, far=None):
    label = "ana" if verdict == "named" else None
    candidates = [Candidate("ana", 0.9, right, 1), Candidate("bob", 0.8, 0.001, 2)]
    return Identity(
        label, None, 0.9, 0.1 if far else None, far, candidates, "", verdict=verdict, p_right=right, p_unknown=unknown
    )


def test_a_threshold_that_decides_against_the_odds_says_so(capsys):
    far = FarStatement(0.5, 0.5, 0.926, 12, True)
    for answer, sentence in (
        (identity("named", 0.4, 0.3, far), "ana, above the threshold (40 %; unknown 30 %; next bob < 1 %)"),
        (identity("unknown", 0.6, 0.2, far), "unknown, below the threshold (20 %); nearest ana 60 %"),
    ):
        identified.print_one(Answered("x.jpg", answer, "ana/1.jpg"), False)
        assert capsys.readouterr().out.splitlines() == [
            sentence,
            "nearest of ana: ana/1.jpg, similarity 0.9000",
            "expected 50 % of strangers named; 12 labels are too few to bound it",
        ]
    assert identified.percent(0.999999) == "> 99 %" and identified.percent(1e-9) == "< 1 %"


def test_few_labels_give_a_candidate_and_a_note():
    output_of(run("enrol", "run", "photos/class1", "--label", "one", "--gallery", "few"))
    out, err = ask("inbox/class0/0.png", "--gallery", "few")
    assert (
        out.startswith("unsure: nearest one\nnearest of one: photos/class1/") and "at least 3 labels are needed" in err
    )
    out, err = ask("inbox/class0/0.png", "--gallery", "few", "--far", 0.1)
    assert out.startswith("unsure: nearest one\n") and "expected" not in out and "at least 3 labels are needed" in err
    _, err = ask("inbox/class0/0.png", "--gallery", "few", "--far", 0.1, "--strict", code=2)
    assert "far must be a rate that the labels can bound" in err and err.count("\n") == 1
    out, _ = ask("photos/class1/0.png", "--gallery", "few")
    assert out.startswith("one, probably (> 99 %; unknown < 1 %)\n"), "an enrolled item is known among any number"


@pytest.mark.parametrize(
    "item, sentence",
    [
        ("nosuch.jpg", "nosuch.jpg: cannot be read (No such file or directory)"),
        ("a text", "a text: cannot be read (No such file or directory)"),
        ("", "'': cannot be read (No such file or directory)"),
        ("nothing", "nothing: it holds no files"),
        ("inbox/notes.txt", "inbox/notes.txt is not a picture of a known format"),
        ("inbox/empty.jpg", "inbox/empty.jpg is empty (0 bytes)"),
        ("cube.npy", "cube.npy: must hold one vector, got shape (2, 3, 16)"),
        ("short.npy", "vectors must have 8 dimensions as the gallery has, got 3"),
        ("nosuch.npz", "nosuch.npz: no such"),
        ("new.npz", "the run's encoder takes pictures, the source has the other kind"),
    ],
)
def test_what_is_no_item_is_one_sentence(item, sentence):
    out, err = ask(item, "--gallery", "g", code=2)
    assert sentence in err and err.count("\n") == 1 and out == ""
    answer = json.loads(ask(item, "--gallery", "g", "--json", code=2)[0])
    assert sentence in answer["error"]


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--out", "rows.txt"], "--out must end in .csv or .jsonl, got rows.txt"),
        (["--out", "no/rows.csv"], "no/rows.csv: the folder no does not exist"),
        (["--out", "nothing.csv"], "nothing.csv: is a folder"),
        (["--sure", "0.4"], "sure must be at least 0.5 and below 1, got 0.4"),
        (["--unknown-prior", "1"], "unknown_prior must be > 0 and < 1, got 1"),
        (["--far", "1.5"], "far must be > 0 and < 1, got 1.5"),
        (["--strict"], "strict needs far"),
        (["--filter", "x"], "filter must be KEY=VALUE"),
    ],
)
def test_wrong_settings_are_said_before_anything_is_encoded(monkeypatch, words, sentence):
    Path("nothing.csv").mkdir(exist_ok=True)
    monkeypatch.setattr(items.Encoding, "embed", lambda *_: pytest.fail("a picture was encoded"))
    _, err = ask("inbox", "--gallery", "g", *words, code=2)
    assert sentence in err and err.count("\n") == 1


# ---- a folder


def test_a_folder_is_a_row_per_file_and_the_unreadable_ones_are_rows():
    out, err = ask("inbox", "--gallery", "g")
    lines = [line.split() for line in out.splitlines()]
    rows = {line[0]: line for line in lines if line and line[0].startswith("inbox/")}
    assert len(rows) == 12 and rows["inbox/class1/1.png"][1] == rows["inbox/empty.jpg"][1] == "unreadable"
    assert "is empty (0 bytes)" in out and "is not a picture of a known format" in out
    documents = json.loads(ask("inbox", "--gallery", "g", "--json")[0])
    assert [document["file"] for document in documents] == list(rows)
    assert err == "note: 1 file that are no images, such as notes.txt\n"
    readable = [document for document in documents if document["verdict"] != "unreadable"]
    for document in readable:
        alone = json.loads(ask(document["file"], "--gallery", "g", "--json")[0])
        assert document["candidates"] == [pytest.approx(c, abs=1e-5) for c in alone["candidates"]]
        assert document["verdict"] == alone["verdict"] and document["nearest"] == alone["nearest"]
    unreadable = next(document for document in documents if document["file"] == "inbox/empty.jpg")
    assert unreadable == {
        "file": "inbox/empty.jpg",
        "verdict": "unreadable",
        "label": None,
        "error": "inbox/empty.jpg is empty (0 bytes)",
    }
    assert out.splitlines()[-1].endswith(", 2 unreadable")


def test_the_summary_counts_and_expects():
    documents = json.loads(ask("new.npz", "--gallery", "v.gallery", "--json")[0])
    count = {verdict: sum(d["verdict"] == verdict for d in documents) for verdict in ("named", "unsure", "unknown")}
    wrong = sum(1 - d["p_right"] for d in documents if d["verdict"] == "named")
    assert min(count.values()) > 5 and wrong > 0.1
    out, _ = ask("new.npz", "--gallery", "v.gallery")
    assert out.splitlines()[-1] == (
        f"{count['named']} of 120 named ({wrong:.1f} of them expected to be wrong), {count['unsure']} unsure, "
        f"{count['unknown']} unknown"
    )
    out, err = ask("new.npz", "--gallery", "v.gallery", "--far", 0.001)
    assert out.count("of strangers named") == 1 and err.count("not proven") == 1, "said once for all"


def test_the_unsure_come_first_in_a_review():
    documents = json.loads(ask("new.npz", "--gallery", "v.gallery", "--json", "--review")[0])
    verdicts = [document["verdict"] for document in documents]
    unsure = verdicts.count("unsure")
    assert set(verdicts[:unsure]) == {"unsure"} and len(documents) == 120
    for part in (documents[:unsure], documents[unsure:]):
        certain = [max(document["p_right"], document["p_unknown"]) for document in part]
        assert certain == sorted(certain)
    assert (
        json.loads(ask("inbox", "--gallery", "g", "--json", "--review", "--sure", 0.99)[0])[-1]["verdict"] != "unsure"
    )


def test_rows_are_written_to_a_file(tmp_path):
    out, _ = ask("new.npz", "--gallery", "v.gallery", "--out", tmp_path / "rows.jsonl")
    assert out.splitlines()[0] == f"{tmp_path / 'rows.jsonl'}: 120 rows" and "of 120 named" in out.splitlines()[1]
    documents = json.loads(ask("new.npz", "--gallery", "v.gallery", "--json", "--out", tmp_path / "rows.csv")[0])
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == documents
    with open(tmp_path / "rows.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120
    for row, document in zip(rows, documents, strict=True):
        best, second = document["candidates"][:2]
        assert row["label"] == (document["label"] or "") and row["best"] == best["label"]
        assert float(row["p_right"]) == pytest.approx(document["p_right"], rel=1e-5)
        assert float(row["p_unknown"]) == pytest.approx(document["p_unknown"], rel=1e-5)
        assert (row["next"], row["nearest"]) == (second["label"], document["nearest"])
    assert ask("new.npz", "--gallery", "v.gallery", "--out", tmp_path / "rows.csv", "--quiet") == ("", "")
    ask("3.npy", "--gallery", "v.gallery", "--out", tmp_path / "one.csv")
    assert (tmp_path / "one.csv").read_text().splitlines()[1].startswith("3.npy,")


def test_a_cell_of_a_csv_is_no_formula(tmp_path):
    rows = [Answered(name, identity("named", 0.9, 0.1), f"={name}") for name in ("=a", "+b", "-c", "@d", "\te", "f")]
    identified.write_rows(tmp_path / "rows.csv", rows)
    with open(tmp_path / "rows.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["file"] for row in read] == ["'=a", "'+b", "'-c", "'@d", "'\te", "f"]
    assert {row["nearest"][:2] for row in read} == {"'="}


def test_a_file_that_cannot_be_written_keeps_the_old_one(tmp_path, monkeypatch):
    (tmp_path / "rows.csv").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nearkin.core.files.os.fsync", full)
    _, err = ask("new.npz", "--gallery", "v.gallery", "--out", tmp_path / "rows.csv", code=2)
    assert "rows.csv could not be written (No space left on device)" in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"] and (tmp_path / "rows.csv").read_text() == "old"


def test_encoder_and_gallery_are_opened_once_and_files_encoded_together(monkeypatch):
    opened, batches = [], []
    load, embed = models.load, items.Encoding.embed
    monkeypatch.setattr(models, "load", lambda *words: opened.append(words) or load(*words))
    monkeypatch.setattr(items.Encoding, "embed", lambda self, rows: batches.append(len(rows)) or embed(self, rows))
    monkeypatch.setattr(items.cpu_pool, "BATCH", 64)
    ask("inbox", "--gallery", "g", "--device", "cpu")
    assert len(opened) == 1 and batches == [10]


def test_an_interrupted_folder_writes_nothing(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Gallery, "identify_with_hits", stop)
    _, err = ask("inbox", "--gallery", "g", "--out", tmp_path / "rows.csv", code=130)
    assert err.endswith("interrupted; nothing was written\n") and not list(tmp_path.iterdir())


# ---- gallery calibrate


def calibrated(*words):
    return output_of(run("gallery", "calibrate", *words))


def test_every_kind_of_gallery_learns_from_its_labels():
    out = calibrated("v.gallery")
    assert "v.gallery: 180 items of 30 labels, learned from its own labels" in out and "for verify" not in out
    assert "note: 30 labels can show 3.2 % of strangers named at the least" in out
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines if line and line[0].startswith("0.")] == ["0.5", "0.2", "0.1", "0.05"]
    assert "g: 20 items of 5 labels, learned from its own labels" in calibrated("g")
    assert "–" in calibrated("g"), "a bound that says nothing is not shown"
    assert run("gallery", "calibrate", "g", "--quiet").output == ""


def test_photographs_of_another_day_are_asked_in_place_of_the_own(tmp_path):
    own = json.loads(calibrated("v.gallery", "--json"))
    before = json.loads(ask("100.npy", "--gallery", "v.gallery", "--json")[0])
    out = calibrated("v.gallery", "--with", "new.npz")
    assert "learned from 120 items of another day, 30 of them strangers'" in out
    assert "note: 40 labels can show 2.4 % of strangers" in out, "each stranger is a class"
    after = json.loads(ask("100.npy", "--gallery", "v.gallery", "--json")[0])
    assert after["p_unknown"] != before["p_unknown"]
    assert json.loads(calibrated("v.gallery", "--json")) == own | {"date": own["date"]}


def test_what_is_enrolled_itself_is_asked_without_its_row_and_unreadable_files_are_said():
    out = calibrated("g", "--with", "photos")
    assert "learned from 20 items of another day" in out and "20 of these are enrolled" in out
    out = calibrated("g", "--with", "inbox")
    assert "learned from 9 items of another day" in out and "skipped: inbox/class1/1.png is not a picture" in out
    document = json.loads(calibrated("g", "--with", "inbox", "--json"))
    assert len(document["unreadable"]) == 1 and document["enrolled"] == 0
    calibrated("g")


def test_rows_that_change_make_what_another_day_has_shown_outdated(tmp_path):
    output_of(run("enrol", "run", "photos", "--gallery", tmp_path / "g"))
    calibrated(tmp_path / "g", "--with", "inbox")
    assert "another day" not in output_of(run("enrol", "run", "photos", "--gallery", tmp_path / "g"))
    photos(tmp_path / "more", classes=5, each=1, seed=4)
    out = output_of(run("enrol", "run", tmp_path / "more", "--gallery", tmp_path / "g"))
    sentence = "learned from its own labels, as its rows have changed since photographs of another day were asked"
    assert sentence in out and f"nearkin gallery calibrate {tmp_path / 'g'} --with FOLDER renews it" in out
    assert sentence in ask("inbox/class0/0.png", "--gallery", tmp_path / "g")[1], "each answer says so"
    calibrated(tmp_path / "g")
    assert ask("inbox/class0/0.png", "--gallery", tmp_path / "g")[1] == "", "until it is calibrated"
