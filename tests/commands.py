"""Run the command line inside a test, or in a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gatelens import cli


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of ``gatelens`` with these words."""
    monkeypatch.setattr(sys, "argv", ["gatelens", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def kill(words: Sequence[str], phase: str, at: int) -> None:
    """Run ``gatelens`` with these words in a new process, which is killed when it reports this piece of a phase."""
    job = {"words": [*words], "signal": "SIGKILL", "phase": phase, "at": at}
    command = [sys.executable, str(Path(__file__).parent / "jobs" / "interrupted.py")]
    one_core = {**os.environ, "OMP_NUM_THREADS": "1"}  # sums in the same order as in the tests
    done = subprocess.run(command, input=json.dumps(job), env=one_core, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
