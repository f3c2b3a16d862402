"""The last stage: what the chosen models are worth on classes that nothing has looked at before."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearkin import models
from nearkin.compare.protocol import Bench, Job, Opened
from nearkin.evaluation.retrieval import retrieval_metrics
from nearkin.training.loader import ItemStore, embed
from nearkin.training.prepare import build_encoder
from nearkin.training.run import raw
from nearkin.training.trainer import PRECISIONS
from nearkin.training.validation import HeldOut

__all__ = ["BASELINE", "METRICS", "UNTRAINED", "model_folder", "test"]

METRICS = ("map@r", "r_precision", "precision@1")
UNTRAINED, BASELINE = "untrained", "baseline"  # what every loss has to beat


def model_folder(home: Path, job: Job) -> Path:
    """Where the best encoder of a final training is kept."""
    return home / job.loss / f"seed{job.seed}-fold{job.fold + 1}"


def test(bench: Bench, opened: Opened, job: Job, home: Path) -> dict[str, NDArray[np.float64]]:
    """{"separated": (F, Q, M), "concatenated": (Q, M)}: METRICS query by query, of the models of one loss and seed.

    Separated: each fold's model by itself. Concatenated: their unit embeddings side by side, as one of F times the
    dimensions (Musgrave et al. 2020, section 4.1).
    """
    on, recipe = bench.recipe.device, bench.recipe
    store = ItemStore(opened.prepared.rows, on, recipe.data.size)
    places = opened.held.everything
    rows: list[Tensor] = []
    for fold in range(job.folds):
        one = job._replace(fold=fold)
        prepared = bench.prepared(one._replace(loss="contrastive") if job.loss in (UNTRAINED, BASELINE) else one)
        precision = PRECISIONS[prepared.recipe.training.precision or "fp32"]
        if job.loss == BASELINE and prepared.baseline != "frozen backbone":
            return {"concatenated": _per_query(raw(store, places), opened.held, on)}
        if job.loss in (UNTRAINED, BASELINE):
            encoder = build_encoder(prepared).to(on)
        else:
            encoder = models.load(model_folder(home, one), on)[0]
        rows.append(embed(encoder, store, places, precision=precision, features=job.loss == BASELINE))
        if job.loss == BASELINE:
            return {"concatenated": _per_query(rows[0], opened.held, on)}
    joined = torch.cat([nn.functional.normalize(part, dim=1) for part in rows], dim=1)
    separated = np.stack([_per_query(part, opened.held, on) for part in rows])
    return {"separated": separated, "concatenated": _per_query(joined, opened.held, on)}


def _per_query(rows: Tensor, held: HeldOut, on: torch.device) -> NDArray[np.float64]:
    """(Q, M); NaN where a query has nothing to find."""
    assert held.labels is not None
    count, labels = len(held.indices), torch.from_numpy(held.labels).to(on)
    queries, gallery, gallery_labels = rows[:count].to(on), None, None
    if held.gallery is not None:
        assert held.gallery_labels is not None
        gallery, gallery_labels = rows[count:].to(on), torch.from_numpy(held.gallery_labels).to(on)
    found = retrieval_metrics.per_query(queries, labels, gallery, gallery_labels, ks=(), metrics=METRICS)
    return torch.stack([found[name] for name in METRICS], dim=1).numpy()
