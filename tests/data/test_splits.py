"""Parts that share no class, for all kinds of sets; and their inspection before training."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin import data

PARTS = ("train", "val", "test")


def items_of(sizes, split=None, targets=None, closed_split=None, name="photos/"):
    """A set whose classes have these sizes: {name: size}."""
    labels = np.repeat(np.arange(len(sizes)), list(sizes.values())).astype(np.int64)
    names = [f"{kind}/{i}.jpg" for kind, size in sizes.items() for i in range(size)]
    return data.Items(
        name,
        names,
        list(sizes),
        labels,
        targets,
        split=split,
        closed_split=closed_split,
        vectors=np.zeros((len(names), 2)),
    )


def many(count, size=3):
    return {f"kind {c}": size for c in range(count)}


def classes(items, of):
    return {items.classes[c] for c in items.labels[of]}


def together(parts):
    return np.concatenate([parts.train, parts.val, parts.test])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(2, 9), min_size=6, max_size=40),
    st.integers(0, 2**40),
    st.floats(0.01, 0.99),
    st.floats(0.01, 0.99),
)
def test_no_class_is_in_two_parts(sizes, seed, val, test):
    items = items_of({f"k{c}": size for c, size in enumerate(sizes)})
    parts = data.divide(items, seed=seed, val=val, test=test)
    assert sorted(together(parts)) == list(range(len(items)))
    kinds = [classes(items, getattr(parts, part)) for part in PARTS]
    assert sum(map(len, kinds)) == len(sizes) == len(set.union(*kinds))
    assert all(len(kind) >= 2 for kind in kinds)
    again = data.divide(items, seed=seed, val=val, test=test)
    assert all(np.array_equal(getattr(parts, part), getattr(again, part)) for part in PARTS)


def test_sizes_and_seeds():
    items = items_of(many(100))
    parts = data.divide(items)
    assert [len(classes(items, getattr(parts, part))) for part in PARTS] == [60, 15, 25]
    assert parts.gallery is None and parts.note.startswith(
        "seeded, no class in two parts (seed 0): train 180 items of 60"
    )
    assert classes(items, data.divide(items, seed=1).test) != classes(items, parts.test)


@pytest.mark.parametrize("closed", [False, True])
def test_the_order_of_items_does_not_matter(closed):
    items = items_of(many(40, 8))
    moved = items.take(np.random.default_rng(0).permutation(len(items)))
    one, two = (data.divide(some, closed=closed) for some in (items, moved))
    for part in PARTS:
        assert {items.names[i] for i in getattr(one, part)} == {moved.names[i] for i in getattr(two, part)}


def test_one_class_more_moves_few():
    parts, larger = (data.divide(items_of(many(n))) for n in (60, 61))
    a, b = items_of(many(60)), items_of(many(61))
    for part in PARTS:
        assert len(classes(a, getattr(parts, part)) ^ classes(b, getattr(larger, part))) <= 4


# Official splits


def test_official_split_with_validation_from_training():
    items = items_of(many(20), split=["train"] * 30 + ["test"] * 30)
    parts = data.divide(items)
    assert parts.test.tolist() == list(range(30, 60)) and len(classes(items, parts.val)) == 2
    assert (
        not classes(items, parts.train) & classes(items, parts.val)
        and "official split; validation classes" in parts.note
    )
    other = data.divide(items, official=False)
    assert other.test.tolist() != parts.test.tolist() and other.note.startswith("seeded")


def test_official_validation_is_kept_and_two_parts_are_train_and_test():
    items = items_of(many(9), split=["train"] * 9 + ["val"] * 9 + ["test"] * 9)
    assert [getattr(data.divide(items), part).tolist() for part in PARTS] == [list(range(a, a + 9)) for a in (0, 9, 18)]
    two = items_of(many(9), split=["train"] * 15 + ["val"] * 12)
    parts = data.divide(two)
    assert (
        parts.test.tolist() == list(range(15, 27))
        and len(classes(two, parts.val)) == 2
        and "its val part" in parts.note
    )
    assert "seeded" in data.divide(items_of(many(9), split=["train"] * 27)).note


def test_query_and_gallery():
    split = ["train"] * 24 + (["query", "gallery", "gallery"] * 4)
    items = items_of(many(12), split=split)
    parts = data.divide(items)
    assert parts.test.tolist() == [24, 27, 30, 33] and parts.gallery.tolist() == [25, 26, 28, 29, 31, 32, 34, 35]
    assert "gallery 8 items of 4 classes" in parts.note
    with pytest.raises(ValueError, match="query items and no gallery"):
        data.divide(items_of(many(12), split=["train"] * 24 + ["query"] * 12))


def test_official_closed_split():
    items = items_of(many(4, 10), split=(["train"] * 8 + ["test"] * 2) * 4)
    parts = data.divide(items)
    assert parts.test.tolist() == [8, 9, 18, 19, 28, 29, 38, 39]
    assert classes(items, parts.train) == classes(items, parts.val) == classes(items, parts.test)
    assert "share classes" in parts.note and len(parts.val) == 8
    birds = items_of(
        many(20, 6), split=["train"] * 60 + ["test"] * 60, closed_split=(["train"] * 4 + ["test"] * 2) * 20
    )
    closed = data.divide(birds, closed=True)
    assert classes(birds, closed.test) == set(birds.classes) and (closed.test % 6 >= 4).all() and len(closed.test) == 40
    assert "seeded, every class" in data.divide(items_of(many(20, 6), split=birds.split), closed=True).note


@pytest.mark.parametrize(
    "split, sentence",
    [
        (["val"] * 9 + ["test"] * 9, r"its split has no train items; its parts are test, val"),
        (["train"] * 15 + ["test"] * 3, r"the test part of its split needs at least 2 classes, got 1"),
        (["train"] * 9 + ["test"] * 9, r"training and validation need at least 4 classes to share out, got 3"),
    ],
)
def test_bad_official_splits(split, sentence):
    with pytest.raises(ValueError, match=sentence):
        data.divide(items_of(many(6), split=split))


# By items


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(2, 30), min_size=2, max_size=20),
    st.integers(0, 99),
    st.floats(0.01, 0.99),
    st.floats(0.01, 0.99),
)
def test_closed_parts_hold_every_class_that_is_big_enough(sizes, seed, val, test):
    items = items_of({f"k{c}": size for c, size in enumerate(sizes)})
    if sum(size >= 6 for size in sizes) < 2:
        with pytest.raises(ValueError, match="at least 2 classes of 6 items or more"):
            data.divide(items, seed=seed, closed=True, val=val, test=test)
        return
    parts = data.divide(items, seed=seed, closed=True, val=val, test=test)
    assert sorted(together(parts)) == list(range(len(items)))
    for part in ("val", "test"):
        counts = np.bincount(items.labels[getattr(parts, part)], minlength=len(sizes))
        assert all((count >= 2) == (size >= 6) for count, size in zip(counts, sizes, strict=True))
        assert set(counts[np.array(sizes) < 6]) <= {0}
    assert (np.bincount(items.labels[parts.train]) >= 2).all()


def test_targets_only_and_targets_with_classes():
    names = [f"{i}.jpg" for i in range(100)]
    items = data.Items("ages.csv", names, targets=np.arange(100.0), vectors=np.zeros((100, 2)))
    parts = data.divide(items)
    assert [len(getattr(parts, part)) for part in PARTS] == [60, 15, 25] and sorted(together(parts)) == list(range(100))
    given_split = data.Items("a", names, targets=np.arange(100.0), split=["train"] * 80 + ["test"] * 20)
    assert data.divide(given_split).test.tolist() == list(range(80, 100)) and len(data.divide(given_split).val) == 16
    both = items_of(many(20), targets=np.arange(60.0))
    parts = data.divide(both)
    assert not classes(both, parts.train) & classes(both, parts.test)
    for share in (0.01, 0.5, 0.99):
        parts = data.divide(items.take(np.arange(6)), val=share, test=share)
        assert all(len(getattr(parts, part)) == 2 for part in PARTS)
    with pytest.raises(ValueError, match="at least 6 items to be divided, got 5"):
        data.divide(items.take(np.arange(5)))


# Too little


def test_single_images():
    items = items_of({**many(8), "heron": 1, "ibis": 1, "jay": 1, "kite": 1})
    sentence = (
        "photos/: 4 classes have a single item (heron, ibis, jay, …); training needs at least 2 per class. "
        "Use --skip-single to leave them out"
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        data.divide(items)
    parts = data.divide(items, skip_single=True)
    assert len(together(parts)) == 24 and "heron" not in classes(items, together(parts))
    with pytest.raises(ValueError, match=r"each of its 7 classes has a single item"):
        data.divide(items_of(many(7, 1)), skip_single=True)
    pictures = data.Items(
        "p", ["a", "b", "c"], ["x", "y"], np.array([0, 0, 1]), pictures=data.Arrays(np.zeros((3, 1, 1), np.uint8))
    )
    with pytest.raises(ValueError, match=r"1 class has a single image \(y\).*leave it out"):
        data.divide(pictures)


def test_single_images_in_a_part():
    items = items_of(many(12), split=["train"] * 22 + ["test"] * 14)
    with pytest.raises(ValueError, match=r"1 class has a single item in training \(kind 7\)"):
        data.divide(items)
    parts = data.divide(items, skip_single=True)
    assert 21 not in parts.train and len(parts.test) == 14


@pytest.mark.parametrize(
    "sizes, sentence",
    [
        ({}, "photos/: it has no items"),
        ({"heron": 9}, r"photos/: it has one class \(heron\) that can be used; at least 2 classes are needed"),
        (many(5), r"need at least 6 classes to share out, got 5. Use --closed"),
    ],
)
def test_too_little(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        data.divide(items_of(sizes))


@pytest.mark.parametrize(
    "wrong", [{"val": 0}, {"val": 1.0}, {"test": -0.1}, {"test": float("nan")}, {"seed": -1}, {"seed": 0.5}]
)
def test_bad_settings(wrong):
    with pytest.raises((ValueError, TypeError), match=f"^{next(iter(wrong))} must be"):
        data.divide(items_of(many(9)), **wrong)


# Inspection


def test_inspection():
    items = items_of({**many(8), "big": 7})
    parts = data.divide(items)
    digests = [str(i) for i in range(len(items))]
    a, b, c = int(parts.train[0]), int(parts.test[0]), int(parts.train[1])
    digests[b] = digests[c] = digests[a]
    bad = int(parts.val[0])
    digests[bad] = digests[a]  # unreadable: all zeros, no duplicate
    report = data.inspect(items, parts, digests, [(bad, "is cut off")])
    assert json.loads(json.dumps(report)) == report
    assert (report["items"], report["classes"], report["largest"]) == (31, 9, {"class": "big", "items": 7})
    assert {part: sizes["items"] for part, sizes in report["parts"].items()} == {
        p: len(getattr(parts, p)) for p in PARTS
    }
    assert report["unreadable"] == [{"name": items.names[bad], "reason": "is cut off"}]
    duplicates = report["duplicates"]
    assert (duplicates["across"]["pairs"], duplicates["within"]["pairs"]) == (2, 1)
    assert [items.names[a], "train", items.names[b], "test"] in duplicates["across"]["shown"]
    text = "\n".join(data.lines(report))
    assert (
        "31 items, 9 classes of 3 (kind 0) to 7 (big)" in text
        and "2 pairs of exact duplicates in different parts" in text
    )
    assert f"{items.names[bad]}: is cut off" in text and "3 each" in text
    assert "duplicates" not in data.inspect(items, parts)
    with pytest.raises(ValueError, match="one entry per item: 31 items, 1 digests"):
        data.inspect(items, parts, ["x"])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_duplicates_are_counted_as_a_slow_loop_counts_them(draw):
    items = items_of(many(8))
    parts = data.divide(items, skip_single=True)
    digests = draw.draw(st.lists(st.sampled_from("abcd"), min_size=24, max_size=24))
    part_of = {int(i): part for part in PARTS for i in getattr(parts, part)}
    across = within = other = 0
    for i in range(24):
        for j in range(i):
            if digests[i] == digests[j]:
                across += part_of[i] != part_of[j]
                within += part_of[i] == part_of[j]
                other += int(items.labels[i] != items.labels[j])
    duplicates = data.inspect(items, parts, digests)["duplicates"]
    assert (duplicates["across"]["pairs"], duplicates["within"]["pairs"], duplicates["other_class"]) == (
        across,
        within,
        other,
    )
    assert all(p[1] != p[3] for p in duplicates["across"]["shown"]) and bool(duplicates["across"]["shown"]) == (
        across > 0
    )


def test_many_copies_are_counted_not_listed():
    items = items_of(many(10, 400))
    duplicates = data.inspect(items, data.divide(items), ["same"] * len(items))["duplicates"]
    assert duplicates["across"]["pairs"] + duplicates["within"]["pairs"] == 4000 * 3999 // 2
    assert len(duplicates["across"]["shown"]) <= 20
