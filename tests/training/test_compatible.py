"""Backward-compatible training: the term beside the loss, retrieval across encoders, resuming, ranks, refusals, use."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import commands
import worlds
from nearkin import evaluation, models, training
from nearkin.gallery import Gallery
from nearkin.training.compatible import CompatibleLoss, class_means
from nearkin.training.config.recipe import read
from nearkin.training.config.registry import LOSSES
from nearkin.training.cross_retrieval import cross_metrics, cross_per_query
from nearkin.training.old_rows import FILE
from nearkin.training.validation import HeldOut

SMALL = ["training.epochs=2", "training.batches=4", "training.log_steps=1", "encoder.hidden=[16]", "sampler.batch=12"]
SMALL += ["training.workers=0", "evaluation.interval=false", "training.device=cpu"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """vectors.npz, targets.npz, photos/, and runs on them: old of 6 dimensions, old-photos of 16 px."""
    folder = tmp_path_factory.mktemp("compatible")
    commands.noisy_vectors(folder / "vectors.npz", 16)
    commands.noisy_vectors(folder / "wide.npz", 16, dim=13)
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(80, 12)).astype(np.float32)
    np.savez(folder / "targets.npz", embeddings=rows, targets=rows[:, :2])
    commands.photos(folder / "photos")
    models.save(
        models.build("mlp", features=12, hidden=[], dim=6, seed=3),
        folder / "old",
        {"kind": "vectors", "features": 12},
    )
    prepared = {"kind": "pictures", "size": 16, "stored": 16, "fit": "crop", "channels": 1, "flip": False}
    models.save(models.build("small-cnn", width=4, size=16, channels=1, dim=5), folder / "old-photos", prepared)
    return folder


def recipe_of(home, *sets, source="vectors.npz", old="old"):
    return read(None, [f'data.source="{home}/{source}"', *SMALL, f'compatible.run="{home}/{old}"', *sets])


def weights(out):
    return (out / "model.safetensors").read_bytes()


def lines(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


# --- the term


def by_hand(method, z, ids, old, all_old, all_ids, scale, share):
    """The term in float64, one item after the other."""
    unit = lambda x: x / x.norm()  # noqa: E731
    means = [unit(sum(unit(o) for o, c in zip(all_old, all_ids, strict=True) if c == k)) for k in sorted(set(all_ids))]
    total = 0.0
    for i, row in enumerate(z):
        x = unit(row[: old.shape[1]])
        if method == "regression":
            total = total + 1 - x @ unit((1 - share) * unit(old[i]) + share * means[ids[i]])
        elif method == "classes":
            logits = torch.stack([scale * (x @ w) for w in means])
            total = total + torch.logsumexp(logits, 0) - logits[ids[i]]
        else:
            logits = torch.stack([scale * (x @ unit(o)) for o in old])
            positive = [logits[j] for j in range(len(z)) if ids[j] == ids[i]]
            total = total + torch.logsumexp(logits, 0) - sum(positive) / len(positive)
    return total / len(z)


@pytest.mark.parametrize("dim", [5, 7])
@pytest.mark.parametrize(
    "method, share", [("classes", 0), ("items", 0), ("regression", 0), ("regression", 0.3), ("regression", 1)]
)
def test_the_term_is_that_of_a_loop(method, share, dim):
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(12, 5, generator=generator, dtype=torch.float64) * 3
    labels, items = torch.arange(12) % 4, torch.tensor([0, 4, 1, 5, 9, 3])
    z = torch.randn(6, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    term = CompatibleLoss(old, labels, method, 0.5, share, 8.0)
    value = term(z, labels[items], items=items)
    expected = 0.5 * by_hand(method, z, labels[items].tolist(), old[items], old, labels.tolist(), 8.0, share)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    (gradient,) = torch.autograd.grad(value, z)
    torch.testing.assert_close(gradient, *torch.autograd.grad(expected, z), rtol=1e-7, atol=1e-9)
    assert gradient[:, 5:].abs().max() == 0 if dim > 5 else True
    assert not list(term.parameters()) and not term.state_dict()


def test_of_levels_the_finest_counts_and_with_targets_the_item():
    generator = torch.Generator().manual_seed(0)
    old, items = torch.randn(8, 4, generator=generator), torch.tensor([0, 4, 1, 2])
    classes, z = torch.arange(8) % 4, torch.randn(4, 4, generator=generator)
    levels = torch.stack([classes, classes // 2], 1)
    plain = CompatibleLoss(old, classes, "items", 1.0, scale=4.0)(z, classes[items], items=items)
    assert CompatibleLoss(old, levels, "items", 1.0, scale=4.0)(z, levels[items], items=items) == plain
    targets = torch.rand(8)
    alone = CompatibleLoss(old, targets, "items", 1.0, scale=4.0)(z, targets[items], items=items)
    assert alone == CompatibleLoss(old, torch.arange(8), "items", 1.0, scale=4.0)(z, items, items=items) != plain
    assert torch.equal(class_means(torch.eye(4).repeat(2, 1), levels), torch.eye(4))


# --- retrieval across encoders


@pytest.mark.parametrize("grouped", [False, True])
def test_old_among_old_is_plain_retrieval(grouped):
    rng = np.random.default_rng(0)
    labels, groups = np.repeat(np.arange(6), 7), rng.integers(-1, 3, 42)
    rows = torch.from_numpy(rng.normal(size=(6, 4))[labels] + rng.normal(size=(42, 4)))
    held_out = HeldOut(np.arange(42), labels, None, groups=groups if grouped else None)
    options = {"groups": torch.from_numpy(groups)} if grouped else {}
    plain = evaluation.retrieval(rows, torch.from_numpy(labels), ks=(1,), **options)
    across = cross_metrics(rows, rows, held_out, False, CPU)
    assert across == {"old_map@r": pytest.approx(plain["map@r"]), "old_recall@1": pytest.approx(plain["recall@1"])}
    longer = torch.cat([rows, 100 * torch.randn(42, 3, dtype=rows.dtype)], 1)
    assert cross_metrics(longer, rows, held_out, False, CPU) == across


def test_a_gallery_of_its_own_is_that_of_the_old_encoder():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(5), 4)
    held_out = HeldOut(np.arange(20), labels, None, np.arange(20, 40), labels)
    new, old = (torch.from_numpy(rng.normal(size=(40, 4))) for _ in range(2))
    ids = torch.from_numpy(labels)
    plain = evaluation.retrieval(new[:20], ids, old[20:], ids, ks=(1,))
    assert cross_metrics(new, old, held_out, False, CPU)["old_map@r"] == pytest.approx(plain["map@r"])


def test_targets_are_searched_half_by_half():
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(11, 2))
    new, old = (torch.from_numpy(rng.normal(size=(11, 4))) for _ in range(2))
    values = cross_per_query(new, old, HeldOut(np.arange(11), None, targets), True, CPU, (3,))["ndcg@3"]
    t = torch.from_numpy(targets)
    for even in (0, 1):
        queries, rows = (torch.arange(i, 11, 2) for i in (even, 1 - even))
        half = evaluation.graded(
            new[queries], t[queries], (3,), gallery=old[rows], gallery_targets=t[rows], distance="cosine"
        )
        assert float(values[queries].mean()) == pytest.approx(half["ndcg@3"])


# --- a run


@pytest.mark.slow
def test_new_queries_find_old_rows(home, tmp_path):
    """Far beyond what an unrelated network finds; everything that a run says of it is there."""
    longer = ["training.batches=150", "compatible.method=regression", "optimizer.lr=0.01", "encoder.dim=8"]
    longer += ["compatible.class_share=0.0", "compatible.weight=10.0"]
    events = []
    out = tmp_path / "new"
    outcome = training.train(recipe_of(home, *longer), out, events.append)
    facts = outcome.results["compatible"]
    plain = [text for text in longer if "compatible" not in text]
    source = f'data.source="{home}/vectors.npz"'
    alone = training.train(read(None, [source, *SMALL, *plain]), tmp_path / "alone")
    rows = load_file(out / FILE)["rows"][torch.from_numpy(alone.test.indices)]
    unrelated = cross_metrics(alone.embeddings, rows, alone.test, False, CPU)["old_map@r"]
    across = facts["test"]["new_old"]["map@r"]["value"]
    assert across > unrelated + 0.6 * (facts["test"]["old_old"]["map@r"]["value"] - unrelated), facts["test"]
    assert set(facts["test"]) == {"old_old", "new_old", "new_new"} and set(facts["against"]) == {"new_old", "new_new"}
    assert facts["test"]["new_new"]["map@r"]["value"] == pytest.approx(
        outcome.results["test"]["trained"]["map@r"]["value"]
    )
    assert "among the rows of" in facts["sentence"].lower()
    epoch = [event for event in events if event["event"] == "epoch"][-1]
    assert {"map@r", "old_map@r", "old_recall@1"} <= set(epoch["val"])
    assert [event for event in events if event["event"] == "old_rows"]
    assert any("among its own rows: map@r" in note for note in outcome.notes)
    description = json.loads((out / "encoder.json").read_text())
    assert description["compatible"] == {"run": f"{home}/old", "encoder": facts["encoder"], "dim": 6}
    assert description["lengths"] == [8, 6]


def test_the_best_weights_are_the_best_of_both(home, tmp_path):
    outcome = training.train(recipe_of(home, "training.epochs=6", "training.patience=9"), tmp_path / "new")
    epochs = [line["val"] for line in outcome.history if line["event"] == "epoch"]
    best = max(range(6), key=lambda i: epochs[i]["map@r"] + epochs[i]["old_map@r"])
    assert outcome.results["val"]["epoch"] == best + 1


def test_the_dimensions_are_those_of_the_old_run(home, tmp_path):
    training.train(recipe_of(home), tmp_path / "new")
    assert read(tmp_path / "new" / "recipe.toml").encoder["dim"] == 6
    assert "lengths" not in json.loads((tmp_path / "new" / "encoder.json").read_text())


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_its_term(name, home, tmp_path):
    source = "targets.npz" if name == "logratio" else "vectors.npz"
    sets = [f"loss.name={name}", "training.epochs=1", "training.batches=2"]
    batch = ["sampler.neighbours=2"] if name == "logratio" else []
    results = {}
    for weight in (1e-9, 5.0):
        out = tmp_path / str(weight)
        training.train(recipe_of(home, *sets, *batch, f"compatible.weight={weight}", source=source), out)
        results[weight] = lines(out)
    first = [run[0]["loss"] for run in results.values()]
    assert first[1] > first[0] + 0.01  # the same batch and weights, and the term


def test_memory_levels_lengths_and_chunks_have_it_too(home, tmp_path):
    every = ["training.chunk=5", "training.ema=0.5", "loss.name=contrastive", "memory.size=24", "encoder.dim=8"]
    outcome = training.train(recipe_of(home, *every, "loss.matryoshka=[4]"), tmp_path / "new")
    assert np.isfinite(outcome.history[-1]["loss"])
    assert json.loads((tmp_path / "new" / "encoder.json").read_text())["lengths"] == [8, 6, 4]


def test_pictures_are_prepared_for_each_encoder(home, tmp_path):
    """The old run sees grey pictures of 16 px, the new one coloured ones of 24 px."""
    sets = ["encoder.name=small-cnn", "encoder.width=4", "data.size=24", "data.stored=24", "data.channels=3"]
    sets += ["data.cache=false", "training.epochs=1", "training.batches=2", "sampler.batch=8", "sampler.per_class=2"]
    small = [text for text in SMALL if "hidden" not in text and "sampler" not in text]
    recipe = read(None, [f'data.source="{home}/photos"', *small, *sets, f'compatible.run="{home}/old-photos"'])
    training.train(recipe, tmp_path / "new")
    rows = load_file(tmp_path / "new" / FILE)["rows"]
    from nearkin import data
    from nearkin.data import augment, image_cache

    items = data.load(str(home / "photos"))
    stored = image_cache.store(items.pictures, items.names, side=16, channels=1, cache=False)
    encoder, _ = models.load(home / "old-photos")
    with torch.no_grad():
        expected = encoder(augment.centre(torch.from_numpy(np.array(stored.pixels)), 16))
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5)


# --- resuming


def stop_at(step):
    def callback(event):
        if event["event"] == "step_end" and event["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return callback


@pytest.mark.parametrize("method", ["classes", "items", "regression"])
def test_a_stopped_run_ends_the_same_without_the_old_one(method, home, tmp_path):
    shutil.copytree(home / "old", tmp_path / "old")
    sets = [f'compatible.run="{tmp_path}/old"', f"compatible.method={method}"]
    training.train(recipe_of(home, *sets), tmp_path / "whole")
    with pytest.raises(training.Stopped):
        training.train(recipe_of(home, *sets), tmp_path / "cut", stop_at(6))
    shutil.rmtree(tmp_path / "old")
    training.resume(tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole") and lines(tmp_path / "cut") == lines(
        tmp_path / "whole"
    )
    results = [json.loads((tmp_path / name / "results.json").read_text())["compatible"] for name in ("cut", "whole")]
    assert results[0] == results[1]


def test_damaged_old_embeddings_are_made_again_by_the_same_encoder_alone(home, tmp_path):
    shutil.copytree(home / "old", tmp_path / "old")
    moved = f'compatible.run="{tmp_path}/old"'
    training.train(recipe_of(home, moved), tmp_path / "whole")
    for damage in ("bytes", "gone"):
        out = tmp_path / damage
        with pytest.raises(training.Stopped):
            training.train(recipe_of(home, moved), out, stop_at(3))
        intact, rows = (out / FILE).read_bytes(), load_file(out / FILE)["rows"].clone()
        if damage == "bytes":
            (out / FILE).write_bytes(intact[:-3] + b"abc")
        else:
            (out / FILE).unlink()
        training.resume(out)
        assert torch.equal(load_file(out / FILE)["rows"], rows) and weights(out) == weights(tmp_path / "whole")
    with pytest.raises(training.Stopped):
        training.train(recipe_of(home, moved), tmp_path / "other", stop_at(3))
    (tmp_path / "other" / FILE).unlink()
    models.save(
        models.build("mlp", features=12, hidden=[], dim=6, seed=4),
        tmp_path / "old",
        {"kind": "vectors", "features": 12},
    )
    with pytest.raises(ValueError, match=r"its encoder has changed since .*start a new run"):
        training.resume(tmp_path / "other")


def test_a_run_cut_while_the_old_rows_are_made_goes_on(home, tmp_path):
    def cut(event):
        if event["event"] == "old_rows":
            raise KeyboardInterrupt

    training.train(recipe_of(home), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        training.train(recipe_of(home), tmp_path / "cut", cut)
    training.resume(tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


# --- what is wrong


@pytest.mark.parametrize(
    "sets, sentence",
    [
        (['compatible.run="nowhere"'], "compatible.run: nowhere"),
        (['compatible.run="{home}"'], "compatible.run: .*"),
        (["encoder.dim=5"], "encoder.dim must be at least the 6 dimensions of .*old, got 5"),
        (['compatible.run="{home}/old-photos"'], "compatible.run must take vectors, .*which takes pictures"),
        (['data.source="{home}/wide.npz"'], r"compatible.run must take items of shape \[13\], .*which takes \[12\]"),
        (["compatible.method=regression", "compatible.scale=3"], "compatible.scale would have no effect"),
        (["compatible.method=items", "compatible.class_share=0.5"], "compatible.class_share would have no effect"),
        (
            ['data.source="{home}/targets.npz"', "compatible.class_share=0.5", "sampler.neighbours=2"],
            "compatible.class_share must be 0 for loss logratio",
        ),
        (["compatible.method=other"], "compatible.method"),
        (["compatible.weight=0"], "compatible.weight"),
        (
            ['data.source="{home}/targets.npz"', "compatible.method=classes", "sampler.neighbours=2"],
            "compatible.method must be items or regression for loss logratio",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence_and_leaves_nothing(sets, sentence, home, tmp_path):
    with pytest.raises(ValueError, match=sentence) as error:
        training.train(recipe_of(home, *(text.replace("{home}", str(home)) for text in sets)), tmp_path / "new")
    assert "\n" not in str(error.value) and not (tmp_path / "new").exists()


@pytest.mark.parametrize("key, value", [("method", '"items"'), ("weight", 2), ("class_share", 0.5), ("scale", 8)])
def test_without_an_old_run_its_keys_have_no_effect(key, value, home, tmp_path):
    recipe = read(None, [f'data.source="{home}/vectors.npz"', *SMALL, f"compatible.{key}={value}"])
    with pytest.raises(ValueError, match=f"compatible.{key} would have no effect: compatible.run is not set"):
        training.train(recipe, tmp_path / "new")


def test_a_damaged_old_run_is_refused(home, tmp_path):
    shutil.copytree(home / "old", tmp_path / "old")
    content = (tmp_path / "old" / "model.safetensors").read_bytes()
    (tmp_path / "old" / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"compatible\.run: .*is corrupt or of another encoder"):
        training.train(recipe_of(home, f'compatible.run="{tmp_path}/old"'), tmp_path / "new")


# --- its use


@pytest.fixture(scope="module")
def new(home):
    training.train(recipe_of(home, "encoder.dim=8", "training.batches=30"), home / "new")
    training.train(read(None, [f'data.source="{home}/vectors.npz"', *SMALL, "encoder.dim=6"]), home / "unrelated")
    return home / "new"


def test_a_compatible_run_searches_the_gallery_and_does_not_enrol(home, new, tmp_path):
    with np.load(home / "vectors.npz") as file:
        rows, labels = file["embeddings"], [str(label) for label in file["labels"]]
    with Gallery.open(tmp_path / "g.db", home / "old") as gallery:
        gallery.enrol(list(rows[:40]), labels[:40])
    with Gallery.open(tmp_path / "g.db", new) as gallery:
        hits = gallery.search(rows[0], k=3)
        encoder, _ = models.load(new)
        with torch.no_grad():
            query = encoder.shorten(6)(torch.from_numpy(rows[:1]))
            old = models.load(home / "old")[0](torch.from_numpy(rows[:40]))
        cosines = torch.nn.functional.cosine_similarity(query, old)
        assert [hit.similarity for hit in hits] == pytest.approx(cosines.topk(3).values.tolist(), abs=1e-5)
        assert "compatible" in gallery.identify(rows[0]).note
        with pytest.raises(ValueError, match="it can search them, not enrol among them"):
            gallery.enrol([rows[50]], "x")
    with pytest.raises(ValueError, match="was made with another encoder"):
        Gallery.open(tmp_path / "g.db", home / "unrelated")


@pytest.mark.slow
def test_the_command_line_and_the_report(home, tmp_path):
    sets = [part for text in SMALL for part in ("--set", text)]
    result = commands.run(
        "train", home / "vectors.npz", "--compatible-with", home / "old", "--out", tmp_path / "new", *sets
    )
    assert "among the rows of" in commands.output_of(result).lower()
    page = (tmp_path / "new" / "report.html").read_text()
    assert "Compatibility" in page and "new among old rows" in page and "MAP@R among old rows" in page
    assert "old_map@r" not in page and "old map@r" not in page
    outcome = training.train(
        str(home / "vectors.npz"), tmp_path / "api", compatible_with=home / "old", settings=SMALL, report=False
    )
    assert outcome.recipe.compatible.run == str(home / "old")


def trained(rank, size, home, out, *sets):
    training.train(recipe_of(home, *sets), out)


@pytest.mark.slow
@pytest.mark.parametrize("sets", [["compatible.method=items"], ["loss.name=arcface", "loss.shard=true"]])
def test_two_ranks_are_one(sets, home, tmp_path):
    sets = [*sets, "sampler.batch=14", "sampler.per_class=2", "training.batches=10"]
    trained(0, 1, home, tmp_path / "one", *(text for text in sets if "shard" not in text))
    worlds.run(2, trained, str(home), tmp_path / "two", *sets)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5)
    assert torch.equal(*(load_file(tmp_path / name / FILE)["rows"] for name in ("one", "two")))
    figures = [json.loads((tmp_path / name / "results.json").read_text())["compatible"] for name in ("one", "two")]
    assert figures[0]["test"] == figures[1]["test"]
