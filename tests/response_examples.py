"""A response task of random tokens, and the log-probability of its responses without gatelens."""

from __future__ import annotations

import random

import torch
from families import VOCAB
from torch import Tensor

from gatelens import Model
from gatelens.tasks.base import Example, ResponseTask


def any_task(n: int = 10, seed: int = 0) -> ResponseTask:
    """Random prompts and responses of different lengths."""
    draw = random.Random(seed)

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCAB) for _ in range(draw.randint(least, most)))

    return ResponseTask("any", seed, [Example(f"prompt {i}", "response", some(3, 8), some(1, 4)) for i in range(n)])


def plain_log_prob(model: Model, example: Example, gates: Tensor) -> Tensor:
    """Log-probabilities of the response's tokens: one example, no padding, all logits, hooks set by hand."""
    handles = [
        block.out.register_forward_pre_hook(
            lambda _, args, row=gates[layer]: ((args[0].unflatten(-1, (len(row), -1)) * row[:, None]).flatten(-2),)
        )
        for layer, block in enumerate(model.anatomy.blocks)
    ]
    try:
        log_probs = model.hf(torch.tensor([example.prompt_ids + example.response_ids])).logits[0].log_softmax(-1)
    finally:
        for handle in handles:
            handle.remove()
    before = len(example.prompt_ids) - 1
    return torch.stack([log_probs[before + i, token] for i, token in enumerate(example.response_ids)])
