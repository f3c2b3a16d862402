"""The blocks of a documentation page: they are run in order, and what they print is compared with what the page shows.

A ```text block is the output of the ```bash or ```python blocks since the last one. In it … stands for anything in a
line, and a line of … for any lines. `<!-- figures may differ by 3 -->` before it allows each number to differ by that
much; `<!-- not run: reason -->` before a block leaves it out.
"""

import contextlib
import io
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from nearkin.cli import app

FENCE = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?^```(bash|python|text)\n(.*?)^```$", re.S | re.M)
NUMBER = r"(?<![\w@-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"  # not in a name, as rug-185 or recall@1
PORT = "8765"


@dataclass
class Block:
    language: str
    code: str
    line: int
    remark: str

    @property
    def skipped(self) -> bool:
        return self.remark.startswith("not run: ")

    @property
    def tolerance(self) -> float:
        match = re.fullmatch(r"figures may differ by ([\d.]+)", self.remark)
        assert match or not self.remark or self.skipped, f"line {self.line}: unknown remark {self.remark!r}"
        return float(match[1]) if match else 0.0


def blocks_of(text: str) -> list[Block]:
    return [Block(m[2], m[3], text[: m.start()].count("\n") + 1, m[1] or "") for m in FENCE.finditer(text)]


class Reader:
    """Follows a page in one folder, as its reader would: one shell, one Python session."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names, self.services = folder, {"__name__": "__main__"}, []
        self.port = _free_port()

    def follow(self, text: str) -> list[str]:
        """What differs from the page, one sentence each."""
        output, wrong = "", []
        try:
            for block in blocks_of(text):
                if block.language == "text":
                    shown = difference(block.code, output, block.tolerance)
                    wrong += [f"line {block.line}: {shown}\n--- printed:\n{output}"] if shown else []
                    output = ""
                elif not block.skipped:
                    output += self.run(block)
        except Exception as error:
            wrong.append(f"line {block.line}: {type(error).__name__}: {error}\n{output}")
        finally:
            for service in self.services:
                service.send_signal(signal.SIGTERM)
                service.wait(20)
        return wrong

    def run(self, block: Block) -> str:
        if "nearkin serve" in block.code:
            self.port = _free_port()
        code = block.code.replace(PORT, str(self.port))
        return self.shell(code) if block.language == "bash" else self.python(code)

    def python(self, code: str) -> str:
        printed = io.StringIO()
        with _inside(self.folder), contextlib.redirect_stdout(printed):
            exec(compile(code, "page", "exec"), self.names)
        return printed.getvalue()

    def shell(self, code: str) -> str:
        lines = [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]
        return "".join(self.command(line) for line in lines)

    def command(self, line: str) -> str:
        if line.startswith("nearkin serve"):
            return self.serve(shlex.split(line.removesuffix("&"))[1:])
        if line.startswith("nearkin ") and not set(line) & set("|>&;$"):
            with _inside(self.folder):
                result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
            assert result.exit_code == 0, f"{line}: {result.output} {result.exception}"
            return result.output
        done = subprocess.run(["bash", "-ec", line], cwd=self.folder, capture_output=True, text=True, env=environment())
        assert done.returncode == 0, f"{line}: {done.stdout} {done.stderr}"
        return done.stdout

    def serve(self, arguments: list[str]) -> str:
        """A service in the background; the page goes on when it answers."""
        command = [sys.executable, "-m", "nearkin", *arguments, "--port", str(self.port)]
        with open(self.folder / "service.log", "wb") as log:
            self.services.append(subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, env=environment()))
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/"):
                return ""
            assert self.services[-1].poll() is None, (self.folder / "service.log").read_text()
            time.sleep(0.1)
        raise AssertionError("the service does not answer")


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def environment() -> dict[str, str]:
    """In which `nearkin` is this code, whatever is installed."""
    source = str(Path(__file__).parents[1] / "src")
    return os.environ | {"PYTHONPATH": source, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def _free_port() -> int:
    """Below the ports that systems give to connections, so that none takes it before the service does."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")


def difference(shown: str, printed: str, tolerance: float) -> str:
    """Why `printed` is not what is shown, or nothing. Blank lines and the width of gaps do not count."""
    wanted = [line.strip() for line in shown.splitlines() if line.strip()]
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    at = 0
    for i, line in enumerate(wanted):
        if line == "…":
            rest = wanted[i + 1 : i + 2]
            while rest and at < len(lines) and _unlike(rest[0], lines[at], tolerance):
                at += 1
            at = at if rest else len(lines)
            continue
        if at == len(lines):
            return f"{line!r} was not printed"
        if _unlike(line, lines[at], tolerance):
            return f"{line!r} is shown, {lines[at]!r} was printed"
        at += 1
    return f"{lines[at]!r} was printed and is not shown" if at < len(lines) else ""


def _unlike(shown: str, printed: str, tolerance: float) -> bool:
    parts = re.split(rf"({NUMBER}|…|\s+|─+)", shown) if tolerance else re.split(r"(…|\s+|─+)", shown)
    pattern = ""
    for part in parts:
        if tolerance and re.fullmatch(NUMBER, part):
            pattern += f"({NUMBER})"
        elif part == "…":
            pattern += ".*?"
        else:
            pattern += r"\s+" if part.isspace() else "─+" if part.startswith("─") else re.escape(part)
    match = re.fullmatch(pattern, printed)
    if not match:
        return True
    numbers = [float(n.replace(",", "")) for n in re.findall(NUMBER, shown)] if tolerance else []
    pairs = zip(numbers, match.groups(), strict=True)
    return any(abs(a - float(b.replace(",", ""))) > tolerance for a, b in pairs)
