"""`nearkin group`: groups of unlabelled items, as a table and a contact sheet."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearkin.cli import options
from nearkin.cli.gallery_admin import opened_gallery, shown
from nearkin.cli.screen import app, echo, one_sentence, plain_bar, print_json, print_table

if TYPE_CHECKING:
    from nearkin.data import Reading
    from nearkin.data.item_set import Items
    from nearkin.gallery import Gallery
    from nearkin.gallery.source_groups import SourceGroups


class Method(str, Enum):
    """Values of --method."""

    average = "average"
    components = "components"
    hdbscan = "hdbscan"
    plda = "plda"


@app.command(no_args_is_help=True)
def group(
    source: Annotated[
        str, typer.Argument(help="What to group, as in `nearkin train`, or a gallery; labels are not used.")
    ],
    run: Annotated[
        str | None,
        typer.Option(help=options.RUN_HELP, metavar="RUN", show_default="efficientnet-lite0; none for vectors"),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The table of the groups; the contact sheet is beside it, as .html.", metavar="CSV")
    ] = Path("groups.csv"),
    far: Annotated[
        float | None,
        typer.Option(help="Near: at most this false-accept rate (FAR) per pair, by the run's calibration."),
    ] = None,
    similarity: Annotated[float | None, typer.Option(help="Near: at least this cosine.")] = None,
    method: Annotated[
        Method | None,
        typer.Option(
            help="How groups are joined; hdbscan needs scikit-learn, plda a trained run.",
            show_default="plda with a trained run, else average",
        ),
    ] = None,
    size: Annotated[int | None, typer.Option(help="About how many items a group has, if known.")] = None,
    root: options.RootOption = None,
    split_folders: options.SplitFoldersOption = None,
    leaf_classes: options.LeafClassesFlag = False,
    allow_outside: options.AllowOutsideFlag = False,
    own_source: options.OwnSourceOption = None,
    part: Annotated[
        str, typer.Option(help="all, or train, val or test as the run splits the source.", metavar="PART")
    ] = "all",
    dim: options.DimOption = None,
    views: Annotated[int, typer.Option(help="Embed the mean over so many crops of each picture.", min=1)] = 1,
    skip_unreadable: options.SkipUnreadableFlag = False,
    device: options.DeviceOption = options.Device.auto,
    json: options.JsonResultsFlag = False,
    quiet: options.SilentFlag = False,
) -> None:
    """Group items that show the same, without labels: a table, and a page with their thumbnails.

    Examples:

      nearkin group photos/

      nearkin group photos/ --run runs/birds --far 0.001 --out birds.csv

      nearkin enrol efficientnet-lite0 photos/ --gallery photos.gallery && nearkin group photos.gallery
    """
    with one_sentence(_after_interrupt), ExitStack() as bars, ExitStack() as resources:
        from nearkin import gallery as room
        from nearkin.gallery.opening import is_gallery

        if out.suffix.lower() != ".csv":
            raise ValueError(f"--out must end in .csv, got {out}")
        if not out.parent.is_dir():
            raise ValueError(f"--out: the folder {out.parent} does not exist")
        if not os.access(out.parent, os.W_OK):
            raise ValueError(f"--out: the folder {out.parent} is not writable; choose another path")

        def bar(what: str) -> Any:
            bars.close()
            return bars.enter_context(plain_bar(what, quiet or json))

        how: dict[str, Any] = {"far": far, "similarity": similarity, "method": method and method.value, "size": size}
        how["progress"] = bar
        if is_gallery(source):
            told = {"--run": run, "--root": root, "--part": part != "all", "--dim": dim, "--views": views > 1}
            told |= {"--split-folders": split_folders, "--leaf-classes": leaf_classes, "--allow-outside": allow_outside}
            told |= {"--skip-unreadable": skip_unreadable, "--source": own_source}
            if needless := [name for name, value in told.items() if value not in (None, False)]:
                raise ValueError(f"{shown(source)}: a gallery is embedded already; leave {', '.join(needless)} out")
            opened = resources.enter_context(opened_gallery(source))
            groups = room.group_gallery(opened, **how)
            picture = _picture_of_row(opened, groups)
        else:
            given: dict[str, Any] = {"root": root, "part": part, "dim": dim, "views": views, "device": device.value}
            given["unreadable"] = "skip" if skip_unreadable else "strict"
            reading = options.reading(split_folders, leaf_classes, allow_outside, own_source)
            items = _all_items(source, root, reading)
            groups = room.group_source(source, run, reading=reading, **given, **how)
            picture = _picture_of_item(items, groups)
        bars.close()
        room.write_groups(out, groups)
        sheet = out.with_suffix(".html")
        unread = _write_sheet(sheet, shown(source), groups, picture)
    if json:
        print_json(_summary(groups))
    elif not quiet:
        _print(groups, out, sheet)
        for note in [*groups.notes, *([f"{unread} pictures could not be shown"] if unread else [])]:
            echo(f"note: {note}", err=True)


def _after_interrupt() -> str:
    return "nothing was written; an enrolment resumes: nearkin enrol, then nearkin group GALLERY"


def _all_items(source: str, root: Path | None, reading: "Reading") -> "Items":
    """As they are before they are embedded: one that goes meanwhile costs its thumbnail only."""
    from nearkin import data
    from nearkin.data import groups as item_groups
    from nearkin.data.sources import AS_BEFORE

    reading = reading._replace(split_folders=AS_BEFORE, leaf_classes=False)  # all of them: they are found by name
    return data.load(source, root=root, labelled=False, group_column=item_groups.UNUSED, **reading.for_load())


def _picture_of_item(items: "Items", groups: "SourceGroups") -> "Callable[[int], Any] | None":
    from nearkin.data import decode

    pictures, place = items.pictures, {name: i for i, name in enumerate(items.names)}
    if pictures is None:
        return None

    def picture(i: int) -> Any:
        if (at := place.get(groups.names[i])) is None:
            raise ValueError(f"{groups.names[i]} came while the items were embedded")
        return decode.square(pictures.read(at), side=96, fit="pad")

    return picture


def _picture_of_row(gallery: "Gallery", groups: "SourceGroups") -> "Callable[[int], Any] | None":
    from nearkin.data import decode

    ids = groups.ids or []
    if not ids or not gallery.thumbnail(ids[0]):
        return None  # vectors have none
    return lambda i: decode.square(gallery.thumbnail(ids[i]), side=96, fit="pad")


def _write_sheet(sheet: Path, title: str, groups: "SourceGroups", picture: "Callable[[int], Any] | None") -> int:
    from nearkin import report

    how = f"method {groups.method}"
    how += "" if groups.similarity is None else f", joined at a mean similarity of {groups.similarity:.3g}"
    facts: dict[str, Any] = {"picture": picture, "labels": groups.labels, "scores": groups.scores, "how": how}
    return report.write_contact_sheet(sheet, title, groups.names, groups.groups, groups.central, **facts)


def _summary(groups: "SourceGroups") -> dict[str, Any]:
    import numpy as np

    sizes = np.bincount(groups.groups)
    summary: dict[str, Any] = {
        "items": len(groups.names),
        "groups": int((sizes > 1).sum()),
        "alone": int((sizes == 1).sum()),
        "largest": int(sizes.max(initial=0)),
        "method": groups.method,
        "similarity": groups.similarity,
        "notes": groups.notes,
    }
    for kind, figures in groups.scores.items():
        summary[kind] = {
            key: {"value": value, "low": _number(low), "high": _number(high)}
            for key, (value, (low, high)) in figures.items()
        }
    return summary


def _number(value: float) -> float | None:
    return value if value == value else None


def _print(groups: "SourceGroups", out: Path, sheet: Path) -> None:
    facts = _summary(groups)
    counts = f"{facts['groups']:,} groups of {facts['items']:,} items, {facts['alone']:,} alone"
    echo(f"{counts}; the largest has {facts['largest']:,}")
    rows = []
    for kind, name in (("bcubed", "B-cubed"), ("pairwise", "pairs")):
        if kind in groups.scores:
            cells = [
                f"{v:.3f}" + ("" if low != low else f" ({low:.3f}–{high:.3f})")
                for v, (low, high) in groups.scores[kind].values()
            ]
            rows.append((name, *cells))
    if rows:
        print_table(("agreement", "precision", "recall", "F (95 %)"), rows, "")
    echo(f"{out}\n{sheet}", lines=True)
