"""Uploaded forms, read by FastAPI within our limits and kept in memory, and what counts as a picture."""

import json
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from nearkin.core.errors import MalformedRequest, UnsupportedMedia
from nearkin.core.text import MARKS
from nearkin.gallery.schema import bounded
from nearkin.web.middleware import Limits

if TYPE_CHECKING:
    from fastapi import UploadFile
    from fastapi.routing import APIRoute

__all__ = ["form_route", "json_object", "only_parts", "picture"]

TEXT_BYTES = 64 * 2**10  # of a part that is not a file
MAX_TEXTS = 8  # parts that are not files
HEAD = 32  # bytes of a file that tell its format
JSON_PARTS = 2**20  # of a JSON text; its bytes are bounded as well
# The first bytes of a file, by format. Fewer formats than training reads: untrusted files reach few decoders.
FORMATS = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "GIF": rb"GIF8[79]a",
    "WebP": rb"RIFF....WEBP",
    "uncompressed BMP": rb"BM.{4}\0{4}.{4}(?:\x0c|.{16}[^\1\2])",  # runs are read in Python
    "AVIF": rb"....ftypavi[fs]",
}


def form_route(limits: Limits) -> "type[APIRoute]":
    """FastAPI's route, with a request that bounds the parts of a form and keeps files in memory.

    FastAPI calls `request.form()` without arguments, which would allow 1,000 files and write those above 1 MiB to disk.
    """
    from fastapi import HTTPException, Request
    from fastapi.routing import APIRoute
    from starlette.formparsers import MultiPartException, MultiPartParser

    class InMemoryParser(MultiPartParser):
        spool_max_size = max_file_size = limits.body + 1  # never reached; the second name is that of Starlette < 0.42

    class FormRequest(Request):
        parsed: Any = None

        async def form(self, **_: Any) -> Any:  # type: ignore[override]
            if self.parsed is None:
                self.parsed = await self._parse()
            return self.parsed

        async def _parse(self) -> Any:
            kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "multipart/form-data":
                vectors = "; /api/vectors/… takes vectors as application/json"
                raise HTTPException(415, f"the body must be multipart/form-data, got {kind[:60] or 'no type'}{vectors}")
            parser = InMemoryParser(self.headers, self.stream(), max_files=limits.pictures, max_fields=MAX_TEXTS)
            parser.max_part_size = TEXT_BYTES
            try:
                return await parser.parse()
            except (MultiPartException, KeyError, UnicodeError, LookupError) as error:
                reason = getattr(error, "message", None) or "it has no boundary"
                raise HTTPException(400, f"the form cannot be read: {reason}") from None

    class FormRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handle = super().get_route_handler()

            async def handle_form(request: Request) -> Any:
                return await handle(FormRequest(request.scope, request.receive))

            return handle_form

    return FormRoute


def only_parts(*files: str, several: bool = False, texts: tuple[str, ...] = ()) -> Callable[..., Awaitable[None]]:
    """A dependency: every file is a picture, each of `files` is there (once, unless `several`), and nothing unknown."""
    from fastapi import Request

    async def check(request: Request) -> None:
        parts = (await request.form()).multi_items()
        for _, part in parts:
            if not isinstance(part, str):
                _check_format(await part.read(HEAD))
                await part.seek(0)
        if unknown := sorted({name for name, _ in parts} - {*files, *texts}):
            raise MalformedRequest(f"unknown part {unknown[0][:60]!r}; known: {', '.join((*files, *texts))}")
        for name in files:
            count = sum(key == name and not isinstance(part, str) for key, part in parts)
            if not count:
                raise MalformedRequest(f"{name} is missing: send a picture as a file in the form")
            if count > 1 and not several:
                raise MalformedRequest(f"{name} must be one picture, got {count}")
        for name in texts:
            if sum(key == name for key, _ in parts) > 1:
                raise MalformedRequest(f"{name} must be given once")
        if "label" in texts and not any(key == "label" and isinstance(part, str) for key, part in parts):
            raise MalformedRequest("label is missing")

    return check


async def picture(upload: "UploadFile") -> tuple[bytes, str | None]:
    """The content of a file and its name without folders, which is only displayed."""
    name = re.split(r"[\\/]", upload.filename or "")[-1]
    return await upload.read(), re.sub(f"[{MARKS}]", "", name)[:200] or None


def json_object(text: str | None, name: str) -> dict[str, Any] | None:
    """A JSON object from the text of a part or a query parameter."""
    if not text:
        return None
    try:
        value = json.loads(text.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise MalformedRequest(f"{name} must be JSON") from None
    try:
        bounded(value, name, parts=JSON_PARTS)
    except ValueError as error:
        raise MalformedRequest(str(error)) from None
    if not isinstance(value, dict):
        raise MalformedRequest(f'{name} must be a JSON object, as {{"place": "pond"}}')
    return value


def _check_format(head: bytes) -> None:
    if not head:
        raise MalformedRequest("the picture is empty (0 bytes)")
    if not any(re.match(start, head, re.DOTALL) for start in FORMATS.values()):
        raise UnsupportedMedia(f"the picture has no supported format ({', '.join(FORMATS)})")
