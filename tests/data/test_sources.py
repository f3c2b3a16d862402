"""Every kind of source is read as it stands, and every bad one is answered with one sentence."""

import os
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin import data
from nearkin.data.file_tree import Archive, by_bytes


def grow(root, *names, content=b"pixels"):
    """Files under a root, each with its own content."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content + name.encode("utf-8", "surrogateescape"))
    return root


def answer(source, **settings):
    """The sentence that a bad source is answered with."""
    with pytest.raises(ValueError, match=r".") as caught:
        data.load(source, **settings)
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 700
    return sentence


# Folders


def test_class_folders(tmp_path):
    grow(
        tmp_path,
        "heron/2.jpg",
        "heron/1.JPG",
        "heron/deep/er/3.png",
        "ibis/1.jpg",
        "ibis/notes.txt",
        "ibis/.hidden.jpg",
    )
    grow(tmp_path, "__MACOSX/ibis/1.jpg", "heron/Thumbs.db", "loose.jpg", ".git/x.jpg", "empty/readme.md")
    items = data.load(str(tmp_path))
    assert items.names == ["heron/1.JPG", "heron/2.jpg", "heron/deep/er/3.png", "ibis/1.jpg"]
    assert items.classes == ["heron", "ibis"] and items.labels.tolist() == [0, 0, 0, 1]
    assert items.split is None and items.targets is None and items.vectors is None and len(items) == 4
    assert items.pictures.read(3) == b"pixelsibis/1.jpg"
    assert items.ignored == [
        "4 hidden or system files",
        "2 files that are no images, such as empty/readme.md",
        "1 image outside class folders, such as loose.jpg",
    ]


@pytest.mark.parametrize(
    "words", [("train", "val", "test"), ("Training", "valid", "testing"), ("TRAIN", "validation", "Test")]
)
def test_divided_folders(tmp_path, words):
    grow(tmp_path, *[f"{word}/{kind}/1.jpg" for word in words for kind in ("heron", "ibis")])
    items = data.load(tmp_path)
    assert items.classes == ["heron", "ibis"]
    split_of = dict(zip(items.names, items.split, strict=True))
    assert split_of == {
        f"{w}/{k}/1.jpg": p for w, p in zip(words, ("train", "val", "test"), strict=True) for k in items.classes
    }


def test_a_class_may_be_called_train(tmp_path):
    grow(tmp_path, "train/1.jpg", "train/express/2.jpg", "boat/1.jpg", "test/1.jpg")
    assert data.load(tmp_path).classes == ["boat", "test", "train"]


def test_order_is_that_of_bytes_and_names_can_be_written(tmp_path):
    grow(tmp_path, *[f"{kind}/{n}.png" for kind in ("Zebra", "ant", "éclair", "日本", "a b") for n in (10, 2)])
    with open(os.fsencode(tmp_path) + b"/ant/\xff.png", "wb") as file:
        file.write(b"x")
    items = data.load(tmp_path)
    assert items.classes == ["Zebra", "a b", "ant", "éclair", "日本"]
    assert items.names[:2] == ["Zebra/10.png", "Zebra/2.png"]
    assert "ant/\\xff.png" in items.names and "\n".join(items.names).encode()
    assert items.pictures.read(items.names.index("ant/\\xff.png")) == b"x"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("aB/é.", min_size=1, max_size=8), unique=True), st.randoms())
def test_order_does_not_depend_on_the_file_system(names, random):
    shuffled = list(names)
    random.shuffle(shuffled)
    assert sorted(shuffled, key=by_bytes) == sorted(names, key=lambda name: name.encode())


def test_links_are_followed_and_loops_end(tmp_path):
    grow(tmp_path / "far", "1.jpg", "2.jpg")
    grow(tmp_path / "photos", "ibis/1.jpg")
    (tmp_path / "photos" / "heron").symlink_to(tmp_path / "far")
    (tmp_path / "photos" / "ibis" / "loop").symlink_to(tmp_path / "photos")
    (tmp_path / "photos" / "self").symlink_to(tmp_path / "photos" / "self")
    (tmp_path / "photos" / "ibis" / "nowhere.jpg").symlink_to(tmp_path / "gone.jpg")
    os.mkfifo(tmp_path / "photos" / "ibis" / "pipe.jpg")
    assert data.load(tmp_path / "photos").names == ["heron/1.jpg", "heron/2.jpg", "ibis/1.jpg"]


def test_bad_folders(tmp_path, monkeypatch):
    grow(
        tmp_path,
        "photos/heron/1.jpg",
        "photos/ibis/1.jpg",
        "flat/1.jpg",
        "flat/2.jpg",
        "text/a/1.txt",
        "birds/images/a/1.jpg",
    )
    (tmp_path / "empty").mkdir()
    assert "holds no files" in answer(tmp_path / "empty")
    assert "holds no images: 1 files, such as a/1.txt" in answer(tmp_path / "text")
    assert "its 2 images are in no class folder" in answer(tmp_path / "flat")
    assert f'did you mean "{tmp_path}/birds/images"?' in answer(tmp_path / "birds")
    assert answer(tmp_path / "photo").endswith(f'no such folder or file; did you mean "{tmp_path}/photos"?')
    assert "is not a folder either" in answer(tmp_path / "a" / "b")
    assert "root is for benchmark sets" in answer(tmp_path / "photos", root=tmp_path)
    assert "must be a folder or a file that ends in" in answer(tmp_path / "photos" / "heron" / "1.jpg")

    real = os.scandir

    def refuse(path):  # a superuser may read everything, so permissions alone would not show it
        if str(path).endswith("ibis"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert answer(tmp_path / "photos") == f"{tmp_path}/photos/ibis: its permissions do not allow reading it"


def test_without_labels(tmp_path):
    grow(tmp_path, "1.jpg", "sub/2.jpg", "list.csv", content=b"path\n1.jpg\nsub/2.jpg")
    (tmp_path / "list.csv").write_text("path\n1.jpg\nsub/2.jpg\n")
    items = data.load(tmp_path, labelled=False)
    assert items.names == ["1.jpg", "sub/2.jpg"] and items.labels is None
    assert data.load(tmp_path / "list.csv", labelled=False).names == items.names
    with pytest.raises(ValueError, match="neither classes nor targets"):
        data.divide(items)


def test_unknown_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grow(tmp_path, "photos/heron/1.jpg")
    assert answer("gylphs").startswith('unknown source "gylphs"; did you mean "glyphs"? known: glyphs, cub200, ')
    assert answer("gylphs").endswith("lfw; or give a folder or a file")
    assert 'did you mean "photos"?' in answer("fotos")
    assert answer("").startswith('unknown source "";')
    assert "cannot be examined" in answer("a" * 5000)


# Archives


def packed(tmp_path, kind, names, prefix=""):
    path = tmp_path / f"photos{kind}"
    grow(tmp_path / "unpacked", *names)
    if kind == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for i, name in enumerate(names):
                archive.write(
                    tmp_path / "unpacked" / name, prefix + name, [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED][i % 2]
                )
    else:
        with tarfile.open(path, "w") as archive:
            for name in names:
                archive.add(tmp_path / "unpacked" / name, prefix + name)
    return path


@pytest.mark.parametrize("kind", [".zip", ".tar"])
@pytest.mark.parametrize("prefix", ["", "all/", "./"])
def test_archives_are_read_in_place(tmp_path, kind, prefix):
    names = [f"{kind}/{n}.jpg" for kind in ("heron", "ibis") for n in range(20)]
    path = packed(tmp_path, kind, names, prefix)
    items = data.load(path)
    assert items.classes == ["heron", "ibis"] and len(items) == 40
    expected = {name: (tmp_path / "unpacked" / name).read_bytes() for name in names}
    wrong = []

    def reader():
        for i in list(range(40)) * 5:
            wrong.extend([i] if items.pictures.read(i) != expected["/".join(items.names[i].split("/")[-2:])] else [])

    threads = [threading.Thread(target=reader) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    some = items.take([39, 0]).pictures
    assert some.read(1) == items.pictures.read(0) and some.stamp(0) == items.pictures.stamp(39) != some.stamp(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, "unpacked"])


def test_bad_archives(tmp_path):
    names = ["heron/1.jpg", "heron/2.jpg", "ibis/1.jpg", "ibis/2.jpg"]
    path = packed(tmp_path, ".zip", names)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"pixelsheron/1", b"pixelsheron/7"))
    pictures = data.load(path).pictures
    with pytest.raises(ValueError, match=r"heron/1\.jpg is corrupt"):
        pictures.read(0)
    path.write_bytes(content[: len(content) // 2])
    assert "not a readable .zip archive" in answer(path)
    tar = packed(tmp_path, ".tar", names)
    tar.write_bytes(tar.read_bytes()[:600])
    assert "incomplete" in answer(tar) or "not a readable" in answer(tar)
    (tmp_path / "p.tgz").write_bytes(b"")
    assert "unpack it first" in answer(tmp_path / "p.tgz")
    with pytest.raises(ValueError, match=r"1 members are not in it"):
        data.Members(Archive(packed(tmp_path, ".tar", names)), ["jay/1.jpg"])


@pytest.mark.parametrize("kind", [".zip", ".tar"])
def test_damaged_archives_are_answered_with_a_sentence(tmp_path, kind):
    content = packed(tmp_path, kind, ["heron/1.jpg", "ibis/2.jpg"]).read_bytes()
    content = content[: 512 * 6] if kind == ".tar" else content  # the rest of a tar is zeros
    rng = np.random.default_rng(0)
    path = tmp_path / f"broken{kind}"
    originals, sentences, complete = {b"pixelsheron/1.jpg", b"pixelsibis/2.jpg"}, [], 0
    for _ in range(300):
        broken = bytearray(content)
        broken[rng.integers(len(broken))] = rng.integers(256)
        path.write_bytes(bytes(broken))
        try:
            items = data.load(path)
            contents = [bytes(items.pictures.read(i)) for i in range(len(items))]
        except ValueError as error:
            sentences.append(str(error))
        else:
            complete += 1
            assert len(contents) <= 2
            if kind == ".zip":  # whose checksums prove the content; a tar has none
                assert set(contents) <= originals, contents
    assert sentences and complete  # some damage is noticed, some lies between the files
    assert all("broken" in sentence and "\n" not in sentence for sentence in sentences), set(sentences)


# Tables


def table(tmp_path, text, name="birds.csv", files=("a.jpg", "b.jpg", "c.jpg", "d/e.jpg")):
    grow(tmp_path, *files)
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


@pytest.mark.parametrize(
    "name, text",
    [
        ("t.csv", "path,label,split\na.jpg,heron,train\n\nb.jpg,ibis,validation\nd/e.jpg,heron,test\n"),
        ("t.csv", "\ufeffPath;Label;Split\r\na.jpg;heron;train\r\nb.jpg;ibis;VAL\r\nd/e.jpg;heron;test\r\n"),
        ("t.tsv", 'path\tlabel\tsplit\n"a.jpg"\theron\ttrain\nb.jpg\tibis\tval\nd/e.jpg\theron\ttest\n'),
    ],
)
def test_tables(tmp_path, name, text):
    items = data.load(table(tmp_path, text, name))
    assert items.names == ["a.jpg", "b.jpg", "d/e.jpg"] and items.classes == ["heron", "ibis"]
    assert items.labels.tolist() == [0, 1, 0] and items.split == ["train", "val", "test"]
    assert items.pictures.read(2) == b"pixelsd/e.jpg"


def test_targets_of_a_table(tmp_path):
    one = data.load(table(tmp_path, "path,age\na.jpg,3\nb.jpg,4.5\n"))
    assert one.labels is None and one.classes == [] and one.targets.tolist() == [3.0, 4.5]
    two = data.load(table(tmp_path, "x,path,y,split\n1,a.jpg,2,train\n3,b.jpg,4,test\n"))
    assert two.targets.tolist() == [[1.0, 2.0], [3.0, 4.0]] and two.split == ["train", "test"]
    both = data.load(table(tmp_path, "path,label,target_1,target_2,price\na.jpg,h,1,2,x\nb.jpg,i,3,4,y\n"))
    assert both.targets.tolist() == [[1.0, 2.0], [3.0, 4.0]] and both.classes == ["h", "i"]
    assert both.ignored == ['column "price", which is not used']
    named = data.load(table(tmp_path, "path,target,comment\na.jpg,1,x\nb.jpg,3,y\n"))
    assert named.targets.tolist() == [1.0, 3.0]


def test_paths_of_a_table_may_start_elsewhere(tmp_path):
    (tmp_path / "lists").mkdir()
    path = table(tmp_path, "")
    absolute = tmp_path / "a.jpg"
    (tmp_path / "lists" / "l.csv").write_text(f"path,label\n{absolute},h\nb.jpg,i\n")
    path = tmp_path / "lists" / "l.csv"
    assert "1 of 2 rows name files that are not there" in answer(path)
    (tmp_path / "lists" / "b.jpg").symlink_to(tmp_path / "b.jpg")  # links within the folder are followed, as in folders
    outside = f"1 of 2 rows name files outside of {tmp_path}/lists, which --allow-outside (allow_outside=True) allows"
    assert f"{outside} (row 2: {absolute})" in answer(path)
    assert data.load(path, root=tmp_path).pictures.read(1) == b"pixelsb.jpg"
    assert data.load(path, allow_outside=True).pictures.read(1) == b"pixelsb.jpg"
    (tmp_path / "here").symlink_to(tmp_path / "lists")
    grow(tmp_path / "lists", "c.jpg", "d.jpg")
    (tmp_path / "lists" / "m.csv").write_text(f"path,label\n{tmp_path}/lists/c.jpg,h\n../lists/d.jpg,i\n")
    assert len(data.load(tmp_path / "here" / "m.csv")) == 2  # by another name of the folder


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", r"it is empty; it must begin with the names of its columns"),
        ("path,label\n", r"it has no rows"),
        ("file,label\na.jpg,x\n", r'no column "path" among its columns: file, label'),
        ("path\na.jpg\n", r'must have a column "label" or numeric target columns'),
        ("path,label,label\na.jpg,x,y\n", r'columns must have different names, got "label" twice'),
        ("path,label\na.jpg,x\nb.jpg\n", r"row 3 must have 2 cells as the heading has, got 1"),
        ("path,label\na.jpg,x\nb.jpg,\n\nc.jpg, \n", r"2 of 3 rows have no label \(row 3, row 5\)"),
        ("path,label\n,x\nb.jpg,y\n", r"1 of 2 rows have no path \(row 2\)"),
        (
            "path,label\nq.jpg,x\nr.jpg,x\na.jpg,x\ns.jpg,x\nt.jpg,y\n",
            r"4 of 5 rows name files that are not there .*\(row 2: q.jpg, row 3: r.jpg, row 5: s.jpg, …\)",
        ),
        ("path,label\na.jpg,x\nb.jpg,y\n./a.jpg,y\n", r"1 path is listed more than once \(a.jpg in rows 2, 4\)"),
        ("path,label,split\na.jpg,x,train\nb.jpg,y,trian\n", r"1 of 2 rows have a split that is none of train, val,"),
        ("path,age\na.jpg,3\nb.jpg,old\n", r'1 of 2 rows have no finite number in column "age", and without a "label"'),
        ("path,target\na.jpg,3\nb.jpg,nan\n", r'1 of 2 rows have no finite number in column "target" \(row 3: nan\)'),
        ('path,label\n"a.jpg,x\n', r"not a readable table"),
    ],
)
def test_bad_tables(tmp_path, text, sentence):
    assert re.search(sentence, answer(table(tmp_path, text)))


def test_table_in_another_encoding(tmp_path):
    path = table(tmp_path, "")
    path.write_bytes("path,label\na.jpg,héron\n".encode("latin-1"))
    assert "not a readable table" in answer(path)


def test_parquet_of_paths(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    grow(tmp_path, "a.jpg", "b.jpg")
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"path": ["a.jpg", "b.jpg"], "label": [3, 1], "split": ["train", "test"]}), path)
    items = data.load(path)
    assert items.classes == ["1", "3"] and items.labels.tolist() == [1, 0] and items.split == ["train", "test"]
    parquet.write_table(pa.table({"path": ["a.jpg", "b.jpg"], "label": ["x", None]}), path)
    assert "1 of 2 rows have no label (row 2)" in answer(path)
    path.write_bytes(b"PAR1")
    assert "not a readable .parquet file" in answer(path)


# Vectors


def test_vectors(tmp_path):
    x = np.arange(12, dtype=np.float64).reshape(4, 3)
    np.savez(tmp_path / "v.npz", embeddings=x, labels=[10, 2, -1, 10], split=np.array(["train", "val", "test", "test"]))
    items = data.load(tmp_path / "v.npz")
    assert (
        items.classes == ["2", "10"]
        and items.labels.tolist() == [1, 0, 1]
        and items.names == ["row 0", "row 1", "row 3"]
    )
    assert items.split == ["train", "val", "test"] and items.vectors.dtype == np.float32 and items.pictures is None
    assert items.ignored == ["1 rows whose class is unknown (-1)"] and items.vectors[2].tolist() == [9, 10, 11]
    np.savez(tmp_path / "n.npz", embeddings=x, labels=np.array(["b", "a", "b", "a"]))
    assert data.load(tmp_path / "n.npz").labels.tolist() == [1, 0, 1, 0]
    np.savez(tmp_path / "t.npz", embeddings=x, targets=x[:, :2])
    assert data.load(tmp_path / "t.npz").targets.shape == (4, 2)
    np.savez(tmp_path / "bad.npz", embeddings=x, labels=[1, 2, 3, 4], split=["train", "x", "y", "test"])
    assert 'split must be train, val, test, query, gallery (or 0, 1, 2), got "x" in 2 rows' in answer(
        tmp_path / "bad.npz"
    )
    np.savez(tmp_path / "bare.npz", embeddings=x)
    assert "it must hold labels or targets" in answer(tmp_path / "bare.npz")
    assert len(data.load(tmp_path / "bare.npz", labelled=False)) == 4


def test_vectors_in_other_files(tmp_path):
    from safetensors.numpy import save_file

    x = np.ones((3, 2), np.float32)
    save_file(
        {"embeddings": x, "labels": np.array([0, 1, 1]), "split": np.array([0, 1, 2])}, tmp_path / "v.safetensors"
    )
    items = data.load(tmp_path / "v.safetensors")
    assert items.split == ["train", "val", "test"] and items.classes == ["0", "1"]
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pa.table({"embedding": x.tolist(), "label": ["a", "b", "b"], "split": ["train", "test", "test"]}),
        tmp_path / "v.parquet",
    )
    items = data.load(tmp_path / "v.parquet")
    assert items.split == ["train", "test", "test"] and items.classes == ["a", "b"] and items.vectors.shape == (3, 2)


# Items


def test_take(tmp_path):
    pairs = data.Pairs(np.array([[0, 1], [1, 3], [2, 0]]), np.array([True, False, True]), np.array([0, 1, 2]))
    items = data.Items(
        "x",
        list("abcd"),
        ["k", "l"],
        np.array([0, 1, 0, 1]),
        np.arange(4.0),
        split=["train", "val", "test", "test"],
        pictures=data.Arrays(np.arange(16, dtype=np.uint8).reshape(4, 2, 2)),
        pairs=pairs,
    )
    some = items.take([2, 0])
    assert some.names == ["c", "a"] and some.labels.tolist() == [0, 0] and some.classes == ["k", "l"]
    assert some.split == ["test", "train"] and some.targets.tolist() == [2.0, 0.0]
    assert (
        some.pairs.items.tolist() == [[0, 1]] and some.pairs.same.tolist() == [True] and some.pairs.fold.tolist() == [2]
    )
    assert some.pictures.read(0).tolist() == [[8, 9], [10, 11]]
    assert items.take(np.array([True, False, False, True])).names == ["a", "d"]
    assert len(items.take([])) == 0 and items.take([]).pairs.items.shape == (0, 2)
    for wrong in ([4], [-1], [True, False], [0.5], [[0]]):
        with pytest.raises((IndexError, ValueError, TypeError)):
            items.take(wrong)
    with pytest.raises(ValueError, match="labels must have one entry per item: 2 items, 1 labels"):
        data.Items("x", ["a", "b"], ["k"], np.array([0]))


def test_stamps_tell_pictures_apart(tmp_path):
    grow(tmp_path, "a.jpg", "b.jpg")
    files = data.Files([tmp_path / "a.jpg", tmp_path / "b.jpg"])
    before = files.stamp(0)
    assert before == files.take([1, 0]).stamp(1) != files.stamp(1)
    (tmp_path / "a.jpg").write_bytes(b"longer than it was")
    assert files.stamp(0) != before
    pixels = data.Arrays(np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3))
    both = data.Several([files, pixels])
    assert len(both) == 4 and both.read(1) == files.read(1) and both.stamp(2) == pixels.stamp(0) != both.stamp(3)
    assert both.take([3, 0]).stamp(1) == files.stamp(0)
    with pytest.raises(ValueError, match="pixels must be uint8"):
        data.Arrays(np.zeros((2, 2, 2)))


def test_glyphs_and_the_list_of_sources():
    items = data.load()
    half = data.glyphs.load().split()[0]
    train = {items.classes[c] for c, part in zip(items.labels, items.split, strict=True) if part == "train"}
    assert train == set(half.characters) and len(set(items.names)) == len(items) == 20 * len(items.classes)
    assert items.pictures.read(0).shape == (32, 32)
    assert "root is for benchmark sets" in answer("glyphs", root="x")
    listed = data.sources()
    assert [source.name for source in listed][:4] == ["glyphs", "FOLDER", "TABLE", "VECTORS"] and len(listed) == 16
    assert all(source.line and source.needs for source in listed)


def test_import_is_light():
    code = "import torch, sys; before = set(sys.modules); import nearkin.data; print(*(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"PIL", "matplotlib", "pyarrow", "scipy", "rich", "safetensors"} & {name.split(".")[0] for name in out}


def test_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(block, {})
    assert capsys.readouterr().out.startswith("glyphs: 19,0")


def test_every_public_name_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for name in data.__all__:
        assert getattr(data, name).__doc__, name
        assert f"`{name}" in page, name
