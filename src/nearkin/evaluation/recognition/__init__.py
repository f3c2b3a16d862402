"""Who is this, or nobody we know: learned from a gallery's own rows; `nearkin.gallery` keeps and asks it."""

from nearkin.evaluation.recognition.events import NONE, OTHER, PRIOR, RIGHT, SURE, Far, softmax
from nearkin.evaluation.recognition.label_model import NOTHING, LabelScores, LabelSums
from nearkin.evaluation.recognition.recogniser import FEWEST, TOO_FEW, Answers, Recogniser, fit
from nearkin.evaluation.recognition.simulation import ITEMS, NEAREST, Hits, Part, Queries

__all__ = [
    "FEWEST",
    "ITEMS",
    "NEAREST",
    "NONE",
    "NOTHING",
    "OTHER",
    "PRIOR",
    "RIGHT",
    "SURE",
    "TOO_FEW",
    "Answers",
    "Far",
    "Hits",
    "LabelScores",
    "LabelSums",
    "Part",
    "Queries",
    "Recogniser",
    "fit",
    "softmax",
]
