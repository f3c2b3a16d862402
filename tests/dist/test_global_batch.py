"""Many processes against one: the same gradients, buffers, memories and draws from the same global batch.

A gradient's error is its largest difference from the single process's, over the largest entry of the latter (absolute
where that is 0). Rank 0 takes the single process's step beside its own, plainly.
"""

import copy
import os
import re
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cases
import worlds
from nearkin import evaluation, losses, mining, samplers
from nearkin.dist import collectives
from nearkin.dist.global_batch import GlobalBatch, average_gradients, share_state
from nearkin.memory import CrossBatchMemory

WORLDS = (1, 2, 3, 4)
ITEMS, INPUT = 24, 5
TOLERANCE = 1e-12
# Rows of each rank in the first and in the second step: unequal, none at all, and one alone, which has no kin there.
CUTS = {1: [(24,), (24,)], 2: [(17, 7), (0, 24)], 3: [(13, 0, 11), (20, 3, 1)], 4: [(9, 1, 14, 0), (6, 6, 6, 6)]}
sized = pytest.mark.parametrize("world", WORLDS)
several = pytest.mark.parametrize("world", WORLDS[1:])


class Uniform:
    """A selection of one's own that draws."""

    def __call__(self, distance, kin):
        return mining.random(distance, kin)


def seeded(make):
    torch.manual_seed(7)
    return make().double()


def all_losses():
    """Every public loss and setting of cases.py, and every selection with each loss that takes it."""
    results = {case.name: (case.build, case.graded) for case in cases.LOSSES}

    def add(name, make):
        results[name] = (lambda: seeded(make), False)

    for name in ("all", *mining.TRIPLET_SELECTIONS):
        add(f"triplet/{name}", lambda name=name: losses.TripletLoss(selection=name))
        add(f"margin/{name}", lambda name=name: losses.MarginLoss(num_classes=cases.CLASSES, selection=name))
        add(f"contrastive/{name}", lambda name=name: losses.ContrastiveLoss(selection=name, normalize=True))
    for name in mining.PAIR_SELECTIONS:
        add(f"margin/{name}", lambda name=name: losses.MarginLoss(selection=name))
        add(f"contrastive/{name}", lambda name=name: losses.ContrastiveLoss(selection=name))
        add(f"multi-similarity/{name}", lambda name=name: losses.MultiSimilarityLoss(selection=name))
    add("triplet/own", lambda: losses.TripletLoss(selection=Uniform()))
    add("triplet/bounded", lambda: losses.TripletLoss(selection="random", max_memory=20_000))
    add("triplet/generator", lambda: losses.TripletLoss(selection="random", generator=torch.Generator()))
    size = (cases.CLASSES * 10, cases.DIM)  # more classes than rows: some are left to be drawn
    for make in (losses.ArcFaceLoss, losses.CosFaceLoss, losses.NormalizedSoftmaxLoss):
        add(f"{make.__name__}/sampled", lambda make=make: make(*size, sample_rate=0.7))
    return results


def items(graded=False):
    """Inputs and labels of the global batch; the last items are of different classes."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(cases.CLASSES).repeat(ITEMS // cases.CLASSES)
    x = torch.randn(cases.CLASSES, INPUT, generator=generator, dtype=torch.float64)[labels]
    x = x + torch.randn(ITEMS, INPUT, generator=generator, dtype=torch.float64)
    return x, labels.double() + 0.1 * torch.arange(ITEMS).double() / ITEMS if graded else labels


def encoder():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(INPUT, 7), nn.Tanh(), nn.Linear(7, cases.DIM)).double()


def part(rows, counts, rank):
    return rows[sum(counts[:rank]) : sum(counts[: rank + 1])]


def error(results, expected):
    """The largest difference over all tensors, relative to the largest entry."""
    assert [a is None for a in results] == [b is None for b in expected]
    pairs = [
        (a.detach().double(), b.detach().double()) for a, b in zip(results, expected, strict=True) if a is not None
    ]
    largest = max([float(b.abs().max()) for _, b in pairs if b.numel()], default=0.0)
    apart = max([float((a - b).abs().max()) for a, b in pairs if b.numel()], default=0.0)
    return apart / largest if largest > 0 else apart


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def one_step(net, loss, arguments, seed):
    torch.manual_seed(seed)
    value = loss(net(arguments[0]), *arguments[1:])
    value.backward()
    return value.detach()


def step_both(rank, counts, seed, many, single, x, labels):
    """A step of all ranks, which end alike, and of one process on rank 0.

    There, the errors of the value, of the encoder's and the loss's gradients, and of the buffers.
    """
    net, loss = many
    value = one_step(net, loss, (part(x, counts, rank), part(labels, counts, rank)), seed + 100 * rank)
    average_gradients(loss)
    results = [value, *gradients(net), *gradients(loss), *loss.buffers()]
    assert collectives.same(torch.cat([t.double().flatten() for t in results if t is not None]))
    errors = []
    if rank == 0:
        expected = one_step(*single, (x, labels), seed)
        errors = [error([value], [expected]), error(gradients(net), gradients(single[0]))]
        errors.append(error(gradients(loss), gradients(single[1])))
        errors += [error([a], [b]) for a, b in zip(loss.buffers(), single[1].buffers(), strict=True)]
    for module in (*many, *single):
        with torch.no_grad():
            for p in module.parameters():
                if p.grad is not None:
                    p -= 0.05 * p.grad
        module.zero_grad()
    return errors


def train_all(rank, world, names):
    results = {}
    for name in names:
        build, graded = all_losses()[name]
        loss = GlobalBatch(build())
        if rank > 0:  # rank 0's parameters are everyone's, and its generator
            generator = getattr(loss.loss, "settings", {}).get("generator")
            if generator is not None:
                generator.manual_seed(rank)
            with torch.no_grad():
                for p in loss.parameters():
                    p.add_(1.0)
        many, single = (DistributedDataParallel(encoder()), loss), (encoder(), build())
        results[name] = []
        for seed, counts in enumerate(CUTS[world]):
            results[name] += step_both(rank, counts, seed, many, single, *items(graded))
    return results


@pytest.mark.slow
@sized
def test_gradients_of_every_loss_and_selection_are_those_of_one_process(world):
    names = list(all_losses())
    results = worlds.run(world, train_all, names, timeout=120)[0]
    wrong = {name: errors for name, errors in results.items() if not max(errors) <= TOLERANCE}
    assert set(results) == set(names) and min(len(errors) for errors in results.values()) >= 6 and not wrong


def boundaries_per_item(rank, world):
    """Errors of the value, and of the gradients by embeddings and boundaries, of a β per item."""
    x, labels = items()
    x, order = x[:, : cases.DIM], torch.randperm(ITEMS, generator=torch.Generator().manual_seed(1))
    results = []
    for counts in CUTS[world]:
        own, full = part(x, counts, rank).clone().requires_grad_(), x.clone().requires_grad_()
        loss = seeded(lambda: losses.MarginLoss(num_items=ITEMS, beta_weight=0.1, selection="semihard"))
        alone = seeded(lambda: losses.MarginLoss(num_items=ITEMS, beta_weight=0.1, selection="semihard"))
        value = GlobalBatch(loss, averaged=False)(own, part(labels, counts, rank), items=part(order, counts, rank))
        value.backward()
        expected = alone(full, labels, items=order)
        expected.backward()
        results += [error([value], [expected]), error([own.grad], [part(full.grad, counts, rank)])]
        results.append(error(gradients(loss), gradients(alone)))
    return results


@sized
def test_boundaries_per_item_are_those_of_one_process(world):
    assert max(map(max, worlds.run(world, boundaries_per_item, timeout=120))) <= TOLERANCE


def any_parts(rank, world, seeds):
    """Random losses, items and cuts, with unknown items and batches of nobody; the errors of values and gradients."""
    results = {}
    for seed in seeds:
        chance = np.random.default_rng(seed)
        name = chance.choice(list(all_losses()))
        build, graded = all_losses()[name]
        number = int(chance.choice([0, 1, 2, 5, 16]))
        counts = np.diff([0, *np.sort(chance.integers(0, number + 1, world - 1)), number]).tolist()
        x = torch.from_numpy(chance.normal(size=(number, cases.DIM)))
        labels = torch.from_numpy(chance.normal(size=number) if graded else chance.integers(-1, 3, number))
        own, full = part(x, counts, rank).clone().requires_grad_(), x.clone().requires_grad_()
        torch.manual_seed(seed + rank)
        value = GlobalBatch(build())(own, part(labels, counts, rank))
        value.backward()
        torch.manual_seed(seed)
        expected = build()(full, labels)
        expected.backward()
        wanted_rows = part(full.grad, counts, rank)
        results[f"{seed} {name} {counts}"] = max(error([value], [expected]), error([own.grad / world], [wanted_rows]))
    return results


@pytest.mark.slow
@several
def test_any_loss_of_any_parts_is_that_of_one_process(world):
    for results in worlds.run(world, any_parts, list(range(60 * world, 60 * world + 60))):
        assert not {name: wrong for name, wrong in results.items() if not wrong <= TOLERANCE}


def views(rank, world):
    """Two views of the items, both with gradient, by ids and by multi-label rows; then a batch given twice."""
    x, labels = items()
    rows = torch.rand(ITEMS, 7, generator=torch.Generator().manual_seed(1)) < 0.3
    results = []
    for counts in CUTS[world]:
        for kind in (labels, rows):
            for case in (losses.SupConLoss(), losses.TripletLoss(selection="random"), losses.SiameseLoss(cases.DIM)):
                net, plain, loss = DistributedDataParallel(encoder()), encoder(), GlobalBatch(case.double())
                own, kin = part(x, counts, rank), part(kind, counts, rank)
                torch.manual_seed(rank)
                loss(net(own), kin, net(own + 0.1), kin).backward()
                torch.manual_seed(0)
                case(plain(x), kind, plain(x + 0.1), kind).backward()
                results.append(error(gradients(net), gradients(plain)))
                net.zero_grad()
                plain.zero_grad()
                y = net(own)
                torch.manual_seed(rank)
                loss(y, kin, y, kin).backward()  # its own references: it meets itself without self-pairs
                torch.manual_seed(0)
                case(plain(x), kind).backward()
                results.append(error(gradients(net), gradients(plain)))
    return results


@several
def test_two_views_and_multi_label_rows(world):
    for results in worlds.run(world, views):
        assert max(results) <= TOLERANCE


def accumulated(rank, world):
    """Gradients of three batches gathered before one step, exchanged with the last: the errors against one process."""
    plain, plainly = encoder(), seeded(lambda: losses.ProxyAnchorLoss(cases.CLASSES, cases.DIM))
    net, loss = DistributedDataParallel(encoder()), GlobalBatch(copy.deepcopy(plainly))
    x, labels = items()
    for turn in range(3):
        taken = torch.arange(ITEMS) % 3 == turn
        local = taken.nonzero().flatten().tensor_split(world)[rank]
        with net.no_sync() if turn < 2 else nullcontext():
            (loss(net(x[local]), labels[local]) / 3).backward()
        (plainly(plain(x[taken]), labels[taken]) / 3).backward()
    average_gradients(loss)
    return error(gradients(net), gradients(plain)), error(gradients(loss), gradients(plainly))


def test_gradients_may_be_accumulated():
    for results in worlds.run(2, accumulated):
        assert max(results) <= 1e-12


def remember(rank, world, label_kind):
    """Steps of a memory with embeddings that are given: every buffer must be that of one process, bit for bit."""
    generator = torch.Generator().manual_seed(2)
    graded = label_kind == "targets"

    def make():
        loss = losses.LogRatioLoss() if graded else losses.TripletLoss(selection="distance_weighted")
        return CrossBatchMemory(loss, 30, cases.DIM, warmup=1, label_kind=label_kind)

    many, single = GlobalBatch(make()), make()
    results = []
    for step in range(6):
        x = torch.randn(ITEMS, cases.DIM, generator=generator)
        labels = torch.randint(0, 4, (ITEMS,), generator=generator)
        labels = labels.float() if graded else labels
        stored = x + 0.01 if step % 2 else None
        counts = CUTS[world][step % 2]
        torch.manual_seed(step + rank)
        value = many(*(None if t is None else part(t, counts, rank) for t in (x, labels, stored)))
        torch.manual_seed(step)
        expected = single(x, labels, stored)
        state = many.loss.state_dict()
        assert all(collectives.same(buffer) for buffer in state.values()) and collectives.same(value)
        assert all(torch.equal(buffer, single.state_dict()[name]) for name, buffer in state.items())
        digests = [collectives.digest(buffer) for buffer in state.values()]
        results.append((float(value), float(expected), torch.stack(digests).numpy()))
    return results


@pytest.mark.parametrize("label_kind", ["ids", "targets"])
@several
def test_memories_are_those_of_one_process_at_every_step(world, label_kind):
    first, *others = worlds.run(world, remember, label_kind)
    assert all(value == expected for value, expected, _ in first)
    digests = np.stack([digest for *_, digest in first])
    assert all((np.stack([digest for *_, digest in other]) == digests).all() for other in others)
    assert len(np.unique(digests[:, 0], axis=0)) == len(first)  # the memory did change


def ordered(rank, world):
    """Parts as a sampler deals them out, put back in the order of one process."""
    x, labels = items()
    place = torch.arange(ITEMS)[rank::world]
    counts = [len(torch.arange(ITEMS)[r::world]) for r in range(world)]
    results = []
    first = losses.LogRatioLoss(anchors=3)  # the first rows of the batch, wherever they were dealt out
    remembered = CrossBatchMemory(losses.SupConLoss(), 40, cases.DIM)
    for loss in (losses.NPairLoss(), losses.MarginLoss(), first, remembered):
        net, plain = DistributedDataParallel(encoder()), encoder()
        many = GlobalBatch(loss.double())
        torch.manual_seed(rank)
        value = many(net(x[place]), labels[place], order=place, counts=counts)
        value.backward()
        if isinstance(loss, CrossBatchMemory):
            loss.reset()
        torch.manual_seed(0)
        expected = loss(plain(x), labels)
        expected.backward()
        results += [error([value], [expected]), error(gradients(net), gradients(plain))]
    return results


@sized
def test_a_batch_dealt_out_in_turns_is_put_back_in_order(world):
    for results in worlds.run(world, ordered):
        assert max(results) <= TOLERANCE


DIFFER = "must have one dtype and shape on all ranks but for the rows:"
BAD = {
    "dimensions": f"embeddings {DIFFER} torch.float32 (3, 4) on rank 0, torch.float32 (3, 5) on rank 1",
    "kind": f"embeddings {DIFFER} torch.float32 (3, 4) on rank 0, torch.bfloat16 (3, 4) on rank 1",
    "labels": "rank 1 of 2: labels must have one entry per row of embeddings: 3 rows, 2 labels",
    "label kind": f"labels {DIFFER} torch.int64 (3) on rank 0, torch.float32 (3) on rank 1",
    "references": f"references {DIFFER} None on rank 0, torch.float32 (3, 4) on rank 1",
    "no tensor": "rank 1 of 2: embeddings must be a torch tensor, got list",
    "no labels": "rank 1 of 2: labels must be a torch tensor, got NoneType",
    "exotic": "rank 1 of 2: a tensor to exchange must have 1 to 7 dimensions and a common dtype, "
    "got torch.complex64 (3,)",
    "alone": "rank 1 of 2: reference_labels need references, got None",
    "relation": "rank 1 of 2: labels must be ids, rows or targets here, got a Relation, which does not describe other "
    "ranks' items; a memory goes inside: GlobalBatch(CrossBatchMemory(loss, ...))",
    "relation rows": "rank 1 of 2: reference_labels must be given with references and multi-label rows, got None",
    "order": "rank 1 of 2: order must have one entry per row of embeddings: 3 rows, 2 labels",
    "range": "labels must be in 0..3 (or -1 for unknown), got 8",
    "classes": "ArcFaceLoss must have parameters and buffers of the same names, shapes and dtypes on all ranks; "
    "on rank {rank}: weight torch.float32 ({classes}, 4)",
    "counts": "counts must be the rows of each of 2 ranks, rank 1 with 3 rows, got (3, 4)",
}


def refused(rank, world):
    """The sentence that each misuse on rank 1 gets on this rank; after each a call that works: nothing is left over."""
    loss = GlobalBatch(losses.ArcFaceLoss(4, 4))
    pair = GlobalBatch(losses.SupConLoss())
    x, labels = torch.randn(3, 4), torch.tensor([0, 1, 1])
    other = torch.eye(3, dtype=torch.bool)
    calls = {
        "dimensions": lambda: loss(torch.randn(3, 5), labels),
        "kind": lambda: loss(x.bfloat16(), labels),
        "labels": lambda: loss(x, labels[:2]),
        "label kind": lambda: loss(x, labels.float()),
        "references": lambda: loss(x, labels, x + 1, labels),
        "no tensor": lambda: loss([1.0], labels),
        "no labels": lambda: loss(x, None),
        "exotic": lambda: loss(x, labels.to(torch.complex64)),
        "alone": lambda: loss(x, labels, None, labels),
        "relation": lambda: pair(x, mining.Relation(other, ~other)),
        "relation rows": lambda: pair(x, other, x + 1),
        "order": lambda: pair(x, labels, order=labels[:2]),
        "range": lambda: loss(x, labels + 8),
        "classes": lambda: GlobalBatch(losses.ArcFaceLoss(4 + rank, 4))(x, labels),
        "counts": lambda: loss(x, labels, counts=(3, 4)),  # known counts are not exchanged: only this rank hears of it
    }
    results = {}
    for name, call in calls.items():
        try:
            if rank == 1 or name == "classes":
                call()
            elif name != "counts":
                loss(x, labels)
        except (TypeError, ValueError) as wrong:
            results[name] = str(wrong)
        assert bool(torch.isfinite(loss(x, labels)))
    return results


def test_bad_use_gets_one_sentence_on_every_rank():
    first, second = worlds.run(2, refused)
    assert second == BAD | {"classes": BAD["classes"].format(rank=1, classes=5)}
    assert first.pop("classes") == BAD["classes"].format(rank=0, classes=4)
    assert first == {name: sentence for name, sentence in BAD.items() if name not in ("counts", "classes")}


def second_derivatives(rank, world):
    """What this rank says to them: each knows the gradient of its own rows alone."""
    x, labels = items()
    own, kin = part(x, CUTS[world][0], rank).requires_grad_(), part(labels, CUTS[world][0], rank)
    values = [lambda: GlobalBatch(losses.SupConLoss())(own, kin)]
    for most in (None, 2**14):
        shared = losses.CosFaceLoss(cases.CLASSES, INPUT, shard=True, max_memory=most).double()
        values.append(lambda shared=shared: shared(own, kin))
    sentences = []
    for value in values:
        value().backward()
        try:
            torch.autograd.grad(value(), own, create_graph=True)
        except RuntimeError as error:
            sentences.append(str(error))
    return sentences


def test_second_derivatives_are_refused():
    for sentences in worlds.run(2, second_derivatives):
        assert [s.partition(" has no second derivative; ")[0] for s in sentences] == [
            "a batch gathered from several processes",
            *["a loss whose class weights processes share (shard=True)"] * 2,
        ]


def variants(rank, world):
    """Half precision, summed gradients, known counts, terms without reduction, a group of some ranks."""
    x, labels = items()
    counts = CUTS[world][0]
    own, kin = part(x, counts, rank), part(labels, counts, rank)
    supcon = losses.SupConLoss()
    results = {}
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        y, z = own.to(kind).requires_grad_(), x.to(kind).requires_grad_()
        value, expected = GlobalBatch(supcon)(y, kin), supcon(z, labels)
        value.backward()
        expected.backward()
        exact = torch.equal(value, expected) and torch.equal(y.grad, part(z.grad, counts, rank) * world)
        results[str(kind)] = exact and y.grad.dtype == kind
    y, z = own.clone().requires_grad_(), x.clone().requires_grad_()
    GlobalBatch(supcon, averaged=False)(y, kin, counts=counts).backward()
    supcon(z, labels).backward()
    results["summed"] = torch.equal(y.grad, part(z.grad, counts, rank))
    terms = GlobalBatch(losses.SupConLoss(reduction="none"))(own, kin)
    results["terms"] = torch.equal(terms, losses.SupConLoss(reduction="none")(x, labels))
    last = dist.new_group([world - 2, world - 1])
    if rank >= world - 2:
        start = sum(counts[: world - 2])
        results["group"] = torch.equal(GlobalBatch(supcon, last)(own, kin), supcon(x[start:], labels[start:]))
        margin = losses.MarginLoss(beta=float(rank))
        share_state(margin, last)
        results["shared in a group"] = float(margin.beta) == world - 2
        return results
    try:
        GlobalBatch(supcon, last)(own, kin)
    except ValueError as wrong:
        results["outside"] = str(wrong) == f"group must have this process in it, got a group without rank {rank}"
    return results


@several
def test_kinds_groups_and_sums(world):
    for rank, results in enumerate(worlds.run(world, variants)):
        assert all(results.values()) and ("group" in results or "outside" in results), (rank, results)


def partial(rank, world):
    """Each rank holds a part of the loss: rank r weighs row i by (r + 1) · i."""
    results = []
    for counts in CUTS[world]:
        for kind in (torch.float64, torch.bfloat16):
            own = torch.ones(counts[rank], 2, dtype=kind, requires_grad=True)
            full = collectives.gather_partial(own)
            (full * torch.arange(ITEMS, dtype=kind)[:, None]).sum().mul(rank + 1).backward()
            expected = part(torch.arange(ITEMS, dtype=kind), counts, rank) * sum(range(1, world + 1)) * world
            results.append(bool((own.grad == expected[:, None]).all()) and own.grad.dtype == kind)
    results.append(collectives.total(torch.tensor([rank])).tolist() == [sum(range(world))])
    results.append(collectives.largest(torch.tensor([rank, -rank])).tolist() == [world - 1, 0])
    results.append(collectives.counts(torch.zeros(rank, 2)) == tuple(range(world)))
    results.append(collectives.same(torch.tensor(1)) and not collectives.same(torch.tensor(rank)))
    return results


@several
def test_parts_of_a_loss_are_summed(world):
    assert all(all(results) for results in worlds.run(world, partial))


def averages(rank, world):
    """Means over ranks; a parameter without a gradient on some ranks, on all, one in another kind, one sharded."""
    module = nn.Module()
    for name in ("all", "some", "none", "own", "narrow"):
        kind = torch.bfloat16 if name == "narrow" else torch.float64
        setattr(module, name, nn.Parameter(torch.zeros(2, 3, dtype=kind)))
    module.own.sharded = True
    for name in ("all", "own", "narrow"):
        parameter = getattr(module, name)
        parameter.grad = torch.full_like(parameter, rank)
    if rank == 0:
        module.some.grad = torch.full_like(module.some, 6)
    average_gradients(module)
    assert module.none.grad is None and module.narrow.grad.dtype == torch.bfloat16
    return [getattr(module, name).grad.double().numpy() for name in ("all", "some", "own", "narrow")]


@several
def test_average_gradients(world):
    for rank, (everywhere, some, own, narrow) in enumerate(worlds.run(world, averages)):
        assert (everywhere == (world - 1) / 2).all() and (narrow == (world - 1) / 2).all()
        assert (some == 6 / world).all() and (own == rank).all()


def draws(rank, world):
    """What the ranks' own generators give after a loss that draws: rank 0's has moved on, the others' have not."""
    x, labels = items()
    counts = CUTS[world][0]
    torch.manual_seed(rank)
    GlobalBatch(losses.TripletLoss(selection="random"))(part(x, counts, rank), part(labels, counts, rank))
    after = torch.rand(3).numpy()
    torch.manual_seed(rank)
    if rank == 0:
        losses.TripletLoss(selection="random")(x, labels)
    return after, torch.rand(3).numpy()


def test_drawing_leaves_the_generators_of_other_ranks_alone():
    for after, expected in worlds.run(2, draws):
        assert (after == expected).all()


class Given(nn.Module):
    """A loss that remembers what it was given."""

    def forward(self, *arguments):
        self.arguments = arguments
        return arguments[0].sum()


def test_a_world_of_one_hands_its_arguments_on():
    x, labels = items()
    loss = GlobalBatch(Given())
    for arguments in ((x, labels), (x, labels, x), (x, labels, x, labels)):
        loss(*arguments)
        assert len(loss.loss.arguments) == len(arguments) and all(
            a is b for a, b in zip(loss.loss.arguments, arguments, strict=True)
        )
    backwards = -torch.arange(ITEMS)
    loss(x, labels, order=backwards)
    assert torch.equal(loss.loss.arguments[0], x.flip(0)) and torch.equal(loss.loss.arguments[1], labels.flip(0))
    pair = losses.SupConLoss()
    torch.testing.assert_close(GlobalBatch(pair)(x, labels, x, labels, order=backwards), pair(x, labels))
    for arguments in (
        collectives.gather(x),
        collectives.gather_partial(x),
        collectives.total(x),
        collectives.largest(x),
        collectives.broadcast(x),
    ):
        assert arguments is x
    assert (
        collectives.size() == 1
        and collectives.rank() == 0
        and collectives.same(x)
        and collectives.counts(x) == (ITEMS,)
    )
    assert GlobalBatch(losses.MarginLoss()).lr_scale == losses.MarginLoss.lr_scale
    with pytest.raises(TypeError, match="loss must be a torch module, got function"):
        GlobalBatch(losses.supcon_loss)


def test_digests_tell_tensors_apart():
    x = torch.arange(12.0)
    near = [x, x.flip(0), x.double(), x.view(3, 4), x.view(4, 3), x[:11], torch.cat([x, x[:1] * 0]), x.long(), -x]
    near += [x.roll(1), x.view(torch.int32), torch.zeros(3), torch.zeros(4), torch.zeros(0), torch.zeros(0, 2)]
    near += [torch.zeros(3, dtype=torch.bool), torch.tensor(1.0), torch.tensor([1.0])]
    assert len({tuple(collectives.digest(t).tolist()) for t in near}) == len(near)
    for view in (x.view(3, 4).T, x[1:], x[1:8:2]):
        assert torch.equal(
            collectives.digest(view), collectives.digest(view.clone(memory_format=torch.contiguous_format))
        )


LABELS = np.repeat(np.arange(24), 6)
MINED = {"neighbours": 5, "guard": 0.05}


def _mined(sampler):
    rows = torch.randn(len(LABELS), 6, generator=torch.Generator().manual_seed(0))
    sampler.refresh(rows, evaluation.nearest_negatives(rows, LABELS, k=5).indices)
    return sampler


SAMPLERS = {
    "ClassBalanced": lambda **ranks: samplers.ClassBalanced(LABELS, 12, 4, **ranks),
    "ClassRatio": lambda **ranks: samplers.ClassRatio(LABELS, 48, 0.25, **ranks),
    "PairPerClass": lambda **ranks: samplers.PairPerClass(LABELS, 12, **ranks),
    "HardClasses": lambda **ranks: samplers.HardClasses(LABELS, 12, 4, **ranks),
    "LabelNeighbours": lambda **ranks: samplers.LabelNeighbours(LABELS + 0.5, 24, 3, **ranks),
    "LabelNeighbours several": lambda **ranks: samplers.LabelNeighbours(LABELS + 0.5, 24, 3, anchors=6, **ranks),
    "HardNegatives": lambda **ranks: samplers.HardNegatives(LABELS, 24, **ranks),
    "HardNegatives of the whole set": lambda **ranks: _mined(samplers.HardNegatives(LABELS, 24, **MINED, **ranks)),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("world", (2, 3, 4))
def test_the_parts_of_a_batch_together_are_the_batch_of_one_process(name, world):
    full, parts = SAMPLERS[name](), [SAMPLERS[name](rank=rank, world_size=world) for rank in range(world)]
    for epoch in range(2):
        for index in range(len(full)):
            got = [sampler.batch(epoch, index) for sampler in parts]
            assert all(got) and sorted(np.concatenate(got).tolist()) == sorted(full.batch(epoch, index))


def read_page(rank, world, code):
    """The training loop of docs/distributed.md; what was learned."""

    class Pictures(torch.utils.data.Dataset):
        targets = torch.arange(40).repeat_interleave(4)
        pictures = torch.randn(160, 16, generator=torch.Generator().manual_seed(0))

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, i):
            return self.pictures[i], self.targets[i]

    torch.manual_seed(0)
    net = nn.Linear(16, 8)
    torch.manual_seed(rank)  # the proxies are drawn inside
    names = {"dataset": Pictures(), "encoder": net, "make_optimizer": lambda results: torch.optim.SGD(results, 0.01)}
    exec(code, names)
    learned = [*names["encoder"].parameters(), *names["loss"].parameters()]
    assert all(collectives.same(p) for p in learned)
    return [p.detach().numpy() for p in learned]


def test_the_page_runs_and_learns_the_same_on_two_ranks_as_on_one():
    page = Path(__file__).parents[2] / "docs" / "distributed.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    (one,), (two, _) = worlds.run(1, read_page, code), worlds.run(2, read_page, code)
    torch.manual_seed(0)
    start = nn.Linear(16, 8).weight.detach().numpy()
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5)
    assert np.abs(one[0] - start).max() > 1e-2


def fails(rank, world, how):
    """Rank 1 raises, dies or sleeps while rank 0 waits for it."""
    if rank == 1 and how == "raises":
        raise RuntimeError("rank 1 gives up")
    if rank == 1 and how == "dies":
        os._exit(3)
    if rank == 1 and how == "sleeps":
        time.sleep(30)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "sentence"),
    [("raises", "rank 1 gives up"), ("dies", "rank 1 of 2: died"), ("sleeps", "rank 1 of 2: did not answer in time")],
)
def test_a_world_that_fails_is_ended_and_a_new_one_works(how, sentence):
    begun = time.monotonic()
    with pytest.raises(worlds.RankFailed, match=sentence):
        worlds.run(2, fails, how, timeout=60.0 if how != "sleeps" else 1.0)
    assert time.monotonic() - begun < 30
    assert worlds.run(1, fails, how) == [None]
