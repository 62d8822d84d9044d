"""The cost of methods besides EAP and EAP-IG of edges, in plain Hugging Face runs: ``python -m bench.methods``.

F is a plain forward. FB is a forward and a backward to the activations, with frozen weights. Both compute all logits.
The cost of ACDC is in `bench.search`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gatelens
from bench.circuits import LENGTH, PROMPTS, STEPS, forward_backward, metric_of, random_task
from bench.heads import gpt2_small, plain
from bench.measurements import Measurement, quick, show
from bench.timing import ratios
from gatelens import GatelensError, Model
from gatelens.gates import EDGES, HEADS, ROLE_EDGES
from gatelens.gates.gradients import SourceGroup
from gatelens.gates.level import Level
from gatelens.measures.top_k import Circuits
from gatelens.methods.activation_path import ActivationPath
from gatelens.methods.attribution import attribute, attribute_edges
from gatelens.methods.relp import relevance_patching
from gatelens.model.anatomy import describe
from gatelens.runtime.context import UNLIMITED
from gatelens.tasks.base import CircuitTask


def main() -> None:
    torch.set_num_threads(1)
    print(f"{PROMPTS} prompts of {LENGTH} tokens, one thread")
    if quick():
        hf = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64)).eval().requires_grad_(False)
        report(Model("two layers", hf, None, describe(hf)), repeats=1)
        return
    report(gpt2_small(), repeats=3)
    try:
        report(gatelens.load("smollm2"), repeats=1)
    except GatelensError as error:
        print(f"skipped smollm2: {error}")


def report(model: Model, *, repeats: int) -> None:
    """Measure edges by role, RelP, one path of EAP-IG on activations, and one update of edge pruning."""
    task = random_task(model)
    edges, by_role = (Circuits.of(model, task, attribute(level, model, task)) for level in (EDGES, ROLE_EDGES))
    lowest, middle = (SourceGroup("heads", layer) for layer in (0, model.n_layers // 2))
    jobs: dict[str, Callable[[], object]] = {
        "FB": forward_backward(model, task),
        "EAP": partial(attribute_edges, model, task),
        "EAP by role": partial(attribute, ROLE_EDGES, model, task),
        "circuit": lambda: edges.metric(0, [edges.total // 10]),
        "circuit by role": lambda: by_role.metric(0, [by_role.total // 10]),
        "RelP of heads": partial(relevance_patching, HEADS, model, task),
        "RelP of edges": partial(relevance_patching, EDGES, model, task),
        "lowest path": activation_path(HEADS, model, task, lowest),
        "middle path": activation_path(HEADS, model, task, middle),
        "update": edge_update(model, task),
    }
    cost = ratios(plain(model, task.buckets[0].clean), jobs, repeats=repeats)
    both = cost["FB"]
    for job, value, unit, floor, most in (
        (f"EAP of {by_role.total:,} edges by role", cost["EAP by role"] / cost["EAP"], "EAP of edges", 1, 1.2),
        ("EAP of edges by role", cost["EAP by role"] / (1 + both), "F + FB", 1, 1.5),
        ("one exact circuit by role", cost["circuit by role"] / cost["circuit"], "circuit of edges", 1, 1.2),
        ("RelP of heads", cost["RelP of heads"] / (1 + both), "F + FB", 1, 1.3),
        ("RelP of edges", cost["RelP of edges"] / (1 + both), "F + FB", 1, 1.3),
        ("EAP-IG on activations, lowest layer", cost["lowest path"] / (1 + STEPS * both), f"F + {STEPS} FB", 1, 1.5),
        ("EAP-IG on activations, middle layer", cost["middle path"] / (1 + STEPS * both), f"F + {STEPS} FB", 0.5, 1.5),
        ("one update of edge pruning", cost["update"] / both, "FB", 1, 3),
    ):
        show(Measurement(f"{model.name}: {job}", value, unit, floor, most))


def activation_path(level: Level[Any], model: Model, task: CircuitTask, group: SourceGroup) -> Callable[[], object]:
    """EAP-IG on the activations of one layer: the points of its path are rows of one pass."""
    batch = task.buckets[0]
    path = ActivationPath(model, level.on(task, batch).attribution(model, batch, metric_of(task)), STEPS, STEPS, [])
    return partial(path.scores, group)


def edge_update(model: Model, task: CircuitTask) -> Callable[[], object]:
    """A run with gates on all edges, and the gradients of a loss with respect to the gates."""
    bucket = task.buckets[0]
    closed = EDGES.capture(model, bucket.corrupt)
    gates = torch.rand(1, *EDGES.shape(model, LENGTH)).requires_grad_()

    def update() -> object:
        logits = EDGES.run(model, bucket.clean, gates, closed, context=UNLIMITED)
        return torch.autograd.grad(logits.log_softmax(-1)[..., 0].sum(), gates)

    return update


if __name__ == "__main__":
    main()
