"""Coarser levels of classes: where they come from, and that a class has exactly one coarser class."""

import re

import numpy as np
import pytest
from PIL import Image

from nearkin import data
from nearkin.data import glyphs
from nearkin.data.levels import levels_of


def picture(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8, 3)).astype(np.uint8)).save(path)


@pytest.fixture
def birds(tmp_path):
    for n, path in enumerate(["bird/warbler/yellow", "bird/warbler/blue", "bird/finch/yellow", "fish/carp/koi"]):
        for i in range(2):
            picture(tmp_path / "photos" / path / f"{i}.png", 10 * n + i)
    return tmp_path / "photos"


def coarse(items, name):
    level = next(level for level in items.levels if level.name == name)
    return {kind: level.classes[level.of_class[c]] for c, kind in enumerate(items.classes)}


def test_folders_around_class_folders_are_levels(birds):
    items = data.load(birds, levels=["genus", "group"])
    assert items.classes == ["bird/finch/yellow", "bird/warbler/blue", "bird/warbler/yellow", "fish/carp/koi"]
    assert coarse(items, "genus") == {kind: kind.rsplit("/", 1)[0] for kind in items.classes}
    assert coarse(items, "group") == {kind: kind.split("/")[0] for kind in items.classes}
    plain = data.load(birds)
    assert plain.classes == ["bird", "fish"] and plain.levels == []
    assert data.load(birds, levels=["genus"]).classes == ["bird/finch", "bird/warbler", "fish/carp"]
    part = items.take([5, 0])
    assert coarse(part, "group") == coarse(items, "group")


def test_folders_of_a_split_too(birds, tmp_path):
    for part in ("train", "test"):
        for path in ("bird/wren", "fish/koi"):
            picture(tmp_path / "split" / part / path / "1.png")
    items = data.load(tmp_path / "split", levels=["group"])
    assert items.classes == ["bird/wren", "fish/koi"] and set(items.split) == {"train", "test"}
    with pytest.raises(ValueError, match="in no class folder; a class is a folder of images, as in photos/B/A/heron"):
        data.load(tmp_path / "split", levels=["a", "b"])


def table(tmp_path, lines, columns="path,label,family,order"):
    for i in range(len(lines)):
        picture(tmp_path / f"{i}.png", i)
    path = tmp_path / "birds.csv"
    path.write_text("\n".join([columns, *(f"{i}.png,{line}" for i, line in enumerate(lines))]), encoding="utf-8")
    return path


def test_columns_of_a_table_are_levels(tmp_path):
    path = table(tmp_path, ["wren,T,P", "wren,T,P", "heron,A,Q", "owl,S,P"])
    items = data.load(path, levels=["Family", "order"])
    assert coarse(items, "Family") == {"heron": "A", "owl": "S", "wren": "T"}
    assert coarse(items, "order") == {"heron": "Q", "owl": "P", "wren": "P"}
    assert items.ignored == []
    assert data.load(path).levels == [] and len(data.load(path).ignored) == 2


@pytest.mark.parametrize(
    "lines, levels, sentence",
    [
        (["wren,T,P", "wren,A,P"], ["family"], 'a class must be in one family, "wren" is in "A" and in "T"'),
        (
            ["wren,T,P", "owl,T,Q", "jay,S,Q"],
            ["family", "order"],
            'a family must be in one order, "T" is in "P" and in',
        ),
        (["wren,T,P", "owl,T,Q"], ["family"], 'level "family" must have at least 2 classes, got "T" only'),
        (["wren,T,P", "owl,,Q"], ["family"], '1 of 2 rows have no "family" (row 3)'),
        (["wren,T,P", "owl,S,Q"], ["genus"], 'no column "genus" among its columns: path, label, family, order'),
        (["wren,T,P", "owl,S,Q"], ["family", "family"], 'levels must have different names, got "family" twice'),
        (["wren,T,P", "owl,S,Q"], ["label"], "levels are those above the classes themselves"),
        (["wren,T,P", "owl,S,Q"], [""], "the name of a level must be text, got ''"),
    ],
)
def test_what_is_no_hierarchy_is_one_sentence(lines, levels, sentence, tmp_path):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        data.load(table(tmp_path, lines), levels=levels)


def test_entries_of_a_file_of_vectors_are_levels(tmp_path):
    labels = np.array([0, 1, 2, -1, 0])
    np.savez(
        tmp_path / "v.npz", embeddings=np.eye(5, dtype=np.float32), labels=labels, family=["a", "b", "b", "c", "a"]
    )
    items = data.load(tmp_path / "v.npz", levels=["family"])
    assert items.classes == ["0", "1", "2"] and coarse(items, "family") == {"0": "a", "1": "b", "2": "b"}
    with pytest.raises(ValueError, match='no "order" in it for the level of that name'):
        data.load(tmp_path / "v.npz", levels=["order"])


def test_sources_without_levels_say_so():
    with pytest.raises(ValueError, match='glyphs: no level "family"; it has script'):
        data.load("glyphs", levels=["family"])


SCRIPTS = {"A": "Latin", "ж": "Cyrillic", "β": "Greek", "7": "digits", "€": "currency", "→": "arrows", "■": "shapes"}
SCRIPTS |= {"∑": "mathematics", "+": "mathematics", "☂": "signs", "©": "signs", "ა": "Georgian"}


@pytest.mark.parametrize("character, script", SCRIPTS.items())
def test_every_character_has_a_script(character, script):
    assert glyphs.script(character) == script


def test_levels_are_checked_by_a_loop():
    """Against a double loop over random columns: a class with two coarser classes is refused, others are mapped."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        labels = np.unique(rng.integers(0, 4, 8), return_inverse=True)[1]
        of_class = rng.integers(0, 2, labels.max() + 1)
        column = np.where(rng.random(8) < 0.03, 1 - of_class[labels], of_class[labels])
        clear = all(len({column[j] for j in range(8) if labels[j] == c}) == 1 for c in set(labels.tolist()))
        outcome = clear and len(set(column.tolist())) > 1
        seen.add((clear, outcome))
        classes = [str(c) for c in range(labels.max() + 1)]
        if not outcome:
            with pytest.raises(ValueError, match=r"must be in one family|must have at least 2 classes"):
                levels_of("set", classes, labels, {"family": [str(k) for k in column]})
            continue
        level = levels_of("set", classes, labels, {"family": [str(k) for k in column]})[0]
        assert [level.classes[level.of_class[c]] for c in labels] == [str(k) for k in column]
    assert {(True, True), (False, False)} <= seen
