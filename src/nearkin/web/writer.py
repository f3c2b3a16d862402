"""Writes of requests: into the gallery of this process, or through the one process that writes."""

import base64
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from nearkin.gallery import Gallery, GroupEditor
from nearkin.gallery.items import Seen
from nearkin.web.process_link import Link

__all__ = ["LocalWriter", "RemoteWriter", "Writer", "answer"]


class Writer(Protocol):
    """When a method returns, the change is on disk, and every process of the service sees it."""

    def enrol(self, items: Sequence[Seen], label: str, metadata: Any) -> dict[str, Any]: ...

    def remove(self, ids: Sequence[int]) -> int: ...

    def relabel(self, ids: Sequence[int], label: str) -> int: ...

    def group_step(self, kind: str, version: int, options: dict[str, Any]) -> None: ...


class LocalWriter:
    def __init__(self, gallery: Gallery) -> None:
        self._gallery, self._editor = gallery, GroupEditor(gallery)

    def enrol(self, items: Sequence[Seen], label: str, metadata: Any) -> dict[str, Any]:
        enrolled = self._gallery.enrol(list(items), label, metadata)
        return {"ids": enrolled.ids, "added": enrolled.added, "known": enrolled.known}

    def remove(self, ids: Sequence[int]) -> int:
        return self._gallery.remove(ids)

    def relabel(self, ids: Sequence[int], label: str) -> int:
        return self._gallery.relabel(ids, label)

    def group_step(self, kind: str, version: int, options: dict[str, Any]) -> None:
        getattr(self._editor, kind)(version, **options)


class RemoteWriter:
    """In a worker: what it has encoded is written by the supervisor.

    A proposal of groups reads all rows, which the supervisor does not hold: the worker writes that one itself, under
    SQLite's lock.
    """

    def __init__(self, link: Link, gallery: Gallery) -> None:
        self._link, self._local = link, LocalWriter(gallery)

    def enrol(self, items: Sequence[Seen], label: str, metadata: Any) -> dict[str, Any]:
        result: dict[str, Any] = self._link.call("enrol", items=_packed(items), label=label, metadata=metadata)
        return result

    def remove(self, ids: Sequence[int]) -> int:
        return int(self._link.call("remove", ids=list(ids)))

    def relabel(self, ids: Sequence[int], label: str) -> int:
        return int(self._link.call("relabel", ids=list(ids), label=label))

    def group_step(self, kind: str, version: int, options: dict[str, Any]) -> None:
        if kind == "propose":
            self._local.group_step(kind, version, options)
        else:
            self._link.call("group_step", kind=kind, version=version, options=options)


def answer(writer: Writer, name: str, arguments: dict[str, Any]) -> Any:
    """Carries out a call of a `RemoteWriter`."""
    if name not in ("enrol", "remove", "relabel", "group_step"):
        raise LookupError(f"no write is called {name}")
    if name == "enrol":
        arguments = {**arguments, "items": _unpacked(arguments["items"])}
    return getattr(writer, name)(**arguments)


def _packed(items: Sequence[Seen]) -> list[list[Any]]:
    return [
        [
            _text(item.vector.astype("<f4").tobytes()),
            _text(item.content),
            item.name,
            _text(item.thumbnail),
            item.quality,
        ]
        for item in items
    ]


def _unpacked(items: list[list[Any]]) -> list[Seen]:
    decode = base64.b64decode
    return [
        Seen(np.frombuffer(decode(vector), "<f4"), decode(content), name, decode(thumbnail), quality)
        for vector, content, name, thumbnail, quality in items
    ]


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
