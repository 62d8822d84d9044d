"""The cost of gated attention, in units of sdpa and of the plain operator: ``python -m bench.gated_attention``.

Forward and backward, batch 1, 8 heads of size 64, float32, one thread. The plain operator keeps whole (T, T) matrices
for autograd. scaled_dot_product_attention of torch (sdpa) has no gates and is the floor. Score gates have a bias.
Probability gates also have offsets for queries and keys, and a rest value. All of these have gradients.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.measurements import QUICK, Measurement, arguments, quick, show
from bench.timing import ratios
from gatelens.sparse.gated_attention import gated_attention

HEADS, DIM = 8, 64
BIAS = {"score": 3.0, "probability": 6.0}  # of gates that are partly open
LENGTHS, REPEATS = ((256,), 2) if quick() else ((256, 1024, 2048), 5)
MEMORY_LENGTH = 512 if quick() else 2048
# Limits: time from T = 1024 on, in units of the plain operator and of sdpa; memory, in units of the plain operator.
TIME, SDPA, MEMORY = 0.5, {"training": 1.6, "inference": 1.4}, 1 / 8


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report_memory()  # first, because a process starts with the peak memory of its parent
    for length in LENGTHS:
        report_time(length)


def report_time(length: int) -> None:
    jobs = {name: job(name, length) for name in OPERATORS}
    cost = ratios(jobs.pop("sdpa"), jobs, repeats=REPEATS)
    for mode in ("training", "inference"):
        sdpa_most, plain_most = (SDPA[mode], TIME) if length >= 1024 else (None, None)
        plain = cost[f"plain, {mode}"]
        show(Measurement(f"T = {length}, {mode}: the plain operator", plain, "sdpa"))
        for gate in BIAS:
            gated = cost[f"{gate} gates, {mode}"]
            show(Measurement(f"T = {length}, {mode}: {gate} gates", gated, "sdpa", 1, sdpa_most))
            show(Measurement(f"T = {length}, {mode}: {gate} gates", gated / plain, "plain operator", None, plain_most))


def report_memory() -> None:
    """How much one forward and backward raises the peak memory of a process. Each operator has its own process."""
    growths = {}
    for name in OPERATORS:
        command = [sys.executable, "-m", "bench.gated_attention", name, *([QUICK] if quick() else [])]
        growths[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for name, growth in growths.items():
        most = MEMORY if "gates" in name else None
        share = growth / max(1, growths["plain, training"])
        show(Measurement(f"T = {MEMORY_LENGTH}, extra memory: {name}", share, "plain, training", None, most))


def peak_growth(name: str) -> int:
    torch.set_num_threads(1)
    job(name, 64)()  # loads what is loaded once
    run = job(name, MEMORY_LENGTH)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def job(name: str, length: int) -> Callable[[], object]:
    q, k, v = (torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3))
    offsets = [torch.randn(1, HEADS, length, requires_grad=True) for _ in range(2)]
    rest = torch.randn(HEADS, DIM, requires_grad=True)
    inputs = (q, k, v, *offsets, rest) if name.startswith("probability") else (q, k, v)
    return lambda: torch.autograd.grad(OPERATORS[name](*inputs), inputs)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum()


def plain(q: Tensor, k: Tensor, v: Tensor, sample: bool) -> Tensor:
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    logits = s + BIAS["score"]
    gates = (logits > 0).float()
    if sample:
        soft = torch.sigmoid(logits + torch.logit(torch.rand_like(s)))
        gates = (soft > 0.5).float() + soft - soft.detach()
    expected: Tensor = torch.sigmoid(logits).sum((-1, -2)) / visible.sum()
    z: Tensor = (torch.softmax(s, -1) * gates) @ v
    return z.sum() + expected.sum()


def score_gates(q: Tensor, k: Tensor, v: Tensor, sample: bool) -> Tensor:
    z, expected, _ = gated_attention(q, k, v, BIAS["score"], sample=sample)
    return z.sum() + expected.sum()


def probability_gates(
    q: Tensor, k: Tensor, v: Tensor, of_queries: Tensor, of_keys: Tensor, rest: Tensor, sample: bool
) -> Tensor:
    options = {"query_offset": of_queries, "key_offset": of_keys, "rest": rest}
    z, expected, _ = gated_attention(q, k, v, BIAS["probability"], sample=sample, gate="probability", **options)
    return z.sum() + expected.sum()


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "sdpa": sdpa,
    "plain, training": partial(plain, sample=True),
    "score gates, training": partial(score_gates, sample=True),
    "probability gates, training": partial(probability_gates, sample=True),
    "plain, inference": partial(plain, sample=False),
    "score gates, inference": partial(score_gates, sample=False),
    "probability gates, inference": partial(probability_gates, sample=False),
}

if __name__ == "__main__":
    if arguments():
        print(peak_growth(arguments()[0]))
    else:
        main()
