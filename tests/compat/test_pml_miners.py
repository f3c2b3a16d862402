"""`nearkin.compat.pml.miners`, `.samplers` and `AccuracyCalculator` against pytorch-metric-learning 2.9."""

import inspect

import pytest
import torch
from pytorch_metric_learning import distances as their_distances
from pytorch_metric_learning import miners as theirs
from pytorch_metric_learning import samplers as their_samplers
from pytorch_metric_learning.utils import accuracy_calculator as their_calculator
from pytorch_metric_learning.utils import loss_and_miner_utils as indexing
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from nearkin.compat.pml import distances, miners, samplers, utils
from nearkin.compat.pml.utils import accuracy_calculator
from nearkin.compat.pml.utils.accuracy_calculator import AccuracyCalculator

EXACT = [
    "BatchHardMiner()",
    "BatchHardMiner(distance=D.CosineSimilarity())",
    "BatchHardMiner(allowed_neg_range=(0.9, 1.9))",
    "MultiSimilarityMiner()",
    "MultiSimilarityMiner(0.3, distance=D.LpDistance())",
    "MultiSimilarityMiner(0.3, distance=D.LpDistance(p=1))",
]


def batch(seed=0, sizes=(4, 2, 5, 1, 3), dim=6):
    g = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=g)]
    return torch.randn(len(labels), dim, generator=g, dtype=torch.float64), labels


def both(miner):
    return [
        eval(f"M.{miner}", {"M": module, "D": parts})
        for module, parts in ((miners, distances), (theirs, their_distances))
    ]


def as_sets(indices):
    """Pairs and triplets without their order."""
    parts = [indices[:2], indices[2:]] if len(indices) == 4 else [indices]
    return [sorted(zip(*(x.tolist() for x in part), strict=True)) for part in parts]


@pytest.mark.parametrize("miner", EXACT)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_choice(miner, seed):
    rows, labels = batch(seed)
    ours, other = both(miner)
    mined = ours(rows, labels)
    assert isinstance(ours, type(other)) and any(len(x) for x in mined)
    references = batch(seed + 10, (3, 4, 2))
    for arguments in (
        (rows, labels),
        (rows, labels, *references),
        (rows, labels, rows + 0.1, labels),
        (rows, labels, rows, labels + 0),
    ):
        assert as_sets(ours(*arguments)) == as_sets(other(*arguments))
    for lonely in (torch.zeros(4, dtype=torch.long), torch.arange(4)):
        assert as_sets(ours(rows[:4], lonely)) == as_sets(other(rows[:4], lonely))
    counted = type(ours)(collect_stats=True)
    counted(rows, labels)
    assert counted.num_triplets + counted.num_pos_pairs > 0


def test_the_other_miners_are_the_originals():
    ours = {k for k in dir(theirs) if k[0].isupper() and getattr(miners, k) is not getattr(theirs, k)}
    assert ours == {"BatchHardMiner", "DistanceWeightedMiner", "MultiSimilarityMiner"}
    assert utils.loss_and_miner_utils is indexing and utils.accuracy_calculator is accuracy_calculator
    with pytest.raises(AttributeError, match="has no inferences"):
        utils.inferences  # noqa: B018


def test_distance_weights_are_the_originals_row_by_row(monkeypatch):
    """The original divides by the largest odds of the batch; where that leaves any, its shares are ours."""
    rows, labels = batch(3, (5, 5, 5), dim=8)
    ours, other = both("DistanceWeightedMiner()")
    torch.manual_seed(0)
    a, p, n = ours(rows, labels)
    assert len(a) and (labels[a] == labels[p]).all() and (labels[a] != labels[n]).all() and (a != p).all()
    distance = torch.cdist(*[torch.nn.functional.normalize(rows)] * 2)
    assert (distance[a, n] < ours.nonzero_loss_cutoff).all()
    seen = []
    monkeypatch.setattr(
        indexing, "get_random_triplet_indices", lambda *_, weights, **__: seen.append(weights) or (a,) * 3
    )
    other(rows, labels), ours(rows, labels)
    assert torch.allclose(seen[1] / seen[1].sum(1, keepdim=True), seen[0], atol=1e-9)


def test_one_near_pair_does_not_silence_the_other_anchors():
    g = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(64, 2048, generator=g), torch.arange(64) // 2
    rows[2] = rows[0] + 0.01 * torch.randn(2048, generator=g)
    ours, other = both("DistanceWeightedMiner(nonzero_loss_cutoff=1.6)")
    assert ours(rows, labels)[0].unique().numel() > 60 > 4 > other(rows, labels)[0].unique().numel()


# Samplers


def test_m_per_class():
    labels = torch.randint(0, 12, (300,), generator=torch.Generator().manual_seed(0)) - 3
    sampler = samplers.MPerClassSampler(labels, 4, batch_size=24, length_before_new_iter=1000)
    items = list(sampler)
    assert len(items) == len(sampler) == 984
    for start in range(0, 984, 24):
        classes = labels[items[start : start + 24]].view(6, 4)
        assert (classes == classes[:, :1]).all() and classes[:, 0].unique().numel() == 6
    assert set(items) == set(range(300))  # a pass has every item
    every = samplers.MPerClassSampler(labels.tolist(), 3, length_before_new_iter=100)
    assert len(every) == len(list(every)) == 72
    assert labels[list(every)[:36]].unique().numel() == 12
    assert len(list(samplers.MPerClassSampler(labels, 3, length_before_new_iter=20))) == 20
    assert samplers.HierarchicalSampler is their_samplers.HierarchicalSampler
    for options in ({"m": 4, "batch_size": 30}, {"m": 4, "batch_size": 52}):
        with pytest.raises(AssertionError):
            samplers.MPerClassSampler(labels, **options)


def test_epochs_are_functions_of_the_seed():
    labels = torch.arange(90) % 6
    first, again, other = (samplers.MPerClassSampler(labels, 2, 8, 80, seed=seed) for seed in (3, 3, 4))
    epochs = [list(first) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    again.set_epoch(2)
    assert list(again) == epochs[2] and list(other) != epochs[0]


# Accuracy

METRICS = (
    "mean_average_precision",
    "mean_average_precision_at_r",
    "mean_reciprocal_rank",
    "precision_at_1",
    "r_precision",
)


def embedded(seed, sizes):
    rows, labels = batch(seed, sizes, 8)
    means = torch.randn(len(sizes), 8, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return (means[labels] + rows).float(), labels


def calculators(**options):
    device = torch.device("cpu")
    return AccuracyCalculator(device=device, **options), their_calculator.AccuracyCalculator(device=device, **options)


@pytest.mark.parametrize(
    "options", [{}, {"avg_of_avgs": True}, {"return_per_class": True}, {"k": "max_bin_count"}, {"k": 13}]
)
@pytest.mark.parametrize("seed", range(3))
def test_the_originals_figures(options, seed):
    queries, references = embedded(seed, (6, 9, 1, 12, 5)), embedded(seed + 5, (8, 3, 4, 9))
    ours, other = calculators(include=METRICS, **options)
    more = (torch.cat([queries[0], references[0]]), torch.cat([queries[1], references[1]]))
    for arguments in (queries, (*queries, *references), (*queries, *more, True)):
        if options.get("k") == 13 and len(arguments) == 5:
            continue  # fewer than its largest class: the next test
        expected = other.get_accuracy(*arguments)
        result = ours.get_accuracy(*(x.numpy() if isinstance(x, torch.Tensor) and seed else x for x in arguments))
        assert list(result) == list(expected) == list(METRICS)
        for name, value in expected.items():
            assert result[name] == pytest.approx(value, abs=1e-6), name


def test_k_cuts_average_precision_but_not_map_at_r():
    queries = embedded(1, (6, 9, 12, 5))
    (small, other), (full, _) = calculators(include=METRICS, k=3), calculators(include=METRICS)
    cut, whole, theirs_ = (x.get_accuracy(*queries) for x in (small, full, other))
    for name in ("mean_average_precision_at_r", "r_precision", "precision_at_1"):
        assert cut[name] == whole[name]
    for name in ("mean_average_precision", "mean_reciprocal_rank", "precision_at_1"):
        assert cut[name] == pytest.approx(theirs_[name], abs=1e-6)
    assert theirs_["r_precision"] != pytest.approx(whole["r_precision"])  # the original warns, and is wrong
    beyond = calculators(include=METRICS, k=1000)[0].get_accuracy(*queries)  # more than there are: all of them
    assert beyond == whole


def test_clusters_agree_as_in_scikit_learn():
    rows, labels = embedded(2, (20, 15, 25))
    assigned = accuracy_calculator.seeded_kmeans(rows, 3)
    ours = AccuracyCalculator(include=("NMI", "AMI")).get_accuracy(rows, labels)
    assert ours["NMI"] == pytest.approx(normalized_mutual_info_score(labels, assigned))
    assert ours["AMI"] == pytest.approx(adjusted_mutual_info_score(labels, assigned))
    mine = AccuracyCalculator(include=("NMI",), kmeans_func=lambda rows, k: labels)
    assert mine.get_accuracy(rows, labels) == {"NMI": 1.0}


def test_labels_of_several_columns_and_own_comparisons():
    rows, labels = embedded(3, (6, 9, 5))
    levels = torch.stack([labels, labels % 2], 1)
    compared = calculators(include=METRICS, label_comparison_fn=lambda a, b: a[..., 1] == b[..., 1])
    ours, other = (x.get_accuracy(rows, levels) for x in compared)
    assert ours == pytest.approx(other) and ours["precision_at_1"] > 0.5


def test_large_labels_stay_apart():
    """The original rounds labels to float32: 2²⁴ and 2²⁴ + 1 become one class."""
    rows = torch.tensor([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0], [1.0, 0.1]])
    labels = torch.tensor([2**24, 2**24 + 1, 2**24, 2**24 + 1])
    ours, other = calculators(include=("precision_at_1",))
    assert ours.get_accuracy(rows, labels) == ours.get_accuracy(rows, labels, rows, labels, True)
    assert ours.get_accuracy(rows, labels) == {"precision_at_1": 0.0} and other.get_accuracy(rows, labels) != {
        "precision_at_1": 0.0
    }


def test_own_functions_and_metrics():
    rows, labels = embedded(4, (6, 9, 5))
    seen = []

    def search(query, k, reference, ref_includes_query):
        seen.append((k, ref_includes_query))
        return accuracy_calculator.exact_knn(query, k, reference, ref_includes_query)

    class WithTwo(AccuracyCalculator):
        def calculate_precision_at_2(self, knn_labels, query_labels, **kwargs):
            return accuracy_calculator.precision_at_k(
                knn_labels, query_labels[:, None], 2, self.avg_of_avgs, self.return_per_class, self.label_comparison_fn
            )

        def requires_knn(self):
            return [*super().requires_knn(), "precision_at_2"]

    figures = WithTwo(include=("precision_at_2",), k=2, knn_func=search).get_accuracy(rows, labels)
    assert seen == [(2, True)]
    distance = torch.cdist(rows.double(), rows.double()).fill_diagonal_(torch.inf)
    near = distance.topk(2, largest=False).indices
    assert figures["precision_at_2"] == pytest.approx((labels[near] == labels[:, None]).double().mean().item())
    twins = torch.zeros(4, 2)  # an item is left out by its index, whatever lies on it
    assert not (accuracy_calculator.exact_knn(twins, 1, torch.zeros(6, 2), True)[1][:, 0] == torch.arange(4)).any()


def test_the_arguments_are_the_originals():
    for ours, other, more in (
        (AccuracyCalculator, their_calculator.AccuracyCalculator, []),
        (AccuracyCalculator.get_accuracy, their_calculator.AccuracyCalculator.get_accuracy, []),
        (samplers.MPerClassSampler, their_samplers.MPerClassSampler, ["seed"]),
    ):
        mine, expected = inspect.signature(ours).parameters, inspect.signature(other).parameters
        assert list(mine) == [*expected, *more]
        assert all(mine[k].default == p.default for k, p in expected.items())
