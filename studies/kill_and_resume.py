"""Kill -9 at random moments, resume, and compare: the weights must be those of the run that was never stopped.

    python studies/kill_and_resume.py [--kills 20] [--source glyphs] [--seed 0]

Each trial starts `nearkin train` as a process of its own, kills it after a random time (mid-save, mid-epoch, while it
validates; with 0 and 2 workers by turns), resumes, kills again now and then, and lets it end. A table of the moments at
which it was hit is printed; any difference in model.safetensors ends with exit code 1.
"""

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QUICK = ["training.epochs=4", "training.batches=8", "training.log_steps=4", "training.save_minutes=0.002"]
QUICK += ["evaluation.interval=false", "encoder.width=16", "sampler.batch=48", "training.patience=99"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "nearkin", "train", *arguments, "--quiet"]


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def where(folder: Path) -> str:
    """What the killed run had come to, by what it left."""
    checkpoints = folder / "checkpoints"
    names = sorted(p.name for p in checkpoints.iterdir()) if checkpoints.is_dir() else []
    steps = [name for name in names if name.startswith("step")]
    half = sum(name.startswith(".") for name in names)
    return f"{steps[-1] if steps else 'before the first checkpoint'}{f', {half} half-written file' if half else ''}"


def killed(arguments: list[str], after: float) -> bool:
    """Whether it was still running when it was killed."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(after)
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--source", default="glyphs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        sets = [part for text in QUICK for part in ("--set", text)]
        whole = base / "whole"
        start = time.perf_counter()
        subprocess.run(command(arguments.source, "--out", str(whole), *sets), check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        wanted, kills, trial, wrong = digest(whole), 0, 0, 0
        print(f"uninterrupted: {seconds:.1f} s, {wanted[:12]}")
        while kills < arguments.kills:
            folder = base / f"trial{trial}"
            workers = ["--set", f"training.workers={2 * (trial % 2)}"]
            going = command(arguments.source, "--out", str(folder), *sets, *workers)
            moments = []
            while killed(going, chance.uniform(0.1, 1.0) * seconds):
                kills += 1
                moments.append(where(folder))
                if (folder / "checkpoints").is_dir() and any((folder / "checkpoints").glob("step-*")):
                    going = command("--resume", str(folder))
                else:  # killed before the first checkpoint: there is nothing to go on from, so it starts again
                    shutil.rmtree(folder, ignore_errors=True)
                if len(moments) == 3:
                    subprocess.run(going, check=True, stdout=subprocess.DEVNULL)
                    break
            same = digest(folder) == wanted
            wrong += not same
            print(f"trial {trial}: {'same' if same else 'DIFFERENT'}; killed at {'; '.join(moments) or 'no time'}")
            shutil.rmtree(folder)
            trial += 1
        print(f"{kills} kills in {trial} runs, {wrong} different")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
