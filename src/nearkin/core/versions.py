"""Versions of packages, also without their metadata: a source tree on the path, or a frozen program."""

import importlib
import re
from importlib.metadata import PackageNotFoundError, requires, version

__all__ = ["is_installed", "packages_of_extras", "version_of"]

_MODULES = {"pillow": "PIL"}
_OF_EXTRA = re.compile(r"^([A-Za-z0-9._-]+)[^;]*;.*extra\s*==\s*['\"]([a-z0-9]+)['\"]")


def version_of(package: str) -> str:
    """The version of an installed package; of nearkin, that of the running code."""
    if package != "nearkin":
        try:
            return version(package)
        except PackageNotFoundError:
            pass
    try:
        module = importlib.import_module(_MODULES.get(package, package))
    except ImportError:
        return "unknown"
    return str(getattr(module, "__version__", "unknown"))


def is_installed(package: str) -> bool:
    """Whether the metadata of a distribution are there; nothing is imported."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def packages_of_extras() -> dict[str, list[str]]:
    """What each extra of nearkin needs; empty for a source tree on the path, which has no metadata."""
    try:
        matches = [_OF_EXTRA.match(line) for line in requires("nearkin") or ()]
    except PackageNotFoundError:
        return {}
    extras: dict[str, list[str]] = {}
    for match in filter(None, matches):
        extras.setdefault(match[2], []).append(match[1])
    return extras
