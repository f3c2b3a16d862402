"""Backups of a gallery: a folder that each call extends by what changed since the one before."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nearkin.core import checks, files
from nearkin.core.errors import CorruptBackup
from nearkin.gallery import backup_points, opening
from nearkin.gallery.backup_points import Point, PointWriter
from nearkin.gallery.schema import facts_of_text
from nearkin.gallery.stores import IdArray, Snapshot, SumArray

__all__ = ["Backup", "PointState", "backup", "check_backup", "existing_points"]

TIMEOUT = 30.0  # seconds
LISTED = 1000  # ids of damaged rows in the end of a point
FETCHED = 4096  # rows read at a time
Progress: TypeAlias = Callable[[int, int], None]


class Backup(NamedTuple):
    """What a backup wrote. new: False where nothing had changed since point `number`, and nothing was written.

    rows: in the backup now. damaged: ids of rows that do not match their checksum; the backup keeps the state it has
    of them, if any. missing: rows that the gallery should have and does not return.
    """

    path: Path
    number: int
    new: bool
    rows: int
    added: int
    changed: int
    removed: int
    damaged: list[int]
    missing: int
    without_thumbnail: int


class PointState(NamedTuple):
    """A point of a backup. rows, added, changed, removed: None where the file is damaged, which `problem` describes."""

    number: int
    path: Path
    full: bool
    created: str
    bytes: int
    rows: int | None
    added: int | None
    changed: int | None
    removed: int | None
    problem: str


class _State(NamedTuple):
    """Of a chain of points: ids and checksums of its rows, the last checksum, the facts as text, the notes."""

    ids: IdArray
    sums: SumArray
    checksum: bytes
    facts: str
    notes: dict[str, str]


# --- backup


def backup(
    place: str | Path,
    folder: str | Path,
    *,
    full: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> Backup:
    """Adds a point to the backup in `folder`: all rows at first, then what changed since the point before.

    Others may write to the gallery meanwhile; the point is one state of it. The points that it continues are read and
    verified first. full: begin anew with all rows; older points stay, and may be deleted.
    """
    checks.positive("timeout", timeout)
    home = Path(folder).expanduser()
    with closing(opening.store_at(place, timeout)) as store:
        opening.existing_facts(store)
        _prepare(home)
        with closing(files.Lock(home / ".lock", f"{home}: another process is writing a backup there")):
            _remove_leftovers(home)
            listed = backup_points.points(home)
            state = _state_of(listed, progress) if listed and not full else None
            with store.snapshot() as snapshot:
                return _write_point(snapshot, home, listed, state, progress)


def _prepare(home: Path) -> None:
    if home.exists() and not home.is_dir():
        raise ValueError(f"{home}: a backup is a folder, this is a file")
    if not home.resolve().parent.is_dir():
        raise ValueError(f"{home}: the folder {home.parent} does not exist")
    with files.explained(str(home), "choose another place"):
        home.mkdir(exist_ok=True)
    if any(not path.name.startswith(".") for path in home.iterdir()) and not backup_points.points(home):
        raise ValueError(f"{home}: has other files and no backup; choose an empty or a new folder")


def _remove_leftovers(home: Path) -> None:
    """Temporary files of processes that were killed; the caller holds the lock."""
    for path in home.glob(".point-*"):
        path.unlink(missing_ok=True)


def _state_of(listed: Sequence[Point], progress: Progress | None = None) -> _State:
    """Of the last point; every block of its chain is verified."""
    ids, sums = np.empty(0, np.int64), np.empty(0, np.uint64)
    checksum, head = b"", {}
    try:
        chain = backup_points.chain_to(listed, listed[-1].number)
        advance = BytesRead(chain, progress)
        for point in chain:
            new_ids, new_sums = [ids], [sums]
            for kind, content, position in backup_points.read(point, checksum):
                with backup_points.as_written(point):
                    if kind == b"D":
                        kept = ~np.isin(new_ids[0], np.frombuffer(content, ">i8"))
                        new_ids[0], new_sums[0] = new_ids[0][kept], new_sums[0][kept]
                    elif kind == b"R":
                        block_ids, block_sums = backup_points.parse_sums(content)
                        new_ids.append(block_ids)
                        new_sums.append(block_sums)
                    elif kind == b"H":
                        head = backup_points.parse_head(content)
                        facts_of_text(str(point.path), head["facts"])
                advance(position)
            ids, sums = np.concatenate(new_ids), np.concatenate(new_sums)
            order = np.argsort(ids, kind="stable")
            ids, sums, checksum = ids[order], sums[order], backup_points.last_checksum(point)
            advance.next()
    except CorruptBackup as error:
        raise CorruptBackup(f"{error}; begin anew with --full") from None
    return _State(ids, sums, checksum, head["facts"], head["notes"])


def _write_point(
    snapshot: Snapshot, home: Path, listed: Sequence[Point], state: _State | None, progress: Progress | None
) -> Backup:
    text, _ = snapshot.facts.serialized()
    if state is not None and facts_of_text(str(home), state.facts).gallery != snapshot.facts.gallery:
        raise ValueError(f"{home}: is the backup of another gallery; choose another folder")
    if state is not None and facts_of_text(str(home), state.facts).fingerprint != snapshot.facts.fingerprint:
        state = None  # after an upgrade all vectors are others, perhaps of another length: it begins anew
    change = _Change.since(state, snapshot)
    number = listed[-1].number + 1 if listed else 1
    if state is not None and not change and (state.facts, state.notes) == (text, snapshot.notes):
        rows = len(state.ids)
        return Backup(listed[-1].path, number - 1, False, rows, 0, 0, 0, [], snapshot.facts.rows - rows, 0)
    path = home / f"point-{number:06d}.{'full' if state is None else 'part'}"
    head = {
        "gallery": snapshot.facts.gallery,
        "point": number,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "facts": text,
        "notes": snapshot.notes,
    }
    with files.explained(str(path), "make room, or choose another place"), files.replacing(path) as file:
        writer = PointWriter(file, None if state is None else state.checksum, head)
        counts = change.write(snapshot, writer, progress)
        writer.end(counts | {"damaged": counts["damaged"][:LISTED]})
    return Backup(path, number, True, missing=snapshot.facts.rows - change.present, **counts)


class _Change:
    """What is different in a gallery from the state of its backup."""

    def __init__(self, state: _State | None, new: IdArray, changed: IdArray, gone: IdArray, present: int) -> None:
        self._state, self._new, self._changed, self._gone, self.present = state, new, changed, gone, present

    def __bool__(self) -> bool:
        return bool(len(self._new) or len(self._changed) or len(self._gone))

    @classmethod
    def since(cls, state: _State | None, snapshot: Snapshot) -> "_Change":
        nothing = np.empty(0, np.int64)
        if state is None:
            return cls(None, nothing, nothing, nothing, snapshot.facts.rows)
        new, changed, present = [nothing], [nothing], np.zeros(len(state.ids), bool)
        for ids, sums in snapshot.sums():
            at = np.searchsorted(state.ids, ids)
            known = at < len(state.ids)
            known[known] = state.ids[at[known]] == ids[known]
            present[at[known]] = True
            new.append(ids[~known])
            changed.append(ids[known][state.sums[at[known]] != sums[known]])
        count = int(present.sum()) + sum(map(len, new))
        return cls(state, np.concatenate(new), np.concatenate(changed), state.ids[~present], count)

    def write(self, snapshot: Snapshot, writer: PointWriter, progress: Progress | None) -> dict[str, Any]:
        """Removed and replaced ids, then rows; returns how many."""
        damaged: list[int] = []
        intact: list[int] = []
        # Twice read, so that a changed row which is damaged is not removed from the backup.
        for ids in _parts(self._changed):
            batch = snapshot.fetch(ids)
            damaged += batch.damaged
            intact += [row.id for row in batch.rows]
        writer.remove(np.concatenate([self._gone, np.array(intact, np.int64)]))
        wanted = np.sort(np.concatenate([self._new, np.array(intact, np.int64)]))
        batches = snapshot.rows() if self._state is None else map(snapshot.fetch, _parts(wanted))
        total = snapshot.facts.rows if self._state is None else len(wanted)
        written = without_thumbnail = 0
        for batch in batches:
            writer.add(batch.rows)
            written += len(batch.rows)
            damaged += batch.damaged
            without_thumbnail += len(batch.without_thumbnail)
            if progress is not None:
                progress(written, max(total, written))
        before = 0 if self._state is None else len(self._state.ids)
        if self._state is None:
            self.present = written + len(damaged)
        return {
            "rows": before - len(self._gone) - len(intact) + written,
            "added": written - len(intact),
            "changed": len(intact),
            "removed": len(self._gone),
            "damaged": damaged,
            "without_thumbnail": without_thumbnail,
        }


def _parts(ids: IdArray) -> Iterator[list[int]]:
    return (ids[start : start + FETCHED].tolist() for start in range(0, len(ids), FETCHED))


# --- points


def check_backup(folder: str | Path, *, progress: Progress | None = None) -> list[PointState]:
    """The points of a backup; every byte is read and verified."""
    _, listed = existing_points(folder)
    states: list[PointState] = []
    advance = BytesRead(listed, progress)
    for point in listed:
        before = states[-1] if states and not point.full else None
        blocks: dict[bytes, Any] = {b"H": {}, b"E": {}}
        problem = ""
        try:
            backup_points.chain_to(listed, point.number)
            if before is not None and before.problem:
                raise CorruptBackup(f"{point.path}: continues point {before.number}, which cannot be restored")
            checksum = None if before is None else backup_points.last_checksum(Point(*before[:3]))
            for kind, content, position in backup_points.read(point, checksum):
                with backup_points.as_written(point):
                    if kind in blocks:
                        blocks[kind] = backup_points.parse_head(content) if kind == b"H" else dict(json.loads(content))
                advance(position)
        except CorruptBackup as error:
            problem = str(error)
        end = {} if problem else blocks[b"E"]
        rows, added, changed, removed = (end.get(key) for key in ("rows", "added", "changed", "removed"))
        created, size = blocks[b"H"].get("created", ""), point.path.stat().st_size
        states.append(PointState(*point, created, size, rows, added, changed, removed, problem))
        advance.next()
    return states


def existing_points(folder: str | Path) -> tuple[Path, list[Point]]:
    home = Path(folder).expanduser()
    if home.is_file():
        raise ValueError(f"{home}: a backup is a folder, this is a file")
    if not home.is_dir():
        raise ValueError(f"{home}: no such folder; nearkin gallery backup GALLERY {home} makes it")
    listed = backup_points.points(home)
    if not listed:
        raise ValueError(f"{home}: has no backup; nearkin gallery backup GALLERY {home} makes one")
    return home, listed


class BytesRead:
    """Progress over the bytes of several files."""

    def __init__(self, points: Sequence[Point], progress: Progress | None) -> None:
        self._sizes = [point.path.stat().st_size if point.path.exists() else 0 for point in points]
        self._progress, self._at = progress, 0

    def __call__(self, position: int) -> None:
        if self._progress is not None:
            self._progress(sum(self._sizes[: self._at]) + position, sum(self._sizes))

    def next(self) -> None:
        self._at += 1
