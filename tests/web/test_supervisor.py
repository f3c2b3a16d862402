"""The supervisor's decisions, without processes: how many workers, and how often one is started again."""

import io
import json
import queue
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")

from nearkin.web import supervisor
from nearkin.web.metrics import Metrics
from nearkin.web.request_log import request_logger


def test_bad_numbers_of_workers_are_refused_in_a_sentence(monkeypatch):
    for workers in (0, -1, 65, 2.0, True):
        with pytest.raises(ValueError, match="workers must be an integer from 1 to 64, got"):
            supervisor.check_workers(workers)
    supervisor.check_workers(64)
    monkeypatch.setattr(sys, "platform", "win32")
    supervisor.check_workers(1)
    with pytest.raises(ValueError, match="workers must be 1 on Windows"):
        supervisor.check_workers(2)


def test_a_worker_that_dies_too_often_is_given_up(monkeypatch):
    """The first death starts another one at once, later ones after a pause; deaths of long ago do not count."""
    stream, clock, started = io.StringIO(), [1000.0], []
    one = supervisor.Supervisor.__new__(supervisor.Supervisor)
    one._workers, one._deaths, one._events, one._metrics = {}, {}, queue.SimpleQueue(), Metrics()
    one._log = request_logger(stream)

    def start(number):
        started.append(number)
        one._workers[number] = worker = supervisor._Worker(number, 0)
        worker.process = SimpleNamespace(returncode=-9)

    one._start = start
    monkeypatch.setattr(supervisor, "PAUSE", 0.0)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    start(1)
    start(2)
    for deaths in range(1, supervisor.MAX_DEATHS + 1):
        one._replace(one._workers[1])
        if deaths > 1:
            assert one._events.get(timeout=60) == ("start", 1)
            start(1)
        assert started.count(1) == deaths + 1 and 1 in one._workers
    clock[0] += supervisor.WITHIN  # all of that is long ago
    one._replace(one._workers[1])
    assert started.count(1) == supervisor.MAX_DEATHS + 2
    for _ in range(supervisor.MAX_DEATHS - 1):
        one._replace(one._workers[1])
        assert one._events.get(timeout=60) == ("start", 1)
    one._replace(one._workers[1])
    assert list(one._workers) == [2] and started.count(2) == 1
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in events].count("worker died") == 11
    assert events[-1]["event"] == "worker given up" and events[-1]["worker"] == 1 and events[0]["status"] == -9
    assert "nearkin_worker_restarts_total 10\n" in one._metrics.text(None)
