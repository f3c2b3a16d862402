"""Versions of packages, also without their metadata: a source tree on the path, or a frozen program."""

import importlib
from importlib.metadata import PackageNotFoundError, version

__all__ = ["version_of"]

_MODULES = {"pillow": "PIL"}


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
