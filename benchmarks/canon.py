"""Every loss of the canon on unseen birds and clothes, beside the peer: docs/benchmarks.md.

    python benchmarks/canon.py cub200 --root data/CUB_200_2011 --out out/canon --workers 5 --limit-seconds 540
    python benchmarks/canon.py cub200 --root data/CUB_200_2011 --out out/canon --speed      # alone on the machine
    python benchmarks/canon.py fashion-mnist --root data/fashion-mnist --out out/canon --workers 5
    python benchmarks/canon.py best --root data/CUB_200_2011 --out out/canon --workers 3
    python benchmarks/canon.py tables cub200 --out out/canon           # from what is there; no training
    python benchmarks/canon.py recipes --out out/canon --to recipes    # the chosen settings as recipes

Settings and learning rates are chosen on training classes (birds 76-100 after training on 1-75), then trained anew in
several seeds and tested. Every training is a line of OUT/SUBJECT.jsonl as soon as it is done: the same command goes on
where it was cut off. After --limit-seconds nothing more runs, and the tables are made from the finished results.
"""

import argparse
import gc
import json
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

import canon_plan
import canon_tables
from canon_plan import Options
from canon_work import Desk, Job, key
from nearkin.core import files

SUBJECTS = ("cub200", "fashion-mnist", "best")
SEARCHED = {"cub200": 12, "fashion-mnist": 6, "best": 0}  # epochs of a training that chooses; best: as the recipe says


class Book:
    """OUT/SUBJECT.jsonl: one line a training that is done. A last line that was cut off is cut away."""

    def __init__(self, folder: Path, subject: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.done = folder / f"{subject}.jsonl", dict[str, dict[str, Any]]()
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):
            os.truncate(self.path, len(complete))
        for line in complete.decode().splitlines():
            record = json.loads(line)
            if "failed" not in record["result"]:  # tried again
                self.done[key(Job(**record["job"]))] = record["result"]

    def write(self, job: Job, result: dict[str, Any]) -> None:
        self.done[key(job)] = result
        line = {"job": job._asdict(), "result": result, "date": time.strftime("%Y-%m-%d")}
        with self.path.open("ab") as file:
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def work(pipe: connection.Connection, root: str, partial: bool, threads: int) -> None:
    """A worker: jobs in, results out, until the other end is gone."""
    torch.set_num_threads(threads)
    desk = Desk(root, partial)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    while True:
        try:
            job = Job(*pipe.recv())
        except EOFError:
            return
        try:
            result = desk.do(job) | {"device": device, "torch": torch.__version__}
        except Exception as error:  # one training that fails must not end the comparison
            result = {"failed": f"{type(error).__name__}: {error}"[:500]}
        gc.collect()  # a trainer and its graphs hold one another
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            pipe.send(result)
        except OSError:
            return


class Workers:
    """Processes that work on one job each; one that dies is replaced, and its job has failed."""

    def __init__(self, count: int, root: str, partial: bool) -> None:
        self.context, self.place = mp.get_context("spawn"), (root, partial)
        self.threads = max(1, (os.cpu_count() or 1) // count)
        self.idle = [self._started() for _ in range(count)]
        self.busy: dict[connection.Connection, tuple[Any, Job, float]] = {}

    def _started(self) -> tuple[connection.Connection, Any]:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=work, args=(theirs, *self.place, self.threads), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def give(self, job: Job) -> None:
        pipe, process = self.idle.pop()
        try:
            pipe.send(tuple(job))
        except OSError:  # it died while it had nothing to do
            process.join(5)
            pipe, process = self._started()
            pipe.send(tuple(job))
        self.busy[pipe] = (process, job, time.monotonic())

    def wait(self, seconds: float) -> Iterator[tuple[Job, dict[str, Any], float]]:
        for pipe in connection.wait(list(self.busy), min(max(0.0, seconds), 3600.0)):
            process, job, began = self.busy.pop(pipe)  # type: ignore[call-overload]
            try:
                result = pipe.recv()  # type: ignore[union-attr]
                self.idle.append((pipe, process))  # type: ignore[arg-type]
            except (EOFError, OSError):
                process.join(5)
                result = {"failed": f"the process ended with code {process.exitcode}"}
                self.idle.append(self._started())
            yield job, result, time.monotonic() - began

    def close(self) -> None:
        for pipe, process in [*self.idle, *((pipe, process) for pipe, (process, *_) in self.busy.items())]:
            pipe.close()
            if pipe in self.busy:
                process.terminate()
        for _, process in self.idle:
            process.join(10)


def compare(subject: str, options: Options, book: Book, workers: Workers, limit: float) -> None:
    """Hands out jobs until none is left, or until the next would not end within `limit` seconds from now."""
    began, took_before = time.monotonic(), dict[str, list[float]]()
    left = lambda: limit - (time.monotonic() - began)  # noqa: E731
    while True:
        at_work = {key(job) for _, job, _ in workers.busy.values()}
        open_jobs = [job for job in canon_plan.jobs(subject, options, book.done) if key(job) not in at_work]
        open_jobs = [job for job in open_jobs if 1.2 * median(took_before.get(job.stage, [0.0])) < left()]
        while workers.idle and open_jobs:
            workers.give(open_jobs.pop(0))
        if not workers.busy or left() <= 0:
            return
        for job, result, took in workers.wait(left()):
            book.write(job, result)
            took_before.setdefault(job.stage, []).append(took)
            summary = result.get("failed") or result.get("diverged") or _short(result)
            print(f"{time.monotonic() - began:6.0f} s  {job.stage:6} {job.row}, {took:.1f} s: {summary}", flush=True)


def _short(result: dict[str, Any]) -> str:
    if "val" in result:
        return f"validation MAP@R {100 * result['val']['map@r']:.2f}, R@1 {100 * result['val']['recall@1']:.1f}"
    if "test" in result:
        test = result["test"]
        return f"R@1 {100 * test['recall@1']['value']:.1f}, MAP@R {100 * test['map@r']['value']:.2f}"
    return f"{result['images_per_second']:,.0f} images/s"


@contextmanager
def shared_gpu(enabled: bool) -> Iterator[None]:
    """NVIDIA's MPS, with which kernels of several processes run side by side; where it does not start, without."""
    if not enabled or not shutil.which("nvidia-cuda-mps-control"):
        if enabled:
            print("no nvidia-cuda-mps-control: the processes take turns", flush=True)
        yield
        return
    folder = tempfile.mkdtemp(prefix="mps")
    mps_environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    os.environ.update(mps_environment)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    try:
        subprocess.run(
            [sys.executable, "-c", "import torch; torch.ones(1).cuda().sum().item()"], check=True, timeout=60
        )
        print("MPS: the processes share the GPU", flush=True)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"MPS does not work here ({type(error).__name__}): the processes take turns", flush=True)
        for name in mps_environment:
            os.environ.pop(name)
    try:
        yield
    finally:
        with suppress(subprocess.SubprocessError, OSError):  # whatever happens, the tables are written
            subprocess.run(
                ["nvidia-cuda-mps-control"],
                input=b"quit\n",
                env=os.environ | mps_environment,
                capture_output=True,
                timeout=20,
            )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*SUBJECTS, "tables", "recipes"])
    parser.add_argument("subject", nargs="?", choices=SUBJECTS, help="of the tables")
    parser.add_argument("--root", help="where the set lies")
    parser.add_argument("--out", type=Path, default=Path("out/canon"))
    parser.add_argument("--to", type=Path, default=Path("recipes"), help="where recipes are written")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--limit-seconds", type=float, default=1e9)
    parser.add_argument("--seeds", type=int, help="of a final; by default 2")
    parser.add_argument("--search-epochs", type=int, help="of a training that chooses")
    parser.add_argument("--epochs", type=int, help="of a final; by default the recipe's")
    parser.add_argument("--batches", type=int, help="of an epoch; by default the recipe's")
    parser.add_argument("--rows", help="names of rows with ; between them")
    parser.add_argument("--speed", action="store_true", help="only measure the step of each row, one after the other")
    parser.add_argument("--mps", action="store_true", help="try NVIDIA's MPS")
    parser.add_argument("--partial", action="store_true", help="take what there is of the set")
    return parser.parse_args()


def options_of(args: argparse.Namespace, subject: str) -> Options:
    """Options that are not set are those of the comparison in --out, or the defaults."""
    usual: dict[str, Any] = {"seeds": 2, "search_epochs": SEARCHED[subject], "epochs": None, "batches": None}
    path = args.out / f"{subject}.options.json"
    if path.exists():
        usual |= json.loads(path.read_text())
    chosen = {name: getattr(args, name) for name in usual if getattr(args, name) is not None}
    rows = None if args.rows is None else tuple(name.strip() for name in args.rows.split(";"))
    return Options(**(usual | chosen), rows=rows, speed=args.speed)


def main() -> None:
    args = arguments()
    if args.what == "recipes":
        for subject in ("cub200", "best"):
            canon_tables.recipes(subject, options_of(args, subject), Book(args.out, subject).done, args.to)
        return
    subject = args.subject or "cub200" if args.what == "tables" else args.what
    options, book = options_of(args, subject), Book(args.out, subject)
    if args.what != "tables":
        if args.root is None:
            raise SystemExit(f"{subject} needs --root, where the set lies")
        began = time.monotonic()
        saved_options = {name: value for name, value in options._asdict().items() if name not in ("rows", "speed")}
        files.write_json(args.out / f"{subject}.options.json", saved_options)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        open_jobs = canon_plan.jobs(subject, options, book.done)
        desk = Desk(args.root, args.partial)
        for job in {str(job.setting.get("data.stored")): job for job in open_jobs}.values():
            desk.store(job)  # pictures are decoded once, here; the workers map the cache
        print(f"{len(open_jobs)} trainings can begin; the pictures are ready after {time.monotonic() - began:.0f} s")
        with shared_gpu(args.mps):
            workers = Workers(1 if args.speed else args.workers, args.root, args.partial)
            try:
                compare(subject, options, book, workers, args.limit_seconds - (time.monotonic() - began))
            finally:
                workers.close()
    canon_tables.write(subject, options._replace(speed=False), book.done, args.out)


if __name__ == "__main__":
    main()
