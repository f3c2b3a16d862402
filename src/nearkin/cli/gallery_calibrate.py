"""`nearkin gallery calibrate`: what the similarities of a run mean, and what a gallery learns from its labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nearkin.cli import options
from nearkin.cli.gallery_admin import opened_gallery, shown, verbs
from nearkin.cli.identified import percent, promise
from nearkin.cli.screen import echo, one_sentence, plain_bar, print_note, print_result, print_table


@verbs.command(no_args_is_help=True)
def calibrate(
    place: Annotated[
        str,
        typer.Argument(
            help="A gallery, which learns from its labels who is who; or the folder of a run, for `verify`.",
            metavar="G|RUN",
            show_default=False,
        ),
    ],
    with_: Annotated[
        str | None,
        typer.Option(
            "--with",
            help="Photographs of another day, a folder per label; folders of other names are strangers'.",
            metavar="FOLDER",
            show_default="the gallery's own items",
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            help="Part of a run's source whose pairs are used: val, or test if val has few classes.",
            metavar="PART",
            show_default="val",
        ),
    ] = None,
    dim: options.DimOption = None,
    split_folders: options.SplitFoldersOption = None,
    leaf_classes: options.LeafClassesFlag = False,
    allow_outside: options.AllowOutsideFlag = False,
    own_source: options.OwnSourceOption = None,
    device: options.DeviceOption = options.Device.auto,
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Learn what `identify` answers from a gallery's labels; or measure pairs of a run, for `verify`.

    Examples:

      nearkin gallery calibrate photos.gallery

      nearkin gallery calibrate photos.gallery --with photos-of-june/

      nearkin gallery calibrate runs/birds
    """
    with one_sentence():
        from nearkin import gallery as room

        is_gallery = "://" in place or Path(place).is_file()
        of_run = {"--part": part, "--dim": dim, "--source": own_source}
        of_folder = {"--split-folders": split_folders, "--leaf-classes": leaf_classes or None}
        of_folder |= {"--allow-outside": allow_outside or None} if is_gallery else {}
        if is_gallery:
            _refuse(of_run, f"{shown(place)}: is a gallery")
        elif with_ is not None:
            raise ValueError(f"{place}: --with is for a gallery, and this is none")
        if with_ is None:
            _refuse(of_folder, "for --with FOLDER")
        reading = options.reading(split_folders, leaf_classes, allow_outside, own_source)
        if not is_gallery:
            part = part or "val"
            with plain_bar("embedding") as progress:
                pairs = room.calibrate(
                    place, part=part, dim=dim, device=device.value, progress=progress, reading=reading
                )
        else:
            with opened_gallery(place, device=device) as opened, plain_bar("learning") as progress:
                if with_ is None:
                    learned = opened.calibrate() | {"unreadable": []}
                else:
                    learned = room.calibrate_with(opened, with_, reading=reading, progress=progress)
    document = {"calibrated": shown(place)} | (learned if is_gallery else {"part": part} | pairs)
    if json or quiet:
        print_result("", document)
    elif is_gallery:
        _print_learned(document)
    else:
        _print_pairs(document, f"{document['calibrated']}: calibrated", str(part))


def _refuse(given: dict[str, Any], why: str) -> None:
    if names := [name for name, value in given.items() if value is not None]:
        raise ValueError(f"{why}: leave {', '.join(names)} out")


def _print_learned(learned: dict[str, Any]) -> None:
    """What holds for `identify`, and the pairs of a frozen encoder's gallery, for `verify`."""
    for sentence in learned["unreadable"][:10]:
        echo(f"skipped: {sentence}", err=True)
    place, items, labels = learned["calibrated"], learned["items"], learned["labels"]
    echo(f"{place}: {items:,} items of {labels:,} labels, learned from {learned['of']}")
    if learned["enrolled"]:
        print_note(f"{learned['enrolled']:,} of these are enrolled, so they were asked without their own rows")
    rows = [(f"{rate['far']:g}", percent(rate["expected"], 2), promise(rate["at_most"])) for rate in learned["rates"]]
    print_table(("--far", "strangers named: expected", "at most (95 %)"), rows, "too few labels for any --far")
    print_note(
        f"{learned['classes']:,} labels can show {percent(learned['least_far'], 2)} of strangers named at the least"
    )
    if learned["pairs"] is not None:
        _print_pairs(learned["pairs"], "for verify: calibrated", "its own")


def _print_pairs(pairs: dict[str, Any], what: str, part: str) -> None:
    echo(
        f"{what} on {pairs['classes']:,} classes of {part}, {pairs['genuine']:,} pairs of the same class and "
        f"{pairs['impostors']:,} of different ones; calibration error {pairs['error']:.3f}"
    )
    rows = [
        (
            f"{point['far']:g}",
            f"{point['threshold']:.4f}",
            _share(point["measured_far"], point["far_interval"]),
            _share(point["tar"], point["tar_interval"]),
            f"{point['classes']:,}",
        )
        for point in pairs["operating_points"]
    ]
    names = ("FAR (per pair)", "threshold", "measured FAR", "TAR", "classes")
    print_table(names, rows, "no FAR can be guaranteed")
    print_note(pairs["note"])


def _share(value: float, interval: Sequence[float]) -> str:
    return f"{value:.3g} ({interval[0]:.2g}–{interval[1]:.2g})"
