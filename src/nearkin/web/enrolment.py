"""Enrols a folder of pictures while the service answers: what is enrolled so far can be found."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from nearkin import data
from nearkin.core.errors import EnrolmentStopped, StoreUnavailable
from nearkin.data import groups
from nearkin.data.item_set import Items
from nearkin.data.sources import PLAIN
from nearkin.gallery import Gallery, enrol_source
from nearkin.gallery.enroll import Counted

__all__ = ["AWAITED", "Enrolment", "Progressing", "RemoteEnrolment", "read_source"]

STEP = 32  # pictures per transaction: the first are found within a second, and a signal waits no longer
AWAITED = "confidences follow when all pictures are enrolled; until then similarities"


class Progressing(Protocol):
    """What the page shows of an enrolment. changed: called after every batch."""

    changed: Callable[[], None]

    @property
    def state(self) -> dict[str, Any]: ...


class RemoteEnrolment:
    """An enrolment in another process, which tells its state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.changed: Callable[[], None] = lambda: None

    def update(self, state: dict[str, Any]) -> None:
        self.state = state
        self.changed()


class Enrolment(threading.Thread):
    """Enrols a source, then calibrates the gallery by its labels.

    Unreadable pictures are left out and counted. An error ends the enrolment, not the service; `note` has its sentence.
    ended: called once, in this thread, when all is done or failed.
    """

    def __init__(
        self,
        gallery: Gallery,
        source: str,
        items: Items,
        progress: Callable[[int, int], None] | None = None,
        ended: "Callable[[Enrolment], None] | None" = None,
    ) -> None:
        super().__init__(name="enrolment", daemon=True)
        self.gallery, self.source, self.items = gallery, source, items
        self.done, self.total, self.note = 0, len(items), ""
        self.counts: Counted | None = None
        self.changed: Callable[[], None] = lambda: None  # after every batch
        self.count_added: Callable[[int], None] = lambda _: None  # rows, when all is enrolled
        self._progress, self._ended = progress, ended
        self._stop_requested = threading.Event()

    def stop(self, seconds: float) -> bool:
        """Ends after the current batch; whether it has ended within so many seconds."""
        self._stop_requested.set()
        if self.ident is not None:
            self.join(seconds)
        return not self.is_alive()

    @property
    def state(self) -> dict[str, Any]:
        """As JSON has it."""
        unreadable = 0 if self.counts is None else len(self.counts.unreadable)
        running = self.is_alive() and not self._stop_requested.is_set()
        return {"done": self.done, "total": self.total, "running": running, "unreadable": unreadable, "note": self.note}

    def run(self) -> None:
        options: dict[str, Any] = {"items": self.items, "step": STEP, "unlabelled": True, "skip_unreadable": True}
        try:
            self.counts = enrol_source(self.gallery, self.source, progress=self._report, **options)
            self.count_added(self.counts.added)
            self.note = self.gallery.calibrate_if_changed()
        except EnrolmentStopped:
            return
        except (ValueError, OSError, StoreUnavailable) as error:
            if self._stop_requested.is_set():
                return
            self.note = f"enrolment ended at {self.done:,} of {self.total:,}: {' '.join(str(error).split())}"
        self.changed()
        if self._ended is not None:
            self._ended(self)

    def _report(self, done: int, total: int) -> None:
        self.done = done
        self.changed()
        if self._progress is not None:
            self._progress(done, total)
        if self._stop_requested.is_set():
            raise EnrolmentStopped


def read_source(source: str, reading: data.Reading = PLAIN) -> Items:
    """The items of a folder of pictures, with or without class folders."""
    try:
        return data.load(source, labelled=False, group_column=groups.UNUSED, **reading.for_load())
    except ValueError as error:
        if Path(source).is_dir():
            raise ValueError(
                f"{source}: not a finished run: there is no encoder.json in it; nor pictures: {error}"
            ) from None
        raise
