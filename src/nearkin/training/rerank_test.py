"""Re-ranking in the final test: settings chosen on the validation classes, measured on the test classes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin import models
from nearkin.evaluation.retrieval import rerank_choice, rerank_settings
from nearkin.training.loader import embed
from nearkin.training.prepare import Prepared
from nearkin.training.trainer import PRECISIONS, Trainer
from nearkin.training.validation import METRICS, HeldOut, groups_of, query_and_gallery

__all__ = ["rerank_results", "validation_rows"]


def validation_rows(trainer: Trainer, encoder: models.Encoder, prepared: Prepared) -> Tensor | None:
    """Embeddings of the validation items, where the recipe's `evaluation.rerank` leaves settings to be chosen."""
    rerank = trainer.recipe.evaluation.rerank
    if rerank is None or rerank_settings.has_settings(rerank):
        return None
    precision = PRECISIONS[trainer.recipe.training.precision or "fp32"]
    options: dict[str, Any] = {"precision": precision, "group": trainer.group}
    return embed(encoder, trainer.store, prepared.held_out("val").everything, **options)


def rerank_results(
    rows: Tensor, held_out: HeldOut, validation: Tensor | None, val: HeldOut, recipe: Any, device: torch.device
) -> dict[str, Any]:
    """As `rerank_choice.figures`, and "chosen": how the settings were found; None where the recipe has them."""
    settings, chosen = rerank_settings.settings_of(recipe.evaluation.rerank), None
    if validation is not None:
        on, labels, _, _ = query_and_gallery(validation, val, device)
        best = rerank_choice.choose_rerank(on, labels, settings.name, **groups_of(val, device))
        settings = best.settings
        tried = [rerank_settings.fields(one) | {"map@r": value} for one, value in best.tried]
        chosen = {"items": len(on), "classes": len(torch.unique(labels)), "plain": best.plain, "tried": tried}
    options: dict[str, Any] = {"metrics": METRICS, "interval": recipe.evaluation.interval}
    options |= groups_of(held_out, device)
    if recipe.evaluation.ks is not None:
        options["ks"] = recipe.evaluation.ks
    result = rerank_choice.figures(*query_and_gallery(rows, held_out, device), settings, **options)
    content: dict[str, Any] = _plain(result)
    return {"chosen": chosen} | content


def _plain(value: Any) -> Any:
    """As JSON has it: None for NaN."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
