"""Methods are registered values: ways of giving every gate of a level a score.

Each file of this room makes a `Method` and registers it when it is imported; `methods` and `method_named` import all of
them. To add a method, add a file: the command line, studies, cost estimates and the reference read the registry.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from pydantic import Field

from gatelens.errors import GatelensError
from gatelens.gates import level_named
from gatelens.gates.learning import LearningSettings
from gatelens.gates.level import Level
from gatelens.gates.scores import Scores
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.settings import Settings, unknown_name
from gatelens.tasks.base import CircuitTask

FORWARD_BACKWARD = 2
"""The cost of a forward-backward pass with frozen weights, in forward passes."""


class MethodSettings(Settings):
    """Settings of a method; a method without settings uses this class itself."""


class GradientSettings(MethodSettings):
    """Settings of all methods that take gradients of the model."""

    straight_through: bool = Field(
        default=False, description="let gradients pass through the gates of a sparse model, as if they were soft"
    )


@dataclass(frozen=True)
class Price:
    """What a method costs, in forward passes of one prompt. A forward-backward pass counts as two.

    Arguments:
        each: forward passes of every prompt.
        per_layer: further ones for each layer of the model.
        per_gate: further ones for each gate of the level.
        per_gate_squared: further ones for the square of the number of gates.
        in_all: forward passes of single prompts that do not depend on the number of prompts, as in a fit.
    """

    each: float = 0.0
    per_layer: float = 0.0
    per_gate: float = 0.0
    per_gate_squared: float = 0.0
    in_all: float = 0.0

    def forwards(self, n_prompts: int, n_layers: int, n_gates: int) -> float:
        """The forward passes of single prompts that scoring a task takes."""
        each = self.each + self.per_layer * n_layers + self.per_gate * n_gates + self.per_gate_squared * n_gates**2
        return n_prompts * each + self.in_all

    def __str__(self) -> str:
        parts = {
            "": self.each,
            " per layer": self.per_layer,
            " per gate": self.per_gate,
            " per gate²": self.per_gate_squared,
            " in all": self.in_all,
        }
        return " + ".join(f"{value:,g} F{unit}" for unit, value in parts.items() if value)


class Scorer(Protocol):
    """Gives every gate of a level a score."""

    def __call__(
        self, level: Level[Any], model: Model, task: CircuitTask, settings: Any, /, *, context: Context
    ) -> Scores: ...


@dataclass(frozen=True)
class Method:
    """A way of scoring gates.

    Arguments:
        name: the value of ``--method``.
        score: called as score(level, model, task, settings, context=context); returns scores of the level.
        price: called as price(level, settings); the cost in forward passes.
        paper: where it is published.
        help: one line for the command line.
        levels: the names of the levels that it works on; None: every level, also those that are added later.
        settings: the class of its settings. Users give them as ``--method-options KEY=VALUE``.
        exact: whether its scores are exact, so that they need no check by patching.
    """

    name: str
    score: Scorer
    price: Callable[[Level[Any], Any], Price]
    paper: str
    help: str
    levels: tuple[str, ...] | None = None
    settings: type[MethodSettings] = field(default=MethodSettings)
    exact: bool = False

    def works_on(self, level: str) -> bool:
        """Whether the method scores the gates of this level."""
        return self.levels is None or level in self.levels

    def check_level(self, level: str) -> None:
        """Raise an error if the method does not work on this level."""
        if not self.works_on(level):
            names = ", ".join(self.levels or ())
            raise GatelensError(f"the method {self.name} does not score {level}: it scores {names}.")


def by_keywords(score: Callable[..., Scores]) -> Scorer:
    """`Method.score` from a function that takes each setting as an argument of this name."""
    return lambda level, model, task, settings, context: score(level, model, task, **vars(settings), context=context)


def learning_price(level: Level[Any], settings: LearningSettings) -> Price:
    """The price of a method that learns gates: the warm start, and gated runs with gradients."""
    start = level.cost.captures + FORWARD_BACKWARD * settings.warm_start if settings.warm_start else 0.0
    learned = settings.updates * settings.draws * level.cost.learned
    return Price(each=start, in_all=learned * settings.batch) if level.shared else Price(each=start + learned)


_METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Add a method to the registry and return it. Two methods must not have the same name."""
    if method.name in _METHODS:
        raise ValueError(f"the method {method.name} is registered twice")
    _METHODS[method.name] = method
    return method


@cache
def _import_all() -> None:
    import gatelens.methods

    for module in pkgutil.iter_modules(gatelens.methods.__path__):
        import_module(f"gatelens.methods.{module.name}")


def methods() -> dict[str, Method]:
    """All registered methods by name."""
    _import_all()
    return dict(sorted(_METHODS.items()))


def method_named(name: str) -> Method:
    """The method with this name; an error lists the names that exist."""
    if name not in methods():
        raise GatelensError(unknown_name("method", name, methods()))
    return _METHODS[name]


def score_gates(
    level: str,
    model: Model,
    task: CircuitTask,
    method: str = "eap-ig",
    *,
    context: Context | None = None,
    **settings: Any,
) -> Scores:
    """The score of every gate of a level by any registered method.

    Example:
        scores = gatelens.score_gates("edges", model, task, "eap-ig-activations", steps=3)

    Arguments:
        level: heads, edges, edges-by-role or attention.
        method: the name of the method; `gatelens circuit --help` lists them.
        context: the memory budget, and where finished pieces are saved so that a killed run resumes.
        settings: the settings of the method.
    """
    chosen = method_named(method)
    chosen.check_level(level)
    return chosen.score(level_named(level), model, task, chosen.settings(**settings), context=context or Context())
