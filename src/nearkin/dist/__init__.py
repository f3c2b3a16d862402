"""Several processes as one: collectives, the global batch, the process group, its heartbeat, DDP and FSDP."""

from nearkin.dist.global_batch import GlobalBatch, average_gradients, share_state
from nearkin.dist.group import ProcessGroup
from nearkin.dist.rendezvous import join

__all__ = ["GlobalBatch", "ProcessGroup", "average_gradients", "join", "share_state"]


def __dir__() -> list[str]:
    return __all__
