"""Nested plain values as TOML text; Python reads TOML and does not write it."""

import json
import math
import re
from typing import Any

__all__ = ["text"]

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")


def text(table: dict[str, Any]) -> str:
    """Plain values first, then tables; TOML has no null, so an unset key is a comment."""
    return "\n".join(_lines(table, ())).strip() + "\n"


def _lines(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    values = {k: v for k, v in table.items() if not isinstance(v, dict)}
    tables = {k: v for k, v in table.items() if isinstance(v, dict)}
    lines = [f"\n[{'.'.join(map(_key, path))}]"] if path and (values or not tables) else []
    for key, value in values.items():
        lines.append(f"# {_key(key)} is not set" if value is None else f"{_key(key)} = {_value(value)}")
    for key, inner in tables.items():
        lines += _lines(inner, (*path, str(key)))
    return lines


def _key(key: object) -> str:
    return str(key) if _BARE.match(str(key)) else _string(str(key))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)  # nan, inf, -inf are TOML
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(v) for v in value if v is not None)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items() if v is not None)}}}"
    return _string(str(value))


def _string(value: str) -> str:
    """JSON's escapes are TOML's, but for DEL, which it leaves alone; half a surrogate pair is no character at all."""
    whole = value.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")
