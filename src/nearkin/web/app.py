"""The service as an app (ASGI): routes, errors as one sentence each, the page, the OpenAPI description."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib.resources import files as resources
from typing import TYPE_CHECKING, Any

from nearkin.core.errors import MalformedRequest, NoPicture, QueueFull, RequestTooLarge, UnsupportedMedia
from nearkin.core.text import visible
from nearkin.core.versions import version_of
from nearkin.gallery import Gallery, LabelConflict, MissingRow, StoreUnavailable
from nearkin.web import routes
from nearkin.web.access import Access
from nearkin.web.middleware import Door, Limits
from nearkin.web.request_log import Journal
from nearkin.web.service import REST, Service

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["build"]

# Most particular first; what is none of these is a fault of ours, a 500, and goes into the log.
STATUS: dict[type[Exception], int] = {
    MissingRow: 404,
    NoPicture: 404,
    LabelConflict: 409,
    MalformedRequest: 400,
    RequestTooLarge: 413,
    UnsupportedMedia: 415,
    ValueError: 422,
    TypeError: 422,
    TimeoutError: 503,
    StoreUnavailable: 503,
    QueueFull: 503,
}
PAGE = {"style.css": "text/css", "script.js": "text/javascript", "map.js": "text/javascript"}
HTML = "text/html; charset=utf-8"
LONGEST = 1000  # characters of a sentence
UNAVAILABLE = "the gallery cannot be used at the moment; the log says why"


def build(
    gallery: Gallery,
    *,
    access: Access | None = None,
    limits: Limits | None = None,
    journal: Journal | None = None,
    pictures: bool = True,
    drawing: bool = False,
) -> Door:
    """The app over an open gallery, which stays the caller's to close.

    pictures: whether the encoder takes them (else vectors only). drawing: the page offers a pad to draw on.
    """
    try:
        from fastapi import FastAPI
    except ModuleNotFoundError:
        raise ModuleNotFoundError("nearkin serve needs fastapi: pip install 'nearkin[serve]'") from None

    chosen, who, said = limits or Limits(), access or Access(), journal or Journal()
    who.check()
    service = Service(gallery, chosen, pictures, drawing)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close(REST)

    app = FastAPI(
        title="nearkin",
        version=version_of("nearkin"),
        description="Search, identify and verify against a gallery of embeddings.",
        lifespan=life,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    _errors(app, gallery.place, said)
    app.include_router(routes.asking(service))
    app.include_router(routes.writing(service))
    app.include_router(routes.reading(service))
    app.include_router(routes.exploring(service))
    _page(app)
    _described(app, who)
    door = Door(app, who, chosen, said)
    door.at_rest = lambda: service.ended
    return door


def _errors(app: "FastAPI", place: str, journal: Journal) -> None:
    """Every error is {"error": sentence}; where the gallery is kept is for the log alone."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    def said(status: int, sentence: str, headers: Any = None) -> JSONResponse:
        more = {"Retry-After": "1"} if status == 503 else {}
        text = " ".join(sentence.replace(place, "the gallery").split())[:LONGEST]
        text = visible(text).encode("utf-8", "replace").decode()
        return JSONResponse({"error": text}, status, {**(headers or {}), **more, "Cache-Control": "no-store"})

    def answer(status: int) -> Callable[[Any, Any], JSONResponse]:
        return lambda _, error: said(status, str(error))

    def unavailable(request: Any, error: Any) -> JSONResponse:
        journal.say("unavailable", "error", id=request.scope.get("visit"), text=str(error))
        return said(503, UNAVAILABLE)

    for kind, status in STATUS.items():
        app.add_exception_handler(kind, answer(status))
    app.add_exception_handler(StoreUnavailable, unavailable)
    app.add_exception_handler(HTTPException, lambda _, error: said(*_http(error)))
    app.add_exception_handler(RequestValidationError, lambda _, error: said(*_invalid(error)))


def _http(error: Any) -> tuple[int, str, Any]:
    sentence = {404: "there is nothing at this address; /openapi.json lists what there is", 405: "not this method here"}
    return error.status_code, sentence.get(error.status_code, str(error.detail)), error.headers


def _invalid(error: Any) -> tuple[int, str]:
    """The first thing that is wrong with the parameters or the JSON."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return 400, "the body must be JSON"
    where = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    return 422, f"{where[:100]}: {first['msg'][:200]}"


def _page(app: "FastAPI") -> None:
    """Files by name from a list made beforehand: no path of a request is ever opened."""
    from fastapi.responses import Response

    folder = resources("nearkin.web").joinpath("page")
    look = resources("nearkin.report").joinpath("page.css").read_bytes()
    known = {
        f"/page/{name}": (folder.joinpath(name).read_bytes(), f"{kind}; charset=utf-8") for name, kind in PAGE.items()
    }
    known |= {"/": (folder.joinpath("index.html").read_bytes(), HTML), "/page/look.css": (look, "text/css")}
    fresh = {"Cache-Control": "no-cache"}

    def shown(content: bytes, kind: str) -> Callable[[], Coroutine[Any, Any, Response]]:
        async def give() -> Response:
            return Response(content, media_type=kind, headers=fresh)

        return give

    for path, (content, kind) in known.items():
        app.add_api_route(path, shown(content, kind), methods=["GET", "HEAD"], include_in_schema=False)
    empty = shown(b"", "image/x-icon")
    app.add_api_route("/favicon.ico", empty, methods=["GET", "HEAD"], include_in_schema=False)


def _described(app: "FastAPI", access: Access) -> None:
    """The OpenAPI description says that a token is needed, where one is."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        said = made()
        if access.token is not None:
            said.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            said["security"] = [{"token": []}]
        return said

    app.openapi = openapi  # type: ignore[method-assign]
