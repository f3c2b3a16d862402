"""What a run says of itself when it starts: chunks, an old run, pairs that cannot be verified, several ranks."""

import torch

from nearkin.training import final_test, grad_cache
from nearkin.training.cross_retrieval import CROSS, cross_metrics
from nearkin.training.prepare import Prepared
from nearkin.training.trainer import Trainer

__all__ = ["chunk_note", "old_note", "pairs_note", "rank_notes"]


def chunk_note(trainer: Trainer) -> list[str]:
    chunk, batch = trainer.recipe.training.chunk, trainer.recipe.sampler["batch"]
    if chunk is None or chunk >= batch or not grad_cache.uses_batch_statistics(trainer.encoder):
        return []
    return [
        f"batch norm takes its statistics from chunks of {chunk}, not from the batch of {batch}; "
        f"encoder.freeze_norms=true makes the gradient that of the whole batch"
    ]


def old_note(trainer: Trainer) -> list[str]:
    """What validation gives for the old run alone: new queries among its rows should find more."""
    if trainer.old is None:
        return []
    held_out = trainer.held_out
    rows = trainer.old.rows[torch.from_numpy(held_out.everything)]
    figures = trainer.group.on_rank0(
        "validation", lambda: cross_metrics(rows, rows, held_out, trainer.graded, trainer.device)
    )
    values = ", ".join(f"{name.removeprefix(CROSS)} {100 * value:.1f} %" for name, value in figures.items())
    return [f"validation of {trainer.old.record['run']} among its own rows: {values or 'nothing to find'}"]


def pairs_note(prepared: Prepared) -> list[str]:
    why = final_test.unverifiable(prepared.test_pairs())
    return [] if why is None else [f"the source's pairs are not verified: {why}"]


def rank_notes(trainer: Trainer) -> list[str]:
    """What several ranks do differently from one process."""
    size, options = trainer.group.size, trainer.recipe.training
    if size == 1:
        return []
    notes = [f"trained on {size} ranks, with the loss of all their items"]
    if options.graphs:
        notes.append("several ranks do not use CUDA graphs")
    if grad_cache.uses_batch_statistics(trainer.encoder) and not options.sync_norms:
        share = trainer.recipe.sampler["batch"] // size
        notes.append(
            f"batch norm takes its statistics from the {share} items of each rank; training.sync_norms=true takes "
            f"them from all, as one process would, and encoder.freeze_norms=true needs none"
        )
    return notes
