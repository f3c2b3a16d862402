"""`nearkin gallery upgrade`: a new encoder for a gallery, without enrolling anew."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

from nearkin.cli import options
from nearkin.cli.gallery_admin import GalleryArgument, shown, verbs, warnings_as_notes
from nearkin.cli.screen import echo, one_sentence, plain_bar, print_json, print_note, print_table


@verbs.command(no_args_is_help=True)
def upgrade(
    gallery: GalleryArgument,
    run: Annotated[str, typer.Option(help=options.RUN_HELP, metavar="RUN", show_default=False)],
    with_source: Annotated[
        str | None,
        typer.Option(
            "--with",
            help="Pictures that both encoders embed to fit the bridge, beside the originals that are still there; no "
            "labels needed.",
            metavar="SOURCE",
        ),
    ] = None,
    no_renew: Annotated[
        bool, typer.Option("--no-renew", help="Only make the bridge; embed no row again from its original.")
    ] = False,
    allow_outside: options.AllowOutsideFlag = False,
    own_source: options.OwnSourceOption = None,
    device: options.DeviceOption = options.Device.auto,
    json: options.JsonFlag = False,
    quiet: options.SilentFlag = False,
) -> None:
    """Give a gallery the encoder of another run. New queries search its old rows at once, over a bridge.

    Rows whose originals are still there are then embedded again. The gallery can be used meanwhile. It can be
    interrupted at any time: nothing is lost, and the same command resumes.

    Examples:

      nearkin gallery upgrade known.gallery --run runs/new

      nearkin gallery upgrade known.gallery --run runs/new --with photos/
    """
    with one_sentence(lambda: "nothing is lost; the same command resumes"), warnings_as_notes():
        from nearkin import gallery as room

        with _bars(quiet or json) as progress:
            result = room.upgrade(
                gallery,
                run,
                with_source=with_source,
                renew_rows=not no_renew,
                device=device.value,
                progress=progress,
                reading=options.reading(allow_outside=allow_outside, own_source=own_source),
            )
    if json:
        print_json(result._asdict())
    elif not quiet:
        _print(gallery, result)


def _print(gallery: str, result: Any) -> None:
    if result.pairs:
        summary = result.summary
        kind = summary["kind"]
        if kind == "identity":
            kind = "none is needed, old rows are comparable as they are"
        what = "classes" if summary["by_class"] else "items"
        echo(
            f"bridge: {kind}; fitted on {summary['pairs']:,} pairs, measured on {summary['held_out']:,} "
            f"items of other {what}"
        )
        rows = [
            (row["rows"], *(_percent(row[key], row[f"{key}_interval"]) for key in ("recall@1", "map@r")))
            for row in summary["rows"]
        ]
        print_table(("query–row, % (95 %)", "R@1", "MAP@R"), rows, "")
    if result.kept:
        echo(f"the gallery as it was is kept in {result.kept}")
    echo(
        f"{shown(gallery)}: {result.rows:,} rows, {result.renewed:,} embedded again, {result.bridged:,} over the bridge"
    )
    if result.bridged and result.why:
        print_note(f"bridged rows have no calibration, so there is only a similarity: {result.why}")
    elif result.why:
        print_note(result.why)


def _percent(value: float, interval: list[float] | None) -> str:
    if interval is None:  # too few classes
        return f"{100 * value:.1f}"
    return f"{100 * value:.1f} ({100 * interval[0]:.1f}–{100 * interval[1]:.1f})"


@contextmanager
def _bars(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """One bar after another, each under the name of what is done."""
    with ExitStack() as stack:
        current = ""
        bar: Callable[[int, int], None] | None = None

        def progress(name: str, done: int, total: int) -> None:
            nonlocal current, bar
            if name != current:
                stack.close()
                current, bar = name, stack.enter_context(plain_bar(name, quiet))
            if bar is not None:
                bar(done, total)

        yield progress
