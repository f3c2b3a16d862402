"""`nearkin evaluate`: metrics of stored embeddings, or of the encoder of a run."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearkin.cli import options
from nearkin.cli.evaluate_inputs import (
    cohort_of_run,
    cut_offs,
    is_encoder,
    open_set_settings,
    rates_of,
    size_in_bytes,
    validation_of_run,
    vectors_of_run,
)
from nearkin.cli.evaluate_table import print_results, protocol_bar
from nearkin.cli.ranks import first, joined
from nearkin.cli.screen import app, as_json, echo, one_sentence, print_json

if TYPE_CHECKING:
    from nearkin.data.vectors import Vectors


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
    split_folders: options.SplitFoldersOption = None,
    leaf_classes: options.LeafClassesFlag = False,
    allow_outside: options.AllowOutsideFlag = False,
    own_source: options.OwnSourceOption = None,
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
        typer.Option(
            "--open-set",
            help="Half of the classes enrolled, the others unknown: FNIR at FPIR, DIR, OSCR; how right identify is.",
        ),
    ] = False,
    examples: Annotated[
        str | None,
        typer.Option(help="Open set: numbers of examples per label.", metavar="M,M,…", show_default="1,2,5"),
    ] = None,
    fpir: Annotated[
        str | None,
        typer.Option(
            help="Open set: false-positive identification rates.", metavar="F,F,…", show_default="0.1,0.05,0.01,0.001"
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
            help="Verification: thresholds at these false-accept rates (FAR). Open set: whether identify keeps them.",
            metavar="F,F,…",
            show_default="1e-1 … 1e-6, without thresholds; open set: 0.1,0.01",
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
    json: Annotated[
        Path | None,
        typer.Option(help="Write all results as JSON, atomically; - prints them, and nothing else.", metavar="OUT"),
    ] = None,
    quiet: options.QuietFlag = False,
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

      nearkin evaluate runs/birds --json - > results.json

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
            None if ks is None else cut_offs(ks),
            None if similarity is None else similarity.value,
            ways,
            shots,
            episodes,
            seed,
            interval,
            size_in_bytes(budget),
            device.value,
            None if far is None else rates_of(far),
            rerank=rerank,
            **open_set_settings(open_set, examples, fpir, repeats, cohort, report),
        )
        if rerank_validation is not None and (rerank is None or has_settings(rerank)):
            raise ValueError("--rerank-validation is for --rerank METHOD without settings, which it chooses")
        if json is not None and not as_json() and first(group):
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
        own = options.reading(allow_outside=allow_outside, own_source=own_source)  # the source of the run
        if is_encoder(embeddings):
            if labels or targets or gallery or groups:
                raise ValueError(
                    f"{embeddings}: a run brings its own labels; leave --labels, --targets, --groups, --gallery out"
                )
            chosen: dict[str, Any] = {"group_pattern": group_pattern, "group_column": group_column}
            chosen |= {"levels": options.names(levels), "part": part}
            chosen["reading"] = options.reading(split_folders, leaf_classes, allow_outside, own_source)
            queries, searched = vectors_of_run(embeddings, source, root, dim, device.value, group, chosen)
            if open_set and cohort is None:
                others = cohort_of_run(embeddings, dim, device.value, group, own)
        else:
            of_run = {"SOURCE": source, "--root": root, "--dim": dim, "--part": part}
            of_run |= {"--split-folders": split_folders, "--leaf-classes": leaf_classes or None}
            of_run |= {"--allow-outside": allow_outside or None, "--source": own_source}
            if given := [name for name, value in of_run.items() if value is not None]:
                raise ValueError(f"{embeddings}: {', '.join(given)}: for the folder of a run, got a file")
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
            validation = validation_of_run(embeddings, dim, device.value, group, own)
        if cohort is not None:
            others = vectors.read(cohort)
        pair_list = None if pairs is None else pair_lists.read(pairs, len(queries.embeddings))
        with protocol_bar("pairs" if pairs is None else "resamples", first(group)) as progress:
            results = runner.evaluate(queries, searched, settings, progress, pair_list, group, others, validation)
        if report is not None and first(group):
            from nearkin.report import write_open_set

            write_open_set(report, results)
        if json is not None and not as_json() and first(group):
            results_table.write(json, results)
        if label_errors is not None and first(group):
            results_table.write_label_errors(label_errors, results)
    if not first(group):
        return
    if as_json():
        print_json(results)
        return
    print_results(results, interval or open_set)
    for written in (json, label_errors, report):
        if written is not None and not quiet:
            echo(f"wrote {written}", err=True)
