"""What a request brings: pictures in the parts of a form, or vectors in JSON; kept in memory, never in a file."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nearkin.core.errors import MalformedRequest, UnsupportedMedia
from nearkin.core.text import MARKS
from nearkin.gallery.schema import bounded
from nearkin.web.middleware import Limits

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["Brought", "body_schema", "json_object", "read"]

TEXT = 64 * 2**10  # bytes of a part that is no picture
LONGEST = 65_536  # numbers of a vector
PARTS = 2**20  # of a JSON text; its bytes are bounded as well
# By what a file of each format begins with. Fewer than a folder may hold: a stranger's file shall meet few decoders.
FORMATS = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "GIF": rb"GIF8[79]a",
    "WebP": rb"RIFF....WEBP",
    "BMP": rb"BM.{4}\0{4}",
    "AVIF": rb"....ftypavi[fs]",
}


class Brought(NamedTuple):
    """items: field → [(picture or vector, name)]; texts: field → text or, from JSON, any value."""

    items: dict[str, list[tuple[Any, str | None]]]
    texts: dict[str, Any]


async def read(request: "Request", limits: Limits, fields: Sequence[str], texts: Sequence[str] = ()) -> Brought:
    """Reads the body; each of `fields` is there at least once, and none but these and `texts`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        found = await _form(request, limits)
    elif kind == "application/json":
        found = _numbers(_parsed(await request.body(), "the body"), fields, texts, limits)
    else:
        raise UnsupportedMedia(
            f"the body must be multipart/form-data or application/json, got {kind[:60] or 'neither'}"
        )
    if unknown := sorted({*found.items, *found.texts} - {*fields, *texts}):
        raise MalformedRequest(f"unknown part {unknown[0][:60]!r}; known: {', '.join((*fields, *texts))}")
    for field in fields:
        if not found.items.get(field):
            raise MalformedRequest(f"{field} is missing: a picture as a file in the form, or a vector in JSON")
    return found


def json_object(text: Any, name: str) -> dict[str, Any] | None:
    """An object, given as such or as JSON text."""
    if text is None or text == "":
        return None
    value = _parsed(text.encode("utf-8", "replace"), name) if isinstance(text, str) else text
    if not isinstance(value, dict):
        raise MalformedRequest(f'{name} must be a JSON object, as {{"place": "pond"}}')
    return value


def body_schema(fields: Sequence[str], many: bool = False, texts: Sequence[str] = ()) -> dict[str, Any]:
    """The body for the OpenAPI description, which a hand-read form does not get by itself."""
    file: dict[str, Any] = {"type": "string", "format": "binary", "description": f"A picture: {', '.join(FORMATS)}."}
    vector: dict[str, Any] = {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": LONGEST}
    kinds = {"multipart/form-data": file, "application/json": vector}
    content = {}
    for kind, one in kinds.items():
        made = {field: {"type": "array", "items": one, "minItems": 1} if many else one for field in fields}
        for text in texts:
            made[text] = {"type": "string"} if text == "label" or kind.startswith("multipart") else {"type": "object"}
        needed = [*fields, *(text for text in texts if text == "label")]
        schema = {"type": "object", "properties": made, "required": needed, "additionalProperties": False}
        content[kind] = {"schema": schema}
    return {"requestBody": {"required": True, "content": content}}


async def _form(request: "Request", limits: Limits) -> Brought:
    from starlette.formparsers import MultiPartException, MultiPartParser

    class InMemory(MultiPartParser):
        spool_max_size = limits.body + 1  # nothing goes to the disk; the door has bounded the bytes

    parser = InMemory(request.headers, request.stream(), max_files=limits.pictures, max_fields=8, max_part_size=TEXT)
    try:
        form = await parser.parse()
        return await _parts(form.multi_items())
    except (MultiPartException, KeyError, UnicodeError, LookupError) as error:
        raise MalformedRequest(
            f"the form cannot be read: {getattr(error, 'message', None) or 'it has no boundary'}"
        ) from None
    finally:
        for file in getattr(parser, "_files_to_close_on_error", ()):  # its own way misses a body that broke off
            file.close()


async def _parts(found: Sequence[tuple[str, Any]]) -> Brought:
    """Pictures are checked for their format; a text is given once."""
    items: dict[str, list[tuple[Any, str | None]]] = {}
    texts: dict[str, Any] = {}
    for field, value in found:
        if not isinstance(value, str):
            content = await value.read()
            items.setdefault(field, []).append((_picture(content), _name(value.filename)))
        elif field in texts:
            raise MalformedRequest(f"{field[:60]} must be given once")
        else:
            texts[field] = value
    return Brought(items, texts)


def _numbers(found: Any, fields: Sequence[str], texts: Sequence[str], limits: Limits) -> Brought:
    if not isinstance(found, dict):
        raise MalformedRequest("the body must be a JSON object")
    items: dict[str, list[tuple[Any, str | None]]] = {}
    for field in fields:
        value = found.get(field)
        if value is None:
            continue
        many = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        if len(many) > limits.pictures:
            raise MalformedRequest(f"{field} must be at most {limits.pictures} vectors, got {len(many)}")
        items[field] = [(_vector(field, one), None) for one in many]
    return Brought(items, {key: value for key, value in found.items() if key not in fields})


def _vector(field: str, value: Any) -> Any:
    if not isinstance(value, list) or not 1 <= len(value) <= LONGEST:
        raise MalformedRequest(f"{field} must be a list of 1 to {LONGEST:,} numbers")
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in value):
        raise MalformedRequest(f"{field} must be a list of numbers only")
    try:
        return np.asarray(value, np.float64)
    except OverflowError:
        raise MalformedRequest(f"{field} must be numbers that a float64 holds") from None


def _picture(content: bytes) -> bytes:
    if not content:
        raise MalformedRequest("the picture is empty (0 bytes)")
    if not any(re.match(start, content[:16], re.DOTALL) for start in FORMATS.values()):
        raise UnsupportedMedia(f"the picture is of no format that is taken here ({', '.join(FORMATS)})")
    return content


def _name(text: str | None) -> str | None:
    """What a file was called, without folders: it is only shown."""
    last = re.split(r"[\\/]", text or "")[-1]
    return re.sub(f"[{MARKS}]", "", last)[:200] or None


def _parsed(content: bytes, name: str) -> Any:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise MalformedRequest(f"{name} must be JSON") from None
    try:
        bounded(found, name, parts=PARTS)
    except ValueError as error:
        raise MalformedRequest(str(error)) from None
    return found
