"""`nearkin losses`, `nearkin encoders`, `nearkin sources`: names, settings and defaults."""

import inspect
from typing import Any

from nearkin.cli import options
from nearkin.cli.screen import app, echo, print_json


@app.command()
def losses(json: options.JsonFlag = False, quiet: options.NamesFlag = False) -> None:
    """List the losses with their settings and defaults.

    Examples:

      nearkin losses

      nearkin train photos/ --loss proxy-anchor --set loss.margin=0.2
    """
    from nearkin.training.config import registry

    _show(
        [
            {"name": loss.name, "line": loss.line, "settings": _defaults(loss.settings)}
            for loss in registry.LOSSES.values()
        ],
        json,
        quiet,
    )


@app.command()
def encoders(json: options.JsonFlag = False, quiet: options.NamesFlag = False) -> None:
    """List the encoders with their settings and defaults.

    Examples:

      nearkin encoders

      nearkin train photos/ --encoder efficientnet-lite0
    """
    from nearkin import models

    _show(
        [{"name": n, "line": line, "settings": dict(settings)} for n, line, settings in models.encoders()], json, quiet
    )


@app.command()
def sources(json: options.JsonFlag = False, quiet: options.NamesFlag = False) -> None:
    """List the named data sets and what they need; a folder or a file needs no name.

    Examples:

      nearkin sources

      nearkin train cub200 --root data/CUB_200_2011
    """
    from nearkin import data

    _show([{"name": name, "line": line, "needs": needs} for name, line, needs in data.sources()], json, quiet)


def _defaults(settings: dict[str, Any]) -> dict[str, Any]:
    empty = inspect.Parameter.empty
    return {name: None if setting.default is empty else setting.default for name, setting in settings.items()}


def _show(entries: list[dict[str, Any]], json: bool, names_only: bool) -> None:
    if json:
        print_json(entries)
        return
    if names_only:
        for entry in entries:
            echo(entry["name"])
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=SIMPLE_HEAD, show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for entry in entries:
        settings = entry.get("settings", {})
        details = entry.get("needs") or "  ".join(f"{key}={_in_toml(value)}" for key, value in settings.items())
        line = Text(entry["line"])
        if details:
            line.append("\n" + details, style="dim")
        grid.add_row(Text(entry["name"], style="bold"), line)
    Console().print(grid)


def _in_toml(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
