"""Can a model use the examples of a response task, and does it know the responses?"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from gatelens.errors import GatelensError, GatelensWarning
from gatelens.gates.responses import ResponseScores, score_responses
from gatelens.gates.runs import run_numbers
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.rank import is_main
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.preview import hardly_known


def check_responses(model: Model, task: ResponseTask, context: Context | None = None) -> None:
    """Raise an error that names the first example that this model cannot use.

    Arguments:
        context: raise an error too if one example does not fit into its memory budget in a fit, which cannot cut it.
    """
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
        if context is not None:
            numbers = run_numbers(model, 1, len(example), 2 * len(example.response_ids), grad=True)
            context.require(numbers, f"example {number} of {task.name}, which has {len(example):,} tokens,")


def share_known(model: Model, task: ResponseTask, context: Context | None = None) -> float:
    """The share of the response tokens that are the model's first choice, from 0 to 1. Cost: 1 forward."""
    scores = _without_gates(model, task, context)
    return float(scores.hits.sum() / scores.tokens.sum())


def warn_if_unknown(model: Model, task: ResponseTask, context: Context | None = None, n_examples: int = 64) -> None:
    """Warn if the model does not know the responses: its heads then have no roles in the task.

    Arguments:
        n_examples: how many examples are tried. The first 64 are enough to tell, and cost little beside the fit.
    """
    if not is_main():  # with several processes, only one of them warns
        return
    task = replace(task, examples=task.examples[:n_examples])
    scores = _without_gates(model, task, context)
    if warning := hardly_known(model.name, task, float(scores.hits.sum() / scores.tokens.sum())):
        # The example is quoted and not numbered: the task may hold only the examples that were drawn for the fit.
        worst = task.examples[int((scores.hits[0] / scores.tokens).argmin())]
        warnings.warn(
            f"{warning} One response that it does not know is {worst.response[:40]!r} after {worst.prompt[-60:]!r}.",
            GatelensWarning,
            stacklevel=3,
        )


def _without_gates(model: Model, task: ResponseTask, context: Context | None) -> ResponseScores:
    return score_responses(model, task, torch.ones(1, model.n_layers, model.n_heads), context=context)
