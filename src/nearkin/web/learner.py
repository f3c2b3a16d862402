"""Keeps what a gallery has learned of its labels up to date in a thread of its own: no query waits for that."""

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Learner"]

EVERY = 30.0  # seconds between two looks: other processes change the gallery too


class Learner(threading.Thread):
    """Calls `learn` when it begins, after each `look`, and every half minute. learn: returns why nothing could be
    learned, or ""; it is logged once."""

    def __init__(self, learn: Callable[[], str], log: logging.Logger) -> None:
        super().__init__(name="learner", daemon=True)
        self._learn, self._log, self._note = learn, log, ""
        self._wanted, self._ending = threading.Event(), threading.Event()

    def look(self) -> None:
        """Something may have changed."""
        self._wanted.set()

    def close(self, seconds: float | None = None) -> None:
        """Ends after what it is at."""
        self._ending.set()
        self._wanted.set()
        if self.ident is not None:
            self.join(seconds)

    def run(self) -> None:
        while not self._ending.is_set():
            started = time.monotonic()
            try:
                note, trace = self._learn(), False
            except Exception as error:  # the thread must survive any error
                note, trace = str(error), not isinstance(error, ValueError | OSError)
            if note and note != self._note and not self._ending.is_set():
                fields = {"text": " ".join(note.split())}
                self._log.log(
                    logging.ERROR if trace else logging.INFO, "not learned", exc_info=trace, extra={"fields": fields}
                )
            self._note = note
            self._ending.wait(time.monotonic() - started)  # queries have the processor for half of the time
            self._wanted.wait(EVERY)
            self._wanted.clear()
