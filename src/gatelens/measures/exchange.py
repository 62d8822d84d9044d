"""Read and write edge circuits in the graph files of EAP-IG and the MIB circuit track, as JSON or as ``.pt``.

Nodes of these files are ``input``, ``a3.h7``, ``m3`` and ``logits``, and edges are named ``a3.h7->a5.h2<q>``. Each has
``in_graph``, and edges have a ``score``. A ``.pt`` file has the same numbers as matrices (source, destination).

Every head has its own k and v input in these files. If heads share k and v in the model, an edge to a shared input is
the sum of the edges to the inputs of its heads, because gradients add up. So its score is divided among the heads
when it is written, and summed when it is read. It is in the circuit if any of the edges is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from gatelens.errors import GatelensError, shortened, shown
from gatelens.gates.edges import EdgeScores
from gatelens.model.graph import Graph
from gatelens.runtime.files import replace_file, replacing
from gatelens.runtime.inputs import parse_json, usable_path

_FORMATS = "a graph file ends in .json or .pt"
_MATRICES = ("edges_scores", "edges_in_graph")


def write_graph(path: str | Path, scores: EdgeScores, kept: Bool[Tensor, "source destination"], width: int) -> None:
    """Write scores and a circuit as a graph file of EAP-IG.

    Arguments:
        path: a file that ends in ``.json`` or ``.pt``.
        kept: the edges of the circuit.
        width: the width of the residual stream, which the format records.

    Example:
        kept = edge_scores.circuit(20).mask
        gatelens.write_graph("circuit.pt", edge_scores, kept, model.anatomy.width)
    """
    path, graph = usable_path(path), scores.graph
    columns = graph.by_query_head
    in_graph = (kept & graph.edges)[:, columns]
    # An edge to a shared input stands for one edge to each head of its group.
    edge_scores = (scores.scores / graph.n_sharing)[:, columns]
    config = {
        "n_layers": graph.n_layers,
        "n_heads": graph.n_heads,
        "parallel_attn_mlp": graph.parallel,
        "d_model": width,
    }
    nodes = nodes_in_graph(graph, in_graph)
    _format(path).write(path, graph, config, edge_scores, in_graph, nodes)


def read_graph(
    path: str | Path, graph: Graph, width: int | None = None
) -> tuple[EdgeScores, Bool[Tensor, "source destination"]]:
    """Read the scores and the circuit of a graph file of EAP-IG. A ``.pt`` file is read without running any code in it.

    Arguments:
        path: a file that ends in ``.json`` or ``.pt``.
        graph: the component graph of the model that the file must fit.
        width: the width of that model's residual stream; None: not compared.

    Returns:
        Scores of all edges, and a mask (source, destination) of the edges in the circuit.

    Example:
        edge_scores, kept = gatelens.read_graph("circuit.json", edge_scores.graph, model.anatomy.width)
    """
    path = usable_path(path)
    theirs, in_graph = _format(path).read(path, graph, width)
    columns, real = graph.by_query_head, graph.edges
    scores = torch.zeros(real.shape, dtype=theirs.dtype).index_add_(1, columns, theirs) * real
    kept = torch.zeros(real.shape).index_add_(1, columns, in_graph.float()).bool() & real
    return EdgeScores(scores, graph, f"read from {path.name}"), kept


class _Json:
    """Graph files as JSON: an object for each edge. Edges that are absent have the score 0."""

    @staticmethod
    def write(path: Path, graph: Graph, config: Any, scores: Tensor, in_graph: Tensor, nodes: Tensor) -> None:
        readable, by_column = graph.reads[graph.by_query_head].tolist(), (scores.T.tolist(), in_graph.T.tolist())
        edges = {
            f"{source}->{name}": {"score": by_column[0][j][i], "in_graph": by_column[1][j][i]}
            for j, name in enumerate(_destinations(graph))
            for i, source in enumerate(_sources(graph)[: readable[j]])
        }
        named_nodes = {name: {"in_graph": kept} for name, kept in zip(_sources(graph), nodes.tolist(), strict=True)}
        named_nodes["logits"] = {"in_graph": True}
        replace_file(path, json.dumps({"cfg": config, "nodes": named_nodes, "edges": edges}))

    @staticmethod
    def read(path: Path, graph: Graph, width: int | None) -> tuple[Tensor, Tensor]:
        data = _load(path, lambda: parse_json(path.read_text(encoding="utf-8")))
        if not all(isinstance(data.get(key), dict) for key in ("cfg", "edges")):
            raise GatelensError(f"{path} is not a circuit: a JSON graph has 'cfg', 'nodes' and 'edges'.")
        _check_shape(path, data["cfg"], graph, width)
        real = graph.edges[:, graph.by_query_head]
        scores, in_graph = torch.zeros(real.shape), torch.zeros(real.shape, dtype=torch.bool)
        rows = {name: i for i, name in enumerate(_sources(graph))}
        columns = {name: j for j, name in enumerate(_destinations(graph))}
        for name, edge in data["edges"].items():
            source, _, destination = name.partition("->")
            place = rows.get(source, -1), columns.get(destination, -1)
            if min(place) < 0 or not real[place] or not isinstance(edge, dict):
                raise GatelensError(
                    f"{path} has an edge '{shortened(name)}' that this model does not have: give a circuit of "
                    "the same model."
                )
            scores[place] = _number(path, name, edge.get("score"))
            in_graph[place] = bool(edge.get("in_graph", False))
        nodes = data.get("nodes")
        listed = nodes.values() if isinstance(nodes, dict) else ()
        scored = [node for node in listed if isinstance(node, dict) and "score" in node]
        if scored and not scores.any():
            raise GatelensError(f"{path} has scores of nodes and none of edges: give a graph of MIB's level edge.")
        return scores, in_graph


class _Pt:
    """Graph files of ``torch.save``: matrices (source, destination), with zeros where there is no edge."""

    @staticmethod
    def write(path: Path, graph: Graph, config: Any, scores: Tensor, in_graph: Tensor, nodes: Tensor) -> None:
        data = {
            "cfg": config,
            "src_nodes": _sources(graph),
            "dst_nodes": _destinations(graph),
            "edges_scores": scores.float(),
            "edges_in_graph": in_graph,
            "nodes_in_graph": nodes,
        }
        with replacing(path) as temporary:
            torch.save(data, temporary)

    @staticmethod
    def read(path: Path, graph: Graph, width: int | None) -> tuple[Tensor, Tensor]:
        # `weights_only` accepts tensors and plain containers, and refuses everything that could run code.
        data = _load(path, lambda: torch.load(path, map_location="cpu", weights_only=True))
        if not isinstance(data.get("cfg"), dict) or not all(isinstance(data.get(key), Tensor) for key in _MATRICES):
            raise GatelensError(
                f"{path} is not a circuit: a .pt graph has 'cfg', {' and '.join(map(repr, _MATRICES))}."
            )
        _check_shape(path, data["cfg"], graph, width)
        real = graph.edges[:, graph.by_query_head]
        scores, in_graph = (data[key] for key in _MATRICES)
        for key, matrix in zip(_MATRICES, (scores, in_graph), strict=True):
            if matrix.shape != real.shape:
                raise GatelensError(
                    f"{path} has {key} of shape {tuple(matrix.shape)}, but this model needs {tuple(real.shape)}: give "
                    "a circuit of the same model."
                )
        names = data.get("src_nodes", _sources(graph)), data.get("dst_nodes", _destinations(graph))
        if [list(part) for part in names] != [_sources(graph), _destinations(graph)]:
            raise GatelensError(f"{path} has its nodes in another order than EAP-IG writes them: write it again.")
        if not scores[real].float().isfinite().all():
            raise GatelensError(f"{path} has scores that are not finite: scores are finite numbers.")
        return scores.float().where(real, 0.0), in_graph != 0


def _format(path: Path) -> type[_Json] | type[_Pt]:
    formats: Mapping[str, type[_Json] | type[_Pt]] = {".json": _Json, ".pt": _Pt}
    if path.suffix not in formats:
        raise GatelensError(f"cannot tell the format of {path}: {_FORMATS}.")
    return formats[path.suffix]


def _load(path: Path, read: Callable[[], Any]) -> dict[str, Any]:
    """What a file holds, if it is an object; a one-sentence error otherwise."""
    try:
        data = read()
    except FileNotFoundError as error:
        raise GatelensError(f"no file {path}: give a graph file that EAP-IG, MIB or gatelens wrote.") from error
    except Exception as error:  # a damaged pickle can raise errors of any type
        reason = shortened(str(error).strip().split("\n")[0]) or type(error).__name__
        raise GatelensError(f"{path} is not a graph file of EAP-IG that can be read safely: {reason}") from error
    if not isinstance(data, dict):
        raise GatelensError(f"{path} is not a circuit: a graph file holds an object with 'cfg' and edges.")
    return data


def _check_shape(path: Path, config: Mapping[str, Any], graph: Graph, width: int | None) -> None:
    shape = (config.get("n_layers"), config.get("n_heads"), bool(config.get("parallel_attn_mlp")))
    if shape != (graph.n_layers, graph.n_heads, graph.parallel):
        raise GatelensError(
            f"{path} is a circuit of a model with {shown(shape[0])} layers of {shown(shape[1])} heads"
            f"{' in parallel blocks' if shape[2] else ''}, but this model has {graph.n_layers} layers of "
            f"{graph.n_heads} heads{' in parallel blocks' if graph.parallel else ''}: give a circuit of the same model."
        )
    their_width = config.get("d_model")
    if width is not None and their_width not in (None, width):
        raise GatelensError(
            f"{path} is a circuit of a model of width {their_width}, but this model has width {width}: give a circuit "
            "of the same model."
        )


def _number(path: Path, name: str, score: Any) -> float:
    if score is None:
        return 0.0
    if not isinstance(score, (int, float)) or not abs(score) <= torch.finfo(torch.float32).max:
        raise GatelensError(f"{path} has an edge '{name}' whose score is {shown(score)}: scores are finite numbers.")
    return float(score)


def _sources(graph: Graph) -> list[str]:
    """The names of the sources in these files, in our order, which is also theirs."""
    names = ["input"]
    for layer in range(graph.n_layers):
        names += [f"a{layer}.h{head}" for head in range(graph.n_heads)]
        names.append(f"m{layer}")
    return names


def _destinations(graph: Graph) -> list[str]:
    """The names of the destinations in these files, in the order of their columns."""
    names: list[str] = []
    for layer in range(graph.n_layers):
        names += [f"a{layer}.h{head}<{kind}>" for kind in "qkv" for head in range(graph.n_heads)]
        names.append(f"m{layer}")
    return [*names, "logits"]


def nodes_in_graph(graph: Graph, in_graph: Shaped[Tensor, "source column"]) -> Bool[Tensor, " source"]:
    """The nodes that an edge of the circuit enters (the input needs none) and an edge leaves."""
    entered = in_graph.any(0)[:-1].view(graph.n_layers, -1)  # (layer, inputs of a layer)
    heads = entered[:, :-1].unflatten(1, (3, graph.n_heads)).any(1)
    inside = torch.cat([heads, entered[:, -1:]], 1).flatten()
    return in_graph.any(1) & torch.cat([torch.tensor([True]), inside])
