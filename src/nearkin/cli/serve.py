"""`nearkin serve`: a gallery over HTTP, with a web page."""

import difflib
import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearkin.cli import options
from nearkin.cli.gallery_admin import shown
from nearkin.cli.screen import EnrolmentBar, app, echo, one_sentence, plain_bar, print_note

if TYPE_CHECKING:
    from nearkin.data import Reading
    from nearkin.web.enrolment import Enrolment


@app.command(no_args_is_help=True)
def serve(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A folder of pictures, with or without class folders; or with --gallery "
            + options.RUN_HELP[0].lower()
            + options.RUN_HELP[1:],
            metavar="PHOTOS|RUN",
            show_default=False,
        ),
    ] = None,
    gallery: Annotated[
        str | None,
        typer.Option(
            "--gallery",
            help="A file, or postgresql://…/db[?gallery=NAME]; created if needed.",
            metavar="G",
            show_default="PHOTOS.gallery",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            help="Encodes PHOTOS: a run, or an encoder's name.",
            metavar="RUN",
            show_default="the gallery's, or efficientnet-lite0",
        ),
    ] = None,
    split_folders: options.SplitFoldersOption = None,
    leaf_classes: options.LeafClassesFlag = False,
    allow_outside: options.AllowOutsideFlag = False,
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
    workers: Annotated[int, typer.Option(help="Processes that answer requests.", metavar="N")] = 1,
    browser: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open the page in a browser.", show_default="of PHOTOS, on a desktop"),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log warnings and errors only.")] = False,
) -> None:
    """Serve a gallery over HTTP: a JSON API, and a page to search, compare, enrol and explore.

    Of a folder of pictures the gallery is made beside it: the page answers at once, from the pictures that are enrolled
    so far. Ctrl-C loses nothing; the next start goes on, and later takes in what is new. Logs are lines of JSON on
    stderr, counters for Prometheus at /metrics; Ctrl-C or SIGTERM ends it after the open requests, SIGHUP reads RUN
    again.

    Examples:

      nearkin serve photos/

      nearkin serve runs/birds --gallery birds.gallery --workers 4

      nearkin serve --demo
    """
    with one_sentence(lambda: "enrolled items stay"), ExitStack() as stack:
        from nearkin import web
        from nearkin.models.frozen import is_run
        from nearkin.web.demo import prepared

        source, reading = None, options.reading(split_folders, leaf_classes, allow_outside)
        encoder: str | Path
        place: str | Path
        told = {"--split-folders": split_folders, "--leaf-classes": leaf_classes, "--allow-outside": allow_outside}
        if (given := [name for name, value in told.items() if value]) and (demo or target is None or is_run(target)):
            raise ValueError(f"{', '.join(given)}: for a folder of pictures; leave it out")
        if demo:
            if gallery is not None or dim is not None or run is not None:
                raise ValueError("--demo makes its own gallery; leave --gallery and --dim out, and --run")
            with plain_bar("enrolling", quiet) as progress:
                encoder, place = prepared(None if target is None else Path(target), progress)
        elif target is None or (is_run(target) and gallery is None):
            raise ValueError(
                "serve needs a run and a gallery: nearkin serve RUN --gallery G; or a folder of pictures: nearkin "
                "serve photos/; or nearkin serve --demo"
            )
        elif is_run(target):
            if run is not None:
                raise ValueError(f"--run is for a folder of pictures, got {target}, which is an encoder itself")
            encoder, place = target, str(gallery)
        else:
            source, encoder, place = target, *_of_photos(target, run, gallery, reading)
        web.serve(
            encoder,
            place,
            host=host,
            port=port,
            token=token,
            dim=dim,
            device=device.value,
            workers=workers,
            drawing=demo,
            source=source,
            reading=reading,
            progress=None if source is None else stack.enter_context(EnrolmentBar(quiet)),
            enrolled=None if quiet else lambda enrolment: _print_enrolled(enrolment, place),
            ready=lambda address: _ready(address, browser, source is not None),
            quiet=quiet,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a hanging thread would block the end of Python, or be torn down within torch


def _of_photos(source: str, run: str | None, gallery: str | None, reading: "Reading") -> tuple[str | Path, str | Path]:
    """The encoder and the gallery of a folder of pictures: those of an earlier start, where there was one."""
    from nearkin.data.folders import WITHOUT
    from nearkin.gallery import run_of
    from nearkin.gallery.embedder import gallery_beside
    from nearkin.models.frozen import DEFAULT, LITE, encoder_folder
    from nearkin.web.enrolment import read_source

    if not Path(source).exists() and difflib.get_close_matches(source, LITE, 1):
        encoder_folder(source)  # which refuses it, and says what it may have been
    note = read_source(source, reading).note  # before anything is made
    if WITHOUT in note:
        print_note(note)
    place = gallery or gallery_beside(source)
    remote = "://" in str(place)
    exists = remote or (Path(place).is_file() and Path(place).stat().st_size > 0)
    if not exists and not os.access(Path(place).absolute().parent, os.W_OK):
        raise ValueError(f"{place}: its folder cannot be written; choose a place for the gallery: --gallery FILE")
    known = None
    if exists and run is None:
        with suppress(*([ValueError] if remote else [])):  # there may be none yet
            known = run_of(place)
    return run or known or DEFAULT, place


def _ready(address: str, browser: bool | None, photos: bool) -> None:
    echo(f"{address}  (Ctrl-C ends it)")
    desktop = sys.platform in ("darwin", "win32") or any(os.environ.get(key) for key in ("DISPLAY", "WAYLAND_DISPLAY"))
    if browser or (browser is None and photos and desktop and sys.stdout.isatty()):
        import webbrowser

        webbrowser.open(address)


def _print_enrolled(enrolment: "Enrolment", place: str | Path) -> None:
    if enrolment.counts is not None:
        for line in enrolment.counts.unreadable[:10]:
            echo(f"skipped: {line}", err=True)
        skipped = f", {len(enrolment.counts.unreadable):,} unreadable" if enrolment.counts.unreadable else ""
        counts = f"{enrolment.counts.added:,} enrolled, {enrolment.counts.known:,} already enrolled{skipped}"
        echo(f"{shown(str(place))}: {counts}")
    print_note(enrolment.note)
