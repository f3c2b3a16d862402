"""Runs pytorch-metric-learning's own tests against `nearkin.compat.pml`: once as they are, once with our modules.

    git clone https://github.com/KevinMusgrave/pytorch-metric-learning
    python studies/peer_suite.py pytorch-metric-learning

Nothing of that package is kept here. Our losses, miners, samplers, distances, reducers, regularizers and
`AccuracyCalculator` and index functions stand in for its modules; its test tools stay its own. Prints a table by
folder and every test that fails with ours, and writes all outcomes as JSON with --out. PEER_TESTS names files
of its tests/ to run fewer.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

FOLDERS = ["distances", "reducers", "regularizers", "miners", "samplers", "losses", "utils"]
# Of its tools: what is no part of the adapters.
LEFT_OUT = ["common_functions", "distributed", "inference", "loss_tracker", "module_with_records"]
MODULES = ["distances", "reducers", "regularizers", "miners", "samplers", "losses", "utils.accuracy_calculator"]
MODULES += ["utils.loss_and_miner_utils"]


def stand_in() -> None:
    """Ours under its names: what a test imports from there is then ours."""
    package = importlib.import_module("pytorch_metric_learning")
    for name in [*MODULES, "utils", "utils.common_functions", "utils.loss_and_miner_utils", "testers"]:
        importlib.import_module(f"pytorch_metric_learning.{name}")  # its own first: its parts import one another
    for name in MODULES:
        module = importlib.import_module(f"nearkin.compat.pml.{name}")
        for key in [k for k in sys.modules if k.startswith(f"pytorch_metric_learning.{name}.")]:
            sys.modules[key] = module
        sys.modules[f"pytorch_metric_learning.{name}"] = module
        parent = package if "." not in name else sys.modules["pytorch_metric_learning.utils"]
        setattr(parent, name.rpartition(".")[2], module)


class Outcomes:
    """A pytest plugin that writes down how each test ended."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self.why: dict[str, str] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of[report.nodeid] = report.outcome
            if report.outcome == "failed":
                lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
                self.why[report.nodeid] = (lines or ["?"])[0][2:].strip()[:160]

    def pytest_collectreport(self, report) -> None:
        if report.outcome == "failed":
            self.of[report.nodeid] = "failed"
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.why[report.nodeid] = (lines or ["?"])[0][2:].strip()[:160]


def run(ours: bool, out: Path) -> None:
    """In a process of its own, in the checkout."""
    import pytest

    sys.path.insert(0, os.getcwd())
    importlib.import_module("pytorch_metric_learning")  # the installed one, before the tests put theirs in front
    if ours:
        stand_in()
    outcomes = Outcomes()
    files = os.environ.get("PEER_TESTS", " ".join(f"tests/{folder}" for folder in FOLDERS)).split()
    left_out = [f"--ignore-glob=*test_{name}*" for name in LEFT_OUT]
    pytest.main(
        [
            "-v",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "--continue-on-collection-errors",
            *left_out,
            *files,
        ],
        plugins=[outcomes],
    )
    out.write_text(json.dumps({"outcomes": outcomes.of, "why": outcomes.why}))


def both(checkout: Path, scratch: Path) -> dict[str, dict[str, dict[str, str]]]:
    environment = {**os.environ, "TEST_DEVICE": "cpu", "TEST_DTYPES": "float32"}
    results = {}
    for who in ("original", "ours"):
        file = scratch / f"peer_suite_{who}.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--run", who, "--out", str(file), str(checkout)]
        subprocess.run(command, cwd=checkout, env=environment, check=True)
        results[who] = json.loads(file.read_text())
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/peer_suite.json"))
    parser.add_argument("--run", choices=["original", "ours"])
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.run:
        run(options.run == "ours", options.out)
        return
    results = both(options.checkout, options.out.parent)
    original, ours = results["original"]["outcomes"], results["ours"]["outcomes"]
    print("\n| tests of | original passes | ours passes | ours fails | skipped by the suite |")
    print("|---|---|---|---|---|")
    for folder in FOLDERS:
        counts = [Counter(v for k, v in o.items() if f"tests/{folder}/" in k) for o in (original, ours)]
        numbers = counts[0]["passed"], counts[1]["passed"], counts[1]["failed"], counts[1]["skipped"]
        print(f"| {folder} | " + " | ".join(map(str, numbers)) + " |")
    print()
    for name, outcome in sorted(ours.items()):
        if outcome == "failed":
            print(f"{name} (original: {original.get(name, 'not run')}): {results['ours']['why'].get(name)}")
    options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
