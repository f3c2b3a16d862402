"""The verbs of the command line. What they do is done elsewhere; here it is asked for, and its answer printed."""

from nearkin.cli import train, compare, evaluate, use, gallery_verbs, serve, listing  # isort: skip  # the order in which --help lists the verbs
from nearkin.cli.screen import app, main

__all__ = ["app", "compare", "evaluate", "gallery_verbs", "listing", "main", "serve", "train", "use"]
