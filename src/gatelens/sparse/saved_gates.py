"""What the config of a saved sparse model says about its gates, under the name "gatelens"."""

from __future__ import annotations

from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.sparse.gated_attention import Gate

NAME = "gatelens"
"""The name of the entry in the config, and of the attention implementation."""


def check_config(config: Any) -> None:
    """Raise an error if what a config says about gates has another form than `save_sparse` writes."""
    saved = getattr(config, NAME, None)
    if saved is None:
        if getattr(config, "_attn_implementation", None) == NAME:
            raise GatelensError(f'its config asks for gated attention, but it has no "{NAME}" with the gates.')
        return
    if not isinstance(saved, dict) or saved.get("gate", "score") not in get_args(Gate):
        raise GatelensError(f'"{NAME}" in its config is {_short(saved)}: it must be an object, such as {{"bias": 0}}.')
    if not isinstance(saved.get("dense"), str | None):
        raise GatelensError(f'"dense" of "{NAME}" in its config is {_short(saved["dense"])}: it must be a string.')
    if saved.get("gate", "score") == "score":
        saved_bias(config)


def saved_bias(config: Any) -> Float[Tensor, "layer head"]:
    """The biases of score gates that a config holds: one number for all heads, or a list of numbers for each layer."""
    saved = getattr(config, NAME, {}).get("bias")
    if saved is None:
        raise GatelensError("this model has no gate biases: set them with make_sparse, and save with save_sparse.")
    shape = (config.num_hidden_layers, config.num_attention_heads)
    try:
        bias = torch.tensor(saved, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        bias = torch.empty(0)
    if bias.shape not in ((), shape) or not bias.isfinite().all():
        raise GatelensError(
            f'"bias" of "{NAME}" in its config is {_short(saved)}: it must be a number, or a list of {shape[1]} '
            f"numbers for each of {shape[0]} layers."
        )
    return bias.expand(shape)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
