"""`nearkin compare`: which loss is best on one's own data."""

import json as json_module
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from nearkin.cli.screen import Device, app, echo, one_sentence, progress_bars, shown
from nearkin.cli.torchrun import alone
from nearkin.core.text import visible


@app.command(no_args_is_help=True)
def compare(
    source: Annotated[str, typer.Argument(help="As in `nearkin train`; it needs classes.", show_default=False)],
    losses: Annotated[
        str, typer.Option(help="Names from `nearkin losses` with commas between, or all.", show_default=False)
    ],
    budget: Annotated[
        str | None,
        typer.Option(
            help="How long the whole may take, as 20m or 1h30m: the rate is measured, and steps, trials, folds and "
            "seeds that are not given are chosen to fit.",
            metavar="TIME",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Of every training.", show_default="by the data")] = None,
    trials: Annotated[int | None, typer.Option(help="Settings searched a loss.", show_default="8")] = None,
    folds: Annotated[int | None, typer.Option(help="Ways to share out the training classes.", show_default="4")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Final trainings of the best setting, a fold.", show_default="3")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the search, the trainings and their batches.")] = 0,
    root: Annotated[Path | None, typer.Option(help="Where a benchmark set lies.", metavar="DIR")] = None,
    recipe: Annotated[Path | None, typer.Option(help="A recipe in TOML, without a loss.", metavar="FILE")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any key of a recipe but the loss's; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    encoder: Annotated[str | None, typer.Option(help="See `nearkin encoders`.", show_default="by the data")] = None,
    batch: Annotated[int | None, typer.Option(help="Items a batch.", show_default="by the data")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate for all losses.", show_default="searched for each")
    ] = None,
    device: Annotated[Device | None, typer.Option(help="auto takes cuda where there is one.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Trainings at a time; changes nothing but the time.", show_default="one a core or GPU"),
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Take what there is of a benchmark set.")] = False,
    skip_single: Annotated[bool, typer.Option("--skip-single", help="Leave out classes of a single item.")] = False,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out files that cannot be read.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder; a comparison begun there goes on.", metavar="DIR", show_default="runs/compare-SOURCE"
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Nothing but the folder.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")] = False,
) -> None:
    """Compare losses fairly: the same encoder, batches and steps; settings searched for each; test classes opened once.

    Killed or interrupted, the same command goes on where it was.

    Examples:

      nearkin compare photos/ --losses triplet,proxy-anchor,arcface --budget 20m

      nearkin compare glyphs --losses all --steps 300 --trials 8 --folds 4 --seeds 3
    """
    flags = {"root": root, "recipe": recipe, "set": set_, "encoder": encoder, "batch": batch, "lr": lr}
    flags |= {
        "partial": partial or None,
        "skip-single": skip_single or None,
        "skip-unreadable": skip_unreadable or None,
    }
    given = {
        "data.source": source,
        "data.root": None if root is None else str(root),
        "data.skip_single": skip_single or None,
        "data.unreadable": "skip" if skip_unreadable else None,
        "data.partial": partial or None,
        "encoder.name": encoder,
        "sampler.batch": batch,
        "optimizer.lr": lr,
        "training.device": None if device is None else device.value,
    }
    folder = out or Path("runs") / f"compare-{_stem(source)}"
    with one_sentence(lambda: f"what was finished is in {folder}; the same command goes on"):
        alone("compare", "it starts processes of its own: --jobs")
        from nearkin import compare as comparison_room
        from nearkin import report, training

        names = comparison_room.comparable(losses)
        time = None if budget is None else comparison_room.seconds(budget)
        sets = [
            f"{key}={json_module.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value is not None
        ]
        asked = training.read_recipe(recipe, [*sets, *(set_ or [])])
        with _screen(quiet or json, steps is not None or budget is not None) as callback:
            found = comparison_room.compare(
                asked,
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
            report.write_comparison(page, found.results)
    if json:
        echo(json_module.dumps(found.results, indent=2, ensure_ascii=False), lines=True)
    elif quiet:
        echo(str(folder))
    else:
        _print(found.results)
        echo(f"report: {page}")


def _stem(source: str) -> str:
    return re.sub(r"[^\w-]+", "-", Path(source).stem).strip("-").lower() or "source"


@contextmanager
def _screen(silent: bool, limited: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """One bar over all trainings with the time left; a line when a loss is through. limited: the user said how long."""
    from rich.console import Console

    console = Console(stderr=True)
    if silent:
        yield lambda event: None
        return
    with progress_bars(console, hidden=not console.is_terminal) as shown:
        yield ComparisonCallback(console, shown, limited)


class ComparisonCallback:
    """One method an event."""

    def __init__(self, console: Any, shown: Any, limited: bool) -> None:
        self.console, self.bars, self.limited = console, shown, limited
        self.task: Any = shown.add_task("reading", total=None, said="")

    def __call__(self, event: dict[str, Any]) -> None:
        handle = getattr(self, f"on_{event['event']}", None)
        if handle is not None:
            handle(event)

    def on_measuring(self, event: dict[str, Any]) -> None:
        self.bars.update(self.task, description=f"measuring the rate of {len(event['losses'])} losses")

    def on_fitted(self, event: dict[str, Any]) -> None:
        self._say(f"the plan takes {event['takes'] / 60:.1f} of {event['budget'] / 60:.1f} minutes at the most")

    def on_planned(self, event: dict[str, Any]) -> None:
        plan, seeds = event["plan"], "1 seed" if event["plan"].seeds == 1 else f"{event['plan'].seeds} seeds"
        text = (
            f"{len(event['losses'])} losses: {plan.trials} settings each on {plan.folds} folds, then {seeds} a fold; "
        )
        text += f"{plan.steps} steps a training, {event['jobs']} at a time"
        self._say(text)
        self._say(f"the same table again: {event['command']}")
        for note in event["notes"]:
            self._say(f"note: {note}")
        if not self.limited:
            self._say("note: --steps, or --budget 20m for a plan that fits into a time, would make it shorter")

    def on_begun(self, event: dict[str, Any]) -> None:
        if event["done"]:
            self._say(f"going on: {event['done']} of at most {event['total']} trainings are kept")
        self.bars.reset(self.task, total=event["total"], completed=event["done"], description="training", said="")

    def on_trained(self, event: dict[str, Any]) -> None:
        job, result = event["job"], event["result"]
        said = f"{job.loss}  map@r {shown('map@r', result['value'], ' %')}"
        self.bars.update(self.task, completed=event["done"], total=event["total"], said=said)

    def on_chosen(self, event: dict[str, Any]) -> None:
        result = event["result"]
        default = result.trials[0].value
        setting = "  ".join(f"{key.partition('.')[2]} {value}" for key, value in result.best.setting.items())
        best, usual = (shown("map@r", value, " %") for value in (result.best.value, default))
        self._say(f"{result.loss}: validation map@r {best} (default {usual})  {setting}")

    def on_testing(self, event: dict[str, Any]) -> None:
        self.bars.update(self.task, description="testing", total=None, said="")

    def on_note(self, event: dict[str, Any]) -> None:
        self._say(f"note: {event['text']}")

    def _say(self, text: str) -> None:
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
        cells = [_cell(row["separated"]["map@r"]), _cell(row["separated"]["precision@1"])]
        cells += [_cell(row["concatenated"]["map@r"]), verdict, "–" if speed is None else f"{speed:.1f}"]
        grid.add_row(Text(visible(row["loss"])), *cells)
    for row in results["references"]:
        name = results["protocol"]["baseline"] if row["loss"] == "baseline" else row["loss"]
        single = row.get("separated") or row["concatenated"]
        joined = _cell(row["concatenated"]["map@r"]) if "separated" in row else ""
        cells = [_cell(single["map@r"]), _cell(single["precision@1"]), joined, "", ""]
        grid.add_row(Text(visible(name)), *cells, style="dim")
    console = Console()
    console.print(grid)
    advice = results["recommendation"]
    for sentence in (*advice["sentences"], *advice["cautions"]):
        console.print(visible(sentence), markup=False, highlight=False)
    console.print(visible(advice["train"], lines=True), markup=False, highlight=False, soft_wrap=True)


def _cell(figure: dict[str, float | None]) -> str:
    value, low, high = (
        None if part is None else f"{100 * part:.1f}" for part in (figure[k] for k in ("value", "low", "high"))
    )
    if value is None:
        return "–"
    return value if low is None or high is None else f"{value} ({low}–{high})"
