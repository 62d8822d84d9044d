"""What a task is: prompt pairs with a metric (circuit tasks), or prompts with a target response (response tasks)."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.tasks._metrics import METRICS, Difference
from gatelens.tasks.tokens import Pair, PairTokens, Tokenizer, continuations, encode, tokenise

__all__ = ["Bucket", "CircuitTask", "Example", "Pair", "ResponseBatch", "ResponseTask"]


@dataclass(frozen=True, eq=False)
class Bucket:
    """The prompts of one token length, so that no padding is needed."""

    clean: Tensor  # (prompt, position) int64, on the CPU
    corrupt: Tensor  # (prompt, position), aligned with `clean` position by position
    which: Tensor  # (prompt,) index of each prompt in the task's `pairs`, to put results back in order

    def __len__(self) -> int:
        return len(self.which)


@dataclass(frozen=True, eq=False)
class CircuitTask:
    """Aligned clean and corrupt prompts, and a metric at the last position that tells right answers from wrong."""

    name: str
    seed: int
    pairs: list[Pair]
    buckets: list[Bucket]
    answer_ids: Tensor  # (prompt, answer) int64, -1 where a prompt has fewer answers
    wrong_ids: Tensor  # (prompt, wrong)
    difference: Difference = "logit"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pairs)

    def metric(self, logits: Tensor, bucket: Bucket) -> Tensor:
        """How clearly the answers win: logits (..., prompt, vocab) at the last position -> (..., prompt) float32.

        Differentiable; large is right, zero is undecided. A difference of logits or of probabilities, see `difference`.
        """
        answers, wrong = (ids[bucket.which].to(logits.device) for ids in (self.answer_ids, self.wrong_ids))
        return METRICS[self.difference](logits, answers, wrong)

    def correct(self, logits: Tensor, bucket: Bucket) -> Tensor:
        """Whether the answers win: same shapes as `metric`, bool."""
        return self.metric(logits, bucket) > 0

    def spec(self) -> dict[str, Any]:
        """Plain JSON (name, n, seed, options) from which `gatelens.tasks.from_spec` makes the same task again."""
        return _spec(self.name, len(self), self.seed, self.options)

    def fingerprint(self) -> str:
        """sha256 over all token ids of prompts and answers and the metric's name: equal means the same task."""
        buckets = [[bucket.which.tolist(), bucket.clean.tolist(), bucket.corrupt.tolist()] for bucket in self.buckets]
        return _sha256([buckets, self.answer_ids.tolist(), self.wrong_ids.tolist(), self.difference])


def circuit_task(
    tokenizer: Tokenizer,
    name: str,
    seed: int,
    pairs: Sequence[Pair],
    difference: Difference = "logit",
    **options: Any,
) -> CircuitTask:
    """The task of these pairs for this tokenizer; an error names the first pair that does not fit it."""
    rows, problems = tokenise(tokenizer, pairs)
    for i in sorted(problems):
        raise GatelensError(f"prompt {i} of {name} does not fit this tokenizer: {problems[i]}.")
    return from_tokens(name, seed, pairs, [row for row in rows if row is not None], difference, **options)


def from_tokens(
    name: str,
    seed: int,
    pairs: Sequence[Pair],
    rows: Sequence[PairTokens],
    difference: Difference = "logit",
    **options: Any,
) -> CircuitTask:
    """The task of pairs whose tokens are known already: `rows` belong to `pairs`, one by one."""
    lengths: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        lengths.setdefault(len(row.clean), []).append(i)
    buckets = [
        Bucket(
            torch.tensor([rows[i].clean for i in which]),
            torch.tensor([rows[i].corrupt for i in which]),
            torch.tensor(which),
        )
        for _, which in sorted(lengths.items())
    ]
    answer_ids, wrong_ids = (_fill_up([getattr(row, key) for row in rows]) for key in ("answers", "wrong"))
    return CircuitTask(name, seed, list(pairs), buckets, answer_ids, wrong_ids, difference, options)


@dataclass(frozen=True)
class Example:
    """One prompt with its target response; the response begins with its leading space if it has one.

    also: tokens that are as right as a response of one token. Its log-probability is then that of any of them.
    """

    prompt: str
    response: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    also: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, eq=False)
class ResponseBatch:
    """Some examples, padded to the longest of them."""

    tokens: Tensor  # (example, position) int64, on the CPU
    mask: Tensor  # (example, position) int64 attention mask: 0 at padding
    targets: Tensor  # (example, position) bool: the token AT this position is the response's (its logit is one before)
    which: Tensor  # (example,) index of each example in the task's `examples`
    also: Tensor  # (example, choice) tokens as right as the response's only one, -1 where there are fewer

    def parts(self, tokens: int) -> list["ResponseBatch"]:
        """The same examples with less padding: those of like lengths together, about so many tokens in each part."""
        order = self.mask.sum(1).argsort(stable=True)
        size = -(-tokens // self.tokens.shape[1])
        return [self._part(some) for some in order.split(max(1, size))]

    def _part(self, some: Tensor) -> "ResponseBatch":
        """Some of the examples, without the padding that all of these have."""
        real = self.mask[some].any(0).nonzero()
        cut = slice(int(real[0]), int(real[-1]) + 1)
        tokens, mask, targets = (x[some, cut] for x in (self.tokens, self.mask, self.targets))
        return ResponseBatch(tokens, mask, targets, self.which[some], self.also[some])


@dataclass(frozen=True, eq=False)
class ResponseTask:
    """Prompts with target responses; what counts is the log-probability of the response's tokens."""

    name: str
    seed: int
    examples: list[Example]
    pad_id: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.examples)

    def batches(self, size: int, side: Literal["right", "left"] = "right") -> Iterator[ResponseBatch]:
        """All examples, the shortest first so that little is padded, `size` at a time, padded at this side."""
        if size < 1 or side not in ("right", "left"):
            raise GatelensError(f"batches take a size from 1 and a side 'right' or 'left', not {size} and {side!r}.")
        order = sorted(range(len(self)), key=lambda i: len(self.examples[i]))
        for start in range(0, len(order), size):
            yield self.batch(order[start : start + size], side)

    def batch(self, which: Sequence[int], side: Literal["right", "left"] = "right") -> ResponseBatch:
        """The examples of these numbers, padded at this side."""
        longest = max(len(self.examples[i]) for i in which)
        tokens = torch.full((len(which), longest), self.pad_id)
        mask = torch.zeros(len(which), longest, dtype=torch.int64)
        targets = torch.zeros(len(which), longest, dtype=torch.bool)
        for row, i in enumerate(which):
            example = self.examples[i]
            start = 0 if side == "right" else longest - len(example)
            end = start + len(example)
            tokens[row, start:end] = torch.tensor(example.prompt_ids + example.response_ids)
            mask[row, start:end] = 1
            targets[row, start + len(example.prompt_ids) : end] = True
        also = _fill_up([list(self.examples[i].also) for i in which])
        return ResponseBatch(tokens, mask, targets, torch.tensor(which), also)

    def spec(self) -> dict[str, Any]:
        """Plain JSON (name, n, seed, options) from which `gatelens.tasks.from_spec` makes the same task again."""
        return _spec(self.name, len(self), self.seed, self.options)

    def fingerprint(self) -> str:
        """sha256 over the token ids of all prompts and responses: equal means the same task."""
        rows = ([x.prompt_ids, x.response_ids, *([x.also] if x.also else [])] for x in self.examples)
        return _sha256(list(rows))


def response_task(
    tokenizer: Tokenizer, name: str, seed: int, items: Sequence[tuple[str, str]], **options: Any
) -> ResponseTask:
    """The task of these (prompt, response) texts; an error names the first that does not fit the tokenizer."""
    rows, problems = examples(tokenizer, items)
    for i in sorted(problems):
        raise GatelensError(f"example {i} of {name} does not fit this tokenizer: {problems[i]}.")
    return ResponseTask(name, seed, [row for row in rows if row is not None], tokenizer.pad_token_id or 0, options)


def examples(tokenizer: Tokenizer, items: Sequence[tuple[str, str]]) -> tuple[list[Example | None], dict[int, str]]:
    """Each (prompt, response) with its tokens, and what is wrong with those that have none (index -> one sentence)."""
    prompts = [prompt for prompt, _ in items]
    prompt_ids = encode(tokenizer, prompts)
    response_ids = continuations(tokenizer, prompts, prompt_ids, [response for _, response in items])
    rows: list[Example | None] = []
    problems: dict[int, str] = {}
    for i, ((prompt, response), before, after) in enumerate(zip(items, prompt_ids, response_ids, strict=True)):
        if before and after:
            rows.append(Example(prompt, response, tuple(before), tuple(after)))
            continue
        rows.append(None)
        if after is None:
            problems[i] = f"{response[:40]!r} changes the tokens of the prompt {prompt[-40:]!r} it follows"
        else:
            problems[i] = "the prompt is empty" if not before else f"the response to {prompt[-40:]!r} is empty"
    return rows, problems


def _fill_up(rows: list[list[int]]) -> Tensor:
    """Rows of different lengths as one int64 tensor, -1 at the end of the shorter ones."""
    longest = max((len(row) for row in rows), default=0)
    return torch.tensor([row + [-1] * (longest - len(row)) for row in rows], dtype=torch.int64)


def _spec(name: str, n: int, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "n": n, "seed": seed, "options": dict(options)}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
