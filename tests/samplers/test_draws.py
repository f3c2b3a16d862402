"""What every sampler keeps to: the same draws with every later version, in any order, on ranks, and resumed.

A digest is of every batch of three epochs and of the sampler's fingerprint, by which stored states are accepted.
"""

import warnings
import zlib

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from nearkin import evaluation
from nearkin.samplers import ClassBalanced, ClassRatio, HardClasses, HardNegatives, LabelNeighbours, PairPerClass

ITEMS = np.arange(97)
LABELS = np.where(ITEMS % 13 == 5, -1, ITEMS**2 % 11)  # six classes of 8 to 17 items, and unknown ones
TAIL = np.repeat(np.arange(9), [40, 9, 7, 5, 3, 2, 2, 1, 1])  # the first class is in every batch
GROUPS = np.where(ITEMS % 7 == 3, -1, ITEMS * 5 % 4)
ROWS = (ITEMS[:, None] * np.array([3, 7, 11]) % 23 - 11).astype(float)
TARGETS = ITEMS * 31 % 53 / 4  # with ties
LISTS = evaluation.nearest_negatives(ROWS, LABELS, k=5).indices


MAKERS = {
    "balanced": lambda **o: ClassBalanced(LABELS, 4, 3, 7, **o),
    "balanced, groups": lambda **o: ClassBalanced(LABELS, 4, 3, 7, groups=GROUPS, **o),
    "balanced, tail": lambda **o: ClassBalanced(TAIL, 4, 2, 2**63 - 1, **o),
    "balanced, short epochs": lambda **o: ClassBalanced(LABELS, 4, 3, 7, batches=5, **o),
    "ratio": lambda **o: ClassRatio(LABELS, 16, 0.25, 7, **o),
    "ratio, many classes": lambda **o: ClassRatio(TAIL, 8, 0.75, 1, batches=20, **o),
    "hard classes": lambda **o: HardClasses(LABELS, 4, 3, 7, **o),
    "hard classes, groups": lambda **o: HardClasses(LABELS, 4, 3, 7, groups=GROUPS, **o),
    "pairs": lambda **o: PairPerClass(LABELS, 4, 7, candidates=5, **o),
    "pairs, mined": lambda **o: PairPerClass(LABELS, 4, 7, candidates=5, **o),
    "pairs, groups": lambda **o: PairPerClass(LABELS, 4, 7, candidates=5, groups=GROUPS, **o),
    "negatives": lambda **o: HardNegatives(LABELS, 12, 3, 7, **o),
    "negatives, mined": lambda **o: HardNegatives(LABELS, 12, None, 7, candidates=20, **o),
    "negatives, lists": lambda **o: HardNegatives(LABELS, 12, 3, 7, neighbours=5, guard=0.05, **o),
    "neighbours": lambda **o: LabelNeighbours(TARGETS, 12, 3, 7, **o),
    "neighbours, two columns": lambda **o: LabelNeighbours(np.stack([TARGETS, ITEMS % 5], 1), 12, 3, 7, **o),
    "neighbours, four anchors": lambda **o: LabelNeighbours(TARGETS, 12, 2, 7, anchors=4, batches=10, **o),
}
REFRESHED = {
    "hard classes": (ROWS,),
    "hard classes, groups": (ROWS,),
    "pairs, mined": (ROWS[:6],),
    "negatives, mined": (ROWS,),
    "negatives, lists": (ROWS, LISTS),
}
SAME = {"pairs", "pairs, mined"}  # but for what they are refreshed with
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


every = pytest.mark.parametrize("name", MAKERS)


def made(name, refresh=True, **world):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = MAKERS[name](**world)
    if refresh and name in REFRESHED:
        sampler.refresh(*REFRESHED[name])
    return sampler


def splits_of(name):
    """How ranks may share a batch; some samplers take items alone and have no such setting."""
    return ({},) if name.startswith(("negatives", "neighbours")) else ({"split": "classes"}, {"split": "items"})


def digests(name):
    worlds = [{}] + [{**split, "rank": rank, "world_size": 2} for split in splits_of(name) for rank in (0, 1)]
    sums = []
    for world in worlds:
        sampler = made(name, **world)
        numbers = [int(sampler.state_dict()["fingerprint"])]
        for epoch in (0, 1, 5):
            for index in range(len(sampler)):
                numbers += [-2, *sampler.batch(epoch, index)]
        sums.append(f"{zlib.crc32(np.array(numbers, '<i8').tobytes()):08x}")
    return " ".join(sums)


@pytest.mark.parametrize("name", DIGESTS)
def test_batches_and_fingerprints_never_change(name):
    assert digests(name) == DIGESTS[name]


def batches_of(sampler, epoch):
    return [sampler.batch(epoch, index) for index in range(len(sampler))]


@every
def test_a_batch_is_a_pure_function_of_epoch_and_index(name):
    one, other = made(name), made(name)
    epochs = [batches_of(one, epoch) for epoch in range(3)]
    for epoch in (2, 0, 1):
        assert [other.batch(epoch, index) for index in reversed(range(len(other)))][::-1] == epochs[epoch]
    assert epochs[0] != epochs[1] != epochs[2]


@every
def test_ranks_share_the_batch_of_one_process(name):
    """As many items each, or whole classes each; of samplers that take items alone, by turns."""
    single = made(name)
    for split in splits_of(name):
        for world in (2,) if split else (1, 2, 3, 4):
            ranks = [made(name, **split, rank=rank, world_size=world) for rank in range(world)]
            assert {len(rank) for rank in ranks} == {len(single)}
            for index, batch in enumerate(batches_of(single, 1)):
                parts = [rank.batch(1, index) for rank in ranks]
                assert sorted(item for part in parts for item in part) == sorted(batch)
                if not split:
                    assert parts == [batch[rank::world] for rank in range(world)]


@every
def test_a_run_resumes_at_any_batch_through_a_file(name, tmp_path):
    """With what was refreshed, whatever the resumed sampler had been refreshed with."""
    sampler = made(name)
    run, number = [batch for _ in range(3) for batch in sampler], len(sampler)
    assert run == [batch for epoch in range(3) for batch in batches_of(made(name), epoch)] and sampler.epoch == 3
    for stop in (0, 1, number - 1, number, number + 2, 2 * number):
        first, done = made(name), []
        while len(done) < stop:
            for batch in first:
                done.append(batch)
                if len(done) == stop:
                    break
        save_file(first.state_dict(), tmp_path / "state.safetensors")
        second = made(name)
        if name in REFRESHED:  # with something else
            second.refresh(REFRESHED[name][0] ** 2, *REFRESHED[name][1:])
            assert batches_of(second, 1) != batches_of(first, 1)
        second.load_state_dict(load_file(tmp_path / "state.safetensors"))
        assert (second.epoch, second.start) == divmod(stop, number)
        while second.epoch < 3:
            done += list(second)
        assert done == run


@every
def test_a_state_is_taken_by_any_rank_and_by_no_other_sampler(name):
    state = made(name).state_dict()
    made(name, rank=1, world_size=2).load_state_dict(state)
    for other in MAKERS.keys() - {name, *(n for n in MAKERS if {n, name} <= SAME)}:
        with pytest.raises(ValueError, match=r"state must come from a .* with the same labels, seed and settings"):
            made(other).load_state_dict(state)


@pytest.mark.parametrize("name", REFRESHED)
def test_what_is_refreshed_is_so_between_epochs_and_forgotten_with_a_plain_state(name):
    sampler, plain = made(name), made(name, refresh=False)
    assert batches_of(sampler, 0) != (before := batches_of(plain, 0))
    epoch = iter(sampler)
    next(epoch)
    with pytest.raises(ValueError, match=rf"refresh must come between epochs, got it after batch 1 of {len(sampler)}"):
        sampler.refresh(*REFRESHED[name])
    list(epoch)
    sampler.refresh(*REFRESHED[name])
    assert list(sampler) == batches_of(made(name), 1)
    sampler.load_state_dict(plain.state_dict())
    assert batches_of(sampler, 0) == before, "a state without embeddings takes them away"
