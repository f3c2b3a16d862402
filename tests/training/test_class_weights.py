"""The optimiser for class weights: its rules by float64, its rounding, sparse rows, memory, saved and resumed."""

import math

import numpy as np
import pytest
import torch

from nearkin import losses, training
from nearkin.training import ClassWeightOptimizer, class_weights
from nearkin.training.config.recipe import read
from nearkin.training.optimizers import EncoderAndClasses, build_optimizer
from nearkin.training.run_dir import recipe_of

SETTINGS = {"lr": 0.1, "weight_decay": 0.01, "seed": 3}


def gradients(rows, dim, steps, kind=torch.float32, seed=1):
    """Per step: a gradient of rows of very different lengths, of which about four in ten are zero."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        lengths = 10 ** (4 * torch.rand(rows, 1, generator=g) - 2)
        present = torch.rand(rows, 1, generator=g) < 0.6
        yield (torch.randn(rows, dim, generator=g) * lengths * present).to(kind)


def trained(kind=torch.float32, shape=(37, 300), steps=4, sparse=False, **settings):
    g = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape, generator=g).to(kind))
    optimizer = ClassWeightOptimizer([weight], **(SETTINGS | settings))
    for gradient in gradients(*shape, steps, kind):
        if sparse:
            rows = gradient.any(1).nonzero().squeeze(1)
            gradient = torch.sparse_coo_tensor(rows[None], gradient[rows], shape, check_invariants=True)
        weight.grad = gradient
        optimizer.step()
    return weight, optimizer


def same(one, other):
    """Whether weights and states are equal to the last bit."""
    states = [optimizer.state[weight] for weight, optimizer in (one, other)]
    tensors = [name for name, value in states[0].items() if isinstance(value, torch.Tensor)]
    return torch.equal(one[0], other[0]) and all(torch.equal(states[0][name], states[1][name]) for name in tensors)


def rowwise_reference(weight, every_gradient):
    """Row-wise Adagrad in float64, one number after the other."""
    rows, dim = weight.shape
    w, total = weight.double().tolist(), [0.0] * rows
    for gradient in every_gradient:
        for c, g in enumerate(gradient.double().tolist()):
            if not any(g):
                continue
            total[c] += sum(value * value for value in g) / dim
            for d in range(dim):
                w[c][d] -= 0.1 * 0.01 * w[c][d] + 0.1 * g[d] / (math.sqrt(total[c]) + 1e-8)
    return torch.tensor(w, dtype=torch.float64), torch.tensor(total, dtype=torch.float64)


def test_rowwise_is_row_wise_adagrad():
    shape = (11, 7)
    weight, optimizer = trained(shape=shape, steps=5)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact, total = rowwise_reference(start, gradients(*shape, 5))
    torch.testing.assert_close(weight.detach().double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(optimizer.state[weight]["sum"].double(), total, rtol=1e-6, atol=0)


def test_rounding_has_no_bias():
    """Over many seeds the mean of a bfloat16 weight is that of float32."""
    shape, seeds = (2, 40), 300
    exact = trained(shape=shape, steps=1)[0].detach()
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    sums = torch.zeros(shape, dtype=torch.float64)
    gradient = next(gradients(*shape, 1))
    gradient[:] = torch.linspace(-1, 2, 80).view(shape)
    for seed in range(seeds):
        weight = torch.nn.Parameter(start.clone())
        weight.grad = gradient.bfloat16()
        optimizer = ClassWeightOptimizer([weight], lr=0.001, seed=seed)
        optimizer.step()
        sums += weight.detach().double()
    single = torch.nn.Parameter(start.float())
    single.grad = gradient.bfloat16().float()
    ClassWeightOptimizer([single], lr=0.001).step()
    moved = (sums / seeds - start.double()) - (single.detach().double() - start.double())
    assert float(moved.abs().mean()) < 2e-4 and exact.isfinite().all()  # half a step of bfloat16 is 2e-3 at 1


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_only_rows_with_a_gradient_move_and_sparse_is_dense(kind, monkeypatch):
    monkeypatch.setattr(class_weights, "CHUNK", 2000)  # several chunks
    dense = trained(kind)
    assert same(dense, trained(kind)) and same(dense, trained(kind, sparse=True))
    assert not torch.equal(dense[0], trained(kind, seed=4)[0]) or kind == torch.float32
    weight, optimizer = dense
    before = {k: v.clone() for k, v in optimizer.state[weight].items() if isinstance(v, torch.Tensor)}
    old = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    weight.grad[5] = 1.0
    optimizer.step()
    others = torch.arange(len(old)) != 5
    assert torch.equal(weight[others], old[others]) and not torch.equal(weight[5], old[5])
    assert all(torch.equal(optimizer.state[weight][k][others], v[others]) for k, v in before.items())


def test_saved_and_loaded_it_goes_on_to_the_last_bit():
    for kind in (torch.float32, torch.bfloat16):
        whole = trained(kind, steps=6)
        weight, optimizer = trained(kind, steps=3)
        again = torch.nn.Parameter(weight.detach().clone())
        resumed = ClassWeightOptimizer([again])
        resumed.load_state_dict(optimizer.state_dict())
        kinds = {k: v.dtype for k, v in optimizer.state[weight].items() if isinstance(v, torch.Tensor)}
        assert all(resumed.state[again][k].dtype == dtype for k, dtype in kinds.items())
        for gradient in list(gradients(37, 300, 6, kind))[3:]:
            again.grad = gradient
            resumed.step()
        assert same(whole, (again, resumed))


def test_each_weight_is_rounded_on_its_own():
    weight = torch.nn.Parameter(torch.ones(64, 61, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 0.5)
    ClassWeightOptimizer([weight], lr=0.002).step()  # half a step of bfloat16
    down = (weight < 1).float()
    together = (down.T @ down / len(down)).fill_diagonal_(0.25)
    assert 0.45 < float(down.mean()) < 0.55 and float((together - 0.25).abs().max()) < 0.25


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_as_on_a_gpu_it_takes_the_same_steps(kind, monkeypatch):
    plain, optimizer = trained(kind, seed=5)
    monkeypatch.setattr(class_weights, "_moved", class_weights._compiled())
    compiled, other = trained(kind, seed=5)
    torch.testing.assert_close(compiled, plain, rtol=1e-2 if kind == torch.bfloat16 else 1e-6, atol=1e-6)
    torch.testing.assert_close(other.state[compiled]["sum"], optimizer.state[plain]["sum"])
    assert float((compiled != plain).float().mean()) < (0.01 if kind == torch.bfloat16 else 1)  # the same random bits


def test_it_goes_on_where_nothing_compiles(monkeypatch):
    def fails(*arguments):
        raise torch._dynamo.exc.TorchDynamoException("no compiler")

    monkeypatch.setattr(class_weights, "_compiled", lambda: fails)
    optimizer = ClassWeightOptimizer([torch.nn.Parameter(torch.ones(3, 2))])
    rows = torch.ones(3, 2), torch.ones(3, 2), torch.zeros(3), torch.arange(3)
    given = [*map(torch.tensor, (0.1, 1.0, 1e-8)), torch.tensor(3), torch.tensor(4)]
    with pytest.warns(RuntimeWarning, match="ClassWeightOptimizer is not compiled: no compiler"):
        first, _ = optimizer._in_one_pass(*rows, *given)
    second, _ = optimizer._in_one_pass(*rows, *given)  # without a second warning
    assert torch.equal(first, second) and torch.allclose(first, torch.full((3, 2), 0.9))


def test_state_is_small():
    weight, optimizer = trained(torch.bfloat16, shape=(10, 512), steps=1)
    tensors = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor)]
    assert sum(t.numel() * t.element_size() for t in tensors) / 10 == 4


def test_bad_arguments_are_one_sentence():
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r'unknown rule "adam"; .*known: rowwise'):
        ClassWeightOptimizer([weight], rule="adam")
    for bad in (torch.zeros(3), torch.zeros(3, 2, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"class weights must be \(C, D\) of float32, float64 or bfloat16, got "):
            ClassWeightOptimizer([torch.nn.Parameter(bad)])


def test_the_rule_that_has_left_is_named(tmp_path):
    gone = 'got "adam8bit", which has left'
    weight, optimizer = trained(steps=1)
    with pytest.raises(ValueError, match=f'rule must be "rowwise", {gone}'):
        ClassWeightOptimizer([weight], rule="adam8bit")
    state = optimizer.state_dict()
    state["param_groups"][0]["rule"] = "adam8bit"
    with pytest.raises(ValueError, match=f'rule must be "rowwise", {gone}; its state cannot be loaded'):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=f'optimizer.class_weights must be "rowwise", or left out .*, {gone}'):
        read(None, ["optimizer.class_weights=adam8bit"])
    (tmp_path / "recipe.toml").write_text('[optimizer]\nclass_weights = "adam8bit"\n')
    stored = recipe_of(tmp_path)
    assert read(None, base=stored.plain(), stored=True).plain() == stored.plain()
    with pytest.raises(
        ValueError, match=r'"adam8bit" in this run, a rule that has left: .* cannot go on; start a new run'
    ):
        build_optimizer(stored, [])


def test_sampled_classes_in_a_loop_of_ones_own():
    torch.manual_seed(0)
    loss = losses.ArcFaceLoss(200, 8, sample_rate=0.1)
    before = loss.weight.detach().clone()
    optimizer = ClassWeightOptimizer(loss.parameters(), lr=0.1)
    loss(torch.randn(6, 8), torch.arange(6)).backward()
    optimizer.step()
    moved = (loss.weight != before).any(1)
    assert bool(moved[:6].all()) and int(moved.sum()) == 20


# --- as a choice of the trainer

SMALL = ["training.epochs=3", "training.batches=4", "sampler.batch=16", "sampler.per_class=4", "encoder.hidden=[16]"]
SMALL += ["encoder.dim=8", "training.log_steps=2", "training.workers=0", 'loss.name="arcface"']


@pytest.fixture
def vectors(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(24), 8)
    rows = rng.normal(size=(24, 12))[labels] + 0.7 * rng.normal(size=(len(labels), 12))
    path = tmp_path / "vectors.npz"
    np.savez(path, embeddings=rows.astype(np.float32), labels=labels)
    return path


class Cut(BaseException):
    """The machine goes down."""


def test_a_run_resumes_to_the_last_bit(vectors, tmp_path):
    recipe = read(None, [f'data.source="{vectors}"', *SMALL, 'optimizer.class_weights="rowwise"'])
    seen = []

    def cut(event):
        seen.append(event)
        if len(seen) == 9:
            raise Cut

    training.train(recipe, tmp_path / "whole", lambda event: None)
    with pytest.raises(Cut):
        training.train(recipe, tmp_path / "cut", cut)
    training.resume(tmp_path / "cut", lambda event: None)
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == resumed


def test_the_choice_needs_class_weights(vectors, tmp_path):
    sets = [f'data.source="{vectors}"', *SMALL, 'optimizer.class_weights="rowwise"', 'loss.name="supcon"']
    with pytest.raises(ValueError, match=r"optimizer\.class_weights .*loss supcon has no class weights"):
        training.train(read(None, sets), tmp_path / "run", lambda event: None)


def test_two_optimisers_are_one():
    encoder, weight = torch.nn.Linear(4, 3), torch.nn.Parameter(torch.randn(6, 3))

    def make():
        first = torch.optim.AdamW([{"params": list(encoder.parameters()), "lr": 0.1}])
        return EncoderAndClasses(first, ClassWeightOptimizer([{"params": [weight], "lr": 0.2}]))

    optimizer = make()
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    before = weight.detach().clone()
    losses.cosface_loss(encoder(torch.randn(5, 4)), torch.arange(5), weight).backward()
    optimizer.step()
    lengths = (weight.detach() - before).square().mean(1).sqrt()
    assert bool(((lengths - 0.1).abs() < 1e-3)[:5].all())  # a row's first step is the rate, its root mean square
    other = make()
    other.load_state_dict(optimizer.state_dict())
    assert other.state[weight]["sum"].shape == (6,) and len(other.state) == 3
    assert other.parts[1].state is other.state and other.parts[0].param_groups[0] is other.param_groups[0]
