"""Training on sequences of several lengths: which length a step has, what it reads, and that a run resumes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from simple_settings import SIMPLE

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.mixture import TrainingText
from gatelens.sparse.sparsify import SparsifySettings, sparsify
from gatelens.sparse.sparsify._log import Log
from gatelens.sparse.sparsify._sequences import TrainingSequences, length_at
from gatelens.sparse.sparsify._student import Student
from gatelens.sparse.sparsify._training import Training

MIXED: dict[str, Any] = {**SIMPLE, "batch": 2, "length": 16, "lengths": (4, 8, 16), "checkpoint_every": 2}


def test_lengths_take_turns_in_a_random_order() -> None:
    lengths = (32, 64, 64, 256)
    chosen = [length_at(step, lengths, seed=3) for step in range(80)]
    for start in range(0, 80, 4):
        assert Counter(chosen[start : start + 4]) == {32: 1, 64: 2, 256: 1}
    assert len({tuple(chosen[start : start + 4]) for start in range(0, 80, 4)}) > 4
    assert chosen == [length_at(step, lengths, seed=3) for step in range(80)]
    assert chosen != [length_at(step, lengths, seed=4) for step in range(80)]
    assert [length_at(step, (128,), seed=0) for step in range(3)] == [128] * 3


def test_sequences_of_a_step_are_independent(llama: Model) -> None:
    """A step reads as many tokens as without lengths, in sequences with places and noise of their own."""
    settings = SparsifySettings(**MIXED)
    student = Student(llama, settings, share=True)
    words = torch.arange(3, 99).repeat(4)
    sequences = TrainingSequences([TrainingText("words", words, None, 1.0, 1.0)], 0)
    training = Training(student, llama.hf, sequences, settings, Accelerator(cpu=True))
    for step in range(3):
        length = training.length(step)
        numbers = training._sequence_numbers(step, range(2))
        assert len(set(numbers)) == len(numbers) == 2 * 16 // length
        tokens = sequences.batch(numbers, length).tokens
        assert tokens.shape == (len(numbers), length)
        assert len({tuple(row) for row in tokens.tolist()}) == len(numbers)
        assert training._backward(step, range(2)).isfinite().all()


def test_a_resumed_run_has_the_same_losses(llama: Model, text: Path, tmp_path: Path) -> None:
    def run(out: str, steps: int) -> list[dict[str, float]]:
        changes = {"steps": steps, "gate": "probability", "learning_rate": 1e-2, "target": 1.0}
        settings = SparsifySettings(**{**MIXED, **changes})
        sparsify(llama, text, settings, out=tmp_path / out)
        records = Log(tmp_path / out, 10**9).records
        return [{name: value for name, value in record.items() if name != "tokens_per_second"} for record in records]

    whole = run("whole", 6)
    run("halves", 2)
    assert run("halves", 6) == whole
    assert sorted(record["length"] for record in whole[:3]) == [4, 8, 16]


def test_one_length_is_the_run_without_lengths(llama: Model, text: Path, tmp_path: Path) -> None:
    for name, lengths in {"plain": (), "one": (16,)}.items():
        settings = SparsifySettings(**{**MIXED, "steps": 3, "lengths": lengths, "learning_rate": 1e-2})
        sparsify(llama, text, settings, out=tmp_path / name)
    plain, one = ([r["loss"] for r in Log(tmp_path / name, 9).records] for name in ("plain", "one"))
    assert plain == one


def test_lengths_that_do_not_fit() -> None:
    with pytest.raises(GatelensError, match=r"lengths is \(1, 8\): it must be at least 2"):
        SparsifySettings(**{**MIXED, "lengths": (1, 8)})
    assert SparsifySettings(**{**MIXED, "lengths": (8, 32)}).used_lengths == (8,)
    assert SparsifySettings(**{**MIXED, "lengths": (32,)}).used_lengths == (16,)
