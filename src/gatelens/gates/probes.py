"""What kind of head a head is, by where it looks in random tokens that are repeated.

A block of random tokens is followed by the same block: ``a b c d a b c d``. From a token of the second block

- a *previous-token* head looks at the token before it (in both blocks),
- a *duplicate-token* head looks at the same token in the first block,
- an *induction* head looks at the token after that one (Olsson et al., arXiv 2209.11895).

A probe's value is the attention that goes there: 0 to 1, mean over positions and sequences.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelens.gates.attention_runs import attention_patterns
from gatelens.model import Model
from gatelens.tasks.tokens import encode, word_tokens

PREVIOUS, DUPLICATE, INDUCTION = "previous token", "duplicate token", "induction"
_SEQUENCES, _BLOCK, _LEAST = 4, 24, 4  # how many sequences; tokens of a block, at most and at least


def probe_heads(model: Model, seed: int = 0) -> dict[str, Float[Tensor, "layer head"]]:
    """The value of each probe for every head. Cost: 1 forward of 4 sequences of about 50 tokens.

    In a sparse model only open edges count. A model that cannot read two blocks of 4 tokens has no probes.
    """
    tokens, start, length = repeated_tokens(model, seed)
    if length < _LEAST:
        return {}
    weights, edges = attention_patterns(model, tokens)
    seen = weights.float() * edges  # (sequence, layer, head, query, key)
    second = torch.arange(start + length, start + 2 * length)
    either = torch.arange(start + 1, start + 2 * length)
    places = {
        PREVIOUS: (either, either - 1),
        DUPLICATE: (second, second - length),
        INDUCTION: (second[:-1], second[:-1] - length + 1),
    }
    return {name: seen[..., queries, keys].mean((0, -1)) for name, (queries, keys) in places.items()}


def repeated_tokens(model: Model, seed: int) -> tuple[Int[Tensor, "sequence position"], int, int]:
    """Blocks of different random tokens, each followed by itself.

    Returns:
        The sequences, the position at which the first block starts (after the model's first token), and its length.
    """
    n_embedded = int(model.hf.get_input_embeddings().weight.shape[0])
    pool, first = list(range(n_embedded)), []
    if model.tokenizer is not None:
        pool = [token for token in word_tokens(model.tokenizer, spaced=True) if token < n_embedded]
        first = encode(model.tokenizer, [""])[0]
    length = min(_BLOCK, len(pool), (model.context - len(first)) // 2)
    generator = torch.Generator().manual_seed(seed)
    blocks = [
        torch.tensor(pool)[torch.randperm(len(pool), generator=generator)[: max(0, length)]] for _ in range(_SEQUENCES)
    ]
    start = torch.tensor(first, dtype=torch.int64)
    return torch.stack([torch.cat([start, block, block]) for block in blocks]), len(first), length
