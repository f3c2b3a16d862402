"""Restores a gallery from its backup, and copies one between SQLite and PostgreSQL: visible when it is complete."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nearkin.core import checks
from nearkin.core.errors import CorruptBackup
from nearkin.gallery import backup_points, opening, schema
from nearkin.gallery.backup_points import Point
from nearkin.gallery.backups import TIMEOUT, BytesRead, Progress, check_backup, existing_points
from nearkin.gallery.schema import Facts, facts_of_text
from nearkin.gallery.stores import Loader
from nearkin.gallery.stores.postgres_connection import shown

__all__ = ["Transferred", "copy", "restore"]


class Transferred(NamedTuple):
    """The result of a restore or a copy. point: the restored one. damaged: ids of rows that were left out of a copy."""

    rows: int
    point: int | None
    damaged: list[int]
    without_thumbnail: int


def restore(
    folder: str | Path,
    place: str | Path,
    *,
    point: int | None = None,
    latest_whole: bool = False,
    overwrite: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> Transferred:
    """Makes the gallery as it was at a point, the last one by default, in a file or in PostgreSQL.

    Everything is verified; a damaged backup is refused with a sentence that names the file. latest_whole: then restore
    the latest point that is intact. overwrite: replace a gallery that is there, which is kept under another name.
    The gallery is visible when it is complete, and not before.
    """
    checks.positive("timeout", timeout)
    if point is not None and latest_whole:
        raise ValueError("point and latest_whole exclude each other; pass one of them")
    if point is not None:
        checks.integer("point", point, 1)
    home, listed = existing_points(folder)
    number = _latest_whole(home) if latest_whole else listed[-1].number if point is None else point
    try:
        chain = backup_points.chain_to(listed, number)
        facts, notes = _head_of(chain[-1], chain[-2] if len(chain) > 1 else None)
        with closing(opening.store_at(place, timeout)) as store, store.load(facts, overwrite) as loader:
            _replay(chain, loader, progress)
            loader.finish(facts.replace(rows=loader.count, beyond=_without_index(facts)), notes)
    except CorruptBackup as error:
        whole = _latest_whole(home)
        raise CorruptBackup(
            f"{error}; nothing was restored, the latest whole point is {whole}: --point {whole} or --latest-whole"
        ) from None
    return Transferred(loader.count, number, [], 0)


def _latest_whole(home: Path) -> int:
    states = check_backup(home)
    whole = [state.number for state in states if not state.problem]
    if not whole:
        raise CorruptBackup(f"{states[0].problem}; no point of this backup is whole")
    return whole[-1]


def _head_of(point: Point, previous: Point | None) -> tuple[Facts, dict[str, str]]:
    """Facts and notes of a point, from its first block: the length of the vectors is needed before the rows."""
    _, content, _ = next(backup_points.read(point, backup_points.last_checksum(previous) if previous else None))
    with backup_points.as_written(point):
        head = backup_points.parse_head(content)
        facts = facts_of_text(str(point.path), head["facts"])
    if facts.format != schema.FORMAT:
        raise ValueError(
            f"{point.path}: is of format {facts.format}, this version of nearkin restores format {schema.FORMAT}"
        )
    return facts, head["notes"]


def _replay(chain: Sequence[Point], loader: Loader, progress: Progress | None) -> None:
    checksum, advance = b"", BytesRead(chain, progress)
    for point in chain:
        for kind, content, position in backup_points.read(point, checksum):
            with backup_points.as_written(point):
                gone = np.frombuffer(content, ">i8").tolist() if kind == b"D" else []
                rows = backup_points.parse_rows(content) if kind == b"R" else []
                count = int(json.loads(content)["rows"]) if kind == b"E" else None
            if gone:
                loader.remove(gone)
            if rows:
                loader.add(rows)
            if count not in (None, loader.count):
                raise CorruptBackup(f"{point.path}: has {loader.count:,} rows at its end, says {count:,}")
            advance(position)
        checksum = backup_points.last_checksum(point)
        advance.next()


def _without_index(facts: Facts) -> dict[str, Any]:
    """The search index is not copied with the rows, so neither is what is known of it."""
    return {key: value for key, value in facts.beyond.items() if key != "hnsw"}


def copy(
    source: str | Path,
    target: str | Path,
    *,
    overwrite: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> Transferred:
    """Copies a gallery between files and PostgreSQL, in any direction: ids, labels, metadata, thumbnails, encoder.

    Others may write to the source meanwhile; the copy is one state of it. It is visible when it is complete, and not
    before. overwrite: replace a gallery that is there, which is kept under another name.
    """
    checks.positive("timeout", timeout)
    with closing(opening.store_at(source, timeout)) as store, closing(opening.store_at(target, timeout)) as other:
        facts = opening.existing_facts(store)
        if _same_place(source, target):
            raise ValueError(f"{store.where}: target must be another place than the source")
        damaged: list[int] = []
        without_thumbnail = 0
        with other.load(facts, overwrite) as loader, store.snapshot() as snapshot:
            facts = snapshot.facts
            for batch in snapshot.rows():
                loader.add(batch.rows)
                damaged += batch.damaged
                without_thumbnail += len(batch.without_thumbnail)
                if progress is not None:
                    progress(loader.count, max(facts.rows, loader.count))
            new = Facts(facts.dim).gallery  # both live on, and change: they are two galleries now
            loader.finish(facts.replace(gallery=new, rows=loader.count, beyond=_without_index(facts)), snapshot.notes)
    return Transferred(loader.count, None, damaged, without_thumbnail)


def _same_place(source: str | Path, target: str | Path) -> bool:
    if "://" in str(source) or "://" in str(target):
        return shown(source) == shown(target)
    return Path(source).expanduser().resolve() == Path(target).expanduser().resolve()
