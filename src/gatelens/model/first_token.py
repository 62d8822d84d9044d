"""The token at the beginning of every text: which one a model gets, and how token ids get it.

Some models were trained with a special token at the beginning of every text, and are much worse without it. The
tokenizer of a loaded model adds this token by itself: `adding_first_token` makes it so at load, from what a .gguf file
or the tokenizer's config says. Tasks, running text and generation ask `first_tokens`.
"""

from __future__ import annotations

from typing import Any


def first_tokens(tokenizer: Any) -> list[int]:
    """The ids of the special tokens that a tokenizer puts before a text by itself: one, or none, for most tokenizers.

    Example:
        >>> first_tokens(gatelens.load("google/gemma-3-270m").tokenizer)
        [2]
    """
    whole: list[int] = tokenizer("a")["input_ids"]
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    starts = [n for n in range(len(whole)) if bare and whole[n : n + len(bare)] == bare]
    return whole[: starts[0]] if starts else [token for token in whole if token == tokenizer.bos_token_id]


def begin(ids: list[int], first: list[int]) -> list[int]:
    """The token ids of a text, preceded by the first tokens unless the text begins with them already.

    Arguments:
        ids: the text, tokenised without special tokens.
        first: what `first_tokens` returns.
    """
    return ids if ids[: len(first)] == first else first + ids


def adding_first_token(tokenizer: Any, asked: bool | None) -> Any:
    """The tokenizer, which now adds its beginning-of-text token if it is asked to and adds no token by itself.

    Arguments:
        tokenizer: is changed in place.
        asked: what the file of the model says; None if it says nothing.
    """
    if asked and tokenizer.bos_token_id is not None and not first_tokens(tokenizer):
        tokenizer.add_bos_token = True
    return tokenizer
