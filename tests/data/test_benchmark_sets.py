"""Benchmark sets: the publishers' layouts as tiny trees, the reduced real ones where they are at hand."""

import gzip
import io
import re
import struct
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from nearkin import data
from nearkin.data import matlab
from nearkin.data.benchmarks import BENCHMARKS

COUNTS = {
    "cub200": {"train photos": 5864, "test photos": 5924},
    "cars196": {"train photos": 8054, "test photos": 8131},
    "sop": {"train photos": 59551, "test photos": 60502},
    "inshop": {"train photos": 25882, "query photos": 14218, "gallery photos": 12612, "train classes": 3997},
    "omniglot": {"train drawings": 19280, "test drawings": 13180, "train classes": 964, "test classes": 659},
    "fashion-mnist": {"train pictures": 60000, "test pictures": 10000},
    "coil20": {"pictures": 1440, "objects": 20},
    "orl": {"photos": 400, "people": 40},
    "lfw": {"photos": 13233, "people": 5749, "pairs": 6000, "folds": 10},
}


def grow(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def cub():
    photos = [
        (1, "001.Albatross/a.jpg"),
        (1, "001.Albatross/b.jpg"),
        (100, "100.Pelican/c.jpg"),
        (101, "101.Crow/d.jpg"),
    ]
    files = {f"images/{name}": f"photo {name}" for _, name in photos}
    return {
        **files,
        "images.txt": "".join(f"{i} {name}\n" for i, (_, name) in enumerate(photos, 1)),
        "image_class_labels.txt": "".join(f"{i} {c}\n" for i, (c, _) in enumerate(photos, 1)),
        "classes.txt": "".join(f"{c} {c:03d}.bird\n" for c in range(1, 201)),
        "train_test_split.txt": "1 1\n2 0\n3 1\n4 0\n",
    }


def mat(**variables):
    scipy_io = pytest.importorskip("scipy.io")
    out = io.BytesIO()
    scipy_io.savemat(out, variables, do_compression=True)
    return out.getvalue()


def structs(rows):
    array = np.zeros((1, len(rows)), dtype=[(key, object) for key in rows[0]])
    for i, row in enumerate(rows):
        array[0, i] = tuple(row.values())
    return array


def names_cell(count):
    cell = np.empty((1, count), object)
    cell[0] = [f"Maker Model {c}" for c in range(1, count + 1)]
    return cell


def cars():
    rows = [
        {"relative_im_path": f"car_ims/{i:06d}.jpg", "bbox_x1": 3, "class": kind, "test": test}
        for i, (kind, test) in enumerate([(1, 0), (98, 1), (99, 0), (196, 1)], 1)
    ]
    files = {row["relative_im_path"]: f"car {i}" for i, row in enumerate(rows)}
    return {**files, "cars_annos.mat": mat(annotations=structs(rows), class_names=names_cell(196))}


def cars_devkit():
    rows = [
        [{"bbox_x1": 1, "class": kind, "fname": f"{i:05d}.jpg"} for i, kind in enumerate(kinds, 1)]
        for kinds in ((1, 98), (99, 196))
    ]
    return {
        **{f"cars_{part}/{i:05d}.jpg": f"{part} {i}" for part in ("train", "test") for i in (1, 2)},
        "devkit/cars_train_annos.mat": mat(annotations=structs(rows[0])),
        "devkit/cars_meta.mat": mat(class_names=names_cell(196)),
        "cars_test_annos_withlabels.mat": mat(annotations=structs(rows[1])),
    }


def sop():
    head = "image_id class_id super_class_id path\n"
    lines = {
        "train": ["1 1 1 bicycle_final/a_0.JPG", "2 1 1 bicycle_final/a_1.JPG"],
        "test": ["3 11319 2 cabinet_final/b_0.JPG"],
    }
    photos = {line.split()[3]: line for part in lines.values() for line in part}
    return {**photos, **{f"Ebay_{part}.txt": head + "\n".join(rows) + "\n" for part, rows in lines.items()}}


def inshop(base="Img/", eval_folder="Eval/"):
    rows = [("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train")]
    rows += [
        (f"img/MEN/Denim/id_00000008/0{i}_1_front.jpg", "id_00000008", part)
        for i, part in enumerate(("query", "gallery"))
    ]
    text = "3\nimage_name item_id evaluation_status\n" + "".join(
        f"{name}    {item}    {part}\n" for name, item, part in rows
    )
    return {**{base + name: name for name, _, _ in rows}, f"{eval_folder}list_eval_partition.txt": text}


def omniglot(*sets):
    return {
        f"{name}/{alphabet}/character0{c}/{100 + c}_{n:02d}.png": f"{alphabet} {c} {n}"
        for name, alphabet in sets
        for c in (1, 2)
        for n in (1, 2)
    }


def fashion(pack=gzip.compress, ending=".gz"):
    files = {}
    for prefix, size in (("train", 20), ("t10k", 10)):
        pixels = np.arange(size * 12, dtype=np.uint8).reshape(size, 4, 3)
        files[f"{prefix}-images-idx3-ubyte{ending}"] = pack(
            struct.pack(">HBBIII", 0, 8, 3, size, 4, 3) + pixels.tobytes()
        )
        files[f"{prefix}-labels-idx1-ubyte{ending}"] = pack(
            struct.pack(">HBBI", 0, 8, 1, size) + bytes(i % 10 for i in range(size))
        )
    return files


def lfw():
    photos = [
        f"{who}/{who}_{i:04d}.jpg"
        for who, size in (("Al_Pacino", 3), ("Bo_Derek", 1), ("Cy_Young", 2))
        for i in range(1, size + 1)
    ]
    pairs = "2\t1\nAl_Pacino\t1\t3\nAl_Pacino\t2\tBo_Derek\t1\nCy_Young\t1\t2\nCy_Young\t2\tBo_Derek\t1\n"
    return {**{f"lfw/{photo}": photo for photo in photos}, "pairs.txt": pairs}


def zipped(files, prefix=""):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(prefix + name, content)
    return out.getvalue()


def tarred(files, prefix=""):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(prefix + name)
            raw = content if isinstance(content, bytes) else content.encode()
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return out.getvalue()


def test_counts_are_the_published_ones():
    assert set(COUNTS) == set(BENCHMARKS)
    for name, counts in COUNTS.items():
        assert counts.items() <= BENCHMARKS[name][0].counts.items()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_is_absent_is_said_in_one_message(tmp_path, name):
    facts = BENCHMARKS[name][0]
    for root, what in (
        (None, "needs a root"),
        (tmp_path / "gone", "does not exist"),
        (tmp_path, f"not found in {tmp_path}"),
    ):
        with pytest.raises(ValueError, match=re.escape(what)) as caught:
            data.load(name, root=root)
        message = str(caught.value)
        assert facts.page in message and facts.layout in message and facts.files in message and "\n" not in message


def test_what_is_packed_is_seen(tmp_path):
    grow(tmp_path, {"CUB_200_2011.tgz": b"x", "notes.txt": b"x"})
    with pytest.raises(ValueError, match=r"CUB_200_2011\.tgz is there: unpack it .*Download"):
        data.load("cub200", root=tmp_path)
    with pytest.raises(ValueError, match="compressed archive; unpack it first"):
        data.load("cub200", root=tmp_path / "CUB_200_2011.tgz")
    with pytest.raises(ValueError, match=r"root must be a folder, a \.zip or an uncompressed \.tar, got .*notes\.txt"):
        data.load("orl", root=tmp_path / "notes.txt")


@pytest.mark.parametrize(
    "name, files",
    [
        ("cub200", cub),
        ("cars196", cars),
        ("sop", sop),
        ("inshop", inshop),
        ("fashion-mnist", fashion),
        ("lfw", lfw),
        ("omniglot", lambda: omniglot(("images_background", "Greek"), ("images_evaluation", "Atlantean"))),
    ],
)
def test_a_part_is_refused_unless_wished(tmp_path, name, files):
    grow(tmp_path, files())
    with pytest.raises(ValueError, match=f"^{name}: it must have .* found .* incomplete"):
        data.load(name, root=tmp_path)
    items = data.load(name, root=tmp_path, partial=True)
    assert items.note.startswith(f"{name}, in part: ") and items.name == name
    assert len(set(items.names)) == len(items) > 0 and all(
        items.pictures.read(i) is not None for i in range(len(items))
    )


@pytest.mark.parametrize("home", ["", "CUB_200_2011/", "tar", "zip"])
def test_cub(tmp_path, home):
    if home in ("tar", "zip"):
        grow(tmp_path, {f"x.{home}": (tarred if home == "tar" else zipped)(cub(), "CUB_200_2011/")})
    else:
        grow(tmp_path, {home + name: content for name, content in cub().items()})
    items = data.load("cub200", root=tmp_path, partial=True)
    assert items.labels.tolist() == [0, 0, 99, 100] and items.split == ["train"] * 3 + ["test"]
    assert items.closed_split == ["train", "test", "train", "test"] and len(items.classes) == 200
    assert items.pictures.read(2) == b"photo 100.Pelican/c.jpg" and items.names[2] == "images/100.Pelican/c.jpg"


def test_listed_photos_that_are_missing(tmp_path):
    files = cub()
    del files["images/001.Albatross/b.jpg"]
    grow(tmp_path, files)
    with pytest.raises(ValueError, match=r"1 of 4 pictures, such as images/001\.Albatross/b\.jpg"):
        data.load("cub200", root=tmp_path)
    assert len(data.load("cub200", root=tmp_path, partial=True)) == 3
    (tmp_path / "classes.txt").unlink()
    with pytest.raises(ValueError, match=r"has no classes\.txt"):
        data.load("cub200", root=tmp_path, partial=True)
    (tmp_path / "classes.txt").write_text("1 a\n2\n")
    with pytest.raises(ValueError, match=r"classes\.txt must have 2 words per line, line 2 has 1"):
        data.load("cub200", root=tmp_path, partial=True)


@pytest.mark.parametrize("files", [cars, cars_devkit])
def test_cars(tmp_path, files):
    items = data.load("cars196", root=grow(tmp_path, files()), partial=True)
    assert items.labels.tolist() == [0, 97, 98, 195] and items.split == ["train", "train", "test", "test"]
    assert sorted(items.closed_split) == ["test", "test", "train", "train"]
    assert items.classes[195] == "Maker Model 196" and items.pictures.read(0) in (b"car 0", b"train 1")


def test_sop(tmp_path):
    grow(tmp_path, {"Stanford_Online_Products.zip": zipped(sop(), "Stanford_Online_Products/")})
    items = data.load("sop", root=tmp_path, partial=True)
    assert items.classes == ["bicycle 1", "cabinet 11319"] and items.labels.tolist() == [0, 0, 1]
    assert items.split == ["train", "train", "test"]


@pytest.mark.parametrize("base, eval_folder", [("Img/", "Eval/"), ("", ""), ("", "Eval/")])
def test_inshop(tmp_path, base, eval_folder):
    items = data.load("inshop", root=grow(tmp_path, inshop(base, eval_folder)), partial=True)
    assert items.split == ["train", "query", "gallery"] and items.labels.tolist() == [0, 1, 1]
    assert items.pictures.read(0).startswith(b"img/WOMEN")


def test_omniglot(tmp_path):
    content = omniglot(("images_background", "Greek"), ("images_evaluation", "Atlantean"))
    items = data.load("omniglot", root=grow(tmp_path / "a", content), partial=True)
    assert items.classes[0] == "Atlantean/character01" and items.split == ["test"] * 4 + ["train"] * 4
    assert items.pictures.read(7) == b"Greek 2 2" and items.names[7] == "Greek/character02/102_02.png"
    small = omniglot(
        ("images_background_small1", "Greek"),
        ("images_background_small2", "Greek"),
        ("images_background_small2", "Latin"),
    )
    root = grow(tmp_path / "b", {})
    for name in ("images_background_small1", "images_background_small2"):
        grow(root, {f"{name}.zip": zipped({key: value for key, value in small.items() if key.startswith(name)})})
    with pytest.raises(ValueError, match="images_background_small1 must have 136 characters, found 2"):
        data.load("omniglot", root=root)
    union = data.load("omniglot", root=root, partial=True)
    assert len(union) == 8 and union.split is None and union.pictures.read(0) == b"Greek 1 1"
    assert (
        union.pictures.read(7) == b"Latin 2 2" and "the union of background_small1 and background_small2" in union.note
    )


@pytest.mark.parametrize("pack, ending", [(gzip.compress, ".gz"), (bytes, "")])
def test_fashion_mnist(tmp_path, pack, ending):
    items = data.load("fashion-mnist", root=grow(tmp_path / "raw", fashion(pack, ending)).parent, partial=True)
    assert items.pictures.read(21).tolist() == np.arange(12, 24).reshape(4, 3).tolist()
    assert items.labels.tolist() == [i % 10 for i in range(30)] and items.split == ["train"] * 20 + ["test"] * 10
    name = f"t10k-labels-idx1-ubyte{ending}"
    content = (tmp_path / "raw" / name).read_bytes()
    for damaged in (content[:-3], b"", pack(struct.pack(">HBBI", 0, 8, 1, 30) + bytes(10))):
        (tmp_path / "raw" / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{name} is corrupt"):
            data.load("fashion-mnist", root=tmp_path, partial=True)


def test_lfw(tmp_path):
    items = data.load("lfw", root=grow(tmp_path, lfw()), partial=True)
    assert items.classes == ["Al_Pacino", "Bo_Derek", "Cy_Young"] and items.split is None
    named = [[items.names[i].split("/")[-1][:-4] for i in pair] for pair in items.pairs.items]
    assert named[1] == ["Al_Pacino_0002", "Bo_Derek_0001"] and named[2] == ["Cy_Young_0001", "Cy_Young_0002"]
    assert items.pairs.same.tolist() == [True, False, True, False] and items.pairs.fold.tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"1 class has a single image \(Bo_Derek\)"):
        data.divide(items)
    (tmp_path / "pairs.txt").write_text("2\t1\nAl_Pacino\t1\t9\nA\t1\tB\t1\nA\t1\t2\nA\t1\tB\t2\n")
    with pytest.raises(ValueError, match=r"photos that pairs\.txt names are not there, the first Al_Pacino_0009\.jpg"):
        data.load("lfw", root=tmp_path)
    for text in ("10\t300\nA\t1\t2\n", "2\t1\nA 1\n", "x y\n"):
        (tmp_path / "pairs.txt").write_text(text)
        with pytest.raises(ValueError, match=r"^lfw: pairs\.txt"):
            data.load("lfw", root=tmp_path, partial=True)
    (tmp_path / "pairs.txt").unlink()
    with pytest.raises(ValueError, match=r"no pairs\.txt"):
        data.load("lfw", root=tmp_path)
    assert data.load("lfw", root=tmp_path, partial=True).pairs is None


def test_coil_in_its_official_layout(tmp_path):
    files = {f"coil-20-proc/obj{o}__{p}.png": f"{o} {p}" for o in range(1, 21) for p in range(72)}
    items = data.load("coil20", root=grow(tmp_path, {"coil-20-proc.zip": zipped(files)}))
    assert items.classes[:2] == ["obj1", "obj2"] and items.pictures.read(72 * 9 + 71) == b"10 71"
    assert np.allclose(items.targets[18], [0.0, 1.0]) and np.allclose(items.targets[36], [-1.0, 0.0])
    step = np.linalg.norm(items.targets[1] - items.targets[0])
    assert np.isclose(np.linalg.norm(items.targets[71] - items.targets[0]), step), "the circle closes"


def test_coil_in_matlab_files(tmp_path):
    rows = np.random.default_rng(0).random((6, 16))
    grow(tmp_path, {"COIL20.mat": mat(fea=rows, gnd=np.array([[1, 1, 1, 2, 2, 2]]).T)})
    items = data.load("coil20", root=tmp_path, partial=True)
    assert np.array_equal(items.pictures.read(4), np.rint(255 * rows[4]).reshape(4, 4).T.astype(np.uint8))
    assert items.names == ["obj1__0", "obj1__1", "obj1__2", "obj2__0", "obj2__1", "obj2__2"]
    grow(tmp_path, {"COIL20.mat": mat(fea=rows)})
    with pytest.raises(ValueError, match="must have square pictures X"):
        data.load("coil20", root=tmp_path, partial=True)


def test_orl(tmp_path):
    files = {f"s{s}/{i}.pgm": f"{s} {i}" for s in range(1, 41) for i in range(1, 11)}
    for place, content in (("tar", tarred), ("zip", zipped)):
        items = data.load("orl", root=grow(tmp_path / place, {f"orl.{place}": content(files)}))
        assert items.classes == [f"s{s}" for s in range(1, 41)] and items.pictures.read(19) == b"2 10"
    assert data.load("orl", root=grow(tmp_path / "folder", files)).names[:2] == ["s1/1.pgm", "s1/2.pgm"]


# MATLAB files


@pytest.mark.parametrize("compressed", [False, True])
def test_matlab_as_scipy_writes_it(compressed):
    scipy_io = pytest.importorskip("scipy.io")
    cell = np.empty((2, 2), object)
    cell[:] = [["a", "bc"], ["", "délta"]]
    kinds = ["i1", "u1", "i2", "u2", "i4", "u4", "f4", "f8", "i8", "u8"]
    numbers = {f"n_{kind}": (np.arange(24).reshape(2, 3, 4) * 5).astype(kind) for kind in kinds}
    inner = structs(
        [
            {"path": "x.jpg", "box": np.array([[1, 2]]), "deep": structs([{"y": 3.5}])},
            {"path": "y", "box": 0, "deep": 1},
        ]
    )
    wide = np.array([[1.0, 2.0, 300.0]])  # MATLAB stores doubles that are whole as small integers
    out = io.BytesIO()
    scipy_io.savemat(
        out,
        {**numbers, "cell": cell, "s": inner, "text": "hello", "e": np.empty((0, 0)), "wide": wide},
        do_compression=compressed,
    )
    variables = matlab.read(out.getvalue(), "x.mat")
    for key, value in numbers.items():
        assert variables[key].dtype == value.dtype and np.array_equal(variables[key], value), key
    assert variables["text"] == "hello" and variables["e"].size == 0 and np.array_equal(variables["wide"], wide)
    assert variables["cell"].shape == (2, 2) and variables["cell"][0, 1] == "bc" and variables["cell"][1, 1] == "délta"
    assert (
        variables["s"].shape == (1, 2) and variables["s"][0, 0]["path"] == "x.jpg" and variables["s"][0, 1]["box"] == 0
    )
    assert variables["s"][0, 0]["box"].tolist() == [[1, 2]] and variables["s"][0, 0]["deep"][0, 0]["y"] == 3.5


def read_or_refused(content):
    """Read, or refused with one sentence; never another error."""
    try:
        matlab.read(content, "x.mat")
    except ValueError as error:
        return str(error)
    return "x.mat: a MATLAB v5 file that is corrupt"


def test_damaged_matlab_files():
    content = mat(x=np.arange(1000.0), s=structs([{"a": "b"}]))
    with pytest.raises(ValueError, match=r"x\.mat: not a MATLAB v5 file$"):
        matlab.read(b"PK" + bytes(200), "x.mat")
    with pytest.raises(ValueError, match="save it with -v7"):
        matlab.read(b"MATLAB 7.3 MAT-file" + bytes(500), "x.mat")
    plain = io.BytesIO()
    pytest.importorskip("scipy.io").savemat(plain, {"x": np.arange(9.0), "s": structs([{"a": "b"}])})
    rng = np.random.default_rng(0)
    broken = [content[:cut] for cut in range(130, len(content) - 1, 7)]
    for _ in range(300):
        copy = bytearray(plain.getvalue())
        copy[rng.integers(128, len(copy))] = rng.integers(256)
        broken.append(bytes(copy))
    assert {sentence[:39] for sentence in map(read_or_refused, broken)} == {"x.mat: a MATLAB v5 file that is corrupt"}


def test_lists_in_another_format(tmp_path):
    grow(tmp_path, cub())
    (tmp_path / "image_class_labels.txt").write_text("1 1\n2 1\n3 hundred\n4 101\n")
    with pytest.raises(ValueError, match=r'cub200: image_class_labels\.txt must number its classes, got "hundred"'):
        data.load("cub200", root=tmp_path, partial=True)
    (tmp_path / "image_class_labels.txt").write_text("1 1\n2 1\n4 101\n")
    with pytest.raises(ValueError, match=r"^cub200: the lists in .* are not in the publisher's format"):
        data.load("cub200", root=tmp_path, partial=True)
    (tmp_path / "image_class_labels.txt").write_text("1 1\n2 1\n3 100\n4 201\n")
    with pytest.raises(ValueError, match=r"^cub200: labels must be from 0 to 199, got 200"):
        data.load("cub200", root=tmp_path, partial=True)
    grow(tmp_path / "shop", inshop())
    path = tmp_path / "shop" / "Eval" / "list_eval_partition.txt"
    path.write_text(path.read_text().replace("query", "quest"))
    with pytest.raises(ValueError, match=r"^inshop: split must be train, val, test, query, gallery, got 'quest'"):
        data.load("inshop", root=tmp_path / "shop", partial=True)


# Real sets


def opened(items, i):
    return Image.open(io.BytesIO(items.pictures.read(i)))


def test_real_cub(shared_data):
    items = data.load("cub200", root=shared_data("CUB_200_2011"))
    assert (items.split.count("train"), items.split.count("test")) == (5864, 5924) and len(items.classes) == 200
    assert (items.closed_split.count("train"), items.closed_split.count("test")) == (5994, 5794)
    assert "as published" in items.note and min(opened(items, 11787).size) == 112
    parts = data.divide(items)
    assert len(np.unique(items.labels[parts.val])) == 20 and items.labels[parts.val].max() < 100
    assert len(data.divide(items, closed=True).test) == 5794


def test_real_fashion_mnist(shared_data):
    items = data.load("fashion-mnist", root=shared_data("fashion-mnist"))
    assert len(items) == 70000 and np.bincount(items.labels).tolist() == [7000] * 10 and "as published" in items.note
    assert items.classes[items.labels[0]] == "Ankle boot"


def test_real_omniglot(shared_data):
    items = data.load("omniglot", root=shared_data("omniglot"))
    assert len(items) == 4840 and len(items.classes) == 242 and opened(items, 4839).size == (105, 105)
    assert (
        len({name.split("/")[0] for name in items.names}) == 8
        and len(set(map(items.pictures.read, range(4840)))) == 4840
    )


def test_real_coil(shared_data):
    scipy_io = pytest.importorskip("scipy.io")
    root = shared_data("coil20")
    items = data.load("coil20", root=root)
    stored = scipy_io.loadmat(root / "COIL20_32x32.mat")
    assert np.array_equal(items.pictures.pixels.transpose(0, 2, 1).reshape(1440, -1), stored["X"])
    assert np.array_equal(items.labels + 1, stored["Y"].ravel()) and items.targets.shape == (1440, 2)
    # Seen from all sides a duck is as wide on its left as on its right, and wider below than above: it sits upright.
    duck = items.pictures.pixels[:72].astype(float).mean(0)
    left, right, above, below = duck[:, :16].sum(), duck[:, 16:].sum(), duck[:16].sum(), duck[16:].sum()
    assert abs(left / right - 1) < 0.2 and below > 1.3 * above


def test_real_orl(shared_data):
    items = data.load("orl", root=shared_data("orl-faces"))
    assert len(items) == 400 and opened(items, 399).size == (92, 112) and "as published" in items.note
    assert len(set(map(items.pictures.read, range(400)))) == 400
