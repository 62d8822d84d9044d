"""Peak memory of each job beside its budget (``--memory-gb``): ``python -m bench.memory``.

A number is (peak of the process - memory before the job, which has the weights) / budget, and should be at most 1.2.
Every job runs in a process of its own. The model is a random Llama of 3 layers with a vocabulary of 49,152 tokens, so
that logits are as large as those of a real model.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.measurements import Measurement, arguments, quick, show
from gatelens.gates import LEVELS
from gatelens.model import Model
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.build import from_tokens
from gatelens.tasks.tokens import Pair, PairTokens

BUDGET_GB, LENGTH, PROMPTS = 0.25, 24, 512
VOCAB = 49_152
TOKENIZER = Path(__file__).parents[1] / "tests" / "trained_model"


def main() -> None:
    if chosen := [name for name in JOBS if name in arguments()]:
        print(measured(JOBS[chosen[0]]))
        return
    print(f"{PROMPTS} prompts of {LENGTH} tokens, a budget of {BUDGET_GB} GB")
    for name in list(JOBS)[: 1 if quick() else None]:
        command = [sys.executable, "-m", "bench.memory", name]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        show(Measurement(f"{name}: peak without weights", float(output.split()[-1]) / BUDGET_GB, "budget", most=1.2))


def measured(job: Callable[[Model, CircuitTask], object]) -> float:
    """How many GB a job takes beside what the process has before it."""
    torch.set_num_threads(1)
    model = random_llama()
    job(model, random_task(2))  # imports, and what torch allocates once
    task = random_task(PROMPTS)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the earlier peak
    job(model, task)
    return _status("VmHWM") - before


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1e6


def random_llama() -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    from gatelens.model.anatomy import describe

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
    config = LlamaConfig(vocab_size=VOCAB, num_attention_heads=6, num_key_value_heads=3, **sizes)
    hf = LlamaForCausalLM(config).eval().requires_grad_(False)
    for weight in hf.parameters():
        weight.mul_(5.0)
    return Model("random", hf, None, describe(hf))


def random_task(n: int) -> CircuitTask:
    """Prompts of random tokens; the corrupt prompt differs in one token, which has a role."""
    tokens = torch.randint(10, VOCAB, (n, LENGTH), generator=torch.Generator().manual_seed(0))
    corrupt = tokens.clone()
    corrupt[:, 3] = 9
    pairs = [Pair(f"clean {i}", f"corrupt {i}", ("right",), ("wrong",)) for i in range(n)]
    roles = ["", "", "", "subject"] + [""] * (LENGTH - 4)
    aligned = zip(tokens.tolist(), corrupt.tolist(), strict=True)
    ids = [PairTokens(clean, other, [5], [6], roles) for clean, other in aligned]
    return from_tokens("random", 0, pairs, ids)


def circuit(level: str, method: str) -> Callable[[Model, CircuitTask], object]:
    """The job of `gatelens circuit` at a level, without what it draws."""

    def run(model: Model, task: CircuitTask) -> object:
        from gatelens.jobs.circuit import find_circuit
        from gatelens.measures.circuit_settings import CircuitSettings

        few = CircuitSettings(
            level=level,
            method=method,
            points=4,
            random_points=0,
            refine=0.0,
            sample=0,
            describe=0,
            allow_noise=True,
            memory_gb=BUDGET_GB,
        )
        return find_circuit(model, task, few)

    return run


def roles(model: Model, task: CircuitTask) -> object:
    """The job of `gatelens gate`."""
    from gatelens.jobs.roles import find_roles
    from gatelens.measures.roles_result import RolesSettings
    from gatelens.tasks.batches import as_responses

    n = len(task)
    settings = RolesSettings(
        seeds=2, updates=2, batch=min(64, n // 2), n=n // 2, held_out=n - n // 2, most=2, every=1, memory_gb=BUDGET_GB
    )
    return find_roles(model, as_responses(task), settings)


def contrast(model: Model, task: CircuitTask) -> object:
    """The job of `gatelens contrast`: two halves of the prompts as two tasks."""
    from gatelens.jobs.contrast import find_contrast
    from gatelens.measures.contrast_result import TwoTaskSettings
    from gatelens.tasks.batches import as_responses, split

    examples = as_responses(task)
    n = len(examples) // 2
    if n < 4:  # the first, small call: four examples for each task, of which one is held out
        examples, n = as_responses(random_task(8)), 4
    keep, lose = split(examples, n)
    settings = TwoTaskSettings(seeds=2, updates=2, batch=min(64, n), n=n, memory_gb=BUDGET_GB)
    return find_contrast(model, keep, lose, settings)


def relations(model: Model, task: CircuitTask) -> object:
    """The job of `gatelens relations`, with the tokenizer of the tests, which splits most words into several tokens."""
    from transformers import AutoTokenizer

    from gatelens.jobs.relations import find_relations
    from gatelens.measures.relations_result import RelationsSettings

    model = replace(model, tokenizer=AutoTokenizer.from_pretrained(TOKENIZER))
    n = min(24, len(task))
    return find_relations(model, RelationsSettings(seeds=2, updates=1, batch=n, n=n, shots=4, memory_gb=BUDGET_GB))


def effect(model: Model, task: CircuitTask) -> object:
    """The job of `gatelens effect`, of every other edge."""
    from gatelens.measures.effect import edges_effect
    from gatelens.model.graph import Graph
    from gatelens.runtime.context import Context

    edges = Graph.of(model.anatomy).edges.clone()
    edges[::2] = False
    return edges_effect(model, task, edges, context=Context(BUDGET_GB))


def tasks(model: Model, task: CircuitTask) -> object:
    """The job of `gatelens tasks`. It has no option for its budget, because it holds the logits of one batch only."""
    from transformers import AutoTokenizer

    from gatelens.tasks.preview import preview

    return preview(replace(model, tokenizer=AutoTokenizer.from_pretrained(TOKENIZER)), task, show=0)


JOBS: dict[str, Callable[[Model, CircuitTask], object]] = {
    **{f"circuit, {level}": circuit(level, "eap") for level in LEVELS},
    "circuit, heads by patching": circuit("heads", "patching"),
    "tasks": tasks,
    "effect": effect,
    "gate": roles,
    "contrast": contrast,
    "relations": relations,
}


if __name__ == "__main__":
    main()
