"""The log-probability of target responses under head gates. Only the logits that predict a response are computed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gatelens.errors import GatelensError, GatelensWarning
from gatelens.gates.head_runs import HeadSource, run_heads
from gatelens.gates.runs import rows_that_fit
from gatelens.model import Model
from gatelens.runtime.context import UNLIMITED, Context
from gatelens.runtime.processes import is_main
from gatelens.tasks.base import ResponseBatch, ResponseTask
from gatelens.tasks.preview import hardly_known

_STREAM = 1 << 17  # a batch is split into parts in which the input of a layer has about this many numbers
_SHORT = 256  # tokens; longer sequences always use the attention that the model was loaded with


def response_log_probs(
    model: Model,
    batch: ResponseBatch,
    gates: Float[Tensor, "row layer head"],
    source: HeadSource = None,
    *,
    context: Context | None = None,
) -> Float[Tensor, "row example"]:
    """Log-probability of each response, summed over its tokens, under each row of gates.

    Arguments:
        gates: they may require gradients.
        source: what closed gates read (`run_heads`); None is zero.

    Returns:
        The log-probabilities, in float32 or wider. Cost: 1 forward for each row, with only the logits that predict a
        response.
    """
    context = context or Context()
    predicts, examples, targets = places(batch)
    sums: list[Tensor] = []
    for rows in gates.split(rows_at_once(model, batch, grad=gates.requires_grad, context=context)):
        logits = run_heads(model, batch.tokens, rows, source, mask=batch.mask, logits_at=predicts, context=UNLIMITED)
        log_probs = logits.to(model.wide_dtype).log_softmax(2)
        chosen = _pick(log_probs, targets.to(log_probs.device)).logsumexp(-1)
        zeros = log_probs.new_zeros(len(rows), len(batch.tokens))
        sums.append(zeros.index_add(1, examples.to(log_probs.device), chosen))
    return torch.cat(sums)


def mean_log_probs(
    model: Model,
    task: ResponseTask,
    gates: Float[Tensor, "row layer head"],
    *,
    batch: int = 16,
    context: Context | None = None,
) -> Float[Tensor, " row"]:
    """Log-probability of a response, summed over its tokens, mean over the examples of a task.

    Arguments:
        batch: examples in a batch.

    Returns:
        On the CPU. Cost: 1 forward for each example and row.
    """
    sums = torch.zeros(len(gates), dtype=model.wide_dtype)
    with torch.no_grad():
        for examples in task.batches(batch):
            for part in parts_at_once(model, examples, len(gates)):
                sums += response_log_probs(model, part, gates, context=context).sum(1).cpu()
    return sums / len(task)


def nll(
    model: Model, batch: ResponseBatch, gates: Float[Tensor, "row layer head"], autocast: bool = False
) -> Float[Tensor, "row example"]:
    """Mean NLL of the target tokens of each example, under each row of gates. The order of the examples may change.

    Arguments:
        autocast: run the model's matrix products in bfloat16. Log-probabilities are float32 in any case.
    """
    means: list[Tensor] = []
    for part in parts_at_once(model, batch, len(gates)):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast), _fast_attention(model, part):
            sums = response_log_probs(model, part, gates, context=UNLIMITED)
        means.append(sums / token_counts(part).to(sums))
    return -torch.cat(means, 1)


def mean_nll(
    model: Model, batch: ResponseBatch, gates: Float[Tensor, "row layer head"], autocast: bool = False
) -> Float[Tensor, " row"]:
    """Mean over examples of the mean NLL of their target tokens, under each row of gates."""
    return nll(model, batch, gates, autocast).mean(1)


def places(
    batch: ResponseBatch,
) -> tuple[Bool[Tensor, "example position"], Int[Tensor, " token"], Int[Tensor, "token choice"]]:
    """Where the response tokens of a batch are predicted.

    Returns:
        predicts: whether the logits at a position predict a response token.
        examples: for each response token, the example that it belongs to.
        ids: for each response token, its id and the ids of all other right tokens, filled up with -1.
    """
    predicts = torch.zeros_like(batch.targets)
    predicts[:, :-1] = batch.targets[:, 1:]  # the logits that predict a token are one position before it
    examples = batch.targets.nonzero()[:, 0]
    return predicts, examples, torch.cat([batch.tokens[batch.targets][:, None], batch.also[examples]], 1)


def _pick(
    logits: Float[Tensor, "row token vocab"], ids: Int[Tensor, "token choice"]
) -> Float[Tensor, "row token choice"]:
    """The logits of these ids; minus infinity where an id is -1."""
    picked = logits.gather(2, ids.clamp(min=0).expand(len(logits), -1, -1))
    return picked if ids.shape[1] == 1 else picked.masked_fill(ids < 0, float("-inf"))


def token_counts(batch: ResponseBatch) -> Int[Tensor, " example"]:
    """The number of tokens of each response."""
    return batch.targets.sum(1)


def parts_at_once(model: Model, batch: ResponseBatch, rows: int) -> list[ResponseBatch]:
    """On a CPU, split a batch into parts with examples of similar lengths, because padding costs as much as text there.

    A part has so many tokens that the overhead of a call does not matter, and so few that they fit into the caches. On
    other devices the whole batch is one part.

    Arguments:
        rows: how many rows of gates each part is run with.
    """
    return batch.parts(_STREAM // (model.anatomy.width * rows)) if model.device.type == "cpu" else [batch]


def rows_at_once(model: Model, batch: ResponseBatch, *, grad: bool, context: Context) -> int:
    """How many rows of gates fit into the memory budget; at least one.

    Arguments:
        grad: whether the run keeps activations for a backward pass.
    """
    return rows_that_fit(model, batch.tokens, 2 * int(batch.targets.sum()), grad=grad, context=context)


@contextmanager
def _fast_attention(model: Model, batch: ResponseBatch) -> Iterator[None]:
    """On a CPU, run short sequences with eager attention: the backward pass of torch's fused attention is slower there.

    It saves a quarter of a whole update of SmolLM2 at 50 and at 100 tokens; above 256 tokens eager attention takes too
    much memory. A float64 model keeps its attention: the eager softmax is float32, where a float64 mask is infinite.
    """
    config = model.hf.config
    loaded = config._attn_implementation
    short = batch.tokens.shape[1] <= _SHORT and model.dtype != torch.float64
    if loaded == "sdpa" and model.device.type == "cpu" and short:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = loaded


def check_responses(model: Model, task: ResponseTask) -> None:
    """Raise an error that names the first example that this model cannot use."""
    if not task.examples:
        raise GatelensError(f"the task {task.name} has no examples: give it at least one.")
    vocabulary = int(model.hf.config.vocab_size)
    for number, example in enumerate(task.examples):
        ids = (*example.prompt_ids, *example.response_ids, *example.also)
        problem = None
        if not example.prompt_ids or not example.response_ids:
            problem = f"an empty {'response' if example.prompt_ids else 'prompt'}: leave it out"
        elif len(example) > model.context:
            problem = (
                f"{len(example)} tokens with its response, but the context of {model.name} has {model.context}: leave "
                "it out or shorten it"
            )
        elif not 0 <= min(ids) <= max(ids) < vocabulary:
            problem = f"tokens that {model.name} does not have: make the task with this model's tokenizer"
        elif example.also and len(example.response_ids) > 1:
            problem = "several right responses of more than one token: give one response, or single tokens"
        if problem:
            raise GatelensError(f"example {number} of {task.name} ({example.prompt[:40]!r}...) has {problem}.")


def share_known(model: Model, task: ResponseTask, context: Context | None = None) -> float:
    """The share of the response tokens that are the model's first choice, from 0 to 1. Cost: 1 forward."""
    n_tokens = sum(len(example.response_ids) for example in task.examples)
    return float(_hits(model, task, context).sum()) / n_tokens


def warn_if_unknown(model: Model, task: ResponseTask, context: Context | None = None, n_examples: int = 64) -> None:
    """Warn if the model does not know the responses: its heads then have no roles in the task.

    Arguments:
        n_examples: how many examples are tried. The first 64 are enough to tell, and cost little beside the fit.
    """
    if not is_main():  # with several processes, only one of them warns
        return
    task = replace(task, examples=task.examples[:n_examples])
    hits = _hits(model, task, context)
    counts = torch.tensor([len(example.response_ids) for example in task.examples])
    if warning := hardly_known(model.name, task, float(hits.sum() / counts.sum())):
        # The example is quoted and not numbered: the task may hold only the examples that were drawn for the fit.
        worst = task.examples[int((hits / counts).argmin())]
        warnings.warn(
            f"{warning} One response that it does not know is {worst.response[:40]!r} after {worst.prompt[-60:]!r}.",
            GatelensWarning,
            stacklevel=3,
        )


def _hits(model: Model, task: ResponseTask, context: Context | None) -> Float[Tensor, " example"]:
    """How many tokens of each response are the model's first choice."""
    open_gates = torch.ones(1, model.n_layers, model.n_heads)
    hits = torch.zeros(len(task))
    for batch in task.batches(16):
        predicts, examples, targets = places(batch)
        with torch.no_grad():
            logits = run_heads(model, batch.tokens, open_gates, mask=batch.mask, logits_at=predicts, context=context)[0]
        is_hit = (logits.argmax(-1).cpu()[:, None] == targets).any(1).float()
        hits[batch.which] = torch.zeros(len(batch.which)).index_add(0, examples, is_hit)
    return hits
