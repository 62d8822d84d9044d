"""Read and write edge circuits in the JSON graph format of EAP-IG and the MIB circuit track.

Nodes of that format are ``input``, ``a3.h7``, ``m3`` and ``logits``, and edges ``a3.h7->a5.h2<q>``. Each has
``in_graph``, and edges have a ``score``. Every head has its own k and v in that format. If heads share k and v in the
model, an edge to the shared input is written once for each head; on reading, the edge is in the graph if any of these
is, and its score is their mean.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.edges import EdgeScores
from gatelens.model.graph import Graph
from gatelens.runtime.files import replace_file


def write_graph(path: str | Path, scores: EdgeScores, kept: Bool[Tensor, "source destination"], width: int) -> None:
    """Write scores and a circuit as a JSON graph.

    Arguments:
        kept: the edges of the circuit.
        width: the width of the residual stream, which the format records.
    """
    graph = scores.graph
    # A node is in the graph if an edge of the circuit leaves it. The two ends are always in the graph.
    kept = kept & graph.edges
    nodes = {name: {"in_graph": bool(kept[i].any())} for i, name in enumerate(_sources(graph))}
    nodes["input"] = nodes["logits"] = {"in_graph": True}
    edges = {
        f"{source}->{name}": {"score": float(scores.scores[i, j]), "in_graph": bool(kept[i, j])}
        for j, names in enumerate(_destinations(graph))
        for name in names
        for i, source in enumerate(_sources(graph)[: int(graph.reads[j])])
    }
    config = {
        "n_layers": graph.n_layers,
        "n_heads": graph.n_heads,
        "parallel_attn_mlp": graph.parallel,
        "d_model": width,
    }
    replace_file(Path(path), json.dumps({"cfg": config, "nodes": nodes, "edges": edges}))


def read_graph(path: str | Path, graph: Graph) -> tuple[EdgeScores, Bool[Tensor, "source destination"]]:
    """Read the scores and the circuit of a JSON graph.

    Arguments:
        graph: the component graph of the model that the file must fit.

    Returns:
        Scores of all edges, and a mask (source, destination) of the edges in the circuit.
    """
    data = _read(Path(path))
    config = data["cfg"]
    shape = (config.get("n_layers"), config.get("n_heads"), bool(config.get("parallel_attn_mlp")))
    if shape != (graph.n_layers, graph.n_heads, graph.parallel):
        raise GatelensError(
            f"{path} is a circuit of a model with {shape[0]} layers of {shape[1]} heads"
            f"{' in parallel blocks' if shape[2] else ''}, but this model has {graph.n_layers} layers of "
            f"{graph.n_heads} heads{' in parallel blocks' if graph.parallel else ''}: give a circuit of the same model."
        )
    scores = torch.zeros(graph.n_sources, graph.n_destinations)
    kept = torch.zeros(graph.n_sources, graph.n_destinations, dtype=torch.bool)
    count = torch.zeros(graph.n_sources, graph.n_destinations)
    sources = {name: i for i, name in enumerate(_sources(graph))}
    destinations = {name: j for j, names in enumerate(_destinations(graph)) for name in names}
    for name, edge in data["edges"].items():
        source, _, destination = name.partition("->")
        place = sources.get(source, -1), destinations.get(destination, -1)
        if min(place) < 0 or not graph.edges[place] or not isinstance(edge, dict):
            raise GatelensError(
                f"{path} has an edge '{name}' that this model does not have: give a circuit of the same model."
            )
        scores[place] += _number(path, name, edge.get("score"))
        count[place] += 1
        kept[place] |= bool(edge.get("in_graph", False))
    return EdgeScores(scores / count.clamp(min=1), graph, f"read from {Path(path).name}"), kept


def _number(path: str | Path, name: str, score: Any) -> float:
    if score is None:
        return 0.0
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        raise GatelensError(f"{path} has an edge '{name}' whose score is {score!r}: scores are finite numbers.")
    return float(score)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise GatelensError(f"no file {path}: give a JSON graph that EAP-IG or gatelens wrote.") from error
    except (OSError, ValueError) as error:
        raise GatelensError(f"{path} is not a JSON graph: {error}") from error
    if not isinstance(data, dict) or not all(isinstance(data.get(key), dict) for key in ("cfg", "edges")):
        raise GatelensError(f"{path} is not a circuit: a JSON graph has 'cfg', 'nodes' and 'edges'.")
    return data


def _sources(graph: Graph) -> list[str]:
    names = ["input"]
    for layer in range(graph.n_layers):
        names += [f"a{layer}.h{head}" for head in range(graph.n_heads)]
        names.append(f"m{layer}")
    return names


def _destinations(graph: Graph) -> list[list[str]]:
    """The names of each destination in that format: several if heads of the model share keys and values."""
    group = graph.n_heads // graph.n_kv_heads
    names: list[list[str]] = []
    for layer in range(graph.n_layers):
        names += [[f"a{layer}.h{head}<q>"] for head in range(graph.n_heads)]
        for kind in "kv":
            names += [[f"a{layer}.h{g * group + i}<{kind}>" for i in range(group)] for g in range(graph.n_kv_heads)]
        names.append([f"m{layer}"])
    return [*names, ["logits"]]
