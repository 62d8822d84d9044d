"""What a training step of smollm2 costs, in units of the same step with dense attention: ``python -m bench.sparsify``.

One thread, LoRA on the attention, KL from the dense model: a forward pass of the dense model, a forward and backward
pass of the trained one, Adam. The floor does the same with torch's sdpa instead of gated attention, and without the
sparsity term.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator

import gatelens
from bench.measurements import Measurement, quick, show
from bench.timing import ratios
from gatelens.sparse.in_model import dense_attention
from gatelens.sparse.sparsify import SparsifySettings
from gatelens.sparse.sparsify._losses import kl_divergence
from gatelens.sparse.sparsify._sequences import TrainingSequences
from gatelens.sparse.sparsify._student import Student
from gatelens.sparse.sparsify._training import Training

MOST = 1.4
REPEATS = 5


def main() -> None:
    torch.set_num_threads(1)
    for batch, length in ((1, 32),) if quick() else ((4, 128), (2, 256)):
        training = make(batch, length)
        cost = ratios(dense_step(training), {"gated": gated_step(training)}, repeats=1 if quick() else REPEATS)
        show(Measurement(f"smollm2: training step, {batch} x {length} tokens", cost["gated"], "dense step", 1, MOST))


def make(batch: int, length: int) -> Training:
    model = gatelens.load("smollm2", check=False)
    settings = SparsifySettings(batch=batch, length=length)
    text = torch.randint(model.hf.config.vocab_size, (64, length), generator=torch.Generator().manual_seed(0))
    student = Student(model, settings, share=True)
    return Training(student, model.hf, TrainingSequences(text, text[:0], 0.0, 0), settings, Accelerator(cpu=True))


def gated_step(training: Training) -> Callable[[], object]:
    return lambda: training.step(0)


def dense_step(training: Training) -> Callable[[], object]:
    """The step without gates."""
    tokens = training.sequences.batch(range(training.settings.batch))
    student = training.student

    def step() -> None:
        training.optimizer.zero_grad()
        with torch.no_grad():
            dense = training.dense(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
        student.train()
        with dense_attention(student.hf):
            trained = training.module(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
            kl_divergence(dense, trained).mean().backward()
        training.optimizer.step()

    return step


if __name__ == "__main__":
    main()
