"""`nearkin gallery …`: statistics, export, index and check; and what the verbs on galleries share."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearkin.cli import options
from nearkin.cli.screen import app, echo, one_sentence, plain_bar, print_json, print_result, print_table
from nearkin.cli.verb import App, Verbs

if TYPE_CHECKING:
    from nearkin.gallery import Gallery

__all__ = ["GalleryArgument", "opened_gallery", "shown", "verbs", "warnings_as_notes"]

GalleryArgument = Annotated[str, typer.Argument(help="A file, or postgresql://…", metavar="G", show_default=False)]

verbs = App(cls=Verbs, no_args_is_help=True, help="Inspect, check, upgrade, back up, copy, export and index a gallery.")
app.add_typer(verbs, name="gallery")


@verbs.command(no_args_is_help=True)
def stats(gallery: GalleryArgument, json: options.JsonFlag = False, quiet: options.QuietFlag = False) -> None:
    """Rows, labels, encoder and index of a gallery.

    Example:

      nearkin gallery stats birds.gallery
    """
    with one_sentence(), opened_gallery(gallery) as opened:
        figures = opened.stats() | {"largest": _largest(opened.labels())}
    if json:
        print_json(figures)
        return
    figures["largest"] = ", ".join(f"{label} {count:,}" for label, count in figures["largest"].items())
    if (learned := figures["learned"]) is not None:
        figures["learned"] = f"{learned['items']:,} items of {learned['labels']:,} labels, on {learned['date']}, from "
        figures["learned"] += learned["of"]
    bridged = [f"{count:,} rows of encoder {mark}" for mark, count in figures["bridged"].items()]
    figures["bridged"] = ", ".join(bridged)
    texts = {key: ", ".join(map(str, x)) if isinstance(x, list) else str(x) for key, x in figures.items()}
    print_table(("", ""), [(key, text) for key, text in texts.items() if text not in ("", "None")], "")


@verbs.command(no_args_is_help=True)
def export(
    gallery: GalleryArgument,
    out: Annotated[Path, typer.Option(help="An .npz, .safetensors, .parquet, .jsonl or .faiss file.", metavar="FILE")],
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Write all rows to a file, for `nearkin evaluate`, FAISS or any other program.

    Example:

      nearkin gallery export birds.gallery --out birds.npz
    """
    with one_sentence(), opened_gallery(gallery) as opened, plain_bar("exporting") as progress:
        count = opened.export(out, progress)
    print_result(f"{out}: {count:,} rows", {"file": str(out), "rows": count})


@verbs.command(no_args_is_help=True)
def reindex(
    gallery: GalleryArgument,
    filter_keys: Annotated[
        str | None,
        typer.Option(
            help="In PostgreSQL: keys of the metadata, or label, whose frequent values get an index of their own, so "
            "that a filter by one of them is fast. It stays so; an empty text ends it.",
            metavar="KEY,KEY",
        ),
    ] = None,
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Rebuild the search index; up to 100,000 rows (PostgreSQL: 10,000) there is none.

    Example:

      nearkin gallery reindex birds.gallery
    """
    keys = None if filter_keys is None else [key for key in filter_keys.split(",") if key]
    with one_sentence(), opened_gallery(gallery) as opened:
        with plain_bar("indexing") as progress:
            opened.reindex(progress, keys)
        state = opened.stats()["index"]
    print_result(f"{shown(gallery)}: {state}", {"gallery": shown(gallery), "index": state})


@verbs.command(no_args_is_help=True)
def convert(
    gallery: GalleryArgument,
    stored: Annotated[
        str,
        typer.Option(
            help="float32, int8, binary or short:N (the first N dimensions) on the disk; memory: all rows in memory.",
            metavar="FORM",
        ),
    ],
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Change how the rows of a gallery in a file are kept for searching; the rows themselves stay as they are.

    Example:

      nearkin gallery convert birds.gallery --stored int8
    """
    with one_sentence(), opened_gallery(gallery) as opened:
        with plain_bar("indexing") as progress:
            opened.store_as(None if stored == "memory" else stored, progress)
        state = opened.stats()["index"]
    print_result(f"{shown(gallery)}: {state}", {"gallery": shown(gallery), "index": state})


@verbs.command(no_args_is_help=True)
def check(
    gallery: GalleryArgument,
    repair: Annotated[bool, typer.Option("--repair", help="Keep the intact rows, set the corrupt ones aside.")] = False,
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Read and verify every row; exit code 1 if any is corrupt.

    Examples:

      nearkin gallery check birds.gallery

      nearkin gallery check birds.gallery --repair
    """
    with one_sentence(), opened_gallery(gallery) as opened:
        with plain_bar("checking") as progress:
            result = opened.check(progress)
        saved = opened.repair() if repair and not result.whole else None
    document = {"gallery": shown(gallery), "rows": result.rows, "intact": result.sound, "notes": result.notes}
    document |= {"corrupt": {str(id): why for id, why in result.bad.items()}}
    document |= {"kept": None if saved is None else saved[0], "set_aside": None if saved is None else str(saved[1])}
    print_result(f"{shown(gallery)}: {result.sound:,} of {result.rows:,} rows are intact", document)
    for id, why in list(result.bad.items())[:20]:
        echo(f"id {id}: {why}", err=True)
    for note in result.notes:
        echo(note, err=True)
    if saved is not None and not (quiet or json):
        echo(f"{saved[0]:,} rows are kept; the previous state is in {saved[1]}")
    if saved is None and not result.whole:
        echo(f"corrupt rows are left out of every search; nearkin gallery check {shown(gallery)} --repair", err=True)
        raise typer.Exit(1)


@contextmanager
def opened_gallery(
    place: str,
    run: str | Path | None = None,
    device: options.Device = options.Device.auto,
    create: bool = False,
    dim: int | None = None,
    stored: str | None = None,
) -> "Iterator[Gallery]":
    """The gallery, closed at the end; its warnings become notes."""
    from nearkin.gallery import Gallery

    with (
        warnings_as_notes(),
        Gallery.open(place, run, dim=dim, create=create, device=device.value, stored=stored) as opened,
    ):
        yield opened


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            yield
        finally:
            for message in dict.fromkeys(str(warning.message) for warning in caught):
                echo(f"note: {message}", err=True)


def _largest(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:5])


def shown(place: object) -> str:
    """The place of a gallery, without a password; imported here, so that --help does without the gallery."""
    from nearkin.gallery.stores import postgres_connection

    return postgres_connection.shown(place)
