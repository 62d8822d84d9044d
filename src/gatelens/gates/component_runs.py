"""Plain runs with the output of every source and the input of every destination of the component graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import forward
from gatelens.model import Model
from gatelens.model.anatomy import TransformerBlock
from gatelens.model.graph import Graph
from gatelens.runtime.precision import widen

Write = Callable[[int, Tensor], None]
"""Called as write(first source, outputs) with outputs (source, prompt, position, width)."""


@dataclass(frozen=True, eq=False)
class Components:
    """What every source wrote and every destination read in one run, in float32 or wider."""

    sources: Float[Tensor, "source prompt position width"]
    attention_inputs: Sequence[Float[Tensor, "prompt position width"]]  # the stream that each layer's attention reads
    mlp_inputs: Sequence[Float[Tensor, "prompt position width"]]  # the stream that each layer's MLP reads
    final: Float[Tensor, "prompt position width"]  # the stream that the logits read
    logits: Float[Tensor, "prompt vocab"]  # at the last position


@torch.no_grad()
def capture_components(model: Model, tokens: Int[Tensor, "prompt position"]) -> Components:
    """A plain run with the output of every source and the input of every destination.

    Cost: 1 forward, and the contributions of the heads (one more output projection).
    """
    anatomy = model.anatomy
    sources = new_sources(model, tokens)
    attention_inputs: list[Tensor] = []
    mlp_inputs: list[Tensor] = []
    finals: list[Tensor] = []

    def keep(start: int, outputs: Tensor) -> None:
        sources[start : start + len(outputs)].copy_(outputs)  # across devices and dtypes

    with Hooks() as hooks:
        hook_sources(model, hooks, keep)
        for block in anatomy.blocks:
            hooks.before(block.layer, lambda stream: attention_inputs.append(widen(stream).to(model.device)))
            hooks.before(block.mlp_start, lambda stream: mlp_inputs.append(widen(stream).to(model.device)))
        hooks.before(anatomy.final_norm.part, lambda stream: finals.append(widen(stream).to(model.device)))
        logits = forward(model, tokens, None, hooks, "last")
    return Components(sources, attention_inputs, mlp_inputs, finals[0], logits)


def hook_sources(model: Model, hooks: Hooks, write: Write, layers: range | None = None) -> None:
    """Pass the output of every source to ``write``: embedding, contributions of heads, and MLPs.

    Arguments:
        layers: only the sources of these layers; the embedding belongs to layer 0.
    """
    anatomy, graph = model.anatomy, Graph.of(model.anatomy)
    cut = (anatomy.n_heads, anatomy.head_dim)

    def watch(layer: int, block: TransformerBlock) -> None:
        def heads(z: Tensor) -> None:
            with torch.no_grad():
                write(graph.heads(layer).start, anatomy.contributions(block, z.detach().unflatten(-1, cut)))

        hooks.before(block.out, heads)
        hooks.after(block.mlp_end, lambda out: write(graph.mlp(layer), out.detach()[None]))

    for layer in range(anatomy.n_layers) if layers is None else layers:
        if layer == 0:
            hooks.before(anatomy.blocks[0].layer, lambda stream: write(0, stream.detach()[None]))
        watch(layer, anatomy.blocks[layer])


def new_sources(model: Model, tokens: Tensor) -> Tensor:
    """Uninitialised memory for the output of every source: (source, prompt, position, width)."""
    n_sources = Graph.of(model.anatomy).n_sources
    return torch.empty(n_sources, *tokens.shape, model.anatomy.width, device=model.device, dtype=model.wide_dtype)


def with_sources(model: Model, run: Components, sources: Tensor) -> Components:
    """What destinations would read in a run if the sources had written ``sources`` (zeros or means) instead.

    A stream is then the sum of these sources and of the biases, which do not belong to an edge. It is not computed as
    the stream of the run minus the run's own sources: the rounding errors of such a difference are as large as those of
    the whole stream, and a norm divides them by almost nothing where the sum is zero. 1,000 random edges of SmolLM2
    then had logits of up to 0.9, and not 0.

    Arguments:
        sources: (source, prompt or 1, position or 1, width).
    """
    graph, blocks = Graph.of(model.anatomy), model.anatomy.blocks
    sums = sources.cumsum(0).expand_as(run.sources)  # up to each source, with this source
    biases = torch.zeros_like(sums[0])
    attention, mlp = [], []
    for layer, block in enumerate(blocks):
        attention.append(sums[graph.heads(layer).start - 1] + biases)
        if model.anatomy.parallel:
            mlp.append(attention[-1])
        biases = biases + _bias_of_attention(model, layer, block, run)
        if not model.anatomy.parallel:
            mlp.append(sums[graph.mlp(layer) - 1] + biases)
    return Components(sources.expand_as(run.sources), attention, mlp, sums[-1] + biases, run.logits)


def _bias_of_attention(model: Model, layer: int, block: TransformerBlock, run: Components) -> Tensor:
    """What the bias of a layer's attention output adds to the stream: (width) or (prompt, position, width)."""
    graph, bias = Graph.of(model.anatomy), model.anatomy.out_bias(block)
    if bias is None:
        return run.final.new_zeros(())
    if block.after_attention.module is None:
        return bias.detach().to(run.final)
    # A norm follows, whose scale depends on the run: what the stream received without the contributions of the heads.
    return run.mlp_inputs[layer] - run.attention_inputs[layer] - run.sources[graph.heads(layer)].sum(0)
