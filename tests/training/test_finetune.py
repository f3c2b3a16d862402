"""Fine-tuning: what is trained, at which rates, and that a run with LoRA or with the head first resumes to the same."""

import os
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny_vit
from commands import photos
from nearkin import models, training
from nearkin.models import adapt
from nearkin.models.encoder import is_lora
from nearkin.training.checkpoint.checkpoints import Checkpoints
from nearkin.training.config import finetune
from nearkin.training.config.recipe import Recipe, read
from nearkin.training.prepare import build_encoder, prepare
from nearkin.training.trainer import assemble

SMALL = ["data.size=32", "data.stored=32", "encoder.dim=8", "sampler.batch=8", "sampler.per_class=2"]
SMALL += ["training.epochs=3", "training.batches=3", "training.log_steps=1", "training.workers=0", "optimizer.lr=0.01"]
SMALL += ["training.device=cpu", "evaluation.interval=false", "training.on_collapse=warn"]
SMALL += ["finetune.interpolate=false"]  # so that the trained weights are saved, whatever they are worth


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with pictures, and a pretrained encoder for them."""
    home = tmp_path_factory.mktemp("finetune")
    photos(home / "photos")
    tiny_vit.save(home / "vit")
    return home


@pytest.fixture
def recipe(home, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(home / "cache"))

    def of(*sets):
        head = [] if "encoder.dim=0" in sets else ["finetune.projection=random"]  # which has everything to learn
        return read(None, [f"data.source={home}/photos", f"encoder.name=hf:{home}/vit", *SMALL, *head, *sets])

    return of


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def moved(outcome):
    """Names of the weights that training has changed."""
    before = build_encoder(outcome.prepared).state_dict()
    after = load_file(outcome.folder / "model.safetensors")
    assert before.keys() == after.keys(), "a plain encoder"
    return {name for name in before if not torch.equal(before[name], after[name])}


# --- what is trained


def test_the_rule_and_its_sentence():
    few = finetune.what_to_train(2, 4.0)
    many = finetune.what_to_train(10_000, 50.0)
    assert few.train in ("head", "lora") and many.train == "all"
    assert "2 training classes of 4 pictures on average" in few.why
    order = ["head", "lora", "all"]
    places = [order.index(finetune.what_to_train(n, 20.0).train) for n in (2, 5, 10, 20, 50, 100, 1000)]
    assert places == sorted(places), "more data never train less"
    assert finetune.what_to_train(None, 100.0).train == "all"


@pytest.mark.parametrize(
    ("classes", "images", "train"),
    [(2, 1000.0, "head"), (4, 2.0, "head"), (5, 8.0, "all"), (5, 7.9, "lora"), (100, 7.9, "lora"), (100, 58.0, "all")],
)
def test_the_rule_as_documented(classes, images, train):
    assert finetune.what_to_train(classes, images).train == train


def test_a_run_says_what_it_trains_and_why(recipe, tmp_path):
    outcome = training.train(recipe("training.epochs=1", "data.closed=false"), tmp_path / "run")
    choice = finetune.what_to_train(6, 6.0)
    sentence = f"trains {finetune.WORDS[choice.train]}: {choice.why} (finetune.train chooses otherwise)"
    assert outcome.notes.count(sentence) == 1 and outcome.recipe.finetune.train == choice.train
    again = training.train(read(tmp_path / "run" / "recipe.toml"), tmp_path / "again")
    assert sentence not in again.notes and weights(tmp_path / "again") == weights(tmp_path / "run")


@pytest.mark.parametrize("what", ["head", "lora", "all"])
def test_what_is_named_is_trained_and_nothing_else(what, recipe, tmp_path):
    outcome = training.train(recipe(f"finetune.train={what}"), tmp_path / "run")
    assert not any(note.startswith("trains ") for note in outcome.notes), "the user's own choice needs no sentence"
    head = {"head.projection.weight", "head.projection.bias"}
    names = moved(outcome)
    attention = {name for name in names if "attention" in name and name.endswith("weight")}
    assert head <= names
    assert names - head == {"head": set(), "lora": attention, "all": names - head}[what]
    assert len(attention) == {"head": 0, "lora": 12, "all": 12}[what] and (what == "all") == (len(names) > 14)


def test_a_run_with_lora_ends_in_a_plain_encoder(recipe, tmp_path):
    outcome = training.train(recipe("finetune.train=lora", "finetune.lora_rank=2"), tmp_path / "run")
    tensors, state, _ = Checkpoints(tmp_path / "run" / "checkpoints").newest()
    assert sum(is_lora(name) and name.startswith("encoder.") for name in tensors) == 24, "to resume from"
    best, _ = Checkpoints(tmp_path / "run" / "checkpoints").open(state["best_file"])
    assert not any(is_lora(name) or name.endswith("original") for name in best.names("encoder"))
    encoder, _ = models.load(tmp_path / "run")
    rows = training.embed_source(tmp_path / "run").embeddings
    assert (rows - outcome.embeddings).abs().max() <= 1e-6 and encoder.dim == 8


def test_explicit_settings_decide_what_is_open(recipe):
    def chosen(*sets):
        return prepare(recipe(*sets)).recipe.finetune.train

    assert chosen("finetune.lora_rank=4") == "lora"
    assert chosen("finetune.layer_decay=0.75") != "head" and chosen("optimizer.backbone_scale=0.1") != "head"
    assert chosen("encoder.freeze_norms=false") == "all"
    assert chosen("encoder.dim=0") != "head"


@pytest.mark.parametrize(
    "sets, sentence",
    [
        (["finetune.train=some"], "finetune.train must be one of auto, head, lora, all, got 'some'"),
        (["finetune.train=head", "finetune.layer_decay=0.5"], "finetune.layer_decay would have no effect"),
        (["finetune.train=all", "finetune.lora_rank=4"], "finetune.lora_rank would have no effect"),
        (["finetune.train=head", "optimizer.backbone_scale=0.1"], "optimizer.backbone_scale would have no effect"),
        (["finetune.train=head", "schedule.frozen_epochs=1"], "schedule.frozen_epochs would have no effect"),
        (["finetune.train=head", "encoder.dim=0"], "nothing of the encoder can learn: the backbone is frozen"),
        (["finetune.train=lora", "encoder.freeze_norms=false"], "encoder.freeze_norms=false would have no effect"),
        (["encoder.freeze_backbone=true"], "encoder.freeze_backbone must be false .* use finetune.train=head"),
        (["encoder.pretrained=false", "finetune.train=all"], "finetune.train would have no effect: encoder.pretrained"),
        (["finetune.lora_layers=nothing"], r"finetune.lora_layers must name linear or 1x1 convolution layers"),
        (["finetune.lora_layers=("], r"finetune.lora_layers must be a regular expression, got '\('"),
        (["finetune.lora_rank=0"], "finetune.lora_rank must be >= 1, got 0"),
        (["finetune.layer_decay=1.5"], "finetune.layer_decay must be <= 1"),
        (["finetune.layer_decay=0"], "finetune.layer_decay must be > 0"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(sets, sentence, recipe, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        training.train(recipe(*sets), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- rates


def test_layers_have_their_own_rates(recipe, tmp_path):
    trainer = assemble(prepare(recipe("finetune.train=all", "finetune.layer_decay=0.75")), tmp_path)
    rates = {id(p): group["base"] for group in trainer.optimizer.param_groups for p in group["params"]}
    depth, last = adapt.depths(trainer.encoder.backbone)
    assert last == 4 and len(rates) == len(trainer.parameters)
    for name, parameter in trainer.encoder.backbone.named_parameters():
        assert rates[id(parameter)] == pytest.approx(0.01 * 0.75 ** (last - depth[name])), name
    assert {rates[id(p)] for p in trainer.encoder.head.parameters()} == {0.01}
    decays = {p.dim() > 1: group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert decays[True] > 0 and decays[False] == 0


def test_layers_have_their_own_rates_with_lora_and_a_scale(recipe, tmp_path):
    sets = ["finetune.train=lora", "finetune.layer_decay=0.5", "optimizer.backbone_scale=0.1"]
    trainer = assemble(prepare(recipe(*sets)), tmp_path)
    rates = sorted({g["base"] for g in trainer.optimizer.param_groups if g["part"] == "backbone"})
    assert rates == pytest.approx([0.01 * 0.1 * 0.5**k for k in (3, 2, 1)])


def test_rates_without_blocks_are_refused(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(adapt, "_BLOCK", adapt.re.compile("nowhere"))
    with pytest.raises(ValueError, match=r"finetune.layer_decay must be 1 for encoder hf:.*: the backbone has no"):
        training.train(recipe("finetune.train=all", "finetune.layer_decay=0.5"), tmp_path / "run")


# --- head first


def test_head_first_then_all(recipe, tmp_path):
    """In the first epoch the backbone stays as it is; after it everything learns."""
    sets = ["finetune.train=all", "schedule.frozen_epochs=1", "schedule.decay=constant", "training.every=3"]
    outcome = training.train(recipe(*sets), tmp_path / "run")
    assert len(moved(outcome)) > 14
    head = ["finetune.train=head", "training.epochs=1", "schedule.decay=constant", "training.every=1"]
    alone = training.train(recipe(*head), tmp_path / "head")
    values = [[line["loss"] for line in run.history if line["event"] == "step"] for run in (outcome, alone)]
    assert values[0][: len(values[1])] == values[1], "the first epoch is that of a head alone"


# --- resuming

RESUMED = {
    "lora": ["finetune.train=lora"],
    "lora, average": ["finetune.train=lora", "training.ema=0.9", "optimizer.name=sgd"],
    "head first, lora": ["finetune.train=lora", "schedule.frozen_epochs=1", "finetune.layer_decay=0.75"],
    "head first, all, chunks": ["finetune.train=all", "schedule.frozen_epochs=2", "training.chunk=3"],
    "rates": ["finetune.train=all", "finetune.layer_decay=0.75"],
    "head": ["finetune.train=head", "loss.name=proxy-anchor"],
}


def stop_at(step):
    def callback(event):
        if event["event"] == "step_end" and event["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return callback


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "head first, lora" else pytest.mark.slow) for n in RESUMED]
)
def test_a_run_stopped_anywhere_ends_the_same(name, recipe, tmp_path):
    """In the middle of the head's epochs (2), at the change (3 or 6), and after it (7)."""
    reference = training.train(recipe(*RESUMED[name]), tmp_path / "reference")
    for step in (2, 3, 6, 7):
        with pytest.raises(training.Stopped):
            training.train(recipe(*RESUMED[name]), tmp_path / f"run{step}", stop_at(step))
        again = training.resume(tmp_path / f"run{step}")
        assert weights(tmp_path / f"run{step}") == weights(tmp_path / "reference"), step
        assert again.results["test"] == reference.results["test"] and again.notes == reference.notes
        lines = [(line["event"], line["step"], line.get("loss"), line.get("val")) for line in again.history]
        assert lines == [(x["event"], x["step"], x.get("loss"), x.get("val")) for x in reference.history]


def test_a_batch_in_chunks_has_the_gradient_of_the_whole(recipe, tmp_path):
    values = []
    for chunk in ([], ["training.chunk=3"]):
        outcome = training.train(recipe("finetune.train=lora", *chunk), tmp_path / f"run{len(chunk)}")
        values.append([line["loss"] for line in outcome.history if line["event"] == "step"])
    np.testing.assert_allclose(values[0], values[1], rtol=1e-4)


# --- the first projection of the head


def test_the_head_starts_with_the_principal_directions_of_the_features(recipe, tmp_path):
    """Of the training items, once per run; a stopped and resumed run has the same."""
    fitted = prepare(recipe("finetune.projection=pca"))
    encoder, again = build_encoder(fitted), build_encoder(fitted)
    assert fitted.recipe.finetune.projection == "pca" and list(fitted.memo) == ["features"]
    assert all(
        torch.equal(a, b) for a, b in zip(encoder.state_dict().values(), again.state_dict().values(), strict=True)
    )
    weight = encoder.head.projection.weight.detach()
    gram = weight @ weight.T
    assert torch.allclose(gram, torch.diag(gram.diag()), atol=1e-4), "directions are orthogonal"
    random = build_encoder(prepare(recipe("finetune.projection=random")))
    assert not torch.allclose(weight, random.head.projection.weight)
    backbone = dict(random.backbone.named_parameters())
    assert all(torch.equal(p, backbone[name]) for name, p in encoder.backbone.named_parameters())
    assert encoder.training and not any(p.device.type != "cpu" for p in encoder.parameters())


def test_the_fitted_projection_is_the_default_of_a_pretrained_encoder_with_a_head(home, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(home / "cache"))
    names = [f"data.source={home}/photos", f"encoder.name=hf:{home}/vit", *SMALL]
    assert prepare(read(None, names)).recipe.finetune.projection == "pca"
    assert prepare(read(None, [*names, "encoder.dim=0"])).recipe.finetune.projection is None
    with pytest.raises(ValueError, match=r"finetune.projection would have no effect.*encoder.dim is 0"):
        prepare(read(None, [*names, "encoder.dim=0", "finetune.projection=random"]))


def test_where_the_length_counts_the_projection_is_not_centred():
    """What is far from the usual picture, as a blurred one, would be long: studies/quality.py measured it."""
    plain = Recipe().with_("encoder", name="efficientnet-lite0", pretrained=True, dim=128, freeze_norms=True)
    for loss, projection in (("magface", "random"), ("adaface", "random"), ("arcface", "pca")):
        settled, _ = finetune.settle_finetune(plain.with_("loss", name=loss), 100, 2000)
        assert settled.finetune.projection == projection
    asked = plain.with_("loss", name="magface").with_("finetune", projection="pca")
    assert finetune.settle_finetune(asked, 100, 2000)[0].finetune.projection == "pca"
