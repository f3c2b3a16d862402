"""What `nearkin evaluate` shows: a bar per protocol, the table, sentences and notes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nearkin.cli.screen import bar_columns, echo, print_note
from nearkin.cli.verb import is_quiet
from nearkin.core.text import visible

if TYPE_CHECKING:
    from nearkin.evaluation.protocols.runner import Progress

__all__ = ["print_results", "protocol_bar"]


@contextmanager
def protocol_bar(verified: str, shown: bool) -> "Iterator[Progress | None]":
    """A bar on stderr with rate and time left, removed at the end; None if stderr is no terminal.

    verified: what verification counts; one-shot counts episodes, open-set searches, the others rows.
    """
    from rich.console import Console
    from rich.progress import Progress

    counted = {"verification": verified, "one_shot": "episodes", "open_set": "searches"}
    console = Console(stderr=True)
    if not shown or is_quiet() or not console.is_terminal:
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


def print_results(results: dict[str, Any], interval: bool) -> None:
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
        print_note(note)
