"""Post-training of a dense model with probability gates: calibration, learning rates, resuming, the written model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import prompts, tiny
from simple_settings import SIMPLE
from torch import Tensor

import gatelens
from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.calibration import calibrate, input_sizes
from gatelens.sparse.in_model import gate_values, is_sparse, make_sparse
from gatelens.sparse.mixture import read_training_texts, texts_of
from gatelens.sparse.sparsify import SparsifySettings, evaluate, sparsify
from gatelens.sparse.sparsify._log import Log
from gatelens.sparse.sparsify._sequences import TrainingSequences
from gatelens.sparse.sparsify.run import calibration_batches

SMALL: dict[str, Any] = {**SIMPLE, "gate": "probability", "close_first": False, "batch": 2, "length": 8}
RATES = ("learning_rate", "bias_learning_rate", "offset_learning_rate", "rest_learning_rate")
FAST: dict[str, Any] = {**SMALL, "target": 1.0, **dict.fromkeys(RATES, 1e-2)}


def logits(hf: Any) -> Tensor:
    with torch.no_grad():
        return hf(input_ids=prompts()).logits


def numbered_sequences(model: Model, text: Path) -> TrainingSequences:
    return TrainingSequences(read_training_texts(model.tokenizer, texts_of(text), 8, 1, 1.0), 0)


def log_of(folder: Path, name: str) -> list[float]:
    return [record[name] for record in Log(folder, 10**9).records]


def test_training_lowers_keys_per_query(trained: Model, trained_text: Path, tmp_path: Path) -> None:
    changes = {"steps": 40, "batch": 4, "length": 32, "warmup": 3, "bias_learning_rate": 0.2, "open_mass": 0.95}
    settings = SparsifySettings(**{**SMALL, **changes, "target": 0.2})
    calibrated = copy.deepcopy(trained)
    batches = calibration_batches(numbered_sequences(trained, trained_text), settings)
    make_sparse(calibrated.hf, **vars(calibrate(calibrated.hf, batches, settings.open_mass)))
    first = evaluate(calibrated, trained_text, trained, length=32)["sentences"]
    sparse = sparsify(trained, trained_text, settings, out=tmp_path / "run")
    last = evaluate(sparse, trained_text, trained, length=32)["sentences"]
    assert last.keys_per_query < 0.9 * first.keys_per_query
    assert last.kl < max(settings.target, first.kl)
    keys = log_of(tmp_path / "run", "keys_per_query")
    assert keys[0] == pytest.approx(first.keys_per_query, rel=0.5)
    assert keys[-1] < keys[0]
    assert not is_sparse(trained.hf)


@pytest.mark.parametrize("close_first", [False, True])
def test_training_starts_from_calibrated_gates(base: Model, text: Path, close_first: bool) -> None:
    """With learning rates of almost 0 the result has the gates that calibration on the first sequences gives."""
    still = dict.fromkeys(RATES, 1e-12)
    changes = {"steps": 1, "open_mass": 0.7, "close_first": close_first, **still}
    settings = SparsifySettings(**{**SMALL, **changes, "lengths": (4, 8)})
    sparse = sparsify(base, text, settings)
    batches = calibration_batches(numbered_sequences(base, text), settings)
    assert [batch.shape for batch in batches] == [(256, 4), (128, 8)]
    expected, gates = calibrate(base.hf, batches, 0.7, close_first=close_first), gate_values(sparse.hf)
    assert gates.gate == "probability"
    for name in ("bias", "query", "key", "rest"):
        torch.testing.assert_close(getattr(gates, name), getattr(expected, name), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("rate", "names"),
    [("bias_learning_rate", ["bias"]), ("offset_learning_rate", ["query", "key"]), ("rest_learning_rate", ["rest"])],
)
def test_each_part_has_its_learning_rate(base: Model, text: Path, rate: str, names: list[str]) -> None:
    """Adam's first step moves a parameter by its learning rate; for offsets, divided by the size of the input."""
    still = sparsify(base, text, SparsifySettings(steps=1, **SMALL, **dict.fromkeys(RATES, 1e-12)))
    rates = {**dict.fromkeys(RATES, 1e-12), rate: 1e-3}
    sparse = sparsify(base, text, SparsifySettings(steps=1, **SMALL, **rates))
    sizes = input_sizes(base.hf, calibration_batches(numbered_sequences(base, text), SparsifySettings(**SMALL)))
    assert sizes.std() > 0.001
    for name in ("bias", "query", "key", "rest"):
        change = getattr(gate_values(sparse.hf), name) - getattr(gate_values(still.hf), name)
        largest = change.abs().flatten(1).amax(1)
        step = 1e-3 / sizes if name in ("query", "key") else torch.full_like(sizes, 1e-3)
        torch.testing.assert_close(largest, step if name in names else 0 * step, rtol=0.01, atol=1e-8)


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_resumed_run_has_the_same_losses(base: Model, text: Path, tmp_path: Path, weights: Any) -> None:
    def run(out: str, steps: int) -> Model:
        return sparsify(base, text, SparsifySettings(steps=steps, weights=weights, **FAST), out=tmp_path / out)

    whole = run("whole", 4)
    run("halves", 2)
    halves = run("halves", 4)
    for name in ("loss", "expected_open", "keys_per_query", "multiplier"):
        assert log_of(tmp_path / "halves", name) == log_of(tmp_path / "whole", name)
    assert torch.equal(logits(halves.hf), logits(whole.hf))


@pytest.mark.parametrize("merge", [True, False])
def test_the_written_model_is_the_student(base: Model, text: Path, tmp_path: Path, merge: bool) -> None:
    sparse = sparsify(base, text, SparsifySettings(steps=2, merge=merge, **FAST), out=tmp_path / "run")
    again = gatelens.load(tmp_path / "run", check=False)
    torch.testing.assert_close(logits(again.hf), logits(sparse.hf), rtol=1e-5, atol=1e-5)
    for name in ("bias", "query", "key", "rest"):
        assert torch.equal(getattr(gate_values(again.hf), name), getattr(gate_values(sparse.hf), name))
    assert gate_values(sparse.hf).query.abs().max() > 0  # type: ignore[union-attr]
    more = sparsify(base, text, SparsifySettings(steps=1, **FAST), start=tmp_path / "run")  # not calibrated again
    change = gate_values(more.hf).query - gate_values(sparse.hf).query  # type: ignore[operator]
    assert change.abs().max() < 0.011


def test_a_run_starts_from_an_adapter(base: Model, text: Path, tmp_path: Path) -> None:
    """With learning rates of almost 0, the run that starts from an adapter ends with it."""
    settings = SparsifySettings(**{**FAST, "steps": 2, "merge": False})
    first = sparsify(base, text, settings, out=tmp_path / "run")
    (tmp_path / "packed").mkdir()
    for name in ("adapter.safetensors", "adapter.json"):
        (tmp_path / "packed" / name).write_bytes((tmp_path / "run" / name).read_bytes())
    still = SparsifySettings(**{**SMALL, "steps": 1, **dict.fromkeys(RATES, 1e-12)})
    second = sparsify(base, text, still, start=tmp_path / "packed")
    torch.testing.assert_close(logits(second.hf), logits(first.hf), rtol=1e-5, atol=1e-5)
    for changes in ({"rank": 4}, {"gate": "score"}):
        with pytest.raises(GatelensError, match="other modules, ranks or gates than are trained here"):
            sparsify(base, text, SparsifySettings(**{**SMALL, **changes}), start=tmp_path / "packed")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bias": 2.0}, "bias is 2.0: it must be left out if the gate is 'probability'"),
        ({"learn_bias": False}, "learn_bias is False: it must be True if the gate is 'probability'"),
    ],
)
def test_settings_that_calibration_replaces(changes: Any, says: str) -> None:
    with pytest.raises(GatelensError, match=says):
        SparsifySettings(gate="probability", **changes)


def test_gates_that_see_scores_stay(text: Path) -> None:
    sparse = tiny("llama")
    make_sparse(sparse.hf, 1.0)
    with pytest.raises(GatelensError, match="is sparse already and its gates see scores"):
        sparsify(sparse, text, SparsifySettings(steps=1, **SMALL))


def test_the_bias_learning_rate_depends_on_the_gate() -> None:
    assert SparsifySettings(gate="score").bias_learning_rate == 0.03
    assert SparsifySettings().bias_learning_rate == 0.012
    assert SparsifySettings().changed({}) == []
