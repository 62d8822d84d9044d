"""The settings of sparse post-training. The defaults are the values that worked best on SmolLM2."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gatelens.errors import GatelensError
from gatelens.runtime.settings import EXECUTION, Settings
from gatelens.sparse.gated_attention import Gate
from gatelens.sparse.in_model import BIAS
from gatelens.sparse.sparsify._penalty import Penalty

RATES = {"lora": 1e-3, "full": 1e-5}
"""The default learning rates, by what is trained."""
BIAS_RATES: dict[Gate, float] = {"score": 0.03, "probability": 0.012}
"""The default learning rates of the biases, by what gates see."""


class SparsifySettings(Settings):
    """Sparse post-training: how long, on which batches, under which constraint, which weights, how fast."""

    steps: int = Field(1000, ge=1, description="Updates of the weights.", json_schema_extra=EXECUTION)
    batch: int = Field(4, ge=1, description="Sequences that one process reads at a time.")
    length: int = Field(128, ge=2, description="Tokens in a sequence.")
    lengths: tuple[int, ...] = Field(
        (),
        description="Train on shorter sequences too: each step cuts its sequences into pieces of one of these lengths, "
        "and all lengths take turns in a random order. Name a length twice to use it twice as often.",
    )
    accumulate: int = Field(1, ge=1, description="Batches for each update: their gradients are averaged.")
    streamed: int = Field(16384, ge=1, description="Sequences read of each hub data set; files are read whole.")
    seed: int = Field(0, ge=0, description="Seed of the order of the text, of the gate noise and of LoRA's start.")

    constraint: Literal["kl", "cross-entropy"] = Field(
        "kl", description="The loss that is held at its target: KL divergence from the dense model, or cross-entropy."
    )
    target: float = Field(0.05, gt=0, description="Target of the loss, in nats per token.")
    relative: bool = Field(True, description="Add the dense model's own loss to the target (for KL that is 0).")
    each_row: bool = Field(
        False,
        description="Count a sequence whose cross-entropy is below the dense model's as equal, so that it does not "
        "make up for others.",
    )
    distill: float = Field(0.0, ge=0, description="Weight of an extra KL from the dense model, beside cross-entropy.")

    penalty: Penalty = Field(
        "total",
        description="What is minimised: the logarithm of all expected open edges, or the mean over heads of the "
        "logarithm of a head's expected keys per query, which makes heads idle.",
    )
    total_share: float = Field(
        0.0, ge=0, le=1, description="Share of the penalty on the total that is mixed into the penalty per head."
    )

    weights: Literal["lora", "full"] = Field(
        "lora", description="Train LoRA adapters (needs peft), or all weights of the model."
    )
    projections: tuple[str, ...] = Field(
        (), description="Names of the modules that get adapters; by default all projections of the attention."
    )
    rank: int = Field(16, ge=1, description="Rank of the adapters.")
    learning_rate: float | None = Field(
        None, gt=0, description="Learning rate of the weights, for Adam; by default 1e-3 for 'lora', 1e-5 for 'full'."
    )
    warmup: int = Field(10, ge=0, description="Steps in which the learning rates rise from 0.")
    cooldown: float = Field(
        0.0, ge=0, le=1, description="Share of the steps, at the end, in which the learning rates fall to 0."
    )

    gate: Gate = Field(
        "score",
        description="What the gates of a dense model see of an edge: its score, as in the paper, or its attention "
        "probability, with learned offsets and rest values that calibration chooses before the first step.",
    )
    open_mass: float = Field(
        0.95,
        gt=0,
        le=1,
        description="Probability gates: share of each head's attention mass that calibration leaves open.",
    )
    close_first: bool = Field(
        False,
        description="Probability gates: calibration also closes the edges to the first token of a sequence; open_mass "
        "then counts all other edges.",
    )
    offset_learning_rate: float = Field(
        8e-4, gt=0, description="Probability gates: learning rate of the offsets of queries and keys, for Adam."
    )
    rest_learning_rate: float = Field(
        1.5e-3, gt=0, description="Probability gates: learning rate of the rest values, for Adam."
    )
    bias: float = Field(
        BIAS["score"], description="Gate bias of every head at the start; gates with a positive bias are open."
    )
    learn_bias: bool = Field(True, description="Learn one bias for each head.")
    bias_learning_rate: float | None = Field(
        None,
        gt=0,
        description="Learning rate of the learned biases, for Adam; by default 0.03 for score gates, 0.012 for "
        "probability gates.",
    )
    most_open: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Before the first step, lower learned biases until no head has a larger share of open edges.",
    )
    bias_end: float | None = Field(
        None, description="Final value of a bias that is not learned; it changes linearly from the start."
    )
    bias_steps: int = Field(0, ge=0, description="Steps after which the bias has its final value.")

    multiplier: float = Field(10.0, description="GECO multiplier of the loss at the start.")
    multiplier_rate: float = Field(
        0.02, gt=0, description="Largest change of the multiplier in one step, in log space."
    )
    multiplier_damping: float = Field(
        1.0, ge=0, description="How far the multiplier responds to the current violation at once, in log space."
    )
    multiplier_smoothing: float = Field(
        0.9, ge=0, lt=1, description="Share of the past in the moving average of the violation."
    )
    multiplier_warmup: int = Field(20, ge=0, description="Steps before the multiplier starts to change.")
    multiplier_low: float = Field(0.1, gt=0, description="Lower limit of the multiplier.")
    multiplier_high: float = Field(1000.0, description="Upper limit of the multiplier.")

    self_text: int = Field(
        0, ge=0, description="Sequences that the dense model writes itself, to train on beside the text."
    )
    self_share: float = Field(0.5, ge=0, le=1, description="Share of these sequences in the batches, if there are any.")

    bf16: bool = Field(False, description="Mixed precision in bfloat16.")
    gradient_checkpointing: bool = Field(
        False, description="Use less memory: compute activations again in the backward pass."
    )
    checkpoint_every: int = Field(50, ge=1, description="Steps between checkpoints.", json_schema_extra=EXECUTION)
    judge_every: int = Field(
        100, ge=1, description="Steps between evaluations on held-out text.", json_schema_extra=EXECUTION
    )
    judge_sequences: int = Field(
        8, ge=1, description="Sequences of each held-out text to evaluate on.", json_schema_extra=EXECUTION
    )
    merge: bool = Field(
        True,
        description="Write full weights; otherwise write the adapter alone, with the name of its base.",
        json_schema_extra=EXECUTION,
    )

    @model_validator(mode="before")
    @classmethod
    def _default_rates(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        defaults = {
            "learning_rate": RATES.get(values.get("weights", "lora")),
            "bias_learning_rate": BIAS_RATES.get(values.get("gate", "score")),
        }
        return values | {name: rate for name, rate in defaults.items() if values.get(name) is None}

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        with_kl = self.constraint == "kl"  # distill would do what the multiplier does, and each_row nothing
        between = self.multiplier_low <= self.multiplier <= self.multiplier_high
        of_scores = self.gate == "score"
        calibrated = "if the gate is 'probability', because calibration chooses the biases"
        requirements = [
            ("bias", of_scores or self.bias == BIAS["score"], f"left out {calibrated}"),
            ("learn_bias", of_scores or self.learn_bias, f"True {calibrated} and training changes them"),
            ("each_row", not self.each_row or self.relative, "False if the target is not relative"),
            ("each_row", not (with_kl and self.each_row), "False if the constraint is 'kl'"),
            ("distill", not (with_kl and self.distill), "0 if the constraint is 'kl'"),
            ("most_open", self.most_open == 1 or self.learn_bias, "1 if the bias is not learned"),
            ("total_share", self.penalty == "per-head" or not self.total_share, "0 if the penalty is 'total'"),
            ("multiplier", between, "between multiplier_low and multiplier_high"),
            ("lengths", all(2 <= n <= self.length for n in self.lengths), f"from 2 to length, which is {self.length}"),
            ("bias_end", self.bias_end is None or not self.learn_bias, "unset if the bias is learned"),
        ]
        for name, holds, requirement in requirements:
            if not holds:
                raise GatelensError(f"{name} is {getattr(self, name)!r}: it must be {requirement}.")
        return self

    @property
    def teacher(self) -> bool:
        """Whether the dense model reads every batch too."""
        return self.constraint == "kl" or self.relative or self.distill > 0

    def bias_at(self, step: int) -> float:
        """The bias that all heads share after this many steps, if it is not learned."""
        if self.bias_end is None:
            return self.bias
        progress = min(1.0, step / max(1, self.bias_steps))
        return self.bias + progress * (self.bias_end - self.bias)

    def rate_factor(self, step: int) -> float:
        """The factor of the learning rates at a step, counted from 0: it rises, stays at 1, and falls."""
        rise = (step + 1) / self.warmup if self.warmup else 1.0
        last = self.cooldown * self.steps
        fall = (self.steps - step) / last if last else 1.0
        return min(1.0, rise, fall)

    def as_dict(self) -> dict[str, Any]:
        """All settings as plain JSON."""
        return self.model_dump(mode="json")

    def changed(self, saved: dict[str, Any]) -> list[str]:
        """The names of the settings that make this another run than the one with the saved settings.

        These are all settings but the length of the run and how often it is saved and evaluated. A setting that the
        saved run did not have yet counts as having its default value there.
        """
        own, other = self.identity(), SparsifySettings(**saved).identity()
        return [name for name in own if own[name] != other[name]]
