"""The verbs of the command line: they parse arguments, call the rooms below, and print."""

from nearkin.cli import (
    compare,
    embed,
    enrol,
    evaluate,
    gallery_admin,
    listing,
    photo_groups,
    queries,
    runs,
    serve,
    train,
)  # isort: skip  # the order in which --help lists the verbs
from nearkin.cli.screen import app, main

__all__ = ["app", "compare", "embed", "enrol", "evaluate", "gallery_admin", "listing", "main", "photo_groups"]
__all__ += ["queries", "runs", "serve", "train"]
