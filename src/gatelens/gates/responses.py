"""The log-probability of target responses under head gates. Only the logits that predict a response are computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from gatelens.gates.head_runs import run_heads
from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import only_at, rows_that_fit
from gatelens.model import Model
from gatelens.model.products import fast_products
from gatelens.runtime.context import UNLIMITED, Context
from gatelens.tasks.base import ResponseBatch, ResponseTask

_STREAM = 1 << 18  # a batch is split into parts in which the input of a layer has about this many numbers
_SHORT = 256  # tokens; longer sequences always use the attention that the model was loaded with


def response_log_probs(
    model: Model,
    batch: ResponseBatch,
    gates: Float[Tensor, "row layer head"],
) -> Float[Tensor, "row example"]:
    """Log-probability of each response, summed over its tokens, under each row of gates.

    All rows and examples run together: `cut` says how many fit into memory.

    Arguments:
        gates: they may require gradients. A closed gate reads zero.

    Returns:
        The log-probabilities, in float32 or wider. Cost: at most 1 forward for each row, with only the logits that
        predict a response.
    """
    logits, examples, ids = _response_logits(model, batch, gates)
    return _by_example(_log_probs(logits, ids), examples, len(batch.tokens))


def _response_logits(
    model: Model, batch: ResponseBatch, gates: Float[Tensor, "row layer head"]
) -> tuple[Float[Tensor, "row token vocab"], Int[Tensor, " token"], Int[Tensor, "token choice"]]:
    """The logits that predict the responses, and the example and the right ids of each token."""
    predicts, examples, targets = places(batch)
    # No token sees padding on its right, so only padding on the left needs a mask.
    mask = batch.mask if (batch.mask.diff(dim=1) > 0).any() else None
    with fast_products(model.hf), Hooks() as hooks:
        only_at(model, predicts, hooks)
        logits = run_heads(model, batch.tokens, gates, mask=mask, logits_at=predicts, context=UNLIMITED)
    return logits.to(model.wide_dtype), examples.to(logits.device), targets.to(logits.device)


def _log_probs(
    logits: Float[Tensor, "row token vocab"], ids: Int[Tensor, "token choice"]
) -> Float[Tensor, "row token"]:
    """The log-probability that a token is one of these ids. An id of -1 stands for none and is left out."""
    if ids.shape[1] == 1:  # one pass over the logits in each direction
        losses = cross_entropy(logits.flatten(0, 1), ids[:, 0].repeat(len(logits)), reduction="none")
        return -losses.unflatten(0, (len(logits), -1))
    picked = logits.gather(2, ids.clamp(min=0).expand(len(logits), -1, -1)).masked_fill(ids < 0, float("-inf"))
    return picked.logsumexp(-1) - logits.logsumexp(-1)


def _by_example(
    values: Float[Tensor, "row token"], examples: Int[Tensor, " token"], n_examples: int
) -> Float[Tensor, "row example"]:
    """Sums over the tokens of each response."""
    return values.new_zeros(len(values), n_examples).index_add(1, examples, values)


@dataclass(frozen=True, eq=False)
class ResponseScores:
    """How well a model gives the responses of a task, under each row of gates.

    Arguments:
        log_probs: log-probability of each response, summed over its tokens.
        hits: how many tokens of each response are the model's first choice.
        tokens: how many tokens each response has.
    """

    log_probs: Float[Tensor, "row example"]
    hits: Float[Tensor, "row example"]
    tokens: Int[Tensor, " example"]

    @property
    def accuracy(self) -> Float[Tensor, " row"]:
        """The share of a response's tokens that are the model's first choice, mean over examples; from 0 to 1."""
        return (self.hits / self.tokens).mean(1)


def score_responses(
    model: Model,
    task: ResponseTask,
    gates: Float[Tensor, "row layer head"],
    *,
    batch: int = 16,
    context: Context | None = None,
) -> ResponseScores:
    """Score the responses of a task under each row of gates.

    Arguments:
        batch: examples in a batch.

    Returns:
        The scores, on the CPU, in the order of the task's examples. Cost: 1 forward for each example and row.
    """
    context = context or Context()
    log_probs = torch.zeros(len(gates), len(task), dtype=model.wide_dtype)
    hits = torch.zeros_like(log_probs)
    with torch.no_grad():
        for examples in task.batches(batch):
            at_once, parts = cut(model, examples, len(gates), grad=False, context=context)
            for part, rows in itertools.product(parts, torch.arange(len(gates)).split(at_once)):
                cell = rows[:, None], part.which
                logits, own, ids = _response_logits(model, part, gates[rows])
                is_hit = (logits.argmax(-1)[..., None] == ids).any(-1).to(logits)
                log_probs[cell] = _by_example(_log_probs(logits, ids), own, len(part.tokens)).cpu()
                hits[cell] = _by_example(is_hit, own, len(part.tokens)).cpu()
    tokens = torch.tensor([len(example.response_ids) for example in task.examples])
    return ResponseScores(log_probs, hits, tokens)


def nll(
    model: Model, batch: ResponseBatch, gates: Float[Tensor, "row layer head"], autocast: bool = False
) -> Float[Tensor, "row example"]:
    """Mean NLL of the target tokens of each example, under each row of gates. `cut` says how much to run at once.

    Arguments:
        autocast: run the model's matrix products in bfloat16. Log-probabilities are float32 in any case.
    """
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast), _fast_attention(model, batch):
        sums = response_log_probs(model, batch, gates)
    return -sums / token_counts(batch).to(sums)


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


def token_counts(batch: ResponseBatch) -> Int[Tensor, " example"]:
    """The number of tokens of each response."""
    return batch.targets.sum(1)


def cut(
    model: Model, batch: ResponseBatch, rows: int, *, grad: bool, context: Context
) -> tuple[int, list[ResponseBatch]]:
    """Cut a batch into parts with examples of similar lengths that fit into memory under many rows of gates.

    On a CPU, padding costs as much as text. A part there has so many tokens that the overhead of a call does not
    matter, and so few that they fit into the caches.

    Arguments:
        rows: how many rows of gates there are.
        grad: whether runs keep activations for a backward pass.

    Returns:
        How many rows to run at once, and the parts.
    """
    longest, logits = batch.tokens.shape[1], int(batch.targets.sum(1).max())
    fit = rows_that_fit(model, batch.tokens[:1], 2 * logits, grad=grad, context=context)  # rows of one example
    rows_at_once = min(rows, fit)
    tokens = longest * min(len(batch.tokens), max(1, fit // rows_at_once))
    if model.device.type == "cpu":
        tokens = min(tokens, _STREAM // (model.anatomy.width * rows_at_once))
    return rows_at_once, batch.parts(tokens) if tokens < batch.tokens.numel() else [batch]


def cut_pairs(
    model: Model, first: ResponseBatch, second: ResponseBatch, rows: int, *, context: Context
) -> tuple[int, list[tuple[ResponseBatch, ResponseBatch]]]:
    """`cut` for two batches whose examples belong together, for runs with a backward pass.

    Returns:
        How many rows to run at once, and the parts. Both batches of a part have the same examples, in the same order.
    """
    longer = max(first, second, key=lambda batch: batch.tokens.shape[1])
    at_once, parts = cut(model, longer, rows, grad=True, context=context)
    by_length = (first.mask.sum(1) + second.mask.sum(1)).argsort(stable=True)
    indices = by_length.split(max(len(part.which) for part in parts))
    return at_once, [(first.part(some), second.part(some)) for some in indices]


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
