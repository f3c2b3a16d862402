"""Where nearkin keeps what it can make again, and whether a path stays within a folder."""

import os
from pathlib import Path

__all__ = ["cache_dir", "is_inside"]


def cache_dir() -> Path:
    """NEARKIN_CACHE, else XDG_CACHE_HOME/nearkin, else ~/.cache/nearkin; RuntimeError for a user without a home."""
    if os.environ.get("NEARKIN_CACHE"):
        return Path(os.environ["NEARKIN_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "nearkin"


def is_inside(path: str, folder: str) -> bool:
    """Whether a path stays within a folder; links within the folder may lead elsewhere, a path with ".." may not."""
    home = os.path.join(os.path.abspath(folder), "")
    if ".." not in Path(path).parts and os.path.abspath(path).startswith(home):
        return True
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), ""))
