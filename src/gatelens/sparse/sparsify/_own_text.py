"""Text that a model writes itself: it covers what the model knows, so that KL divergence on it preserves just that."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from gatelens.model import Model
from gatelens.model.first_token import begin, first_tokens
from gatelens.runtime.journal import Journal

PIECE = 32  # sequences that are written together
LONGEST_OPENING = 8  # tokens of text
MARK = "\x00"


def write_text(
    model: Model, text: Int[Tensor, "*any"], count: int, length: int, seed: int, journal: Journal
) -> Int[Tensor, "count length"]:
    """Sample sequences from the model at temperature 1.

    Openings are, in turn, one token of the vocabulary, one to eight tokens from anywhere in the text and, for a model
    with a chat template, the beginning of a chat up to the first words of the user. Every sequence begins with the
    first token of the model, if it has one. Cost: about as many forward passes of one token as there are tokens. The
    journal keeps each piece of 32 sequences.

    Arguments:
        text: where openings are taken from.
    """
    pieces = -(-count // PIECE)
    journal.begin("write own text", pieces)
    chat = _chat_opening(model.tokenizer)
    written = []
    for number in range(pieces):
        generator = torch.Generator().manual_seed(seed * 100_003 + number)
        opening = _openings(model, text, chat, number, generator)
        # The seed depends on the number of the piece, because all chats have the same opening.
        compute = partial(_continue, model, opening, length, seed * 100_003 + number)
        written.append(journal.piece(f"text-{number}", compute))
    return torch.cat(written)[:count]


def _openings(model: Model, text: Tensor, chat: list[int], number: int, generator: torch.Generator) -> Tensor:
    """(PIECE, token): all of the same kind, so that none is padded."""
    first = torch.tensor(first_tokens(model.tokenizer), dtype=torch.long)
    kinds = 3 if chat else 2
    kind = number % kinds
    if kind == 0:
        special = set(model.tokenizer.all_special_ids)
        # Some models have more embeddings than their tokenizer has tokens.
        known = min(model.hf.config.vocab_size, len(model.tokenizer))
        ordinary = torch.tensor([i for i in range(known) if i not in special])
        chosen = ordinary[torch.randint(len(ordinary), (PIECE, 1), generator=generator)]
    elif kind == 1:
        tokens = text[~torch.isin(text, first)]
        width = min(len(tokens), 1 + number // kinds % LONGEST_OPENING)
        starts = torch.randint(len(tokens) - width + 1, (PIECE, 1), generator=generator)
        chosen = tokens[starts + torch.arange(width)]
    else:
        return torch.tensor(begin(chat, first.tolist())).expand(PIECE, -1)
    return torch.cat([first.expand(PIECE, -1), chosen], 1)


def _chat_opening(tokenizer: Any) -> list[int]:
    """The tokens before the first words of a user, or none for a model without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    chat = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    tokens: list[int] = tokenizer(chat.split(MARK)[0], add_special_tokens=False)["input_ids"]
    return tokens


@torch.no_grad()
def _continue(model: Model, opening: Tensor, length: int, seed: int) -> Tensor:
    """Continue the openings to `length` tokens by sampling; an end-of-text token does not end a sequence."""
    opening = opening[:, : length - 1].to(model.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        written = model.hf.generate(
            opening,
            attention_mask=torch.ones_like(opening),
            max_new_tokens=length - opening.shape[1],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
    return written.cpu()
