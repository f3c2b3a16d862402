"""How PostgreSQL searches: all rows, the rows that a filter leaves, or by pgvector's HNSW. Float64 decides.

The index is in segments, one partial HNSW per range of ids; rows that are newer than the last segment are compared one
by one. The text of a statement decides the way, not a setting, so the server may keep its plan.
"""

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nearkin.gallery import schema
from nearkin.gallery.schema import Facts, Filter, Floats, Row
from nearkin.gallery.stores import postgres_filters
from nearkin.gallery.stores.matrix import similarities

__all__ = [
    "COLUMNS",
    "DEEPEST",
    "FORMS",
    "IndexFacts",
    "Read",
    "Search",
    "Statement",
    "best",
    "between",
    "by_cursor",
    "query_text",
    "read_rows",
]

SPARE = 6  # rows that exact search proposes beyond k
DEEPEST = 1000  # hnsw.ef_search; pgvector takes no more
STEP_COST = 20.0  # one more candidate of HNSW, in comparisons of a row that passes a filter
FILTERS, SAMPLE = 256, 1000  # filters whose share of rows is remembered; rows that estimate it
FEW = 100_000  # passing rows up to which the index of metadata finds them
SHORT = 20_000  # of these a list fits into the memory of PostgreSQL's defaults
LIST_OF_ROWS = ("SELECT set_config('work_mem', '32MB', true)", ())  # of those that pass, not of their pages
# The depth of an index; and no plan may sort all rows instead.
BY_INDEX = (
    "SELECT set_config('hnsw.ef_search', %s, true), set_config('enable_sort', 'off', true),"
    " set_config('hnsw.iterative_scan', 'relaxed_order', true)"
)
COLUMNS = "id, content, label, name, metadata, vector_send(vector), sum"
# What HNSW orders by: halfvec, or the Hamming distance of the signs, whose nearest are compared again in SQL.
FORMS = {
    "half": "vector::halfvec({dim}) <#> %s::vector({dim})::halfvec({dim})",
    "bit": "binary_quantize(vector)::bit({dim}) <~> binary_quantize(%s::vector({dim}))::bit({dim})",
}
Neighbours = list[tuple[Row, float]]
Statement = tuple[str, Sequence[Any]]  # and its values
Read = Callable[[Sequence[Statement]], list[Any]]  # what the last of some statements of one transaction selects
Parts = tuple[tuple[str, bool], ...]  # of a statement: its condition, and whether an index has it


class IndexFacts(NamedTuple):
    """What the description of a gallery says about its index.

    bounds: the first id of each segment, and the first id after all of them. depth, deep: hnsw.ef_search that found the
    10 and the 100 nearest when it was built. recall: of the 10, measured then. own: of filters with indexes of their
    own, by `postgres_filters.slot`, their segments and depth.
    """

    form: str
    bounds: tuple[int, ...]
    depth: int
    deep: int
    recall: float
    own: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def of(cls, facts: Facts) -> "IndexFacts | None":
        """None where there is no index, or one of an earlier version."""
        stored = facts.beyond.get("hnsw", {})
        if "bounds" not in stored:
            return None
        figures = stored["depth"], stored["deep"], stored["recall"]
        return cls(stored["form"], tuple(stored["bounds"]), *figures, stored.get("own", {}))

    def stored(self) -> dict[str, Any]:
        return self._asdict() | {"bounds": list(self.bounds)}

    def depth_for(self, count: float) -> int:
        """hnsw.ef_search that finds so many of the nearest, from those measured for 10 and 100."""
        wanted = self.depth + (self.deep - self.depth) * (count - 10) / 90
        return math.ceil(min(max(wanted, self.depth, count), DEEPEST))


def has_terms(facts: Facts) -> bool:
    """Whether metadata are indexed: beside the segments, and where these are not good enough."""
    return bool({"bounds", "too_low"} & set(facts.beyond.get("hnsw", {})))


class Search:
    """In one table. exact: without the index, whatever there is."""

    def __init__(self, gallery_schema: str, exact: bool) -> None:
        self.schema, self.table, self.exact = gallery_schema, f"{gallery_schema}.items", exact
        self._shares: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def nearest(
        self,
        read: Read,
        facts: Facts,
        query: Floats,
        k: int,
        filter: Filter | None,
        excluded: Callable[[dict[int, str]], Sequence[int]],
    ) -> Neighbours:
        """The k nearest, ties by id. excluded: told of damaged rows, returns the ids to leave out."""
        index, out = None if self.exact else IndexFacts.of(facts), excluded({})
        own = postgres_filters.single(filter) if filter is not None and index is not None and index.own else None
        if index is not None and own is not None and k + _spare(k) <= DEEPEST:
            while (found := self.by_own_index(read, facts.dim, index, query, k + _spare(k), *own, out)) is not None:
                rows, damaged = found
                if damaged:
                    out = excluded(damaged)
                elif len(rows) < k:
                    break
                else:
                    return best(rows, query, k)[0]
        share = 1.0 if filter is None or not has_terms(facts) else self._share(read, facts, filter)
        depth = None if index is None else _depth(facts, index, k, share)
        while index is not None and depth is not None:
            rows, damaged = self.by_index(read, facts.dim, index, query, k + _spare(k), depth, filter, out)
            if damaged:
                out = excluded(damaged)
            elif len(rows) < k:
                break  # the index gave up before enough rows passed, or among removed ones
            else:
                return best(rows, query, k)[0]
        few = filter is not None and has_terms(facts) and share * facts.rows <= FEW
        return self.compare(read, query, k, filter, out, excluded, few, share * facts.rows > SHORT)

    # --- by index

    def by_index(
        self,
        read: Read,
        dim: int,
        index: IndexFacts,
        query: Floats,
        count: int,
        depth: int,
        filter: Filter | None = None,
        excluded: Sequence[int] = (),
    ) -> tuple[list[Row], dict[int, str]]:
        """`count` rows of each segment, unordered; and damaged ones."""
        where, values = self.conditions(filter, excluded)
        more = f" AND {where}" if where else ""
        parts = [(f"{between(*one)}{more}", True) for one in pairwise(index.bounds)]
        parts.append((f"id >= {index.bounds[-1]}{more}", False))
        return self._proposed(read, dim, index.form, tuple(parts), values, query, count, depth)

    def by_own_index(
        self,
        read: Read,
        dim: int,
        index: IndexFacts,
        query: Floats,
        count: int,
        key: str,
        value: str,
        excluded: Sequence[int] = (),
        depth: int | None = None,
    ) -> tuple[list[Row], dict[int, str]] | None:
        """As `by_index`, by the indexes of one value of a filter; None where it has none."""
        own = index.own.get(postgres_filters.slot(key, value))
        if own is None:
            return None
        if depth is None:  # measured for 10 rows
            deeper = index.depth_for(count - _spare(count)) / index.depth
            depth = min(DEEPEST, math.ceil(own["depth"] * deeper))
        where, values = self.conditions(None, excluded)
        parts = _own_parts(self.schema, index.bounds, tuple(map(tuple, own["segments"])), key, value, where)
        return self._proposed(read, dim, index.form, parts, values, query, count, depth)

    def _proposed(
        self,
        read: Read,
        dim: int,
        form: str,
        parts: Parts,
        values: list[Any],
        query: Floats,
        count: int,
        depth: int,
    ) -> tuple[list[Row], dict[int, str]]:
        """values: of the condition of every part."""
        text = _statement(self.table, dim, form, parts, count, depth if form == "bit" else count)
        each = [query_text(query)]
        twice = [*each, *each] if form == "bit" else each
        parameters = [one for _, by_index in parts for one in (*values, *(twice if by_index else each))]
        return read_rows(read([(BY_INDEX, (str(depth),)), (text, parameters)]))

    def _share(self, read: Read, facts: Facts, filter: Filter) -> float:
        """Of rows that pass a filter; remembered until a twentieth of all rows has changed, for it decides about speed.

        Estimated from some rows, and counted where few of them pass.
        """
        name, state = str(filter), facts.next_id + facts.changes
        if name in self._shares and abs(state - self._shares[name][1]) <= max(100, facts.rows // 20):
            self._shares.move_to_end(name)
            return self._shares[name][0]
        where, values = self.conditions(filter, ())
        ids = np.random.default_rng(0).integers(1, max(2, facts.next_id), SAMPLE).tolist()
        sample = f"SELECT count(*) FILTER (WHERE {where}), count(*) FROM {self.table} WHERE id = ANY(%s)"
        ((passed, sampled),) = read([(sample, [*values, ids])])
        share = float(passed / max(1, sampled))
        if share * facts.rows <= FEW:
            where, values = self.conditions(filter, (), terms=True)
            ((count,),) = read([LIST_OF_ROWS, (f"SELECT count(*) FROM {self.table} WHERE {where}", values)])
            share = float(count / max(1, facts.rows))
        self._shares[name] = share, state
        if len(self._shares) > FILTERS:
            self._shares.popitem(last=False)
        return share

    # --- by comparing rows

    def compare(
        self,
        read: Read,
        query: Floats,
        k: int,
        filter: Filter | None,
        out: Sequence[int],
        excluded: Callable[[dict[int, str]], Sequence[int]],
        terms: bool,
        many: bool = True,
    ) -> Neighbours:
        """More and more rows are proposed until the last one is too far to be among the k nearest.

        terms: by the index of metadata, of whose rows many may pass.
        """
        count, slack = k + SPARE, 8 * len(query) * float(np.finfo(np.float32).eps)
        text = query_text(query)
        settings = [LIST_OF_ROWS] if terms and many else []
        others: set[int] = set()  # whose terms have the hash of another
        while True:
            where, values = self.conditions(filter, [*out, *others], terms=terms)
            near = f"SELECT id FROM {self.table} {'WHERE ' + where if where else ''}"
            near += " ORDER BY (vector <#> %s::vector) + 0, id LIMIT %s"
            # The bytes of a vector are only selected for near rows: PostgreSQL would make them of all.
            statement = _fetched(self.table, near)
            rows, damaged = read_rows(read([*settings, (statement, [*values, text, count])]))
            wrong = {row.id for row in rows if terms and filter is not None and not filter.passes(row)}
            if damaged or wrong:
                out, others = excluded(damaged) if damaged else out, others | wrong
                continue
            nearest, last = best(rows, query, k)
            if len(rows) < count or nearest[-1][1] - last > slack:
                return nearest
            count *= 2

    def conditions(self, filter: Filter | None, excluded: Sequence[int], terms: bool = False) -> tuple[str, list[Any]]:
        """As SQL, and their values. terms: by the index of metadata, which may let rows of an equal hash pass."""
        parts: list[str] = []
        values: list[Any] = []
        if filter is not None and filter.labels is not None:
            parts.append("label = ANY(%s)")
            values.append(list(filter.labels))
        for key, allowed in filter.keys.items() if filter is not None else ():
            if terms:
                hashes = "SELECT coalesce(array_agg(term), '{}') FROM unnest(%s::text[]) AS pair,"
                hashes += f" unnest({self.schema}.terms(pair)) AS term"
                parts.append(f"{self.schema}.terms(metadata) && ({hashes})")
                values.append([f"{{{json.dumps(key)}: {value}}}" for value in allowed])
            else:
                parts.append("metadata::jsonb -> %s = ANY(%s::jsonb[])")
                values += [key, list(allowed)]
        if excluded:
            parts.append("id <> ALL(%s)")
            values.append(list(excluded))
        return " AND ".join(parts), values


def _depth(facts: Facts, index: IndexFacts, k: int, share: float) -> int | None:
    """Of a search by index; None where comparing each row that passes the filter is faster. share: of such rows."""
    if k + _spare(k) > DEEPEST:
        return None
    share = max(share, 1e-9)
    depth = index.depth_for(k / share**1.3)  # among rows that pass, the nearest are farther, and a class passes as one
    steps = max(depth, (k + _spare(k)) / share)
    return None if share * facts.rows <= steps * STEP_COST else depth


@lru_cache(maxsize=256)
def _statement(table: str, dim: int, form: str, parts: Parts, count: int, limit: int) -> str:
    """Reads the rows near a query: of each part by its index, or by comparing each row."""
    order, near = FORMS[form].format(dim=dim), []
    compared = f"ORDER BY (vector <#> %s::vector({dim})) + 0 LIMIT {count}"
    for condition, by_index in parts:
        if not by_index:
            near.append(f"(SELECT id FROM {table} WHERE {condition} {compared})")
            continue
        proposed = f"FROM {table} WHERE {condition} ORDER BY {order} LIMIT {limit}"
        if form == "bit":
            near.append(f"(SELECT id FROM (SELECT id, vector {proposed}) AS proposed {compared})")
        else:
            near.append(f"(SELECT id {proposed})")
    return _fetched(table, " UNION ALL ".join(near))


def _fetched(table: str, near: str) -> str:
    """The rows of the ids that a statement selects."""
    fields = COLUMNS.replace("id,", "items.id,", 1)
    return f"WITH near AS MATERIALIZED ({near}) SELECT {fields} FROM near JOIN {table} AS items ON items.id = near.id"


@lru_cache(maxsize=256)
def _own_parts(
    schema: str, bounds: tuple[int, ...], segments: tuple[tuple[int, int], ...], key: str, value: str, where: str
) -> Parts:
    """Of a filter with indexes of its own in some segments; in the others few rows pass."""
    more = f" AND {where}" if where else ""
    # A clause is text: its % are no parameters.
    frequent = postgres_filters.clause(key, value).replace("%", "%%")
    rare = postgres_filters.rare_clause(schema, key, value).replace("%", "%%")
    parts = (
        (f"{between(*one)} AND {frequent if one in segments else rare}{more}", one in segments)
        for one in pairwise(bounds)
    )
    return (*parts, (f"id >= {bounds[-1]} AND {frequent}{more}", False))


def between(first: int, end: int) -> str:
    """The condition of a segment, which its index has too."""
    return f"id >= {first} AND id < {end}"


def query_text(query: Floats) -> str:
    return "[" + ",".join(f"{number:.9g}" for number in query.tolist()) + "]"


def _spare(k: int) -> int:
    """Rows that the index proposes beyond k: it orders by rounded vectors."""
    return max(4, k // 4)


def best(rows: list[Row], query: Floats, k: int) -> tuple[Neighbours, float]:
    """The k nearest by float64, and the least similarity of all."""
    if not rows:
        return [], 0.0
    score = similarities(schema.unpack([row.vector for row in rows], len(query)), query)
    order = np.lexsort((np.array([row.id for row in rows], np.int64), -score))[:k]
    return [(rows[i], float(score[i])) for i in order], float(score.min())


def by_cursor(cursor: Any) -> Read:
    """One statement after the other."""

    def read(statements: Sequence[Statement]) -> list[Any]:
        for statement in statements:
            cursor.execute(*statement, prepare=True)
        selected: list[Any] = cursor.fetchall()
        return selected

    return read


def read_rows(selected: Iterable[Any]) -> tuple[list[Row], dict[int, str]]:
    """Rows that match their checksum, vectors without pgvector's head of 4 bytes, and what is wrong with the others."""
    rows, damaged = [], {}
    for id, content, label, name, metadata, vector, total in selected:
        row = Row(id, content, label, name, metadata, vector[4:])
        try:
            difference = "" if schema.checksum(*row) == total else "not as it was written"
        except Exception as error:  # a number beyond its range
            difference = f"not as it was written ({type(error).__name__})"
        if difference:
            damaged[id] = difference
        else:
            rows.append(row)
    return rows, damaged
