"""Class weights that processes share: every loss with shard=True beside the plain one on the batch of all processes."""

import copy
import functools
import inspect
import math
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import worlds
from nearkin import losses
from nearkin.dist.global_batch import GlobalBatch
from nearkin.losses import class_sampling, class_shards

DIM, CLASSES, ROWS = 5, 11, 13
WORLDS = (1, 2, 3, 4)
PARTS = {1: [13], 2: [9, 4], 3: [8, 0, 5], 4: [5, 1, 0, 7]}  # rows of each rank

CASES = {
    "normalized": ("NormalizedSoftmaxLoss", {}),
    "normalized, sum": ("NormalizedSoftmaxLoss", {"reduction": "sum", "scale": 7.0}),
    "normalized, none": ("NormalizedSoftmaxLoss", {"reduction": "none"}),
    "normalized, sampled": ("NormalizedSoftmaxLoss", {"sample_rate": 0.3}),
    "heated": ("HeatedSoftmaxLoss", {"heat_after": 1}),
    "heated, batch": ("HeatedSoftmaxLoss", {"norm": "batch"}),
    "adacos": ("AdaCosLoss", {}),
    "adacos, fixed": ("AdaCosLoss", {"dynamic": False}),
    "cosface": ("CosFaceLoss", {"scale": 16.0}),
    "cosface, little memory": ("CosFaceLoss", {"max_memory": 2**13}),
    "cosface, sampled": ("CosFaceLoss", {"sample_rate": 0.8, "max_memory": 2**13}),
    "arcface": ("ArcFaceLoss", {}),
    "arcface, active": ("ArcFaceLoss", {"reduction": "active", "straight_through": True}),
    "arcface, 3 centres": ("ArcFaceLoss", {"sub_centers": 3, "scale": 8.0}),
    "arcface, 3 centres, sampled": ("ArcFaceLoss", {"sub_centers": 3, "scale": 8.0, "sample_rate": 0.5}),
    "sphereface": ("SphereFaceLoss", {"start": 3.0, "floor": 0.5}),
    "adaface": ("AdaFaceLoss", {"momentum": 0.3, "concentration": 0.7}),
    "adaface, sampled": ("AdaFaceLoss", {"momentum": 0.3, "concentration": 0.7, "sample_rate": 0.5}),
    "magface": ("MagFaceLoss", {"lower_length": 0.3, "upper_length": 2.0}),
    "magface, none": ("MagFaceLoss", {"lower_length": 0.3, "upper_length": 2.0, "reduction": "none"}),
    "proxy-nca": ("ProxyNCALoss", {}),
    "proxy-nca, original": ("ProxyNCALoss", {"form": "original", "scale": 2.0}),
    "proxy-nca, 2 proxies": ("ProxyNCALoss", {"proxies_per_class": 2}),
    "proxy-nca, dynamic": ("ProxyNCALoss", {"assignment": "dynamic", "form": "original"}),
    "proxy-anchor": ("ProxyAnchorLoss", {}),
    "proxy-anchor, little memory": ("ProxyAnchorLoss", {"max_memory": 2**13}),
    "soft-triple": ("SoftTripleLoss", {"centers_per_class": 3}),
    "soft-triple, 1 centre": ("SoftTripleLoss", {"centers_per_class": 1}),
    "soft-triple, little memory": ("SoftTripleLoss", {"centers_per_class": 3, "max_memory": 3 * 2**12}),
    "center": ("CenterLoss", {"center_weight": 0.5}),
    "center, first": ("CenterLoss", {"center_weight": 0.5, "start": "first"}),
    "center, sampled": ("CenterLoss", {"center_weight": 0.5, "sample_rate": 0.3}),
    "center, little memory": ("CenterLoss", {"center_weight": 0.5, "max_memory": 2**13}),
    "heated, sampled, little memory": ("HeatedSoftmaxLoss", {"sample_rate": 0.4, "max_memory": 2**13}),
    "sphereface, sampled": ("SphereFaceLoss", {"sample_rate": 0.4}),
    "proxy-nca, 2 proxies, little memory": ("ProxyNCALoss", {"proxies_per_class": 2, "max_memory": 2**14}),
    "proxy-anchor, sampled": ("ProxyAnchorLoss", {"sample_rate": 0.4}),
    "soft-triple, sampled": ("SoftTripleLoss", {"centers_per_class": 3, "sample_rate": 0.4}),
    "adacos, sampled": ("AdaCosLoss", {"sample_rate": 0.4}),
}


def number_of(name):
    """There is something to draw only where classes are more than rows."""
    return 41 if "sampled" in name else CLASSES


def build_loss(name, shard):
    kind, settings = CASES[name]
    torch.manual_seed(7)
    return getattr(losses, kind)(number_of(name), DIM, **settings, shard=shard).double()


def batch(step=0, num_classes=CLASSES, rows=ROWS):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 6, generator=g, dtype=torch.float64)
    labels = torch.randint(num_classes, (rows,), generator=g)
    labels[1], labels[-1] = -1, num_classes - 1
    return x, labels


def encoder():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, DIM)).double()


def train(loss, name, parts, rank, ddp, steps=2):
    """Two steps with momentum: losses, gradients of the encoder and of the loss, and what the loss holds after each."""
    net = encoder()
    inner = net
    if ddp:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.05, momentum=0.9)
    first = sum(parts[:rank])
    results = {"start": {name: value.numpy().copy() for name, value in loss.state_dict().items()}}
    for step in range(steps):
        x, labels = batch(step, number_of(name))
        local = slice(first, first + parts[rank])
        torch.manual_seed(100 + step + 50 * rank)  # sampled classes are those of the first process
        optimizer.zero_grad()
        value = loss(net(x[local]), labels[local])
        (value * torch.linspace(1.7, 3, value.numel()).view_as(value)).sum().backward()
        results[f"value {step}"] = value.detach().numpy()
        results[f"encoder {step}"] = [p.grad.numpy().copy() for p in inner.parameters()]
        results[f"loss {step}"] = {name: p.grad.numpy().copy() for name, p in loss.named_parameters()}
        optimizer.step()
        results[f"state {step}"] = {name: value.numpy().copy() for name, value in loss.state_dict().items()}
    loss.eval()
    with torch.no_grad():
        results["evaluated"] = loss(inner(x[local]), labels[local]).numpy()
    return results


@functools.cache
def plainly(name):
    return train(build_loss(name, False), name, [ROWS], 0, False)


def trained(rank, world, names):
    results = {}
    for name in names:
        loss = build_loss(name, True)
        assert loss.held and loss.held.total == number_of(name)
        results[name] = train(loss, name, PARTS[world], rank, True), class_shards.layout(loss)
    return results


def close(got, expected, what):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, what
    if expected.size:
        assert np.isfinite(expected).all()
        assert np.abs(got - expected).max() <= 1e-12 * max(1.0, np.abs(expected).max()), what


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_shards_train_as_one_process(world):
    ranks = worlds.run(world, trained, list(CASES), timeout=120)
    for name in CASES:
        expected = plainly(name)
        results = [rank[name][0] for rank in ranks]
        layouts = [rank[name][1] for rank in ranks]
        assert all(np.array_equal(part["start"][key], expected["start"][key][first:last])
                   for part, layout in zip(results, layouts, strict=True)
                   for key, (first, last, _) in layout.items()), name  # fmt: skip
        for key, value in expected.items():
            for rank, part in enumerate(results):
                if key.startswith(("value", "evaluated")):
                    close(part[key], value, (name, key, rank))
                elif key.startswith("encoder"):
                    for place, (a, b) in enumerate(zip(part[key], value, strict=True)):
                        close(a, b, (name, key, rank, place))
            if not key.startswith(("loss", "state")):
                continue
            for entry, full in value.items():
                parts = [part[key][entry] for part in results]
                got = np.concatenate(parts) if entry in layouts[0] else parts[0]
                close(got, full, (name, key, entry))
                sizes = [len(part) for part in parts if entry in layouts[0]]
                assert not sizes or max(sizes) - min(sizes) <= full.shape[0] // number_of(name)


def test_every_class_and_proxy_loss_is_here():
    public = {name for name in losses.__all__ if name.endswith("Loss")}
    over_classes = {name for name in public if {"num_classes", "dim"} <= set(parameters(getattr(losses, name)))}
    assert over_classes - {"MarginLoss"} == {kind for kind, _ in CASES.values()}


def parameters(kind):
    return inspect.signature(kind).parameters


@pytest.mark.parametrize("name", CASES)
def test_alone_a_shard_is_the_plain_loss(name):
    plain, alone = build_loss(name, False), build_loss(name, True)
    assert alone.held and not plain.held
    for step in range(2):
        x, labels = batch(step)
        grads = []
        for loss in (plain, alone):
            torch.manual_seed(0)
            e = x[:, :DIM].clone().requires_grad_()
            loss.zero_grad()
            value = loss(e, labels)
            value.sum().backward()
            grads.append([value, e.grad, *(p.grad for p in loss.parameters()), *loss.state_dict().values()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def refusal(call, *args, **more):
    try:
        call(*args, **more)
    except (TypeError, ValueError) as error:
        return str(error)


def faults(rank, world):
    """What is wrong on one rank is said by all, and the world goes on."""
    sentences = []
    x, labels = batch()
    e = x[:, :DIM]
    for kind in ("ArcFaceLoss", "ProxyAnchorLoss", "HeatedSoftmaxLoss", "CenterLoss", "SoftTripleLoss", "AdaCosLoss"):
        loss = getattr(losses, kind)(CLASSES, DIM, shard=True).double()
        wrong = [
            (e, labels.clone().fill_(CLASSES)),
            (e[:, 1:], labels),
            (e, labels[1:]),
            (e, labels.tolist()),
            (e.float(), labels),
        ]
        sentences += [refusal(loss, *(bad if rank == world - 1 else (e, labels))) for bad in wrong]
        loss.eval()
        value = loss(e, labels).detach()
        assert math.isfinite(float(value)) and torch.equal(GlobalBatch(loss)(e, labels).detach(), value)
        empty = e[:0].clone().requires_grad_()
        nothing = loss(empty, labels[:0])
        nothing.backward()
        assert float(nothing.detach()) == 0 and empty.grad.shape == empty.shape
    few = refusal(losses.CosFaceLoss, world - 1, DIM, shard=True)
    torch.manual_seed(5)
    dynamic = losses.ProxyNCALoss(CLASSES, DIM, assignment="dynamic", shard=True).double()
    sentences.append(refusal(dynamic, e, [1] * len(e)))
    tags = torch.arange(2 * ROWS).view(-1, 2) % 3 == 0
    with torch.no_grad():
        several = float(dynamic(e, tags))
    weight = losses.CosFaceLoss(CLASSES, DIM, shard=True).double()
    with torch.no_grad():
        weight.weight[0] = math.inf if rank == 0 else 1.0
        spoilt = float(weight(e, labels))
    return sentences, few, several, spoilt


def test_a_fault_on_one_rank_is_said_by_all():
    results = worlds.run(3, faults)
    assert all(math.isnan(rank[3]) for rank in results)
    assert results[0][:3] == results[1][:3] == results[2][:3]
    sentences, few, several, _ = results[0]
    for start in range(0, len(sentences) - 1, 5):
        label, dim, short, listed, kind = sentences[start : start + 5]
        assert label == "rank 2 of 3: labels must be in 0..10 (or -1 for unknown), got 11"
        assert dim == "rank 2 of 3: embeddings must have 5 dimensions as the class weights have, got 4"
        assert short == "rank 2 of 3: labels must have one entry per row of embeddings: 13 rows, 12 labels"
        assert listed == "rank 2 of 3: labels must be a torch tensor of class ids, got list"
        assert "embeddings must have one dtype and shape on all ranks" in kind
    assert sentences[-1] == "rank 0 of 3: labels must be a tensor where shard=True, got list"
    assert few == "num_classes must be at least the number of processes that share them (shard=True): 3, got 2"
    x = batch()[0][:, :DIM].repeat(3, 1)
    tags = (torch.arange(2 * ROWS).view(-1, 2) % 3 == 0).repeat(3, 1)
    torch.manual_seed(5)
    dynamic = losses.ProxyNCALoss(CLASSES, DIM, assignment="dynamic")
    assert several == pytest.approx(float(dynamic.double()(x, tags).detach()))


def test_what_a_loss_refuses():
    with pytest.raises(TypeError, match="shard must be True or False, got 1"):
        losses.ArcFaceLoss(5, 3, shard=1)
    loss = losses.ArcFaceLoss(5, 3, shard=True)
    loss.held = loss.held._replace(processes=2)
    with pytest.raises(ValueError, match="in the world it is used in: made for 2 processes, got 1"):
        loss(torch.randn(2, 3), torch.tensor([0, 1]))


# Initial values, and what is saved.


@pytest.mark.parametrize("shape", [(11, 5), (3, 1), (100, 7), (257, 3)])
@pytest.mark.parametrize("size", [1, 100, 2**22])
def test_a_shard_is_drawn_as_its_part_of_the_whole(shape, size, monkeypatch):
    monkeypatch.setattr(class_shards, "DRAWN", size)
    rows, dim = shape
    for kind in (torch.float32, torch.float64):
        torch.manual_seed(1)
        torch.set_default_dtype(kind)
        try:
            full = class_shards.init_weight(rows, dim, lambda empty: empty.normal_() * 3, None)
            after = torch.get_rng_state()
            for world in (2, 3):
                for rank in range(world):
                    part = class_shards.Shard(rank * rows // world, (rank + 1) * rows // world, rows, world)
                    torch.manual_seed(1)
                    own = class_shards.init_weight(rows, dim, lambda empty: empty.normal_() * 3, part)
                    assert torch.equal(own, full[part.first : part.last])
                    assert torch.equal(after, torch.get_rng_state())
        finally:
            torch.set_default_dtype(torch.float32)


def saved(rank, world, state):
    loss = losses.ArcFaceLoss(CLASSES, DIM, sub_centers=2, shard=True)
    holder = nn.ModuleDict({"loss": loss})
    first, last = rank * CLASSES // world * 2, (rank + 1) * CLASSES // world * 2
    full = {"loss.weight": torch.from_numpy(state)}
    for way in ({}, {"assign": True}):
        holder.load_state_dict(full, **way)
        weight = loss.weight
        assert torch.equal(weight, full["loss.weight"][first:last])
        assert weight.sharded and weight.rows == (first, last) and weight.total == 2 * CLASSES
    own = {name: value.clone() for name, value in holder.state_dict().items()}
    assert own["loss.weight"].shape == (last - first, DIM)
    holder.load_state_dict(own)
    assert class_shards.layout(copy.deepcopy(holder)) == {"loss.weight": (first, last, 2 * CLASSES)}
    center = losses.CenterLoss(CLASSES, DIM, shard=True).double()
    center(torch.randn(3, DIM).double(), torch.tensor([0, 4, 10]))
    layout = {name: (tensor.rows, tensor.total) for name, tensor in center.state_dict(keep_vars=True).items()}
    assert (
        layout == {name: ((a, b), total) for name, (a, b, total) in class_shards.layout(center).items()}
        and len(layout) == 3
    )
    return refusal(holder.load_state_dict, {"loss.weight": torch.zeros(5, DIM)})


def test_a_state_of_all_classes_is_loaded_by_each():
    sentences = worlds.run(2, saved, np.random.default_rng(0).normal(size=(2 * CLASSES, DIM)).astype(np.float32))
    assert sentences[1] == "loss.weight must have 22 rows, or the 12 of this process, 10 to 21, got (5, 5)"


# Memory: nothing that a rank makes is as large as all classes.


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for value in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(value, torch.Tensor):
                self.numbers = max(self.numbers, value.untyped_storage().nbytes() // value.element_size())
        return results


def summed(rank, world):
    """The gradient by the own rows of a rank, averaged later and summed later."""
    x, labels = (t.tensor_split(world)[rank] for t in batch())
    x = x[:, :DIM]
    results = []
    for averaged in (True, False):
        leaf = x.clone().requires_grad_()
        GlobalBatch(build_loss("cosface", True), averaged=averaged)(leaf, labels).backward()
        results.append(leaf.grad.numpy())
    return results


def test_gradients_that_are_summed_have_no_factor():
    for averaged, plain in worlds.run(2, summed):
        assert np.allclose(averaged, 2 * plain, rtol=1e-12) and np.abs(plain).max() > 0


def largest(rank, world, num_classes):
    class_shards.DRAWN = 2**10
    with Largest() as made_now:
        loss = losses.ArcFaceLoss(num_classes, 8, sample_rate=0.5, shard=True)
        e = torch.randn(4, 8, requires_grad=True)
        loss(e, torch.arange(4) + rank).backward()
        loss.eval()
        loss(e, torch.arange(4) + rank).backward()
    return made_now.numbers, sum(p.numel() for p in loss.parameters())


def test_memory_falls_with_the_world():
    num_classes = 2**14
    for world in (2, 4):
        for numbers, largest_rows in worlds.run(world, largest, num_classes):
            assert largest_rows == num_classes // world * 8
            assert numbers <= max(4 * world, 8) * num_classes // world  # scores, or class weights, of its own classes


# Sampled classes.


def drawn(rank, world, rate, rows):
    """The classes that each of some steps meets, by their gradients."""
    loss = losses.CosFaceLoss(40, DIM, sample_rate=rate, shard=True).double()
    results = []
    for step in range(10):
        torch.manual_seed(step + 1000 * rank)
        g = torch.Generator().manual_seed(step)
        e, labels = (
            torch.randn(rows, DIM, generator=g).double().requires_grad_(),
            torch.randint(40, (rows,), generator=g),
        )
        local = slice(rank * rows // world, (rank + 1) * rows // world)
        loss.zero_grad()
        loss(e[local], labels[local]).backward()
        results.append(loss.weight.grad.any(1).nonzero().squeeze(1).add(loss.weight.rows[0]).tolist())
    return results


@pytest.mark.parametrize("rate, rows", [(0.01, 2), (0.3, 3), (0.9, 4)])
def test_shards_draw_the_classes_that_one_process_draws(rate, rows):
    expected = drawn(0, 1, rate, rows)
    for world in (2, 4):
        ranks = worlds.run(world, drawn, rate, rows)
        assert [[*chain(*step)] for step in zip(*ranks, strict=True)] == expected
    if rate == 0.01:  # fewer classes than processes: some have none, and go along
        assert all(len(step) == 2 for step in expected)


def test_turns_are_all_different_and_fair():
    full = class_shards.Shard(0, 5000, 5000)
    turns = torch.stack([class_sampling._random_keys(torch.tensor(seed * 7919), full) for seed in range(200)])
    assert all(len(turn.unique()) == 5000 for turn in turns) and int(turns.min()) >= 0 and int(turns.max()) < 2**48
    part = class_sampling._random_keys(torch.tensor(7919), class_shards.Shard(100, 200, 5000))
    assert torch.equal(part, turns[1, 100:200])
    chosen = torch.zeros(5000).index_add_(0, turns.topk(500).indices.flatten(), torch.ones(200 * 500))  # 20 ± 4.2
    assert abs(float(chosen.std()) - math.sqrt(18)) < 0.3 and int(chosen.max()) < 45
    follows = turns.topk(500).indices.sort(1).values.diff(dim=1)
    assert abs(float((follows == 1).float().mean()) - 0.1) < 0.005  # neighbours are drawn independently
