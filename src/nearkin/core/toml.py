"""TOML: writes nested plain values, which Python cannot; and reads text, after a check of its size and depth."""

import importlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from nearkin.core.errors import ExcessiveText

__all__ = ["read", "read_file", "text"]

LARGEST, DEEPEST = 2**18, 16  # bytes of a file; nested brackets, and parts of a dotted key

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_TOKEN = re.compile(
    r'''"""[^"\\]*(?:(?:\\.|"{1,2}(?!"))[^"\\]*)*"{3,5}'''  # strings, whose content does not count
    r"|'''[^']*(?:'{1,2}(?!')[^']*)*'{3,5}"
    r'''|""(?!")|"[^"\\\n]+(?:\\[^\n][^"\\\n]*)*"|"(?:\\[^\n][^"\\\n]*)+"'''
    r"|''(?!')|'[^'\n]+'"
    r"|#[^\n]*"
    r"""|[][{}.,=\n"']""",
    re.DOTALL,
)


def read_file(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises OSError, UnicodeDecodeError, or a ValueError that names the fault."""
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ExcessiveText(f"larger than {LARGEST // 1024} KiB")
    return read(content.decode("utf-8"))


def read(text: str) -> dict[str, Any]:
    """The content of TOML text; `ExcessiveText`, or another ValueError if it is not TOML.

    Python's reader recurses with every bracket and stores every prefix of a dotted key: both are checked first.
    """
    _refuse_excessive(text)
    reader: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table: dict[str, Any] = reader.loads(text)
    except ValueError as error:  # also for a number of thousands of digits, which is valid TOML
        raise ValueError(f"not valid TOML ({error})") from None
    return table


def _refuse_excessive(text: str) -> None:
    depth = dots = 0
    in_key = True
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in ("'", '"'):  # an unterminated string: the reader stops here
            return
        if token in ("[", "{"):
            depth += 1
        elif token in ("]", "}"):
            depth -= 1
        elif token == "." and in_key:
            dots += 1
        if token in ("[", "{", ",", "\n", "="):
            dots, in_key = 0, token != "="
        if depth > DEEPEST or dots >= DEEPEST:
            what = "brackets within brackets" if depth > DEEPEST else "parts of a dotted key"
            raise ExcessiveText(f"more than {DEEPEST} {what} in line {text.count(chr(10), 0, match.start()) + 1}")


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
    """JSON's escapes are TOML's, except for DEL; half a surrogate pair is replaced, for it cannot be encoded."""
    encodable = value.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(encodable, ensure_ascii=False).replace("\x7f", "\\u007f")
