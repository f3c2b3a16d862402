"""Exact search: a naive twin, ties, tiles, threads, backends, memory."""

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.evaluation import Neighbours, nearest, nearest_negatives
from nearkin.evaluation.retrieval import duplicate_rows, knn
from nearkin.evaluation.retrieval.exact import Space, require_float64

SIMILARITIES = knn.SIMILARITIES


def similarity_of(a, b, kind):
    """In rational numbers: nothing is rounded, so equal means equal."""
    a, b = [Fraction(v) for v in a], [Fraction(v) for v in b]
    if kind == "euclidean":
        return -sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
    dot = sum(p * q for p, q in zip(a, b, strict=True))
    if kind == "dot":
        return dot
    lengths = sum(p * p for p in a) * sum(q * q for q in b)
    return dot * abs(dot) / lengths if lengths else Fraction(0)  # signed square of the cosine


def order_of(queries, gallery, kind):
    """Every gallery index, nearest first, for each query; without a gallery the query itself is left out."""
    self_search = gallery is None
    gallery = queries if self_search else gallery
    queries, gallery = queries.tolist(), gallery.tolist()
    return [
        sorted(
            (j for j in range(len(gallery)) if not (self_search and i == j)),
            key=lambda j, q=q: (-similarity_of(q, gallery[j], kind), j),
        )
        for i, q in enumerate(queries)
    ]


@st.composite
def grids(draw):
    """Few values, so that nearly everything ties; duplicates and zero rows abound."""
    seed, rows, dim = draw(st.integers(0, 2**31)), draw(st.integers(1, 14)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(seed)
    top = draw(st.integers(1, 3))
    return torch.randint(-top, top + 1, (rows, dim), generator=generator).float()


@settings(max_examples=300, deadline=None)
@given(grids(), st.booleans(), st.integers(1, 20), st.sampled_from(SIMILARITIES), st.integers(1, 5))
def test_equals_rational_arithmetic(x, self_search, k, kind, rows):
    gallery = None if self_search else x.flip(0)
    budget = rows * len(x) * 112
    result = nearest(x, gallery, k=k, similarity=kind, budget=budget).indices
    for row, expected in zip(result.tolist(), order_of(x, gallery, kind), strict=True):
        assert row == (expected + [-1] * k)[:k]


@settings(max_examples=300, deadline=None)
@given(grids(), st.integers(1, 20), st.sampled_from(SIMILARITIES), st.integers(1, 5), st.data())
def test_negatives_equal_rational_arithmetic(x, k, kind, rows, data):
    """Of another known class: -1 is unknown, finds nothing and is not found."""
    labels = torch.tensor(data.draw(st.lists(st.integers(-1, 3), min_size=len(x), max_size=len(x))))
    result = nearest_negatives(x, labels, k=k, similarity=kind, budget=rows * len(x) * 112)
    for i, (row, order) in enumerate(zip(result.indices.tolist(), order_of(x, None, kind), strict=True)):
        expected = [j for j in order if labels[i] >= 0 and labels[j] >= 0 and labels[i] != labels[j]]
        assert row == (expected + [-1] * k)[:k]
        assert (result.similarity[i] == -torch.inf).tolist() == [j < 0 for j in row]


def test_negatives_in_tiles_are_those_of_one(monkeypatch):
    base = torch.randn(150, 24)
    x, labels = torch.cat([base, base, 2 * base]), torch.arange(450) % 7
    expected = nearest_negatives(x, labels, k=9)
    cosine = nearest(x, k=449)
    for i in (0, 200, 449):
        other = [j for j in cosine.indices[i].tolist() if labels[j] != labels[i]]
        assert expected.indices[i].tolist() == other[:9]
    done = []
    for rows in (1, 7, 100):
        budget = rows * len(x) * 112
        result = nearest_negatives(x, labels, k=9, budget=budget, progress=lambda *at: done.append(at))
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
        assert done[-1] == (450, 450)


@pytest.mark.parametrize("kind", SIMILARITIES)
@pytest.mark.parametrize("self_search", [True, False])
def test_tiles_and_threads_change_nothing(kind, self_search):
    base = torch.randn(60, 37)
    x = torch.cat([base, base, base + 1e-7 * torch.randn(60, 37), 3 * base])  # ties, and near ties below float32
    gallery = None if self_search else x[torch.randperm(len(x))]
    expected = nearest(x, gallery, k=50, similarity=kind)
    for rows in (1, 7, 100):
        result = nearest(x, gallery, k=50, similarity=kind, budget=rows * len(x) * 112)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    torch.set_num_threads(2)
    try:
        result = nearest(x, gallery, k=50, similarity=kind)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("kind", SIMILARITIES)
def test_the_device_changes_nothing(kind):
    x = torch.randn(300, 37)
    x = torch.cat([x, x + 1e-7 * torch.randn(300, 37)])
    on_cpu, there = nearest(x, k=50, similarity=kind), nearest(x.cuda(), k=50, similarity=kind)
    assert torch.equal(on_cpu.indices, there.indices.cpu())
    torch.testing.assert_close(on_cpu.similarity, there.similarity.cpu(), rtol=1e-15, atol=0)  # the root of a cosine
    labels = torch.arange(600) % 50
    on_cpu, there = (nearest_negatives(x.to(on), labels.to(on), k=50, similarity=kind) for on in ("cpu", "cuda"))
    assert torch.equal(on_cpu.indices, there.indices.cpu())
    torch.testing.assert_close(on_cpu.similarity, there.similarity.cpu(), rtol=1e-15, atol=0)


@pytest.mark.parametrize("kind", SIMILARITIES)
@pytest.mark.parametrize("self_search", [True, False])
def test_faiss_proposes_the_same(kind, self_search):
    pytest.importorskip("faiss", reason="faiss is an extra and is not installed")
    base = torch.randn(80, 24)
    x = torch.cat([base, base, base + 1e-7 * torch.randn(80, 24), torch.zeros(40, 24)])
    gallery = None if self_search else x.flip(0)
    for k in (1, 30, 500):
        expected = nearest(x, gallery, k=k, similarity=kind)
        result = nearest(x, gallery, k=k, similarity=kind, backend="faiss")
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", SIMILARITIES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_values_are_the_float64_ones(dtype, kind, scale):
    x = (torch.randn(50, 19) * scale).to(dtype)
    wide = x.double()
    if kind == "cosine":
        unit = torch.nn.functional.normalize(wide)
        matrix = unit @ unit.T
    else:
        matrix = wide @ wide.T if kind == "dot" else -torch.cdist(wide, wide).square()
    result = nearest(x, k=49, similarity=kind)
    expected = matrix.gather(1, result.indices)
    torch.testing.assert_close(result.similarity, expected, rtol=1e-9, atol=1e-9 * scale**2)
    assert bool((result.similarity.diff(dim=1) <= 0).all())


def test_the_bound_holds_and_is_used():
    """Long rows of nearly one direction: float32 alone orders them wrongly."""
    x = 1 + 1e-4 * torch.randn(200, 512)
    expected = nearest(x.double(), k=20).indices
    assert torch.equal(nearest(x, k=20).indices, expected)
    unit = torch.nn.functional.normalize(x)
    naive = (unit @ unit.T).fill_diagonal_(-2).topk(20).indices
    assert not torch.equal(naive, expected)
    space = Space(x, None, "cosine", knn.BUDGET)
    wide = torch.nn.functional.normalize(x.double())
    gap = (knn.proposed_rows(space, torch.arange(200)) - wide @ wide.T).fill_diagonal_(0).abs()
    assert bool((gap <= space.error[:, None]).all())


def exact_proposals(space, similarity):
    """The float64 values of which the products of `space` are an approximation."""
    a, b = space.queries.double() * space._scale, space.gallery.double() * space._scale
    if similarity == "cosine":
        return torch.nn.functional.normalize(a) @ torch.nn.functional.normalize(b).T
    return (
        a @ b.T if similarity == "dot" else -(torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist") ** 2) / 2
    )


@pytest.mark.parametrize("similarity", knn.SIMILARITIES)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, 1e24])
@pytest.mark.parametrize("self_search", [True, False])
def test_the_bound_holds_with_and_without_copies(similarity, scale, self_search):
    x = scale * torch.cat([torch.randn(150, 64), torch.zeros(1, 64), 5 * torch.randn(49, 64)])
    gallery = None if self_search else scale * torch.randn(300, 64)
    small = 4 * 200 * 66
    copied, queries, bare = (Space(x, gallery, similarity, b) for b in (knn.BUDGET, 2 * small, small))
    assert copied.lefts is not None and (self_search or copied.rights is not None)
    assert queries.lefts is not None and queries.rights is None and bare.lefts is None
    exact, rows = exact_proposals(copied, similarity), torch.arange(200)
    items = torch.stack([torch.randperm(len(copied.gallery))[:5] for _ in rows])
    for space in (copied, queries, bare):
        tile = space.tile(space.left(rows), space.right(slice(None)), torch.empty(exact.shape))
        assert bool(((tile - exact).abs() <= space.error[:, None]).all())
        few = space.proposed(rows, items)
        assert bool(((few - exact.gather(1, items)).abs() <= space.error[:, None]).all())
        many = space.proposed(rows, torch.arange(len(exact[0])).expand_as(exact))
        assert bool(((many - exact).abs() <= space.error[:, None]).all())
        if self_search:  # one product serves both sides
            assert bool(((tile.T - exact).abs() <= space.error[:, None]).all())
    expected = nearest(x, gallery, k=7, similarity=similarity)
    for budget in (small, 2 * small, 2**22):
        result = nearest(x, gallery, k=7, similarity=similarity, budget=budget)
        assert torch.equal(result.indices, expected.indices)


def test_lengths_at_the_ends_of_the_range():
    x = torch.randn(40, 8) * torch.logspace(-12, 12, 40)[:, None]
    least = 40 * 112
    for kind in SIMILARITIES:
        expected = nearest(x, k=5, similarity=kind)
        assert torch.equal(nearest(x, k=5, similarity=kind, budget=least).indices, expected.indices)
        assert expected.indices.tolist() == [row[:5] for row in order_of(x, None, kind)]


@given(grids(), st.integers(0, 2**31), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
@settings(max_examples=200, deadline=None)
def test_places_count_equal_rows(x, seed, dtype):
    x = x[torch.randint(0, len(x), (30,), generator=torch.Generator().manual_seed(seed))].to(dtype)
    rows = [tuple(row) for row in x.tolist()]
    assert duplicate_rows.earlier_copies(x).tolist() == [rows[:i].count(row) for i, row in enumerate(rows)]


def test_a_collision_of_hashes_is_no_equality(monkeypatch):
    monkeypatch.setattr(duplicate_rows, "_hashes", lambda x, _: torch.zeros(len(x), dtype=torch.long))
    assert duplicate_rows.earlier_copies(torch.tensor([[1.0], [2.0], [2.0], [1.0]])).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("kind", SIMILARITIES)
def test_crowds_change_nothing_and_cost_nothing(kind, monkeypatch):
    x = torch.cat([torch.randn(1, 8).repeat(300, 1), torch.randn(50, 8), torch.randn(1, 8).repeat(200, 1)])
    x = x[torch.randperm(len(x))]
    gallery = x.flip(0)
    with monkeypatch.context() as patch:
        patch.setattr(Space, "drop_duplicates", lambda self, k: None)
        expected = [nearest(x, g, k=4, similarity=kind) for g in (None, gallery)]
    worked = []
    exact = Space.exact
    monkeypatch.setattr(Space, "exact", lambda self, rows, items: worked.append(len(rows)) or exact(self, rows, items))
    for g, want in zip((None, gallery), expected, strict=True):
        result = nearest(x, g, k=4, similarity=kind)
        assert all(torch.equal(a, b) for a, b in zip(result, want, strict=True))
    assert sum(worked) < 2 * 550 * 70  # of 2 * 550 * 300 and more


def test_a_device_without_float64_is_refused(monkeypatch):
    def empty(*_, **__):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    require_float64(torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(ValueError, match=r"embeddings must be on a device with float64, .* got mps; use \.cpu"):
        require_float64(torch.device("mps"))


def test_a_group_maximum_is_a_floor():
    for size, k in ((1000, 3), (1000, 100), (999, 250), (17, 16), (5, 9)):
        tile = torch.randn(20, size)
        floor = knn.kth_floor(tile, k)
        assert bool(((tile >= floor).sum(1) >= min(k, size)).all())
        assert k >= size or bool(((tile >= floor).sum(1) < 4 * k + 20).all())


def test_huge_and_tiny_numbers():
    x = torch.tensor([[1e30, 1e30], [1e30, 0], [1e-30, 1e-30], [0, 0]])
    assert nearest(x, k=3).indices[0].tolist() == [2, 1, 3]
    assert nearest(x, k=3, similarity="dot").indices[1].tolist() == [0, 2, 3]
    assert nearest(x, k=3, similarity="euclidean").indices[3].tolist() == [2, 1, 0]


@pytest.mark.parametrize("kind", SIMILARITIES)
def test_numpy_arrays_are_taken_as_tensors_are(kind):
    x, gallery = torch.randn(9, 5), torch.randn(20, 5)
    expected = nearest(x, gallery, k=4, similarity=kind)
    assert isinstance(expected, Neighbours) and expected.indices.dtype == torch.int64
    arrays = [x.numpy(), gallery.numpy()]
    for result in (nearest(*arrays, k=4, similarity=kind), nearest(x, arrays[1], k=4, similarity=kind)):
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    with pytest.raises(TypeError, match="queries must be a torch tensor or a NumPy array, got list"):
        nearest(x.tolist(), gallery, k=4)


def test_a_small_gallery_is_filled_up():
    result = nearest(torch.eye(3), k=4)
    assert result.indices.tolist() == [[1, 2, -1, -1], [0, 2, -1, -1], [0, 1, -1, -1]]
    assert result.similarity[0].tolist() == [0, 0, -torch.inf, -torch.inf]


def test_the_example_of_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    section = page.split("## Nearest neighbours\n")[1].split("\n## ")[0]
    names = {}
    exec("\n".join(line[4:] for line in section.splitlines() if line.startswith("    ") or not line), names)
    neighbours = names["neighbours"]
    assert neighbours.indices.shape == neighbours.similarity.shape == (3, 5)
    assert neighbours.indices[:, 0].tolist() == [0, 1, 2] and neighbours.similarity.dtype == torch.float64


def test_progress_reaches_the_end():
    calls = []
    nearest(torch.randn(10, 3), k=2, budget=128 * 10, progress=lambda done, of: calls.append((done, of)))
    assert calls == [(3, 10), (6, 10), (9, 10), (10, 10)]  # the copy is counted in the budget


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"similarity": "cosin"}, 'unknown similarity "cosin"; did you mean "cosine"'),
        ({"backend": "annoy"}, 'unknown backend "annoy"'),
        ({"k": 0}, "k must be >= 1, got 0"),
        ({"budget": 100}, "budget must hold one query against the gallery: 560 bytes, got 100"),
        ({"gallery": torch.ones(2, 4)}, "gallery must have 3 dimensions as queries have, got 4"),
        ({"queries": torch.tensor([[1.0, torch.nan, 0]])}, "embeddings must be finite .* got 1 rows"),
        ({"gallery": torch.full((2, 3), torch.inf)}, "gallery must be finite .* got 2 rows"),
    ],
)
def test_error_sentences(change, sentence):
    arguments = {"queries": torch.randn(5, 3), "k": 2, **change}
    with pytest.raises(ValueError, match=sentence):
        nearest(**arguments)


MEMORY = """
import resource, sys, torch
from nearkin.evaluation import retrieval
torch.set_num_threads(1)
x = torch.randn(6000, 64)
if sys.argv[1] == "ties":
    x[:] = x[0].clone()
labels = torch.arange(6000) // 4
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
retrieval(x[:500], labels[:500])
before = peak()
if sys.argv[1] == "ties":
    retrieval(x[:300], labels[:300], gallery=x, gallery_labels=labels, ks=(1, 100), budget=48 * 2**20)
else:
    retrieval(x, labels, ks=(1, 1000), budget=48 * 2**20)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["random", "ties"])
def test_memory_stays_within_the_budget(case):
    """Against a full matrix of 144 MB; two copies of the embeddings and the allocator's slack are allowed."""
    out = subprocess.run([sys.executable, "-c", MEMORY, case], capture_output=True, text=True, check=True).stdout
    assert int(out) < 48 * 2**20 + 2 * 6000 * 64 * 4 + 16 * 2**20
