"""The cost of scores and circuits, in plain Hugging Face runs on the same prompts: ``python -m bench.circuits``.

F is a plain forward. FB is a forward and a backward to the activations, with frozen weights. Both compute all logits.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import gatelens
from bench.heads import gpt2_small, plain
from bench.measurements import Measurement, arguments, quick, show
from bench.timing import ratios
from gatelens import GatelensError, Model
from gatelens.gates.edge_gradients import EdgeAttribution
from gatelens.gates.gradients import Pass
from gatelens.measures.top_k import Circuits
from gatelens.methods.attribution import attribute_edges
from gatelens.methods.patching import patch_heads
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import from_tokens
from gatelens.tasks.tokens import Pair, PairTokens

PROMPTS, LENGTH, STEPS = 8, 16, 5
MEMORY_GB = 3.0


def main() -> None:
    torch.set_num_threads(1)
    print(f"{PROMPTS} prompts of {LENGTH} tokens, one thread")
    if quick():
        report(gpt2_small(), repeats=1, heads=12, n_circuits=4)
        return
    report(gpt2_small(), repeats=5, heads=144, n_circuits=30)
    try:
        # One forward takes about a second here, so only a sample of the heads and a few circuits are measured.
        report(gatelens.load("smollm2"), repeats=3, heads=60, n_circuits=8)
    except GatelensError as error:
        print(f"skipped smollm2: {error}")
        return
    peak = subprocess.run([sys.executable, "-m", "bench.circuits", "peak"], capture_output=True, text=True, check=True)
    show(Measurement("smollm2: EAP, peak memory of the whole process", float(peak.stdout), "GB", most=MEMORY_GB))


def report(model: Model, *, repeats: int, heads: int, n_circuits: int) -> None:
    """Measure patching of a sample of heads, attribution of all edges, and circuits of edges."""
    task = random_task(model)
    scores = attribute_edges(model, task)
    circuits = Circuits.of(model, task, scores)
    ks = [round(circuits.total ** (i / (n_circuits - 1))) for i in range(n_circuits)]
    name = f"{model.name}, {circuits.total:,} edges"
    forward = plain(model, task.buckets[0].clean)
    both = ratios(forward, {"FB": forward_backward(model, task)}, repeats=repeats)["FB"]
    show(Measurement(f"{name}: FB", both, "F"))
    jobs: dict[str, Callable[[], object]] = {
        "EAP": lambda: attribute_edges(model, task),
        "EAP of means": lambda: MeanProducts(model, task.buckets[0], metric_of(task)).products(Pass()).sum(0),
        "EAP-IG": lambda: attribute_edges(model, task, STEPS),
        "circuit": lambda: circuits.metric(0, [circuits.total // 10]),
    }
    cost = ratios(forward, jobs, repeats=repeats)
    slow_jobs: dict[str, Callable[[], object]] = {
        "heads": lambda: patch_heads(model, task, sample=heads),
        "curve": lambda: [circuits.metric(0, ks[i : i + 8]) for i in range(0, n_circuits, 8)],
    }
    cost |= ratios(forward, slow_jobs, repeats=1)
    for job, value, unit, floor, most in (
        (f"{heads} heads by exact patching, per head", cost["heads"] / heads, "F", 0.5, 0.6),
        ("EAP", cost["EAP"] / (1 + both), "F + FB", 1, 1.5),
        ("EAP with scores of every prompt", cost["EAP"] / cost["EAP of means"], "EAP of means over prompts", 1, 1.1),
        (f"EAP-IG, {STEPS} steps", cost["EAP-IG"] / (1 + STEPS * both), f"F + {STEPS} FB", 1, 1.5),
        ("one exact circuit of a tenth of the edges", cost["circuit"], "F", 1, 2.5),
        (f"{n_circuits} edge circuits in rows, per circuit", cost["curve"] / n_circuits, "F", 1, 2.5),
    ):
        show(Measurement(f"{name}: {job}", value, unit, floor, most))


class MeanProducts(EdgeAttribution):
    """EAP that only sums over prompts, in one product for all of them: what a ranking by absolute means needs."""

    def _multiply(self, differences: Tensor, gradients: Tensor) -> Tensor:
        sums = differences.flatten(1) @ gradients.flatten(1).mT
        return torch.cat([sums[None], sums.new_zeros(len(self.batch) - 1, *sums.shape)])


def metric_of(task: CircuitTask) -> Callable[[Tensor], Tensor]:
    return lambda logits: task.metric(logits, task.buckets[0])


def random_task(model: Model) -> CircuitTask:
    """Prompts and answers of random tokens, with roles."""
    torch.manual_seed(0)
    vocabulary = int(model.hf.config.vocab_size)
    roles = [f"part {position // 3}" for position in range(LENGTH)]  # and the first and the last token: 8 roles
    tokens = [
        PairTokens(
            *torch.randint(0, vocabulary, (2, LENGTH)).tolist(),
            *torch.randint(0, vocabulary, (2, 1)).tolist(),
            roles=roles,
        )
        for _ in range(PROMPTS)
    ]
    return from_tokens("random", 0, [Pair("clean", "corrupt", ("right",), ("wrong",))] * PROMPTS, tokens)


def forward_backward(model: Model, task: CircuitTask) -> Callable[[], object]:
    """The unit FB: all logits, and the gradient of the metric with respect to the embeddings."""
    bucket = task.buckets[0]

    def run() -> object:
        embeddings = model.hf.get_input_embeddings()(bucket.clean).detach().requires_grad_()
        logits = model.hf(inputs_embeds=embeddings, use_cache=False).logits[:, -1]
        return torch.autograd.grad(task.metric(logits, bucket).sum(), embeddings)

    return run


def peak() -> None:
    """Load smollm2, run EAP, and print the peak memory of this process in GB."""
    torch.set_num_threads(1)
    model = gatelens.load("smollm2")
    attribute_edges(model, random_task(model))
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(kilobytes / (1e9 if sys.platform == "darwin" else 1e6))


if __name__ == "__main__":
    peak() if arguments() == ["peak"] else main()
