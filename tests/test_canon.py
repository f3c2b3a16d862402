"""The comparison of the canon: its plan, its memory of what is done, and that a final is what a recipe trains."""

import gzip
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import canon
import canon_plan
import canon_tables
from canon_plan import Options
from canon_rows import BASES, CANDIDATES, PEER, RATES, rows_of
from canon_work import Desk, Job, content_of, key
from nearkin import training
from nearkin.training.config.recipe import read
from nearkin.training.config.registry import loss_settings, sampler_settings

SUBJECTS = ("cub200", "fashion-mnist")
SHORT = {"training.epochs": 2, "training.batches": 2}


def played(subject, options, values=lambda job: 0.5, until=lambda job: False):
    """The whole plan with made-up results: what was done, in its order."""
    done, order = {}, []
    while jobs := canon_plan.jobs(subject, options, done):
        job = jobs[0]
        order.append(job)
        if until(job):
            break
        figure = {"value": 0.3, "low": 0.25, "high": 0.35}
        tested = dict.fromkeys(canon_tables.METRICS, figure)
        more = {"device": "a GPU", "torch": "2", "training_seconds": 9.0, "peak_bytes": 2**30}
        done[key(job)] = {"val": {"map@r": values(job), "recall@1": 0.5}} if job.stage == "search" else {"test": tested}
        done[key(job)] |= more
    return done, order


def fashion(folder, rng, poison=False):
    """The four files with a few noisy pictures of ten kinds; poison: the test classes' labels are shuffled."""
    folder.mkdir(exist_ok=True)
    looks = rng.integers(0, 200, (10, 28, 28))
    for part, each in (("train", 24), ("t10k", 4)):
        labels = np.repeat(np.arange(10, dtype=np.uint8), each)
        pixels = (looks[labels] + rng.integers(0, 56, (len(labels), 28, 28))).astype(np.uint8)
        if poison:
            labels[labels >= 5] = np.roll(labels[labels >= 5], 7)
        for kind, content in (("images-idx3", pixels), ("labels-idx1", labels)):
            head = struct.pack(f">HBB{content.ndim}I", 0, 8, content.ndim, *content.shape)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + content.tobytes(), 1))
    return str(folder)


def birds(folder, rng):
    """200 classes of three photos in the publisher's layout."""
    from PIL import Image

    lines = {name: [] for name in ("images", "image_class_labels", "train_test_split")}
    for kind in range(200):
        look = rng.integers(0, 200, (16, 16, 3))
        place = f"{kind + 1:03d}.Bird_{kind}"
        (folder / "images" / place).mkdir(parents=True)
        for i in range(3):
            name, number = f"{place}/{i}.png", 3 * kind + i + 1
            picture = (look + rng.integers(0, 56, look.shape)).astype(np.uint8)
            Image.fromarray(picture).save(folder / "images" / name)
            for file, value in zip(lines, (name, kind + 1, 1), strict=True):
                lines[file].append(f"{number} {value}")
    for file, content in lines.items():
        (folder / f"{file}.txt").write_text("\n".join(content))
    (folder / "classes.txt").write_text("\n".join(f"{k + 1} {k + 1:03d}.Bird_{k}" for k in range(200)))
    return str(folder)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_setting_is_one_that_its_loss_has(subject):
    for row in rows_of(subject):
        for setting in row.tried:
            recipe = read(base=content_of(Job(subject, "final", row.name, setting)))
            assert_has(loss_settings(recipe), "loss", setting)
            assert_has(sampler_settings(recipe), "sampler", setting)
    for setting in CANDIDATES.values():
        recipe = read(base=content_of(Job("best", "final", "best recipe", setting)))
        assert_has(loss_settings(recipe), "loss", setting)
        assert_has(recipe.encoder, "encoder", setting)


def assert_has(settings, section, setting):
    """What a row sets in this section of the recipe is what is built from it."""
    wanted = {key.removeprefix(f"{section}."): value for key, value in setting.items() if key.startswith(f"{section}.")}
    wanted.pop("name", None)
    assert {key: settings[key] for key in wanted} == wanted


def test_every_loss_is_in_the_table_and_every_row_of_the_peer():
    from nearkin.training.config.registry import LOSSES

    rows = rows_of("cub200")
    assert {row.tried[0]["loss.name"] for row in rows} == set(LOSSES)
    assert {row.peer for row in rows} - {None} == set(PEER) - {"frozen"}


def test_plan_searches_settings_then_rates_then_tests_and_what_the_peer_has_first():
    rows = {row.name: row for row in rows_of("cub200")}
    wanted = {"loss.margin": 0.35, "loss.scale": 10.0}

    def values(job):
        right = wanted.items() <= job.setting.items()
        return 0.4 + 0.1 * right + 0.05 * (job.setting["optimizer.lr"] == RATES["cub200"][2])

    done, order = played("cub200", Options(seeds=3), values)
    assert order[0].stage == "frozen"
    cosface = [job for job in order if job.row == "CosFace"]
    assert [job.stage for job in cosface] == ["search"] * 6 + ["final"] * 3
    final = cosface[-1].setting
    assert wanted.items() <= final.items() and final["optimizer.lr"] == RATES["cub200"][2]
    assert "training.epochs" not in final
    last_of_peer = max(i for i, job in enumerate(order) if job.seed < 2 and not rows.get(job.row, rows["circle"]).group)
    assert last_of_peer < min(i for i, job in enumerate(order) if job.row == "circle")
    assert len({key(job) for job in order}) == len(order) == len(done)


def test_plan_goes_on_from_anywhere():
    options = Options(rows=("CosFace", "lifted", "siamese"))
    finished, order = played("cub200", options)
    for cut in (0, 3, 7, len(order) - 1):
        done = {key(job): finished[key(job)] for job in order[:cut]}
        while jobs := canon_plan.jobs("cub200", options, done):
            done[key(jobs[-1])] = finished[key(jobs[-1])]  # workers end in any order
        assert done == finished


def test_a_row_that_always_diverges_is_not_tested_and_an_unknown_row_is_answered():
    options = Options(rows=("siamese",))
    done, _ = played("cub200", options, values=lambda job: -1.0)
    assert not canon_plan.finals("cub200", rows_of("cub200")[0], options, done)
    with pytest.raises(ValueError, match='unknown row "siames"; known: contrastive'):
        canon_plan.jobs("cub200", Options(rows=("siames",)), {})


def test_book_keeps_what_is_done_and_tries_again_what_failed(tmp_path):
    book = canon.Book(tmp_path, "best")
    jobs = [Job("best", "search", name, {}) for name in "abc"]
    for job, result in zip(jobs, ({"val": {"map@r": 0.5}}, {"failed": "no memory"}, {"diverged": "NaN"}), strict=True):
        book.write(job, result)
    with (tmp_path / "best.jsonl").open("ab") as file:
        file.write(b'{"job": {"subj')
    again = canon.Book(tmp_path, "best")
    assert set(again.done) == {key(jobs[0]), key(jobs[2])}
    again.write(jobs[1], {"val": {"map@r": 0.1}})
    assert len(canon.Book(tmp_path, "best").done) == 3


def test_search_sees_nothing_of_the_test_classes(tmp_path):
    job = Job("fashion-mnist", "search", "contrastive", {"loss.name": "contrastive", "encoder.width": 4, **SHORT})
    scores = []
    for poison in (False, True):
        desk = Desk(fashion(tmp_path / "set", np.random.default_rng(0), poison), partial=True)
        parts = desk.prepared(job).parts
        labels = desk.prepared(job).items.labels
        assert set(labels[parts.train]) == {0, 1, 2} and set(labels[parts.val]) == {3, 4} and not len(parts.test)
        scores.append(desk.do(job)["val"])
    assert scores[0] == scores[1]
    tested = Desk(str(tmp_path / "set"), partial=True).prepared(job._replace(stage="final")).parts.test
    assert set(labels[tested]) == {5, 6, 7, 8, 9}


def test_a_final_is_what_nearkin_train_makes_of_its_recipe(tmp_path):
    root = birds(tmp_path / "birds", np.random.default_rng(0))
    small = {"encoder.name": "small-cnn", "encoder.freeze_norms": False, "data.size": 16, "data.stored": 16}
    small |= {"encoder.width": 4, "sampler.batch": 24, "sampler.per_class": 2, "training.ema": 0.5, **SHORT}
    job = Job("cub200", "final", "x", {"loss.name": "cosface", "loss.scale": 16.0, **small}, seed=1)
    final = Desk(root, partial=True).do(job)
    sets = [f"data.root={root}", "data.partial=true", "training.seed=1", "training.keep_start=false"]
    recipe = read(base=content_of(job), sets=sets)
    results = training.train(recipe, tmp_path / "run").results
    for name in ("recall@1", "recall@8", "map@r"):
        assert final["test"][name] == results["test"]["trained"][name]
    assert final["test"]["nmi"]["value"] == results["clustering"]["nmi"]
    assert final["steps"] == results["steps"] == 4


def test_tables_picture_and_recipes(tmp_path):
    options = Options(seeds=2)
    done, order = played("cub200", options)
    job = next(job for job in order if job.stage == "final" and job.row == "ArcFace")
    done[key(job._replace(stage="speed", seed=0))] = {"images_per_second": 12345.6}
    canon_tables.write("cub200", options, done, tmp_path)
    text = (tmp_path / "cub200.md").read_text()
    assert "| ArcFace | 30.0 ± 0.0 (25.0–35.0) |" in text and "33.4, 69.7, 9.5, 50.3" in text and "12,346" in text
    assert len(json.loads((tmp_path / "cub200.json").read_text())["rows"]) == len(rows_of("cub200")) + 1
    assert (tmp_path / "cub200.csv").read_text().count("\n") == len(rows_of("cub200")) + 2
    assert (tmp_path / "cub200.svg").stat().st_size > 10_000
    canon_tables.recipes("cub200", options, done, tmp_path)
    files = sorted((tmp_path / "cub200-96").glob("*.toml"))
    assert len(files) == sum(not row.name.endswith(("defaults", "on attributes")) for row in rows_of("cub200"))
    for file in files:
        recipe = read(file)
        assert recipe.data.size == 96 and recipe.training.epochs == BASES["cub200"]["training"]["epochs"]
        head = file.read_text().splitlines()[:3]
        assert head[0].endswith(f"--recipe recipes/cub200-96/{file.name}") and "0.300 (0.250-0.350)" in head[1]


def test_the_best_recipe_is_chosen_among_candidates(tmp_path):
    name = list(CANDIDATES)[1]
    done, order = played("best", Options(), values=lambda job: 0.4 + 0.1 * (job.row == name))
    assert [job.stage for job in order] == ["search"] * len(CANDIDATES) + ["final"] * 2
    assert order[-1].setting == CANDIDATES[name]
    canon_tables.recipes("best", Options(), done, tmp_path)
    assert read(tmp_path / "cub200-128.toml").encoder["pooling"] == CANDIDATES[name]["encoder.pooling"]


@pytest.mark.slow
def test_workers_do_the_plan_and_one_that_dies_is_replaced(tmp_path, monkeypatch):
    root = fashion(tmp_path / "set", np.random.default_rng(0))
    monkeypatch.setenv("PYTHONPATH", str(Path(canon.__file__).parent))
    options = Options(seeds=1, search_epochs=1, epochs=1, batches=1, rows=("siamese",))
    book = canon.Book(tmp_path, "fashion-mnist")
    workers = canon.Workers(1, root, True)
    try:
        workers.idle[0][1].terminate()
        canon.compare("fashion-mnist", options, book, workers, 300)
    finally:
        workers.close()
    lines = [json.loads(line) for line in book.path.read_text().splitlines()]
    assert sum("failed" in line["result"] for line in lines) <= 1 < sum("val" in line["result"] for line in lines)
    assert sum(line["job"]["stage"] == "final" and "test" in line["result"] for line in lines) == 1
