"""Weights between the pretrained and the trained ones: a run never ends below the frozen encoder on validation."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import standin
import worlds
from commands import output_of
from commands import run as command
from nearkin import evaluation, models, training
from nearkin.core.errors import UnfittingWeights
from nearkin.dist import parallel
from nearkin.evaluation.statistics import cluster_bootstrap
from nearkin.gallery import Gallery, calibrate
from nearkin.training import interpolation
from nearkin.training.checkpoint.checkpoints import Checkpoints
from nearkin.training.config.recipe import read
from nearkin.training.interpolation import FROZEN, SHARES, UNTRAINED, interpolated, judge
from nearkin.training.prepare import build_encoder, prepare
from nearkin.training.trainer import assemble
from nearkin.training.validation import HeldOut

HARMFUL = ["optimizer.lr=3", "training.on_collapse=warn"]


@pytest.fixture(scope="module")
def hues(tmp_path_factory):
    home = tmp_path_factory.mktemp("interpolation")
    standin.pictures(home / "hues")
    return home


@pytest.fixture(autouse=True)
def _pretrained(hues, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # so that what was there is restored after the test
    standin.install()
    monkeypatch.chdir(hues)
    monkeypatch.setenv("NEARKIN_CACHE", str(hues / "cache"))


def run(out, *sets, callback=lambda event: None, report=False):
    return training.train(read(None, [*standin.SETS, *sets]), out, callback, report=report)


def run_plain(out, *sets):
    """Without keys of [finetune], which an encoder without pretrained weights refuses."""
    return training.train(read(None, [*(s for s in standin.SETS if not s.startswith("finetune.")), *sets]), out)


def validation_map(out):
    """MAP@R of the saved encoder on the validation part, measured from its files."""
    embedded = training.embed_source(out, part="val")
    return evaluation.retrieval(embedded.embeddings, torch.from_numpy(embedded.labels))["map@r"]


def frozen_map():
    """That of the pooled features of the pretrained backbone."""
    prepared = prepare(read(None, standin.SETS))
    rows = torch.from_numpy(np.ascontiguousarray(prepared.rows[prepared.parts.val])).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        features = build_encoder(prepared).eval().features(rows)
    return evaluation.retrieval(features, torch.from_numpy(prepared.held_out("val").labels))["map@r"]


def weights(out):
    return (out / "model.safetensors").read_bytes()


# --- the weights


def test_weights_between_are_exact_at_both_ends():
    start = {"w": torch.randn(7, 5), "same": torch.randn(9), "count": torch.tensor(3), "half": torch.randn(4).half()}
    end = {"w": torch.randn(7, 5), "same": start["same"], "count": torch.tensor(8), "half": torch.randn(4).half()}
    for a in SHARES:
        between = interpolated(start, end, a)
        for name in ("w", "half"):
            first, last = (state[name].numpy().astype(np.float64) for state in (start, end))
            assert torch.equal(between[name], torch.from_numpy((1 - a) * first + a * last).to(start[name].dtype))
        assert torch.equal(between["same"], start["same"]) and int(between["count"]) == 8
    assert torch.equal(interpolated(start, end, 0.0)["w"], start["w"])
    assert torch.equal(interpolated(start, end, 1.0)["w"], end["w"])
    with pytest.raises(UnfittingWeights, match="lora is only in one of them"):
        interpolated(start, end | {"lora": torch.ones(1)}, 0.5)


@pytest.mark.parametrize("changes", [{}, {"pooling": "gem"}, {"layer_norm": True}, {"normalize": False}])
def test_pooled_features_are_an_encoder_of_their_own(changes, tmp_path):
    encoder = models.build("timm:standin", dim=8, **changes).eval()
    pooled = encoder.pooled()
    x = torch.rand(5, 3, 32, 32)
    features = encoder.features(x)
    torch.testing.assert_close(pooled(x), torch.nn.functional.normalize(features, dim=1))
    assert pooled.dim == 12 == pooled(x).shape[1] and pooled.pretrained and not pooled.training
    models.save(pooled, tmp_path)
    again = models.load(tmp_path)[0]
    assert torch.equal(again(x), pooled(x)) and again.dim == 12 and again.settings == pooled.settings
    assert encoder.dim == 8 == encoder(x).shape[1], "the one it was made from is not changed"


# --- the choice

CLASSES = torch.arange(12).repeat_interleave(5)


def values_of(**gains):
    """Per query values: those of the frozen features, and so much more for each a; classes differ, queries too."""
    generator = torch.Generator().manual_seed(0)
    frozen = 0.3 + 0.2 * torch.rand(len(CLASSES), generator=generator)
    noise = {a: 0.02 * torch.randn(12, generator=generator)[CLASSES] for a in SHARES}
    values = {FROZEN: frozen, UNTRAINED: frozen - 0.1}
    return values | {a: frozen + noise[a] - noise[a].mean() + gains.get(f"a{int(100 * a)}", -0.1) for a in SHARES}


def test_the_best_of_those_that_are_better_beyond_chance():
    facts = judge(values_of(a25=0.05, a50=0.09, a75=0.08), CLASSES, "map@r")
    assert (facts["chosen"], facts["a"]) == ("finetuned", 0.5)
    assert [point["better"] for point in facts["curve"]] == [False, True, True, True, False]
    assert [point["a"] for point in facts["curve"]] == list(SHARES) and facts["classes"] == 12
    values = values_of(a25=0.05, a50=0.09, a75=0.08)
    for point in facts["curve"]:
        right = cluster_bootstrap.compare(values[point["a"]], values[FROZEN], CLASSES, confidence=0.8)
        assert [point["gain"]["low"], point["gain"]["high"]] == list(right["interval"])
        assert point["value"] == pytest.approx(float(values[point["a"]].double().mean()), abs=1e-12)
        assert (point["low"], point["high"]) == cluster_bootstrap.share_interval(values[point["a"]], CLASSES)


def test_a_gain_inside_the_interval_is_no_reason_to_leave_the_frozen_encoder():
    facts = judge(values_of(a50=0.002), CLASSES, "map@r")
    best = facts["curve"][2]
    assert best["gain"]["low"] < 0 < best["gain"]["value"], "better, but it may be chance"
    assert facts["chosen"] == FROZEN and facts["a"] == 0


def test_of_equal_ones_the_nearest_to_the_pretrained_weights():
    values = values_of(a50=0.1)
    values[0.25] = values[0.75] = values[0.5].clone()
    assert judge(values, CLASSES, "map@r")["a"] == 0.25


@pytest.mark.parametrize("classes, gain, chosen", [(2, 0.02, FROZEN), (3, 0.3, "finetuned"), (4, 0.3, "finetuned")])
def test_few_classes_need_a_large_gain(classes, gain, chosen):
    """Student's interval over three or four classes is wide, but not without end."""
    some = slice(0, 5 * classes)
    facts = judge({a: one[some] for a, one in values_of(a100=gain).items()}, CLASSES[some], "map@r")
    assert facts["chosen"] == chosen and facts["classes"] == classes and facts["confidence"] == 0.95
    sentence = interpolation._sentence(facts, "MAP@R", 8, 12)
    assert (chosen == FROZEN) == ("of so few only a large gain is proof" in sentence)


def test_the_interval_of_three_classes_is_students():
    """1.2 times the jackknife's variance over equal classes, two degrees of freedom: by hand."""
    gains = torch.tensor([0.1, 0.2, 0.4])
    values = torch.zeros(12), (-gains).repeat_interleave(4)
    groups = torch.arange(3).repeat_interleave(4)
    low, high = cluster_bootstrap.compare(*values, groups, fewest=2)["interval"]
    mean = 0.7 / 3
    error = math.sqrt(1.2 * sum((g - mean) ** 2 for g in (0.1, 0.2, 0.4)) / (3 * 2))
    assert (high - low) / 2 == pytest.approx(4.302653 * error, rel=1e-3) and (low + high) / 2 == pytest.approx(mean)
    assert math.isnan(cluster_bootstrap.compare(*values, groups)["interval"][0]), "five classes, if not asked otherwise"
    with pytest.raises(ValueError, match=r"fewest must be .*2, got 1"):
        cluster_bootstrap.compare(*values, groups, fewest=1)


def test_weights_without_finite_embeddings_are_not_chosen():
    values = values_of(a50=0.1)
    values[1.0] = torch.full_like(values[1.0], math.nan)
    facts = judge(values, CLASSES, "map@r")
    assert facts["a"] == 0.5 and facts["curve"][-1]["value"] is None
    assert "no value" in interpolation._sentence(facts, "MAP@R", 8, 8)
    json.dumps(facts, allow_nan=False)


def test_nothing_to_find_is_said_and_nothing_is_chosen():
    for values in ({}, {FROZEN: torch.full((3,), math.nan)}):
        facts = judge(values, CLASSES[:3], "map@r")
        assert facts["chosen"] is None and facts["a"] is None
        assert "no validation item has anything to find" in interpolation._sentence(facts, "MAP@R", 8, 8)


# --- runs


def test_a_harmful_training_ends_at_the_frozen_encoder(tmp_path, hues):
    outcome = run(tmp_path / "run", *HARMFUL)
    facts = outcome.results["interpolation"]
    assert facts["chosen"] == FROZEN and facts["dim"] == 12 == outcome.embeddings.shape[1]
    assert validation_map(tmp_path / "run") == frozen_map() == facts["frozen"]["value"]
    assert max(point["value"] for point in facts["curve"]) < facts["frozen"]["value"], "or nothing was shown"
    assert facts["sentence"].startswith("The frozen encoder is kept: on 12 validation classes")
    assert facts["sentence"].endswith("; its embeddings have 12 dimensions, not 8.")
    verdict = outcome.results["verdict"]
    assert verdict["helped"] is None and "the saved encoder is the frozen backbone" in verdict["sentence"]
    assert outcome.results["test"]["trained"]["map@r"] == outcome.results["test"]["baseline"]["map@r"]
    description = json.loads((tmp_path / "run" / "encoder.json").read_text())
    assert description["settings"]["dim"] is None and description["pretrained"] is True


@pytest.mark.parametrize("sets", [[], HARMFUL], ids=["helpful", "harmful"])
def test_a_frozen_encoder_has_no_short_embeddings(sets, tmp_path):
    """Nothing has trained its first dimensions to stand alone."""
    outcome = run(tmp_path / "run", *sets, "loss.matryoshka=[4]")
    lengths = json.loads((tmp_path / "run" / "encoder.json").read_text()).get("lengths")
    assert (lengths is None) == (not outcome.results.get("lengths")) == (sets == HARMFUL)


def test_the_frozen_encoder_is_used_as_any_other(tmp_path, hues):
    """In a calibrated gallery, and exported: 12 dimensions everywhere."""
    run(tmp_path / "run", *HARMFUL)
    calibrate(tmp_path / "run")
    paths = sorted((hues / "hues").glob("class0[0-3]/*.png"))
    with Gallery.open(tmp_path / "hues.gallery", run=tmp_path / "run") as gallery:
        gallery.enrol(paths, [path.parent.name for path in paths])
        assert gallery.stats()["dim"] == 12
        assert gallery.search(paths[0], k=1)[0].similarity == pytest.approx(1, abs=1e-5)
        assert gallery.verify(paths[0], paths[0]).same
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11):  # older ones have another exporter
        assert training.inference.export_onnx(tmp_path / "run", tmp_path / "encoder.onnx")[0] < 1e-4


@pytest.mark.parametrize("train", ["all", "lora", "head"])
def test_a_helpful_training_ends_better(train, tmp_path):
    outcome = run(tmp_path / "run", f"finetune.train={train}", "optimizer.lr=0.02")
    facts = outcome.results["interpolation"]
    assert facts["chosen"] == "finetuned" and facts["dim"] == 8 == outcome.embeddings.shape[1]
    chosen = next(point for point in facts["curve"] if point["a"] == facts["a"])
    assert validation_map(tmp_path / "run") == pytest.approx(chosen["value"], abs=1e-12)
    assert chosen["value"] > frozen_map() + 0.1 and facts["sentence"].startswith("Fine-tuning gained on 12 validation")
    assert facts["curve"][-1]["value"] == outcome.results["val"]["map@r"], "a = 1 is what was validated"
    assert outcome.results["verdict"]["helped"] is True
    assert (
        models.load(tmp_path / "run")[0].state_dict().keys() == models.build("timm:standin", dim=8).state_dict().keys()
    )
    assert len(facts["curve"]) == (1 if train == "head" else 5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [1e-4, 0.1, 1])
def test_no_run_ends_below_the_frozen_encoder_on_validation(rate, seed, tmp_path):
    sets = [f"optimizer.lr={rate}", f"training.seed={seed}", "training.on_collapse=warn", "training.epochs=1"]
    run(tmp_path / "run", *sets, "training.batches=6", "encoder.freeze_norms=false")
    assert validation_map(tmp_path / "run") >= frozen_map()


@pytest.mark.parametrize("chosen", [0.0, 0.25, 0.75, 1.0])
def test_the_saved_weights_are_those_of_the_chosen_a(chosen, tmp_path, monkeypatch):
    """Backbone and BatchNorm's statistics between, head trained; the pretrained weights before any training."""

    def judged(*args):
        return judge(*args) | {"chosen": "finetuned", "a": chosen}

    monkeypatch.setattr(interpolation, "judge", judged)
    run(tmp_path / "run", "encoder.freeze_norms=false")
    start = models.build("timm:standin", dim=8).state_dict()
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    end = checkpoints.open(checkpoints.newest()[1]["best_file"])[0].section("encoder")
    saved = models.load(tmp_path / "run")[0].state_dict()
    assert not torch.equal(start["backbone.model.norm.running_mean"], end["backbone.model.norm.running_mean"])
    for name, tensor in saved.items():
        share = chosen if name.startswith("backbone.") else 1.0
        expected = end[name]
        if tensor.is_floating_point():
            expected = ((1 - share) * start[name].double() + share * end[name].double()).to(tensor.dtype)
        assert torch.equal(tensor, expected), name


def test_a_frozen_backbone_leaves_two_candidates(tmp_path):
    events = []
    outcome = run(tmp_path / "run", "finetune.train=head", callback=events.append)
    assert [point["a"] for point in outcome.results["interpolation"]["curve"]] == [1.0]
    assert [event["what"] for event in events if event["event"] == "interpolating"] == [
        "frozen features",
        "untrained head",
        "a = 1.0",
    ]


def test_it_can_be_switched_off(tmp_path):
    outcome = run(tmp_path / "run", *HARMFUL, "finetune.interpolate=false")
    assert "interpolation" not in outcome.results and outcome.embeddings.shape[1] == 8
    assert validation_map(tmp_path / "run") < frozen_map()


def test_without_validation_items_the_trained_weights_are_saved(tmp_path):
    prepared = prepare(read(None, standin.SETS))
    trainer = assemble(prepared, tmp_path)
    none = np.empty(0, np.int64)
    trainer = replace(trainer, held_out=HeldOut(none, none, None))
    with torch.no_grad():
        for parameter in trainer.encoder.parameters():
            parameter.add_(1.0)
    encoder, facts = interpolation.choose(trainer, prepared, trainer.encoder, lambda event: None)
    assert facts["chosen"] is None and "no validation item has anything to find" in facts["sentence"]
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(tensor, trainer.encoder.state_dict()[name])


@pytest.mark.parametrize("value", ["true", "false"])
@pytest.mark.parametrize("encoder", [["encoder.name=small-cnn"], ["encoder.pretrained=false"]])
def test_encoders_without_pretrained_weights_refuse_the_key(value, encoder, tmp_path):
    with pytest.raises(
        ValueError, match=r"finetune.interpolate would have no effect: (small-cnn has no|.*pretrained is f)"
    ):
        run_plain(tmp_path / "run", *encoder, f"finetune.interpolate={value}")
    assert not (tmp_path / "run").exists()
    outcome = run_plain(tmp_path / "plain", *encoder, "training.epochs=1", "training.batches=2")
    assert "interpolation" not in outcome.results and "interpolate" not in (tmp_path / "plain/recipe.toml").read_text()


def test_bad_values_get_one_sentence():
    with pytest.raises(ValueError, match=r"finetune.interpolate must be true or false, got 0.5"):
        read(None, ["finetune.interpolate=0.5"])
    with pytest.raises(ValueError, match=r'unknown key "finetune.interpolat"; did you mean "interpolate"'):
        read(None, ["finetune.interpolat=true"])


def test_a_saved_recipe_says_that_it_interpolates(tmp_path):
    outcome = run(tmp_path / "run", "training.epochs=1", "training.batches=2")
    assert outcome.recipe.finetune.interpolate is True
    assert read(tmp_path / "run" / "recipe.toml").plain() == outcome.recipe.plain()


def test_the_command_prints_the_sentence_and_the_report_shows_the_curve(tmp_path):
    sets = [part for text in standin.SETS[1:] for part in ("--set", text)]
    out = output_of(command("train", "hues", *sets, "--out", tmp_path / "run"))
    sentence = json.loads((tmp_path / "run" / "results.json").read_text())["interpolation"]["sentence"]
    assert sentence in out and out.index(sentence) < out.index("Training helped")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert sentence in page.replace("\u202f%", " %") and 'class="whisker main"' in page


class Cut(BaseException):
    """The machine goes down."""


@pytest.mark.parametrize("sets", [[], HARMFUL, ["finetune.train=lora"]], ids=["helpful", "harmful", "lora"])
def test_a_run_cut_while_it_interpolates_ends_the_same(sets, tmp_path):
    reference = run(tmp_path / "reference", *sets)
    for at in ("frozen features", "a = 0.25", "a = 1.0", "interpolated"):

        def cut(event, at=at):
            if at in (event.get("what"), event["event"]):
                raise Cut

        out = tmp_path / at.replace(" ", "")
        with pytest.raises(Cut):
            run(out, *sets, callback=cut)
        again = training.resume(out)
        assert weights(out) == weights(tmp_path / "reference")
        assert again.results["interpolation"] == reference.results["interpolation"]
        assert again.results["test"] == reference.results["test"] and again.notes == reference.notes


def test_targets_are_chosen_by_their_own_metric(tmp_path, hues):
    """Continuous labels: nDCG@10 over items."""
    lines = ["path,x,y"]
    for path in sorted((hues / "hues").glob("*/*.png")):
        angle = 2 * math.pi * int(path.parent.name[5:]) / 40
        lines.append(f"{path},{math.cos(angle):.4f},{math.sin(angle):.4f}")
    (hues / "hues.csv").write_text("\n".join(lines))
    sets = [s for s in standin.SETS if not s.startswith(("loss.", "sampler.per_class", "data.source"))]
    recipe = read(None, [*sets, f'data.source="{hues}/hues.csv"', "loss.name=logratio"])
    facts = training.train(recipe, tmp_path / "run").results["interpolation"]
    assert facts["metric"] == "ndcg@10" and facts["unit"] == "items" and "nDCG@10" in facts["sentence"]
    assert len(facts["curve"]) == 5


# --- several ranks


def ranked(rank, size, home, out, *sets):
    import os

    standin.install()
    os.chdir(home)
    os.environ["NEARKIN_CACHE"] = f"{home}/cache"
    outcome = training.train(read(None, [*standin.SETS, *sets]), out)
    return outcome.results["interpolation"]


def ranked_resume(rank, size, home, out):
    import os

    standin.install()
    os.chdir(home)
    os.environ["NEARKIN_CACHE"] = f"{home}/cache"
    return training.resume(out).results["interpolation"]


needs_cpu_fsdp = pytest.mark.skipif(not parallel.shards_on_cpu(), reason="FSDP on a CPU needs torch 2.7")
RANKED = {
    "helpful": [],
    "harmful": HARMFUL,
    "lora": ["finetune.train=lora"],
    "averaged": ["training.ema=0.9", "training.sync_norms=true"],
}
RANKED["averaged"] += ["encoder.freeze_norms=false"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets",
    [*RANKED.values(), pytest.param(["training.strategy=fsdp"], marks=needs_cpu_fsdp)],
    ids=[*RANKED, "sharded"],
)
def test_two_ranks_choose_alike_and_as_one(sets, tmp_path, hues):
    """Of the same best weights the same choice, to the last bit; also of a run that was finished by one process."""
    first, second = worlds.run(2, ranked, str(hues), str(tmp_path / "two"), *sets)
    assert first == second
    saved = weights(tmp_path / "two")
    alone = training.resume(tmp_path / "two").results["interpolation"]
    assert alone == first and weights(tmp_path / "two") == saved
    assert worlds.run(2, ranked_resume, str(hues), str(tmp_path / "two")) == [first, first]
    assert weights(tmp_path / "two") == saved
