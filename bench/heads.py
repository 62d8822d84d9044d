"""The cost of gates on heads, in plain Hugging Face forwards on the same prompts: ``python -m bench.heads``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import gatelens
from bench.measurements import Measurement, quick, show
from bench.timing import ratios
from gatelens import GatelensError, Model
from gatelens.gates.head_runs import run_heads
from gatelens.gates.runs import capture
from gatelens.model.anatomy import describe

PROMPTS, LENGTH = 8, 16
GATED, PATCHED = 1.1, 0.6  # limits, for the shape of GPT-2 small


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{PROMPTS} prompts of {LENGTH} tokens, one thread; in units of one plain Hugging Face forward")
    report(gpt2_small(), heads=3 if quick() else 12)
    if quick():
        return
    try:
        report(gatelens.load("smollm2"), heads=3)
    except GatelensError as error:
        print(f"skipped smollm2: {error}")


def gpt2_small() -> Model:
    """The shape of GPT-2 small (12 layers x 12 heads), with random weights."""
    hf = GPT2LMHeadModel(GPT2Config()).eval().requires_grad_(False)
    return Model("gpt2-small shape", hf, None, describe(hf))


def report(model: Model, *, heads: int) -> None:
    """Print the ratios. ``heads`` of each layer are patched, a third at a time, so that the floor is measured often."""
    tokens = torch.randint(0, model.hf.config.vocab_size, (PROMPTS, LENGTH))
    for name, ratio in ratios(plain(model, tokens), gated(model, tokens), repeats=2 if quick() else 5).items():
        show(Measurement(f"{model.name}: {name}", ratio, "F", floor=1, most=GATED))
    costs = [
        ratios(plain(model, tokens, times=3), {"patched": patched(model, tokens, part)}, repeats=1, warm=False)
        for part in torch.arange(heads).chunk(3)
    ]
    name = f"{model.name}: {heads} heads of each layer patched, per head"
    per_head = 3 * sum(cost["patched"] for cost in costs) / (heads * model.n_layers)
    show(Measurement(name, per_head, "F", floor=0.5, most=PATCHED))


def plain(model: Model, tokens: Tensor, times: int = 1) -> Callable[[], object]:
    """The unit F: a forward of the Hugging Face model with all logits."""

    @torch.no_grad()
    def run() -> None:
        for _ in range(times):
            model.hf(input_ids=tokens, use_cache=False)

    return run


def gated(model: Model, tokens: Tensor) -> dict[str, Callable[[], object]]:
    """One row of random gates over all heads, all logits."""
    gates = torch.rand(1, model.n_layers, model.n_heads)
    corrupt = capture(model, tokens.flip(0)).heads
    return {
        "gated forward, zero": lambda: run_heads(model, tokens, gates, logits_at="all"),
        "gated forward, corrupt": lambda: run_heads(model, tokens, gates, corrupt, logits_at="all"),
    }


def patched(model: Model, tokens: Tensor, heads: Tensor) -> Callable[[], object]:
    """Patch these heads of every layer, one at a time, with their corrupt output in a clean run."""
    each = 1 - torch.eye(model.n_layers * model.n_heads).unflatten(0, (model.n_layers, model.n_heads))
    gates = each[:, heads].reshape(-1, model.n_layers, model.n_heads)
    clean, corrupt = capture(model, tokens), capture(model, tokens.flip(0)).heads
    return lambda: run_heads(model, tokens, gates, corrupt, start=clean)


if __name__ == "__main__":
    main()
