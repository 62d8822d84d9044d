"""A circuit that two processes find, are stopped at and resume has the numbers of one undisturbed process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from circuit_run import POINTS, SAMPLE, N, find

from gatelens import CircuitSettings, Model, find_circuit
from gatelens.measures.circuit_result import CircuitResult, load_circuit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")]
RUN, TRAINED = str(Path(__file__).parent / "circuit_run.py"), Path(__file__).parents[1] / "trained_model"
# As in test_sparsify_processes.py: the launcher for several GPUs, told to use the CPU.
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that two processes wrote to, and what they printed."""
    out = tmp_path_factory.mktemp("two")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *LAUNCH, RUN, str(out), str(TRAINED)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done.stdout


@pytest.fixture(scope="module")
def alone(trained: Model) -> CircuitResult:
    settings = CircuitSettings(
        level="edges", n=N, sample=SAMPLE, points=POINTS, stability=1, tests=True, allow_noise=True
    )
    return find_circuit(trained, "ioi", settings)


def test_both_saved_pieces_before_they_were_stopped(two: tuple[Path, str]) -> None:
    pieces = json.loads((two[0] / "stopped.json").read_text())
    # One batch of prompts for each process: they score it, and evaluate the circuits of the curve on it.
    assert {"edges-0.safetensors", "edges-1.safetensors"} <= set(pieces)
    assert {Path(name).stem.split("-")[-1] for name in pieces if name.startswith("curve-")} == {"0", "1"}


@pytest.mark.parametrize("folder", ["run", "for-one"])
def test_resumed_they_find_what_one_finds(folder: str, two: tuple[Path, str], alone: CircuitResult) -> None:
    """Resumed by both, or by one process alone, which begins again."""
    if folder == "for-one":
        assert any((two[0] / folder / "pieces").rglob("*.safetensors"))
        find(two[0] / folder, str(TRAINED))
    found = load_circuit(two[0] / folder, scores=True)
    for ours, theirs in zip(found.scores, alone.scores, strict=True):
        torch.testing.assert_close(ours.scores, theirs.scores, atol=1e-5, rtol=1e-4)
    assert found.curve.asked == alone.curve.asked
    torch.testing.assert_close(found.curve.metrics, alone.curve.metrics, atol=1e-4, rtol=1e-4)
    assert found.validity.complement == pytest.approx(alone.validity.complement, abs=1e-4)
    assert found.validity.correlation == pytest.approx(alone.validity.correlation, abs=1e-3)
    assert found.heads is not None
    assert alone.heads is not None
    assert [line.score for line in found.heads.lines] == pytest.approx(
        [line.score for line in alone.heads.lines], abs=1e-4
    )


def test_the_main_process_alone_writes_and_prints(two: tuple[Path, str]) -> None:
    out, printed = two
    assert printed.count("written to") == printed.count("cost:") - 1 == 1  # the cost is printed at each of two starts
    files = {path.name for path in (out / "run").iterdir()}
    assert {"asked.json", "result.json", "curve.csv"} < files
    assert not {name for name in files if name == "pieces" or name.endswith(".tmp")}
