"""What a run can leave out: sparsity (the dense control), rest values, or adapters outside the attention."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import prompts
from torch import Tensor, nn

import gatelens
from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.in_model import gate_values, make_dense
from gatelens.sparse.sparsify import SparsifySettings, evaluate, sparsify
from gatelens.sparse.sparsify._log import Log
from gatelens.sparse.sparsify._student import Student

FAST: dict[str, Any] = {
    "batch": 2,
    "length": 16,
    "lengths": (),
    "checkpoint_every": 1,
    "learning_rate": 1e-2,
    "warmup": 0,
    "cooldown": 0.0,
}


def log_of(folder: Path, name: str) -> list[float]:
    return [row[name] for row in Log(folder, 10**9).records]


def logits(hf: Any) -> Tensor:
    with torch.no_grad():
        return hf(input_ids=prompts()).logits


@pytest.mark.parametrize("gate", ["score", "probability"])
@pytest.mark.parametrize("weights", ["lora", "full"])
def test_the_dense_control(base: Model, text: Path, tmp_path: Path, gate: Any, weights: Any) -> None:
    """All gates are open in every step, weights change, and the result is the same model without gates."""
    settings = SparsifySettings(steps=3, hold="open", gate=gate, weights=weights, kl=0.0, **FAST)
    control = sparsify(base, text, settings, out=tmp_path / "run")
    assert log_of(tmp_path / "run", "open") == log_of(tmp_path / "run", "expected_open") == [1.0] * 3
    assert log_of(tmp_path / "run", "above_dense")[0] == pytest.approx(0, abs=1e-5)
    again = gatelens.load(tmp_path / "run", check=False)
    assert evaluate(again, text, base, length=16)["trained"].open_share == 1
    dense = copy.deepcopy(again.hf)
    make_dense(dense)
    torch.testing.assert_close(logits(again.hf), logits(dense), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(control.hf), logits(dense), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(dense), logits(base.hf), atol=1e-3)


def test_the_control_of_the_published_recipe(base: Model, text: Path, tmp_path: Path) -> None:
    """The bias of that recipe falls to 0, which would close gates."""
    settings = SparsifySettings.preset("published", steps=2, hold="open", bias_steps=1, **FAST)
    sparsify(base, text, settings, out=tmp_path / "run")
    assert log_of(tmp_path / "run", "open") == [1.0, 1.0]


def test_a_control_does_not_start_from_gates(base: Model, text: Path, tmp_path: Path) -> None:
    sparsify(base, text, SparsifySettings(steps=1, merge=False, **FAST), out=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(GatelensError, match="gates than are trained here"):
        sparsify(base, text, SparsifySettings(steps=1, hold="open", **FAST), start=tmp_path / "run")


def test_a_control_is_plain_fine_tuning(base: Model, text: Path) -> None:
    """Its weights after a step are those that plain attention and plain cross-entropy give."""
    settings = SparsifySettings(steps=1, hold="open", kl=0.0, weights="full", clip=None, **FAST)
    control = sparsify(base, text, settings)
    from gatelens.sparse.mixture import read_training_texts, texts_of
    from gatelens.sparse.sparsify._sequences import TrainingSequences

    texts = read_training_texts(base.tokenizer, texts_of(text), 16, 1, 0.0)
    tokens = TrainingSequences(texts, 0).batch([(0, 0), (1, 0)], 16).tokens
    plain = copy.deepcopy(base.hf).train().requires_grad_(True)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2, betas=(0.9, 0.99))
    plain(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    torch.testing.assert_close(logits(control.hf), logits(plain.eval()), rtol=1e-3, atol=1e-4)


def test_a_control_of_a_sparse_model_is_refused(base: Model, text: Path, tmp_path: Path) -> None:
    sparse = sparsify(base, text, SparsifySettings(steps=1, **FAST))
    with pytest.raises(GatelensError, match="begins with a dense model"):
        sparsify(sparse, text, SparsifySettings(hold="open", **FAST), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_rest_values(base: Model, text: Path, tmp_path: Path) -> None:
    """They are 0 and stay 0; biases and offsets are calibrated and learned."""
    settings = SparsifySettings(steps=2, rest=False, merge=False, **FAST)
    sparse = sparsify(base, text, settings, out=tmp_path / "run")
    for model in (sparse, gatelens.load(tmp_path / "run", check=False)):
        values = gate_values(model.hf)
        assert values.rest is not None
        assert not values.rest.any()
        assert values.bias.std() > 0
    sparsify(base, text, SparsifySettings(steps=1, **FAST), out=tmp_path / "rests")
    with pytest.raises(GatelensError, match=r"gate_rest|rest"):
        sparsify(base, text, settings, out=tmp_path / "other", start=tmp_path / "rests")


def test_adapters_on_all_linear_modules(base: Model, text: Path, tmp_path: Path) -> None:
    """All of them but the output embeddings, and the adapter is the trained model."""
    settings = SparsifySettings(steps=2, projections=("all-linear",), rank=2, merge=False, **FAST)
    student = Student(base, settings, share=True)
    adapted = {name.split(".lora_A")[0] for name, _ in student.trained.named_parameters() if ".lora_A" in name}
    output = base.hf.get_output_embeddings()
    linear = {
        name for name, module in base.hf.named_modules() if isinstance(module, nn.Linear) and module is not output
    }
    assert {name.removeprefix("base_model.model.") for name in adapted} == linear
    assert any("mlp" in name for name in linear)
    sparse = sparsify(base, text, settings, out=tmp_path / "run")
    torch.testing.assert_close(
        logits(gatelens.load(tmp_path / "run", check=False).hf), logits(sparse.hf), rtol=1e-5, atol=1e-5
    )


def test_a_loss_below_the_floor_changes_nothing(base: Model, text: Path) -> None:
    """With a floor above the loss of all sequences the weights stay; with one below it, the run is as without."""
    settings = SparsifySettings(steps=2, hold="open", kl=0.0, **FAST)
    free, above, below = (
        sparsify(base, text, settings.replace(least_loss=floor)).hf for floor in (None, 100.0, -100.0)
    )
    torch.testing.assert_close(logits(above), logits(base.hf), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(below), logits(free))
    assert not torch.allclose(logits(free), logits(base.hf), atol=1e-3)
