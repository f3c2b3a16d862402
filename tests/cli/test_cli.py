"""The command line: what it prints, what it writes, and one sentence for whatever cannot be done."""

import json
import math
import subprocess
import sys
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from nearkin import evaluation
from nearkin.cli import app, ranks, screen
from nearkin.core import files
from nearkin.data import vectors
from nearkin.evaluation.protocols import results_table, runner
from nearkin.evaluation.statistics import cluster_bootstrap
from nearkin.report import run_report
from nearkin.report.findings import Findings
from nearkin.training.final_test import full_metrics, no_interval
from nearkin.training.validation import HeldOut

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
    """stdout and stderr apart: click before 8.2 must be asked to."""
    apart = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    return CliRunner(**apart).invoke(app, [str(word) for word in words])


def good(*words):
    result = run(*words)
    assert result.exit_code == 0, result.stderr or result.exception
    return result


def bad(*words, code=2):
    """The one sentence on stderr."""
    result = run(*words)
    assert result.exit_code == code and result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    return line


def values(stdout):
    """{metric: the rest of its line} of a printed table."""
    lines = [line.split() for line in stdout.splitlines() if "@" in line or "_" in line or "%" in line]
    return {word: line[at + 1 :] for line in lines for at, word in enumerate(line) if at < 2}


def names_there(folder):
    return sorted(path.name for path in folder.iterdir())


def test_reranking_stands_beside_the_plain_figures(tmp_path):
    """Chosen on the classes of another file, never on those that are measured."""
    rng = np.random.default_rng(0)
    kinds = np.arange(120) % 12
    rows = (rng.normal(size=(12, 6))[kinds] + 0.6 * rng.normal(size=(120, 6))).astype(np.float32)
    np.savez("test.npz", embeddings=rows[kinds < 6], labels=kinds[kinds < 6], levels=kinds[kinds < 6] // 2)
    np.savez("val.npz", embeddings=rows[kinds >= 6], labels=kinds[kinds >= 6])
    words = ("evaluate", "test.npz", "--rerank", "k-reciprocal", "--rerank-validation", "val.npz", "--interval")
    printed = good(*words, "--levels", "levels", "--json", "out.json")
    content = json.loads(Path("out.json").read_text())["results"]["retrieval"]
    again = content["rerank"]
    x, labels = torch.from_numpy(rows), torch.from_numpy(kinds)
    best = evaluation.choose_rerank(x[labels >= 6], labels[labels >= 6])
    assert again["settings"] == {"k1": best.settings.k1, "k2": best.settings.k2, "lambda": 0.3}
    assert [one["map@r"] for one in again["chosen"]["tried"]] == [value for _, value in best.tried]
    assert again["chosen"]["classes"] == 6 and again["chosen"]["plain"] == best.plain
    own = x[labels < 6], labels[labels < 6]
    expected = evaluation.retrieval(*own, rerank=best.settings, interval=True)
    assert again["map@r"] == expected["map@r"] and again["intervals"]["map@r"] == list(expected.intervals["map@r"])
    test = again["against"]["map@r"]
    assert test["difference"] == pytest.approx(again["map@r"] - content["map@r"]) and test["plain"] == content["map@r"]
    assert again["levels"]["levels"]["map@r"] != content["levels"]["levels"]["map@r"]
    assert again["sentence"] in " ".join(printed.stdout.split()) and "gain in map@r" in printed.stdout
    assert "k1 chosen by MAP@R on 6 validation classes, 60 items" in printed.stdout
    plain = good("evaluate", "test.npz", "--rerank", "alpha-qe")
    assert "published settings: there are no validation items" in plain.stderr
    given = good("evaluate", "test.npz", "--rerank", "alpha-qe:neighbours=3", "--json", "given.json")
    assert "note" not in given.stderr.replace("lengths", "") or "published" not in given.stderr
    figures = json.loads(Path("given.json").read_text())["results"]["retrieval"]["rerank"]
    assert figures["settings"] == {"neighbours": 3, "alpha": 3.0} and figures["chosen"] is None


def test_retrieval_is_printed_and_written(tmp_path):
    np.savez("a.npz", embeddings=UNIT, labels=NAMES)
    printed = good("evaluate", "a.npz", "--json", "out.json")
    assert "wrote out.json" in printed.stderr and "note" not in printed.stderr
    assert printed.stdout.splitlines()[0] == "a.npz: 48 × 5, 8 classes"
    written = json.loads((tmp_path / "out.json").read_text())
    expected = evaluation.retrieval(torch.from_numpy(UNIT), torch.from_numpy(7 - CLASSES))
    stored = written["results"]["retrieval"]
    assert stored == {"similarity": "cosine", **expected}
    shown = values(printed.stdout)
    assert shown["recall@1"] == [f"{100 * expected['recall@1']:.2f}", "%"]
    assert shown["without_positives"] == ["0"]
    assert written["class_names"][0] == "bird [red] a" and written["embeddings"]["rows"] == 48
    assert names_there(tmp_path) == ["a.npz", "out.json"]


def test_every_protocol_at_once(tmp_path):
    np.savez("a.npz", embeddings=X, labels=NAMES, targets=CENTRES[CLASSES])
    flags = ["--retrieval", "--clustering", "--verification", "--one-shot", "--open-set", "--graded", "--diagnose"]
    more = ["--ways", 5, "--episodes", 20, "--interval", "--ks", "1,3", "--seed", 3, "--json", "out.json"]
    printed = good("evaluate", "a.npz", *flags, *more)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert list(results) == list(runner.PROTOCOLS)
    x, ids = torch.from_numpy(X), torch.from_numpy(7 - CLASSES)
    once = evaluation.one_shot(x, ids, 5, 1, 20, 3, interval=True)
    assert results["one_shot"]["accuracy"] == once["accuracy"]
    assert results["one_shot"]["intervals"]["accuracy"] == list(once.intervals["accuracy"])
    assert results["one_shot"]["episode_half_width"] == once["interval"]
    every = evaluation.all_pairs(x, ids, interval=True, seed=3)
    shown = results["verification"]
    plain = {name: tuple(None if math.isnan(end) else end for end in ends) for name, ends in every.intervals.items()}
    assert {name: tuple(ends) for name, ends in shown["intervals"].items()} == plain
    assert [shown[name] for name in ("auc", "balanced_accuracy")] == [every[n] for n in ("auc", "balanced_accuracy")]
    assert len(shown["roc"]["far"]) == len(shown["roc"]["tar"]) > 20
    for protocol, found_ in results.items():
        if protocol not in ("diagnose", "open_set"):
            rows = [
                line
                for line in results_table.table({"results": {protocol: found_}, "class_names": None})
                if line.interval
            ]
            assert {row.metric for row in rows} == set(found_["intervals"]) and rows
    assert results["clustering"]["nmi"] == evaluation.clustering(x, ids, 3)["nmi"]
    expected = evaluation.retrieval(x, ids, ks=(1, 3), interval=True)
    assert results["retrieval"]["intervals"]["recall@3"] == list(expected.intervals["recall@3"])
    assert results["graded"]["ndcg@3"] == evaluation.graded(x, torch.from_numpy(CENTRES[CLASSES]), (1, 3))["ndcg@3"]
    assert results["verification"]["tar@far=1e-06"] is None and 1e-6 in results["verification"]["not_measurable"]
    for metric in ("recall@3", "map@r", "nmi", "tar@far=0.1", "accuracy", "spearman", "hubness", "collapsed"):
        assert metric in printed.stdout
    assert "bird [red]" in printed.stdout and "95 % interval" in printed.stdout and "…" not in printed.stdout
    assert printed.stderr.startswith("note: a.npz: rows have lengths ")


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
    printed = json.loads((tmp_path / "out.json").read_text())["results"]["retrieval"]
    gallery, ids = torch.from_numpy(X[1::2][keep[1::2]]), torch.from_numpy(CLASSES[1::2][keep[1::2]])
    own = torch.from_numpy(X[::2].copy()), torch.from_numpy(CLASSES[::2].copy())
    expected = evaluation.retrieval(*own, gallery, ids, similarity="euclidean")
    assert printed == {"similarity": "euclidean", **expected} and printed["without_positives"] == 3


def test_targets_are_graded_by_default(tmp_path):
    np.savez("q.npz", embeddings=X[::2], targets=X[::2, 0])
    np.savez("g.npz", embeddings=X[1::2], targets=X[1::2, 0])
    assert "ndcg@10" in values(good("evaluate", "q.npz").stdout)
    assert "ndcg@2" in values(good("evaluate", "q.npz", "--gallery", "g.npz", "--ks", 2).stdout)


def test_a_list_of_pairs_is_verified(tmp_path):
    np.savez("a.npz", embeddings=UNIT, labels=NAMES)
    np.savez("plain.npz", embeddings=UNIT)
    pairs = np.random.default_rng(1).integers(0, 48, (300, 2))
    same = CLASSES[pairs[:, 0]] == CLASSES[pairs[:, 1]]
    fold = np.arange(300) % 5
    (tmp_path / "p.csv").write_text(
        "\n".join(f"{a},{b},{int(s)},{f}" for (a, b), s, f in zip(pairs, same, fold, strict=True))
    )
    np.save("p.npy", pairs)
    x = torch.from_numpy(UNIT)
    expected_metrics = evaluation.verification(embeddings=x, pairs=torch.from_numpy(pairs), same=same, folds=fold)
    good("evaluate", "plain.npz", "--pairs", "p.csv", "--json", "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    stored = written["results"]["verification"]
    assert list(written["results"]) == ["verification"] and written["pairs"] == {"file": "p.csv", "pairs": 300}
    for name in ("eer", "auc", "accuracy", "threshold", "genuine", "tar@far=0.1"):
        assert stored[name] == expected_metrics[name]
    assert 0 <= stored["calibration_error"] < 0.3
    fitted = evaluation.Calibration.from_dict(stored["calibration"])
    assert float(fitted.probability(torch.tensor([1.0]))) > 0.5
    printed = good("evaluate", "a.npz", "--pairs", "p.npy", "--interval", "--far", "1e-1,0.05", "--json", "out.json")
    stored = json.loads((tmp_path / "out.json").read_text())["results"]["verification"]
    ids = torch.from_numpy(7 - CLASSES)
    again = evaluation.verification(
        embeddings=x, pairs=torch.from_numpy(pairs), labels=ids, interval=True, fars=(0.1, 0.05)
    )
    assert stored["intervals"]["eer"] == list(again.intervals["eer"])
    point = again["operating_points"][1]
    assert stored["threshold@far=0.05"] == point.threshold
    assert stored["intervals"]["seen_far@far=0.05"] == list(point.far_interval)
    for name in ("threshold@far=0.1", "seen_far@far=0.05", "tar@far=0.05", "auc", "calibration_error"):
        assert name in printed.stdout
    assert "tar@far=0.001" not in printed.stdout


def test_rows_of_several_labels(tmp_path):
    rows = np.eye(8, dtype=np.uint8)[CLASSES] | np.eye(8, dtype=np.uint8)[(CLASSES + 1) % 8]
    np.savez("a.npz", embeddings=UNIT, labels=rows)
    np.savez("q.npz", embeddings=UNIT[:8], labels=rows[:8])  # as many labels as rows
    np.savez("g.npz", embeddings=UNIT[8:], labels=rows[8:, :5])
    printed = good("evaluate", "a.npz", "--interval", "--json", "out.json")
    x, y = torch.from_numpy(UNIT), torch.from_numpy(rows).bool()
    expected = evaluation.retrieval(x, y, interval=True)
    stored = json.loads((tmp_path / "out.json").read_text())["results"]["retrieval"]
    assert stored["map@r"] == expected["map@r"] and stored["intervals"]["map@r"] == list(expected.intervals["map@r"])
    assert printed.stdout.splitlines()[0] == "a.npz: 48 × 5, 8 classes"
    assert "recall@1" in good("evaluate", "q.npz").stdout
    good("evaluate", "q.npz", "--gallery", "a.npz")
    assert bad("evaluate", "a.npz", "--clustering") == (
        "a.npz: --clustering needs one label per row, got several; --retrieval takes them"
    )
    sentence = bad("evaluate", "q.npz", "--gallery", "g.npz")
    assert sentence == "labels of embeddings and gallery must have the same columns, got 5 columns and 8 columns"


def test_graded_resamples_the_classes_of_labels(tmp_path):
    np.savez("a.npz", embeddings=X, labels=NAMES, targets=CENTRES[CLASSES])
    good("evaluate", "a.npz", "--graded", "--interval", "--json", "out.json")
    stored = json.loads((tmp_path / "out.json").read_text())["results"]["graded"]
    targets, classes = torch.from_numpy(CENTRES[CLASSES]), torch.from_numpy(7 - CLASSES)
    expected = evaluation.graded(torch.from_numpy(X), targets, interval=True, classes=classes)
    assert stored["intervals"]["ndcg@10"] == list(expected.intervals["ndcg@10"])


def test_open_set_is_printed_written_and_drawn(tmp_path):
    """The page has the figures of the JSON; the cohort never has a tested class."""
    draw = np.random.default_rng(1)
    labels = np.repeat(np.arange(40), 6)
    rows = (draw.normal(size=(40, 12))[labels] + 0.6 * draw.normal(size=(240, 12))).astype(np.float32)
    np.savez("a.npz", embeddings=rows, labels=np.array([f"<b>{i}" for i in labels]))
    np.savez("c.npz", embeddings=rows[::-1] + 1, labels=np.array([f"<b>{i}" for i in labels + 35]))
    words = ["--open-set", "--examples", "1,2", "--fpir", "0.1,0.001", "--repeats", 3, "--cohort", "c.npz"]
    words += ["--far", "0.2,0.01"]
    printed = good("evaluate", "a.npz", *words, "--json", "out.json", "--report", "page.html")
    written = json.loads((tmp_path / "out.json").read_text())
    scores = written["results"]["open_set"]
    assert scores["cohort"] == 35 and "c.npz: 5 of its classes are also tested" in printed.stderr
    assert "FPIR 0.001 is not quoted" in printed.stderr
    assert [entry["examples"] for entry in scores["examples"]] == [1, 2] and scores["not_measurable"] == [0.001]
    x = torch.from_numpy(rows)
    names = np.unique([f"<b>{i}" for i in labels], return_inverse=True)[1]
    again = evaluation.open_set(x, torch.from_numpy(names), examples=(1, 2), fpirs=(0.1, 0.001), repeats=3)
    for entry, expected in zip(scores["examples"], again["examples"], strict=True):
        figures, wanted = entry["methods"]["nearest"], expected["methods"]["nearest"]
        assert figures["fnir@fpir=0.1"] == wanted["fnir@fpir=0.1"] and figures["fnir@fpir=0.001"] is None
        assert figures["intervals"]["auroc"] == list(wanted["intervals"]["auroc"])
        assert f"{100 * wanted['fnir@fpir=0.1']:.2f} %" in printed.stdout
    answers = evaluation.identification(x, torch.from_numpy(names), examples=(1, 2), fars=(0.2, 0.01), repeats=3)
    page = (tmp_path / "page.html").read_text()
    text = " ".join(printed.stdout.split())
    for entry, expected in zip(scores["identify"]["examples"], answers["examples"], strict=True):
        assert entry["gain"] == expected["gain"] and entry["dir@fpir=0.001"] is None
        assert entry["intervals"]["oscr"] == list(expected["intervals"]["oscr"])
        of = f"{entry['examples']} example{'s' * (entry['examples'] > 1)}"
        assert f"{of} per label: {entry['sentence']}" in text and entry["sentence"].replace(" %", "\u202f%") in page
        assert f"{of}: gain {100 * entry['gain']:.2f} %" in text
        for rate in entry["far"]:
            said = f"{of}: far {rate['asked']:g} ({100 * rate['expected']:.2g} %)"
            assert f"{said} {100 * rate['observed']:.2f} %" in text
            assert f"20 × {entry['examples']}, far {rate['asked']:g}" in page
    assert "20 labels can show 4.8\u202f% at the least; 1\u202f% was asked" in page
    assert page.count("<figure>") == 4 and "<b>1" not in page and "Reliability of" in page
    for choice in (choice for entry in scores["examples"] for choice in entry["choices"]):
        assert choice["sentence"].split(":")[0].replace(" %", "\u202f%") in page


def test_every_protocol_tells_how_far_it_is():
    calls = []
    items = vectors.Vectors("a", torch.from_numpy(X), CLASSES, torch.from_numpy(X[:, 0]).double())
    names = ("retrieval", "clustering", "verification", "one_shot", "open_set", "graded")
    settings = runner.Settings(names, ways=5, episodes=20)
    runner.evaluate(items, None, settings, lambda *three: calls.append(three))
    for name in names:
        own_calls = [(done, total) for protocol, done, total in calls if protocol == name]
        assert own_calls[0] == (0, 0) and own_calls[-1][0] == own_calls[-1][1] > 0, name


def test_ctrl_c_in_the_middle_of_a_pass(tmp_path, monkeypatch):
    from nearkin.evaluation.verification import pair_scan

    def interrupt(*_):
        raise KeyboardInterrupt

    np.savez("a.npz", embeddings=X, labels=CLASSES)
    monkeypatch.setattr(pair_scan, "_between", interrupt)
    words = ["evaluate", "a.npz", "--verification", "--json", "out.json"]
    assert bad(*words, code=130) == "interrupted; nothing was written"
    assert names_there(tmp_path) == ["a.npz"]


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
    (["single.npz"], "retrieval needs queries with positives among the others: none of 8 has any"),
    (["a.npz", "--gallery", "narrow.npz"], "narrow.npz: the gallery must have 5 dimensions as a.npz has, got 4"),
    (["a.npz", "--gallery", "plain.npz"], "give --gallery-labels FILE"),
    (["a.npz", "--gallery", "a.npz"], "each row would find itself; leave --gallery out"),
    (["a.npz", "--gallery", "one.npz", "--one-shot"], "--one-shot takes no --gallery; --retrieval and --graded do"),
    (["a.npz", "--gallery", "one.npz"], "must be of one kind, got strings and whole numbers"),
    (["a.npz", "--gallery-labels", "t.npy"], "need --gallery FILE"),
    (["a.npz", "--ks", "1,x"], 'ks must be whole numbers >= 1, separated by commas, as 1,2,4,8, got "1,x"'),
    (["a.npz", "--ks", "0"], "ks must be whole numbers >= 1"),
    (["a.npz", "--budget", "lots"], 'budget must be a size as 512MB or 2GB, got "lots"'),
    (["a.npz", "--budget", "1KB"], "budget must hold one query against the gallery"),
    (["a.npz", "--one-shot"], "ways must be at most the number of classes"),
    (["a.npz", "--verification", "--similarity", "euclidean"], "--verification compares by cosine or dot, got"),
    (["a.npz", "--retrieval", "--pairs", "p.csv"], "--pairs is for --verification, which is not asked for"),
    (["a.npz", "--far", "0.1"], "--far is for --verification and --open-set, which are not asked for"),
    (["a.npz", "--verification", "--far", "2"], "far must be rates > 0 and < 1, separated by commas"),
    (["a.npz", "--verification", "--far", "x"], 'as 1e-2,1e-3, got "x"'),
    (["plain.npz", "--pairs", "p.csv"], "plain.npz: --verification needs labels, there are none; give --labels FILE"),
    (["a.npz", "--pairs", "far.csv"], "far.csv: pairs must be of rows 0 to 47, got (0, 48) in pair 0"),
    (["a.npz", "--pairs", "none.csv"], "none.csv: no such file"),
    (["half.npz", "--pairs", "p.csv"], "p.csv: pairs must be of rows with a known label, some have -1"),
    (["a.npz", "--rerank", "k-reciprocl"], 'unknown rerank "k-reciprocl"; did you mean "k-reciprocal"?'),
    (["a.npz", "--rerank", "dba:k1=3"], 'unknown setting of dba "k1"; known: neighbours, alpha'),
    (["a.npz", "--rerank", "k-reciprocal:k1=x"], "rerank: k1 must be a whole number, as in k-reciprocal:k1=20"),
    (["a.npz", "--rerank", "k-reciprocal:k1=0"], "k1 must be >= 1, got 0"),
    (["a.npz", "--clustering", "--rerank", "dba"], "--rerank is for --retrieval, which is not asked for"),
    (["a.npz", "--similarity", "dot", "--rerank", "k-reciprocal"], 'similarity="dot" is not possible here'),
    (["a.npz", "--rerank", "dba:alpha=1", "--rerank-validation", "a.npz"], "for --rerank METHOD without settings"),
    (["a.npz", "--rerank-validation", "a.npz"], "for --rerank METHOD without settings"),
    (["a.npz", "--rerank", "dba", "--rerank-validation", "narrow.npz"], "must have 5 dimensions as a.npz has, got 4"),
    (["a.npz", "--rerank", "dba", "--rerank-validation", "plain.npz"], "validation items need one label per row"),
    (
        ["a.npz", "--rerank", "dba", "--rerank-validation", "a.npz"],
        "must not be chosen on classes that are measured; 8",
    ),
    (
        ["a.npz", "--examples", "1", "--report", "a.html"],
        "--examples, --report: for --open-set, which is not asked for",
    ),
    (["a.npz", "--open-set", "--examples", "0"], "examples must be whole numbers >= 1, separated by commas, as 1,2,5"),
    (
        ["a.npz", "--open-set", "--fpir", "2"],
        'fpir must be rates > 0 and < 1, separated by commas, as 1e-2,1e-3, got "2"',
    ),
    (["a.npz", "--open-set", "--repeats", "0"], "repeats must be >= 1, got 0"),
    (["a.npz", "--open-set", "--report", "a.pdf"], "a.pdf: a report must end in .html"),
    (["a.npz", "--open-set", "--report", "no/a.html"], "no/a.html: the folder no does not exist"),
    (["a.npz", "--open-set", "--cohort", "narrow.npz"], "narrow.npz: the cohort must have 5 dimensions as a.npz has"),
    (["a.npz", "--open-set", "--cohort", "none.npz"], "none.npz: no such file"),
    (["a.npz", "--open-set", "--similarity", "dot"], "--open-set compares by cosine, got --similarity dot"),
    (["a.npz", "--open-set", "--examples", "7"], "at least 4 classes with more than 7 examples"),
    (["single.npz", "--open-set"], "(one is enrolled, another searched for), got 0 of 8 classes"),
    (["three.npz", "--open-set"], "at least 4 classes, half of them enrolled, got 3"),
    (["a.npz", "--json", "no/out.json"], "no/out.json: the folder no does not exist"),
    (["a.npz", "--json", "."], "must be a plain file, got a folder"),
]


@pytest.mark.parametrize("words, sentence", SENTENCES, ids=lambda part: "-".join(part) if type(part) is list else "")
def test_one_sentence_and_nothing_written(tmp_path, words, sentence):
    with_nan = X.copy()
    with_nan[7, 1] = np.nan
    np.savez("a.npz", embeddings=X, labels=CLASSES)
    np.savez("plain.npz", embeddings=X)
    np.savez("nan.npz", embeddings=with_nan, labels=CLASSES)
    np.savez("one.npz", embeddings=X, labels=np.full(48, "bird"))
    np.savez("unknown.npz", embeddings=X, labels=np.full(48, -1))
    np.savez("short.npz", embeddings=X, labels=CLASSES[:5])
    np.savez("single.npz", embeddings=X[::6], labels=CLASSES[::6])
    np.savez("narrow.npz", embeddings=X[:, :4], labels=CLASSES)
    np.savez("half.npz", embeddings=X, labels=np.where(CLASSES == 0, -1, CLASSES))
    np.savez("three.npz", embeddings=X[:18], labels=CLASSES[:18])
    (tmp_path / "p.csv").write_text("0,1\n6,7\n0,7\n")
    (tmp_path / "far.csv").write_text("0,48\n")
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
    known = "known: train, compare, evaluate, embed, export, enrol, group, search, identify, verify, explain, serve, "
    known += "runs, report, doctor, losses, encoders, sources, gallery"
    assert bad("evalute", "a.npz") == f'unknown verb "evalute"; did you mean "evaluate"? {known}'
    assert bad("zzz") == f'unknown verb "zzz"; {known}'
    printed = run("evaluate", "a.npz", "--retreival")
    assert printed.exit_code == 2 and "--retreival" in printed.stderr


@pytest.mark.parametrize("at", ["evaluate", "replace"])
def test_ctrl_c_leaves_the_old_file(tmp_path, monkeypatch, at):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    np.savez("a.npz", embeddings=X, labels=CLASSES)
    (tmp_path / "out.json").write_text("old")
    monkeypatch.setattr(*((runner, "evaluate") if at == "evaluate" else (files.os, "replace")), interrupt)
    assert bad("evaluate", "a.npz", "--json", "out.json", code=130) == "interrupted; nothing was written"
    assert (tmp_path / "out.json").read_text() == "old"
    assert names_there(tmp_path) == ["a.npz", "out.json"]


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    np.savez("a.npz", embeddings=X, labels=CLASSES)
    (tmp_path / "out.json").write_text("old")
    monkeypatch.setattr(files.os, "fsync", full)
    sentence = bad("evaluate", "a.npz", "--json", "out.json")
    assert sentence == "out.json: could not be written (No space left on device)"
    assert (tmp_path / "out.json").read_text() == "old"
    assert names_there(tmp_path) == ["a.npz", "out.json"]


def test_what_is_not_a_number_is_null(tmp_path):
    np.savez("a.npz", embeddings=X, targets=np.ones(48))
    printed = good("evaluate", "a.npz", "--json", "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["results"]["graded"]["spearman"] is None
    assert values(printed.stdout)["spearman_skipped"] == ["48"]


def test_as_a_process(tmp_path):
    np.savez("a.npz", embeddings=UNIT, labels=NAMES)
    words = [sys.executable, "-m", "nearkin", "evaluate"]
    printed = subprocess.run([*words, "a.npz", "--json", "out.json"], capture_output=True, timeout=60)
    assert printed.returncode == 0, printed.stderr
    assert "recall@1" in printed.stdout.decode() and printed.stderr.split() == [b"wrote", b"out.json"]
    assert json.loads((tmp_path / "out.json").read_text())["results"]["retrieval"]["queries"] == 48


def test_two_classes_have_no_interval_and_a_sentence_says_why(tmp_path, monkeypatch):
    """In evaluate, at the end of a training, and in its report."""
    monkeypatch.chdir(tmp_path)
    g = torch.Generator().manual_seed(0)
    np.savez("two.npz", embeddings=torch.randn(8, 4, generator=g).numpy(), labels=np.arange(8) % 2)
    printed = good("evaluate", "two.npz", "--interval", "--clustering", "--retrieval", "--json", "out.json")
    stored = json.loads(Path("out.json").read_text())
    sentence = cluster_bootstrap.too_few(2)
    assert stored["notes"][1:] == [sentence] and sentence in " ".join(printed.stderr.split())
    ends = [end for one in stored["results"].values() for pair in one["intervals"].values() for end in pair]
    assert ends and set(ends) == {None}
    held_out = HeldOut(np.arange(8), np.arange(8) % 2, None)
    x, device = torch.randn(8, 4, generator=g), torch.device("cpu")
    tested = full_metrics(x, held_out, False, device, ks=(1,), interval=True, seed=0)
    assert no_interval(tested, held_out) == sentence
    assert no_interval({"map@r": {"value": 0.5, "low": 0.4, "high": 0.6}}, held_out) is None
    results = {"baseline": "pixels", "test": dict.fromkeys(("baseline", "untrained", "trained"), tested)}
    screen.results_table(results | {"no_interval": sentence})
    parts: dict = {"recipe": {}, "data": {}, "history": [], "labels": None, "targets": None, "classes": [], "names": []}
    findings = Findings("", results=results | {"no_interval": sentence}, embeddings=x, **parts)
    note = run_report._results_note(findings)
    assert sentence[1:] in note and "Small figures" not in note
    findings.results["no_interval"] = None
    assert "intervals" not in run_report._results_note(findings)


def test_a_rank_ends_at_once_and_a_process_by_itself_as_python_does(monkeypatch):
    """On Python's own way out a rank is watched by none; stopped there, it would keep torchrun waiting."""
    codes = []
    monkeypatch.setattr(screen.warnings, "formatwarning", screen.warnings.formatwarning)  # which `main` replaces
    monkeypatch.setattr(ranks.os, "_exit", codes.append)
    monkeypatch.setattr(screen, "app", lambda **_: sys.exit(codes_of.pop()))
    codes_of = [0, None, 3, 0]
    with pytest.raises(SystemExit):
        screen.main()
    assert codes == []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for _ in range(3):
        with pytest.raises(SystemExit):
            screen.main()
    assert codes == [3, 0, 0]
