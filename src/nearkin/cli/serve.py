"""`nearkin serve`: a gallery over HTTP, with a web page."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nearkin.cli import options
from nearkin.cli.screen import app, echo, one_sentence, plain_bar


@app.command(no_args_is_help=True)
def serve(
    run: Annotated[Path | None, typer.Argument(help="The folder of a run.", metavar="RUN", show_default=False)] = None,
    gallery: Annotated[
        str | None,
        typer.Option("--gallery", help="A file, or postgresql://…/db[?gallery=NAME]; created if needed.", metavar="G"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other than localhost needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            help="Token that requests must have; better set in NEARKIN_TOKEN.", envvar="NEARKIN_TOKEN", metavar="T"
        ),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(
            help="Length of a new gallery's embeddings, of loss.matryoshka.", metavar="D", show_default="the gallery's"
        ),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="The glyphs of `make demo`, with a canvas to draw on.")] = False,
    device: options.DeviceOption = options.Device.auto,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log warnings and errors only.")] = False,
) -> None:
    """Serve a gallery over HTTP: a JSON API, and a page to search, compare, enrol and explore.

    Logs are lines of JSON on stderr; Ctrl-C or SIGTERM ends it after the open requests.

    Examples:

      nearkin serve runs/birds --gallery birds.gallery

      nearkin serve --demo
    """
    with one_sentence(lambda: "enrolled items stay"):
        from nearkin import web
        from nearkin.web.demo import prepared

        run_folder: Path
        place: str | Path
        if demo:
            if gallery is not None or dim is not None:
                raise ValueError("--demo makes its own gallery; leave --gallery and --dim out")
            with plain_bar("enrolling", quiet) as progress:
                run_folder, place = prepared(run, progress)
        elif run is None or gallery is None:
            raise ValueError("serve needs a run and a gallery: nearkin serve RUN --gallery G, or nearkin serve --demo")
        else:
            run_folder, place = run, gallery
        ended = web.serve(
            run_folder,
            place,
            host=host,
            port=port,
            token=token,
            dim=dim,
            device=device.value,
            drawing=demo,
            ready=lambda address: echo(f"{address}  (Ctrl-C ends it)"),
            quiet=quiet,
        )
    if not ended:  # a hanging thread would block the end of Python, or be torn down within torch
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
