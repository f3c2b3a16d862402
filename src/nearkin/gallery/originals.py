"""The items that rows were enrolled from, read again where they still are: at their path, or in their source."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nearkin import data
from nearkin.core.errors import NotAllowed
from nearkin.data import groups
from nearkin.data.item_set import Items
from nearkin.data.map_dataset import check_typed
from nearkin.data.sources import AS_BEFORE, PLAIN
from nearkin.gallery import matched_parts
from nearkin.gallery.items import Encoding, RawItem, encode_items, hash_items
from nearkin.gallery.schema import Row

__all__ = ["Originals"]


class Originals:
    """Reads the originals of rows for an encoder. sources: that were enrolled from; each is opened when needed."""

    def __init__(self, sources: Sequence[str], encoding: Encoding, reading: data.Reading = PLAIN) -> None:
        self._sources, self._encoding = list(sources), encoding
        self._reading = reading._replace(split_folders=AS_BEFORE, leaf_classes=False)  # they are found by name
        self._opened: dict[str, tuple[Items, dict[str, int]] | None] = {}

    def has(self, row: Row) -> bool:
        """Whether something may be there, without reading it: `read` decides whether it is what was enrolled."""
        if self._encoding.takes_pictures and matched_parts.has_original(row.name):
            return True
        return any(self._position(source, row.name) is not None for source in self._sources)

    def read(self, row: Row) -> RawItem | None:
        """The item, if it is what was enrolled, by the hash of its content."""
        for content in self._contents(row):
            with suppress(ValueError, TypeError):  # no picture, or other features than the encoder takes
                (item,) = hash_items([content], self._encoding, self._encoding.dim)
                if item.content == row.content and isinstance(item, RawItem):
                    return item._replace(name=row.name)
        return None

    def embedded(self, rows: Sequence[Row]) -> dict[int, Any]:
        """By id what `encode_items` makes of those rows whose originals are there and can be decoded."""
        items = {row.id: item for row in rows if (item := self.read(row)) is not None}
        encoded = encode_items(list(items.values()), self._encoding, [])
        return {id: seen for id, seen in zip(items, encoded, strict=True) if seen is not None}

    def _contents(self, row: Row) -> Any:
        if self._encoding.takes_pictures and (content := matched_parts.original(row.name)):
            yield content
        for source in self._sources:
            if (position := self._position(source, row.name)) is None:
                continue
            items, at = position
            with self._unless_refused(source):
                if items.vectors is not None:
                    yield items.vectors[at]
                elif items.pictures is not None:
                    yield items.pictures.read(at)

    @contextmanager
    def _unless_refused(self, source: str) -> Iterator[None]:
        """Passes over what cannot be read any more; what only the user may allow is said."""
        try:
            yield
        except NotAllowed as error:
            warnings.warn(f"originals of {source} are not read: {error}", RuntimeWarning, stacklevel=2)
        except (OSError, ValueError):
            pass

    def _position(self, source: str, name: str) -> tuple[Items, int] | None:
        """Where a source has the item of this name."""
        prefix = source.rstrip("/") + "/"
        opened = self._source(source) if name.startswith(prefix) else None
        at = None if opened is None else opened[1].get(name[len(prefix) :])
        return None if opened is None or at is None else (opened[0], at)

    def _source(self, source: str) -> tuple[Items, dict[str, int]] | None:
        """The items of a source by name; None where it cannot be opened any more."""
        if source not in self._opened:
            self._opened[source] = None
            with self._unless_refused(source):
                check_typed(source, [self._reading.own_source], "the gallery")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    items = data.load(source, labelled=False, group_column=groups.UNUSED, **self._reading.for_load())
                self._opened[source] = items, {name: i for i, name in enumerate(items.names)}
        return self._opened[source]
