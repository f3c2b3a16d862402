"""A folder that may be read in two ways, as parts of a split or as classes, is never read without a word."""

import zipfile

import numpy as np
import pytest
from PIL import Image

from commands import output_of, photos, run
from nearkin import data, gallery, training
from nearkin.data import folder_layout

KINDS = ("heron", "ibis", "jay")


def grow(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def classed(*folders):
    """Two pictures of every kind in each folder."""
    return [f"{folder}/{kind}/{i}.jpg" for folder in folders for kind in KINDS for i in (1, 2)]


def refused(root, **settings):
    with pytest.raises(ValueError, match=r".") as caught:
        data.load(root, **settings)
    sentence = str(caught.value)
    assert sentence.startswith(str(root)) and "\n" not in sentence and len(sentence) < 700
    return sentence.removeprefix(str(root))


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize(
    "names, parts, beside",
    [
        (classed("train", "val", "test", "extra"), "train,val,test", ["extra"]),
        ([*classed("data/train", "data/test"), "docs/1.jpg"], "data/train,data/test", ["docs"]),
        (classed("training_set", "test_set"), "training_set,test_set", []),
        (classed("train2017", "val2017"), "train2017,val2017", []),
        (classed("bounding_box_train", "query", "gallery"), "bounding_box_train,query,gallery", []),
        (classed("a/b/Trainset", "a/b/Testing", "c"), "a/b/Trainset,a/b/Testing", ["c"]),
        ([*classed("train", "more"), "test/1.jpg"], "train,test", ["more"]),
    ],
)
def test_parts_beside_other_folders_are_refused_with_the_choices(tmp_path, names, parts, beside, labelled):
    sentence = refused(grow(tmp_path, *names), labelled=labelled)
    assert f"its folders {parts.replace(',', ', ')} may be the parts of a split" in sentence
    assert f"--split-folders {parts} " in sentence and "--split-folders none" in sentence
    assert "--leaf-classes" in sentence and all(f"beside {folder}" in sentence for folder in beside)


@pytest.mark.parametrize("archive", [False, True])
def test_chosen_parts_are_read_and_the_rest_is_left_out(tmp_path, archive):
    root = grow(tmp_path / "photos", *classed("train", "val", "more/test", "extra"), "extra/loose.jpg")
    if archive:
        with zipfile.ZipFile(tmp_path / "photos.zip", "w") as packed:
            for path in sorted(root.rglob("*.jpg")):
                packed.write(path, f"all/{path.relative_to(root)}")
        root = tmp_path / "photos.zip"
    for labelled in (True, False):
        items = data.load(root, labelled=labelled, split_folders=["train", "val/", "more/test"])
        assert items.classes == list(KINDS) and len(items) == 18
        split = {
            name.removeprefix("all/").rpartition("/")[0]: part
            for name, part in zip(items.names, items.split, strict=True)
        }
        assert split == {
            f"{folder}/{kind}": folder.split("/")[-1] for folder in ("train", "val", "more/test") for kind in KINDS
        }
        assert any("7 images outside the folders of the parts, such as" in line for line in items.ignored)
    renamed = data.load(root, split_folders=["extra=train", "val=test"])
    assert set(renamed.split) == {"train", "test"} and len(renamed) == 12
    plain = data.load(root, split_folders=["none"])
    assert plain.split is None and plain.classes == ["extra", "more", "train", "val"]


def test_a_leaf_folder_may_be_a_class(tmp_path):
    root = grow(tmp_path, "birds/heron/1.jpg", "birds/2.jpg", "cats/3.jpg", "birds/heron/young/4.jpg", "loose.jpg")
    assert data.load(root).classes == ["birds", "cats"]
    items = data.load(root, leaf_classes=True)
    assert items.classes == ["birds", "birds/heron", "birds/heron/young", "cats"] and len(items) == 4
    assert items.ignored == ["1 image outside class folders, such as loose.jpg"]
    grow(tmp_path / "split", *classed("train", "test"), "train/heron/young/3.jpg")
    split = data.load(tmp_path / "split", leaf_classes=True)
    assert split.classes == ["heron", "heron/young", "ibis", "jay"] and set(split.split) == {"train", "test"}
    assert "exclude each other" in refused(root, leaf_classes=True, levels=["order"])


def test_images_are_not_lost_by_uneven_depths(tmp_path):
    flat = grow(tmp_path / "flat", *classed("train"), *[f"test/{i}.jpg" for i in range(876)])
    assert refused(flat).startswith(": test holds 876 images in no class folder, such as test/0.jpg; train has class")
    assert refused(flat).endswith("--split-folders train leaves test out")
    assert len(data.load(flat, split_folders=["train"])) == 6 and len(data.load(flat, labelled=False)) == 882
    assert "test holds 876 images" in refused(flat, split_folders=["train", "test"])

    levels = grow(tmp_path / "levels", "birds/heron/1.jpg", "birds/ibis/1.jpg", "cats/1.jpg", "cats/2.jpg")
    assert ": cats holds 2 images in no class folder, such as cats/1.jpg" in refused(levels, levels=["order"])
    assert data.load(levels).classes == ["birds", "cats"]

    loose = grow(tmp_path / "loose", *classed("."), *[f"{i}.jpg" for i in range(7)])
    assert ": 7 of its 13 images are in no class folder, such as 0.jpg; class folders are in heron" in refused(loose)

    both = grow(tmp_path / "both", "train/1.jpg", "train/2.jpg", "test/1.jpg")
    assert "test, train are parts of a split by their names, and hold no class folders" in refused(both)
    assert data.load(both, split_folders=["none"]).classes == ["test", "train"]
    assert data.load(both, labelled=False).labels is None


def test_class_folders_that_are_not_read_are_said(tmp_path):
    root = grow(tmp_path, *classed("."), "loose.jpg")
    note = data.load(root, labelled=False).note
    assert note == f"{root}: images without classes, since 1 of 7 are in no class folder, such as loose.jpg"


def test_folders_with_one_meaning_are_read_as_before(tmp_path):
    for number, names in enumerate(
        (
            classed("train", "val", "test"),
            [*classed("."), "test/1.jpg", "train/1.jpg"],  # classes that are called so
            ["train/1.jpg", "train/express/2.jpg", "boat/1.jpg", "test/1.jpg"],
            [f"{kind}/{part}/{i}.jpg" for kind in KINDS for part in ("train", "test") for i in (1, 2)],
            classed("developers", "testers", "trainees"),
        )
    ):
        root = grow(tmp_path / str(number), *names)
        items, before = data.load(root), data.load(root, split_folders=folder_layout.AS_BEFORE)
        assert (items.names, items.classes, items.split) == (before.names, before.classes, before.split)
        assert len(items) == len(names)


@pytest.mark.parametrize(
    "chosen, sentence",
    [
        (["trian"], ': split_folders: "trian" is no folder with images; its folders are extra'),
        (["extra"], ': split_folders: of which part is "extra"? extra=train, or val, test, query, gallery'),
        (["extra=all"], ': split_folders: of which part is "extra=all"?'),
        (["train", "train/heron=test"], ': split_folders: "train/heron" is named twice, or within another one'),
    ],
)
def test_parts_that_cannot_be_chosen(tmp_path, chosen, sentence):
    assert refused(grow(tmp_path, *classed("train", "extra")), split_folders=chosen).startswith(sentence)


def test_other_sources_have_no_folders(tmp_path):
    (tmp_path / "t.csv").write_text("path,label\n")
    for source in (tmp_path / "t.csv", "glyphs", "orl", "webdataset:x"):
        with pytest.raises(ValueError, match="split_folders is for folders and archives of pictures"):
            data.load(source, split_folders=["train"])
    with pytest.raises(ValueError, match="leaf_classes is for folders"):
        data.load("glyphs", leaf_classes=True)


def test_hostile_names_take_no_time():
    assert folder_layout.part_of("dataset" * 10_000) is None
    assert folder_layout.part_of("train" * 10_000 + "_set" * 10_000) is None


# In every verb


@pytest.fixture
def home(tmp_path, monkeypatch):
    """photos/: train and test of different classes, and a folder beside them that is no part."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    photos(tmp_path / "photos", classes=10)
    for c in range(10):
        target = tmp_path / "photos" / ("train" if c < 7 else "test") / f"class{c}"
        target.parent.mkdir(exist_ok=True)
        (tmp_path / "photos" / f"class{c}").rename(target)
    (tmp_path / "photos" / "extra").mkdir()
    for i in range(3):
        Image.fromarray(np.full((20, 20, 3), 60 * i, np.uint8)).save(tmp_path / "photos" / "extra" / f"{i}.png")
    return tmp_path


CHOICE = ("--split-folders", "train,test")
QUICK = ("--epochs", 1, "--set", "training.batches=2", "--set", "encoder.dim=8", "--device", "cpu")


def test_the_choice_is_taken_by_every_verb_that_reads_a_folder(home):
    output_of(run("train", "photos", *QUICK, *CHOICE, "--out", "trained", "--quiet"))
    assert 'split_folders = ["train", "test"]' in (home / "trained" / "recipe.toml").read_text()
    output_of(run("train", "--resume", "trained", "--quiet"))
    output_of(run("evaluate", "trained", "--quiet"))  # its own source, as it was read
    verbs = {
        "train": ("train", "photos", *QUICK, "--out", "again", "--quiet"),
        "compare": ("compare", "photos", "--losses", "triplet,contrastive", "--out", "compared", "--folds", 6),
        "evaluate": ("evaluate", "trained", "./photos/", "--part", "all"),
        "embed": ("embed", "trained", "./photos/../photos", "--out", "out.npz"),
        "enrol": ("enrol", "trained", "./photos/../photos", "--gallery", "g.gallery"),
        "group": ("group", "./photos/../photos", "--run", "trained", "--similarity", 0.9, "--quiet"),
        "serve": ("serve", "photos", "--run", "trained", "--host", "0.0.0.0", "--quiet"),
    }
    later = {
        "compare": "6 folds need at least 12 training classes",
        "serve": "token",
    }  # what is refused once the folder is read
    for name, words in verbs.items():
        if name != "evaluate":
            assert "may be the parts of a split" in output_of(run(*words), 2), name
        result = run(*words, *CHOICE)
        output_of(result, 2 if name in later else 0)
        assert later.get(name, "") in result.output, name
    with np.load("out.npz", allow_pickle=False) as stored:
        assert len(stored["embeddings"]) == 60 and set(stored["labels"]) == {f"class{c}" for c in range(10)}
    with gallery.Gallery.open("g.gallery") as opened:
        assert set(opened.labels()) == {f"class{c}" for c in range(10)}
    reading = data.Reading(split_folders=("train", "test"))
    assert (
        training.vectors_of("trained", "photos/../photos", device="cpu", reading=reading)[0].embeddings.shape[0] == 60
    )
    assert "its own way" in output_of(run("embed", "trained", "photos", "--leaf-classes", "--out", "x.npz"), 2)


def test_a_run_of_before_goes_on_as_it_began(home, monkeypatch):
    """It read the folders as four classes, of which extra is one; now that would be refused."""
    monkeypatch.setattr(folder_layout, "check_layout", lambda *_: None)
    for c in range(10):
        part = "train" if c < 7 else "test"
        (home / "photos" / part / f"class{c}").rename(home / "photos" / f"{part}_{c}_set")
    for c in (0, 1, 7):  # folders in three of them, so that they look like parts
        folder = home / "photos" / f"{'train' if c < 7 else 'test'}_{c}_set"
        (folder / "within").mkdir()
        for path in list(folder.glob("*.png")):
            path.rename(folder / "within" / path.name)
    output_of(run("train", "photos", *QUICK, "--out", "old", "--quiet"))
    assert "split_folders" not in (home / "old" / "recipe.toml").read_text()
    monkeypatch.undo()
    monkeypatch.chdir(home)
    assert "may be the parts of a split" in output_of(run("train", "photos", *QUICK, "--out", "new"), 2)
    (home / "old" / "report.html").unlink()
    output_of(run("train", "--resume", "old", "--quiet"))
    output_of(run("report", "old", "--quiet"))
    output_of(run("evaluate", "old", "--quiet"))
    assert (home / "old" / "report.html").is_file()
