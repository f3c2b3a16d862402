"""A worker of `nearkin serve --workers N`: python -m nearkin.web.worker NUMBER LINK LISTENING METRICS PROCESSES

The arguments are its number, descriptors inherited from the supervisor, and how many processes share the counters.
Where the supervisor is gone, however it ended, the worker ends too.
"""

import os
import signal
import socket
import sys
import threading
from typing import Any

import torch

from nearkin.core.errors import StoreUnavailable
from nearkin.web.enrolment import RemoteEnrolment
from nearkin.web.metrics import Metrics
from nearkin.web.process import Process, Settings, close_gallery
from nearkin.web.process_link import Link
from nearkin.web.request_log import capture_server_logs, request_logger

__all__ = ["main"]

LAST = 12.0  # seconds after which a worker without a supervisor ends, whatever its threads do


class Worker:
    """Answers requests, and the calls of the supervisor."""

    def __init__(self, number: int, link: int, listening: int, metrics: int, processes: int) -> None:
        self.number, self._listening = number, listening
        self._shared = processes, number, metrics
        self.process: Process | None = None
        self.link = Link(socket.socket(fileno=link), self.answer, self._abandoned, request_logger(worker=number))

    def answer(self, name: str, arguments: dict[str, Any]) -> Any:
        process = self.process
        if name == "drain":
            if process is None or process.server is None:
                os._exit(0)
            process.end()
        elif name == "enrolling" and process is not None and isinstance(process.enrolment, RemoteEnrolment):
            process.enrolment.update(arguments["state"])
        elif name == "changed" and process is not None and process.server is not None:
            process.reloader.version.service.count_change()
        elif name == "learned" and process is not None and process.server is not None:
            process.reloader.version.service.learner.look()
        elif name in ("prepare", "swap", "abandon") and process is not None:
            return getattr(process.reloader, name)()
        return None

    def run(self) -> int:
        plain = self.link.call("settings")
        settings = Settings(**plain["settings"])
        log = request_logger(quiet=settings.quiet, worker=self.number)
        capture_server_logs(quiet=settings.quiet, worker=self.number)
        torch.set_num_threads(plain["threads"])
        process = Process(settings, log, Metrics(*self._shared, begun=False), self.link)
        if plain["enrolling"] is not None:
            process.enrolment = RemoteEnrolment(plain["enrolling"])
        try:
            process.open(settings.open_gallery())
        except (ValueError, OSError, TimeoutError) as error:
            self.link.call("failed", text=" ".join(str(error).split()))
            return 1
        self.process = process
        with socket.socket(fileno=self._listening) as bound:
            # One connection per turn: a worker that is busy leaves the next one to the others.
            ended = process.run(bound, lambda _: self.link.tell("ready"), 1)
        return 0 if close_gallery(process.gallery) and ended else 3

    def _abandoned(self) -> None:
        if self.process is None or self.process.server is None:
            os._exit(1)
        timer = threading.Timer(LAST, os._exit, (1,))
        timer.daemon = True
        timer.start()
        self.process.end()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal: for the supervisor, which lets the requests finish
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        status = Worker(*map(int, sys.argv[1:])).run()
    except StoreUnavailable:  # the supervisor is gone
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a hanging thread would block the end of Python, or be torn down within torch


if __name__ == "__main__":
    main()
