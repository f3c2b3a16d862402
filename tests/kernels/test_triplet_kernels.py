"""The kernels of triplet selections against plain torch and float64, by Triton's interpreter.

In a separate process: the interpreter is chosen when triton is imported. The checks are in `triplet_cases`.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

import triplet_cases
from nearkin import kernels, losses


def judge():
    """The checks' verdicts as JSON: nothing, or what went wrong."""
    verdicts = {}
    for name, check in triplet_cases.CHECKS.items():
        torch.manual_seed(0)
        try:
            check("cpu")
            verdicts[name] = ""
        except Exception:
            verdicts[name] = traceback.format_exc()
    print(json.dumps(verdicts))


@pytest.fixture(scope="module")
def verdicts():
    if not kernels.installed():
        pytest.skip("triton 3.4 or newer is not installed (pip install triton)")
    code = "import torch; torch.set_num_threads(1); import test_triplet_kernels; test_triplet_kernels.judge()"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    folder = Path(__file__).parent
    command = [sys.executable, "-c", f"import sys; sys.path.append('..'); {code}"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", triplet_cases.CHECKS)
def test_kernels(name, verdicts):
    assert not verdicts[name], verdicts[name]


def test_modules_hold_the_choice(monkeypatch):
    assert "impl" not in losses.TripletLoss().settings
    assert "impl='torch'" in repr(losses.TripletLoss(impl="torch"))
    x, labels, _, _ = triplet_cases.batch((20, None, 6))
    assert torch.equal(losses.TripletLoss(impl="torch")(x, labels), losses.triplet_loss(x, labels))
    with pytest.raises(ValueError, match='unknown impl "tritn"; did you mean "triton"\\? known: auto, torch, triton'):
        losses.triplet_loss(x, labels, impl="tritn", swap=True)
    monkeypatch.setattr(kernels, "installed", lambda: False)
    monkeypatch.setattr(kernels, "RECENT", True)
    with pytest.raises(ValueError, match=r'impl="triton" is not possible here: triton is not installed'):
        losses.TripletLoss(impl="triton")
