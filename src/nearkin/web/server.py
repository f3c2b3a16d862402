"""Serving: the gallery opened and warmed, a socket bound, uvicorn running until it is told to stop."""

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nearkin.core import checks
from nearkin.gallery import Gallery
from nearkin.gallery.encoding import described
from nearkin.web.access import Access
from nearkin.web.app import build
from nearkin.web.journal import Journal, config
from nearkin.web.limits import Limits

__all__ = ["serve"]

GRACE = 10  # seconds in which requests that are under way may end
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
) -> None:
    """Serves a gallery until SIGINT or SIGTERM; requests that are under way are answered first.

    port: 0 takes a free one. ready: is told the address when requests are answered. A host that others can reach needs
    a token. quiet: only warnings and errors are logged.
    """
    try:
        import uvicorn
    except ModuleNotFoundError:
        raise ModuleNotFoundError("nearkin serve needs uvicorn: pip install 'nearkin[serve]'") from None

    access, chosen, journal = Access(token, host), limits or Limits(), Journal(quiet=quiet)
    access.check()
    pictures = described(run).preparation["kind"] == "pictures"
    opening = {"timeout": WAIT, "device": device, "max_pixels": chosen.pixels}
    with _bound(host, port) as bound, Gallery.open(place, run, **opening) as gallery:  # type: ignore[arg-type]
        gallery.warm()
        _first(gallery, pictures)
        app = build(gallery, access=access, limits=chosen, journal=journal, pictures=pictures, drawing=drawing)
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE,
            timeout_keep_alive=15,
        )
        config(journal)
        bound.listen(1024)  # who comes from now on waits, and is not sent away
        if ready is not None:
            ready(_address(bound, host))
        with suppress(KeyboardInterrupt):  # uvicorn has ended in order, and hands the signal on
            uvicorn.Server(settings).run(sockets=[bound])
    journal.say("stopped")


def _first(gallery: Gallery, pictures: bool) -> None:
    """The encoder is loaded and has seen something before anybody waits for it."""
    import numpy as np

    if pictures:
        gallery.see([np.zeros((8, 8, 3), np.uint8)])


def _bound(host: str, port: int) -> socket.socket:
    checks.whole("port", port, 0)
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
