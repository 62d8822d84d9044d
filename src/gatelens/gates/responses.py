"""The log-probability of target responses under head gates. Only the logits that predict a response are computed."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from gatelens.errors import GatelensError, GatelensWarning
from gatelens.gates.heads import HeadSource, run_heads
from gatelens.gates.runs import rows_that_fit
from gatelens.model import Model
from gatelens.runtime.processes import is_main
from gatelens.tasks.base import ResponseBatch, ResponseTask
from gatelens.tasks.preview import hardly_known

_STREAM = 1 << 17  # numbers in a layer's input: a part of a batch has about so many


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
        log_probs = logits.to(model.wide_dtype).log_softmax(2)
        chosen = _pick(log_probs, targets.to(log_probs.device)).logsumexp(-1)
        sums = log_probs.new_zeros(len(rows), len(batch.tokens))
        parts.append(sums.index_add(1, examples.to(log_probs.device), chosen))
    return torch.cat(parts)


def mean_log_probs(
    model: Model, task: ResponseTask, gates: Tensor, *, batch: int = 16, memory_gb: float | None = 2.0
) -> Tensor:
    """Log-probability of a response, summed over its tokens, mean over the task's examples: (row,), on the CPU."""
    sums = torch.zeros(len(gates), dtype=model.wide_dtype)
    with torch.no_grad():
        for some in task.batches(batch):
            for part in parts_at_once(model, some, len(gates)):
                sums += response_log_probs(model, part, gates, memory_gb=memory_gb).sum(1).cpu()
    return sums / len(task)


def places(batch: ResponseBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Where response tokens are predicted, bool (example, position); and of each such token its example and its ids.

    The ids of a token, (token, choice), are itself and what is as right as it; -1 where there are fewer.
    """
    predicts = torch.zeros_like(batch.targets)
    predicts[:, :-1] = batch.targets[:, 1:]  # the logit of a token stands one position before it
    examples = batch.targets.nonzero()[:, 0]
    return predicts, examples, torch.cat([batch.tokens[batch.targets][:, None], batch.also[examples]], 1)


def _pick(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits (row, token, vocabulary) of ids (token, choice): (row, token, choice), minus infinity where it is -1."""
    picked = logits.gather(2, ids.clamp(min=0).expand(len(logits), -1, -1))
    return picked if ids.shape[1] == 1 else picked.masked_fill(ids < 0, float("-inf"))


def token_counts(batch: ResponseBatch) -> Tensor:
    """Tokens of each response: (example,)."""
    return batch.targets.sum(1)


def parts_at_once(model: Model, batch: ResponseBatch, rows: int) -> list[ResponseBatch]:
    """On a CPU, a batch in parts of examples of like lengths: padding costs as much as text there.

    A part has enough tokens for the arithmetic to outweigh the calls, and no more than its caches like. Other devices
    want all the work at once.
    """
    return batch.parts(_STREAM // (model.anatomy.width * rows)) if model.device.type == "cpu" else [batch]


def rows_at_once(model: Model, batch: ResponseBatch, *, grad: bool, memory_gb: float | None) -> int:
    """How many rows fit into the memory budget."""
    return rows_that_fit(model, batch.tokens, 2 * int(batch.targets.sum()), grad=grad, memory_gb=memory_gb)


def check_responses(model: Model, task: ResponseTask) -> None:
    """Refuse examples that this model cannot read."""
    if not task.examples:
        raise GatelensError(f"{task.name} has no examples: give it some.")
    vocabulary = int(model.hf.config.vocab_size)
    for number, example in enumerate(task.examples):
        ids = (*example.prompt_ids, *example.response_ids, *example.also)
        problem = None
        if not example.prompt_ids or not example.response_ids:
            problem = f"an empty {'response' if example.prompt_ids else 'prompt'}: leave it out"
        elif len(example) > model.context:
            problem = (
                f"{len(example)} tokens with its response, and {model.name} reads {model.context}: leave it out or "
                "shorten it"
            )
        elif not 0 <= min(ids) <= max(ids) < vocabulary:
            problem = f"tokens that {model.name} does not have: make the task with this model's tokenizer"
        elif example.also and len(example.response_ids) > 1:
            problem = "several right responses, of more than one token: give one, or single tokens"
        if problem:
            raise GatelensError(f"example {number} of {task.name} ({example.prompt[:40]!r}...) has {problem}.")


def share_known(model: Model, task: ResponseTask, memory_gb: float) -> float:
    """The share of the responses' tokens that the model itself would have chosen, from 0 to 1. Cost: 1 forward."""
    return float(_hits(model, task, memory_gb).sum()) / sum(len(example.response_ids) for example in task.examples)


def warn_if_unknown(model: Model, task: ResponseTask, memory_gb: float, most: int = 64) -> None:
    """Warn where a model does not know the responses: of heads without a job there are no roles.

    The first `most` examples are looked at: enough to tell, and little beside the fit however many there are.
    """
    if not is_main():  # one process says it for all
        return
    task = replace(task, examples=task.examples[:most])
    hits = _hits(model, task, memory_gb)
    counts = torch.tensor([len(example.response_ids) for example in task.examples])
    if warning := hardly_known(model.name, task, float(hits.sum() / counts.sum())):
        worst = task.examples[int((hits / counts).argmin())]
        warnings.warn(  # which number it has is not known here: it may be one of those that were drawn for the fit
            f"{warning} One that it does not know is {worst.response[:40]!r} after {worst.prompt[-60:]!r}.",
            GatelensWarning,
            stacklevel=3,
        )


def _hits(model: Model, task: ResponseTask, memory_gb: float) -> Tensor:
    """How many of each response's tokens are the model's first choice: (example,)."""
    ones = torch.ones(1, model.n_layers, model.n_heads)
    hits = torch.zeros(len(task))
    for batch in task.batches(16):
        predicts, examples, targets = places(batch)
        with torch.no_grad():
            logits = run_heads(model, batch.tokens, ones, mask=batch.mask, logits_at=predicts, memory_gb=memory_gb)[0]
        hit = (logits.argmax(-1).cpu()[:, None] == targets).any(1).float()
        hits[batch.which] = torch.zeros(len(batch.which)).index_add(0, examples, hit)
    return hits
