"""Who is this, or nobody we know: the model of labels, the questions, the events and their rates, against slow ones."""

import math
import tracemalloc

import numpy as np
import pytest

from calibrations import embeddings
from nearkin.evaluation.recognition import NOTHING, Hits, LabelSums, Part, Queries, events, fit, label_model, simulation
from nearkin.evaluation.recognition.label_model import LabelFit, Scatter
from nearkin.evaluation.recognition.recogniser import _fitted, relative


def gallery(labels=12, each=5, dim=16, seed=0, spread=0.5):
    rows, codes = embeddings(labels, each, dim=dim, seed=seed, spread=spread)
    return rows, codes, lambda: iter([Part(rows, codes, np.arange(1, len(codes) + 1))])


def nearest(queries, rows, codes, k=simulation.NEAREST):
    cosines = queries.astype(np.float64) @ rows.T.astype(np.float64)
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return Hits(np.take_along_axis(cosines, order, 1), codes[order])


def answered(recogniser, queries, rows, codes, prior=0.5):
    labels = LabelSums.of(recogniser.rows(rows), codes, int(codes.max()) + 1)
    scores = recogniser.scores(labels.counts, labels.sums)
    return recogniser.answer(recogniser.rows(queries), nearest(queries, rows, codes), scores, prior)


# ---- the model of labels


def test_scores_are_log_ratios_of_gaussians():
    """Against the densities themselves: of the query together with the label's rows, and of both alone."""
    draw = np.random.default_rng(0)
    between, size = np.array([3.0, 0.7, 0.05]), 3
    rows, codes = draw.normal(size=(9, size)), np.array([0, 0, 0, 0, 1, 1, 2, 2, 2])
    labels = LabelSums.of(rows, codes, 4)
    scores = simulation_scores(between, labels)
    queries = draw.normal(size=(5, size)) * 2

    def density(values, k):
        covariance = np.eye(len(values)) + between[k]
        return -(values @ np.linalg.solve(covariance, values) + np.linalg.slogdet(2 * math.pi * covariance)[1]) / 2

    found = scores(queries)
    assert (found[:, 3] == NOTHING).all(), "a label without rows"
    for q, query in enumerate(queries):
        for label in range(3):
            mine = rows[codes == label]
            expected = sum(
                density(np.r_[mine[:, k], query[k]], k) - density(mine[:, k], k) - density(query[k : k + 1], k)
                for k in range(size)
            )
            assert found[q, label] == pytest.approx(expected, abs=1e-4)
    out = LabelSums(np.array([1, 1]), rows[[0, 4]])
    left = scores.without(queries[:2], np.array([0, 1]), out)
    fewer = simulation_scores(between, LabelSums.of(rows[[1, 2, 3, 5, 6, 7, 8]], codes[[1, 2, 3, 5, 6, 7, 8]], 4))
    np.testing.assert_allclose(left, fewer(queries[:2])[[0, 1], [0, 1]], atol=1e-4)


def simulation_scores(between, labels):
    from nearkin.evaluation.recognition.label_model import LabelScores

    return LabelScores(between, labels.counts, labels.sums)


def test_a_model_less_some_rows_or_labels_is_the_model_of_the_others(monkeypatch):
    monkeypatch.setattr(label_model, "LABELS", 4)
    rows, codes = embeddings(9, 6, dim=7, seed=1)
    some = np.random.default_rng(1).random(len(codes)) < 0.7
    some[codes == 4] = False  # a whole label among them
    labels = np.isin(codes, [1, 5, 6])
    all_labels, wide = LabelSums.of(rows, codes, 9), rows.astype(np.float64)
    whole = LabelFit(all_labels, wide.T @ wide)
    out = wide[labels]
    for model, keep in (
        (whole.less(wide[~some], codes[~some]), some),
        (whole.without(np.array([1, 5, 6]), out.T @ out), ~labels),
    ):
        with monkeypatch.context() as whole_again:
            whole_again.setattr(label_model, "LABELS", 100)
            other = LabelFit(LabelSums.of(rows[keep], codes[keep], 9), wide[keep].T @ wide[keep]).model()
        np.testing.assert_allclose(model.mean, other.mean, atol=1e-9)
        np.testing.assert_allclose(model.between, other.between, rtol=1e-6)
        one, two = (m.scores(all_labels)(m.rows(wide[:5])) for m in (model, other))
        np.testing.assert_allclose(one, two, atol=1e-3)


def test_a_fit_copies_no_sums_of_many_labels():
    sums = LabelSums(np.full(40_000, 2), np.random.default_rng(0).normal(size=(40_000, 32)))
    tracemalloc.start()
    whole = LabelFit(sums, np.eye(32) * 1e5)
    whole.model(), whole.without(np.arange(0, 40_000, 20), np.eye(32))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < sums.sums.nbytes


def test_directions_are_those_of_a_decomposition_and_take_parts():
    rows, _ = embeddings(20, 3, dim=9, seed=2)
    whole, parts = Scatter(9), Scatter(9)
    whole.add(rows)
    for part in np.array_split(rows, 7):
        parts.add(part)
    directions = whole.directions()
    roots = np.sign(rows) * np.sqrt(np.abs(rows))
    roots /= np.linalg.norm(roots, axis=1, keepdims=True)
    centred = roots - roots.mean(0)
    np.testing.assert_allclose(directions.mean, roots.mean(0), atol=1e-6)
    spread = np.linalg.svd(centred)[1]
    np.testing.assert_allclose(np.linalg.norm(directions.rows(rows), axis=0), spread, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.abs((parts.directions().basis * directions.basis).sum(0)), 1, atol=1e-4)


# ---- the questions


@pytest.mark.parametrize("only_near", [False, True])
def test_questions_are_those_of_leaving_out_by_hand(only_near, monkeypatch):
    """Each item against the whole gallery less itself, or less its label, by models refitted without its fold."""
    monkeypatch.setattr(simulation, "NEAREST", 4)
    rows, codes, stream = gallery(8, 4, dim=12, seed=3)
    counts = np.bincount(codes)
    learned = simulation.learn(stream, counts, only_near=only_near)
    coordinates = learned.directions.rows(rows).astype(np.float64)
    folds = simulation.folds_of(8, len(codes), 0)
    items = simulation._item_folds(codes, simulation._fold_count(len(codes)), 0)
    expected = []
    for known in (False, True):
        for i in range(len(codes)):
            out = items == items[i] if known else folds[codes] == folds[codes[i]]
            seen = coordinates[~out]
            model = LabelFit(LabelSums.of(seen, codes[~out], 8), seen.T @ seen).model()
            there = np.arange(len(codes)) != i if known else codes != codes[i]
            labels = LabelSums.of(coordinates[there], codes[there], 8)
            values = model.scores(labels)(model.rows(coordinates[i : i + 1]))
            near = nearest(rows[i : i + 1], rows[there], codes[there], 4)
            if only_near:
                values[:, [label not in near.codes for label in range(8)]] = NOTHING
            best, first, second = simulation.best_labels(values)
            event = events.NONE if not known else events.RIGHT if best[0] == codes[i] else events.OTHER
            expected.append((event, *events.features(first, second, *near.labels(best))[0]))
    asked = learned.questions
    found = np.c_[asked.event, asked.features]
    assert len(found) == 64
    order = np.lexsort(found.T[::-1].round(3)), np.lexsort(np.array(expected).T[::-1].round(3))
    np.testing.assert_allclose(found[order[0]], np.array(expected)[order[1]], rtol=2e-3, atol=2e-3)


def test_parts_and_their_sizes_change_nothing():
    rows, codes, stream = gallery(15, 4, seed=4)
    ids = np.arange(1, len(codes) + 1)

    def small():
        for start in range(0, len(codes), 7):
            part = slice(start, start + 7)
            yield Part(rows[part], codes[part], ids[part])

    one, two = (fit(source, np.bincount(codes)) for source in (stream, small))
    np.testing.assert_allclose(one.weights, two.weights, atol=1e-4)
    np.testing.assert_allclose(one.far.score, two.far.score, atol=1e-2)


def test_cosines_mean_what_their_scale_says_and_rows_that_are_not_asked_are_not():
    rows, codes, _ = gallery(10, 4, seed=4)
    ids, old = np.arange(1, len(codes) + 1), codes % 2 == 1
    parts = [
        Part(rows[~old], codes[~old], ids[~old]),
        Part(rows[old], codes[old], ids[old], lambda cosines: cosines / 4, asked=False),
    ]
    asked = simulation.learn(lambda: iter(parts), np.bincount(codes)).questions
    assert (asked.classes % 2 == 0).all() and len(asked.event) == 2 * (~old).sum()
    plain = simulation.learn(lambda: iter([part._replace(scale=None) for part in parts]), np.bincount(codes)).questions
    np.testing.assert_allclose(asked.features[:, :2], plain.features[:, :2])
    assert (asked.features[asked.event == events.NONE, 2] <= plain.features[plain.event == events.NONE, 2]).all()
    assert (asked.features != plain.features).any()


def test_items_are_drawn_evenly_and_bounded(monkeypatch):
    monkeypatch.setattr(simulation, "ITEMS", 30)
    _, codes, stream = gallery(10, 8, seed=5)
    asked = simulation.learn(stream, np.bincount(codes)).questions
    strangers = asked.event == events.NONE
    assert strangers.sum() == 30 and (np.bincount(asked.classes[strangers]) == 3).all()
    again = simulation.learn(stream, np.bincount(codes)).questions
    assert (again.features == asked.features).all(), "drawn by a seed"


def test_queries_of_another_day_are_asked_in_place_of_rows():
    rows, codes, stream = gallery(10, 5, seed=6)
    other, _ = embeddings(3, 4, dim=16, seed=60)
    vectors = np.concatenate([rows[::5] + 0.05, other]).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = Queries(vectors, np.r_[np.arange(10), np.full(12, -1)], np.zeros(22, np.int64))
    asked = simulation.learn(stream, np.bincount(codes), queries=queries).questions
    assert (asked.event == events.NONE).sum() == 10 + 12 and (asked.event != events.NONE).sum() == 10
    with_rows = queries._replace(ids=np.r_[np.arange(1, 51, 5), np.zeros(12, np.int64)])
    left = simulation.learn(stream, np.bincount(codes), queries=with_rows).questions
    known = [q.features[q.event != events.NONE][:, 2].mean() for q in (asked, left)]
    assert known[1] < known[0], "its own row is left out"


@pytest.mark.parametrize(("strangers", "left_out"), [(29, 10), (30, 0)])
def test_enough_strangers_that_are_shown_stand_for_all(strangers, left_out):
    rows, codes, stream = gallery(10, 5, seed=6)
    other, of = embeddings(strangers, 2, dim=16, seed=60)
    queries = Queries(np.concatenate([rows[::5], other]), np.r_[np.arange(10), -1 - of], np.zeros(10 + len(of), int))
    learned = simulation.learn(stream, np.bincount(codes), queries=queries)
    none = learned.questions.classes[learned.questions.event == events.NONE]
    assert (none < 10).sum() == left_out and (none >= 10).sum() == 2 * strangers
    assert fit(stream, np.bincount(codes), queries=queries).far.classes == strangers + left_out


# ---- the events


def test_the_regression_is_at_its_minimum_and_far_from_it_without_data():
    draw = np.random.default_rng(0)
    x = np.c_[np.ones(300), draw.normal(size=(300, 3))]
    truth = draw.normal(size=(4, 3))
    event = np.array([draw.choice(3, p=p) for p in events.softmax(x @ truth)])
    weight = draw.random(300) + 0.5
    start = draw.normal(size=(4, 3))
    found = events.fit_events(x, event, weight, start)
    gradient = x.T @ (weight[:, None] * (events.softmax(x @ found) - np.eye(3)[event])) + events.RIDGE * (found - start)
    np.testing.assert_allclose(gradient, 0, atol=1e-4)
    nothing = events.fit_events(x[:1], event[:1], np.zeros(1), start)
    np.testing.assert_allclose(nothing, start, atol=1e-9)


def test_the_far_curve_is_conformal_over_classes():
    """The expected share of a new class above the threshold is within the rate, over many draws of classes."""
    shares = {0.1: [], 0.3: []}
    for seed in range(300):
        draw = np.random.default_rng(seed)
        level = draw.normal(size=31)
        score, classes = np.repeat(level, 6) + 0.5 * draw.normal(size=186), np.repeat(np.arange(31), 6)
        old = classes < 30
        far = events.far_curve(score[old], classes[old])
        assert far.classes == 30 and far.expected[0] == 1 and far.expected[-1] == pytest.approx(1 / 31)
        assert (np.diff(far.expected) <= 1e-12).all() and (far.at_most >= far.expected - 1e-9).all()
        for rate, share in shares.items():
            share.append((score[~old] > far.score[far.at(rate)]).mean())
    for rate, share in shares.items():
        assert rate - 0.06 < np.mean(share) < rate + 0.02, (rate, np.mean(share))
    assert far.at(0.03) is None, "30 classes can show 3.2 % at the least"


def test_each_label_weighs_the_same_and_strangers_as_much_as_known_items():
    draw = np.random.default_rng(0)
    classes = np.repeat([0, 1, 2, 0, 1], [12, 2, 1, 3, 1])  # known from 15 on
    event = np.r_[np.full(15, events.NONE), draw.integers(0, 2, 4)]
    asked = simulation.Questions(draw.normal(size=(19, 4)), event, classes)
    weight = np.repeat(19 / 2 * np.array([1 / 36, 1 / 6, 1 / 3, 1 / 6, 1 / 2]), [12, 2, 1, 3, 1])
    x = np.c_[np.ones(19), asked.features]
    found = _fitted(x, asked, np.ones(19, bool))
    np.testing.assert_allclose(found, events.fit_events(x, event, weight, events.DEFAULT), atol=1e-9)


def test_strangers_are_judged_by_weights_that_have_not_seen_their_label():
    _, codes, stream = gallery(9, 4, dim=12, seed=3)
    recogniser, asked = fit(stream, np.bincount(codes)), simulation.learn(stream, np.bincount(codes)).questions
    folds, score = simulation.folds_of(9, len(codes), 0), []
    x = relative(asked.features, recogniser.strangers)
    stranger = asked.event == events.NONE
    for i in np.flatnonzero(stranger):
        kept = folds[asked.classes] != folds[asked.classes[i]]
        logits = x[i] @ _fitted(x, asked, kept)
        score.append(logits[events.RIGHT] - logits[events.NONE])
    far = events.far_curve(np.array(score), asked.classes[stranger])
    np.testing.assert_allclose(recogniser.far.score, far.score, atol=1e-6)
    np.testing.assert_allclose(recogniser.far.expected, far.expected)


# ---- the answers


def test_far_holds_on_labels_that_played_no_part():
    """Ten galleries of 60 labels, asked for 200 others: the share named follows the rate, and rises."""
    rows, codes = embeddings(260, 8, seed=7, spread=0.45)
    named = {0.1: [], 0.2: [], 0.5: []}
    for seed in range(10):
        chosen = np.random.default_rng(seed).permutation(260)
        known = np.isin(codes, chosen[:60])
        mine = known & (np.arange(len(codes)) % 8 < 6)
        number = np.searchsorted(np.sort(chosen[:60]), codes)
        stream = [Part(rows[mine], number[mine], np.arange(1, mine.sum() + 1))]
        recogniser = fit(lambda stream=stream: iter(stream), np.bincount(number[mine]))
        score = answered(recogniser, rows[~known][::4], rows[mine], number[mine]).score
        for rate, found in named.items():
            found.append((score > recogniser.far.score[recogniser.far.at(rate)]).mean())
    means = [np.mean(found) for found in named.values()]
    assert means == sorted(means)
    for rate, mean in zip(named, means, strict=True):
        assert mean == pytest.approx(rate, abs=0.05)


def test_probabilities_come_true_at_any_prior():
    rows, codes = embeddings(160, 9, seed=8, spread=0.6)
    known = codes < 80
    mine = known & (np.arange(len(codes)) % 9 < 5)
    stream = [Part(rows[mine], codes[mine], np.arange(1, mine.sum() + 1))]
    recogniser = fit(lambda: iter(stream), np.bincount(codes[mine]))
    asked = ~mine
    for prior in (0.2, 0.5, 0.8):
        found = answered(recogniser, rows[asked], rows[mine], codes[mine], prior)
        stranger = codes[asked] >= 80
        weight = np.where(stranger, prior / stranger.sum(), (1 - prior) / (~stranger).sum())
        truth = np.stack([~stranger & (found.best == codes[asked]), ~stranger & (found.best != codes[asked]), stranger])
        for event, came in enumerate(truth):
            share = found.shares[:, event]
            bins = np.minimum((share * 10).astype(int), 9)
            error = sum(abs((weight * (came - share))[bins == b].sum()) for b in range(10))
            assert error < 0.08, (prior, event, error)


@pytest.mark.parametrize(("labels", "each"), [(3, 1), (3, 2), (5, 1), (2, 5), (40, 1)])
def test_tiny_galleries_answer_with_finite_numbers_or_a_sentence(labels, each):
    rows, codes, stream = gallery(labels, each, seed=9)
    if labels < 3:
        with pytest.raises(ValueError, match="at least 3 labels are needed"):
            fit(stream, np.bincount(codes))
        return
    found = answered(fit(stream, np.bincount(codes)), rows, rows, codes)
    assert np.isfinite(found.shares).all() and np.allclose(found.shares.sum(1), 1)
    assert (found.best == codes).mean() > 0.9


def test_a_gallery_of_single_rows_takes_the_weights_of_such_galleries(monkeypatch):
    _, codes, stream = gallery(30, 1, seed=9)
    assert (fit(stream, np.bincount(codes)).weights == events.SINGLE).all()
    monkeypatch.setattr(events, "RIDGE", 1e9)
    _, codes, stream = gallery(30, 2, seed=9)
    np.testing.assert_allclose(fit(stream, np.bincount(codes)).weights, events.DEFAULT, atol=1e-4)


def test_equal_rows_and_a_constant_gallery_do_not_fail():
    rows = np.tile(np.array([[0.6, 0.8, 0.0]], np.float32), (12, 1))
    codes = np.arange(12) // 3
    recogniser = fit(lambda: iter([Part(rows, codes, np.arange(1, 13))]), np.bincount(codes))
    assert np.isfinite(answered(recogniser, rows, rows, codes).shares).all()


@pytest.mark.slow
def test_a_rate_holds_among_20_000_labels():
    """Questions against 200 labels alone would name three times as many strangers as asked."""
    draw = np.random.default_rng(0)
    labels, each, dim = 20_000, 3, 24
    centres = draw.normal(size=(labels + 1000, dim))
    rows = np.repeat(centres[:labels], each, 0) + 0.55 * draw.normal(size=(labels * each, dim))
    strangers = centres[labels:] + 0.55 * draw.normal(size=(1000, dim))
    rows, strangers = ((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in (rows, strangers))
    codes, ids = np.repeat(np.arange(labels), each), np.arange(1, labels * each + 1)

    def stream():
        for start in range(0, len(codes), 4096):
            part = slice(start, start + 4096)
            yield Part(rows[part], codes[part], ids[part])

    recogniser = fit(stream, np.bincount(codes))
    score = np.concatenate([answered(recogniser, part, rows, codes).score for part in np.array_split(strangers, 20)])
    for rate in (0.05, 0.1, 0.2):
        assert (score > recogniser.far.score[recogniser.far.at(rate)]).mean() == pytest.approx(rate, abs=0.05)
