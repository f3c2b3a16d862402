"""Some items into a gallery in one transaction: who is there already is not encoded again."""

from typing import Any, NamedTuple

import numpy as np

from nearkin.core.errors import LabelConflict
from nearkin.gallery import items
from nearkin.gallery.encoding import Encoding
from nearkin.gallery.items import Seen
from nearkin.gallery.schema import Fields, fields_of, packed
from nearkin.gallery.stores.contract import Added, Store

__all__ = ["Asked", "admit", "plain"]


class Asked(NamedTuple):
    """Items with what is said of them, one entry per item; name None: its own. keep: see `Gallery.enrol`."""

    items: list[Any]
    labels: list[str]
    metadata: list[Any]
    names: list[str | None]
    keep: bool


def plain(item: Any, encoding: Encoding | None) -> bool:
    """Whether it needs no encoder: seen before, or a vector that is an embedding already."""
    if isinstance(item, Seen):
        return True
    return getattr(item, "ndim", 0) == 1 and (encoding is None or encoding.takes_pictures)


def admit(store: Store, encoding: Encoding | None, dim: int, asked: Asked) -> list[Added]:
    """What became of each."""
    there: dict[bytes, tuple[int, str]] = {}
    first = asked.items[0]
    if all(
        isinstance(item, np.ndarray) and item.shape == first.shape and plain(item, encoding) for item in asked.items
    ):
        seen: list[Any] = list(items.vectors(np.stack(asked.items), dim))
    else:
        raws = items.contents(asked.items, encoding, dim)
        there = store.known([raw.content for raw in raws])
        ready = iter(items.encoded([raw for raw in raws if raw.content not in there], encoding))
        seen = [raw if raw.content in there else next(ready) for raw in raws]
    done: list[Added | None] = [None] * len(seen)
    for i, one in enumerate(seen):
        if one.content in there:
            id, has = there[one.content]
            if has != asked.labels[i] and not asked.keep:
                raise LabelConflict(asked.names[i] or one.name, id, has, asked.labels[i])
            done[i] = Added(id, False, has)
    new = [i for i, one in enumerate(done) if one is None]
    for i, one in zip(new, store.add(_fields(seen, asked, new), asked.keep) if new else [], strict=True):
        done[i] = one
    return [one for one in done if one is not None]


def _fields(seen: list[Seen], asked: Asked, new: list[int]) -> list[Fields]:
    vectors = packed(np.stack([seen[i].vector for i in new])) if new else []
    rows = []
    for i, vector in zip(new, vectors, strict=True):
        one, name = seen[i], asked.names[i]
        name = one.name if name is None else name
        rows.append(fields_of(one.content, asked.labels[i], name, asked.metadata[i], vector, one.thumbnail))
    return rows
