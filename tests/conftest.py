"""One thread a worker, so that two workers on two cores do not fight; the same random start for every test."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)
