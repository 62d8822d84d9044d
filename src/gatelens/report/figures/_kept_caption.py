"""The caption of a figure of gates kept: how gates were ranked, on how many prompts, and what lines and bands mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gatelens.measures.curves import Curve
from gatelens.report.figures._text import task_title

_VALUES = {"corrupt": "its corrupt value", "mean": "its mean", "zero": "zero", "optimal": "its optimal constant"}

Labelled = tuple[str, str, Curve]  # the task, the model and its curve


def caption(panels: Mapping[str, Mapping[str, Curve]], threshold: float, compares: bool) -> str:
    """Everything that a reader needs to understand the numbers.

    Arguments:
        panels: the curves, ``panels[task][model]``.
        threshold: the explained effect at which gates are counted.
        compares: whether the figure has pairs of a dense and a sparse model.
    """
    curves = [(task, model, curve) for task, by_model in panels.items() for model, curve in by_model.items()]
    seeds = " and seeds" * any(curve.sample.seeds > 1 for *_, curve in curves)
    sentences = [
        f"Ranked by {_grouped(curves, _ranking)}.",
        f"Lines: mean of {_grouped(curves, lambda curve: str(curve.sample))}. "
        f"Bands: 95 %, bootstrap over prompts{seeds}, for a fixed ranking.",
    ]
    if any(curve.random is not None for *_, curve in curves):
        sentences.append("Dotted: gates in random order.")
    if compares:
        sentences.append(
            f"Dashed: from one count at {threshold:g} of the effect to the other; above, dense count / sparse count "
            "with its 95 % interval, grey if it contains 1."
        )
    return " ".join(sentences)


def _ranking(curve: Curve) -> str:
    selection = "" if curve.selection == "top" else f", selected by {curve.selection}"
    return (
        f"{curve.ranking} score on {curve.sample.ranking}{selection}, everything else is set to "
        f"{_VALUES.get(curve.source, curve.source)}"
    )


def _grouped(curves: Sequence[Labelled], describe: Callable[[Curve], str]) -> str:
    """What is said of each curve. If it differs, the tasks or the models that it is said of follow in brackets."""
    groups: dict[str, list[Labelled]] = {}
    for labelled in curves:
        groups.setdefault(describe(labelled[2]), []).append(labelled)
    if len(groups) == 1:
        return next(iter(groups))
    tasks = {task for task, *_ in curves}
    tasks_differ = any({task for task, *_ in group} != tasks for group in groups.values())
    parts = []
    for text, group in groups.items():
        names = dict.fromkeys(task_title(task) if tasks_differ else model for task, model, _ in group)
        parts.append(f"{text} ({', '.join(names)})")
    return "; ".join(parts)
