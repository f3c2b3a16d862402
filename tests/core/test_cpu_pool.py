"""Pieces of work in threads of one torch thread each."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nearkin.core import cpu_pool


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_from_threads_of_one_torch_thread(three_threads):
    together = threading.Barrier(3, timeout=20)

    def work(piece):
        if piece < 3:
            together.wait()  # hangs, and fails, unless three pieces are under way at a time
        return piece, torch.get_num_threads(), threading.current_thread().name

    results = list(cpu_pool.mapped(work, range(10)))
    assert [piece for piece, _, _ in results] == list(range(10))
    assert {threads for _, threads, _ in results} == {1}
    assert len({name for _, _, name in results}) == 3
    assert torch.get_num_threads() == 3
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [3], "threads to come have torch's number again"


def test_one_thread_or_one_piece_needs_no_pool(three_threads):
    name = threading.current_thread().name
    assert list(cpu_pool.mapped(lambda _: threading.current_thread().name, [1])) == [name]
    assert list(cpu_pool.mapped(str, [])) == []
    torch.set_num_threads(1)
    assert set(cpu_pool.mapped(lambda _: threading.current_thread().name, [1, 2, 3])) == {name}


def test_an_error_comes_in_its_turn_and_ends_the_threads(three_threads):
    def work(piece):
        if piece >= 2:
            raise ValueError(f"piece {piece}")
        return piece

    results = cpu_pool.mapped(work, range(6))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="piece 2"):
        next(results)
    assert not [t for t in threading.enumerate() if t.name.startswith("nearkin-encode")]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupt_while_threads_start_leaves_none_waiting(three_threads, monkeypatch, after):
    class Interrupted(ThreadPoolExecutor):
        def submit(self, *work):
            if len(self._threads) == after:
                raise KeyboardInterrupt
            return super().submit(*work)

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            list(cpu_pool.mapped(str, range(6)))

    monkeypatch.setattr(cpu_pool, "ThreadPoolExecutor", Interrupted)
    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
