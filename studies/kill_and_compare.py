"""Kill -9 a comparison at random moments, start the same command again, and compare: the table must be the same.

    python studies/kill_and_compare.py [--kills 9] [--source glyphs|vectors|FILE] [--seed 0]

A comparison runs undisturbed once. Then the same command is killed three times at random moments, with one process and
with two by turns, left to end, and its comparison.csv compared byte by byte, until there were enough kills. How far it
had come at each kill is printed; any difference ends with exit code 1.
"""

import argparse
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from killing import killed, vectors

LOSSES = "triplet,proxy-anchor,arcface"
SMALL = ["--steps", "20", "--trials", "5", "--folds", "2", "--seeds", "2"]
QUICK = ["encoder.width=4", "encoder.dim=16", "sampler.batch=32", "data.size=16", "data.stored=16"]


def command(source: str, folder: Path, jobs: int) -> list[str]:
    settings = (
        [] if source.endswith((".npz", ".safetensors", ".parquet")) else [x for text in QUICK for x in ("--set", text)]
    )
    words = [sys.executable, "-m", "nearkin", "compare", source, "--losses", LOSSES, *SMALL, *settings]
    return [*words, "--out", str(folder), "--jobs", str(jobs), "--quiet"]


def finished(folder: Path, table: str = "trainings") -> int:
    try:
        with closing(sqlite3.connect(f"file:{folder / 'study.db'}?mode=ro", uri=True)) as db:
            return int(db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])
    except sqlite3.Error:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--source", default="glyphs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        source = str(vectors(base / "vectors.npz")) if arguments.source == "vectors" else arguments.source
        subprocess.run(command(source, base / "undisturbed", 1), check=True, stdout=subprocess.DEVNULL)
        expected, total = (base / "undisturbed" / "comparison.csv").read_bytes(), finished(base / "undisturbed")
        print(f"undisturbed: {total} trainings", flush=True)
        kills, runs, wrong = 0, 0, 0
        while kills < arguments.kills:
            folder, moments, point = base / f"run{runs}", [], 0
            for turn in range(3):
                point = rng.randint(point, total)
                run_command = command(source, folder, 1 + turn % 2)
                hit = killed(run_command, finished, folder, point, rng.uniform(0.0, 0.5))
                kills += hit
                moments.append(
                    f"{finished(folder)} trained, {finished(folder, 'tests')} tested" + ("" if hit else ", at its end")
                )
            subprocess.run(command(source, folder, 2), check=True, stdout=subprocess.DEVNULL)
            same = (folder / "comparison.csv").read_bytes() == expected
            wrong += not same
            print(f"run {runs}: {'same' if same else 'DIFFERENT'}; killed at {'; '.join(moments)}", flush=True)
            shutil.rmtree(folder)
            runs += 1
        print(f"{kills} kills in {runs} runs, {wrong} different")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
