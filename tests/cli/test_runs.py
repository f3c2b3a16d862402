"""`nearkin runs`, `nearkin report`, `nearkin doctor`, `nearkin --version`, and how little `nearkin --help` loads."""

import json
import subprocess
import sys

import numpy as np

import nearkin
from commands import separate_runner
from nearkin import training
from nearkin.cli import app

RUNNER = separate_runner()


def test_doctor_prints_a_table_and_json():
    table = RUNNER.invoke(app, ["doctor"])
    assert table.exit_code == 0 and "torch 2." in table.output and "GiB free" in table.output
    state = json.loads(RUNNER.invoke(app, ["doctor", "--json"]).stdout)
    assert state["nearkin"] == nearkin.__version__ and isinstance(state["notes"], list)


def test_runs_without_a_folder_is_one_sentence(tmp_path):
    answer = RUNNER.invoke(app, ["runs", str(tmp_path / "none")])
    assert answer.exit_code == 2 and answer.stderr.count("\n") == 1
    empty = RUNNER.invoke(app, ["runs", str(tmp_path)])
    assert empty.exit_code == 0 and "no run in it" in empty.output
    assert json.loads(RUNNER.invoke(app, ["runs", str(tmp_path), "--json"]).stdout) == []


def test_report_is_made_again(tmp_path):
    run = tmp_path / "run"
    rng = np.random.default_rng(0)
    labels = np.arange(60) // 5
    np.savez(tmp_path / "v.npz", embeddings=rng.normal(size=(60, 8)).astype(np.float32), labels=labels)
    settings = {"training.epochs": 1, "training.batches": 2, "training.device": "cpu"}
    before = training.train(str(tmp_path / "v.npz"), run, settings=settings, report=True)
    (run / "report.html").unlink()
    answer = RUNNER.invoke(app, ["report", str(run), "--quiet"])
    assert answer.exit_code == 0, answer.output
    assert answer.output == f"report: {run / 'report.html'}\n" and (run / "report.html").is_file()
    again = json.loads((run / "results.json").read_text())
    assert again["test"] == before.results["test"]


def test_report_of_no_run_or_an_unfinished_one_is_refused(tmp_path):
    answer = RUNNER.invoke(app, ["report", str(tmp_path)])
    assert answer.exit_code == 2 and "not a run" in answer.stderr
    (tmp_path / "recipe.toml").write_text("")
    answer = RUNNER.invoke(app, ["report", str(tmp_path)])
    assert answer.exit_code == 2 and f"nearkin train --resume {tmp_path}" in answer.stderr


def test_version():
    answer = RUNNER.invoke(app, ["--version"])
    assert answer.exit_code == 0 and answer.output == f"nearkin {nearkin.__version__}\n"


def test_help_does_not_load_torch():
    """So that it answers at once."""
    code = (
        "import sys; from nearkin.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'PIL'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"
