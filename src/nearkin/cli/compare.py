"""`nearkin compare`: which loss is best on your own data."""

import json as json_module
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from nearkin.cli import options
from nearkin.cli.ranks import refuse_torchrun
from nearkin.cli.screen import app, batches, echo, metric_cell, one_sentence, print_json, progress_bars, shown
from nearkin.core.text import visible


@app.command(no_args_is_help=True)
def compare(
    source: Annotated[str, typer.Argument(help="As in `nearkin train`; it needs classes.", show_default=False)],
    losses: Annotated[
        str, typer.Option(help="Names from `nearkin losses`, separated by commas, or all.", show_default=False)
    ],
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for the comparison, as 20m or 1h30m: the speed is measured, and steps, trials, folds and seeds "
            "that are not set are chosen to fit.",
            metavar="TIME",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps per training.", show_default="by the data")] = None,
    trials: Annotated[int | None, typer.Option(help="Settings tried per loss.", show_default="8")] = None,
    folds: Annotated[int | None, typer.Option(help="Folds of the training classes.", show_default="4")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Final trainings of the best setting, per fold.", show_default="3")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search, the trainings and their batches.")] = 0,
    root: options.RootOption = None,
    recipe: Annotated[Path | None, typer.Option(help="A recipe in TOML, without a loss.", metavar="FILE")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Any key of a recipe except those of the loss; may be repeated.", metavar="KEY=VALUE"
        ),
    ] = None,
    encoder: options.EncoderOption = None,
    batch: options.BatchOption = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of all losses.", show_default="searched per loss")
    ] = None,
    device: options.OpenDeviceOption = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Trainings at a time; changes only the duration.", show_default="one per core or GPU"),
    ] = None,
    partial: options.PartialFlag = False,
    split_folders: options.SplitFoldersOption = None,
    leaf_classes: options.LeafClassesFlag = False,
    allow_outside: options.AllowOutsideFlag = False,
    group_pattern: options.GroupPatternOption = None,
    group_column: options.GroupColumnOption = None,
    skip_single: options.SkipSingleFlag = False,
    skip_unreadable: options.SkipUnreadableFlag = False,
    closed: options.ClosedOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output folder; a comparison started there is resumed.",
            metavar="DIR",
            show_default="runs/compare-SOURCE",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the folder.")] = False,
    json: options.JsonResultsFlag = False,
) -> None:
    """Compare losses fairly: same encoder, batches and steps; settings searched per loss; test items used once.

    If it is killed or interrupted, the same command resumes.

    Examples:

      nearkin compare photos/ --losses triplet,proxy-anchor,arcface --budget 20m

      nearkin compare glyphs --losses all --steps 300 --trials 8 --folds 4 --seeds 3
    """
    flags = {"root": root, "recipe": recipe, "set": set_, "encoder": encoder, "batch": batch, "lr": lr}
    flags |= {
        "split-folders": split_folders,
        "leaf-classes": leaf_classes or None,
        "allow-outside": allow_outside or None,
        "group-pattern": group_pattern,
        "group-column": group_column,
        "partial": partial or None,
        "skip-single": skip_single or None,
        "skip-unreadable": skip_unreadable or None,
        "closed": closed or None,
        "open": True if closed is False else None,
    }
    settings = {
        "data.source": source,
        "data.root": None if root is None else str(root),
        "data.split_folders": options.names(split_folders),
        "data.leaf_classes": leaf_classes or None,
        "data.group_pattern": group_pattern,
        "data.group_column": group_column,
        "data.skip_single": skip_single or None,
        "data.unreadable": "skip" if skip_unreadable else None,
        "data.partial": partial or None,
        "data.closed": closed,
        "encoder.name": encoder,
        "sampler.batch": batch,
        "optimizer.lr": lr,
        "training.device": None if device is None else device.value,
    }
    folder = out or Path("runs") / f"compare-{_stem(source)}"
    with one_sentence(lambda: f"finished trainings are in {folder}; the same command resumes"):
        refuse_torchrun("compare", "it starts processes of its own: --jobs")
        from nearkin import compare as comparison_room
        from nearkin import report, training

        names = comparison_room.comparable(losses)
        time = None if budget is None else comparison_room.seconds(budget)
        sets = [
            f"{key}={json_module.dumps(value, ensure_ascii=False)}"
            for key, value in settings.items()
            if value is not None
        ]
        base = training.read_recipe(recipe, [*sets, *(set_ or [])]).allowing_outside(allow_outside)
        with _screen(quiet or json, steps is not None or budget is not None) as callback:
            comparison = comparison_room.compare(
                base,
                names,
                folder,
                budget=time,
                steps=steps,
                trials=trials,
                folds=folds,
                seeds=seeds,
                seed=seed,
                jobs=jobs,
                flags={name: value for name, value in flags.items() if value is not None},
                callback=callback,
            )
            page = folder / "comparison.html"
            report.write_comparison(page, comparison.results)
    if json:
        print_json(comparison.results)
    elif quiet:
        echo(str(folder))
    else:
        _print(comparison.results)
        echo(f"report: {page}")


def _stem(source: str) -> str:
    return re.sub(r"[^\w-]+", "-", Path(source).stem).strip("-").lower() or "source"


@contextmanager
def _screen(silent: bool, limited: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A callback that shows a bar over all trainings and a line per finished loss. limited: by steps or a budget."""
    from rich.console import Console

    console = Console(stderr=True)
    if silent:
        yield lambda event: None
        return
    with progress_bars(console, hidden=not console.is_terminal) as bars:
        yield ComparisonCallback(console, bars, limited)


class ComparisonCallback:
    """One method per event."""

    def __init__(self, console: Any, bars: Any, limited: bool) -> None:
        self.console, self.bars, self.limited = console, bars, limited
        self.task: Any = bars.add_task("reading", total=None, status="")

    def __call__(self, event: dict[str, Any]) -> None:
        handle = getattr(self, f"on_{event['event']}", None)
        if handle is not None:
            handle(event)

    def on_measuring(self, event: dict[str, Any]) -> None:
        self.bars.update(self.task, description=f"measuring the speed of {len(event['losses'])} losses")

    def on_fitted(self, event: dict[str, Any]) -> None:
        self._print(f"the plan takes {event['takes'] / 60:.1f} of {event['budget'] / 60:.1f} minutes at the most")

    def on_planned(self, event: dict[str, Any]) -> None:
        plan, seeds = event["plan"], "1 seed" if event["plan"].seeds == 1 else f"{event['plan'].seeds} seeds"
        text = (
            f"{len(event['losses'])} losses: {plan.trials} settings each on {plan.folds} folds, then {seeds} per fold; "
        )
        text += f"{plan.steps} steps per training, {event['jobs']} at a time; {batches(event['sampler'])}"
        self._print(text)
        self._print(f"to reproduce: {event['command']}")
        for note in event["notes"]:
            self._print(f"note: {note}")
        if not self.limited:
            self._print("note: --steps, or --budget 20m for a plan that fits into a time, makes it shorter")

    def on_begun(self, event: dict[str, Any]) -> None:
        if event["done"]:
            self._print(f"resuming: {event['done']} of at most {event['total']} trainings are done")
        self.bars.reset(self.task, total=event["total"], completed=event["done"], description="training", status="")

    def on_trained(self, event: dict[str, Any]) -> None:
        job, result = event["job"], event["result"]
        status = f"{job.loss}  map@r {shown('map@r', result['value'], ' %')}"
        self.bars.update(self.task, completed=event["done"], total=event["total"], status=status)

    def on_chosen(self, event: dict[str, Any]) -> None:
        result = event["result"]
        default = result.trials[0].value
        setting = "  ".join(f"{key.partition('.')[2]} {value}" for key, value in result.best.setting.items())
        best, usual = (shown("map@r", value, " %") for value in (result.best.value, default))
        self._print(f"{result.loss}: validation map@r {best} (default {usual})  {setting}")

    def on_testing(self, event: dict[str, Any]) -> None:
        self.bars.update(self.task, description="testing", total=None, status="")

    def on_note(self, event: dict[str, Any]) -> None:
        self._print(f"note: {event['text']}")

    def _print(self, text: str) -> None:
        from rich.text import Text

        self.console.print(Text(visible(text)), soft_wrap=True)


def _print(results: dict[str, Any]) -> None:
    """The table, and the recommendation under it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    grid.add_column("test, % (95 %)", no_wrap=True)
    for name in ("MAP@R", "R@1", "joined MAP@R", "to the best", "ms/step"):
        grid.add_column(name, justify="right", overflow="fold")
    for row in results["table"]:
        against, speed = row["separated"]["against"], results["timing"][row["loss"]]["ms_per_step"]
        verdict = "best"
        if against["p"] is not None:
            words = "worse" if against["verdict"] == "worse" else "not shown worse"
            verdict = f"{100 * against['difference']:.1f}, {words}"
        cells = [metric_cell(name, row["separated"][name]) for name in ("map@r", "precision@1")]
        cells += [metric_cell("map@r", row["concatenated"]["map@r"]), verdict, "–" if speed is None else f"{speed:.1f}"]
        grid.add_row(Text(visible(row["loss"])), *cells)
    for row in results["references"]:
        name = results["protocol"]["baseline"] if row["loss"] == "baseline" else row["loss"]
        single = row.get("separated") or row["concatenated"]
        joined = metric_cell("map@r", row["concatenated"]["map@r"]) if "separated" in row else ""
        cells = [*(metric_cell(metric, single[metric]) for metric in ("map@r", "precision@1")), joined, "", ""]
        grid.add_row(Text(visible(name)), *cells, style="dim")
    console = Console()
    console.print(grid)
    recommendation = results["recommendation"]
    for sentence in (*recommendation["sentences"], *recommendation["cautions"]):
        console.print(visible(sentence), markup=False, highlight=False)
    if recommendation["train"] is not None:
        console.print(visible(recommendation["train"], lines=True), markup=False, highlight=False, soft_wrap=True)
