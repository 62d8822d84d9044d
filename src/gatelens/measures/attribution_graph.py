"""Write edge circuits as attribution graphs: the JSON files that circuit-tracer's viewer and Neuronpedia open.

A node of such a graph is a feature at a token. Our components act at all positions, so all nodes stand at one more
position, which is labelled "(all positions)", behind the tokens of an example prompt. The links between two components
through q, k and v are one link, whose weight is the sum of their scores.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.edges import EdgeScores
from gatelens.measures.example import PromptRecord
from gatelens.measures.exchange import nodes_in_graph
from gatelens.model.graph import Graph
from gatelens.runtime.files import make_folder, read_json, write_json

ALL_POSITIONS = "(all positions)"
_INDEX = "graph-metadata.json"  # the graphs that the viewer offers


def write_attribution_graph(
    folder: str | Path,
    slug: str,
    model_name: str,
    scores: EdgeScores,
    kept: Bool[Tensor, "source destination"],
    prompt: PromptRecord,
) -> Path:
    """Write a circuit to a folder that circuit-tracer's viewer serves, and add it to the viewer's list of graphs.

    Example:
        path = write_attribution_graph("graphs", "ioi-edges", "smollm2", scores, kept, prompt)
        # then: circuit_tracer.frontend.local_server.serve("graphs")

    Arguments:
        slug: the name of the graph and of its file: letters, digits and dashes.
        model_name: the name of the model; Neuronpedia takes it as its model id.
        kept: the edges of the circuit.
        prompt: an example prompt with its answer, which names the logits.

    Returns:
        The path of the graph: ``folder/slug.json``.
    """
    if not re.fullmatch(r"[A-Za-z0-9-]+", slug):
        raise GatelensError(f"the slug '{slug}' cannot name a graph: use letters, digits and dashes.")
    folder = Path(folder)
    make_folder(folder)
    metadata = {
        "slug": slug,
        "scan": model_name,
        "transcoder_list": [],
        "prompt_tokens": [*prompt.tokens, ALL_POSITIONS],
        "prompt": "".join(prompt.tokens),
        "schema_version": 1,
        "info": {"generator": {"name": "gatelens"}, "description": f"edges scored by {scores.method}"},
    }
    weights = link_weights(scores, kept)
    names = _node_ids(scores.graph)
    links = [
        {"source": names[i], "target": names[j], "weight": float(weights[i, j])} for i, j in weights.nonzero().tolist()
    ]
    graph = {
        "metadata": metadata,
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": names[-1], "sg_pos": ""},
        "nodes": _nodes(scores.graph, weights, prompt),
        "links": links,
    }
    path, index = folder / f"{slug}.json", folder / _INDEX
    write_json(path, graph)
    listed = read_json(index).get("graphs", []) if index.exists() else []
    write_json(index, {"graphs": [*(other for other in listed if other.get("slug") != slug), metadata]})
    return path


def link_weights(
    scores: EdgeScores, kept: Bool[Tensor, "source destination"]
) -> Float[Tensor, "component component_or_logits"]:
    """The sum of the scores of a circuit's edges between any two components; the last column is the logits.

    An edge to a k or v input that several heads share is divided among them. Edges of components that are not on the
    way from the embedding to the logits are left out.
    """
    graph, columns = scores.graph, scores.graph.by_query_head
    in_graph = kept[:, columns] & graph.edges[:, columns]
    inside = torch.cat([nodes_in_graph(graph, in_graph), torch.tensor([True])])
    layers = [[*range(graph.heads(n).start, graph.heads(n).stop)] * 3 + [graph.mlp(n)] for n in range(graph.n_layers)]
    readers = torch.tensor([*(node for layer in layers for node in layer), graph.n_sources])  # the node of each column
    in_graph &= inside[:-1, None] & inside[readers]
    values = (scores.scores / graph.n_sharing)[:, columns].float() * in_graph
    return torch.zeros(graph.n_sources, graph.n_sources + 1).index_add_(1, readers, values)


def _nodes(graph: Graph, weights: Tensor, prompt: PromptRecord) -> list[dict[str, Any]]:
    """The components of a circuit, and the logits."""
    if prompt.probability is None:
        raise GatelensError("the example of this run lacks the answer's probability: run the job again.")
    # The viewer prunes nodes by the share of the total influence that they and all stronger nodes have.
    influence = weights.abs().sum(1)
    order = influence.argsort(descending=True, stable=True)
    cumulative = torch.empty_like(influence).index_copy_(0, order, influence[order].cumsum(0))
    cumulative /= influence.sum().clamp(min=1e-12)
    labels = [*graph.source_names, f'Output "{prompt.answer}" (p={prompt.probability:.3f})']
    types = {"E": "embedding", str(graph.n_layers + 1): "logit"}
    nodes: list[dict[str, Any]] = []
    for node, (node_id, label) in enumerate(zip(_node_ids(graph), labels, strict=True)):
        layer, feature, _ = node_id.split("_")
        is_logit = node == graph.n_sources
        if not is_logit and not weights[node].any():
            continue
        nodes.append(
            {
                "node_id": node_id,
                "feature": int(feature),
                "layer": layer,
                "ctx_idx": len(prompt.tokens),
                "feature_type": types.get(layer, "cross layer transcoder"),
                "token_prob": prompt.probability if is_logit else 0.0,
                "is_target_logit": is_logit,
                "run_idx": 0,
                "reverse_ctx_idx": 0,
                "jsNodeId": f"{layer}_{feature}-0",
                "clerp": label,
                "influence": None if is_logit else float(cumulative[node]),
                "activation": None,
            }
        )
    return nodes


def _node_ids(graph: Graph) -> list[str]:
    """The layer, the number in the layer (the MLP after the heads) and 0 for every component, then for the logits."""
    ids = ["E_0_0"]
    for layer in range(graph.n_layers):
        ids += [f"{layer}_{number}_0" for number in range(graph.n_heads + 1)]
    return [*ids, f"{graph.n_layers + 1}_0_0"]
