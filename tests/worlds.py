"""Worlds of processes for tests: each rank is a real process with torch.distributed on gloo.

`run(world, function, *args)` calls `function(rank, world, *args)` on every rank and returns the results, rank by rank;
an error on a rank is raised here with its traceback, and a world that hangs is ended. Results are best NumPy arrays and
plain values. The function must be importable by name: at the top level of a test module or of a file beside it.

Processes start once and serve every later call of this test process, also in worlds of another size, because importing
torch is slow. After a failure all of them are ended, since their states may differ.
"""

import atexit
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any

HERE = str(Path(__file__).absolute().parent)
# A server that has imported torch forks the ranks; it has no threads that a fork could lose.
_context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
if hasattr(_context, "set_forkserver_preload"):
    _context.set_forkserver_preload(["torch", "torch.distributed", "nearkin"])


class RankFailed(AssertionError):
    """A rank raised, died or did not answer; the message holds its traceback."""


class Processes:
    """Processes that wait for calls; the first so many of them form a world."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="worlds-")
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self.size = self.formed = 0

    def call(self, world: int, function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        while len(self.pipes) < world:
            self._add()
        if world != self.size:
            self.size, self.formed = world, self.formed + 1
        rendezvous = os.path.join(self.folder.name, str(self.formed))
        for rank, pipe in enumerate(self.pipes[:world]):
            pipe.send((rank, world, rendezvous, function.__module__, function.__qualname__, args))
        return self._answers(world, monotonic() + timeout)

    def _add(self) -> None:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self.pipes.append(ours)
        self.processes.append(process)

    def _answers(self, world: int, end: float) -> list[Any]:
        answers: list[Any] = [None] * world
        failures: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:world])}
        while waiting:
            ready = wait(list(waiting), max(end - monotonic(), 0.0))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), "did not answer in time")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    sound, answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    sound, answer = False, "died"
                if sound:
                    answers[rank] = answer
                else:
                    failures[rank] = answer
                    # The others may wait for this rank for ever: they get a moment to report.
                    end = min(end, monotonic() + 2.0)
        if failures:
            raise RankFailed("\n".join(f"rank {rank} of {world}: {failures[rank]}" for rank in sorted(failures)))
        return answers

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


_processes: list[Processes] = []


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """What `function(rank, world, *args)` returns on each rank of a world of this size."""
    if not _processes:
        _processes.append(Processes())
    try:
        return _processes[0].call(world, function, *args, timeout=timeout)
    except BaseException:
        _end_all()
        raise


@atexit.register
def _end_all() -> None:
    while _processes:
        _processes.pop().end()


def _serve(pipe: Any) -> None:
    """Answers calls, each in the world that the call names, until the pipe closes."""
    import torch

    sys.path.insert(0, HERE)
    torch.set_num_threads(1)
    joined = None
    while True:
        try:
            rank, world, rendezvous, module, name, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            if joined != rendezvous:
                _join(rank, world, rendezvous)
                joined = rendezvous
            function = getattr(importlib.import_module(module), name)
            torch.manual_seed(0)
            answer = (True, function(rank, world, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            break
    os._exit(0)  # the others may have ended already


def _join(rank: int, world: int, rendezvous: str) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
