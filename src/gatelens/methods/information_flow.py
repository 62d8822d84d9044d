"""Information-flow routes: how much of what a component reads comes from each source, in one plain run.

What a destination reads is a sum of what its sources wrote. The importance of a source is how much closer its output x
brings zero to the sum y, in the L1 norm, as a share of all sources:

    proximity(x, y) = max(0, |y| - |y - x|),    importance = proximity / sum of the proximities of all sources

(Ferrando and Voita, arXiv 2403.00824; on the component graph as in Mueller et al., arXiv 2504.13151.)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from gatelens.gates import EDGES
from gatelens.gates.attribution import prompt_sums
from gatelens.gates.component_runs import Components, capture_components
from gatelens.gates.edges import EdgeScores
from gatelens.methods.registry import Method, Price, register
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.batches import batches


def flow_routes(model: Model, task: CircuitTask, *, context: Context | None = None) -> EdgeScores:
    """The importance of every edge in the clean run, mean over positions and prompts.

    The importances of the edges into one destination add up to 1, and are not negative. The logits are read at the last
    position only. The q, k and v inputs of all heads of a layer read the same stream, so their edges have the same
    scores. Neither the metric nor the corrupt prompts are used.

    A score compares edges into the same destination, so use the selection ``path``, which grows a circuit from the
    logits, as the authors do.

    Returns:
        Scores of edges. Cost: 1 forward, and about as much for the norms.
    """
    context = context or Context()
    parts = batches(task, lambda length: EDGES.closed_numbers(model, length), context)
    context.begin("score edges", len(parts))
    pieces = context.each_piece([(f"edges-{i}", partial(_piece, model, batch)) for i, batch in enumerate(parts)])
    return EDGES.attributed(model, task, pieces, "ifr")


def importances(
    sources: Float[Tensor, "source prompt position width"], stream: Float[Tensor, "prompt position width"]
) -> Float[Tensor, "source prompt position"]:
    """The importance of each source of a stream. The importances at a position add up to 1, or are all 0."""
    whole = stream.abs().sum(-1)
    proximities = torch.stack([whole - (stream - source).abs().sum(-1) for source in sources]).clamp(min=0)
    total = proximities.sum(0)
    return proximities / total.where(total > 0, 1)


def _piece(model: Model, batch: Bucket) -> Tensor:
    """The sums over the prompts of a batch."""
    graph = Graph.of(model.anatomy)
    run = capture_components(model, batch.clean)
    scores = run.sources.new_zeros(len(batch), graph.n_sources, graph.n_destinations)
    for destinations, stream in _streams(run, graph):
        n_positions = stream.shape[1]
        sources = run.sources[: int(graph.reads[destinations.start]), :, -n_positions:]
        means = importances(sources, stream).mean(-1)
        scores[:, : len(sources), destinations] = means.T[..., None]
    return prompt_sums(scores)


def _streams(run: Components, graph: Graph) -> Iterator[tuple[slice, Float[Tensor, "prompt position width"]]]:
    """The destinations that read the same stream, with the stream; for the logits at the last position only."""
    for layer in range(graph.n_layers):
        mlp = graph.mlp_input(layer)
        yield graph.attention_inputs(layer), run.attention_inputs[layer]
        yield slice(mlp, mlp + 1), run.mlp_inputs[layer]
    yield slice(graph.logits, graph.logits + 1), run.final[:, -1:]


IFR = register(
    Method(
        name="ifr",
        score=lambda level, model, task, settings, context: flow_routes(model, task, context=context),
        price=lambda level, settings: Price(each=2),
        paper="Ferrando and Voita, arXiv 2403.00824",
        help="how much of what a component reads comes from each source, in the clean run",
        levels=("edges",),
    )
)
