"""Pinned draws: a stored seed gives the same run with every later version, on every machine and rank.

A digest is of every batch of three epochs and of the sampler's fingerprint, by which stored states are accepted.
"""

import warnings
import zlib

import numpy as np
import pytest

from nearkin import evaluation
from nearkin.samplers import ClassBalanced, ClassRatio, HardClasses, HardNegatives, LabelNeighbours, PairPerClass

ITEMS = np.arange(97)
LABELS = np.where(ITEMS % 13 == 5, -1, ITEMS**2 % 11)  # six classes of 8 to 17 items, and unknown ones
TAIL = np.repeat(np.arange(9), [40, 9, 7, 5, 3, 2, 2, 1, 1])  # the first class is in every batch
GROUPS = np.where(ITEMS % 7 == 3, -1, ITEMS * 5 % 4)
ROWS = (ITEMS[:, None] * np.array([3, 7, 11]) % 23 - 11).astype(float)
TARGETS = ITEMS * 31 % 53 / 4  # with ties
LISTS = evaluation.nearest_negatives(ROWS, LABELS, k=5).indices


def refreshed(sampler, *rows):
    sampler.refresh(*rows)
    return sampler


MAKERS = {
    "balanced": lambda **o: ClassBalanced(LABELS, 4, 3, 7, **o),
    "balanced, groups": lambda **o: ClassBalanced(LABELS, 4, 3, 7, groups=GROUPS, **o),
    "balanced, tail": lambda **o: ClassBalanced(TAIL, 4, 2, 2**63 - 1, **o),
    "balanced, short epochs": lambda **o: ClassBalanced(LABELS, 4, 3, 7, batches=5, **o),
    "ratio": lambda **o: ClassRatio(LABELS, 16, 0.25, 7, **o),
    "ratio, many classes": lambda **o: ClassRatio(TAIL, 8, 0.75, 1, batches=20, **o),
    "hard classes": lambda **o: refreshed(HardClasses(LABELS, 4, 3, 7, **o), ROWS),
    "hard classes, groups": lambda **o: refreshed(HardClasses(LABELS, 4, 3, 7, groups=GROUPS, **o), ROWS),
    "pairs": lambda **o: PairPerClass(LABELS, 4, 7, candidates=5, **o),
    "pairs, mined": lambda **o: refreshed(PairPerClass(LABELS, 4, 7, candidates=5, **o), ROWS[:6]),
    "negatives": lambda **o: HardNegatives(LABELS, 12, 3, 7, **o),
    "negatives, mined": lambda **o: refreshed(HardNegatives(LABELS, 12, None, 7, candidates=20, **o), ROWS),
    "negatives, lists": lambda **o: refreshed(
        HardNegatives(LABELS, 12, 3, 7, neighbours=5, guard=0.05, **o), ROWS, LISTS
    ),
    "neighbours": lambda **o: LabelNeighbours(TARGETS, 12, 3, 7, **o),
    "neighbours, two columns": lambda **o: LabelNeighbours(np.stack([TARGETS, ITEMS % 5], 1), 12, 3, 7, **o),
    "neighbours, four anchors": lambda **o: LabelNeighbours(TARGETS, 12, 2, 7, anchors=4, batches=10, **o),
}
DIGESTS = {  # of one process; of two ranks with whole classes, where they may be; of two ranks with items of each class
    "balanced": "721f4ed5 127e8c52 6d25e93a ef6e7d04 99b5a66a",
    "balanced, groups": "8aa1838a 9957422b a891c835 64f72459 f9d5eef4",
    "balanced, tail": "4fdf8608 9a279bd2 86a7eb47 858e000e e679eaa7",
    "balanced, short epochs": "1abf856f 29e4d7b0 a8b1a3c6 dfe9bdb6 b240ac09",
    "ratio": "937647dc d13cae82 6400584c 955486ec fdcc4492",
    "ratio, many classes": "954198c2 c97c9c5e 48c1a8e9 fe80dadc acdeb074",
    "hard classes": "e06c3f63 951a89a7 f99aa4cd cce46bb4 0c9bafef",
    "hard classes, groups": "ed2e9349 6d4f3ec3 cb370921 6ebd3465 f43f8b71",
    "pairs": "6f3f37de 49b380df cdf98df7 e7f7b5e0 30912f5e",
    "pairs, mined": "6091bc37 a502906d 13045274 8e2a95fe bddd578f",
    "negatives": "3081850c 4e7ee99e 7f8dfa1f",
    "negatives, mined": "fab084dc 60f3cf3e 99959e97",
    "negatives, lists": "2123b742 45c025c7 af399c53",
    "neighbours": "6242f8d8 20b225a2 908f61eb",
    "neighbours, two columns": "a7bca94c 63651973 21411910",
    "neighbours, four anchors": "85265a87 3adcc7d7 965ee200",
}


def digests(name):
    splits = ("items",) if name.startswith(("negatives", "neighbours")) else ("classes", "items")
    worlds = [{}] + [{"split": split, "rank": rank, "world_size": 2} for split in splits for rank in (0, 1)]
    sums = []
    for world in worlds:
        if len(splits) == 1:
            world.pop("split", None)  # these take items alone
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = MAKERS[name](**world)
        numbers = [int(sampler.state_dict()["fingerprint"])]
        for epoch in (0, 1, 5):
            for index in range(len(sampler)):
                numbers += [-2, *sampler.batch(epoch, index)]
        sums.append(f"{zlib.crc32(np.array(numbers, '<i8').tobytes()):08x}")
    return " ".join(sums)


@pytest.mark.parametrize("name", MAKERS)
def test_batches_and_fingerprints_never_change(name):
    assert digests(name) == DIGESTS[name]
