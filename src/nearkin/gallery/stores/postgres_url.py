"""The address of a gallery in PostgreSQL: what is ours in it, what is the server's, and what may be shown."""

import re
from typing import NamedTuple
from urllib.parse import unquote

__all__ = ["Address", "address", "shown"]

SCHEMES = ("postgresql://", "postgres://")
HOST = r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?"  # and its port, a number: what else stands there may be part of a password


class Address(NamedTuple):
    """url: for PostgreSQL. name: of the gallery. shown: for sentences and logs. secrets: what no sentence may say."""

    url: str
    name: str
    shown: str
    secrets: list[str]


def address(url: str) -> Address:
    """As PostgreSQL reads it: user and password end at the first @ before a /, and + is no space."""
    scheme, _, rest = url.partition("://")
    user, _, rest = ("", "", rest) if "@" not in rest.partition("/")[0] else rest.partition("@")
    base, _, query = rest.partition("?")
    options = [part.partition("=") for part in query.split("&") if part]
    hosts = base.partition("/")[0].split(",")
    if "@" in base or not all(re.fullmatch(HOST, host) for host in hosts) or not all(part[1] for part in options):
        raise ValueError(
            "a gallery in PostgreSQL is postgresql://USER:PASSWORD@HOST:PORT/DATABASE?OPTION=VALUE; in a user or "
            "password @ : / ? # and % are written %40 %3A %2F %3F %23 and %25"
        )
    name = next((unquote(value) for key, _, value in options if unquote(key) == "gallery"), "gallery")
    if not re.fullmatch(r"[a-z0-9_]{1,40}", name):
        raise ValueError(f'gallery must be 1 to 40 small letters, digits and _, got "{name}"')
    who, _, password = user.partition(":")
    secrets = [password, *(value for key, _, value in options if _secret(key))]
    secrets = [text for secret in secrets for text in {secret, unquote(secret)} if text]
    head = f"{scheme}://"
    for_server = [part for part in options if unquote(part[0]) != "gallery"]
    for_all = [part for part in options if not _secret(part[0])]
    return Address(
        head + (f"{user}@" if user else "") + _joined(base, for_server),
        name,
        head + (f"{who}@" if who else "") + _joined(base, for_all),
        sorted(secrets, key=len, reverse=True),
    )


def shown(place: object) -> str:
    """Any place of a gallery, without a password."""
    text = str(place)
    if text.startswith(SCHEMES):
        return address(text).shown
    return re.sub(r"://.*@", "://…@", text)


def _secret(key: str) -> bool:
    return "pass" in unquote(key).lower()


def _joined(base: str, options: list[tuple[str, str, str]]) -> str:
    return base + ("?" + "&".join("".join(part) for part in options) if options else "")
