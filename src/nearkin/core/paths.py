"""Where nearkin keeps what it can make again."""

import os
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """NEARKIN_CACHE, else XDG_CACHE_HOME/nearkin, else ~/.cache/nearkin; RuntimeError for a user without a home."""
    if os.environ.get("NEARKIN_CACHE"):
        return Path(os.environ["NEARKIN_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "nearkin"
