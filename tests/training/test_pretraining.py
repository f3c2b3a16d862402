"""Pretraining on pictures without labels: what it sees, that it resumes to the bit, and that it is handed on."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import worlds
from nearkin import losses, training
from nearkin.core.random import Salt, salted
from nearkin.data import augment
from nearkin.training import pretraining
from nearkin.training.config.recipe import read
from nearkin.training.loader import ItemStore
from nearkin.training.prepare import prepare
from nearkin.training.run_list import list_runs
from nearkin.training.unlabelled_items import StackedRows

TINY = ["encoder.name=small-cnn", "encoder.width=4", "encoder.dim=4", "data.size=16", "data.stored=20"]
TINY += ["sampler.batch=8", "sampler.per_class=2", "training.epochs=2", "training.batches=3", "training.log_steps=1"]
TINY += ["training.workers=0", "data.cache=false", "evaluation.interval=false"]
VIEWS = ["unlabelled.epochs=2", "unlabelled.batch=6", "unlabelled.batches=3", "unlabelled.projector=[8,6]"]
INFONCE = [*VIEWS, "unlabelled.method=infonce", "unlabelled.queue=20"]
VICREG = VIEWS  # the default


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """photos/ with ten classes of six; more/ with 20 others, three copies of two of them, and all of photos/."""
    folder = tmp_path_factory.mktemp("unlabelled")
    rng = np.random.default_rng(0)

    def picture(path, shade):
        pixels = rng.integers(0, 255, (20, 24, 3)).astype(np.uint8)
        pixels[4:12, 4 : 6 + shade] = 25 * shade
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)

    for number in range(60):
        picture(folder / "photos" / f"class{number // 6}" / f"{number}.png", number // 6)
    for number in range(20):
        picture(folder / "more" / f"{number}.png", number % 10)
    for number in range(3):
        shutil.copy(folder / "more" / f"{number // 2}.png", folder / "more" / f"copy{number}.png")
    shutil.copytree(folder / "photos", folder / "more" / "photos")
    return folder


def recipe_of(home, *sets, source=True, folder="more"):
    own = [f'data.source="{home}/photos"'] if source else []
    tiny = TINY if source else [s for s in TINY if not s.startswith(("sampler", "training.e", "training.b", "eval"))]
    return read(None, [*own, *tiny, f'unlabelled.folder="{home}/{folder}"', *sets])


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def stop_at(step, stage):
    def callback(event):
        if event["event"] == "step_end" and event["step"] == step and event.get("stage") == stage:
            os.kill(os.getpid(), signal.SIGTERM)

    return callback


# --- what it sees


def test_held_out_files_are_left_out_and_listed(home, tmp_path):
    """No picture of validation or test is seen; copies count once; the rest of the folder and the training part are."""
    prepared = prepare(recipe_of(home, *INFONCE))
    rows, record = prepared.unlabelled.rows, prepared.report["unlabelled"]
    held = np.concatenate([prepared.parts.val, prepared.parts.test])
    assert record["pictures"] == len(rows) == 20 + len(prepared.parts.train) and record["duplicates"] > 0
    assert record["held_out"]["files"] == len(held) and not record["held_out"]["kept"]
    shown = {Path(entry["path"]).name for entry in record["held_out"]["shown"]}
    assert shown == {Path(prepared.items.names[i]).name for i in held}
    seen = {row.tobytes() for row in rows[:]}
    assert len(seen) == len(rows) and not seen & {prepared.rows[i].tobytes() for i in held}
    assert {prepared.rows[i].tobytes() for i in prepared.parts.train} < seen
    assert any("left out" in note for note in prepared.notes)
    kept = prepare(recipe_of(home, *INFONCE, "unlabelled.held_out=keep"))
    assert len(kept.unlabelled.rows) == 80 and any("all the same" in note for note in kept.notes)
    alone = prepare(recipe_of(home, *INFONCE, "unlabelled.own_part=false"))
    assert len(alone.unlabelled.rows) == len(rows) and alone.report["unlabelled"]["of_training_part"] == 0
    own = prepare(read(None, [f'data.source="{home}/photos"', *TINY, *INFONCE, "unlabelled.own_part=true"]))
    assert {row.tobytes() for row in own.unlabelled.rows[:]} == {own.rows[i].tobytes() for i in own.parts.train}


def test_stacked_rows_are_those_of_the_arrays():
    rng = np.random.default_rng(0)
    one, two = (rng.integers(0, 255, (n, 2, 2, 3)).astype(np.uint8) for n in (5, 7))
    rows = StackedRows([(one, np.array([4, 0])), (two, np.array([6, 1, 2])), (one, np.array([], np.int64))])
    wanted = np.concatenate([one[[4, 0]], two[[6, 1, 2]]])
    assert np.array_equal(rows[:], wanted) and np.array_equal(rows[1:4], wanted[1:4]) and rows.nbytes == wanted.nbytes
    store = ItemStore(rows, torch.device("cpu"), 2)
    order = np.array([3, 0, 4, 3])
    assert np.array_equal(store.gather(order).numpy(), wanted[order])


def test_batches_have_every_picture_twice_and_are_a_function_of_the_seed():
    sampler = pretraining.TwoViews(23, 5, batches=6, seed=3)
    batches = [sampler.batch(epoch, i) for epoch in range(2) for i in range(6)]
    for batch in batches:
        assert batch[0::2] == batch[1::2] and len(set(batch)) == 5
    first_pass = [item for batch in batches[:4] for item in batch[0::2]]
    assert len(set(first_pass)) == 20, "a pass has no item twice"
    again = pretraining.TwoViews(23, 5, batches=6, seed=3)
    assert [again.batch(1, i) for i in range(6)] == batches[6:]
    assert [pretraining.TwoViews(23, 5, batches=6, seed=4).batch(0, i) for i in range(6)] != batches[:6]


def test_views_are_a_function_of_seed_epoch_index_and_view(home, tmp_path, monkeypatch):
    """The two views differ; another batch order or number of threads does not change them, and training sees others."""
    seen = {}
    plain = augment.warp

    def warp(images, keys, **how):
        seen.setdefault(how["seed"], []).append(keys.clone())
        return plain(images, keys, **how)

    monkeypatch.setattr(augment, "warp", warp)
    training.train(recipe_of(home, *INFONCE), tmp_path / "run")
    views, trained = salted(0, Salt.VIEWS) & (2**63 - 1), 0
    assert set(seen) == {views, trained}
    keys = torch.cat(seen[views])
    assert len(keys) == 2 * 3 * 12 and len(set(keys.tolist())) == len(keys), "no view occurs twice"
    sampler = pretraining.TwoViews(len(prepare(recipe_of(home, *INFONCE)).unlabelled.rows), 6, batches=3, seed=0)
    items = torch.tensor(sampler.batch(1, 2))
    assert torch.equal(seen[views][5], augment.keys(1, 2, items))


# --- the loss


@pytest.mark.parametrize("method", ["infonce", "vicreg"])
def test_the_loss_of_two_views_is_the_plain_one(method, home):
    recipe = prepare(recipe_of(home, *(INFONCE if method == "infonce" else VICREG))).recipe
    loss = pretraining.build_view_loss(recipe, 4).double()
    x, ids = torch.randn(10, 4).double(), torch.arange(5).repeat_interleave(2)
    z = loss.projector(x)
    if method == "infonce":
        wanted = losses.infonce_loss(z, ids, temperature=0.2)
    else:
        wanted = losses.vicreg_loss(z[0::2], ids[0::2], z[1::2], ids[1::2])
    torch.testing.assert_close(loss(x, ids), wanted)
    other = pretraining.build_view_loss(recipe, 4).double()
    assert all(torch.equal(a, b) for a, b in zip(loss.parameters(), other.parameters(), strict=True))
    if method == "infonce":
        assert loss.loss.embeddings.shape == (20, 6) and loss.loss.warmup == 3


# --- the run


@pytest.mark.parametrize("sets", [INFONCE, VICREG], ids=["infonce", "vicreg"])
def test_training_begins_with_the_pretrained_weights(sets, home, tmp_path):
    events = []
    outcome = training.train(recipe_of(home, *sets), tmp_path / "run", events.append, report=True)
    facts = outcome.results["pretraining"]
    assert facts["epochs"] == 2 and facts["steps"] == 6 and len(facts["loss"]) == 2
    assert set(facts["test"]) == set(outcome.results["test"]["trained"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "pretraining.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["event"] == "epoch"] == facts["loss"]
    stages = [event.get("stage") for event in events if event["event"] == "step_end"]
    assert stages == ["pretraining"] * 6 + [None] * 6
    start = load_file(tmp_path / "run" / "pretraining" / "step-00000006.safetensors")
    prepared = prepare(recipe_of(home, *sets))
    trainer = training.run.assemble(prepared, tmp_path / "x", weights=pretraining.pretrained_weights(tmp_path / "run"))
    for name, value in trainer.encoder.state_dict().items():
        assert torch.equal(value, start[f"encoder.{name}"]), name
    untrained = training.run.assemble(prepared, tmp_path / "x").encoder.state_dict()
    assert any(not torch.equal(value, start[f"encoder.{name}"]) for name, value in untrained.items())
    plain = training.train(read(None, [f'data.source="{home}/photos"', *TINY]), tmp_path / "plain")
    assert weights(tmp_path / "plain") != weights(tmp_path / "run") and "pretraining" not in plain.results
    assert not (tmp_path / "plain" / "pretraining").exists() and "unlabelled" not in plain.recipe.plain()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert 'id="pretraining"' in page and 'id="pretraining"' not in _report(plain)


def _report(outcome):
    from nearkin import report

    return report.of_run(outcome).read_text(encoding="utf-8")


@pytest.mark.parametrize("sets", [INFONCE, [*VICREG, "training.chunk=5"]], ids=["infonce", "vicreg, chunks"])
@pytest.mark.parametrize("step, stage", [(1, "pretraining"), (3, "pretraining"), (5, "pretraining"), (4, None)])
def test_a_run_stopped_anywhere_ends_the_same(sets, step, stage, home, tmp_path):
    reference = training.train(recipe_of(home, *sets), tmp_path / "reference")
    with pytest.raises(training.Stopped) as stopped:
        training.train(recipe_of(home, *sets), tmp_path / "run", stop_at(step, stage))
    assert "--resume" in str(stopped.value)
    again = training.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(tmp_path / "reference")
    assert again.results["test"] == reference.results["test"] and again.notes == reference.notes
    for key in ("loss", "steps", "test"):
        assert again.results["pretraining"][key] == reference.results["pretraining"][key]


def test_a_restored_optimizer_has_the_layout_of_its_weights(home, tmp_path):
    """Weights of a convolution are stored channels last; fused optimisers of a GPU refuse moments in another order."""
    with pytest.raises(training.Stopped):
        training.train(recipe_of(home, *INFONCE), tmp_path / "run", stop_at(2, "pretraining"))
    trainer = pretraining.assemble_pretrainer(prepare(recipe_of(home, *INFONCE)), tmp_path / "run")
    trainer.restore()
    moments = [
        (parameter, moment)
        for parameter, entries in trainer.optimizer.state.items()
        for moment in entries.values()
        if moment.shape == parameter.shape
    ]
    assert moments and any(not parameter.is_contiguous() for parameter, _ in moments)
    assert all(parameter.stride() == moment.stride() for parameter, moment in moments)


class Cut(Exception):
    """The end of a process, as a kill has it: nothing is saved."""


def test_a_run_cut_between_its_checkpoints_ends_the_same(home, tmp_path):
    training.train(recipe_of(home, *INFONCE), tmp_path / "reference")
    for number, (step, stage) in enumerate([(2, "pretraining"), (5, "pretraining"), (1, None), (5, None)]):

        def callback(event, step=step, stage=stage):
            if event["event"] == "step_end" and event["step"] == step and event.get("stage") == stage:
                raise Cut

        with pytest.raises(Cut):
            training.train(recipe_of(home, *INFONCE), tmp_path / f"{number}", callback)
        training.resume(tmp_path / f"{number}")
        assert weights(tmp_path / f"{number}") == weights(tmp_path / "reference"), (step, stage)


def test_what_has_changed_is_not_resumed(home, tmp_path):
    shutil.copytree(home / "more", tmp_path / "more")
    shutil.copytree(home / "photos", tmp_path / "photos")
    for stage in ("pretraining", None):
        with pytest.raises(training.Stopped):
            training.train(recipe_of(tmp_path, *INFONCE), tmp_path / f"run-{stage}", stop_at(2, stage))
    shutil.rmtree(tmp_path / "run-None" / "pretraining")
    (tmp_path / "more" / "19.png").unlink()
    with pytest.raises(ValueError, match=r"the pictures without labels of .* have changed since the run started"):
        training.resume(tmp_path / "run-pretraining")
    shutil.copytree(home / "more", tmp_path / "more", dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run-pretraining" / "pretraining")
    with pytest.raises(ValueError, match=r"all checkpoints of its pretraining are missing, although pretraining.jsonl"):
        training.resume(tmp_path / "run-pretraining")


def test_a_started_training_does_not_ask_for_the_folder_again(home, tmp_path):
    for name in ("more", "photos"):
        shutil.copytree(home / name, tmp_path / name)
    training.train(recipe_of(tmp_path, *INFONCE), tmp_path / "reference")
    with pytest.raises(training.Stopped):
        training.train(recipe_of(tmp_path, *INFONCE), tmp_path / "run", stop_at(2, None))
    shutil.rmtree(tmp_path / "more")
    training.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(tmp_path / "reference")


def test_an_encoder_of_your_own_is_pretrained(home, tmp_path):
    def encoder():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5, 4), torch.nn.Flatten(), torch.nn.LazyLinear(4))

    sets = [s for s in TINY if not s.startswith("encoder")]
    settings = [*sets, f'unlabelled.folder="{home}/more"', *INFONCE]
    source = str(home / "photos")
    training.train(source, tmp_path / "a", encoder=encoder(), settings=settings, report=False)
    with pytest.raises(training.Stopped):
        training.train(
            source, tmp_path / "b", stop_at(4, "pretraining"), encoder=encoder(), settings=settings, report=False
        )
    training.resume(tmp_path / "b", encoder=encoder())
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


# --- without labels


@pytest.mark.parametrize("sets", [INFONCE, VICREG], ids=["infonce", "vicreg"])
def test_without_a_labelled_source_the_run_ends_with_its_pretraining(sets, home, tmp_path):
    recipe = recipe_of(home, *sets, source=False)
    outcome = training.train(recipe, tmp_path / "run", report=True)
    assert outcome.recipe.unlabelled.only and outcome.report is None and "test" not in outcome.results
    assert outcome.results["pretraining"]["pictures"] == 80
    with pytest.raises(training.Stopped):
        training.train(recipe, tmp_path / "stopped", stop_at(4, "pretraining"))
    states = {Path(run["run"]).name: (run["loss"], run["state"], run["test"]) for run in list_runs(tmp_path)}
    assert states["run"] == (outcome.recipe.unlabelled.method, "finished", {})
    assert states["stopped"][1].startswith("stopped at epoch 1 of 2 of its pretraining; nearkin train --resume")
    training.resume(tmp_path / "stopped")
    training.resume(tmp_path / "stopped")  # a finished one too
    assert weights(tmp_path / "stopped") == weights(tmp_path / "run")
    embedded = training.embed_source(tmp_path / "run", str(home / "photos"))
    assert embedded.embeddings.shape == (60, 4)


# --- refusals


@pytest.mark.parametrize(
    "sets, sentence",
    [
        (["unlabelled.queue=9"], "unlabelled.queue would have no effect"),
        (["unlabelled.method=vicreg", "unlabelled.temperature=0.5"], "unlabelled.temperature would have no effect"),
        (["unlabelled.method=infonce", "unlabelled.variance=3"], "unlabelled.variance would have no effect"),
        (["unlabelled.preset=strong"], 'unknown unlabelled.preset "strong"'),
        (["unlabelled.preset=none"], "unlabelled.preset must change pictures, or both views are the same"),
        (["unlabelled.batch=99"], "unlabelled.batch must be at most the 40 pictures"),
        (["unlabelled.method=moco"], "unlabelled.method must be one of infonce, vicreg, got 'moco'"),
        (["unlabelled.epoch=3"], 'unknown key "unlabelled.epoch"; did you mean "epochs"?'),
        (["unlabelled.only=true"], "unlabelled.only must be left out where there is a labelled source"),
        (["unlabelled.method=vicreg", "unlabelled.invariance=0"], "unlabelled.invariance must be > 0"),
        (['unlabelled.folder="nowhere/"'], "unlabelled.folder: nowhere/: no such folder or file"),
    ],
)
def test_what_is_wrong_is_one_sentence(sets, sentence, home, tmp_path):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(").replace("?", r"\?")):
        training.train(recipe_of(home, *sets), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "sets, key",
    [
        (["loss.name=triplet"], "loss.name"),
        (["training.epochs=3"], "training.epochs"),
        (["evaluation.clustering=true"], "evaluation.clustering"),
        (["schedule.decay=constant"], "schedule.decay"),
        (["data.val=0.3"], "data.val"),
        (["unlabelled.own_part=true"], "unlabelled.own_part"),
        (["unlabelled.held_out=keep"], "unlabelled.held_out"),
    ],
)
def test_keys_of_a_training_have_no_effect_without_labels(sets, key, home, tmp_path):
    with pytest.raises(ValueError, match=f"{key} would have no effect"):
        training.train(recipe_of(home, *INFONCE, *sets, source=False), tmp_path / "run")


def test_vectors_and_datasets_have_no_views(home, tmp_path):
    np.savez(tmp_path / "vectors.npz", embeddings=np.eye(24, dtype=np.float32), labels=np.arange(24) // 2)
    sets = [f'data.source="{tmp_path}/vectors.npz"', f'unlabelled.folder="{home}/more"']
    with pytest.raises(ValueError, match=r"unlabelled.folder needs a source of pictures"):
        training.train(read(None, sets), tmp_path / "run")
    dataset = [(torch.rand(3, 16, 16), i // 3) for i in range(30)]
    with pytest.raises(ValueError, match=r"unlabelled.folder needs a source of pictures"):
        training.train(torch.utils.data.Subset(dataset, range(30)), tmp_path / "run", settings=sets[1:])
    sets = [f'data.source="{home}/photos"', f'unlabelled.folder="{tmp_path}/vectors.npz"']
    with pytest.raises(ValueError, match=r"unlabelled.folder must hold pictures, got vectors"):
        training.train(read(None, sets), tmp_path / "run")
    held = [f'data.source="{home}/photos"', *TINY, 'unlabelled.method="infonce"']
    with pytest.raises(ValueError, match=r"unlabelled.method would have no effect: unlabelled.folder is not set"):
        training.train(read(None, held), tmp_path / "run")


# --- several ranks


def trained(rank, size, home, out, *sets):
    training.train(recipe_of(Path(home), *sets), Path(out))


def curve(out):
    lines = [json.loads(line) for line in (out / "pretraining.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if line["event"] == "step"])


@pytest.mark.slow
@pytest.mark.parametrize("sets", [INFONCE, VICREG], ids=["infonce", "vicreg"])
def test_two_ranks_pretrain_as_one(sets, home, tmp_path):
    synced = [*sets, "training.sync_norms=true"]
    trained(0, 1, home, tmp_path / "one", *sets)
    worlds.run(2, trained, str(home), str(tmp_path / "two"), *synced)
    np.testing.assert_allclose(curve(tmp_path / "two"), curve(tmp_path / "one"), rtol=2e-4)
    assert len(curve(tmp_path / "one")) == 6


def stopped(rank, size, home, out, *sets):
    try:
        training.train(recipe_of(Path(home), *sets), Path(out), stop_at(4, "pretraining") if rank else None)
    except training.Stopped as error:
        return str(error)
    except SystemExit as error:  # the other ranks end with the code of the one that was asked
        return error.code
    raise AssertionError("it did not stop")


def resumed(rank, size, out):
    training.resume(out)


@pytest.mark.slow
def test_ranks_stop_and_go_on_together_in_the_middle_of_pretraining(home, tmp_path):
    worlds.run(2, trained, str(home), str(tmp_path / "whole"), *INFONCE)
    worlds.run(2, stopped, str(home), str(tmp_path / "run"), *INFONCE)
    worlds.run(2, resumed, str(tmp_path / "run"))
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
