"""The table of benchmarks: measurements pass through a pipe, and a wrong name gives one sentence. Nothing is timed."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import gatelens

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.__main__ import NAMES, ONLY_BY_NAME, cells  # noqa: E402
from bench.growth import slope  # noqa: E402
from bench.large import in_a_process  # noqa: E402
from bench.large_models import model_folder  # noqa: E402
from bench.measurements import Measurement, read_output, show  # noqa: E402
from bench.memory_watch import Used, watched  # noqa: E402
from bench.peers import best_peers, record  # noqa: E402
from bench.tables import write_table  # noqa: E402


def test_measurements_are_read_as_they_were_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--json"])
    measurements = [Measurement("EAP", 1.25, "F + FB", 1, 1.5), Measurement("FB", 2.0, "F")]
    for measurement in measurements:
        print("a note")
        show(measurement)
    lines = capsys.readouterr().out.splitlines()
    assert list(read_output(iter(lines))) == ["a note", measurements[0], "a note", measurements[1]]


def test_measurements_as_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    show(Measurement("EAP", 1.25, "F + FB", 1, 1.5))
    assert capsys.readouterr().out.split() == ["EAP", "1.25", "F", "+", "FB", "(floor", "1,", "at", "most", "1.5)"]


def test_a_measurement_above_its_limit_is_marked() -> None:
    assert [cells(Measurement("a", value, "F", 1, 1.5))[-1] for value in (1.4, 1.5, 1.6)] == ["", "", "above"]
    assert cells(Measurement("a", 9.0, "F")) == ["a", "9", "F", "", "", ""]


def test_every_benchmark_is_in_the_table() -> None:
    assert {"heads", "circuits", "gated_attention", "head_gating", "sparsify", "peers", "growth"} <= set(NAMES)
    assert not {"measurements", "timing", "tables", "__init__", "__main__"} & set(NAMES)
    assert set(ONLY_BY_NAME) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_can_be_imported(name: str) -> None:
    """Also those that nobody runs every day: what they import has not moved."""
    assert callable(import_module(f"bench.{name}").main)


def test_a_wrong_name_gives_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "haeds"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("no benchmark 'haeds': there are ")
    assert len(done.stderr.splitlines()) == 1


def test_the_slope_of_a_power_is_its_exponent() -> None:
    sizes = [2, 4, 8, 16]
    assert slope(sizes, [3.0 * size**1.5 for size in sizes]) == pytest.approx(1.5)


def test_a_table_is_written_as_csv_and_as_markdown(tmp_path: Path) -> None:
    records = [{"job": "EAP", "peak": 1.23456, "note": None}, {"job": "curve", "peak": 2.0, "note": "slow"}]
    write_table(tmp_path / "large.csv", records, "# Title")
    assert (tmp_path / "large.csv").read_text().splitlines()[0] == "job,peak,note"
    lines = (tmp_path / "large.md").read_text().splitlines()
    assert lines[0] == "# Title"
    assert lines[2:] == ["| job | peak | note |", "| --- | --- | --- |", "| EAP | 1.235 |  |", "| curve | 2 | slow |"]


def test_ratios_to_a_library_are_taken_in_each_repetition() -> None:
    row = record("slow", "patch heads", [(1.0, 4.0), (2.0, 4.0), (1.0, 9.0)], 0.0)
    assert row["ours, F"] == "1 (1 to 2)"
    assert row["theirs / ours"] == "4 (2 to 9)"
    fast = record("fast", "patch heads", [(1.0, 2.0)], 0.0)
    assert [one["library"] for one in best_peers([row, fast, record("absent", note="not on PyPI")])] == ["fast"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_is_held_is_measured() -> None:
    with watched() as used:
        held = torch.ones(20_000_000)
    assert 0.08 <= used.peak_gb < 0.16
    assert held.sum() == 20_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_row_has_a_process_of_its_own_and_may_fail() -> None:
    assert in_a_process(lambda: Used(1.5, 2.0, 3.0)) == Used(1.5, 2.0, 3.0)
    assert in_a_process(lambda: Used(**{"unknown": 1})) is None


def test_a_random_model_is_loaded_as_it_was_written(tmp_path: Path) -> None:
    folder = model_folder("tiny", tmp_path)
    model = gatelens.load(folder, dtype=torch.bfloat16)  # with the check at load
    assert (model.n_layers, model.n_heads, model.dtype) == (3, 4, torch.bfloat16)
    weight = model.anatomy.blocks[1].mlp.up_proj.weight
    assert weight.float().std() == pytest.approx(0.02, rel=0.05)
    assert model_folder("tiny", tmp_path) == folder  # a second call finds it
