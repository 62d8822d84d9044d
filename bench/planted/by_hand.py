"""Circuits whose weights are set by hand: heads that look up positions or tokens, and single neurons.

All other heads, neurons and MLPs do something small at random (`toys.hand_set`).
"""

from __future__ import annotations

from typing import Any

import torch
from families import wrap
from torch import Tensor
from toys import PLANTED, TOKENS, hand_set, planted, planted_task, set_head, stream_parts

from bench.planted.case import Case, Planted, from_pairs

PROMPTS = 24
LOOK, MATCH = 80.0, 40.0  # how sharply heads look up a position or a token


def induction() -> Planted:
    """``a b c ... a`` is followed by ``b``."""
    return Planted(planted(), planted_task(PROMPTS), PLANTED)


@torch.no_grad()
def two_hops() -> Planted:
    """The answer is the token two positions before the last: one head moves it by one position, the next again."""
    hf = hand_set(2, 4)
    token, moved, copied, position = stream_parts(4)
    hf.lm_head.weight.copy_(10 * copied)
    before = position.T @ torch.diag(torch.ones(TOKENS - 1), 1)  # the key that matches the query one position later
    set_head(hf, (0, 1), LOOK, query=position.T, key=before, value=token.T, out=moved)
    set_head(hf, (1, 2), LOOK, query=position.T, key=before, value=moved.T, out=copied)
    clean, corrupt = different_tokens(4)
    task = from_pairs(clean, corrupt, clean[:, 1], corrupt[:, 1])
    return Planted(wrap(hf, "two-hops"), task, ["embed -> L0H1.v", "L0H1 -> L1H2.v", "L1H2 -> logits"])


@torch.no_grad()
def other_name() -> Planted:
    """``a b a`` is followed by ``b``, and ``a b b`` by ``a``: one head finds the position, one reads the other one."""
    hf = hand_set(2, 4)
    token, found, copied, position = stream_parts(4)
    hf.lm_head.weight.copy_(10 * copied)
    set_head(hf, (0, 0), MATCH, query=token.T, key=token.T, value=position.T, out=found)
    set_head(hf, (1, 3), -LOOK, query=found.T, key=position.T, value=token.T, out=copied)
    names = torch.stack([tokens[:, :2] for tokens in different_tokens(2)])
    repeated = torch.arange(PROMPTS) % 2  # the position of the name that clean prompts repeat
    places = torch.stack([repeated, 1 - repeated])[..., None]
    clean, corrupt = torch.cat([names, names.gather(2, places)], 2)
    answers, wrong = names.gather(2, 1 - places)[..., 0]
    edges = ["embed -> L0H0.q", "embed -> L0H0.k", "L0H0 -> L1H3.q", "embed -> L1H3.v", "L1H3 -> logits"]
    return Planted(wrap(hf, "other-name"), from_pairs(clean, corrupt, answers, wrong), edges)


@torch.no_grad()
def opposed() -> Planted:
    """Two heads copy the first token to the logits; the second one subtracts half of what the first one adds."""
    hf = hand_set(2, 4)
    token, copied, _, position = stream_parts(4)
    hf.lm_head.weight.copy_(10 * copied)
    for head, strength in (((0, 1), 1.0), ((1, 0), -0.5)):
        set_head(hf, head, LOOK, query=position.T, key=only(0, position), value=token.T, out=strength * copied)
    clean, corrupt = different_tokens(4)
    edges = ["embed -> L0H1.v", "L0H1 -> logits", "embed -> L1H0.v", "L1H0 -> logits"]
    return Planted(wrap(hf, "opposed"), from_pairs(clean, corrupt, clean[:, 0], corrupt[:, 0]), edges)


def both() -> Planted:
    """The answer is 1 if the first two tokens are 1: a neuron adds what two heads copy."""
    return _of_bits("both", 2, ((1.5, 2.0),))


def either() -> Planted:
    """The answer is 1 if one of the first two tokens is 1. Both are, so that each of them is enough alone."""
    return _of_bits("either", 2, ((0.5, 2.0), (1.0, -2.0)))


def saturated() -> Planted:
    """The answer is 1 if the first token is 1. The two neurons that say so do not change near 0 and near 1."""
    return _of_bits("saturated", 1, ((0.25, 2.0), (0.75, -2.0)))


@torch.no_grad()
def _of_bits(name: str, n_heads: int, neurons: tuple[tuple[float, float], ...]) -> Planted:
    """Heads of layer 0 copy the first bits, and neurons of the MLP of layer 1 read how many of them are 1.

    Arguments:
        neurons: for each neuron, above which number it is active, and what a unit of it adds to the answer.
    """
    hf = hand_set(2, 4)
    token, copied, answer, position = stream_parts(4)
    hf.lm_head.weight.copy_(10 * answer)
    for head in range(n_heads):
        set_head(hf, (0, head), LOOK, query=position.T, key=only(head, position), value=token.T, out=copied)
    for number, (above, adds) in enumerate(neurons):
        set_neuron(hf, 1, number, reads=copied[1], above=above, writes=adds * answer[1], copies=n_heads)
    clean = torch.randint(2, TOKENS, (PROMPTS, 4), generator=torch.Generator().manual_seed(0))
    corrupt = clean.clone()
    clean[:, :n_heads], corrupt[:, :n_heads] = 1, 0
    ends = [(f"embed -> L0H{head}.v", f"L0H{head} -> M1") for head in range(n_heads)]
    edges = [*(edge for pair in ends for edge in pair), "M1 -> logits"]
    ones = torch.ones(PROMPTS, dtype=torch.int64)
    return Planted(wrap(hf, name), from_pairs(clean, corrupt, ones, 0 * ones), edges)


@torch.no_grad()
def set_neuron(
    hf: Any,
    layer: int,
    number: int,
    *,
    reads: Tensor,
    above: float,
    writes: Tensor,
    copies: int,
    sharpness: float = 40.0,
) -> None:
    """Set one neuron: how far what it reads is above a number, times a vector; 0 below.

    Arguments:
        reads, writes: vectors (width,).
        copies: how many heads have written one unit to the stream.
        sharpness: a larger one makes the bend shorter.
    """
    mlp = hf.transformer.h[layer].mlp
    mean = (2 + copies) / hf.config.n_embd  # of a stream that holds a token, a position and copies; norms subtract it
    mlp.c_fc.weight[:, number] = sharpness * reads
    mlp.c_fc.bias[number] = sharpness * (float(reads.sum()) * mean - above)
    mlp.c_proj.weight[number] = writes / sharpness


def only(place: int, position: Tensor) -> Tensor:
    """The key that is matched by the query of every position, at one position only: (width, dim)."""
    key = torch.zeros(TOKENS, TOKENS)
    key[place] = 1.0
    return position.T @ key


def different_tokens(length: int) -> tuple[Tensor, Tensor]:
    """Clean and corrupt prompts (prompt, position), all of whose tokens differ."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([torch.randperm(TOKENS, generator=generator) for _ in range(PROMPTS)])
    return drawn[:, :length], drawn[:, length : 2 * length]


BY_HAND = [
    Case("induction", "by hand", induction, "a b ... a is followed by b"),
    Case("two hops", "by hand", two_hops, "the token two positions before the last"),
    Case("other name", "by hand", other_name, "of two names, the one that is not repeated"),
    Case("opposed", "by hand", opposed, "the first token; a second head subtracts half of it again"),
    Case("both", "by hand", both, "1 if the first two tokens are 1"),
    Case("either", "by hand", either, "1 if one of the first two tokens is 1; both are"),
    Case("saturated", "by hand", saturated, "1 if the first token is 1, by neurons that are saturated"),
]
