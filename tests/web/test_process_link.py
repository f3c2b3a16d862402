"""Calls between processes of the service: answers, errors with their class and sentence, an end that is gone."""

import io
import logging
import socket
import threading

import numpy as np
import pytest

from nearkin.core.errors import LabelConflict, MissingRow, StoreUnavailable
from nearkin.gallery.items import Seen
from nearkin.web import writer
from nearkin.web.process_link import Link
from nearkin.web.request_log import json_handler

RAISED = (
    LabelConflict("a.png", 3, "heron", "ibis"),
    MissingRow(4),
    StoreUnavailable("it is gone"),
    TimeoutError("late"),
)


@pytest.fixture
def log():
    logger = logging.getLogger("test_link")
    logger.handlers, logger.propagate = [json_handler(io.StringIO())], False
    return logger


def linked(answer, log, ended=lambda: None):
    ours, theirs = socket.socketpair()
    return Link(ours, lambda *_: None, lambda: None, log), Link(theirs, answer, ended, log)


def test_an_answer_and_errors_arrive_as_they_were(log):
    def answer(name, arguments):
        if name == "fail":
            raise RAISED[arguments["which"]]
        if name == "bug":
            raise ZeroDivisionError("oops")
        return [name, arguments]

    link, other = linked(answer, log)
    large = "x" * 3_000_000
    assert link.call("echo", text=large) == ["echo", {"text": large}]
    for which, error in enumerate(RAISED):
        with pytest.raises(type(error)) as raised:
            link.call("fail", which=which)
        assert str(raised.value) == str(error)
    with pytest.raises(RuntimeError, match="internal error of another process: oops"):
        link.call("bug")
    other.close()


def test_calls_do_not_wait_for_one_another(log):
    gate = threading.Event()
    link, other = linked(lambda name, _: gate.wait(60) if name == "slow" else "quick", log)
    slow = threading.Thread(target=link.call, args=("slow",))
    slow.start()
    assert link.call("quick") == "quick" and slow.is_alive()
    with pytest.raises(TimeoutError, match=r"within 0\.05 seconds"):
        link.call("slow", 0.05)
    gate.set()
    slow.join(60)
    other.close()


def test_a_call_fails_where_the_other_end_is_gone_or_goes(log):
    ended, called = threading.Event(), threading.Event()
    link, other = linked(lambda *_: called.set() or ended.wait(60), log, ended.set)
    closer = threading.Thread(target=lambda: called.wait(60) and other.close())
    closer.start()
    with pytest.raises(StoreUnavailable, match="has ended"):
        link.call("wait")
    closer.join()
    with pytest.raises(StoreUnavailable, match="has ended"):
        link.call("wait")
    link.tell("wait")  # nothing happens
    assert ended.wait(60)


def test_items_are_written_as_they_were_encoded(log):
    """Through a link, as a worker sends them to the process that writes."""

    class Kept:
        def enrol(self, items, label, metadata):
            self.items, self.rest = items, (label, metadata)
            return {"ids": [1, 2], "added": 2, "known": 0}

    kept = Kept()
    link, other = linked(lambda name, arguments: writer.answer(kept, name, arguments), log)
    items = [
        Seen(np.array([0.6, -0.8], np.float32), bytes(range(32)), "ä.png", b"\x89PNG", 1.25),
        Seen(np.array([1e-30, 1.0], np.float32), bytes(32), "", b"", None),
    ]
    remote = writer.RemoteWriter.__new__(writer.RemoteWriter)
    remote._link = link
    assert remote.enrol(items, "한글", {"a": [1, None]})["ids"] == [1, 2]
    assert kept.rest == ("한글", {"a": [1, None]})
    for sent, item in zip(kept.items, items, strict=True):
        assert sent[1:] == item[1:] and sent.vector.tobytes() == item.vector.tobytes()
        assert sent.vector.dtype == np.float32
    other.close()
