"""The figures of a report, each with its data as CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from gatelens.errors import GatelensError
from gatelens.methods.head_gating import KINDS
from gatelens.report.circuit_graph import circuit_figure
from gatelens.report.kept import NOUNS, kept_figure
from gatelens.report.roles import ablation_figure, head_maps
from gatelens.report.runs import CircuitRun, GateRun, Runs, SparsifyRun, labels
from gatelens.report.style import save_figure
from gatelens.report.summary import Group
from gatelens.report.training import loss_against_open_figure, open_edges_figure, training_figure
from gatelens.report.views import top_edges

Table = tuple[Sequence[str], list[Sequence[Any]]]
_MOST_DRAWN = 60  # edges of a printed circuit graph


@dataclass(frozen=True)
class Picture:
    """A figure of the page: files ``figures/STEM`` .png, .svg, .pdf and .csv."""

    title: str
    alt: str  # what is to be seen, for those who do not see it
    stem: str


@dataclass(frozen=True)
class _Plan:
    title: str
    alt: str
    draw: Callable[[], Figure]
    table: Callable[[], Table]


def draw_pictures(runs: Runs, groups: Sequence[Group], folder: Path) -> tuple[list[Picture], list[str]]:
    """Draw all figures into a folder; one that cannot be drawn becomes a sentence among the problems."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Picture] = []
    problems: list[str] = []
    for plan in _plans(runs, groups):
        stem = f"{len(pictures) + 1:02}-{re.sub('[^a-z0-9]+', '-', plan.title.lower()).strip('-')[:60]}"
        try:
            figure = plan.draw()
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # it has its places now: they are not to be found again for every format
            save_figure(figure, folder / stem)
            _write_csv(folder / f"{stem}.csv", plan.table())
            pictures.append(Picture(plan.title, plan.alt, stem))
        except (GatelensError, ValueError, RuntimeError) as error:
            problems.append(f"the figure '{plan.title}' cannot be drawn: {' '.join(str(error).split())[:200]}")
    return pictures, problems


def _plans(runs: Runs, groups: Sequence[Group]) -> Iterator[_Plan]:
    for level in ("heads", "edges", "attention"):
        for method in dict.fromkeys(group.method for group in groups if group.level == level):
            yield _kept([group for group in groups if (group.level, group.method) == (level, method)])
    if runs.gates:
        yield _ablation(runs.gates)
    for title, gate in titled(runs.gates).items():
        yield _roles(title, gate)
    for group in groups:
        if group.level == "heads":
            yield _head_scores(group)
        for line in group.lines:
            if group.level == "edges" and line.run.graph is not None:
                yield _circuit(f"{group.task} in {line.label}, {group.method}", line.run)
    for label, run in _sparse_models(groups).items():
        yield _open_edges(label, run)
    for sparsified in runs.sparsified:
        yield _training(sparsified)
    if judged := {run.name: run.judged for run in runs.sparsified if run.judged}:
        yield _price(judged)


def titled(gates: Sequence[GateRun]) -> dict[str, GateRun]:
    """Gate runs by task and model, with the folder where two share them."""
    return {
        f"{task} in {label}": run
        for task in dict.fromkeys(run.result.task for run in gates)
        for label, run in labels([run for run in gates if run.result.task == task]).items()
    }


def _kept(groups: Sequence[Group]) -> _Plan:
    first = groups[0]
    curves = {group.task: {line.label: line.run.result.curve for line in group.lines} for group in groups}
    pairs = list(
        dict.fromkeys((line.dense, line.label) for group in groups for line in group.lines if line.dense is not None)
    )
    told = [
        f"{line.label} needs {'more than there are' if count is None else f'{count:,.0f}'} for {group.task}"
        for group in groups
        for line in group.lines
        for count in [line.run.result.curve.count_at(first.threshold)]  # as in the figure, also where groups differ
    ]

    def table() -> Table:
        rows: list[Sequence[Any]] = []
        for task, named in curves.items():
            for model, curve in named.items():
                for ranking, one in ((curve.ranking, curve), ("random", curve.random)):
                    if one is not None:
                        columns = (x.tolist() for x in (one.kept, one.effect, one.low, one.high))
                        rows += [(task, model, ranking, *row) for row in zip(*columns, strict=True)]
        return ("task", "model", "ranking", "kept", "effect", "low", "high"), rows

    return _Plan(
        f"{NOUNS[first.level].capitalize()} kept ({first.method})",
        f"Explained effect against the number of {NOUNS[first.level].lower()} kept. At {first.threshold:.0%}: "
        f"{'; '.join(told)}.",
        lambda: kept_figure(curves, threshold=first.threshold, pairs=pairs),
        table,
    )


def _ablation(gates: Sequence[GateRun]) -> _Plan:
    tasks = dict.fromkeys(run.result.task for run in gates)
    named = {task: labels([run for run in gates if run.result.task == task]) for task in tasks}
    grid = {task: {label: run.result.curves for label, run in mine.items()} for task, mine in named.items()}
    told = [
        f"{task} in {model}, {int(curve.ablated[-1])} {curve.kind} heads: {float(curve.change[-1]):+.2f}"
        for task, models in grid.items()
        for model, curves in models.items()
        for curve in curves
    ]

    def table() -> Table:
        rows: list[Sequence[Any]] = []
        for task, models in grid.items():
            for model, curves in models.items():
                for curve in curves:
                    columns = (curve.ablated, curve.of_kind, curve.change, curve.low, curve.high)
                    points = zip(*(x.tolist() for x in columns), strict=True)
                    rows += [(task, model, curve.kind, *point) for point in points]
        return ("task", "model", "kind", "ablated", "of kind", "change", "low", "high"), rows

    alt = f"Change in log-probability of the target response against ablated heads. At the end: {'; '.join(told)}."
    return _Plan("Head ablation", alt, lambda: ablation_figure(grid), table)


def _roles(title: str, run: GateRun) -> _Plan:
    maps = {kind: run.result.roles.kind(kind).mean(0) for kind in KINDS}
    shares = ", ".join(f"{kind} {float((scores >= 0.5).float().mean()):.0%}" for kind, scores in maps.items())
    return _head_maps(f"Head roles: {title}", f"Share of heads at or above 0.5: {shares}.", maps, "mean over seeds")


def _head_scores(group: Group) -> _Plan:
    found = {line.label: line.run.head_scores for line in group.lines}
    maps = {label: scores for label, scores in found.items() if scores is not None}
    best = []
    for label, scores in maps.items():
        layer, head = divmod(int(scores.abs().argmax()), scores.shape[1])
        best.append(f"L{layer}H{head} in {label} ({float(scores[layer, head]):+.3g})")
    alt = f"Largest score: {', '.join(best)}."
    return _head_maps(f"Head scores: {group.task} ({group.method})", alt, maps, "score")


def _head_maps(title: str, alt: str, maps: dict[str, torch.Tensor], label: str) -> _Plan:
    def table() -> Table:
        rows: list[Sequence[Any]] = [
            (name, layer, head, value)
            for name, scores in maps.items()
            for layer, row in enumerate(scores.tolist())
            for head, value in enumerate(row)
        ]
        return ("map", "layer", "head", "score"), rows

    return _Plan(title, f"Heat maps over layers and heads. {alt}", lambda: head_maps(maps, title, label=label), table)


def _circuit(title: str, run: CircuitRun) -> _Plan:
    graph, curve = run.graph, run.result.curve
    assert graph is not None
    point = curve.point_at(run.result.settings.threshold)
    asked = min(_MOST_DRAWN, curve.asked[-1] if point is None else max(1, curve.asked[point]))
    top = top_edges(run, asked)
    kept = torch.zeros_like(graph.edges)
    kept[tuple(torch.tensor(top).T)] = True
    live = graph.on_a_path(kept[None])[0]

    def table() -> Table:
        names = graph.source_names, graph.destination_names
        rows = [(names[0][i], names[1][j], float(run.edge_scores[i, j]), bool(live[i, j])) for i, j in top]
        return ("source", "destination", "score", "on_a_path"), list(rows)

    on_a_path = f"{int(live.sum())} of them on a path from the embedding to the logits"
    alt = f"Graph of the first {asked} edges of the ranking, {on_a_path}."
    ranking = run.result.settings.ranking
    return _Plan(f"Circuit: {title}", alt, lambda: circuit_figure(graph, run.edge_scores, asked, title, ranking), table)


def _sparse_models(groups: Sequence[Group]) -> dict[str, CircuitRun]:
    """A run with open edges for each sparse model and task."""
    return {
        f"{line.label}, {group.task}": line.run
        for group in groups
        for line in group.lines
        if any(prompt.open is not None for prompt in line.run.prompts)
    }


def _open_edges(label: str, run: CircuitRun) -> _Plan:
    maps = [prompt.open.float() for prompt in run.prompts if prompt.open is not None]
    pairs = sum(x.shape[-1] * (x.shape[-1] + 1) // 2 for x in maps)
    share = torch.stack([x.sum((2, 3)) for x in maps]).sum(0) / pairs

    def table() -> Table:
        rows = [(layer, head, value) for layer, row in enumerate(share.tolist()) for head, value in enumerate(row)]
        return ("layer", "head", "open_share"), list(rows)

    title = f"Open edges: {label}"
    alt = f"Share of open attention edges of each head on the example prompts; in all {float(share.mean()):.2%}."
    return _Plan(title, alt, lambda: open_edges_figure(share, title), table)


def _training(run: SparsifyRun) -> _Plan:
    last, target = run.log[-1], run.asked["settings"].get("target")

    def table() -> Table:
        rows = [("training", key, row["step"], value) for row in run.log for key, value in row.items() if key != "step"]
        rows += [
            ("held out", key, row["step"], value) for row in run.judged for key, value in row.items() if key != "step"
        ]
        return ("text", "what", "step", "value"), list(rows)

    title = f"Sparse post-training: {run.name}"
    alt = f"Loss and open edges against steps; at step {last['step']:.0f} {last['open']:.2%} of the edges are open."
    return _Plan(title, alt, lambda: training_figure(run.log, run.judged, target, run.name), table)


def _price(judged: dict[str, list[dict[str, float]]]) -> _Plan:
    def table() -> Table:
        steps = [(run, row) for run, found in judged.items() for row in found]
        rows = [(run, row["step"], key, value) for run, row in steps for key, value in row.items() if key != "step"]
        return ("run", "step", "what", "value"), list(rows)

    title = "Loss against open edges"
    alt = f"Loss above the dense model against open edges on held-out text, during {', '.join(judged)}."
    return _Plan(title, alt, lambda: loss_against_open_figure(judged, title), table)


def _write_csv(path: Path, table: Table) -> None:
    header, rows = table
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows)
