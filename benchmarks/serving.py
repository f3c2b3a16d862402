"""The service under load: python benchmarks/serving.py RUN GALLERY [--seconds 60]

Starts `nearkin serve`, then clients that ask /api/search without pause, each with a picture of the gallery: 64 of them
for --seconds, four times as many for a sixth of it, and 64 again. Statuses, requests per second, p50 and p99 of what
was answered, and the server's memory go to results/serving.csv. Clients and server share the machine: read p99 / p50.
"""

import argparse
import http.client
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

import measure
from nearkin.gallery import Gallery

BOUNDARY = "nearkin-benchmark"


def form(picture: bytes) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="item"; filename="a.png"\r\n\r\n'
    return head.encode() + picture + f"\r\n--{BOUNDARY}--\r\n".encode()


def crowd(place: str, bodies: list[bytes], clients: int, seconds: float) -> tuple[Counter, np.ndarray]:
    """Statuses (0: a broken connection) and seconds of the answers that were 200."""
    statuses: Counter = Counter()
    times: list[float] = []
    until = time.monotonic() + seconds
    kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}

    def one(number: int) -> None:
        line = http.client.HTTPConnection(place, timeout=60)
        while time.monotonic() < until:
            begun = time.perf_counter()
            try:
                line.request("POST", "/api/search", bodies[number % len(bodies)], kind)
                answer = line.getresponse()
                answer.read()
                status = answer.status
            except (OSError, http.client.HTTPException):
                line.close()
                status = 0
            statuses[status] += 1
            if status == 200:
                times.append(time.perf_counter() - begun)
        line.close()

    threads = [threading.Thread(target=one, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses, np.array(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("gallery")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with Gallery.open(options.gallery, options.run, create=False) as gallery:
        some = [hit.id for hit, _ in zip((hit for hit, _ in gallery.rows()), range(200), strict=False)]
        bodies = [form(gallery.thumbnail(i)) for i in some]
    command = [sys.executable, "-m", "nearkin", "serve", str(options.run), "--gallery", options.gallery, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    rows = []
    try:
        assert server.stdout is not None
        place = server.stdout.readline().split()[0].removeprefix("http://").strip("/")
        crowd(place, bodies, 4, 2)  # warm
        print(" clients  seconds  requests/s   p50 ms   p99 ms  p99/p50    MiB  statuses")
        for clients, seconds in ((64, options.seconds), (256, options.seconds / 6), (64, options.seconds / 6)):
            statuses, times = crowd(place, bodies, clients, seconds)
            p50, p99 = (1e3 * float(np.quantile(times, q)) for q in (0.5, 0.99))
            lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
            mib = int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024
            counts = " ".join(f"{status}:{number}" for status, number in sorted(statuses.items()))
            rate = sum(statuses.values()) / seconds
            print(f"{clients:>8}{seconds:>9.0f}{rate:>12.0f}{p50:>9.0f}{p99:>9.0f}{p99 / p50:>9.2f}{mib:>7}  {counts}")
            figures = [f"{rate:.0f}", f"{p50:.0f}", f"{p99:.0f}", f"{p99 / p50:.2f}", mib, counts]
            rows.append([measure.machine("cpu"), clients, f"{seconds:.0f}", *figures])
    finally:
        server.terminate()
        server.wait()
    header = [
        "machine",
        "clients",
        "seconds",
        "requests_s",
        "p50_ms",
        "p99_ms",
        "p99_over_p50",
        "server_mib",
        "statuses",
    ]
    measure.write_csv(Path(__file__).parent / "results" / "serving.csv", header, rows)


if __name__ == "__main__":
    main()
