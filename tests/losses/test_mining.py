"""Selections against loops written from their definitions: exact, ties included; drawn ones by their frequencies."""

import shutil
from functools import partial

import pytest
import torch
from scipy import stats

import nearkin
import reference
from cases import DIM, pair_twin
from loss_checks.waiting import Watch
from nearkin import losses, mining, relations
from nearkin.core import distances
from nearkin.core.relations import Relation
from nearkin.dist import global_batch


def easy_positive_or_skip(distance, positive, negative):
    """Without a negative farther than the positive the loop falls back on one that is not."""
    chosen = reference.mine_easy_positive(distance, positive, negative)
    return [(a, p, n) for a, p, n in chosen if distance[a][n] > distance[a][p]]


TRIPLETS = {
    "hard": (mining.hard, reference.mine_hard),
    "semihard": (mining.semihard, reference.mine_semihard),
    "semihard-skip": (
        partial(mining.semihard, fallback="skip"),
        partial(reference.mine_semihard, fallback="skip"),
    ),
    "semihard-hardest": (partial(mining.semihard, fallback="hardest"), reference.mine_semihard_or_hardest),
    "batch_hard": (mining.batch_hard, reference.mine_batch_hard),
    "easy_positive": (mining.easy_positive, reference.mine_easy_positive),
    "easy_positive-hard": (
        partial(mining.easy_positive, negative="hard"),
        partial(reference.mine_easy_positive, kind="hard"),
    ),
    "easy_positive-skip": (partial(mining.easy_positive, fallback="skip"), easy_positive_or_skip),
}
PAIRS = {
    "all": (mining.all_pairs, lambda distance, positive, negative: (positive, negative)),
    "hard_negatives": (mining.hard_negatives, reference.mine_hard_negatives),
    "multi_similarity": (mining.multi_similarity, reference.mine_multi_similarity),
    "multi_similarity-tied": (  # a whole step of the grid: whether a pair exactly at the limit counts, shows
        partial(mining.multi_similarity, epsilon=1.0),
        partial(reference.mine_multi_similarity, epsilon=1.0),
    ),
}
DRAWN = {
    "random": (mining.random, None),
    "random_semihard": (partial(mining.random_semihard, margin=0.3), None),
    "random_semihard-squared": (partial(mining.random_semihard, margin=0.3, squared=True), None),
    "random_semihard-any": (partial(mining.random_semihard, margin=None), None),
    "distance_weighted": (partial(mining.distance_weighted, dim=8), {"dim": 8}),
    "distance_weighted-flat": (partial(mining.distance_weighted, dim=2), {"dim": 2}),
    "distance_weighted-high": (
        partial(mining.distance_weighted, dim=512, clip=0.9, cutoff=None),
        {"dim": 512, "clip": 0.9, "cutoff": None},
    ),
}
EVERY = {name: function for name, (function, _) in (TRIPLETS | PAIRS | DRAWN).items()}
by_name = pytest.mark.parametrize("name", EVERY)


# ---------------------------------------------------------------- worlds to select in


def make_relation(kind, anchors, others):
    """A random relation of one of the kinds that losses take; None others: the batch with itself."""
    if kind == "ids":
        labels, more = torch.randint(-1, 4, (anchors,)), None if others is None else torch.randint(-1, 4, (others,))
        return relations.of(labels, None if others is None else torch.empty(others, 1), more)
    if kind == "multilabel":
        rows = torch.rand(anchors, 5) < 0.3
        more = None if others is None else torch.rand(others, 5) < 0.3
        relation = relations.multilabel(rows, more)
    else:  # asymmetric, a third of the pairs in neither mask, some anchors without any
        word = torch.rand(anchors, anchors if others is None else others)
        word[torch.rand(anchors) < 0.15] = 1.0
        relation = relations.explicit(word < 0.3, (word > 0.3) & (word < 0.7))
    return relations.of(relation, None if others is None else torch.empty(others, 1))


def worlds_of_every_kind(number, top=1.9):
    """Distances and relations, in turn tied on a coarse grid and all different, in a batch and with references."""
    torch.manual_seed(number)
    for i in range(number):
        anchors = int(torch.randint(1, 9, ()))
        others = None if i % 2 else int(torch.randint(0, 12, ()))
        shape = (anchors, anchors if others is None else others)
        steps = 1 + i % 5
        grid = torch.randint(0, steps + 1, shape).double() * top / steps
        distance = grid if i % 3 else torch.rand(shape, dtype=torch.float64) * top
        yield distance, make_relation(("ids", "multilabel", "explicit")[i % 3], anchors, others)


def triplets(chosen):
    """Valid triplets as a list, with everything that any of them must keep to."""
    assert chosen.positive.shape == chosen.negative.shape == chosen.valid.shape
    assert chosen.positive.dtype == chosen.negative.dtype == torch.long and chosen.valid.dtype == torch.bool
    return list(zip(*(index.tolist() for index in chosen.indices()), strict=True))


def assert_valid(listed, relation):
    assert len(set(listed)) == len(listed)
    for a, p, n in listed:
        assert relation.positive[a, p] and relation.negative[a, n]


def with_both(relation):
    return set((relation.positive.any(1) & relation.negative.any(1)).nonzero().squeeze(1).tolist())


def assert_equals_loop(name, distance, relation):
    function, loop = (TRIPLETS | PAIRS)[name]
    chosen, wanted = (
        function(distance, relation),
        loop(distance.tolist(), relation.positive.tolist(), relation.negative.tolist()),
    )
    if name in PAIRS:
        for mask, twin in zip(chosen, wanted, strict=True):
            assert torch.equal(mask, torch.as_tensor(twin, dtype=torch.bool).view_as(mask))
        return
    listed = triplets(chosen)
    assert listed == wanted
    assert_valid(listed, relation)
    if "skip" not in name:
        assert {a for a, _, _ in listed} == with_both(relation)


def assert_drawn(name, distance, relation):
    """Each positive of an anchor with negatives once, its negative one that may be drawn; the same seed, the same."""
    function, weights = DRAWN[name]
    chosen = function(distance, relation, generator=torch.Generator().manual_seed(5))
    listed = triplets(chosen)
    assert_valid(listed, relation)
    wanted = {(a, p) for a in with_both(relation) for p in reference.columns(relation.positive.tolist(), a)}
    assert {(a, p) for a, p, _ in listed} == wanted and len(listed) == len(wanted)
    rows, negative = distance.tolist(), relation.negative.tolist()
    for a, p, n in listed:
        if name.startswith("random_semihard"):
            margin, squared = function.keywords["margin"], function.keywords.get("squared", False)
            assert n in reference.farther_negatives(rows[a], p, reference.columns(negative, a), margin, squared)
        if weights and relation.negative[a].sum() > 1 and not (weights["dim"] == 2 and distance[a, n] >= 2):
            assert reference.distance_weights(distance[a].tolist(), relation.negative[a].tolist(), **weights)[n] > 0
    again = function(distance, relation, generator=torch.Generator().manual_seed(5))
    assert all(torch.equal(u, v) for u, v in zip(chosen, again, strict=True))


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("name", TRIPLETS | PAIRS)
def test_equals_the_loop_on_hundreds_of_batches(name):
    for distance, relation in worlds_of_every_kind(300):
        assert_equals_loop(name, distance, relation)


@pytest.mark.parametrize("name", DRAWN)
def test_draws_are_valid_on_hundreds_of_batches(name):
    for distance, relation in worlds_of_every_kind(200):
        assert_drawn(name, distance, relation)


@by_name
def test_strangers_to_the_selection_change_nothing(name):
    """Columns in neither mask, however near, and the order of the anchors."""
    for distance, relation in worlds_of_every_kind(60):
        deterministic = name not in DRAWN
        seeded = {} if deterministic else {"generator": torch.Generator().manual_seed(1)}
        none = torch.zeros(len(distance), 2, dtype=torch.bool)
        padded = torch.cat([distance, distance.new_zeros(none.shape)], 1)
        more = Relation(*(torch.cat([mask, none], 1) for mask in relation[:2]))
        chosen = EVERY[name](padded, more, **seeded)
        if name in PAIRS:
            assert not any(mask[:, -2:].any() for mask in chosen)
            assert all(torch.equal(a[:, :-2], b) for a, b in zip(chosen, EVERY[name](distance, relation), strict=True))
        elif deterministic:
            assert triplets(chosen) == triplets(EVERY[name](distance, relation))
            flipped = EVERY[name](distance.flip(0), Relation(*(mask.flip(0) for mask in relation[:2])))
            wanted = [(len(distance) - 1 - a, p, n) for a, p, n in triplets(chosen)]
            assert sorted(triplets(flipped)) == sorted(wanted)
        else:
            assert_valid(triplets(chosen), relation)


@pytest.mark.parametrize("name", ["hard", "semihard", "batch_hard", "easy_positive", "hard_negatives"])
def test_only_the_order_of_distances_counts(name):
    for distance, relation in worlds_of_every_kind(60):
        for a, b in zip(EVERY[name](distance, relation), EVERY[name]((distance + 1) ** 3, relation), strict=True):
            assert torch.equal(a, b)


@by_name
@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0), (1, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("kind", ["all positive", "all negative", "none"])
def test_hardly_anyone(name, shape, kind):
    """Nobody to choose from is no triplet and no error; R = 0 and one anchor are ordinary."""
    mask = torch.ones(shape, dtype=torch.bool)
    relation = Relation(mask & (kind == "all positive"), mask & (kind == "all negative"))
    chosen = EVERY[name](torch.rand(shape), relation)
    if isinstance(chosen, mining.Triplets):
        assert triplets(chosen) == []
        assert all(t.shape[0] == shape[0] for t in chosen)
    else:
        assert chosen.positive.shape == chosen.negative.shape == shape
        assert not (chosen.negative & ~relation.negative).any()
    for value, mask in zip(*[iter(mining.as_pairs(chosen, torch.rand(shape)))] * 2, strict=True):
        assert value.shape == mask.shape


@by_name
def test_layout_and_precision_of_distances_do_not_matter(name):
    distance, relation = torch.randint(0, 8, (9, 12)).double() / 8, make_relation("explicit", 9, 12)
    seeded = {"generator": torch.Generator().manual_seed(2)} if name in DRAWN else {}
    wanted = EVERY[name](distance, relation, **seeded)
    turned = Relation(*(mask.T.contiguous().T for mask in relation[:2]))
    for other in (distance.T.contiguous().T, distance.float(), distance.half(), distance.clone().requires_grad_()):
        if name == "multi_similarity" and other.dtype == torch.half:
            continue  # 0.1 is another number there
        seeded = {"generator": torch.Generator().manual_seed(2)} if name in DRAWN else {}
        for a, b in zip(EVERY[name](other, turned, **seeded), wanted, strict=True):
            assert torch.equal(a, b) and not a.requires_grad


@pytest.mark.parametrize("name", TRIPLETS | DRAWN)
def test_nan_chooses_columns_that_exist(name):
    """The loss is NaN by its taint; a place beyond the row would be another error."""
    chosen = EVERY[name](torch.full((8, 8), torch.nan), relations.of(torch.arange(8) // 2))
    for columns in chosen[:2]:
        assert bool(((columns >= 0) & (columns < 8)).all())


def test_semihard_by_hand():
    """Positives at 1 and 3; negatives at 1 (a tie is not farther), 2, 2 and 0."""
    distance = torch.tensor([[1.0, 3.0, 1.0, 2.0, 2.0, 0.0]])
    relation = relations.explicit(torch.tensor([[True, True, False, False, False, False]]))
    assert triplets(mining.semihard(distance, relation)) == [(0, 0, 3), (0, 1, 3)]  # 3: the first of the two farthest
    assert triplets(mining.semihard(distance, relation, fallback="skip")) == [(0, 0, 3)]
    assert triplets(mining.semihard(distance, relation, fallback="hardest")) == [(0, 0, 3), (0, 1, 5)]
    assert triplets(mining.easy_positive(distance + 9 * ~relation.negative, relation, fallback="hardest")) == [
        (0, 0, 5)
    ]
    assert triplets(mining.hard(distance, relation)) == [(0, 0, 5), (0, 1, 5)]
    assert triplets(mining.batch_hard(distance, relation)) == [(0, 1, 5)]
    assert triplets(mining.easy_positive(distance, relation)) == [(0, 0, 3)]
    assert mining.hard_negatives(distance, relation).negative.tolist() == [[False, False, True, False, False, True]]


# ---------------------------------------------------------------- no anchor starves, and draws have their distribution


@pytest.mark.parametrize("dim", [8, 64, 128, 512, 2048])
def test_a_near_duplicate_starves_nobody(dim):
    labels = torch.arange(32).repeat_interleave(4)
    x = distances.unit(torch.randn(128, dim, dtype=torch.float64))
    x[4] = distances.unit(x[:1] + 1e-7 * x[4:5])[0]  # of another class, all but on top of the first
    x[8] = x[1]  # and exactly
    distance, relation = distances.euclidean(x), relations.of(labels)
    for name in (*mining.TRIPLET_SELECTIONS,):
        chosen = mining.select(name, distance, relation, dim=dim)
        listed = triplets(chosen)
        assert_valid(listed, relation)
        assert {a for a, _, _ in listed} == set(range(128))
    negatives = distance.masked_fill(~relation.negative, torch.inf)
    has_near = negatives.min(1).values < 1.4
    drawn = mining.distance_weighted(distance, relation, dim=dim)
    far = (mining.pick(distance, drawn.negative) >= 1.4) & drawn.valid
    assert not bool(far[has_near].any())  # what has a negative within the cutoff draws none beyond
    assert bool((drawn.negative[0][drawn.valid[0]] == 4).all()) or dim == 8  # the near one outweighs all others


def frequencies(row, negatives, draws, at=0.1, **how):
    """What of the first columns was drawn for `draws` positives, in one call; rows of distances (B, N)."""
    rows = torch.tensor(row, dtype=torch.float64)
    distance = torch.cat([rows, torch.full((len(rows), draws), at, dtype=torch.float64)], 1)
    masked = torch.cat([torch.tensor(negatives), torch.zeros(len(rows), draws, dtype=torch.bool)], 1)
    relation = Relation(~masked & (torch.arange(distance.shape[1]) >= rows.shape[1]), masked)
    if "dim" in how:
        chosen = mining.distance_weighted(distance, relation, **how)
    else:
        chosen = (mining.random_semihard if "margin" in how else mining.random)(distance, relation, **how)
    assert bool(chosen.valid[:, rows.shape[1] :].all())
    return chosen.negative[:, rows.shape[1] :]


def assert_distributed(drawn, probabilities):
    counts = torch.bincount(drawn, minlength=len(probabilities)).double()
    expected = torch.tensor(probabilities, dtype=torch.float64) * len(drawn)
    assert len(counts) == len(expected) and not bool(counts[expected == 0].any())
    common = expected >= 10
    rare = ~common & (expected > 0)
    if bool(rare.any()):  # those hardly ever drawn count as one, with the least common of the others
        least = expected.masked_fill(~common, torch.inf).argmin()
        counts[least] += counts[rare].sum()
        expected[least] += expected[rare].sum()
    counts, expected = counts[common], expected[common]
    if len(counts) > 1:
        assert stats.chisquare(counts, expected).pvalue > 1e-4


@pytest.mark.parametrize("dim", [3, 8, 64, 128, 512, 2048])
def test_distance_weighted_frequencies(dim):
    """1e5 draws a row against min(λ, 1/q) normalised in the row."""
    close = torch.linspace(0, min(0.5, 30 / dim), 20)
    row = torch.stack(
        [
            torch.linspace(0.3, 1.39, 20),  # all the way
            0.85 + close,  # where the weights differ by factors, not by orders of magnitude
            torch.linspace(0.1, 0.5, 20),  # all under the clip: uniform
            torch.linspace(1.4, 1.99, 20),  # all beyond the cutoff: uniform
            1.39 - close / 30 + 0.02 * (torch.arange(20) % 2),  # every second beyond the cutoff
        ]
    ).tolist()
    negatives = torch.ones(len(row), 20, dtype=torch.bool)
    negatives[:, 7] = False
    drawn = frequencies(row, negatives.tolist(), 100_000, dim=dim, generator=torch.Generator().manual_seed(dim))
    for i, distance in enumerate(row):
        assert_distributed(drawn[i], reference.distance_weights(distance, negatives[i].tolist(), dim))


def test_distance_weighted_frequencies_by_hand():
    """In four dimensions 1/q = 1 / (d² √(1 - d²/4)); λ is its value at 0.5; the far side is capped too."""
    row = [0.2, 0.5, 0.8, 1.0, 1.3, 1.6, 1.9999]

    def inverse(d):
        return 1 / (d * d * (1 - d * d / 4) ** 0.5)

    weights = [min(inverse(0.5), inverse(d)) for d in row]
    drawn = frequencies([row], [[True] * 7], 100_000, dim=4, cutoff=None, generator=torch.Generator().manual_seed(0))
    assert weights[0] == weights[-1] == weights[1]
    assert_distributed(drawn[0], [w / sum(weights) for w in weights])


def test_cutoff_of_each_anchor():
    row, limits = [[0.6, 0.9, 1.2, 1.5]] * 3, torch.tensor([0.9, 1.3, 0.1], dtype=torch.float64)
    drawn = frequencies(
        row, [[True] * 4] * 3, 20_000, dim=16, cutoff=limits, generator=torch.Generator().manual_seed(0)
    )
    for i, limit in enumerate(limits.tolist()):
        assert_distributed(drawn[i], reference.distance_weights(row[i], [True] * 4, 16, cutoff=limit))


def test_random_is_uniform():
    negatives = torch.tensor([[i % 3 != j % 2 for i in range(30)] for j in range(2)])
    drawn = frequencies(torch.rand(2, 30).tolist(), negatives.tolist(), 100_000, generator=torch.Generator())
    for own, allowed in zip(drawn, negatives.double(), strict=True):
        assert_distributed(own, (allowed / allowed.sum()).tolist())


@pytest.mark.parametrize("squared", [False, True])
def test_random_semihard_is_uniform_among_the_first_kind_that_there_is(squared):
    """1e5 positives at 0.5 a row; margin 0.3 ends at 0.8, or squared at 0.742."""
    row = [
        [0.1, 0.5, 0.50001, 0.6, 0.74, 0.75, 0.8, 0.9, 1.9],  # some within the margin
        [0.1, 0.5, 0.49999, 0.3, 0.9, 0.80001, 0.8, 1.4, 1.9],  # none within, some farther
        [0.1, 0.2, 0.49999, 0.5, 0.3, 0.0, 0.5, 0.4, 0.5],  # none farther: the first of the farthest
        [0.6, 0.6, 0.6, 0.9, 0.9, 0.9, 0.5, 0.5, 0.2],  # ties, each with its share
    ]
    negatives = [[n != 3 for n in range(9)], *[[n != 8 for n in range(9)]] * 3]
    frequent = {"margin": 0.3, "squared": squared, "generator": torch.Generator().manual_seed(4 + squared)}
    drawn = frequencies(row, negatives, 100_000, at=0.5, **frequent)
    wanted = [[2, 4] if squared else [2, 4, 5], [4, 5, 6, 7], [3], [0, 1, 2]]
    for i, among in enumerate(wanted):
        own = [n for n in range(9) if negatives[i][n]]
        assert reference.farther_negatives([*row[i], 0.5], 9, own, 0.3, squared) == among
        assert_distributed(drawn[i], [(n in among) / len(among) for n in range(9)])
    softly = frequencies(row, negatives, 100_000, at=0.5, margin=None, generator=torch.Generator().manual_seed(6))
    for i, among in enumerate([[2, 4, 5, 6, 7, 8], [4, 5, 6, 7], [3], [0, 1, 2, 3, 4, 5]]):
        assert_distributed(softly[i], [(n in among) / len(among) for n in range(9)])


@pytest.mark.parametrize(
    "how", [{}, {"margin": 2.0}, {"dim": 4}], ids=["random", "random_semihard", "distance_weighted"]
)
def test_each_positive_draws_its_own_negative(how):
    """Neighbouring positives, and neighbouring anchors, draw independently of each other."""
    row = [torch.linspace(0.5, 1.2, 6).tolist()] * 2
    drawn = frequencies(row, [[True] * 6] * 2, 50_000, generator=torch.Generator().manual_seed(0), **how)
    for a, b in ((drawn[0, ::2], drawn[0, 1::2]), (drawn[0], drawn[1])):
        table = torch.bincount(a * 6 + b, minlength=36).view(6, 6)
        assert stats.chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize("name", DRAWN)
def test_the_generator_decides(name):
    distance = 0.9 + 0.01 * torch.rand(20, 30, dtype=torch.float64)
    relation = relations.explicit(torch.rand(20, 30) < 0.5)

    def draw(seed):
        return triplets(EVERY[name](distance, relation, generator=torch.Generator().manual_seed(seed)))

    assert draw(1) == draw(1) != draw(2)
    torch.manual_seed(3)
    without = triplets(EVERY[name](distance, relation))
    torch.manual_seed(3)
    draw(4)
    assert triplets(EVERY[name](distance, relation)) == without  # its own generator leaves torch's alone


# ---------------------------------------------------------------- cost: no B³, no loop over anchors, no stall


def test_the_watch_sees_stalls():
    x = torch.rand(5)
    for stall in (lambda: bool(x.any()), lambda: x[x > 0], lambda: x.nonzero(), lambda: x.sum().item()):
        with Watch(), pytest.raises(AssertionError, match="waits for the device"):
            stall()
    with Watch() as watch:
        assert (x[:, None, None] - x[None, :, None] + x).shape == (5, 5, 5)
    assert watch.largest == 125


@by_name
def test_cost(name):
    calls = []
    for anchors, others in ((3, 5), (1500, 1700)):
        distance, relation = torch.rand(anchors, others) * 1.5, make_relation("ids", anchors, others)
        with Watch() as watch:
            EVERY[name](distance, relation)
        assert watch.largest <= anchors * others
        calls.append(watch.calls)
    assert calls[0] == calls[1]


# ---------------------------------------------------------------- selections by name, in the losses

NAMES = ("all", *mining.TRIPLET_SELECTIONS, *mining.PAIR_SELECTIONS)
TRIPLET, PAIR = mining.TRIPLET_SELECTIONS, mining.PAIR_SELECTIONS
RAW = tuple(name for name in NAMES if name != "distance_weighted")
DRAWERS = {name: getattr(mining, name) for name in mining.DRAWN}
TAKERS = {  # how to make it, its loop, what it takes, and where distance-weighted draws end
    "TripletLoss": (losses.TripletLoss, reference.triplet, ("all", *TRIPLET), 1.4),
    "TripletLoss-soft": (partial(losses.TripletLoss, None), reference.triplet, TRIPLET, 1.4),
    "TripletLoss-swap": (partial(losses.TripletLoss, swap=True), reference.triplet, TRIPLET, 1.4),
    "TripletLoss-raw": (partial(losses.TripletLoss, normalize=False), reference.triplet, ("all", *TRIPLET[:-1]), None),
    "MarginLoss": (partial(losses.MarginLoss, beta=0.9), reference.margin, NAMES, 1.1),
    "MarginLoss-raw": (partial(losses.MarginLoss, normalize=False), reference.margin, RAW, None),
    "ContrastiveLoss": (partial(losses.ContrastiveLoss, 1.2, normalize=True), reference.contrastive, NAMES, 1.2),
    "ContrastiveLoss-raw": (losses.ContrastiveLoss, reference.contrastive, RAW, None),
    "MultiSimilarityLoss": (losses.MultiSimilarityLoss, reference.multi_similarity, ("all", *PAIR), None),
}


def some_batch():
    labels = torch.arange(4).repeat(4)
    x = 0.3 * torch.randn(4, DIM, dtype=torch.float64)[labels] + torch.randn(16, DIM, dtype=torch.float64)
    return x.requires_grad_(), labels


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("name", NAMES)
def test_every_loss_with_every_selection(taker, name):
    make, loop, possible, cutoff = TAKERS[taker]
    x, labels = some_batch()
    if name not in possible:
        with pytest.raises(ValueError, match=rf'selection="{name}" is not possible here: ') as error:
            make(selection=name)
        named = str(error.value).split("possible: ")[1].split(", ")
        assert set(possible) <= set(named) and name not in named
        return
    if name not in DRAWERS:
        module = make(selection=name).double()
        value = module(x, labels)
        torch.testing.assert_close(value, pair_twin(loop)(module, x, labels), rtol=1e-10, atol=1e-12)
    else:
        value = make(selection=name, generator=torch.Generator().manual_seed(3)).double()(x, labels)
        drawer, how = DRAWERS[name], {}
        if name == "distance_weighted":
            how = {"dim": DIM, "cutoff": cutoff}
        elif (
            name == "random_semihard"
        ):  # a triplet's margin, on its squared distances; a pair loss has none between two
            margin = 0.2 if taker in ("TripletLoss", "TripletLoss-swap", "TripletLoss-raw") else None
            how = {"margin": margin, "squared": True}
        generator = torch.Generator().manual_seed(3)
        by_hand = make(selection=lambda d, relation: drawer(d, relation, generator=generator, **how)).double()
        torch.testing.assert_close(value, by_hand(x, labels), rtol=0, atol=0)
    value.backward()
    assert float(value.detach()) > 0 and bool(x.grad.isfinite().all()) and bool(x.grad.any())


@pytest.mark.parametrize("taker", TAKERS)
def test_an_unknown_selection_is_answered_with_the_known(taker):
    make, _, possible, _ = TAKERS[taker]
    with pytest.raises(
        ValueError, match=r'unknown selection "batchhard"; did you mean "batch_hard"\? known: '
    ) as error:
        make(selection="batchhard")
    assert set(possible) <= set(str(error.value).split("known: ")[1].split(", "))
    with pytest.raises(ValueError, match="unknown selection"):
        mining.select("batchhard", torch.rand(2, 2), make_relation("ids", 2, None), dim=3)


@pytest.mark.parametrize("taker", TAKERS)
def test_no_loss_stalls_over_its_selection(taker, monkeypatch):
    make, _, possible, _ = TAKERS[taker]
    modules, (x, labels) = [make(selection=name) for name in possible], some_batch()
    monkeypatch.setattr(nearkin.core.checks, "reads_values", lambda tensor: False)
    for module in modules:
        with Watch() as watch:
            module(x, labels, x.detach() + 0.1, labels).backward()
        assert watch.largest <= 16 * 16


@pytest.mark.parametrize("taker", TAKERS)
def test_a_selection_of_ones_own(taker):
    make, _, possible, _ = TAKERS[taker]
    x, labels = some_batch()

    def nearest_positive_first_negative(distance, relation):
        _, positive = (-distance.masked_fill(~relation.positive, torch.inf)).max(1)
        negative = relation.negative.to(torch.uint8).argmax(1)
        return mining.Triplets(
            positive[:, None], negative[:, None], (relation.positive.any(1) & relation.negative.any(1))[:, None]
        )

    def half_of_the_pairs(distance, relation):
        even = torch.arange(distance.shape[1]) % 2 == 0
        return mining.Pairs(relation.positive & even, relation.negative & even)

    if "hard" in possible:
        module = make(selection=nearest_positive_first_negative)
        assert bool(module(x, labels) > 0)
        distance = distances.euclidean(x if "raw" in taker else distances.unit(x))
        chosen = nearest_positive_first_negative(distance, relations.of(labels))
        replayed = make(selection=lambda distance, relation: chosen)
        torch.testing.assert_close(module(x, labels), replayed(x, labels))
    else:
        with pytest.raises(ValueError, match="the loss weighs pairs, not triplets; possible: all, hard_negatives"):
            make(selection=nearest_positive_first_negative)(x, labels)
    if taker.startswith("Triplet"):
        with pytest.raises(TypeError, match="selection must return Triplets for a triplet loss, got Pairs"):
            make(selection=half_of_the_pairs)(x, labels)
    else:
        assert bool(make(selection=half_of_the_pairs)(x, labels) > 0)


def test_all_by_name_is_every_pair():
    distance, relation = torch.rand(5, 7), make_relation("explicit", 5, 7)
    chosen = mining.select("all", distance, relation, dim=3)
    assert isinstance(chosen, mining.Pairs)
    assert torch.equal(chosen.positive, relation.positive) and torch.equal(chosen.negative, relation.negative)
    near, positive, far, negative = mining.as_pairs(chosen, distance)
    assert near is far is distance and positive is relation.positive and negative is relation.negative


def test_ranks_know_which_selections_draw():
    assert global_batch._RANDOM_SELECTIONS == mining.DRAWN


def semihard_draws(x, labels, references=None, dtype=torch.float64, **settings):
    """The triplets that a triplet loss has drawn, and its value."""
    taken, select = [], mining.select

    def watched(*arguments, **options):
        taken.append(select(*arguments, **options))
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mining, "select", watched)
        loss = losses.TripletLoss(selection="random_semihard", generator=torch.Generator().manual_seed(2), **settings)
        taken.clear()  # of the check of the settings
        value = loss(x.to(dtype), labels, *(() if references is None else references))
    return [triplet for chosen in taken for triplet in triplets(chosen)], value


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("margin", [0.15, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_triplet_loss_draws_within_its_margin_of_its_own_distance(squared, margin, dtype):
    x, labels = some_batch()
    x = x.detach().to(dtype)
    listed, value = semihard_draws(x, labels, dtype=dtype, squared=squared, margin=margin)
    distance = distances.euclidean(x, normalize=True).double()
    relation, kinds = relations.of(labels), set()
    assert len(listed) == 4 * 4 * 3
    for a, p, n in listed:
        row, own = distance[a].tolist(), reference.columns(relation.negative.tolist(), a)
        among = reference.farther_negatives(row, p, own, margin, squared)
        assert n in among
        farther = len([i for i in own if row[i] > row[p]])
        kinds.add("nearer" if not farther else "farther" if margin is None or len(among) == farther else "within")
    assert kinds >= ({"farther"} if margin is None else {"within"})
    power = 2 if squared else 1
    gaps = torch.tensor([distance[a, p] ** power - distance[a, n] ** power for a, p, n in listed])
    wanted = torch.nn.functional.softplus(gaps) if margin is None else (gaps + margin).relu()
    assert float(value) == pytest.approx(float(wanted.mean()), rel=1e-5)


def test_random_semihard_of_hardly_anyone():
    """No item, classes of one member, one class, everybody in one point, and NaN: 0 or NaN, never an error."""
    for x, labels in [
        (torch.empty(0, 4), []),
        (torch.randn(5, 4), [0, 1, 2, 3, 4]),
        (torch.randn(5, 4), [3] * 5),
        (torch.randn(1, 4), [0]),
        (torch.ones(6, 4), [0, 0, 1, 1, 2, -1]),
        (torch.full((8, 4), torch.nan), [0, 0, 1, 1, 2, 2, 3, -1]),
    ]:
        for form in ({}, {"max_memory": 8_000}):
            listed, value = semihard_draws(x, torch.tensor(labels, dtype=torch.long), dtype=torch.float32, **form)
            assert bool(value.isnan()) == bool(x.isnan().any())
            assert len(listed) == {5: 0, 6: 4, 8: 6}.get(len(x), 0)
            assert bool(value == 0) or listed
    listed, value = semihard_draws(torch.ones(6, 4), torch.tensor([0, 0, 1, 1, 2, -1]))
    assert listed == [(0, 1, 2), (1, 0, 2), (2, 3, 0), (3, 2, 0)] and float(value) == pytest.approx(0.2)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_random_semihard_compiles_whole_and_draws_what_it_draws_eagerly(backend):
    if backend == "inductor" and shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on this machine")
    torch._dynamo.reset()
    x, labels = some_batch()
    loss = losses.TripletLoss(selection="random_semihard").double()
    compiled, values = torch.compile(loss, fullgraph=True, backend=backend), []
    for run in (loss, compiled):
        torch.manual_seed(9)
        x.grad = None
        with torch._inductor.config.patch(fallback_random=True):  # torch's own numbers, as without a compiler
            value = run(x, labels)
        value.backward()
        values.append((value.detach(), x.grad))
    for eager, other in zip(*values, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-10, atol=1e-12)


def test_bad_settings_are_told():
    distance, relation = torch.rand(3, 3), make_relation("ids", 3, None)
    for call, words in [
        (lambda: mining.semihard(distance, relation, fallback="nearest"), 'unknown fallback "nearest"'),
        (lambda: mining.easy_positive(distance, relation, negative="easy"), 'unknown negative "easy"'),
        (lambda: mining.easy_positive(distance, relation, fallback="any"), 'unknown fallback "any"'),
        (lambda: mining.random_semihard(distance, relation, margin=-0.1), "margin must be >= 0, got -0.1"),
        (lambda: mining.distance_weighted(distance, relation, dim=1), "dim must be >= 2, got 1"),
        (lambda: mining.distance_weighted(distance, relation, dim=8, clip=0), "clip must be > 0 and < 2, got 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
