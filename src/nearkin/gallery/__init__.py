"""Embeddings put to use: enrol items, then search, identify, verify; kept in SQLite or PostgreSQL."""

from nearkin.gallery.answers import Candidate, Hit, Identity, Verification
from nearkin.gallery.calibrating import calibrate
from nearkin.gallery.enrolling import enrol_source
from nearkin.gallery.gallery import Enrolled, Gallery
from nearkin.gallery.intake import Seen
from nearkin.gallery.opening import run_of
from nearkin.gallery.pairs import verify
from nearkin.gallery.store import Conflict, Missing, Report, Unavailable

__all__ = [
    "Candidate",
    "Conflict",
    "Enrolled",
    "Gallery",
    "Hit",
    "Identity",
    "Missing",
    "Report",
    "Seen",
    "Unavailable",
    "Verification",
    "calibrate",
    "enrol_source",
    "run_of",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
