"""Llama models as gguf files."""

from __future__ import annotations

from pathlib import Path

import gguf
from families import VOCAB

from gatelens import Model

_NAMES = {
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
        kind = _NAMES[part.removesuffix(".weight")]
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
