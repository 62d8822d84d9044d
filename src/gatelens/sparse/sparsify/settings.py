"""What can be chosen about sparse post-training, with the values that served best on SmolLM2."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from gatelens.errors import GatelensError

RATES = {"lora": 1e-3, "full": 1e-5}  # learning rates by what is trained


@dataclass(frozen=True)
class SparsifySettings:
    """Sparse post-training: how long, on what batches, under which constraint, which weights, how fast."""

    steps: int = field(default=1000, metadata={"help": "Updates of the weights."})
    batch: int = field(default=4, metadata={"help": "Sequences that one process reads at a time."})
    length: int = field(default=128, metadata={"help": "Tokens in a sequence."})
    accumulate: int = field(default=1, metadata={"help": "Batches for each update: gradients are averaged over them."})
    streamed: int = field(
        default=16384, metadata={"help": "Sequences read of each hub data set; files are read whole."}
    )
    seed: int = field(default=0, metadata={"help": "Of the order of the text, the gates' noise and LoRA's start."})

    constraint: Literal["kl", "cross-entropy"] = field(
        default="kl",
        metadata={"help": "The loss held at its target: KL divergence from the dense model, or cross-entropy."},
    )
    target: float = field(default=0.05, metadata={"help": "Target of the loss, in nats per token."})
    relative: bool = field(
        default=True,
        metadata={"help": "Add the dense model's own loss to the target (for KL that is 0)."},
    )
    each_row: bool = field(
        default=False,
        metadata={"help": "Count a row whose cross-entropy is below the dense model's as equal: it pays for no other."},
    )
    distill: float = field(
        default=0.0, metadata={"help": "Weight of an extra KL from the dense model, beside cross-entropy."}
    )

    weights: Literal["lora", "full"] = field(
        default="lora", metadata={"help": "Train LoRA adapters (needs peft), or all weights of the model."}
    )
    projections: tuple[str, ...] = field(
        default=(), metadata={"help": "Modules that get adapters, by name; none given: all of the attention."}
    )
    rank: int = field(default=16, metadata={"help": "Rank of the adapters."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Of the weights, for Adam; not given: 1e-3 for 'lora', 1e-5 for 'full'."}
    )
    warmup: int = field(default=10, metadata={"help": "Steps in which learning rates rise from 0."})
    cooldown: float = field(
        default=0.0, metadata={"help": "Share of the steps, at the end, in which learning rates fall to 0."}
    )

    bias: float = field(default=3.0, metadata={"help": "Gate bias of every head at the start; positive is open."})
    learn_bias: bool = field(default=True, metadata={"help": "Learn one bias for each head."})
    bias_learning_rate: float = field(default=0.03, metadata={"help": "Of the learned biases, for Adam."})
    most_open: float = field(
        default=1.0,
        metadata={"help": "Before the first step, lower learned biases until no head has more of its edges open."},
    )
    bias_end: float | None = field(
        default=None, metadata={"help": "Where a bias that is not learned arrives, in a straight line."}
    )
    bias_steps: int = field(default=0, metadata={"help": "Steps that it takes to arrive there."})

    multiplier: float = field(default=10.0, metadata={"help": "GECO multiplier of the loss at the start."})
    multiplier_rate: float = field(default=0.02, metadata={"help": "Its largest change in one step, in log space."})
    multiplier_damping: float = field(
        default=1.0, metadata={"help": "How far it answers the present violation at once, in log space."}
    )
    multiplier_smoothing: float = field(
        default=0.9, metadata={"help": "Share of the past in the moving average of the violation."}
    )
    multiplier_warmup: int = field(default=20, metadata={"help": "Steps before it starts to move."})
    multiplier_low: float = field(default=0.1, metadata={"help": "It never falls below this."})
    multiplier_high: float = field(default=1000.0, metadata={"help": "It never rises above this."})

    self_text: int = field(
        default=0, metadata={"help": "Sequences that the dense model writes itself, to train on beside the text."}
    )
    self_share: float = field(default=0.5, metadata={"help": "Their share of the batches, where there are any."})

    bf16: bool = field(default=False, metadata={"help": "Mixed precision in bfloat16."})
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Less memory: compute activations again in the backward pass."}
    )
    checkpoint_every: int = field(default=50, metadata={"help": "Steps between checkpoints."})
    judge_every: int = field(default=100, metadata={"help": "Steps between looks at held-out text."})
    judge_sequences: int = field(default=8, metadata={"help": "Sequences of each held-out text looked at."})
    merge: bool = field(
        default=True, metadata={"help": "Write full weights; otherwise the adapter alone, beside its base's name."}
    )

    def __post_init__(self) -> None:
        self._require("constraint", self.constraint in ("kl", "cross-entropy"), "'kl' or 'cross-entropy'")
        self._require("weights", self.weights in RATES, "'lora' or 'full'")
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", RATES[self.weights])
        for name, value in self.as_dict().items():
            self._require(name, not isinstance(value, float) or math.isfinite(value), "a finite number")
        counts = ("steps", "batch", "accumulate", "rank", "checkpoint_every", "judge_every", "judge_sequences")
        for name in counts:
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("streamed", self.streamed >= 1, "at least 1")
        self._require("length", self.length >= 2, "at least 2, as a first token predicts a second")
        for name in ("seed", "warmup", "bias_steps", "multiplier_warmup", "multiplier_damping", "self_text", "distill"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("learning_rate", "bias_learning_rate", "multiplier_rate", "multiplier_low", "target"):
            self._require(name, getattr(self, name) > 0, "above 0")
        for name in ("cooldown", "self_share"):
            self._require(name, 0 <= getattr(self, name) <= 1, "a share from 0 to 1")
        self._require("each_row", not self.each_row or self.relative, "unset where the target is not relative")
        beside = self.constraint != "kl"  # beside KL the one does nothing, the other what the multiplier does
        for name in ("each_row", "distill"):
            self._require(name, beside or not getattr(self, name), "unset where the constraint is 'kl'")
        self._require("most_open", 0 < self.most_open <= 1, "a share above 0, up to 1")
        self._require("most_open", self.most_open == 1 or self.learn_bias, "1 where the bias is not learned")
        self._require("multiplier_smoothing", 0 <= self.multiplier_smoothing < 1, "a share from 0 to below 1")
        between = self.multiplier_low <= self.multiplier <= self.multiplier_high
        self._require("multiplier", between, "between multiplier_low and multiplier_high")
        self._require("bias_end", self.bias_end is None or not self.learn_bias, "unset where the bias is learned")
        object.__setattr__(self, "projections", tuple(self.projections))

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise GatelensError(f"{name} should be {what}, not {getattr(self, name)!r}.")

    @property
    def teacher(self) -> bool:
        """Whether the dense model reads every batch too."""
        return self.constraint == "kl" or self.relative or self.distill > 0

    def bias_at(self, step: int) -> float:
        """The bias that all heads share after this many steps, where it is not learned."""
        if self.bias_end is None:
            return self.bias
        arrived = min(1.0, step / max(1, self.bias_steps))
        return self.bias + arrived * (self.bias_end - self.bias)

    def speed(self, step: int) -> float:
        """What learning rates are multiplied with at a step, counted from 0: a trapezium."""
        rise = (step + 1) / self.warmup if self.warmup else 1.0
        last = self.cooldown * self.steps
        fall = (self.steps - step) / last if last else 1.0
        return min(1.0, rise, fall)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def changed(self, other: dict[str, Any]) -> list[str]:
        """What makes another run of these settings: all but how long it is, how often it is saved and looked at."""
        free = {"steps", "checkpoint_every", "judge_every", "judge_sequences", "merge"}
        theirs = SparsifySettings(**other).as_dict()  # settings that are newer than the run have their defaults
        mine = self.as_dict()
        return [f.name for f in fields(self) if f.name not in free and mine[f.name] != theirs[f.name]]
