"""`nearkin evaluate`: metrics of stored embeddings, or of the encoder of a run."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearkin.cli import options
from nearkin.cli.ranks import first, joined
from nearkin.cli.screen import app, bar_columns, echo, one_sentence, plain_bar, print_note
from nearkin.core.text import visible

if TYPE_CHECKING:
    from nearkin.data.vectors import Vectors
    from nearkin.dist.group import ProcessGroup
    from nearkin.evaluation.protocols.runner import Progress, Settings

PER_CLASS = 20  # items of a training class, whose mean is in the cohort
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


class Similarity(str, Enum):
    """Values of --similarity."""

    cosine = "cosine"
    dot = "dot"
    euclidean = "euclidean"


@app.command(no_args_is_help=True)
def evaluate(
    embeddings: Annotated[
        str,
        typer.Argument(
            help="Embeddings: .npz or .safetensors with embeddings and labels (or targets); .npy with --labels; "
            ".parquet with columns embedding and label (or target). Or the folder of a run, or an encoder's name: "
            "efficientnet-lite0, timm:…, hf:…",
            metavar="EMBEDDINGS|RUN",
            show_default=False,
        ),
    ],
    source: Annotated[
        str | None,
        typer.Argument(
            help="What the encoder of RUN is evaluated on, as in `nearkin train`.", show_default="the run's test part"
        ),
    ] = None,
    root: options.RootOption = None,
    levels: options.LevelsOption = None,
    part: Annotated[
        str | None,
        typer.Option(
            help="Part of the source as RUN splits it: train, val, test or all.", metavar="PART", show_default="test"
        ),
    ] = None,
    label_errors: Annotated[
        Path | None,
        typer.Option(
            help="Write likely label errors as .csv or .json, for `nearkin train --without`; implies --diagnose.",
            metavar="FILE",
        ),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(help="Of RUN: measure the first so many dimensions alone.", metavar="D", show_default="all"),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="Class of each row: .npy, or .csv/.txt with one per line.", metavar="FILE")
    ] = None,
    targets: Annotated[
        Path | None, typer.Option(help="Real-valued targets of each row: .npy, .csv or .txt.", metavar="FILE")
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(help="Group of each row (burst, camera, writer): .npy, .csv or .txt.", metavar="FILE"),
    ] = None,
    group_pattern: options.GroupPatternOption = None,
    group_column: options.GroupColumnOption = None,
    gallery: Annotated[
        Path | None,
        typer.Option(help="Embeddings to search; without it EMBEDDINGS search one another.", metavar="FILE"),
    ] = None,
    gallery_labels: Annotated[Path | None, typer.Option(help="As --labels, for the gallery.", metavar="FILE")] = None,
    gallery_targets: Annotated[Path | None, typer.Option(help="As --targets, for the gallery.", metavar="FILE")] = None,
    gallery_groups: Annotated[Path | None, typer.Option(help="As --groups, for the gallery.", metavar="FILE")] = None,
    retrieval: Annotated[
        bool, typer.Option("--retrieval", help="Recall@k, R-precision, MAP@R (the default with labels).")
    ] = False,
    clustering: Annotated[bool, typer.Option("--clustering", help="NMI, AMI and F1 of k-means.")] = False,
    verification: Annotated[
        bool, typer.Option("--verification", help="EER, AUC and TAR at FAR over all pairs, or those of --pairs.")
    ] = False,
    one_shot: Annotated[bool, typer.Option("--one-shot", help="Recognition from --shots examples per class.")] = False,
    open_set: Annotated[
        bool,
        typer.Option("--open-set", help="Half of the classes enrolled, the others unknown: FNIR at FPIR, DIR, AUROC."),
    ] = False,
    examples: Annotated[
        str | None,
        typer.Option(help="Open set: numbers of examples per label.", metavar="M,M,…", show_default="1,2,5"),
    ] = None,
    fpir: Annotated[
        str | None,
        typer.Option(
            help="Open set: false-positive identification rates.", metavar="F,F,…", show_default="0.1,0.01,0.001"
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="Open set: random halves of the classes.", metavar="N", show_default="10, or fewer for many"),
    ] = None,
    cohort: Annotated[
        Path | None,
        typer.Option(
            help="Open set: embeddings of other classes, for AS-norm. A run brings its training part.", metavar="FILE"
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Open set: write a page with its charts, .html.", metavar="OUT")
    ] = None,
    graded: Annotated[
        bool, typer.Option("--graded", help="nDCG and rank correlation (the default with targets).")
    ] = False,
    diagnose: Annotated[bool, typer.Option("--diagnose", help="Find problems of the embeddings.")] = False,
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
            help="Verification: thresholds at these false-accept rates (FAR).",
            metavar="F,F,…",
            show_default="1e-1 … 1e-6, without thresholds",
        ),
    ] = None,
    rerank: Annotated[
        str | None,
        typer.Option(
            help="Retrieval also after re-ranking: k-reciprocal, alpha-qe or dba; with settings as "
            "k-reciprocal:k1=20,k2=6,lambda=0.3. Without settings they are chosen on validation classes.",
            metavar="METHOD",
        ),
    ] = None,
    rerank_validation: Annotated[
        Path | None,
        typer.Option(
            help="Embeddings of other classes, on which the settings of --rerank are chosen.",
            metavar="FILE",
            show_default="the validation part of RUN",
        ),
    ] = None,
    ks: Annotated[
        str | None,
        typer.Option(help="Cut-offs k, as 1,2,4,8.", metavar="K,K,…", show_default="1,2,4,8; graded: 1,5,10"),
    ] = None,
    similarity: Annotated[
        Similarity | None, typer.Option(help="Similarity measure.", show_default="cosine; graded: euclidean")
    ] = None,
    ways: Annotated[int, typer.Option(help="One-shot: classes per episode.")] = 20,
    shots: Annotated[int, typer.Option(help="One-shot: examples per class.")] = 1,
    episodes: Annotated[int, typer.Option(help="One-shot: number of episodes.")] = 600,
    seed: Annotated[int, typer.Option(help="Seed of k-means, episodes and resamples.")] = 0,
    interval: Annotated[
        bool, typer.Option("--interval", help="Add 95 % intervals over the choice of classes.")
    ] = False,
    budget: Annotated[
        str, typer.Option(help="Working memory besides the embeddings, as 512MB or 2GB.", metavar="SIZE")
    ] = "512MB",
    device: options.DeviceOption = options.Device.auto,
    json: Annotated[Path | None, typer.Option(help="Write all results as JSON, atomically.", metavar="OUT")] = None,
) -> None:
    """Evaluate stored embeddings, or the encoder of a run: prints a table, and writes JSON on request.

    Without a protocol flag: verification with --pairs; else retrieval with labels, graded with targets.
    For retrieval, labels may be 0/1 rows (N, L): positives share a label. With groups, pairs of the same class and
    group are left out.

    Examples:

      nearkin evaluate embeddings.npz --interval

      nearkin evaluate runs/birds new-photos/ --clustering --diagnose

      nearkin evaluate efficientnet-lite0 photos/ --interval

      nearkin evaluate runs/birds new-photos/ --open-set --report open-set.html

      nearkin evaluate faces.npz --pairs pairs.csv --far 1e-3

      torchrun --nproc-per-node 8 -m nearkin evaluate runs/birds
    """
    others: Vectors | None = None
    flags = {
        "retrieval": retrieval,
        "clustering": clustering,
        "verification": verification,
        "one_shot": one_shot,
        "open_set": open_set,
        "graded": graded,
        "diagnose": diagnose or label_errors is not None,
    }
    with one_sentence(), joined() as group:
        from nearkin.data import pair_lists, vectors
        from nearkin.evaluation.protocols import results_table, runner
        from nearkin.evaluation.retrieval.rerank_settings import has_settings, method_of

        if rerank is not None:
            method_of(rerank)  # before anything is read or embedded
        settings = runner.Settings(
            tuple(name for name, on in flags.items() if on),
            None if ks is None else _cut_offs(ks),
            None if similarity is None else similarity.value,
            ways,
            shots,
            episodes,
            seed,
            interval,
            _size_in_bytes(budget),
            device.value,
            None if far is None else _rates(far),
            rerank=rerank,
            **_open_set_settings(open_set, examples, fpir, repeats, cohort, report),
        )
        if rerank_validation is not None and (rerank is None or has_settings(rerank)):
            raise ValueError("--rerank-validation is for --rerank METHOD without settings, which it chooses")
        if json is not None and first(group):
            results_table.writable(json)
        if report is not None and first(group):
            results_table.writable(report)
        if label_errors is not None and first(group):
            results_table.writable(label_errors)
            results_table.check_error_list(label_errors)
        if gallery is None and (gallery_labels or gallery_targets or gallery_groups):
            raise ValueError("--gallery-labels, --gallery-targets and --gallery-groups need --gallery FILE")
        if groups is not None and (group_pattern or group_column):
            raise ValueError("--groups FILE excludes --group-pattern and --group-column, got both")
        if _is_encoder(embeddings):
            if labels or targets or gallery or groups:
                raise ValueError(
                    f"{embeddings}: a run brings its own labels; leave --labels, --targets, --groups, --gallery out"
                )
            chosen: dict[str, Any] = {"group_pattern": group_pattern, "group_column": group_column}
            chosen |= {"levels": options.names(levels), "part": part}
            queries, searched = _of_run(embeddings, source, root, dim, device.value, group, chosen)
            if open_set and cohort is None:
                others = _cohort_of_run(embeddings, dim, device.value, group)
        else:
            if source is not None or root is not None or dim is not None or part is not None:
                raise ValueError(
                    f"{embeddings}: SOURCE, --root, --dim and --part are for the folder of a run, got a file"
                )
            if group_pattern is not None:
                raise ValueError(f"{embeddings}: --group-pattern is for the folder of a run; --groups FILE for a file")
            beside: dict[str, Any] = {"multi_label": True, "group_column": group_column}
            beside["levels"] = options.names(levels) or ()
            queries = vectors.read(Path(embeddings), labels, targets, groups, **beside)
            searched = None
            if gallery is not None:
                searched = vectors.read(gallery, gallery_labels, gallery_targets, gallery_groups, **beside)
        validation = None
        if rerank_validation is not None:
            validation = vectors.read(rerank_validation, group_column=group_column)
        elif rerank is not None and not has_settings(rerank) and Path(embeddings).is_dir():
            validation = _validation_of(embeddings, dim, device.value, group)
        if cohort is not None:
            others = vectors.read(cohort)
        pair_list = None if pairs is None else pair_lists.read(pairs, len(queries.embeddings))
        with _bar("pairs" if pairs is None else "resamples", first(group)) as progress:
            results = runner.evaluate(queries, searched, settings, progress, pair_list, group, others, validation)
        if open_set and first(group):
            _add_far_check(results, queries, embeddings, settings, dim)
        if report is not None and first(group):
            from nearkin.report import write_open_set

            write_open_set(report, results)
        if json is not None and first(group):
            results_table.write(json, results)
        if label_errors is not None and first(group):
            results_table.write_label_errors(label_errors, results)
    if not first(group):
        return
    _print(results, interval or open_set)
    for written in (json, label_errors, report):
        if written is not None:
            echo(f"wrote {written}", err=True)


def _is_encoder(text: str) -> bool:
    """Whether the argument is no file: a folder, an encoder's name, or what may be one mistyped."""
    from nearkin.models.frozen import is_encoder_name

    path = Path(text)
    return is_encoder_name(text) or path.is_dir() or not (path.exists() or path.suffix)


def _of_run(
    run: str,
    source: str | None,
    root: Path | None,
    dim: int | None,
    device: str,
    group: "ProcessGroup | None",
    chosen: dict[str, Any],
) -> "tuple[Vectors, Vectors | None]":
    """Embeddings of a source by the encoder of a run; and of its gallery, if it has one."""
    from nearkin import training
    from nearkin.training.inference import length_note

    with plain_bar("embedding", not first(group)) as progress:
        options: dict[str, Any] = {"root": root, "dim": dim, "device": device, "progress": progress, "group": group}
        vectors = training.vectors_of(run, source, **options, **chosen)
    if dim is not None and first(group) and (note := length_note(run, dim)) is not None:
        print_note(note)
    return vectors


def _validation_of(run: str, dim: int | None, device: str, group: "ProcessGroup | None") -> "Vectors | None":
    """Embeddings of the validation part of a run's own source; None where it has none."""
    from nearkin import training

    with plain_bar("embedding the validation part", not first(group)) as progress:
        items = training.vectors_of(run, part="val", dim=dim, device=device, progress=progress, group=group)[0]
    return items if len(items.embeddings) else None


def _open_set_settings(
    asked: bool, examples: str | None, fpir: str | None, repeats: int | None, cohort: Path | None, report: Path | None
) -> dict[str, Any]:
    """The settings of --open-set; its options need it."""
    given = {"--examples": examples, "--fpir": fpir, "--repeats": repeats, "--cohort": cohort, "--report": report}
    if not asked and (alone := [name for name, value in given.items() if value is not None]):
        raise ValueError(f"{', '.join(alone)}: for --open-set, which is not asked for")
    if report is not None and report.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{report}: a report must end in .html")
    chosen: dict[str, Any] = {} if repeats is None else {"repeats": repeats}
    if examples is not None:
        chosen["examples"] = _cut_offs(examples, "examples", "1,2,5")
    if fpir is not None:
        chosen["fpirs"] = _rates(fpir, "fpir")
    return chosen


def _cohort_of_run(run: str | Path, dim: int | None, device: str, group: "ProcessGroup | None") -> "Vectors | None":
    """Embeddings of the run's training part; a note where there is none, as when its source has moved."""
    from nearkin import training

    if not Path(run).is_dir():  # an encoder's name: it was trained elsewhere
        return None
    options: dict[str, Any] = {"dim": dim, "device": device, "group": group, "part": "train", "per_class": PER_CLASS}
    try:
        with plain_bar("embedding the training part", not first(group)) as progress:
            return training.vectors_of(run, progress=progress, **options)[0]
    except (ValueError, OSError) as error:
        if first(group):
            print_note(f"no cohort for AS-norm: {error}")
        return None


def _add_far_check(
    results: dict[str, Any], queries: "Vectors", run: str | Path, settings: "Settings", dim: int | None
) -> None:
    """Whether `identify` keeps its FAR on these classes, in the results of open-set identification."""
    from nearkin.gallery import far_check

    with plain_bar("checking identify") as progress:
        options: dict[str, Any] = {"examples": settings.examples, "seed": settings.seed, "progress": progress}
        results["results"]["open_set"]["identify"] = far_check.of_vectors(
            queries,
            Path(run) if Path(run).is_dir() else None,
            dim=dim,
            device=settings.device,
            budget=settings.budget,
            **options,
        )


def _cut_offs(text: str, name: str = "ks", like: str = "1,2,4,8") -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f'{name} must be whole numbers >= 1, separated by commas, as {like}, got "{text}"')
    return tuple(dict.fromkeys(int(part) for part in parts))


def _rates(text: str, name: str = "far") -> tuple[float, ...]:
    try:
        rates = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < 1 for rate in rates):
        raise ValueError(f'{name} must be rates > 0 and < 1, separated by commas, as 1e-2,1e-3, got "{text}"')
    return rates


def _size_in_bytes(text: str) -> int:
    """512MB is 512 · 2^20 bytes, with or without an i."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    if match is None or not float(match[1]):
        raise ValueError(f'budget must be a size as 512MB or 2GB, got "{text}"')
    return int(float(match[1]) * 2 ** _UNITS[match[2]])


@contextmanager
def _bar(verified: str, shown: bool) -> "Iterator[Progress | None]":
    """A bar on stderr with rate and time left, removed at the end; None if stderr is no terminal.

    verified: what verification counts; one-shot counts episodes, open-set searches, the others rows.
    """
    from rich.console import Console
    from rich.progress import Progress

    counted = {"verification": verified, "one_shot": "episodes", "open_set": "searches"}
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
                tasks[protocol] = bar.add_task(protocol.replace("_", "-"), total=None, status="")
            speed = next(task.speed for task in bar.tasks if task.id == tasks[protocol])
            rate = f"{speed:,.0f} {counted.get(protocol, 'rows')}/s" if speed else ""
            bar.update(tasks[protocol], completed=done, total=total or None, status=rate)

        yield progress


def _chosen(reranked: dict[str, Any]) -> str:
    """Where the settings of re-ranking come from."""
    chosen = reranked["chosen"]
    if chosen is None:
        return f"{reranked['method']}: settings not chosen on validation classes"
    tried, key = chosen["tried"], next(iter(reranked["settings"]))
    figures = ", ".join(f"{key} {one[key]}: {100 * one['map@r']:.1f} %" for one in tried)
    of = f"{chosen['classes']:,} validation classes, {chosen['items']:,} items"
    return f"{reranked['method']}: {key} chosen by MAP@R on {of} (plain: {100 * chosen['plain']:.1f} %; {figures})"


def _print(results: dict[str, Any], interval: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nearkin.evaluation.protocols import results_table

    sets = [
        f"{vectors['file']}: {vectors['rows']:,} × {vectors['dimensions']}"
        for vectors in (results["embeddings"], results["gallery"])
        if vectors
    ]
    classes = f", {results['classes']:,} classes" if results["classes"] else ""
    classes += f", {results['groups']:,} groups" if results["groups"] else ""
    echo(" against ".join(sets) + classes)
    grid = Table(box=SIMPLE_HEAD)
    for name in ("protocol", "metric"):
        grid.add_column(name, no_wrap=True)
    grid.add_column("value", justify="right", overflow="fold", min_width=9)  # names may be long: they wrap
    if interval:
        grid.add_column("95 % interval", justify="right", no_wrap=True)
    last = ""
    for row in results_table.table(results):
        if last and row.protocol != last:
            grid.add_section()
        protocol = "" if row.protocol == last else row.protocol
        cells = (protocol, row.metric, row.value, *([row.interval] if interval else []))
        grid.add_row(*(Text(visible(cell, lines=True)) for cell in cells))  # a class may be called [red]
        last = row.protocol
    Console().print(grid)
    reranked = results["results"].get("retrieval", {}).get("rerank")
    if reranked is not None:
        echo(_chosen(reranked))
        echo(reranked["sentence"])
    for sentence in results_table.sentences(results):
        echo(sentence)
    for note in results["notes"]:
        echo(f"note: {note}", err=True)
