"""`nearkin evaluate`: how good stored embeddings, or the encoder of a run, are."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearkin.cli.screen import Device, app, bar_columns, echo, one_sentence, plain_bar
from nearkin.cli.torchrun import first, shared
from nearkin.core.text import visible

if TYPE_CHECKING:
    from nearkin.data.vectors import Vectors
    from nearkin.dist.group import ProcessGroup
    from nearkin.evaluation.protocols.runner import Progress

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


class Similarity(str, Enum):
    """What may follow --similarity."""

    cosine = "cosine"
    dot = "dot"
    euclidean = "euclidean"


@app.command(no_args_is_help=True)
def evaluate(
    embeddings: Annotated[
        Path,
        typer.Argument(
            help="Embeddings: .npz or .safetensors with embeddings and labels (or targets); .npy with --labels; "
            ".parquet with columns embedding and label (or target). Or the folder of a run.",
            metavar="EMBEDDINGS|RUN",
            show_default=False,
        ),
    ],
    source: Annotated[
        str | None,
        typer.Argument(
            help="What the encoder of RUN is measured on, as in `nearkin train`.", show_default="the run's test part"
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where a benchmark set lies.", metavar="DIR")] = None,
    labels: Annotated[
        Path | None, typer.Option(help="Class of each row: .npy, or .csv/.txt with one a line.", metavar="FILE")
    ] = None,
    targets: Annotated[
        Path | None, typer.Option(help="Real-valued targets of each row: .npy, .csv or .txt.", metavar="FILE")
    ] = None,
    gallery: Annotated[
        Path | None,
        typer.Option(help="Search these embeddings; without it EMBEDDINGS search one another.", metavar="FILE"),
    ] = None,
    gallery_labels: Annotated[Path | None, typer.Option(help="As --labels, for the gallery.", metavar="FILE")] = None,
    gallery_targets: Annotated[Path | None, typer.Option(help="As --targets, for the gallery.", metavar="FILE")] = None,
    retrieval: Annotated[
        bool, typer.Option("--retrieval", help="Recall@k, R-precision, MAP@R (the default where there are labels).")
    ] = False,
    clustering: Annotated[bool, typer.Option("--clustering", help="NMI, AMI and F1 of k-means.")] = False,
    verification: Annotated[
        bool, typer.Option("--verification", help="EER, AUC and TAR at FAR over all pairs, or those of --pairs.")
    ] = False,
    one_shot: Annotated[bool, typer.Option("--one-shot", help="Recognition from --shots examples a class.")] = False,
    graded: Annotated[
        bool, typer.Option("--graded", help="nDCG and rank correlation (the default where there are targets).")
    ] = False,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="What is wrong with the embeddings, if anything.")
    ] = False,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="Verify these pairs only: .csv or .npy of row, row[, same][, fold], rows counted from 0; without same "
            "the labels decide.",
            metavar="FILE",
        ),
    ] = None,
    far: Annotated[
        str | None,
        typer.Option(
            help="Verification: thresholds for these shares of false acceptances.",
            metavar="F,F,…",
            show_default="1e-1 … 1e-6, without thresholds",
        ),
    ] = None,
    ks: Annotated[
        str | None,
        typer.Option(help="Ranks to report at, as 1,2,4,8.", metavar="K,K,…", show_default="1,2,4,8; graded: 1,5,10"),
    ] = None,
    similarity: Annotated[
        Similarity | None, typer.Option(help="What is near.", show_default="cosine; graded: euclidean")
    ] = None,
    ways: Annotated[int, typer.Option(help="One-shot: classes an episode.")] = 20,
    shots: Annotated[int, typer.Option(help="One-shot: examples a class.")] = 1,
    episodes: Annotated[int, typer.Option(help="One-shot: how many are drawn.")] = 600,
    seed: Annotated[int, typer.Option(help="Of k-means, episodes and resamples.")] = 0,
    interval: Annotated[bool, typer.Option("--interval", help="Add 95 % intervals over new classes.")] = False,
    budget: Annotated[
        str, typer.Option(help="Working memory beside the embeddings, as 512MB or 2GB.", metavar="SIZE")
    ] = "512MB",
    device: Annotated[Device, typer.Option(help="auto takes cuda where there is one.")] = Device.auto,
    json: Annotated[
        Path | None, typer.Option(help="Write everything there as JSON, whole or not at all.", metavar="OUT")
    ] = None,
) -> None:
    """Measure stored embeddings, or the encoder of a run: prints a table, and writes JSON if asked.

    Without a protocol flag: verification with --pairs; else retrieval where there are labels, graded where targets.
    Labels may be 0/1 rows (N, L), for retrieval: kin share a label.

    Examples:

      nearkin evaluate embeddings.npz --interval

      nearkin evaluate runs/birds new-photos/ --clustering --diagnose

      nearkin evaluate faces.npz --pairs pairs.csv --far 1e-3

      torchrun --nproc-per-node 8 -m nearkin evaluate runs/birds
    """
    flags = {
        "retrieval": retrieval,
        "clustering": clustering,
        "verification": verification,
        "one_shot": one_shot,
        "graded": graded,
        "diagnose": diagnose,
    }
    with one_sentence(), shared() as group:
        from nearkin.data import pair_lists, vectors
        from nearkin.evaluation.protocols import results_table, runner

        settings = runner.Settings(
            tuple(name for name, on in flags.items() if on),
            None if ks is None else _whole_numbers(ks),
            None if similarity is None else similarity.value,
            ways,
            shots,
            episodes,
            seed,
            interval,
            _bytes(budget),
            device.value,
            None if far is None else _shares(far),
        )
        if json is not None and first(group):
            results_table.writable(json)
        if gallery is None and (gallery_labels or gallery_targets):
            raise ValueError("--gallery-labels and --gallery-targets need --gallery FILE")
        if embeddings.is_dir():
            if labels or targets or gallery:
                raise ValueError(f"{embeddings}: a run brings its own labels; leave --labels, --targets, --gallery out")
            items, others = _of_run(embeddings, source, root, device.value, group)
        else:
            if source is not None or root is not None:
                raise ValueError(f"{embeddings}: SOURCE and --root are for the folder of a run, got a file")
            items = vectors.read(embeddings, labels, targets, multi_label=True)
            others = (
                None if gallery is None else vectors.read(gallery, gallery_labels, gallery_targets, multi_label=True)
            )
        listed = None if pairs is None else pair_lists.read(pairs, len(items.embeddings))
        with _bar("pairs" if pairs is None else "resamples", first(group)) as progress:
            found = runner.evaluate(items, others, settings, progress, listed, group)
        if json is not None and first(group):
            results_table.write(json, found)
    if not first(group):
        return
    _print(found, interval)
    if json is not None:
        echo(f"wrote {json}", err=True)


def _of_run(
    run: Path, source: str | None, root: Path | None, device: str, group: "ProcessGroup | None"
) -> "tuple[Vectors, Vectors | None]":
    """What the encoder of a run makes of a source; the gallery's part where the source has one."""
    from nearkin import training

    with plain_bar("embedding", not first(group)) as progress:
        return training.vectors_of(run, source, root=root, device=device, progress=progress, group=group)


def _whole_numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f'ks must be whole numbers from 1 with commas between, as 1,2,4,8, got "{text}"')
    return tuple(dict.fromkeys(int(part) for part in parts))


def _shares(text: str) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < share < 1 for share in found):
        raise ValueError(f'far must be shares above 0 and below 1 with commas between, as 1e-2,1e-3, got "{text}"')
    return found


def _bytes(text: str) -> int:
    """512MB is 512 · 2^20 bytes, with or without an i."""
    read = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    if read is None or not float(read[1]):
        raise ValueError(f'budget must be a size as 512MB or 2GB, got "{text}"')
    return int(float(read[1]) * 2 ** _UNITS[read[2]])


@contextmanager
def _bar(verified: str, shown: bool) -> "Iterator[Progress | None]":
    """A bar on stderr with rate and time left, gone at the end; nothing where stderr is no terminal.

    verified: what verification counts; one-shot counts episodes, the others rows.
    """
    from rich.console import Console
    from rich.progress import Progress

    counted = {"verification": verified, "one_shot": "episodes"}
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    with Progress(*bar_columns(), console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def progress(protocol: str, done: int, total: int) -> None:
            if protocol not in tasks:
                for task in tasks.values():
                    bar.remove_task(task)
                tasks.clear()
                tasks[protocol] = bar.add_task(protocol.replace("_", "-"), total=None, said="")
            speed = next(task.speed for task in bar.tasks if task.id == tasks[protocol])
            rate = f"{speed:,.0f} {counted.get(protocol, 'rows')}/s" if speed else ""
            bar.update(tasks[protocol], completed=done, total=total or None, said=rate)

        yield progress


def _print(found: dict[str, Any], interval: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nearkin.evaluation.protocols import results_table

    sets = [
        f"{one['file']}: {one['rows']:,} × {one['dimensions']}"
        for one in (found["embeddings"], found["gallery"])
        if one
    ]
    classes = f", {found['classes']:,} classes" if found["classes"] else ""
    echo(" against ".join(sets) + classes)
    grid = Table(box=SIMPLE_HEAD)
    for name in ("protocol", "metric"):
        grid.add_column(name, no_wrap=True)
    grid.add_column("value", justify="right", overflow="fold", min_width=9)  # names may be long: they wrap
    if interval:
        grid.add_column("95 % interval", justify="right", no_wrap=True)
    last = ""
    for row in results_table.table(found):
        if last and row.protocol != last:
            grid.add_section()
        shown = "" if row.protocol == last else row.protocol
        cells = (shown, row.metric, row.value, *([row.interval] if interval else []))
        grid.add_row(*(Text(visible(cell, lines=True)) for cell in cells))  # a class may be called [red]
        last = row.protocol
    Console().print(grid)
    for note in found["notes"]:
        echo(f"note: {note}", err=True)
