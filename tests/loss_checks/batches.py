"""Degenerate and bad batches: a finite value and finite gradients, or one sentence that names the argument.

Only NaN or Inf among embeddings or references may give NaN, and then they always do.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import nearkin
from cases import CLASSES, DIM, Case
from loss_checks.outcome import assert_same, covering, least_room, odd_batch, room, run
from loss_checks.properties import holds, in_blocks, pairs
from nearkin import relations

KINDS = ("float64", "float32", "bfloat16", "float16", "autocast")
POISON = (float("nan"), float("inf"), -float("inf"))
SITUATIONS = (
    *("empty", "one item", "one class", "all distinct", "duplicated rows", "all the same", "zero vectors"),
    *("all zero", "cosine one", "all unknown", "norms 1e30", "norms 1e-30"),
)


def set_up(case: Case, kind: str) -> tuple[Any, ...]:
    """A module, a batch in the kind's type, and the context to run in."""
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    module = case.build(torch.float64 if kind == "float64" else torch.float32)
    context = torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else contextlib.nullcontext()
    return module, *case.batch(dtype), context


def situated(case: Case, x: Tensor, labels: Tensor, situation: str) -> tuple[Tensor, Tensor]:
    """The batch in one of the situations."""
    ids = torch.arange(CLASSES).repeat(len(x) // CLASSES)
    match situation:
        case "empty":
            return x[:0], labels[:0]
        case "one item":
            return x[:1], labels[:1]
        case "one class":
            return x, labels * 0
        case "all distinct":
            return x[:CLASSES], case.targets(torch.arange(CLASSES))
        case "duplicated rows":
            return x[ids], labels
        case "all the same":
            return x[:1].expand_as(x), labels
        case "zero vectors":
            return torch.cat([x[:6] * 0, x[6:]]), labels
        case "all zero":
            return x * 0, labels
        case "cosine one":
            y = torch.zeros_like(x)
            y[:, 0] = torch.where(ids % 2 == 0, 2.0, -2.0).to(x.dtype)
            return y, labels
        case "all unknown":
            return x, labels if case.graded else torch.full_like(labels, -1)
    y = x.double()
    return (y / y.norm(dim=1, keepdim=True) * float(situation.removeprefix("norms "))).to(x.dtype), labels


@holds()
def degenerate_batches_are_finite(case: Case) -> None:
    """Value, every gradient and the state: in each situation, in some type, training or not, and in blocks."""
    for row in covering(case, situation=SITUATIONS, kind=KINDS, training=(True, False)):
        situation, kind = row["situation"], row["kind"]
        if (situation, kind) == ("norms 1e30", "float16"):  # Inf in float16
            kind = "bfloat16"
        module, x, labels, context = set_up(case, kind)
        module.train(row["training"])
        x, labels = situated(case, x, labels, situation)
        if situation == "cosine one":
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.dim() == 2:  # class weights exactly along and against the items
                        parameter.zero_()[:, 0] = 1.0
                        parameter[1::2, 0] = -1.0
        with context:
            got = run(module, module, x, labels)
        assert all(bool(tensor.isfinite().all()) for tensor in got), row
        if situation in ("empty", "all unknown") and not case.graded:
            assert float(got[0]) == 0 and not got[1].any(), row
        state = [t for t in module.state_dict().values() if t.is_floating_point()]
        assert all(bool(t.isfinite().all()) for t in state), row
        if kind == "float64" and in_blocks(case) and len(x):
            module.max_memory = room(1, x)
            assert_same(run(module, module, x, labels), got, 1e-9)


@holds(in_blocks)
def degenerate_batches_in_blocks_are_those_in_one_piece(case: Case) -> None:
    """One item, no kin, no strangers, nobody known, nobody, everybody in one point; against one reference and none."""
    x, labels = odd_batch(case)
    ids = torch.arange(CLASSES) if not case.graded else labels[:CLASSES]
    unknown = labels if case.graded else torch.full_like(labels, -1)
    situations = [(x[:1], labels[:1]), (x[:CLASSES], ids), (x, labels * 0), (x, unknown), (x[:0], labels[:0])]
    situations += [(x[:1].expand_as(x), labels), (x, labels, x[:1] + 0.1, labels[:1]), (x, labels, x[:0], labels[:0])]
    for batch in situations:
        module = case.build()
        wanted = run(module, module, *batch)
        module.max_memory = least_room(case, batch[0], batch[2] if len(batch) > 2 else batch[0])
        assert_same(run(module, module, *batch), wanted, 1e-11)


@holds(pairs)
def no_references_are_no_signal(case: Case) -> None:
    """0 with finite gradients; but for a penalty on the embeddings' own lengths."""
    for row in covering(case, kind=KINDS):
        module, x, labels, context = set_up(case, row["kind"])
        with context:
            value, *gradients = run(module, module, x, labels, x[:0], labels[:0])
        assert all(bool(g.isfinite().all()) for g in gradients)
        assert float(value) == 0 or "NPair" in case.name


@holds()
def poison_is_never_a_plausible_number(case: Case) -> None:
    """NaN or Inf in any row, also of an item without a class, in references, in blocks: NaN; a sentence if strict."""
    places = ["batch", "unknown", *["references", "blocks"][: 2 * case.pairs]]
    for row in covering(case, kind=KINDS, poison=POISON, where=places, at=(0, 1, 2, 5)):
        module, x, labels, context = set_up(case, row["kind"])
        at = row["at"]
        spoilt = x.clone()
        spoilt[at, at % DIM] = row["poison"]
        if row["where"] == "unknown" and not case.graded:
            labels = torch.where(torch.arange(len(labels)) == at, -1, labels)
        if row["where"] == "blocks" and in_blocks(case):
            module.max_memory = room(2, x)
        batch = (x, labels, spoilt, labels) if row["where"] == "references" else (spoilt, labels)
        with context:
            assert bool(module(*batch).isnan()), row
            name = "references" if row["where"] == "references" else "embeddings"
            with nearkin.strict(), pytest.raises(ValueError, match=f"{name} must be finite"):
                module(*batch)


@holds()
def labels_of_a_wrong_kind_get_a_sentence(case: Case) -> None:
    """Too few, elsewhere, a list, names, switches, complex, of three axes, and numbers where ids are needed."""
    for row in covering(case, kind=KINDS):
        module, x, labels, context = set_up(case, row["kind"])
        wrong = [
            (labels[:-1], ValueError),
            (labels.to("meta"), ValueError),
            (labels.tolist(), TypeError),
            ([f"class {label}" for label in labels.tolist()], TypeError),
            (labels > 1, TypeError),
            (labels.to(torch.complex64), TypeError),
            (labels[:, None, None], ValueError),
        ]
        with context:
            for bad, error in wrong if case.graded else [*wrong, (labels.float(), TypeError)]:
                with pytest.raises(error, match="labels must"):
                    module(x, bad)
            torch.testing.assert_close(module.eval()(x, labels.to(torch.int32)), module(x, labels.long()))


def knows_its_classes(case: Case) -> bool:
    """Has something for each class."""
    return (not case.pairs or "classes" in case.name) and "Facility" not in case.name and "dynamic" not in case.name


@holds(knows_its_classes)
def labels_out_of_range_get_a_sentence_or_nan(case: Case) -> None:
    """A sentence where values are read; NaN, and never an index error, where they are not, as on an accelerator."""
    for bad in (CLASSES, 10**12, -2):
        module, x, labels, _ = set_up(case, "float32")
        wrong = torch.where(labels == 1, bad, labels)
        with pytest.raises(ValueError, match=rf"labels must be in 0..{CLASSES - 1} \(or -1 for unknown\), got {bad}"):
            module(x, wrong)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nearkin.core.checks, "reads_values", lambda tensor: False)
            assert bool(module(x, torch.where(torch.arange(len(x)) == 1, bad, labels)).isnan())


@holds()
def embeddings_of_a_wrong_kind_get_a_sentence(case: Case) -> None:
    """Whole numbers, a list, one axis, three, no columns; and another length than class weights have."""
    module, x, labels, _ = set_up(case, "float32")
    wrong = ((x.long(), TypeError), (x.tolist(), TypeError), (x[:, 0], ValueError), (x[None], ValueError))
    for bad, error in (*wrong, (x[:, :0], ValueError)):
        with pytest.raises(error, match="embeddings must"):
            module(bad, labels)
    if (not case.pairs or "Siamese" in case.name) and "Facility" not in case.name:
        with pytest.raises(ValueError, match=r"dimension"):
            module(torch.randn(len(x), DIM + 1), labels)


@holds(pairs)
def references_of_a_wrong_kind_get_a_sentence(case: Case) -> None:
    """Of another length, elsewhere, without labels, labels without them; masks that may mean two things."""
    module, x, labels, _ = set_up(case, "float32")
    square = torch.ones(len(x), len(x), dtype=torch.bool)
    wrong = [
        ((labels, torch.randn(3, DIM + 1), labels[:3]), f"references must have {DIM} dimensions .*, got {DIM + 1}"),
        ((labels, x.to("meta"), labels), "references must be on the device of embeddings"),
        ((labels, x[:3], labels[:2]), "reference_labels must have one entry per row of references: 3 rows, 2 labels"),
        ((labels, x[:3]), "reference_labels must be given with references"),
        ((labels, None, labels), "reference_labels need references"),
    ]
    if not case.graded:
        wrong += [((square,), "may be multi-label rows or a relation; say which")]
        wrong += [((relations.explicit(square[:3]),), r"labels\.positive must have shape")]
    for batch, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            module(x, *batch)
