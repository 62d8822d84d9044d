"""What finding a circuit will take, before anything is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gatelens.gates import LEVELS, optimal
from gatelens.jobs.circuit import CHECKED_PROMPTS
from gatelens.jobs.circuit_tasks import circuit_tasks
from gatelens.jobs.cost import Cost, seconds_per_example
from gatelens.jobs.described import DESCRIBED_PROMPTS
from gatelens.measures.areas import mib_counts
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.measures.circuit_tests import tests_cost
from gatelens.measures.describe import describe_cost
from gatelens.measures.effect import baseline_grid
from gatelens.measures.refinement import most_refined_points
from gatelens.measures.stability import stability_cost
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import as_responses


def circuit_parts(settings: CircuitSettings, graph: Graph, length: int) -> dict[str, float]:
    """Forward passes of one prompt that each part of `find_circuit` takes. A forward and backward pass counts as two.

    Arguments:
        length: tokens of a prompt.
    """
    level, method = LEVELS[settings.level], settings.chosen_method
    n_gates = level.n_gates(graph, length)
    price = method.price(level, settings.method_settings)
    grid = level.grid(n_gates, settings.points)
    fitted = 0.0
    if settings.source == "optimal":
        fitted = settings.seeds * level.cost.learned * optimal.UPDATES * min(optimal.PROMPTS, settings.n)
    n_points = len(grid) + len(settings.refined_at) * most_refined_points(grid, settings.refine)
    if settings.random_points:
        n_points += len(baseline_grid(level, n_gates, settings.random_points))
    if settings.areas != "none":
        n_points += len(set(mib_counts(n_gates)) - {0, n_gates})
    checked = 0.0
    if not method.exact and settings.sample:
        n_checked = min(CHECKED_PROMPTS, settings.n)
        gates = min(settings.sample, n_gates) if level.shared else settings.sample / n_checked
        checked = price.forwards(n_checked, graph.n_layers, n_gates) + n_checked * level.cost.patch * gates
    scored = price.forwards(settings.n, graph.n_layers, n_gates)
    return {
        "effect of all gates": 2 * settings.seeds * settings.n * level.cost.circuit,
        "scores": settings.seeds * scored,
        "optimal constants": fitted,
        "curves": settings.n * level.cost.circuit * (settings.seeds * n_points + 1),  # and the complement
        "check": checked,
        "tests": tests_cost(settings.n, level.cost.circuit) if settings.tests else 0.0,
        "stability": stability_cost(settings.stability, scored, settings.n * level.cost.circuit),
        "heads": min(DESCRIBED_PROMPTS, settings.n) * describe_cost(settings.describe),
    }


def circuit_forwards(settings: CircuitSettings, graph: Graph, length: int) -> float:
    """Forward passes of one prompt that `find_circuit` takes in all."""
    return sum(circuit_parts(settings, graph, length).values())


def circuit_cost(
    model: Model, task: str | CircuitTask, settings: CircuitSettings, options: Mapping[str, Any] | None = None
) -> str:
    """What `find_circuit` will take, in words. Cost: 2 forwards of a few prompts.

    Arguments:
        task, settings, options: as for `find_circuit`.
    """
    prompts = circuit_tasks(model, task, settings.replace(seeds=1), options).first
    examples = as_responses(prompts)
    length = max(len(example.prompt_ids) for example in examples.examples)
    parts = circuit_parts(settings.replace(n=len(prompts)), Graph.of(model.anatomy), length)
    forwards = sum(parts.values())
    cost = Cost(forwards, forwards * seconds_per_example(model, examples, Context(settings.memory_gb)), "prompt")
    shares = ", ".join(f"{name} {part / forwards:.0%}" for name, part in parts.items() if part)
    return f"{cost} ({shares}); {len(prompts)} prompts"
