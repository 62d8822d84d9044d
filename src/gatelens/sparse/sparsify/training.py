"""One training run: its steps, and everything of it that a checkpoint holds.

A step minimises, over rows, `log(expected open edges) + multiplier * loss`. The logarithm keeps the push on gates as
strong when few are open as it was when all were. As both terms are means over rows, neither the number of processes
nor gradient accumulation changes what is minimised. All randomness is a function of the seed, the step and the row:
a run that is continued draws what it would have drawn.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.files import write_tensors
from gatelens.runtime.precision import use_bfloat16
from gatelens.sparse.recording import record_open, sequence_noise
from gatelens.sparse.sparsify.geco import Multiplier
from gatelens.sparse.sparsify.losses import cross_entropy, kl_divergence
from gatelens.sparse.sparsify.rows import Rows
from gatelens.sparse.sparsify.settings import SparsifySettings
from gatelens.sparse.sparsify.spread import cut_state, is_spread, whole, whole_state
from gatelens.sparse.sparsify.student import Student

FAR = 3.0  # nats above its target, and above where it began: no constraint brings a model back from there
NONE_OPEN = 1e-12  # an expected share below which the push on gates ends: the logarithm of 0 has no gradient
WEIGHTS = "weights.safetensors"
Numbers = dict[str, float]


class Training:
    """A student, the dense model it should agree with, the optimizer and the multiplier."""

    def __init__(self, student: Student, dense: Any, rows: Rows, settings: SparsifySettings, accelerator: Any) -> None:
        self.student, self.rows, self.settings = student, rows, settings
        self.accelerator = accelerator
        self.bfloat16 = use_bfloat16(accelerator.device, settings.bf16)
        # Adam's second moment forgets within a hundred steps: gradients change as gates close.
        groups: list[dict[str, Any]] = [
            {"params": student.weights(), "lr": settings.learning_rate},
            {"params": student.biases(), "lr": settings.bias_learning_rate},
        ]
        optimizer = torch.optim.Adam([g for g in groups if g["params"]], betas=(0.9, 0.99))
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.module, self.optimizer = accelerator.prepare(student.trained, optimizer)
        self.dense = accelerator.prepare_model(dense, evaluation_mode=True) if is_spread(accelerator) else dense
        self.first: float | None = None  # the constrained loss of the first step
        self.multiplier = Multiplier(
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
        """Update the weights once, from the rows of this step (counted from 0), and say what was measured."""
        settings, processes = self.settings, self.accelerator.num_processes
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * settings.speed(step)
        self.optimizer.zero_grad()
        measured = []
        for part in range(settings.accumulate):
            first = ((step * settings.accumulate + part) * processes + self.accelerator.process_index) * settings.batch
            last = part == settings.accumulate - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                measured.append(self._backward(step, range(first, first + settings.batch)))
        numbers = self._mean(torch.cat([torch.stack(measured).mean(0), self._not_finite()]))
        self._refuse_divergence(step, numbers)
        self.optimizer.step()
        self._set_bias(step + 1)
        numbers["multiplier"] = self.multiplier.now  # the one that this step used
        self.multiplier.update(numbers["constrained"])
        return numbers

    def _backward(self, step: int, numbers: range) -> Tensor:
        """Gradients of one batch, and what was measured on it: (loss, KL, cross-entropy, expected, open)."""
        settings = self.settings
        tokens = self.rows.batch(numbers).to(self.accelerator.device)
        kl = dense_ce = tokens.new_zeros(len(tokens), dtype=torch.float32)
        dense = self._dense(tokens) if settings.teacher else None
        self.student.train()
        seeds = [(settings.seed, step, number) for number in numbers]
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
            expected = _share(record.expected, record.pairs)
            objective = expected.clamp(min=NONE_OPEN).log() + self.multiplier.now * loss + settings.distill * kl
            self.accelerator.backward(objective.mean() / settings.accumulate)
            opened = _share(record.open_share, record.pairs)
        return torch.stack([x.detach().mean() for x in (loss, kl, ce, ce - dense_ce, expected, opened)])

    @torch.no_grad()
    def _dense(self, tokens: Tensor) -> Tensor:
        with self._precision():
            logits = self.dense(input_ids=tokens, use_cache=False).logits
        return logits.float().log_softmax(-1)

    def _precision(self) -> Any:
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.bfloat16)

    def _not_finite(self) -> Tensor:
        """How many of this process's gradients have NaN or infinity in them: (1,)."""
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        mine = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]  # FSDP cuts them
        bad = [~grad.isfinite().all() for grad in mine]
        return torch.stack([x.to(self.accelerator.device) for x in bad]).sum().float()[None]

    def _set_bias(self, steps: int) -> None:
        """Give a bias that is not learned the value that it has after this many steps."""
        if self.settings.bias_end is not None:
            self.student.set_bias(self.settings.bias_at(steps))

    def _mean(self, measured: Tensor) -> Numbers:
        """Over processes, by name."""
        names = ("constrained", "kl", "cross_entropy", "above_dense", "expected_open", "open", "not_finite")
        values = self.accelerator.reduce(measured, reduction="mean").tolist()
        return dict(zip(names, values, strict=True))

    def _refuse_divergence(self, step: int, numbers: Numbers) -> None:
        loss, target = numbers["constrained"], self.settings.target
        self.first = loss if self.first is None else self.first
        bad = numbers.pop("not_finite") or not math.isfinite(loss) or not math.isfinite(numbers["expected_open"])
        if not bad and loss <= max(target, self.first) + FAR:
            return
        gradients = ", and its gradients are no numbers" if bad else ""
        raise _diverged(step + 1, f"the loss is {loss:.3g} nats where its target is {target:.3g}{gradients}")

    def weights(self, steps: int) -> dict[str, Tensor]:
        """What this many steps made, whole and on the CPU; refused if any is no number. All processes must ask."""
        weights = {name: whole(weight) for name, weight in self.student.state().items()}
        if not all(weight.isfinite().all() for weight in weights.values()):
            raise _diverged(steps, "its update left weights that are no numbers")
        return weights

    def save(self, folder: Path, steps: int) -> None:
        """Write what a checkpoint holds after this many steps: trained weights, optimizer, multiplier.

        All processes call it, as weights may be cut over them; the main one writes.
        """
        weights = self.weights(steps)
        optimizer = whole_state(self.optimizer)
        if self.accelerator.is_main_process:
            write_tensors(folder / WEIGHTS, weights)
            torch.save(optimizer, folder / "optimizer.pt")
            moved = {name: getattr(self.multiplier, name) for name in ("base", "steps", "violation")}
            state = {"steps": steps, "first": self.first, "multiplier": moved}
            (folder / "state.json").write_text(json.dumps(state, indent=1))

    def restore(self, folder: Path) -> int:
        """Take up what `save` wrote and return the number of steps done."""
        try:
            state = json.loads((folder / "state.json").read_text())
            weights = load_file(folder / WEIGHTS)
            optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
            steps, first, moved = int(state["steps"]), state["first"], state["multiplier"]
        except (OSError, SafetensorError, UnpicklingError, EOFError, ValueError, RuntimeError, LookupError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise GatelensError(f"the checkpoint {folder} is damaged ({reason[:100]}).") from error
        self.student.load_state(weights)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.optimizer.load_state_dict(cut_state(optimizer, parameters))
        self.first = first
        for name, value in moved.items():
            setattr(self.multiplier, name, value)
        self._set_bias(steps)
        return steps


def _diverged(step: int, why: str) -> GatelensError:
    return GatelensError(
        f"training diverged at step {step}: {why}. The last checkpoint is as it was before; lower learning_rate or "
        "bias_learning_rate and write to another folder."
    )


def _share(shares: Tensor, pairs: Tensor) -> Tensor:
    """Of shares (layer, row, head), the share over all visible pairs of a row: (row,)."""
    return (shares * pairs).sum((0, 2)) / pairs.sum((0, 2))
