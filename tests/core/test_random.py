"""Random streams: one list of them, no number twice, and no module with streams of its own."""

import ast
from pathlib import Path

import numpy as np
import pytest

import nearkin
from nearkin.core import random
from nearkin.core.random import Salt, Stream

ROOT = Path(nearkin.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "core" / "random.py")
# A stream that gets another number draws other batches, episodes and intervals from the same seed.
NUMBERS = {
    **{"ITEMS": 0, "CLASSES": 1, "COLUMNS": 2, "ORDER": 3, "SIZES": 4, "MINING": 5, "ANCHORS": 6, "REST": 7},
    **{"PAIRS": 8, "NEGATIVES": 9, "KMEANS": 16, "EPISODES": 17, "RESAMPLES": 18, "SIGN_FLIPS": 19},
    **{"CLUSTERING_PARTS": 20, "GENUINE_PAIRS": 21, "IMPOSTOR_PAIRS": 22, "COIN_WEIGHTS": 23, "CLASS_GROUPS": 24},
    **{"LEFT_OUT_CLASSES": 25, "DIAGNOSIS": 100, "QUERIES": 101, "MAP": 102, "WORST": 103},
    **{"OPEN_SET_CLASSES": 32, "OPEN_SET_ITEMS": 33, "OPEN_SET_COHORT": 34},
    **{"LORA": 48, "PROJECTION": 49, "UNLABELLED": 10},
}


def streams_of(path):
    """The stream of each call of `words` in a file, as it is written there, and the streams it names."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "words":
                yield ast.unparse(node.args[2])


@pytest.mark.parametrize("kind", [Stream, Salt])
def test_no_number_is_used_twice(kind):
    values = [member.value for member in kind.__members__.values()]
    assert len(set(values)) == len(values) == len(kind)


def test_streams_keep_their_numbers():
    assert {stream.name: stream.value for stream in Stream} == NUMBERS
    assert {salt.name: salt.value for salt in Salt} == {"EPOCH": 1, "STEP": 2, "SEED": 3, "VIEWS": 4}


def test_streams_are_made_in_one_module():
    named = set()
    for path in MODULES:
        assert "random.Philox(" not in path.read_text(), f"{path}: words come from core.random"
        for stream in streams_of(path):
            assert stream == "stream" or stream.removeprefix("random.").startswith("Stream."), f"{path}: {stream}"
        named |= {name for name in Stream.__members__ if f"Stream.{name}" in path.read_text()}
    assert named == set(Stream.__members__), "a stream that nothing draws from"


def test_words_depend_on_seed_stream_and_place_alone():
    expected = random.words(5, 3, Stream.ITEMS, 1, 2)
    assert expected.dtype == np.uint64
    assert (random.words(9, 3, Stream.ITEMS, 1, 2)[:5] == expected).all()
    places = ((4, Stream.ITEMS, 1, 2), (3, Stream.CLASSES, 1, 2), (3, Stream.ITEMS, 2, 1), (3, Stream.ITEMS, 1))
    for different in places:
        assert not (random.words(5, *different) == expected).any()
