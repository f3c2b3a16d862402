"""Checks of the kernels of triplet selections, on a GPU and under Triton's interpreter: each check asserts."""

import math

import torch

from nearkin import kernels, losses, mining
from nearkin.core import blockwise
from nearkin.core.labels import BatchFirst
from nearkin.kernels import triplet_ops

CASES = {
    "semihard": (losses.triplet_loss, {}),
    "semihard, soft": (losses.triplet_loss, {"margin": None}),
    "semihard, Euclidean, active": (losses.triplet_loss, {"squared": False, "reduction": "active"}),
    "semihard, raw": (losses.triplet_loss, {"normalize": False, "margin": 3.0, "reduction": "sum"}),
    "semihard_or_hardest": (losses.triplet_loss, {"selection": "semihard_or_hardest"}),
    "semihard_or_hardest, Euclidean": (losses.triplet_loss, {"selection": "semihard_or_hardest", "squared": False}),
    "semihard_or_skip": (losses.triplet_loss, {"selection": "semihard_or_skip"}),
    "batch_hard": (losses.triplet_loss, {"selection": "batch_hard"}),
    "batch_hard, Hermans": (
        losses.triplet_loss,
        {"selection": "batch_hard", "margin": None, "squared": False, "normalize": False},
    ),
    "easy_positive": (losses.triplet_loss, {"selection": "easy_positive"}),
    "easy_positive, Euclidean": (losses.triplet_loss, {"selection": "easy_positive", "squared": False}),
    "hard": (losses.triplet_loss, {"selection": "hard"}),
    "hard, soft, Euclidean": (losses.triplet_loss, {"selection": "hard", "margin": None, "squared": False}),
    "all": (losses.triplet_loss, {"selection": "all"}),
    "all, Euclidean, active": (losses.triplet_loss, {"selection": "all", "squared": False, "reduction": "active"}),
    "all, raw": (losses.triplet_loss, {"selection": "all", "normalize": False, "reduction": "sum"}),
}
DRAWN = {
    "random": (losses.triplet_loss, {"selection": "random"}),
    "random, raw": (losses.triplet_loss, {"selection": "random", "normalize": False, "squared": False}),
    "distance_weighted": (losses.triplet_loss, {"selection": "distance_weighted", "squared": False}),
    "fitted dimension": (
        losses.triplet_loss,
        {"selection": "distance_weighted", "squared": False, "sampling_dim": "fitted"},
    ),
    "margin, fitted": (losses.margin_loss, {"beta": torch.tensor(1.2), "margin": 4.0, "sampling_dim": "fitted"}),
    "margin": (losses.margin_loss, {"beta": torch.tensor([0.9, 1.2, 1.1, 1.3, 1.0, 1.2, 1.15]), "margin": 4.0}),
    "margin, one beta": (losses.margin_loss, {"beta": torch.tensor(1.2), "margin": 4.0, "nu": 0.1}),
    "contrastive": (losses.contrastive_loss, {"selection": "distance_weighted", "normalize": True, "margin": 3.0}),
    "contrastive, all pairs": (
        losses.contrastive_loss,
        {"selection": "distance_weighted", "normalize": True, "margin": 3.0, "balance": False, "reduction": "active"},
    ),
}
SHAPES = [(33, None, 16), (17, 37, 50), (1, None, 4), (5, 1, 2), (35, None, 1), (1, 70, 130)]
LONG = (7, 18, 270)
SOME = ("semihard", "easy_positive", "all")  # for what does not depend on how a loss is made of pairs


def batch(shape, device="cpu", dtype=torch.float32, classes=7, seed=0):
    """Anchors, labels (one unknown where there are several), references or None, and their labels."""
    number, num_references, dim = shape
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=g)

    def side(many):
        labels = torch.randint(classes, (many,), generator=g)
        rows = centres[labels] + torch.randn(many, dim, generator=g)
        if many > 4:
            labels[2] = -1
        return rows.to(device, dtype), labels.to(device)

    return *side(number), *(side(num_references) if num_references else (None, None))


def outcome(case, inputs, wants=(True, True), **overrides):
    """Value and gradients under an upstream that is not 1: by anchors, references, and β where it is a tensor."""
    function, settings = case
    x, labels, r, other = inputs
    x = x.detach().clone().requires_grad_(wants[0])
    if isinstance(other, BatchFirst):
        r = torch.cat([x, r])
    else:
        r = None if r is None else r.detach().clone().requires_grad_(wants[1])
    beta = settings.get("beta")
    if beta is not None:
        beta = beta.to(x.device, torch.promote_types(x.dtype, torch.float32), copy=True).requires_grad_()
        settings = settings | {"beta": beta}
    value = function(x, labels, r, other, **(settings | overrides))
    (value * 1.7).backward()
    return [value.detach(), *(t.grad for t in (x, r, beta) if t is not None and t.is_leaf and t.grad is not None)]


def served(case, inputs, wants=(True, True), **overrides):
    """The same, where the kernels must have served."""
    counted = []
    plain = triplet_ops._Loss.apply
    triplet_ops._Loss.apply = lambda *a: counted.append(1) or plain(*a)
    try:
        outcomes = outcome(case, inputs, wants, impl="triton", **overrides)
    finally:
        triplet_ops._Loss.apply = plain
    assert counted, "the kernels did not serve"
    return outcomes


def errors(got, exact):
    """The largest error of each tensor, by the size of its largest entry."""
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs]


def wide(inputs):
    return tuple(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs)


def as_exact(case, inputs, exact=None, plain=None, **overrides):
    """The kernel's error against float64 is at most plain torch's own and a hair.

    A value near 0 is a difference of distances near 1, each rounded to float32: as much more is luck.
    """
    setting = kernels.float64_units()
    kernels.set_float64_units("auto")  # plain torch has float64 inside, whatever the kernels have
    try:
        exact = outcome(case, wide(inputs), impl="torch") if exact is None else exact
        plain = outcome(case, inputs, impl="torch") if plain is None else plain
    finally:
        kernels.set_float64_units(setting)
    got = served(case, inputs, **overrides)
    assert [t.dtype for t in got] == [t.dtype for t in plain]
    for place, (ours, theirs) in enumerate(zip(errors(got, exact), errors(plain, exact), strict=True)):
        luck = 2**-24 / max(float(exact[0]), 1e-6) if place == 0 else 0.0
        assert ours <= theirs + 1e-6 + luck, (case, inputs[0].shape, place, ours, theirs)


def check_exactness(device):
    """Every selection and loss, in turns at one shape each where the device is slow; rows too long for one program."""
    turns = [(name, shape) for k, name in enumerate(CASES) for shape in SHAPES[k % 6 :: 6 if device == "cpu" else 1]]
    for name, shape in (*turns, ("semihard", LONG), ("all, Euclidean, active", LONG)):
        as_exact(CASES[name], batch(shape, device))
    for name in ("all", "all, Euclidean, active"):  # classes apart: the few active hinges are small
        as_exact(CASES[name], batch((36, None, 128), device, classes=9))


def check_batch_first(device):
    """References that start with the batch, as a memory gives them: no pair of an item with itself, and both roles."""
    for k, name in enumerate(CASES):
        shape = SHAPES[1] if k % 2 else (20, 7, 33)
        as_exact(CASES[name], with_memory(batch(shape, device)))
    for dtype in (torch.bfloat16, torch.float16):
        as_exact(CASES["semihard"], with_memory(batch((20, 18, 24), device, dtype)))
    spoilt = with_memory(batch((20, 12, 6), device))
    spoilt[2][5, 1] = math.nan
    assert bool(served(CASES["semihard"], spoilt)[0].isnan())


def with_memory(inputs):
    x, labels, memory, memory_labels = inputs
    return x, labels, memory, BatchFirst(torch.cat([labels, memory_labels]))


def check_half_precision(device):
    for dtype in (torch.bfloat16, torch.float16):
        x, labels, r, other = batch((20, 18, 24), device, dtype)
        as_exact(CASES["semihard"], (x, labels.int(), r, other.int()))
        as_exact(CASES["all"], (x, labels, r.float(), other))
        as_exact(CASES["batch_hard"], (x, labels, None, None))


def check_many_positives(device):
    """Several groups of slots, ragged: classes of 1 to 9."""
    x, _, _, _ = batch((20, None, 8), device)
    labels = torch.tensor([0] * 9 + [1] * 6 + [2] * 2 + [4] * 2 + [5])[torch.randperm(20)].to(device)
    for name in ("semihard", "all, Euclidean, active"):
        as_exact(CASES[name], (x, labels, None, None))


def check_ties(device):
    """Points on a small grid: distances are exact and mostly equal, so every choice is decided by the order."""
    for seed in range(1 if device == "cpu" else 5):
        g = torch.Generator().manual_seed(seed)
        x = torch.randint(-1, 2, (30, 3), generator=g).float().to(device)
        r = torch.randint(-1, 2, (70, 3), generator=g).float().to(device)
        y, other = (torch.randint(9, (n,), generator=g).to(device) for n in (30, 70))
        for name in ("semihard, raw", "semihard_or_hardest", "batch_hard", "easy_positive", "hard", "all, raw"):
            function, settings = CASES[name]
            for inputs in ((x, y, r, other),) if name == "hard" else ((x, y, None, None),):
                case = function, settings | {"normalize": False, "margin": 0.5}
                got, plain = served(case, inputs), outcome(case, inputs, impl="torch")
                assert max(errors(got, plain)) < 1e-5, name


def check_duplicates(device):
    """Positives and negatives at the same point: none is strictly farther than the other, and none has a slope."""
    x, labels, _, _ = batch((16, None, 6), device)
    x, labels = torch.cat((x, x * 2, x)), torch.cat((labels, labels, (labels + 1) % 7))
    labels[2::16] = -1
    for name in ("semihard, Euclidean, active", "all, Euclidean, active", "easy_positive"):
        got, plain = (overrides(CASES[name], (x, labels, None, None)) for overrides in (served, outcome))
        torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def check_collapse(device):
    """Rows within 1e-4 of each other."""
    x, labels, _, _ = batch((40, None, 12), device)
    x = torch.ones_like(x) + 1e-4 * x
    for name in ("semihard", "semihard, Euclidean, active", "all, Euclidean, active"):
        as_exact(CASES[name], (x, labels, None, None))


def check_nobody(device):
    """No positives, no negatives, no known labels: exactly 0, with a gradient of 0."""
    x, labels, r, _ = batch((20, 12, 6), device)
    cases = {name: CASES[name] for name in SOME}
    cases |= {"random": DRAWN["random"], "margin": (losses.margin_loss, {"beta": torch.tensor(1.2)})}
    for name, case in cases.items():
        nobody = (torch.arange(20, device=device), labels * 0, labels * 0 - 1)
        for y in nobody[:2] if name != "semihard" else nobody:
            assert not any(bool(t.any()) for t in served(case, (x[:12], y[:12], None, None))), name
    assert not any(bool(t.any()) for t in served(CASES["semihard"], (x, labels, r, labels[:12] + 50)))


def check_spoilt(device):
    """A NaN or Inf anywhere, including a row without pairs, is never a plausible number."""
    cases = [CASES[name] for name in SOME] + [DRAWN["distance_weighted"], DRAWN["margin"]]
    for k, case in enumerate(cases):
        for side, row in ((0, 2), (2, 2 + k)) if k else ((0, 0), (2, 11)):
            inputs = list(batch((20, 12, 6), device))
            inputs[side][row, 1] = (math.nan, math.inf, -math.inf)[(k + side) % 3]
            assert bool(served(case, inputs)[0].isnan()), (case, side, row)
    beta = torch.full((7,), 1.2)
    beta[3] = math.nan
    assert bool(served((losses.margin_loss, {"beta": beta}), batch((20, None, 6), device))[0].isnan())


def check_extremes(device):
    """Zero rows, and lengths from 1e-30 to 1e30: finite, as plain torch."""
    x = torch.tensor([[2.0, 0.0], [-3.0, 0.0], [0.0, 0.0], [1e-30, 1e-30], [1e30, 0.0], [0.0, 1e30], [1e-3, 1.0]])
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 0])
    inputs = (x.to(device), labels.to(device), None, None)
    for name in ("semihard", "batch_hard, Hermans", "all, Euclidean, active"):
        got, plain = served(CASES[name], inputs), outcome(CASES[name], inputs, impl="torch")
        assert all(bool(t.isfinite().all()) for t in got), name
        for a, b in zip(got, plain, strict=True):  # at 1e-30 plain torch itself loses a part of the gradient
            a, b = (t[[0, 1, 4, 5, 6]] if t.dim() else t for t in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def check_who_learns(device):
    inputs = batch((10, 17, 6), device)
    for name in ("semihard", "all"):
        both = served(CASES[name], inputs)
        assert torch.equal(served(CASES[name], inputs, (True, False))[1], both[1])
        assert torch.equal(served(CASES[name], inputs, (False, True))[1], both[2])
    beta = torch.tensor(1.2, device=device, requires_grad=True)
    x, labels, _, _ = inputs
    losses.margin_loss(x, labels, beta=beta, impl="triton").backward()
    assert beta.grad is not None and x.grad is None


def check_a_queue_may_move_on(device):
    x, labels, r, other = batch((10, 17, 6), device)
    for name in ("semihard", "all"):
        function, settings = CASES[name]
        expected = served(CASES[name], (x, labels, r, other), (True, False))[1]
        leaf, queue, ids, anchor_ids = x.clone().requires_grad_(), r.clone(), other.clone(), labels.clone()
        value = function(leaf, anchor_ids, queue, ids, impl="triton", **settings) * 1.0
        value += 1  # a loss may be added to in place
        queue.zero_(), ids.zero_(), anchor_ids.zero_()
        (value * 1.7).backward()
        assert torch.equal(leaf.grad, expected)
        direct = function(leaf, labels, impl="triton", **settings)
        direct *= 2
        direct.backward()


def check_room(device):
    """Where not all pairs may be positive, the largest class is looked up; if it is too large, torch serves."""
    inputs = batch((20, None, 6), device)
    expected = served(CASES["semihard"], inputs)
    largest = int((inputs[1] + 1).bincount().max())
    before = triplet_ops.ROOM
    try:
        triplet_ops.ROOM = 20 * largest
        assert all(map(torch.equal, served(CASES["semihard"], inputs), expected))
        triplet_ops.ROOM = 20 * largest - 1
        plain = outcome(CASES["semihard"], inputs, impl="triton")
        assert all(map(torch.equal, plain, outcome(CASES["semihard"], inputs, impl="torch")))
    finally:
        triplet_ops.ROOM = before


def check_fallback(device):
    """What the kernels cannot serve has the result of plain torch."""
    x, labels, r, other = batch((20, 30, 6), device)
    rows = torch.nn.functional.one_hot(labels.clamp(min=0), 7).bool()
    triplet = CASES["semihard"]
    for case, inputs in (
        (triplet, (x.double(), labels, None, None)),
        (triplet, (x, rows, None, None)),
        ((triplet[0], {"swap": True}), (x, labels, None, None)),
        ((triplet[0], {"selection": mining.hard}), (x, labels, r, other)),
    ):
        got, plain = outcome(case, inputs, impl="triton"), outcome(case, inputs, impl="torch")
        assert all(map(torch.equal, got, plain))
    each = losses.triplet_loss(x, labels, reduction="none", impl="triton")
    assert torch.equal(each, losses.triplet_loss(x, labels, reduction="none", impl="torch"))
    empty = losses.triplet_loss(x[:0], labels[:0], impl="triton")
    assert float(empty) == 0


def drawn(case, inputs, seed):
    """The pairs that the kernels draw from this seed, as a selection for plain torch; every term must be above 0."""
    outcomes = []
    plain = triplet_ops._kernels().forward

    def forward(*a):
        outcomes.append(plain(*a))
        return outcomes[-1]

    triplet_ops._kernels().forward = forward
    try:
        got = served(case, inputs, generator=torch.Generator(inputs[0].device).manual_seed(seed))
    finally:
        triplet_ops._kernels().forward = plain
    number, room = len(inputs[0]), outcomes[0][1].capacity
    lists = outcomes[0][1].lists[: (3 + 2 * room) * number].view(-1, number).long()
    count = lists[0]
    chosen = torch.arange(room, device=count.device)[None, :] < count[:, None]
    columns = lists[3:].view(2, room, number).transpose(1, 2)
    valid = chosen & (columns >= 0).all(0)
    positive, negative = torch.where(valid, columns, 0)
    return got, mining.Triplets(positive, negative, valid)


def check_draws(device):
    """Value and gradient are the formula's on the drawn pairs, which are positive and negative; a seed determines
    them."""
    for name, (function, settings) in DRAWN.items():
        for inputs in (batch((20, None, 6), device) if len(name) % 2 else batch((10, 70, 6), device),):
            case = function, settings | ({"margin": None} if function is losses.triplet_loss else {})
            got, pairs = drawn(case, inputs, 3)
            same = case[0], case[1] | {"selection": lambda distance, related, pairs=pairs: pairs}
            same[1].pop("sampling_dim", None)
            related = blockwise.relation(blockwise.Batch(*inputs))
            assert bool((related.positive & related.negative.any(1, keepdim=True)).sum() == pairs.valid.sum()), name
            a, p, n = pairs.indices()
            assert bool(related.positive[a, p].all()) and bool(related.negative[a, n].all()), name
            assert len({(int(i), int(j)) for i, j in zip(a, p, strict=True)}) == len(a), name
            exact = outcome(same, wide(inputs))
            plain = outcome(same, inputs)
            for ours, theirs in zip(errors(got, exact), errors(plain, exact), strict=True):
                assert ours <= theirs + 1e-6, (name, ours, theirs)
            if name not in ("random", "margin"):
                continue
            again, num_references = (drawn(case, inputs, seed) for seed in (3, 4))
            assert all(map(torch.equal, again[0], got)) and torch.equal(again[1].negative, pairs.negative)
            assert not torch.equal(num_references[1].negative, pairs.negative), name


def check_distribution(device):
    """Draws of one anchor: as often as the density requires, uniformly where all are beyond the cutoff."""
    common = torch.tensor([0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 2.4])  # angles of eight negatives from the anchor
    clipped = torch.tensor([0.02, 0.2, 0.4, 0.52, 0.54, 0.56, 0.58, 2.4])
    weighted = ("distance_weighted", common), ("distance_weighted", clipped), ("distance_weighted", 2.5 + common / 9)
    positives = 32 if device == "cpu" else 1000
    fitted = torch.tensor(16.0, device=device)
    tries = [(selection, angles, None) for selection, angles in (("random", common), *weighted)]
    for selection, angles, dim in (*tries, *((*each, fitted) for each in weighted)):
        x = torch.eye(1, 16, device=device).repeat(16, 1)
        negatives = torch.cat((angles[:, None].cos(), angles[:, None].sin(), torch.zeros(8, 14)), 1).to(device)
        r = torch.cat((negatives[:5], x[:1].expand(positives, 16), negatives[5:]))
        other = torch.tensor([1] * 5 + [0] * positives + [1] * 3, device=device)
        case = losses.triplet_loss, {"selection": selection, "margin": None, "sampling_dim": dim}
        _, pairs = drawn(case, (x, torch.zeros(16, dtype=torch.long, device=device), r, other), 1)
        _, _, columns = pairs.indices()
        counted = columns.cpu().bincount(minlength=positives + 8).double()
        counted = torch.cat((counted[:5], counted[positives + 5 :]))
        distance = 2 * (angles.double() / 2).sin()
        weight = torch.ones(8, dtype=torch.float64)
        if selection == "distance_weighted" and bool((distance < 1.4).any()):
            log_weight = mining._log_inverse_density(torch.cat((distance, torch.tensor([0.5]))), 16)
            weight = log_weight[:8].clamp(max=log_weight[8]).sub(log_weight[8]).exp() * (distance < 1.4)
        expected = weight / weight.sum() * 16 * positives
        assert int(counted.sum()) == 16 * positives and not bool(counted[expected == 0].any())
        chi = float(((counted - expected).square() / expected.clamp(min=1e-9))[expected > 0].sum())
        assert chi < 24.3, (selection, chi, counted, expected)  # exceeded once in a thousand seeds


CHECKS = {name[6:]: function for name, function in list(globals().items()) if name.startswith("check_")}
