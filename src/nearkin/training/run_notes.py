"""What a run says of itself when it starts: chunks, pairs that cannot be verified, several ranks."""

from nearkin.training import final_test, grad_cache
from nearkin.training.prepare import Prepared
from nearkin.training.trainer import Trainer

__all__ = ["chunk_note", "pairs_note", "rank_notes"]


def chunk_note(trainer: Trainer) -> list[str]:
    chunk, batch = trainer.recipe.training.chunk, trainer.recipe.sampler["batch"]
    if chunk is None or chunk >= batch or not grad_cache.uses_batch_statistics(trainer.encoder):
        return []
    return [
        f"batch norm takes its statistics from chunks of {chunk}, not from the batch of {batch}; "
        f"encoder.freeze_norms=true makes the gradient that of the whole batch"
    ]


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
