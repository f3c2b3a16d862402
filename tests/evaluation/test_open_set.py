"""Open-set identification against float64 loops; what it may not quote; intervals on classes of their own."""

import itertools
import math

import numpy as np
import pytest
import torch

import reference
from nearkin import evaluation
from nearkin.evaluation.open_set import draws, label_scores, method_choice, search_rates
from nearkin.evaluation.open_set.label_scores import Cohort, Method
from nearkin.evaluation.open_set.search_rates import Trials

METHODS = [Method(*pair) for pair in itertools.product(label_scores.SCORINGS, label_scores.NORMALIZATIONS)]


def world(classes=12, each=5, dim=6, noise=0.7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    labels = torch.arange(classes).repeat_interleave(each)
    lengths = 0.5 + torch.rand(classes * each, 1, generator=generator, dtype=torch.float64)
    rows = (centres[labels] + noise * torch.randn(classes * each, dim, generator=generator).double()) * lengths
    return rows, labels, torch.randn(9, dim, generator=generator, dtype=torch.float64)


def plain(trials):
    return Trials(*(np.asarray(column) for column in zip(*trials, strict=True)))


# ---- draws


@pytest.mark.parametrize("examples", [1, 2, 4])
def test_a_draw_enrols_half_and_searches_for_everything_else(examples):
    classes = np.repeat(np.arange(9), [5, 5, 5, 5, 5, 5, 5, 5, 1])  # the last one can only be unknown
    bursts = np.arange(len(classes))
    seen = set()
    for repeat in range(6):
        draw = draws.draw(classes, bursts, examples, repeat, seed=3)
        assert draw.enrolled.shape == (4, examples)
        labels = classes[draw.enrolled]
        assert (labels == labels[:, :1]).all() and len(set(labels[:, 0])) == 4 and 8 not in labels
        everything = np.concatenate([draw.enrolled.ravel(), draw.probes])
        assert sorted(everything) == list(range(len(classes)))
        for probe, mate in zip(draw.probes, draw.mate, strict=True):
            assert (mate == -1) == (classes[probe] not in labels)
            assert mate == -1 or labels[mate, 0] == classes[probe]
        again = draws.draw(classes, bursts, examples, repeat, seed=3)
        assert all((a == b).all() for a, b in zip(draw, again, strict=True))
        assert (draws.draw(classes, bursts, 1, repeat, seed=3).enrolled[:, 0] == draw.enrolled[:, 0]).all(), "nested"
        seen.add(tuple(sorted(labels[:, 0])))
    assert len(seen) > 3, "the halves differ"


def test_no_search_meets_its_own_burst():
    classes = np.repeat(np.arange(6), 6)
    bursts = np.tile([0, 0, 1, 1, 2, 2], 6) + 10 * classes
    for repeat in range(5):
        draw = draws.draw(classes, bursts, 2, repeat, seed=0)
        assert all(len(set(bursts[items])) == 2 for items in draw.enrolled)
        for probe, mate in zip(draw.probes, draw.mate, strict=True):
            assert mate == -1 or bursts[probe] not in bursts[draw.enrolled[mate]]
        assert (draw.mate >= 0).sum() == 3 * 2, "two items of the third burst of each enrolled class"
    assert len(draws.enrollable(classes, bursts, 3)) == 0


# ---- scores and rates, against loops


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("examples", [1, 3])
def test_scores_are_those_of_a_loop(method, examples):
    rows, labels, others = world()
    draw = draws.draw(labels.numpy(), np.arange(len(labels)), examples, repeat=1, seed=0)
    templates = others / others.norm(dim=1, keepdim=True)
    slow = reference.open_set_searches(rows, *draw, *method, cohort=others, nearest=4)
    for budget in (1, 2**9, 2**29):
        cohort = Cohort.of(templates, 4, rows, budget)
        (fast,) = label_scores.search(rows, draw, [method], cohort, budget)
        torch.testing.assert_close(
            fast.score, torch.tensor([s for s, _ in slow], dtype=torch.float64), atol=1e-10, rtol=0
        )
        assert fast.first.tolist() == [first for _, first in slow]


def test_all_methods_together_are_each_alone():
    rows, labels, others = world(seed=4)
    draw = draws.draw(labels.numpy(), np.arange(len(labels)), 2, repeat=0, seed=0)
    cohort = Cohort.of(others / others.norm(dim=1, keepdim=True), 3, rows, 2**20)
    for method, together in zip(METHODS, label_scores.search(rows, draw, METHODS, cohort, 2**20), strict=True):
        (alone,) = label_scores.search(rows, draw, [method], cohort, 2**20)
        assert torch.equal(together.score, alone.score) and torch.equal(together.first, alone.first)


@pytest.mark.parametrize("seed", range(6))
def test_rates_are_those_of_a_loop_also_with_ties(seed):
    draw = np.random.default_rng(seed)
    score = draw.integers(0, 8, 60).astype(np.float64) if seed % 2 else draw.normal(size=60)
    mated, first = draw.random(60) < 0.5, draw.random(60) < 0.8
    trials = Trials(score, first & mated, mated, draw.integers(0, 5, 60))
    for fpir in (0.001, 0.03, 0.1, 0.5, 0.99):
        point = search_rates.operating_point(trials, fpir)
        missed, accepted = reference.open_set_rates(score.tolist(), first.tolist(), mated.tolist(), fpir)
        assert point.fnir == pytest.approx(missed, abs=1e-12) and point.fpir <= fpir
        assert point.fpir >= accepted - 1e-12
        assert np.mean(score[~mated] >= point.threshold) == point.fpir
    assert search_rates.auroc(trials) == pytest.approx(reference.auroc(score.tolist(), mated.tolist()), abs=1e-12)


def test_the_whole_is_its_draws_its_loops_and_its_rates():
    rows, labels, others = world(classes=14, each=6, seed=2)
    scores = evaluation.open_set(rows, labels, examples=(1, 2), fpirs=(0.1, 0.2), repeats=2, seed=5, cohort=others)
    for entry in scores["examples"]:
        trials = {}
        for repeat in range(2):
            draw = draws.draw(labels.numpy(), np.arange(len(labels)), entry["examples"], repeat, 5)
            for name in entry["methods"]:
                scoring, _, kind = name.partition("+")
                slow = reference.open_set_searches(rows, *draw, scoring, kind or "none", others, 4)
                trials.setdefault(name, []).extend((s, f, m >= 0) for (s, f), m in zip(slow, draw.mate, strict=True))
        assert entry["labels"] == 7 and entry["nonmated"] == 42 and entry["mated"] == 7 * (6 - entry["examples"])
        for name, figures in entry["methods"].items():
            score, first, mated = zip(*trials[name], strict=True)
            score = [round(s, 10) for s in score]
            for fpir in (0.1, 0.2):
                fnir = reference.open_set_rates(score, first, mated, fpir)[0]
                assert figures[f"fnir@fpir={fpir:g}"] == pytest.approx(fnir, abs=1e-12), name
                assert figures[f"dir@fpir={fpir:g}"] == pytest.approx(1 - fnir, abs=1e-12)
            assert figures["auroc"] == pytest.approx(reference.auroc(score, mated), abs=1e-9)
            assert figures["identification"] == pytest.approx(sum(first) / sum(mated), abs=1e-12)
    assert set(scores["examples"][0]["methods"]) == {"nearest", "nearest+as-norm", "nearest+csls"}
    assert len(scores["examples"][1]["methods"]) == 9


# ---- what it says


def test_well_separated_classes_are_all_found_and_equal_embeddings_none():
    rows, labels, _ = world(classes=40, each=6, dim=40, noise=0.01)
    scores = evaluation.open_set(rows, labels, examples=(1,), fpirs=(0.1, 0.3), repeats=3)
    figures = scores["examples"][0]["methods"]["nearest"]
    assert figures["fnir@fpir=0.1"] == 0 and figures["auroc"] == 1
    assert math.isnan(figures["intervals"]["dir@fpir=0.1"][0]), "the threshold is that of three classes"
    low, high = figures["intervals"]["dir@fpir=0.3"]
    assert high == 1 and 0.9 < low < 1, "all right with 40 classes is no certainty"
    same = evaluation.open_set(torch.ones_like(rows), labels, examples=(1,), fpirs=(0.1,), repeats=3)
    figures = same["examples"][0]["methods"]["nearest"]
    assert figures["identification"] == 0 and figures["fnir@fpir=0.1"] == 1 and figures["auroc"] == 0.5


def test_lengths_matter_to_the_weighted_template_only():
    rows, labels, others = world(classes=16, each=6)
    scaled = rows * torch.linspace(0.1, 3, len(rows), dtype=torch.float64)[:, None]
    options = {"examples": (3,), "fpirs": (0.1,), "repeats": 2, "cohort": others, "interval": False}
    a, b = (evaluation.open_set(x, labels, **options)["examples"][0]["methods"] for x in (rows, scaled))
    changed = {name for name in a if a[name]["auroc"] != b[name]["auroc"]}
    assert changed and all(name.startswith("weighted") for name in changed)
    units = rows / rows.norm(dim=1, keepdim=True)
    assert not any("weighted" in n for n in evaluation.open_set(units, labels, **options)["examples"][0]["methods"])


def test_an_fpir_that_so_few_searches_cannot_show_is_not_quoted():
    rows, labels, _ = world(classes=20, each=6)
    scores = evaluation.open_set(rows, labels, examples=(1,), repeats=20)
    entry = scores["examples"][0]
    assert entry["nonmated"] == 60 and entry["smallest_fpir"] == pytest.approx(-math.log(0.05) / 60)
    figures = entry["methods"]["nearest"]
    assert figures["fnir@fpir=0.1"] is not None and scores["not_measurable"] == [0.01, 0.001]
    for fpir in ("0.01", "0.001"):
        assert figures[f"fnir@fpir={fpir}"] is None and f"fnir@fpir={fpir}" not in figures["intervals"]
    assert any("60 searches of unknown classes can show 0.05 at the least" in note for note in scores["notes"])
    assert len(scores["notes"]) == 2, "and there is no cohort"
    assert all(point["fpir"] >= entry["smallest_fpir"] for point in figures["curve"])
    assert [p["fnir"] for p in figures["curve"]] == sorted((p["fnir"] for p in figures["curve"]), reverse=True)


def test_numpy_names_groups_unknown_labels_and_float32():
    rows, labels, _ = world(classes=16, each=6)
    options = {"examples": (1, 2), "fpirs": (0.1,), "repeats": 2}
    whole = evaluation.open_set(rows, labels, **options)
    names = [f"class {i:02}" for i in labels.tolist()]
    assert repr(evaluation.open_set(rows.numpy(), names, **options)) == repr(whole), "NaN is not itself"
    unknown = torch.cat([labels, torch.full((3,), -1)])
    with_unknown = evaluation.open_set(torch.cat([rows, rows[:3]]), unknown, **options)
    assert repr(with_unknown | {"items": 96}) == repr(whole)
    single = evaluation.open_set(rows.float(), labels, **options)["examples"][0]["methods"]["nearest"]
    assert single["auroc"] == pytest.approx(whole["examples"][0]["methods"]["nearest"]["auroc"], abs=1e-4)
    alone = evaluation.open_set(rows, labels, groups=torch.arange(96), **options)
    assert repr(alone) == repr(whole)
    pairs = evaluation.open_set(rows, labels, groups=torch.arange(96) // 2, **options)
    assert [entry["mated"] for entry in pairs["examples"]] == [8 * 4, 8 * 2]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"labels": torch.arange(60) % 3}, "at least 4 classes, half of them enrolled, got 3"),
        ({"labels": torch.arange(60)}, "more than 1 example .* got 0 of 60 classes; the largest has 1 item"),
        ({"labels": torch.full((60,), -1)}, "all labels are -1"),
        ({"examples": (0,)}, "examples must be >= 1, got 0"),
        ({"examples": ()}, "examples must be a list of at least one"),
        ({"examples": (9, 20)}, "more than 9 examples .* got 0 of 12 classes; the largest has 5 items"),
        ({"fpirs": (0.1, 1.0)}, "fpirs must be > 0 and < 1, got 1.0"),
        ({"repeats": 0}, "repeats must be >= 1, got 0"),
        ({"scorings": ("mean",)}, 'unknown scorings "mean"'),
        ({"normalizations": ("z-norm",)}, 'unknown normalizations "z-norm"'),
        ({"cohort": torch.randn(9, 5).double()}, "cohort must have 6 dimensions as embeddings have, got 5"),
        ({"cohort": torch.randn(1, 6).double()}, "cohort must be at least two classes: 2, got 1"),
        ({"cohort_labels": torch.arange(9)}, "cohort_labels must come with cohort"),
        (
            {"cohort": torch.randn(9, 6).double(), "cohort_labels": torch.arange(9) + 10},
            "classes that are not tested, got 2 that are also in labels",
        ),
    ],
)
def test_bad_input_is_one_sentence(change, sentence):
    rows, labels, _ = world()
    with pytest.raises(ValueError, match=sentence) as error:
        evaluation.open_set(rows, **{"labels": labels, "repeats": 2} | change)
    assert "\n" not in str(error.value)


def test_classes_with_too_few_items_are_searched_for_as_unknown_and_named_in_a_note():
    rows, labels, _ = world(classes=12, each=5)
    kept = torch.cat([torch.arange(50), torch.tensor([50, 55])])  # the last two classes have one item each
    scores = evaluation.open_set(rows[kept], labels[kept], examples=(1, 2, 7), fpirs=(0.2,), repeats=2)
    assert [entry["examples"] for entry in scores["examples"]] == [1, 2]
    assert any(note.startswith("1 example: 10 of 12 classes") for note in scores["notes"])
    assert any(note.startswith("7 examples: not measured, 0 classes") for note in scores["notes"])
    assert scores["examples"][0]["labels"] == 5 and scores["examples"][0]["nonmated"] == 5 * 5 + 2


# ---- the choice of a method


def trials_of(hits, classes, unknown=200):
    """Searches whose hit or miss is given; the unknown ones are all below every threshold of interest."""
    score = np.concatenate([np.where(hits, 2.0, 0.0), np.linspace(0, 1, unknown)])
    mated = np.arange(len(score)) < len(hits)
    groups = np.concatenate([classes, np.arange(unknown) % (classes.max() + 1)])
    return Trials(score, mated & (score > 1), mated, groups)


def test_a_method_is_chosen_only_where_classes_agree():
    draw = np.random.default_rng(0)
    classes = np.repeat(np.arange(40), 10)
    base = draw.random(400) < 0.5
    better, lucky = base | (draw.random(400) < 0.5), base ^ (draw.random(400) < 0.1)
    trials = {"nearest": trials_of(base, classes), "template": trials_of(better, classes)}
    trials["nearest+csls"] = trials_of(lucky, classes)
    fnirs = {name: search_rates.intervals(part, [0.1], seed=0).fnirs for name, part in trials.items()}
    choice = method_choice.choose(trials, fnirs, [0.1], 0.1, seed=0)
    assert choice["best"] == "template" and choice["against"]["nearest+csls"]["verdict"] == "undecided"
    low, high = choice["against"]["template"]["interval"]
    assert 0 < low < choice["against"]["template"]["difference"] < high
    assert choice["sentence"].startswith("Best is the template: DIR")
    swapped = {"nearest": trials["template"], "template": trials["nearest"]}
    fnirs = {"nearest": fnirs["template"], "template": fnirs["nearest"]}
    choice = method_choice.choose(swapped, fnirs, [0.1], 0.1, seed=0)
    assert choice["best"] == "nearest" and "shown worse: template" in choice["sentence"]


# ---- intervals, on classes that played no part in making them


@pytest.mark.slow
def test_intervals_cover_what_new_classes_show():
    """Sixty samples of 60 classes; the truth from a hundred others: of 95 % intervals 54 of 60 must cover."""

    def sample(seed):
        draw = np.random.default_rng(seed)
        centres = draw.normal(size=(60, 12))
        width = 0.45 * np.exp(0.4 * draw.normal(size=60))
        labels = np.repeat(np.arange(60), 8)
        return centres[labels] + width[labels, None] * draw.normal(size=(480, 12)), labels

    def trials(seed):
        rows, labels = (torch.from_numpy(part) for part in sample(seed))
        known = evaluation_classes(rows, labels)
        return open_set_searches(rows, known, 2, [Method("nearest")], 4, 0)["nearest"]

    from nearkin.evaluation.open_set.open_set_metrics import classes_of as evaluation_classes
    from nearkin.evaluation.open_set.open_set_metrics import searches as open_set_searches

    others = [trials(1000 + seed) for seed in range(100)]
    population = Trials(*(np.concatenate(column) for column in zip(*others, strict=True)))
    fpirs = [0.1, 0.02]
    truth = [search_rates.operating_point(population, f).fnir for f in fpirs]
    covered = {"auroc": 0, **dict.fromkeys(fpirs, 0)}
    fpir_covered = 0
    for seed in range(60):
        part = trials(seed)
        spread = search_rates.intervals(part, fpirs, seed=0)
        for f, true, (low, high) in zip(fpirs, truth, spread.fnir, strict=True):
            covered[f] += low <= true <= high
        covered["auroc"] += spread.auroc[0] <= search_rates.auroc(population) <= spread.auroc[1]
        threshold = search_rates.operating_point(part, 0.1).threshold
        true = np.mean(population.score[~population.mated] >= threshold)
        fpir_covered += spread.fpir[0][0] <= true <= spread.fpir[0][1]
    assert min(covered.values()) >= 54 and fpir_covered >= 52, (covered, fpir_covered)
