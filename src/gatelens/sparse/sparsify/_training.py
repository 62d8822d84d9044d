"""One training run: its steps, and everything that a checkpoint holds.

A step minimises, as a mean over sequences, `penalty on open edges + multiplier * loss`. As both terms are means over
sequences, neither the number of processes nor gradient accumulation changes what is minimised. All random numbers are
functions of the seed, the step and the sequence, so that a resumed run draws the same numbers.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.files import write_tensors
from gatelens.runtime.precision import use_bfloat16
from gatelens.sparse.recording import record_open, sequence_noise
from gatelens.sparse.sparsify._geco import LossMultiplier
from gatelens.sparse.sparsify._losses import cross_entropy, kl_divergence
from gatelens.sparse.sparsify._optimizer_state import load_optimizer_tensors, optimizer_tensors
from gatelens.sparse.sparsify._penalty import penalty, share_of_all_pairs
from gatelens.sparse.sparsify._sequences import TrainingSequences, cut, length_at
from gatelens.sparse.sparsify._sharding import gather, is_sharded
from gatelens.sparse.sparsify._student import Student
from gatelens.sparse.sparsify.settings import SparsifySettings

DIVERGED = 3.0  # nats above the target and above the first loss: no constraint brings a model back from there
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
MEASURED = (
    "constrained",
    "kl",
    "cross_entropy",
    "above_dense",
    "expected_open",
    "open",
    "keys_per_query",
    "not_finite",
)
Numbers = dict[str, float]


class Training:
    """A student, the dense model that it should agree with, the optimizer and the multiplier."""

    def __init__(
        self,
        student: Student,
        dense: Any,
        sequences: TrainingSequences,
        settings: SparsifySettings,
        accelerator: Any,
    ) -> None:
        self.student, self.sequences, self.settings = student, sequences, settings
        self.accelerator = accelerator
        self.bfloat16 = use_bfloat16(accelerator.device, settings.bf16)
        # Adam's second moment forgets within a hundred steps, because gradients change as gates close.
        groups: list[dict[str, Any]] = [
            {"params": student.weights(), "lr": settings.learning_rate},
            {"params": student.biases(), "lr": settings.bias_learning_rate},
            {"params": student.offsets(), "lr": settings.offset_learning_rate},
            {"params": student.rest_values(), "lr": settings.rest_learning_rate},
        ]
        optimizer = torch.optim.Adam([group for group in groups if group["params"]], betas=(0.9, 0.99))
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.module, self.optimizer = accelerator.prepare(student.trained, optimizer)
        self.dense = accelerator.prepare_model(dense, evaluation_mode=True) if is_sharded(accelerator) else dense
        self.first_loss: float | None = None  # the constrained loss of the first step
        self.multiplier = LossMultiplier(
            base=settings.multiplier,
            target=settings.target,
            scale=settings.target if settings.constraint == "kl" or settings.relative else 0.1,
            rate=settings.multiplier_rate,
            damping=settings.multiplier_damping,
            smoothing=settings.multiplier_smoothing,
            low=settings.multiplier_low,
            high=settings.multiplier_high,
            warmup=settings.multiplier_warmup,
        )

    def step(self, step: int) -> Numbers:
        """Update the weights once, from the sequences of this step (counted from 0), and return what was measured."""
        settings, processes = self.settings, self.accelerator.num_processes
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * settings.rate_factor(step)
        self.optimizer.zero_grad()
        measured = []
        for part in range(settings.accumulate):
            first = ((step * settings.accumulate + part) * processes + self.accelerator.process_index) * settings.batch
            last = part == settings.accumulate - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                measured.append(self._backward(step, range(first, first + settings.batch)))
        numbers = self._mean(torch.cat([torch.stack(measured).mean(0), self._not_finite()]))
        self._check_divergence(step, numbers)
        self.optimizer.step()
        self._set_bias(step + 1)
        numbers["length"] = self.length(step)
        numbers["multiplier"] = self.multiplier.now  # the one that this step used
        self.multiplier.update(numbers["constrained"])
        return numbers

    def _backward(self, step: int, numbers: range) -> Tensor:
        """Compute the gradients of one batch and return what was measured on it, in the order of `MEASURED`."""
        settings = self.settings
        tokens = cut(self.sequences.batch(numbers), self.length(step)).to(self.accelerator.device)
        kl = dense_ce = tokens.new_zeros(len(tokens), dtype=torch.float32)
        dense = self._dense_log_probs(tokens) if settings.teacher else None
        self.student.train()
        seeds = self._noise_seeds(step, numbers)
        with sequence_noise(self.student.hf, seeds), record_open(self.student.hf) as record:
            with self._precision():
                logits = self.module(input_ids=tokens, use_cache=False).logits
            sparse = logits.float().log_softmax(-1)
            ce = cross_entropy(sparse, tokens)
            if dense is not None:
                kl, dense_ce = kl_divergence(dense, sparse), cross_entropy(dense, tokens)
            relative = ce - dense_ce if settings.relative else ce
            if settings.each_row:
                relative = relative.clamp(min=0)
            loss = kl if settings.constraint == "kl" else relative
            edges = penalty(record, settings.penalty, settings.total_share)
            objective = edges + self.multiplier.now * loss + settings.distill * kl
            self.accelerator.backward(objective.mean() / settings.accumulate)
            expected, opened = (
                share_of_all_pairs(shares, record.pairs) for shares in (record.expected, record.open_share)
            )
            keys = record.open_keys.float()
        return torch.stack([x.detach().mean() for x in (loss, kl, ce, ce - dense_ce, expected, opened, keys)])

    def length(self, step: int) -> int:
        """Tokens in each sequence of this step."""
        settings = self.settings
        return length_at(step, settings.lengths or (settings.length,), settings.seed)

    def _noise_seeds(self, step: int, numbers: range) -> list[tuple[int, ...]]:
        """The seed of the gate noise of each sequence or, if sequences are cut, of each piece."""
        settings, pieces = self.settings, self.settings.length // self.length(step)
        if pieces == 1:
            return [(settings.seed, step, number) for number in numbers]
        return [(settings.seed, step, number, piece) for number in numbers for piece in range(pieces)]

    @torch.no_grad()
    def _dense_log_probs(self, tokens: Int[Tensor, "sequence token"]) -> Float[Tensor, "sequence token vocab"]:
        with self._precision():
            logits = self.dense(input_ids=tokens, use_cache=False).logits
        return logits.float().log_softmax(-1)

    def _precision(self) -> Any:
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.bfloat16)

    def _not_finite(self) -> Float[Tensor, 1]:
        """How many gradients of this process contain NaN or infinity."""
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
        not_finite = [~gradient.isfinite().all() for gradient in local]
        return torch.stack([x.to(self.accelerator.device) for x in not_finite]).sum().float()[None]

    def _set_bias(self, steps: int) -> None:
        """Give a bias that is not learned the value that it has after this many steps."""
        if self.settings.bias_end is not None:
            self.student.set_bias(self.settings.bias_at(steps))

    def _mean(self, measured: Tensor) -> Numbers:
        """The mean over processes, by name."""
        values = self.accelerator.reduce(measured, reduction="mean").tolist()
        return dict(zip(MEASURED, values, strict=True))

    def _check_divergence(self, step: int, numbers: Numbers) -> None:
        loss, target = numbers["constrained"], self.settings.target
        self.first_loss = loss if self.first_loss is None else self.first_loss
        bad = numbers.pop("not_finite") or not math.isfinite(loss) or not math.isfinite(numbers["expected_open"])
        if not bad and loss <= max(target, self.first_loss) + DIVERGED:
            return
        gradients = ", and its gradients contain NaN or infinity" if bad else ""
        raise _diverged(step + 1, f"the loss is {loss:.3g} nats and its target {target:.3g}{gradients}")

    def weights(self, steps: int) -> dict[str, Tensor]:
        """The trained weights after this many steps, whole and on the CPU. All processes must call this.

        Raises an error if any of them is NaN or infinite.
        """
        weights = {name: gather(weight) for name, weight in self.student.state().items()}
        if not all(weight.isfinite().all() for weight in weights.values()):
            raise _diverged(steps, "the updated weights contain NaN or infinity")
        return weights

    def save(self, folder: Path, steps: int) -> None:
        """Write a checkpoint after this many steps: trained weights, optimizer, multiplier.

        All processes call it, because weights may be sharded over them; the main one writes.
        """
        weights, moments = self.weights(steps), optimizer_tensors(self.optimizer)
        if self.accelerator.is_main_process:
            write_tensors(folder / WEIGHTS, weights)
            write_tensors(folder / OPTIMIZER, moments)
            multiplier = {name: getattr(self.multiplier, name) for name in ("base", "steps", "violation")}
            state = {"steps": steps, "first": self.first_loss, "multiplier": multiplier}
            (folder / STATE).write_text(json.dumps(state, indent=1))

    def restore(self, folder: Path) -> int:
        """Continue from what `save` wrote, and return the number of steps done."""
        if (folder / "optimizer.pt").exists():
            raise GatelensError(f"the checkpoint {folder} was written by gatelens 0.1, which stored a pickle.")
        try:
            state = json.loads((folder / STATE).read_text())
            weights, moments = load_file(folder / WEIGHTS), load_file(folder / OPTIMIZER)
            steps, first_loss, multiplier = int(state["steps"]), state["first"], state["multiplier"]
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise GatelensError(f"the checkpoint {folder} is damaged ({reason[:100]}).") from error
        self.student.load_state(weights)
        load_optimizer_tensors(self.optimizer, moments)
        self.first_loss = first_loss
        for name, value in multiplier.items():
            setattr(self.multiplier, name, value)
        self._set_bias(steps)
        return steps


def _diverged(step: int, reason: str) -> GatelensError:
    return GatelensError(
        f"training diverged at step {step}: {reason}. The last checkpoint is unchanged; lower learning_rate or "
        "bias_learning_rate and give another folder."
    )
