"""Labels, names and paths of others on a terminal and in a log: control characters are shown, markup is text."""

import io
import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))

from nearkin.cli import app, screen
from nearkin.core.text import visible
from nearkin.gallery import Gallery

pytestmark = pytest.mark.slow

EVIL = "heron\x1b[2J\x1b]0;owned\x07\r\n\x9b31m\u202egood[bold red]x[/]"
SAFE = "heron\\u001b[2J\\u001b]0;owned\\u0007\\u000d\\u000a\\u009b31m\\u202egood[bold red]x[/]"


def raw(text: str) -> set[str]:
    """Control characters other than those between lines."""
    return {one for one in text if one != "\n" and visible(one) != one}


@pytest.fixture
def place(tmp_path):
    with Gallery.open(tmp_path / "g", dim=4) as gallery:
        gallery.enrol(np.eye(4)[0], EVIL, {"note": EVIL}, names=EVIL)
        np.save(tmp_path / "one.npy", np.eye(4)[0])
    return tmp_path / "g"


def output_of(*arguments) -> str:
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "400"}).output


def test_commands_show_control_characters_and_send_none(place):
    item = place.with_name("one.npy")
    for command in (
        ("search", item, "--gallery", place),
        ("search", item, "--gallery", place, "--json"),
        ("identify", item, "--gallery", place),
        ("identify", item, "--gallery", place, "--json"),
        ("gallery", "stats", place),
        ("search", EVIL, "--gallery", place),
        ("search", item, "--gallery", place, "--filter", EVIL),
    ):
        printed = output_of(*command)
        assert not raw(printed), (command, printed)
        assert "heron\\u001b[2J\\u001b]0;owned\\u0007" in printed, (command, printed)
    rows = json.loads(output_of("search", item, "--gallery", place, "--json"))
    assert rows[0]["label"] == EVIL and rows[0]["metadata"] == {"note": EVIL}, "as JSON it is what it was"
    assert SAFE in output_of("search", item, "--gallery", place)


def test_an_error_shows_them_too(place, capsys):
    with pytest.raises(screen.typer.Exit), screen.one_sentence():
        raise ValueError(f"{EVIL} is enrolled already")
    printed = capsys.readouterr().err
    assert not raw(printed) and "[bold red]x[/]" in printed


def test_markup_in_names_is_text_on_bars_and_in_lines():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200, color_system=None)
    with screen.progress_bars(console) as bars:
        callback = screen.ProgressCallback(console, bars)
        callback({"event": "loading", "source": "[red]photos[/red]\x1b[2J\x07"})
        bars.refresh()
        callback({"event": "note", "text": "class [bold]heron[/bold]\x1b[2J\x07 is small"})
    printed = out.getvalue()
    assert "[red]photos[/red]\\u001b[2J\\u0007" in printed and "class [bold]heron[/bold]\\u001b[2J\\u0007 is" in printed


def test_lines_of_the_log_are_ascii():
    from nearkin.web.request_log import json_handler, request_logger

    out = io.StringIO()
    request_logger(out).info("request", extra={"fields": {"path": EVIL + "\x7f"}})
    json_handler(out).handle(logging.LogRecord("x", 30, "x", 1, EVIL + "\x7f", None, None))
    for line in out.getvalue().splitlines():
        assert line.isascii() and line.isprintable() and EVIL + "\x7f" in json.loads(line).values()
    assert len(out.getvalue().splitlines()) == 2
