"""The figure of a task: its first prompts, with the words that have a token role in colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gatelens.report.figures._style import COLOURS, styled
from gatelens.report.figures._text import shown, task_title
from gatelens.report.plots import Ax, axis_of
from gatelens.tasks.base import CircuitTask, ResponseTask

_COLUMNS = 96  # letters in a line
_LETTER, _LINE = 0.0635, 0.19  # the size of a letter in inches
Piece = tuple[str, str]  # a text, and its role; "" if it has none


@styled
def plot_task(task: CircuitTask | ResponseTask, ax: Ax = None, *, most: int = 5) -> Any:
    """The first prompts of a task, each with its answer. Words with a token role have a colour, which the legend names.

    Arguments:
        most: how many prompts.
    """
    prompts = list(_prompts(task, most))
    roles = list(dict.fromkeys(role for pieces in prompts for _, role in pieces if role))
    colours = {role: COLOURS[i % len(COLOURS)] for i, role in enumerate(roles)}
    lines = [line for pieces in prompts for line in (*_wrapped(pieces), [])]
    figure, axis = axis_of(ax, 0.3 + _COLUMNS * _LETTER, 0.7 + _LINE * len(lines))
    axis.set(xlim=(0, _COLUMNS), ylim=(len(lines), -1), title=f"{task_title(task.name)}: {len(task)} prompts")
    axis.set_axis_off()
    for y, line in enumerate(lines):
        x = 0
        for text, role in line:
            box = {"facecolor": colours[role], "alpha": 0.3, "linewidth": 0, "pad": 1} if role else None
            axis.text(x, y, text, family="DejaVu Sans Mono", fontsize=7.5, va="center", bbox=box)
            x += len(text)
    handles = [
        axis.scatter([], [], marker="s", s=40, color=colour, alpha=0.4, label=role) for role, colour in colours.items()
    ]
    if handles:
        axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=min(len(handles), 6))
    return figure


def _prompts(task: CircuitTask | ResponseTask, most: int) -> Iterator[list[Piece]]:
    """The first prompts in pieces."""
    if isinstance(task, ResponseTask):
        for example in task.examples[:most]:
            yield [(shown(example.prompt), ""), (shown(example.response), "response")]
        return
    for pair in task.pairs[:most]:
        pieces, end = [], 0
        for span in sorted(pair.roles, key=lambda span: span.start):
            pieces += [(shown(pair.clean[end : span.start]), ""), (shown(pair.clean[span.start : span.end]), span.role)]
            end = max(end, span.end)
        yield [*pieces, (shown(pair.clean[end:]), ""), (f" ->{shown(pair.answers[0])}", "")]


def _wrapped(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces in lines of at most `_COLUMNS` letters. A line may end inside a word."""
    lines: list[list[Piece]] = [[]]
    room = _COLUMNS
    for text, role in pieces:
        while text:
            lines[-1].append((text[:room], role))
            text, used = text[room:], len(text[:room])
            room -= used
            if room == 0:
                lines.append([])
                room = _COLUMNS
    return [line for line in lines if line]
