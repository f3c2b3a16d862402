"""Where nearkin keeps what it can make again, and whether a path stays within a folder."""

import os
from pathlib import Path

__all__ = ["cache_dir", "homes", "is_inside"]


def cache_dir() -> Path:
    """NEARKIN_CACHE, else XDG_CACHE_HOME/nearkin, else ~/.cache/nearkin; RuntimeError for a user without a home."""
    if os.environ.get("NEARKIN_CACHE"):
        return Path(os.environ["NEARKIN_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "nearkin"


def homes(*folders: str | Path) -> tuple[str, ...]:
    """The names of folders, as `is_inside` takes them: as they are written, and without links."""
    return tuple(os.path.join(name(folder), "") for folder in folders for name in (os.path.abspath, os.path.realpath))


def is_inside(path: str, homes: tuple[str, ...]) -> bool:
    """Whether a path stays within one of the folders, by its name alone; links in them may lead elsewhere."""
    return os.path.abspath(path).startswith(homes)
