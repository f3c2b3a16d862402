"""Recipes: typed, told apart, and never a key that is taken and then ignored."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny_vit
from nearkin import evaluation, models, report, training
from nearkin.core import toml
from nearkin.data import augment, vector_files, vectors
from nearkin.training.config import defaults
from nearkin.training.config.recipe import KEYS, NAMED, Recipe, read
from nearkin.training.config.registry import LOSSES, SAMPLERS, loss_settings, settings_of

# --- reading and writing


@pytest.mark.parametrize(
    "sets, sentence",
    [
        (["los.name=triplet"], 'unknown section "los"; did you mean "loss"?'),
        (["training.epoch=3"], 'unknown key "training.epoch"; did you mean "epochs"?'),
        (["schedule.lr=2"], 'unknown key "schedule.lr"; did you mean "optimizer.lr"?'),
        (["training.epochs=ten"], "training.epochs must be a whole number, got 'ten'"),
        (["training.epochs=2.5"], "training.epochs must be a whole number, got 2.5"),
        (["training.epochs=true"], "training.epochs must be a whole number, got True"),
        (["training.epochs=0"], "training.epochs must be >= 1, got 0"),
        (["optimizer.lr=-1"], "optimizer.lr must be > 0"),
        (["optimizer.lr=nan"], "optimizer.lr must be a finite number, got nan"),
        (["optimizer.lr=inf"], "optimizer.lr must be a finite number, got inf"),
        (["optimizer.betas=[0.9]"], "optimizer.betas must be a list of at least 2, got [0.9]"),
        (["optimizer.betas=[1.5,0.9]"], "optimizer.betas.0 must be < 1"),
        (["evaluation.ks=[]"], "evaluation.ks must be a list of at least 1, got []"),
        (["evaluation.ks=[1,0]"], "evaluation.ks.1 must be >= 1, got 0"),
        (["training.seed=9223372036854775808"], "training.seed must be < 9223372036854775808"),
        (["training.precision=bf6"], "training.precision must be one of fp32, bf16, fp16, got 'bf6'; did you mean"),
        (["data.closed=yes"], "data.closed must be true or false, got 'yes'"),
        (["loss.margin"], '--set must be section.key=value, as loss.margin=0.3, got "loss.margin"'),
        (["margin=1"], "--set must be section.key=value"),
        (["loss.margin="], "--set must be section.key=value"),
    ],
)
def test_what_is_wrong_is_one_sentence(sets, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        read(None, sets)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("[loss\n", "not valid TOML"),
        ("margin = 1\n", "margin = … is outside of a section"),
        ("[lost]\nname = 'triplet'\n", 'unknown section "lost"; did you mean "loss"?'),
        ("[optimizer]\nlearning_rate = 0.1\n", 'unknown key "optimizer.learning_rate"'),
    ],
)
def test_a_wrong_file_is_named(text, sentence, tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        read(file)
    assert str(error.value).startswith(str(file))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no such recipe"):
        read(tmp_path / "none.toml")


def test_the_command_line_goes_before_the_file(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('[loss]\nname = "triplet"\nmargin = 0.1\n[training]\nepochs = 3\n', encoding="utf-8")
    recipe = read(file, ["loss.margin=0.3", "data.source=photos"])
    assert recipe.loss == {"name": "triplet", "margin": 0.3}
    assert recipe.training.epochs == 3 and recipe.data.source == "photos"
    assert recipe.explicit_keys == {"loss.name", "loss.margin", "training.epochs", "data.source"}


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)


@given(
    source=TEXT,
    seed=st.integers(0, 2**40),
    lr=st.floats(1e-30, 1e30),
    ks=st.lists(st.integers(1, 99), min_size=1, max_size=4),
)
def test_what_is_written_is_read_back(source, seed, lr, ks):
    recipe = Recipe().with_("data", source=source).with_("training", seed=seed).with_("optimizer", lr=lr)
    recipe = recipe.with_("evaluation", ks=ks).with_("loss", name="triplet", margin=None, squared=False)
    again = read(None, [], base=toml.read(recipe.to_toml()))
    assert again.plain() == recipe.plain()


# --- no key is ignored

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Tiny sets: vectors with classes, vectors with targets, pictures in folders."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(16), 6)
    rows = (rng.normal(size=(16, 5))[labels] + 0.5 * rng.normal(size=(96, 5))).astype(np.float32)
    np.savez(folder / "vectors.npz", embeddings=rows, labels=labels, family=labels % 4)
    (folder / "without.csv").write_text("path\nrow 3\nrow 9\n", encoding="utf-8")
    np.savez(folder / "targets.npz", embeddings=rows, targets=rows[:, :2])
    np.savez(folder / "single.npz", embeddings=rows[:-5], labels=labels[:-5])
    split = np.array(["train" if c < 8 else "val" if c < 12 else "test" for c in labels])
    np.savez(folder / "split.npz", embeddings=rows, labels=labels, split=split)
    camera, burst = np.arange(96) % 2, labels // 2 * 3 + np.arange(96) % 3
    np.savez(folder / "groups.npz", embeddings=rows, labels=labels, groups=burst, camera=camera + 2 * labels)
    for c in range(10):
        (folder / "photos" / f"class{c}").mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 255, (20, 24, 3)).astype(np.uint8)
            pixels[4:12, 4 : 6 + c] = 25 * c
            Image.fromarray(pixels).save(folder / "photos" / f"class{c}" / f"{i}.png")
    for c in range(10):
        shutil.copytree(
            folder / "photos" / f"class{c}", folder / "divided" / ("train" if c < 5 else "test") / f"class{c}"
        )
    (folder / "divided" / "train" / "class0" / "young").mkdir()
    for i in range(3):
        (folder / "divided" / "train" / "class0" / f"{i}.png").rename(
            folder / "divided" / "train" / "class0" / "young" / f"{i}.png"
        )
    shutil.copytree(folder / "photos", folder / "more")  # without labels, with ten other pictures
    for c in range(10):
        Image.fromarray(rng.integers(0, 255, (20, 24, 3)).astype(np.uint8)).save(folder / "more" / f"{c}.png")
    old = {"kind": "vectors", "features": 5}
    models.save(models.build("mlp", features=5, hidden=[8], dim=4, seed=1), folder / "old", old)
    models.save(models.build("mlp", features=5, hidden=[8], dim=4, seed=2), folder / "older", old)
    return folder


VECTORS = ["data.source=vectors.npz", "encoder.hidden=[8]", "encoder.dim=4", "sampler.batch=8", "sampler.per_class=2"]
VECTORS += ["training.epochs=2", "training.batches=3", "training.log_steps=1", "training.workers=0"]
PHOTOS = ["data.source=photos", "encoder.name=small-cnn", "encoder.width=4", "data.size=16", "data.stored=20"]
PHOTOS += ["encoder.dim=4", "sampler.batch=8", "sampler.per_class=2", "training.epochs=1", "training.batches=2"]
PHOTOS += ["training.log_steps=1", "training.workers=0"]
DIVIDED = ["data.source=divided", *PHOTOS[1:], "sampler.batch=4"]
UNLABELLED = [*PHOTOS, "unlabelled.folder=more", "unlabelled.epochs=2", "unlabelled.batches=2", "unlabelled.batch=6"]
UNLABELLED += ["unlabelled.projector=[6,4]"]
INFONCE = [*UNLABELLED, "unlabelled.method=infonce", "unlabelled.queue=12"]
GROUPS = [text.replace("vectors", "groups") for text in VECTORS]
PRETRAINED = ["data.source=photos", "encoder.name=hf:vit", "data.size=32", "data.stored=32", *PHOTOS[5:]]
COMPATIBLE = [*VECTORS, "compatible.run=old"]
TARGETS = [text.replace("vectors.npz", "targets.npz") for text in VECTORS if "per_class" not in text]

# For every key of the fixed sections: the recipe it stands in, and a value that must make a difference to the run.
CHANGES = {
    "data.source": (VECTORS, "split.npz"),
    "data.root": (None, "needs a set on disk: test_benchmark_sets and test_sources read with it"),
    "data.size": (PHOTOS, 24),
    "data.stored": (PHOTOS, 24),
    "data.fit": (PHOTOS, "squash"),
    "data.channels": (PHOTOS, 1),
    "data.unreadable": (PHOTOS, "error: one of strict, skip"),
    "data.max_pixels": (PHOTOS, "error: 10"),
    "data.cache": (None, "decides where pixels are kept, not what they are: test_cache_key"),
    "data.skip_single": ([text.replace("vectors", "single") for text in VECTORS], "mended: true"),
    "data.closed": (VECTORS, False),
    "data.official": ([text.replace("vectors", "split") for text in VECTORS], False),
    "data.partial": (None, "takes an incomplete benchmark: test_benchmark_sets"),
    "data.val": ([*VECTORS, "data.closed=false"], 0.4),
    "data.test": ([*VECTORS, "data.closed=false"], 0.5),
    "data.seed": (VECTORS, 3),
    "data.levels": (VECTORS, ["family"]),
    "data.split_folders": (DIVIDED, ["train=test", "test=train"]),
    "data.leaf_classes": (DIVIDED, True),
    "data.near": (PHOTOS, "off"),
    "data.without": (VECTORS, "without.csv"),
    "unlabelled.folder": ([text.replace("folder=more", "own_part=true") for text in UNLABELLED], "more"),
    "unlabelled.own_part": (
        [*(text.replace("=more", "=more/class1") for text in UNLABELLED), "data.closed=false"],
        False,
    ),
    "unlabelled.only": (None, "is what a run without a labelled source has: test_pretraining"),
    "unlabelled.held_out": (UNLABELLED, "keep"),
    "unlabelled.method": (UNLABELLED, "infonce"),
    "unlabelled.epochs": (UNLABELLED, 3),
    "unlabelled.batches": (UNLABELLED, 3),
    "unlabelled.batch": (UNLABELLED, 8),
    "unlabelled.lr": (UNLABELLED, 0.1),
    "unlabelled.preset": (UNLABELLED, "light"),
    "unlabelled.projector": (UNLABELLED, [5]),
    "unlabelled.temperature": (INFONCE, 0.5),
    "unlabelled.queue": ([*INFONCE, "unlabelled.epochs=3"], 0),
    "unlabelled.invariance": (UNLABELLED, 3.0),
    "unlabelled.variance": (UNLABELLED, 3.0),
    "unlabelled.covariance": (UNLABELLED, 30.0),
    "compatible.run": (COMPATIBLE, "older"),
    "compatible.method": (COMPATIBLE, "items"),
    "compatible.weight": (COMPATIBLE, 0.5),
    "compatible.class_share": (COMPATIBLE, 0.0),
    "compatible.scale": ([*COMPATIBLE, "compatible.method=classes"], 3.0),
    "levels.weights": ([*VECTORS, 'data.levels=["family"]'], [1.0, 0.5]),
    "data.group_pattern": (PHOTOS, r"(?P<group>class\d(?:/(?=[3-5]))?)"),
    "data.group_column": (GROUPS, "camera"),
    "data.group_scope": (GROUPS, "class"),
    "memory.size": ([*VECTORS, "loss.name=contrastive"], 16),
    "memory.warmup": ([*VECTORS, "loss.name=contrastive", "memory.size=16"], 2),
    "optimizer.name": (VECTORS, "rmsprop"),
    "optimizer.lr": (VECTORS, 0.02),
    "optimizer.weight_decay": (VECTORS, 0.5),
    "optimizer.momentum": ([*VECTORS, "optimizer.name=sgd"], 0.1),
    "optimizer.betas": (VECTORS, [0.5, 0.9]),
    "optimizer.eps": (VECTORS, 0.1),
    "optimizer.backbone_scale": (VECTORS, 0.1),
    "optimizer.head_scale": (VECTORS, 0.1),
    "optimizer.loss_scale": ([*VECTORS, "loss.name=proxy-anchor"], 0.5),
    "optimizer.class_weights": ([*VECTORS, "loss.name=proxy-anchor"], "rowwise"),
    "optimizer.clip": (VECTORS, 0.01),
    "finetune.train": ([*PRETRAINED, "finetune.train=all"], "head"),
    "finetune.layer_decay": ([*PRETRAINED, "finetune.train=all", "optimizer.backbone_scale=1"], 0.5),
    "finetune.lora_rank": ([*PRETRAINED, "finetune.train=lora"], 2),
    "finetune.lora_alpha": ([*PRETRAINED, "finetune.train=lora"], 4.0),
    "finetune.lora_layers": (
        [*PRETRAINED, "finetune.train=lora"],
        "fc1|intermediate",
    ),  # as newer and older transformers name it
    "finetune.projection": ([*PRETRAINED, "finetune.train=all"], "random"),
    "finetune.interpolate": ([*PRETRAINED, "finetune.train=all"], False),
    "schedule.decay": (VECTORS, "constant"),
    "schedule.warmup": (VECTORS, 0.5),
    "schedule.floor": (VECTORS, 0.5),
    "schedule.every": ([*VECTORS, "schedule.decay=step"], 1),
    "schedule.factor": ([*VECTORS, "schedule.decay=step", "schedule.every=1"], 0.01),
    "schedule.patience": ([*VECTORS, "schedule.decay=plateau", "training.epochs=6", "optimizer.lr=1e-9"], 1),
    "schedule.frozen_epochs": (VECTORS, 1),
    "training.epochs": (VECTORS, 3),
    "training.batches": (VECTORS, 4),
    "training.chunk": (PHOTOS, 3),
    "training.precision": (VECTORS, "bf16"),
    "training.ema": (VECTORS, 0.9),
    "training.seed": (VECTORS, 1),
    "training.device": (VECTORS, "error: cuda"),
    "training.workers": (None, "threads must not change anything: test_training resumes with 0 and 2"),
    "training.deterministic": (None, "sets torch's flags: test_deterministic_sets_flags"),
    "training.graphs": (None, "needs a CUDA device: tests/gpu/test_graphs_gpu.py, and test_graphs_need_a_gpu"),
    "training.strategy": (None, "needs several ranks: tests/dist/test_torchrun.py"),
    "training.sync_norms": (None, "needs several ranks: tests/dist/test_torchrun.py"),
    "training.patience": ([*VECTORS, "training.epochs=30", "training.batches=1", "optimizer.lr=1e-9"], 2),
    "training.every": (VECTORS, 2),
    "training.keep_start": ([*VECTORS, "optimizer.lr=10"], False),
    "training.save_minutes": (VECTORS, 1e-9),
    "training.log_steps": (VECTORS, 5),
    "training.on_collapse": (None, "test_training: test_collapse_is_noticed"),
    "training.log": (None, "test_tracking"),
    "training.tensorboard": (None, "test_tensorboard"),
    "evaluation.ks": (VECTORS, [1, 3]),
    "evaluation.interval": (VECTORS, False),
    "evaluation.clustering": (VECTORS, True),
    "evaluation.rerank": (VECTORS, "k-reciprocal"),
    "evaluation.views": (PHOTOS, 2),
}


def test_every_fixed_key_has_a_change():
    assert set(CHANGES) == {f"{section}.{key}" for section, names in KEYS.items() for key in names}


def outcome_of(sets, sources, out, monkeypatch):
    """Everything that a key may influence: weights, figures, log lines, files; times left out."""
    monkeypatch.chdir(sources)
    monkeypatch.setenv("NEARKIN_CACHE", str(sources / "cache"))
    events = []
    outcome = training.train(read(None, sets), out, lambda event: events.append(event["event"]))
    results = json.dumps(
        {k: v for k, v in outcome.results.items() if k not in ("seconds", "peak_bytes")}, sort_keys=True
    )
    lines = [{k: v for k, v in line.items() if "second" not in k} for line in outcome.history]
    return (out / "model.safetensors").read_bytes(), results, json.dumps(lines), events


BASES = {}


def base_of(sets, sources, tmp_path, monkeypatch):
    name = tuple(sets)
    if name not in BASES:
        BASES[name] = outcome_of(sets, sources, tmp_path / "base", monkeypatch)
    return BASES[name]


@pytest.mark.parametrize("key", [key for key, (base, _) in CHANGES.items() if base is not None])
def test_every_key_makes_a_difference(key, sources, tmp_path, monkeypatch):
    base, value = CHANGES[key]
    if "encoder.name=hf:vit" in base:
        tiny_vit.save(sources / "vit")
    section, name = key.split(".")
    text = json.dumps(value)
    if isinstance(value, str) and value.startswith("error: "):
        with pytest.raises(ValueError, match=name.replace("_", ".")):
            outcome_of([*base, f"{key}={value[7:]}"], sources, tmp_path / "run", monkeypatch)
        return
    if isinstance(value, str) and value.startswith("mended: "):
        with pytest.raises(ValueError, match="--skip-single"):
            outcome_of(base, sources, tmp_path / "run", monkeypatch)
        outcome_of([*base, f"{key}={value[8:]}"], sources, tmp_path / "run", monkeypatch)
        return
    changed = outcome_of([*base, f"{key}={text}"], sources, tmp_path / "changed", monkeypatch)
    assert changed != base_of(base, sources, tmp_path, monkeypatch), f"{key} = {text} changes nothing"
    assert getattr(getattr(read(tmp_path / "changed" / "recipe.toml"), section), name) == value


@pytest.mark.parametrize(
    "sets, key",
    [
        (["optimizer.momentum=0.5"], "optimizer.momentum"),
        (["optimizer.name=sgd", "optimizer.betas=[0.9,0.99]"], "optimizer.betas"),
        (["optimizer.name=sgd", "optimizer.eps=0.1"], "optimizer.eps"),
        (["schedule.every=3"], "schedule.every"),
        (["schedule.decay=constant", "schedule.floor=0.1"], "schedule.floor"),
        (["schedule.decay=step", "schedule.patience=2"], "schedule.patience"),
        (["memory.warmup=3"], "memory.warmup"),
        (["data.size=32"], "data.size"),
        (["data.fit=pad"], "data.fit"),
        (["evaluation.views=2"], "evaluation.views"),
        (["augment.flip=0.5"], "augment.flip"),
        (["encoder.freeze_backbone=true", "optimizer.backbone_scale=0.1"], "optimizer.backbone_scale"),
        (["encoder.freeze_backbone=true", "schedule.frozen_epochs=1"], "schedule.frozen_epochs"),
        (["encoder.freeze_backbone=true", "encoder.dropout=0.1"], "encoder.dropout"),
        (["encoder.freeze_norms=true"], "encoder.freeze_norms"),
        (["encoder.hidden=[]", "encoder.dropout=0.1"], "encoder.dropout"),
        (["finetune.train=head"], "finetune.train"),
        (["finetune.layer_decay=0.75"], "finetune.layer_decay"),
        (["finetune.lora_rank=4"], "finetune.lora_rank"),
        (["encoder.hidden=[]", "encoder.freeze_backbone=true"], "encoder.freeze_backbone"),
        (["encoder.hidden=[]", "schedule.frozen_epochs=1"], "schedule.frozen_epochs"),
        (["encoder.hidden=[]", "optimizer.backbone_scale=0.1"], "optimizer.backbone_scale"),
        (["encoder.dim=0", "optimizer.head_scale=0.1"], "optimizer.head_scale"),
        (["loss.name=supcon", "optimizer.loss_scale=0.1"], "optimizer.loss_scale"),
        (["loss.name=supcon", "optimizer.class_weights=rowwise"], "optimizer.class_weights"),
        (["finetune.interpolate=true"], "finetune.interpolate"),
        (["finetune.projection=pca"], "finetune.projection"),
        (["data.partial=true"], "data.partial"),
        (["data.official=false"], "data.official"),
        (["data.group_scope=class"], "data.group_scope"),
        (["data.group_column=none"], "data.group_column"),
        (["data.source=split.npz", "data.test=0.3"], "data.test"),
        (["data.source=split.npz", "data.val=0.3"], "data.val"),
        (["data.source=split.npz", "data.seed=1"], "data.seed"),
        (["levels.weights=[1,0.5]"], "levels.weights"),
        (['data.levels=["family"]', "levels.weights=[1,0]"], "levels.weights"),
        (["data.near=drop"], "data.near"),
        (["compatible.run=old", "training.keep_start=true"], "training.keep_start"),
        (["compatible.weight=2"], "compatible.weight"),
        (["compatible.run=old", "compatible.scale=2"], "compatible.scale"),
    ],
)
def test_a_key_without_effect_is_refused(sets, key, sources, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"{key} would have no effect"):
        outcome_of([*VECTORS, *sets], sources, tmp_path / "run", monkeypatch)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["data.closed", "data.skip_single"])
def test_targets_have_no_classes_to_divide_by(key, sources, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"{key} would have no effect"):
        outcome_of([*TARGETS, f"{key}=true"], sources, tmp_path / "run", monkeypatch)


@pytest.mark.parametrize(
    "sets, key",
    [
        (["augment.preset=light", "augment.erase_area=0.5"], "augment.erase_area"),
        (["data.channels=1", "augment.saturation=0.5"], "augment.saturation"),
        (["data.channels=1", "augment.grey=0.5"], "augment.grey"),
    ],
)
def test_an_augmentation_without_effect_is_refused(sets, key, sources, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"{key} would have no effect"):
        outcome_of([*PHOTOS, *sets], sources, tmp_path / "run", monkeypatch)


def test_views_are_averaged_in_the_test(sources, tmp_path, monkeypatch):
    outcome_of([*PHOTOS, "evaluation.views=2"], sources, tmp_path / "run", monkeypatch)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    for views, same in ((1, False), (2, True)):
        embedded = training.embed_source(tmp_path / "run", views=views)
        value = evaluation.retrieval(embedded.embeddings, embedded.labels)["map@r"]
        assert (abs(results["test"]["trained"]["map@r"]["value"] - value) < 1e-9) is same


def test_more_views_than_there_are_crops(sources, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"evaluation.views must be <= 14 without mirror images .* got 15"):
        outcome_of([*PHOTOS, "augment.flip=0", "evaluation.views=15"], sources, tmp_path / "run", monkeypatch)


@pytest.mark.parametrize(
    "sets",
    [
        ["encoder.freeze_backbone=true", "encoder.dim=0"],
        ["encoder.hidden=[]", "encoder.dim=0", "loss.name=proxy-anchor"],
        ["schedule.frozen_epochs=1", "encoder.dim=0"],
    ],
)
def test_an_encoder_that_cannot_learn_is_refused(sets, sources, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"nothing .*can learn"):
        outcome_of([*VECTORS, *sets], sources, tmp_path / "run", monkeypatch)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "sets",
    [
        VECTORS,
        TARGETS,
        PHOTOS,
        GROUPS,
        [*GROUPS, "sampler.groups=true", "data.group_column=camera"],
        [text.replace("vectors", "split") for text in VECTORS],
        ["data.source=photos"],
        [*VECTORS, "optimizer.name=sgd", "schedule.decay=plateau", "encoder.dim=none", "evaluation.ks=[1,3]"],
        [*VECTORS, "optimizer.name=rmsprop", "encoder.freeze_backbone=true", "loss.name=margin", "memory.size=8"],
        *([*VECTORS[:3], f"loss.name={name}"] for name in LOSSES if name != "logratio"),
        *([*VECTORS[:3], f"sampler.name={name}"] for name in SAMPLERS if name != "label-neighbours"),
    ],
    ids=" ".join,
)
def test_a_settled_recipe_settles_to_itself(sets, sources, tmp_path, monkeypatch):
    from nearkin.training.prepare import prepare

    monkeypatch.chdir(sources)
    monkeypatch.setenv("NEARKIN_CACHE", str(sources / "cache"))
    settled = prepare(read(None, sets)).recipe
    (tmp_path / "recipe.toml").write_text(settled.to_toml(), encoding="utf-8")
    assert prepare(read(tmp_path / "recipe.toml")).recipe.plain() == settled.plain()


@pytest.mark.parametrize(("loss", "unit"), [("sphereface", False), ("npair", False), ("arcface", True)])
def test_losses_of_lengths_are_given_lengths(loss, unit, sources, monkeypatch):
    """Of unit embeddings SphereFace's logits could not exceed 1, and it would hardly learn."""
    from nearkin.training.prepare import prepare

    monkeypatch.chdir(sources)
    monkeypatch.setenv("NEARKIN_CACHE", str(sources / "cache"))
    sets = [*VECTORS[:3], f"loss.name={loss}"]
    assert prepare(read(None, sets)).recipe.encoder["normalize"] is unit
    assert (
        prepare(read(None, [*sets, f"encoder.normalize={str(not unit).lower()}"])).recipe.encoder["normalize"]
        is not unit
    )


@pytest.mark.parametrize("loss", ["adaface", "magface"])
def test_the_length_is_the_quality_of_an_item(loss, sources, tmp_path, monkeypatch):
    """Margins follow it in training; the run's embeddings have it, each file of them, and its report shows it."""
    from safetensors.torch import load_file

    monkeypatch.chdir(sources)
    outcome = training.train(read(None, [*VECTORS, f"loss.name={loss}"]), tmp_path / "run")
    embedded = training.embed_source(tmp_path / "run")
    assert embedded.quality is not None and embedded.quality.std() > 1e-3
    np.testing.assert_allclose(embedded.quality, embedded.embeddings.double().norm(dim=1).numpy())
    columns = (embedded.labels, embedded.targets, embedded.names, embedded.classes, embedded.quality)
    for ending in (".npz", ".safetensors"):
        vector_files.write(tmp_path / f"out{ending}", embedded.embeddings, *columns)
        assert torch.equal(vectors.read(tmp_path / f"out{ending}").embeddings, embedded.embeddings)
    with np.load(tmp_path / "out.npz") as archive:
        assert np.array_equal(archive["quality"], embedded.quality)
    assert np.array_equal(load_file(tmp_path / "out.safetensors")["quality"].numpy(), embedded.quality)
    page = report.of_run(outcome).read_text()
    assert 'id="quality"' in page and "blurred, dark and odd items should have short ones" in page


def test_unit_length_is_no_quality(sources, tmp_path, monkeypatch):
    monkeypatch.chdir(sources)
    outcome = training.train(read(None, VECTORS), tmp_path / "run")
    assert training.embed_source(tmp_path / "run").quality is None
    assert 'id="quality"' not in report.of_run(outcome).read_text()


def test_a_run_is_used_as_it_was_trained(sources, tmp_path, monkeypatch):
    """What it skipped, its limit of pixels and its wish for no cache hold when its source is read again."""
    import shutil

    shutil.copytree(sources / "photos", tmp_path / "photos")
    (tmp_path / "photos" / "class0" / "broken.png").write_bytes(b"x")
    sets = [*PHOTOS, "data.unreadable=skip", "data.max_pixels=480", "data.cache=false"]
    outcome = outcome_of(sets, tmp_path, tmp_path / "run", monkeypatch)
    assert not (tmp_path / "cache" / "pictures").exists()
    tested = json.loads(outcome[1])["items"]["test"]
    assert len(training.embed_source(tmp_path / "run").embeddings) == tested
    assert len(training.embed_source(tmp_path / "run", "photos", part="test").embeddings) == tested
    assert not (tmp_path / "cache" / "pictures").exists()
    with pytest.raises(ValueError, match="1 of 61 pictures cannot be used"):
        training.embed_source(tmp_path / "run", str(tmp_path / "photos"))


def test_pixels_are_not_copied_because_one_picture_is_unreadable(sources, tmp_path, monkeypatch):
    import shutil

    from nearkin.training.prepare import prepare

    shutil.copytree(sources / "photos", tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    undamaged = prepare(read(None, PHOTOS))
    (tmp_path / "photos" / "class0" / "a.png").write_bytes(b"x")
    prepared = prepare(read(None, [*PHOTOS, "data.unreadable=skip"]))
    assert isinstance(prepared.rows, np.memmap)
    for part in ("train", "val", "test"):
        names = [[one.items.names[i] for i in getattr(one.parts, part)] for one in (prepared, undamaged)]
        assert names[0] == names[1]
        rows = [one.rows[getattr(one.parts, part)] for one in (prepared, undamaged)]
        assert np.array_equal(*rows)
    assert prepared.report["unreadable"][0]["name"] == "class0/a.png"


@pytest.mark.parametrize("name", LOSSES)
def test_losses_take_their_settings_and_no_others(name):
    from nearkin.training.config.registry import loss_settings

    for key, setting in LOSSES[name].settings.items():
        value = setting.default if setting.default is not None else "none"
        assert loss_settings(Recipe().with_("loss", name=name, **{key: value}))[key] == setting.default
    with pytest.raises(ValueError, match=f'of loss "{name}"'):
        loss_settings(Recipe().with_("loss", name=name, marginn=1))


@pytest.mark.parametrize("name", ["supcon", "logratio", "arcface", "soft-triple"])
def test_recipes_from_before_the_kernels_of_a_loss_left_are_read(name, tmp_path):
    """Their runs have written impl = "auto", or what was set."""
    for impl in ("auto", "torch"):
        (tmp_path / "recipe.toml").write_text(f'[loss]\nname = "{name}"\nimpl = "{impl}"\n')
        recipe = read(tmp_path / "recipe.toml", stored=True).recorded()
        assert "impl" not in loss_settings(recipe)
        assert recipe.to_toml() == read(tmp_path / "recipe.toml").to_toml()  # its digest is as it was: it is resumed
    assert loss_settings(read(None, [f"loss.name={name}", "loss.impl=auto"])) == {}
    with pytest.raises(ValueError, match=f"loss.impl has left {name} with its kernels: leave it out, got 'torch'"):
        loss_settings(read(None, [f"loss.name={name}", "loss.impl=torch"]))


def test_a_renamed_setting_is_read_from_a_run_and_answered_where_it_is_typed(tmp_path):
    (tmp_path / "recipe.toml").write_text('[loss]\nname = "npair"\npenalty = 0.5\n')
    recipe = read(tmp_path / "recipe.toml", stored=True).recorded()
    assert loss_settings(recipe) == {"length_weight": 0.5}
    assert recipe.to_toml() == read(tmp_path / "recipe.toml").to_toml()  # its digest is as it was: it is resumed
    with pytest.raises(ValueError, match=r"loss\.penalty of npair is loss\.length_weight now, got 0\.5"):
        loss_settings(read(None, ["loss.name=npair", "loss.penalty=0.5"]))


@pytest.mark.parametrize(
    "sets, sentence",
    [
        (["loss.name=arcfase"], 'unknown loss "arcfase"; did you mean "arcface"? known: adacos, adaface, arcface'),
        (["loss.name=adaface", "encoder.normalize=true"], "encoder.normalize must be false for loss adaface, whose"),
        (["loss.name=triplet", "loss.margin=wide"], "loss.margin must be a number or \"none\", got 'wide'"),
        (["loss.name=triplet", "loss.margin=-1"], "loss.margin must be"),
        (["loss.name=supcon", "loss.reduction=none"], "loss.reduction must give one number"),
        (["sampler.name=balanced"], 'unknown sampler "balanced"; did you mean "class-balanced"?'),
        (["sampler.batch=7"], "sampler.batch must be a multiple of the 2 items per class, got 7"),
        (["sampler.batch=800"], "sampler.batch must hold at most all"),
        (["sampler.neighbours=3"], "neighbours"),
        (["encoder.name=mpl"], 'unknown encoder "mpl"; did you mean "mlp"?'),
        (["encoder.name=small-cnn"], "takes pictures, the source holds vectors"),
        (["encoder.widht=3"], "widht"),
        (["loss.name=logratio"], "needs continuous targets"),
        (["loss.name=proxy-anchor", "memory.size=9"], "memory.size needs a loss that takes references, as pair losses"),
    ],
)
def test_wrong_choices_are_one_sentence_and_leave_nothing(sets, sentence, sources, tmp_path, monkeypatch):
    with pytest.raises((ValueError, TypeError)) as error:
        outcome_of([*VECTORS, *sets], sources, tmp_path / "run", monkeypatch)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_every_setting_of_an_augmentation_changes_pictures():
    """[augment] hands its keys to `Augmentation`, each of which must change what a warp gives."""
    import torch

    images = torch.randint(0, 255, (4, 16, 16, 3), dtype=torch.uint8)
    keys = torch.arange(4)
    start = augment.Augmentation(erase=1.0, grey=0.5)
    others = {"scale_low": 0.5, "scale_high": 0.7, "aspect": 2.0, "flip": 1.0, "rotation": 1.0, "shear": 0.5}
    others |= {"shift": 0.3, "brightness": 0.9, "contrast": 0.9, "saturation": 0.9, "grey": 1.0, "erase": 0.0}
    others |= {"erase_area": 0.9}
    assert set(others) == set(settings_of(augment.Augmentation))
    from dataclasses import replace

    plain = augment.warp(images, keys, size=16, augmentation=start)
    for name, value in others.items():
        changed = augment.warp(images, keys, size=16, augmentation=replace(start, **{name: value}))
        assert not torch.equal(changed, plain), name


def test_deterministic_sets_flags():
    import torch

    from nearkin.training.loop import deterministic

    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_tensorboard(sources, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    outcome_of([*VECTORS, "training.tensorboard=true"], sources, tmp_path / "run", monkeypatch)
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_named_sections_are_those_without_fixed_keys():
    assert set(NAMED) == {section for section, names in KEYS.items() if not names}
    assert SAMPLERS and models.encoders()


RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda path: path.stem)
def test_recipes_read_and_say_what_they_cost(file):
    """A recipe begins with its command, then cost and expected result; its keys exist."""
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# nearkin train ") and lines[1].startswith("# ") and "expect" in lines[1] + lines[2]
    recipe = read(file)
    assert recipe.explicit_keys


def test_a_recipe_by_name_beside_a_folder_of_the_same_name(tmp_path, monkeypatch):
    """`nearkin train photos/ --recipe photos` is run where photos/ is; a file of that name is a recipe of one's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    assert read("photos") == read(ROOT / "recipes" / "photos.toml")
    (tmp_path / "photos").rmdir()
    (tmp_path / "photos").write_text("[training]\nepochs = 3\n")
    assert read("photos").training.epochs == 3


@pytest.mark.parametrize(
    ("sets", "graphs"),
    [
        ([], True),
        (["training.graphs=auto"], True),
        (["training.graphs=false"], False),
        (["training.graphs=encoder"], "encoder"),
        (["training.chunk=4"], False),
        (["encoder.name=timm:resnet18"], False),
        (["loss.name=own:Loss"], "encoder"),
    ],
)
def test_graphs_are_settled_by_encoder_and_loss(sets, graphs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    recipe = read(None, ["encoder.name=mlp", "loss.name=supcon", "sampler.batch=8", *sets])
    facts = defaults.Facts(100, 10, None, False, torch.device("cuda"))
    assert defaults._settle_training(recipe, facts).training.graphs == graphs


def test_graphs_need_a_gpu(sources, tmp_path, monkeypatch):
    monkeypatch.chdir(sources)
    with pytest.raises(ValueError, match=r"training\.graphs would have no effect: the device is not a CUDA one"):
        training.train(read(None, [*VECTORS, "training.graphs=true", "training.device=cpu"]), tmp_path / "run")
