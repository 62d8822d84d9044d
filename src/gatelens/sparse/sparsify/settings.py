"""The settings of sparse post-training. The defaults are the values that worked best on SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gatelens.errors import GatelensError
from gatelens.runtime.settings import ADDED, EXECUTION, Settings
from gatelens.sparse.gated_attention import Gate
from gatelens.sparse.in_model import BIAS
from gatelens.sparse.sparsify._penalty import Penalty

RATES = {"lora": 8e-4, "full": 1e-5}
"""The default learning rates, by what is trained."""
BIAS_RATES: dict[Gate, float] = {"score": 0.03, "probability": 0.012}
"""The default learning rates of the biases, by what gates see."""
PUBLISHED: dict[str, Any] = {
    "gate": "score",
    "learn_bias": False,
    "bias_end": 0.0,
    "bias_steps": 500,
    "hold": "loss",
    "kl": 0.0,
    "target": 0.01,
    "penalty": "share",
    "temperature": 1.0,
    "lengths": (),
    "clip": None,
    "cooldown": 0.0,
}
"""The paper's recipe: one bias for all heads, which falls to 0, and the expected share of open edges is minimised while
the cross-entropy stays at its target. What the paper does not say (target, rates, steps) is our choice."""


QUICK: dict[str, Any] = {
    "steps": 60,
    "batch": 1,
    "length": 128,
    "keys": 4.0,
    "checkpoint_every": 20,
    "judge_sequences": 4,
}
"""A few minutes on two cores for SmolLM2: enough to see keys close, not for a good model."""


class SparsifySettings(Settings):
    """Sparse post-training: how long, on which batches, what is minimised and what is held, which weights, how fast."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"published": PUBLISHED, "quick": QUICK}
    common: ClassVar[tuple[str, ...] | None] = (
        "steps", "batch", "length", "keys", "hold", "target", "weights", "learning_rate", "seed", "bf16",
        "checkpoint_every", "judge_every",
    )  # fmt: skip

    steps: int = Field(1000, ge=1, description="Updates of the weights.", json_schema_extra=EXECUTION)
    batch: int = Field(1, ge=1, description="Sequences that one process reads at a time.")
    length: int = Field(512, ge=2, description="Tokens in a sequence.")
    lengths: tuple[int, ...] = Field(
        (32, 64, 64, 128, 128, 256, 256, 512),
        description="Lengths of the sequences: all sequences of a step have one of these lengths, as many as have the "
        "tokens of the batch, and all lengths take turns in a random order. Name a length twice to use it twice as "
        "often. Lengths above `length` are not used; without any, all sequences have that length.",
    )
    accumulate: int = Field(1, ge=1, description="Batches for each update: their gradients are averaged.")
    streamed: int = Field(16384, ge=1, description="Sequences read of each hub data set; files are read whole.")
    seed: int = Field(0, ge=0, description="Seed of the order of the text, of the gate noise and of LoRA's start.")

    kl: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the KL divergence from the dense model in the loss; the rest is cross-entropy. A text of "
        "a mixture file may have its own.",
    )
    relative: bool = Field(True, description="Count cross-entropy from that of the dense model.")
    teacher_top: int | None = Field(
        None,
        ge=1,
        description="Compute the KL divergence from this many most probable tokens of the dense model, and count all "
        "others as one; by default all tokens. A run with a teacher cache has 64.",
        json_schema_extra=ADDED,
    )
    hold: Literal["keys", "loss", "open"] = Field(
        "keys",
        description="What is held: open keys per query move along a line, at the smallest loss, or the loss is held at "
        "its target, with as few open edges as possible, or all gates stay open: the dense control, which shows what "
        "the same training does without sparsity.",
    )
    keys: float = Field(1.0, gt=0, description="hold=keys: open keys per query and head at the end of the line.")
    ramp: float = Field(
        0.6,
        gt=0,
        le=1,
        description="hold=keys: share of the steps until the end of the line, which is straight in "
        "the logarithm of the keys.",
    )
    most_loss: float | None = Field(
        None, gt=0, description="hold=keys: the line waits while the smoothed loss of any text is above this."
    )
    least_loss: float | None = Field(
        None,
        description="The loss of a sequence does not count below this, so that a model does not adapt to the text "
        "beyond it: 0 is the dense model.",
        json_schema_extra=ADDED,
    )
    target: float = Field(0.05, gt=0, description="hold=loss: target of the loss, in nats per token.")

    penalty: Penalty = Field(
        "per-head",
        description="What is minimised: the mean over heads of the logarithm of a head's expected keys per query, "
        "which makes heads idle, the same for each query of each head, which leaves queries without a key, the "
        "logarithm of all expected open edges, or their share itself, as in the paper.",
    )
    total_share: float = Field(
        0.7, ge=0, le=1, description="Share of the penalty on the total in the penalty per head or per query."
    )

    weights: Literal["lora", "full"] = Field(
        "lora", description="Train LoRA adapters (needs peft), or all weights of the model."
    )
    projections: tuple[str, ...] = Field(
        (),
        description="Names of the modules that get adapters; by default all projections of the attention. 'all-linear' "
        "stands for all linear modules but the output embeddings.",
    )
    rank: int = Field(16, ge=1, description="Rank of the adapters.")
    learning_rate: float | None = Field(
        None, gt=0, description="Learning rate of the weights, for Adam; by default 8e-4 for 'lora', 1e-5 for 'full'."
    )
    clip: float | None = Field(1.0, gt=0, description="Largest norm of the gradient of the loss by the weights.")
    warmup: int = Field(15, ge=0, description="Steps in which the learning rates rise from 0.")
    cooldown: float = Field(
        0.3, ge=0, le=1, description="Share of the steps, at the end, in which the learning rates fall to 0."
    )

    gate: Gate = Field(
        "probability",
        description="What the gates of a dense model see of an edge: its score, as in the paper, or its attention "
        "probability, with learned offsets and rest values that calibration chooses before the first step.",
    )
    temperature: float = Field(
        0.3, gt=0, description="Temperature of sampled gates: with a low one they differ little from those in use."
    )
    open_mass: float = Field(
        0.75,
        gt=0,
        le=1,
        description="Probability gates: share of each head's attention mass that calibration leaves open.",
    )
    close_first: bool = Field(
        True,
        description="Probability gates: calibration also closes the edges to the first token of a sequence; open_mass "
        "then counts all other edges.",
    )
    rest: bool = Field(
        True,
        description="Probability gates: closed edges carry a learned constant of their head, the rest value; otherwise "
        "nothing.",
        json_schema_extra=ADDED,
    )
    offset_learning_rate: float = Field(
        8e-4,
        gt=0,
        description="Probability gates: learning rate of the offsets of queries and keys, for Adam, divided by the "
        "root mean square of the attention's input in each layer.",
    )
    rest_learning_rate: float = Field(
        1.5e-3, gt=0, description="Probability gates: learning rate of the rest values, for Adam."
    )
    bias: float = Field(BIAS["score"], description="Score gates: bias of every head at the start.")
    learn_bias: bool = Field(True, description="Learn one bias for each head.")
    bias_learning_rate: float | None = Field(
        None,
        gt=0,
        description="Learning rate of the learned biases, for Adam; by default 0.03 for score gates, 0.012 for "
        "probability gates.",
    )
    bias_end: float | None = Field(
        None, description="Final value of a bias that is not learned; it changes linearly from the start."
    )
    bias_steps: int = Field(0, ge=0, description="Steps after which the bias has its final value.")

    multiplier: float = Field(16.0, description="Weight of the loss, relative to that of the penalty, at the start.")
    multiplier_rate: float = Field(
        0.05, gt=0, description="Largest change of the multiplier in one step, in log space."
    )
    multiplier_damping: float = Field(
        0.5, ge=0, description="How far the multiplier responds to the current violation at once, in log space."
    )
    multiplier_smoothing: float = Field(
        0.8, ge=0, lt=1, description="Share of the past in the moving average of what is held."
    )
    multiplier_warmup: int = Field(10, ge=0, description="Steps before the multiplier starts to change.")
    multiplier_low: float = Field(2.5, gt=0, description="Lower limit of the multiplier.")
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
        """Learning rates that are not given follow from what is trained."""
        if not isinstance(values, dict):
            return values
        defaults = {
            "learning_rate": RATES.get(values.get("weights", "lora")),
            "bias_learning_rate": BIAS_RATES.get(values.get("gate", "probability")),
        }
        return values | {name: rate for name, rate in defaults.items() if values.get(name) is None}

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        between = self.multiplier_low <= self.multiplier <= self.multiplier_high
        of_scores, holds_keys = self.gate == "score", self.hold == "keys"
        calibrated = "if the gate is 'probability', because calibration chooses the biases"
        requirements = [
            ("bias", of_scores or self.bias == BIAS["score"], f"left out {calibrated}"),
            ("learn_bias", of_scores or self.learn_bias, f"True {calibrated} and training changes them"),
            ("most_loss", holds_keys or self.most_loss is None, "unset unless hold is 'keys'"),
            ("multiplier", between, "between multiplier_low and multiplier_high"),
            ("lengths", all(n >= 2 for n in self.lengths), "at least 2"),
            ("bias_end", self.bias_end is None or not self.learn_bias, "unset if the bias is learned"),
        ]
        for name, holds, requirement in requirements:
            if not holds:
                raise GatelensError(f"{name} is {getattr(self, name)!r}: it must be {requirement}.")
        return self

    @property
    def used_lengths(self) -> tuple[int, ...]:
        """The lengths of the sequences, as often as they are used."""
        return tuple(length for length in self.lengths if length <= self.length) or (self.length,)

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

    @property
    def depends_on_steps(self) -> bool:
        """Whether the schedule depends on the number of steps, so that a run cannot go on for more."""
        return self.cooldown > 0 or self.hold == "keys"

    def changed(self, saved: dict[str, Any]) -> list[str]:
        """The names of the settings that make this another run than the one with the saved settings.

        These are all settings but the length of the run and how often it is saved and evaluated. A setting that the
        saved run did not have yet counts as having its default value there.
        """
        own, other = self.identity(), SparsifySettings(**saved).identity()
        # A setting that was added later is part of an identity only if it does not have its default.
        return [name for name in {**own, **other} if own.get(name) != other.get(name)]
