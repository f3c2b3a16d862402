"""How good embeddings are: ranking, clustering, verification, one-shot, graded; exact search underneath."""

from nearkin.evaluation.allpairs import all_pairs
from nearkin.evaluation.calibration import Calibration, calibrate
from nearkin.evaluation.clustering import clustering
from nearkin.evaluation.diagnosis import diagnose
from nearkin.evaluation.few_shot import omniglot_accuracy, one_shot
from nearkin.evaluation.graded import graded
from nearkin.evaluation.paired import compare
from nearkin.evaluation.ranking import retrieval
from nearkin.evaluation.split import Ranks
from nearkin.evaluation.uncertainty import bootstrap
from nearkin.evaluation.verification import operating_point, verification

__all__ = [
    "Calibration",
    "Ranks",
    "all_pairs",
    "bootstrap",
    "calibrate",
    "clustering",
    "compare",
    "diagnose",
    "graded",
    "omniglot_accuracy",
    "one_shot",
    "operating_point",
    "retrieval",
    "verification",
]


def __dir__() -> list[str]:
    return __all__
