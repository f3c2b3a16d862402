"""`nearkin.compat.pml.miners`, `.samplers` and `AccuracyCalculator` against pytorch-metric-learning 2.9."""

import math

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances as their_distances
from pytorch_metric_learning import miners as theirs
from pytorch_metric_learning import samplers as their_samplers
from pytorch_metric_learning.utils import accuracy_calculator as their_calculator
from pytorch_metric_learning.utils import loss_and_miner_utils as their_indexing

from nearkin.compat.pml import distances, losses, miners, samplers
from nearkin.compat.pml.utils import accuracy_calculator
from nearkin.compat.pml.utils import loss_and_miner_utils as indexing
from nearkin.compat.pml.utils.accuracy_calculator import AccuracyCalculator

EXACT = [
    "BatchHardMiner()",
    "BatchHardMiner(distance=D.CosineSimilarity())",
    *[f"BatchEasyHardMiner('{p}', '{n}')" for p in ("hard", "easy", "all") for n in ("hard", "easy", "all")],
    "BatchEasyHardMiner()",
    "BatchEasyHardMiner('semihard', 'hard')",
    "BatchEasyHardMiner('semihard', 'easy', distance=D.CosineSimilarity())",
    "BatchEasyHardMiner('hard', 'semihard', allowed_pos_range=(0.5, 1.2), allowed_neg_range=(0.9, 1.9))",
    "BatchEasyHardMiner('easy', 'hard', allowed_neg_range=(-0.4, 0.3), distance=D.CosineSimilarity())",
    "TripletMarginMiner()",
    "TripletMarginMiner(0.4, 'hard')",
    "TripletMarginMiner(0.4, 'semihard')",
    "TripletMarginMiner(0.1, 'easy', distance=D.CosineSimilarity())",
    "PairMarginMiner(0.7, 1.1)",
    "PairMarginMiner(0.3, 0.1, distance=D.CosineSimilarity())",
    "MultiSimilarityMiner()",
    "MultiSimilarityMiner(0.3, distance=D.LpDistance())",
    "AngularMiner()",
    "AngularMiner(35)",
    "HDCMiner(0.3)",
    "HDCMiner(distance=D.CosineSimilarity())",
    "EmbeddingsAlreadyPackagedAsTriplets()",
]


def batch(seed=0, sizes=(4, 2, 5, 1, 3), dim=6):
    g = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=g)]
    return torch.randn(len(labels), dim, generator=g, dtype=torch.float64), labels


def both(miner):
    return (
        eval(f"M.{miner}", {"M": module, "D": parts})
        for module, parts in ((miners, distances), (theirs, their_distances))
    )


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
    assert as_sets(mined) == as_sets(other(rows, labels)) and any(len(x) for x in mined)
    counts = ("num_pos_pairs", "num_neg_pairs", "num_triplets")
    assert [getattr(ours, k) for k in counts] == [getattr(other, k, 0) for k in counts]
    if "Packaged" not in miner:
        references = batch(seed + 10, (3, 4, 2))
        assert as_sets(ours(rows, labels, *references)) == as_sets(other(rows, labels, *references))


@pytest.mark.parametrize("miner", [m for m in EXACT if "Packaged" not in m])
@pytest.mark.parametrize(
    "labels", [torch.zeros(4, dtype=torch.long), torch.arange(4)], ids=["one class", "no positives"]
)
def test_nothing_to_mine(miner, labels):
    ours, _ = both(miner)
    mined = ours(batch(1)[0][:4], labels)
    assert len(mined) in (3, 4) and all(x.dtype == torch.long for x in mined)
    missing = slice(2, None) if labels.unique().numel() == 1 else slice(0, 2)
    assert len(mined) != 4 or "Pair" not in miner or not any(len(x) for x in mined[missing])
    assert len(mined) != 3 or not any(len(x) for x in mined)


def test_random_miners_draw_valid_pairs_and_triplets():
    torch.manual_seed(0)
    rows, labels = batch(2, (6, 6, 6))
    for miner in (miners.DistanceWeightedMiner(), miners.DistanceWeightedMiner(nonzero_loss_cutoff=2.0)):
        a, p, n = miner(rows, labels)
        assert len(a) and (labels[a] == labels[p]).all() and (labels[a] != labels[n]).all() and (a != p).all()
        distance = torch.cdist(*[torch.nn.functional.normalize(rows)] * 2)
        assert (distance[a, n] < miner.nonzero_loss_cutoff).all()
    a1, p, a2, n = miners.UniformHistogramMiner(4, 5, 7)(rows, labels)
    assert len(a1) % 5 == 0 and len(a2) % 7 == 0 and (labels[a1] == labels[p]).all() and (labels[a2] != labels[n]).all()
    bins = (distance[a2, n] - distance[labels[:, None] != labels].min()) // 1e-9
    assert bins.numel() == len(a2)


def test_distance_weights_are_the_originals_row_by_row():
    """The original divides by the largest odds of the batch; where that leaves any, its shares are ours."""
    rows, labels = batch(3, (5, 5, 5), dim=8)
    ours, other = both("DistanceWeightedMiner()")
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            their_indexing, "get_random_triplet_indices", lambda *a, weights, **_: seen.update(w=weights) or ()
        )
        patch.setattr(other, "output_assertion", lambda _: None)
        other(rows, labels)
    odds = ours.odds(rows, labels, rows, labels)
    assert torch.allclose(odds / odds.sum(1, keepdim=True), seen["w"], atol=1e-9)


def test_one_near_pair_does_not_silence_the_other_anchors():
    g = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(64, 512, generator=g), torch.arange(64) // 2
    rows[2] = rows[0] + 0.01 * torch.randn(512, generator=g)
    miner = miners.DistanceWeightedMiner(nonzero_loss_cutoff=1.6)
    assert (
        miner(rows, labels)[0].unique().numel()
        > 60
        > 4
        > theirs.DistanceWeightedMiner(0.5, 1.6)(rows, labels)[0].unique().numel()
    )


def test_hdc_of_given_pairs():
    rows, labels = batch(4)
    ours, other = both("HDCMiner(0.5)")
    pairs = theirs.PairMarginMiner(0.5, 1.3)(rows, labels)
    for miner in (ours, other):
        miner.set_idx_externally(pairs, labels)
    assert as_sets(ours(rows, labels)) == as_sets(other(rows, labels))


def test_index_functions():
    rows, labels = batch(5)
    references = batch(6)[1]
    for ref in (None, references):
        for name in ("get_all_pairs_indices", "get_all_triplets_indices"):
            mine, other = (getattr(m, name)(labels, ref) for m in (indexing, their_indexing))
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), name
    pairs = theirs.PairMarginMiner(0.5, 1.3)(rows, labels)
    mine, other = (m.convert_to_triplets(pairs, labels) for m in (indexing, their_indexing))
    assert as_sets(mine) == as_sets(other)
    for using_ref in (False, True):
        mine, other = (
            m.convert_to_weights(pairs, labels, torch.float64, using_ref) for m in (indexing, their_indexing)
        )
        assert torch.equal(mine, other)
    mine, other = (m.convert_to_pos_pairs_with_unique_labels(None, labels) for m in (indexing, their_indexing))
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    x, mask = torch.randn(4, 5), torch.rand(4, 5) > 0.5
    for add_one in (True, False):
        for dim in (0, 1):
            mine, other = (m.logsumexp(x, mask, add_one, dim) for m in (indexing, their_indexing))
            assert torch.allclose(mine, other, atol=1e-6)
    torch.manual_seed(0)
    a, p, n = indexing.get_random_triplet_indices(labels, t_per_anchor=7)
    assert set(a.bincount().tolist()) <= {0, 7} and (labels[a] == labels[p]).all() and (labels[a] != labels[n]).all()


def test_miners_refuse_in_one_sentence():
    rows, labels = batch(0)
    for call, sentence in (
        (lambda: miners.BatchEasyHardMiner("hardest"), "pos_strategy must be one of hard, semihard, easy, all"),
        (lambda: miners.BatchEasyHardMiner("semihard", "semihard"), "semihard needs one pair of the other kind"),
        (lambda: miners.TripletMarginMiner(0.1, "semi"), "type_of_triplets must be one of"),
        (
            lambda: miners.DistanceWeightedMiner(distance=distances.CosineSimilarity()),
            r"must be LpDistance\(\), got Cosine",
        ),
        (lambda: miners.BatchHardMiner()(rows, labels[1:]), "labels must have one entry per row"),
        (lambda: miners.BatchHardMiner()(rows, labels, rows.clone()), "ref_labels must be given with ref_emb"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


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
    every = samplers.MPerClassSampler(labels, 3, length_before_new_iter=100)
    assert len(every) == len(list(every)) == 72
    assert labels[list(every)[:36]].unique().numel() == 12
    assert len(list(samplers.MPerClassSampler(labels, 3, length_before_new_iter=20))) == 20
    for options, sentence in (
        ({"m": 4, "batch_size": 30}, "batch_size must be a multiple of m=4, got 30"),
        ({"m": 4, "batch_size": 52}, "must be at most"),
        ({"m": 4, "batch_size": 48, "length_before_new_iter": 40}, "length_before_new_iter must be at least"),
    ):
        with pytest.raises(ValueError, match=sentence):
            samplers.MPerClassSampler(labels, **options)


def seeded_samplers(seed):
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 6, (90,), generator=g)
    levels = torch.stack([labels, labels % 3], 1)
    dataset = torch.utils.data.TensorDataset(torch.randn(90, 4, generator=g), labels)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    return [
        samplers.MPerClassSampler(labels, 2, 8, 80, seed=seed),
        samplers.FixedSetOfTriplets(labels, 20, seed=seed),
        samplers.HierarchicalSampler(levels, 8, 2, seed=seed),
        samplers.TuplesToWeightsSampler(model, miners.BatchHardMiner(), dataset, 40, seed=seed),
    ]


def test_epochs_are_functions_of_the_seed():
    for first, again, other in zip(*(seeded_samplers(seed) for seed in (3, 3, 4)), strict=True):
        epochs = [list(first) for _ in range(3)]
        assert epochs[0] != epochs[1] != epochs[2]
        again.set_epoch(2)
        assert list(again) == epochs[2] and list(other) != epochs[0]


def test_fixed_triplets_hierarchies_and_weights():
    _, triplets, levels, weighted = seeded_samplers(0)
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 6, (90,), generator=g)
    rows = torch.tensor(list(triplets)).view(20, 3)
    assert len(triplets) == 60 and (labels[rows[:, 0]] == labels[rows[:, 1]]).all()
    assert (labels[rows[:, 0]] != labels[rows[:, 2]]).all()
    assert sorted(rows.tolist()) == sorted(torch.tensor(list(triplets)).view(20, 3).tolist())
    batches = list(levels)
    assert len(batches) == len(levels) == 3 * 4
    for one in batches:
        kinds = labels[one]
        assert len(one) == 8 and (kinds % 3).unique().numel() == 2 and (kinds.bincount()[kinds.unique()] % 2 == 0).all()
    drawn = list(weighted)
    assert len(drawn) == 40 and (weighted.weights[drawn] > 0).all() and weighted.model.training
    with pytest.raises(ValueError, match='samples_per_class must be "all" or a divisor of 4, got 3'):
        samplers.HierarchicalSampler(torch.stack([labels, labels % 3], 1), 8, 3)


def test_a_sampler_trains_in_a_loader():
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(8).repeat_interleave(10)
    dataset = torch.utils.data.TensorDataset(torch.randn(80, 4, generator=g), labels)
    loader = torch.utils.data.DataLoader(dataset, 16, sampler=samplers.MPerClassSampler(labels, 4, 16, 160))
    model, loss = torch.nn.Linear(4, 3), losses.TripletMarginLoss()
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, targets in loader:
        optimizer.zero_grad()
        embeddings = model(inputs)
        loss(embeddings, targets, miners.BatchHardMiner()(embeddings, targets)).backward()
        optimizer.step()
    assert not torch.equal(before, model.weight)


# Accuracy

METRICS = (
    "precision_at_1",
    "mean_average_precision",
    "mean_average_precision_at_r",
    "mean_reciprocal_rank",
    "r_precision",
)


def embedded(seed, sizes):
    rows, labels = batch(seed, sizes, 8)
    means = torch.randn(len(sizes), 8, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return (means[labels] + rows).float(), labels


@pytest.mark.parametrize(
    "options", [{}, {"avg_of_avgs": True}, {"return_per_class": True}, {"k": "max_bin_count"}, {"k": 40}]
)
@pytest.mark.parametrize("seed", range(3))
def test_the_originals_figures(options, seed):
    queries, references = embedded(seed, (6, 9, 1, 12, 5)), embedded(seed + 5, (8, 3, 4, 9))
    ours = AccuracyCalculator(include=METRICS, **options)
    other = their_calculator.AccuracyCalculator(include=METRICS, device=torch.device("cpu"), **options)
    more = (torch.cat([queries[0], references[0]]), torch.cat([queries[1], references[1]]))
    for arguments in (queries, (*queries, *references), (*queries, *more, True)):
        if options.get("k") == 40 and arguments is not queries and len(arguments) == 4:
            continue  # more neighbours than references
        if options.get("k") == 40 and arguments is queries:
            continue
        expected = other.get_accuracy(*arguments)
        result = ours.get_accuracy(*(x.numpy() if isinstance(x, torch.Tensor) and seed else x for x in arguments))
        assert list(result) == sorted(expected) == sorted(METRICS)
        for name, value in expected.items():
            assert result[name] == pytest.approx(value, abs=1e-6), name


def test_k_cuts_average_precision_but_not_map_at_r():
    queries = embedded(1, (6, 9, 12, 5))
    small, full = AccuracyCalculator(include=METRICS, k=3), AccuracyCalculator(include=METRICS)
    cut, whole = small.get_accuracy(*queries), full.get_accuracy(*queries)
    for name in ("mean_average_precision_at_r", "r_precision", "precision_at_1"):
        assert cut[name] == whole[name]
    other = their_calculator.AccuracyCalculator(include=METRICS, k=3, device=torch.device("cpu")).get_accuracy(*queries)
    for name in ("mean_average_precision", "mean_reciprocal_rank", "precision_at_1"):
        assert cut[name] == pytest.approx(other[name], abs=1e-6)
    assert other["r_precision"] != pytest.approx(whole["r_precision"])  # the original warns, and is wrong


def test_clusters_agree_as_in_scikit_learn():
    from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

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

    def same_parent(a, b):
        return a[..., 1] == b[..., 1]

    for compare in (None, same_parent):
        options = {
            "include": ("precision_at_1", "r_precision", "mean_average_precision"),
            "label_comparison_fn": compare,
        }
        if compare is not None:
            options["exclude"] = ()
        ours = AccuracyCalculator(**options).get_accuracy(rows, levels)
        kinds = labels if compare is None else labels % 2
        expected = AccuracyCalculator(include=options["include"]).get_accuracy(rows, kinds)
        assert ours == pytest.approx(expected)
    with pytest.raises(NotImplementedError, match="retrieval only"):
        AccuracyCalculator(label_comparison_fn=same_parent)


def test_a_subclass_adds_a_metric():
    class WithTwo(AccuracyCalculator):
        def calculate_precision_at_2(self, knn_labels, query_labels, **kwargs):
            return accuracy_calculator.precision_at_k(
                knn_labels, query_labels[:, None], 2, self.avg_of_avgs, self.return_per_class, self.label_comparison_fn
            )

        def requires_knn(self):
            return [*super().requires_knn(), "precision_at_2"]

    rows, labels = embedded(4, (6, 9, 5))
    distance = torch.cdist(rows.double(), rows.double()).fill_diagonal_(torch.inf)
    near = distance.topk(2, largest=False).indices
    expected = (labels[near] == labels[:, None]).double().mean().item()
    assert WithTwo(include=("precision_at_2",)).get_accuracy(rows, labels) == {
        "precision_at_2": pytest.approx(expected)
    }


def test_large_labels_stay_apart_and_nobody_to_find():
    """The original rounds labels to float32: 2²⁴ and 2²⁴ + 1 become one class."""
    rows = torch.tensor([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0], [1.0, 0.1]])
    labels = torch.tensor([2**24, 2**24 + 1, 2**24, 2**24 + 1])
    calculator = AccuracyCalculator(include=("precision_at_1",))
    assert calculator.get_accuracy(rows, labels) == {"precision_at_1": 0.0}
    alone = calculator.get_accuracy(rows, torch.arange(4))
    assert math.isnan(alone["precision_at_1"])


def test_the_calculator_refuses_in_one_sentence():
    rows, labels = embedded(0, (3, 3))
    for call, sentence in (
        (lambda: AccuracyCalculator(include=("recall",)), "include must be of .*precision_at_1.*, got recall"),
        (lambda: AccuracyCalculator(k=0), "k must be a whole number >= 1"),
        (lambda: AccuracyCalculator(avg_of_avgs=True, return_per_class=True), "exclude each other"),
        (lambda: AccuracyCalculator().get_accuracy(rows, labels[1:]), "query_labels must have one entry per row"),
        (lambda: AccuracyCalculator().get_accuracy(rows, labels, rows + 1, labels, True), "first rows of reference"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    with pytest.raises(TypeError, match="include must be a tuple or list"):
        AccuracyCalculator(include="NMI")


def test_own_search_function():
    rows, labels = embedded(0, (4, 4))
    seen = []

    def search(query, k, reference, ref_includes_query):
        seen.append((k, ref_includes_query))
        return accuracy_calculator.exact_knn(query, k, reference, ref_includes_query)

    AccuracyCalculator(include=("precision_at_1",), k=1, knn_func=search).get_accuracy(rows, labels)
    assert seen == [(1, True)]
    assert np.isclose(accuracy_calculator.exact_knn(rows, 1, rows + 1e-3)[0].min().item(), 1e-3 * 8**0.5, rtol=1e-2)


def test_metrics_of_given_neighbours():
    """A caller's own neighbours: the arguments that the original passes to its metrics are enough."""
    labels, neighbours = torch.tensor([1, 1, 2, 0]), torch.tensor([[0, 1, 1], [1, 0, 1], [2, 2, 2], [1, 2, 1]])
    given = {
        "query_labels": labels,
        "knn_labels": neighbours,
        "label_counts": ([0, 1, 2], [2, 3, 4]),
        "not_lone_query_mask": torch.tensor([True, True, True, False]),
        "ref_includes_query": True,
    }
    ours, other = AccuracyCalculator(include=METRICS), their_calculator.AccuracyCalculator(include=METRICS)
    values = ours._get_accuracy(ours.get_function_dict(), **given)
    assert values == pytest.approx(other._get_accuracy(other.get_function_dict(), **given))


@pytest.mark.parametrize("own", [False, True])
def test_lone_queries_are_those_of_the_original(own):
    labels, references = torch.tensor([0, 0, 1, 2, 7]), torch.tensor([0, 0, 1, 2, 7, 2])

    def near(a, b):
        return abs(a - b) < 2

    for compare in (torch.eq, near):
        counts = accuracy_calculator.get_label_match_counts(labels, references, compare)
        theirs = their_calculator.get_label_match_counts(labels, references, compare)
        assert all(map(torch.equal, counts, theirs))
        ours = accuracy_calculator.get_lone_query_labels(labels, counts, own, compare)
        assert all(map(torch.equal, ours, their_calculator.get_lone_query_labels(labels, theirs, own, compare)))


def test_refusals_are_assertions_too():
    for sampler in (samplers.MPerClassSampler, their_samplers.MPerClassSampler):
        with pytest.raises(AssertionError):
            sampler([0, 0, 1, 1], 2, batch_size=6)


def test_self_comparisons_are_left_out_as_by_the_original():
    labels = torch.tensor([0, 0, 1, 1, 0, 2])
    memory = torch.cat([labels[2:], torch.tensor([1, 0]), labels[:2]])  # the batch wraps around
    places = torch.tensor([6, 7, 0, 1, 2, 3])
    for mined in (indexing.get_all_pairs_indices(labels, memory), indexing.get_all_triplets_indices(labels, memory)):
        ours = indexing.remove_self_comparisons(mined, places, len(memory))
        expected = their_indexing.remove_self_comparisons(mined, places, len(memory))
        assert len(ours[0]) == len(mined[0]) - len(labels) or len(mined) == 3
        assert all(map(torch.equal, ours, expected))
    mined, places = indexing.get_all_pairs_indices(labels, labels[2:]), torch.arange(2, 6)
    ours = indexing.remove_self_comparisons(mined, places, 4, ref_is_subset=True)
    assert all(map(torch.equal, ours, their_indexing.remove_self_comparisons(mined, places, 4, ref_is_subset=True)))
