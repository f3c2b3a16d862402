"""The service and its page: a gallery over HTTP, on this machine or with a token."""

from nearkin.web.access import Access
from nearkin.web.app import build
from nearkin.web.middleware import Limits
from nearkin.web.server import serve

__all__ = ["Access", "Limits", "build", "serve"]


def __dir__() -> list[str]:
    return __all__
