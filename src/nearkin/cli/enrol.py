"""`nearkin enrol`: a source into a gallery."""

import json as json_module
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearkin.cli import options
from nearkin.cli.gallery_admin import opened_gallery, shown
from nearkin.cli.ranks import first, joined
from nearkin.cli.screen import app, echo, one_sentence, plain_bar, print_note, print_result

if TYPE_CHECKING:
    from nearkin.dist.group import ProcessGroup
    from nearkin.gallery import Gallery
    from nearkin.gallery.items import Encoding


@app.command("enroll", no_args_is_help=True, hidden=True)
@app.command(no_args_is_help=True)
def enrol(
    run: options.RunArgument,
    source: Annotated[str, typer.Argument(help="What to enrol, as in `nearkin train`; its classes are the labels.")],
    gallery: options.GalleryOption,
    root: options.RootOption = None,
    split_folders: options.SplitFoldersOption = None,
    leaf_classes: options.LeafClassesFlag = False,
    allow_outside: options.AllowOutsideFlag = False,
    label: Annotated[str | None, typer.Option(help="Enrol everything under this label.")] = None,
    metadata: Annotated[
        str | None, typer.Option(help='Metadata of every item, as {"place": "pond"}.', metavar="JSON")
    ] = None,
    dim: options.DimOption = None,
    stored: options.StoredOption = None,
    skip_unreadable: options.SkipUnreadableFlag = False,
    device: options.DeviceOption = options.Device.auto,
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Enrol a source in a gallery, which is created if needed. Items that are enrolled already are skipped.

    It can be interrupted at any time: enrolled items stay, and the same command resumes. At the end the gallery learns
    from its labels who is who. With an encoder's name, pictures without class folders are enrolled without a label.

    Examples:

      nearkin enrol runs/birds photos/ --gallery birds.gallery

      nearkin enrol efficientnet-lite0 photos/ --gallery photos.gallery

      nearkin enrol runs/birds heron.jpg-folder/ --label heron --gallery birds.gallery

      torchrun --nproc-per-node 8 -m nearkin enrol runs/birds photos/ --gallery birds.gallery
    """
    with one_sentence(lambda: "enrolled items stay; the same command resumes"), joined() as group:
        from nearkin import gallery as room
        from nearkin.models.frozen import is_encoder_name

        metadata_object = _json_object(metadata)
        frozen = is_encoder_name(run)
        with _enrolling(gallery, run, device, dim, stored, group) as opened:
            with plain_bar("enrolling", quiet or not first(group)) as progress:
                result = room.enrol_source(
                    opened,
                    source,
                    root=None if root is None else str(root),
                    label=label,
                    metadata=metadata_object,
                    skip_unreadable=skip_unreadable,
                    unlabelled=frozen,
                    progress=progress,
                    group=group,
                    reading=options.reading(split_folders, leaf_classes, allow_outside),
                )
            if isinstance(opened, room.Gallery):
                with plain_bar("indexing", quiet) as progress:
                    opened.warm(progress)
                with plain_bar("learning from its labels", quiet):
                    note = opened.calibrate_if_changed()
                stats = opened.stats()
    if not first(group):
        return
    for line in result.unreadable[:10]:
        echo(f"skipped: {line}", err=True)
    relabelled = f", {result.kept:,} of them under another label, which they keep" if result.kept else ""
    skipped = f", {len(result.unreadable):,} unreadable" if result.unreadable else ""
    counts = f"{result.added:,} enrolled, {result.known:,} already enrolled{relabelled}{skipped}"
    document = {"gallery": shown(gallery), "enrolled": result.added, "already_enrolled": result.known}
    rows, learned = stats["rows"], stats["learned"]
    document |= {"kept_label": result.kept, "unreadable": result.unreadable, "rows": rows, "learned": learned}
    knows = "" if learned is None else f"; learned who is who from {learned['labels']:,} labels"
    print_result(f"{shown(gallery)}: {counts}; {rows:,} in all{knows}", document | {"note": note or None})
    print_note(note)


@contextmanager
def _enrolling(
    place: str,
    run: str,
    device: options.Device,
    dim: int | None,
    stored: str | None,
    group: "ProcessGroup | None",
) -> "Iterator[Gallery | Encoding]":
    """The gallery in the process that writes it; the encoder alone in those that help."""
    if first(group):
        with opened_gallery(place, run, device, create=True, dim=dim, stored=stored) as opened:
            yield opened
    else:
        from nearkin.gallery.items import Encoding

        yield Encoding(run, device.value, dim=dim)


def _json_object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        content = json_module.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--metadata must be JSON ({error}), got {text[:200]}") from None
    if not isinstance(content, dict):
        raise ValueError(f'--metadata must be a JSON object, as {{"place": "pond"}}, got {text[:200]}')
    return content
