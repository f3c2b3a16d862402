"""The four photo sets of the retrieval literature: birds, cars, products for sale, clothes."""

from pathlib import Path
from typing import Any

import numpy as np

from nearkin.data import matlab
from nearkin.data.benchmarks.layout import Facts, by_mark, counted, present
from nearkin.data.file_tree import Tree
from nearkin.data.item_set import Items

__all__ = ["CARS196", "CUB200", "INSHOP", "SOP", "cars196", "cub200", "inshop", "sop"]

CUB200 = Facts(
    "cub200",
    "birds: 11,788 photos of 200 species, classes 1-100 to train, 101-200 to test",
    "CUB_200_2011.tgz",
    "https://www.vision.caltech.edu/datasets/cub_200_2011/",
    "ROOT/images.txt, image_class_labels.txt, classes.txt, train_test_split.txt, "
    "images/001.Black_footed_Albatross/… (or one uncompressed .tar or .zip of these)",
    {"train photos": 5864, "test photos": 5924, "classes": 200},
)
CARS196 = Facts(
    "cars196",
    "cars: 16,185 photos of 196 models, classes 1-98 to train, 99-196 to test",
    "car_ims.tgz and cars_annos.mat (or cars_train.tgz, cars_test.tgz, the devkit and cars_test_annos_withlabels.mat)",
    "https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
    "ROOT/cars_annos.mat, car_ims/000001.jpg … "
    "(or ROOT/cars_train/, cars_test/, devkit/cars_train_annos.mat, cars_test_annos_withlabels.mat)",
    {"train photos": 8054, "test photos": 8131, "classes": 196},
)
SOP = Facts(
    "sop",
    "Stanford Online Products: 120,053 photos of 22,634 products, official zero-shot split",
    "Stanford_Online_Products.zip",
    "https://cvgl.stanford.edu/projects/lifted_struct/",
    "ROOT/Ebay_train.txt, Ebay_test.txt, bicycle_final/… (or the .zip itself)",
    {"train photos": 59551, "test photos": 60502, "train classes": 11318, "test classes": 11316},
)
INSHOP = Facts(
    "inshop",
    "In-Shop clothes: 52,712 photos of 7,982 items, official train, query and gallery",
    "Img/img.zip and Eval/list_eval_partition.txt of the In-shop Clothes Retrieval Benchmark",
    "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html",
    "ROOT/Eval/list_eval_partition.txt (or ROOT/list_eval_partition.txt), ROOT/Img/img/WOMEN/… (or ROOT/img/WOMEN/…)",
    {"train photos": 25882, "query photos": 14218, "gallery photos": 12612, "train classes": 3997},
)


def cub200(root: Path | None, partial: bool = False) -> Items:
    """Zero-shot split of the metric-learning literature; `train_test_split.txt` is the closed one."""
    tree, _ = by_mark(CUB200, root, "image_class_labels.txt")
    files = _table(tree, "images.txt", CUB200)
    kinds = dict(_table(tree, "image_class_labels.txt", CUB200))
    classes = [
        name
        for _, name in sorted((_integer(i, "classes.txt"), name) for i, name in _table(tree, "classes.txt", CUB200))
    ]
    trained = dict(_table(tree, "train_test_split.txt", CUB200)) if tree.has("train_test_split.txt") else None
    names = [f"images/{name}" for _, name in files]
    available = present(CUB200, tree, names, partial)
    ids = [files[i][0] for i in available]
    labels = np.array([_integer(kinds[i], "image_class_labels.txt") - 1 for i in ids], np.int64)
    split = ["train" if label < 100 else "test" for label in labels]
    return Items(
        name="cub200",
        names=[names[i] for i in available],
        classes=classes,
        labels=labels,
        split=split,
        closed_split=None if trained is None else ["train" if trained[i] == "1" else "test" for i in ids],
        pictures=tree.pictures([names[i] for i in available]),
        note=_photos(CUB200, split, {"classes": len(set(labels.tolist()))}, partial)
        + "; official classes 1-100 / 101-200",
    )


def cars196(root: Path | None, partial: bool = False) -> Items:
    """From `cars_annos.mat`, or from the two lists of the later devkit; classes 1-98 train, 99-196 test."""
    tree, mark = by_mark(CARS196, root, "cars_annos.mat", "devkit/cars_train_annos.mat", "cars_train_annos.mat")
    if mark == "cars_annos.mat":
        stored = matlab.read(tree.read(mark), mark)
        classes, rows = stored["class_names"], stored["annotations"].ravel()
        names = [row["relative_im_path"] for row in rows]
        closed = ["test" if _int(row["test"]) else "train" for row in rows]
    else:
        classes, rows, names, closed = _cars_devkit(tree, mark.removesuffix("cars_train_annos.mat"))
    available = present(CARS196, tree, names, partial)
    labels = np.array([_int(rows[i]["class"]) - 1 for i in available], np.int64)
    split = ["train" if label < 98 else "test" for label in labels]
    return Items(
        name="cars196",
        names=[names[i] for i in available],
        classes=[str(name) for name in classes.ravel()],
        labels=labels,
        split=split,
        closed_split=[closed[i] for i in available],
        pictures=tree.pictures([names[i] for i in available]),
        note=_photos(CARS196, split, {"classes": len(set(labels.tolist()))}, partial)
        + "; official classes 1-98 / 99-196",
    )


def _cars_devkit(tree: Tree, folder: str) -> tuple[Any, list[Any], list[str], list[str]]:
    rows: list[Any] = []
    names: list[str] = []
    closed: list[str] = []
    for part, choices in (
        ("train", [f"{folder}cars_train_annos.mat"]),
        ("test", [f"{folder}cars_test_annos_withlabels.mat", "cars_test_annos_withlabels.mat"]),
    ):
        mark = next((choice for choice in choices if tree.has(choice)), choices[0])
        annotations = matlab.read(_listed(tree, mark, CARS196), mark)["annotations"].ravel()
        nested = f"cars_{part}/cars_{part}/"  # as in one well-known copy
        base = nested if any(name.startswith(nested) for name in tree.files) else f"cars_{part}/"
        rows += list(annotations)
        names += [base + row["fname"] for row in annotations]
        closed += [part] * len(annotations)
    meta = f"{folder}cars_meta.mat"
    return matlab.read(_listed(tree, meta, CARS196), meta)["class_names"], rows, names, closed


def sop(root: Path | None, partial: bool = False) -> Items:
    """`Ebay_train.txt` and `Ebay_test.txt`: lines of image id, class id, super-class id, path."""
    tree, _ = by_mark(SOP, root, "Ebay_train.txt")
    rows = [
        (part, line)
        for part in ("train", "test")
        for line in _table(tree, f"Ebay_{part}.txt", SOP, columns=4)
        if line[0] != "image_id"
    ]
    available = present(SOP, tree, [line[3] for _, line in rows], partial)
    lines = [rows[i] for i in available]
    split = [part for part, _ in lines]
    kinds = [f"{line[3].split('/')[0].removesuffix('_final')} {line[1]}" for _, line in lines]
    return _in_order(SOP, tree, [line[3] for _, line in lines], kinds, split, ["train", "test"], partial)


def inshop(root: Path | None, partial: bool = False) -> Items:
    """`list_eval_partition.txt`: a count, a heading, then image, item id and train, query or gallery."""
    tree, mark = by_mark(INSHOP, root, "Eval/list_eval_partition.txt", "list_eval_partition.txt")
    rows = [line for line in _table(tree, mark, INSHOP, columns=3) if line[0] != "image_name"]
    base = "Img/" if any(name.startswith("Img/img/") for name in tree.files) else ""
    available = present(INSHOP, tree, [base + line[0] for line in rows], partial)
    lines = [rows[i] for i in available]
    names, kinds, split = ([line[c] for line in lines] for c in range(3))
    return _in_order(INSHOP, tree, [base + name for name in names], kinds, split, ["train"], partial)


def _in_order(
    facts: Facts, tree: Tree, names: list[str], kinds: list[str], split: list[str], parts: list[str], partial: bool
) -> Items:
    """Items whose classes are numbered in the order of the lists."""
    number = {kind: c for c, kind in enumerate(dict.fromkeys(kinds))}
    labels = np.array([number[kind] for kind in kinds], np.int64)
    sizes = {f"{part} classes": len({k for k, s in zip(kinds, split, strict=True) if s == part}) for part in parts}
    note = _photos(facts, split, sizes, partial) + "; official split"
    return Items(
        name=facts.name,
        names=names,
        classes=list(number),
        labels=labels,
        split=split,
        pictures=tree.pictures(names),
        note=note,
    )


def _photos(facts: Facts, split: list[str], others: dict[str, int], partial: bool) -> str:
    return counted(facts, {f"{part} photos": split.count(part) for part in dict.fromkeys(split)} | others, partial)


def _listed(tree: Tree, name: str, facts: Facts) -> bytes:
    if not tree.has(name):
        raise ValueError(f"{facts.name}: {tree} has no {name}; layout: {facts.layout}")
    return tree.read(name)


def _table(tree: Tree, name: str, facts: Facts, columns: int = 2) -> list[list[str]]:
    """Lines of `columns` words; a first line that is only a count is skipped."""
    lines = [line.split(maxsplit=columns - 1) for line in _listed(tree, name, facts).decode("utf-8").splitlines()]
    rows = [[word.strip() for word in line] for line in lines if line]
    if rows and len(rows[0]) == 1 and columns > 1:
        rows = rows[1:]
    bad = [i for i, row in enumerate(rows, 1) if len(row) != columns]
    if bad or not rows:
        where = f"line {bad[0]} has {len(rows[bad[0] - 1])}" if bad else "it is empty"
        raise ValueError(f"{facts.name}: {name} must have {columns} words per line, {where}")
    return rows


def _integer(word: str, name: str) -> int:
    if not word.isdecimal():
        raise ValueError(f'cub200: {name} must number its classes, got "{word}"')
    return int(word)


def _int(value: Any) -> int:
    return int(np.asarray(value).ravel()[0])
