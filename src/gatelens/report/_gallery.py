"""The figures of a report, each with its data as CSV."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gatelens.errors import shortened
from gatelens.gates import LEVELS
from gatelens.measures.method_comparison import method_lines
from gatelens.measures.thresholds import threshold_lines
from gatelens.report._plans import (
    Plan,
    ablation_plan,
    circuit_plan,
    frontier_plan,
    head_scores_plan,
    kept_plan,
    methods_plan,
    open_edges_plan,
    role_circuit_plan,
    roles_plan,
    thresholds_plan,
    titles,
    training_plan,
)
from gatelens.report._runs import Runs
from gatelens.report._summary import Group, summarise
from gatelens.report.figures import save_figure
from gatelens.report.figures._saving import lay_out
from gatelens.report.figures._training import has_keys
from gatelens.runtime.files import write_csv


@dataclass(frozen=True)
class Picture:
    """A figure of the page: ``figures/STEM.csv`` and the images ``figures/STEM.png`` and so on."""

    title: str
    alt: str  # what the figure shows, for readers who cannot see it
    stem: str
    width: int  # in CSS pixels
    height: int


def draw_pictures(
    runs: Runs, groups: Sequence[Group], folder: Path, formats: Sequence[str]
) -> tuple[list[Picture], list[str]]:
    """Draw all figures of these runs into a folder.

    Returns:
        The figures, and one sentence for each figure that could not be drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Picture] = []
    problems: list[str] = []
    for plan in _plans(runs, groups):
        stem = f"{len(pictures) + 1:02}-{re.sub('[^a-z0-9]+', '-', plan.title.lower()).strip('-')[:60]}"
        try:
            figure = plan.draw()
            lay_out(figure)
            save_figure(figure, folder / stem, formats)
            write_csv(folder / f"{stem}.csv", *plan.table())
            width, height = (round(96 * inches) for inches in figure.get_size_inches())
            pictures.append(Picture(plan.title, plan.alt, stem, width, height))
        except OSError:  # the disk, not the run
            raise
        except Exception as error:  # a run with odd numbers can raise errors of any type: the others are drawn
            problems.append(f"cannot draw the figure '{plan.title}': {shortened(' '.join(str(error).split()))}")
    return pictures, problems


def count_pictures(runs: Runs) -> int:
    """How many figures these runs have; nothing is drawn."""
    return sum(1 for _ in _plans(runs, summarise(runs.circuits)))


def _plans(runs: Runs, groups: Sequence[Group]) -> Iterator[Plan]:
    """The figures in the order of the page."""
    results = [entry.result for group in groups for entry in group.entries]
    lines, at_thresholds = method_lines(results), threshold_lines(results)
    for level in LEVELS:
        if compared := [line for line in lines if line.level == level]:
            yield methods_plan(compared)
        methods = dict.fromkeys(group.method for group in groups if group.level == level)
        for method in methods:
            yield kept_plan([group for group in groups if (group.level, group.method) == (level, method)])
        if multipliers := [line for line in at_thresholds if line.level == level]:
            yield thresholds_plan(multipliers)
    if runs.roles:
        yield ablation_plan(runs.roles)
    for title, roles in titles(runs.roles).items():
        yield roles_plan(title, roles)
    for group in groups:
        if group.level == "heads":
            yield head_scores_plan(group)
        for entry in group.entries:
            if entry.run.has_graph:
                yield circuit_plan(f"{group.task} in {entry.label}, {group.method}", entry.run)
            if (scores := entry.run.role_scores) is not None:
                yield role_circuit_plan(f"{group.task} in {entry.label}, {group.method}", entry.run, scores)
    # Runs at several levels have the same prompts, so a sparse model and a task have one figure of open edges.
    sparse_runs = {
        f"{entry.label}, {group.task}": entry.run
        for group in groups
        for entry in group.entries
        if any(prompt.open is not None for prompt in entry.run.prompts)
    }
    for label, run in sparse_runs.items():
        yield open_edges_plan(label, run)
    for sparsified in runs.sparsified:
        yield training_plan(sparsified)
    if judged := {run.name: run.judged for run in runs.sparsified if has_keys(run.judged)}:
        yield frontier_plan(judged)
