"""The log-probability of target responses under head gates. Only the logits that predict a response are computed."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from gatelens.errors import GatelensError, GatelensWarning
from gatelens.gates.heads import HeadSource, run_heads
from gatelens.gates.runs import rows_that_fit
from gatelens.model import Model
from gatelens.tasks.base import ResponseBatch, ResponseTask


def response_log_probs(
    model: Model, batch: ResponseBatch, gates: Tensor, source: HeadSource = None, *, memory_gb: float | None = 2.0
) -> Tensor:
    """Log-probability of each response, summed over its tokens: (row, example), at least float32.

    gates: (row, layer, head); they may require gradients. Cost: 1 forward per row, less the other logits.
    """
    predicts, examples, targets = places(batch)
    parts: list[Tensor] = []
    for rows in gates.split(rows_at_once(model, batch, grad=gates.requires_grad, memory_gb=memory_gb)):
        logits = run_heads(model, batch.tokens, rows, source, mask=batch.mask, logits_at=predicts, memory_gb=None)
        wide = logits.to(model.wide_dtype)
        chosen = wide.gather(2, targets.to(wide.device).expand(len(rows), -1)[..., None])[..., 0]
        sums = wide.new_zeros(len(rows), len(batch.tokens))
        parts.append(sums.index_add(1, examples.to(wide.device), chosen - wide.logsumexp(2)))
    return torch.cat(parts)


def places(batch: ResponseBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Where response tokens are predicted, bool (example, position); and of each such token its example and its id."""
    predicts = torch.zeros_like(batch.targets)
    predicts[:, :-1] = batch.targets[:, 1:]  # the logit of a token stands one position before it
    return predicts, batch.targets.nonzero()[:, 0], batch.tokens[batch.targets]


def token_counts(batch: ResponseBatch) -> Tensor:
    """Tokens of each response: (example,)."""
    return batch.targets.sum(1)


def rows_at_once(model: Model, batch: ResponseBatch, *, grad: bool, memory_gb: float | None) -> int:
    """How many rows fit into the memory budget."""
    return rows_that_fit(model, batch.tokens, 2 * int(batch.targets.sum()), grad=grad, memory_gb=memory_gb)


def check_responses(model: Model, task: ResponseTask, memory_gb: float) -> None:
    """Refuse examples that do not fit into the model; warn where the model does not know the responses at all."""
    for number, example in enumerate(task.examples):
        if len(example) > model.context:
            raise GatelensError(
                f"example {number} of {task.name} ({example.prompt[:40]!r}...) has {len(example)} tokens with its "
                f"response, and {model.name} reads {model.context}: leave it out or shorten it."
            )
    ones = torch.ones(1, model.n_layers, model.n_heads)
    worst, total = (0.0, 0), 0.0
    for batch in task.batches(16):
        with torch.no_grad():
            sums = response_log_probs(model, batch, ones, memory_gb=memory_gb)[0].cpu()
        means = sums / token_counts(batch)
        total += float(means.sum())
        worst = min(worst, *((float(mean), int(which)) for mean, which in zip(means, batch.which, strict=True)))
    # A fair guess among all tokens is the least that a model with the behaviour must beat by far.
    guess = -float(torch.log(torch.tensor(float(model.hf.config.vocab_size))))
    if total / len(task) < 0.5 * guess:
        text = task.examples[worst[1]].prompt[-60:]
        warnings.warn(
            f"{model.name} gives the responses of {task.name} a mean log-probability of {total / len(task):.1f} per "
            f"token (a blind guess: {guess:.1f}): it hardly has the behaviour, and roles of heads mean little. "
            f"The worst is example {worst[1]} (...{text!r}).",
            GatelensWarning,
            stacklevel=3,
        )
