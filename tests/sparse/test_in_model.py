"""Gated attention inside tiny random models of every family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import decode_in_steps
from families import LENGTH, VOCAB, prompts, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, StaticCache

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.sparse.in_model import dense_attention, gate_biases, is_sparse, make_dense, make_sparse, save_sparse
from gatelens.sparse.recording import record_open

OPEN = 1e4
CLOSE = {"rtol": 1e-5, "atol": 5e-5}  # logits reach 12 in these models


@pytest.fixture
def hf(family: Model) -> Any:
    """The Hugging Face model of each family in turn, to change at will."""
    return copy.deepcopy(family.hf)


@pytest.fixture
def llama() -> Any:
    """One model is enough where the family plays no part."""
    return tiny("llama").hf


def padded(tokens: Tensor, side: str, extra: int = 3) -> tuple[dict[str, Tensor], slice]:
    """Model inputs in which all but the first row are padded by `extra` tokens, and where their real tokens are.

    The first row is real throughout: real and padded rows share a batch.
    """
    filler = torch.full((len(tokens), extra), 7)
    ids = torch.cat([filler, tokens] if side == "left" else [tokens, filler], 1)
    real = slice(extra, None) if side == "left" else slice(0, tokens.shape[1])
    mask = torch.zeros_like(ids)
    mask[:, real] = 1
    mask[0] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, real


@torch.no_grad()
def logits(hf: Any, **inputs: Any) -> Tensor:
    return hf(**inputs).logits


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_open_gates_are_the_dense_model(hf: Any, padding: str | None) -> None:
    inputs, real = ({"input_ids": prompts()}, slice(None)) if padding is None else padded(prompts(), padding)
    dense = logits(hf, **inputs)
    hf.set_attn_implementation("eager")
    eager = logits(hf, **inputs)
    make_sparse(hf, OPEN)
    assert is_sparse(hf)
    with record_open(hf) as record:
        sparse = logits(hf, **inputs)
    for right in (dense, eager):
        torch.testing.assert_close(sparse[0], right[0], **CLOSE)
        torch.testing.assert_close(sparse[:, real], right[:, real], **CLOSE)
    assert record.open_share.min() == record.expected.min() == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_numbers_do_not_depend_on_padding(hf: Any, side: str) -> None:
    make_sparse(hf, 0.3)
    tokens = prompts()
    with record_open(hf) as bare:
        alone = logits(hf, input_ids=tokens)
    inputs, real = padded(tokens, side)
    with record_open(hf) as record:
        beside = logits(hf, **inputs)
    assert 0.05 < bare.open_share.mean() < 0.95
    torch.testing.assert_close(beside[1:, real], alone[1:], **CLOSE)
    torch.testing.assert_close(record.expected[:, 1:], bare.expected[:, 1:], **CLOSE)
    assert torch.equal(record.open_share[:, 1:], bare.open_share[:, 1:])
    assert torch.equal(record.pairs[:, 1:], bare.pairs[:, 1:])


def test_closed_gates_close_the_attention(hf: Any) -> None:
    """Nothing but the token itself then reaches its logits."""
    make_sparse(hf, -OPEN)
    tokens = prompts()
    other = tokens.clone()
    other[:, :-1] = other[:, :-1].flip(0)
    torch.testing.assert_close(logits(hf, input_ids=tokens)[:, -1], logits(hf, input_ids=other)[:, -1])


def test_cached_decoding_is_the_full_forward(hf: Any) -> None:
    make_sparse(hf, 0.3)
    inputs, _ = padded(prompts(), "left")
    full = logits(hf, **inputs)
    together = decode_in_steps(hf, inputs)
    torch.testing.assert_close(together[0], full[0], **CLOSE)
    torch.testing.assert_close(together[:, 3:], full[:, 3:], **CLOSE)


def test_static_cache(hf: Any) -> None:
    """Its keys reach past the tokens seen so far."""
    make_sparse(hf, 0.3)
    tokens = prompts()
    full = logits(hf, input_ids=tokens)
    cache = StaticCache(config=hf.config, max_cache_len=32)
    first = logits(hf, input_ids=tokens[:, :6], past_key_values=cache)
    rest = [logits(hf, input_ids=tokens[:, at : at + 1], past_key_values=cache) for at in range(6, LENGTH)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), full, **CLOSE)


def test_generate(llama: Any) -> None:
    make_sparse(llama, 0.3)
    out = llama.generate(prompts(rows=1), max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    for at in range(LENGTH, LENGTH + 5):
        assert logits(llama, input_ids=out[:, :at])[0, -1].argmax() == out[0, at]


def test_record(llama: Any) -> None:
    make_sparse(llama, 0.3)
    with record_open(llama, edges=True) as record:
        logits(llama, input_ids=prompts())
    assert record.edges.shape == (3, 3, 4, LENGTH, LENGTH)
    assert (record.pairs == LENGTH * (LENGTH + 1) // 2).all()
    torch.testing.assert_close(record.edges.sum((-1, -2)) / record.pairs, record.open_share)
    with pytest.raises(RuntimeError), record_open(llama):
        raise RuntimeError
    assert not any(hasattr(module, "gate_record") for module in llama.modules())
    with record_open(llama) as nothing, pytest.raises(GatelensError, match="nothing was recorded"):
        _ = nothing.expected


def test_sliding_window_is_recorded() -> None:
    mistral = tiny("mistral").hf
    make_sparse(mistral, 0.3)
    with record_open(mistral) as record:
        logits(mistral, input_ids=prompts())
    assert (record.pairs == 1 + 2 + 3 + 4 * (LENGTH - 3)).all()


def test_gates_are_drawn_in_training_only(llama: Any) -> None:
    make_sparse(llama, 0.0)
    inputs = {"input_ids": prompts()}
    assert torch.equal(logits(llama, **inputs), logits(llama, **inputs))
    llama.train()
    assert not torch.equal(logits(llama, **inputs), logits(llama, **inputs))


def bias_gradient(hf: Any) -> Tensor:
    """(layer, head), of the loss and of the expected share of open edges, after one training step."""
    hf.zero_grad()
    torch.manual_seed(0)
    with record_open(hf) as record:
        loss = hf(input_ids=prompts(), labels=prompts(), use_cache=False).loss
        (loss + record.expected.log().mean()).backward()
    return torch.stack([layer.self_attn.gate_bias.grad for layer in hf.model.layers])


def test_biases_learn(llama: Any) -> None:
    make_sparse(llama, 0.2, learned=True)
    assert sum(name.endswith(".gate_bias") for name in llama.state_dict()) == 3
    llama.train()
    gradient = bias_gradient(llama)
    assert gradient.shape == (3, 4)
    assert gradient.ne(0).all()
    llama.gradient_checkpointing_enable()
    torch.testing.assert_close(bias_gradient(llama), gradient)


def test_dense_again(hf: Any) -> None:
    before, names, config = logits(hf, input_ids=prompts()), list(hf.state_dict()), hf.config.to_dict()
    make_sparse(hf, 0.1, learned=True)
    sparse = logits(hf, input_ids=prompts())
    assert not torch.equal(sparse, before)
    with dense_attention(hf):
        assert torch.equal(logits(hf, input_ids=prompts()), before)
    with pytest.raises(RuntimeError), dense_attention(hf):
        raise RuntimeError
    assert torch.equal(logits(hf, input_ids=prompts()), sparse)
    make_dense(hf)
    assert not is_sparse(hf)
    assert torch.equal(logits(hf, input_ids=prompts()), before)
    assert list(hf.state_dict()) == names
    assert hf.config.to_dict() == config


@pytest.mark.parametrize("learned", [False, True])
def test_a_saved_model_opens_in_plain_transformers(hf: Any, learned: bool, tmp_path: Path) -> None:
    make_sparse(hf, torch.linspace(-1, 1, 12).view(3, 4), learned)
    right = logits(hf, input_ids=prompts())
    save_sparse(hf, tmp_path / "first")
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "first", output_loading_info=True)
    assert is_sparse(again)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    save_sparse(again, tmp_path / "second")
    assert torch.equal(logits(again, input_ids=prompts()), right)
    third = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    assert is_sparse(third)
    make_sparse(third, learned=True)  # to train on from where it was
    assert torch.equal(logits(third, input_ids=prompts()), right)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "first", attn_implementation="eager")
    make_dense(third)
    torch.testing.assert_close(logits(third, input_ids=prompts()), logits(dense, input_ids=prompts()), **CLOSE)


def test_biases(llama: Any, tmp_path: Path) -> None:
    make_sparse(llama)
    assert torch.equal(gate_biases(llama), torch.full((3, 4), 3.0))
    llama.save_pretrained(tmp_path)  # biases that are not learned need no special care
    assert torch.equal(gate_biases(AutoModelForCausalLM.from_pretrained(tmp_path)), torch.full((3, 4), 3.0))
    make_sparse(llama, learned=True)
    llama.model.layers[1].self_attn.gate_bias.data[2] = 5.0
    make_sparse(llama)  # learned no more, but kept
    assert not any("gate_bias" in name for name in llama.state_dict())
    assert gate_biases(llama)[1].tolist() == [3.0, 3.0, 5.0, 3.0]
    with pytest.raises(GatelensError, match="broadcast"):
        make_sparse(llama, torch.zeros(4, 3))


def test_switched_by_name_alone(llama: Any) -> None:
    llama.set_attn_implementation("gatelens")
    with pytest.raises(GatelensError, match="make_sparse"):
        logits(llama, input_ids=prompts())
    make_sparse(llama, OPEN)
    sparse = logits(llama, input_ids=prompts())
    make_dense(llama)
    torch.testing.assert_close(sparse, logits(llama, input_ids=prompts()), **CLOSE)


def test_stale_biases_are_never_saved(llama: Any, tmp_path: Path) -> None:
    make_sparse(llama, 1.0, learned=True)
    llama.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(GatelensError, match="save_sparse"):
        logits(again, input_ids=prompts())


def test_half_precision(llama: Any) -> None:
    dense = logits(llama.to(torch.bfloat16), input_ids=prompts())
    make_sparse(llama, OPEN)
    torch.testing.assert_close(logits(llama, input_ids=prompts()), dense, rtol=0.1, atol=0.1)


def test_a_model_without_exchangeable_attention_is_refused() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(GatelensError, match="BloomForCausalLM"):
        make_sparse(bloom)


def test_a_float_mask_is_refused(llama: Any) -> None:
    make_sparse(llama)
    with pytest.raises(GatelensError, match="boolean"):
        logits(llama, input_ids=prompts(rows=1), attention_mask=torch.zeros(1, 1, LENGTH, LENGTH))
