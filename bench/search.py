"""The cost of searching for a circuit, in plain Hugging Face forwards: ``python -m bench.search``."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gatelens
from bench.circuits import LENGTH, PROMPTS, random_task
from bench.heads import gpt2_small, plain
from bench.measurements import Measurement, quick, show
from bench.timing import ratios
from gatelens import GatelensError, Model
from gatelens.gates import HEADS
from gatelens.methods.acdc import AcdcSettings, acdc
from gatelens.methods.patching import patch_heads
from gatelens.model.anatomy import describe

MOST = 0.5  # F per test


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{PROMPTS} prompts of {LENGTH} tokens, one thread")
    if quick():
        hf = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64)).eval().requires_grad_(False)
        report(Model("two layers", hf, None, describe(hf)))
        return
    report(gpt2_small())
    try:
        report(gatelens.load("smollm2"))
    except GatelensError as error:
        print(f"skipped smollm2: {error}")


def report(model: Model) -> None:
    """Measure ACDC on all heads, with a threshold at which it keeps some heads and closes others."""
    task, n_heads = random_task(model), model.n_layers * model.n_heads
    tau = float(patch_heads(model, task, sample=min(24, n_heads)).magnitudes.quantile(0.95))
    settings = AcdcSettings(tau=tau, objective="metric")
    open_heads = 0

    def search() -> None:
        nonlocal open_heads
        open_heads = int((acdc(HEADS, model, task, settings).scores >= tau).sum())

    times = max(1, n_heads // 20)  # the floor is measured for a similar time
    cost = times * ratios(plain(model, task.buckets[0].clean, times), {"acdc": search}, repeats=1, warm=False)["acdc"]
    name = f"{model.name}: ACDC on heads, {open_heads} of {n_heads} stay open, per test"
    show(Measurement(name, cost / n_heads, "F", floor=0.5 * (1 + 1 / model.n_layers), most=MOST))


if __name__ == "__main__":
    main()
