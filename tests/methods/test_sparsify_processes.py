"""Runs that are killed, and runs of two processes: the losses are those of one undisturbed process."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from families import prompts

RUN = str(Path(__file__).parent / "sparsify_run.py")
NAMES = ("constrained", "cross_entropy", "expected_open", "open", "multiplier")
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")  # what accelerate launch starts
STEPS = 8


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(f"t{int(i)}" for i in prompts(seed=1, rows=1, length=400)[0]))
    return path


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    out = tmp_path_factory.mktemp("undisturbed")
    start(text, out, batch=4).wait(timeout=120)
    return losses(out)


def start(
    text: Path, out: Path, batch: int, wait: float = 0.0, launch: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """The run in a process group of its own, so that nothing else can be killed with it."""
    command = [sys.executable, *launch, RUN, str(text), str(out), str(STEPS), str(batch), str(wait)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(command, env=environment, start_new_session=True)


def losses(out: Path) -> list[list[float]]:
    with (out / "log.csv").open(newline="") as file:
        return [[float(row[name]) for name in NAMES] for row in csv.DictReader(file)]


def test_a_killed_run_continues_with_the_same_losses(
    text: Path, tmp_path: Path, undisturbed: list[list[float]]
) -> None:
    assert len(undisturbed) == STEPS
    run = start(text, tmp_path, batch=4, wait=0.3)
    deadline = time.monotonic() + 120
    while not ((tmp_path / "log.csv").exists() and len(losses(tmp_path)) >= 5):  # two steps after a checkpoint
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]
    assert not (tmp_path / "config.json").exists()
    (tmp_path / "log.csv").open("a").write("6,0.1")  # and half a line
    assert start(text, tmp_path, batch=4).wait(timeout=120) == 0
    assert losses(tmp_path) == undisturbed
    assert (tmp_path / "config.json").exists()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000006", "step-000008"]


def test_two_processes_are_one_with_twice_the_batch(text: Path, tmp_path: Path, undisturbed: list[list[float]]) -> None:
    assert start(text, tmp_path, batch=2, launch=LAUNCH).wait(timeout=200) == 0
    found = losses(tmp_path)
    assert len(found) == STEPS
    for row, right in zip(found, undisturbed, strict=True):
        assert row == pytest.approx(right, rel=2e-4, abs=2e-6)
