"""The settings of a circuit job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from gatelens.errors import GatelensError
from gatelens.gates import level_named
from gatelens.gates.selection import selection_named
from gatelens.measures.effect import CurveSettings
from gatelens.methods.registry import Method, MethodSettings, method_named, methods
from gatelens.runtime.context import MEMORY_GB, MEMORY_HELP
from gatelens.runtime.settings import ADDED, EXECUTION, key_values
from gatelens.tasks import MOST_PROMPTS


class CircuitSettings(CurveSettings):
    """The settings of `find_circuit` and ``gatelens circuit``: which gates to score, how, and on how many prompts."""

    level: str = Field(
        default="heads",
        description="gates on heads, on edges between components, on such edges at the tokens of each role "
        "(edges-by-role), or on attention edges (attention)",
    )
    method: str = Field(
        default="eap-ig",
        description="how gates are scored: " + "; ".join(f"{name} ({m.help})" for name, m in methods().items()),
    )
    steps: int = Field(default=5, ge=1, le=10_000, description="points of eap-ig's path")
    method_options: tuple[str, ...] = Field(default=(), description="a setting of the method as KEY=VALUE; repeatable")
    n: int = Field(default=64, ge=1, le=MOST_PROMPTS, description="prompts for each task seed")
    held_out: bool = Field(
        default=False,
        description="rank gates on as many other prompts, so that the n prompts of the curve are held out (not for "
        "attention edges, which belong to a prompt; studies do it by default)",
        json_schema_extra=ADDED,
    )
    seeds: int = Field(default=1, ge=1, le=1_000, description="task seeds: each draws its own prompts")
    seed: int = Field(default=0, ge=0, description="the first task seed")
    sample: int = Field(
        default=64,
        ge=0,
        description="gates patched exactly to check the scores: a third each of the top, the middle and the rest of "
        "the ranking (0: no check; fewer than 16: no correlation)",
    )
    tests: bool = Field(
        default=False,
        description="test the circuit: drop its gates one by one, and test equivalence, independence and minimality",
        json_schema_extra=ADDED,
    )
    stability: int = Field(
        default=0,
        ge=0,
        le=1_000,
        description="random halves of the prompts, and of the templates, whose circuits are compared (0: none)",
        json_schema_extra=ADDED,
    )
    describe: int = Field(
        default=10,
        ge=0,
        description="heads to describe: where they look, what they write (0: none)",
        json_schema_extra=EXECUTION,
    )
    allow_noise: bool = Field(
        default=False,
        description="go on, with a warning, if the effect of all gates cannot be told from 0 on these prompts",
        json_schema_extra=EXECUTION,
    )
    memory_gb: float = Field(default=MEMORY_GB, gt=0, description=MEMORY_HELP, json_schema_extra=EXECUTION)

    common: ClassVar[tuple[str, ...] | None] = (
        "level", "method", "n", "seeds", "seed", "threshold", "ranking", "describe", "memory_gb"
    )  # fmt: skip
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {"n": 8, "steps": 3, "points": 12, "random_points": 0, "sample": 0, "areas": "none", "describe": 5}
    }

    def model_post_init(self, _: object) -> None:
        super().model_post_init(_)
        level_named(self.level).check_source(self.source)
        self.chosen_method.check_level(self.level)
        selection_named(self.selection).check_level(self.level)
        _ = self.method_settings  # which checks them

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if not self.method_options:  # a field that version 0.1 did not have: its studies can still be resumed
            del identity["method_options"]
        return identity

    @property
    def ranks_on_others(self) -> bool:
        """Whether gates are ranked on other prompts than circuits are evaluated on."""
        return self.held_out and level_named(self.level).shared

    @property
    def chosen_method(self) -> Method:
        """The registered method."""
        return method_named(self.method)

    @property
    def method_settings(self) -> MethodSettings:
        """The settings of the method: its fields that these settings have too, and ``method_options``."""
        cls = self.chosen_method.settings
        shared = {name: getattr(self, name) for name in cls.model_fields if hasattr(self, name)}
        options = key_values(self.method_options, "an option of the method")
        try:
            return cls(**{**shared, **options})
        except GatelensError as error:
            raise GatelensError(f"the method {self.method}: {error}") from None
