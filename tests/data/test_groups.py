"""Groups beside classes: from columns and file names, and splits that keep them whole."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from nearkin import data
from nearkin.data import groups as grouping
from nearkin.data import vector_files, vectors
from nearkin.data.item_set import Items


def photos(folder, names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    return folder


NAMES = [
    f"{kind}/{kind}_c{camera}s1_{number}.png" for kind in ("gull", "heron") for camera in (1, 2) for number in (7, 8)
]


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("*_c{group}s*", ["1", "1", "2", "2"]),
        ("{group}_c*", ["gull"] * 4),
        ("gull/*_{group}s1_*", None),  # heron/ does not match
        ("{group}/*_c*", ["gull"] * 4),
        (r"_c(?P<group>\d)", ["1", "1", "2", "2"]),
        (r"(?P<group>.+)_\d+\.png$", ["gull/gull_c1s1", "gull/gull_c1s1", "gull/gull_c2s1", "gull/gull_c2s1"]),
    ],
)
def test_a_pattern_finds_groups_in_names(tmp_path, pattern, expected):
    photos(tmp_path / "birds", NAMES)
    if expected is None:
        with pytest.raises(ValueError, match=r"must match the names of all items, it matches only 4 of 8; not heron/"):
            data.load(tmp_path / "birds", group_pattern=pattern)
        return
    items = data.load(tmp_path / "birds", group_pattern=pattern)
    assert items.groups[:4] == expected
    assert items.take([5, 0]).groups == [items.groups[5], items.groups[0]]


@pytest.mark.parametrize(
    "pattern, sentence",
    [
        (
            "*_x{group}_*",
            r"it matches none of 8; not gull/gull_c1s1_7.png, gull/gull_c1s1_8.png, gull/gull_c2s1_7.png, …",
        ),
        ("c1", r"group_pattern must have \{group\} once"),
        ("{group}_{group}", r"group_pattern must have \{group\} once"),
        ("{class}_c{group}_*", r"group_pattern must have \{group\} once, and \* for any other text"),
        (r"(?P<group>[", r"group_pattern must be a regular expression, got"),
        ("{group}.png", r"would have no effect: it gives each of the 8 items a group of its own"),
    ],
)
def test_a_wrong_pattern_is_refused_in_a_sentence(tmp_path, pattern, sentence):
    photos(tmp_path / "birds", NAMES)
    with pytest.raises(ValueError, match=sentence):
        data.load(tmp_path / "birds", group_pattern=pattern)


def test_columns_are_for_tables_and_one_of_both_is_given(tmp_path):
    photos(tmp_path / "birds", NAMES)
    with pytest.raises(ValueError, match="group_column is for tables and files of vectors, got"):
        data.load(tmp_path / "birds", group_column="camera")
    with pytest.raises(ValueError, match="group_column is for tables and files of vectors, got"):
        data.load("glyphs", group_column="camera")
    with pytest.raises(ValueError, match="exclude each other"):
        data.load(tmp_path / "birds", group_column="camera", group_pattern="{group}*")


def table(folder, heading, rows):
    photos(folder, [row.split(",")[0] for row in rows])
    (folder / "t.csv").write_text("\n".join([heading, *rows]))
    return folder / "t.csv"


def test_a_table_has_a_group_column(tmp_path):
    path = table(tmp_path, "path,label,Group,day", ["a.png,x,1,mon", "b.png,x,2,mon", "c.png,y,1,tue", "d.png,y,1,tue"])
    assert data.load(path).groups == ["1", "2", "1", "1"]
    assert data.load(path, group_column="Day").groups == ["mon", "mon", "tue", "tue"]
    ignored = data.load(path, group_column="none")
    assert ignored.groups is None and any("group" in line for line in ignored.ignored)
    with pytest.raises(ValueError, match='no column "camera" among its columns'):
        data.load(path, group_column="camera")
    with pytest.raises(ValueError, match='group_column must be a column of its own, got "label"'):
        data.load(path, group_column="label")


def test_a_table_without_groups_is_as_before_and_empty_cells_are_refused(tmp_path):
    path = table(tmp_path, "path,label", ["a.png,x", "b.png,y"])
    assert data.load(path).groups is None
    with pytest.raises(ValueError, match="group_column would have no effect"):
        data.load(path, group_column="none")
    (tmp_path / "t.csv").write_text("path,label,group\na.png,x,1\nb.png,y,\n")
    with pytest.raises(ValueError, match=r'1 of 2 rows have no group in column "group" \(row 3\)'):
        data.load(path)
    (tmp_path / "t.csv").write_text("path,group,angle\na.png,1,0.5\nb.png,2,1.5\n")
    items = data.load(path)
    assert items.groups == ["1", "2"] and items.targets.tolist() == [0.5, 1.5]


X = np.arange(12, dtype=np.float32).reshape(6, 2)
LABELS = np.array([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize("ending", [".npz", ".safetensors", ".parquet"])
def test_vectors_with_groups_are_written_and_read(tmp_path, ending):
    path = tmp_path / f"x{ending}"
    names, of = [f"n{i}" for i in range(6)], ["a", "b", "a", "", "c", "c"]
    vector_files.write(path, torch.from_numpy(X), LABELS, None, names, ["k", "l", "m"], groups=of)
    assert vectors.read(path).groups.tolist() == of
    assert data.load(path).groups == of
    assert data.load(path, group_column="none").groups is None
    assert vectors.read(path, group_column="none").groups is None
    vector_files.write(path, torch.from_numpy(X), LABELS, None, names, ["k", "l", "m"])
    assert vectors.read(path).groups is None
    with pytest.raises(ValueError, match="group_column would have no effect"):
        data.load(path, group_column="none")
    with pytest.raises(ValueError, match='it has no entry "camera" for group_column'):
        data.load(path, group_column="camera")


def test_vectors_take_groups_from_other_entries_and_files(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=X, labels=LABELS, groups=np.array([5, 5, -1, 7, 7, 7]), camera=LABELS % 2)
    assert data.load(tmp_path / "x.npz").groups == ["5", "5", "", "7", "7", "7"]
    assert data.load(tmp_path / "x.npz", group_column="camera").groups == ["0", "0", "1", "1", "0", "0"]
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "g.csv").write_text("group\n" + "\n".join("aabbcc"))
    assert vectors.read(tmp_path / "x.npy", groups=tmp_path / "g.csv").groups.tolist() == list("aabbcc")
    np.save(tmp_path / "g.npy", np.zeros(5, int))
    with pytest.raises(ValueError, match="groups must have one entry per row of embeddings: 6 rows, 5 groups"):
        vectors.read(tmp_path / "x.npy", groups=tmp_path / "g.npy")
    np.save(tmp_path / "g.npy", np.zeros(6))
    with pytest.raises(ValueError, match=r"groups must be whole numbers or strings, got float64$"):
        vectors.read(tmp_path / "x.npy", groups=tmp_path / "g.npy")


# --- splits


def items_of(labels, of, **columns):
    labels = np.asarray(labels)
    classes = [f"class {c}" for c in range(labels.max() + 1)]
    names = [f"item {i}" for i in range(len(labels))]
    return Items("set", names, classes, labels, vectors=np.zeros((len(labels), 2), np.float32), groups=of, **columns)


def parts_of(parts):
    return {"train": parts.train, "val": parts.val, "test": parts.test}


def in_one_part(items, parts, within_class=False):
    """No group, or no group within a class, is in two parts: by a loop."""
    home = {}
    for name, places in parts_of(parts).items():
        for i in places.tolist():
            if items.groups[i]:
                key = (items.groups[i], items.labels[i]) if within_class else items.groups[i]
                if home.setdefault(key, name) != name:
                    return False
    return True


@settings(max_examples=60, deadline=None)
@given(st.integers(12, 30), st.integers(0, 2**31), st.integers(0, 5), st.integers(0, 100))
def test_no_group_is_in_two_parts(classes, draw, shared, seed):
    """Groups within classes, and a few that two classes share."""
    random = np.random.default_rng(draw)
    labels = np.repeat(np.arange(classes), 14)
    of = [f"{c}-{n % 7}" if random.random() < 0.9 else "" for c in range(classes) for n in range(14)]
    for _ in range(shared):
        a, b = random.choice(len(labels), 2, replace=False)
        of[a] = of[b] = f"both {a}"
    items = items_of(labels, of)
    parts = data.divide(items, seed=seed)
    assert in_one_part(items, parts)
    assert not set(labels[parts.train]) & set(labels[parts.test]) and not set(labels[parts.val]) & set(
        labels[parts.test]
    )
    assert len(parts.train) + len(parts.val) + len(parts.test) == len(labels)
    assert "no group in two parts" in parts.note
    closed = data.divide(items, seed=seed, closed=True)
    assert in_one_part(items, closed)


def test_items_without_common_groups_are_split_as_ever():
    labels = np.repeat(np.arange(20), 8)
    plain, alone = items_of(labels, None), items_of(labels, [str(i) for i in range(160)])
    for closed in (False, True):
        a, b = (data.divide(items, closed=closed, seed=3) for items in (plain, alone))
        for name, places in parts_of(a).items():
            assert (places == parts_of(b)[name]).all()


def test_cameras_of_all_classes_need_the_scope_of_a_class():
    labels, of = np.repeat(np.arange(12), 6), [f"camera {i % 3}" for i in range(72)]
    items = items_of(labels, of)
    with pytest.raises(ValueError, match=r'its groups connect its classes \(group "camera 0" has items of 12 of 12\)'):
        data.divide(items)
    parts = data.divide(items, group_scope="class")
    assert "groups whole within each class" in parts.note
    plain = data.divide(items_of(labels, None))
    assert all((places == parts_of(plain)[name]).all() for name, places in parts_of(parts).items())
    with pytest.raises(ValueError, match='unknown group_scope "all"; known: set, class'):
        data.divide(items, group_scope="all")


def test_closed_parts_of_writers_share_no_writer():
    """20 characters by 12 writers: writers are divided, every class is in every part."""
    labels, of = np.repeat(np.arange(20), 12), [f"writer {i % 12}" for i in range(240)]
    items = items_of(labels, of)
    parts = data.divide(items, closed=True)
    assert in_one_part(items, parts) and "group by group" in parts.note
    assert all(len(set(labels[places])) == 20 for places in parts_of(parts).values())
    within = data.divide(items, closed=True, group_scope="class")
    assert in_one_part(items, within, within_class=True) and not in_one_part(items, within)


def test_closed_parts_divide_the_groups_of_every_class():
    labels = np.repeat(np.arange(5), 18)
    of = [f"{c}-{n // 3}" for c in range(5) for n in range(18)]  # six bursts of three
    items = items_of(labels, of)
    parts = data.divide(items, closed=True)
    assert in_one_part(items, parts)
    for places in parts_of(parts).values():
        for c in range(5):
            assert len({of[i] for i in places if labels[i] == c}) >= 2
    few = items_of(labels, [f"{c}-{n // 4}" for c in range(5) for n in range(18)])
    with pytest.raises(ValueError, match="dividing the groups of every class needs at least 2 classes of 6 groups"):
        data.divide(few, closed=True)


def test_a_split_of_its_own_must_keep_groups_whole():
    labels, of = np.repeat(np.arange(12), 4), [f"{c}-{n // 2}" for c in range(12) for n in range(4)]
    split = ["train" if c < 8 else "test" for c in range(12) for n in range(4)]
    parts = data.divide(items_of(labels, of, split=split))
    assert in_one_part(items_of(labels, of), parts)
    of[0] = of[-1]
    with pytest.raises(
        ValueError, match=r'a group must be in one part, 1 are in train and in test, such as "11-1"'
    ) as error:
        data.divide(items_of(labels, of, split=split))
    assert "data.group_scope=class" in str(error.value)
    data.divide(items_of(labels, of, split=split), group_scope="class")


def test_held_out_items_must_have_something_to_find():
    labels = np.repeat(np.arange(12), 4)
    with pytest.raises(ValueError, match="no validation item has an item of its class in another group"):
        data.divide(items_of(labels, [f"{c}" for c in labels]))


def test_a_gallery_of_other_groups_can_be_found():
    """Market-like: queries of camera 1 search camera 2, and one part has both cameras of a class."""
    labels = np.repeat(np.arange(10), 4)
    of = [f"{c} c{n % 2}" for c in range(10) for n in range(4)]
    split = ["train" if c < 6 else ("query" if n % 2 == 0 else "gallery") for c in range(10) for n in range(4)]
    parts = data.divide(items_of(labels, of, split=split))
    assert parts.gallery is not None and in_one_part(items_of(labels, of), parts)
    same = [f"{c}" if c >= 6 else name for c, name in zip(labels, of, strict=True)]
    with pytest.raises(ValueError, match="no test item has an item of its class in another group"):
        data.divide(items_of(labels, same, split=split))


def test_targets_are_divided_group_by_group():
    of = [f"video {i // 5}" for i in range(60)]
    items = Items(
        "set", [str(i) for i in range(60)], targets=np.arange(60.0), vectors=np.zeros((60, 2), np.float32), groups=of
    )
    parts = data.divide(items)
    assert "group by group" in parts.note
    sides = [{of[i] for i in places} for places in parts_of(parts).values()]
    assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])


def test_numbers_blocks_and_counts():
    items = items_of([0, 0, 1, 1, 2, 3], ["a", "", "a", "b", "", "b"])
    assert grouping.group_ids(items).tolist() == [1, -1, 1, 2, -1, 2]
    assert grouping.group_ids(items_of([0, 1], None)) is None
    assert grouping.class_blocks(items, np.arange(6), "set") == [[0, 1, 3], [2]]
    assert grouping.class_blocks(items, np.arange(6), "class") == [[0], [1], [2], [3]]
    assert grouping.spanning(items, np.arange(6)) == ("a", 2)
    with pytest.raises(ValueError, match="groups must have one entry per item: 6 items, 2 groups"):
        items_of([0, 0, 1, 1, 2, 3], ["a", "b"])
    labels = np.repeat(np.arange(12), 4)
    items = items_of(labels, [f"{c}-{n // 2}" for c in range(12) for n in range(4)])
    report = data.inspect(items, data.divide(items))
    assert report["groups"] == 24 and "48 items, 24 groups" in data.lines(report)[0]
    json.dumps(report)
