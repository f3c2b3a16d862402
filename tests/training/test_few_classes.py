"""Few classes: what is held out, how a batch is filled, and that nothing worse than the start is saved in silence."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from commands import noisy_vectors, output_of, photos, run
from nearkin import training
from nearkin.training.config.defaults import filled
from nearkin.training.config.recipe import read
from nearkin.training.start import judge
from nearkin.training.verdict import concluded

TINY = ["encoder.hidden=[16]", "encoder.dim=8", "training.epochs=2", "training.batches=4", "training.workers=0"]
TINY += ["training.device=cpu"]
SENTENCE = "10 classes are too few to hold some of them out"


@pytest.fixture
def ten(tmp_path):
    """Vectors of ten classes of 20."""
    noisy_vectors(tmp_path / "ten.npz", 10, per_class=20)
    return tmp_path / "ten.npz"


def trained(source, out, *sets, **options):
    return training.train(read(None, [f'data.source="{source}"', *TINY, *sets]), out, **options)


def parts(outcome):
    labels, of = outcome.prepared.items.labels, outcome.prepared.parts
    return {name: set(labels[getattr(of, name)].tolist()) for name in ("train", "val", "test")}


# --- what is held out


def test_items_of_every_class_are_held_out_and_it_is_said_everywhere(ten, tmp_path):
    outcome = trained(ten, tmp_path / "run", report=True)
    every = set(range(10))
    assert parts(outcome) == {"train": every, "val": every, "test": every}
    assert outcome.recipe.data.closed is True and read(tmp_path / "run" / "recipe.toml").data.closed is True
    [note] = [note for note in outcome.notes if note.startswith(SENTENCE)]
    assert "--open (data.closed=false)" in note and note in outcome.results["notes"]
    page = outcome.report.read_text(encoding="utf-8")
    assert page.count(SENTENCE) == 1 and "10 known classes" in page and "unseen" not in page
    again = training.train(read(tmp_path / "run" / "recipe.toml"), tmp_path / "again")
    assert again.results["test"] == outcome.results["test"] and not any(SENTENCE in note for note in again.notes)


def test_the_command_line_has_a_flag_for_each(ten, tmp_path):
    def lines(out, *flags):
        sets = [word for text in TINY for word in ("--set", text)]
        text = output_of(run("train", ten, "--out", tmp_path / out, *sets, *flags))
        return text, read(tmp_path / out / "recipe.toml").data.closed

    text, closed = lines("default")
    assert SENTENCE in text and "class-balanced × 80 (8 items of each of 10 classes)" in text and closed is True
    text, closed = lines("closed", "--closed")
    assert SENTENCE not in text and closed is True
    text, closed = lines("open", "--open")
    assert SENTENCE not in text and closed is False and "no class in two parts" in text


@pytest.mark.parametrize("sets", [["data.closed=false"], ["data.closed=true"]])
def test_what_is_typed_stays_and_needs_no_sentence(sets, ten, tmp_path):
    outcome = trained(ten, tmp_path / "run", *sets)
    assert outcome.recipe.data.closed is (sets == ["data.closed=true"])
    assert not any(SENTENCE in note for note in outcome.notes)


def test_a_split_of_the_source_stays(tmp_path):
    noisy_vectors(tmp_path / "v.npz", 10, per_class=8)
    with np.load(tmp_path / "v.npz") as content:
        labels = content["labels"]
        split = np.where(labels < 4, "train", np.where(labels < 7, "val", "test"))
        np.savez(tmp_path / "split.npz", **content, split=split)
    outcome = trained(tmp_path / "split.npz", tmp_path / "run")
    assert parts(outcome) == {"train": set(range(4)), "val": {4, 5, 6}, "test": {7, 8, 9}}
    assert outcome.recipe.data.closed is False and outcome.prepared.parts.note.startswith("official split")
    shared = np.where(np.arange(80) % 8 < 5, "train", "test")
    np.savez(tmp_path / "shared.npz", embeddings=np.load(tmp_path / "v.npz")["embeddings"], labels=labels, split=shared)
    outcome = trained(tmp_path / "shared.npz", tmp_path / "known", "data.closed=false", report=True)
    assert any("which share classes; data.official=false holds out classes" in note for note in outcome.notes)
    assert "10 known classes" in outcome.report.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("classes", "each", "closed"), [(19, 6, True), (20, 6, False), (10, 5, False), (2, 6, True), (5, 6, True)]
)
def test_when_items_are_held_out(classes, each, closed, tmp_path):
    noisy_vectors(tmp_path / "v.npz", classes, per_class=each)
    recipe = read(None, [f'data.source="{tmp_path / "v.npz"}"'])
    assert training.prepare.prepare(recipe).recipe.data.closed is closed


def test_groups_are_kept_whole(tmp_path):
    noisy_vectors(tmp_path / "v.npz", 8, per_class=16)
    with np.load(tmp_path / "v.npz") as content:
        np.savez(tmp_path / "bursts.npz", **content, groups=np.arange(128) // 2)
    prepared = training.prepare.prepare(read(None, [f'data.source="{tmp_path / "bursts.npz"}"']))
    bursts = [set((of // 2).tolist()) for of in prepared.part_indices().values()]
    assert prepared.recipe.data.closed and not (bursts[0] & bursts[1] | bursts[0] & bursts[2] | bursts[1] & bursts[2])
    assert "every class in every part" in prepared.parts.note and "no group in two parts" in prepared.parts.note


def test_a_run_that_began_before_resumes_as_it_was(ten, tmp_path):
    """Its recipe has closed = false and the small batch written out, and knows no contender."""

    class Stop(BaseException):
        pass

    def stop(event):
        if event["event"] == "step_end" and event["step"] == 2:
            raise Stop

    old = ["data.closed=false", "sampler.per_class=2", "sampler.batch=12", "optimizer.lr=1000"]
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        trained(ten, folder, *old, callback=stop)
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text.replace("keep_start = true\n", ""))
    start = json.loads((folder / "data.json").read_text())
    del start["notes"], start["keep_start"]
    (folder / "data.json").write_text(json.dumps(start | {"recipe": read(folder / "recipe.toml").digest()}))
    for path in (*(folder / "checkpoints").iterdir(), folder / "metrics.jsonl"):
        path.unlink()  # checkpoints name the digest of the recipe; the run starts again
    outcome = training.resume(folder)
    assert outcome.recipe.data.closed is False and outcome.recipe.sampler["batch"] == 12
    assert outcome.results["start"]["start"] > outcome.results["start"]["trained"], "trained at a rate that ruins it"
    assert outcome.results["start"]["chosen"] == "trained", "as it would have ended then"
    assert outcome.recipe.training.keep_start is None
    assert "In validation it is below" in outcome.results["verdict"]["sentence"]


# --- how a batch is filled


@pytest.mark.parametrize(
    ("classes", "smallest", "usual", "most", "each"),
    [
        (10, 60, 2, 144, 8),
        (6, 100, 2, 144, 8),
        (18, 60, 2, 144, 8),
        (30, 60, 2, 144, 4),
        (72, 60, 2, 144, 2),
        (1000, 60, 2, 144, 2),
        (10, 5, 2, 144, 5),  # the smallest class
        (10, 1, 2, 144, 2),  # fewer are repeated, as ever
        (10, 60, 4, 64, 6),  # pretrained, on a CPU
        (12, 60, 4, 120, 8),
        (20, 60, 4, 120, 6),
        (40, 60, 4, 64, 4),
        (10, None, 4, 144, 4),
    ],
)
def test_a_batch_is_filled_up_to_the_smallest_class(classes, smallest, usual, most, each):
    assert filled(classes, smallest, usual, most) == each
    assert classes * each <= max(most, classes * usual)


def test_a_small_network_learns_known_classes_by_pairs_and_averages_its_weights(tmp_path):
    photos(tmp_path / "photos", classes=10, each=20)

    def settled(*sets):
        source = f'data.source="{tmp_path / "photos"}"'
        return training.prepare.prepare(read(None, [source, "training.device=cpu", "data.cache=false", *sets])).recipe

    known, unseen = settled(), settled("data.closed=false")
    assert (known.loss["name"], known.training.ema, known.sampler["batch"]) == ("supcon", 0.99, 80)
    assert known.training.epochs * known.training.batches == 900
    assert (unseen.loss["name"], unseen.training.ema, unseen.sampler["batch"]) == ("arcface", 0.0, 48)
    assert unseen.training.epochs * unseen.training.batches == 1800
    typed = settled("loss.name=arcface", "training.ema=0.5", "sampler.per_class=2")
    assert (typed.loss["name"], typed.training.ema, typed.sampler["batch"]) == ("arcface", 0.5, 20)
    assert settled("training.epochs=2").training.ema == 0.0, "too few steps to average over"


# --- what is saved and said


def test_a_start_that_validation_prefers_is_saved(ten, tmp_path):
    ruin = ["encoder.hidden=[]", "optimizer.lr=1000"]
    outcome = trained(ten, tmp_path / "run", *ruin)
    results = outcome.results
    assert results["start"]["chosen"] == "start" and results["start"]["start"] > results["start"]["trained"]
    assert results["test"]["trained"] == results["test"]["untrained"] and results["val"]["epoch"] == 0
    assert results["val"]["map@r"] == pytest.approx(results["start"]["start"])
    saved = training.embed_source(tmp_path / "run").embeddings
    assert torch.equal(saved, outcome.embeddings)
    judgement = results["verdict"]
    assert judgement["helped"] is None and judgement["below"] is True
    assert judgement["sentence"].startswith("Training changed nothing: on 10 validation classes the trained encoder is")
    assert "What may help: more items of each class." in judgement["sentence"]
    again = trained(ten, tmp_path / "again", *ruin, "training.keep_start=false")
    assert again.results["start"]["chosen"] == "trained"
    assert again.results["test"]["trained"] != again.results["test"]["untrained"]


def test_a_better_training_is_saved_without_a_word_on_the_start(ten, tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 20)
    rows = np.concatenate([rng.normal(size=(10, 4))[labels], 3 * rng.normal(size=(200, 12))], 1)  # one part tells
    np.savez(tmp_path / "v.npz", embeddings=rows.astype(np.float32), labels=labels)
    outcome = trained(tmp_path / "v.npz", tmp_path / "run", "training.epochs=4", "training.batches=40")
    assert outcome.results["start"]["chosen"] == "trained"
    assert "validation" not in outcome.results["verdict"]["sentence"]


def judged(difference, classes=10, helped=None):
    """A verdict of the test, as `verdict` gives it."""
    figures = {"trained": 0.5 + difference, "other": 0.5, "difference": difference, "classes": classes}
    against = {"untrained": figures, "baseline": figures}
    return {"helped": helped, "sentence": "So it is.", "metric": "map@r", "against": against}


def prepared(known=False, baseline="pixels", each=6):
    items = SimpleNamespace(labels=np.repeat(np.arange(8), each), pictures=baseline != "vectors" or None)
    return SimpleNamespace(items=items, known_classes=known, baseline=baseline)


MORE, CLOSED = "more classes", "--closed, which asks about new {} of known classes"
PRETRAINED = "a pretrained encoder (nearkin encoders)"


@pytest.mark.parametrize(
    ("judgement", "facts", "said"),
    [
        (judged(0.2, helped=True), {}, ""),
        (judged(0.01), {}, ""),  # undecided, of classes enough, and not below
        (judged(0.2, 2), {}, f" What would tell: {MORE}; {CLOSED.format('pictures')}."),
        (judged(0.2, 2), {"each": 5}, f" What would tell: {MORE}."),  # too few items to divide
        (judged(-0.1, 2), {}, f" What may help: {MORE}; {CLOSED.format('pictures')}; {PRETRAINED}."),
        (judged(-0.1, helped=False), {"known": True}, f" What may help: more pictures of each class; {PRETRAINED}."),
        (
            judged(-0.1, helped=False),
            {"baseline": "vectors"},
            f" What may help: {MORE}; {CLOSED.format('items')}.",
        ),
        (
            judged(-0.1, helped=False),
            {"baseline": "frozen backbone"},
            f" What may help: {MORE}; {CLOSED.format('pictures')}.",
        ),
    ],
)
def test_a_remedy_is_named_where_training_has_not_proved_itself(judgement, facts, said):
    conclusion = concluded(judgement, None, prepared(**facts), graded=False)
    assert conclusion["sentence"] == "So it is." + said and conclusion["helped"] is judgement["helped"]
    assert conclusion["below"] is (judgement["against"]["untrained"]["difference"] < 0)


def test_validation_has_its_say():
    gain = {"value": 0.1, "low": -0.2, "high": 0.4}
    facts = {"metric": "map@r", "trained": 0.4, "start": 0.3, "baseline": 0.45, "chosen": "trained", "gain": gain}
    facts |= {"classes": 2, "unit": "classes"}
    told = concluded(judged(0.1, helped=True), facts, prepared(), graded=False)
    assert "In validation it is below the pixels (45.0 %): MAP@R 40.0 %. What may help" in told["sentence"]
    assert told["below"] is True and told["helped"] is True
    told = concluded(judged(0.1), facts | {"start": 0.5}, prepared(), graded=False)
    assert "below the encoder before training (50.0 %) and the pixels (45.0 %)" in told["sentence"]
    told = concluded(judged(0.0), facts | {"chosen": "start", "baseline": 0.2}, prepared(), graded=False)
    assert told["helped"] is None and told["below"] is False
    assert told["sentence"].startswith(
        "Training changed nothing: on 2 validation classes the trained encoder is not shown better than the one before "
        "training (MAP@R 40.0 % beside 30.0 %, a difference of +10.0 points, 95 % interval −20.0 to +40.0), so that "
        "one is saved; in the test it has MAP@R 50.0 %, the pixels 50.0 %. What may help: more classes; --closed"
    )
    nothing = {"metric": "ndcg@10", "trained": None, "start": None, "baseline": None, "chosen": "trained"}
    assert concluded(judged(0.1), nothing, prepared(), graded=True)["sentence"] == "So it is."


@pytest.mark.parametrize(
    ("classes", "gains", "chosen"),
    [
        (3, [0.2, 0.1, -0.1], "trained"),  # the mean decides
        (3, [0.2, -0.2, -0.1], "start"),
        (2, [0.2, 0.201], "trained"),
        (2, [0.3, 0.1], "start"),  # the mean of two is not enough
        (2, [-0.1, -0.1], "start"),
    ],
)
def test_the_start_is_a_contender(classes, gains, chosen):
    groups = torch.arange(classes).repeat_interleave(50)
    start = torch.full((50 * classes,), 0.5) + 0.01 * torch.randn(50 * classes, generator=torch.manual_seed(0))
    each = torch.tensor(gains)
    values = {"trained": start + each[groups], "start": start, "baseline": start}
    facts = judge(values, groups, "map@r")
    assert facts["chosen"] == chosen and facts["classes"] == classes
    assert facts["gain"]["value"] == pytest.approx(float(each.mean()), abs=1e-6)
    nothing = {name: torch.full((4,), torch.nan) for name in values}
    assert judge(nothing, torch.arange(4), "map@r")["chosen"] == "trained"
