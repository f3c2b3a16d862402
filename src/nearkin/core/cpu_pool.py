"""Small pieces of work for an encoder on the CPU, one thread per core, each with one thread of torch.

A convolution network on a few pictures at a time leaves cores idle within every layer, and on many at a time its blocks
are so large that the system takes them back after every layer and clears them anew. Small batches side by side avoid
both.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch

__all__ = ["BATCH", "mapped"]

BATCH = 2  # pictures: of EfficientNet-Lite0 each costs 16 ms of a core, 23 ms in batches of 4 and 30 ms in batches of 8
_starting = threading.Lock()
P = TypeVar("P")
R = TypeVar("R")


def mapped(function: Callable[[P], R], pieces: Sequence[P]) -> Iterator[R]:
    """function(piece) of each, in order; by as many threads as torch uses here. An error is raised in its turn."""
    workers = min(torch.get_num_threads(), len(pieces))
    if workers <= 1:
        yield from map(function, pieces)
        return
    pool, begun = _started(workers)
    try:
        begun()
        futures = [pool.submit(function, piece) for piece in pieces]
        for i, future in enumerate(futures):
            yield future.result()
            futures[i] = None  # type: ignore[call-overload]  # its result may be large
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _started(workers: int) -> tuple[ThreadPoolExecutor, Callable[[], None]]:
    """A pool, and what starts its threads. The number of torch's threads belongs to a thread, but setting it also sets
    that of threads to come, which is set back."""
    ready = threading.Barrier(workers + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread takes the number of all threads when it first asks, and only then its own
        torch.set_num_threads(1)
        with suppress(threading.BrokenBarrierError):
            ready.wait()

    pool = ThreadPoolExecutor(workers, "nearkin-encode", start)

    def begun() -> None:
        with _starting:
            before = torch.get_num_threads()
            try:
                for _ in range(workers):
                    pool.submit(int)
                ready.wait()
            except BaseException:  # a signal: threads that wait for the others would wait for ever
                ready.abort()
                raise
            finally:
                torch.set_num_threads(before)

    return pool, begun
