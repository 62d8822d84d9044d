"""A run for tests to start as a process of its own: python sparsify_run.py TEXT OUT STEPS BATCH [STOP] [fsdp].

Before step number STOP (from 1) it prints the line "stopped" and waits for a line on its standard input.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

sys.path.insert(0, str(Path(__file__).parents[1]))
from families import tiny

from gatelens.sparse.sparsify import SparsifySettings, run, sparsify
from gatelens.sparse.sparsify._training import Training

torch.set_num_threads(1)


def fsdp(*_: Any) -> Accelerator:
    """Accelerate uses FSDP on accelerators only, though torch has it on CPUs: its state is told that it does."""
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return accelerator


def main(text: str, out: str, steps: str, batch: str, stop: str = "0", kind: str = "") -> None:
    step = Training.step

    def stopping(self: Training, number: int) -> Any:
        if number + 1 == int(stop):
            print("stopped", flush=True)
            sys.stdin.readline()
        assert all(hasattr(weight, "full_tensor") == (kind == "fsdp") for weight in self.student.state().values())
        return step(self, number)

    Training.step = stopping  # type: ignore[method-assign]
    if kind == "fsdp":
        run._accelerator = fsdp
    for last in (5, int(steps)) if kind == "fsdp" else (int(steps),):  # stopped and continued
        settings = SparsifySettings(
            steps=last,
            batch=int(batch),
            length=8,
            learning_rate=1e-2,
            checkpoint_every=3,
            multiplier_warmup=2,
            hold="loss",
            kl=1.0,
            cooldown=0.0,
        )
        sparsify(tiny("llama"), text, settings, out=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
