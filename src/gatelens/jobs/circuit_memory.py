"""The memory that finding a circuit takes, before anything is run."""

from __future__ import annotations

from gatelens.gates import level_named
from gatelens.jobs.circuit_tasks import CircuitTasks
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.measures.top_k import circuit_numbers
from gatelens.model import Model
from gatelens.runtime.context import Context

_ESTIMATED_LENGTH = 32  # tokens of a prompt


def memory_estimate(model: Model, settings: CircuitSettings) -> tuple[float, float]:
    """Peak memory of a job.

    Returns:
        GB of the weights, and GB of runs: the budget or, if that is more, what prompts of 32 tokens need, because a run
        cannot be cut below one prompt.
    """
    weights = sum(p.numel() * p.element_size() for p in model.hf.parameters()) / 1e9
    held = settings.seeds * settings.n * level_named(settings.level).held_numbers(model, _ESTIMATED_LENGTH)
    return weights, max(settings.memory_gb, 4e-9 * (held + _least_numbers(model, settings, _ESTIMATED_LENGTH)))


def require_memory(model: Model, tasks: CircuitTasks, settings: CircuitSettings) -> None:
    """Raise an error if the job does not fit into the memory budget when it runs one prompt at a time."""
    budget, least = Context(settings.memory_gb), _least_numbers(model, settings, tasks.longest)
    at_level = f"of {tasks.longest:,} tokens at the level {settings.level}"
    budget.require(least, f"one prompt {at_level}")
    held, n_prompts = held_numbers(model, tasks, settings), sum(map(len, tasks.ranked))
    what = f"a job with {n_prompts:,} prompts, the longest {at_level}, keeps the scores of all of them and"
    budget.require(held + least, what, "fewer or shorter prompts")


def held_numbers(model: Model, tasks: CircuitTasks, settings: CircuitSettings) -> int:
    """How many numbers the scores and rankings of all prompts hold until the job ends."""
    level = level_named(settings.level)
    buckets = (bucket for task in tasks.ranked for bucket in task.buckets)
    return sum(len(bucket) * level.held_numbers(model, bucket.clean.shape[1]) for bucket in buckets)


def _least_numbers(model: Model, settings: CircuitSettings, length: int) -> int:
    """How many numbers a job holds if it runs one prompt at a time: a run cannot be cut any further."""
    level = level_named(settings.level)
    return max(circuit_numbers(level, model, length), level.attribute_numbers(model, length))
