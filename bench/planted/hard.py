"""Circuits that some methods cannot find, and why. The weights are set by hand, as in `by_hand`.

Each model has one property that is known from real models and that misleads some of the methods. In all of them the
heads outside the circuit are as active as those of the circuit: they copy tokens of the prompt to a part of the stream
that nothing reads (`_distract`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from families import wrap
from torch import Tensor
from toys import TOKENS, hand_set, set_head, stream_parts

from bench.planted.by_hand import LOOK, PROMPTS, different_tokens, only, set_neuron
from bench.planted.case import Case, Planted, from_pairs

PARTS = 6  # of the stream; also the heads of a layer
LENGTH = 6  # tokens of a prompt


@torch.no_grad()
def distractors() -> Planted:
    """One head copies the first token to the logits. Eleven others copy it, or other tokens, to where nothing reads."""
    hf = _without_circuit(2)
    token, copied, *_, position = stream_parts(PARTS)
    hf.lm_head.weight.copy_(10 * copied)
    set_head(hf, (0, 1), LOOK, query=position.T, key=only(0, position), value=token.T, out=copied)
    _distract(hf, {(0, 1)})
    clean, corrupt = different_tokens(LENGTH)
    task = from_pairs(clean, corrupt, clean[:, 0], corrupt[:, 0])
    return Planted(wrap(hf, "distractors"), task, ["embed -> L0H1.v", "L0H1 -> logits"])


@torch.no_grad()
def misleading() -> Planted:
    """The answer is 1 if the first token is 1, by saturated neurons; others rise and fall again between the prompts.

    What the other neurons add is 0 on both prompts, but has a slope on the clean one.
    """
    hf = _without_circuit(2)
    token, copied, answer, *_, position = stream_parts(PARTS)
    hf.lm_head.weight.copy_(10 * answer)
    for head in range(PARTS):
        bit = torch.zeros_like(copied)
        bit[0], bit[1] = copied[0], copied[1 + head]  # a head copies its bit to a place of its own
        set_head(hf, (0, head), LOOK, query=position.T, key=only(head, position), value=token.T, out=bit)
    _distract(hf, {(0, head) for head in range(PARTS)})
    step, bump = ((0.25, 2.0), (0.75, -2.0)), ((0.2, 2.5), (0.6, -5.0))
    bends = [(head, *bend) for head in range(PARTS) for bend in (bump if head else step)]
    for number, (head, above, adds) in enumerate(bends):
        set_neuron(hf, 1, number, reads=copied[1 + head], above=above, writes=adds * answer[1], copies=2 * PARTS)
    return Planted(wrap(hf, "misleading"), _bits(LENGTH), ["embed -> L0H0.v", "L0H0 -> M1", "M1 -> logits"])


@torch.no_grad()
def jump() -> Planted:
    """The answer is 1 if the first token is 1, by neurons that jump between 0.58 and 0.62, and are constant elsewhere.

    EAP-IG with 5 steps takes gradients at 0.5 and 0.7.
    """
    hf = _without_circuit(2)
    token, copied, answer, *_, position = stream_parts(PARTS)
    hf.lm_head.weight.copy_(10 * answer)
    set_head(hf, (0, 0), LOOK, query=position.T, key=only(0, position), value=token.T, out=copied)
    _distract(hf, {(0, 0)})
    _step(hf, 1, copied[1], answer[1], 0.58, 0.62, copies=2 * PARTS, sharpness=1000.0)
    return Planted(wrap(hf, "jump"), _bits(1), ["embed -> L0H0.v", "L0H0 -> M1", "M1 -> logits"])


@torch.no_grad()
def spread() -> Planted:
    """The answer is 1 if the first token is 1. Six heads of two layers say so, and any three of them are enough."""
    hf = _without_circuit(3)
    token, copied, answer, *_, position = stream_parts(PARTS)
    hf.lm_head.weight.copy_(10 * answer)
    heads = [(layer, head) for layer in range(2) for head in range(layer, 6, 2)]
    for head in heads:
        set_head(hf, head, LOOK, query=position.T, key=only(0, position), value=token.T, out=copied)
    _distract(hf, set(heads))
    _step(hf, 2, copied[1], answer[1], 1.25, 2.25, copies=3 * PARTS)
    names = [f"L{layer}H{head}" for layer, head in heads]
    edges = [edge for name in names for edge in (f"embed -> {name}.v", f"{name} -> M2")]
    return Planted(wrap(hf, "spread"), _bits(1), [*edges, "M2 -> logits"])


@torch.no_grad()
def backup() -> Planted:
    """One head copies the first token. A backup copies it, too, if the first head copied a blank (token 0).

    In corrupt prompts the first token is blank, and the second one is in all prompts: where the backup looks otherwise.
    """
    hf = _without_circuit(2)
    token, copied, *_, position = stream_parts(PARTS)
    hf.lm_head.weight.copy_(10 * copied)
    set_head(hf, (0, 1), LOOK, query=position.T, key=only(0, position), value=token.T, out=copied)
    query, key = torch.zeros(2, TOKENS * PARTS, TOKENS)
    query[:, 0], query[:, 1] = copied[0], 0.5 * position[LENGTH - 1]
    key[:, 0], key[:, 1] = position[0], position[1]
    out = copied - copied[0]  # takes the blank away; and a blank adds nothing
    set_head(hf, (1, 3), 2 * LOOK, query=query, key=key, value=token.T, out=out)
    _distract(hf, {(0, 1), (1, 3)})
    clean = 1 + torch.stack([tokens - (tokens == TOKENS - 1).long() for tokens in different_tokens(LENGTH)[0]])
    clean[:, 1] = 0
    corrupt = clean.clone()
    corrupt[:, 0] = 0
    edges = ["embed -> L0H1.v", "L0H1 -> logits", "L0H1 -> L1H3.q", "embed -> L1H3.v", "L1H3 -> logits"]
    return Planted(wrap(hf, "backup"), from_pairs(clean, corrupt, clean[:, 0], corrupt[:, 0]), edges)


@torch.no_grad()
def cancelling() -> Planted:
    """Two heads copy the first token to the logits, and a third one takes away all that the second one added."""
    hf = _without_circuit(3)
    token, copied, moved, *_, position = stream_parts(PARTS)
    hf.lm_head.weight.copy_(10 * copied)
    first = {"query": position.T, "key": only(0, position), "value": token.T}
    set_head(hf, (0, 2), LOOK, **first, out=copied)
    set_head(hf, (0, 4), LOOK, **first, out=copied + moved)
    set_head(hf, (2, 1), LOOK, query=position.T, key=position.T, value=moved.T, out=-copied)
    _distract(hf, {(0, 2), (0, 4), (2, 1)})
    clean, corrupt = different_tokens(LENGTH)
    edges = [
        "embed -> L0H2.v",
        "L0H2 -> logits",
        "embed -> L0H4.v",
        "L0H4 -> logits",
        "L0H4 -> L2H1.v",
        "L2H1 -> logits",
    ]
    return Planted(wrap(hf, "cancelling"), from_pairs(clean, corrupt, clean[:, 0], corrupt[:, 0]), edges)


@torch.no_grad()
def pointers() -> Planted:
    """The last token is the position to look at, the token there is the next position, and the one there the third."""
    hf = _without_circuit(4)
    token, first, second, copied, _, position = stream_parts(PARTS)
    hf.lm_head.weight.copy_(10 * copied)
    for head, pointer, out in (((0, 1), token, first), ((1, 2), first, second), ((3, 0), second, copied)):
        set_head(hf, head, LOOK, query=pointer.T, key=position.T, value=token.T, out=out)
    _distract(hf, {(0, 1), (1, 2), (3, 0)})
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([torch.randperm(LENGTH, generator=generator) for _ in range(40 * PROMPTS)])
    answers = drawn[:, -1:]
    for _ in range(3):
        answers = drawn.gather(1, answers)
    pairs = drawn.view(-1, 2, LENGTH), answers.view(-1, 2)
    chosen = (pairs[1][:, 0] != pairs[1][:, 1]).nonzero()[:PROMPTS, 0]
    (clean, corrupt), (right, wrong) = pairs[0][chosen].unbind(1), pairs[1][chosen].unbind(1)
    edges = [
        "embed -> L0H1.q", "embed -> L0H1.v", "L0H1 -> L1H2.q", "embed -> L1H2.v", "L1H2 -> L3H0.q", "embed -> L3H0.v",
        "L3H0 -> logits",
    ]  # fmt: skip
    return Planted(wrap(hf, "pointers"), from_pairs(clean, corrupt, right, wrong), edges)


def _without_circuit(n_layers: int) -> Any:
    """The model before a circuit is set. Its values have biases that add the mean of the stream, which norms subtract.

    So a head that copies a token writes exactly one unit.
    """
    hf = hand_set(n_layers, PARTS)
    width = hf.config.n_embd
    for layer, block in enumerate(hf.transformer.h):
        block.attn.c_attn.bias[-width:] = (2 + layer * PARTS) / width  # a token, a position, and the heads below
    return hf


def _distract(hf: Any, circuit: Collection[tuple[int, int]]) -> None:
    """Let all heads outside the circuit copy the token of some position to the last part but one of the stream."""
    token, *_, unread, position = stream_parts(PARTS)
    generator = torch.Generator().manual_seed(0)
    for layer in range(len(hf.transformer.h)):
        for head in range(PARTS):
            place = int(torch.randint(LENGTH, (), generator=generator))
            if (layer, head) not in circuit:
                set_head(
                    hf, (layer, head), LOOK, query=position.T, key=only(place, position), value=token.T, out=unread
                )


def _step(
    hf: Any, layer: int, reads: Tensor, writes: Tensor, low: float, high: float, *, copies: int, sharpness: float = 40.0
) -> None:
    """Two neurons that together write nothing below `low`, the whole vector above `high`, and a part of it between."""
    for number, (above, sign) in enumerate(((low, 1), (high, -1))):
        adds = sign / (high - low) * writes
        set_neuron(hf, layer, number, reads=reads, above=above, writes=adds, copies=copies, sharpness=sharpness)


def _bits(n: int) -> Any:
    """Random bits, of which the first n are 1 in clean and 0 in corrupt prompts; the answer is 1 or 0."""
    clean = torch.randint(2, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(0))
    corrupt = clean.clone()
    clean[:, :n], corrupt[:, :n] = 1, 0
    ones = torch.ones(PROMPTS, dtype=torch.int64)
    return from_pairs(clean, corrupt, ones, 0 * ones)


HARD = [
    Case("distractors", "hard", distractors, "the first token; other heads copy it to where nothing reads"),
    Case("misleading", "hard", misleading, "1 if the first token is 1; neurons that do nothing have a slope"),
    Case("jump", "hard", jump, "1 if the first token is 1, by a jump between two points of a path"),
    Case("spread", "hard", spread, "1 if the first token is 1; any three of six heads are enough"),
    Case("backup", "hard", backup, "the first token; a second head copies it if the first one did not"),
    Case("cancelling", "hard", cancelling, "the first token; a head adds it again, and another takes that away"),
    Case("pointers", "hard", pointers, "the token that a pointer to a pointer to a pointer leads to"),
]
