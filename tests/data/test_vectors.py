"""Stored embeddings: every kind of file reads the same, and a file that cannot be used gets one sentence."""

import importlib.util
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nearkin.data import pair_lists, vectors

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
IDS = np.array([0, 0, 1, 1, 2, -1])
NAMES = np.array(["jay", "ibis", "jay", "heron", "heron", "ibis"])
HAS_PYARROW = importlib.util.find_spec("pyarrow") is not None


def npz(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return folder / "a.npz"


def npy(folder, array, name="x.npy"):
    np.save(folder / name, array)
    return folder / name


def text(folder, name, content):
    (folder / name).write_text(content, encoding="utf-8")
    return folder / name


def refused(path, *others):
    with pytest.raises(ValueError, match=r"^\S+: ") as error:
        vectors.read(path, *others)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def same(result, labels=IDS):
    assert torch.equal(result.embeddings.float(), torch.from_numpy(X))
    assert result.labels.tolist() == labels.tolist()


def test_npz_with_ids_strings_and_targets(tmp_path):
    same(vectors.read(npz(tmp_path, embeddings=X, labels=IDS)))
    same(vectors.read(npz(tmp_path, embeddings=X, labels=NAMES)), NAMES)
    same(vectors.read(npz(tmp_path, embeddings=X, labels=NAMES.astype("S"))), NAMES)
    result = vectors.read(npz(tmp_path, embeddings=X, targets=X[:, :2]))
    assert result.labels is None and result.targets.dtype == torch.float64 and result.targets.shape == (6, 2)


def test_npz_in_another_byte_order_and_in_columns(tmp_path):
    same(vectors.read(npz(tmp_path, embeddings=np.asfortranarray(X.astype(">f4")), labels=IDS.astype(">i2"))))


def test_safetensors(tmp_path):
    save_file({"embeddings": torch.from_numpy(X), "labels": torch.from_numpy(IDS)}, tmp_path / "a.safetensors")
    same(vectors.read(tmp_path / "a.safetensors"))
    half = torch.from_numpy(X).bfloat16()
    save_file({"embeddings": half, "targets": torch.arange(6.0)}, tmp_path / "b.safetensors")
    result = vectors.read(tmp_path / "b.safetensors")
    assert torch.equal(result.embeddings, half) and result.targets.tolist() == [0, 1, 2, 3, 4, 5]
    save_file({"vectors": half}, tmp_path / "c.safetensors")
    assert refused(tmp_path / "c.safetensors").endswith('no "embeddings" among its keys: vectors')


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("y.txt", "0\n0\n1\n1\n2\n-1\n", IDS),
        ("y.txt", "0\n0\n1\n1\n2\n-1\n\n\n", IDS),
        ("y.csv", "label\r\n0\r\n0\r\n1\r\n1\r\n2\r\n-1\r\n", IDS),
        ("y.txt", "jay\nibis\njay\nheron\nheron\nibis", NAMES),
        ("y.txt", "label\nibis\njay\nheron\nheron\nibis", np.array(["label", *NAMES[[1, 2, 3, 4, 5]]])),
        ("y.csv", '"jay, blue"\nibis\njay\nheron\nheron\nibis', np.array(["jay, blue", *NAMES[1:]])),
    ],
)
def test_npy_with_labels_in_text(tmp_path, name, content, expected):
    same(vectors.read(npy(tmp_path, X), text(tmp_path, name, content)), expected)


def test_npy_with_labels_and_targets_beside(tmp_path):
    same(vectors.read(npy(tmp_path, X), npy(tmp_path, IDS, "y.npy")))
    assert vectors.read(npy(tmp_path, X)).labels is None
    for name, content in (("t.csv", "target,other\n" + "1.5,2\n" * 6), ("t.txt", "1.5 2\n" * 6)):
        result = vectors.read(npy(tmp_path, X), None, text(tmp_path, name, content))
        assert result.targets.tolist() == [[1.5, 2]] * 6
    assert vectors.read(npy(tmp_path, X), None, text(tmp_path, "t.txt", "1\n" * 6)).targets.shape == (6,)


def test_a_labels_file_goes_before_those_inside(tmp_path):
    same(vectors.read(npz(tmp_path, embeddings=X, labels=IDS * 0), npy(tmp_path, IDS, "y.npy")))


def test_class_ids_in_sorted_order_shared_by_both_sets():
    (ids, others), names = vectors.class_ids(NAMES, np.array(["auk", "jay"]))
    assert names == ["auk", "heron", "ibis", "jay"]
    assert ids.tolist() == [3, 2, 3, 1, 1, 2] and others.tolist() == [0, 3]
    (same_ids,), names = vectors.class_ids(IDS)
    assert same_ids.tolist() == IDS.tolist() and names == ["0", "1", "2"]
    with pytest.raises(ValueError, match="of one kind"):
        vectors.class_ids(NAMES, IDS)


def test_files_that_are_not_there_or_not_known(tmp_path):
    assert refused(tmp_path / "none.npz").endswith("none.npz: no such file")
    assert 'ends in .npz, .npy, .parquet, .safetensors, got ".h5"' in refused(text(tmp_path, "a.h5", ""))
    assert "got no ending" in refused(tmp_path / "none")
    assert refused(tmp_path).endswith("must be a file, got a folder")
    x = npy(tmp_path, X)
    assert "labels must be a file that ends in .npy, .csv, .txt" in refused(x, tmp_path / "y.json")
    assert refused(x, tmp_path / "y.txt").endswith("y.txt: no such file")


@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.safetensors"])
@pytest.mark.parametrize("content", [b"", b"hello", b"\x93NUMPY", b"PK\x03\x04" + bytes(40)])
def test_spoilt_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert f"{name}: not a readable {name[1:]} file" in refused(tmp_path / name)


def test_cut_files(tmp_path):
    content = npz(tmp_path, embeddings=X, labels=IDS).read_bytes()
    (tmp_path / "a.npz").write_bytes(content[: len(content) // 2])
    assert "not a readable .npz file" in refused(tmp_path / "a.npz")
    x = npy(tmp_path, X)
    x.write_bytes(x.read_bytes()[:-5])
    assert "not a readable .npy file" in refused(x)


def test_nothing_is_unpickled(tmp_path):
    objects = np.array([{"a": 1}] * 6, dtype=object)
    assert "labels holds Python objects" in refused(npz(tmp_path, embeddings=X, labels=objects))
    assert "holds Python objects" in refused(npy(tmp_path, X), npy(tmp_path, objects, "y.npy"))


@pytest.mark.parametrize(
    "arrays, sentence",
    [
        ({"vectors": X, "y": IDS}, 'no "embeddings" among its keys: vectors, y'),
        ({}, 'no "embeddings" among its keys: there are none'),
        ({"embeddings": X[0], "labels": IDS}, "embeddings must have shape (rows, dimensions), got (4,)"),
        ({"embeddings": X[:0], "labels": IDS[:0]}, "embeddings must have shape (rows, dimensions), got (0, 4)"),
        (
            {"embeddings": X.astype(int), "labels": IDS},
            "embeddings must be float16, bfloat16, float32, float64, got int64",
        ),
        ({"embeddings": X, "labels": IDS[:4]}, "labels must have one entry per row of embeddings: 6 rows, 4 labels"),
        ({"embeddings": X, "labels": X}, "labels must be whole numbers or strings, got float32; real-valued ones"),
        ({"embeddings": X, "labels": IDS[:, None]}, "labels must have shape (rows,), got (6, 1)"),
        ({"embeddings": X, "labels": np.full(6, 2**64 - 1, np.uint64)}, "labels must be below 2**63"),
        ({"embeddings": X, "targets": X[:5]}, "targets must have one entry per row of embeddings: 6 rows, 5 targets"),
        ({"embeddings": X, "targets": NAMES}, "targets must be numbers"),
        (
            {"embeddings": X, "targets": X[:, :1] * np.float32(np.inf)},
            "targets must be finite, got NaN or Inf in 6 of 6 rows (rows 0, 1",
        ),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, arrays, sentence):
    assert f"a.npz: {sentence}" in refused(npz(tmp_path, **arrays))


def test_rows_that_are_not_finite_are_counted(tmp_path):
    bad = X.copy()
    bad[3, 1] = np.nan
    assert refused(npz(tmp_path, embeddings=bad)).endswith("NaN or Inf in 1 of 6 rows (row 3, counted from 0)")
    bad[:5, 0] = np.inf
    assert "NaN or Inf in 5 of 6 rows (rows 0, 1, 2, …, counted from 0)" in refused(npz(tmp_path, embeddings=bad))


def test_text_that_does_not_fit(tmp_path):
    x = npy(tmp_path, X)
    assert "y.txt: line 2 is empty" in refused(x, text(tmp_path, "y.txt", "a\n\nb\n"))
    assert "labels must be one per line, got 2 columns" in refused(x, text(tmp_path, "y.csv", "a,b\n" * 6))
    assert "6 rows, 2 labels" in refused(x, text(tmp_path, "y.txt", "a\nb\n"))
    assert "6 rows, 0 labels" in refused(x, text(tmp_path, "y.txt", ""))
    assert "targets must be numbers" in refused(x, None, text(tmp_path, "t.txt", "one\n" * 6))
    assert "targets must be numbers" in refused(x, None, text(tmp_path, "t.csv", "1,2\n1\n1\n1\n1\n1\n"))
    (tmp_path / "y.txt").write_bytes(b"\xff\xfe\x00")
    assert "not a readable text file" in refused(x, tmp_path / "y.txt")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused(text(tmp_path, "a.parquet", "")).endswith("needs pyarrow: pip install 'nearkin[parquet]'")


@pytest.mark.skipif(not HAS_PYARROW, reason="pyarrow is not installed")
@pytest.mark.parametrize("fixed", [False, True])
def test_parquet(tmp_path, fixed):
    import pyarrow
    import pyarrow.parquet

    kind = pyarrow.list_(pyarrow.float32(), 4) if fixed else pyarrow.list_(pyarrow.float32())
    path = tmp_path / "a.parquet"
    column = pyarrow.array(X.tolist(), kind)
    pyarrow.parquet.write_table(pyarrow.table({"embedding": column, "label": NAMES.tolist()}), path, row_group_size=4)
    same(vectors.read(path), NAMES)
    pyarrow.parquet.write_table(pyarrow.table({"embedding": column, "label": IDS, "target": X[:, 0]}), path)
    same(vectors.read(path))
    assert vectors.read(path).targets.shape == (6,)
    pyarrow.parquet.write_table(pyarrow.table({"vector": column}), path)
    assert refused(path).endswith('no "embedding" among its columns: vector')
    pyarrow.parquet.write_table(pyarrow.table({"embedding": [[1.0], [1.0, 2.0]]}), path)
    assert "rows of embedding must have one length, got 1 to 2" in refused(path)
    pyarrow.parquet.write_table(pyarrow.table({"embedding": column, "label": [*NAMES[:5].tolist(), None]}), path)
    assert "column label must have a value in every row, 1 have none" in refused(path)
    path.write_text("hello")
    assert "not a readable .parquet file" in refused(path)


def test_several_labels_a_row_where_they_are_welcome(tmp_path):
    rows = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]])
    for kind in (bool, np.uint8, np.int64):
        result = vectors.read(npz(tmp_path, embeddings=X, labels=rows.astype(kind)), multi_label=True).labels
        assert result.dtype == bool and (result == rows).all()
    save_file({"embeddings": torch.from_numpy(X), "labels": torch.from_numpy(rows).bool()}, tmp_path / "a.safetensors")
    assert (vectors.read(tmp_path / "a.safetensors", multi_label=True).labels == rows).all()
    assert (vectors.read(npy(tmp_path, X), npy(tmp_path, rows, "y.npy"), multi_label=True).labels == rows).all()
    assert refused(npz(tmp_path, embeddings=X, labels=rows)).endswith("labels must have shape (rows,), got (6, 3)")
    with pytest.raises(ValueError, match=r"or be 0/1 rows \(rows, labels\), got \(6, 3\)"):
        vectors.read(npz(tmp_path, embeddings=X, labels=rows * 2), multi_label=True)
    with pytest.raises(ValueError, match="6 rows, 4 labels"):
        vectors.read(npz(tmp_path, embeddings=X, labels=rows[:4]), multi_label=True)


@pytest.mark.parametrize(
    "content, same, fold",
    [
        ("0,1\n2,3\n", None, None),
        ("0,1,1\n2,3,0\n", [True, False], None),
        ("row,row,same,fold\n0,1,1,4\n2,3,0,5\n", [True, False], [4, 5]),
        ("a, b, fold\n0, 1, 4\n2, 3, 5\n\n", None, [4, 5]),
    ],
)
def test_lists_of_pairs(tmp_path, content, same, fold):
    result = pair_lists.read(text(tmp_path, "p.csv", content), 6)
    assert result.pairs.tolist() == [[0, 1], [2, 3]]
    assert (result.same if same is None else result.same.tolist()) == same
    assert (result.fold if fold is None else result.fold.tolist()) == fold
    if "fold" not in content:
        table = np.array([[int(cell) for cell in line.split(",")] for line in content.split()])
        again = pair_lists.read(npy(tmp_path, table.astype(np.int16), "p.npy"), 6)
        assert again.pairs.tolist() == result.pairs.tolist()


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("0,1\n2,6\n", "pairs must be of rows 0 to 5, got (2, 6) in pair 1"),
        ("-1,1\n", "got (-1, 1) in pair 0"),
        ("0\n1\n", "pairs must have 2 to 4 columns: row, row[, same][, fold], got shape (2, 1)"),
        ("", "there are no pairs in it"),
        ("a,b\n", "there are no pairs in it"),
        ("0,1\n2\n", "pairs must be whole numbers, as many in each line"),
        ("0,1.5\n", "pairs must be whole numbers, as many in each line"),
        ("0,1,2\n", "same must be 0 or 1, got 2"),
        ("0,1,1,3\n2,3,0,3\n", "fold must name at least 2 folds, got 1"),
    ],
)
def test_lists_that_do_not_fit(tmp_path, content, sentence):
    with pytest.raises(ValueError, match=r"p\.csv: ") as error:
        pair_lists.read(text(tmp_path, "p.csv", content), 6)
    assert sentence in str(error.value)


def test_lists_of_another_kind(tmp_path):
    with pytest.raises(ValueError, match=r"pairs must be a file that ends in \.csv, \.npy"):
        pair_lists.read(tmp_path / "p.txt", 6)
    with pytest.raises(
        ValueError, match=r"p\.npy: pairs must be whole numbers: row, row\[, same\]\[, fold\], got float32"
    ):
        pair_lists.read(npy(tmp_path, X, "p.npy"), 6)
