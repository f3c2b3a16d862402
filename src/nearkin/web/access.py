"""Who may ask: anybody on this machine, or whoever has the token; no web page of somebody else."""

import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Access", "is_loopback"]

OPEN = ("/", "/favicon.ico")  # the page itself, which holds no data; what it asks for needs the token
OPEN_FOLDER = "/page/"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Access(NamedTuple):
    """token: what "Authorization: Bearer …" must bring, None where the service is on loopback and asks for none."""

    token: str | None = None
    host: str = "127.0.0.1"

    def check(self) -> None:
        """Raises where the service would stand open to others, or the token cannot be sent in a header."""
        if self.token is not None and not re.fullmatch(r"[\x21-\x7e]+", self.token):
            raise ValueError("token must be letters, digits and signs without spaces, at least one")
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached by others, so a token is needed: --token T, or --host 127.0.0.1"
            )

    def refusal(self, scope: Mapping[str, Any]) -> tuple[int, str] | None:
        """Status and sentence for a request that may not go on."""
        host, origin = _header(scope, b"host"), _header(scope, b"origin")
        if self.token is None and _name(host) not in (*LOOPBACK, self.host):
            # A stranger's page may have its own name point to 127.0.0.1, and would then be of our origin.
            return 403, f"this service answers to 127.0.0.1 and localhost only, not to {_shown(host)}"
        foreign = bool(origin) and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower())
        foreign = foreign or (not origin and _header(scope, b"sec-fetch-site") == "cross-site")
        page = scope["path"] in OPEN and scope["method"] in ("GET", "HEAD")  # a link from elsewhere may lead to it
        if foreign and not page:
            return 403, "requests from other web pages are not answered"
        if self.token is None or page or scope["path"].startswith(OPEN_FOLDER):
            return None
        kind, _, given = _header(scope, b"authorization").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode()):
            return None
        return 401, "a token is needed: Authorization: Bearer TOKEN" if not given else "the token is wrong"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _header(scope: Mapping[str, Any], name: bytes) -> str:
    """The value, "" where there is none; a header that comes twice is not believed."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    found = [value for key, value in headers if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else ""


def _name(host: str) -> str:
    """Without the port."""
    match = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](?::\d+)?|([^:]+)(?::\d+)?", host)
    return (match[1] or match[2]).lower() if match else ""


def _shown(text: str) -> str:
    return repr(text[:60]) if text else "a request without a host"
