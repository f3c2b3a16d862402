"""Kill a random rank at a random moment, again and again: the result must be that of an untouched run.

    python studies/kill_ranks.py [--kills 50] [--ranks 2] [--seed 0] [--strategy ddp]

Each trial starts `torchrun --max-restarts 3 ... -m nearkin train` and kills one of its ranks (SIGKILL; every fourth
time it is stopped instead, SIGSTOP, so that it hangs) up to three times, a random moment after a random step is in
the log: epochs, saves, validations, the test and the joining after a restart are all hit. Counted are hangs (ranks
that have not all ended within 60 s, of which torchrun itself takes 30 if a process does not end when asked), wrong
exits and results that differ by a bit; any of them ends with exit code 1.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from killing import logged, ranks_of, vectors

STEPS, BATCHES = 60, 12
SETS = [f"training.epochs={STEPS // BATCHES}", f"training.batches={BATCHES}", "training.log_steps=1"]
SETS += [
    "training.save_minutes=0.001",
    "encoder.hidden=[16]",
    "encoder.dim=8",
    "sampler.batch=21",
    "sampler.per_class=3",
]
SETS += ["training.patience=99", "training.device=cpu", "evaluation.interval=false", "training.workers=0"]
SETS += ["loss.name=arcface", "loss.shard=true", "training.ema=0.9"]
ENDS = 60.0  # seconds in which all have ended


def start(source: Path, out: Path, ranks: int, strategy: str, log: Path) -> subprocess.Popen:
    sets = [part for text in [*SETS, f"training.strategy={strategy}"] for part in ("--set", text)]
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", "--nproc-per-node", str(ranks)]
    command += ["-m", "nearkin", "train", str(source), "--out", str(out), *sets]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NEARKIN_RANK_TIMEOUT": "10"}
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=env, start_new_session=True)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def gone(process: int) -> bool:
    """Whether a process has ended, perhaps as a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def hit(run: subprocess.Popen, folder: Path, rng: random.Random, first: int, hang: bool) -> tuple[str, bool] | None:
    """Which rank was hit and when, and whether all others ended in time; None if the run was over first."""
    step, after = rng.randint(first, STEPS), rng.choice([0.0, 0.02, 0.1, 0.5, 2.0])
    while run.poll() is None and logged(folder) < step:
        time.sleep(0.005)
    time.sleep(after)
    before = ranks_of(run.pid)
    if run.poll() is not None or not before:
        return None
    rank = rng.choice(sorted(before))
    try:
        os.kill(before[rank], signal.SIGSTOP if hang else signal.SIGKILL)
    except ProcessLookupError:
        return None
    end = time.monotonic() + ENDS
    while time.monotonic() < end and not all(gone(process) for process in before.values()):
        time.sleep(0.02)
    name = f"rank {rank} {'stopped' if hang else 'killed'} at step {logged(folder)}"
    return name, all(gone(process) for process in before.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    kills = trial = hangs = exits = different = unnamed = 0
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        source = vectors(base / "vectors.npz")
        untouched = start(source, base / "untouched", arguments.ranks, arguments.strategy, base / "log")
        if untouched.wait() != 0:
            sys.exit((base / "log").read_text())
        expected = digest(base / "untouched")
        print(f"untouched: {expected[:12]}", flush=True)
        while kills < arguments.kills:
            folder, log, moments, first, late = base / f"trial{trial}", base / f"log{trial}", [], 0, 0
            run = start(source, folder, arguments.ranks, arguments.strategy, log)
            while len(moments) < min(3, arguments.kills - kills):
                outcome = hit(run, folder, rng, first, hang=(kills + len(moments)) % 4 == 3)
                if outcome is None:
                    break
                moments.append(outcome[0])
                late += not outcome[1]
                first = logged(folder)
            try:
                code = run.wait(300)
            except subprocess.TimeoutExpired:
                code, late = None, late + 1
                for process in [*ranks_of(run.pid).values(), run.pid]:
                    os.kill(process, signal.SIGKILL)
            errors = log.read_text()
            named = errors.count("was killed or died") + errors.count("no sign of life")
            named += errors.count("has not moved") + errors.count("did not come within")
            same = code == 0 and digest(folder) == expected
            kills, trial, hangs, exits = kills + len(moments), trial + 1, hangs + late, exits + (code != 0)
            different, unnamed = different + (code == 0 and not same), unnamed + max(0, len(moments) - named)
            verdict = "same" if same else f"DIFFERENT (exit {code})"
            print(f"trial {trial}: {verdict}; {'; '.join(moments) or 'untouched'}", flush=True)
            if not same or late:
                print(errors, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{kills} kills in {trial} runs: {hangs} hangs, {exits} wrong exits, {different} different results", end="")
    print(f"; {unnamed} kills that only torchrun reported, as those before a rank has joined")
    sys.exit(1 if hangs or exits or different else 0)


if __name__ == "__main__":
    main()
