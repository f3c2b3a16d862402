"""The verbs of the command line: they parse arguments, call the rooms below, and print."""

from nearkin.cli import train, compare, evaluate, embed, enrol, queries, gallery_admin, gallery_backup, serve, listing  # isort: skip  # the order in which --help lists the verbs
from nearkin.cli.screen import app, main

__all__ = [
    "app",
    "compare",
    "embed",
    "enrol",
    "evaluate",
    "gallery_admin",
    "gallery_backup",
    "listing",
    "main",
    "queries",
    "serve",
]
__all__ += ["train"]
