"""Sources of other frameworks: Hugging Face datasets, WebDataset shards and map-style datasets, all from the disk."""

import io
import json
import pickle
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin import data, training
from nearkin.data import image_cache
from nearkin.training.config.recipe import read as read_recipe

KINDS = ["hf-dataset", "webdataset", "dataset"]
CLASSES = ["heron", "ibis", "jay"]


def picture(number):
    pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def rows(parts):
    """(part, class, camera, picture) of 6 pictures per class and part."""
    return [
        (part, name, f"camera {i % 2}", picture(100 * p + 10 * c + i))
        for p, part in enumerate(parts)
        for c, name in enumerate(CLASSES)
        for i in range(6)
    ]


def hf_dataset(folder, parts, broken=None):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=CLASSES),
            "camera": datasets.Value("string"),
            "kind": datasets.Value("string"),
        }
    )
    made = {}
    for part in parts:
        chosen = [row for row in rows(parts) if row[0] == part]
        columns = {
            "image": [{"bytes": broken if broken and i == 0 else row[3], "path": None} for i, row in enumerate(chosen)],
            "label": [CLASSES.index(row[1]) for row in chosen],
            "camera": [row[2] for row in chosen],
            "kind": ["small" if row[1] == "jay" else "large" for row in chosen],
        }
        made[part] = datasets.Dataset.from_dict(columns, features=features)
    (datasets.DatasetDict(made) if len(made) > 1 else made[parts[0]]).save_to_disk(folder / "set")
    return f"hf-dataset:{folder / 'set'}"


def webdataset(folder, parts, broken=None):
    (folder / "shards").mkdir(exist_ok=True)
    every = rows(parts)
    for part in parts:
        chosen = [row for row in every if row[0] == part]
        for shard in range(2):
            with tarfile.open(folder / "shards" / f"{part}-{shard:03}.tar", "w") as archive:
                for i, (_, name, camera, content) in enumerate(chosen[shard::2]):
                    facts = {"camera": camera, "kind": "small" if name == "jay" else "large"}
                    content = broken if broken and i == shard == 0 else content
                    members = {"png": content, "cls": name.encode(), "json": json.dumps(facts).encode()}
                    for ending, data_ in members.items():
                        info = tarfile.TarInfo(f"{i:04}.{ending}")
                        info.size = len(data_)
                        archive.addfile(info, io.BytesIO(data_))
    return f"webdataset:{folder / 'shards'}"


class Birds(torch.utils.data.Dataset):
    """As torchvision's sets: `classes`, `targets`, and dataset[i] = (a Pillow image, a label)."""

    classes = CLASSES

    def __init__(self, some, broken=None):
        self.rows, self.broken = some, broken
        self.targets = [CLASSES.index(row[1]) for row in some]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        content = self.broken if self.broken and i == 0 else self.rows[i][3]
        return Image.open(io.BytesIO(content)).convert("RGB"), self.targets[i]


MADE = {}  # what `dataset:test_framework_sources:made` is


def made(root=None):
    return MADE["dataset"]


def map_dataset(folder, parts, broken=None):
    every = rows(parts)
    sets = {part: Birds([row for row in every if row[0] == part], broken) for part in parts}
    MADE["dataset"] = sets if len(parts) > 1 else sets[parts[0]]
    sys.modules["framework_birds"] = sys.modules[__name__]
    return "dataset:framework_birds:made"


BUILD = {"hf-dataset": hf_dataset, "webdataset": webdataset, "dataset": map_dataset}


def answer(source, **settings):
    with pytest.raises(ValueError, match=r".") as caught:
        data.load(source, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_items_classes_and_pictures(kind, tmp_path):
    items = data.load(BUILD[kind](tmp_path, ["train"]))
    expected = sorted((name, content) for _, name, _, content in rows(["train"]))
    assert items.classes == CLASSES and len(items) == len(set(items.names)) == 18 and items.split is None
    got = [(items.classes[label], items.pictures.read(i)) for i, label in enumerate(items.labels)]
    if kind == "dataset":
        pixels = [np.asarray(Image.open(io.BytesIO(content))) for _, content in expected]
        assert all(any(np.array_equal(p, q) for q in pixels) for _, p in got)
    else:
        assert sorted(got) == expected
    assert len({items.pictures.stamp(i) for i in range(18)}) == 18
    some = items.take([5, 0])
    assert some.pictures.stamp(1) == items.pictures.stamp(0) and len(some.pictures) == 2
    assert "root is for" in answer(items.name, root="x") if kind != "dataset" else True


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_split(kind, tmp_path):
    items = data.load(BUILD[kind](tmp_path, ["train", "validation", "test"]))
    assert len(items) == 54 and {p: items.split.count(p) for p in items.split} == {"train": 18, "val": 18, "test": 18}
    assert "its own split" in items.note or "their own split" in items.note


@pytest.mark.parametrize("kind", KINDS)
def test_threads_read_the_same(kind, tmp_path):
    items = data.load(BUILD[kind](tmp_path, ["train"]))
    one = [np.asarray(items.pictures.read(i)).tobytes() for i in range(18)]
    with ThreadPoolExecutor(8) as pool:
        many = list(pool.map(lambda i: np.asarray(items.pictures.read(i % 18)).tobytes(), range(180)))
    assert many == one * 10
    if kind != "dataset":  # a worker process gets a copy
        again = pickle.loads(pickle.dumps(items.pictures))
        assert again.read(7) == items.pictures.read(7) and again.stamp(7) == items.pictures.stamp(7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_picture_is_reported_by_name(kind, tmp_path):
    items = data.load(BUILD[kind](tmp_path, ["train"], broken=b"\x89PNG not a picture"))
    stored = image_cache.store(items.pictures, items.names, side=8, unreadable="skip", cache=False)
    assert [i for i, _ in stored.bad] == [0] and len(stored.bad[0][1]) > 10
    with pytest.raises(ValueError, match=items.names[0].split("/")[-1]):
        image_cache.store(items.pictures, items.names, side=8, cache=False)


@pytest.mark.parametrize("kind", ["hf-dataset", "webdataset"])
def test_groups_and_levels(kind, tmp_path):
    source = BUILD[kind](tmp_path, ["train"])
    items = data.load(source, levels=["kind"], group_column="camera")
    assert set(items.groups) == {"camera 0", "camera 1"}
    assert (
        items.levels[0].name == "kind"
        and len(items.levels[0].names if hasattr(items.levels[0], "names") else "ab") == 2
    )
    assert "specie" in answer(source, levels=["specie"])


def test_hf_datasets_that_cannot_be_used(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    source = hf_dataset(tmp_path, ["train", "test"])
    assert "options must be image, label, group, split, config" in answer(f"{source}?lable=x")
    assert 'no column "fine"' in answer(f"{source}?label=fine")
    assert "holds no pictures" in answer(f"{source}?image=camera")
    assert 'split must be train, test, got "dev"' in answer(f"{source}?split=dev")
    assert len(data.load(f"{source}?split=test&label=camera").classes) == 2
    assert len(data.load(f"{source}?split=train&group=camera").groups) == 18
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "texts")
    assert "one column of pictures" in answer(f"hf-dataset:{tmp_path / 'texts'}")
    (tmp_path / "empty").mkdir()
    assert "cannot be opened" in answer(f"hf-dataset:{tmp_path / 'empty'}")
    assert "must follow" in answer("hf-dataset:")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "needs the package datasets: pip install" in answer(source)


def test_no_code_of_a_named_dataset_is_run(monkeypatch):
    """Older versions of the library have scripts of datasets, and ask whether to run them."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        raise ValueError("it has a script")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert "cannot be opened (it has a script)" in answer("hf-dataset:someone/birds?config=small")
    assert asked == [(("someone/birds", "small"), {"trust_remote_code": False})]


def test_a_changed_dataset_changes_its_stamps(tmp_path):
    pytest.importorskip("datasets")
    before = data.load(hf_dataset(tmp_path / "one", ["train"])).pictures.stamp(3)
    assert data.load(f"hf-dataset:{tmp_path / 'one' / 'set'}").pictures.stamp(3) == before
    after = data.load(hf_dataset(tmp_path / "two", ["train"], broken=picture(999))).pictures.stamp(3)
    assert after != before


def test_shards_by_pattern_and_bad_ones(tmp_path):
    folder = webdataset(tmp_path, ["train", "test"]).removeprefix("webdataset:")
    assert len(data.load(f"webdataset:{folder}/train-{{000..001}}.tar")) == 18
    assert len(data.load(f"webdataset:{folder}/te*.tar")) == 18
    assert "1 of its 3 shards are not there" in answer(f"webdataset:{folder}/train-{{000..002}}.tar")
    assert "is empty" in answer(f"webdataset:{folder}/train-{{3..1}}.tar")
    assert "no .tar files there" in answer(f"webdataset:{folder}/x*.tar")
    (tmp_path / "none").mkdir()
    assert "no .tar files there" in answer(f"webdataset:{tmp_path / 'none'}")
    with tarfile.open(tmp_path / "none" / "a.tar", "w") as archive:
        info = tarfile.TarInfo("1.png")
        info.size = len(picture(1))
        archive.addfile(info, io.BytesIO(picture(1)))
    assert "1 pictures have no class, the first a.tar/1.png" in answer(f"webdataset:{tmp_path / 'none'}")
    assert data.load(f"webdataset:{tmp_path / 'none'}", labelled=False).labels is None
    whole = (tmp_path / "none" / "a.tar").read_bytes()
    (tmp_path / "none" / "a.tar").write_bytes(whole[:700])
    assert "incomplete" in answer(f"webdataset:{tmp_path / 'none'}")
    (tmp_path / "none" / "a.tar").write_bytes(b"no archive at all" * 100)
    assert "not a readable .tar archive" in answer(f"webdataset:{tmp_path / 'none'}")


def test_map_datasets_of_tensors_and_bad_ones():
    class Tensors(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.full((3, 4, 5), i / 4), torch.tensor(i % 2)

    items = data.from_dataset(Tensors(), "tensors")
    assert items.classes == ["0", "1"] and items.labels.tolist() == [0, 1, 0, 1]
    assert items.pictures.read(2).shape == (4, 5, 3) and items.pictures.read(2)[0, 0, 0] == 128
    normalised = Tensors()
    normalised.__class__ = type(
        "Normalised", (Tensors,), {"__getitem__": lambda self, i: (torch.full((3, 2, 2), -1.0), i)}
    )
    with pytest.raises(ValueError, match="must be within 0 to 1; leave Normalize"):
        data.from_dataset(normalised).pictures.read(0)
    for bad, sentence in (
        (iter([1]), r"must have len\(\) and \[i\]"),
        ([], "it has no items"),
        ({"train": [(0, 1)], "extra": [(0, 1)]}, 'got "extra"'),
        ([1.5, 2.5], r"dataset\[i\] must be \(picture, label\)"),
        ([(0, 0.5)], "a label must be a whole number or text"),
    ):
        with pytest.raises(ValueError, match=sentence):
            data.from_dataset(bad)
    assert "MODULE:NAME" in answer("dataset:birds")
    assert "cannot be imported" in answer("dataset:no_such_module:x")
    sys.modules["framework_birds"] = sys.modules[__name__]
    assert "root is for a function" in answer("dataset:framework_birds:CLASSES", root="x")
    MADE.clear()
    assert "made failed (KeyError" in answer("dataset:framework_birds:made")


SMALL = [
    "data.size=16",
    "encoder.name=small-cnn",
    "encoder.dim=8",
    "sampler.per_class=2",
    "sampler.batch=4",
    "training.epochs=3",
]
SMALL += ["training.workers=0", "training.device=cpu", 'loss.name="supcon"', "data.official=true", "training.batches=4"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stops_and_resumes_to_the_same_weights(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    source = BUILD[kind](tmp_path, ["train", "test"])
    recipe = read_recipe(None, [f"data.source={json.dumps(source)}", *SMALL])
    whole = training.train(recipe, tmp_path / "whole").folder

    def stop(event):
        if event["event"] == "epoch" and event["epoch"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.train(recipe, tmp_path / "parts", stop)
    resumed = training.resume(tmp_path / "parts", source=source if kind == "dataset" else None).folder
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
