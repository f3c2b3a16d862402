"""Samplers: what a batch is made of, even over epochs, mined, grouped; what all of them keep to: test_draws.py."""

import re
import time
import tracemalloc
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from nearkin import evaluation, samplers
from nearkin.samplers import (
    ClassBalanced,
    ClassRatio,
    HardClasses,
    HardNegatives,
    LabelNeighbours,
    PairPerClass,
    schedule,
)

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**63 - 1)


def shuffled_labels(counts, unknown=0):
    """Labels 0, 3, 6, … with these counts, some unknown items between, in a scattered order."""
    labels = np.concatenate([np.repeat(np.arange(len(counts)) * 3, counts), np.full(unknown, -1)])
    return labels[np.random.default_rng(0).permutation(len(labels))]


def embeddings_of(rows, seed=0, dim=6):
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def make(name, labels, classes, per_class, seed=0, **options):
    """Any class sampler with batches of about classes × per_class; a name with a + is refreshed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "ClassRatio":
            size = classes * per_class
            return ClassRatio(labels, size, classes / size, seed, **options)
        if name.startswith("PairPerClass"):
            sampler = PairPerClass(labels, classes, seed, candidates=classes + 3, **options)
            rows = len(sampler.class_ids)
        else:
            kind = getattr(samplers, name.removesuffix("+"))
            sampler, rows = kind(labels, classes, per_class, seed, **options), len(labels)
    if name.endswith("+"):
        sampler.refresh(embeddings_of(rows))
    return sampler


CLASS_SAMPLERS = ["ClassBalanced", "ClassRatio", "PairPerClass", "PairPerClass+", "HardClasses", "HardClasses+"]
by_class = pytest.mark.parametrize("name", CLASS_SAMPLERS)


@st.composite
def requests(draw, divisible_by=1):
    """Class sizes, unknown items, and a P × K that they can serve."""
    counts = draw(st.lists(st.integers(1, 12), min_size=2 * divisible_by, max_size=14))
    classes = draw(st.integers(1, len(counts) // divisible_by)) * divisible_by
    return shuffled_labels(counts, draw(st.integers(0, 5))), classes, draw(st.integers(1, 5))


def epoch_of(sampler, epoch=0):
    return [sampler.batch(epoch, index) for index in range(len(sampler))]


def uses(sampler, items, epoch=0):
    return np.bincount(np.concatenate(epoch_of(sampler, epoch)), minlength=items)


# --- what a batch is made of


@by_class
@quick
@given(request=requests(), seed=seeds)
def test_class_batches_have_the_promised_composition(name, request, seed):
    labels, classes, per_class = request
    sampler = make(name, labels, classes, per_class, seed)
    each = 2 if name.startswith("PairPerClass") else per_class
    for batch in epoch_of(sampler):
        drawn = labels[batch]
        assert -1 not in drawn
        ids, sizes = np.unique(drawn, return_counts=True)
        assert len(ids) == classes
        assert len(batch) == classes * each
        if name != "ClassRatio":
            assert set(sizes) == {each}
            assert len(np.unique(drawn.reshape(classes, each), axis=1).ravel()) >= classes
            assert all(len(set(drawn[at : at + each])) == 1 for at in range(0, len(batch), each)), "class after class"
        for label in ids:
            have = (labels == label).sum()
            of_class = np.array(batch)[drawn == label]
            repeats = np.unique(of_class, return_counts=True)[1]
            if name != "ClassRatio" or np.isin(labels, ids).sum() >= len(batch):
                assert len(set(of_class)) == min(len(of_class), have), "items of a class differ as far as they can"
            assert repeats.max() - (repeats.min() if len(repeats) == have else 0) <= 1


def test_ratio_is_of_unique_classes():
    labels = shuffled_labels([40] * 100)
    for ratio, classes in [(0.25, 32), (0.5, 64), (0.75, 96), (0.001, 1)]:
        sampler = ClassRatio(labels, 128, ratio)
        for index in range(5):
            batch = sampler.batch(0, index)
            assert len(set(batch)) == (128 if classes > 1 else 40)
            assert len(np.unique(labels[batch])) == classes


def test_ratio_fills_at_random():
    """Sizes of the classes differ within a batch, around their mean."""
    labels = shuffled_labels([60] * 100)
    sampler = ClassRatio(labels, 128, 0.25)
    sizes = np.concatenate([np.unique(labels[batch], return_counts=True)[1] for batch in epoch_of(sampler)])
    assert sizes.min() == 1 and sizes.max() >= 6
    assert abs(sizes.mean() - 4) < 1e-9 and sizes.std() > 1


def brute_neighbours(targets, item, k):
    columns = np.asarray(targets, np.float64).reshape(len(targets), -1)
    if columns.shape[1] == 1:
        distance = np.abs(columns[:, 0] - columns[item, 0])
    else:
        distance = np.zeros(len(columns))
        for column in columns.T:
            distance += (column - column[item]) ** 2
    order = np.lexsort((np.arange(len(columns)), distance))
    return order[order != item][:k]


@st.composite
def graded(draw):
    items = draw(st.integers(2, 40))
    value = st.floats(-1e6, 1e6, width=32) | st.integers(-2, 2).map(float)  # with many ties
    dims = draw(st.integers(1, 3))
    targets = np.array(draw(st.lists(value, min_size=items * dims, max_size=items * dims))).reshape(items, dims)
    batch_size = draw(st.integers(1, items))
    return targets[:, 0] if dims == 1 else targets, batch_size, draw(st.integers(0, batch_size - 1))


@quick
@given(request=graded(), seed=seeds)
def test_label_neighbours_have_the_promised_composition(request, seed):
    targets, batch_size, k = request
    sampler = LabelNeighbours(targets, batch_size, k, seed)
    batches = epoch_of(sampler)
    assert sorted(batch[0] for batch in batches) == list(range(len(targets))), "every item an anchor once"
    for batch in batches:
        assert len(batch) == len(set(batch)) == batch_size
        assert batch[1 : k + 1] == brute_neighbours(targets, batch[0], k).tolist()


@quick
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=12), k=st.integers(1, 2))
def test_nearest_by_label_for_any_floats(values, k):
    with np.errstate(over="ignore"):
        expected = [brute_neighbours(values, item, k).tolist() for item in range(len(values))]
    sampler = LabelNeighbours(values, 3, k)
    assert [sampler.nearest(item).tolist() for item in range(len(values))] == expected


def test_targets_too_far_apart_to_square():
    targets = np.array([[0.0, 0.0], [1e200, 0.0], [-1e200, 0.0], [0.0, 1.0]])
    assert LabelNeighbours(targets, 4, 2).nearest(1).tolist() == [0, 2]
    assert LabelNeighbours(targets, 4, 2).nearest(0).tolist() == [3, 1]


def present(targets, batch, rows, k=5):
    """Which part of the k nearest labels of each of these rows of a batch is in the batch."""
    inside = set(batch)
    return np.mean([len(inside & set(brute_neighbours(targets, batch[row], k))) / k for row in rows])


@pytest.mark.parametrize("dims", [1, 2, 20])
def test_every_anchor_has_its_nearest_labels_in_the_batch(dims):
    """One anchor, as in the paper, leaves the other 149 rows without; 25 anchors have all of theirs."""
    targets = np.random.default_rng(0).standard_normal((2000, dims))
    first_sampler, several = LabelNeighbours(targets, 150, 5), LabelNeighbours(targets, 150, 5, anchors=25)
    for index in range(3):
        batch = first_sampler.batch(0, index)
        assert present(targets, batch, [0]) == 1 and present(targets, batch, range(1, 150)) < 0.2
        batch = several.batch(0, index)
        assert present(targets, batch, range(25)) == 1
        assert len(batch) == len(set(batch)) == 150


@quick
@given(request=graded(), seed=seeds, data=st.data())
def test_several_anchors_have_the_promised_composition(request, seed, data):
    targets, batch_size, _ = request
    anchors = data.draw(st.integers(1, batch_size))
    k = data.draw(st.integers(0, batch_size // anchors - 1))
    sampler = LabelNeighbours(targets, batch_size, k, seed, anchors=anchors)
    batches = epoch_of(sampler, 1)
    assert len(batches) == -(-len(targets) // anchors)
    times = np.bincount(np.concatenate([batch[:anchors] for batch in batches]), minlength=len(targets))
    assert times.min() == 1 and times.sum() == anchors * len(batches) and times.max() <= 2
    for batch in batches:
        assert len(batch) == len(set(batch)) == batch_size
        expected = dict.fromkeys(batch[:anchors])
        for anchor in batch[:anchors]:
            expected |= dict.fromkeys(brute_neighbours(targets, anchor, k).tolist())
        assert batch[: len(expected)] == list(expected)
    last = LabelNeighbours(targets, batch_size, k, seed, batch_size - 1, batch_size, anchors=anchors)
    assert last.batch(1, 0) == batches[0][-1:]


# --- positive pairs and their hard negatives


def paired(counts, size, pairs=None, seed=0, unknown=3, **options):
    labels = shuffled_labels(counts, unknown)
    return labels, HardNegatives(labels, size, pairs, seed, **options)


@quick
@given(
    counts=st.lists(st.integers(1, 9), min_size=2, max_size=10).filter(lambda sizes: max(sizes) > 1),
    seed=seeds,
    refreshed=st.booleans(),
    data=st.data(),
)
def test_pairs_with_negatives_have_the_promised_composition(counts, seed, refreshed, data):
    size = data.draw(st.integers(2, sum(counts)))
    pairs = data.draw(st.integers(1, min(size // 2, sum(-(-n // 2) for n in counts if n > 1))))
    labels, sampler = paired(counts, size, pairs, seed)
    if refreshed:
        sampler.refresh(embeddings_of(len(labels)))
    batches = epoch_of(sampler)
    for batch in batches:
        assert len(batch) == len(set(batch)) == size and -1 not in labels[batch]
    ends = {item for batch in batches for item in batch[: 2 * pairs]}
    ids, sizes = np.unique(labels[labels >= 0], return_counts=True)
    assert ends >= set(np.flatnonzero(np.isin(labels, ids[sizes > 1]))), "every item with kin is in a pair"


def test_negatives_are_the_nearest_of_each_item_in_turn():
    labels, sampler = paired([6] * 20, 24, 4)
    rows = embeddings_of(len(labels))
    before = epoch_of(sampler)
    sampler.refresh(rows)
    unit = unit_grid(rows)
    similarity = unit @ unit.T
    for batch, random in zip(epoch_of(sampler), before, strict=True):
        assert batch[:8] == random[:8] and batch[8:] != random[8:], "the pairs are random, the negatives are not"
        taken = set(batch[:8])
        for place, item in enumerate(batch[8:]):
            end = batch[place % 8]
            free = [i for i in np.flatnonzero((labels != labels[end]) & (labels >= 0)) if i not in taken]
            assert item in free and similarity[end, item] == max(similarity[end, i] for i in free)
            taken.add(item)


def test_positive_pairs_are_drawn_evenly_and_change():
    labels, sampler = paired([8] * 30, 32)
    assert sampler.pairs == 8 and len(sampler) == 15
    fronts = [batch[:16] for batch in epoch_of(sampler)]
    assert (np.bincount(np.concatenate(fronts), minlength=len(labels))[labels >= 0] == 1).all()
    company = [{frozenset(b[i : i + 2]) for b in epoch_of(sampler, e) for i in range(0, 16, 2)} for e in (0, 1)]
    assert all(len({labels[i] for i in pair}) == 1 for pair in company[0])
    assert len(company[0] & company[1]) < 40  # of 120; a pair comes again by chance in one of seven


def test_hard_negatives_of_many_items_are_sought_among_candidates():
    labels = np.arange(100_000) // 2
    sampler = HardNegatives(labels, 128)
    tracemalloc.start()
    sampler.refresh(embeddings_of(100_000, dim=16))
    batch = sampler.batch(0, 700)
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()
    assert len(set(batch)) == 128 and len(set(labels[batch[:64]])) == 32


def mined(counts, size, pairs=None, k=6, guard=0.05, seed=0, unknown=3, dim=6, **options):
    """Labels, embeddings that have something to do with them, and a sampler refreshed with exact lists."""
    labels = shuffled_labels(counts, unknown)
    rows = embeddings_of(len(labels), dim=dim)
    rows = rows + 1.5 * embeddings_of(max(labels) + 2, seed=1, dim=dim)[labels]
    sampler = HardNegatives(labels, size, pairs, seed, neighbours=k, guard=guard, **options)
    sampler.refresh(rows, evaluation.nearest_negatives(rows, labels, k=k).indices)
    return labels, rows, sampler


@quick
@given(
    counts=st.lists(st.integers(1, 9), min_size=2, max_size=10).filter(lambda sizes: max(sizes) > 1),
    seed=seeds,
    k=st.integers(1, 9),
    guard=st.none() | st.floats(0, 3),
    data=st.data(),
)
def test_batches_from_lists_have_the_promised_composition(counts, seed, k, guard, data):
    size = data.draw(st.integers(2, sum(counts)))
    pairs = data.draw(st.integers(1, min(size // 2, sum(-(-n // 2) for n in counts if n > 1))))
    labels, _, sampler = mined(counts, size, pairs, k, guard, seed)
    _, plain = paired(counts, size, pairs, seed)
    for batch, random in zip(epoch_of(sampler), epoch_of(plain), strict=True):
        assert len(batch) == len(set(batch)) == size and -1 not in labels[batch]
        assert batch[:2] == random[:2], "the pairs are those of a sampler that does not mine"


@pytest.mark.parametrize("guard", [None, 0.0, 0.05, 0.5])
def test_negatives_of_lists_are_the_nearest_of_the_whole_set_within_the_guard(guard):
    """By a loop over all items: as long as no item uses up its list, lists lose nothing."""
    labels, rows, sampler = mined([6] * 20, 24, 4, k=120, guard=guard)
    unit = unit_grid(rows)
    similarity, left_out = unit @ unit.T, 0
    for batch in epoch_of(sampler):
        taken = set(batch[:8])
        for place, item in enumerate(batch[8:]):
            end, other = batch[place % 8], batch[(place % 8) ^ 1]
            assert labels[end] == labels[other]
            bound = np.inf if guard is None else similarity[end, other] - guard * abs(similarity[end, other])
            free = [i for i in np.flatnonzero((labels != labels[end]) & (labels >= 0)) if i not in taken]
            allowed = [i for i in free if similarity[end, i] <= bound]
            left_out += len(allowed) < len(free)
            if allowed:
                assert similarity[end, item] == max(similarity[end, i] for i in allowed)
            taken.add(item)
    assert (left_out > 0) == (guard is not None)


def test_an_item_of_two_pairs_has_the_lower_bound():
    """A class of three: the second pair repeats an item of the first."""
    _, rows, sampler = mined([3] * 12, 16, 5, k=33, unknown=0)
    unit = unit_grid(rows)
    bounds, repeated = [], 0
    negatives = sampler._negatives
    sampler._negatives = lambda ends, bound, *at: bounds.append((ends, bound)) or negatives(ends, bound, *at)
    for epoch, index in ((epoch, index) for epoch in range(6) for index in range(len(sampler))):
        sampler.batch(epoch, index)
        drawn = sampler._paired[np.arange(5 * index, 5 * index + 5) % len(sampler._paired)]
        for end, bound in zip(*bounds.pop(), strict=True):
            pairs = [unit[a] @ unit[b] for a, b in drawn if end in (a, b)]
            repeated += len(pairs) > 1
            assert bound == min(s - 0.05 * abs(s) for s in pairs)
    assert repeated


def test_lists_of_many_items_take_bounded_memory():
    labels = np.arange(100_000) // 2
    sampler = HardNegatives(labels, 128, neighbours=16, guard=0.05)
    lists = (np.arange(100_000)[:, None] + np.arange(2, 18)) % 100_000
    tracemalloc.start()
    sampler.refresh(embeddings_of(100_000, dim=16), lists)
    batch = sampler.batch(0, 700)
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()
    assert len(set(batch)) == 128 and len(set(labels[batch[:64]])) == 32


# --- the same everywhere


def test_labels_may_be_a_list_an_array_or_a_tensor():
    labels = shuffled_labels([5, 6, 7, 8], unknown=2)
    expected = epoch_of(ClassBalanced(labels, 2, 3))
    for same in (labels.tolist(), labels.astype(np.int16), torch.tensor(labels), torch.tensor(labels).int()):
        assert epoch_of(ClassBalanced(same, 2, 3)) == expected
    targets = np.arange(40) * 7 % 23 / 4
    expected = epoch_of(LabelNeighbours(targets, 8, 3))
    for same in (targets.tolist(), torch.tensor(targets), targets.astype(np.float32)):
        assert epoch_of(LabelNeighbours(same, 8, 3)) == expected


def test_seeds_and_epochs_differ():
    labels = shuffled_labels([20] * 20)
    for name in CLASS_SAMPLERS:
        first = make(name, labels, 8, 4)
        assert epoch_of(first, 0) != epoch_of(first, 1)
        assert epoch_of(first, 0) != epoch_of(make(name, labels, 8, 4, seed=1), 0)
    graded = LabelNeighbours(np.arange(50), 10, 3)
    assert epoch_of(graded, 0) != epoch_of(graded, 1) != epoch_of(LabelNeighbours(np.arange(50), 10, 3, 1), 1)


def test_items_of_a_class_change_company():
    sampler = ClassBalanced(np.zeros(40, int), 1, 4)
    company = [{frozenset(batch) for batch in epoch_of(sampler, epoch)} for epoch in (0, 1)]
    assert len(company[0] | company[1]) == 20


# --- epochs and resuming


def test_a_run_with_its_own_epochs_keeps_the_resumed_place():
    labels = shuffled_labels([9] * 8)
    sampler = ClassBalanced(labels, 4, 3)
    sampler.resume(2, 3)
    sampler.set_epoch(2)
    assert list(sampler) == epoch_of(sampler, 2)[3:]
    sampler.set_epoch(2)
    assert list(sampler) == epoch_of(sampler, 2)
    sampler.resume(1, len(sampler))
    assert (sampler.epoch, sampler.start) == (2, 0)
    sampler.resume(1, 2)
    sampler.set_epoch(4)
    assert (sampler.epoch, sampler.start) == (4, 0)


def test_a_broken_off_epoch_is_followed_by_the_next():
    sampler = ClassBalanced(shuffled_labels([9] * 8), 4, 3)
    next(iter(sampler))
    assert list(sampler) == epoch_of(sampler, 1)
    assert sampler.epoch == 2


def test_states_are_refused_by_samplers_of_other_settings():
    labels = shuffled_labels([9] * 8)
    groups = groups_for(labels, 3)
    made = {"labels": labels, "classes": 4, "per_class": 3, "groups": groups}
    state = ClassBalanced(**made).state_dict()
    for other in ({"seed": 1}, {"batches": 2}, {"groups": groups[::-1].copy()}, {"labels": labels[::-1]}):
        with pytest.raises(ValueError, match=r"state must come from a .* with the same labels, seed and settings"):
            ClassBalanced(**made | other).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_and_prefetch(workers):
    labels = shuffled_labels([10] * 6)
    data = TensorDataset(torch.arange(60))

    def loader(sampler):
        return DataLoader(data, batch_sampler=sampler, num_workers=workers, persistent_workers=False)

    sampler = ClassBalanced(labels, 3, 2)
    assert len(loader(sampler)) == len(sampler) == 10
    batches_seen = []
    for step, (items,) in enumerate(loader(sampler), start=sampler.start):
        batches_seen.append(items.tolist())
        if step == 7:
            ahead, state = sampler.state_dict(), sampler.state_dict(batches_done=step + 1)
            break
    assert batches_seen == epoch_of(sampler)[:8]
    assert int(state["batch"]) == 8
    if workers:
        assert (int(ahead["epoch"]), int(ahead["batch"])) == (1, 0), "drawn to the end, ahead of the loop"

    resumed = ClassBalanced(labels, 3, 2)
    resumed.load_state_dict(state)
    for step, (items,) in enumerate(loader(resumed), start=resumed.start):
        assert items.tolist() == sampler.batch(0, step)
    assert step == 9
    assert [items.tolist() for (items,) in loader(resumed)] == epoch_of(sampler, 1)


# --- ranks


@by_class
@pytest.mark.parametrize("split", ["classes", "items"])
@quick
@given(request=requests(divisible_by=2), seed=seeds)
def test_ranks_share_the_batch_of_a_single_process(name, split, request, seed):
    labels, classes, per_class = request
    world_size = 2
    single = make(name, labels, classes, per_class, seed)
    ranks = [make(name, labels, classes, per_class, seed, rank=r, world_size=world_size, split=split) for r in (0, 1)]
    assert all(len(rank) == len(single) for rank in ranks)
    for index, batch in enumerate(epoch_of(single)):
        parts = [rank.batch(0, index) for rank in ranks]
        assert sorted([*parts[0], *parts[1]]) == sorted(batch)
        if len(set(batch)) == len(batch):
            assert not set(parts[0]) & set(parts[1])
        ids = [set(labels[part]) for part in parts]
        if split == "classes":
            assert not ids[0] & ids[1]
            assert len(ids[0]) == len(ids[1]) == classes // world_size
        else:
            assert len(parts[0]) == len(parts[1])
            spread = [np.bincount(labels[part], minlength=labels.max() + 1) for part in parts]
            assert np.abs(spread[0] - spread[1]).max() <= 1


def test_four_ranks_with_whole_classes_are_about_as_full():
    labels = shuffled_labels([60] * 40)
    ranks = [ClassRatio(labels, 128, 0.25, rank=r, world_size=4) for r in range(4)]
    for index in range(len(ranks[0])):
        sizes = [len(rank.batch(0, index)) for rank in ranks]
        assert sum(sizes) == 128 and max(sizes) - min(sizes) <= 4


# --- evenness


@by_class
@quick
@given(request=requests(), seed=seeds, epoch=st.integers(0, 3))
def test_every_item_is_drawn_and_a_class_evenly(name, request, seed, epoch):
    labels, classes, per_class = request
    sampler = make(name, labels, classes, per_class, seed)
    used = uses(sampler, len(labels), epoch)
    assert (used[labels == -1] == 0).all()
    for label in set(labels) - {-1}:
        of_class = used[labels == label]
        assert of_class.max() - of_class.min() <= 1
        if name != "ClassRatio":
            assert of_class.min() >= 1


@pytest.mark.parametrize("name", CLASS_SAMPLERS)
def test_items_that_fit_are_drawn_exactly_once(name):
    labels = shuffled_labels([12] * 100, unknown=3)
    once = (uses(make(name, labels, 10, 2), len(labels))[labels >= 0] == 1).mean()
    assert once > 0.97 if name == "ClassRatio" else once == 1


@pytest.mark.parametrize("name", CLASS_SAMPLERS)
def test_evenness_of_usual_data_sets(name):
    """Measured: uneven classes of many items (birds), and of few (products)."""
    chance = np.random.default_rng(0)
    for counts, once in [(chance.integers(41, 61, 100), 0.96), (chance.integers(2, 13, 1000), 0.8)]:
        labels = shuffled_labels(counts)
        used = uses(make(name, labels, 32, 4), len(labels))
        assert used.min() == 1
        assert (used == 1).mean() > once
        assert (used > 2).mean() < 0.001 if name == "ClassRatio" else used.max() == 2


def test_a_class_too_large_is_in_every_batch_and_the_rest_comes_round_evenly():
    labels = shuffled_labels([400, *[8] * 9])
    for name in CLASS_SAMPLERS:
        sampler = make(name, labels, 4, 2)
        used = uses(sampler, len(labels))
        assert len(sampler) == 200
        assert all(0 in labels[batch] for batch in epoch_of(sampler))
        assert used[labels == 0].min() >= (1 if name != "ClassRatio" else 0) and used[labels == 0].max() <= 2
        other_samplers = used[labels > 0]
        assert other_samplers.min() >= 12 and other_samplers.max() <= 22  # 3 × 2 × 200 draws of 72 items: 16.7


def test_short_epochs_walk_through_a_pass():
    labels = shuffled_labels([12] * 20)
    short, single = ClassBalanced(labels, 10, 2, batches=5), ClassBalanced(labels, 10, 2)
    walked = [short.batch(epoch, index) for epoch in range(12) for index in range(5)]
    assert walked == [single.batch(epoch, index) for epoch in range(5) for index in range(12)]


def test_classes_meet_all_others():
    """Chance is chance: over some epochs any two classes share a batch about as often as any other two."""
    labels = shuffled_labels([8] * 16)
    sampler = ClassBalanced(labels, 4, 2)
    meet = np.zeros((16, 16))
    for epoch in range(200):
        for batch in epoch_of(sampler, epoch):
            ids = labels[batch][::2] // 3
            meet[np.ix_(ids, ids)] += 1
    pairs = meet[np.triu_indices(16, 1)]
    assert abs(pairs.mean() - 200 * 16 * 6 / 120) < 1e-9  # 160
    assert pairs.min() > 110 and pairs.max() < 210


def test_the_random_rest_is_even():
    sampler = LabelNeighbours(np.random.default_rng(0).standard_normal(300), 30, 3)
    rest = np.bincount(np.concatenate([batch[4:] for batch in epoch_of(sampler)]), minlength=300)
    assert abs(rest.mean() - 26) < 1e-9
    assert rest.std() < 2.5  # 4.9 if every batch drew for itself
    assert rest.min() >= 17


# --- mining


def unit_grid(rows):
    rows = np.asarray(rows, np.float64)
    return np.round(rows / np.linalg.norm(rows, axis=1, keepdims=True) * 2048).astype(np.int64)


def test_hard_classes_are_the_nearest_with_turns_left():
    labels = shuffled_labels([4] * 30)
    embeddings = embeddings_of(len(labels))
    sampler = HardClasses(labels, 5, 2)
    assert epoch_of(sampler, 1) == epoch_of(ClassBalanced(labels, 5, 2), 1), "random before the first refresh"
    sampler.refresh(embeddings)
    means = unit_grid([embeddings[labels == label].double().mean(0).numpy() for label in sampler.class_ids])
    similarity = means @ means.T
    left = np.full(30, 2)
    for batch in epoch_of(sampler)[:-2]:  # in the last two some classes are due
        ids = np.unique(labels[batch] // 3)

        def nearest(seed, left=left):
            score = np.where(left > 0, similarity[seed], -np.inf)
            score[seed] = np.inf
            return sorted(np.argsort(-score, kind="stable")[:5])

        assert any(nearest(seed) == ids.tolist() for seed in ids)
        left[ids] -= 1
    assert left.sum() == 2 * 5 and left.min() >= 0


def greedy_by_hand(similarity, first, count):
    chosen = [first]
    while len(chosen) < count:
        score = similarity[chosen].max(0).astype(float)
        score[chosen] = -np.inf
        chosen.append(int(score.argmax()))
    return sorted(chosen)


def test_pairs_are_mined_greedily():
    labels = shuffled_labels([40] * 24)
    sampler = PairPerClass(labels, 6, candidates=5000)  # all classes are candidates
    class_embeddings = embeddings_of(24)
    sampler.refresh(class_embeddings)
    unit = unit_grid(class_embeddings.numpy())
    expected = {tuple(greedy_by_hand(unit @ unit.T, first, 6)) for first in range(24)}
    batches = epoch_of(sampler)
    mined = [tuple(np.unique(labels[batch] // 3)) in expected for batch in batches]
    assert all(mined[: len(mined) // 8])
    assert set(uses(sampler, len(labels))) == {1}, "mining does not change how often an item is drawn"


@pytest.mark.parametrize("kind", [HardClasses, PairPerClass])
def test_mined_batches_hold_nearer_classes(kind):
    labels = shuffled_labels([6] * 200)
    mined, plain = kind(labels, 10), kind(labels, 10)
    groups = embeddings_of(20).repeat_interleave(10, 0) + 0.1 * embeddings_of(200, 1)  # 20 families of 10 classes
    mined.refresh(groups if kind is PairPerClass else groups[labels // 3])

    def same_family(sampler):
        each = len(sampler.batch(0, 0)) // 10
        family = np.array([np.sort(labels[batch][::each] // 30) for batch in epoch_of(sampler)])
        return (np.diff(family, axis=1) == 0).mean()

    assert same_family(plain) < 0.4
    assert same_family(mined) > 0.8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_similarities_of_classes_are_exact(dtype):
    """Whole numbers below 2^24: float32 adds them without rounding, in any order, so machines cannot differ."""
    rows = (embeddings_of(50, dim=512) * torch.logspace(-3, 3, 50)[:, None]).to(dtype)
    rows[7] = 0
    rows[8] = torch.finfo(dtype).tiny
    sampler = make("PairPerClass", np.arange(50).repeat(2), 5, 2)
    sampler.refresh(rows)
    unit = sampler.state_dict()["class_embeddings"]
    assert unit.dtype == torch.int16 and not unit[7].any()
    single = unit.long() @ unit.long().T
    assert (unit.long().abs() @ unit.long().abs().T).max() < 2**24
    assert torch.equal(single, (unit.float() @ unit.float().T).long())
    other_samplers = torch.arange(50) != 7
    torch.testing.assert_close(single.diagonal()[other_samplers] / 2048**2, torch.ones(49), atol=2e-2, rtol=0)


def test_read_only_and_unknown_rows():
    labels = shuffled_labels([6] * 20, unknown=4)
    embeddings = embeddings_of(124).numpy()
    embeddings[labels == -1] = np.nan
    embeddings.flags.writeable = False
    sampler = HardClasses(labels, 5, 2)
    sampler.refresh(embeddings)
    assert len(epoch_of(sampler)) == 12


# --- long tails


def long_tail(items, classes, largest):
    """Class sizes from `largest` down to 1 by a power law."""
    rank = np.arange(1, classes + 1)
    low, high = 0.0, 3.0
    for _ in range(50):
        power = (low + high) / 2
        counts = np.maximum(1, (largest * rank**-power).astype(np.int64))
        low, high = (power, high) if counts.sum() > items else (low, power)
    counts[1:1000] += (items - counts.sum()) // 999
    counts[0] = largest
    return counts


@pytest.mark.parametrize("name", ["ClassBalanced", "ClassRatio", "PairPerClass", "HardClasses"])
def test_a_long_tail_builds_in_seconds_and_bounded_memory(name):
    counts = long_tail(1_000_000, 100_000, 10_000)
    counts[-1000:] = 1
    labels = np.repeat(np.arange(100_000), counts)
    assert labels.size > 990_000 and counts.max() == 10_000 and counts.min() == 1
    start = time.perf_counter()
    sampler = make(name, labels, 32, 4)
    first = sampler.batch(0, 0)
    assert time.perf_counter() - start < 10
    assert len(np.unique(labels[first])) == 32
    tracemalloc.start()
    make(name, labels, 32, 4).batch(1, 0)
    assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    tracemalloc.stop()
    if name == "ClassBalanced":
        used = uses(sampler, len(labels))
        assert used.min() == 1 and (used > 4).mean() < 0.001 and (used <= 2).mean() > 0.9


@pytest.mark.parametrize("name", ["PairPerClass", "HardClasses"])
def test_mining_100_000_classes_holds_no_square(name):
    labels = np.arange(200_000) % 100_000
    sampler = make(name, labels, 32, 2)
    rows = embeddings_of(100_000 if name == "PairPerClass" else 200_000, dim=16)
    tracemalloc.start()
    start = time.perf_counter()
    sampler.refresh(rows)
    for index in range(5):
        assert len(np.unique(labels[sampler.batch(0, index)])) == 32
    assert time.perf_counter() - start < 10
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("targets", [np.arange(300_000) % 977 / 7, np.zeros(300_000), np.ones((300_000, 4))])
def test_many_targets_hold_no_square(targets):
    tracemalloc.start()
    sampler = LabelNeighbours(targets)
    batch = sampler.batch(0, 200_000)
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()
    assert batch[1:6] == brute_neighbours(targets, batch[0], 5).tolist()


# --- bad requests


def test_small_classes_are_said_once():
    labels = np.repeat(np.arange(5), [1, 2, 3, 4, 5])
    with pytest.warns(
        UserWarning, match=r"^3 of 5 classes have fewer than 4 items; their items are repeated"
    ) as warnings_:
        sampler = ClassBalanced(labels, 2, 4)
    assert len(warnings_) == 1
    assert warnings_[0].filename == __file__
    epoch_of(sampler)  # says nothing more
    with pytest.warns(UserWarning, match="1 of 5 classes have fewer than 2 items"):
        PairPerClass(labels, 3)
    ClassBalanced(labels, 2, 4, rank=1, world_size=2)  # only rank 0 says it


CLASSES = "classes must be at most the number of classes with items"
NONE = "labels must hold at least one item of a known class"
TWO = [0, 0, 1, 1]
BAD = [
    (lambda: ClassBalanced(np.arange(10), 32, 1), f"{CLASSES}: 10, got 32"),
    (lambda: ClassBalanced([0, 0, -1, -1], 2), f"{CLASSES}: 1, got 2"),
    (lambda: ClassBalanced([-1, -1]), f"{NONE}, got 2 items and no class"),
    (lambda: ClassBalanced([]), f"{NONE}, got 0 items and no class"),
    (lambda: ClassBalanced([0, -2], 1), "labels must be >= 0, or -1 for unknown, got -2"),
    (lambda: ClassBalanced([TWO], 1), "labels must be one-dimensional, got shape (1, 4)"),
    (lambda: ClassBalanced([0.0, 1.0], 1), "labels must be integers, got float64"),
    (lambda: ClassBalanced(torch.tensor([True]), 1), "labels must be integers, got bool"),
    (lambda: ClassBalanced(TWO, 0), "classes must be >= 1, got 0"),
    (lambda: ClassBalanced(TWO, 1.5), "classes must be a whole number, got 1.5"),
    (lambda: ClassBalanced(TWO, 1, 0), "per_class must be >= 1, got 0"),
    (lambda: ClassBalanced(TWO, 1, 1, -1), "seed must be >= 0, got -1"),
    (lambda: ClassBalanced(TWO, 1, 1, 2**64), f"seed must be at most the largest allowed: {2**63 - 1}, got {2**64}"),
    (lambda: ClassBalanced(TWO, 1, 1, 0, 2, 2), "rank must be below world_size: 2, got 2"),
    (lambda: ClassBalanced(TWO, 1, 1, 0, 0, 0), "world_size must be >= 1, got 0"),
    (
        lambda: ClassBalanced([0, 1, 2], 3, 2, world_size=2),
        'classes must be a multiple of world_size with split="classes": 2, got 3',
    ),
    (
        lambda: ClassBalanced([0, 1, 2], 3, 1, world_size=2, split="items"),
        'classes * per_class must be a multiple of world_size with split="items": 2, got 3',
    ),
    (
        lambda: ClassBalanced(TWO, 1, 1, split="item"),
        'unknown split "item"; did you mean "items"? known: classes, items',
    ),
    (lambda: ClassBalanced(TWO, 1, 1, batches=0), "batches must be >= 1, got 0"),
    (lambda: ClassBalanced(TWO, 1, 2).batch(0, 2), "index must be at most the last batch of an epoch: 1, got 2"),
    (lambda: ClassBalanced(TWO, 1, 2).resume(0, 3), "batch must be at most the batches of an epoch: 2, got 3"),
    (lambda: ClassBalanced(TWO, 1, 2).state_dict(3), "batches_done must be at most the batches of an epoch: 2, got 3"),
    (lambda: ClassRatio(TWO, 4, 0.0), "ratio must be > 0, got 0.0"),
    (lambda: ClassRatio(TWO, 4, 1.01), "ratio must be <= 1 (it is a share of batch_size), got 1.01"),
    (lambda: ClassRatio(TWO, 4, float("nan")), "ratio must be finite, got nan"),
    (lambda: ClassRatio(TWO, 4, 1.0), f"ratio * batch_size{CLASSES.removeprefix('classes')}: 2, got 4"),
    (lambda: PairPerClass(TWO), f"{CLASSES}: 2, got 64"),
    (lambda: PairPerClass(TWO, 2, candidates=1), "candidates must be >= 2, got 1"),
    (
        lambda: PairPerClass(TWO, 2).refresh(torch.ones(3, 2)),
        "class_embeddings must have one row per class: 2, got 3",
    ),
    (
        lambda: PairPerClass(TWO, 2).refresh(torch.tensor([[1.0], [float("nan")]])),
        "class_embeddings must be finite, got NaN or Inf in 1 classes",
    ),
    (lambda: HardClasses(TWO, 2, 2).refresh(np.ones((2, 2))), "embeddings must have one row per item: 4, got 2"),
    (lambda: HardClasses([0, 0], 1, 2).refresh([[1.0], [1.0]]), "embeddings must be a torch tensor, got list"),
    (lambda: LabelNeighbours(np.arange(10)), "batch_size must be at most the number of items: 10, got 150"),
    (
        lambda: LabelNeighbours(np.arange(10), 5),
        "neighbours must be at most what batch_size leaves beside the anchor: 4, got 5",
    ),
    (lambda: LabelNeighbours(np.arange(10), 5, anchors=0), "anchors must be >= 1, got 0"),
    (lambda: LabelNeighbours([]), "batch_size must be at most the number of items: 0, got 150"),
    (lambda: LabelNeighbours(np.arange(10), 5, 0, anchors=6), "anchors must be at most batch_size: 5, got 6"),
    (
        lambda: LabelNeighbours(np.arange(10), 8, 2, anchors=4),
        "neighbours must be at most what batch_size leaves beside each of 4 anchors: 1, got 2",
    ),
    (
        lambda: HardNegatives([0, 1, 2], 2),
        "labels must hold at least 2 classes, one of them with 2 items or more, got 3 classes, the largest of 1 items",
    ),
    (lambda: HardNegatives(TWO, 5), "batch_size must be at most the number of items of known classes: 4, got 5"),
    (lambda: HardNegatives(TWO, 4, 3), "pairs must be at most half of batch_size: 2, got 3"),
    (lambda: HardNegatives([0, 0, 1, 2], 4, 2), "pairs must be at most the positive pairs of a pass: 1, got 2"),
    (lambda: HardNegatives(TWO, 4, candidates=3), "candidates must be >= 4, got 3"),
    (lambda: HardNegatives(TWO, 4, neighbours=-1), "neighbours must be >= 0, got -1"),
    (lambda: HardNegatives(TWO, 4, guard=-0.1), "guard must be >= 0, got -0.1"),
    (
        lambda: HardNegatives(TWO, 4).refresh(torch.ones(4, 2), torch.ones(4, 1).long()),
        "neighbours must be left out of refresh where the sampler has neighbours=0, got lists",
    ),
    (
        lambda: HardNegatives(TWO, 4, neighbours=2).refresh(torch.ones(4, 2)),
        "neighbours must be lists of 2 items, as evaluation.nearest_negatives(embeddings, labels, k=2) finds them, "
        "got None",
    ),
    (
        lambda: HardNegatives(TWO, 4, neighbours=2).refresh(torch.ones(4, 2), torch.ones(4, 1).long()),
        "neighbours must be whole numbers of shape (4, 2), got int64 (4, 1)",
    ),
    (
        lambda: HardNegatives(TWO, 4, neighbours=1).refresh(torch.ones(4, 2), torch.ones(4, 1)),
        "neighbours must be whole numbers of shape (4, 1), got float32 (4, 1)",
    ),
    (
        lambda: HardNegatives(TWO, 4, neighbours=1).refresh(torch.ones(4, 2), torch.tensor([[2], [4], [0], [0]])),
        "neighbours must be items in 0..3, or -1 for none, got 4",
    ),
    (
        lambda: HardNegatives(TWO, 4, neighbours=1).refresh(torch.ones(4, 2), torch.tensor([[-1], [0], [0], [0]])),
        "neighbours must be of known classes other than their item's, got others for item 1",
    ),
    (lambda: HardNegatives(TWO, 4).refresh(torch.ones(3, 2)), "embeddings must have one row per item: 4, got 3"),
    (
        lambda: HardNegatives(TWO, 4).refresh(torch.full((4, 2), float("nan"))),
        "embeddings must be finite, got NaN or Inf in 4 items",
    ),
    (
        lambda: HardNegatives(TWO, 3, 1, world_size=2),
        'batch_size must be a multiple of world_size with split="items": 2, got 3',
    ),
    (lambda: LabelNeighbours([1.0, float("inf")], 2, 1), "targets must be finite, got NaN or Inf in 1 items"),
    (lambda: LabelNeighbours(["a", "b"], 2, 1), "targets must be real numbers, got <U1"),
    (
        lambda: LabelNeighbours(np.ones((2, 2, 2)), 2, 1),
        "targets must have shape (items,) or (items, K), got (2, 2, 2)",
    ),
    (
        lambda: LabelNeighbours(np.arange(10), 5, 1, world_size=2),
        'batch_size must be a multiple of world_size with split="items": 2, got 5',
    ),
]


@pytest.mark.parametrize("call, sentence", BAD, ids=[sentence[:40] for _, sentence in BAD])
def test_bad_requests_are_answered_in_one_sentence(call, sentence):
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(sentence)}$"):
        call()


# --- groups


def groups_for(labels, most, seed=0):
    """A few groups within each class, some items in none."""
    return np.random.default_rng(seed).integers(-1, most, len(labels))


GROUPED = ["ClassBalanced", "PairPerClass", "PairPerClass+", "HardClasses", "HardClasses+"]


@pytest.mark.parametrize("name", GROUPED)
@quick
@given(request=requests(), seed=seeds, most=st.integers(1, 6))
def test_items_of_a_class_are_of_different_groups_as_far_as_possible(name, request, seed, most):
    """Over the turns of each class in a pass, by an exact count of the best division."""
    labels, classes, per_class = request
    groups = groups_for(labels, most)
    each = 2 if name.startswith("PairPerClass") else per_class
    sampler = make(name, labels, classes, per_class, seed, groups=groups)
    plain = make(name, labels, classes, per_class, seed)
    assert len(sampler) == len(plain)
    drawn, turns, repeated = np.zeros(len(labels), int), Counter(), Counter()
    alone = np.where(groups < 0, groups.max() + 1 + np.arange(len(groups)), groups)
    for batch in epoch_of(sampler):
        np.add.at(drawn, batch, 1)
        for at in range(0, len(batch), each):
            items = np.array(batch[at : at + each])
            assert len(set(labels[items])) == 1
            assert len(set(items.tolist())) == min(each, int((labels == labels[items[0]]).sum()))
            turns[labels[items[0]]] += 1
            repeated[labels[items[0]]] += each - len(set(alone[items]))
    assert (drawn[labels >= 0] >= 1).all() and (drawn[labels < 0] == 0).all(), "every item is drawn"
    for c, number in turns.items():
        sizes = np.unique(alone[labels == c], return_counts=True)[1]
        # A group of more items than turns meets itself, and so do groups where a turn has more items than there are.
        assert repeated[c] == max(np.maximum(sizes - number, 0).sum(), number * (each - min(each, len(sizes))))


def test_items_of_a_class_with_groups_are_drawn_as_evenly_as_their_groups_allow():
    """10 draws in 5 turns of 2: those of the small group first, once a turn at most; what is left goes to all."""
    draws = schedule._draws(np.array([1, 6]), 5, 10)
    assert draws.tolist() == [4, 1, 1, 1, 1, 1, 1]
    assert schedule._draws(np.array([2, 6]), 6, 12).tolist() == [3, 3, 1, 1, 1, 1, 1, 1]
    assert schedule._draws(np.array([2, 2]), 3, 12).tolist() == [3, 3, 3, 3]
    assert schedule._draws(np.array([3, 1, 2]), 2, 8).tolist() == [2, 1, 1, 2, 1, 1]
    assert schedule._draws(np.array([4, 1]), 2, 8).tolist() == [2, 2, 1, 1, 2]


@pytest.mark.parametrize("name", GROUPED)
def test_pairs_cross_groups_where_both_have_as_many_items(name):
    """Two cameras of equal size: every pair has one item of each; plain batches do not."""
    labels, groups = np.repeat(np.arange(10), 12), np.tile([0, 0, 0, 1, 1, 1], 20)
    for grouped in (groups, None):
        sampler = make(name, labels, 5, 2, groups=grouped)
        pairs = np.concatenate([np.array(batch).reshape(-1, 2) for batch in epoch_of(sampler)])
        crossed = groups[pairs[:, 0]] != groups[pairs[:, 1]]
        assert crossed.all() == (grouped is not None)


def test_the_last_turn_is_filled_up_from_other_groups():
    labels, groups = np.repeat([0, 1], 5), np.tile([0, 0, 0, 1, 2], 2)
    for seed in range(20):
        sampler = ClassBalanced(labels, 2, 2, seed, groups=groups)
        for batch in epoch_of(sampler):
            for pair in np.array(batch).reshape(-1, 2):
                assert groups[pair[0]] != groups[pair[1]]


def test_groups_are_checked_and_a_class_of_one_group_is_named():
    labels = np.repeat([0, 1, 2], 4)
    with pytest.raises(ValueError, match="groups must have one entry per item: 12 items"):
        ClassBalanced(labels, 2, 2, groups=[0, 1])
    with pytest.raises(TypeError, match="groups must be integers"):
        ClassBalanced(labels, 2, 2, groups=np.zeros(12))
    with pytest.raises(ValueError, match="groups must be >= 0, or -1"):
        ClassBalanced(labels, 2, 2, groups=np.full(12, -2))
    with pytest.warns(UserWarning, match="1 of 3 classes have items of one group only"):
        ClassBalanced(labels, 2, 2, groups=[0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 2, 3])
