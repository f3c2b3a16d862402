"""Embeddings put to use: enrol items, then search, identify and verify them; in SQLite or PostgreSQL."""

from nearkin.core.errors import LabelConflict, MissingRow, StoreUnavailable
from nearkin.gallery.backups import Backup, PointState, backup, check_backup
from nearkin.gallery.calibration import calibrate
from nearkin.gallery.enroll import enrol_source, enroll_source
from nearkin.gallery.gallery import Enrolled, Gallery
from nearkin.gallery.items import Seen
from nearkin.gallery.opening import run_of
from nearkin.gallery.results import Candidate, Hit, Identity, Verification, verify
from nearkin.gallery.stores import Report
from nearkin.gallery.transfer import Transferred, copy, restore

__all__ = [
    "Backup",
    "Candidate",
    "Enrolled",
    "Gallery",
    "Hit",
    "Identity",
    "LabelConflict",
    "MissingRow",
    "PointState",
    "Report",
    "Seen",
    "StoreUnavailable",
    "Transferred",
    "Verification",
    "backup",
    "calibrate",
    "check_backup",
    "copy",
    "enrol_source",
    "enroll_source",
    "restore",
    "run_of",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
