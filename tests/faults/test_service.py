"""The service under attack: no request delays the others, silent connections do not block it, it shuts down.

NEARKIN_FAULTS=10 opens ten times as many connections.
"""

import asyncio
import contextlib
import io
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")
pytest.importorskip("httpx2", reason="its tests need httpx2")

from test_web import a_run, ask, client_of, connect, item, picture, refused

from nearkin.data import decode
from nearkin.gallery import Gallery, items
from nearkin.web import build
from nearkin.web.middleware import Limits
from nearkin.web.queue import BatchQueue
from nearkin.web.request_log import RepeatFilter, json_handler, request_logger

pytestmark = pytest.mark.slow

FAULTS = int(os.environ.get("NEARKIN_FAULTS", "1"))
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def gallery(run, tmp_path):
    with Gallery.open(tmp_path / "g.gallery", run, device="cpu", max_pixels=Limits().pixels) as opened:
        opened.enrol([picture(n) for n in range(6)], [f"kind {n // 3}" for n in range(6)])
        yield opened


def png(width: int, height: int, depth: int = 16, kind: int = 6) -> bytes:
    """A complete file of zeros; kind 6 is RGBA, 2 RGB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    pack, line = zlib.compressobj(9), bytes(1 + width * depth // 8 * {6: 4, 2: 3}[kind])
    body = b"".join(pack.compress(line) for _ in range(height)) + pack.flush()
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", body) + chunk(b"IEND", b"")


# ---- pictures


def test_pixels_times_bytes_of_a_request_are_bounded_before_anything_is_decoded(gallery, monkeypatch):
    monkeypatch.setattr(decode, "decode", lambda *_, **__: 1 / 0)  # must not be called
    with client_of(gallery, limits=Limits(decoded=100_000)) as client:
        files = [("items", ("a.png", png(60, 60)))] * 4  # 4 × 60 × 60 × 8 bytes
        refused(client.post("/api/enrol", files=files, data={"label": "x"}), 413, "at most 100,000 bytes of pixels")
        refused(client.post("/api/search", files=item(png(120, 120))), 413, "got 115,200")
        monkeypatch.undo()
        assert client.post("/api/verify", files={"a": png(90, 90, 8), "b": png(90, 90)}).status_code == 200  # 97,200
    assert Limits().decoded < 7000 * 7000 * 8, "the picture of the attack is refused on its own"


def test_an_unreadable_picture_does_not_open_the_door_to_large_ones(gallery, monkeypatch):
    monkeypatch.setattr(decode, "decode", lambda *_, **__: 1 / 0)  # must not be called
    with client_of(gallery, limits=Limits(decoded=100_000)) as client:
        files = [("items", ("a.png", png(60, 60)))] * 4 + [("items", ("b.png", b"GIF89a" + b"\xff" * 40))]
        refused(client.post("/api/enrol", files=files, data={"label": "x"}), 422, "b.png is")


def test_a_header_is_read_once(gallery, monkeypatch):
    read, before = [], Image.open
    monkeypatch.setattr(Image, "open", lambda *words, **options: read.append(1) or before(*words, **options))
    with client_of(gallery) as client:
        assert client.post("/api/search", files=item(png(30, 30))).status_code == 200 and len(read) == 1
        heavy = png(3000, 2900)  # of more pixels than the first decoder takes
        assert client.post("/api/search", files=item(heavy)).status_code == 200 and len(read) == 2


def test_run_lengths_of_a_bmp_are_no_supported_format(gallery):
    """Pillow decodes them in Python, a byte at a time; training still reads them."""
    out = io.BytesIO()
    Image.new("P", (24, 20)).save(out, "BMP")
    plain = out.getvalue()
    with client_of(gallery) as client:
        assert client.post("/api/search", files=item(plain)).status_code == 200
        refused(client.post("/api/search", files=item(plain[:30] + b"\1" + plain[31:])), 415, "uncompressed BMP")


@pytest.mark.parametrize("kind", ["of many pixels", "of many bytes"])
def test_a_search_is_answered_while_large_pictures_are_decoded(gallery, monkeypatch, kind):
    """Decoding of large pictures hangs; small ones and vectors are answered."""
    gate, before, large = threading.Event(), items.Encoding.square, []

    def square(self, data, name):
        if len(data.data) > 10_000:
            large.append(name)
            assert gate.wait(60)
        return before(self, data, name)

    monkeypatch.setattr(items.Encoding, "square", square)
    heavy = png(3000, 2900) if kind == "of many pixels" else picture(0) + bytes(4 * 2**20)  # 69,600,000 bytes of pixels
    with client_of(gallery) as client, contextlib.ExitStack() as stack:
        stack.callback(gate.set)
        answers = []

        def ask_heavy():
            answers.append(client.post("/api/search", files=item(heavy)))

        slow = [threading.Thread(target=ask_heavy) for _ in range(2)]  # as many as the ordinary decoder has threads
        for thread in slow:
            thread.start()
        while not large:
            time.sleep(0.01)
        for n in range(5):
            assert client.post("/api/search", files=item(picture(n))).status_code == 200
        vector = gallery.vectors([1])[0].tolist()
        assert client.post("/api/vectors/search", json={"item": vector}).status_code == 200 and not answers
        gate.set()
        for thread in slow:
            thread.join()
        assert [answer.status_code for answer in answers] == [200, 200]


def test_decoding_first_gives_the_same_rows(gallery):
    """Hash of the file, name and thumbnail are the same: nothing is enrolled twice."""
    with client_of(gallery) as client:
        again = client.post("/api/enrol", files=[("items", ("a.png", picture(1)))], data={"label": "kind 0"})
        assert again.json() == {"ids": [2], "added": 0, "known": 1}
        new = client.post("/api/enrol", files=[("items", ("b.png", picture(77)))], data={"label": "kind 0"}).json()
    assert gallery.get(new["ids"][0]).name == "b.png" and gallery.thumbnail(new["ids"][0])
    one, other = gallery.see([picture(77)])[0], gallery.see(gallery.decode([picture(77)]))[0]
    assert one.content == other.content and (one.vector == other.vector).all() and one.thumbnail == other.thumbnail


# ---- hangs


def test_a_hanging_gallery_is_503_within_the_limit_and_health_sees_it(gallery, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(gallery, "stats", lambda: gate.wait(60))
    with client_of(gallery, limits=Limits(answer=0.2, stuck=0.1)) as client, contextlib.ExitStack() as stack:
        stack.callback(gate.set)
        assert client.get("/api/health").json()["status"] == "ok"
        refused(client.get("/api/stats"), 503, "no answer within 0.2 seconds")
        refused(client.get("/api/health"), 503, "the reader has worked on one request for")
        gate.set()
        while client.get("/api/health").status_code == 503:
            time.sleep(0.01)


def test_a_line_that_hangs_is_left_after_its_time():
    gate = threading.Event()

    async def main():
        queue = BatchQueue("test")
        task = asyncio.create_task(queue.submit(lambda _: gate.wait(60)))
        await asyncio.sleep(0.05)
        assert queue.busy_for > 0 and not queue.close(0.05) and not queue.ended
        gate.set()
        assert await task and queue.close(30) and queue.busy_for == 0

    asyncio.run(main())


def test_who_still_waits_at_the_end_is_told_so(gallery, monkeypatch):
    """A request in the middle of its work and one in the middle of its body both get a 503 in JSON."""
    gate, stream = threading.Event(), io.StringIO()
    monkeypatch.setattr(gallery, "stats", lambda: gate.wait(60))
    guarded = build(gallery, log=request_logger(stream))

    async def one(path, method, kind, receive):
        messages = []
        headers = [(b"host", b"localhost"), (b"content-type", kind)]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        scope |= {"http_version": "1.1", "scheme": "http", "client": ("x", 1), "raw_path": path.encode()}

        async def send(message):
            messages.append(message)

        await guarded(scope, receive, send)
        return messages[0]["status"], json.loads(messages[1]["body"])["error"]

    async def main():
        async def silent():
            await asyncio.sleep(60)

        async def nothing():
            return {"type": "http.request", "body": b"", "more_body": False}

        work = asyncio.create_task(one("/api/stats", "GET", b"", nothing))
        body = asyncio.create_task(one("/api/search", "POST", b"multipart/form-data; boundary=q", silent))
        await asyncio.sleep(0.2)
        guarded.end()
        answers = [await work, await body, await one("/api/health", "GET", b"", nothing)]
        gate.set()
        return answers

    assert asyncio.run(main()) == [(503, "the service is shutting down; try again when it is back")] * 3
    assert guarded.active == 0 and "Traceback" not in stream.getvalue()


# ---- odd requests


def test_content_length_together_with_chunked_is_refused(gallery):
    with client_of(gallery) as client:
        headers = JSON | {"content-length": "20", "transfer-encoding": "chunked"}
        refused(
            client.post("/api/vectors/search", content=b'{"item": [1.0, 2.0]}', headers=headers), 400, "must not come"
        )


def test_the_smallest_rate_of_all_is_a_sentence(gallery):
    with client_of(gallery) as client:
        for far in ("5e-324", "1e-310", "1e-300"):
            pair = {"a": picture(1), "b": picture(2)}
            refused(client.post(f"/api/verify?far={far}", files=pair), 422, "far must be at least")
            said = client.post(f"/api/identify?far={far}", files=item(picture(1))).json()["far"]
            assert said["asked"] == float(far) and not said["proven"]


@pytest.mark.parametrize("path", ["/api/search", "/api/remove"])
def test_a_client_that_hangs_up_is_no_fault_of_ours(gallery, path):
    stream, got = io.StringIO(), []
    guarded = build(gallery, log=request_logger(stream))

    async def main():
        messages = [{"type": "http.request", "body": b"--q\r\n", "more_body": True}, {"type": "http.disconnect"}]

        async def receive():
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message):
            got.append(message)

        kind = b"multipart/form-data; boundary=q" if path == "/api/search" else b"application/json"
        headers = [(b"host", b"localhost"), (b"content-type", kind)]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await guarded(scope | {"http_version": "1.1", "scheme": "http", "client": ("x", 1)}, receive, send)

    asyncio.run(main())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (line,) = (line for line in lines if line["event"] == "request")
    assert line["status"] == 499 and line["level"] == "info" and not got


def test_no_sentence_says_where_the_gallery_is(gallery, monkeypatch):
    def broken():
        raise TimeoutError(f"{gallery.place}: another process is writing to it")

    with client_of(gallery) as client:
        monkeypatch.setattr(gallery, "stats", broken)
        answer = refused(client.get("/api/stats"), 503, "the gallery: another process is writing")
        assert gallery.place not in answer.text


# ---- connections


def test_the_same_warning_is_written_once_in_a_while():
    stream = io.StringIO()
    handler = json_handler(stream)
    handler.addFilter(RepeatFilter())
    for n in range(1000):
        text = f"socket.accept() out of system resource\nsocket: <{n}>"
        handler.handle(logging.LogRecord("asyncio", logging.ERROR, "x", 1, text, None, None))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["text"].startswith("socket.accept() out of system resource")


@contextlib.contextmanager
def serving(run, folder, files=None, lines=""):
    """`nearkin serve` in its own process, with a limit of open files; lines: Python code that runs first."""
    with Gallery.open(folder / "g.gallery", run) as gallery:
        gallery.enrol([picture(n) for n in range(6)], [f"kind {n // 3}" for n in range(6)])
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))\n" if files else ""
    code = f"{limit}import sys\nfrom nearkin.cli import main\n{lines}\nmain()"
    command = ["serve", run, "--gallery", folder / "g.gallery", "--port", "0"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, command)],
            stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            yield process.stdout.readline().split()[0], process, folder / "log"
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def open_connections(address, count, begun=b""):
    host, port = address.removeprefix("http://").strip("/").split(":")
    opened = []
    for _ in range(count):
        connection = socket.create_connection((host, int(port)), timeout=20)
        opened.append(connection)
        if begun:
            with contextlib.suppress(OSError):  # cut already
                connection.sendall(begun)
    return opened


@pytest.mark.skipif(sys.platform == "win32", reason="limits of open files are those of Unix")
def test_silent_and_slow_connections_leave_room_for_others(run, tmp_path):
    """More of them than the service may open files; incomplete heads count as silence."""
    import resource

    idle, slow = min(200 * FAULTS, 2000), min(20 * FAULTS, 200)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < idle + slow + 256:
        pytest.skip(f"only {hard} files may be opened here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, idle + slow + 256), hard))
    with (
        serving(run, tmp_path, files=192 if FAULTS == 1 else 1024) as (address, _, log),
        contextlib.ExitStack() as stack,
    ):
        head = b"POST /api/search HTTP/1.1\r\nHo"
        for connection in open_connections(address, idle) + open_connections(address, slow, head):
            stack.callback(connection.close)
        for _ in range(3):
            assert ask(address)[0] == 200
        head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=q\r\n"
        for connection in open_connections(address, slow, head + b"Content-Length: 999\r\n\r\n--q"):
            stack.callback(connection.close)
        assert ask(address)[0] == 200
        text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["event"] for line in lines].count("crowded") == 1 and len(text) < 100_000
    assert not any("out of system resource" in line.get("text", "") for line in lines)


def test_a_head_that_does_not_come_is_not_waited_for(gallery):
    """In this process: the protocol of uvicorn with a limit of 0.05 seconds."""
    uvicorn = pytest.importorskip("uvicorn")
    from nearkin.web import connections

    limits = Limits(headers=0.05, connections=3)

    async def main():
        log = request_logger(io.StringIO())
        guarded, protocol = build(gallery, limits=limits, log=log), connections.protocol(limits, log)
        options = {"log_config": None, "lifespan": "off", "timeout_keep_alive": 15}
        config = uvicorn.Config(guarded, http=protocol, **options)
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(
            lambda: config.http_protocol_class(config=config, server_state=server.server_state, app_state={}),
            "127.0.0.1", 0)  # fmt: skip
        port = listening.sockets[0].getsockname()[1]

        async def came(begun):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begun)
            return reader, writer

        health = b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        silent, slow, second = await came(b""), await came(b"GET / HT"), await came(health)
        assert (await second[0].readuntil(b"}")).startswith(b"HTTP/1.1 200")
        second[1].write(b"GET /api/hea")  # half of the head of a second request
        for reader, writer in (silent, slow, second):
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        three = [await came(b"") for _ in range(3)]
        fourth = await came(health)  # three are allowed: the longest idle one is closed
        assert (await asyncio.wait_for(fourth[0].readuntil(b"}"), 20)).startswith(b"HTTP/1.1 200")
        assert await asyncio.wait_for(three[0][0].read(), 20) == b""
        listening.close()
        for _, writer in (*three, fourth):
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    asyncio.run(main())


# ---- the end


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM is that of Unix")
def test_sigterm_ends_a_service_whose_gallery_hangs(run, tmp_path):
    """The gallery never answers; waiting requests get an answer, and the process ends within its 10 seconds."""
    hang = """
import threading
from nearkin.gallery import Gallery
from nearkin.web import server
server.PATIENCE = 1.0
never = threading.Event()
Gallery.stats = Gallery.close = lambda self: never.wait()
"""
    with serving(run, tmp_path, lines=hang) as (address, process, log):
        assert ask(address)[0] == 200
        with connect(address) as connection:
            connection.request("GET", "/api/stats")
            time.sleep(0.5)
            start = time.monotonic()
            process.send_signal(signal.SIGTERM)
            answer = connection.getresponse()
            assert answer.status == 503 and b"the service is shutting down" in answer.read()
        assert process.wait(60) == 0
        assert time.monotonic() - start < 30  # 10 on an idle machine
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-1]["event"] == "stopped" and "did not end" in lines[-1]["text"]
