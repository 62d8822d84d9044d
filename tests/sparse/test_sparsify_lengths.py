"""Training on sequences of several lengths: which length a step has, what it reads, and that a run resumes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from families import prompts, tiny

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.sparsify import SparsifySettings, sparsify
from gatelens.sparse.sparsify._log import Log
from gatelens.sparse.sparsify._sequences import TrainingSequences, cut, length_at
from gatelens.sparse.sparsify._student import Student
from gatelens.sparse.sparsify._training import Training

MIXED: dict[str, Any] = {"batch": 2, "length": 16, "lengths": (4, 8, 16), "warmup": 0, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny("llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred random words."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(f"t{int(i)}" for i in prompts(seed=1, rows=1, length=400)[0]))
    return path


def test_lengths_take_turns_in_a_random_order() -> None:
    lengths = (32, 64, 64, 256)
    chosen = [length_at(step, lengths, seed=3) for step in range(80)]
    for start in range(0, 80, 4):
        assert Counter(chosen[start : start + 4]) == {32: 1, 64: 2, 256: 1}
    assert len({tuple(chosen[start : start + 4]) for start in range(0, 80, 4)}) > 4
    assert chosen == [length_at(step, lengths, seed=3) for step in range(80)]
    assert chosen != [length_at(step, lengths, seed=4) for step in range(80)]
    assert [length_at(step, (128,), seed=0) for step in range(3)] == [128] * 3


def test_pieces_are_the_text_in_order() -> None:
    tokens = torch.arange(22).view(2, 11)
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [11, 12, 13, 14], [15, 16, 17, 18]]
    assert cut(tokens, 4).tolist() == expected
    assert torch.equal(cut(tokens, 11), tokens)


def test_pieces_have_noise_of_their_own(llama: Model) -> None:
    """A step reads as many tokens as without lengths, and no two of its pieces have the same noise."""
    settings = SparsifySettings(**MIXED)
    tokens = prompts(rows=4, length=16)
    student = Student(llama, settings, share=True)
    sequences = TrainingSequences(tokens, tokens[:0], 0.0, 0)
    training = Training(student, llama.hf, sequences, settings, Accelerator(cpu=True))
    for step in range(3):
        seeds, length = training._noise_seeds(step, range(2)), training.length(step)
        assert len(set(seeds)) == len(seeds) == 2 * 16 // length
        assert training._backward(step, range(2)).isfinite().all()


def test_a_resumed_run_has_the_same_losses(llama: Model, text: Path, tmp_path: Path) -> None:
    def run(out: str, steps: int) -> list[dict[str, float]]:
        settings = SparsifySettings(steps=steps, gate="probability", learning_rate=1e-2, target=1.0, **MIXED)
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
    plain, one = ([r["constrained"] for r in Log(tmp_path / name, 9).records] for name in ("plain", "one"))
    assert plain == one


@pytest.mark.parametrize("lengths", [(1, 8), (8, 32)])
def test_lengths_that_do_not_fit(lengths: tuple[int, ...]) -> None:
    with pytest.raises(GatelensError, match="it must be from 2 to length, which is 16"):
        SparsifySettings(**{**MIXED, "lengths": lengths})
