"""Faces: the ORL database, and Labeled Faces in the Wild with its pairs."""

from pathlib import Path

import numpy as np

from nearkin.data.benchmarks.layout import Facts, absent, by_pattern, counted, trees
from nearkin.data.folders import numbered
from nearkin.data.item_set import Items, Pairs

__all__ = ["LFW", "ORL", "lfw", "orl"]

ORL = Facts(
    "orl",
    "faces: 400 photos of 40 people",
    "att_faces.zip",
    "https://cam-orl.co.uk/facedatabase.html",
    "ROOT/s1/1.pgm … s40/10.pgm (or one .zip or uncompressed .tar of these)",
    {"photos": 400, "people": 40},
)
LFW = Facts(
    "lfw",
    "faces in the wild: 13,233 photos of 5,749 people, 6,000 pairs in 10 folds to verify",
    "lfw.tgz (or its aligned versions) and pairs.txt",
    "http://vis-www.cs.umass.edu/lfw/",
    "ROOT/pairs.txt, ROOT/lfw/Aaron_Eckhart/Aaron_Eckhart_0001.jpg … (photos also as one .zip or uncompressed .tar)",
    {"photos": 13233, "people": 5749, "pairs": 6000, "folds": 10},
)


def orl(root: Path | None, partial: bool = False) -> Items:
    """A person is a class."""
    matches = by_pattern(ORL, root, r"s(\d+)/(\d+)\.(?:pgm|png|jpg)", "s1/1.pgm")
    order = sorted(range(len(matches.names)), key=lambda i: tuple(map(int, matches.groups[i])))
    people = np.array([int(matches.groups[i][0]) for i in order])
    kinds, labels = np.unique(people, return_inverse=True)
    names = [matches.names[i] for i in order]
    return Items(
        name="orl",
        names=names,
        classes=[f"s{kind}" for kind in kinds],
        labels=labels.reshape(-1).astype(np.int64),
        pictures=matches.tree.pictures(names),
        note=counted(ORL, {"photos": len(names), "people": len(kinds)}, partial) + "; no split of its own",
    )


def lfw(root: Path | None, partial: bool = False) -> Items:
    """A person is a class; `pairs` is the protocol of view 2, ten folds that share no person."""
    matches = by_pattern(LFW, root, r"([^/]+)/(\2_\d{4})\.jpg", "lfw/Aaron_Eckhart/Aaron_Eckhart_0001.jpg")
    assert root is not None
    text = _pairs_text(root)
    if text is None and not partial:
        raise absent(LFW, root, "no pairs.txt")
    classes, labels = numbered([person for person, _ in matches.groups])
    place = {name: i for i, (_, name) in enumerate(matches.groups)}
    pairs = _pairs(text, place, partial) if text is not None else None
    counts = {"photos": len(labels), "people": len(classes)}
    if pairs is not None:
        counts |= {"pairs": len(pairs.same), "folds": len(np.unique(pairs.fold))}
    return Items(
        name="lfw",
        names=matches.names,
        classes=classes,
        labels=labels,
        pictures=matches.tree.pictures(matches.names),
        pairs=pairs,
        note=counted(LFW, counts, partial) + "; official pairs, no split of its own",
    )


def _pairs_text(root: Path) -> str | None:
    for tree in trees(root):
        for name in tree.files:
            if name == "pairs.txt" or name.endswith("/pairs.txt"):
                return tree.read(name).decode("utf-8")
    return None


def _pairs(text: str, place: dict[str, int], partial: bool) -> Pairs:
    """First line: folds and pairs of a kind in each; then, fold by fold, `name i j` (same) and `name i name j`."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    try:
        folds, each = (int(word) for word in lines[0]) if len(lines[0]) == 2 else (1, int(lines[0][0]))
        rows = [_pair(line) for line in lines[1:]]
    except (ValueError, IndexError) as error:
        raise ValueError(f"lfw: pairs.txt is not in the publisher's format ({error})") from None
    if len(rows) != folds * each * 2:
        raise ValueError(f"lfw: pairs.txt must have {folds} x {each} x 2 pairs as its first line says, got {len(rows)}")
    lost = [name for first, second, _ in rows for name in (first, second) if name not in place]
    if lost and not partial:
        raise ValueError(f"lfw: {len(lost)} photos that pairs.txt names are not there, the first {lost[0]}.jpg")
    present_pairs = [i for i, (first, second, _) in enumerate(rows) if first in place and second in place]
    return Pairs(
        np.array([[place[rows[i][0]], place[rows[i][1]]] for i in present_pairs], np.int64).reshape(-1, 2),
        np.array([rows[i][2] for i in present_pairs], np.bool_),
        np.array([i // (2 * each) for i in present_pairs], np.int64),
    )


def _pair(line: list[str]) -> tuple[str, str, bool]:
    if len(line) == 3:
        return f"{line[0]}_{int(line[1]):04d}", f"{line[0]}_{int(line[2]):04d}", True
    if len(line) == 4:
        return f"{line[0]}_{int(line[1]):04d}", f"{line[2]}_{int(line[3]):04d}", False
    raise ValueError(f"a line of {len(line)} words: {' '.join(line)[:60]}")
