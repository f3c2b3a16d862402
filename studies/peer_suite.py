"""Runs pytorch-metric-learning's own tests twice: as they are, and with the classes of `nearkin.compat.pml` in place.

    git clone --branch v2.8.1 https://github.com/KevinMusgrave/pytorch-metric-learning
    python studies/peer_suite.py pytorch-metric-learning

Nothing of that package is kept here. Prints a table by folder, every test whose outcome differs, and how many calls of
each class nearkin computed and how many the original; writes all of it as JSON with --out. PEER_TESTS names
files of its tests/ to run fewer.
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
MODULES = ["distances", "losses", "miners", "samplers", "utils.accuracy_calculator"]


def stand_in() -> Counter:
    """Our classes under the original's names; counts the calls of each, and of these what nearkin computed."""
    calls: Counter = Counter()
    for name in [*MODULES, "testers", "trainers"]:
        importlib.import_module(f"pytorch_metric_learning.{name}")  # its parts import one another: they keep their own
    for name in MODULES:
        theirs = sys.modules[f"pytorch_metric_learning.{name}"]
        ours = importlib.import_module(f"nearkin.compat.pml.{name}")
        for key in dir(theirs):
            thing = getattr(ours, key)
            if thing is not getattr(theirs, key) and isinstance(thing, type):
                setattr(theirs, key, thing)
                for method in ("compute_loss", "mine", "forward", "native", "get_accuracy", "__iter__"):
                    count(thing, method, calls)
    return calls


def count(kind: type, method: str, calls: Counter) -> None:
    """Counts a method's calls; `native` where it gives a number."""
    called = getattr(kind, method, None)
    asks = {"forward": hasattr(kind, "compute_mat"), "native": method in vars(kind)}
    if called is None or not asks.get(method, True):
        return

    def counted(self, *arguments, **options):
        result = called(self, *arguments, **options)
        if type(self) is kind and not (method == "native" and result is None):
            calls[f"{kind.__name__} {'nearkin' if method == 'native' else 'all'}"] += 1
        return result

    setattr(kind, method, counted)


class Outcomes:
    """A pytest plugin that writes down how each test ended."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self.why: dict[str, str] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._note(report)

    def pytest_collectreport(self, report) -> None:
        if report.outcome == "failed":
            self._note(report)

    def _note(self, report) -> None:
        self.of[report.nodeid] = report.outcome
        if report.outcome == "failed":
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.why[report.nodeid] = (lines or ["?"])[0][2:].strip()[:160]


def run(ours: bool, out: Path) -> None:
    """In a process of its own, in the checkout."""
    import pytest

    sys.path.insert(0, os.getcwd())
    importlib.import_module("pytorch_metric_learning")  # the installed one, before the tests put theirs in front
    calls = stand_in() if ours else Counter()
    outcomes = Outcomes()
    files = os.environ.get("PEER_TESTS", " ".join(f"tests/{folder}" for folder in FOLDERS)).split()
    left_out = [f"--ignore-glob=*test_{name}*" for name in LEFT_OUT]
    options = ["-v", "--no-header", "-p", "no:cacheprovider", "--tb=short", "--continue-on-collection-errors"]
    pytest.main([*options, *left_out, *files], plugins=[outcomes])
    out.write_text(json.dumps({"outcomes": outcomes.of, "why": outcomes.why, "calls": calls}))


def both(checkout: Path, scratch: Path) -> dict[str, dict[str, dict[str, str]]]:
    environment = {**os.environ, "TEST_DEVICE": "cpu", "TEST_DTYPES": "float32"}
    results = {}
    for who in ("original", "ours"):
        file = scratch / f"peer_suite_{who}.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--run", who, "--out", str(file), str(checkout)]
        subprocess.run(command, cwd=checkout, env=environment, check=True)
        results[who] = json.loads(file.read_text())
    return results


def print_tables(results: dict) -> None:
    original, ours = results["original"]["outcomes"], results["ours"]["outcomes"]
    print("\n| tests of | original passes | of these ours passes | and fails | skipped by the suite |")
    print("|---|---|---|---|---|")
    for folder in [*FOLDERS, ""]:
        of = {k: v for k, v in original.items() if f"tests/{folder}" in k}
        passed = [k for k, v in of.items() if v == "passed"]
        failed = sum(ours.get(k) == "failed" for k in passed)
        skipped = sum(v == "skipped" for v in of.values())
        print(f"| {folder or 'all'} | {len(passed)} | {sum(ours.get(k) == 'passed' for k in passed)}", end=" ")
        print(f"| {failed} | {skipped} |")
    print()
    for name, outcome in sorted(ours.items()):
        if outcome == "failed":
            print(f"{name} (original: {original.get(name, 'not run')}): {results['ours']['why'].get(name)}")
    print("\n| class | calls | by nearkin |\n|---|---|---|")
    calls = results["ours"]["calls"]
    for name in sorted({key.split()[0] for key in calls}):
        every, native = calls.get(f"{name} all", 0), calls.get(f"{name} nearkin", 0)
        print(f"| {name} | {every} | {native if native or 'Loss' in name else 'all'} |")


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
    print_tables(results)
    options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
