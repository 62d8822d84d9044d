"""Sparsify keeps every gradient and weight finite, or stops and keeps the last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from simple_settings import SIMPLE
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.in_model import gate_biases
from gatelens.sparse.sparsify import SparsifySettings, sparsify
from gatelens.sparse.sparsify._log import Log
from gatelens.sparse.sparsify._result import merged
from gatelens.sparse.sparsify._student import Student
from gatelens.sparse.sparsify._training import Training

FAST: dict[str, Any] = {
    **SIMPLE, "batch": 2, "length": 8, "checkpoint_every": 1, "target": 1.0,
    "learning_rate": 1e-2, "bias_learning_rate": 0.5,
}  # fmt: skip


def test_gates_that_are_all_closed_have_gradients(base: Model, text: Path) -> None:
    sparse = sparsify(base, text, SparsifySettings(steps=2, bias=-200.0, **FAST))
    assert all(weight.isfinite().all() for weight in sparse.hf.parameters())
    assert gate_biases(sparse.hf).isfinite().all()


def test_a_gradient_that_is_no_number(base: Model, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = Training._backward

    def spoiled(self: Training, step: int, numbers: range) -> Tensor:
        if step == 1:
            measured = backward(self, step, numbers)
            self.student.weights()[0].grad[0, 0] = torch.nan  # type: ignore[index]
            return torch.cat([measured[:-1], self._not_finite()])
        return backward(self, step, numbers)

    monkeypatch.setattr(Training, "_backward", spoiled)
    with pytest.raises(GatelensError, match="diverged at step 2:"):
        sparsify(base, text, SparsifySettings(steps=3, **FAST), out=tmp_path)
    [checkpoint] = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name == "step-000001"
    assert all(weight.isfinite().all() for weight in load_file(checkpoint / "weights.safetensors").values())
    assert len(Log(tmp_path, 9).records) == 1


def test_an_update_that_leaves_no_numbers(
    base: Model, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Training.step

    def spoiled(self: Training, step: int) -> Any:
        measured = update(self, step)
        with torch.no_grad():
            self.student.weights()[0][0, 0] = torch.inf
        return measured

    monkeypatch.setattr(Training, "step", spoiled)
    for out in (tmp_path, None):
        with pytest.raises(GatelensError, match=r"diverged at step 1: .* NaN or infinity"):
            sparsify(base, text, SparsifySettings(steps=1, **FAST), out=out)
    assert not list((tmp_path / "checkpoints").iterdir())
    assert not (tmp_path / "adapter.safetensors").exists()


def test_adapters_whose_product_is_no_number(base: Model) -> None:
    student = Student(base, SparsifySettings(), share=False)
    student.load_state({name: torch.full_like(weight, 1e30) for name, weight in student.state().items()})
    with pytest.raises(GatelensError, match="NaN or infinite, and nothing is written"):
        merged(student)
