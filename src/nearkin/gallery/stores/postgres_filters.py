"""Indexes for filters in PostgreSQL: of the keys that were asked for, an HNSW per segment and frequent value.

Each is partial, over the rows of the segment that have the value. A search whose filter is that value alone asks these
and is as fast as one without a filter. In a segment where few rows have the value they are compared one by one. Each
condition begins with a range of ids, so new rows cost an enrolment one comparison per index.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

from nearkin.gallery.schema import Filter, scalar_json

__all__ = ["LABEL", "Part", "check_keys", "clause", "name_of", "rare_clause", "single", "slot", "wanted"]

LABEL = "label"  # the key that is no metadata
LEAST, MOST_SHARE = 5_000, 0.8  # rows of a value that has its own index, and of the segment: else it gains nothing
MOST = 128  # indexes of a gallery; the most frequent values have them


class Part(NamedTuple):
    """The rows of one value, as JSON, in one segment."""

    first: int
    end: int
    key: str
    value: str
    rows: int

    @property
    def name(self) -> str:
        return name_of(self.first, self.end, self.key, self.value)


def check_keys(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str) or not all(isinstance(key, str) and key and "\0" not in key for key in keys):
        raise ValueError(f"keys of filters must be a list of texts, got {keys!r}")
    return list(dict.fromkeys(keys))


def slot(key: str, value: str) -> str:
    """Under which the gallery's description has the indexes of a value."""
    return json.dumps([key, value], ensure_ascii=False)


def name_of(first: int, end: int, key: str, value: str) -> str:
    return f"items_pass_{first}_{end}_{sha256(slot(key, value).encode()).hexdigest()[:12]}"


def single(filter: Filter) -> tuple[str, str] | None:
    """Key and value of a filter that is one value alone."""
    if filter.labels is not None:
        return (LABEL, scalar_json(filter.labels[0])) if len(filter.labels) == 1 and not filter.keys else None
    if len(filter.keys) != 1:
        return None
    key, values = next(iter(filter.keys.items()))
    return (key, values[0]) if len(values) == 1 else None


def clause(key: str, value: str) -> str:
    """The condition, the same text in index and search, so that the server sees that they match."""
    if key == LABEL:
        return f"label = {_quoted(json.loads(value))}"
    return f"metadata::jsonb -> {_quoted(key)}::text = {_quoted(value)}::jsonb"


def rare_clause(gallery_schema: str, key: str, value: str) -> str:
    """The same, where the index of labels or metadata finds the few rows."""
    if key == LABEL:
        return clause(key, value)
    pair = _quoted(f"{{{json.dumps(key, ensure_ascii=False)}: {value}}}")
    return f"{gallery_schema}.terms(metadata) && {gallery_schema}.terms({pair}) AND {clause(key, value)}"


def wanted(connection: Any, table: str, keys: Sequence[str], bounds: tuple[int, ...]) -> list[Part]:
    """Of all segments, the largest first."""
    parts = [part for key in keys for one in pairwise(bounds) for part in _frequent(connection, table, key, *one)]
    return sorted(parts, key=lambda part: -part.rows)[:MOST]


def _frequent(connection: Any, table: str, key: str, first: int, end: int) -> list[Part]:
    value = "to_jsonb(label)" if key == LABEL else f"metadata::jsonb -> {_quoted(key)}::text"
    counted = f"SELECT {value} AS value, count(*) AS rows FROM {table} WHERE id >= {first} AND id < {end} GROUP BY 1"
    query = f"SELECT value::text, rows, (sum(rows) OVER ())::bigint FROM ({counted}) AS counted"
    parts = []
    for text, rows, total in connection.execute(query).fetchall():
        if text is None or not LEAST <= rows <= MOST_SHARE * total or text[0] in "[{":
            continue
        with suppress(ValueError):  # a number beyond those of Python, which no filter can name
            parts.append(Part(first, end, key, scalar_json(json.loads(text)), rows))
    return parts


def _quoted(text: str) -> str:
    from psycopg import sql

    return sql.Literal(text).as_string(None)
