"""A model whose heads have known roles, by hand-set weights: two copy, one spoils what they copy, the rest are idle."""

import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gatelens.anatomy import Head, describe
from gatelens.model import Model
from gatelens.tasks.base import Example, ResponseTask

WORDS, SEPARATOR, LENGTH = 11, 11, 8
WIDTH, N_HEADS, DIM = 64, 4, 16
COPIES, SPOILS = (Head(0, 0), Head(0, 1)), Head(0, 2)


@torch.no_grad()
def copying_model() -> Model:
    """Reads ``x y SEPARATOR`` and answers ``x y``. Head 0 copies x, head 1 copies y, head 2 writes both away again."""
    config = GPT2Config(
        vocab_size=WORDS + 1,
        n_embd=WIDTH,
        n_head=N_HEADS,
        n_layer=2,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    hf = GPT2LMHeadModel(config).eval().requires_grad_(False)
    for name, weight in hf.named_parameters():
        weight.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
    # Tokens and positions are unit vectors in rooms of their own, so that the norm scales all of them alike.
    hf.transformer.wte.weight[:, : WORDS + 1] = torch.eye(WORDS + 1)
    hf.transformer.wpe.weight[:, WORDS + 1 : WORDS + 1 + LENGTH] = torch.eye(LENGTH)
    for head, looks, strength in ((0, [(2, 0)], 0.35), (1, [(3, 1)], 0.35), (2, [(2, 0), (3, 1)], -0.35)):
        _copy_head(hf.transformer.h[0].attn, head, looks, strength)
    return Model("copying", hf, None, describe(hf))


def _copy_head(attention: torch.nn.Module, head: int, looks: list[tuple[int, int]], strength: float) -> None:
    """At each query position look at one key position, and write that token, times the strength."""
    qkv, out = attention.c_attn.weight, attention.c_proj.weight
    start = head * DIM
    for channel, (query, key) in enumerate(looks):
        qkv[WORDS + 1 + query, start + channel] = 1.5
        qkv[WORDS + 1 + key, WIDTH + start + channel] = 1.5
    # Wherever it has nothing to copy it looks at the separator, which it does not write.
    attention.c_attn.bias[start + len(looks)] = 4.0
    qkv[WORDS + 1 + 2, WIDTH + start + len(looks)] = 1.5
    words = torch.arange(WORDS)
    qkv[words, 2 * WIDTH + start + words] = 1.0
    out[start + words, words] = strength


def copying_task(n: int = 24, seed: int = 0) -> ResponseTask:
    """Prompts ``x y SEPARATOR`` with the response ``x y``."""
    draw = random.Random(seed)
    pairs = [draw.sample(range(WORDS), 2) for _ in range(n)]
    return ResponseTask(
        "copying", seed, [Example(f"{x} {y} |", f" {x} {y}", (x, y, SEPARATOR), (x, y)) for x, y in pairs]
    )
