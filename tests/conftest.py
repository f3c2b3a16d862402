"""One thread per worker, so that two workers on two cores do not fight; the same random start for every test."""

import os
import signal
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("loss_checks")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a suite in the background inherits it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shared_data():
    """Finds a real set by its folder's name, in NEARKIN_DATA or ../shared/data; skips the test where it is absent."""
    home = Path(os.environ.get("NEARKIN_DATA") or Path(__file__).parents[2] / "shared" / "data")

    def find(name):
        if not (home / name).exists():
            pytest.skip(f"no {name} in {home} (set NEARKIN_DATA)")
        return home / name

    return find
