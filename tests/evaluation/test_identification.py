"""Who is this, or nobody we know, on half of the classes: every figure against float64 loops; what it may not say."""

import json

import numpy as np
import pytest
import torch

import reference
from calibrations import embeddings
from nearkin import evaluation
from nearkin.data.vectors import Vectors
from nearkin.evaluation.open_set import draws, event_rates, identification, learned_gallery, search_rates
from nearkin.evaluation.open_set.search_rates import Trials
from nearkin.evaluation.protocols import runner
from nearkin.evaluation.recognition import NEAREST, NONE, RIGHT, Far, Hits, LabelSums, Part, events, fit


def world(classes=16, each=7, dim=12, seed=0, spread=0.9):
    rows, labels = embeddings(classes, each, dim=dim, seed=seed, spread=spread)
    return torch.from_numpy(rows), torch.from_numpy(labels)


def some_answers(seed, ties=False, classes=9):
    """Searches with events of random probabilities."""
    draw = np.random.default_rng(seed)
    shares = events.softmax(draw.normal(size=(240, 3)) * 2)
    score = np.log(shares[:, RIGHT] / shares[:, NONE])
    if ties:
        score = score.round()
    mated = draw.random(240) < 0.6
    return Trials(score, mated & (draw.random(240) < 0.7), mated, draw.integers(0, classes, 240)), shares


# ---- the figures, against loops


@pytest.mark.parametrize("seed", range(4))
def test_figures_are_those_of_loops_also_with_ties(seed):
    trials, shares = some_answers(seed, ties=seed % 2 > 0)
    found = event_rates.event_figures(trials, shares, seed=0, interval=True)
    columns = trials.first.tolist(), trials.mated.tolist()
    assert search_rates.oscr(trials) == pytest.approx(reference.oscr(trials.score.tolist(), *columns), abs=1e-12)
    assert found["gain"] == pytest.approx(reference.gain(shares.tolist(), *columns), abs=1e-12)
    assert found["oracle"] == pytest.approx(reference.best_gain(trials.score.tolist(), *columns), abs=1e-12)
    weights = np.array(reference.half_strangers(trials.mated))
    unknown = reference.calibration_error(shares[:, NONE].tolist(), (~trials.mated).tolist(), weights.tolist())
    assert found["ece_unknown"] == pytest.approx(unknown, abs=1e-12)
    named = np.flatnonzero(shares.argmax(1) == RIGHT)
    of_named = shares[named, RIGHT].tolist(), trials.first[named].tolist(), weights[named].tolist()
    assert found["ece_named"] == pytest.approx(reference.calibration_error(*of_named), abs=1e-12)
    for kind, stated, came, which in (
        ("unknown", shares[:, NONE], ~trials.mated, np.arange(240)),
        ("named", shares[:, RIGHT], trials.first, named),
    ):
        for line in found["reliability"][kind]:
            inside = [i for i in which if min(int(stated[i] * 10), 9) == round(10 * line["from"])]
            weight = sum(weights[i] for i in inside)
            assert line["searches"] == len(inside) and line["share"] == pytest.approx(weight, abs=1e-12)
            assert line["stated"] == pytest.approx(sum(weights[i] * stated[i] for i in inside) / weight, abs=1e-12)
            observed = sum(weights[i] * bool(came[i]) for i in inside) / weight
            assert line["observed"] == pytest.approx(observed, abs=1e-12)
            assert np.isnan(line["interval"][0]) or line["interval"][0] <= observed <= line["interval"][1]
        assert sum(line["searches"] for line in found["reliability"][kind]) == len(which)
    for name in ("gain", "ece_unknown", "ece_named"):
        assert found["intervals"][name][0] < found[name] < found["intervals"][name][1]


def test_verdicts_are_those_of_a_loop():
    trials, shares = some_answers(5)
    found = event_rates.verdict_shares(trials, shares, 0.3, 0.7, True)
    counted = {"known": dict.fromkeys(("right", "wrong", "unsure", "unknown"), 0)}
    counted["strangers"] = dict.fromkeys(("named", "unsure", "unknown"), 0)
    for share, first, mated in zip(shares, trials.first, trials.mated, strict=True):
        right, other, none = share[0] * 0.7, share[1] * 0.7, share[2] * 0.3
        total = right + other + none
        verdict = "named" if right / total >= 0.7 else "unknown" if none / total >= 0.7 else "unsure"
        if mated and verdict == "named":
            verdict = "right" if first else "wrong"
        counted["known" if mated else "strangers"][verdict] += 1
    for kind, number in (("known", trials.mated.sum()), ("strangers", (~trials.mated).sum())):
        for verdict, count in counted[kind].items():
            assert count and found[kind][verdict] == pytest.approx(count / number, abs=1e-12)
            low, high = found[kind]["intervals"][verdict]
            assert low < found[kind][verdict] < high


def slow_answers(rows, labels, examples, repeats, seed=0):
    """Each search by itself, in float64, asked of a recogniser that was fitted on the enrolled rows."""
    x, searches = rows.double().numpy(), []
    for repeat in range(repeats):
        draw = draws.draw(labels.numpy(), np.arange(len(labels)), examples, repeat, seed)
        mine = x[draw.enrolled.ravel()].astype(np.float32)
        codes = np.repeat(np.arange(len(draw.enrolled)), examples)
        stream = [Part(mine, codes, np.arange(1, len(codes) + 1))]
        learned = fit(lambda stream=stream: iter(stream), np.full(len(draw.enrolled), examples))
        sums = LabelSums.of(learned.rows(mine), codes, len(draw.enrolled))
        for probe, mate in zip(draw.probes, draw.mate, strict=True):
            cosines = mine.astype(np.float64) @ x[probe]
            order = np.argsort(-cosines)[:NEAREST]
            query = learned.rows(x[probe][None].astype(np.float32)).astype(np.float64)
            found = learned.answer(query, Hits(cosines[order][None], codes[order][None]), learned.scores(*sums))
            searches.append((found.score[0], found.best[0] == mate, mate >= 0, found.shares[0], learned.far))
    return searches


@pytest.mark.parametrize("examples", [1, 3])
def test_the_whole_is_its_draws_asked_one_by_one(examples):
    rows, labels = world()
    found = evaluation.identification(rows, labels, examples=(examples,), fpirs=(0.1, 0.2), fars=(0.3, 0.01), repeats=2)
    (entry,) = found["examples"]
    score, first, mated, shares, curves = zip(*slow_answers(rows, labels, examples, 2), strict=True)
    assert entry["labels"] == 8 and entry["nonmated"] == 56 and entry["mated"] == 8 * (7 - examples)
    assert entry["gain"] == pytest.approx(reference.gain(shares, first, mated), abs=1e-12)
    assert entry["oracle"] == pytest.approx(reference.best_gain(score, first, mated), abs=1e-12)
    assert entry["oscr"] == pytest.approx(reference.oscr(score, first, mated), abs=1e-6)
    assert entry["auroc"] == pytest.approx(reference.auroc(score, mated), abs=1e-6)
    stated = [share[NONE] for share in shares], [not m for m in mated], reference.half_strangers(mated)
    assert entry["ece_unknown"] == pytest.approx(reference.calibration_error(*stated), abs=1e-4)
    for fpir in (0.1, 0.2):
        missed = reference.open_set_rates(score, first, mated, fpir)[0]
        assert entry[f"dir@fpir={fpir:g}"] == pytest.approx(1 - missed, abs=1e-12)
    for rate in entry["far"]:
        named, known, expected = [], [], []
        for s, f, m, curve in zip(score, first, mated, curves, strict=True):
            within = [i for i, e in enumerate(curve.expected) if e <= rate["asked"]] or [len(curve.score) - 1]
            (known if m else named).append(s > curve.score[within[0]] and (f or not m))
            expected.append(curve.expected[within[0]])
        assert rate["observed"] == pytest.approx(np.mean(named), abs=1e-12)
        assert rate["right"] == pytest.approx(np.mean(known), abs=1e-12)
        assert rate["expected"] == pytest.approx((expected[0] + expected[-1]) / 2, abs=1e-12)
        assert rate["proven"] == (rate["asked"] == 0.3)
    assert 0 < entry["gain"] < 1 and 0 < entry["oscr"] < 1, "the world is neither trivial nor hopeless"


def test_budget_changes_nothing_and_progress_counts_searches(monkeypatch):
    rows, labels = world()
    calls = []
    options = {"examples": (1, 2), "repeats": 2, "fars": (0.3,)}
    one = evaluation.identification(rows, labels, **options, progress=lambda *two: calls.append(two))
    monkeypatch.setattr(learned_gallery, "ROWS", 5)
    two = evaluation.identification(rows, labels, **options, budget=1)
    for a, b in zip(one["examples"], two["examples"], strict=True):
        assert a["gain"] == b["gain"] and a["oscr"] == pytest.approx(b["oscr"], abs=1e-9)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls) and calls[-1][0] == calls[-1][1]


def test_beyond_so_many_rows_the_labels_of_the_nearest_compete(monkeypatch):
    rows, labels = world(classes=60, each=4, spread=1.2)
    options = {"examples": (3,), "repeats": 2}
    (all_,) = evaluation.identification(rows, labels, **options)["examples"]
    monkeypatch.setattr(learned_gallery, "COMPETE", 50)
    monkeypatch.setattr(learned_gallery, "NEAREST", 2)
    (near,) = evaluation.identification(rows, labels, **options)["examples"]
    assert near["identification"] != all_["identification"]


def test_arrays_and_names_of_classes_do_what_tensors_do():
    rows, labels = world(classes=10, each=5)
    options = {"examples": (2,), "fars": (0.3,), "repeats": 2}
    expected = evaluation.identification(rows, labels, **options)
    names = [f"class {label:02}" for label in labels.tolist()]
    for same in ((rows.numpy(), labels.numpy()), (rows.double(), labels), (rows, names)):
        found = evaluation.identification(*same, **options)
        assert json.dumps(found) == json.dumps(expected) and found["examples"]
    unknown = torch.cat([labels, torch.full((6,), -1)])
    more = evaluation.identification(torch.cat([rows, -rows[:6]]), unknown, **options)
    assert json.dumps(more) == json.dumps(expected), "items of unknown classes take no part"


def test_no_search_meets_an_enrolled_item_of_its_group():
    rows, labels = world(classes=20, each=6, spread=0.5)
    copies = rows.repeat_interleave(2, 0)  # each item twice, of one group
    groups = torch.arange(len(copies)) // 2
    twice = labels.repeat_interleave(2)
    options = {"examples": (2,), "repeats": 2}
    (apart,) = evaluation.identification(copies, twice, **options, groups=groups)["examples"]
    (mixed,) = evaluation.identification(copies, twice, **options)["examples"]
    assert apart["mated"] == 10 * 8 and mixed["mated"] == 10 * 10
    assert mixed["identification"] > apart["identification"], "copies of enrolled items are found"


# ---- what it says


def test_classes_far_apart_are_named_and_equal_rows_are_not():
    rows, labels = world(classes=60, each=6, dim=48, spread=0.05)
    (entry,) = evaluation.identification(rows, labels, examples=(3,), repeats=3)["examples"]
    assert entry["gain"] > 0.97 and entry["known"]["right"] > 0.97 and entry["strangers"]["named"] < 0.03
    assert entry["sentence"].startswith("Of 30 labels identify names ")
    (same,) = evaluation.identification(torch.ones_like(rows), labels, examples=(3,), repeats=2)["examples"]
    assert same["known"]["right"] == same["strangers"]["named"] == same["dir@fpir=0.1"] == 0
    assert same["oracle"] == 0.5 and same["auroc"] == 0.5


def test_a_rate_is_kept_exceeded_or_below():
    draw = np.random.default_rng(0)
    mated, classes = np.arange(800) % 2 == 0, np.repeat(np.arange(40), 20)
    trials = Trials(draw.random(800), mated, mated, classes)
    curve = Far(np.array([0.0, 0.9, 0.99]), np.array([1.0, 0.1, 0.05]), np.ones(3), 20)
    above = np.stack([trials.score > cut for cut in (0.9, 0.5, 0.999, 0.99)], 1)
    answers = identification._Answers(trials, np.full((800, 3), 1 / 3), above, [curve, curve])
    rates = [identification._far(answers, n, asked, True) for n, asked in enumerate((0.1, 0.1, 0.1, 0.01))]
    assert [rate["verdict"] for rate in rates] == ["kept", "exceeded", "below", "below"]
    assert [rate["proven"] for rate in rates] == [True, True, True, False] and rates[3]["expected"] == 0.05
    assert rates[3]["note"] == "20 labels can show 5 % at the least; 1 % was asked"
    kept = identification._rates_sentence([{"far": rates[:1]}])
    assert (
        kept.startswith("identify names no more strangers than expected, at the rate asked; nearest")
        and " of strangers named where 10.0 % are" in kept
    )
    worst = identification._rates_sentence([{"far": rates}])
    assert worst.startswith("identify names more strangers than expected at 1 of 4 rates; worst: 48.0 % of")
    assert "where 10.0 % are expected" in worst
    none = identification._far(answers, 0, 0.1, False)
    assert none["verdict"] is None and np.isnan(none["interval"][0])


def test_few_classes_have_no_intervals_and_fewer_are_a_note():
    rows, labels = world(classes=6, each=5)
    found = evaluation.identification(rows, labels, examples=(2,))
    (entry,) = found["examples"]
    assert entry["labels"] == 3 and not np.isnan(entry["intervals"]["gain"][0])
    none = evaluation.identification(rows, labels, examples=(2,), interval=False)["examples"][0]
    assert "intervals" not in none and none["gain"] == entry["gain"] and none["far"][0]["verdict"] is None
    few = evaluation.identification(rows[:25], labels[:25], examples=(2,))
    assert (
        few["examples"] == []
        and "2 examples: identify is not measured, 2 labels are enrolled, 3 are needed" in (few["notes"])
    )
    assert few["sentence"] == "Whether a rate asked of identify holds was not measured."


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"examples": ()}, "examples must be a list of at least one"),
        ({"fars": (0.0,)}, "fars must be"),
        ({"fars": 0.1}, "fars must be a list"),
        ({"fpirs": (2,)}, "fpirs must be"),
        ({"repeats": 0}, "repeats must be >= 1, got 0"),
        ({"examples": (7,)}, "at least 4 classes with more than 7 examples"),
    ],
)
def test_bad_input_is_one_sentence(options, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        evaluation.identification(*world(), **options)


def test_it_is_part_of_the_protocol_without_nan():
    rows, labels = world(classes=12, each=4)
    items = Vectors("a", rows, labels.numpy())
    settings = runner.Settings(("open_set",), examples=(1, 3), fars=(0.5,), repeats=2)
    scores = runner.evaluate(items, None, settings)["results"]["open_set"]
    json.dumps(scores, allow_nan=False)
    alone = evaluation.identification(rows, labels, examples=(1, 3), fars=(0.5,), repeats=2)
    for entry, expected in zip(scores["identify"]["examples"], alone["examples"], strict=True):
        assert entry["gain"] == expected["gain"] and entry["far"][0]["asked"] == 0.5
    with pytest.raises(ValueError, match="--far is for --verification and --open-set, which are not asked for"):
        runner.evaluate(items, None, runner.Settings(("retrieval",), fars=(0.5,)))
