"""Adapters: whole, and on the base that they were made for, or refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from safetensors.torch import load_file, save_file

import gatelens
from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.model.families import family_of
from gatelens.sparse.adapters import apply_adapter, base_weights, write_adapter
from gatelens.sparse.in_model import GateValues, gate_values

NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.default.weight"


def adapter(folder: Path, model: Model, **about: Any) -> Path:
    generator = torch.Generator().manual_seed(0)
    matrices = {
        NAME.format("A"): torch.randn(2, 48, generator=generator),
        NAME.format("B"): torch.randn(48, 2, generator=generator),
    }
    gates = GateValues("score", torch.zeros(3, 4))
    write_adapter(folder, matrices, gates, 2.0, {"base": "here", **base_weights(model.hf), **about})
    return folder


def test_it_is_added_to_its_base(llama: Model, tmp_path: Path) -> None:
    tensors = load_file(adapter(tmp_path, llama) / "adapter.safetensors")
    hf = apply_adapter(copy.deepcopy(llama.hf), tmp_path)
    name = "model.layers.1.self_attn.q_proj"
    right = llama.hf.get_submodule(name).weight + 2 * tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"]
    torch.testing.assert_close(hf.get_submodule(name).weight, right)


def test_an_adapter_of_an_earlier_version(llama: Model, tmp_path: Path) -> None:
    """It does not say what its gates see: that was always the score."""
    about_path = adapter(tmp_path, llama) / "adapter.json"
    about = json.loads(about_path.read_text())
    assert about.pop("gate") == "score"
    about_path.write_text(json.dumps(about))
    hf = apply_adapter(copy.deepcopy(llama.hf), tmp_path)
    assert gate_values(hf).gate == "score"
    assert not gate_values(hf).bias.any()


def random_gates(layers: int, heads: int, width: int, dim: int) -> GateValues:
    shapes = {"bias": (), "query": (width,), "key": (width,), "rest": (dim,)}
    return GateValues("probability", **{name: torch.randn(layers, heads, *shape) for name, shape in shapes.items()})


def test_probability_gates(llama: Model, tmp_path: Path) -> None:
    gates = random_gates(3, 4, 48, 12)
    write_adapter(tmp_path, {}, gates, 2.0, {"base": "here"})
    actual = gate_values(apply_adapter(copy.deepcopy(llama.hf), tmp_path))
    assert actual.gate == "probability"
    for name in ("bias", "query", "key", "rest"):
        assert torch.equal(getattr(actual, name), getattr(gates, name))
    tensors = load_file(tmp_path / "adapter.safetensors")
    save_file({key: tensor for key, tensor in tensors.items() if key != "gate_rest"}, tmp_path / "adapter.safetensors")
    with pytest.raises(GatelensError, match="it has no gate_rest"):
        apply_adapter(copy.deepcopy(llama.hf), tmp_path)


def test_an_adapter_of_smollm2_is_small(smollm2: Model, tmp_path: Path) -> None:
    """LoRA of rank 16 on all of the attention, and all of the gates, in float16: below 8 MB."""
    config, family = smollm2.hf.config, family_of(smollm2.hf.config)
    matrices = {}
    for name, module in smollm2.hf.named_modules():
        if name.rpartition(".")[2] in (*family.qkv, family.out):
            rows, columns = module.weight.shape
            matrices[f"base_model.model.{name}.lora_A.default.weight"] = torch.zeros(16, columns)
            matrices[f"base_model.model.{name}.lora_B.default.weight"] = torch.zeros(rows, 16)
    assert len(matrices) == 2 * 4 * config.num_hidden_layers
    gates = random_gates(config.num_hidden_layers, config.num_attention_heads, config.hidden_size, config.head_dim)
    write_adapter(tmp_path, matrices, gates, 2.0, {"base": "smollm2"}, torch.float16)
    assert (tmp_path / "adapter.safetensors").stat().st_size < 8e6


def test_another_base_is_refused(llama: Model, tmp_path: Path) -> None:
    adapter(tmp_path, llama)
    other = tiny("llama", seed=1).hf
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(GatelensError, match="made for other weights than here has"):
        apply_adapter(other, tmp_path)
    assert all(torch.equal(before[name], weight) for name, weight in other.state_dict().items())
    apply_adapter(copy.deepcopy(llama.hf).to(torch.bfloat16), tmp_path)  # rounded: not compared
    about = json.loads((tmp_path / "adapter.json").read_text())
    del about["fingerprint"]
    (tmp_path / "adapter.json").write_text(json.dumps(about))
    apply_adapter(other, tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_hidden_layers": 1}, r"bias is \(3, 4\) \(layer, head, ...\), not \(1, 4\)"),
        ({"hidden_size": 32, "head_dim": 12}, "has another shape"),
    ],
)
def test_a_base_of_another_shape_is_refused(llama: Model, tmp_path: Path, config: Any, says: str) -> None:
    adapter(tmp_path, llama, dtype="not compared")
    with pytest.raises(GatelensError, match=f"{says}.*belongs to another model, here"):
        apply_adapter(tiny("llama", **config).hf, tmp_path)


def test_a_damaged_adapter(llama: Model, tmp_path: Path) -> None:
    about, weights = (adapter(tmp_path, llama) / name for name in ("adapter.json", "adapter.safetensors"))
    whole = weights.read_bytes()
    tensors = load_file(weights)
    for keep in (lambda key: key != "gate_bias", lambda key: not key.endswith("lora_B")):
        save_file({key: tensor for key, tensor in tensors.items() if keep(key)}, weights)
        with pytest.raises(GatelensError, match="incomplete or damaged"):
            apply_adapter(copy.deepcopy(llama.hf), tmp_path)
    weights.write_bytes(whole[:50])
    with pytest.raises(GatelensError, match=r"adapter.safetensors is incomplete"):
        apply_adapter(copy.deepcopy(llama.hf), tmp_path)
    for content in ("{", "[]", "{}"):
        about.write_text(content)
        with pytest.raises(GatelensError, match=r"adapter.json is incomplete"):
            gatelens.load(tmp_path)


def test_a_base_that_is_gone(llama: Model, tmp_path: Path) -> None:
    adapter(tmp_path, llama, base=str(tmp_path / "gone"))
    with pytest.raises(GatelensError, match=r"cannot open the base model of the adapter .*no folder or file .*gone"):
        gatelens.load(tmp_path)


def test_what_it_cannot_hold(tmp_path: Path) -> None:
    trained = {"base_model.model.model.embed_tokens.lora_embedding_A.default": torch.zeros(2, 100)}
    with pytest.raises(GatelensError, match=r"cannot hold .*embed_tokens"):
        write_adapter(tmp_path, trained, GateValues("score", torch.zeros(3, 4)), 2.0, {"base": "here"})
    assert not list(tmp_path.iterdir())


def test_a_model_knows_where_it_came_from(llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama.hf.save_pretrained(tmp_path / "mine")
    llama.tokenizer.save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert gatelens.load("mine", check=False).source == str(tmp_path / "mine")
    assert llama.source == ""
