"""Ranks that are killed, stopped or hang, on this machine or on another: who is named, how soon, and with which code.

Each rank is a process without torchrun, which would end the others by itself: what is seen is the heartbeat's doing.
The limits are scaled down: 2 s of silence, exchanges of 6 s instead of 50, a lag of 4 s instead of 40.
"""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

import worlds
from nearkin import dist
from nearkin.dist import heartbeat, rendezvous

pytestmark = pytest.mark.slow

PATIENCE, EXCHANGE, LAG = 2, 6.0, 4.0
ENDING = "; all ranks end, and what was saved stays"


def _rank(rank, size, port, home, scenario, patience, elsewhere, raises):
    """A process that joins, tells so, and plays its part of a scenario; what it says is in a file."""
    os.dup2(os.open(Path(home) / f"{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "localhost", "NEARKIN_RANK_TIMEOUT": str(patience)}
    torch.set_num_threads(1)
    rendezvous._EXCHANGE, heartbeat._MAX_LAG, heartbeat._WAIT = EXCHANGE, LAG, 1.0
    if elsewhere:
        heartbeat._machine = lambda: f"machine{rank} 1"
    if raises:
        torch_dist.init_process_group("gloo")
    with dist.ProcessGroup() if raises else dist.join() as group:
        group.advance()
        _exchange()
        (Path(home) / f"{rank}.joined").touch()
        SCENARIOS[scenario](rank, group)


def _exchange():
    torch_dist.all_reduce(torch.ones(1))


def _kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_an_exchange(rank, group):
    _kill_self() if rank == 1 else _exchange()


def killed_while_others_wait_for_a_device(rank, group):
    _kill_self() if rank == 1 else time.sleep(60)


def killed_while_others_wait_for_it(rank, group):
    group.on_rank0("asking", lambda: 0)
    _kill_self() if rank == 1 else group.values(rank)


def stopped(rank, group):
    os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else _exchange()


def hangs_while_others_are_in_an_exchange(rank, group):
    """In the same part of a step; of the others one comes a little later than the first."""
    time.sleep(60 if rank == group.size - 1 else 0.5 * rank)
    _exchange()


def hangs_after_a_slow_part(rank, group):
    """Two parts before the exchange: the others are later one than the other, and the one that hangs ends its first."""
    time.sleep((0, 2.0, 3.6)[rank])
    group.advance()
    if rank < 2:
        group.advance()
        _exchange()
    time.sleep(60)


def hangs_while_others_wait_for_a_device(rank, group):
    if rank == 0:
        group.advance()
    time.sleep(60)


def works_for_long(rank, group):
    """Longer than any limit; then one rank is late in a step, by less than the lag."""
    with group.work("reading"):
        if rank == 1:
            time.sleep(EXCHANGE + LAG)
    time.sleep(2.5 * rank)
    group.advance()
    _exchange()


def hangs_before_a_call(rank, group):
    """In a step that the other has ended, which now waits for it at the end of the epoch."""
    if rank == 1:
        time.sleep(60)
    group.advance()
    group.values(rank)


def fails(rank, group):
    if rank == 1:
        raise ValueError("there is a fire")
    _exchange()


def stops_by_an_exit(rank, group):
    if rank == 1:
        raise SystemExit(7)
    _exchange()


SCENARIOS = {
    function.__name__: function
    for function in (
        *(killed_in_an_exchange, killed_while_others_wait_for_a_device, killed_while_others_wait_for_it, stopped),
        *(hangs_while_others_are_in_an_exchange, hangs_while_others_wait_for_a_device),
        *(hangs_after_a_slow_part, hangs_before_a_call, works_for_long, fails, stops_by_an_exit),
    )
}


def play(home, scenario, *, size=2, patience=PATIENCE, elsewhere=False, raises=False):
    """The exit codes of the ranks, what they said, their processes, and the seconds from the last joining on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    arguments = (size, port, str(home), scenario, patience, elsewhere, raises)
    ranks = [worlds._context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        end = time.monotonic() + 60
        while not all((home / f"{rank}.joined").exists() for rank in range(size)):
            assert time.monotonic() < end, [path.read_text() for path in home.glob("*.txt")]
            time.sleep(0.02)
        began = time.monotonic()
        for process in ranks:
            process.join(max(0.1, began + 40 - time.monotonic()))
        seconds = time.monotonic() - began
    finally:
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
    said = "\n".join((home / f"{rank}.txt").read_text() for rank in range(size))
    return (
        codes,
        [line for line in said.splitlines() if re.match(r"rank \d|\w*Error|\S+RankFailed", line)],
        ranks,
        seconds,
    )


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a process is looked up in /proc")
by_death = pytest.mark.parametrize(
    "scenario",
    ["killed_in_an_exchange", "killed_while_others_wait_for_a_device", "killed_while_others_wait_for_it"],
)


@by_death
def test_a_rank_killed_on_another_machine_is_named_by_its_silence(scenario, tmp_path):
    codes, lines, ranks, seconds = play(tmp_path, scenario, elsewhere=True)
    assert codes == [4, -9], lines
    (line,) = lines
    silence = re.fullmatch(
        rf"rank 0: rank 1 \(process {ranks[1].pid} on machine1\) gave no sign of life for (\d) s" + ENDING, line
    )
    assert silence and PATIENCE <= int(silence[1]) <= PATIENCE + 1, line
    assert PATIENCE - 1 < seconds < PATIENCE + 5


@needs_proc
@by_death
def test_a_rank_killed_on_this_machine_is_named_at_once(scenario, tmp_path):
    codes, lines, ranks, seconds = play(tmp_path, scenario, patience=30)
    assert codes == [4, -9], lines
    (line,) = lines
    assert re.fullmatch(rf"rank 0: rank 1 \(process {ranks[1].pid} on .*\) was killed or died" + ENDING, line)
    assert seconds < 10


@needs_proc
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_group_that_raises_names_a_killed_rank_to_the_caller(elsewhere, tmp_path):
    codes, lines, ranks, seconds = play(
        tmp_path, "killed_while_others_wait_for_it", patience=2 if elsewhere else 30, elsewhere=elsewhere, raises=True
    )
    how = rf"{ranks[1].pid} on machine1\) gave no sign of life for \d s" if elsewhere else r".*\) was killed or died"
    assert codes == [1, -9] and seconds < 10
    assert re.fullmatch(rf"nearkin.core.errors.RankFailed: rank 1 \(process {how}", lines[-1]), lines


def test_a_stopped_rank_is_named_and_ended(tmp_path):
    codes, lines, _, seconds = play(tmp_path, "stopped")
    assert codes == [4, -9], lines
    assert len(lines) == 1 and "gave no sign of life for 2 s" in lines[0] and seconds < PATIENCE + 5


@pytest.mark.parametrize(
    "scenario, size",
    [
        ("hangs_while_others_are_in_an_exchange", 3),
        ("hangs_after_a_slow_part", 3),
        ("hangs_while_others_wait_for_a_device", 2),
        ("hangs_before_a_call", 2),
    ],
)
def test_a_rank_that_hangs_is_named_and_all_end(scenario, size, tmp_path):
    """It is alive, so that its silence tells nothing; of those that wait none is taken for it."""
    codes, lines, ranks, seconds = play(tmp_path, scenario, size=size)
    assert codes == [4] * (size - 1) + [-9], lines
    (line,) = lines
    named = rf"rank \d: rank {size - 1} \(process {ranks[-1].pid} on .*\) has not moved for \d+ s while others wait"
    assert re.fullmatch(named + " for it" + ENDING, line), line
    assert seconds < EXCHANGE + LAG + 8


def test_work_of_any_length_is_no_hang(tmp_path):
    assert play(tmp_path, "works_for_long")[:2] == ([0, 0], [])


@pytest.mark.parametrize(
    "scenario, code, said", [("fails", 2, "ValueError: rank 1: there is a fire"), ("stops_by_an_exit", 7, None)]
)
def test_an_error_of_one_rank_is_said_once_and_gives_all_its_code(scenario, code, said, tmp_path):
    codes, lines, _, seconds = play(tmp_path, scenario)
    assert codes[0] == code and seconds < 6
    assert [line for line in lines if line.startswith("ValueError: rank")] == ([said] if said else []), lines
