"""Evaluation, embedding and enrolment shared by ranks: the same numbers, files and rows as one process makes."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import worlds
from commands import separate_runner
from nearkin import dist, evaluation, gallery, training
from nearkin.cli import app
from nearkin.core import relations
from nearkin.core.errors import RankFailed
from nearkin.evaluation.protocols import runner
from nearkin.evaluation.retrieval import by_counting
from nearkin.evaluation.retrieval.retrieval_metrics import METRICS
from nearkin.evaluation.verification import pair_scan
from nearkin.gallery.items import Encoding

pytestmark = pytest.mark.slow

QUICK = ["training.epochs=1", "training.batches=2", "encoder.width=4", "encoder.dim=8", "sampler.batch=8"]
QUICK += ["sampler.per_class=2", "data.size=16", "data.stored=16", "training.workers=0", "evaluation.interval=false"]


# --- retrieval, graded and verification: every rank gets what one process finds


def _sets():
    """Names and arguments of `retrieval`: each way it can take, with ties, unknown classes and few or many kin."""
    make = torch.Generator().manual_seed(3)
    x = torch.randn(330, 12, generator=make)
    x[200:230] = x[:30]  # ties
    few, many = torch.arange(330) % 83, torch.arange(330) % 3
    holes = few.clone()
    holes[::7] = -1
    other = torch.randn(140, 12, generator=make)
    rows = torch.rand(330, 6, generator=make) < 0.3
    kin = torch.rand(40, 140, generator=make)
    relation = relations.Relation(kin < 0.1, kin > 0.3)
    same = x.clone()
    same[50:300] = same[50]  # a crowd: most of the gallery takes no part
    all_metrics = {"metrics": METRICS}
    return {
        "tiles that serve two ways": ((x, few), all_metrics),
        "unknown classes": ((x, holes), {"interval": True}),
        "many kin": ((x, many), all_metrics),
        "a gallery": ((x, few, other, few[:140]), {"similarity": "euclidean", "interval": True}),
        "little memory": ((x, few), {"budget": 60_000, "similarity": "dot"}),
        "several labels": ((x, rows), {}),
        "a relation": ((x[:40], relation, other), all_metrics),
        "a crowd": ((same, few), {}),
        "half precision": ((x.half(), few), {}),
        "faiss": ((x, few), {"backend": "faiss"}),
        "fewer queries than ranks": ((x[:2], few[:2] * 0, other, few[:140]), all_metrics),
        "one query": ((x[:1], few[:1], other, few[:140]), {}),
        "groups": ((x, few), {"groups": few * 5 + torch.arange(330) % 2, **all_metrics}),
        "groups of many kin": ((x, many), {"groups": torch.arange(330) % 7, "interval": True}),
        "groups and a gallery": (
            (x, few, other, few[:140]),
            {"groups": torch.arange(330) % 4, "gallery_groups": torch.arange(140) % 4, **all_metrics},
        ),
        "groups and faiss": ((x, few), {"groups": torch.arange(330) % 4, "backend": "faiss"}),
        "re-ranked": ((x, holes), {"rerank": evaluation.KReciprocal(8, 3), **all_metrics}),
        "re-ranked, a gallery": (
            (x, few, other, few[:140]),
            {"rerank": "k-reciprocal:k1=5", "similarity": "euclidean"},
        ),
        "expanded": ((x, few), {"rerank": "alpha-qe", "groups": torch.arange(330) % 4}),
        "augmented": ((x, many, other, many[:140]), {"rerank": "dba", "interval": True}),
        "misses": ((x[:100], few[:100], None, None), {"without_positives": "miss", "interval": True}),
    }


def _same(one, other):
    """Equal to the last bit, NaN with NaN."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def compare_retrieval(rank, world):
    by_counting._SIDE["cpu"] = 48  # several tiles
    wrong = []
    with dist.ProcessGroup() as ranks:
        for name, (arguments, options) in _sets().items():
            alone, shared = (evaluation.retrieval(*arguments, **options, group=who) for who in (None, ranks))
            both = [{**r, "ends": r.intervals, "which": r.without_positives} for r in (alone, shared)]
            if not _same(*both):
                wrong.append(f"{name}: {both}")
    return wrong


def compare_negatives(rank, world):
    x, labels = torch.randn(331, 12, generator=torch.Generator().manual_seed(3)), torch.arange(331) % 23
    x[200:230] = x[:30]
    labels[::7] = -1
    wrong = []
    with dist.ProcessGroup() as ranks:
        for options in ({"k": 5}, {"k": 400}, {"k": 9, "budget": 60_000}, {"k": 3, "similarity": "euclidean"}):
            alone = evaluation.nearest_negatives(x, labels, **options)
            shared = evaluation.nearest_negatives(x, labels, **options, group=ranks)
            if not all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True)):
                wrong.append(str(options))
        done = []
        evaluation.nearest_negatives(x, labels, k=2, group=ranks, progress=lambda *at: done.append(at))
        if rank == 0 and done[-1][0] != done[-1][1]:
            wrong.append(str(done))
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_nearest_negatives_are_those_of_one_process(world):
    assert worlds.run(world, compare_negatives) == [[]] * world


def compare_others(rank, world):
    pair_scan.TILE = 64
    make = torch.Generator().manual_seed(5)
    x, labels = torch.randn(300, 8, generator=make), torch.arange(300) % 20
    x[100:110] = x[:10]
    targets = torch.rand(300, 2, generator=make)
    x, wrong, shown = x + labels[:, None] * 0.02, [], []
    with dist.ProcessGroup() as ranks:
        for name, call in {
            "graded": lambda who: evaluation.graded(x, targets, interval=True, classes=labels, group=who),
            "graded cosine": lambda who: evaluation.graded(x, targets, distance="cosine", budget=10**6, group=who),
            "a gallery": lambda who: evaluation.graded(
                x[:2], targets[:2], gallery=x[2:], gallery_targets=targets[2:], group=who
            ),
            "all pairs": lambda who: evaluation.all_pairs(
                x, labels, interval=True, group=who, progress=lambda done, of: shown.append((done, of))
            ),
            "groups": lambda who: evaluation.all_pairs(x, labels, groups=torch.arange(300) % 3, group=who),
            "few at once": lambda who: evaluation.all_pairs(x, labels, budget=30 << 20, similarity="dot", group=who),
        }.items():
            alone, shared = call(None), call(ranks)
            if not (_same({**alone}, {**shared}) and alone.intervals == shared.intervals):
                wrong.append(f"{name}: {alone} {shared}")
    assert rank or shown[-1][0] == shown[-1][1] > 0
    return wrong


def compare_protocols(rank, world, path):
    """All protocols of one report, as `nearkin evaluate` runs them."""
    from nearkin.data import vectors

    items = vectors.read(Path(path), None, None, multi_label=True)
    names = ("retrieval", "clustering", "verification", "one_shot", "open_set", "graded", "diagnose")
    settings = runner.Settings(names, ways=5, episodes=20, interval=True)
    with dist.ProcessGroup() as ranks:
        shared = runner.evaluate(items, settings=settings, group=ranks)
    return _same(runner.evaluate(items, settings=settings), shared)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_find_what_one_process_finds(world, tmp_path):
    assert worlds.run(world, compare_retrieval) == [[]] * world
    assert worlds.run(world, compare_others) == [[]] * world
    if world == 3:
        rng = np.random.default_rng(0)
        labels = np.arange(90) % 9
        np.savez(
            tmp_path / "e.npz",
            embeddings=rng.normal(size=(90, 6)).astype("f4") + labels[:, None],
            labels=labels,
            targets=rng.random(90),
        )
        assert worlds.run(world, compare_protocols, str(tmp_path / "e.npz")) == [True] * world


def test_shares_are_whole_batches_in_order():
    for number, unit, size in [(1000, 256, 3), (5, 1, 8), (0, 4, 2), (513, 256, 2), (7, 3, 3)]:
        ranks = dist.ProcessGroup()
        ranks.size, covered, sizes = size, [], []
        for rank in range(size):
            ranks.rank = rank
            part = ranks.share(number, unit)
            covered += range(number)[part]
            sizes.append(part.stop - part.start)
            assert part.start % unit == 0 or part.start == number
        assert covered == list(range(number))
        assert unit > 1 or [*ranks.share_sizes(number)] == sizes


def test_alone_it_is_as_if_there_were_no_ranks():
    x, labels = torch.randn(50, 4), torch.arange(50) % 5
    with dist.ProcessGroup() as ranks:
        assert ranks.size == 1
        assert evaluation.retrieval(x, labels, group=ranks) == evaluation.retrieval(x, labels)
        assert ranks.on_rank0("work", lambda: {"a": 1}) == {"a": 1}


def speak(rank, world, home):
    """What both kinds of team answer, and in which turns they work, as if on machines of two ranks each."""
    results = []
    with dist.ProcessGroup(on_failure="exit") as trained, dist.ProcessGroup() as ranks:
        for team, kind in ((trained, "exit"), (ranks, "raise")):
            team.local_rank = rank % 2
            for once in (False, True):
                log = Path(home) / f"{kind} {once}"

                def note(log=log):
                    time.sleep(0.1 * (3 - rank))  # without turns the last would be first
                    with log.open("a") as file:
                        file.write(str(rank))
                    return rank

                assert team.first_on_machine("noting", note, once) == rank
                results.append(log.read_text())
            results.append([*team.values({"rank": rank}), team.on_rank0("asking", lambda: [rank, "ü"])])
    return results


def test_both_teams_speak_alike(tmp_path):
    answers = worlds.run(4, speak, str(tmp_path))
    assert answers == [answers[0]] * 4
    for a_machine, once, values in (answers[0][:3], answers[0][3:]):
        assert [sorted(a_machine[:2]), sorted(a_machine[2:])] == [["0", "2"], ["1", "3"]]
        assert once in ("0213", "0231")
        assert values == [{"rank": 0}, {"rank": 1}, {"rank": 2}, {"rank": 3}, [0, "ü"]]


def heartbeats(rank, world):
    """The threads of a group that evaluates, and the patience of groups."""
    x, labels = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 4
    os.environ["NEARKIN_RANK_TIMEOUT"] = "7"
    try:
        with dist.join() as group:
            evaluation.retrieval(x, labels, group=group)
            threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("nearkin")]
            patience = [group.heartbeat.patience]
        with dist.ProcessGroup(patience=30) as group:
            patience.append(group.heartbeat.patience)
        os.environ["NEARKIN_RANK_TIMEOUT"] = "soon"
        with pytest.raises(
            ValueError, match="NEARKIN_RANK_TIMEOUT must be a number of seconds from 2 to 3600, got 'soon'"
        ):
            dist.ProcessGroup()
    finally:
        del os.environ["NEARKIN_RANK_TIMEOUT"]
    return threads, patience


def test_a_group_has_one_heartbeat_and_one_patience():
    assert worlds.run(2, heartbeats) == [(["nearkin-heartbeat"], [7, 30])] * 2
    with pytest.raises(ValueError, match="patience must be > 0"):
        dist.ProcessGroup(patience=0)
    with pytest.raises(ValueError, match="on_failure"):
        dist.ProcessGroup(on_failure="ignore")


# --- failures: one sentence, the same on every rank, and nobody waits for ever


def _sentence(call):
    try:
        call()
    except RankFailed as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fail(rank, world):
    x, labels = torch.randn(60, 4), torch.arange(60) % 6

    def in_work():
        with dist.ProcessGroup() as ranks, ranks.work("reading"):
            if rank == 1:
                raise ValueError("photos/heron.jpg cannot be read")

    def between_calls():
        with dist.ProcessGroup() as ranks:
            if rank == 1:
                raise TypeError("labels are no tensor")
            ranks.values(rank)

    def while_others_work():
        with dist.ProcessGroup() as ranks, ranks.work("reading", None, 100) as report:
            if rank == 1:
                raise OSError("the disk is gone")
            for done in range(600):
                time.sleep(0.05)
                report(done, 600)

    def other_items():
        with dist.ProcessGroup() as ranks:
            evaluation.retrieval(x + (rank == 1), labels, group=ranks)

    def other_calls():
        with dist.ProcessGroup() as ranks:
            if rank:
                evaluation.graded(x, x[:, 0], group=ranks)
            else:
                evaluation.retrieval(x, labels, group=ranks)

    def wrong_input_on_one():
        with dist.ProcessGroup() as ranks:
            evaluation.retrieval(x, labels[: 60 - rank], group=ranks)

    def first_leaves_early():
        with dist.ProcessGroup() as ranks:
            if rank:
                evaluation.retrieval(x, labels, group=ranks)

    began = time.monotonic()
    calls = in_work, between_calls, while_others_work, other_items, other_calls, wrong_input_on_one, first_leaves_early
    return {call.__name__: _sentence(call) for call in calls} | {"seconds": time.monotonic() - began}


def test_a_failure_is_one_sentence_on_every_rank():
    one, other = worlds.run(2, fail)
    assert max(one.pop("seconds"), other.pop("seconds")) < 30
    assert one["in_work"] == other["in_work"] == "rank 1: photos/heron.jpg cannot be read"
    assert one["between_calls"] == other["between_calls"] == "rank 1: labels are no tensor"
    assert one["while_others_work"] == other["while_others_work"] == "rank 1: the disk is gone"
    assert one["other_items"] == other["other_items"]
    assert one["other_items"] == "embeddings must be the same on all ranks; rank 1 has others than rank 0"
    assert "embeddings" in one["other_calls"] or "same calls" in one["other_calls"]
    assert "60 rows, 59 labels" in one["wrong_input_on_one"] and "rank 1" in one["wrong_input_on_one"]
    assert "59 labels" in other["wrong_input_on_one"]
    assert "same calls" in one["first_leaves_early"] and "same calls" in other["first_leaves_early"]


# --- embedding and enrolment


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """photos/ with doubles, one of them in the next part of the same round, and a run."""
    folder = tmp_path_factory.mktemp("home")
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("NEARKIN_CACHE", str(folder / "cache"))
        for c in range(12):
            (folder / "photos" / f"class{c}").mkdir(parents=True)
            for i in range(5):
                pixels = rng.integers(0, 60, (20, 20, 3)).astype(np.uint8) + np.uint8(15 * c)
                Image.fromarray(pixels).save(folder / "photos" / f"class{c}" / f"{i}.png")
        sets = [part for text in QUICK for part in ("--set", text)]
        result = CliRunner().invoke(app, ["train", "photos", *sets, "--quiet", "--out", "run"])
        assert result.exit_code == 0, result.output
        for double, of in {"class9/again": "class0/3", "class0/twin": "class0/1"}.items():
            (folder / f"photos/{double}.png").write_bytes((folder / f"photos/{of}.png").read_bytes())
    return folder


def embed_both(rank, world, home, batch, views):
    os.chdir(home)
    os.environ["NEARKIN_CACHE"] = str(Path(home) / "cache")
    shown = []
    with dist.ProcessGroup() as ranks:
        options = {"batch": batch, "views": views, "device": "cpu"}
        alone = training.embed_source("run", "photos", **options)
        shared = training.embed_source("run", "photos", **options, progress=lambda *n: shown.append(n), group=ranks)
    assert rank or shown[-1] == (62, 62)
    return torch.equal(alone.embeddings, shared.embeddings) and alone.names == shared.names


def test_embeddings_are_the_same_to_the_last_bit(home):
    for world, batch, views in [(2, 7, 1), (3, 50, 2)]:  # in batches of 50, one of three ranks has nothing to do
        assert worlds.run(world, embed_both, str(home), batch, views) == [True] * world


def enrol_shared(rank, world, home, source, place, part):
    os.chdir(home)
    gallery.enroll.PICTURE_BATCH = part
    with dist.ProcessGroup() as ranks:
        if rank:
            counts = gallery.enrol_source(Encoding("run", "cpu"), source, group=ranks, skip_unreadable=True)
        else:
            with gallery.Gallery.open(place, "run", device="cpu") as opened:
                counts = gallery.enrol_source(opened, source, group=ranks, skip_unreadable=True)
    return list(counts)


UNLIKE = ("meta", "facts", "sqlite_sequence", "transactions")  # times, and random numbers of each writing


def _rows(path):
    with closing(sqlite3.connect(path)) as link:
        names = [name for (name,) in link.execute("select name from sqlite_master where type = 'table' order by name")]
        tables = {name: link.execute(f"select * from {name} order by 1").fetchall() for name in names}
    return {name: rows for name, rows in tables.items() if rows and name not in UNLIKE}


def test_a_shared_gallery_is_row_for_row_that_of_one_process(home, monkeypatch):
    monkeypatch.chdir(home)
    broken = home / "photos/class1/broken.png"
    monkeypatch.setattr(gallery.enroll, "PICTURE_BATCH", 4)
    broken.write_bytes(b"no picture")
    try:
        with gallery.Gallery.open("alone.gallery", "run", device="cpu") as opened:
            alone = gallery.enrol_source(opened, "photos", skip_unreadable=True)
            again = gallery.enrol_source(opened, "photos", skip_unreadable=True)
        for world in (2, 3):
            place = f"shared{world}.gallery"
            arguments = (str(home), "photos", place, 4)
            assert worlds.run(world, enrol_shared, *arguments) == [list(alone)] * world
            assert worlds.run(world, enrol_shared, *arguments) == [list(again)] * world
            assert _rows(place) == _rows("alone.gallery")
    finally:
        broken.unlink()
    assert alone.added == 60 and alone.known == 2 and again.known == 62 and len(alone.unreadable) == 1


# --- the verbs, as torchrun starts them


def torchrun(home, *arguments, world=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += ["-m", "nearkin", *map(str, arguments)]
    options = {"NEARKIN_CACHE": str(home / "cache"), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=home, env=os.environ | options, capture_output=True, text=True, timeout=120, check=False
    )


def test_verbs_under_torchrun(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("NEARKIN_CACHE", str(home / "cache"))
    shared = torchrun(home, "evaluate", "run", "photos", "--interval", "--device", "cpu", "--json", "shared.json")
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout.count("recall@1") == 1  # one rank prints
    alone = separate_runner().invoke(
        app, ["evaluate", "run", "photos", "--interval", "--device", "cpu", "--json", "a.json"]
    )
    assert alone.exit_code == 0
    assert json.loads(Path("shared.json").read_text()) == json.loads(Path("a.json").read_text())
    assert shared.stdout.strip() == alone.stdout.strip()


def test_a_verb_that_fails_on_a_rank_ends_all_with_one_sentence(home):
    broken = home / "photos/class1/broken.png"
    broken.write_bytes(b"no picture")
    try:
        process = torchrun(home, "enrol", "run", "photos", "--gallery", "fails.gallery", "--device", "cpu")
    finally:
        broken.unlink()
    assert process.returncode != 0
    lines = [line for line in process.stderr.splitlines() if "broken.png" in line]
    assert len(lines) == 1 and "rank" in lines[0] and "--skip-unreadable" in lines[0], process.stderr
