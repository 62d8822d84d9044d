"""Large models with random weights, as folders that `gatelens.load` opens. They are written one layer at a time.

The weights are files, so that a process maps them into memory instead of copying them, and a later process finds them
in the page cache.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

TOKENIZER = Path(__file__).parents[1] / "tests" / "trained_model"
DTYPE = torch.bfloat16
SCALE = 0.02  # standard deviation of weights that are matrices

_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "Gemma3Text",
        {
            "vocab_size": 4096,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
    ),
    "gemma-3-4b": (
        "Gemma3Text",
        {
            "vocab_size": 262_208,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
        },
    ),
    "olmo-7b": (
        "Olmo",
        {
            "vocab_size": 50_304,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "llama-3.1-8b": (
        "Llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rope_parameters": _LLAMA_ROPE,
        },
    ),
}
"""The family and the config of each shape; "tiny" shows that the benchmark works."""


def model_folder(shape: str, home: Path) -> Path:
    """The folder of a shape's random model. It is written if it is not there, or if it is incomplete.

    Peak memory: the weights of one layer, or the embedding.
    """
    folder = home / shape
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    family, fields = SHAPES[shape]
    config = getattr(transformers, f"{family}Config")(**fields, dtype="bfloat16")
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    centre = 0.0 if family.startswith("Gemma") else 1.0  # Gemma's norms add 1 to their weights
    parts: dict[str, dict[str, torch.Size]] = {}
    for name, weight in hf.state_dict().items():
        if name not in tied:
            layer = re.search(r"layers\.(\d+)\.", name)
            parts.setdefault(f"layer-{layer[1]}" if layer else name, {})[name] = weight.shape
    for number, (part, shapes) in enumerate(parts.items()):
        generator = torch.Generator().manual_seed(number)
        weights = {name: _random(size, generator, centre) for name, size in shapes.items()}
        save_file(weights, folder / f"{part}.safetensors", metadata={"format": "pt"})
    files = {name: f"{part}.safetensors" for part, shapes in parts.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    config.architectures = [type(hf).__name__]
    config.save_pretrained(folder)  # last: a folder with a config is complete
    return folder


def _random(size: torch.Size, generator: torch.Generator, centre: float) -> torch.Tensor:
    if len(size) == 1:  # a norm
        return torch.randn(size, generator=generator).mul_(SCALE).add_(centre).to(DTYPE)
    weight = torch.empty(size, dtype=DTYPE)
    for rows in weight.split(4096):  # so that only a part of the embedding is in float32
        rows.copy_(torch.randn(rows.shape, generator=generator).mul_(SCALE))
    return weight
