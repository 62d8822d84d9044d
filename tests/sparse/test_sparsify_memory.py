"""A run with adapters keeps one copy of the weights that it does not train, also in the model that it returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import tiny

from gatelens.model import Model
from gatelens.sparse.adapters import read_adapter
from gatelens.sparse.sparsify import SparsifySettings, sparsify

SETTINGS = SparsifySettings(steps=2, batch=2, length=8, lengths=(), rank=2, judge_sequences=2, warmup=0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_only_adapted_weights_are_copied(family: str, text: Path, tmp_path: Path) -> None:
    model = tiny(family, num_hidden_layers=2)
    before = {name: weight.clone() for name, weight in model.hf.named_parameters()}
    sparse = sparsify(model, text, SETTINGS, out=tmp_path / "run")
    matrices, _, scale = read_adapter(sparse.hf, tmp_path / "run")
    products = {
        name.removesuffix(".lora_A") + ".weight": scale * (matrices[name.replace("lora_A", "lora_B")] @ down)
        for name, down in matrices.items()
        if name.endswith(".lora_A")
    }
    after = dict(sparse.hf.named_parameters())
    assert products.keys() < before.keys()
    for name, weight in model.hf.named_parameters():
        assert torch.equal(weight, before[name])
        assert (after[name].data_ptr() == weight.data_ptr()) == (name not in products)
        change = products.get(name, torch.zeros(()))
        change = change.T if change.ndim and family == "gpt2" else change  # which stores its weights transposed
        torch.testing.assert_close(after[name], weight + change, rtol=1e-5, atol=1e-6)
    assert max(float(product.abs().max()) for product in products.values()) > 1e-6


def test_the_models_are_moved_and_converted_separately(text: Path) -> None:
    model: Model = tiny("llama", num_hidden_layers=2, tie_word_embeddings=True)
    sparse = sparsify(model, text, SETTINGS)
    sparse.hf.double().requires_grad_(True)
    assert {weight.dtype for weight in model.hf.parameters()} == {torch.float32}
    assert not any(weight.requires_grad for weight in model.hf.parameters())
    assert sparse.hf.get_input_embeddings().weight is sparse.hf.get_output_embeddings().weight
