"""`nearkin group`: groups of unlabelled items, as a table and a contact sheet."""

from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearkin.cli import options
from nearkin.cli.screen import app, echo, one_sentence, plain_bar, print_json, print_table

if TYPE_CHECKING:
    from nearkin.gallery.source_groups import SourceGroups


class Method(str, Enum):
    """Values of --method."""

    average = "average"
    components = "components"
    hdbscan = "hdbscan"


@app.command(no_args_is_help=True)
def group(
    source: Annotated[str, typer.Argument(help="What to group, as in `nearkin train`; labels are not used.")],
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
    method: Annotated[Method, typer.Option(help="How groups are joined; hdbscan needs scikit-learn.")] = Method.average,
    size: Annotated[int | None, typer.Option(help="About how many items a group has, if known.")] = None,
    root: options.RootOption = None,
    part: Annotated[
        str, typer.Option(help="all, or train, val or test as the run splits the source.", metavar="PART")
    ] = "all",
    dim: options.DimOption = None,
    skip_unreadable: options.SkipUnreadableFlag = False,
    device: options.DeviceOption = options.Device.auto,
    json: options.JsonResultsFlag = False,
    quiet: options.SilentFlag = False,
) -> None:
    """Group items that show the same, without labels: a table, and a page with their thumbnails.

    Examples:

      nearkin group photos/

      nearkin group photos/ --run runs/birds --far 0.001 --out birds.csv
    """
    with one_sentence(), ExitStack() as bars:
        from nearkin import gallery as room

        if out.suffix.lower() != ".csv":
            raise ValueError(f"--out must end in .csv, got {out}")
        if not out.parent.is_dir():
            raise ValueError(f"--out: the folder {out.parent} does not exist")

        def bar(what: str) -> Any:
            bars.close()
            return bars.enter_context(plain_bar(what, quiet or json))

        groups = room.group_source(
            source,
            run,
            root=root,
            part=part,
            far=far,
            similarity=similarity,
            method=method.value,
            size=size,
            dim=dim,
            unreadable="skip" if skip_unreadable else "strict",
            device=device.value,
            progress=bar,
        )
        bars.close()
        room.write_groups(out, groups)
        sheet = out.with_suffix(".html")
        unread = _write_sheet(sheet, source, root, groups, method.value)
    if json:
        print_json(_summary(groups))
    elif not quiet:
        _print(groups, out, sheet)
        for note in [*groups.notes, *([f"{unread} pictures could not be shown"] if unread else [])]:
            echo(f"note: {note}", err=True)


def _write_sheet(sheet: Path, source: str, root: Path | None, groups: "SourceGroups", method: str) -> int:
    from nearkin import data, report
    from nearkin.data import decode
    from nearkin.data import groups as item_groups

    items = data.load(source, root=root, labelled=False, group_column=item_groups.UNUSED)
    place = {name: i for i, name in enumerate(items.names)}
    pictures = items.pictures
    picture: Any = None
    if pictures is not None:

        def picture(i: int) -> Any:
            return decode.square(pictures.read(place[groups.names[i]]), side=96, fit="pad")

    how = f"method {method}"
    how += "" if groups.similarity is None else f", joined at a mean similarity of {groups.similarity:.3g}"
    facts: dict[str, Any] = {"picture": picture, "labels": groups.labels, "scores": groups.scores, "how": how}
    return report.write_contact_sheet(sheet, source, groups.names, groups.groups, groups.central, **facts)


def _summary(groups: "SourceGroups") -> dict[str, Any]:
    import numpy as np

    sizes = np.bincount(groups.groups)
    summary: dict[str, Any] = {
        "items": len(groups.names),
        "groups": int((sizes > 1).sum()),
        "alone": int((sizes == 1).sum()),
        "largest": int(sizes.max(initial=0)),
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
