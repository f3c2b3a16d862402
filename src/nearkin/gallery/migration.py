"""Brings a gallery of an older format up to date when it is opened; a copy of the old one is kept beside it.

A new format: increase `schema.FORMAT` and add a `Step` here, under the number of the format it starts from.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from nearkin.gallery import schema
from nearkin.gallery.schema import Facts
from nearkin.gallery.stores import Store

__all__ = ["STEPS", "Step", "migrate"]


class Step(NamedTuple):
    """From one format to the next. sqlite, postgres: statements, with {schema} for that of the gallery in PostgreSQL.
    facts: changes the fields of the description, if they change."""

    sqlite: tuple[str, ...]
    postgres: tuple[str, ...]
    facts: Callable[[dict[str, Any]], dict[str, Any]] = dict


STEPS: dict[int, Step] = {}  # format 1 is that of version 0.1.0, and the only one so far


def migrate(store: Store, facts: Facts) -> Facts:
    """The facts in the format of today. Copy and change are one transaction: a kill leaves the old format, whole."""
    if facts.format == schema.FORMAT:
        return facts
    missing = [number for number in range(facts.format, schema.FORMAT) if number not in STEPS]
    if missing:
        raise ValueError(f"{store.where}: has format {facts.format}, which no version of nearkin has written")

    def changed(old: Facts) -> tuple[list[str], Facts]:
        """The statements, and the new facts."""
        steps = [STEPS[number] for number in range(old.format, schema.FORMAT)]
        statements = [text for step in steps for text in (step.sqlite if store.kind == "sqlite" else step.postgres)]
        fields = dict(vars(old))
        for step in steps:
            fields = step.facts(fields)
        return statements, Facts(**fields | {"format": schema.FORMAT})

    store.migrate(schema.FORMAT, changed)
    return store.facts() or facts
