"""What a training step of smollm2 costs, in units of the same step with dense attention: ``python -m bench.sparsify``.

One thread, LoRA on the attention, loss against the dense model: a forward pass of the dense model, a forward and
backward pass of the trained one, Adam. The floor does the same with torch's sdpa instead of gated attention, and
without the sparsity term.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator

import gatelens
from bench.measurements import Measurement, quick, show
from bench.timing import ratios
from gatelens.sparse.gated_attention import Gate
from gatelens.sparse.in_model import dense_attention
from gatelens.sparse.mixture import TrainingText
from gatelens.sparse.sparsify import SparsifySettings
from gatelens.sparse.sparsify._losses import losses
from gatelens.sparse.sparsify._sequences import TrainingSequences
from gatelens.sparse.sparsify._student import Student
from gatelens.sparse.sparsify._training import Training

MOST = 1.3
REPEATS = 5


def main() -> None:
    torch.set_num_threads(1)
    gates: tuple[Gate, ...] = ("score", "probability")
    for batch, length in ((1, 32),) if quick() else ((8, 64), (4, 128), (2, 256)):
        trainings = {gate: make(batch, length, gate) for gate in gates}
        steps = {gate: gated_step(training) for gate, training in trainings.items()}
        cost = ratios(dense_step(trainings["score"]), steps, repeats=1 if quick() else REPEATS)
        for gate in gates:
            job = f"smollm2: step, {batch} x {length} tokens, {gate} gates"
            show(Measurement(job, cost[gate], "dense step", 1, MOST))


def make(batch: int, length: int, gate: Gate) -> Training:
    model = gatelens.load("smollm2", check=False)
    settings = SparsifySettings(batch=batch, length=length, lengths=(), gate=gate)
    tokens = torch.randint(model.hf.config.vocab_size, (64 * length,), generator=torch.Generator().manual_seed(0))
    sequences = TrainingSequences([TrainingText("random", tokens, None, 1.0, 1.0)], 0)
    student = Student(model, settings, share=True)
    return Training(student, model.hf, sequences, settings, Accelerator(cpu=True))


def gated_step(training: Training) -> Callable[[], object]:
    return lambda: training.step(0)


def dense_step(training: Training) -> Callable[[], object]:
    """The step without gates."""
    numbers = [(number, 0) for number in range(training.settings.batch)]
    tokens = training.sequences.batch(numbers, training.settings.length).tokens
    student = training.student

    def step() -> None:
        training.optimizer.zero_grad()
        with torch.no_grad():
            dense = training.dense(input_ids=tokens, use_cache=False).logits
        student.train()
        with dense_attention(student.hf):
            trained = training.module(input_ids=tokens, use_cache=False).logits
            losses(trained, dense, tokens).kl.mean().backward()
        training.optimizer.step()

    return step


if __name__ == "__main__":
    main()
