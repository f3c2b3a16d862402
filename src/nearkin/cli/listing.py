"""`nearkin losses`, `nearkin encoders`, `nearkin sources`: what there is, with parameters and defaults."""

import inspect
import json as json_module
from typing import Annotated, Any

import typer

from nearkin.cli.screen import app, echo

_Json = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.command()
def losses(json: _Json = False) -> None:
    """Every loss, what it does, and its settings with their defaults."""
    from nearkin.training.config import registry

    found = [
        {"name": one.name, "line": one.line, "settings": _defaults(one.settings)} for one in registry.LOSSES.values()
    ]
    _show(found, json)


@app.command()
def encoders(json: _Json = False) -> None:
    """Every encoder, what it is for, and its settings with their defaults."""
    from nearkin import models

    _show([{"name": n, "line": line, "settings": dict(settings)} for n, line, settings in models.encoders()], json)


@app.command()
def sources(json: _Json = False) -> None:
    """Every source that has a name, and what it needs; a folder or a file needs none."""
    from nearkin import data

    _show([{"name": name, "line": line, "needs": needs} for name, line, needs in data.sources()], json)


def _defaults(settings: dict[str, Any]) -> dict[str, Any]:
    empty = inspect.Parameter.empty
    return {name: None if one.default is empty else one.default for name, one in settings.items()}


def _show(found: list[dict[str, Any]], json: bool) -> None:
    if json:
        echo(json_module.dumps(found, indent=2, ensure_ascii=False, default=str), lines=True)
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=SIMPLE_HEAD, show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for one in found:
        settings = one.get("settings", {})
        more = one.get("needs") or "  ".join(f"{key}={_written(value)}" for key, value in settings.items())
        line = Text(one["line"])
        if more:
            line.append("\n" + more, style="dim")
        grid.add_row(Text(one["name"], style="bold"), line)
    Console().print(grid)


def _written(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
