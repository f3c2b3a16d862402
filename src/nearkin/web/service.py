"""What the routes ask for: the gallery behind lines of waiting requests, each answer as plain values."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nearkin.core.errors import QueueFull, RequestTooLarge, UnreadablePicture
from nearkin.core.versions import version_of
from nearkin.data import decode as decoding
from nearkin.gallery import Gallery
from nearkin.gallery.schema import bounded
from nearkin.web.explore import Explorer
from nearkin.web.middleware import Limits
from nearkin.web.queue import Line

__all__ = ["Service"]

T = TypeVar("T")
Item = tuple[Any, "str | None"]  # a picture or a vector, and its name
LIGHT = 64 * 2**20  # bytes of pixels; who brings more stands in a line of his own, and nobody waits behind him
REST = 1.0  # seconds in which threads may end what they are at


class Service:
    """The encoder sees the items of several requests together.

    Decoding, writing, reading and exploring have threads of their own and do not hold it up.
    """

    def __init__(self, gallery: Gallery, limits: Limits, pictures: bool = True, drawing: bool = False) -> None:
        self.gallery, self.limits, self.pictures, self.drawing = gallery, limits, pictures, drawing
        self.explorer = Explorer(gallery)
        soon = limits.answer
        self._decoder = Line("decoder", queue=2 * limits.requests, threads=2, seconds=soon)
        self._large = Line("decoder of large pictures", queue=4, seconds=soon)
        self._model = Line("encoder", self._see, batch=limits.batch, queue=limits.queue, seconds=soon)
        self._writer = Line("writer", queue=limits.queue, seconds=soon)
        self._reader = Line("reader", queue=2 * limits.requests, threads=2, seconds=soon)
        self._explorer = Line("explorer", queue=16, seconds=10 * soon)
        self._lines = (self._decoder, self._large, self._model, self._writer, self._reader, self._explorer)

    def close(self, seconds: float | None = None) -> None:
        """What waits is still done, where it is done within so many seconds."""
        until = None if seconds is None else time.monotonic() + seconds
        for line in self._lines:
            line.close(None if until is None else max(0.0, until - time.monotonic()))

    @property
    def ended(self) -> bool:
        return all(line.ended for line in self._lines)

    def healthy(self) -> None:
        """Raises where a thread has not come back from one request for long; exploring may take its time."""
        for line in self._lines[:-1]:
            if line.busy_for > self.limits.stuck:
                raise QueueFull(f"the {line.name} has been at one request for {line.busy_for:.0f} seconds")

    @property
    def waiting(self) -> int:
        return self._model.waiting

    async def search(self, item: Item, k: int, filter: Any) -> dict[str, Any]:
        items = await self._decoded([item])
        return {"hits": await self._model.ask(lambda seen: _plain(self.gallery.search(seen[0], k, filter)), items)}

    async def identify(self, item: Item, far: float | None, filter: Any, k: int) -> dict[str, Any]:
        def answer(seen: list[Any]) -> dict[str, Any]:
            identity, hits = self.gallery.identify_with_hits(seen[0], k, far=far, filter=filter)
            return identity._asdict() | {"candidates": _plain(identity.candidates), "hits": _plain(hits)}

        return await self._model.ask(answer, await self._decoded([item]))

    async def verify(self, a: Item, b: Item, far: float | None) -> dict[str, Any]:
        items = await self._decoded([a, b])
        return await self._model.ask(lambda seen: self.gallery.verify(seen[0], seen[1], far=far)._asdict(), items)

    async def enrol(self, items: Sequence[Item], label: str, metadata: Any) -> dict[str, Any]:
        seen = await self._model.ask(lambda found: found, await self._decoded(items))
        found = await self._write(lambda: self.gallery.enrol(seen, label, metadata))
        return {"ids": found.ids, "added": found.added, "known": found.known}

    async def remove(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"rows": await self._write(lambda: self.gallery.remove(ids))}

    async def relabel(self, ids: Sequence[int], label: str) -> dict[str, Any]:
        return {"rows": await self._write(lambda: self.gallery.relabel(ids, label))}

    async def get(self, id: int) -> dict[str, Any]:
        return await self._reader.ask(lambda _: _plain([self.gallery.get(id)])[0])

    async def thumbnail(self, id: int) -> bytes:
        return await self._reader.ask(lambda _: self.gallery.thumbnail(id))

    async def labels(self, starts: str, most: int) -> dict[str, Any]:
        def answer(_: Any) -> dict[str, Any]:
            start = starts.casefold()
            found = [(one, n) for one, n in self.gallery.labels().items() if one.casefold().startswith(start)]
            found.sort(key=lambda one: (-one[1], one[0]))
            return {"labels": [{"label": label, "rows": n} for label, n in found[:most]]}

        return await self._reader.ask(answer)

    async def stats(self) -> dict[str, Any]:
        found = await self._reader.ask(lambda _: self.gallery.stats())
        kept = (
            "store",
            "rows",
            "labels",
            "dim",
            "encoder",
            "calibrated",
            "calibration_classes",
            "fars",
            "index",
            "lost",
        )
        return {key: found[key] for key in kept} | {
            "damaged": len(found["damaged"]),
            "pictures": self.pictures,
            "drawing": self.drawing,
            "version": version_of("nearkin"),
            "largest_body": self.limits.body,
            "largest_upload": self.limits.pictures,
        }

    async def map(self, method: str) -> dict[str, Any]:
        return await self._explorer.ask(lambda _: self.explorer.map(method))

    async def diagnosis(self) -> dict[str, Any]:
        return await self._explorer.ask(lambda _: self.explorer.diagnosis())

    async def neighbours(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        found = await self._reader.ask(lambda _: self.explorer.neighbours(ids, k))
        return {key: _plain(hits) for key, hits in found.items()}

    async def _write(self, write: Callable[[], T]) -> T:
        found = await self._writer.ask(lambda _: write())
        self.explorer.changes += 1
        return found

    async def _decoded(self, items: Sequence[Item]) -> Sequence[Item]:
        """Pictures as the encoder is fed, before they take a place in its line."""
        self._model.room_for(len(items))
        if not any(isinstance(item, bytes) for item, _ in items):
            return items
        light = await self._decoder.ask(lambda _: self._decode(items, LIGHT))
        return light or await self._large.ask(lambda _: self._decode(items, self.limits.decoded))

    def _decode(self, items: Sequence[Item], most: int) -> Sequence[Item]:
        """None of them where they have more bytes of pixels than `most`, which their headers say."""
        size = sum(self._weight(item, name) for item, name in items)
        if size > self.limits.decoded:
            raise RequestTooLarge(
                f"the pictures of a request must have at most {self.limits.decoded:,} bytes of pixels "
                f"(width × height × bytes a pixel), got {size:,}"
            )
        if size > most:
            return []
        found = self.gallery.decode([item for item, _ in items], [name or "" for _, name in items])
        return [(one, name) for one, (_, name) in zip(found, items, strict=True)]

    def _weight(self, item: Any, name: str | None) -> int:
        try:
            return decoding.weight(item, self.limits.pixels) if isinstance(item, bytes) else 0
        except UnreadablePicture as error:
            raise ValueError(f"{name or 'the picture'} {error}") from None

    def _see(self, items: list[Item]) -> list[Any]:
        """Each as seen, or the error it makes; one that spoils the call for all is looked at by itself."""
        bad: list[str] = []
        try:
            seen = self.gallery.see([item for item, _ in items], [name or "" for _, name in items], bad)
        except (ValueError, TypeError) as error:
            return [error] if len(items) == 1 else [self._see([item])[0] for item in items]
        sentences = iter(bad)
        return [ValueError(next(sentences)) if one is None else one for one in seen]


def _plain(found: Sequence[Any]) -> list[dict[str, Any]]:
    return [_fields(one) for one in found]


def _fields(hit: Any) -> dict[str, Any]:
    """A row whose metadata could not be sent does not spoil the answer; before they were bounded, any were taken."""
    found: dict[str, Any] = hit._asdict()
    try:
        bounded(found.get("metadata"), "metadata")
    except ValueError as error:
        found["metadata"] = {"left out": str(error)}
    return found
