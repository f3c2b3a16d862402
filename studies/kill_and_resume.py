"""Kill -9 at random moments, resume, and compare: the weights must be those of the run that was never stopped.

    python studies/kill_and_resume.py [--kills 20] [--source glyphs] [--seed 0]

Each trial starts `nearkin train` as a process of its own and kills it a random moment after a random step is in its
log, so that epochs, saves, validations and the test are all hit; with 0 and 2 workers by turns. It is resumed, killed
again, resumed, and left to end. The moments of the kills are printed; any difference in model.safetensors ends with
exit code 1.
"""

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from killing import killed, logged

STEPS = 48
QUICK = ["training.epochs=6", "training.batches=8", "training.log_steps=1", "training.save_minutes=0.0005"]
QUICK += ["evaluation.interval=false", "encoder.width=16", "sampler.batch=48", "training.patience=99"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "nearkin", "train", *arguments, "--quiet"]


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def where(folder: Path) -> str:
    """How far the killed run had come, by its files."""
    checkpoints = folder / "checkpoints"
    names = sorted(p.name for p in checkpoints.iterdir()) if checkpoints.is_dir() else []
    steps = [int(name[5:13]) for name in names if name.startswith("step")]
    half = sum(name.startswith(".") for name in names)
    place = f"step {logged(folder)}, saved {steps[-1] if steps else 'nothing'}"
    return place + (", in the middle of a save" if half else "") + (", tested" * (folder / "results.json").exists())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--source", default="glyphs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        sets = [part for text in QUICK for part in ("--set", text)]
        undisturbed = base / "undisturbed"
        subprocess.run(
            command(arguments.source, "--out", str(undisturbed), *sets), check=True, stdout=subprocess.DEVNULL
        )
        expected, kills, trial, wrong = digest(undisturbed), 0, 0, 0
        print(f"uninterrupted: {expected[:12]}", flush=True)
        while kills < arguments.kills:
            folder = base / f"trial{trial}"
            workers = ["--set", f"training.workers={2 * (trial % 2)}"]
            run_command = command(arguments.source, "--out", str(folder), *sets, *workers)
            moments = []
            step = 0
            while len(moments) < 3:
                step = rng.randint(step, STEPS)
                hit = killed(run_command, logged, folder, step, rng.uniform(0.0, 0.3))
                kills += hit
                moments.append(where(folder) + ("" if hit else ", at its end"))
                if (folder / "checkpoints").is_dir() and any((folder / "checkpoints").glob("step-*")):
                    run_command = command("--resume", str(folder))
                else:  # killed before the first checkpoint: there is nothing to resume, so it starts again
                    shutil.rmtree(folder, ignore_errors=True)
            subprocess.run(run_command, check=True, stdout=subprocess.DEVNULL)
            same = digest(folder) == expected
            wrong += not same
            print(f"trial {trial}: {'same' if same else 'DIFFERENT'}; killed at {'; '.join(moments)}", flush=True)
            shutil.rmtree(folder)
            trial += 1
        print(f"{kills} kills in {trial} runs, {wrong} different")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
