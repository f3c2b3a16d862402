"""Other systems and versions: what Windows lacks, source trees without metadata, the floors of pyproject."""

import ast
import builtins
import importlib.metadata
import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nearkin
from commands import output_of, run
from nearkin import kernels, report, training
from nearkin.core.versions import version_of
from nearkin.data import cache_store
from nearkin.data.item_set import Pairs
from nearkin.dist import heartbeat
from nearkin.training.checkpoint import checkpoints
from nearkin.training.prepare import Prepared
from nearkin.web import supervisor

SOURCE = Path(nearkin.__file__).parent
ROOT = SOURCE.parents[1]
SMALL = ["training.epochs=1", "training.batches=2", "sampler.batch=8", "sampler.per_class=4", "encoder.hidden=[8]"]
SMALL += ["encoder.dim=4", "training.workers=0"]

# What a Python on Windows does not have.
MODULES = {"resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "crypt", "spwd", "curses"}
_LACKED = {
    "os": """fork forkpty killpg getpgid setpgid setsid getuid geteuid getgid getegid setuid setgid getgroups uname nice
        getloadavg sched_getaffinity sched_setaffinity sched_yield sysconf confstr statvfs fstatvfs mkfifo mknod chown
        fchown lchown fchmod pread pwrite preadv pwritev readv writev sendfile posix_fallocate posix_fadvise lockf wait3
        wait4 waitid WNOHANG fdatasync sync O_DIRECTORY O_NOFOLLOW O_CLOEXEC O_NONBLOCK O_SYNC O_DSYNC openpty ttyname
        memfd_create copy_file_range eventfd getresuid initgroups tcgetpgrp""",
    "signal": """SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGQUIT SIGSTOP SIGCONT SIGTSTP SIGPIPE SIGWINCH alarm
        setitimer getitimer pause pthread_kill pthread_sigmask sigwait sigtimedwait siginterrupt""",
    "socket": "AF_UNIX SO_REUSEPORT send_fds recv_fds",
    "select": "poll epoll kqueue",
    "time": "tzset clock_gettime pthread_getcpuclockid",
}
ATTRIBUTES = {module: names.split() for module, names in _LACKED.items()}


@pytest.fixture
def vectors(tmp_path):
    """An .npz of 12 classes of 6 noisy vectors."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 6)
    rows = rng.normal(size=(12, 8))[labels] + 0.5 * rng.normal(size=(len(labels), 8))
    np.savez(tmp_path / "vectors.npz", embeddings=rows.astype(np.float32), labels=labels)
    return tmp_path / "vectors.npz"


def train(source, out):
    return training.train(training.read_recipe(None, [f'data.source="{source.as_posix()}"', *SMALL]), out)


# --- what the source asks of the system


def tolerant(parents, *errors):
    """Whether a place of the source is inside a `try` or a `suppress` that expects one of the errors."""
    for node in parents:
        if isinstance(node, ast.Try):
            text = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
        elif isinstance(node, ast.With):
            text = " ".join(ast.unparse(item) for item in node.items if "suppress" in ast.unparse(item))
        else:
            continue
        if any(error in text for error in errors):
            return True
    return False


def asked_for(parents, name):
    """Whether a condition around a place of the source asks for the attribute before it is taken."""
    tests = [node.test for node in parents if isinstance(node, ast.If | ast.IfExp)]
    return any("hasattr" in ast.unparse(test) and f"'{name}'" in ast.unparse(test) for test in tests)


def is_text_without_encoding(call):
    """`open`, `.open`, `.read_text` or `.write_text` that reads letters as the system happens to write them."""
    named = isinstance(call.func, ast.Name)
    name = call.func.id if named else getattr(call.func, "attr", "")
    if name not in ("open", "read_text", "write_text"):
        return False
    on = "" if named else ast.unparse(call.func.value)
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    if name == "read_text":
        return not call.args
    if name == "write_text":
        return on != "files" and len(call.args) < 2
    if on.endswith(("Image", "os", "tarfile", "Gallery", "webbrowser")):
        return False
    modes = [ast.literal_eval(arg) for arg in call.args if isinstance(arg, ast.Constant)]
    modes += [ast.literal_eval(k.value) for k in call.keywords if k.arg == "mode"]
    modes = [mode for mode in modes if isinstance(mode, str) and re.fullmatch(r"[rwxabt+]{1,3}", mode)]
    return not any("b" in mode for mode in modes) if modes or named else False


NOT_ON_WINDOWS = ("supervisor.py", "worker.py")  # of nearkin serve --workers, which is refused there


def faults(path):
    """Every line of a file that another system would stumble over."""

    def walk(node, parents):
        yield node, parents
        for child in ast.iter_child_nodes(node):
            yield from walk(child, [*parents, node])

    for node, parents in walk(ast.parse(path.read_text(encoding="utf-8")), []):
        line = f"{path.name}:{getattr(node, 'lineno', 0)}"
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        imported += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in imported:
            if name.split(".")[0] in MODULES and not tolerant(parents, "ImportError"):
                yield f"{line} imports {name}"
        if isinstance(node, ast.ImportFrom) and node.module in ATTRIBUTES:
            yield from (f"{line} imports {a.name}" for a in node.names if a.name in ATTRIBUTES[node.module])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            known = node.attr in ATTRIBUTES.get(node.value.id, ())
            known &= not (path.name in NOT_ON_WINDOWS and node.value.id == "signal")
            if known and not asked_for(parents, node.attr) and not tolerant(parents, "AttributeError"):
                yield f"{line} takes {ast.unparse(node)}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            unix = re.match(r"/(proc|dev|sys|tmp|etc|usr|var)(/|$)", node.value)
            if unix and not tolerant(parents, "OSError"):
                yield f"{line} speaks of {node.value}"
        if isinstance(node, ast.Call):
            if is_text_without_encoding(node):
                yield f"{line} names no encoding"
            name = getattr(node.func, "attr", "")
            if name in ("get_context", "set_start_method") and "'fork" in ast.unparse(node):
                yield f"{line} forks"
            if name == "kill" and node.args and ast.unparse(node.args[-1]) == "0":
                function = next((p for p in reversed(parents) if isinstance(p, ast.FunctionDef)), node)
                if "win32" not in ast.unparse(function):
                    yield f"{line} would send Ctrl-C on Windows"


def test_several_workers_are_refused_on_windows(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ValueError, match=r"workers must be 1 on Windows.*, got 2"):
        supervisor.check_workers(2)


def test_the_source_asks_no_system_for_what_others_lack():
    assert not [fault for path in sorted(SOURCE.rglob("*.py")) for fault in faults(path)]


@pytest.mark.parametrize(
    "text",
    [
        "import resource",
        "def f():\n    import fcntl",
        "try:\n    import pwd\nexcept OSError:\n    pass",
        "os.sched_getaffinity(0)",
        "x = 1 if hasattr(os, 'fork') else os.sched_getaffinity(0)",
        "os.kill(3, signal.SIGKILL)",
        "os.kill(3, 0)",
        "from os import fork",
        "open('names.txt')",
        "path.open('w')",
        "path.read_text()",
        "mp.get_context('fork')",
        "x = '/proc/self/stat'",
    ],
)
def test_the_reader_of_the_source_sees(text, tmp_path):
    (tmp_path / "bad.py").write_text(text, encoding="utf-8")
    assert len(list(faults(tmp_path / "bad.py"))) == 1


# --- a run on such a system


@pytest.fixture
def elsewhere(monkeypatch):
    """This process as if it ran on Windows, as far as modules and attributes go."""
    for name in (*MODULES, "openTSNE"):  # whatever is imported meanwhile would remember what it missed
        monkeypatch.setitem(sys.modules, name, None)
    for module, names in ATTRIBUTES.items():
        for name in names:
            monkeypatch.delattr(sys.modules[module], name, raising=False)


def test_a_run_ends_with_results_and_report_without_posix(elsewhere, vectors, tmp_path):
    outcome = train(vectors, tmp_path / "run")
    report.of_run(outcome)
    assert (tmp_path / "run" / "report.html").is_file()
    assert json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))["peak_bytes"] is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell")
def test_the_peak_of_memory_is_told_where_the_system_does(vectors, tmp_path):
    assert train(vectors, tmp_path / "run").results["peak_bytes"] > 2**24


def test_a_process_is_not_sent_ctrl_c_to_see_whether_it_lives(monkeypatch):
    def absent(*_, **__):
        raise FileNotFoundError

    sent = []
    monkeypatch.setattr(builtins, "open", absent)
    monkeypatch.setattr(os.path, "isdir", lambda _: False)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    assert heartbeat.started_at(4711) == 0 and not sent


def test_a_hanging_rank_is_ended_where_there_is_no_sigkill(monkeypatch):
    sent = []
    monkeypatch.delattr(signal, "SIGKILL", raising=False)
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    monkeypatch.setattr(heartbeat, "started_at", lambda process: 7)
    heartbeat._kill(heartbeat._Beat(machine=heartbeat._machine(), process=4711, started=7))
    assert sent == [(4711, signal.SIGTERM)]


def test_a_loaded_checkpoint_does_not_hold_its_file(tmp_path):
    """A file that is mapped can be neither replaced nor removed on Windows."""
    path = tmp_path / "step-00000001.safetensors"
    checkpoints.save(path, {"x": torch.ones(5000)}, {})
    tensors, _ = checkpoints.load(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
    assert tensors["x"].eq(1).all()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is mapped")
def test_no_file_of_the_picture_cache_is_removed_while_it_is_mapped(monkeypatch, tmp_path):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path))
    removed = []

    def remove(path):
        removed.append(path.name in Path("/proc/self/maps").read_text(encoding="utf-8"))

    monkeypatch.setattr(cache_store, "_delete", remove)
    part = cache_store.Part({}, 64, 3, auto=True)
    for i in range(3):
        part.append(f"{i}", np.full((64, 64, 3), i, np.uint8), None)
    part.finish()
    assert removed == [False]


def test_a_checkpoint_that_cannot_be_removed_yet_does_not_end_the_training(monkeypatch, tmp_path):
    kept = checkpoints.Checkpoints(tmp_path)
    for step in (1, 2):
        kept.write(step, {"x": torch.ones(2)}, {})
    with monkeypatch.context() as context:
        context.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError("in use")))
        kept.write(3, {"x": torch.ones(2)}, {})
    kept.write(4, {"x": torch.ones(2)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{n}.safetensors" for n in (3, 4)]


# --- a source tree without metadata, and whatever else would fail at the end


@pytest.fixture
def unknown(monkeypatch):
    """No package has metadata."""

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", absent)


def test_a_run_without_metadata_ends_with_results_and_report(unknown, vectors, tmp_path):
    report.of_run(train(vectors, tmp_path / "run"))
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert results["nearkin"] == nearkin.__version__
    assert f"nearkin {nearkin.__version__}" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_versions_without_metadata(unknown):
    import PIL

    assert version_of("pillow") == PIL.__version__ and version_of("numpy") == np.__version__
    assert version_of("nearkin") == nearkin.__version__ and version_of("no-such-package") == "unknown"


def test_versions_are_looked_up_in_one_place():
    asking = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "importlib.metadata" in path.read_text(encoding="utf-8")
    }
    assert asking == {"core/versions.py", "kernels/__init__.py"}  # the second only asks whether triton is recent


def test_what_a_report_lacks_is_said_before_training(monkeypatch, vectors, tmp_path):
    def absent(*_):
        raise FileNotFoundError("page.css is not there")

    monkeypatch.setattr("nearkin.report.template.resources", absent)
    sets = [word for one in SMALL for word in ("--set", one)]
    assert "page.css" in output_of(run("train", vectors, *sets, "--out", tmp_path / "run"), 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("same, fold", [([1, 0, 1], [0, 0, 0]), ([1, 1, 1], [0, 1, 1])])
def test_pairs_that_cannot_be_verified_are_a_note_at_the_beginning(same, fold, monkeypatch, vectors, tmp_path):
    pairs = Pairs(np.array([[0, 1], [0, 2], [1, 3]]), np.array(same, bool), np.array(fold))
    monkeypatch.setattr(Prepared, "test_pairs", lambda self: pairs)
    outcome = train(vectors, tmp_path / "run")
    assert "verification" not in outcome.results
    assert any("not verified: " in note for note in outcome.notes)


# --- versions


def requirements():
    """Of pyproject: what a user's installation may ask for, (name, floor) each."""
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(r for name in extras if name not in ("dev", "docs", "test") for r in extras[name]),
    ]
    floors = [re.match(r"([\w-]+)(?:\[\w+\])?(?:>=([\d.]+))?", requirement).groups() for requirement in asked]
    return [(name.lower(), floor) for name, floor in floors if floor is not None]


def test_the_floor_environment_has_the_oldest_versions_that_pyproject_allows():
    lines = (ROOT / "constraints-floor.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(re.match(r"([\w-]+)==([\d.]+)", line).groups() for line in lines if not line.startswith("#"))
    pinned = {name.lower(): version for name, version in pinned.items()}
    for name, floor in requirements():
        parts = floor.split(".")
        assert pinned[name].split(".")[: len(parts)] == parts, f"{name}: pyproject {floor}, floor {pinned[name]}"


def test_an_old_triton_is_not_asked_for_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "RECENT", False)
    monkeypatch.setattr(kernels, "version", lambda _: "3.2.0")
    assert not kernels.installed()
    assert kernels.missing() == "triton 3.2.0 is installed, 3.4 or newer is needed, which comes with torch 2.8"


@pytest.mark.parametrize("found, recent", [("3.2.0", False), ("3.4.0", True), ("3.10.1+git", True), ("4.0", True)])
def test_recent_tritons(found, recent, monkeypatch):
    monkeypatch.setattr(kernels, "version", lambda _: found)
    assert kernels._recent() is recent
