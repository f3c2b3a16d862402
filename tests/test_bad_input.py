"""The matrix of bad and degenerate input: a finite value and finite gradients, or one sentence naming the argument.

Only NaN or Inf among the embeddings may give NaN, and then they always do.
"""

import contextlib
import re

import pytest
import torch

import nearkin
from cases import CLASSES, DIM, LOSSES

every = pytest.mark.parametrize("case", LOSSES, ids=str)
KINDS = ["float64", "float32", "bfloat16", "float16", "autocast"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def set_up(case, kind):
    """A module, a batch in the kind's type, and the context to run in."""
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    module = case.build(torch.float64 if kind == "float64" else torch.float32)
    context = torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else contextlib.nullcontext()
    return module, *case.batch(dtype), context


def run(module, x, labels, context):
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with context:
        value = module(x, labels)
    value.backward()
    return value.detach(), [x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def batch_of(case, x, labels, situation):
    ids = torch.arange(CLASSES).repeat(len(x) // CLASSES)
    if situation == "empty":
        return x[:0], labels[:0]
    if situation == "one item":
        return x[:1], labels[:1]
    if situation == "one class":
        return x, labels * 0
    if situation == "all distinct":
        return x[:CLASSES], case.targets(torch.arange(CLASSES))
    if situation == "duplicated rows":
        return x[ids], labels
    if situation == "all the same":
        return x[:1].expand_as(x), labels
    if situation == "zero vectors":
        return torch.cat([x[:6] * 0, x[6:]]), labels
    if situation == "all zero":
        return x * 0, labels
    if situation == "cosine one":
        y = torch.zeros_like(x)
        y[:, 0] = torch.where(ids % 2 == 0, 2.0, -2.0).to(x.dtype)
        return y, labels
    if situation == "all unknown":
        return x, labels if case.graded else torch.full_like(labels, -1)
    scale = {"norms 1e30": 1e30, "norms 1e-30": 1e-30}[situation]
    y = x.double()
    return (y / y.norm(dim=1, keepdim=True) * scale).to(x.dtype), labels


SITUATIONS = [
    "empty",
    "one item",
    "one class",
    "all distinct",
    "duplicated rows",
    "all the same",
    "zero vectors",
    "all zero",
    "cosine one",
    "all unknown",
    "norms 1e30",
    "norms 1e-30",
]


@every
@every_kind
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_degenerate_batches_are_finite(case, kind, training):
    for situation in SITUATIONS:
        module, x, labels, context = set_up(case, kind)
        module.train(training)
        x, labels = batch_of(case, x, labels, situation)
        if situation == "cosine one":
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.dim() == 2:  # class weights exactly along and against the items
                        parameter.zero_()[:, 0] = 1.0
                        parameter[1::2, 0] = -1.0
        value, gradients = run(module, x, labels, context)
        for name, tensor in [("value", value), *(("gradient", g) for g in gradients)]:
            if situation == "norms 1e30" and kind == "float16":  # Inf in float16
                continue
            assert bool(tensor.isfinite().all()), f"{situation}: {name} is {tensor}"
        if situation in ("empty", "all unknown") and not case.graded:
            assert float(value) == 0 and bool((gradients[0] == 0).all()), situation
        state = [t for t in module.state_dict().values() if t.is_floating_point()]
        assert all(bool(t.isfinite().all()) for t in state), f"{situation}: state"


@every_kind
@pytest.mark.parametrize("case", [c for c in LOSSES if c.pairs], ids=str)
def test_no_references_are_no_signal(case, kind):
    module, x, labels, context = set_up(case, kind)
    x.requires_grad_()
    with context:
        value = module(x, labels, x[:0].detach(), labels[:0])
    value.backward()
    assert bool((x.grad.isfinite()).all())
    if "NPair" not in case.name:
        assert float(value.detach()) == 0


@every
@every_kind
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_poison_is_never_a_plausible_number(case, kind, poison):
    for row in range(3):
        for spoil_label in (False, True):
            module, x, labels, context = set_up(case, kind)
            x = x.clone()
            x[row, row] = poison
            if spoil_label and not case.graded:
                labels = labels.clone()
                labels[row] = -1  # even where nothing is learned from the row
            value, _ = run(module, x, labels, context)
            assert bool(value.isnan()), f"row {row}: {value}"
    module, x, labels, context = set_up(case, kind)
    x[0, 0] = poison
    with nearkin.strict(), context, pytest.raises(ValueError, match="embeddings must be finite"):
        module(x, labels)


@every
@every_kind
def test_labels_of_every_wrong_kind(case, kind):
    module, x, labels, context = set_up(case, kind)
    wrong = {
        "wrong length": (labels[:-1], ValueError),
        "other device": (labels.to("meta"), ValueError),
        "a list": (labels.tolist(), TypeError),
        "bool": (labels > 1, TypeError),
        "complex": (labels.to(torch.complex64), TypeError),
        "three axes": (labels[:, None, None], ValueError),
    }
    if not case.graded:
        wrong["float"] = (labels.float(), TypeError)
    with context:
        for name, (bad, error) in wrong.items():
            with pytest.raises(error, match="labels must"):
                module(x, bad), name
    with context:
        torch.testing.assert_close(module.eval()(x, labels.to(torch.int32)), module(x, labels.long()))


@pytest.mark.parametrize("case", [c for c in LOSSES if not c.pairs or "classes" in c.name], ids=str)
def test_labels_out_of_range(case):
    module, x, labels, _ = set_up(case, "float32")
    if "Facility" in case.name or "dynamic" in case.name:
        pytest.skip("any id is a class here")
    for bad in (CLASSES, 10**12, -2):
        with pytest.raises(ValueError, match=rf"labels must be in 0..{CLASSES - 1} \(or -1 for unknown\), got {bad}"):
            module(x, torch.where(labels == 1, bad, labels))


@pytest.mark.parametrize("case", [c for c in LOSSES if not c.pairs or "classes" in c.name], ids=str)
def test_labels_out_of_range_are_nan_where_values_are_not_read(case, monkeypatch):
    """What an accelerator does, shown on the CPU: a bad row gives NaN, never an index error."""
    if "Facility" in case.name or "dynamic" in case.name:
        pytest.skip("any id is a class here")
    monkeypatch.setattr(nearkin.core.checks, "reads_values", lambda tensor: False)
    for bad in (CLASSES, 10**12, -2):
        module, x, labels, _ = set_up(case, "float32")
        value = module(x, torch.where(torch.arange(len(labels)) == 1, bad, labels))
        assert bool(value.isnan())


@every
def test_embeddings_of_every_wrong_kind(case):
    module, x, labels, _ = set_up(case, "float32")
    for bad, error in ((x.long(), TypeError), (x.tolist(), TypeError), (x[:, 0], ValueError), (x[None], ValueError)):
        with pytest.raises(error, match="embeddings must"):
            module(bad, labels)
    with pytest.raises(ValueError, match="embeddings must"):
        module(x[:, :0], labels)
    if not case.pairs or "Siamese" in case.name:
        with pytest.raises(ValueError, match=r"dimension") if "Facility" not in case.name else contextlib.nullcontext():
            module(torch.randn(len(x), DIM + 1), labels)


@pytest.mark.parametrize("case", [c for c in LOSSES if c.pairs], ids=str)
def test_references_of_every_wrong_kind(case):
    module, x, labels, _ = set_up(case, "float32")
    with pytest.raises(ValueError, match=f"references must have {DIM} dimensions as embeddings have, got {DIM + 1}"):
        module(x, labels, torch.randn(3, DIM + 1), labels[:3])
    with pytest.raises(ValueError, match="references must be on the device of embeddings"):
        module(x, labels, x.to("meta"), labels)
    message = "reference_labels must have one entry per row of references: 3 rows, 2 labels"
    with pytest.raises(ValueError, match=message):
        module(x, labels, x[:3], labels[:2])
    with pytest.raises(ValueError, match="reference_labels must be given with references"):
        module(x, labels, x[:3])
    with pytest.raises(ValueError, match="reference_labels need references"):
        module(x, labels, None, labels)
    if not case.graded:
        square = torch.ones(len(x), len(x), dtype=torch.bool)
        with pytest.raises(ValueError, match="may be multi-label rows or a relation; say which"):
            module(x, square)
        with pytest.raises(ValueError, match=r"labels\.positive must have shape"):
            module(x, nearkin.relations.explicit(square[:3]))


def test_strict_reads_values_where_they_would_not_be_read(monkeypatch):
    labels = torch.tensor([0, 9])
    checks = nearkin.core.checks
    seen = []
    monkeypatch.setattr(checks, "reads_values", lambda t, f=checks.reads_values: seen.append(f(t)) or f(t))
    with nearkin.strict(), pytest.raises(ValueError, match=r"labels must be in 0\.\.3"):
        nearkin.losses.CosFaceLoss(4, 2)(torch.randn(2, 2), labels)
    assert all(seen)


def test_bad_settings_fail_when_the_loss_is_made():
    from nearkin import losses as made

    for make, words in [
        (lambda: made.TripletLoss(margin=-1), "margin must be >= 0, got -1"),
        (lambda: made.SupConLoss(temperature=0), "temperature must be > 0, got 0"),
        (lambda: made.TripletLoss(selection="semi_hard"), 'unknown selection "semi_hard"; did you mean "semihard"?'),
        (lambda: made.TripletLoss(selection="hard_negatives"), "it selects pairs; possible: all, hard, semihard"),
        (lambda: made.TripletLoss(None, selection="all"), "needs a margin and no swap; possible: hard"),
        (lambda: made.ContrastiveLoss(selection="distance_weighted"), "needs unit vectors, normalize=True; possible"),
        (lambda: made.MultiSimilarityLoss(selection="hard"), "the loss weighs pairs, not triplets; possible: all"),
        (
            lambda: made.LiftedStructureLoss(form="soft"),
            'unknown form "soft"; did you mean "smooth"? known: smooth, max',
        ),
        (lambda: made.AdaCosLoss(2, 8), "num_classes must be >= 3, got 2"),
        (lambda: made.ArcFaceLoss(0, 8), "num_classes must be >= 1, got 0"),
        (lambda: made.FastAPLoss(bins=0), "bins must be >= 1, got 0"),
        (lambda: made.HeatedSoftmaxLoss(3, 4, norm="layer"), 'unknown norm "layer"; known: l2, batch'),
    ]:
        with pytest.raises(ValueError, match=re.escape(words)):
            make()
    for make, words in [
        (lambda: made.TripletLoss("semihard"), "margin must be a number, got 'semihard'"),
        (lambda: made.SupConLoss(temperature=None), "temperature must be a number, got None"),
        (lambda: made.ArcFaceLoss(4, 8, margin="0.5"), "margin must be a number, got '0.5'"),
        (lambda: made.ArcFaceLoss(4.0, 8), "num_classes must be a whole number, got 4.0"),
        (lambda: made.FastAPLoss(bins=True), "bins must be a whole number, got True"),
    ]:
        with pytest.raises(TypeError, match=re.escape(words)):
            make()
