"""Fit gates that keep one task and lose another, in a folder from which a killed run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gatelens.errors import GatelensError
from gatelens.gates.response_checks import check_responses
from gatelens.jobs._task import Task, task_identity, task_of
from gatelens.jobs.cost import Cost, seconds_per_example
from gatelens.measures.contrast_result import ContrastResult, TwoTaskSettings, load_contrast, save_contrast
from gatelens.methods.contrast import fit_contrast, hold_out
from gatelens.methods.registry import FORWARD_BACKWARD
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.journal import Progress
from gatelens.runtime.processes import Processes
from gatelens.runtime.run_folder import RunFolder, request
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.batches import as_responses


def find_contrast(
    model: Model,
    keep: str | Path | Task,
    lose: str | Path | Task,
    settings: TwoTaskSettings | None = None,
    *,
    out: str | Path | None = None,
    keep_options: Mapping[str, Any] | None = None,
    lose_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ContrastResult:
    """Fit gates on examples of both tasks, and evaluate them on other examples that were held out.

    With several processes (`accelerate launch`), they share the seeds, and the main one writes the folder.

    Arguments:
        keep: the task whose responses are kept: the name of a task, a .jsonl file, or a task.
        lose: the task whose responses are lost, likewise.
        out: the run folder. A complete one is loaded, and an unfinished one is resumed. Without it nothing is saved.
        keep_options: options of ``keep``, if it is given by its name.
        lose_options: options of ``lose``, if it is given by its name.
        progress: is told about every finished piece of work.

    Returns:
        The gates and their effect on held-out examples of both tasks.

    Example:
        settings = gatelens.TwoTaskSettings.preset("quick")
        result = gatelens.find_contrast(model, *gatelens.tasks.contrast(model, n=16), settings)
        result.contrast.accuracy
    """
    settings = settings or TwoTaskSettings()
    keep_task = _examples(model, keep, settings, keep_options)
    lose_task = _examples(model, lose, settings, lose_options)
    if keep_task.fingerprint() == lose_task.fingerprint():
        raise GatelensError(
            f"{_name_with_options(keep_task)} cannot be kept and lost at once: give two tasks that differ, for example "
            "by an option."
        )
    tasks = [task_identity(task) for task in (keep_task, lose_task)]
    asked = request("contrast", model.identity(), settings, tasks=tasks)
    with RunFolder(out, asked, progress, Processes(model.device)) as run:
        if run.complete and run.path is not None:
            return load_contrast(run.path)
        context = run.context(settings.memory_gb)
        contrast = fit_contrast(model, keep_task, lose_task, settings, context=context)
        keep_name, lose_name = (_name_with_options(task) for task in (keep_task, lose_task))
        result = ContrastResult(model.name, keep_name, lose_name, settings, contrast, run.seconds)
        save_contrast(result, run)
    return result


def contrast_forwards(settings: TwoTaskSettings) -> float:
    """Forward passes of one example that a contrast takes: a fit for each seed on both tasks, and their evaluation."""
    fitted = FORWARD_BACKWARD * settings.seeds * settings.updates * settings.batch * settings.accumulate
    return 2 * (fitted + (settings.seeds + 1) * settings.n * settings.held_out)


def contrast_cost(
    model: Model,
    keep: str | Path | Task,
    lose: str | Path | Task,
    settings: TwoTaskSettings,
    keep_options: Mapping[str, Any] | None = None,
    lose_options: Mapping[str, Any] | None = None,
) -> Cost:
    """What `find_contrast` will take, before anything is fitted. Cost: 2 forwards of a few examples.

    Arguments:
        keep, lose, settings, keep_options, lose_options: as for `find_contrast`.
    """
    tasks = _examples(model, keep, settings, keep_options), _examples(model, lose, settings, lose_options)
    context = Context(settings.memory_gb)
    seconds = sum(seconds_per_example(model, task, context) for task in tasks) / 2
    forwards = contrast_forwards(settings)
    return Cost(forwards, forwards * seconds)


def _examples(
    model: Model, task: str | Path | Task, settings: TwoTaskSettings, options: Mapping[str, Any] | None
) -> ResponseTask:
    """The examples of one of the tasks. They are checked before the folder is claimed and any gate is fitted."""
    examples = as_responses(task_of(task, model, settings.n, settings.seed, options))
    if len(examples) < settings.n:
        raise GatelensError(
            f"{examples.name} has {len(examples)} examples, fewer than the {settings.n} asked for: ask for fewer."
        )
    examples = replace(examples, examples=examples.examples[: settings.n])
    check_responses(model, examples, Context(settings.memory_gb))
    hold_out(examples, settings.held_out)  # raises an error if there are too few
    return examples


def _name_with_options(task: ResponseTask) -> str:
    """The name of a task, with the options that distinguish it from another task of this name."""
    given = ", ".join(f"{key}={value}" for key, value in task.options.items() if value is not None)
    return f"{task.name} ({given})" if given else task.name
