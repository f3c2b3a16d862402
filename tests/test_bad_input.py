"""Bad settings of losses, and the switch that reads values; bad batches are in `loss_checks/batches.py`."""

import re

import pytest
import torch

import nearkin


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
