"""What tests of calibrated answers share: a calibration written by hand, and embeddings of classes."""

import numpy as np

from nearkin.gallery import results


def calibration_by_hand(at, log_ratio, classes=60):
    """at: {threshold: (bound of the FAR, TAR)}; log_ratio: {similarity: value}, from 0 to 1."""
    x, y = zip(*sorted(log_ratio.items()), strict=True)
    bounds, tars = zip(*(at[t] for t in sorted(at)), strict=True)
    curves = {"far": bounds, "far_bound": bounds, "tar": tars, "log_ratio": {"similarity": x, "value": y}}
    plain = {"format": results.FORMAT, "classes": classes, "confidence": 0.95, "impostors": 10**6}
    return plain | {"largest_impostor": 0.95, "thresholds": sorted(at), "examples": {"1": curves}}


def embeddings(classes, each, dim=24, seed=0, spread=0.5, heavy=0.7):
    """Classes of several widths on the sphere, items with heavy tails, by class: (rows, labels)."""
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    width = spread * np.exp(heavy * draw.normal(size=classes))
    tails = np.sqrt(3 / draw.chisquare(3, size=(len(labels), 1)))
    rows = draw.normal(size=(classes, dim))[labels] + width[labels, None] * tails * draw.normal(size=(len(labels), dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels
