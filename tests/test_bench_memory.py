"""The estimate of a training step's memory: what it counts as trained is what a student trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from families import tiny

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.sparsify_memory import step_gb, trained_numbers
from gatelens.sparse.sparsify import SparsifySettings
from gatelens.sparse.sparsify._student import Student

SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "all-linear": {"projections": ("all-linear",), "rank": 2},
    "some": {"projections": ("down_proj",), "rank": 3},
    "full": {"weights": "full"},
    "score gates": {"gate": "score"},
    "without rest values": {"rest": False},
    "open": {"hold": "open"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_trained_numbers_are_those_of_a_student(name: str) -> None:
    model, settings = tiny("llama"), SparsifySettings(length=8, lengths=(), **SETTINGS[name])
    student = Student(model, settings, share=False)
    trained = sum(p.numel() for p in student.trained.parameters() if p.requires_grad)
    assert trained_numbers(model, settings) == trained


def test_the_adapters_of_a_fused_projection() -> None:
    model, settings = tiny("gpt2"), SparsifySettings(length=8, lengths=())
    student = Student(model, settings, share=False)
    trained = sum(p.numel() for p in student.trained.parameters() if p.requires_grad)
    assert trained_numbers(model, settings) == trained


def test_checkpointing_and_short_sequences_take_less() -> None:
    model = tiny("llama")
    long, short = (SparsifySettings(length=length, lengths=()) for length in (64, 32))
    state = 16e-9 * trained_numbers(model, long)
    assert step_gb(model, long) - state == pytest.approx(2 * (step_gb(model, short) - state))
    assert step_gb(model, long.replace(gradient_checkpointing=True)) < step_gb(model, long)
