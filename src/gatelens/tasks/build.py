"""Build tasks from text: prompts and answers are tokenised, and checked to fit the tokenizer."""

from collections.abc import Sequence
from typing import Any

import torch

from gatelens.errors import GatelensError
from gatelens.tasks._metrics import Difference
from gatelens.tasks.base import Bucket, CircuitTask, Example, ResponseTask, pad_ids
from gatelens.tasks.token_roles import token_roles
from gatelens.tasks.tokens import Pair, PairTokens, Tokenizer, continuations, encode, tokenise


def circuit_task(
    tokenizer: Tokenizer,
    name: str,
    seed: int,
    pairs: Sequence[Pair],
    difference: Difference = "logit",
    **options: Any,
) -> CircuitTask:
    """Tokenise prompt pairs into a task. An error names the first pair that does not fit the tokenizer.

    Arguments:
        name, seed, options: what `spec` records, so that the task can be built again.
        difference: the metric, a difference of logits or of probabilities.
    """
    tokens, problems = tokenise(tokenizer, pairs)
    for i in sorted(problems):
        raise GatelensError(f"prompt {i} of the task {name} does not fit this tokenizer: {problems[i]}.")
    return from_tokens(name, seed, pairs, [pair for pair in tokens if pair is not None], difference, **options)


def from_tokens(
    name: str,
    seed: int,
    pairs: Sequence[Pair],
    tokens: Sequence[PairTokens],
    difference: Difference = "logit",
    **options: Any,
) -> CircuitTask:
    """Build a task from pairs that are tokenised already: `tokens[i]` belongs to `pairs[i]`."""
    lengths: dict[int, list[int]] = {}
    for i, pair in enumerate(tokens):
        lengths.setdefault(len(pair.clean), []).append(i)
    buckets = [
        Bucket(
            torch.tensor([tokens[i].clean for i in which]),
            torch.tensor([tokens[i].corrupt for i in which]),
            torch.tensor(which),
        )
        for _, which in sorted(lengths.items())
    ]
    answer_ids, wrong_ids = (pad_ids([getattr(pair, key) for pair in tokens]) for key in ("answers", "wrong"))
    roles = token_roles([pair.roles or [""] * len(pair) for pair in tokens])
    return CircuitTask(name, seed, list(pairs), buckets, answer_ids, wrong_ids, difference, options, roles)


def response_task(
    tokenizer: Tokenizer, name: str, seed: int, items: Sequence[tuple[str, str]], **options: Any
) -> ResponseTask:
    """Tokenise (prompt, response) texts into a task. An error names the first that does not fit the tokenizer."""
    tokenised, problems = examples(tokenizer, items)
    for i in sorted(problems):
        raise GatelensError(f"example {i} of the task {name} does not fit this tokenizer: {problems[i]}.")
    fitting = [example for example in tokenised if example is not None]
    return ResponseTask(name, seed, fitting, tokenizer.pad_token_id or 0, options)


def examples(tokenizer: Tokenizer, items: Sequence[tuple[str, str]]) -> tuple[list[Example | None], dict[int, str]]:
    """Tokenise and check (prompt, response) texts.

    Returns:
        The example of each item, or None if the item does not fit the tokenizer; and for each such item, index -> what
        is wrong with it.
    """
    prompts = [prompt for prompt, _ in items]
    prompt_ids = encode(tokenizer, prompts)
    response_ids = continuations(tokenizer, prompts, prompt_ids, [response for _, response in items])
    tokenised: list[Example | None] = []
    problems: dict[int, str] = {}
    for i, ((prompt, response), before, after) in enumerate(zip(items, prompt_ids, response_ids, strict=True)):
        if before and after:
            tokenised.append(Example(prompt, response, tuple(before), tuple(after)))
            continue
        tokenised.append(None)
        if after is None:
            problems[i] = f"the response {response[:40]!r} changes the tokens of the prompt {prompt[-40:]!r}"
        else:
            problems[i] = "the prompt is empty" if not before else f"the response to {prompt[-40:]!r} is empty"
    return tokenised, problems
