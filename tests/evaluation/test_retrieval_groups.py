"""Groups beside classes: items of the query's class and group are not ranked, in every path, against loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_knn import grids
from test_retrieval import ALL, line, naive, same

from nearkin.core import relations
from nearkin.evaluation import all_pairs, compare, one_shot, retrieval, verification
from nearkin.evaluation.retrieval import by_counting, by_sorting, knn, relevance, retrieval_metrics
from nearkin.evaluation.retrieval.exact import Space
from nearkin.evaluation.verification import class_rates, pair_scan
from nearkin.evaluation.verification.verification_metrics import pair_scores

KS = (1, 2, 5, 30)


def ranked_pairs(labels, groups, gallery_labels, gallery_groups):
    """(Q, G) positive and negative, pair by pair by the definition; -1 shares its group with none."""
    positive = torch.zeros(len(labels), len(gallery_labels), dtype=torch.bool)
    negative = positive.clone()
    for i, (kind, group) in enumerate(zip(labels.tolist(), groups.tolist(), strict=True)):
        for j, (other, its) in enumerate(zip(gallery_labels.tolist(), gallery_groups.tolist(), strict=True)):
            if kind == -1 or other == -1:
                continue
            if kind != other:
                negative[i, j] = True
            elif group == -1 or group != its:
                positive[i, j] = True
    return positive, negative


def drawn(x, self_search, seed, classes, groups):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, classes, (len(x),), generator=generator)
    of = torch.randint(-1, groups, (len(x),), generator=generator)
    if self_search:
        positive, negative = ranked_pairs(labels, of, labels, of)
        itself = torch.eye(len(x), dtype=torch.bool)
        return (x, labels, None, None), {"groups": of}, positive & ~itself, negative
    gallery_labels = torch.randint(-1, classes, (len(x),), generator=generator)
    gallery_groups = torch.randint(-1, groups, (len(x),), generator=generator)
    positive, negative = ranked_pairs(labels, of, gallery_labels, gallery_groups)
    return (x, labels, x.flip(0), gallery_labels), {"groups": of, "gallery_groups": gallery_groups}, positive, negative


@settings(max_examples=150, deadline=None)
@given(
    grids(),
    st.booleans(),
    st.sampled_from(knn.SIMILARITIES),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_groups_equal_the_loops(x, self_search, kind, classes, groups, seed):
    sides, given_groups, positive, negative = drawn(x, self_search, seed, classes, groups)
    expected, without = naive(x, positive, negative, sides[2], kind, KS, "skip")
    result = retrieval(*sides, ks=KS, metrics=ALL, similarity=kind, **given_groups)
    same(result, expected)
    assert result.without_positives == [i for i in without if sides[1][i] >= 0]
    few = retrieval(*sides, ks=(1, 2), similarity=kind, budget=len(x) * 400 + 200, **given_groups)
    same(few, {name: expected[name] for name in few if name in expected})


@settings(max_examples=60, deadline=None)
@given(
    grids(), st.booleans(), st.sampled_from(knn.SIMILARITIES), st.integers(0, 2**31), st.sampled_from(["count", "sort"])
)
def test_both_ways_to_count_equal_the_loops(x, self_search, kind, seed, path):
    """Few positives among many duplicates, tiles of 16 × 16, duplicates dropped, whichever way is taken."""
    generator = torch.Generator().manual_seed(seed)
    x = x[torch.randint(0, len(x), (40,), generator=generator)]
    sides, given_groups, positive, negative = drawn(x, self_search, seed, 12, 3)
    expected, _ = naive(x, positive, negative, sides[2], kind, (1, 2), "skip")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_counting, "_SIDE", {"cpu": 16})
        if path == "count":
            patch.setattr(
                by_sorting,
                "positions",
                lambda s, r, limit, *rest: by_counting.positions(s, r, by_counting.Limits(limit, limit), *rest),
            )
        else:
            patch.setattr(
                by_counting, "positions", lambda s, r, limits, *rest: by_sorting.positions(s, r, max(limits), *rest)
            )
        for metrics in (("recall", "r_precision", "map@r"), ALL):
            result = retrieval(*sides, ks=(1, 2), metrics=metrics, similarity=kind, **given_groups)
            same(result, {name: expected[name] for name in result if name in expected})


def clustered(items=400, dim=24, groups=5):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(items) % 37
    x = torch.randn(37, dim, generator=generator)[labels] + 1.5 * torch.randn(items, dim, generator=generator)
    x[items // 2 :: 7] = x[: items // 2 : 7][: len(x[items // 2 :: 7])]
    return x, labels, torch.randint(0, groups, (items,), generator=generator)


@pytest.mark.parametrize("kind", knn.SIMILARITIES)
def test_every_item_in_a_group_of_its_own_is_the_plain_evaluation(kind):
    x, labels, _ = clustered()
    expected = retrieval(x, labels, metrics=ALL, similarity=kind, interval=True)
    for groups in (None, torch.arange(len(x)), torch.full((len(x),), -1)):
        result = retrieval(x, labels, metrics=ALL, similarity=kind, groups=groups, interval=True)
        assert result == expected and result.intervals == expected.intervals
    sides = x[:150], labels[:150], x[150:], labels[150:]
    apart = {"groups": torch.zeros(150, dtype=torch.long), "gallery_groups": torch.ones(250, dtype=torch.long)}
    assert retrieval(*sides, metrics=ALL, similarity=kind, **apart) == retrieval(*sides, metrics=ALL, similarity=kind)


@pytest.mark.parametrize("kind", knn.SIMILARITIES)
def test_nothing_but_embeddings_labels_and_groups_changes_a_metric(kind):
    x, labels, groups = clustered()
    expected = retrieval(x, labels, metrics=ALL, similarity=kind, groups=groups)
    assert expected != retrieval(x, labels, metrics=ALL, similarity=kind)
    for rows in (2, 7, 50):
        assert retrieval(x, labels, metrics=ALL, similarity=kind, groups=groups, budget=rows * 400 * 120) == expected
    few = retrieval(x, labels, similarity=kind, groups=groups)
    assert few == {name: expected[name] for name in few}
    same_class = labels[:, None] == labels
    junk = same_class & (groups[:, None] == groups)
    relation = relations.Relation(same_class & ~junk, ~same_class)
    as_relation = retrieval(x, relation, metrics=ALL, similarity=kind)
    assert {name: as_relation[name] for name in expected} == dict(expected)


@pytest.mark.parametrize("kind", knn.SIMILARITIES)
def test_faiss_changes_no_metric(kind):
    pytest.importorskip("faiss", reason="faiss is an extra and is not installed")
    x, labels, groups = clustered()
    for metrics in (retrieval_metrics.DEFAULT, ALL):
        expected = retrieval(x, labels, metrics=metrics, similarity=kind, groups=groups)
        assert retrieval(x, labels, metrics=metrics, similarity=kind, groups=groups, backend="faiss") == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("kind", knn.SIMILARITIES)
def test_the_device_changes_no_metric(kind):
    for items, classes in ((3000, 600), (3000, 5)):
        x, _, groups = clustered(items)
        labels = torch.arange(items) % classes
        there = [part.cuda() for part in (x, labels)]
        on_cpu = retrieval(x, labels, metrics=ALL, similarity=kind, groups=groups)
        assert retrieval(*there, metrics=ALL, similarity=kind, groups=groups.cuda()) == on_cpu
        assert retrieval(*there, metrics=ALL, similarity=kind, groups=groups.numpy()) == on_cpu
    if kind != "euclidean":
        pairs, alone = (
            all_pairs(a, b, groups=c, similarity=kind) for a, b, c in ((*there, groups.cuda()), (x, labels, groups))
        )
        assert pairs["left_out"] == alone["left_out"] and pairs["eer"] == pytest.approx(alone["eer"], abs=1e-6)
        few = one_shot(*there, ways=5, episodes=50, groups=groups.cuda())
        assert few["accuracy"] == pytest.approx(one_shot(x, labels, ways=5, episodes=50, groups=groups)["accuracy"])


@pytest.mark.parametrize("items", [60, 2000])
def test_collapsed_embeddings_stay_exact(items):
    """Equal rows: most are dropped before the search, and a query's own group must not use up those that remain."""
    labels, groups = torch.arange(items) % 20, torch.arange(items) // 20 % 3
    x = torch.ones(items, 4)
    every = retrieval(x, labels, metrics=ALL, ks=(1, 4), groups=groups)
    few = retrieval(x, labels, ks=(1, 4), groups=groups)
    assert few == {name: every[name] for name in few}


@pytest.mark.parametrize("others", [1, 500])
def test_equal_rows_of_the_query_group_do_not_hide_its_positive(others):
    """A gallery of equal rows: 30 of the query's class and group, then its positive, then another class."""
    gallery_labels = torch.tensor([0] * 31 + [1] * others)
    gallery_groups = torch.tensor([7] * 30 + [1] + [2] * others)
    sides = torch.ones(1, 3), torch.tensor([0]), torch.ones(31 + others, 3), gallery_labels
    result = retrieval(*sides, ks=(1,), groups=torch.tensor([7]), gallery_groups=gallery_groups)
    assert result["recall@1"] == result["map@r"] == 1


def test_by_hand():
    """The published example of mINP: 3 matches of which the last is at position 10 has 0.3, at position 5 has 0.6."""
    for last, expected in ((10, 0.3), (5, 0.6)):
        hits = [i in (1, 2, last) for i in range(1, 12)]
        x, labels, gallery, gallery_labels = line(hits)
        result = retrieval(
            x, labels, gallery, gallery_labels, similarity="euclidean", metrics=("minp", "cmc"), ks=(1, 5)
        )
        assert result["minp"] == pytest.approx(expected, abs=1e-15) and result["cmc@1"] == 1
    # A line of items at 1, 2, …: the query's class at 1 and 2 (its own camera), 4 (another) and 6 (another).
    x, labels, gallery, gallery_labels = line([True, True, False, True, False, True])
    groups = {"groups": torch.tensor([7]), "gallery_groups": torch.tensor([7, 7, 7, 1, 7, 2])}
    result = retrieval(x, labels, gallery, gallery_labels, similarity="euclidean", metrics=ALL, ks=(1, 2), **groups)
    # Ranked: 3 (no), 4 (yes), 5 (no), 6 (yes): positions 2 and 4 of the two positives.
    assert result["cmc@1"] == result["recall@1"] == 0 and result["cmc@2"] == 1
    assert result["minp"] == 2 / 4 and result["map"] == (1 / 2 + 2 / 4) / 2 and result["map@r"] == (1 / 2) / 2


def test_names_and_numbers():
    x, labels, groups = clustered()
    expected = retrieval(x, labels, groups=groups)
    names = [f"camera {group}" for group in groups.tolist()]
    assert retrieval(x, labels, groups=names) == expected
    assert retrieval(x.numpy(), [f"c{kind}" for kind in labels.tolist()], groups=groups.numpy()) == expected
    split = x[:100], labels[:100], x[100:], labels[100:]
    expected = retrieval(*split, groups=groups[:100], gallery_groups=groups[100:])
    assert retrieval(*split, groups=names[:100], gallery_groups=np.array(names[100:])) == expected
    result = compare(x, x + 0.5 * torch.randn(x.shape), labels, metric="minp", groups=groups, samples=200)
    assert result["a"] == pytest.approx(retrieval(x, labels, metrics=("minp",), groups=groups)["minp"])


def test_wrong_groups_are_refused():
    x, labels, groups = clustered(40)
    rows, y = torch.ones(40, 3, dtype=torch.bool), x.clone()
    assert retrieval(x, labels, x, labels, groups=groups, gallery_groups=groups) == retrieval(x, labels, groups=groups)
    for sides, options, message in (
        ((x, labels), {"groups": groups[:5]}, "groups must have one"),
        ((x, labels), {"groups": groups.float()}, "groups must be integer"),
        ((x, labels), {"gallery_groups": groups}, "gallery_groups need a gallery"),
        ((x, labels, y, labels), {"groups": groups}, "got no gallery_groups"),
        ((x, labels, y, labels), {"gallery_groups": groups}, "got no groups"),
        ((x, labels, y, labels), {"groups": groups, "gallery_groups": groups[:3]}, "gallery_groups must have one"),
        ((x, rows, y, rows), {"groups": groups, "gallery_groups": groups}, "groups need class ids"),
        ((x, relations.of(labels)), {"groups": groups}, "groups need class ids"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            retrieval(*sides, **options)


def test_a_class_of_one_group_has_nothing_to_find():
    x, labels = torch.randn(6, 3), torch.tensor([0, 0, 0, 1, 1, 1])
    groups = torch.tensor([5, 5, 5, 1, 2, 2])
    result = retrieval(x, labels, groups=groups, metrics=ALL)
    assert result.without_positives == [0, 1, 2] and result["queries"] == 6
    assert retrieval_metrics.per_query(x, labels, groups=groups)["positives"].tolist() == [0, 0, 0, 2, 1, 1]
    assert math.isnan(retrieval(x, labels, groups=labels)["map@r"])


def test_positives_skip_the_query_group():
    labels, groups = torch.tensor([3, 1, 3, 3, 1, 3]), torch.tensor([0, 0, 1, 0, 2, -1])
    x = torch.randn(6, 2)
    space = Space(x, None, "cosine", knn.BUDGET)
    relation = relevance.Relevance(relevance.with_known_labels(x, labels, None, None, groups)[0], space)
    lists = [sorted(i for i in row if i >= 0) for row in relation.positives(torch.arange(6)).tolist()]
    assert lists == [[2, 5], [4], [0, 3, 5], [2, 5], [1], [0, 2, 3]]


# --- pairs and episodes


def pairs_counted(labels, groups):
    """Every pair i < j but those of the same class and group, by a loop; -1 is no class, and no common group."""
    pairs = []
    for i in range(len(labels)):
        for j in range(i + 1, len(labels)):
            same_group = groups[i] == groups[j] and groups[i] != -1
            if -1 in (labels[i], labels[j]) or (labels[i] == labels[j] and same_group):
                continue
            pairs.append((i, j))
    return torch.tensor(pairs)


@pytest.mark.parametrize("tile", [16, 1024])
def test_all_pairs_leave_out_those_of_one_class_and_group(tile, monkeypatch):
    monkeypatch.setattr(pair_scan, "TILE", tile)
    x, labels, groups = clustered(120, groups=3)
    x, labels = (4 * x).round(), labels % 7  # whole numbers: exact in any order of addition
    labels[::11], groups[::9] = -1, -1
    pairs = pairs_counted(labels.tolist(), groups.tolist())
    same = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    expected = verification(pair_scores(x, pairs, "dot"), same)
    result = all_pairs(x, labels, groups=groups, interval=True, similarity="dot")
    for name in ("genuine", "impostors", "eer", "auc", "tar@far=0.1", "tar@far=0.01"):
        assert result[name] == pytest.approx(expected[name], abs=1e-12), name
    every = int((labels >= 0).sum())
    assert result["left_out"] == every * (every - 1) // 2 - len(pairs) > 0
    assert all(low <= result[name] <= high for name, (low, high) in result.intervals.items() if not math.isnan(low))
    alone = all_pairs(x, labels, groups=torch.arange(120))
    assert {k: v for k, v in alone.items() if k != "left_out"} == dict(all_pairs(x, labels)) and alone["left_out"] == 0


def test_a_list_of_pairs_leaves_out_those_of_one_class_and_group():
    x, labels, groups = clustered(120, groups=3)
    generator = torch.Generator().manual_seed(1)
    pairs = torch.stack([torch.randperm(120, generator=generator) for _ in range(2)], 1).repeat(4, 1)
    pairs[::2, 1] = (pairs[::2, 0] + 37) % 111  # the same class
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    folds = torch.arange(len(pairs)) % 5
    left, right = pairs.T
    counted = (labels[left] != labels[right]) | (groups[left] != groups[right])
    options = {"embeddings": x, "labels": labels, "interval": True, "samples": 100}
    result = verification(pairs=pairs, folds=folds, groups=groups, **options)
    expected = verification(pairs=pairs[counted], folds=folds[counted], **options)
    assert result.pop("left_out") == int((~counted).sum()) > 0
    assert result == expected and result.intervals == expected.intervals
    with pytest.raises(ValueError, match="groups need embeddings, pairs and labels"):
        verification(pair_scores(x, pairs), labels[left] == labels[right], groups=groups)


def test_no_query_of_an_episode_shares_a_group_with_a_support():
    """Near-copies within groups and nothing else in common: with groups an episode is pure chance."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(60, 16, generator=generator)
    group = torch.arange(60).repeat_interleave(5)
    x, labels = centres[group] + 0.01 * torch.randn(300, 16, generator=generator), group // 6
    plain = one_shot(x, labels, ways=5, shots=1, episodes=300)["accuracy"]
    grouped = one_shot(x, labels, ways=5, shots=1, episodes=300, groups=group)["accuracy"]
    assert plain > 0.3 and abs(grouped - 0.2) < 0.06
    for options in ({"shots": 2, "queries": 3}, {"score": "nearest"}):
        expected = one_shot(x, labels, ways=5, episodes=50, **options)
        assert one_shot(x, labels, ways=5, episodes=50, groups=torch.arange(300), **options) == expected
    few, more = (one_shot(x, labels, ways=5, episodes=n, groups=group, budget=b) for n, b in ((50, 1), (50, 2**30)))
    assert few == more
    with pytest.raises(ValueError, match="shots \\+ queries = 7 or more groups: 0, got 5"):
        one_shot(x, labels, ways=5, shots=6, groups=group)


def test_episodes_draw_different_groups(monkeypatch):
    from nearkin.evaluation import few_shot

    labels, group = torch.arange(80) % 4, torch.arange(80) // 4 % 5
    group[3] = -1
    seen = []
    original = few_shot._one_of_each
    monkeypatch.setattr(few_shot, "_one_of_each", lambda *args: seen.append(original(*args)) or seen[-1])
    members, *_ = few_shot._classes(labels, np.arange(80), 2, 3, group)
    one_shot(torch.randn(80, 4), labels, ways=3, shots=2, queries=2, episodes=40, groups=group)
    drawn = members[np.concatenate(seen)]  # (40, 3, 4)
    assert drawn.shape == (40, 3, 4)
    for row in drawn.reshape(-1, 4):
        assert len(set(labels[row].tolist())) == 1
        assert len({(g, -1) if g >= 0 else (g, i) for g, i in zip(group[row].tolist(), row.tolist(), strict=True)}) == 4
    assert len(np.unique(drawn)) > 60


def test_genuine_scores_of_a_calibration_leave_bursts_out():
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(40, 6)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    classes = [np.arange(0, 12), np.arange(12, 40)]
    bursts = generator.integers(0, 4, 40)
    for group, scores in zip(classes, class_rates.genuine_groups(rows, classes, bursts), strict=True):
        expected = [float(rows[i] @ rows[j]) for i in group for j in group if i != j and bursts[i] != bursts[j]]
        np.testing.assert_allclose(np.sort(scores), np.sort(expected), atol=1e-6)
        assert class_rates.most_others(group, bursts) == max((bursts[group] != bursts[i]).sum() for i in group)
    plain = class_rates.genuine_groups(rows, classes)
    alone = class_rates.genuine_groups(rows, classes, np.arange(40))
    assert all((a == b).all() for a, b in zip(plain, alone, strict=True))
