"""`nearkin.compat.pml.losses` against pytorch-metric-learning 2.9: values, gradients, terms; where they differ, why."""

import inspect
import subprocess
import sys

import pytest
import torch
from pytorch_metric_learning import distances as their_distances
from pytorch_metric_learning import losses as theirs
from pytorch_metric_learning import miners as their_miners
from pytorch_metric_learning import reducers as their_reducers
from pytorch_metric_learning import regularizers as their_regularizers

from nearkin.compat import pml
from nearkin.compat.pml import distances, losses, miners, reducers, regularizers

pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence for multidimensional:UserWarning"),  # the original
]
CLASSES, DIM = 5, 6
SIZES = {"even": [4, 4, 4], "uneven": [2, 5, 1, 3, 4], "pairs": [2, 2, 2, 2, 2]}
OURS = {"D": distances, "R": reducers, "G": regularizers, "M": miners}
THEIRS = {"D": their_distances, "R": their_reducers, "G": their_regularizers, "M": their_miners}
RAW = "D.LpDistance(normalize_embeddings=False)"
DOT = "D.DotProductSimilarity(normalize_embeddings=False)"
PAIRS = {
    "ContrastiveLoss": ["", "0.4, 2.5", f"0.1, 1.3, distance={RAW}", "distance=D.CosineSimilarity()"],
    "SignalToNoiseRatioContrastiveLoss": [""],
    "IntraPairVarianceLoss": ["", "distance=D.LpDistance()"],
    "TripletMarginLoss": ["", "0.2, smooth_loss=True", "0.3, distance=D.LpDistance(power=2)", f"distance={RAW}"],
    "MarginLoss": ["", "0.1, nu=0.3, beta=0.9, learn_beta=True", "0.2, 0.1, 1.0, 'all', True, CLASSES"],
    "LiftedStructureLoss": ["", "1.5, 0.2", f"distance={RAW}", "distance=D.CosineSimilarity()"],
    "GeneralizedLiftedStructureLoss": ["", "1.5, 0.2", "distance=D.CosineSimilarity()"],
    "NTXentLoss": ["", "0.5", "0.3, distance=D.LpDistance()", "distance=D.DotProductSimilarity()"],
    "MultiSimilarityLoss": ["", "1, 30, 0.4", "distance=D.LpDistance()"],
    "CircleLoss": ["", "0.25, 32"],
    "SupConLoss": ["", "0.5", "0.3, distance=D.LpDistance(p=1)"],
    "TupletMarginLoss": ["", "10, 16"],
    "NCALoss": ["", "5", "distance=D.CosineSimilarity()"],
    "AngularLoss": ["", "30"],
}
ALONE = {
    "RankedListLoss": ["0.4, 4", "0.3, 2, 0.7, 1.1, 3"],
    "HistogramLoss": ["", "20", "delta=0.1"],
    "PNPLoss": ["anneal=0.1", *[f"3, 2, 0.05, '{variant}'" for variant in ("Ds", "Dq", "Iu", "Ib")]],
    "ThresholdConsistentMarginLoss": ["", "0.5, 2, 0.7, 0.2"],
    "LargeMarginSoftmaxLoss": ["CLASSES, DIM", "CLASSES, DIM, margin=3, scale=0.5"],
    "InstanceLoss": ["", "8"],
    "NPairsLoss": ["", "distance=D.DotProductSimilarity(normalize_embeddings=False)", "distance=D.LpDistance()"],
    "FastAPLoss": ["", "7"],
    "ArcFaceLoss": ["CLASSES, DIM", "CLASSES, DIM, 20, 30"],
    "CosFaceLoss": ["CLASSES, DIM", "CLASSES, DIM, margin=0.2, scale=20"],
    "SphereFaceLoss": ["CLASSES, DIM", "CLASSES, DIM, margin=3, scale=2"],
    "SubCenterArcFaceLoss": ["num_classes=CLASSES, embedding_size=DIM, sub_centers=2"],
    "NormalizedSoftmaxLoss": [
        "CLASSES, DIM",
        "CLASSES, DIM, 0.2, distance=D.CosineSimilarity()",
        f"CLASSES, DIM, distance={DOT}",
    ],
    "SoftTripleLoss": ["CLASSES, DIM", "CLASSES, DIM, 3, 10, 0.2, 0.05"],
    "ProxyNCALoss": ["CLASSES, DIM", "CLASSES, DIM, softmax_scale=9", "CLASSES, DIM, distance=D.CosineSimilarity()"],
    "ProxyAnchorLoss": ["CLASSES, DIM", "CLASSES, DIM, 0.2, 10", "CLASSES, DIM, reducer=R.MeanReducer()"],
}
UNMINED = {"RankedListLoss", "PNPLoss", "InstanceLoss"}
SETTINGS = [(name, setting) for table in (PAIRS, ALONE) for name, some in table.items() for setting in some]
# The pieces that any loss may have: a regularizer of embeddings or weights, another reducer.
SETTINGS += [
    ("ContrastiveLoss", "reducer=R.ThresholdReducer(low=0.1, high=0.8)"),
    ("ContrastiveLoss", "reducer=R.PerAnchorReducer()"),
    ("ContrastiveLoss", "reducer=R.MultipleReducers({'pos_loss': R.SumReducer()}, R.MeanReducer())"),
    ("ContrastiveLoss", "reducer=R.MeanReducer()"),
    ("TripletMarginLoss", "reducer=R.SumReducer()"),
    ("TripletMarginLoss", "reducer=R.ClassWeightedReducer(torch.arange(1.0, 6.0))"),
    ("NTXentLoss", "reducer=R.PerAnchorReducer(R.AvgNonZeroReducer())"),
    ("SupConLoss", "reducer=R.MeanReducer(), embedding_regularizer=G.LpRegularizer(power=2), embedding_reg_weight=0.1"),
    ("MultiSimilarityLoss", "embedding_regularizer=G.ZeroMeanRegularizer(), embedding_reg_weight=0.3"),
    ("TripletMarginLoss", "embedding_regularizer=G.LpRegularizer(p=1)"),
    ("CosFaceLoss", "CLASSES, DIM, weight_regularizer=G.RegularFaceRegularizer(), weight_reg_weight=0.5"),
    ("NormalizedSoftmaxLoss", "CLASSES, DIM, weight_regularizer=G.CenterInvariantRegularizer()"),
    ("SoftTripleLoss", "CLASSES, DIM, 3, weight_regularizer=G.SparseCentersRegularizer(CLASSES, 3)"),
    ("ProxyAnchorLoss", "CLASSES, DIM, weight_regularizer=G.RegularFaceRegularizer(), weight_reg_weight=2"),
]
MINERS = [
    "M.BatchHardMiner()",
    "M.PairMarginMiner(0.6, 1.2)",
    "M.MultiSimilarityMiner(0.2)",
]


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
    for module, parts in ((losses, OURS), (theirs, THEIRS)):
        torch.manual_seed(7)
        names = {**parts, "CLASSES": CLASSES, "DIM": DIM, "torch": torch, "loss": getattr(module, name)}
        both.append(eval(f"loss({setting})", names).double())
    for (first, mine), (second, other) in zip(*(loss.named_parameters() for loss in both), strict=True):
        assert first == second and torch.equal(mine, other)  # names, shapes and start are the original's
    return both


def gradients(loss, rows, *arguments, **options):
    rows = [x.clone().requires_grad_() for x in (rows, *([options["ref_emb"]] if "ref_emb" in options else []))]
    if len(rows) > 1:
        options["ref_emb"] = rows[1]
    value = loss(rows[0], *arguments, **options)
    parameters = list(loss.parameters())
    return value.detach(), torch.autograd.grad(value, [*rows, *parameters], allow_unused=True)


def assert_equal(name, setting, *arguments, **options):
    tolerance = 1e-5 if name == "HistogramLoss" else 1e-9  # the original places its bins in float32
    ours, other = built(name, setting)
    value, slopes = gradients(ours, *arguments, **options)
    expected, their_slopes = gradients(other, *arguments, **options)
    assert float(value.detach()) == pytest.approx(float(expected.detach()), rel=tolerance, abs=1e-12)
    for mine, theirs_ in zip(slopes, their_slopes, strict=True):
        reference = torch.zeros(()).double() if theirs_ is None else theirs_
        result = torch.zeros(()).double() if mine is None else mine
        assert torch.allclose(result, reference.expand_as(result), rtol=1e-6, atol=max(1e-8, tolerance)), (
            result,
            reference,
        )


@pytest.mark.parametrize("kind, seed, scale", [("even", 0, 1.0), ("uneven", 1, 3.0), ("pairs", 2, 0.2)])
@pytest.mark.parametrize("name, setting", SETTINGS, ids=lambda x: x)
def test_values_and_gradients_are_the_originals(name, setting, kind, seed, scale):
    if "ClassWeighted" in setting and kind == "uneven":
        pytest.skip("the weights are of five classes")
    assert_equal(name, setting, *batch(kind, seed, scale))


@pytest.mark.parametrize("name, setting", [(n, s) for n, some in PAIRS.items() for s in some], ids=lambda x: x)
def test_against_references(name, setting):
    if name == "LiftedStructureLoss":
        pytest.skip("the original looks up rows of the batch by the number of a reference")
    rows, labels = batch("even", 3)
    references, reference_labels = batch("uneven", 4)
    assert_equal(name, setting, rows, labels, ref_emb=references, ref_labels=reference_labels)


@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("name, setting", [s for s in SETTINGS if "Reducer" not in s[1]], ids=lambda x: x)
def test_with_the_indices_of_a_miner(name, setting, miner):
    if name == "LiftedStructureLoss":
        pytest.skip("the original takes log 1 for the negatives of a pair that has none")
    if name in UNMINED:
        pytest.skip("takes no indices, as in the original")
    rows, labels = batch("uneven", 5)
    assert_equal(name, setting, rows, labels, eval(miner, THEIRS)(rows, labels))


@pytest.mark.parametrize("name, setting", SETTINGS, ids=lambda x: x)
@pytest.mark.parametrize(
    "labels", [torch.zeros(4, dtype=torch.long), torch.arange(4)], ids=["one class", "no positives"]
)
def test_a_batch_without_pairs_of_a_kind(name, setting, labels):
    single = labels.unique().numel() == 1
    if (name == "SupConLoss" and single) or (name == "NPairsLoss" and single) or "ClassWeighted" in setting:
        pytest.skip("named in docs/migrating.md, or weights of other classes")
    rows = batch("even", 6)[0][:4]
    ours, _ = built(name, setting)
    value, slopes = gradients(ours, rows, labels)
    assert torch.isfinite(value) and all(torch.isfinite(x).all() for x in slopes if x is not None)
    if name in ("IntraPairVarianceLoss", "NCALoss") or "PerAnchor" in setting:
        return  # the original's mean of no pairs is NaN, and its backward fails
    assert_equal(name, setting, rows, labels)


def test_one_row_and_an_empty_miner_cost_nothing():
    rows, labels = batch("even", 8)
    empty = torch.empty(0, dtype=torch.long)
    for name in PAIRS:
        loss = getattr(losses, name)()
        for arguments in ((rows[:1], labels[:1]), (rows, labels, (empty, empty, empty)), (rows, labels, (empty,) * 4)):
            value, (slope, *_) = gradients(loss, *arguments)
            if name not in ("NCALoss", "AngularLoss"):  # these take every item of another class, whatever was mined
                assert value == 0 and (slope is None or not slope.any()), name


@pytest.mark.parametrize("name", ["ContrastiveLoss", "TripletMarginLoss", "NTXentLoss", "MultiSimilarityLoss"])
def test_labels_are_plain_numbers(name):
    """-1 means unknown in nearkin; here it is a class, as in the original."""
    rows, labels = batch("even", 9)
    assert_equal(name, "", rows, labels - 1)


def test_terms_are_handed_out():
    rows, labels = batch("uneven", 10)
    for name, kind in (("ContrastiveLoss", "pos_loss"), ("TripletMarginLoss", "loss"), ("CircleLoss", "loss")):
        ours, other = built(name, "reducer=R.DoNothingReducer()")
        mine, expected = ours(rows, labels), other(rows, labels)
        assert set(mine) == set(expected) and mine[kind]["reduction_type"] == expected[kind]["reduction_type"]
        assert torch.allclose(mine[kind]["losses"], expected[kind]["losses"].squeeze(), atol=1e-9)
        for a, b in zip(mine[kind]["indices"], expected[kind]["indices"], strict=True):
            assert torch.equal(a, b)


def test_smooth_ap_where_the_original_reads_its_batch_right():
    """In order of class, with as many classes as items per class; the original rounds to float32."""
    g = torch.Generator().manual_seed(3)
    labels = torch.arange(4).repeat_interleave(4)
    rows = torch.randn(16, DIM, generator=g, dtype=torch.float64)
    ours, other = built("SmoothAPLoss", "0.1")
    value, (slope,) = gradients(ours, rows, labels)
    expected, (their_slope,) = gradients(other, rows, labels)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert torch.allclose(slope, their_slope, atol=1e-6)
    order = torch.randperm(16, generator=g)
    assert float(ours(rows[order], labels[order])) == pytest.approx(float(value))
    assert float(other(rows[order], labels[order])) != pytest.approx(float(expected))


def test_vicreg_takes_views_and_no_labels():
    one, other = batch("even", 1)[0], batch("even", 2)[0]
    assert_equal("VICRegLoss", "", one, ref_emb=other)
    with pytest.raises(ValueError, match="labels must be None"):
        losses.VICRegLoss()(one, batch("even", 1)[1], ref_emb=other)
    with pytest.raises(ValueError, match="distance must be None"):
        losses.VICRegLoss(distance=distances.LpDistance())


@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss", "TripletMarginLoss", "ContrastiveLoss"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_self_supervised(name, symmetric):
    rows, view = batch("even", 1)[0], batch("even", 2)[0]
    mine = losses.SelfSupervisedLoss(getattr(losses, name)(), symmetric)(rows, view)
    other = theirs.SelfSupervisedLoss(getattr(theirs, name)(), symmetric)(rows, view)
    assert float(mine) == pytest.approx(float(other))


@pytest.mark.parametrize("name", [n for n in PAIRS if n != "LiftedStructureLoss"])
@pytest.mark.parametrize("miner", [None, "M.PairMarginMiner(0.2, 1.6)", "M.TripletMarginMiner(0.5)"])
def test_cross_batch_memory(name, miner):
    """Filling, full, and around the end."""
    mine = losses.CrossBatchMemory(getattr(losses, name)(), DIM, 27, None if miner is None else eval(miner, OURS))
    other = theirs.CrossBatchMemory(getattr(theirs, name)(), DIM, 27, None if miner is None else eval(miner, THEIRS))
    for step in range(6):
        rows, labels = batch("even", step)
        value, (slope,) = gradients(mine, rows, labels)
        expected, (their_slope,) = gradients(other, rows, labels)
        assert float(value) == pytest.approx(float(expected), rel=1e-9), step
        assert torch.allclose(slope, their_slope, atol=1e-8)
    rows, labels = batch("even", 6)  # not in the memory: the original's distance of equal rows is not quite 0
    mask = torch.arange(12) % 2 == 0
    assert float(mine(rows, labels, enqueue_mask=mask)) == pytest.approx(float(other(rows, labels, enqueue_mask=mask)))
    assert set(mine.state_dict()) == set(other.state_dict()) and mine.queue_idx == other.queue_idx


def test_cross_batch_memory_reads_a_miners_rows_where_they_lie():
    """The original reads rows 0, 1, … of the memory, wherever the batch was stored."""
    memory = losses.CrossBatchMemory(losses.ContrastiveLoss(0, 0, reducer=reducers.SumReducer()), DIM, 40)
    for step in range(2):
        rows, labels = batch("even", step)
        memory(rows, labels)
    memory.reset_queue()
    memory(*batch("even", 0))
    again = memory.loss(rows, labels, (torch.tensor([0]), torch.tensor([1]), *[torch.empty(0, dtype=torch.long)] * 2))
    state = memory.embedding_memory.clone(), memory.queue_idx
    alone = float(memory(rows, labels))
    memory.embedding_memory, memory.queue_idx = state
    indices = (torch.tensor([0]), torch.tensor([1]), *[torch.empty(0, dtype=torch.long)] * 2)
    assert float(memory(rows, labels, indices)) == pytest.approx(alone + float(again))
    assert float(again) > 0


def test_multiple_losses_and_what_they_refuse():
    rows, labels = batch("even", 3)
    both = [
        (
            m.MultipleLosses([m.ContrastiveLoss(), m.CircleLoss()], weights=[1, 0.5]),
            m.MultipleLosses({"a": m.NTXentLoss()}),
        )
        for m in (losses, theirs)
    ]
    for mine, other in zip(*both, strict=True):
        assert float(mine(rows, labels)) == pytest.approx(float(other(rows, labels)))
    mined = losses.MultipleLosses([losses.TripletMarginLoss()], miners=[miners.BatchHardMiner()])
    expected = losses.TripletMarginLoss()(rows, labels, miners.BatchHardMiner()(rows, labels))
    assert float(mined(rows, labels)) == float(expected)
    with pytest.raises(ValueError, match="indices_tuple must be None"):
        mined(rows, labels, miners.BatchHardMiner()(rows, labels))
    with pytest.raises(ValueError, match="weights must have the keys of losses"):
        losses.MultipleLosses({"a": losses.NTXentLoss()}, weights={"b": 1})


def test_checkpoints_of_the_original_load():
    for name, (setting, *_) in ALONE.items():
        ours, other = built(name, setting)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.5)
        ours.load_state_dict(other.state_dict())
        rows, labels = batch("uneven", 2)
        assert float(ours(rows, labels)) == pytest.approx(float(other(rows, labels)))


@pytest.mark.parametrize("name", [n for n in ALONE if hasattr(theirs, n) and "Proxies" not in n])
def test_get_logits(name):
    ours, other = built(name, ALONE[name][0])
    if hasattr(other, "get_logits"):
        rows, _ = batch("uneven", 2)
        assert torch.allclose(ours.get_logits(rows), other.get_logits(rows))


def test_outliers_of_sub_centers():
    ours, other = built("SubCenterArcFaceLoss", "num_classes=CLASSES, embedding_size=DIM")
    rows, labels = batch("uneven", 2)
    mine, expected = ours.get_outliers(rows, labels, 60), other.get_outliers(rows, labels, 60)
    assert torch.equal(mine[0], expected[0]) and torch.allclose(mine[1], expected[1])
    assert torch.equal(ours.get_outliers(rows, labels, 60, return_dominant_centers=False), mine[0])


def test_every_class_has_the_originals_arguments():
    """In the same order, so that positional arguments mean the same; what is not there is refused by name."""
    for name in sorted(set(losses.__all__) - {"BaseMetricLossFunction"}):
        mine, other = (inspect.signature(getattr(m, name)).parameters for m in (losses, theirs))
        own = [k for k, p in other.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if name not in ("CosFaceLoss", "SubCenterArcFaceLoss", "SphereFaceLoss"):  # they hide theirs behind *args
            assert [k for k, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD][: len(own)] == own, name
        for k in own:
            assert mine[k].default == other[k].default, (name, k)


def test_what_is_refused_says_what_to_use():
    with pytest.raises(AttributeError, match=r"no TripletLoss; known: .*TripletMarginLoss"):
        losses.TripletLoss  # noqa: B018
    assert set(losses.__all__) >= {n for n in dir(theirs) if n.endswith("Loss")} - {"GenericPairLoss"}
    for call, sentence in (
        (
            lambda: losses.CircleLoss(distance=distances.LpDistance()),
            r"CircleLoss: distance must be CosineSimilarity\(\)",
        ),
        (lambda: losses.ArcFaceLoss(3, 4, distance=distances.LpDistance()), "ArcFaceLoss: distance must be Cosine"),
        (lambda: losses.FastAPLoss(distance=distances.LpDistance()), r"must be LpDistance\(power=2\), got LpDistance"),
        (lambda: losses.SupConLoss(collect_stats=True), "collect_stats must be False"),
        (lambda: losses.CrossBatchMemory(losses.ArcFaceLoss(3, 4), 4), "loss must take references, got ArcFaceLoss"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    with pytest.raises(TypeError, match="SupConLoss has no argument temprature"):
        losses.SupConLoss(temprature=0.1)
    rows, labels = batch("even", 0)
    with pytest.raises(ValueError, match=r"labels must have one entry per row: 12 rows, shape \(11,\)"):
        losses.SupConLoss()(rows, labels[1:])
    with pytest.raises(ValueError, match="ArcFaceLoss takes no ref_emb"):
        losses.ArcFaceLoss(CLASSES, DIM)(rows, labels, ref_emb=rows.clone(), ref_labels=labels)
    with pytest.raises(ValueError, match="ContrastiveLoss needs labels, got None"):
        losses.ContrastiveLoss()(rows)
    with pytest.raises(ValueError, match="indices_tuple must have 3 or 4 tensors, got 2"):
        losses.ContrastiveLoss()(rows, labels, (labels, labels))


def test_where_the_original_is_wrong():
    rows, labels = batch("even", 0)
    # A miner's only triplet is dropped by the original's pair losses.
    one = tuple(
        torch.tensor([i]) for i in (0, int((labels == labels[0]).nonzero()[1]), int((labels != labels[0]).nonzero()[0]))
    )
    assert theirs.NTXentLoss()(rows, labels, one) == 0 < losses.NTXentLoss()(rows, labels, one)
    # Two views under one tensor of labels: the original drops each item's own other view.
    view = rows + 0.3
    mine, other = losses.ContrastiveLoss(), theirs.ContrastiveLoss()
    expected = other(rows, labels, ref_emb=view, ref_labels=labels.clone())
    assert float(mine(rows, labels, ref_emb=view, ref_labels=labels)) == pytest.approx(float(expected))
    assert float(other(rows, labels, ref_emb=view, ref_labels=labels)) != pytest.approx(float(expected))
    # swap against references reads rows of the batch by the number of a reference.
    references, reference_labels = batch("uneven", 4)
    swapped = losses.TripletMarginLoss(0.2, swap=True)
    order = torch.randperm(len(references))
    value = swapped(rows, labels, ref_emb=references, ref_labels=reference_labels)
    assert float(swapped(rows, labels, ref_emb=references[order], ref_labels=reference_labels[order])) == pytest.approx(
        float(value)
    )
    # Proxy-NCA and NCA drop an item whose share underflows.
    far = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    assert losses.NCALoss(100)(far, torch.tensor([0, 0, 1])) > 100


def test_half_precision_keeps_the_weights():
    rows, labels = batch("even", 0)
    loss = losses.ArcFaceLoss(CLASSES, DIM)
    value = loss(rows.bfloat16(), labels)
    assert value.dtype == torch.float32 and loss.W.dtype == torch.float32
    assert losses.TripletMarginLoss()(rows.half(), labels).dtype == torch.float32


def test_own_losses_and_reducers_plug_in():
    """A subclass of the base, as that package's users write it."""

    class Pull(losses.BaseMetricLossFunction):
        def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
            if len(embeddings) < 2:
                return self.zero_losses()
            mat = self.distance(embeddings, ref_emb)
            indices = torch.arange(len(mat))
            return {"loss": {"losses": mat.sum(1), "indices": indices, "reduction_type": "element"}}

        def get_default_distance(self):
            return distances.CosineSimilarity()

    class Last(reducers.BaseReducer):
        def element_reduction(self, losses, *_):
            return losses[-1]

    rows, labels = batch("even", 0)
    expected = torch.nn.functional.normalize(rows) @ torch.nn.functional.normalize(rows).T
    assert float(Pull()(rows, labels)) == pytest.approx(float(expected.sum(1).mean()))
    assert float(Pull(reducer=Last())(rows, labels)) == pytest.approx(float(expected.sum(1)[-1]))
    assert Pull()(rows[:1], labels[:1]) == 0


def test_the_package_does_not_need_the_original():
    code = "import sys; sys.modules['pytorch_metric_learning'] = None; from nearkin.compat.pml import losses, utils"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(dir(pml)) == set(pml.__all__)


def test_p2sgrad_but_for_the_originals_renorm():
    """The original scales its weights by torch's renorm, which is off by 1e-7."""
    for kind in SIZES:
        rows, labels = batch(kind, 3)
        (value, slopes), (expected, theirs_) = (
            gradients(x, rows, labels) for x in built("P2SGradLoss", "DIM, CLASSES")
        )
        assert float(value) == pytest.approx(float(expected), rel=1e-6)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(slopes, theirs_, strict=True))


def test_dynamic_soft_margin_keeps_a_histogram():
    """Values are the original's; its gradient also runs through the weights, so a second backward fails there."""
    rows, labels = batch("uneven", 3)
    ours, other = built("DynamicSoftMarginLoss", "-3.0, 12, 0.2")
    for step in range(3):
        moved = (rows + 0.1 * step).requires_grad_()
        value = ours(moved, labels)
        value.backward()
        with torch.no_grad():
            assert float(value) == pytest.approx(float(other(moved, labels)))
        assert torch.isfinite(moved.grad).all() and moved.grad.any() and not ours.hist_.requires_grad
    view = rows + 0.2
    pair = built("DynamicSoftMarginLoss", "-3.0, 12")
    assert float(pair[0](rows, ref_emb=view)) == pytest.approx(float(pair[1](rows, ref_emb=view, ref_labels=None)))
    wide = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    far = losses.DynamicSoftMarginLoss()(wide, torch.tensor([0, 0, 1, 1]))  # the original has no bin for +2
    assert torch.isfinite(far)


@pytest.mark.parametrize("setting", ["DIM, 4", "DIM, 3, 0.5, 0.6, 0.01", "DIM, 3, 0.0"])
def test_manifold(setting):
    """The original inverts in float32."""
    rows = batch("uneven", 3)[0]
    ours, other = built("ManifoldLoss", setting)
    proxies = torch.arange(len(rows)) % ours.K
    (value, slopes), (expected, theirs_) = (gradients(x, rows, None, proxies) for x in (ours, other))
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(slopes, theirs_, strict=True))
    values = []
    for loss in (ours, other):
        torch.manual_seed(3)
        values.append(float(loss(rows)))
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_manifold_of_the_context_alone_is_finite():
    rows = batch("uneven", 3)[0].float()
    assert (
        torch.isfinite(losses.ManifoldLoss(DIM, 4, float("inf"))(rows))
        and theirs.ManifoldLoss(DIM, 4, float("inf"))(rows).isinf()
    )
    with pytest.raises(ValueError, match="neither labels nor references"):
        losses.ManifoldLoss(DIM, 4)(rows, torch.zeros(len(rows)))
    with pytest.raises(ValueError, match=r"at least K=50 rows, l=6\), got \(15, 6\)"):
        losses.ManifoldLoss(DIM)(rows)


def test_where_the_original_of_the_added_losses_is_wrong():
    twins, labels = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1, 1])
    ours, other = losses.RankedListLoss(0.4, 2, reducer=reducers.SumReducer()), theirs.RankedListLoss(0.4, 2)
    assert ours(twins, labels) > 3 * other(
        twins, labels
    )  # a negative at distance 0 is the hardest, and is dropped there
    rows, other_rows = batch("even", 3)[0].float(), batch("uneven", 4)[0].float()
    labels, reference_labels = batch("even", 3)[1], batch("uneven", 4)[1]
    mine = losses.ThresholdConsistentMarginLoss()(rows, labels, ref_emb=other_rows, ref_labels=reference_labels)
    turned = other_rows.flip(0), reference_labels.flip(0)
    assert mine == pytest.approx(
        losses.ThresholdConsistentMarginLoss()(rows, labels, ref_emb=turned[0], ref_labels=turned[1]).item()
    )
    same = torch.ones(2, 3, 2).flatten(0, 1)  # cosine 1 has no bin there
    assert torch.isfinite(losses.HistogramLoss()(same, torch.tensor([0, 0, 0, 1, 1, 1])))
