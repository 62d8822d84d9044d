"""The demo: which heads of the built-in model do indirect object identification, and are they enough?"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.markup import escape

from gatelens.circuit import CircuitSettings, find_circuit
from gatelens.gates.heads import capture, run_heads
from gatelens.loading import load
from gatelens.model import Model
from gatelens.scores import HeadScores
from gatelens.show import Bars, anatomy_table, circuit_table
from gatelens.tasks import task as make_task
from gatelens.tasks.base import CircuitTask


def run_demo(n: int = 16) -> None:
    """Load the model, find the circuit of a task, and show one prompt with and without it. About two minutes."""
    console = Console()
    model = load("smollm2")
    console.print(anatomy_table(model, 16))
    settings = CircuitSettings(level="heads", method="eap-ig", n=n, points=28, random_points=8, sample=0)
    with Bars(console) as bars:
        result = find_circuit(model, "ioi", settings, progress=bars)
    console.print(circuit_table(result))
    task = make_task("ioi", model, n=n, seed=0)
    assert isinstance(task, CircuitTask)
    (scores,) = result.scores
    assert isinstance(scores, HeadScores)
    kept = torch.zeros(model.n_layers, model.n_heads)
    for head in scores.top(int(result.count or 0)):
        kept[head.layer, head.index] = 1
    _show_prompt(model, task, kept, console)


def _show_prompt(model: Model, task: CircuitTask, kept: torch.Tensor, console: Console) -> None:
    """One prompt, answered by all heads, by the circuit's alone, and by all others."""
    bucket = task.buckets[0]
    prompt, corrupt = bucket.clean[:1], bucket.corrupt[:1]
    gates = torch.stack([torch.ones_like(kept), kept, 1 - kept])
    logits = run_heads(model, prompt, gates, capture(model, corrupt).heads)[:, 0]
    console.print(f"\nprompt: {escape(task.pairs[int(bucket.which[0])].clean)}", soft_wrap=True)
    console.print(f"corrupt: {escape(task.pairs[int(bucket.which[0])].corrupt)}", soft_wrap=True)
    n = int(kept.sum())
    for what, row in zip((f"all {kept.numel()} heads", f"the {n} of the circuit", "all others"), logits, strict=True):
        chances = row.softmax(-1)
        best = ", ".join(f"{model.tokenizer.decode([i])!r} {chances[i]:.0%}" for i in row.topk(3).indices.tolist())
        console.print(f"  {what} say: {escape(best)}", soft_wrap=True)
