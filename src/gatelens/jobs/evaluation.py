"""Settings and cost of evaluations: of a task, of a circuit of another program, and of a sparse model on text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field

from gatelens.gates.edges import EDGES
from gatelens.jobs.cost import Cost, seconds_per_example, seconds_per_forward
from gatelens.model import Model
from gatelens.runtime.context import MEMORY_GB, MEMORY_HELP, Context
from gatelens.runtime.settings import EXECUTION, Settings
from gatelens.tasks import MOST_PROMPTS
from gatelens.tasks.base import CircuitTask, ResponseTask
from gatelens.tasks.batches import as_responses

_CIRCUITS = 4  # of an effect: none, the circuit, everything, the rest


class EffectSettings(Settings):
    """The settings of ``gatelens effect``."""

    n: int = Field(default=64, ge=1, le=MOST_PROMPTS, description="number of prompts")
    seed: int = Field(default=0, ge=0, description="task seed")
    memory_gb: float = Field(default=MEMORY_GB, gt=0, description=MEMORY_HELP, json_schema_extra=EXECUTION)

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": {"n": 8}}


class EvaluateSettings(Settings):
    """The settings of ``gatelens evaluate``."""

    length: int = Field(default=256, description="tokens in a sequence")
    sequences: int = Field(default=64, ge=0, description="number of sequences of each text (0: all)")
    skip: int = Field(default=0, ge=0, description="skip this many sequences at the beginning of each text")

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": {"sequences": 8}}


def preview_cost(model: Model, task: CircuitTask | ResponseTask) -> Cost:
    """What it will take to see how well a model does on a task. Cost: 2 forwards of one prompt."""
    if isinstance(task, CircuitTask):
        forwards, tokens = 2 * len(task), max(task.buckets, key=lambda bucket: len(bucket.which)).clean[:1]
    else:
        by_length = sorted(task.examples, key=len)
        median = by_length[len(by_length) // 2]
        forwards, tokens = len(task), torch.tensor([median.prompt_ids + median.response_ids])
    return Cost(forwards, forwards * seconds_per_forward(model, tokens), "prompt")


def effect_cost(model: Model, task: CircuitTask, memory_gb: float) -> Cost:
    """What the effect of one circuit of edges will take. Cost: 2 forwards of a few prompts."""
    forwards = len(task) * (EDGES.cost.captures + _CIRCUITS * EDGES.cost.circuit)
    seconds = seconds_per_example(model, as_responses(task), Context(memory_gb))
    return Cost(forwards, forwards * seconds, "prompt")


def evaluate_cost(model: Model, length: int, n_sequences: int) -> Cost:
    """What the evaluation of a sparse model, and of the dense one beside it, will take. Cost: 2 forwards of a sequence.

    Arguments:
        n_sequences: sequences of all texts together.
    """
    seconds = seconds_per_forward(model, torch.zeros(1, length, dtype=torch.long))
    return Cost(2 * n_sequences, 2 * n_sequences * seconds, "sequence")
