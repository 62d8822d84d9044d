"""What gated attention costs, in units of torch's sdpa and of the plain operator: ``python -m bench.gated_attention``.

Forward and backward of batch 1, 8 heads of size 64, float32, one thread. The plain operator keeps whole (T, T) matrices
for autograd; sdpa has no gates and is the floor.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.rows import QUICK, Row, quick, say, words
from bench.timing import ratios
from gatelens.sparse.gated_attention import gated_attention

HEADS, DIM, BIAS = 8, 64, 3.0
LENGTHS, REPEATS = ((256,), 2) if quick() else ((256, 1024, 2048), 5)
MEMORY_LENGTH = 512 if quick() else 2048
TIME, SDPA, MEMORY = 0.5, 2.0, 1 / 8  # at most: time over plain's and sdpa's from T = 1024 on, memory over plain's


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report_memory()  # first: a process starts with the peak of the one that started it
    for length in LENGTHS:
        report_time(length)


def report_time(length: int) -> None:
    jobs = {name: job(name, length) for name in OPERATORS}
    cost = ratios(jobs.pop("sdpa"), jobs, repeats=REPEATS)
    sdpa_most, plain_most = (SDPA, TIME) if length >= 1024 else (None, None)
    for mode in ("training", "inference"):
        plain, gated = cost[f"plain, {mode}"], cost[f"gated, {mode}"]
        say(Row(f"T = {length}, {mode}: the plain operator", plain, "sdpa"))
        say(Row(f"T = {length}, {mode}: gated attention", gated, "sdpa", 1, sdpa_most))
        say(Row(f"T = {length}, {mode}: gated attention", gated / plain, "plain operator", None, plain_most))


def report_memory() -> None:
    """Growth of the peak of a process in one forward and backward; each in a process of its own."""
    grown = {}
    for name in OPERATORS:
        command = [sys.executable, "-m", "bench.gated_attention", name, *([QUICK] if quick() else [])]
        grown[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for name, growth in grown.items():
        most = MEMORY if name.startswith("gated") else None
        share = growth / max(1, grown["plain, training"])
        say(Row(f"T = {MEMORY_LENGTH}, extra memory: {name}", share, "plain, training", None, most))


def peak_growth(name: str) -> int:
    torch.set_num_threads(1)
    job(name, 64)()  # pays for what is loaded once
    run = job(name, MEMORY_LENGTH)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def job(name: str, length: int) -> Callable[[], object]:
    q, k, v = (torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3))
    return lambda: torch.autograd.grad(OPERATORS[name](q, k, v), (q, k, v))


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum()


def plain(q: Tensor, k: Tensor, v: Tensor, sample: bool) -> Tensor:
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    gates = (s + BIAS > 0).float()
    if sample:
        soft = torch.sigmoid(s + BIAS + torch.logit(torch.rand_like(s)))
        gates = (soft > 0.5).float() + soft - soft.detach()
    expected: Tensor = torch.sigmoid(s + BIAS).sum((-1, -2)) / visible.sum()
    y: Tensor = (torch.softmax(s, -1) * gates) @ v
    return y.sum() + expected.sum()


def gated(q: Tensor, k: Tensor, v: Tensor, sample: bool) -> Tensor:
    y, expected, _ = gated_attention(q, k, v, BIAS, sample=sample)
    return y.sum() + expected.sum()


OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": sdpa,
    "plain, training": partial(plain, sample=True),
    "gated, training": partial(gated, sample=True),
    "plain, inference": partial(plain, sample=False),
    "gated, inference": partial(gated, sample=False),
}

if __name__ == "__main__":
    if words():
        print(peak_growth(words()[0]))
    else:
        main()
