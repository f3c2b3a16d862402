"""The stored form of a gallery: chosen when it is made, changed later, and a search that may be asked to be exact."""

from collections.abc import Callable
from typing import Any

from nearkin.gallery.schema import Filter, Floats, Row
from nearkin.gallery.stores import Store
from nearkin.gallery.stores.sqlite import SqliteStore
from nearkin.gallery.stores.stored_forms import parse_form

__all__ = ["check_form", "nearest", "store_as"]


def check_form(store: Store, form: str, dim: int) -> str:
    """A form that this store can have, or a ValueError."""
    if not isinstance(store, SqliteStore):
        raise ValueError(f"{store.where}: stored={form!r} is for galleries in a file; PostgreSQL has its own index")
    return parse_form(form, dim).text


def store_as(store: Store, form: str | None, dim: int, progress: Callable[[int, int], None] | None = None) -> None:
    """See `Gallery.store_as`."""
    if form is not None:
        check_form(store, form, dim)
    if isinstance(store, SqliteStore):
        store.store_as(form)
    store.warm(progress)


def nearest(rows: Any, query: Floats, k: int, filter: Filter | None, exact: bool) -> list[tuple[Row, float]]:
    """`nearest` of a store or of what is searched in its place, exact if that is asked for."""
    found: list[tuple[Row, float]]
    if getattr(rows, "kind", "sqlite") != "sqlite" and exact:
        raise ValueError(f"{rows.where}: exact=True is for galleries in a file; PostgreSQL takes search=exact")
    found = rows.nearest(query, k, filter, exact=True) if exact else rows.nearest(query, k, filter)
    return found
