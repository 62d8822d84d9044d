"""How cost grows with the size of the work, as exponents: ``python -m bench.growth``.

A small random Llama is given more prompts, tokens, layers, edges or rows, one of them at a time. The exponent of a job
is the slope of log(processor time) against log(size), by least squares over the larger half of the sizes, because small
sizes measure the overhead of calls. All sizes run in turn, several times; each round gives one exponent, and the table
has their median, smallest and largest. With one prompt after the other, an exponent of 1 means linear growth.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.measurements import Measurement, quick, show
from bench.tables import processor, write_table
from gatelens.gates import EDGES, HEADS
from gatelens.gates.fitting import loss_and_gradient
from gatelens.measures.top_k import Circuits
from gatelens.methods.attribution import attribute
from gatelens.methods.head_gating import HeadGatingSettings, nll_objective
from gatelens.model import Model
from gatelens.model.anatomy import describe
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.sparse.gated_attention import gated_attention
from gatelens.tasks.base import CircuitTask, Example, ResponseTask
from gatelens.tasks.build import from_tokens
from gatelens.tasks.tokens import Pair, PairTokens

RESULTS = Path(__file__).parents[1] / "results" / "bench"
VOCAB, WIDTH = 512, 128
LINEAR = 1.1  # exponents up to this count as linear


@dataclass(frozen=True)
class Size:
    """How large the work is; one of the fields is varied at a time."""

    prompts: int = 8
    tokens: int = 32
    layers: int = 4
    heads: int = 4
    rows: int = 4  # circuits, seeds of a fit, or patched gates that run together


AXES: Mapping[str, tuple[Size, Sequence[int]]] = {
    "prompts": (Size(), (4, 8, 16, 32, 64)),
    "tokens": (Size(prompts=1, rows=1), (16, 32, 64, 128, 256, 512, 1024, 2048)),
    "layers": (Size(), (2, 4, 8, 16, 32)),
    "heads": (Size(), (2, 4, 8, 16, 32)),  # at the same width: only the graph grows
    "rows": (Size(), (1, 2, 4, 8, 16)),
}
"""The size that is varied, the other sizes, and its values. The cost of heads is given per edge."""

Make = Callable[[Model, Size], Callable[[], object]]


def main() -> None:
    torch.set_num_threads(1)
    records = []
    for name, (make, axes) in JOBS.items():
        for axis in axes:
            records.append(grown(name, make, axis))
            last = records[-1]
            show(Measurement(f"{name}, {last['axis']}", last["exponent"], "exponent", most=LINEAR))
    if not quick():
        write_table(RESULTS / "growth.csv", records, description())


def grown(name: str, make: Make, axis: str) -> dict[str, Any]:
    """Measure one job at all sizes of an axis, and fit its exponent."""
    base, values = AXES[axis]
    values = values[:3] if quick() else values
    jobs, sizes = [], []
    for value in values:
        size = replace(base, **{axis: value})
        model = random_llama(size)
        jobs.append(make(model, size))
        sizes.append(Graph.of(model.anatomy).n_edges if axis == "heads" else value)
        jobs[-1]()  # first runs allocate memory and choose kernels
    rounds = [[seconds(job) for job in jobs] for _ in range(1 if quick() else 5)]
    upper = len(values) // 2
    exponents = [slope(sizes[upper:], times[upper:]) for times in rounds]
    exponent = statistics.median(exponents)
    return {
        "job": name,
        "axis": "edges" if axis == "heads" else axis,
        "from": sizes[upper],
        "to": sizes[-1],
        "exponent": exponent,
        "least": min(exponents),
        "most": max(exponents),
        "linear": "yes" if exponent <= LINEAR else "no",
        "seconds at the largest": statistics.median(times[-1] for times in rounds),
    }


def slope(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The slope of log(time) against log(size), by least squares."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(t) for t in times]).slope


def seconds(job: Callable[[], object]) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


def description() -> str:
    return (
        "# How cost grows\n\n"
        f"`python -m bench.growth` on: {processor()}, torch {torch.__version__}, one thread, processor time. A random "
        f"Llama of width {WIDTH} with {Size().layers} layers and {Size().heads} heads, {Size().prompts} prompts of "
        f"{Size().tokens} tokens and {Size().rows} rows; for tokens, one prompt and one row. Exponents are fitted from "
        "`from` to `to`: median of 5 rounds, the smallest and the largest. An exponent up to "
        f"{LINEAR} counts as linear. Edges grow with the heads at the same width."
    )


def random_llama(size: Size) -> Model:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=4096,
    )
    hf = LlamaForCausalLM(config).eval().requires_grad_(False)
    return Model("random", hf, None, describe(hf))


def random_task(size: Size) -> CircuitTask:
    pairs = [Pair(f"clean {i}", f"corrupt {i}", ("right",), ("wrong",)) for i in range(size.prompts)]
    tokens = torch.randint(8, VOCAB, (2, size.prompts, size.tokens), generator=torch.Generator().manual_seed(0))
    aligned = zip(*tokens.tolist(), strict=True)
    return from_tokens("random", 0, pairs, [PairTokens(clean, corrupt, [5], [6]) for clean, corrupt in aligned])


def attribution(level: Any) -> Make:
    return lambda model, size: lambda: attribute(level, model, random_task(size))


def circuits(level: Any) -> Make:
    """Circuits of about half of the gates, as rows of one batch."""

    def make(model: Model, size: Size) -> Callable[[], object]:
        task = random_task(size)
        ranked = Circuits.of(model, task, attribute(level, model, task))
        return lambda: ranked.metric(0, [ranked.total // 2 + row for row in range(size.rows)])

    return make


def gating(model: Model, size: Size) -> Callable[[], object]:
    """The gradient of one update; rows are seeds."""
    tokens = random_task(size).buckets[0].clean.tolist()
    task = ResponseTask("random", 0, [Example("", "", tuple(ids[:-1]), (ids[-1],)) for ids in tokens])
    settings = HeadGatingSettings(batch=size.prompts)
    objective = nll_objective(model, task, settings, [0] * size.rows, torch.zeros(size.rows), Context())
    logits = torch.zeros(size.rows, model.n_layers, model.n_heads).requires_grad_()
    return lambda: loss_and_gradient(logits, 0, objective)


def attention(model: Model, size: Size) -> Callable[[], object]:
    """Gated attention of one layer, forward and backward."""
    shape = (size.prompts, size.heads, size.tokens, WIDTH // size.heads)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))

    def run() -> object:
        z, expected, _ = gated_attention(q, k, v, bias=2.0, sample=True)
        return torch.autograd.grad(z.sum() + expected.sum(), (q, k, v))

    return run


ALL = ("prompts", "tokens", "layers", "heads")
JOBS: Mapping[str, tuple[Make, Sequence[str]]] = {
    "EAP of edges": (attribution(EDGES), ALL),
    "attribution of heads": (attribution(HEADS), ALL),
    "circuits of heads": (circuits(HEADS), (*ALL, "rows")),
    "circuits of edges": (circuits(EDGES), (*ALL, "rows")),
    "gate update": (gating, (*ALL, "rows")),
    "gated attention": (attention, ("prompts", "tokens")),
}


if __name__ == "__main__":
    main()
