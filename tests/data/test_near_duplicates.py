"""Near-duplicates: planted copies are found and others are not, in bounded memory; lists of items to leave out."""

import io
import json
import re
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin import data
from nearkin.data import left_out, near_duplicates
from nearkin.data.near_duplicates import find
from nearkin.data.splits import Parts, leave_out


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))


def scenes(count, side=48, seed=0):
    """Pictures that differ: smooth random patterns of several scales."""
    g = torch.Generator().manual_seed(seed)
    total = torch.zeros(count, 3, side, side)
    for cells in (3, 6, 12):
        part = torch.rand(count, 3, cells, cells, generator=g)
        total += torch.nn.functional.interpolate(part, size=(side, side), mode="bicubic")
    low, high = total.amin((1, 2, 3), keepdim=True), total.amax((1, 2, 3), keepdim=True)
    return (255 * (total - low) / (high - low)).permute(0, 2, 3, 1).round().to(torch.uint8).numpy()


def jpeg(picture):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=50)
    return np.asarray(Image.open(buffer))


def crop(picture, left=0.06, top=0.02, side=0.92):
    n = picture.shape[0]
    box = (left * n, top * n, (left + side) * n, (top + side) * n)
    return np.asarray(Image.fromarray(picture).resize((n, n), Image.Resampling.BICUBIC, box))


def resized(picture):
    n = picture.shape[0]
    return np.asarray(Image.fromarray(picture).resize((n // 2, n // 2)).resize((n, n)))


def brighter(picture):
    return np.clip(1.2 * picture.astype(float) + 10, 0, 255).astype(np.uint8)


WAYS = [jpeg, crop, resized, brighter]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_planted_copies_are_found_and_nothing_else(way):
    """Of 60 pictures in three parts, five of training are copies of test, and one of validation of test."""
    pictures = scenes(60)
    for copy, original in ((0, 40), (1, 41), (2, 42), (3, 43), (4, 44), (30, 45)):
        pictures[copy] = way(pictures[original])
    found = find(pictures, [np.arange(30), np.arange(30, 40), np.arange(40, 60)])
    assert {tuple(pair) for pair in found.pairs.tolist()} == {(0, 40), (1, 41), (2, 42), (3, 43), (4, 44), (30, 45)}
    assert (found.similarity >= near_duplicates.THRESHOLD).all() and (np.diff(found.similarity) <= 0).all()


def test_either_of_two_may_be_the_crop():
    pictures = scenes(8)
    pictures[5] = crop(pictures[1])
    assert find(pictures, [np.arange(4), np.arange(4, 8)]).pairs.tolist() == [[1, 5]]
    assert find(pictures, [np.arange(4, 8), np.arange(4)]).pairs.tolist() == [[5, 1]]


def test_copies_within_a_part_are_no_pairs():
    pictures = scenes(8)
    pictures[1] = pictures[0]
    assert find(pictures, [np.arange(4), np.arange(4, 8)]).pairs.shape == (0, 2)


def test_flat_pictures_are_nobodys_copy():
    pictures = np.full((6, 20, 20, 1), 200, np.uint8)
    pictures[3:] = 90
    assert len(find(pictures, [np.arange(3), np.arange(3, 6)]).pairs) == 0


def test_many_copies_of_one_picture_are_all_noticed_and_listed_up_to_a_number():
    """Every training picture of a large group of copies is named, if not with each of its copies."""
    pictures = np.repeat(scenes(1), 70, 0)
    found = find(pictures, [np.arange(40), np.empty(0, np.int64), np.arange(40, 70)])
    assert np.unique(found.pairs[:, 0]).tolist() == list(range(40))
    assert len(found.pairs) == 40 * near_duplicates.CANDIDATES


def test_blocks_change_nothing(monkeypatch):
    pictures = scenes(50)
    pictures[:8] = [way(pictures[30 + i]) for i, way in enumerate(WAYS * 2)]
    parts = [np.arange(20), np.arange(20, 30), np.arange(30, 50)]
    whole = find(pictures, parts)
    for name, size in (("_ROWS", 7), ("_COLUMNS", 9), ("_PAIRS", 5), ("_CHUNK", 4)):
        monkeypatch.setattr(near_duplicates, name, size)
    parts_of_it = find(pictures, parts)
    np.testing.assert_array_equal(parts_of_it.pairs, whole.pairs)
    np.testing.assert_allclose(parts_of_it.similarity, whole.similarity, atol=1e-5)


def test_window_similarity_is_that_of_a_loop():
    """Against float64 loops over windows and cells, which average pixels by the areas that they share."""
    thumbs = near_duplicates.thumbnails(scenes(6), np.arange(6))
    fast = near_duplicates._best_window(thumbs[:3], thumbs[3:], *near_duplicates.FEW)

    def unit(view):
        view = view - view.mean()
        return view / np.linalg.norm(view)

    def averaged(line, offset, scale):  # along axis 0 of (32, n), exactly
        sums = np.concatenate([np.zeros((1, line.shape[1])), np.cumsum(line, 0)])
        edges = 32 * (offset + scale * np.arange(17) / 16)
        integral = np.stack([np.interp(edges, np.arange(33), column) for column in sums.T], 1)
        return np.diff(integral, axis=0) / (2 * scale)

    for p in range(3):
        best = -1.0
        for cut, other in ((p, p + 3), (p + 3, p)):
            a, b = thumbs[cut].double().numpy(), thumbs[other].double().numpy()
            target = unit(averaged(averaged(b, 0, 1).T, 0, 1).T)
            for scale in near_duplicates.FEW[0]:
                for top in np.linspace(0, 1 - scale, 3):
                    for left in np.linspace(0, 1 - scale, 3):
                        view = unit(averaged(averaged(a, top, scale).T, left, scale).T)
                        best = max(best, float((view * target).sum()))
        assert abs(best - float(fast[p])) < 1e-4


def test_memory_is_bounded_and_progress_is_reported():
    """3,000 pictures of which none is a copy: blocks, and 1.3 KiB per picture."""
    pictures = np.repeat(scenes(30, side=32), 100, 0)[..., :1]
    pictures = np.ascontiguousarray(np.roll(pictures, 1, 0))
    calls = []
    tracemalloc.start()
    find(pictures, [np.arange(2000), np.arange(2000, 3000)], progress=lambda *done: calls.append(done))
    peak = tracemalloc.get_traced_memory()[1]  # numpy's share; torch's blocks are fixed
    tracemalloc.stop()
    assert peak < 64 * 2**20
    assert calls == sorted(calls) and calls[-1] == (6000, 6000)


def test_pairs_are_kept_with_the_picture_cache(monkeypatch):
    pictures, digests = scenes(8), [str(i) for i in range(8)]
    pictures[0] = pictures[5]
    parts = [np.arange(4), np.arange(4, 8)]
    first = find(pictures, parts, digests=digests)
    monkeypatch.setattr(near_duplicates, "thumbnails", None)  # would be called for a search
    again = find(pictures, parts, digests=digests)
    np.testing.assert_array_equal(again.pairs, first.pairs)
    np.testing.assert_allclose(again.similarity, first.similarity)
    with pytest.raises(TypeError):
        find(pictures, parts, digests=["other", *digests[1:]])
    monkeypatch.undo()
    from nearkin.data import cache_store

    for file in cache_store.folder().glob("near-*.json"):
        file.write_text("{", encoding="utf-8")
    np.testing.assert_array_equal(find(pictures, parts, digests=digests).pairs, first.pairs)


def test_a_threshold_is_checked():
    with pytest.raises(ValueError, match="threshold must be > 0 and < 1, got 2"):
        find(scenes(4), [np.arange(2), np.arange(2, 4)], threshold=2)


# --- lists of items to leave out


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.csv", "path,label,suggested,score\nb.png,x,y,0.9\na.png,x,y,0.8\nb.png,x,y,0.7\n"),
        ("a.tsv", "score\tPath\n1\tb.png\n1\ta.png\n"),
        ("a.json", '["b.png", "a.png"]'),
        ("a.json", '[{"path": "b.png", "score": 1}, {"path": "a.png"}]'),
    ],
)
def test_lists_are_read(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert left_out.read(tmp_path / name) == ["b.png", "a.png"]


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("a.txt", "a.png", "a list of items to leave out must end in .csv, .tsv, .json, got"),
        ("none.csv", None, "no such file"),
        ("a.csv", "", 'its first line must name a column "path", got it is empty'),
        ("a.csv", "file\na.png\n", 'its first line must name a column "path", got file'),
        ("a.csv", "path\n", "it names no item to leave out"),
        ("a.csv", "label,path\nx\n", "row 2 has no path"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", '{"path": "a"}', 'it must be a list of paths, or of objects with a "path", got dict'),
        ("a.json", '["a", 3]', "entry 1 has no path"),
    ],
)
def test_a_bad_list_is_one_sentence(name, text, sentence, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        left_out.read(tmp_path / name)


def items_of(labels):
    return data.Items(
        name="set",
        names=[f"{i}.png" for i in range(len(labels))],
        classes=[str(c) for c in range(max(labels) + 1)],
        labels=np.array(labels, np.int64),
        vectors=np.zeros((len(labels), 2), np.float32),
    )


def test_unknown_paths_are_refused():
    items = items_of([0, 0, 1, 1])
    assert left_out.positions(items, ["3.png", "0.png"], "list.csv").tolist() == [0, 3]
    with pytest.raises(
        ValueError, match=re.escape("list.csv: 1 of 2 paths are no items of set (9.png); its items are")
    ):
        left_out.positions(items, ["3.png", "9.png"], "list.csv")


def test_who_is_left_alone_goes_too_and_nobody_changes_part():
    items = items_of([0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5])
    parts = Parts(np.arange(7), np.array([7, 8]), np.array([9, 10, 11, 12]), note="seeded: train 7", official=("test",))
    with pytest.raises(ValueError, match="the val part has 1 classes of 2 or more items, and needs at least 2"):
        leave_out(items, parts, np.array([0]))
    parts = parts._replace(val=np.array([7, 8, 9, 10]))
    left = leave_out(items, parts, np.array([0, 6]))
    assert left.train.tolist() == [2, 3, 4, 5] and left.val.tolist() == [7, 8, 9, 10] and left.official == ("test",)
    assert left.note.startswith("seeded: train 4 items of 2 classes")
    with pytest.raises(ValueError, match="without the 3 items that are left out, the train part has 1 classes"):
        leave_out(items, parts, np.array([0, 2, 4]))
    assert json.dumps(left.train.tolist())
