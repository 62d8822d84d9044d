"""Tiny random models of every known family, small enough for every test.

They have no trivial parts: norm weights and biases are random too, sliding windows are shorter than the prompts,
clipping and soft-capping have an effect, and key-value heads are shared wherever the family allows it.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from gatelens.model import Model
from gatelens.model.anatomy import describe
from gatelens.sparse.in_model import GateValues, make_sparse

VOCAB = 100
WINDOW = 4
LENGTH = 9  # of the prompts below: longer than the window

_EACH: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GATED: dict[str, Any] = {"intermediate_size": 64, "num_key_value_heads": 2}
_GEMMA: dict[str, Any] = {**_GATED, "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {}),
    "gpt_neox": ("GPTNeoX", {"hidden_size": 32, "intermediate_size": 64}),
    "gpt_neox_sequential": ("GPTNeoX", {"hidden_size": 32, "intermediate_size": 64, "use_parallel_residual": False}),
    "llama": ("Llama", _GATED),
    "mistral": ("Mistral", {**_GATED, "head_dim": 12, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2", _GATED),
    "qwen3": ("Qwen3", {**_GATED, "head_dim": 16}),
    "olmo": ("Olmo", {**_GATED, "clip_qkv": 1.0}),
    "olmo2": ("Olmo2", _GATED),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3_text": ("Gemma3", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "phi3": ("Phi3", _GATED),
}


def tiny(family: str, seed: int = 0, **config: Any) -> Model:
    """A random model of a family; ``config`` overrides fields of its Hugging Face config."""
    name, settings = CONFIGS[family]
    made = _config_class(name)(**{**_EACH, **settings, **config})
    hf = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(made)
    _randomise(hf, seed)
    return wrap(hf, f"tiny-{family}")


def sparse_model(family: str) -> tuple[Model, GateValues]:
    """A model with random gates, about half of which are open."""
    model = wrap(copy.deepcopy(tiny(family).hf), f"sparse-{family}")
    anatomy, generator = model.anatomy, torch.Generator().manual_seed(0)
    sizes = {"bias": (), "query": (anatomy.width,), "key": (anatomy.width,), "rest": (anatomy.head_dim,)}
    drawn = {
        name: torch.randn(model.n_layers, model.n_heads, *size, generator=generator) for name, size in sizes.items()
    }
    gates = GateValues("probability", drawn["bias"] + 2.0, 0.3 * drawn["query"], 0.3 * drawn["key"], drawn["rest"])
    make_sparse(model.hf, **vars(gates))
    return model, gates


def tiny_float64(family: str, **config: Any) -> Model:
    """`tiny` in float64. Some norms of Hugging Face still round to float32."""
    return wrap(tiny(family, **config).hf.double(), f"tiny-{family}")


def wrap(hf: nn.Module, name: str = "tiny") -> Model:
    """A Hugging Face model as gatelens holds it: in evaluation mode, with frozen weights."""
    hf = hf.eval().requires_grad_(False)
    return Model(name, hf, tokenizer(), describe(hf))


def prompts(seed: int = 0, rows: int = 3, length: int = LENGTH) -> Tensor:
    """Random tokens (prompt, position), none of them a special one."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@functools.cache
def tokenizer() -> Any:
    """Splits at spaces; the words are ``t3`` ... ``t99`` after three special tokens."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"t{index}": index for index in range(3, VOCAB)}
    rust = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def _config_class(name: str) -> Any:
    return getattr(transformers, f"{name}{'TextConfig' if name == 'Gemma3' else 'Config'}")


@torch.no_grad()
def _randomise(hf: nn.Module, seed: int) -> None:
    """Make weights so large that every head matters, and add noise to norm weights and biases."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in hf.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.25 * noise if parameter.ndim > 1 else parameter + 0.3 * noise)
