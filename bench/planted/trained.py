"""Circuits that models were trained to have (`interchange`). Each program is a few lines."""

from __future__ import annotations

from functools import partial

import torch
from torch import Generator, Tensor

from bench.planted.case import Case
from bench.planted.interchange import UNDEFINED, Node, Program, train

_END = 10  # the token that ends a prompt
_YES, _NO = 1, 0


def _digits(n: int, length: int, generator: Generator, below: int = 10) -> Tensor:
    return torch.randint(0, below, (n, length), generator=generator)


def _end(tokens: Tensor) -> Tensor:
    return torch.cat([tokens, torch.full((len(tokens), 1), _END)], 1)


def _pick(tokens: Tensor, places: Tensor) -> Tensor:
    """The token at one place of each prompt; undefined where the place is."""
    return tokens.gather(1, places.clamp(min=0)[:, None])[:, 0].where(places != UNDEFINED, UNDEFINED)


def _place_of(wanted: Tensor, tokens: Tensor) -> Tensor:
    """The place of the one token that is wanted; undefined if there is none, or more than one."""
    found = tokens == wanted[:, None]
    return found.long().argmax(1).where(found.sum(1) == 1, UNDEFINED)


def _distinct(n: int, length: int, generator: Generator) -> Tensor:
    return torch.rand(n, 10, generator=generator).argsort(1)[:, :length]


def _answer(edge: str) -> Node:
    """The logits read the answer."""
    return Node([edge], lambda value: value)


SUM = Program(
    "sum",
    "the sum of two digits below 5, modulo 5",
    _END + 1,
    lambda n, generator: _end(_digits(n, 2, generator, below=5)),
    [
        Node(["embed -> L0H1.v"], lambda tokens: tokens[:, 0]),
        Node(["embed -> L0H2.v"], lambda tokens: tokens[:, 1]),
        Node(["L0H1 -> M1", "L0H2 -> M1"], lambda first, second: (first + second) % 5),
        _answer("M1 -> logits"),
    ],
    steps=2500,
)
EQUAL = Program(
    "equal",
    "whether two tokens are equal",
    _END + 1,
    lambda n, generator: _end(_digits(n, 2, generator, below=4)),
    [
        Node(["embed -> L0H0.v"], lambda tokens: tokens[:, 0]),
        Node(["embed -> L0H3.v"], lambda tokens: tokens[:, 1]),
        Node(["L0H0 -> M0", "L0H3 -> M0"], lambda first, second: torch.where(first == second, _YES, _NO)),
        _answer("M0 -> logits"),
    ],
    steps=2500,
)
TABLE = torch.tensor([3, 7, 0, 9, 1, 8, 2, 6, 5, 4, 10])
LOOKED_UP = Program(
    "looked up",
    "the first token, by a table",
    _END + 1,
    lambda n, generator: _end(_digits(n, 2, generator)),
    [
        Node(["embed -> M0"], lambda tokens: TABLE[tokens]),
        Node(["M0 -> L1H3.v"], lambda values: values[:, 0]),
        _answer("L1H3 -> logits"),
    ],
)
SELECTOR = Program(
    "selector",
    "the second or third token; the first one says which",
    _END + 1,
    lambda n, generator: _end(torch.cat([_digits(n, 1, generator, below=2), _digits(n, 2, generator)], 1)),
    [
        Node(["embed -> L0H0.v"], lambda tokens: tokens[:, 0]),
        Node(["L0H0 -> L1H2.q", "embed -> L1H2.v"], lambda which, tokens: _pick(tokens, 1 + which)),
        _answer("L1H2 -> logits"),
    ],
)


def _repeating(n: int, generator: Generator, length: int, first: int) -> Tensor:
    """Distinct tokens, and after them a repetition of one of the first of them."""
    tokens = _distinct(n, length, generator)
    return torch.cat([tokens, tokens.gather(1, _digits(n, 1, generator, below=first))], 1)


OTHER_NAME = Program(
    "other name",
    "of two names, the one that is not repeated",
    _END + 1,
    partial(_repeating, length=2, first=2),
    [
        Node(["embed -> L0H3.q", "embed -> L0H3.k"], lambda q, k: _place_of(q[:, -1], k[:, :2])),
        Node(
            ["L0H3 -> L1H1.q", "embed -> L1H1.v"],
            lambda place, tokens: _pick(tokens, (1 - place).where(place != UNDEFINED, UNDEFINED)),
        ),
        _answer("L1H1 -> logits"),
    ],
)


TWO_HOPS = Program(
    "two hops",
    "the token two positions before the last",
    _END + 1,
    lambda n, generator: _end(_digits(n, 2, generator)),
    [
        Node(["embed -> L0H2.v"], lambda tokens: tokens.roll(1, 1)),
        Node(["L0H2 -> L1H0.v"], lambda moved: moved[:, 1]),
        _answer("L1H0 -> logits"),
    ],
)


INDUCTION = Program(
    "induction",
    "a b ... a is followed by b",
    _END + 1,
    partial(_repeating, length=4, first=3),
    [
        Node(["embed -> L0H1.v"], lambda tokens: tokens.roll(1, 1)),
        Node(
            ["embed -> L1H2.q", "L0H1 -> L1H2.k", "embed -> L1H2.v"],
            lambda q, k, v: _pick(v[:, 1:4], _place_of(q[:, -1], k[:, 1:4])),
        ),
        _answer("L1H2 -> logits"),
    ],
)

PROGRAMS = [SUM, EQUAL, LOOKED_UP, SELECTOR, OTHER_NAME, TWO_HOPS, INDUCTION]
TRAINED = [Case(program.name, "trained", partial(train, program), program.says) for program in PROGRAMS]
