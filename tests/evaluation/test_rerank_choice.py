"""Settings of re-ranking chosen on validation classes; the paired comparison with the plain order."""

import math

import numpy as np
import pytest
import torch

from nearkin.evaluation import AlphaQE, KReciprocal, choose_rerank, retrieval
from nearkin.evaluation.retrieval import rerank_choice
from nearkin.evaluation.retrieval.retrieval_metrics import per_query
from nearkin.evaluation.statistics import cluster_bootstrap


def clustered(classes=20, each=8, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes * each) % classes
    x = torch.randn(classes, 8, generator=generator)[labels]
    return x + spread * torch.randn(len(labels), 8, generator=generator), labels


def test_candidates_follow_the_median_class_size():
    labels = torch.tensor([0] * 11 + [1] * 11 + [2] * 90 + [-1] * 500)
    assert [one.k1 for one in rerank_choice.candidates(labels, "k-reciprocal")] == [2, 5, 10, 15, 20]
    assert [one.k2 for one in rerank_choice.candidates(labels, "k-reciprocal")] == [1, 2, 3, 4, 6]
    assert [one.neighbours for one in rerank_choice.candidates(labels, "dba")] == [1, 2, 5]
    assert rerank_choice.candidates(torch.tensor([0, 0, 1, 1]), "k-reciprocal") == [KReciprocal(k) for k in (1, 2)]


def test_the_best_on_validation_is_taken():
    x, labels = clustered()
    best = choose_rerank(x.numpy(), labels.tolist(), "alpha-qe")
    values = [retrieval(x, labels, rerank=one)["map@r"] for one, _ in best.tried]
    assert [value for _, value in best.tried] == pytest.approx(values) and best.plain == retrieval(x, labels)["map@r"]
    assert best.settings == best.tried[int(np.argmax(values))][0] and isinstance(best.settings, AlphaQE)
    groups = torch.arange(len(x)) % 3
    grouped = choose_rerank(x, labels, groups=groups)
    assert grouped.plain == retrieval(x, labels, groups=groups)["map@r"] != best.plain


def test_the_difference_is_paired_by_query():
    x, labels = clustered(40, spread=0.8)
    method, groups = KReciprocal(7), torch.arange(len(x)) % 3
    result = rerank_choice.figures(x, labels, None, None, method, interval=True, groups=groups, ks=(1, 2))
    plain, again = (per_query(x, labels, groups=groups, rerank=way) for way in (None, method))
    test = cluster_bootstrap.compare(again["map@r"], plain["map@r"], labels)
    found = result["against"]["map@r"]
    assert (found["low"], found["high"]) == test["interval"] and found["difference"] == test["difference"]
    assert found["verdict"] != "better" or result["against"]["recall@1"]["verdict"] != "worse"
    words = {"better": "helps", "worse": "harms", "undecided": "may or may not help"}[found["verdict"]]
    assert result["sentence"].startswith(f"Re-ranking {words}: MAP@R ")
    expected = retrieval(x, labels, groups=groups, rerank=method, interval=True, ks=(1, 2))
    assert all(result[name] == expected[name] for name in ("recall@2", "map@r"))
    assert result["intervals"] == expected.intervals and "queries" not in result


def test_the_sentence_says_harm_and_doubt():
    one = {"plain": 0.5, "reranked": 0.4, "difference": -0.1, "low": -0.15, "high": -0.05, "verdict": "worse"}
    two = one | {"low": math.nan, "high": math.nan, "verdict": "undecided"}
    text = rerank_choice.sentence({"map@r": one, "recall@1": two})
    assert text == (
        "Re-ranking harms: MAP@R 50.0 % becomes 40.0 % (−10.0 points, 95 % interval −15.0 to −5.0, worse); "
        "R@1 50.0 % becomes 40.0 % (−10.0 points, undecided)."
    )
    mixed = rerank_choice.sentence({"map@r": one | {"verdict": "better"}, "recall@1": one})
    assert mixed.startswith("Re-ranking helps MAP@R and harms R@1: ")
    assert rerank_choice.sentence({"map@r": two}).startswith("Re-ranking may or may not help: ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.randn(9, 2), torch.arange(9) % 3, "k-reciproca"), 'unknown method "k-reciproca"; did you mean'),
        ((torch.randn(9, 2), torch.arange(9)), "labels must have a class of two items or more"),
        ((torch.randn(9, 2), torch.full((9,), -1)), "labels must be class ids, one per row and some of them known"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose_rerank(*arguments)
