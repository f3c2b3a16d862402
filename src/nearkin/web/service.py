"""What the routes call: the gallery behind queues of worker threads, each answer as plain values."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from nearkin.core.errors import (
    MissingRow,
    QueueFull,
    ReloadRefused,
    RequestTooLarge,
    StoreUnavailable,
    UnreadablePicture,
)
from nearkin.core.versions import version_of
from nearkin.data import decode as decoding
from nearkin.gallery import Gallery, GroupEditor, Heat, Reviewed
from nearkin.gallery.answers import Asked
from nearkin.gallery.schema import UNLABELLED, bounded
from nearkin.report import heatmaps, thumbnails
from nearkin.web.enrolment import AWAITED, Progressing
from nearkin.web.explore import Explorer
from nearkin.web.learner import Learner
from nearkin.web.metrics import Metrics
from nearkin.web.middleware import Limits
from nearkin.web.queue import BatchQueue
from nearkin.web.writer import LocalWriter, Writer

__all__ = ["Service"]

T = TypeVar("T")
Item = tuple[Any, "str | None"]  # a picture or a vector, and its name
# Requests beyond these have decoders of their own, so that no other request waits for them.
SMALL = 4 * 2**20  # bytes of files
LIGHT = 64 * 2**20  # bytes of pixels
STATS = ["store", "rows", "labels", "dim", "encoder", "learned", "calibrated", "calibration_classes", "fars", "index"]
STATS += ["lost"]
FIRST_GROUPS, FACES = 60, 12  # groups of an answer to a step, and rows of each
QUERY_SIDE, ROW_SIDE = 224, 96  # pixels of pictures below heat maps; of a row no more than its thumbnail has
REST = 1.0  # seconds that threads get to finish


class Service:
    """The encoder gets the items of several requests in one batch.

    Decoding, writing, reading and exploring have their own threads and do not delay it.
    """

    def __init__(
        self,
        gallery: Gallery,
        limits: Limits,
        pictures: bool = True,
        drawing: bool = False,
        enrolment: Progressing | None = None,
        metrics: Metrics | None = None,
        writer: Writer | None = None,
        written: Callable[[], None] | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        """writer: where writes go, by default to the gallery. written: called after each, in a worker, whose supervisor
        then learns from the labels; otherwise this service does."""
        self.gallery, self.limits, self.pictures, self.drawing = gallery, limits, pictures, drawing
        self.explorer, self.enrolment = Explorer(gallery), enrolment
        self.editor, self.metrics = GroupEditor(gallery), metrics or Metrics()
        self.reload: Callable[[], dict[str, Any]] | None = None
        self._writes, self._written = writer or LocalWriter(gallery), written
        self.learner = Learner(self._learn, log or logging.getLogger(__name__))
        if enrolment is not None:
            enrolment.changed = self._count_enrolment
        soon = limits.answer
        self._decoder = BatchQueue("decoder", queue=2 * limits.requests, threads=2, seconds=soon)
        self._long = BatchQueue("decoder of long files", queue=2 * limits.requests, seconds=soon)
        self._large = BatchQueue("decoder of large pictures", queue=4, seconds=soon)
        self._model = BatchQueue("encoder", self._encode, batch=limits.batch, queue=limits.queue, seconds=soon)
        self._writer = BatchQueue("writer", queue=limits.queue, seconds=soon)
        self._reader = BatchQueue("reader", queue=2 * limits.requests, threads=2, seconds=soon)
        self._explorer = BatchQueue("explorer", queue=16, seconds=10 * soon)
        decoders = self._decoder, self._long, self._large
        self._queues = (*decoders, self._model, self._writer, self._reader, self._explorer)
        self.learner.start()

    def close(self, seconds: float | None = None) -> None:
        """Accepts no more jobs; waiting ones get `seconds`."""
        until = None if seconds is None else time.monotonic() + seconds
        for queue in self._queues:
            queue.close(None if until is None else max(0.0, until - time.monotonic()))
        self.learner.close(None if until is None else max(0.0, until - time.monotonic()))

    @property
    def ended(self) -> bool:
        return not self.learner.is_alive() and all(queue.ended for queue in self._queues)

    def _learn(self) -> str:
        """In the learner's thread."""
        note = ""
        if self._written is None and not self.enrolling:  # an enrolment learns at its end
            note = self.gallery.calibrate_if_changed()
        self.gallery.take_learned()
        return note

    def _count_enrolment(self) -> None:
        """In the enrolment's thread, which ends after its last call: by then answers follow what it has learned."""
        self.count_change()
        state = {} if self.enrolment is None else self.enrolment.state
        if state and state["done"] == state["total"]:
            with suppress(ValueError, OSError):  # the learner tries again
                self.gallery.take_learned()

    def _enrolling(self) -> dict[str, Any]:
        assert self.enrolment is not None
        state = self.enrolment.state
        return state | {"note": state["note"].replace(self.gallery.place, "the gallery")}

    @property
    def enrolling(self) -> bool:
        return self.enrolment is not None and bool(self.enrolment.state["running"])

    def check_health(self) -> None:
        """Raises if a thread has worked on one request for too long; exploring may take longer."""
        for queue in self._queues[:-1]:
            if queue.busy_for > self.limits.stuck:
                raise QueueFull(f"the {queue.name} has worked on one request for {queue.busy_for:.0f} seconds")

    @property
    def waiting(self) -> int:
        return self._model.waiting

    @property
    def queue_lengths(self) -> dict[str, int]:
        return {queue.name: queue.waiting for queue in self._queues}

    async def count_rows(self) -> int | None:
        """Of the gallery; None where it is unavailable."""
        try:
            return await self._reader.submit(lambda _: self.gallery.row_count)
        except (ValueError, TimeoutError, StoreUnavailable, QueueFull):
            return None

    async def reload_run(self) -> dict[str, Any]:
        if self.reload is None:
            raise ReloadRefused("this service was not started by nearkin serve, and cannot read its run again")
        return await asyncio.to_thread(self.reload)

    async def search(self, item: Item, k: int, filter: Any, rerank: str | None = None) -> dict[str, Any]:
        items = await self._decoded([item])

        def answer(seen: list[Any]) -> dict[str, Any]:
            hits = self.gallery.search(seen[0], k, filter, rerank=rerank)
            return {"hits": _plain(hits), "quality": seen[0].quality}

        return await self._model.submit(answer, items)

    async def identify(self, item: Item, asked: Asked, filter: Any, k: int) -> dict[str, Any]:
        """By what the gallery has learned of its labels so far: a query does not wait until it has learned more."""

        def answer(seen: list[Any]) -> dict[str, Any]:
            identity, hits = self.gallery.identify_with_hits(seen[0], k, filter=filter, asked=asked, learn=False)
            note = AWAITED if identity.p_right is None and identity.candidates and self.enrolling else identity.note
            far = None if identity.far is None else identity.far._asdict()
            plain = {"far": far, "note": note, "candidates": _plain(identity.candidates), "hits": _plain(hits)}
            return identity._asdict() | plain

        return await self._model.submit(answer, await self._decoded([item]))

    async def verify(self, a: Item, b: Item, far: float | None) -> dict[str, Any]:
        def answer(seen: list[Any]) -> dict[str, Any]:
            verification = self.gallery.verify(seen[0], seen[1], far=far)
            note = AWAITED if verification.same_probability is None and self.enrolling else verification.note
            return verification._asdict() | {"note": note}

        return await self._model.submit(answer, await self._decoded([a, b]))

    async def explain(self, item: Item, id: int) -> dict[str, Any]:
        """Reading and decoding have their own threads; the encoder's thread computes the heat maps."""
        ((decoded, _),) = await self._decoded([item])
        pictures = []
        for content, source in await self._reader.submit(lambda _: self.gallery.row_pictures(id)):
            with suppress(ValueError, RequestTooLarge):  # an original that is no picture any more, or too large
                pictures.append(((await self._decoded([(content, source)]))[0][0], source))

        def answer(_: Any) -> dict[str, Any]:
            matched = self.gallery.explain(decoded, id, pictures)
            scale = heatmaps.scale_of(matched.a.heat, matched.b.heat)
            query, row = _heat_map(matched.a, scale, QUERY_SIDE), _heat_map(matched.b, scale, ROW_SIDE)
            return matched._asdict() | {"query": query, "row": row}

        return await self._model.submit(answer)

    async def enrol(self, items: Sequence[Item], label: str, metadata: Any) -> dict[str, Any]:
        seen = await self._model.submit(lambda items: items, await self._decoded(items))
        enrolled = await self._write(lambda: self._writes.enrol(seen, label, metadata))
        self.metrics.count_enrolled(enrolled["added"])
        return enrolled

    async def remove(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"rows": await self._write(lambda: self._writes.remove(ids))}

    async def relabel(self, ids: Sequence[int], label: str) -> dict[str, Any]:
        return {"rows": await self._write(lambda: self._writes.relabel(ids, label))}

    async def get(self, id: int) -> dict[str, Any]:
        return await self._reader.submit(lambda _: _plain([self.gallery.get(id)])[0])

    async def thumbnail(self, id: int) -> bytes:
        return await self._reader.submit(lambda _: self.gallery.thumbnail(id))

    async def labels(self, starts: str, most: int) -> dict[str, Any]:
        def answer(_: Any) -> dict[str, Any]:
            start = starts.casefold()
            counts = [(label, n) for label, n in self.gallery.labels().items() if label.casefold().startswith(start)]
            counts.sort(key=lambda pair: (-pair[1], pair[0]))
            return {"labels": [{"label": label, "rows": n} for label, n in counts[:most]]}

        return await self._reader.submit(answer)

    async def stats(self) -> dict[str, Any]:
        stats = await self._reader.submit(lambda _: self.gallery.stats())
        return {key: stats[key] for key in STATS} | {
            "damaged": len(stats["damaged"]),
            "pictures": self.pictures,
            "drawing": self.drawing,
            "enrolling": None if self.enrolment is None else self._enrolling(),
            "version": version_of("nearkin"),
            "largest_body": self.limits.body,
            "largest_upload": self.limits.pictures,
        }

    async def map(self, method: str) -> dict[str, Any]:
        return await self._explorer.submit(lambda _: self.explorer.map(method))

    async def diagnosis(self) -> dict[str, Any]:
        return await self._explorer.submit(lambda _: self.explorer.diagnosis())

    async def neighbours(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        groups = await self._reader.submit(lambda _: self.explorer.neighbours(ids, k))
        return {key: _plain(hits) for key, hits in groups.items()}

    def count_change(self) -> None:
        """The gallery has changed: what was computed of its rows is out of date."""
        self.explorer.changes += 1
        self.learner.look()

    async def groups(self, start: int, most: int) -> dict[str, Any]:
        return await self._reader.submit(lambda _: self._reviewed(self.editor.state(), start, most))

    async def one_group(self, number: int) -> dict[str, Any]:
        def answer(_: Any) -> dict[str, Any]:
            rows = self.editor.state().groups.get(number)
            if rows is None:
                raise MissingRow(number, "group")
            return {"group": number, "rows": len(rows), "ids": rows}

        return await self._reader.submit(answer)

    async def group_step(self, kind: str, version: int, **options: Any) -> dict[str, Any]:
        """propose works as long as a map does, and in its thread; the other steps are writes like any other."""

        def answer() -> dict[str, Any]:
            self._writes.group_step(kind, version, options)
            return self._reviewed(self.editor.state(), 0, FIRST_GROUPS)

        if kind == "propose":
            return await self._explorer.submit(lambda _: answer())
        return await self._write(answer)

    def _reviewed(self, state: Reviewed, start: int, most: int) -> dict[str, Any]:
        counts = self.gallery.labels()
        rows = counts.get(UNLABELLED, 0) if state.scope == "unlabelled" else sum(counts.values())
        shown = list(state.groups.items())[start : start + most]
        return {
            "version": state.version,
            "scope": state.scope,
            "similarity": state.similarity,
            "total": len(state.groups),
            "ungrouped": rows - sum(map(len, state.groups.values())),
            "undo": state.undo,
            "groups": [{"group": n, "rows": len(ids), "ids": ids[:FACES]} for n, ids in shown],
        }

    async def _write(self, write: Callable[[], T]) -> T:
        result = await self._writer.submit(lambda _: write())
        self.count_change()
        if self._written is not None:
            self._written()
        return result

    async def _decoded(self, items: Sequence[Item]) -> Sequence[Item]:
        """Pictures decoded for the encoder, before they enter its queue."""
        self._model.check_room(len(items))
        if not any(isinstance(item, bytes) for item, _ in items):
            return items
        size = sum(len(item) for item, _ in items if isinstance(item, bytes))
        decoder = self._decoder if size <= SMALL else self._long
        light, seen = await decoder.submit(lambda _: self._open(items))
        return seen if light else await self._large.submit(lambda _: self._decode(seen))

    def _open(self, items: Sequence[Item]) -> tuple[bool, Sequence[Item]]:
        """Pictures decoded; or only their headers read, where those declare more than LIGHT bytes of pixels."""
        opened = [(self._opened(item, name), name) for item, name in items]
        size = sum(decoding.weight(item) for item, _ in opened if isinstance(item, decoding.Opened))
        if size > self.limits.decoded:
            raise RequestTooLarge(
                f"the pictures of a request must have at most {self.limits.decoded:,} bytes of pixels "
                f"(width × height × bytes per pixel), got {size:,}"
            )
        return (True, self._decode(opened)) if size <= LIGHT else (False, opened)

    def _opened(self, item: Any, name: str | None) -> Any:
        try:
            return decoding.opened(item, self.limits.pixels) if isinstance(item, bytes) else item
        except UnreadablePicture as error:
            raise ValueError(f"{name or 'the picture'} {error}") from None

    def _decode(self, items: Sequence[Item]) -> Sequence[Item]:
        decoded = self.gallery.decode([item for item, _ in items], [name or "" for _, name in items])
        return [(pixels, name) for pixels, (_, name) in zip(decoded, items, strict=True)]

    def _encode(self, items: list[Item]) -> list[Any]:
        """Each item encoded, or its error; if the call fails as a whole, every item is tried by itself."""
        bad: list[str] = []
        try:
            seen = self.gallery.see([item for item, _ in items], [name or "" for _, name in items], bad)
        except (ValueError, TypeError) as error:
            return [error] if len(items) == 1 else [self._encode([item])[0] for item in items]
        sentences = iter(bad)
        return [ValueError(next(sentences)) if item is None else item for item in seen]


def _heat_map(side: Heat, scale: float, most: int) -> dict[str, Any]:
    """most: pixels of the picture's side."""
    return {
        "heat": side.heat.tolist(),
        "sum": float(side.heat.sum()),
        "bias": side.bias,
        "missing": side.missing,
        "picture": thumbnails.encoded(heatmaps.faded(side.picture), most),
        "overlay": heatmaps.overlay(side.heat, scale),
    }


def _plain(hits: Sequence[Any]) -> list[dict[str, Any]]:
    return [_fields(hit) for hit in hits]


def _fields(hit: Any) -> dict[str, Any]:
    """Metadata too large to send are left out: they were enrolled before metadata were bounded."""
    fields: dict[str, Any] = hit._asdict()
    try:
        bounded(fields.get("metadata"), "metadata")
    except ValueError as error:
        fields["metadata"] = {"left out": str(error)}
    return fields
