"""Metrics of embeddings: retrieval, clustering, verification, few-shot, graded relevance; exact nearest neighbours."""

from nearkin.evaluation.clustering import clustering
from nearkin.evaluation.diagnosis import diagnose
from nearkin.evaluation.few_shot import omniglot_accuracy, one_shot
from nearkin.evaluation.graded import graded
from nearkin.evaluation.group_agreement import bcubed, bcubed_values, pairwise
from nearkin.evaluation.grouping import Grouping, group, smoothed
from nearkin.evaluation.open_set.identification import identification
from nearkin.evaluation.open_set.open_set_metrics import open_set
from nearkin.evaluation.plda import PLDA, fit_plda
from nearkin.evaluation.retrieval.knn import Neighbours, nearest
from nearkin.evaluation.retrieval.nearest_negatives import nearest_negatives
from nearkin.evaluation.retrieval.rerank_choice import ChosenRerank, choose_rerank
from nearkin.evaluation.retrieval.rerank_settings import DBA, AlphaQE, KReciprocal
from nearkin.evaluation.retrieval.reranked import rerank
from nearkin.evaluation.retrieval.retrieval_metrics import retrieval
from nearkin.evaluation.statistics.cluster_bootstrap import bootstrap
from nearkin.evaluation.statistics.paired import compare
from nearkin.evaluation.verification.all_pairs import all_pairs
from nearkin.evaluation.verification.score_calibration import Calibration, calibrate
from nearkin.evaluation.verification.verification_metrics import operating_point, verification

__all__ = [
    "DBA",
    "PLDA",
    "AlphaQE",
    "Calibration",
    "ChosenRerank",
    "Grouping",
    "KReciprocal",
    "Neighbours",
    "all_pairs",
    "bcubed",
    "bcubed_values",
    "bootstrap",
    "calibrate",
    "choose_rerank",
    "clustering",
    "compare",
    "diagnose",
    "fit_plda",
    "graded",
    "group",
    "identification",
    "nearest",
    "nearest_negatives",
    "omniglot_accuracy",
    "one_shot",
    "open_set",
    "operating_point",
    "pairwise",
    "rerank",
    "retrieval",
    "smoothed",
    "verification",
]


def __dir__() -> list[str]:
    return __all__
