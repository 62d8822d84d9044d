"""Ours against TransformerLens on the same work: ``python -m bench.peers``.

TransformerLens comes from PyPI into an environment of its own, with the torch and transformers that are pinned here.
Both sides run the same random model of GPT-2-small shape, one thread, on the same prompts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import torch

from bench.circuits import LENGTH, PROMPTS, random_task
from bench.heads import gpt2_small, plain
from bench.timing import _seconds
from gatelens.methods.attribution import attribute_heads
from gatelens.methods.patching import patch_heads

HOME = Path.home() / ".cache" / "gatelens" / "peers" / "transformer-lens"
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
REPEATS = 3
JOBS = ("plain forward", "144 heads patched one at a time", "144 heads by cached gradients")

THEIRS = """
import json, sys, time
import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

prompts, length, repeats = map(int, sys.argv[1:])
torch.set_num_threads(1)
torch.manual_seed(0)
model = HookedTransformer(HookedTransformerConfig(
    n_layers=12, n_heads=12, d_model=768, d_head=64, d_mlp=3072, n_ctx=1024, d_vocab=50257, act_fn="gelu_new",
    normalization_type="LN", device="cpu",
))
for parameter in model.parameters():
    parameter.requires_grad_(False)
clean, corrupt = torch.randint(0, 50257, (2, prompts, length))
right, wrong = torch.randint(0, 50257, (2, prompts))
places = torch.arange(prompts)

def metric(logits):
    return logits[places, -1, right] - logits[places, -1, wrong]

def forward():
    with torch.no_grad():
        model(clean)

def is_z(name):
    return name.endswith("hook_z")

def patch():
    with torch.no_grad():
        _, other = model.run_with_cache(corrupt, names_filter=is_z)
        base = metric(model(clean))
        for layer in range(12):
            name = f"blocks.{layer}.attn.hook_z"
            for head in range(12):
                def put(z, hook):
                    z[:, :, head] = other[hook.name][:, :, head]
                    return z
                (base - metric(model.run_with_hooks(clean, fwd_hooks=[(name, put)]))).mean()

def attribute():
    with torch.no_grad():
        _, other = model.run_with_cache(corrupt, names_filter=is_z)
    values, grads = {}, {}
    def keep(z, hook):
        values[hook.name] = z.detach()
        return z if z.requires_grad else z.requires_grad_()
    def keep_grad(grad, hook):
        grads[hook.name] = grad
    with model.hooks(fwd_hooks=[(is_z, keep)], bwd_hooks=[(is_z, keep_grad)]):
        metric(model(clean)).sum().backward()
    return [((values[n] - other[n]) * grads[n]).sum((0, 1, 3)) for n in grads]

assert len(attribute()) == 12
times = []
for job in (forward, patch, attribute):
    seconds = []
    for _ in range(1 if job is patch else repeats):
        begun = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - begun)
    times.append(min(seconds))
print(json.dumps(times))
"""


def main() -> None:
    torch.set_num_threads(1)
    python = install()
    if python is None:
        return
    model = gpt2_small()
    task = random_task(model)
    ours = [
        plain(model, task.buckets[0].clean),
        lambda: patch_heads(model, task),
        lambda: attribute_heads(model, task),
    ]
    for job in (ours[0], ours[2]):
        job()
    # In turn and not at once, so that neither side slows the other.
    mine = [min(_seconds(job) for _ in range(1 if i == 1 else REPEATS)) for i, job in enumerate(ours)]
    command = [python, "-c", THEIRS, str(PROMPTS), str(LENGTH), str(REPEATS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"TransformerLens left out: {done.stderr.strip().splitlines()[-1]}")
        return
    theirs = json.loads(done.stdout.splitlines()[-1])
    print(f"GPT-2-small shape, {PROMPTS} prompts of {LENGTH} tokens, one thread; seconds")
    print(f"  {'':34} {'gatelens':>9} {'TransformerLens':>16} {'ratio':>7}")
    for name, our, their in zip(JOBS, mine, theirs, strict=True):
        print(f"  {name:34} {our:9.2f} {their:16.2f} {their / our:7.1f}")


def install() -> str | None:
    """The interpreter of an environment with TransformerLens; None, and the reason printed, where there is none."""
    python = HOME / "bin" / "python"
    ready = HOME / "ready"
    if not ready.exists():
        venv.create(HOME, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), "torch", "transformer-lens"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"TransformerLens cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
            return None
        ready.touch()
    return str(python)


if __name__ == "__main__":
    sys.exit(main())
