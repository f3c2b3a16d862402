"""Several workers under load: python benchmarks/serving_workers.py RUN GALLERY [--workers 1 2 4] [--seconds 60]

Starts `nearkin serve --workers N` over a copy of the gallery, in a file and in PostgreSQL (--stores), and 256 clients
that ask without pause: of ten requests six search, three identify and one enrols a new picture; a client that gets a
503 waits as Retry-After says. Every row that was acknowledged is looked for afterwards. Answers per second against one
worker, p50 and p99 of what was answered, statuses and memory go to results/serving_workers_STORE.csv.

Clients are one process of asyncio, which shares the machine with the service: `client_cpu` is its use of a core,
`service_cpu` that of the service, and `ceiling` the ratio at which all cores would be busy.
"""

import argparse
import asyncio
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from PIL import Image

import measure
from nearkin.gallery import Gallery
from nearkin.gallery.transfer import copy

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import postgres_server

CLIENTS = 256
BOUNDARY = "nearkin-benchmark"
MIX = ["search"] * 6 + ["identify"] * 3 + ["enrol"]
HEADER = ["machine", "store", "workers", "clients", "seconds", "answers_s", "ratio", "ceiling", "p50_ms", "p99_ms"]
HEADER += ["client_cpu", "service_cpu", "service_mib", "enrolled", "missing", "statuses"]


def request(kind: str, picture: bytes) -> bytes:
    field = "items" if kind == "enrol" else "item"
    parts = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"; filename="a.png"\r\n\r\n'.encode()
    parts += picture + b"\r\n"
    if kind == "enrol":
        parts += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="label"\r\n\r\nnew\r\n'.encode()
    parts += f"--{BOUNDARY}--\r\n".encode()
    head = f"POST /api/{kind} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(parts)}\r\n"
    return head.encode() + f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n".encode() + parts


class Crowd:
    """Clients that ask without pause, each on one connection. Status 0: a broken connection; -1: 503 without a time."""

    def __init__(self, port: int, known: list[bytes], seconds: float) -> None:
        self.port, self.known, self.until = port, known, time.monotonic() + seconds
        self.statuses: Counter[int] = Counter()
        self.times: list[float] = []
        self.ids: list[int] = []
        self._new = itertools.count(int(time.time() * 1000) % 10**9 * 1000)

    async def run(self, clients: int) -> None:
        await asyncio.gather(*(self.client(n) for n in range(clients)))

    async def client(self, number: int) -> None:
        writer = None
        for turn in itertools.count(number):
            if time.monotonic() >= self.until:
                break
            kind = MIX[turn % len(MIX)]
            content = self.fresh() if kind == "enrol" else self.known[turn * 7 % len(self.known)]
            begun = time.perf_counter()
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(request(kind, content))
                status, retry, body, closes = await asyncio.wait_for(self.read(reader), 60)
            except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, ValueError):
                status, retry, body, closes = 0, None, b"", True
            if status == 200:
                self.times.append(time.perf_counter() - begun)
                if kind == "enrol":
                    self.ids += [int(one) for one in re.search(rb'"ids":\[([\d,]+)\]', body)[1].split(b",")]
            self.statuses[-1 if status == 503 and retry is None else status] += 1
            if closes and writer is not None:
                writer.close()
                writer = None
            if status == 503:
                await asyncio.sleep(retry or 1)
        if writer is not None:
            writer.close()

    @staticmethod
    async def read(reader: asyncio.StreamReader) -> tuple[int, float | None, bytes, bool]:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = re.search(rb"content-length: (\d+)", head)
        retry = re.search(rb"retry-after: (\d+)", head)
        body = await reader.readexactly(int(length[1]))
        return int(head[9:12]), None if retry is None else float(retry[1]), body, b"connection: close" in head

    def fresh(self) -> bytes:
        """A picture that no gallery has."""
        pixels = np.random.default_rng(next(self._new)).integers(0, 256, (16, 16), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG")
        return out.getvalue()


def cpu_of(pids: list[int]) -> float:
    """Seconds of processor time so far."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def processes_of(pid: int) -> list[int]:
    """A process and its children, whichever thread has started them."""
    parts = [(one / "children").read_text().split() for one in Path(f"/proc/{pid}/task").iterdir()]
    return [pid, *(int(child) for part in parts for child in part)]


def wait_for_all(address: str, workers: int) -> str:
    while True:
        text = urllib.request.urlopen(address + "metrics").read().decode()
        if f"nearkin_processes {workers + (workers > 1)}\n" in text:
            return text
        time.sleep(0.2)


def one_round(
    run: Path, place: str, workers: int, known: list[bytes], seconds: float, database: list[int]
) -> dict[str, object]:
    """database: processes of the database itself, which is part of the service; its children are added."""
    command = [sys.executable, "-m", "nearkin", "serve", str(run), "--gallery", place, "--port", "0", "--quiet"]
    server = subprocess.Popen([*command, "--workers", str(workers)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        port = int(address.rstrip("/").rpartition(":")[2])
        wait_for_all(address, workers)
        asyncio.run(Crowd(port, known, 2).run(16))  # warm
        pids = [pid for parent in (server.pid, *database) for pid in processes_of(parent)]
        service, own = cpu_of(pids), time.process_time()
        crowd, begun = Crowd(port, known, seconds), time.monotonic()
        asyncio.run(crowd.run(CLIENTS))
        took = time.monotonic() - begun
        service, own = (cpu_of(pids) - service) / took, (time.process_time() - own) / took
        memory = re.findall(r"resident_memory_bytes\{.*\} (\d+)", wait_for_all(address, workers))
    finally:
        server.terminate()
        server.wait()
    with Gallery.open(place, run, create=False) as gallery:
        present = {hit.id for hit, _ in gallery.rows()}
    return {
        "answers": len(crowd.times) / took,
        "p50": 1e3 * float(np.quantile(crowd.times, 0.5)),
        "p99": 1e3 * float(np.quantile(crowd.times, 0.99)),
        "client_cpu": own,
        "service_cpu": service,
        "mib": sum(map(int, memory)) >> 20,
        "enrolled": len(crowd.ids),
        "missing": len(set(crowd.ids) - present),
        "statuses": " ".join(f"{status}:{n}" for status, n in sorted(crowd.statuses.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("gallery", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--stores", nargs="+", choices=["sqlite", "postgres"], default=["sqlite", "postgres"])
    options = parser.parse_args()
    with Gallery.open(options.gallery, options.run, create=False) as gallery:
        some = [hit.id for hit, _ in itertools.islice(gallery.rows(), 200)]
        known = [gallery.thumbnail(i) for i in some]
    cores = len(os.sched_getaffinity(0))
    print("store     workers  answers/s  ratio  ceiling   p50 ms   p99 ms  clients  service   MiB  enrolled  statuses")
    for store in options.stores:
        one: dict[str, object] = {}
        rows = []
        for workers in options.workers:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                database: list[int] = []
                if store == "sqlite":
                    place = str(shutil.copy(options.gallery, folder / "g.gallery"))
                else:
                    server = stack.enter_context(postgres_server.Server())
                    place, database = server.url + "&gallery=load", [server.process.pid]
                    copy(options.gallery, place)
                got = one_round(options.run, place, workers, known, options.seconds, database)
            one = one or got
            ratio = got["answers"] / one["answers"]
            ceiling = cores / (one["client_cpu"] + one["service_cpu"])
            print(
                f"{store:<9}{workers:>8}{got['answers']:>11.0f}{ratio:>7.2f}{ceiling:>9.2f}{got['p50']:>9.0f}"
                f"{got['p99']:>9.0f}{got['client_cpu']:>9.2f}{got['service_cpu']:>9.2f}{got['mib']:>6}"
                f"{got['enrolled']:>10}  {got['statuses']}  missing {got['missing']}",
                flush=True,
            )
            figures = [
                f"{got['answers']:.0f}",
                f"{ratio:.2f}",
                f"{ceiling:.2f}",
                f"{got['p50']:.0f}",
                f"{got['p99']:.0f}",
            ]
            figures += [
                f"{got['client_cpu']:.2f}",
                f"{got['service_cpu']:.2f}",
                got["mib"],
                got["enrolled"],
                got["missing"],
            ]
            head = [measure.machine("cpu"), store, workers, CLIENTS, f"{options.seconds:.0f}"]
            rows.append([*head, *figures, got["statuses"]])
        measure.write_csv(Path(__file__).parent / "results" / f"serving_workers_{store}.csv", HEADER, rows)


if __name__ == "__main__":
    main()
