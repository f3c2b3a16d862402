"""Graded relevance against loops in float64, scipy and hand-worked tables."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from nearkin.evaluation.graded import graded


def ranks(values):
    return [sum(v < w for v in values) + (sum(v == w for v in values) + 1) / 2 for w in values]


def correlation(a, b):
    middle = (len(a) + 1) / 2
    both = math.fsum((p - middle) * (q - middle) for p, q in zip(a, b, strict=True))
    alone = [math.fsum((p - middle) ** 2 for p in row) for row in (a, b)]
    return both / math.sqrt(alone[0] * alone[1])


def oracle(x, targets, ks, gallery=None, gallery_targets=None):
    """The definitions, one query and one item at a time."""
    alone = gallery is None
    g, gt = (x, targets) if alone else (gallery, gallery_targets)
    sums, rhos, skipped = {}, [], 0
    for i in range(len(x)):
        others = [j for j in range(len(g)) if not (alone and i == j)]
        away = [math.sqrt(sum((p - q) ** 2 for p, q in zip(x[i], g[j], strict=True))) for j in others]
        apart = [math.sqrt(sum((p - q) ** 2 for p, q in zip(targets[i], gt[j], strict=True))) for j in others]
        ranked = [apart[j] for j in sorted(range(len(others)), key=lambda j: (away[j], j))]
        for k in ks:
            gain, ideal = (
                math.fsum(1 / (1 + d) / math.log2(r + 2) for r, d in enumerate(row[:k]))
                for row in (ranked, sorted(apart))
            )
            sums.setdefault(f"ndcg@{k}", []).append(gain / ideal)
            sums.setdefault(f"label_distance@{k}", []).append(math.fsum(ranked[:k]) / len(ranked[:k]))
            sums.setdefault(f"best_label_distance@{k}", []).append(math.fsum(sorted(apart)[:k]) / len(ranked[:k]))
        if len(set(apart)) == 1:
            skipped += 1
        else:
            rhos.append(0.0 if len(set(away)) == 1 else correlation(ranks(away), ranks(apart)))
    result = {name: math.fsum(values) / len(values) for name, values in sums.items()}
    return {**result, "spearman": math.fsum(rhos) / len(rhos) if rhos else math.nan, "spearman_skipped": skipped}


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, abs=1e-12, rel=0, nan_ok=True), name


@st.composite
def sets(draw):
    """Whole coordinates on a small grid: ties and duplicates are common and exact."""
    dim, width = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    reach = draw(st.sampled_from([0, 1, 3, 50]))

    def part(low):
        n = draw(st.integers(low, 9))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        return rng.integers(-reach, reach + 1, (n, dim)) * 1.0, rng.integers(-2, 3, (n, width)) * 0.5

    return part, draw(st.booleans()), draw(st.sampled_from([1, 500, 2**20]))


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(sets())
def test_equals_the_loop(case):
    part, alone, budget = case
    x, t = part(2 if alone else 1)
    g, gt = (None, None) if alone else part(1)
    ks = (1, 3, 12)
    tensors = {} if alone else {"gallery": torch.tensor(g), "gallery_targets": torch.tensor(gt)}
    same(graded(torch.tensor(x), torch.tensor(t), ks, budget=budget, **tensors), oracle(x, t, ks, g, gt))


@pytest.mark.parametrize("grid", [3.0, 1e9])
def test_spearman_equals_scipy(grid):
    generator = torch.Generator().manual_seed(5)
    x, t = ((torch.randn(30, n, generator=generator, dtype=torch.float64) * grid).round() for n in (2, 1))
    away, apart = ((v[:, None] - v[None]).square().sum(-1).sqrt().numpy() for v in (x, t))
    others = [np.arange(30) != i for i in range(30)]
    expected = np.mean([spearmanr(away[i, o], apart[i, o]).statistic for i, o in enumerate(others)])
    assert graded(x, t[:, 0])["spearman"] == pytest.approx(expected, abs=1e-12)


def test_a_hand_worked_table():
    """Points 0, 1, 3 on a line with labels 0, 2, 1."""
    result = graded(torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([0.0, 2.0, 1.0]), ks=(1, 2))
    assert result["label_distance@1"] == pytest.approx((2 + 2 + 1) / 3)
    assert result["best_label_distance@1"] == pytest.approx(1)
    assert result["label_distance@2"] == pytest.approx((3 + 3 + 2) / 6)
    assert result["ndcg@1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    second = 1 / math.log2(3)
    low = (1 / 3 + second / 2) / (1 / 2 + second / 3)
    assert result["ndcg@2"] == pytest.approx((2 * low + 1) / 3)
    assert result["spearman"] == pytest.approx(-1) and result["spearman_skipped"] == 1  # item 2 is at 1 from both


def test_perfect_order_scores_one():
    t = torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = graded(t[:, None] * 7, t)
    assert result["ndcg@10"] == pytest.approx(1) and result["spearman"] == pytest.approx(1)
    assert result["label_distance@5"] == pytest.approx(result["best_label_distance@5"], abs=1e-14)


def test_collapsed_embeddings_say_nothing():
    result = graded(torch.ones(8, 3), torch.arange(8.0))
    assert result["spearman"] == 0 and result["ndcg@1"] < 1
    assert math.isnan(graded(torch.rand(4, 2), torch.ones(4))["spearman"])


def test_the_query_is_left_out_by_index_not_by_distance():
    """Items 0 and 1 are duplicates with different labels: each is the other's nearest."""
    result = graded(torch.tensor([[0.0], [0.0], [9.0]]), torch.tensor([0.0, 5.0, 5.0]), ks=(1,))
    assert result["label_distance@1"] == pytest.approx((5 + 5 + 5) / 3)  # item 2's tie goes to index 0


def test_cosine_ranks_by_angle():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    t = torch.randn(40, 2, generator=generator)
    stretched = x * torch.rand(40, 1, generator=generator) * 9 + 0
    by_angle = graded(torch.nn.functional.normalize(x), t)
    for rows in (x, stretched):
        same(graded(rows, t, distance="cosine"), by_angle)
    assert graded(stretched, t) != by_angle
    zero = torch.cat([x, torch.zeros(1, 5)])
    assert math.isfinite(graded(zero, torch.randn(41), distance="cosine")["ndcg@1"])


def test_cosine_ties_go_to_the_lowest_index():
    """Rows of one direction and many lengths are at the same cosine of everything."""
    direction = torch.tensor([0.3, 0.7, -0.2], dtype=torch.float64)
    rows = torch.cat([direction * s for s in torch.rand(50, 1, dtype=torch.float64)]).view(50, 3)
    result = graded(torch.tensor([[0.1, 0.9, 0.5]], dtype=torch.float64), torch.zeros(1), ks=(1,), distance="cosine",
                    gallery=rows, gallery_targets=torch.arange(50.0))  # fmt: skip
    assert result["label_distance@1"] == 0 and result["spearman"] == 0


def test_half_precision_and_tiles_agree():
    x = torch.randn(50, 4).half()
    t = torch.randn(50)
    same(graded(x, t), graded(x.double(), t, budget=1))


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"embeddings": torch.full((4, 2), torch.nan)}, "embeddings must be finite, got NaN or Inf in 4 rows"),
        ({"targets": torch.tensor([0, torch.inf, 1, 2])}, "targets must be finite, got NaN or Inf in 1 rows"),
        ({"targets": torch.ones(3)}, r"one entry per row of embeddings: 4 rows, got \(3,\)"),
        ({"targets": [1, 2, 3, 4]}, "targets must be real-valued"),
        ({"ks": ()}, "ks must hold at least one k"),
        ({"ks": (0,)}, "ks must be >= 1, got 0"),
        ({"distance": "cosin"}, 'unknown distance "cosin"; did you mean "cosine"'),
        ({"embeddings": torch.ones(1, 2), "targets": torch.ones(1)}, "at least two rows where there is no gallery"),
        ({"gallery": torch.ones(2, 3), "gallery_targets": torch.ones(2)}, "gallery must have 2 dimensions"),
        ({"gallery": torch.ones(2, 2)}, "gallery_targets must be real-valued"),
        ({"gallery_targets": torch.ones(2)}, "gallery_targets need a gallery"),
        ({"gallery": torch.ones(2, 2), "gallery_targets": torch.ones(2, 2)}, "as many columns as targets: 1, got 2"),
        ({"gallery": torch.ones(0, 2), "gallery_targets": torch.ones(0)}, "gallery must be at least one row"),
    ],
)
def test_bad_input_is_named(change, sentence):
    given_ = {"embeddings": torch.rand(4, 2), "targets": torch.arange(4.0), **change}
    with pytest.raises((TypeError, ValueError), match=sentence):
        graded(**given_)


def test_intervals_resample_queries():
    g = torch.Generator().manual_seed(0)
    targets = torch.rand(120, generator=g)
    x = torch.stack([targets, 0.3 * torch.rand(120, generator=g)], 1)
    result = graded(x, targets, interval=True)
    assert graded(x, targets).intervals == {}
    assert set(result.intervals) == set(result) - {"spearman_skipped"}
    for name, (low, high) in result.intervals.items():
        assert low <= result[name] <= high
    assert result.intervals == graded(x, targets, interval=True).intervals
    assert result.intervals != graded(x, targets, interval=True, seed=1).intervals


def test_classes_are_resampled_where_they_are_known():
    g = torch.Generator().manual_seed(0)
    classes = torch.arange(20).repeat_interleave(6)
    targets = torch.rand(20, generator=g)[classes]
    x = targets[:, None] + 0.3 * torch.randn(20, 2, generator=g)[classes] + 0.01 * torch.randn(120, 2, generator=g)
    calls = []
    result = graded(x, targets, interval=True, classes=classes, budget=1, progress=lambda *both: calls.append(both))
    assert calls[0] == (1, 120) and calls[-1] == (120, 120)
    alone = graded(x, targets, interval=True)
    assert dict(result) == pytest.approx(dict(alone), nan_ok=True)
    wide, narrow = (scores.intervals["ndcg@10"][1] - scores.intervals["ndcg@10"][0] for scores in (result, alone))
    assert wide > 1.5 * narrow  # six queries of one class say the same
    with pytest.raises(ValueError, match="classes must have one entry per row of embeddings: 120 rows, 3 labels"):
        graded(x, targets, interval=True, classes=classes[:3])
    for name, value in (("seed", 0), ("classes", classes)):
        with pytest.raises(ValueError, match=f"{name} would have no effect: interval is False"):
            graded(x, targets, **{name: value})
