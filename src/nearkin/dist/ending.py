"""How the error of one rank ends all: one rank says it, and all have its exit code."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nearkin.core.errors import Diverged, Stopped, Terminated
from nearkin.dist.heartbeat import RANK_LOST, Heartbeat

__all__ = ["end_all", "one_line"]

_ECHOES = ("gloo", "Gloo", "NCCL", "Dist", "peer", "socket")  # words of an error that another rank's end has caused


def end_all(heartbeat: Heartbeat, error: BaseException) -> None:
    """The error of one rank ends all: the first that has one raises it, the others exit without a word."""
    code = _exit_code(error)
    if code == 0:
        return
    if isinstance(error, Stopped):  # all ranks have agreed to stop and have saved
        heartbeat.leave()
        if heartbeat.rank == 0:
            return
        raise SystemExit(code) from None
    sentence = " ".join(str(error).split()) or type(error).__name__
    with _ignoring_signals():
        if isinstance(error, RuntimeError | KeyboardInterrupt):  # perhaps only an echo of another rank's end
            text = f"{type(error).__name__} {error}"
            echo = isinstance(error, RuntimeError) and any(word in text for word in _ECHOES)
            heartbeat.await_failure(exchange_failed=echo)
        if not heartbeat.report(sentence, code):
            heartbeat.exit_after(heartbeat.reported())
    kind = OSError if isinstance(error, OSError) else type(error)
    if kind in (ValueError, TypeError, OSError, Diverged):
        raise kind(f"rank {heartbeat.rank}: {sentence}") from error


@contextmanager
def _ignoring_signals() -> Iterator[None]:
    """torchrun asks all ranks to end when one has, which they do soon enough."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(error: BaseException) -> int:
    """The exit code with which a rank ends: as the command line has them."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else RANK_LOST
    if isinstance(error, KeyboardInterrupt):
        return 143 if isinstance(error, Terminated) else 130
    if isinstance(error, Stopped):
        return 128 + error.number
    return 3 if isinstance(error, Diverged) else 2 if isinstance(error, ValueError | TypeError | OSError) else 1


def one_line(error: BaseException) -> str:
    """One line; with the class of the error where it is not bad input."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | TypeError | OSError) and text else f"{type(error).__name__} {text}"
