"""Samplers: which items share a batch; seeded, rank-aware, resumable.

    sampler = ClassBalanced(labels, classes=32, per_class=4, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=8)

A batch is a pure function of (arguments, epoch, index), `sampler.batch(epoch, index)`: equal arguments give equal
batches on every machine, Python and NumPy. `ClassBalanced` is the usual choice; `ClassRatio` for the facility-location
loss, `PairPerClass` for N-pair, `LabelNeighbours` for log-ratio, `HardNegatives` for lifted structure, `HardClasses` to
put near classes into the same batch. `EpochSampler` describes epochs, resuming and ranks.
"""

from nearkin.samplers.base import EpochSampler
from nearkin.samplers.class_balanced import ClassBalanced, ClassRatio
from nearkin.samplers.hard_classes import HardClasses, PairPerClass
from nearkin.samplers.hard_negatives import HardNegatives
from nearkin.samplers.label_neighbours import LabelNeighbours

__all__ = [
    "ClassBalanced",
    "ClassRatio",
    "EpochSampler",
    "HardClasses",
    "HardNegatives",
    "LabelNeighbours",
    "PairPerClass",
]


def __dir__() -> list[str]:
    return __all__
