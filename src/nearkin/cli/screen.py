"""What the verbs share: the app, errors as one sentence, progress bars and tables."""

import io
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

from nearkin.cli.ranks import end_rank
from nearkin.cli.verb import EXIT_CODES, App, Verbs, as_json, echo, is_quiet, print_error, print_json, print_result
from nearkin.core.errors import Diverged, Stopped, Terminated
from nearkin.core.text import visible

__all__ = [
    "EnrolmentBar",
    "app",
    "bar_columns",
    "echo",
    "main",
    "metric_cell",
    "one_sentence",
    "plain_bar",
    "print_json",
]
__all__ += [
    "as_json",
    "print_note",
    "print_result",
    "print_table",
    "progress_bars",
    "results_table",
    "shown",
    "training_screen",
]


# Of CUDA, of the CPU, and of more bytes than a number has room for.
NO_MEMORY = re.compile("out of memory|can't allocate memory|calculation overflowed")

app = App(
    cls=Verbs,
    help="Deep metric learning: train encoders, evaluate embeddings, search and identify.",
    epilog="Start: nearkin train photos/ (a folder per class), or nearkin serve photos/ without training. "
    "nearkin VERB --help has examples. Exit codes: "
    + "; ".join(f"{code} {meaning.partition(';')[0].partition(':')[0]}" for code, meaning in EXIT_CODES.items())
    + ".",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from nearkin.core.versions import version_of

        echo(f"nearkin {version_of('nearkin')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the verb."""


def main() -> None:
    """The `nearkin` command."""
    # Threads that spin while they wait slow a training down where another program uses a core. torch reads this when it
    # is imported, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × prints ?, and nothing fails
    before = warnings.formatwarning
    warnings.formatwarning = lambda *args, **options: visible(before(*args, **options), lines=True)
    try:
        app(prog_name="nearkin")
    except SystemExit as end:
        end_rank(end.code)
        raise


@contextmanager
def one_sentence(interrupted: Callable[[], str] = lambda: "nothing was written") -> Iterator[None]:
    """Bad input ends with one sentence and exit code 2, a diverged training with 3, a signal with 128 + its number."""
    try:
        with _terminable():
            yield
    except KeyboardInterrupt as error:
        code = 143 if isinstance(error, Terminated) else 130
        print_error(f"interrupted; {interrupted()}", code)
        raise typer.Exit(code) from None
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and "pip install" not in str(error):
            raise  # no missing extra, but a bug of nearkin
        code = 3 if isinstance(error, Diverged) else 2
        print_error(" ".join(str(error).split()), code)
        raise typer.Exit(code) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
            raise
        print_error("out of memory; use a smaller encoder, --budget, --batch or --chunk, or --device cpu", 2)
        raise typer.Exit(2) from None
    except Stopped as error:
        print_error(str(error), 128 + error.number)
        raise typer.Exit(128 + error.number) from None


@contextmanager
def _terminable() -> Iterator[None]:
    def end(*_: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def plain_bar(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """progress(done, total) as a bar with rate and time left on stderr; None without a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or is_quiet() or not console.is_terminal:
        yield None
        return
    with progress_bars(console) as bars:
        task = bars.add_task(what, total=None, status="")

        def progress(done: int, total: int) -> None:
            speed = bars.tasks[0].speed
            bars.update(task, completed=done, total=total or None, status=f"{speed:,.0f}/s" if speed else "")

        yield progress


class EnrolmentBar:
    """progress(done, total) from another thread: a bar that goes when all is done, or a line per quarter."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._shown, self._stack = quiet, 0, ExitStack()
        self._bar: Callable[[int, int], None] | None = None

    def __enter__(self) -> "EnrolmentBar":
        if not self._quiet:
            self._bar = self._stack.enter_context(plain_bar("enrolling"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar(done, total)
            if done == total:
                self._bar = None
                self._stack.close()
        elif not self._quiet and 4 * done // total > self._shown < 4:
            self._shown = 4 * done // total
            echo(f"enrolled {done:,} of {total:,}", err=True)


@contextmanager
def training_screen(silent: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A callback that shows a training: progress bars, one line per epoch, notes and warnings."""
    from rich.console import Console

    console = Console(stderr=True)
    if silent:
        yield lambda event: None
        return
    with progress_bars(console, hidden=not console.is_terminal) as bars:
        yield ProgressCallback(console, bars)


class ProgressCallback:
    """One method per event."""

    def __init__(self, console: Any, bars: Any) -> None:
        self.console, self.bars = console, bars
        self.task: Any = None
        self.description = ""
        self.epochs = self.batches = 0
        self.settled: Any = None
        self.stage = "training"
        self.loss = ""

    def __call__(self, event: dict[str, Any]) -> None:
        handle = getattr(self, f"on_{event['event']}", None)
        if handle is not None:
            handle(event)

    def on_loading(self, event: dict[str, Any]) -> None:
        self._bar(f"reading {event['source']}", None)

    def on_storing(self, event: dict[str, Any]) -> None:
        self._bar("decoding images", event["total"])
        self._advance(event["done"], "images/s")

    def on_old_rows(self, event: dict[str, Any]) -> None:
        self._bar(f"embedding by {event['run']}", event["total"])
        self._advance(event["done"], "items/s")

    def on_near(self, event: dict[str, Any]) -> None:
        self._bar("looking for near-duplicates", event["total"] or None)
        if event["total"]:
            self.bars.update(self.task, total=event["total"])
            self._advance(event["done"], "pictures/s")

    def on_data(self, event: dict[str, Any]) -> None:
        for line in event["lines"]:
            self._print(line)

    def on_settled(self, event: dict[str, Any]) -> None:
        recipe = self.settled = event["recipe"]
        self.epochs, self.batches = recipe.training.epochs, recipe.training.batches
        if recipe.unlabelled.only:
            self._print(f"{recipe.encoder['name']}, pretraining only, {recipe.training.precision}")
            return
        self._print(
            f"{recipe.encoder['name']}, {recipe.loss['name']}, {recipe.sampler['name']} × {recipe.sampler['batch']}, "
            f"{_count(self.epochs, 'epoch', 's')} of {_count(self.batches, 'batch', 'es')}, {recipe.training.precision}"
        )

    def on_pretraining(self, event: dict[str, Any]) -> None:
        self.stage, self.epochs, self.batches = "pretraining", event["epochs"], event["batches"]
        self._print(
            f"pretraining: {event['method']}, {event['pictures']:,} pictures × 2 views, {event['batch']} in a batch, "
            f"{_count(self.epochs, 'epoch', 's')} of {_count(self.batches, 'batch', 'es')}"
        )

    def on_pretrained(self, event: dict[str, Any]) -> None:
        options = self.settled.training
        self.stage, self.epochs, self.batches = "training", options.epochs, options.batches
        self._print(f"pretrained in {event['steps']:,} steps, {event['seconds']:.0f} s")

    def on_resumed(self, event: dict[str, Any]) -> None:
        if event["finished"]:
            self._print(f"training was finished at step {event['step']}; testing its best weights again")
        else:
            what = f"{event['stage']} " if "stage" in event else ""
            self._print(f"resuming {what}in epoch {event['epoch']} after step {event['step']}")

    def on_step_end(self, event: dict[str, Any]) -> None:
        self._bar(self.stage, self.epochs * self.batches, start=event["step"] - 1)
        self._advance(event["step"], "batches/s")

    def on_step(self, event: dict[str, Any]) -> None:
        self.loss = f"loss {event['loss']:.4g}"

    def on_epoch(self, event: dict[str, Any]) -> None:
        val = "".join(f"  {name} {shown(name, value, ' %')}" for name, value in event.get("val", {}).items())
        best, mean = "  best" if event.get("best") else "", f"loss {event['loss']:.4g}"
        self._print(f"epoch {event['epoch']:>3}/{self.epochs}  {mean}{val}  {event['seconds']:.0f} s{best}")

    def on_mining(self, event: dict[str, Any]) -> None:
        self._bar(f"mining: {event['what']}", event["total"])
        self._advance(event["done"], "items/s")

    def on_saved(self, event: dict[str, Any]) -> None:
        self._print(f"saved at step {event['step']}")

    def on_interpolating(self, event: dict[str, Any]) -> None:
        self._bar("interpolating weights", event["total"])
        self.bars.update(self.task, completed=event["done"], status=event["what"])

    def on_testing(self, event: dict[str, Any]) -> None:
        self.loss = ""
        self._bar(f"testing: {event['what']}", None)
        if "done" in event:
            self.bars.update(self.task, total=event["total"])
            self._advance(event["done"], "items/s")

    def on_reporting(self, event: dict[str, Any]) -> None:
        self._bar("writing the report", None)

    def on_note(self, event: dict[str, Any]) -> None:
        self._print(f"note: {event['text']}")

    def _print(self, text: str) -> None:
        from rich.text import Text

        self.console.print(Text(visible(text)), soft_wrap=True)

    def _bar(self, description: str, total: int | None, start: int = 0) -> None:
        if self.description == description:
            return
        if self.task is not None:
            self.bars.remove_task(self.task)
        self.task = self.bars.add_task(visible(description), total=total, completed=start, status="")
        self.description = description

    def _advance(self, done: int, unit: str) -> None:
        speed = self.bars.tasks[0].speed
        rate = f"{speed:,.1f} {unit}" if speed else ""
        self.bars.update(self.task, completed=done, status=f"{rate}  {self.loss}")


@contextmanager
def progress_bars(console: Any, hidden: bool = False) -> Iterator[Any]:
    from rich.progress import Progress

    with Progress(*bar_columns(), console=console, transient=True, disable=hidden, refresh_per_second=4) as bars:
        yield bars


def bar_columns() -> tuple[Any, ...]:
    """Columns of a progress bar: name, bar, elapsed time, the field `status`, and the time left once it is known."""
    from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        """As "0:01:23 left"; empty while unknown, so that the elapsed time is not mistaken for it."""

        max_refresh = 0.5

        def render(self, task: Any) -> Text:
            seconds = None if task.finished else task.time_remaining
            if task.total is None or seconds is None:
                return Text("")
            minutes, rest = divmod(int(seconds), 60)
            hours, minutes = divmod(minutes, 60)
            return Text(f"{hours}:{minutes:02d}:{rest:02d} left", style="progress.remaining")

    status = TextColumn("{task.fields[status]}", markup=False)
    description = TextColumn("{task.description}", markup=False)  # a folder may be called [red]
    return description, BarColumn(), TimeElapsedColumn(), status, TimeLeft()


def results_table(results: dict[str, Any]) -> None:
    """Baseline, untrained and trained encoder side by side, with 95 % intervals."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    tested = results["test"]
    columns = {"baseline": results["baseline"], "untrained": "untrained", "trained": "trained"}
    interval = any(figure["low"] is not None for figure in tested["trained"].values())
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    grid.add_column("test, % (95 %)" if interval else "test, %", no_wrap=True)
    for name in columns.values():
        grid.add_column(Text(visible(name)), justify="right", overflow="fold")  # narrow screens wrap: no value is cut
    for metric in tested["trained"]:
        if metric != "precision@1":  # the same number as recall@1
            grid.add_row(metric, *(metric_cell(metric, tested[name][metric]) for name in columns))
    for level in results.get("levels", [])[1:]:  # the first is the classes themselves
        grid.add_section()
        for metric in level["test"]["trained"]:
            cells = (metric_cell(metric, level["test"][name][metric]) for name in columns)
            grid.add_row(Text(visible(f"{level['name']}: {metric}")), *cells)
    Console().print(grid)
    if results.get("groups"):
        pairs, test = results["groups"]["pairs_left_out"], results["groups"]["test"]
        line = f"{test:,} test groups: {pairs:,} pairs of the same class and group are left out"
        Console().print(line, soft_wrap=True, highlight=False, markup=False)
    if results.get("no_interval"):
        Console().print(visible(results["no_interval"]), soft_wrap=True, highlight=False, markup=False)


def print_note(note: str) -> None:
    """A note on stderr; none with --quiet or --json, whose document has it."""
    if note and not is_quiet():
        echo(f"note: {note}", err=True)


def print_table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]], empty: str) -> None:
    """empty: what is printed where there are no rows."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        echo(empty)
        return
    grid = Table(box=SIMPLE_HEAD, show_header=any(names), pad_edge=False)
    for name in names:
        grid.add_column(name, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(visible(cell)) for cell in row))
    Console().print(grid)


def _count(number: int, noun: str, ending: str) -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"


def metric_cell(metric: str, figure: dict[str, float | None]) -> str:
    """A metric with its interval, where it has one."""
    value, low, high = (
        None if part is None else shown(metric, part) for part in (figure["value"], figure["low"], figure["high"])
    )
    if value is None:
        return "–"
    return value if low is None or high is None else f"{value} ({low}–{high})"


def shown(metric: str, value: float, unit: str = "") -> str:
    """A metric in words: shares in per cent, with the unit; distances and correlations as they are."""
    if metric == "spearman" or "distance" in metric:
        return f"{value:.3f}" if metric == "spearman" else f"{value:.3g}"
    return f"{100 * value:.1f}{unit}"
