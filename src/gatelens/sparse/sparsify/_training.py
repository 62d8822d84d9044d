"""One training run: its steps, and everything that a checkpoint holds.

A step minimises, as a mean over sequences, `loss + penalty on open edges / multiplier`. As both terms are means over
sequences, neither the number of processes nor gradient accumulation changes what is minimised. All random numbers are
functions of the seed, the step and the sequence, so that a resumed run draws the same numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gatelens.errors import GatelensError
from gatelens.runtime.files import replace_file, write_tensors
from gatelens.runtime.precision import use_bfloat16
from gatelens.sparse.recording import gate_temperature, record_open, sequence_noise
from gatelens.sparse.sparsify._log import MEASURED, Record
from gatelens.sparse.sparsify._losses import Losses, losses
from gatelens.sparse.sparsify._multiplier import Held, HeldKeys, HeldLoss, HeldOpen, Multiplier, load_state, state_of
from gatelens.sparse.sparsify._optimizer_state import load_optimizer_tensors, optimizer_tensors
from gatelens.sparse.sparsify._penalty import penalty, share_of_all_pairs
from gatelens.sparse.sparsify._sequences import TrainingSequences, length_at
from gatelens.sparse.sparsify._sharding import gather, is_sharded
from gatelens.sparse.sparsify._student import Student
from gatelens.sparse.sparsify._teacher_cache import TeacherCache
from gatelens.sparse.sparsify._top_k import TopK, top_k_losses, top_k_of
from gatelens.sparse.sparsify.judge import IDLE
from gatelens.sparse.sparsify.settings import SparsifySettings

DIVERGED = 3.0  # nats above the target and above the first loss: no constraint brings a model back from there
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"


class Training:
    """A student, the dense model that it should agree with, the optimizer, the multiplier and what it holds.

    Arguments:
        input_sizes: the root mean square of the attention's input in each layer: learning rates of offsets are divided
            by it. A checkpoint holds it too.
        cache: where the distributions of the dense model are read from, if `teacher_top` is set.
    """

    def __init__(
        self,
        student: Student,
        dense: Any,
        sequences: TrainingSequences,
        settings: SparsifySettings,
        accelerator: Any,
        input_sizes: Sequence[float] | None = None,
        cache: TeacherCache | None = None,
    ) -> None:
        self.student, self.sequences, self.settings = student, sequences, settings
        self.accelerator, self.cache = accelerator, cache
        self.bfloat16 = use_bfloat16(accelerator.device, settings.bf16)
        self.input_sizes = input_sizes or [1.0] * len(student.offsets())
        # Adam's second moment forgets within a hundred steps, because gradients change as gates close.
        groups = [
            {"params": list(parameters), "lr": rate} for parameters, rate in self._parameters_with_rates() if parameters
        ]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
        self.module, self.optimizer = accelerator.prepare(student.trained, optimizer)
        self.dense = accelerator.prepare_model(dense, evaluation_mode=True) if is_sharded(accelerator) else dense
        self.first_loss: float | None = None  # the loss of the first step
        self.held = _held(settings)
        self.multiplier = Multiplier(
            base=settings.multiplier,
            rate=settings.multiplier_rate,
            damping=settings.multiplier_damping,
            low=settings.multiplier_low,
            high=settings.multiplier_high,
            warmup=settings.multiplier_warmup,
        )

    def _parameters_with_rates(self) -> list[tuple[Sequence[nn.Parameter], float]]:
        """All trained parameters and their learning rates. Offsets have one for each layer, at the end."""
        settings, student = self.settings, self.student
        assert settings.learning_rate is not None
        assert settings.bias_learning_rate is not None
        return [
            (student.weights(), settings.learning_rate),
            (student.biases(), settings.bias_learning_rate),
            (student.rest_values(), settings.rest_learning_rate),
            *(
                (of_layer, settings.offset_learning_rate / size)
                for of_layer, size in zip(student.offsets(), self.input_sizes, strict=True)
            ),
        ]

    def step(self, step: int) -> Record:
        """Update the weights once, from the sequences of this step (counted from 0), and return what was measured."""
        settings, processes = self.settings, self.accelerator.num_processes
        rates = [rate for parameters, rate in self._parameters_with_rates() if parameters]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * settings.rate_factor(step)
        self.optimizer.zero_grad()
        measured = []
        for part in range(settings.accumulate):
            first = ((step * settings.accumulate + part) * processes + self.accelerator.process_index) * settings.batch
            last = part == settings.accumulate - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                measured.append(self._backward(step, range(first, first + settings.batch)))
        numbers, not_finite = self._mean(torch.stack(measured).mean(0))
        self._check_divergence(step, numbers, not_finite)
        if settings.clip is not None:
            self.accelerator.clip_grad_norm_(self.student.weights(), settings.clip)
        self.optimizer.step()
        self._set_bias(step + 1)
        numbers["multiplier"] = self.multiplier.now  # the one that this step used
        self.held.watch(self._loss_of_texts(numbers), self.length(step))
        self.multiplier.update(self.held.violation(numbers["loss"], numbers["keys_per_query"]))
        numbers["length"] = self.length(step)
        return numbers

    def _backward(self, step: int, numbers: range) -> Tensor:
        """Compute the gradients of one batch and return what was measured on it.

        Returns the numbers of `MEASURED`, then the loss of each text, summed over its sequences, and the number of its
        sequences.
        """
        settings = self.settings
        sequence_numbers = self._sequence_numbers(step, numbers)
        batch = self.sequences.batch(sequence_numbers, self.length(step))
        tokens, kl_share = batch.tokens.to(self.accelerator.device), batch.kl.to(self.accelerator.device)
        dense = self._dense(tokens)
        self.student.train()
        hf, seeds = self.student.hf, [(settings.seed, step, *number) for number in sequence_numbers]
        with sequence_noise(hf, seeds), gate_temperature(hf, settings.temperature), record_open(hf) as record:
            with self.precision():
                logits = self.module(input_ids=tokens, use_cache=False).logits
            kl, ce, dense_ce = _losses(logits, dense, tokens)
            relative = ce - dense_ce if settings.relative else ce
            loss = kl_share * kl + (1 - kl_share) * relative
            if settings.least_loss is not None:
                loss = loss.clamp(min=settings.least_loss)
            edges = penalty(record, settings.penalty, settings.total_share)
            self.accelerator.backward((loss + edges / self.multiplier.now).mean() / settings.accumulate)
            expected, opened = (
                share_of_all_pairs(shares, record.pairs) for shares in (record.expected, record.open_share)
            )
            keys = record.open_keys.float()
            idle = (keys.mean(-1) < IDLE).float()
        means = [x.detach().mean() for x in (loss, kl, ce, ce - dense_ce, expected, opened, keys, idle)]
        by_text = torch.zeros(2, len(self.sequences.texts), device=loss.device)
        text = batch.text.to(loss.device)
        by_text[0].index_add_(0, text, loss.detach())
        by_text[1].index_add_(0, text, torch.ones_like(loss))
        return torch.cat([torch.stack(means), by_text.flatten(), self._not_finite()])

    def length(self, step: int) -> int:
        """Tokens in each sequence of this step."""
        return length_at(step, self.settings.used_lengths, self.settings.seed)

    def _sequence_numbers(self, step: int, numbers: range) -> list[tuple[int, int]]:
        """The numbers of all sequences of a batch: as many short ones as have the tokens of one of full length."""
        pieces = self.settings.length // self.length(step)
        return [(number, piece) for number in numbers for piece in range(pieces)]

    def _loss_of_texts(self, numbers: Record) -> dict[str, float]:
        """Take the mean loss of each text that was read in this step out of what was measured."""
        of_texts: dict[str, float] = {}
        for index, text in enumerate(self.sequences.texts):
            total, count = numbers.pop(f"loss {index}"), numbers.pop(f"count {index}")
            if count:
                of_texts[text.name] = total / count
        return of_texts

    def _dense(self, tokens: Int[Tensor, "sequence token"]) -> Tensor | TopK:
        """What the loss compares with: the logits of the dense model, or the top k of its distributions."""
        top = self.settings.teacher_top
        if top is None:
            return self._dense_logits(tokens)

        def compute(some: Tensor) -> TopK:
            return top_k_of(self._dense_logits(some), some, top)

        if self.cache is None:
            return compute(tokens)
        return TopK(*(x.to(tokens.device) for x in self.cache.read(tokens, compute)))

    @torch.no_grad()
    def _dense_logits(self, tokens: Int[Tensor, "sequence token"]) -> Float[Tensor, "sequence token vocab"]:
        with self.precision():
            logits: Tensor = self.dense(input_ids=tokens, use_cache=False).logits
        return logits

    def precision(self) -> Any:
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.bfloat16)

    def _not_finite(self) -> Float[Tensor, 1]:
        """How many gradients of this process contain NaN or infinity."""
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
        not_finite = [~gradient.isfinite().all() for gradient in local]
        return torch.stack([x.to(self.accelerator.device) for x in not_finite]).sum().float()[None]

    def _set_bias(self, steps: int) -> None:
        """Give a bias that is not learned the value that it has after this many steps. Gates that stay open keep it."""
        if self.settings.bias_end is not None and self.settings.hold != "open":
            self.student.set_bias(self.settings.bias_at(steps))

    def _mean(self, measured: Tensor) -> tuple[Record, bool]:
        """The mean over processes, by name, and whether any gradient contains NaN or infinity."""
        values = self.accelerator.reduce(measured, reduction="mean").tolist()
        texts = range(len(self.sequences.texts))
        names = (*MEASURED, *(f"loss {index}" for index in texts), *(f"count {index}" for index in texts))
        return dict(zip(names, values[:-1], strict=True)), values[-1] > 0

    def _check_divergence(self, step: int, numbers: Record, not_finite: bool) -> None:
        loss, target = numbers["loss"], self.settings.target
        self.first_loss = loss if self.first_loss is None else self.first_loss
        bad = not_finite or not math.isfinite(loss) or not math.isfinite(numbers["expected_open"])
        if not bad and loss <= max(target, self.first_loss) + DIVERGED:
            return
        gradients = ", and its gradients contain NaN or infinity" if bad else ""
        first = f" where it began at {self.first_loss:.3g}" if self.first_loss is not None else ""
        raise _diverged(step + 1, f"the loss is {loss:.3g} nats{first}{gradients}")

    def weights(self, steps: int) -> dict[str, Tensor]:
        """The trained weights after this many steps, whole and on the CPU. All processes must call this.

        Raises an error if any of them is NaN or infinite.
        """
        weights = {name: gather(weight) for name, weight in self.student.state().items()}
        if not all(weight.isfinite().all() for weight in weights.values()):
            raise _diverged(steps, "the updated weights contain NaN or infinity")
        return weights

    def save(self, folder: Path, steps: int) -> None:
        """Write a checkpoint after this many steps: trained weights, optimizer, multiplier and what it holds.

        All processes call it, because weights may be sharded over them; the main one writes.
        """
        weights, moments = self.weights(steps), optimizer_tensors(self.optimizer)
        if self.accelerator.is_main_process:
            write_tensors(folder / WEIGHTS, weights)
            write_tensors(folder / OPTIMIZER, moments)
            state = {"steps": steps, "first": self.first_loss, "input_sizes": list(self.input_sizes)}
            replace_file(folder / STATE, json.dumps({**state, **state_of(self.held, self.multiplier)}, indent=1))

    def restore(self, folder: Path) -> int:
        """Continue from what `save` wrote, and return the number of steps done."""
        if (folder / "optimizer.pt").exists():
            raise GatelensError(f"the checkpoint {folder} was written by gatelens 0.1, which stored a pickle.")
        try:
            state = json.loads((folder / STATE).read_text())
            weights, moments = load_file(folder / WEIGHTS), load_file(folder / OPTIMIZER)
            steps, first_loss, input_sizes = int(state["steps"]), state["first"], state["input_sizes"]
            load_state(self.held, self.multiplier, state)
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise GatelensError(f"the checkpoint {folder} is damaged ({reason[:100]}).") from error
        self.student.load_state(weights)
        load_optimizer_tensors(self.optimizer, moments)
        self.first_loss, self.input_sizes = first_loss, input_sizes
        self._set_bias(steps)
        return steps


def _losses(
    sparse: Float[Tensor, "sequence token vocab"], dense: Tensor | TopK, tokens: Int[Tensor, "sequence token"]
) -> Losses:
    return top_k_losses(sparse, dense, tokens) if isinstance(dense, TopK) else losses(sparse, dense, tokens)


def _held(settings: SparsifySettings) -> Held:
    if settings.hold == "open":
        return HeldOpen()
    if settings.hold == "keys":
        ramp_steps = settings.ramp * settings.steps
        return HeldKeys(settings.keys, ramp_steps, settings.multiplier_smoothing, settings.most_loss)
    scale = settings.target if settings.relative else 0.1
    return HeldLoss(settings.target, scale, settings.multiplier_smoothing)


def _diverged(step: int, reason: str) -> GatelensError:
    return GatelensError(
        f"training diverged at step {step}: {reason}. The last checkpoint is unchanged; lower learning_rate or "
        "bias_learning_rate and give another folder."
    )
