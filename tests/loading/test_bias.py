"""A model with plain attention as a sparse model with one bias: by load, convert, its config, and its hub id."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from families import prompts, tiny
from refusals import refusal
from torch import Tensor
from transformers import AutoModelForCausalLM

import gatelens
from gatelens import GatelensError
from gatelens.loading import builtin, loader
from gatelens.loading.builtin import made_from
from gatelens.sparse.in_model import gate_values, is_sparse

BIAS = 0.3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain Hugging Face folder."""
    model = tiny("llama")
    for part in (model.hf, model.tokenizer):
        part.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def first_layer(hf: Any, tokens: Tensor, bias: float) -> Tensor:
    """The output of the first layer's attention, from the formula: p is not normalised again over the open edges."""
    layer, attention = hf.model.layers[0], hf.model.layers[0].self_attn
    x = layer.input_layernorm(hf.model.embed_tokens(tokens))
    n, heads, kv_heads, dim = tokens.shape[1], 4, 2, 12
    cos, sin = hf.model.rotary_emb(x, torch.arange(n)[None])
    q, k, v = (
        project(x).view(*tokens.shape, -1, dim).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = (t * cos[:, None] + torch.cat([-t[..., dim // 2 :], t[..., : dim // 2]], -1) * sin[:, None] for t in (q, k))
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scores = q @ k.mT / dim**0.5
    hidden = torch.ones(n, n).triu(1).bool()
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1) * (scores + bias > 0)
    return attention.o_proj((p @ v).transpose(1, 2).flatten(2))


def attention_output(hf: Any, tokens: Tensor) -> Tensor:
    outputs: list[Tensor] = []
    handle = hf.model.layers[0].self_attn.register_forward_hook(lambda _, args, out: outputs.append(out[0]))
    hf(tokens)
    handle.remove()
    return outputs[0]


def test_a_plain_folder_with_a_bias(folder: Path) -> None:
    dense, sparse = gatelens.load(folder), gatelens.load(folder, bias=BIAS)
    assert not is_sparse(dense.hf)
    expected = first_layer(dense.hf, prompts(), BIAS)
    torch.testing.assert_close(attention_output(sparse.hf, prompts()), expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(attention_output(dense.hf, prompts()), expected, atol=0.01)
    assert dense.fingerprint != sparse.fingerprint != gatelens.load(folder, bias=0.5).fingerprint


def test_convert_and_the_config_give_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gatelens.load(folder, bias=BIAS).hf(prompts()).logits
    assert run(monkeypatch, "convert", str(folder), "--bias", str(BIAS), "--out", str(folder.parent / "converted")) == 0
    shutil.copytree(folder, folder.parent / "edited")
    config = json.loads((folder / "config.json").read_text())
    config |= {"attn_implementation": "gatelens", "gatelens": {"bias": BIAS}}
    (folder.parent / "edited" / "config.json").write_text(json.dumps(config))
    for name in ("converted", "edited"):
        assert torch.equal(gatelens.load(folder.parent / name).hf(prompts()).logits, expected)
        plain = AutoModelForCausalLM.from_pretrained(folder.parent / name)
        assert torch.equal(plain(prompts()).logits, expected)
        assert torch.equal(gate_values(plain).bias, torch.full((3, 4), BIAS))


def test_converted_weights_keep_their_dtype(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama").hf.bfloat16().save_pretrained(folder)
    assert run(monkeypatch, "convert", str(folder), "--bias", "0", "--out", str(tmp_path / "half")) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ("no", "\"gatelens\" in its config is 'no': it must be an object"),
        ({"gate": "sums"}, "it must be an object"),
        ({"bias": [[0.0]]}, "it must be a number, or a list of 4 numbers for each of 3 layers"),
        ({"bias": [["a"] * 4] * 3}, "it must be a number, or a list of 4 numbers"),
        ({"bias": "0"}, "it must be a number, or a list of 4 numbers"),
        ({"bias": 1e300}, "it must be a number, or a list of 4 numbers"),
        ({"bias": 0.0, "dense": 3}, "it must be a string"),
        ({}, "no gate biases"),
        (None, 'it has no "gatelens" with the gates'),
    ],
)
def test_a_config_of_another_form_is_refused(folder: Path, gates: Any, message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"attn_implementation": "gatelens"} | ({} if gates is None else {"gatelens": gates})
    (folder / "config.json").write_text(json.dumps(config))
    said = refusal(folder)
    assert said.startswith(f"{folder} cannot be opened as a sparse model: ")
    assert message in said


def test_a_bias_that_is_not_a_number(folder: Path) -> None:
    with pytest.raises(GatelensError, match="the bias is nan: it must be a finite number"):
        gatelens.load(folder, bias=float("nan"))


def test_released_models_need_no_bias(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader, "RELEASED", {str(folder): "dense"})
    assert torch.equal(gate_values(gatelens.load(folder).hf).bias, torch.zeros(3, 4))
    assert torch.equal(gate_values(gatelens.load(folder, bias=1.0).hf).bias, torch.ones(3, 4))
    assert made_from("flodraye/sparse-olmo7b") == "allenai/OLMo-7B-hf"
    assert set(builtin.RELEASED) == {
        "flodraye/sparse-olmo7b",
        "ansonisl/SparseGPT2",
        "ansonisl/SparseGPT2Finetuned",
        "ansonisl/ShortSparseGPT2",
        "ansonisl/ShortSparseLlama1B",
    }
