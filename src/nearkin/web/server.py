"""Serving: the gallery opened and warmed, a socket bound, uvicorn running until it is told to stop."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nearkin.core import checks
from nearkin.gallery import Gallery
from nearkin.gallery.items import encoder_info
from nearkin.web import connections
from nearkin.web.access import Access
from nearkin.web.app import build
from nearkin.web.middleware import Limits
from nearkin.web.request_log import Journal, config

__all__ = ["serve"]

# Within 10 seconds of a signal the service has ended: requests under way may end, then those that have not are told so,
# then connections are cut, then threads and the gallery are waited for.
PATIENCE, GRACE, REST = 5.0, 7, 1.5
WAIT = 5.0  # seconds a writer waits for another process


def serve(
    run: str | Path,
    place: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    device: str = "auto",
    limits: Limits | None = None,
    drawing: bool = False,
    ready: Callable[[str], None] | None = None,
    quiet: bool = False,
) -> bool:
    """Serves a gallery until SIGINT or SIGTERM; requests that are under way are answered first, for up to 5 seconds.

    port: 0 takes a free one. ready: is told the address when requests are answered. A host that others can reach needs
    a token. quiet: only warnings and errors are logged. Whether all work has ended: a thread may be stuck for good.
    """
    try:
        import uvicorn
    except ModuleNotFoundError:
        raise ModuleNotFoundError("nearkin serve needs uvicorn: pip install 'nearkin[serve]'") from None

    access, chosen, journal = Access(token, host), limits or Limits(), Journal(quiet=quiet)
    access.check()
    pictures = encoder_info(run).preparation["kind"] == "pictures"
    opening = {"timeout": WAIT, "device": device, "max_pixels": chosen.pixels}
    with _bound(host, port) as bound:
        config(journal)
        gallery = Gallery.open(place, run, **opening)  # type: ignore[arg-type]
        try:
            gallery.warm()
            _first(gallery, pictures)
            app = build(gallery, access=access, limits=chosen, journal=journal, pictures=pictures, drawing=drawing)
            settings = uvicorn.Config(
                app,
                http=connections.protocol(chosen, journal),
                backlog=connections.AT_ONCE,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE,
                timeout_keep_alive=15,
            )
            connections.listen(bound)  # who comes from now on waits, and is not sent away
            if ready is not None:
                ready(_address(bound, host))
            with suppress(KeyboardInterrupt):  # uvicorn has ended in order, and hands the signal on
                connections.server(settings, app.end, PATIENCE).run(sockets=[bound])
            ended = app.at_rest()
        finally:
            closed = _closed(gallery)
    left = {} if ended and closed else {"text": "work that did not end was left"}
    journal.say("stopped", "warning" if left else "info", **left)
    return ended and closed


def _closed(gallery: Gallery) -> bool:
    """Closes it in a thread: one that is stuck may hold what closing waits for. Whether that ended."""
    closing = threading.Thread(target=gallery.close, name="closing", daemon=True)
    closing.start()
    closing.join(REST)
    return not closing.is_alive()


def _first(gallery: Gallery, pictures: bool) -> None:
    """The encoder is loaded and has seen something before anybody waits for it."""
    import numpy as np

    if pictures:
        gallery.see([np.zeros((8, 8, 3), np.uint8)])


def _bound(host: str, port: int) -> socket.socket:
    checks.integer("port", port, 0)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
    except (OSError, OverflowError) as error:
        raise ValueError(f"host {host} port {port} is no address of this machine ({error})") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"host {host} port {port} cannot be had ({why}); take another with --port") from None
    return bound


def _address(bound: socket.socket, host: str) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{bound.getsockname()[1]}/"
