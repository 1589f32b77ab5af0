"""Runs kernel_cases.py in a process of its own: Triton asks for its interpreter when it is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels():
    cases = Path(__file__).with_name("kernel_cases.py")
    environment = dict(os.environ) if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, cwd=cases.parents[2]
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
