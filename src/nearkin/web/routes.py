"""The addresses of the service, by subject; each reads its request and asks the service."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from nearkin.core.errors import MalformedRequest, NoPicture
from nearkin.web import parsing, schemas
from nearkin.web.service import Service

if TYPE_CHECKING:
    from fastapi import APIRouter

__all__ = ["asking", "exploring", "reading", "writing"]

REFUSALS = {
    400: "The request is malformed.",
    401: "The token is missing or wrong.",
    403: "Asked from another web page, or under another name of this machine.",
    404: "No such row.",
    408: "The body took too long.",
    409: "The item is enrolled under another label.",
    413: "The body or its pictures are too large.",
    415: "No such format is taken.",
    422: "A value or a picture is not as it must be.",
    503: "There are too many requests, or the gallery cannot be used; Retry-After says when to come again.",
}


def asking(service: Service) -> "APIRouter":
    """search, identify, verify: a picture in a form (`curl -F item=@new.jpg`), or a vector in JSON."""
    from fastapi import Query, Request

    router = _router("ask")
    limits = service.limits
    K = Annotated[int, Query(ge=1, le=1000, description="How many.")]
    Hits = Annotated[int, Query(ge=0, le=1000, description="How many of the nearest rows to give beside it.")]
    FarQuery = Annotated[
        float | None,
        Query(gt=0, lt=1, allow_inf_nan=False, description="Share of queries by strangers that may pass (per query)."),
    ]
    FarPair = Annotated[
        float | None,
        Query(gt=0, lt=1, allow_inf_nan=False, description="Share of pairs of strangers that may pass (per pair)."),
    ]
    Filter = Annotated[str | None, Query(max_length=4000, description='JSON, as {"label": "heron"}; any of a list.')]

    @router.post("/search", response_model=schemas.Items, openapi_extra=parsing.body_schema(["item"]))
    async def search(request: Request, k: K = 10, filter: Filter = None) -> Any:
        """The k nearest rows, nearest first."""
        brought = await parsing.read(request, limits, ["item"])
        return await service.search(_one(brought, "item"), k, parsing.json_object(filter, "filter"))

    @router.post("/identify", response_model=schemas.Identity, openapi_extra=parsing.body_schema(["item"]))
    async def identify(request: Request, far: FarQuery = None, filter: Filter = None, hits: Hits = 0) -> Any:
        """Whose it is, with a calibrated confidence, or unknown."""
        brought = await parsing.read(request, limits, ["item"])
        return await service.identify(_one(brought, "item"), far, parsing.json_object(filter, "filter"), hits)

    @router.post("/verify", response_model=schemas.Verification, openapi_extra=parsing.body_schema(["a", "b"]))
    async def verify(request: Request, far: FarPair = None) -> Any:
        """Whether two are the same, how probably, and at which false-accept rate per pair."""
        brought = await parsing.read(request, limits, ["a", "b"])
        return await service.verify(_one(brought, "a"), _one(brought, "b"), far)

    return router


def writing(service: Service) -> "APIRouter":
    """enrol, remove, relabel: when the answer is there, it is on the disk."""
    from fastapi import Request

    router = _router("write")
    extra = parsing.body_schema(["items"], many=True, texts=["label", "metadata"])

    @router.post("/enrol", response_model=schemas.Enrolled, openapi_extra=extra)
    async def enrol(request: Request) -> Any:
        """Adds pictures or vectors under a label, which is recognised from its first one on."""
        brought = await parsing.read(request, service.limits, ["items"], ["label", "metadata"])
        if "label" not in brought.texts:
            raise MalformedRequest("label is missing")
        metadata = parsing.json_object(brought.texts.get("metadata"), "metadata")
        return await service.enrol(brought.items["items"], brought.texts["label"], metadata)

    @router.post("/remove", response_model=schemas.Count)
    async def remove(rows: schemas.Rows) -> Any:
        """Takes rows out; those that are not there do not count."""
        return await service.remove(rows.ids)

    @router.post("/relabel", response_model=schemas.Count)
    async def relabel(rows: schemas.Relabel) -> Any:
        """Gives rows another label; those that are not there do not count."""
        return await service.relabel(rows.ids, rows.label)

    return router


def reading(service: Service) -> "APIRouter":
    """Rows, their thumbnails, labels, stats, health."""
    from fastapi import Path, Query, Response

    router = _router("read")
    Id = Annotated[int, Path(ge=1, lt=2**63, description="Of a row.")]
    pictures: dict[int | str, dict[str, Any]] = {
        200: {"content": {"image/png": {}, "image/jpeg": {}}, "description": "A small picture."}
    }

    @router.get("/items/{id}", response_model=schemas.Item)
    async def item(id: Id) -> Any:
        """A row; its similarity is 1, that with itself."""
        return await service.get(id)

    @router.get("/items/{id}/thumbnail", responses={**_refusals(), **pictures}, response_class=Response)
    async def thumbnail(id: Id) -> Any:
        """A small picture of what the encoder was shown; 404 where there is none."""
        content = await service.thumbnail(id)
        if not content:
            await service.get(id)  # says so where there is no such row
            raise NoPicture(f"row {id} has no picture")
        kind = "image/png" if content.startswith(b"\x89PNG") else "image/jpeg"
        return Response(content, media_type=kind, headers={"Cache-Control": "private, max-age=3600"})

    @router.get("/labels", response_model=schemas.Labels)
    async def labels(
        starts: Annotated[str, Query(max_length=500)] = "", most: Annotated[int, Query(ge=1, le=10_000)] = 100
    ) -> Any:
        """Labels that start with a text, those of most rows first."""
        return await service.labels(starts, most)

    @router.get("/stats", response_model=schemas.Stats)
    async def stats() -> Any:
        """What there is."""
        return await service.stats()

    @router.get("/health", response_model=schemas.Health)
    async def health() -> Any:
        """That the service answers and none of its threads is stuck; the gallery is not asked."""
        service.healthy()
        return {"status": "ok", "waiting": service.waiting}

    return router


def exploring(service: Service) -> "APIRouter":
    """The gallery as a whole."""
    from fastapi import Query

    router = _router("explore")
    Method = Annotated[Literal["pca", "tsne"], Query(description="pca is quick; tsne keeps neighbours together.")]

    @router.get("/map", response_model=schemas.Map)
    async def map(method: Method = "pca") -> Any:
        """The rows in two dimensions; of large galleries a part."""
        return await service.map(method)

    @router.get("/diagnosis", response_model=schemas.Diagnosis)
    async def diagnosis() -> Any:
        """Labels that are confused with one another, and rows that are likely labelled wrong."""
        return await service.diagnosis()

    @router.post("/neighbours", response_model=schemas.Neighbours)
    async def neighbours(ask: schemas.Ask) -> Any:
        """The rows nearest to the middle of some rows."""
        return await service.neighbours(ask.ids, ask.k)

    return router


def _router(tag: str) -> "APIRouter":
    from fastapi import APIRouter

    return APIRouter(prefix="/api", tags=[tag], responses=_refusals())


def _refusals() -> dict[int | str, dict[str, Any]]:
    return {status: {"model": schemas.Problem, "description": text} for status, text in REFUSALS.items()}


def _one(brought: parsing.Brought, field: str) -> Any:
    items = brought.items[field]
    if len(items) != 1:
        raise MalformedRequest(f"{field} must be one picture or vector, got {len(items)}")
    return items[0]
