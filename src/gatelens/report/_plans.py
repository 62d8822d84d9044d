"""For each figure of a report: its title, its description in words, how to draw it, and its data as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from gatelens.gates import LEVELS
from gatelens.gates.role_edges import RoleEdgeScores
from gatelens.gates.roles import KINDS
from gatelens.gates.selection import selected
from gatelens.measures.curve_files import CURVE_COLUMNS, curve_lines
from gatelens.measures.method_comparison import MethodLine, method_ranks
from gatelens.measures.thresholds import ThresholdLine
from gatelens.model.components import Head
from gatelens.report._runs import CircuitRun, RolesRun, SparsifyRun, labels
from gatelens.report._summary import Group
from gatelens.report.figures import (
    ablation_figure,
    circuit_figure,
    frontier_figure,
    head_maps,
    kept_figure,
    methods_figure,
    open_edges_figure,
    role_circuit_figure,
    thresholds_figure,
    training_figure,
)

Table = tuple[Sequence[str], list[Sequence[Any]]]  # the header, and the records
_MOST_DRAWN = 60  # edges of a circuit graph


@dataclass(frozen=True)
class Plan:
    """A figure that is not drawn yet. Figures are drawn one at a time, because each takes much memory."""

    title: str
    alt: str  # what the figure shows, in words
    draw: Callable[[], Figure]
    table: Callable[[], Table]


def titles(runs: Sequence[RolesRun]) -> dict[str, RolesRun]:
    """Runs of head roles by task and model."""
    return {f"{task} in {label}": run for task, by_label in _by_task(runs).items() for label, run in by_label.items()}


def kept_plan(groups: Sequence[Group]) -> Plan:
    """Explained effect against the number of gates kept. The groups have one level, method and threshold."""
    noun, method, threshold = LEVELS[groups[0].level].noun, groups[0].method, groups[0].threshold
    curves = {group.task: {entry.label: entry.result.curve for entry in group.entries} for group in groups}
    pairs = dict.fromkeys(
        (entry.dense, entry.label) for group in groups for entry in group.entries if entry.dense is not None
    )
    needed = [f"{entry.label} for {group.task}: {entry.count}" for group in groups for entry in group.entries]

    def table() -> Table:
        records: list[Sequence[Any]] = []
        for task, by_model in curves.items():
            for model, curve in by_model.items():
                records += [(task, model, *line) for line in curve_lines(curve)]
        return ("task", "model", *CURVE_COLUMNS), records

    return Plan(
        f"{noun[0].upper()}{noun[1:]} kept ({method})",
        f"Explained effect against the number of {noun} kept. Needed for {threshold:.0%}, with 95 % intervals: "
        f"{', '.join(needed)}.",
        lambda: kept_figure(curves, threshold=threshold, pairs=list(pairs)),
        table,
    )


def methods_plan(lines: Sequence[MethodLine]) -> Plan:
    """How many gates each method needs. The lines have one level."""
    noun = LEVELS[lines[0].level].noun
    ranks = ", ".join(f"{rank.method} {rank.rank:.1f}" for rank in method_ranks(lines))
    needed = "; ".join(f"{line.method} for {line.task} in {line.model}: {line.needed}" for line in lines)
    columns = list(MethodLine.model_fields)
    return Plan(
        f"Methods compared: {noun}",
        f"{noun[0].upper()}{noun[1:]} that each method needs for {lines[0].threshold:.0%} of the effect, with 95 % "
        f"intervals. Mean rank, the best first: {ranks or 'no task has all methods'}. {needed}.",
        lambda: methods_figure(lines),
        lambda: (columns, [[getattr(line, name) for name in columns] for line in lines]),
    )


def thresholds_plan(lines: Sequence[ThresholdLine]) -> Plan:
    """Multipliers against the threshold. The lines have one level."""
    noun = LEVELS[lines[0].level].noun
    ratios = "; ".join(f"{line.task} at {line.threshold:.0%}: {line.shown}" for line in lines)
    columns = list(ThresholdLine.model_fields)
    return Plan(
        f"Multipliers at other thresholds: {noun}",
        f"Dense count / sparse count of {noun}, with 95 % intervals, against the threshold. {ratios}.",
        lambda: thresholds_figure(lines),
        lambda: (columns, [[getattr(line, name) for name in columns] for line in lines]),
    )


def ablation_plan(runs: Sequence[RolesRun]) -> Plan:
    """Change in log-probability against ablated heads, for all runs of head roles."""
    grid = {
        task: {label: run.result.curves for label, run in by_label.items()} for task, by_label in _by_task(runs).items()
    }
    ends = [
        f"{task} in {model}, {int(curve.ablated[-1])} {curve.kind} heads: {float(curve.change[-1]):+.2f}"
        for task, models in grid.items()
        for model, curves in models.items()
        for curve in curves
    ]

    def table() -> Table:
        records: list[Sequence[Any]] = []
        for task, models in grid.items():
            for model, curves in models.items():
                for curve in curves:
                    columns = (curve.ablated, curve.of_kind, curve.change, curve.low, curve.high)
                    points = zip(*(x.tolist() for x in columns), strict=True)
                    records += [(task, model, curve.kind, *point) for point in points]
        return ("task", "model", "kind", "ablated", "of kind", "change", "low", "high"), records

    alt = f"Change in log-probability of the target response against ablated heads. At the end: {'; '.join(ends)}."
    return Plan("Head ablation", alt, lambda: ablation_figure(grid), table)


def roles_plan(title: str, run: RolesRun) -> Plan:
    """Heat maps of the three kinds of role."""
    maps = {kind: run.result.roles.kind(kind).mean(0) for kind in KINDS}
    shares = ", ".join(f"{kind} {float((scores >= 0.5).float().mean()):.0%}" for kind, scores in maps.items())
    return _head_maps_plan(
        f"Head roles: {title}", f"Share of heads with a score of 0.5 or more: {shares}.", maps, "mean over seeds"
    )


def head_scores_plan(group: Group) -> Plan:
    """Heat maps of the scores of heads, one for each model."""
    largest = []
    for label, scores in group.head_scores.items():
        layer, head = divmod(int(scores.abs().argmax()), scores.shape[1])
        largest.append(f"{Head(layer, head)} in {label} ({float(scores[layer, head]):+.3g})")
    alt = f"Largest score: {', '.join(largest)}."
    return _head_maps_plan(f"Head scores: {group.task} ({group.method})", alt, group.head_scores, "score")


def circuit_plan(title: str, run: CircuitRun) -> Plan:
    """The graph of a circuit of edges, with at most as many edges as a reader can tell apart."""
    graph, ranking, n_edges = run.edge_graph, run.result.settings.ranking, _n_drawn(run)
    top = run.top_edges(n_edges)
    mask = torch.zeros_like(graph.edges)
    mask[tuple(torch.tensor(top).T)] = True
    on_a_path = graph.on_a_path(mask[None])[0]

    def table() -> Table:
        sources, destinations = graph.source_names, graph.destination_names
        records = [(sources[i], destinations[j], float(run.edge_scores[i, j]), bool(on_a_path[i, j])) for i, j in top]
        return ("source", "destination", "score", "on_a_path"), list(records)

    alt = (
        f"Graph of the first {n_edges} edges of the ranking, {int(on_a_path.sum())} of them on a path from the "
        "embedding to the logits."
    )
    return Plan(f"Circuit: {title}", alt, lambda: circuit_figure(graph, run.edge_scores, mask, title, ranking), table)


def role_circuit_plan(title: str, run: CircuitRun, scores: RoleEdgeScores) -> Plan:
    """The graph of a circuit of edges by role, with at most as many edges as a reader can tell apart."""
    settings, n_edges = run.result.settings, _n_drawn(run)
    [order] = selected(scores, settings.ranking, settings.selection)
    top = order[:n_edges]
    mask = torch.zeros_like(scores.exists())
    mask.view(-1)[top] = True
    on_a_path = scores.effective(mask).flatten()

    def table() -> Table:
        records = []
        for place in top.tolist():
            gate, _ = scores.gate(0, place)
            score = float(scores.scores.flatten()[place])
            records.append((gate.role, *scores.ends(gate), score, bool(on_a_path[place])))
        return ("role", "source", "destination", "score", "on_a_path"), list(records)

    def draw() -> Figure:
        return role_circuit_figure(scores.graph, scores.roles.names, scores.roles.sees, scores.scores, mask, title)

    alt = (
        f"Graph of the first {n_edges} edges by role of the ranking, {int(on_a_path.sum())} of them on a path from the "
        "embedding to the logits, with a column for each role."
    )
    return Plan(f"Circuit by role: {title}", alt, draw, table)


def _n_drawn(run: CircuitRun) -> int:
    """How many edges of a circuit are drawn."""
    curve = run.result.curve
    return min(_MOST_DRAWN, max(1, curve.asked[curve.circuit_point(run.result.settings.threshold)]))


def open_edges_plan(label: str, run: CircuitRun) -> Plan:
    """The share of open attention edges of each head on the example prompts."""
    maps = [prompt.open.float() for prompt in run.prompts if prompt.open is not None]
    pairs = sum(x.shape[-1] * (x.shape[-1] + 1) // 2 for x in maps)
    shares = torch.stack([x.sum((2, 3)) for x in maps]).sum(0) / pairs
    title = f"Open edges: {label}"
    mean = float(shares.mean())
    alt = f"Share of open attention edges of each head on the example prompts; the mean over heads is {mean:.2%}."

    def table() -> Table:
        return ("layer", "head", "open_share"), list(_by_head(shares))

    return Plan(title, alt, lambda: open_edges_figure(shares, title), table)


def training_plan(run: SparsifyRun) -> Plan:
    """Loss and open edges by step."""
    last = run.log[-1]

    def table() -> Table:
        records = [("training", *cell) for cell in _cells(run.log)] + [
            ("held out", *cell) for cell in _cells(run.judged)
        ]
        return ("text", "step", "measure", "value"), list(records)

    title = f"Sparse post-training: {run.name}"
    alt = f"Loss and open edges against steps; at step {last['step']:.0f} {last['open']:.2%} of the edges are open."
    return Plan(title, alt, lambda: training_figure(run.log, run.judged, run.target, run.name), table)


def frontier_plan(judged: Mapping[str, list[dict[str, float]]]) -> Plan:
    """Loss above the dense model against open keys per query, for all runs of sparse post-training."""

    def table() -> Table:
        records = [(run, *cell) for run, measured in judged.items() for cell in _cells(measured)]
        return ("run", "step", "measure", "value"), list(records)

    title = "Loss against open keys per query"
    alt = f"Loss above the dense model against open keys per query on held-out text, during {', '.join(judged)}."
    return Plan(title, alt, lambda: frontier_figure(judged, title), table)


def _head_maps_plan(title: str, alt: str, maps: Mapping[str, Tensor], label: str) -> Plan:
    def table() -> Table:
        records = [(name, *cell) for name, scores in maps.items() for cell in _by_head(scores)]
        return ("map", "layer", "head", "score"), list(records)

    return Plan(title, f"Heat maps over layers and heads. {alt}", lambda: head_maps(maps, title, label=label), table)


def _by_task(runs: Sequence[RolesRun]) -> dict[str, dict[str, RolesRun]]:
    tasks = dict.fromkeys(run.result.task for run in runs)
    return {task: labels([run for run in runs if run.result.task == task]) for task in tasks}


def _by_head(scores: Tensor) -> list[tuple[int, int, float]]:
    """A table of layer, head and score."""
    return [(layer, head, score) for layer, heads in enumerate(scores.tolist()) for head, score in enumerate(heads)]


def _cells(log: Sequence[Mapping[str, float]]) -> list[tuple[float, str, float]]:
    """A table of step, measure and value."""
    return [(record["step"], name, value) for record in log for name, value in record.items() if name != "step"]
