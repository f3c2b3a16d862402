"""Access: everyone on this machine, or those with the token; no foreign web page."""

import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Access", "is_loopback"]

OPEN = ("/", "/favicon.ico")  # the page itself holds no data; its requests need the token
OPEN_FOLDER = "/page/"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Access(NamedTuple):
    """token: expected in "Authorization: Bearer …"; None only on loopback."""

    token: str | None = None
    host: str = "127.0.0.1"

    def check(self) -> None:
        """Raises if other machines could reach the service without a token, or the token does not fit into a header."""
        if self.token is not None and not re.fullmatch(r"[\x21-\x7e]+", self.token):
            raise ValueError("token must be one or more letters, digits and signs without spaces")
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines, so a token is needed: "
                "--token T, or --host 127.0.0.1"
            )

    def refusal(self, scope: Mapping[str, Any]) -> tuple[int, str] | None:
        """Status and sentence for a request that is refused."""
        host, origin = _header(scope, b"host"), _header(scope, b"origin")
        if self.token is None and _host_name(host) not in (*LOOPBACK, self.host):
            # DNS rebinding: a foreign page may let its name resolve to 127.0.0.1, and would then have our origin.
            return 403, f"this service answers to 127.0.0.1 and localhost only, not to {_quoted(host)}"
        foreign = bool(origin) and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower())
        foreign = foreign or (not origin and _header(scope, b"sec-fetch-site") == "cross-site")
        page = scope["path"] in OPEN and scope["method"] in ("GET", "HEAD")  # links from other pages are allowed
        if foreign and not page:
            return 403, "requests from other web pages are refused"
        if self.token is None or page or scope["path"].startswith(OPEN_FOLDER):
            return None
        scheme, _, token = _header(scope, b"authorization").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self.token.encode()):
            return None
        return 401, "a token is needed: Authorization: Bearer TOKEN" if not token else "the token is wrong"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _header(scope: Mapping[str, Any], name: bytes) -> str:
    """The value, "" where there is none; a repeated header is ignored."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    values = [value for key, value in headers if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def _host_name(host: str) -> str:
    """Without the port."""
    match = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](?::\d+)?|([^:]+)(?::\d+)?", host)
    return (match[1] or match[2]).lower() if match else ""


def _quoted(text: str) -> str:
    return repr(text[:60]) if text else "a request without a host"
