"""The verbs of the command line: they parse arguments, call the rooms below, and print."""

# In the order in which --help lists the verbs.
from nearkin.cli import train, compare, evaluate, embed, enrol, photo_groups, queries, gallery_admin  # isort: skip
from nearkin.cli import gallery_calibrate, gallery_backup, gallery_upgrade, serve, runs, listing  # isort: skip
from nearkin.cli.screen import app, main
from nearkin.cli.verb import group_verbs

group_verbs(app)

__all__ = [
    "app",
    "compare",
    "embed",
    "enrol",
    "evaluate",
    "gallery_admin",
    "gallery_backup",
    "gallery_calibrate",
    "gallery_upgrade",
    "listing",
    "main",
]
__all__ += ["photo_groups", "queries", "runs", "serve", "train"]
