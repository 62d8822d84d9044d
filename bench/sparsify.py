"""What a training step of smollm2 costs, in units of the same step with dense attention: ``python -m bench.sparsify``.

One thread, LoRA on the attention, loss against the cached dense model: a forward and backward pass, Adam. The floor
does the same with torch's sdpa instead of gated attention, and without the sparsity term. Each is measured in float32
and in bfloat16, where matrix products are cheaper and everything else counts more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

import gatelens
from bench.measurements import Measurement, quick, show
from bench.timing import ratios
from gatelens.sparse.gated_attention import Gate
from gatelens.sparse.in_model import dense_attention
from gatelens.sparse.mixture import TrainingText
from gatelens.sparse.sparsify import SparsifySettings
from gatelens.sparse.sparsify._sequences import TrainingSequences
from gatelens.sparse.sparsify._student import Student, with_narrow_weights
from gatelens.sparse.sparsify._teacher_cache import TeacherCache
from gatelens.sparse.sparsify._top_k import top_k_losses, top_k_of
from gatelens.sparse.sparsify._training import Training

MOST = 1.3
REPEATS = 5
TOP = 64  # tokens of the cached distributions


def main() -> None:
    torch.set_num_threads(1)
    gates: tuple[Gate, ...] = ("score", "probability")
    sizes = ((1, 32, False),) if quick() else ((8, 64, False), (2, 256, False), (8, 64, True), (2, 256, True))
    for batch, length, bf16 in sizes:
        with tempfile.TemporaryDirectory() as folder:
            trainings = {gate: make(batch, length, gate, bf16, Path(folder)) for gate in gates}
            steps = {gate: gated_step(training) for gate, training in trainings.items()}
            cost = ratios(dense_step(trainings["score"]), steps, repeats=1 if quick() else REPEATS)
        for gate in gates:
            precision = ", bfloat16" if bf16 else ""
            job = f"smollm2: step, {batch} x {length} tokens, {gate} gates{precision}"
            show(Measurement(job, cost[gate], "dense step", 1, MOST))


def make(batch: int, length: int, gate: Gate, bf16: bool, folder: Path) -> Training:
    """A training whose dense model is cached after the first step."""
    model = gatelens.load("smollm2", check=False)
    model = with_narrow_weights(model) if bf16 else model
    settings = SparsifySettings(batch=batch, length=length, lengths=(), gate=gate, bf16=bf16, teacher_top=TOP)
    tokens = torch.randint(model.hf.config.vocab_size, (64 * length,), generator=torch.Generator().manual_seed(0))
    sequences = TrainingSequences([TrainingText("random", tokens, None, 1.0, 1.0)], 0)
    student = Student(model, settings, share=True)
    cache = TeacherCache(folder, {"model": "smollm2"}, TOP)
    return Training(student, model.hf, sequences, settings, Accelerator(cpu=True), cache=cache)


def gated_step(training: Training) -> Callable[[], object]:
    return lambda: training.step(0)


def dense_step(training: Training) -> Callable[[], object]:
    """The step without gates."""
    numbers = [(number, 0) for number in range(training.settings.batch)]
    tokens = training.sequences.batch(numbers, training.settings.length).tokens
    student = training.student
    with torch.no_grad(), training.precision():
        dense = top_k_of(training.dense(input_ids=tokens, use_cache=False).logits, tokens, TOP)

    def step() -> None:
        training.optimizer.zero_grad()
        student.train()
        with dense_attention(student.hf):
            with training.precision():
                trained = training.module(input_ids=tokens, use_cache=False).logits
            top_k_losses(trained, dense, tokens).kl.mean().backward()
        training.optimizer.step()

    return step


if __name__ == "__main__":
    main()
