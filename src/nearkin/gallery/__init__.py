"""Embeddings put to use: enrol items, then search, identify and verify them; in SQLite or PostgreSQL."""

from nearkin.core.errors import LabelConflict, MissingRow, StaleGroups, StoreUnavailable
from nearkin.gallery.answers import Candidate, FarStatement, Identity
from nearkin.gallery.asking import Answered, calibrate_with, identify_source
from nearkin.gallery.backups import Backup, PointState, backup, check_backup
from nearkin.gallery.calibration import calibrate
from nearkin.gallery.embedder import Embedder, open_encoder
from nearkin.gallery.encoder_upgrade import Upgraded, upgrade
from nearkin.gallery.enroll import enrol_source, enroll_source
from nearkin.gallery.gallery import Enrolled, Gallery
from nearkin.gallery.group_edits import GroupEditor, Reviewed
from nearkin.gallery.items import Seen
from nearkin.gallery.matched_parts import Heat, Matched, RowPicture, explain
from nearkin.gallery.opening import run_of
from nearkin.gallery.results import Hit, Hits, Verification, verify
from nearkin.gallery.source_groups import SourceGroups, group_gallery, group_source, write_groups
from nearkin.gallery.stores import Report
from nearkin.gallery.transfer import Transferred, copy, restore

__all__ = [
    "Answered",
    "Backup",
    "Candidate",
    "Embedder",
    "Enrolled",
    "FarStatement",
    "Gallery",
    "GroupEditor",
    "Heat",
    "Hit",
    "Hits",
    "Identity",
    "LabelConflict",
    "Matched",
    "MissingRow",
    "PointState",
    "Report",
    "Reviewed",
    "RowPicture",
    "Seen",
    "SourceGroups",
    "StaleGroups",
    "StoreUnavailable",
    "Transferred",
    "Upgraded",
    "Verification",
    "backup",
    "calibrate",
    "calibrate_with",
    "check_backup",
    "copy",
    "enrol_source",
    "enroll_source",
    "explain",
    "group_gallery",
    "group_source",
    "identify_source",
    "open_encoder",
    "restore",
    "run_of",
    "upgrade",
    "verify",
    "write_groups",
]


def __dir__() -> list[str]:
    return __all__
