"""What a finished training is measured against, and the figures that it leaves behind."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin import models
from nearkin.core import files
from nearkin.core.versions import version_of
from nearkin.dist import collectives
from nearkin.training import validation
from nearkin.training.improvement import verdict
from nearkin.training.loader import ItemStore, embed
from nearkin.training.prepare import Prepared, build_encoder
from nearkin.training.trainer import PRECISIONS, Trainer

__all__ = ["contenders", "explained", "raw", "results", "unwrapped"]

_PIXELS = 32  # side to which pictures are reduced before their pixels are compared


def explained(trainer: Trainer, what: str) -> AbstractContextManager[None]:
    """A file at the end of a run that cannot be written is one sentence."""
    way_out = f"training is done and saved: make room, then nearkin train --resume {trainer.out}"
    return files.explained(f"{trainer.out}: {what}", way_out)


def contenders(
    trainer: Trainer, encoder: models.Encoder, prepared: Prepared, held: validation.Held
) -> dict[str, Callable[[], Tensor]]:
    """What is tested: the trained encoder, the same one untrained, and what could be had without training."""
    recipe, store, indices = trainer.recipe, trainer.store, held.everything
    precision = PRECISIONS[recipe.training.precision or "fp32"]

    def trained() -> Tensor:
        return embed(encoder, store, indices, precision=precision, group=trainer.group)

    def untrained() -> Tensor:
        return embed(
            build_encoder(prepared).to(trainer.device), store, indices, precision=precision, group=trainer.group
        )

    def baseline() -> Tensor:
        if prepared.baseline == "frozen backbone":
            fresh = build_encoder(prepared).to(trainer.device)
            return embed(fresh, store, indices, precision=precision, features=True, group=trainer.group)
        return raw(store, indices)

    return {"trained": trained, "untrained": untrained, "baseline": baseline}


def raw(store: ItemStore, indices: NDArray[np.int64]) -> Tensor:
    """The items themselves as vectors: pixels, of large pictures reduced ones."""
    parts = []
    for start in range(0, len(indices), 256):
        seen = store.eval_view(store.gather(indices[start : start + 256])).float()
        if seen.dim() == 4 and seen.shape[-1] > 2 * _PIXELS:
            seen = torch.nn.functional.interpolate(seen, size=(_PIXELS, _PIXELS), mode="area")
        parts.append(seen.flatten(1).cpu())
    return torch.cat(parts)


def results(
    trainer: Trainer, prepared: Prepared, held: validation.Held, rows: dict[str, Tensor], facts: dict[str, Any]
) -> dict[str, Any]:
    """Every contender measured; results.json."""
    recipe, state = trainer.recipe, trainer.state
    options: dict[str, Any] = {"ks": recipe.evaluation.ks, "interval": recipe.evaluation.interval}
    options["seed"] = recipe.training.seed
    tested = {name: validation.test(x, held, trainer.graded, trainer.device, **options) for name, x in rows.items()}
    settings: dict[str, Any] = {"baseline": prepared.baseline, "seed": recipe.training.seed}
    judged = verdict(rows, held, trainer.graded, trainer.device, **settings)
    found = {
        "nearkin": version_of("nearkin"),
        "source": recipe.data.source,
        "protocol": prepared.parts.note,
        "test": tested,
        "baseline": prepared.baseline,
        "verdict": judged,
        "val": facts["val"] | {"epoch": facts["epoch"], "step": facts["step"]},
        "items": {name: len(part) for name, part in prepared.sizes().items()},
        "classes": prepared.class_counts(),
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
        "epochs": state.epoch,
        "steps": state.step,
        "seconds": state.seconds,
        "peak_bytes": _peak(trainer.device),
        "notes": state.notes,
    }
    if recipe.evaluation.interval:
        found["no_interval"] = validation.no_interval(tested["trained"], held)
    if trainer.group.size > 1:
        found["ranks"] = trainer.group.size
    found |= validation.more(rows["trained"], held, prepared.test_pairs(), recipe, trainer.device)
    with explained(trainer, "results.json"):
        files.write_json(trainer.out / "results.json", found)
    return found


def unwrapped(encoder: models.Encoder, prepared: Prepared) -> models.Encoder:
    """The encoder as `models.build` makes it, without what several ranks have put into it."""
    if collectives.size() == 1:
        return encoder
    plain = build_encoder(prepared)
    plain.load_state_dict(encoder.state_dict())
    return plain


def _peak(on: torch.device) -> int | None:
    """The most bytes in use at once; None on a system that does not tell, as Windows."""
    if on.type == "cuda":
        return torch.cuda.max_memory_allocated(on)
    try:
        import resource
    except ImportError:
        return None
    most: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # type: ignore[attr-defined, unused-ignore]
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes, others KiB
