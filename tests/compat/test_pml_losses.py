"""`nearkin.compat.pml.losses` against pytorch-metric-learning 2.9: values, gradients, which path was taken."""

import copy
import subprocess
import sys
import threading

import pytest
import torch
from pytorch_metric_learning import distances as their_distances
from pytorch_metric_learning import losses as theirs
from pytorch_metric_learning import miners as their_miners
from pytorch_metric_learning import reducers as R
from pytorch_metric_learning import regularizers as G
from pytorch_metric_learning.utils import loss_and_miner_utils as their_indexing
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

from nearkin.compat import pml
from nearkin.compat.pml import distances, losses, miners

pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:DistributedLossWrapper is being used:UserWarning"),
]
CLASSES, DIM = 5, 6
SIZES = {"even": [4, 4, 4], "uneven": [2, 5, 1, 3, 4], "pairs": [2, 2, 2, 2, 2]}
RAW = "D.LpDistance(normalize_embeddings=False)"
# Settings that nearkin computes, of losses that take references.
PAIRS = {
    "ContrastiveLoss": ["", "0.4, 2.5", f"0.1, 1.3, distance={RAW}"],
    "TripletMarginLoss": ["", "0.3, distance=D.LpDistance(power=2)", f"distance={RAW}"],
    "LiftedStructureLoss": ["", "1.5, 0.2", f"distance={RAW}"],
    "NTXentLoss": ["", "0.5, distance=D.DotProductSimilarity()"],
    "MultiSimilarityLoss": ["", "1, 30, 0.4"],
    "CircleLoss": ["", "0.25, 32"],
    "SupConLoss": ["", "0.5"],
}
REDUCED = ["ContrastiveLoss", "TripletMarginLoss", "LiftedStructureLoss", "NTXentLoss", "ProxyAnchorLoss"]
ALONE = {
    "NPairsLoss": ["", "distance=D.DotProductSimilarity(normalize_embeddings=False)"],
    "FastAPLoss": ["", "7"],
    "ArcFaceLoss": ["CLASSES, DIM", "CLASSES, DIM, 20, 30"],
    "CosFaceLoss": ["CLASSES, DIM", "CLASSES, DIM, margin=0.2, scale=20"],
    "SphereFaceLoss": ["CLASSES, DIM", "CLASSES, DIM, margin=3, scale=2"],
    "SubCenterArcFaceLoss": ["num_classes=CLASSES, embedding_size=DIM, sub_centers=2"],
    "NormalizedSoftmaxLoss": ["CLASSES, DIM", f"CLASSES, DIM, distance=D.DotProductSimilarity({RAW[13:]}"],
    "SoftTripleLoss": ["CLASSES, DIM", "CLASSES, DIM, 3, 10, 0.2, 0.05"],
    "ProxyNCALoss": ["CLASSES, DIM", "CLASSES, DIM, softmax_scale=9"],
    "ProxyAnchorLoss": ["CLASSES, DIM", "CLASSES, DIM, 0.2, 10"],
}
NATIVE = [(name, setting) for table in (PAIRS, ALONE) for name, some in table.items() for setting in some]
# Settings that the original computes, in a class of ours.
ORIGINAL = [
    ("ContrastiveLoss", "distance=D.CosineSimilarity()"),
    ("ContrastiveLoss", "reducer=R.ThresholdReducer(low=0.1, high=0.8)"),
    ("ContrastiveLoss", "reducer=R.PerAnchorReducer()"),
    ("ContrastiveLoss", "reducer=R.MultipleReducers({'pos_loss': R.SumReducer()}, R.MeanReducer())"),
    ("TripletMarginLoss", "0.2, smooth_loss=True"),
    ("TripletMarginLoss", "0.2, swap=True"),
    ("TripletMarginLoss", "reducer=R.ClassWeightedReducer(torch.arange(1.0, 6.0))"),
    ("LiftedStructureLoss", "distance=D.CosineSimilarity()"),
    ("NTXentLoss", "reducer=R.PerAnchorReducer(R.AvgNonZeroReducer())"),
    ("NTXentLoss", "0.3, distance=D.LpDistance()"),
    ("MultiSimilarityLoss", "distance=D.LpDistance()"),
    ("SupConLoss", "0.3, distance=D.LpDistance(p=1)"),
    ("NPairsLoss", "distance=D.LpDistance()"),
    ("FastAPLoss", "distance=D.LpDistance(power=1)"),
    ("NormalizedSoftmaxLoss", "CLASSES, DIM, distance=D.LpDistance()"),
    ("ProxyNCALoss", "CLASSES, DIM, distance=D.CosineSimilarity()"),
    ("ProxyAnchorLoss", "CLASSES, DIM, reducer=R.MeanReducer()"),
]
# The pieces that any loss may have: each reducer, a regularizer of embeddings or weights.
PIECES = [
    ("ContrastiveLoss", "reducer=R.MeanReducer()"),
    ("TripletMarginLoss", "reducer=R.SumReducer()"),
    ("NTXentLoss", "reducer=R.AvgNonZeroReducer()"),
    ("LiftedStructureLoss", "reducer=R.MultipleReducers({'loss': R.SumReducer()})"),
    ("SupConLoss", "reducer=R.PerAnchorReducer()"),
    ("SupConLoss", "reducer=R.MeanReducer(), embedding_regularizer=G.LpRegularizer(power=2), embedding_reg_weight=0.1"),
    ("MultiSimilarityLoss", "embedding_regularizer=G.ZeroMeanRegularizer(), embedding_reg_weight=0.3"),
    ("TripletMarginLoss", "embedding_regularizer=G.LpRegularizer(p=1)"),
    ("ArcFaceLoss", "CLASSES, DIM, reducer=R.ClassWeightedReducer(torch.arange(1.0, 6.0))"),
    ("CosFaceLoss", "CLASSES, DIM, weight_regularizer=G.RegularFaceRegularizer(), weight_reg_weight=0.5"),
    ("NormalizedSoftmaxLoss", "CLASSES, DIM, weight_regularizer=G.CenterInvariantRegularizer()"),
    ("SoftTripleLoss", "CLASSES, DIM, 3, weight_regularizer=G.SparseCentersRegularizer(CLASSES, 3)"),
    ("ProxyAnchorLoss", "CLASSES, DIM, weight_regularizer=G.RegularFaceRegularizer(), weight_reg_weight=2"),
]
SETTINGS = NATIVE + ORIGINAL + PIECES


def batch(kind="even", seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(SIZES[kind])])
    labels = labels[torch.randperm(len(labels), generator=g)]
    means = torch.randn(CLASSES, DIM, generator=g, dtype=torch.float64)
    rows = means[labels] + 0.9 * torch.randn(len(labels), DIM, generator=g, dtype=torch.float64)
    return scale * rows, labels


def built(name, setting):
    """The loss of each library with one start, in float64."""
    both = []
    for module, kinds in ((losses, distances), (theirs, their_distances)):
        torch.manual_seed(7)
        names = {"D": kinds, "R": R, "G": G, "CLASSES": CLASSES, "DIM": DIM, "torch": torch}
        both.append(eval(f"loss({setting})", names | {"loss": getattr(module, name)}).double())
    assert isinstance(both[0], type(both[1])) and type(both[0]) is not type(both[1])
    return both


def gradients(loss, rows, *arguments, **options):
    rows = [x.clone().requires_grad_() for x in (rows, *([options["ref_emb"]] if "ref_emb" in options else []))]
    if len(rows) > 1:
        options["ref_emb"] = rows[1]
    value = loss(rows[0], *arguments, **options)
    return value.detach(), torch.autograd.grad(value, [*rows, *loss.parameters()], allow_unused=True)


def assert_equal(pair, *arguments, **options):
    (value, slopes), (expected, their_slopes) = (gradients(loss, *arguments, **options) for loss in pair)
    assert float(value) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
    for mine, other in zip(slopes, their_slopes, strict=True):
        mine, other = (torch.zeros(()).double() if x is None else x for x in (mine, other))
        assert torch.allclose(mine, other.expand_as(mine), rtol=1e-6, atol=1e-8), (mine, other)


@pytest.fixture
def taken(monkeypatch):
    """Counts what `native` computed, by class."""
    count = {}

    def counted(kind, native):
        def run(self, *arguments, **options):
            result = native(self, *arguments, **options)
            count[kind] = count.get(kind, 0) + (result is not None)
            return result

        return run

    for name in (*PAIRS, *ALONE, "SmoothAPLoss", "VICRegLoss"):
        kind = getattr(losses, name)
        monkeypatch.setattr(kind, "native", counted(name, kind.native))
    return count


def test_nineteen_losses_are_ours_and_all_others_the_originals():
    ours = {k for k in dir(theirs) if k[0].isupper() and getattr(losses, k) is not getattr(theirs, k)}
    assert ours == {*PAIRS, *ALONE, "SmoothAPLoss", "VICRegLoss"} and len(ours) == 19
    assert losses.AngularLoss is theirs.AngularLoss and pml.reducers is R
    with pytest.raises(AttributeError, match="TripletLoss"):
        losses.TripletLoss  # noqa: B018
    with pytest.raises(AttributeError, match="has no losers"):
        pml.losers  # noqa: B018


@pytest.mark.parametrize("kind, seed, scale", [("even", 0, 1.0), ("uneven", 1, 3.0), ("pairs", 2, 0.2)])
@pytest.mark.parametrize("name, setting", SETTINGS, ids=lambda x: x)
def test_values_and_gradients_are_the_originals(name, setting, kind, seed, scale, taken):
    pair = built(name, setting)
    assert_equal(pair, *batch(kind, seed, scale))
    assert taken.get(name, 0) == ((name, setting) not in ORIGINAL)
    rows, labels = batch(kind, seed, scale)
    if name in PAIRS or name in ("NPairsLoss", "FastAPLoss"):  # -1 means unknown in nearkin; here it is a class
        assert "ClassWeighted" in setting or float(pair[0](rows, labels - 1)) == pytest.approx(
            float(pair[0](rows, labels))
        )
    terms = [copy.deepcopy(loss) for loss in pair]
    for loss in terms:
        loss.reducer = R.DoNothingReducer()
    mine, expected = (loss(rows, labels) for loss in terms)
    for part, info in expected.items():
        assert mine[part]["reduction_type"] == info["reduction_type"]
        if torch.is_tensor(info["losses"]):
            assert torch.allclose(mine[part]["losses"].squeeze(), info["losses"].squeeze(), atol=1e-9)


@pytest.mark.parametrize("name, setting", [s for s in SETTINGS if s[0] in PAIRS], ids=lambda x: x)
def test_against_references(name, setting, taken):
    if name == "LiftedStructureLoss" or any(word in setting for word in ("swap", "PerAnchor")):
        pytest.skip("the original looks up rows of the batch by the number of a reference")
    references, others = batch("uneven", 4)
    assert_equal(built(name, setting), *batch("even", 3), ref_emb=references, ref_labels=others)
    assert taken.get(name, 0) == ((name, setting) not in ORIGINAL)
    rows, labels = batch("even", 3)
    for refs in ((rows + 0.3, labels), (rows, labels.clone())):  # one tensor of labels, or of rows
        pair = built(name, "" if name == "ContrastiveLoss" else setting)
        assert_equal(pair, rows, labels, ref_emb=refs[0], ref_labels=refs[1])


@pytest.mark.parametrize("miner", ["BatchHardMiner()", "PairMarginMiner(0.6, 1.2)", "TripletMarginMiner(0.5)"])
@pytest.mark.parametrize("name, setting", [s for s in SETTINGS if "reducer=" not in s[1]], ids=lambda x: x)
def test_with_the_indices_of_a_miner(name, setting, miner, taken):
    rows, labels = batch("uneven", 5)
    indices = eval(f"M.{miner}", {"M": their_miners})(rows, labels)
    assert_equal(built(name, setting), rows, labels, indices)
    assert taken.get(name, 0) == ((name, setting) not in ORIGINAL and name not in REDUCED)


@pytest.mark.parametrize("name, setting", SETTINGS, ids=lambda x: x)
@pytest.mark.parametrize("labels", [[0] * 4, list(range(4))], ids=["one class", "no positives"])
def test_a_batch_without_pairs_of_a_kind(name, setting, labels):
    rows, labels = batch("even", 6)[0][:4], torch.tensor(labels)
    if "PerAnchor" in setting:
        pytest.skip("the original's mean of no pairs is NaN, and its backward fails")
    assert_equal(built(name, setting), rows, labels)


def test_one_row_a_lone_pair_and_an_empty_miner():
    rows, labels = batch("even", 8)
    empty = torch.empty(0, dtype=torch.long)
    one = tuple(torch.tensor([i]) for i in (0, 1, 2))
    for name in PAIRS:
        for arguments in ((rows[:1], labels[:1]), (rows, labels, (empty,) * 3), (rows, labels, (empty,) * 4)):
            assert_equal(built(name, ""), *arguments)
        assert_equal(built(name, ""), rows, labels, one)
        for pairs in ((*their_indexing.get_all_pairs_indices(labels)[:2], empty, empty), (empty, empty, *one[:2])):
            assert_equal(built(name, ""), rows, labels, pairs)
        references = {"ref_emb": rows[1:3], "ref_labels": torch.tensor([0, 1])}
        assert_equal(built(name, ""), rows[:1], torch.tensor([0]), **references)


def test_vicreg_takes_views(taken):
    one, other = batch("even", 1)[0], batch("even", 2)[0]
    assert_equal(built("VICRegLoss", ""), one, ref_emb=other)
    assert_equal(built("VICRegLoss", "10, 5, 2, 1e-3"), one, ref_emb=other)
    assert taken == {"VICRegLoss": 2}
    assert_equal(built("VICRegLoss", "reducer=R.SumReducer()"), one, ref_emb=other)
    assert taken == {"VICRegLoss": 2}


@pytest.mark.parametrize("name", [n for n in PAIRS if n != "LiftedStructureLoss"])
@pytest.mark.parametrize("miner", [None, "PairMarginMiner(0.2, 1.6)", "MultiSimilarityMiner(0.5)"])
def test_the_originals_wrappers_take_our_losses(name, miner):
    """A memory filling, full and around the end; two views; several losses; a group of one process."""
    pair = built(name, "")
    memories = [theirs.CrossBatchMemory(loss, DIM, 27, miner and eval(f"M.{miner}", {"M": kind}))
                for loss, kind in zip(pair, (miners, their_miners), strict=True)]  # fmt: skip
    for step in range(5):
        assert_equal(memories, *batch("even", step))
    rows, view, labels = batch("even", 1)[0], batch("even", 2)[0], batch("even", 1)[1]
    for symmetric in (True, False):
        assert_equal([theirs.SelfSupervisedLoss(loss, symmetric) for loss in pair], rows, view)
    assert_equal([theirs.MultipleLosses([loss, loss], weights=[1, 0.5]) for loss in pair], rows, labels)
    assert_equal([DistributedLossWrapper(loss) for loss in pair], rows, labels)


@pytest.mark.parametrize("name", [n for n in ALONE if n not in ("NPairsLoss", "FastAPLoss")])
def test_checkpoints_load_and_logits_are_the_originals(name):
    ours, other = built(name, ALONE[name][0])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5)
    ours.load_state_dict(other.state_dict())
    rows, labels = batch("uneven", 2)
    assert_equal([ours, other], rows, labels)
    assert torch.equal(ours.get_logits(rows), other.get_logits(rows))
    with pytest.raises(ValueError, match="ref_emb is not supported"):
        ours(rows, labels, ref_emb=rows.clone(), ref_labels=labels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*PAIRS, *ALONE])
def test_half_precision_is_computed_in_float32(name, dtype):
    rows, labels = batch("even", 0)
    setting = ALONE.get(name, [""])[0]
    for indices in (None, their_miners.BatchHardMiner()(rows, labels)):
        ours, other = (loss.float() for loss in built(name, setting))
        value = ours(rows.to(dtype), labels, indices)
        assert value.dtype == torch.float32 and {p.dtype for p in ours.parameters()} <= {torch.float32}
        assert float(value) == pytest.approx(float(other(rows.to(dtype).float(), labels, indices)), rel=0.02)
        if hasattr(ours, "get_logits"):
            assert ours.get_logits(rows.to(dtype)).dtype == torch.float32


def test_what_a_user_changes_in_a_subclass_is_computed_by_the_original():
    class Doubled(losses.ContrastiveLoss):
        def pos_calc(self, pos_pair_dist, margin):
            return 2 * super().pos_calc(pos_pair_dist, margin)

    class TheirDoubled(theirs.ContrastiveLoss):
        pos_calc = Doubled.pos_calc

    rows, labels = batch("even", 0)
    TheirDoubled.pos_calc = lambda self, d, margin: 2 * theirs.ContrastiveLoss.pos_calc(self, d, margin)
    assert_equal([Doubled(), TheirDoubled()], rows, labels)
    counted = losses.ContrastiveLoss(collect_stats=True, reducer=R.AvgNonZeroReducer(collect_stats=True))
    counted(rows, labels)
    assert counted.reducer.reducers["neg_loss"].losses_size == 2 * 48


@pytest.mark.parametrize("name", [*PAIRS, *ALONE])
def test_a_call_leaves_nothing_on_the_module(name):
    """So that threads do not mix: two batches on one loss, many times at once, each with its own value."""
    loss, _ = built(name, ALONE.get(name, [""])[0])
    loss.cast_types = None  # the original assigns to the weights' data in each call: in two threads that can hang
    before = {k for part in loss.modules() for k in vars(part)}
    calls = [(batch("even", 0), {}), (batch("uneven", 1), {})]
    if name in PAIRS:
        references, others = batch("uneven", 4)
        calls[1] = (calls[1][0], {"ref_emb": references, "ref_labels": others})
    expected, wrong = [float(loss(*arguments, **options)) for arguments, options in calls], []

    def run(i):
        arguments, options = calls[i]
        wrong.extend(v for v in (float(loss(*arguments, **options)) for _ in range(5)) if v != expected[i])

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert {k for part in loss.modules() for k in vars(part)} == before


# What docs/migrating.md calls a correction.


def test_equal_rows_are_at_distance_0():
    rows = torch.nn.functional.normalize(torch.randn(40, 64))
    rows[20:] = rows[:20]
    labels = torch.arange(20).repeat(2)
    pairs = their_miners.PairMarginMiner(-1.0, 0.0)(rows, labels)
    for indices in (None, pairs):
        ours, other = (m.ContrastiveLoss(neg_margin=0)(rows, labels, indices) for m in (losses, theirs))
        assert ours == 0 < other
    assert not distances.LpDistance()(rows).diagonal(20).any() and their_distances.LpDistance()(rows).diagonal(20).any()
    x, y = batch("even", 0)[0], batch("uneven", 1)[0]
    for setting in ("LpDistance()", "LpDistance(p=1)", "LpDistance(power=3)", RAW[2:], "CosineSimilarity(power=2)"):
        mine, other = (eval(f"D.{setting}", {"D": m}) for m in (distances, their_distances))
        assert torch.allclose(mine(x, y), other(x, y)) and torch.allclose(mine(x), other(x), atol=1e-6)


def test_nothing_underflows_and_nothing_is_nan():
    x, references = torch.tensor([[1.0, 0.02]]), torch.tensor([[-1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    against = {"ref_emb": references, "ref_labels": torch.tensor([0, 1, 2])}
    ours, other = (m.NTXentLoss(0.01)(x, torch.tensor([0]), **against) for m in (losses, theirs))
    assert ours.item() == pytest.approx(200, rel=0.01) and other.item() < 88
    far, own = torch.tensor([[-1.0, 0.02], [1.0, 0.02]]), torch.tensor([0, 0])
    for module, value in ((losses, 64), (theirs, 0)):  # the mean of 128 and of nothing, or nothing alone
        loss = module.ProxyNCALoss(2, 2, softmax_scale=32)
        loss.proxies.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        assert loss(far, own).item() == pytest.approx(value, rel=1e-2, abs=1e-6)
    arc = losses.ArcFaceLoss(3, 4, scale=8)
    arc.W.data, rows = torch.eye(4, 3), torch.eye(3, 4).requires_grad_()
    assert all(x.isfinite().all() for x in torch.autograd.grad(arc(rows, torch.arange(3)), [rows, arc.W]))


def test_references_and_orders_that_the_original_misreads(taken):
    rows, labels = batch("even", 0)
    references, others = batch("uneven", 4)
    turned = {"ref_emb": references.flip(0), "ref_labels": others.flip(0)}
    for module, same in ((losses, True), (theirs, False)):
        values = [module.LiftedStructureLoss()(rows, labels, **r)
                  for r in ({"ref_emb": references, "ref_labels": others}, turned)]  # fmt: skip
        assert (float(values[0]) == pytest.approx(float(values[1]))) == same
    g = torch.Generator().manual_seed(3)
    rows, labels, order = torch.randn(16, DIM, generator=g), torch.arange(4).repeat_interleave(4), torch.randperm(16)
    ours, other = losses.SmoothAPLoss(0.1), theirs.SmoothAPLoss(0.1)
    assert float(ours(rows, labels)) == pytest.approx(float(other(rows, labels)), rel=1e-6)  # in order of class
    assert float(ours(rows[order], labels[order])) == pytest.approx(float(ours(rows, labels)), rel=1e-6)
    assert float(other(rows[order], labels[order])) != pytest.approx(float(other(rows, labels)), rel=1e-3)
    assert ours(*batch("uneven", 1)) > 0
    assert taken == {"LiftedStructureLoss": 2, "SmoothAPLoss": 4}


@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "CircleLoss"])
def test_weights_of_classes_go_with_their_own_items(name):
    """The original's terms are (B, 1), so that each is multiplied by the weights of all."""
    rows, labels = batch("even", 0)
    weights = torch.arange(1.0, 6.0).double()
    ours, other = built(name, "reducer=R.ClassWeightedReducer(torch.arange(1.0, 6.0))")
    terms = getattr(theirs, name)(reducer=R.DoNothingReducer())(rows, labels)["loss"]["losses"]
    assert float(ours(rows, labels)) == pytest.approx(float((terms.squeeze() * weights[labels]).mean()))
    assert float(other(rows, labels)) != pytest.approx(float(ours(rows, labels)), rel=1e-3)


def test_terms_that_float32_rounds_to_0_count():
    """A share of 1 - 1e-9 costs 1e-9; the original's float32 has 0, which its default reducer leaves out."""
    labels = torch.arange(24) // 4
    rows = torch.eye(6)[labels] + 0.05 * torch.randn(24, 6)
    mean = R.AvgNonZeroReducer()
    exact = float(theirs.NTXentLoss(reducer=mean)(rows.double(), labels))
    assert float(losses.NTXentLoss(reducer=mean)(rows, labels)) == pytest.approx(exact, rel=1e-6)
    assert float(theirs.NTXentLoss(reducer=mean)(rows, labels)) != pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("version, sentence", [(None, "needs pytorch-metric-learning "), ("2.8.1", "got 2.8.1")])
def test_without_the_original_one_sentence_names_the_extra(version, sentence):
    fake = (
        "None"
        if version is None
        else f"type(sys)('pml'); sys.modules['pytorch_metric_learning'].__version__ = {version!r}"
    )
    code = f"import sys; sys.modules['pytorch_metric_learning'] = {fake}\nfrom nearkin.compat.pml import losses"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1 and sentence in last and last.endswith("pip install 'nearkin[pml]'")
