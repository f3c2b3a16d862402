"""`nearkin gallery …`: backup, points, restore, copy and vacuum."""

from pathlib import Path
from typing import Annotated

import typer

from nearkin.cli import options
from nearkin.cli.gallery_admin import GalleryArgument, opened_gallery, shown, verbs, warnings_as_notes
from nearkin.cli.screen import echo, one_sentence, plain_bar, print_json, print_result, print_table

__all__: list[str] = []

_Folder = Annotated[Path, typer.Argument(help="The folder of the backup.", metavar="FOLDER", show_default=False)]
_Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a gallery that is there; it is kept under another name.")
]


@verbs.command(no_args_is_help=True)
def backup(
    gallery: GalleryArgument,
    folder: _Folder,
    full: Annotated[
        bool, typer.Option("--full", help="Write all rows again; the points before may be deleted then.")
    ] = False,
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Add what changed since the last time to a backup; others may write to the gallery meanwhile.

    Example:

      nearkin gallery backup birds.gallery birds-backup/
    """
    with one_sentence(lambda: "the backup is as it was"), warnings_as_notes():
        from nearkin import gallery as room

        with plain_bar("backing up") as progress:
            result = room.backup(gallery, folder, full=full, progress=progress)
    counts = f"{result.added:,} added, {result.changed:,} changed, {result.removed:,} removed"
    text = f"{result.path}: {result.rows:,} rows, {counts}"
    if not result.new:
        text = f"nothing has changed since point {result.number}, {result.rows:,} rows"
    print_result(text, result._asdict() | {"path": str(result.path)})
    _say_left_out(gallery, result.damaged, result.without_thumbnail, "the backup keeps what it has of them")
    if result.missing:
        echo(f"note: the gallery lacks {result.missing:,} rows; nearkin gallery check {shown(gallery)}", err=True)


@verbs.command(no_args_is_help=True)
def points(folder: _Folder, json: options.JsonFlag = False, quiet: options.QuietFlag = False) -> None:
    """Read and verify a backup and list its points; exit code 1 if any is damaged.

    Example:

      nearkin gallery points birds-backup/
    """
    with one_sentence():
        from nearkin import gallery as room

        with plain_bar("reading", quiet=json) as progress:
            states = room.check_backup(folder, progress=progress)
    if json:
        print_json([state._asdict() | {"path": str(state.path)} for state in states])
    else:
        cells = [
            (
                f"{state.number}{' full' if state.full else ''}",
                state.created,
                f"{state.bytes:,}",
                *("" if count is None else f"{count:,}" for count in state[5:9]),
            )
            for state in states
        ]
        print_table(("point", "created", "bytes", "rows", "added", "changed", "removed"), cells, "")
        for state in states:
            if state.problem:
                echo(state.problem, err=True)
    if any(state.problem for state in states):
        raise typer.Exit(1)


@verbs.command(no_args_is_help=True)
def restore(
    folder: _Folder,
    gallery: GalleryArgument,
    point: Annotated[
        int | None, typer.Option(help="Number of a point; the last one by default.", metavar="N", show_default=False)
    ] = None,
    latest_whole: Annotated[
        bool, typer.Option("--latest-whole", help="Of a damaged backup, the latest point that is intact.")
    ] = False,
    overwrite: _Overwrite = False,
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Make a gallery, in a file or in PostgreSQL, from a backup; every byte is verified.

    Examples:

      nearkin gallery restore birds-backup/ birds.gallery

      nearkin gallery restore birds-backup/ birds.gallery --point 3 --overwrite
    """
    with one_sentence(lambda: "no gallery was made"), warnings_as_notes():
        from nearkin import gallery as room

        with plain_bar("restoring") as progress:
            result = room.restore(
                folder, gallery, point=point, latest_whole=latest_whole, overwrite=overwrite, progress=progress
            )
    document = {"gallery": shown(gallery), "rows": result.rows, "point": result.point}
    print_result(f"{shown(gallery)}: {result.rows:,} rows of point {result.point}", document)


@verbs.command(no_args_is_help=True)
def copy(
    gallery: GalleryArgument,
    target: Annotated[str, typer.Argument(help="A file, or postgresql://…", metavar="TARGET", show_default=False)],
    overwrite: _Overwrite = False,
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Copy a gallery between files and PostgreSQL; the answers stay the same.

    Example:

      nearkin gallery copy birds.gallery postgresql://localhost/birds
    """
    with one_sentence(lambda: "no copy was made"), warnings_as_notes():
        from nearkin import gallery as room

        with plain_bar("copying") as progress:
            result = room.copy(gallery, target, overwrite=overwrite, progress=progress)
    print_result(
        f"{shown(target)}: {result.rows:,} rows",
        {"gallery": shown(target), "rows": result.rows, "damaged": result.damaged},
    )
    _say_left_out(gallery, result.damaged, result.without_thumbnail, "they were not copied")


@verbs.command(no_args_is_help=True)
def vacuum(
    gallery: GalleryArgument,
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Free the space of removed rows.

    Example:

      nearkin gallery vacuum birds.gallery
    """
    with one_sentence(lambda: "the gallery is as it was"), opened_gallery(gallery) as opened:
        before, after = opened.vacuum()
    document = {"gallery": shown(gallery), "bytes_before": before, "bytes_after": after}
    print_result(f"{shown(gallery)}: {before:,} bytes before, {after:,} after", document)


def _say_left_out(gallery: str, damaged: list[int], without_thumbnail: int, what: str) -> None:
    if damaged:
        ids = ", ".join(map(str, damaged[:5])) + (", …" if len(damaged) > 5 else "")
        count = "1 row is" if len(damaged) == 1 else f"{len(damaged):,} rows are"
        echo(f"note: {count} damaged (id {ids}), {what}; nearkin gallery check {shown(gallery)}", err=True)
    if without_thumbnail:
        echo(f"note: {without_thumbnail:,} damaged thumbnails were left out", err=True)
