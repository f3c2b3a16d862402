"""How good embeddings are: ranking, clustering, verification, one-shot, graded; exact search underneath."""

from nearkin.evaluation.clustering import clustering as clustering
from nearkin.evaluation.diagnosis import diagnose as diagnose
from nearkin.evaluation.few_shot import one_shot as one_shot
from nearkin.evaluation.graded import graded as graded
from nearkin.evaluation.paired import compare as compare
from nearkin.evaluation.ranking import retrieval as retrieval
from nearkin.evaluation.uncertainty import bootstrap as bootstrap
from nearkin.evaluation.verification import verification as verification
