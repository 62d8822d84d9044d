"""A run for tests to start as a process of its own: python sparsify_run.py TEXT OUT STEPS BATCH [seconds to wait]."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from families import tiny

from gatelens.methods.sparsify import SparsifySettings, sparsify
from gatelens.methods.sparsify.training import Training

torch.set_num_threads(1)


def main(text: str, out: str, steps: str, batch: str, wait: str = "0") -> None:
    step = Training.step

    def slow(self: Training, number: int) -> Any:
        time.sleep(float(wait))  # so that it can be killed half-way
        return step(self, number)

    Training.step = slow  # type: ignore[method-assign]
    settings = SparsifySettings(
        steps=int(steps), batch=int(batch), length=8, learning_rate=1e-2, checkpoint_every=3, multiplier_warmup=2
    )
    sparsify(tiny("llama"), text, settings, out=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
