"""Kernels under Triton's interpreter, which must be chosen before triton is imported: so in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearkin import kernels

TESTS = Path(__file__).parent


def interpreted(test_file, judge):
    """What the function `judge` of a test file prints last, as JSON; skips the test where triton is missing."""
    if not kernels.installed():
        pytest.skip("triton 3.4 or newer is not installed (pip install triton)")
    module = Path(test_file).stem
    code = f"import torch; torch.set_num_threads(1); import {module}; {module}.{judge}()"
    path = os.pathsep.join(filter(None, [str(Path(test_file).parent), str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])
