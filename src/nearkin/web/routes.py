"""The addresses of the service, by subject; each reads its request and calls the service."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from nearkin.core.errors import MalformedRequest, NoPicture
from nearkin.gallery.answers import PRIOR, SURE, Asked
from nearkin.web import metrics, parsing, schemas
from nearkin.web.service import Service

if TYPE_CHECKING:
    from fastapi import APIRouter

__all__ = ["exploring", "grouping", "operating", "reading", "searching", "searching_by_vector", "writing"]

REFUSALS = {
    400: "The request is malformed.",
    401: "The token is missing or wrong.",
    403: "The request comes from another web page, or uses another host name.",
    404: "No such row.",
    408: "The body took too long.",
    409: "The item is enrolled under another label, the groups have changed meanwhile, or a reload was refused.",
    413: "The body or its pictures are too large.",
    415: "The format is not supported.",
    422: "A value or a picture is invalid.",
    503: "There are too many requests, or the gallery is unavailable; Retry-After says when to try again.",
}


def searching(service: Service) -> "APIRouter":
    """search, identify, verify, explain by pictures in a form: `curl -F item=@new.jpg`."""
    from fastapi import Depends, UploadFile

    router = _router("search", service)
    only_item = [Depends(parsing.only_parts("item"))]

    @router.post("/search", response_model=schemas.Items, dependencies=only_item)
    async def search(
        item: UploadFile, k: schemas.K = 10, filter: schemas.FilterText = None, rerank: schemas.RerankText = None
    ) -> Any:
        """The k nearest rows, nearest first; or in the order after re-ranking."""
        return await service.search(await parsing.picture(item), k, parsing.json_object(filter, "filter"), rerank)

    @router.post("/identify", response_model=schemas.Identity, dependencies=only_item)
    async def identify(
        item: UploadFile,
        far: schemas.Far = None,
        unknown_prior: schemas.UnknownPrior = PRIOR,
        sure: schemas.Sure = SURE,
        strict: schemas.Strict = False,
        filter: schemas.FilterText = None,
        hits: schemas.HitCount = 0,
    ) -> Any:
        """Who it is: the best candidate with its probability, and a verdict: named, unsure or unknown."""
        asked = Asked(far, unknown_prior, sure, strict)
        return await service.identify(await parsing.picture(item), asked, parsing.json_object(filter, "filter"), hits)

    @router.post("/verify", response_model=schemas.Verification, dependencies=[Depends(parsing.only_parts("a", "b"))])
    async def verify(a: UploadFile, b: UploadFile, far: schemas.MaxFar = None) -> Any:
        """Whether two pictures show the same, with its probability and the false-accept rate per pair."""
        return await service.verify(await parsing.picture(a), await parsing.picture(b), far)

    @router.post("/explain", response_model=schemas.Explained, dependencies=only_item)
    async def explain(item: UploadFile, id: schemas.RowId) -> Any:
        """Which part of a picture and of a row matched: a heat map over each, whose sum is the similarity."""
        return await service.explain(await parsing.picture(item), id)

    return router


def searching_by_vector(service: Service) -> "APIRouter":
    """The same by vectors in JSON, and their enrolment."""
    router = _router("vectors", service, "/api/vectors")

    @router.post("/search", response_model=schemas.Items)
    async def search_vector(
        query: schemas.VectorQuery,
        k: schemas.K = 10,
        filter: schemas.FilterText = None,
        rerank: schemas.RerankText = None,
    ) -> Any:
        """The k nearest rows, nearest first; or in the order after re-ranking."""
        return await service.search(_item(query.item), k, parsing.json_object(filter, "filter"), rerank)

    @router.post("/identify", response_model=schemas.Identity)
    async def identify_vector(
        query: schemas.VectorQuery,
        far: schemas.Far = None,
        unknown_prior: schemas.UnknownPrior = PRIOR,
        sure: schemas.Sure = SURE,
        strict: schemas.Strict = False,
        filter: schemas.FilterText = None,
        hits: schemas.HitCount = 0,
    ) -> Any:
        """Who it is: the best candidate with its probability, and a verdict: named, unsure or unknown."""
        asked = Asked(far, unknown_prior, sure, strict)
        return await service.identify(_item(query.item), asked, parsing.json_object(filter, "filter"), hits)

    @router.post("/verify", response_model=schemas.Verification)
    async def verify_vectors(pair: schemas.VectorPair, far: schemas.MaxFar = None) -> Any:
        """Whether two vectors are of the same, with its probability and the false-accept rate per pair."""
        return await service.verify(_item(pair.a), _item(pair.b), far)

    @router.post("/enrol", response_model=schemas.Enrolled)
    @router.post("/enroll", response_model=schemas.Enrolled, include_in_schema=False)
    async def enrol_vectors(new: schemas.NewVectors) -> Any:
        """Adds vectors under a label."""
        if len(new.items) > service.limits.pictures:
            raise MalformedRequest(f"items must be at most {service.limits.pictures} vectors, got {len(new.items)}")
        return await service.enrol([_item(vector) for vector in new.items], new.label, new.metadata)

    return router


def writing(service: Service) -> "APIRouter":
    """enrol, remove, relabel: when the answer arrives, the change is on disk."""
    from fastapi import Depends, Form, UploadFile

    router = _router("write", service)
    parts = [Depends(parsing.only_parts("items", several=True, texts=("label", "metadata")))]
    Label = Annotated[str, Form()]
    Metadata = Annotated[str, Form(description='JSON, as {"place": "pond"}.')]

    @router.post("/enrol", response_model=schemas.Enrolled, dependencies=parts)
    @router.post("/enroll", response_model=schemas.Enrolled, dependencies=parts, include_in_schema=False)
    async def enrol(items: list[UploadFile], label: Label, metadata: Metadata = "") -> Any:
        """Adds pictures under a label; it is recognised from the first one on."""
        pictures = [await parsing.picture(item) for item in items]
        return await service.enrol(pictures, label, parsing.json_object(metadata, "metadata"))

    @router.post("/remove", response_model=schemas.Count)
    async def remove(rows: schemas.Rows) -> Any:
        """Removes rows; ids that do not exist do not count."""
        return await service.remove(rows.ids)

    @router.post("/relabel", response_model=schemas.Count)
    async def relabel(rows: schemas.Relabel) -> Any:
        """Changes the label of rows; ids that do not exist do not count."""
        return await service.relabel(rows.ids, rows.label)

    return router


def reading(service: Service) -> "APIRouter":
    """Rows, their thumbnails, labels, stats, health."""
    from fastapi import Path, Query, Response

    router = _router("read", service)
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
        """A small picture as the encoder saw it; 404 where there is none."""
        content = await service.thumbnail(id)
        if not content:
            await service.get(id)  # raises where there is no such row
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
        """What the gallery holds and what the service allows."""
        return await service.stats()

    @router.get("/health", response_model=schemas.Health)
    async def health() -> Any:
        """Whether the service answers and none of its threads is stuck; does not query the gallery."""
        service.check_health()
        return {"status": "ok", "waiting": service.waiting}

    return router


def exploring(service: Service) -> "APIRouter":
    """The gallery as a whole."""
    from fastapi import Query

    router = _router("explore", service)
    Method = Annotated[Literal["pca", "tsne"], Query(description="pca is quick; tsne preserves neighbourhoods.")]

    @router.get("/map", response_model=schemas.Map)
    async def map(method: Method = "pca") -> Any:
        """The rows in two dimensions; an even sample of a large gallery."""
        return await service.map(method)

    @router.get("/diagnosis", response_model=schemas.Diagnosis)
    async def diagnosis() -> Any:
        """Labels that are confused with one another, and rows that are likely labelled wrong."""
        return await service.diagnosis()

    @router.post("/neighbours", response_model=schemas.Neighbours)
    async def neighbours(centre: schemas.Centre) -> Any:
        """The rows nearest to the mean of some rows."""
        return await service.neighbours(centre.ids, centre.k)

    return router


def grouping(service: Service) -> "APIRouter":
    """Groups under review: when the answer arrives, the step is on disk."""
    from fastapi import Path, Query

    router = _router("groups", service)
    Start = Annotated[int, Query(ge=0, lt=2**53, description="Groups to skip.")]
    Most = Annotated[int, Query(ge=1, le=500, description="Groups to return.")]

    @router.get("/groups", response_model=schemas.Groups)
    async def groups(start: Start = 0, most: Most = 60) -> Any:
        """The groups under review, the largest first."""
        return await service.groups(start, most)

    @router.get("/groups/{id}", response_model=schemas.GroupCard)
    async def one_group(id: Annotated[int, Path(ge=1, lt=2**53, description="Of a group.")]) -> Any:
        """A group with the ids of all its rows."""
        return await service.one_group(id)

    @router.post("/groups/propose", response_model=schemas.Groups)
    async def propose(step: schemas.Propose) -> Any:
        """Groups rows by what they show; takes seconds to minutes. 422 beyond 20,000 rows."""
        options = {"scope": step.scope, "similarity": step.similarity, "size": step.size}
        return await service.group_step("propose", step.version, **options)

    @router.post("/groups/name", response_model=schemas.Groups)
    async def name(step: schemas.NameGroup) -> Any:
        """Labels the rows of a group; the group is then done."""
        return await service.group_step("name", step.version, group=step.group, label=step.label)

    @router.post("/groups/merge", response_model=schemas.Groups)
    async def merge(step: schemas.MergeGroups) -> Any:
        """Makes one group of several."""
        return await service.group_step("merge", step.version, groups=step.groups)

    @router.post("/groups/split", response_model=schemas.Groups)
    async def split(step: schemas.SplitGroup) -> Any:
        """Makes some rows of a group a group of their own."""
        return await service.group_step("split", step.version, group=step.group, ids=step.ids)

    @router.post("/groups/undo", response_model=schemas.Groups)
    async def undo(step: schemas.GroupStep) -> Any:
        """Takes the last step back; up to 50 of them."""
        return await service.group_step("undo", step.version)

    return router


def operating(service: Service) -> "APIRouter":
    """For those who run the service: counters, and the run read again."""
    from fastapi import Response

    router = _router("operate", service, "")
    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}, "description": "Counters."}}

    @router.get("/metrics", responses={**_refusals(), **text}, response_class=Response)
    async def counters() -> Any:
        """Counters of all processes together, in Prometheus's text format."""
        return Response(service.metrics.text(await service.count_rows()), media_type=metrics.CONTENT_TYPE)

    @router.post("/api/reload", response_model=schemas.Reloaded)
    async def reload() -> Any:
        """Reads the run again; requests under way are answered by the one before."""
        return await service.reload_run()

    return router


def _router(tag: str, service: Service, prefix: str = "/api") -> "APIRouter":
    from fastapi import APIRouter

    route = parsing.form_route(service.limits)
    return APIRouter(prefix=prefix, tags=[tag], responses=_refusals(), route_class=route)


def _refusals() -> dict[int | str, dict[str, Any]]:
    return {status: {"model": schemas.Problem, "description": text} for status, text in REFUSALS.items()}


def _item(vector: list[float]) -> tuple[Any, None]:
    """A vector as an item without a name."""
    return np.asarray(vector, np.float64), None
