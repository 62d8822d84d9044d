"""What the page's interactive parts show, as plain JSON: circuit graphs, head maps, and attention.

Only what can be looked at goes to the page: of a circuit the first 1,000 edges of its ranking, of a head's attention
the strongest pairs; whole attention patterns are files of their own, which the page reads when they are asked for.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gatelens.gates.scores import rank
from gatelens.measures.example import ExamplePrompt
from gatelens.methods.head_gating import KINDS
from gatelens.model.components import Component
from gatelens.model.graph import Graph
from gatelens.report.layout import Edge, component, components, layout, links
from gatelens.report.runs import CircuitRun, GateRun
from gatelens.report.summary import Group

MOST_EDGES = 1000
_LAID_OUT = (40, 100)  # up to so many edges, graphs are laid out
_STEPS = 65535  # an attention weight goes to the page as a whole number of this many steps
_PAIRS = 3  # pairs of tokens shown of each head


# Circuit graphs


def circuit_views(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One for each task and method with edge circuits: its models as sides that can be set beside each other."""
    views = []
    for group in groups:
        drawn = {line.label: line.run for line in group.lines if group.level == "edges" and line.run.graph is not None}
        if drawn:
            views.append({"title": f"{group.task}, {group.method}", "sides": _sides(drawn, group.threshold)})
    return views


def _sides(drawn: dict[str, CircuitRun], threshold: float) -> list[dict[str, Any]]:
    tops = {label: top_edges(run) for label, run in drawn.items()}
    # Models of one shape share their places, so that a component is found where it is in the other.
    by_shape: dict[Graph, list[list[Edge]]] = {}
    for label, run in drawn.items():
        by_shape.setdefault(_graph(run), []).append(tops[label])
    places = {graph: _places(graph, mine) for graph, mine in by_shape.items()}
    return [_side(label, run, tops[label], places[_graph(run)], threshold) for label, run in drawn.items()]


def _places(graph: Graph, tops: Sequence[Sequence[Edge]]) -> dict[int, dict[str, tuple[float, float]]]:
    """Where components stand while up to so many edges are drawn.

    Few edges are laid out to be read; of many only the bulk can be seen, and the plain order of heads is best.
    """
    places = {most: layout(graph, sorted({edge for top in tops for edge in top[:most]})) for most in _LAID_OUT}
    return {**places, MOST_EDGES: in_order(graph, components(graph, {edge for top in tops for edge in top}))}


def in_order(graph: Graph, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Places in rows by layer and columns by head, the MLPs at the right: name -> (x, y) in 0..1."""
    group, columns, bands = graph.n_heads / graph.n_kv_heads, graph.n_heads + 1, graph.n_layers + 1

    def place(name: str) -> tuple[float, float]:
        part = Component.find(name)
        if part is None:
            return 0.5, float(name == "logits")
        if part.kind == "M":
            return 1 - 0.5 / columns, (part.layer + 1.3) / bands
        column = (part.index + 0.5) * (group if part.kind == "KV" else 1)
        return column / columns, (part.layer + (0.7 if part.kind == "KV" else 1)) / bands

    return {name: place(name) for name in names}


def _side(
    label: str,
    run: CircuitRun,
    top: list[Edge],
    places: dict[int, dict[str, tuple[float, float]]],
    threshold: float,
) -> dict[str, Any]:
    graph, scores, curve = _graph(run), run.edge_scores, run.result.curve
    names = components(graph, top)
    number = {name: i for i, name in enumerate(names)}
    sources, destinations = zip(*top, strict=True)
    ends = [graph.destination_names[j] for j in destinations]
    return {
        "label": label,
        "sparse": run.sparse,
        "total": graph.n_edges,
        "threshold": threshold,
        "count": curve.count_at(threshold),
        "curve": {"asked": curve.asked, "kept": _short(curve.kept), "effect": _short(curve.effect)},
        "names": names,
        "places": [
            {"most": most, **{axis: [_place(mine, name, i) for name in names] for i, axis in enumerate("xy")}}
            for most, mine in places.items()
        ],
        "scores": [_component_score(run, name) for name in names],
        "attends": [_attends(run.prompts, name) for name in names],
        "links": [[number[a], number[b]] for a, b in links(graph, names)],
        "source": [number[graph.source_names[i]] for i in sources],
        "destination": [number[component(name)] for name in ends],
        "input": [name.partition(".")[2] for name in ends],
        "score": _short(scores[list(sources), list(destinations)]),
        "joins": joins(graph, top),
    }


def _place(places: dict[str, tuple[float, float]], name: str, axis: int) -> float | None:
    return round(places[name][axis], 4) if name in places else None


def _graph(run: CircuitRun) -> Graph:
    assert run.graph is not None  # others are not drawn
    return run.graph


def top_edges(run: CircuitRun, most: int = MOST_EDGES) -> list[Edge]:
    """The first edges of the run's ranking, as (source, destination)."""
    edges = _graph(run).edges.nonzero()
    order = rank(run.edge_scores[edges[:, 0], edges[:, 1]], run.result.settings.ranking)
    return [(i, j) for i, j in edges[order[:most]].tolist()]


def joins(graph: Graph, ranked: Sequence[Edge]) -> list[int]:
    """For each edge of a ranking the smallest k whose top k has it on a path from the embedding to the logits.

    0 if that takes more edges than are given. A path is there once its last edge is: so a component joins with the
    best of the paths to it, whose worst edge is ranked highest.
    """
    never = len(ranked) + 1
    ranks = torch.full((graph.n_sources, graph.n_destinations), never)
    sources, destinations = torch.tensor(list(ranked)).T
    ranks[sources, destinations] = torch.arange(1, never)
    reached = torch.full((graph.n_sources,), never)
    reached[0] = 0
    useful = torch.full((graph.n_destinations,), never)
    useful[graph.logits] = 0
    for layer in range(graph.n_layers):
        inputs = graph.attention_inputs(layer)
        reached[graph.heads(layer)] = _by_head(graph, torch.maximum(ranks[:, inputs], reached[:, None]).amin(0))
        reached[graph.mlp(layer)] = torch.maximum(ranks[:, graph.mlp_input(layer)], reached).min()
    for layer in reversed(range(graph.n_layers)):
        useful[graph.mlp_input(layer)] = torch.maximum(ranks[graph.mlp(layer)], useful).min()
        heads = torch.maximum(ranks[graph.heads(layer)], useful).amin(1)
        useful[graph.attention_inputs(layer)] = _by_input(graph, heads)
    joined = torch.stack([ranks[sources, destinations], reached[sources], useful[destinations]]).amax(0)
    return torch.where(joined < never, joined, 0).tolist()


def _by_head(graph: Graph, inputs: Tensor) -> Tensor:
    """The first of a head's three inputs; heads that are coupled count as one."""
    if graph.coupled:
        return inputs.min()
    q, k, v = inputs.split([graph.n_heads, graph.n_kv_heads, graph.n_kv_heads])
    return torch.minimum(q, torch.minimum(k, v).repeat_interleave(graph.n_heads // graph.n_kv_heads))


def _by_input(graph: Graph, heads: Tensor) -> Tensor:
    """The first of the heads behind an input."""
    if graph.coupled:
        return heads.min()
    shared = heads.unflatten(0, (graph.n_kv_heads, -1)).amin(1)
    return torch.cat([heads, shared, shared])


def _component_score(run: CircuitRun, name: str) -> float | None:
    """The sum of the scores of all edges that leave a component: to first order, what its output does."""
    names = _graph(run).source_names
    return _short(run.edge_scores[names.index(name)].sum()[None])[0] if name in names else None


def _attends(prompts: Sequence[ExamplePrompt], name: str) -> list[list[Any]]:
    """The strongest [query, key, weight] of a head in the first prompt, the last token's first.

    The first token is left aside as a key: most heads rest there when they have nothing to do.
    """
    part = Component.find(name)
    if not prompts or part is None or part.kind != "H":
        return []
    layer, head = part.layer, part.index
    prompt = prompts[0]
    weights = prompt.attention[layer, head].float()
    if prompt.open is not None:
        weights = weights * prompt.open[layer, head]
    weights = weights.tril()
    last = weights.shape[0] - 1
    weights[:, 0] = 0
    own = weights[last].topk(min(_PAIRS, last + 1)).indices.tolist()
    weights[last] = 0
    others = weights.flatten().topk(min(_PAIRS, weights.numel())).indices.tolist()
    pairs = [(last, key) for key in own] + [divmod(place, last + 1) for place in others]
    values = [float(prompt.attention[layer, head, query, key]) for query, key in pairs]
    shown = [
        [query, key, round(value, 4)]
        for (query, key), value in zip(pairs, values, strict=True)
        if key > 0 and key <= query and value > 0.005 and (prompt.open is None or prompt.open[layer, head, query, key])
    ]
    return [[prompt.tokens[query], prompt.tokens[key], value] for query, key, value in shown]


# Head maps


def head_views(groups: Sequence[Group], gates: dict[str, GateRun]) -> list[dict[str, Any]]:
    """Scores of heads by circuit runs, and roles by gate runs: each has one or more maps (layer, head)."""
    views: list[dict[str, Any]] = []
    for title, run in gates.items():
        maps = {kind: run.result.roles.kind(kind).mean(0) for kind in KINDS}
        views.append(_head_view(f"roles: {title}", "score, mean over seeds", maps))
    for group in groups:
        if group.level == "edges":
            continue
        found = {line.label: line.run.head_scores for line in group.lines}
        maps = {label: scores for label, scores in found.items() if scores is not None}
        what = "score of the head" if group.level == "heads" else "sum of the scores of its attention edges"
        views.append(_head_view(f"scores: {group.title}", what, maps))
    return views


def _head_view(title: str, label: str, maps: dict[str, Tensor]) -> dict[str, Any]:
    most = max(float(scores.abs().max()) for scores in maps.values())
    signed = any(bool((scores < 0).any()) or bool((scores > 1).any()) for scores in maps.values())
    return {
        "title": title,
        "label": label,
        "low": -most if signed else 0,
        "high": most if signed else 1,
        "signed": signed,
        "maps": [{"name": name, "z": [_short(row) for row in scores]} for name, scores in maps.items()],
    }


# Attention


def attention_views(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """What can be picked in the viewer, and, for each, the patterns of its prompts, which are read later.

    Runs at several levels look at the same prompts: a model's attention to a task is there once.
    """
    views: list[dict[str, Any]] = []
    patterns: list[list[dict[str, Any]]] = []
    seen: set[tuple[str, str]] = set()
    for group in groups:
        for line in group.lines:
            tokens = "\n".join("\t".join(prompt.tokens) for prompt in line.run.prompts)
            if not line.run.prompts or (line.label, tokens) in seen:
                continue
            seen.add((line.label, tokens))
            layers, heads = line.run.prompts[0].attention.shape[:2]
            view = {"label": f"{line.label}, {group.task}", "layers": layers, "heads": heads, "sparse": line.run.sparse}
            prompts = [{"tokens": prompt.tokens, "answer": prompt.answer} for prompt in line.run.prompts]
            views.append({**view, "best": best_head(groups, line.label, group.task), "prompts": prompts})
            patterns.append([pattern(prompt) for prompt in line.run.prompts])
    return views, patterns


def best_head(groups: Sequence[Group], label: str, task: str) -> int:
    """The head to look at first, as layer * heads + head: that with the largest score for the task, or the first."""
    for group in sorted(groups, key=lambda group: group.level != "heads"):
        for line in group.lines:
            if (line.label, group.task) == (label, task) and line.run.head_scores is not None:
                return int(line.run.head_scores.abs().argmax())
    return 0


def pattern(prompt: ExamplePrompt) -> dict[str, str | None]:
    """Weights (layer, head, pair) as uint16 in steps of 1/65535 and open edges as bytes, in base64.

    A pair is a query and a key that is not after it: (0, 0), (1, 0), (1, 1), (2, 0), ...
    """
    length = len(prompt.tokens)
    queries, keys = torch.tril_indices(length, length)
    weights = (prompt.attention[..., queries, keys].float().clamp(0, 1) * _STEPS).round().to(torch.int32)
    opened = None if prompt.open is None else prompt.open[..., queries, keys].numpy().astype("u1").tobytes()
    return {
        "weights": base64.b64encode(weights.numpy().astype("<u2").tobytes()).decode(),
        "open": None if opened is None else base64.b64encode(opened).decode(),
    }


def _short(values: Tensor) -> list[float]:
    """Numbers with 5 digits."""
    return [float(f"{value:.5g}") for value in values.tolist()]
