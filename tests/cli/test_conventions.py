"""What every verb has: groups and examples in --help, --json, --quiet, exit codes, no colours where none are wanted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

from commands import separate_runner
from nearkin import training
from nearkin.cli import app, verb
from nearkin.cli.verb import EXIT_CODES, VERB_GROUPS

RUNNER = separate_runner()
GROUP = typer.main.get_command(app)
VERBS = {(name,): command for name, command in GROUP.commands.items() if name != "gallery" and not command.hidden}
VERBS |= {("gallery", name): command for name, command in GROUP.commands["gallery"].commands.items()}
DOCS = Path(__file__).parents[2] / "docs"


def names_of(command):
    return {word for param in command.params for word in getattr(param, "opts", ())}


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_help_has_examples_that_name_the_verb(words):
    text = VERBS[words].help or ""
    examples = re.findall(r"^ *(?:torchrun .* -m )?nearkin (.*)$", text.partition("Example")[2], re.MULTILINE)
    assert any(example.split()[: len(words)] == list(words) for example in examples), f"{words}: no example"


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_every_verb_has_json_and_quiet(words):
    missing = {"--json", "--quiet"} - names_of(VERBS[words])
    assert missing <= ({"--json"} if words == ("serve",) else set())  # whose log is lines of JSON already


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_mistyped_option_is_answered_also_as_json(words):
    answer = RUNNER.invoke(app, [*words, "--jsom"])
    assert answer.exit_code == 2 and "--jsom" in answer.stderr and answer.stdout == ""
    if words != ("serve",):
        answer = RUNNER.invoke(app, [*words, "--nonsense", "--json", *(["-"] if words == ("evaluate",) else [])])
        error = json.loads(answer.stdout)
        assert answer.exit_code == error["exit_code"] == 2 and "--nonsense" in error["error"]


def test_every_verb_is_in_a_group():
    listed = [name for names in VERB_GROUPS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) == {name for name, command in GROUP.commands.items() if not command.hidden}
    text = RUNNER.invoke(app, ["--help"]).output
    assert all(group in text for group in VERB_GROUPS) and "Exit codes" in text


@pytest.mark.parametrize("words", [("train",), ("evaluate",), ("compare",)], ids=" ".join)
def test_options_of_long_helps_are_in_groups(words):
    text = RUNNER.invoke(app, [*words, "--help"], env={"COLUMNS": "140"}).output
    assert "─ Data ─" in text and "─ Output ─" in text and text.index("─ Data ─") < text.rindex("--root")


def test_option_groups_name_options_that_exist():
    known = {param.name for command in VERBS.values() for param in command.params}
    assert set(verb._GROUP_OF) <= known


def test_errors_are_json_where_results_would_be(tmp_path):
    for words in (["evaluate", "none.npz", "--json", "-"], ["report", str(tmp_path), "--json"]):
        answer = RUNNER.invoke(app, words)
        document = json.loads(answer.stdout)
        assert answer.exit_code == document["exit_code"] == 2 and document["error"] == answer.stderr.strip()
    plain = RUNNER.invoke(app, ["report", str(tmp_path)])
    assert plain.stdout == "" and plain.stderr.count("\n") == 1


def test_unknown_verbs_are_errors_in_json_too():
    for words in (["evalute", "--json"], ["gallery", "chek", "--json"]):
        answer = RUNNER.invoke(app, words)
        assert answer.exit_code == 2 and "did you mean" in json.loads(answer.stdout)["error"]


def test_print_json_is_standard_json(capsys):
    verb.print_json({"a": float("nan"), "b": [1.0, float("inf")], 3: Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.0, None], "3": "x"}


def test_lists_of_names_alone():
    for words in ("losses", "encoders", "sources"):
        lines = RUNNER.invoke(app, [words, "--quiet"]).output.split("\n")[:-1]
        names = [entry["name"] for entry in json.loads(RUNNER.invoke(app, [words, "--json"]).stdout)]
        assert lines == names and names


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run of vectors, and a gallery of them."""
    home = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    labels = np.arange(120) // 6
    rows = 3 * rng.normal(size=(20, 8))[labels] + rng.normal(size=(120, 8))
    np.savez(home / "v.npz", embeddings=rows.astype(np.float32), labels=labels)
    np.save(home / "one.npy", rows[0].astype(np.float32))
    settings = {"training.epochs": 1, "training.batches": 2, "training.device": "cpu"}
    training.train(str(home / "v.npz"), home / "run", settings=settings, report=False)
    return home


def test_every_action_reports_one_document_and_nothing_when_quiet(made, monkeypatch):
    monkeypatch.chdir(made)
    actions = [
        (["enrol", "run", "v.npz", "--gallery", "g.db"], {"enrolled", "already_enrolled", "rows", "unreadable"}),
        (["embed", "run", "v.npz", "--out", "e.npz"], {"file", "rows", "dimensions"}),
        (["gallery", "export", "g.db", "--out", "x.npz"], {"file", "rows"}),
        (["gallery", "reindex", "g.db"], {"gallery", "index"}),
        (["gallery", "check", "g.db"], {"rows", "intact", "corrupt", "notes"}),
        (["gallery", "backup", "g.db", "backup"], {"path", "new", "rows", "added"}),
        (["gallery", "copy", "g.db", "copy.db", "--overwrite"], {"gallery", "rows"}),
        (["gallery", "restore", "backup", "again.db", "--overwrite"], {"gallery", "rows", "point"}),
        (["gallery", "vacuum", "g.db"], {"bytes_before", "bytes_after"}),
        (["gallery", "calibrate", "run", "--part", "test"], {"calibrated", "part", "operating_points"}),
    ]
    for words, keys in actions:
        answer = RUNNER.invoke(app, [*words, "--json"])
        assert answer.exit_code == 0, (words, answer.stderr, answer.exception)
        assert keys <= set(json.loads(answer.stdout)), words
        quiet = RUNNER.invoke(app, [*words, "--quiet"])
        assert quiet.exit_code == 0 and quiet.stdout == "", (words, quiet.stdout)


def test_every_question_has_a_document(made, monkeypatch):
    monkeypatch.chdir(made)
    RUNNER.invoke(app, ["enrol", "run", "v.npz", "--gallery", "q.db", "--quiet"])
    questions = [["search", "one.npy", "--gallery", "q.db"], ["identify", "one.npy", "--gallery", "q.db"]]
    questions += [["verify", "one.npy", "one.npy", "--run", "run"], ["runs", "."], ["doctor"]]
    questions += [["gallery", "stats", "q.db"], ["gallery", "points", "backup"]]
    RUNNER.invoke(app, ["gallery", "backup", "q.db", "backup", "--quiet"])
    for words in questions:
        answer = RUNNER.invoke(app, [*words, "--json"])
        assert answer.exit_code == 0, (words, answer.stderr)
        json.loads(answer.stdout)
        quiet = RUNNER.invoke(app, [*words, "--quiet"])
        assert quiet.exit_code == 0 and "note:" not in quiet.stderr
    printed = RUNNER.invoke(app, ["evaluate", "v.npz", "--clustering", "--json", "-"])
    written = RUNNER.invoke(app, ["evaluate", "v.npz", "--clustering", "--json", "r.json", "--quiet"])
    assert json.loads(printed.stdout) == json.loads(Path("r.json").read_text()) and written.stderr == ""
    assert not Path("-").exists() and RUNNER.invoke(app, ["runs", ".", "--quiet"]).output == "run\n"


def test_exit_codes_are_documented():
    text = (DOCS / "commands.md").read_text()
    table = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*?) \|$", text, re.MULTILINE)}
    assert table == EXIT_CODES


def test_exit_codes_are_returned():
    from nearkin.cli.screen import one_sentence
    from nearkin.core.errors import Diverged, Stopped, Terminated
    from nearkin.dist.heartbeat import RANK_LOST

    causes = [(ValueError("x"), 2), (OSError("x"), 2), (MemoryError(), 2), (Diverged("x"), 3), (Terminated(), 143)]
    causes += [(KeyboardInterrupt(), 130), (Stopped(15, 1, "x"), 143), (Stopped(2, 1, "x"), 130)]
    for cause, code in causes:
        with pytest.raises(typer.Exit) as end, one_sentence():
            raise cause
        assert end.value.exit_code == code and code in EXIT_CODES
    assert RANK_LOST == 4 and RANK_LOST in EXIT_CODES


def coloured(words, **variables):
    """Whether the command sends colours to a terminal."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100"} | variables
    with subprocess.Popen([sys.executable, "-m", "nearkin", *words], stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        content = b""
        try:
            while part := os.read(ours, 65536):
                content += part
        except OSError:  # Linux says so when the other end is closed
            pass
    os.close(ours)
    assert content
    return re.search(rb"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38;)", content) is not None


def test_no_colour_where_none_is_wanted(tmp_path):
    assert coloured(["--help"])  # or the rest would show nothing
    assert not coloured(["--help"], NO_COLOR="1")
    assert not coloured(["losses"], NO_COLOR="1")
    piped = subprocess.run([sys.executable, "-m", "nearkin", "losses"], capture_output=True, check=True)
    assert b"\x1b" not in piped.stdout


@pytest.mark.skipif(os.name == "nt", reason="bash")
def test_bash_completes_verbs_and_options():
    """What the script of `nearkin --install-completion` asks for."""
    for words, number, expected in (("nearkin ev", "1", "evaluate"), ("nearkin train --epo", "2", "--epochs")):
        asked = {"_NEARKIN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
        command = [sys.executable, "-c", "from nearkin.cli import main; main()"]
        answer = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True)
        assert expected in answer.stdout.split(), answer


@pytest.mark.parametrize("wanted", [None, "ACTIVE"])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(wanted, monkeypatch):
    """A thread that spins takes the core that another program needs; torch reads the variable when it is imported."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if wanted is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", wanted)
    code = "import os, sys; from nearkin.cli import screen; screen.app = lambda **_: "
    code += "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules); screen.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [wanted or "PASSIVE", "False"]
