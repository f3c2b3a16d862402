"""The command line: what it prints, what it writes, and one sentence for whatever cannot be done."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from nearkin import evaluation
from nearkin.cli import app
from nearkin.evaluation import protocols, report

CLASSES = np.repeat(np.arange(8), 6)
DRAW = np.random.default_rng(0)
CENTRES = DRAW.normal(size=(8, 5))
X = (CENTRES[CLASSES] + 0.8 * DRAW.normal(size=(48, 5))).astype(np.float32)
UNIT = X / np.linalg.norm(X, axis=1, keepdims=True)
NAMES = np.array([f"bird [red] {name}" for name in "hgfedcba"])[CLASSES]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def good(*words):
    found = run(*words)
    assert found.exit_code == 0, found.stderr or found.exception
    return found


def bad(*words, code=2):
    """The one sentence on stderr."""
    found = run(*words)
    assert found.exit_code == code and found.stdout == ""
    assert isinstance(found.exception, SystemExit)
    (line,) = found.stderr.splitlines()
    return line


def values(stdout):
    """{metric: the rest of its line} of a printed table."""
    lines = [line.split() for line in stdout.splitlines() if "@" in line or "_" in line or "%" in line]
    return {word: line[at + 1 :] for line in lines for at, word in enumerate(line) if at < 2}


def names_there(folder):
    return sorted(path.name for path in folder.iterdir())


def test_retrieval_is_printed_and_written(tmp_path):
    np.savez("a.npz", embeddings=UNIT, labels=NAMES)
    found = good("evaluate", "a.npz", "--json", "out.json")
    assert "wrote out.json" in found.stderr and "note" not in found.stderr
    assert found.stdout.splitlines()[0] == "a.npz: 48 × 5, 8 classes"
    written = json.loads((tmp_path / "out.json").read_text())
    expected = evaluation.retrieval(torch.from_numpy(UNIT), torch.from_numpy(7 - CLASSES))
    kept = written["results"]["retrieval"]
    assert kept == {"similarity": "cosine", **expected}
    shown = values(found.stdout)
    assert shown["recall@1"] == [f"{100 * expected['recall@1']:.2f}", "%"]
    assert shown["without_kin"] == ["0"]
    assert written["class_names"][0] == "bird [red] a" and written["embeddings"]["rows"] == 48
    assert names_there(tmp_path) == ["a.npz", "out.json"]


def test_every_protocol_at_once(tmp_path):
    np.savez("a.npz", embeddings=X, labels=NAMES, targets=CENTRES[CLASSES])
    flags = ["--retrieval", "--clustering", "--verification", "--one-shot", "--graded", "--diagnose"]
    more = ["--ways", 5, "--episodes", 20, "--interval", "--ks", "1,3", "--seed", 3, "--json", "out.json"]
    found = good("evaluate", "a.npz", *flags, *more)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert list(results) == list(protocols.PROTOCOLS)
    x, ids = torch.from_numpy(X), torch.from_numpy(7 - CLASSES)
    once = evaluation.one_shot(x, ids, 5, 1, 20, 3)
    assert results["one_shot"]["accuracy"] == once["accuracy"]
    low, high = results["one_shot"]["intervals"]["accuracy"]
    assert 0 <= low <= once["accuracy"] <= high <= 1
    assert results["clustering"]["nmi"] == evaluation.clustering(x, ids, 3)["nmi"]
    expected = evaluation.retrieval(x, ids, ks=(1, 3), interval=True, seed=3)
    assert results["retrieval"]["intervals"]["recall@3"] == list(expected.intervals["recall@3"])
    assert results["graded"]["ndcg@3"] == evaluation.graded(x, torch.from_numpy(CENTRES[CLASSES]), (1, 3))["ndcg@3"]
    assert results["verification"]["tar@far=1e-06"] is None and 1e-6 in results["verification"]["not_measurable"]
    for metric in ("recall@3", "map@r", "nmi", "tar@far=0.1", "accuracy", "spearman", "hubness", "collapsed"):
        assert metric in found.stdout
    assert "bird [red]" in found.stdout and "95 % interval" in found.stdout and "…" not in found.stdout
    assert found.stderr.startswith("note: a.npz: rows have lengths ")


def test_npy_with_labels_and_safetensors_say_the_same(tmp_path):
    np.save("x.npy", X)
    (tmp_path / "y.txt").write_text("\n".join(NAMES))
    save_file({"embeddings": torch.from_numpy(X), "labels": torch.from_numpy(CLASSES)}, "a.safetensors")
    good("evaluate", "x.npy", "--labels", "y.txt", "--json", "one.json")
    good("evaluate", "a.safetensors", "--json", "two.json")
    one, two = (json.loads((tmp_path / name).read_text())["results"] for name in ("one.json", "two.json"))
    assert one == two


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_other_precisions(kind):
    np.savez("a.npz", embeddings=X.astype(kind), labels=CLASSES)
    flags = ["--retrieval", "--clustering", "--verification", "--one-shot", "--diagnose"]
    good("evaluate", "a.npz", *flags, "--ways", 5, "--episodes", 5)


def test_gallery_with_names_of_its_own(tmp_path):
    np.savez("q.npz", embeddings=X[::2], labels=NAMES[::2])
    keep = CLASSES != 3
    np.savez("g.npz", embeddings=X[1::2][keep[1::2]], labels=NAMES[1::2][keep[1::2]])
    good("evaluate", "q.npz", "--gallery", "g.npz", "--similarity", "euclidean", "--json", "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["results"]["retrieval"]
    gallery, ids = torch.from_numpy(X[1::2][keep[1::2]]), torch.from_numpy(CLASSES[1::2][keep[1::2]])
    own = torch.from_numpy(X[::2].copy()), torch.from_numpy(CLASSES[::2].copy())
    expected = evaluation.retrieval(*own, gallery, ids, similarity="euclidean")
    assert found == {"similarity": "euclidean", **expected} and found["without_kin"] == 3


def test_targets_are_graded_by_default(tmp_path):
    np.savez("q.npz", embeddings=X[::2], targets=X[::2, 0])
    np.savez("g.npz", embeddings=X[1::2], targets=X[1::2, 0])
    assert "ndcg@10" in values(good("evaluate", "q.npz").stdout)
    assert "ndcg@2" in values(good("evaluate", "q.npz", "--gallery", "g.npz", "--ks", 2).stdout)


def test_zero_rows_under_cosine_and_not(tmp_path):
    zero = X.copy()
    zero[:2] = 0
    np.savez("a.npz", embeddings=zero, labels=CLASSES)
    assert bad("evaluate", "a.npz").startswith("a.npz: 2 of 48 rows are zero, and cosine needs a direction")
    assert good("evaluate", "a.npz", "--similarity", "euclidean").stderr == ""


SENTENCES = [
    (["none.npz"], "none.npz: no such file"),
    (["a.h5"], 'ends in .npz, .npy, .parquet, .safetensors, got ".h5"'),
    (["plain.npz"], "plain.npz: there are neither labels nor targets; give --labels FILE"),
    (["plain.npz", "--targets", "t.npy", "--clustering"], "plain.npz: --clustering needs labels, there are none"),
    (["a.npz", "--graded"], "a.npz: --graded needs targets, there are none; give --targets FILE"),
    (["nan.npz"], "nan.npz: embeddings must be finite, got NaN or Inf in 1 of 48 rows"),
    (["one.npz"], 'one.npz: labels must hold at least 2 classes, got 1 ("bird")'),
    (["unknown.npz"], "unknown.npz: labels must hold at least 2 classes, got 0"),
    (["short.npz"], "48 rows, 5 labels"),
    (["single.npz"], "retrieval needs queries with kin among the others: none of 8 has any"),
    (["a.npz", "--gallery", "narrow.npz"], "narrow.npz: the gallery must have 5 dimensions as a.npz has, got 4"),
    (["a.npz", "--gallery", "plain.npz"], "give --gallery-labels FILE"),
    (["a.npz", "--gallery", "a.npz"], "each row would find itself; leave --gallery out"),
    (["a.npz", "--gallery", "one.npz", "--one-shot"], "--one-shot takes no --gallery; --retrieval and --graded do"),
    (["a.npz", "--gallery", "one.npz"], "must be of one kind, got strings and whole numbers"),
    (["a.npz", "--gallery-labels", "t.npy"], "need --gallery FILE"),
    (["a.npz", "--ks", "1,x"], 'ks must be whole numbers from 1 with commas between, as 1,2,4,8, got "1,x"'),
    (["a.npz", "--ks", "0"], "ks must be whole numbers from 1"),
    (["a.npz", "--budget", "lots"], 'budget must be a size as 512MB or 2GB, got "lots"'),
    (["a.npz", "--budget", "1KB"], "budget must hold one query against the gallery"),
    (["a.npz", "--one-shot"], "ways must be at most the number of classes"),
    (["a.npz", "--verification", "--similarity", "euclidean"], "--verification compares by cosine or dot, got"),
    (["a.npz", "--json", "no/out.json"], "no/out.json: the folder no does not exist"),
    (["a.npz", "--json", "."], "must be a plain file, got a folder"),
]


@pytest.mark.parametrize("words, sentence", SENTENCES, ids=lambda part: "-".join(part) if type(part) is list else "")
def test_one_sentence_and_nothing_written(tmp_path, words, sentence):
    spoilt = X.copy()
    spoilt[7, 1] = np.nan
    np.savez("a.npz", embeddings=X, labels=CLASSES)
    np.savez("plain.npz", embeddings=X)
    np.savez("nan.npz", embeddings=spoilt, labels=CLASSES)
    np.savez("one.npz", embeddings=X, labels=np.full(48, "bird"))
    np.savez("unknown.npz", embeddings=X, labels=np.full(48, -1))
    np.savez("short.npz", embeddings=X, labels=CLASSES[:5])
    np.savez("single.npz", embeddings=X[::6], labels=CLASSES[::6])
    np.savez("narrow.npz", embeddings=X[:, :4], labels=CLASSES)
    np.save("t.npy", X[:, 0])
    before = names_there(tmp_path)
    words = words if "--json" in words else [*words, "--json", "out.json"]
    assert sentence in bad("evaluate", *words)
    assert names_there(tmp_path) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a cuda device")
def test_a_device_that_is_not_there():
    np.savez("a.npz", embeddings=X, labels=CLASSES)
    assert bad("evaluate", "a.npz", "--device", "cuda") == "device cuda is not available here; use --device cpu"


def test_a_mistyped_verb_lists_the_verbs_and_a_mistyped_flag_is_named():
    assert bad("evalute", "a.npz") == 'unknown verb "evalute"; did you mean "evaluate"? known: evaluate'
    assert bad("zzz") == 'unknown verb "zzz"; known: evaluate'
    found = run("evaluate", "a.npz", "--retreival")
    assert found.exit_code == 2 and "--retreival" in found.stderr


@pytest.mark.parametrize("at", ["evaluate", "replace"])
def test_ctrl_c_leaves_the_old_file(tmp_path, monkeypatch, at):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    np.savez("a.npz", embeddings=X, labels=CLASSES)
    (tmp_path / "out.json").write_text("old")
    monkeypatch.setattr(*((protocols, "evaluate") if at == "evaluate" else (report.os, "replace")), interrupt)
    assert bad("evaluate", "a.npz", "--json", "out.json", code=130) == "interrupted; nothing was written"
    assert (tmp_path / "out.json").read_text() == "old"
    assert names_there(tmp_path) == ["a.npz", "out.json"]


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    np.savez("a.npz", embeddings=X, labels=CLASSES)
    (tmp_path / "out.json").write_text("old")
    monkeypatch.setattr(report.os, "fsync", full)
    sentence = bad("evaluate", "a.npz", "--json", "out.json")
    assert sentence == "out.json: could not be written (No space left on device)"
    assert (tmp_path / "out.json").read_text() == "old"
    assert names_there(tmp_path) == ["a.npz", "out.json"]


def test_what_is_not_a_number_is_null(tmp_path):
    np.savez("a.npz", embeddings=X, targets=np.ones(48))
    found = good("evaluate", "a.npz", "--json", "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["results"]["graded"]["spearman"] is None
    assert values(found.stdout)["spearman_skipped"] == ["48"]


def test_as_a_process(tmp_path):
    np.savez("a.npz", embeddings=UNIT, labels=NAMES)
    words = [sys.executable, "-m", "nearkin", "evaluate"]
    found = subprocess.run([*words, "a.npz", "--json", "out.json"], capture_output=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert "recall@1" in found.stdout.decode() and found.stderr.split() == [b"wrote", b"out.json"]
    assert json.loads((tmp_path / "out.json").read_text())["results"]["retrieval"]["queries"] == 48
