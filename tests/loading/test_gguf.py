"""Models in .gguf files: converted once, the same numbers, and one clear sentence for a damaged file."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest
import torch
from families import VOCAB, prompts, tiny
from refusals import refusal

import gatelens
from gatelens import GatelensError, Model
from gatelens.loading import _gguf


def test_converted_once_and_the_same(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tiny("llama"), tmp_path / "mine.gguf")
    first = gatelens.load(file)
    assert torch.equal(first.hf(prompts()).logits, tiny("llama").hf(prompts()).logits)
    assert first.tokenizer("ab c").input_ids == [93, 69]
    assert [path.name.startswith("mine-") for path in cache.iterdir()] == [True]

    def fail(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(_gguf, "_convert", fail)
    assert gatelens.load(file).fingerprint == first.fingerprint


def test_another_file_of_that_name_size_and_date_is_another_model(tmp_path: Path) -> None:
    fingerprints = []
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        file = write_gguf(tiny("llama", seed=seed), tmp_path / str(seed) / "mine.gguf")
        os.utime(file, (0, 0))
        fingerprints.append(gatelens.load(file).fingerprint)
    assert fingerprints[0] != fingerprints[1]


@pytest.mark.parametrize(("says", "ids"), [(None, [93, 69]), (False, [93, 69]), (True, [1, 93, 69])])
def test_the_first_token_that_the_file_asks_for(tmp_path: Path, says: bool | None, ids: list[int]) -> None:
    file = write_gguf(tiny("llama"), tmp_path / "mine.gguf", add_first=says)
    assert gatelens.load(file).tokenizer("ab c").input_ids == ids


@pytest.mark.parametrize("size", [0, 4, 500, 120_000, -1])
def test_truncated(tmp_path: Path, cache: Path, size: int) -> None:
    file = write_gguf(tiny("llama"), tmp_path / "mine.gguf")
    file.write_bytes(file.read_bytes()[:size])
    assert "If the file is truncated, copy it again" in refusal(file)
    assert list(cache.iterdir()) == []


def test_missing_tensor(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tiny("llama"), tmp_path / "mine.gguf", leave_out="blk.1.ffn_up")
    assert "model.layers.1.mlp.up_proj.weight missing or of another shape" in refusal(file)
    assert list(cache.iterdir()) == []


def test_a_file_of_another_kind(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "mine.gguf").write_text("not gguf" * 99)
    assert "cannot read" in refusal(tmp_path / "mine.gguf")
    assert list(cache.iterdir()) == []


def test_packages_that_reading_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tiny("llama"), tmp_path / "mine.gguf")
    monkeypatch.setattr(_gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        GatelensError, match=r"mine.gguf needs gguf and accelerate: run `pip install 'gatelens\[gguf\]'"
    ):
        gatelens.load(file)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATELENS_CACHE", "/a/b")
    assert _gguf.cache_folder() == Path("/a/b")
    monkeypatch.delenv("GATELENS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert _gguf.cache_folder() == Path("/x/gatelens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _gguf.cache_folder() == Path.home() / ".cache" / "gatelens"


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Model, path: Path, leave_out: str = "", add_first: bool | None = None) -> Path:
    """A Llama as a gguf file, with a tokenizer of single characters and one merge."""
    config = model.hf.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(model.anatomy.head_dim)
    writer.add_vocab_size(VOCAB)
    words = ["<pad>", "<s>", "</s>", *map(chr, range(33, 123)), "ab"]
    words += [f"unused{index}" for index in range(len(words), VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCAB - 3))
    writer.add_token_merges(["a b"])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if add_first is not None:
        writer.add_add_bos_token(add_first)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for key, weight in model.hf.state_dict().items():
        _, _, layer, part = key.split(".", 3) if ".layers." in key else ("", "", "", key)
        kind = _GGUF_NAMES[part.removesuffix(".weight")]
        name = f"blk.{layer}.{kind}" if layer else kind
        if kind in heads:  # there the rotary embedding turns neighbouring numbers, here the halves of a head
            weight = weight.unflatten(0, (heads[kind], 2, -1)).transpose(1, 2).reshape(weight.shape).contiguous()
        if name != leave_out:
            writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
