"""The two kinds of task: prompt pairs with a metric (circuit tasks), and prompts with responses (response tasks)."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.shown import Shown
from gatelens.tasks._metrics import METRICS, Difference, Target, mean_difference
from gatelens.tasks.token_roles import TokenRoles
from gatelens.tasks.tokens import Pair


@dataclass(frozen=True, eq=False)
class Bucket:
    """Prompts that have the same number of tokens, so that no padding is needed."""

    clean: Tensor  # (prompt, position) int64, on the CPU
    corrupt: Tensor  # (prompt, position), aligned with `clean` position by position
    which: Tensor  # (prompt,) index of each prompt in the task's `pairs`, to put results back in order

    def __len__(self) -> int:
        return len(self.which)

    def parts(self, size: int) -> "list[Bucket]":
        """The prompts in order, in parts of at most this size."""
        tensors = (self.clean, self.corrupt, self.which)
        return [Bucket(*part) for part in zip(*(tensor.split(size) for tensor in tensors), strict=True)]


@dataclass(frozen=True, eq=False, repr=False)
class CircuitTask(Shown):
    """Aligned clean and corrupt prompts, and a metric that compares right and wrong answers at the last position.

    Example:
        task = gatelens.task("ioi", model, n=16, seed=0)
        task.pairs[0].clean, task.pairs[0].answers, task.role_names
    """

    name: str  # the name of the task
    seed: int  # the task seed, which decides the prompts
    pairs: list[Pair]  # each prompt as text: clean, corrupt, right and wrong answers
    buckets: list[Bucket]  # the tokens of prompts of the same length
    answer_ids: Tensor  # (prompt, answer) int64, -1 where a prompt has fewer right answers
    wrong_ids: Tensor  # (prompt, wrong answer) int64, -1 where a prompt has fewer wrong answers
    difference: Difference = "logit"  # of what the metric is a difference: logits or probabilities
    options: Mapping[str, Any] = field(default_factory=dict)  # the options of the task that were given
    token_roles: TokenRoles = field(default_factory=TokenRoles)  # what each position is for the task
    target: Target = "metric"  # what methods that use gradients differentiate

    drawn_by = "gatelens.report.task_plot:plot_task"

    def records(self) -> list[dict[str, Any]]:
        """One record for each prompt."""
        return [
            {
                "clean": pair.clean,
                "corrupt": pair.corrupt,
                "right": ", ".join(map(repr, pair.answers)),
                "wrong": ", ".join(map(repr, pair.wrong)),
            }
            for pair in self.pairs
        ]

    def headline(self) -> str:
        return f"{self.name}: {len(self)} prompts, seed {self.seed}, {self.difference} difference"

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def role_names(self) -> tuple[str, ...]:
        """The names of the roles that tokens have in this task, such as IO, S1 and S2."""
        return self.token_roles.names

    def roles(self, bucket: Bucket) -> Tensor:
        """The role of every position of a bucket's prompts: (prompt, position) int64, numbers of `role_names`."""
        return self.token_roles.ids[bucket.which, : bucket.clean.shape[1]]

    def metric(self, logits: Tensor, bucket: Bucket) -> Tensor:
        """How clearly the model prefers the right answers. It is differentiable.

        Above zero the right answers win, below zero the wrong answers. It is a difference of logits, or of
        probabilities between -1 and 1; `difference` says which.

        Arguments:
            logits: (..., prompt, vocab) at the last position, for the prompts of `bucket`.

        Returns:
            (..., prompt) float32.
        """
        answers, wrong = (ids[bucket.which].to(logits.device) for ids in (self.answer_ids, self.wrong_ids))
        return METRICS[self.difference](logits, answers, wrong)

    def differentiated(self, logits: Tensor, bucket: Bucket) -> Tensor:
        """What methods that use gradients differentiate, with the shapes of `metric`.

        It is the metric or, with the target ``mean``, the mean logit of the right answers minus that of the wrong ones.
        The metric reads the largest wrong logit only, so its gradient jumps where another answer becomes the largest.
        """
        if self.target == "metric":
            return self.metric(logits, bucket)
        answers, wrong = (ids[bucket.which].to(logits.device) for ids in (self.answer_ids, self.wrong_ids))
        return mean_difference(logits, answers, wrong)

    def correct(self, logits: Tensor, bucket: Bucket) -> Tensor:
        """Whether the right answers win: bool, with the shapes of `metric`."""
        return self.metric(logits, bucket) > 0

    def token_ids(self) -> Iterator[list[int]]:
        """All token ids of each prompt pair and of its answers, in the order of the buckets."""
        for bucket in self.buckets:
            answers = [ids[bucket.which].tolist() for ids in (self.answer_ids, self.wrong_ids)]
            for parts in zip(bucket.clean.tolist(), bucket.corrupt.tolist(), *answers, strict=True):
                yield [token for part in parts for token in part]

    def spec(self) -> dict[str, Any]:
        """Plain JSON (name, n, seed, options) from which `gatelens.tasks.from_spec` builds the same task again."""
        return _spec(self.name, len(self), self.seed, self.options)

    def fingerprint(self) -> str:
        """The sha256 of the token ids of all prompts and answers and of the metric: equal for equal tasks."""
        buckets = [[bucket.which.tolist(), bucket.clean.tolist(), bucket.corrupt.tolist()] for bucket in self.buckets]
        return _sha256([buckets, self.answer_ids.tolist(), self.wrong_ids.tolist(), self.difference])


@dataclass(frozen=True)
class Example:
    """A prompt with its target response, which begins with its leading space if it has one.

    If the response is one token, `also` can hold further tokens that are right too. The log-probability of the response
    is then that of any of these tokens.
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
    """Some examples of a task, padded to the length of the longest."""

    tokens: Tensor  # (example, position) int64, on the CPU
    mask: Tensor  # (example, position) int64 attention mask: 0 at padding
    targets: Tensor  # (example, position) bool: True at response tokens; the logits one position earlier predict them
    which: Tensor  # (example,) index of each example in the task's `examples`
    also: Tensor  # (example, choice) further right tokens of a response of one token, -1 where there are fewer

    def parts(self, tokens: int) -> list["ResponseBatch"]:
        """Split the batch into parts with less padding: examples of similar length, about `tokens` tokens in each."""
        order = self.mask.sum(1).argsort(stable=True)
        size = -(-tokens // self.tokens.shape[1])
        return [self.part(indices) for indices in order.split(max(1, size))]

    def part(self, indices: Tensor) -> "ResponseBatch":
        """The examples with these indices, without the positions at which all of them are padded."""
        used = self.mask[indices].any(0).nonzero()
        cut = slice(int(used[0]), int(used[-1]) + 1)
        tokens, mask, targets = (x[indices, cut] for x in (self.tokens, self.mask, self.targets))
        return ResponseBatch(tokens, mask, targets, self.which[indices], self.also[indices])


@dataclass(frozen=True, eq=False, repr=False)
class ResponseTask(Shown):
    """Prompts with target responses. The measure is the log-probability of the response tokens only.

    Example:
        task = gatelens.task("syntax", model, n=16)
        task.examples[0]
    """

    name: str  # the name of the task
    seed: int  # the task seed, which decides the examples
    examples: list[Example]  # prompts and responses, as text and tokens
    pad_id: int = 0  # the token that fills up shorter examples
    options: Mapping[str, Any] = field(default_factory=dict)  # the options of the task that were given

    drawn_by = "gatelens.report.task_plot:plot_task"

    def records(self) -> list[dict[str, Any]]:
        """One record for each example."""
        return [{"prompt": example.prompt, "response": example.response} for example in self.examples]

    def headline(self) -> str:
        return f"{self.name}: {len(self)} examples, seed {self.seed}"

    def __len__(self) -> int:
        return len(self.examples)

    def batches(self, size: int, side: Literal["right", "left"] = "right") -> Iterator[ResponseBatch]:
        """Yield all examples in batches, padded on one side. The shortest examples come first, to save padding."""
        if size < 1 or side not in ("right", "left"):
            raise GatelensError(
                f"no batches of size {size} and side {side!r}: give a size of at least 1, and 'right' or 'left'."
            )
        order = sorted(range(len(self)), key=lambda i: len(self.examples[i]))
        for start in range(0, len(order), size):
            yield self.batch(order[start : start + size], side)

    def batch(self, which: Sequence[int], side: Literal["right", "left"] = "right") -> ResponseBatch:
        """The examples with these indices as one batch, padded on one side."""
        longest = max(len(self.examples[i]) for i in which)
        tokens = torch.full((len(which), longest), self.pad_id)
        mask = torch.zeros(len(which), longest, dtype=torch.int64)
        targets = torch.zeros(len(which), longest, dtype=torch.bool)
        for place, i in enumerate(which):
            example = self.examples[i]
            start = 0 if side == "right" else longest - len(example)
            end = start + len(example)
            tokens[place, start:end] = torch.tensor(example.prompt_ids + example.response_ids)
            mask[place, start:end] = 1
            targets[place, start + len(example.prompt_ids) : end] = True
        also = pad_ids([list(self.examples[i].also) for i in which])
        return ResponseBatch(tokens, mask, targets, torch.tensor(which), also)

    def token_ids(self) -> Iterator[list[int]]:
        """All token ids of each example."""
        for example in self.examples:
            yield [*example.prompt_ids, *example.response_ids, *example.also]

    def spec(self) -> dict[str, Any]:
        """Plain JSON (name, n, seed, options) from which `gatelens.tasks.from_spec` builds the same task again."""
        return _spec(self.name, len(self), self.seed, self.options)

    def fingerprint(self) -> str:
        """The sha256 of the token ids of all prompts and responses: equal for equal tasks."""
        return _sha256([[x.prompt_ids, x.response_ids, *([x.also] if x.also else [])] for x in self.examples])


def pad_ids(ids: list[list[int]]) -> Tensor:
    """Lists of different lengths as one int64 tensor, with -1 at the end of the shorter ones."""
    longest = max(map(len, ids), default=0)
    return torch.tensor([numbers + [-1] * (longest - len(numbers)) for numbers in ids], dtype=torch.int64)


def _spec(name: str, n: int, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "n": n, "seed": seed, "options": dict(options)}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
