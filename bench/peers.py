"""gatelens and TransformerLens on the same work: ``python -m bench.peers``.

TransformerLens is installed with pip into its own environment, with the pinned versions of torch and transformers. Both
libraries run the same random model of the shape of GPT-2 small on the same prompts, with one thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.circuits import LENGTH, PROMPTS, random_task
from bench.heads import gpt2_small, plain
from bench.measurements import Measurement, quick, show
from gatelens.methods.attribution import attribute_heads
from gatelens.methods.patching import patch_heads

HOME = Path.home() / ".cache" / "gatelens" / "peers" / "transformer-lens"
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
REPEATS = 3
JOBS = ("plain forward", "144 heads by cached gradients", "144 heads patched one at a time")
JOBS = JOBS[:2] if quick() else JOBS

PEER_SCRIPT = """
import json, sys, tempfile, time
import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2Config, GPT2LMHeadModel

work = json.load(sys.stdin)
clean, corrupt, right, wrong = (torch.tensor(work[key]) for key in ("clean", "corrupt", "right", "wrong"))
torch.set_num_threads(1)
torch.manual_seed(0)
hf = GPT2LMHeadModel(GPT2Config()).eval()
with tempfile.TemporaryDirectory() as folder:
    hf.config.save_pretrained(folder)
    model = TransformerBridge.boot_transformers(folder, hf_model=hf, device="cpu")
for parameter in model.parameters():
    parameter.requires_grad_(False)
places = torch.arange(len(clean))
names = [f"blocks.{layer}.attn.hook_z" for layer in range(12)]

def metric(logits):
    return logits[places, -1, right] - logits[places, -1, wrong]

def is_z(name):
    return name in names

@torch.no_grad()
def forward():
    return model(clean)

@torch.no_grad()
def patch():
    _, other = model.run_with_cache(corrupt, names_filter=is_z)
    base = metric(model(clean))
    scores = torch.zeros(12, 12)
    for layer, name in enumerate(names):
        for head in range(12):
            def put(z, hook):
                z[:, :, head] = other[name][:, :, head]
                return z
            scores[layer, head] = (base - metric(model.run_with_hooks(clean, fwd_hooks=[(name, put)]))).mean()
    return scores

def attribute():
    with torch.no_grad():
        _, other = model.run_with_cache(corrupt, names_filter=is_z)
    values = {}
    def keep(name):
        def hook(z, hook):
            values[name] = z if z.requires_grad else z.requires_grad_()
            return values[name]
        return hook
    with model.hooks(fwd_hooks=[(name, keep(name)) for name in names]):
        total = metric(model(clean)).sum()
    grads = torch.autograd.grad(total, [values[name] for name in names])
    scores = [((values[n] - other[n]) * grad).sum((0, 1, 3)) for n, grad in zip(names, grads)]
    return torch.stack(scores) / len(clean)

def timed(job, repeats):
    seconds = []
    for _ in range(repeats):
        begun = time.process_time()
        result = job()
        seconds.append(time.process_time() - begun)
    return min(seconds), result

jobs = [(forward, work["repeats"]), (attribute, work["repeats"]), (patch, 1)]
jobs = [timed(*job) for job in jobs[: work["jobs"]]]
print(json.dumps({"seconds": [job[0] for job in jobs], "scores": [job[1].tolist() for job in jobs[1:]]}))
"""


def main() -> None:
    torch.set_num_threads(1)
    python = install()
    if python is None:
        return
    torch.manual_seed(0)
    model = gpt2_small()
    task = random_task(model)
    [bucket] = task.buckets
    work = {
        "clean": bucket.clean.tolist(),
        "corrupt": bucket.corrupt.tolist(),
        "right": task.answer_ids[bucket.which, 0].tolist(),
        "wrong": task.wrong_ids[bucket.which, 0].tolist(),
        "repeats": REPEATS,
        "jobs": len(JOBS),
    }
    # One library after the other, so that neither slows the other.
    done = subprocess.run(
        [python, "-c", PEER_SCRIPT], input=json.dumps(work), capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"skipped TransformerLens: {done.stderr.strip().splitlines()[-1]}")
        return
    peer = json.loads(done.stdout.splitlines()[-1])
    forward = plain(model, bucket.clean)
    jobs: list[tuple[Callable[[], Any], int]] = [
        (forward, REPEATS),
        (lambda: attribute_heads(model, task), REPEATS),
        (lambda: patch_heads(model, task), 1),
    ]
    forward()
    own = [timed(job, repeats) for job, repeats in jobs[: len(JOBS)]]
    print(f"GPT-2-small shape, {PROMPTS} prompts of {LENGTH} tokens, one thread")
    for name, (own_seconds, _), peer_seconds in zip(JOBS, own, peer["seconds"], strict=True):
        show(
            Measurement(
                f"{name} ({own_seconds:.2f} s, TransformerLens {peer_seconds:.2f} s)",
                own_seconds / peer_seconds,
                "TransformerLens",
            )
        )
    for name, (_, scores), peer_scores in zip(JOBS[1:], own[1:], peer["scores"], strict=True):
        difference = (scores.scores - torch.tensor(peer_scores)).abs().max() / scores.scores.abs().max()
        print(f"  {name}: scores differ by at most {float(difference):.0e} of the largest")


def timed(job: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """The shortest processor time in seconds, and the result of the job."""
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        result = job()
        times.append(time.process_time() - begun)
    return min(times), result


def install() -> str | None:
    """The interpreter of an environment with TransformerLens. If there is none, print why and return None."""
    python = HOME / "bin" / "python"
    ready = HOME / "ready"
    if not ready.exists() and quick():
        print("skipped TransformerLens: it is not installed yet, and a quick run does not install it")
        return None
    if not ready.exists():
        print(f"installing TransformerLens into {HOME}, once", flush=True)
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(HOME)],
            [str(python), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), "torch", "transformer-lens"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"TransformerLens cannot be installed here: {done.stderr.strip()[-300:]}")
                return None
        ready.touch()
    return str(python)


if __name__ == "__main__":
    main()
