"""Decode with a KV cache, some tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def decode_in_steps(hf: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits of a batch (prompt, position, vocab): five tokens, then three, then one at a time, with a cache.

    Arguments:
        inputs: ``input_ids``, ``attention_mask`` and ``position_ids``.
    """
    length = inputs["input_ids"].shape[1]
    cache, logits = None, []
    for start, stop in [(0, 5), (5, 8), *((position, position + 1) for position in range(8, length))]:
        with torch.no_grad():
            out = hf(
                input_ids=inputs["input_ids"][:, start:stop],
                attention_mask=inputs["attention_mask"][:, :stop],
                position_ids=inputs["position_ids"][:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)
