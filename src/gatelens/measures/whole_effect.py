"""The effect of all gates together: the metric with all gates open minus the metric with all gates closed.

The explained effect of a circuit is a share of this number. If it cannot be told from 0 on the prompts, every share of
it is noise, and a circuit of one gate may explain 500 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor

from gatelens.gates.level import Level, Source
from gatelens.measures.counts import Sample
from gatelens.measures.head_table import bootstrap_mean
from gatelens.measures.top_k import Circuits
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.preview import lacks_behaviour


@dataclass(frozen=True, eq=False)
class WholeEffect:
    """The metric with all gates open and with all gates closed, on the prompts of one task seed.

    ``str(effect)`` is what messages print: ``+3.21 (+2.80 to +3.66; 64 prompts)``.
    """

    none: Float[Tensor, " prompt"]
    everything: Float[Tensor, " prompt"]

    @property
    def mean(self) -> float:
        """The denominator of the explained effect, in units of the metric."""
        return float((self.everything - self.none).mean())

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval over prompts."""
        return bootstrap_mean(self.everything - self.none)

    @property
    def is_noise(self) -> bool:
        """Whether the interval contains 0. One prompt has no interval, so that nothing can be said about it."""
        low, high = self.interval
        return len(self.none) > 1 and low <= 0 <= high

    @property
    def answered(self) -> float:
        """The share of prompts that the whole model answers correctly."""
        return float((self.everything > 0).float().mean())

    def __str__(self) -> str:
        sample = Sample(len(self.none))
        low, high = self.interval
        interval = f"{low:+.3g} to {high:+.3g}" if sample.has_interval else "no interval"
        return f"{self.mean:+.3g} ({interval}; {sample})"


def whole_effect(
    level: Level[Any],
    model: Model,
    task: CircuitTask,
    source: Source = "corrupt",
    *,
    fitted_on: CircuitTask | None = None,
    context: Context | None = None,
) -> WholeEffect:
    """The effect of all gates of a level on a task. Cost: two circuits (``level.cost.circuit``).

    Arguments:
        source: what closed gates read.
        fitted_on: the prompts that optimal constants are fitted on; None: those of the task.
    """
    circuits = Circuits(level.on(task), model, task, [], source, context or Context(), fitted_on)
    return WholeEffect(*circuits.measure(f"effect of all {level.noun}", [("all", circuits.ends)]))


def noise_problem(effects: Sequence[WholeEffect], level: Level[Any], model: str, task: CircuitTask) -> str | None:
    """What is wrong if the effect of a task seed cannot be told from 0, in a sentence without its end; else None.

    Arguments:
        effects: the effects of all task seeds.
        model: the model's name.
    """
    noisy = [effect for effect in effects if effect.is_noise]
    if not noisy:
        return None
    return (
        f"all {level.noun} of {model} together change the metric of {task.name} by {noisy[0]}, which cannot be told "
        "from 0, so that a share of it is noise"
    )


def behaviour_warning(effects: Sequence[WholeEffect], model: str, task: CircuitTask) -> str | None:
    """A warning if the model answers too few prompts of all task seeds correctly, else None."""
    return lacks_behaviour(model, task.name, sum(effect.answered for effect in effects) / len(effects))
