"""The server: binds a socket and answers until a signal, in this process or in several."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nearkin.core import checks
from nearkin.core.errors import QueueFull, ReloadRefused
from nearkin.data.sources import PLAIN, Reading
from nearkin.gallery import Gallery
from nearkin.gallery.items import encoder_info
from nearkin.web import connections
from nearkin.web.access import Access
from nearkin.web.enrolment import Enrolment, read_source
from nearkin.web.metrics import Metrics
from nearkin.web.middleware import Limits
from nearkin.web.process import REST, Process, Settings, close_gallery
from nearkin.web.request_log import capture_server_logs, request_logger
from nearkin.web.supervisor import Supervisor, check_workers

__all__ = ["serve"]


def serve(
    run: str | Path,
    place: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    dim: int | None = None,
    device: str = "auto",
    workers: int = 1,
    limits: Limits | None = None,
    drawing: bool = False,
    source: str | None = None,
    reading: Reading = PLAIN,
    progress: Callable[[int, int], None] | None = None,
    enrolled: Callable[[Enrolment], None] | None = None,
    ready: Callable[[str], None] | None = None,
    quiet: bool = False,
) -> bool:
    """Serves a gallery until SIGINT or SIGTERM; requests under way get up to 5 seconds to finish.

    port: 0 takes a free one. ready: called with the address once requests are accepted. A host that other machines can
    reach needs a token. dim: of a new gallery, as in `Gallery.open`. source: a folder of pictures that is enrolled
    while the service answers, with or without labels; what is enrolled already is skipped, and a gallery of a frozen
    encoder is calibrated by its labels. workers: processes that answer, with one more that supervises them and is the
    only one to write a gallery in a file. SIGHUP reads the run again. progress(done, total) is called meanwhile and
    enrolled(enrolment) at its end, both in its thread. reading: how the files of the source are read, see `data.load`.
    quiet: logs warnings and errors only. Returns whether all threads have ended.
    """
    try:
        import uvicorn  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError("nearkin serve needs uvicorn: pip install 'nearkin[serve]'") from None

    check_workers(workers)
    log, limits = request_logger(quiet=quiet), limits or Limits()
    Access(token, host).check()
    pictures = encoder_info(run).preparation["kind"] == "pictures"
    items = None if source is None else read_source(source, reading)
    settings = Settings(
        str(run), str(place), host, token, dim, device, list(limits), pictures=pictures, drawing=drawing, quiet=quiet
    )

    def source_of(gallery: Gallery) -> Enrolment | None:
        if source is None or items is None:
            return None
        gallery.check_source_kind(items.vectors is not None, source)
        return Enrolment(gallery, source, items, progress, enrolled)

    with _bind(host, port) as bound:
        capture_server_logs(quiet=quiet)

        def announce() -> None:
            if ready is not None:
                ready(_address(bound, host))

        if workers > 1:
            in_order = Supervisor(settings, workers, bound, log, source_of).run(announce)
        else:
            in_order = _serve_here(settings, bound, log, source_of, announce)
    fields = {} if in_order else {"text": "a thread did not end and was abandoned"}
    log.log(logging.WARNING if fields else logging.INFO, "stopped", extra={"fields": fields})
    return in_order


def _serve_here(
    settings: Settings,
    bound: socket.socket,
    log: logging.Logger,
    source_of: Callable[[Gallery], Enrolment | None],
    announce: Callable[[], None],
) -> bool:
    """In this process; whether all threads have ended."""
    process = Process(settings, log, Metrics())
    gallery, enrolment = settings.open_gallery(), None
    try:
        process.enrolment = enrolment = source_of(gallery)
        process.open(gallery, lambda: _check_idle(enrolment))
        connections.listen(bound)  # from now on connections wait and are not refused
        announce()
        if enrolment is not None:
            enrolment.count_added = process.metrics.count_enrolled
            enrolment.start()
        ended = process.run(bound, lambda loop: _reload_on_hangup(process, loop), connections.ACCEPTED_AT_ONCE)
        gallery = process.gallery
    finally:
        stopped = enrolment is None or enrolment.stop(REST)
        closed = close_gallery(gallery) and stopped
    return ended and closed


def _check_idle(enrolment: Enrolment | None) -> None:
    if enrolment is not None and enrolment.is_alive():
        raise ReloadRefused("a folder is being enrolled; the run can be read again when that is done")


def _reload_on_hangup(process: Process, loop: asyncio.AbstractEventLoop) -> None:
    """SIGHUP reads the run again, where the system has it."""

    def reload() -> None:
        with suppress(ReloadRefused, QueueFull):  # it is in the log
            process.reloader.reload()

    def started() -> None:
        threading.Thread(target=reload, daemon=True).start()

    if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGHUP, connections.on_hangup(started, process.end))


def _bind(host: str, port: int) -> socket.socket:
    checks.integer("port", port, 0)
    if port > 65_535:  # the system would take another port without a word
        raise ValueError(f"port must be from 0 to 65,535, got {port}; choose another with --port")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
    except (OSError, OverflowError) as error:
        raise ValueError(f"host {host} port {port} is not an address of this machine ({error})") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"host {host} port {port} is not available ({reason}); choose another with --port") from None
    return bound


def _address(bound: socket.socket, host: str) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{bound.getsockname()[1]}/"
