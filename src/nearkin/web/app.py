"""The ASGI app: routes, errors as one sentence each, the page, the OpenAPI description."""

import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from html import escape
from importlib.resources import files as resources
from typing import TYPE_CHECKING, Any, NamedTuple

from nearkin.core.errors import MalformedRequest, NoPicture, QueueFull, ReloadRefused, RequestTooLarge, UnsupportedMedia
from nearkin.core.text import visible
from nearkin.core.versions import version_of
from nearkin.gallery import Gallery, LabelConflict, MissingRow, StaleGroups, StoreUnavailable
from nearkin.web import request_log, routes
from nearkin.web.access import Access
from nearkin.web.enrolment import Progressing
from nearkin.web.metrics import Metrics
from nearkin.web.middleware import GuardMiddleware, Limits
from nearkin.web.schemas import MALFORMED
from nearkin.web.service import REST, Service
from nearkin.web.writer import Writer

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from fastapi import FastAPI

__all__ = ["Version", "build", "build_version", "guard"]

# Any other exception is an internal error: 500, and its traceback goes to the log.
STATUS: dict[type[Exception], int] = {
    MissingRow: 404,
    NoPicture: 404,
    LabelConflict: 409,
    StaleGroups: 409,
    ReloadRefused: 409,
    MalformedRequest: 400,
    RequestTooLarge: 413,
    UnsupportedMedia: 415,
    ValueError: 422,
    TypeError: 422,
    TimeoutError: 503,
    StoreUnavailable: 503,
    QueueFull: 503,
}
ROUTERS = (
    routes.searching,
    routes.searching_by_vector,
    routes.writing,
    routes.reading,
    routes.exploring,
    routes.grouping,
    routes.operating,
)
SCRIPTS = (
    "api",
    "camera",
    "compare",
    "dom",
    "explain",
    "explore",
    "find",
    "groups",
    "inputs",
    "items",
    "keys",
    "map",
    "pad",
    "progress",
    "script",
    "state",
    "tabs",
    "texts",
    "verdict",
)
LANGUAGES = ("en", "ko")  # each has its file of texts
PAGE = {
    "style.css": "text/css",
    **{f"{name}.js": "text/javascript" for name in SCRIPTS},
    **{f"texts/{language}.json": "application/json" for language in LANGUAGES},
}
HTML = "text/html; charset=utf-8"
MAX_MESSAGE = 1000  # characters of an error message
UNAVAILABLE = "the gallery is unavailable at the moment; the log has the reason"


class Version(NamedTuple):
    """The app over one opening of the gallery; a reload makes another one."""

    app: "FastAPI"
    service: Service
    gallery: Gallery


def build(
    gallery: Gallery,
    *,
    access: Access | None = None,
    limits: Limits | None = None,
    log: logging.Logger | None = None,
    pictures: bool = True,
    drawing: bool = False,
    enrolment: Progressing | None = None,
    metrics: Metrics | None = None,
) -> GuardMiddleware:
    """The app over an open gallery, which stays the caller's to close.

    enrolment: of a folder into this gallery, whose progress the page shows.
    pictures: whether the encoder takes pictures (else vectors only). drawing: the page shows a drawing pad. log: by
    default JSON lines on stderr. metrics: by default those of this process.
    """
    limits, access, log = limits or Limits(), access or Access(), log or request_log.request_logger()
    metrics = metrics or Metrics()
    access.check()
    options: dict[str, Any] = {"pictures": pictures, "drawing": drawing, "enrolment": enrolment}
    version = build_version(gallery, access, limits, log, metrics, **options)
    return guard(version, access, limits, log, metrics)


def guard(version: Version, access: Access, limits: Limits, log: logging.Logger, metrics: Metrics) -> GuardMiddleware:
    """The middleware around the first version."""
    guarded = GuardMiddleware(version.app, access, limits, log, metrics, version.service)
    version.app.state.guard = guarded
    return guarded


def build_version(
    gallery: Gallery,
    access: Access,
    limits: Limits,
    log: logging.Logger,
    metrics: Metrics,
    *,
    pictures: bool = True,
    drawing: bool = False,
    enrolment: Progressing | None = None,
    writer: Writer | None = None,
    written: Callable[[], None] | None = None,
) -> Version:
    """See `build`, and `Service` for writer and written."""
    try:
        from fastapi import FastAPI
    except ModuleNotFoundError:
        raise ModuleNotFoundError("nearkin serve needs fastapi: pip install 'nearkin[serve]'") from None

    gallery.take_learned()
    service = Service(gallery, limits, pictures, drawing, enrolment, metrics, writer, written, log)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """Of the first version, which the server starts; by its end another one may serve."""
        yield
        app.state.guard.close(REST)

    app = FastAPI(
        title="nearkin",
        version=version_of("nearkin"),
        description="Search, identify and verify against a gallery of embeddings.",
        lifespan=lifespan,
        docs_url=None,  # would load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_error_handlers(app, gallery.place, log)
    routers = [router(service) for router in ROUTERS]
    for router in routers:
        app.include_router(router)
    _add_page(app)
    _describe_token(app, access)
    all_routes = [*app.routes, *(route for router in routers for route in router.routes)]
    metrics.name_routes(route.path for route in all_routes if hasattr(route, "path"))  # a router has none
    return Version(app, service, gallery)


def _add_error_handlers(app: "FastAPI", place: str, log: logging.Logger) -> None:
    """Every error is {"error": sentence}; the gallery's address appears in the log only."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    def respond(status: int, sentence: str, headers: Any = None) -> JSONResponse:
        retry = {"Retry-After": "1"} if status == 503 else {}
        text = " ".join(sentence.replace(place, "the gallery").split())[:MAX_MESSAGE]
        text = visible(text).encode("utf-8", "replace").decode()
        return JSONResponse({"error": text}, status, {**(headers or {}), **retry, "Cache-Control": "no-store"})

    def answer(status: int) -> Callable[[Any, Any], JSONResponse]:
        return lambda _, error: respond(status, str(error))

    def unavailable(request: Any, error: Any) -> JSONResponse:
        log.error("unavailable", extra={"fields": {"id": request.scope.get("request_id"), "text": str(error)}})
        return respond(503, UNAVAILABLE)

    for kind, status in STATUS.items():
        app.add_exception_handler(kind, answer(status))
    app.add_exception_handler(StoreUnavailable, unavailable)
    app.add_exception_handler(HTTPException, lambda _, error: respond(*_http_error(error)))
    app.add_exception_handler(RequestValidationError, lambda _, error: respond(*_invalid(error)))


def _http_error(error: Any) -> tuple[int, str, Any]:
    sentence = str(error.detail)
    if error.status_code == 404:
        sentence = "there is nothing at this address; /openapi.json lists the addresses"
    elif error.status_code == 405:
        sentence = "this address does not support the method"
    elif isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI could not decode the body
        sentence = "the body must be JSON"
    return error.status_code, sentence, error.headers


def _invalid(error: Any) -> tuple[int, str]:
    """The first thing that is wrong with the parameters or the JSON."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return 400, "the body must be JSON"
    if first["type"] == "model_attributes_type":
        return 400, "the body must be a JSON object"
    where = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    return 400 if first["type"] == MALFORMED else 422, f"{where[:100]}: {first['msg'][:200]}"


def _add_page(app: "FastAPI") -> None:
    """Files by name from a fixed list: no path of a request is ever opened."""
    from fastapi.responses import Response

    folder = resources("nearkin.web").joinpath("page")
    report_style = resources("nearkin.report").joinpath("page.css").read_bytes()
    contents = {
        f"/page/{name}": (folder.joinpath(name).read_bytes(), f"{kind}; charset=utf-8") for name, kind in PAGE.items()
    }
    contents |= {
        "/": (_index(folder).encode(), HTML),
        "/page/report.css": (report_style, "text/css"),
    }
    contents["/favicon.ico"] = b"", "image/x-icon"

    def responder(content: bytes, kind: str) -> Callable[[], Coroutine[Any, Any, Response]]:
        async def respond() -> Response:
            return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

        return respond

    for path, (content, kind) in contents.items():
        app.add_api_route(path, responder(content, kind), methods=["GET", "HEAD"], include_in_schema=False)


def _index(folder: "Traversable") -> str:
    """The page itself; what it says without JavaScript is put in here, in every language."""
    texts = {one: json.loads(folder.joinpath("texts", f"{one}.json").read_text("utf-8")) for one in LANGUAGES}
    needed = "".join(f'<p class="alert" lang="{one}">{escape(texts[one]["noscript"])}</p>' for one in LANGUAGES)
    page = folder.joinpath("index.html").read_text("utf-8")
    return page.replace("<noscript></noscript>", f"<noscript>{needed}</noscript>")


def _describe_token(app: "FastAPI", access: Access) -> None:
    """The OpenAPI description declares the token, where one is needed."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        description = describe()
        if access.token is not None:
            schemes = {"token": {"type": "http", "scheme": "bearer"}}
            description.setdefault("components", {})["securitySchemes"] = schemes
            description["security"] = [{"token": []}]
        return description

    app.openapi = openapi  # type: ignore[method-assign]
