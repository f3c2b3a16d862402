"""The server: opens and warms the gallery, binds a socket, runs uvicorn until a signal."""

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nearkin.core import checks
from nearkin.gallery import Gallery
from nearkin.gallery.items import encoder_info
from nearkin.web import connections
from nearkin.web.access import Access
from nearkin.web.app import build
from nearkin.web.enrolment import Enrolment, read_source
from nearkin.web.middleware import Limits
from nearkin.web.request_log import capture_server_logs, request_logger

__all__ = ["serve"]

# The service ends within 10 seconds of a signal: requests under way may finish (PATIENCE), the others get a 503,
# connections are closed (GRACE), threads and the gallery get a last moment (REST).
PATIENCE, GRACE, REST = 5.0, 7, 1.5
WAIT = 5.0  # seconds a writer waits for another process


def serve(
    run: str | Path,
    place: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    dim: int | None = None,
    device: str = "auto",
    limits: Limits | None = None,
    drawing: bool = False,
    source: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    enrolled: Callable[[Enrolment], None] | None = None,
    ready: Callable[[str], None] | None = None,
    quiet: bool = False,
) -> bool:
    """Serves a gallery until SIGINT or SIGTERM; requests under way get up to 5 seconds to finish.

    port: 0 takes a free one. ready: called with the address once requests are accepted. A host that other machines can
    reach needs a token. dim: of a new gallery, as in `Gallery.open`. source: a folder of pictures that is enrolled
    while the service answers, with or without labels; what is enrolled already is skipped, and a gallery of a frozen
    encoder is calibrated by its labels. progress(done, total) is called meanwhile and enrolled(enrolment) at its end,
    both in its thread. quiet: logs warnings and errors only. Returns whether all threads have ended.
    """
    try:
        import uvicorn
    except ModuleNotFoundError:
        raise ModuleNotFoundError("nearkin serve needs uvicorn: pip install 'nearkin[serve]'") from None

    access, limits, log = Access(token, host), limits or Limits(), request_logger(quiet=quiet)
    access.check()
    pictures = encoder_info(run).preparation["kind"] == "pictures"
    items = None if source is None else read_source(source)
    opening = {"dim": dim, "timeout": WAIT, "device": device, "max_pixels": limits.pixels}
    with _bind(host, port) as bound:
        capture_server_logs(quiet=quiet)
        gallery = Gallery.open(place, run, **opening)  # type: ignore[arg-type]
        enrolment = None
        try:
            if source is not None and items is not None:
                gallery.check_source_kind(items.vectors is not None, source)
                enrolment = Enrolment(gallery, source, items, progress, enrolled)
            gallery.warm()
            _warm_encoder(gallery, pictures)
            options: dict[str, Any] = {
                "access": access,
                "limits": limits,
                "log": log,
                "pictures": pictures,
                "drawing": drawing,
            }
            app = build(gallery, enrolment=enrolment, **options)
            settings = uvicorn.Config(
                app,
                http=connections.protocol(limits, log),
                backlog=connections.ACCEPTED_AT_ONCE,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE,
                timeout_keep_alive=15,
            )
            connections.listen(bound)  # from now on connections wait and are not refused
            if ready is not None:
                ready(_address(bound, host))
            if enrolment is not None:
                enrolment.start()
            with suppress(KeyboardInterrupt):  # uvicorn has shut down and raises the signal again
                connections.server(settings, app.end, PATIENCE).run(sockets=[bound])
            ended = app.work_ended()
        finally:
            stopped = enrolment is None or enrolment.stop(REST)
            closed = _close(gallery) and stopped
    fields = {} if ended and closed else {"text": "a thread did not end and was abandoned"}
    log.log(logging.WARNING if fields else logging.INFO, "stopped", extra={"fields": fields})
    return ended and closed


def _close(gallery: Gallery) -> bool:
    """Closes it in a thread, as a stuck thread may hold its lock. Returns whether that ended."""
    closing = threading.Thread(target=gallery.close, name="closing", daemon=True)
    closing.start()
    closing.join(REST)
    return not closing.is_alive()


def _warm_encoder(gallery: Gallery, pictures: bool) -> None:
    """Loads the encoder and runs it once before the first request."""
    import numpy as np

    if pictures:
        gallery.see([np.zeros((8, 8, 3), np.uint8)])


def _bind(host: str, port: int) -> socket.socket:
    checks.integer("port", port, 0)
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
