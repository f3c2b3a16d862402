"""Pinned selections: on the CPU equal seeds pick equal pairs and triplets with every later version.

A digest is of the columns and masks that a selection returns, in this form, over worlds that every path serves.
"""

import zlib

import numpy as np
import pytest
import torch

from nearkin import mining, relations
from nearkin.core.relations import Relation

NAMES = ("all", *mining.TRIPLET_SELECTIONS, *mining.PAIR_SELECTIONS)


def worlds():
    """Distances and relations: few positives and many, with references, tied and all different; both types."""
    rng = np.random.Philox(7)  # its raw words are the same everywhere
    for anchors, others, classes, steps in ((40, 40, 10, 2**20), (40, 40, 10, 9), (12, 70, 2, 2**20), (9, 30, 3, 6)):
        words = torch.from_numpy((rng.random_raw(anchors * others) % steps).astype(np.int64)).view(anchors, others)
        distance = words.double() * (1.75 / steps) + 0.125  # up to beyond the cutoff of distance_weighted
        ids = torch.arange(others) % classes
        ids[::9] = -1
        own = ids[:anchors]
        related = relations.of(own) if anchors == others else relations.of(own, torch.empty(others, 1), ids)
        yield distance, related
        yield distance.float(), Relation(related.positive & (words % 4 > 0), related.negative & (words % 3 > 0))


DIGESTS = {
    "all": "0a08285b",
    "hard": "5ed74bd0",
    "semihard": "9e57584c",
    "semihard_or_hardest": "815dd754",
    "semihard_or_skip": "bc2779b2",
    "batch_hard": "6ad37a37",
    "easy_positive": "2e48aed3",
    "random": "c15392d0",
    "random_semihard": "c211685f",
    "distance_weighted": "6e438e87",
    "hard_negatives": "608cf900",
    "multi_similarity": "5a9c1109",
}


def digest(name):
    bits = []
    for number, (distance, relation) in enumerate(worlds()):
        torch.manual_seed(number)
        for generator in (None, torch.Generator().manual_seed(5)):
            chosen = mining.select(name, distance, relation, dim=6, margin=0.25, squared=True, generator=generator)
            if isinstance(chosen, mining.Triplets):  # a column beside the mask is nobody's
                chosen = (chosen.positive * chosen.valid, chosen.negative * chosen.valid, chosen.valid)
            bits += [part.numpy().astype("<i4").tobytes() for part in chosen]
    return f"{zlib.crc32(b''.join(bits)):08x}"


@pytest.mark.parametrize("name", NAMES)
def test_selections_never_change(name):
    assert digest(name) == DIGESTS[name]


def test_the_worlds_take_both_paths():
    """An anchor's triplets are as many as its positives where these are few, else one per column."""
    slots = [mining.select("hard", *world, dim=6).valid.shape[1] for world in worlds()]
    assert slots == [3, 3, 3, 3, 70, 70, 30, 30]
