"""Kernels for GPUs: the bits of the C kernel and of torch, by one launch a message and side.

They run here by Triton's interpreter, on tensors of the CPU, in a process that asks for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

interpreted = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@interpreted
@pytest.mark.process
@pytest.mark.parametrize("program", ["fused_bits", "product_bits"])
def test_kernels_have_the_bits_of_the_cpu(program):
    """Products have its numbers, up to the rounding of bf16."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.support.programs.{program}"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
