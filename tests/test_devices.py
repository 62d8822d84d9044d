"""Tensors are made on the device of the model: the tests of `on_second_device.py`, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_everything_runs_on_a_second_device() -> None:
    options = ["-n", "0", "-p", "no:cacheprovider", "-o", "addopts="]
    command = [sys.executable, "-m", "pytest", *options, str(TESTS / "on_second_device.py")]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:]
