"""The last stage: the chosen models on the test classes, which nothing has used before."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearkin import models
from nearkin.compare.protocol import Job, Setup, TestSet
from nearkin.core import devices
from nearkin.evaluation.retrieval import retrieval_metrics
from nearkin.training.loader import ItemStore, embed
from nearkin.training.prepare import build_encoder
from nearkin.training.run import raw
from nearkin.training.trainer import PRECISIONS
from nearkin.training.validation import HeldOut, groups_of

__all__ = ["BASELINE", "METRICS", "UNTRAINED", "evaluate_models", "model_folder"]

METRICS = ("map@r", "r_precision", "precision@1")
UNTRAINED, BASELINE = "untrained", "baseline"  # references that every loss has to beat


def model_folder(home: Path, job: Job) -> Path:
    """Where the best encoder of a final training is saved."""
    return home / job.loss / f"seed{job.seed}-fold{job.fold + 1}"


def evaluate_models(setup: Setup, test_set: TestSet, job: Job, home: Path) -> dict[str, NDArray[np.float64]]:
    """{"separated": (F, Q, M), "concatenated": (Q, M)}: METRICS per query, for the models of one loss and seed.

    Separated: each fold's model by itself. Concatenated: their unit embeddings side by side, as one of F times the
    dimensions (Musgrave et al. 2020, section 4.1).
    """
    device, recipe = setup.recipe.device, setup.recipe
    store = ItemStore(test_set.prepared.rows, device, recipe.data.size)
    places = test_set.held_out.everything
    rows: list[Tensor] = []
    for fold in range(job.folds):
        one = job._replace(fold=fold)
        prepared = setup.prepared(one._replace(loss="contrastive") if job.loss in (UNTRAINED, BASELINE) else one)
        precision = PRECISIONS[prepared.recipe.training.precision or "fp32"]
        if job.loss == BASELINE and prepared.baseline != "frozen backbone":
            return {"concatenated": _per_query(raw(store, places), test_set.held_out, device)}
        if job.loss in (UNTRAINED, BASELINE):
            encoder = build_encoder(prepared).to(device)
        else:
            encoder = models.load(model_folder(home, one), device)[0]
        rows.append(embed(encoder, store, places, precision=precision, features=job.loss == BASELINE))
        if job.loss == BASELINE:
            return {"concatenated": _per_query(rows[0], test_set.held_out, device)}
    joined = torch.cat([nn.functional.normalize(part, dim=1) for part in rows], dim=1)
    separated = np.stack([_per_query(part, test_set.held_out, device) for part in rows])
    return {"separated": separated, "concatenated": _per_query(joined, test_set.held_out, device)}


def _per_query(rows: Tensor, held_out: HeldOut, device: torch.device) -> NDArray[np.float64]:
    """(Q, M); NaN where a query has nothing to find."""
    assert held_out.labels is not None
    device = devices.exact(device)
    count, labels = len(held_out.indices), torch.from_numpy(held_out.labels).to(device)
    queries, gallery, gallery_labels = rows[:count].to(device), None, None
    if held_out.gallery is not None:
        assert held_out.gallery_labels is not None
        gallery, gallery_labels = rows[count:].to(device), torch.from_numpy(held_out.gallery_labels).to(device)
    grouped = groups_of(held_out, device)
    figures = retrieval_metrics.per_query(queries, labels, gallery, gallery_labels, ks=(), metrics=METRICS, **grouped)
    return torch.stack([figures[name] for name in METRICS], dim=1).numpy()
