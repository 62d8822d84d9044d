"""Find the role of every head in a task and test it by ablation, in a folder from which a killed run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gatelens.errors import GatelensError
from gatelens.gates.response_checks import check_responses, share_known
from gatelens.jobs._task import Task, task_identity, task_of
from gatelens.jobs.cost import Cost, seconds_per_example
from gatelens.measures.ablation import ablation_curve
from gatelens.measures.roles_result import ORDERS, RolesResult, RolesSettings, load_roles, save_roles
from gatelens.methods.head_gating import fit_head_gates
from gatelens.methods.registry import FORWARD_BACKWARD
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.journal import Progress
from gatelens.runtime.processes import Processes
from gatelens.runtime.run_folder import RunFolder, request
from gatelens.sparse.in_model import is_sparse
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.batches import as_responses, split

_FITS = 3  # G, G+ and G-


def find_roles(
    model: Model,
    task: str | Path | Task,
    settings: RolesSettings | None = None,
    *,
    out: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> RolesResult:
    """Fit head gates on examples of a task, and ablate heads on other examples that were held out.

    With several processes (`accelerate launch`), they share the work, and the main one writes the folder.

    Example:
        result = gatelens.find_roles(model, "syntax", gatelens.RolesSettings(seeds=10), out="runs/syntax-roles")

    Arguments:
        task: the name of a task, a .jsonl file, or a task, of which the first ``n + held_out`` examples are used.
        out: the run folder. A complete one is loaded, and an unfinished one is resumed. Without it nothing is saved.
        options: options of a task that is given by its name.
        progress: is told about every finished piece of work.

    Returns:
        The fitted roles, and an ablation curve for each kind and for a random order.
    """
    settings = settings or RolesSettings()
    examples = _examples(model, task, settings, options)
    fitted, held_out = split(examples, settings.n)
    asked = request("gate", model.identity(), settings, task=task_identity(examples))
    with RunFolder(out, asked, progress, Processes(model.device)) as run:
        if run.complete and run.path is not None:
            return load_roles(run.path)
        context = run.context(settings.memory_gb)
        # 1. Three fits for each seed.
        roles = fit_head_gates(model, fitted, settings, context=context)
        # 2. The test: ablate the top heads of each kind, and random ones.
        most = min(settings.most, model.n_layers * model.n_heads)
        curves = [
            ablation_curve(
                model, held_out, roles, kind, most, every=settings.every, batch=settings.batch, context=context
            )
            for kind in ORDERS
        ]
        known = share_known(model, held_out, context)
        # 3. Save.
        sparse = is_sparse(model.hf)
        result = RolesResult(model.name, sparse, examples.name, settings, roles, curves, known, run.seconds)
        save_roles(result, run)
    return result


def roles_forwards(settings: RolesSettings) -> float:
    """Forward passes of one example that head gating takes: three fits for each seed, and the ablation curves."""
    updates = settings.updates * settings.batch * settings.accumulate
    fitted = _FITS * FORWARD_BACKWARD * settings.seeds * updates
    n_points = len({*range(0, settings.most + 1, settings.every), settings.most})
    return fitted + len(ORDERS) * 2 * n_points * settings.seeds * settings.held_out


def roles_cost(
    model: Model, task: str | Path | Task, settings: RolesSettings, options: Mapping[str, Any] | None = None
) -> Cost:
    """What `find_roles` will take, before anything is fitted. Cost: 2 forwards of a few examples.

    Arguments:
        task, settings, options: as for `find_roles`.
    """
    examples = _examples(model, task, settings, options)
    forwards = roles_forwards(settings)
    return Cost(forwards, forwards * seconds_per_example(model, examples, Context(settings.memory_gb)))


def _examples(
    model: Model, task: str | Path | Task, settings: RolesSettings, options: Mapping[str, Any] | None
) -> ResponseTask:
    """The examples to fit on and to hold out. They are checked before the folder is claimed and any gate is fitted."""
    n = settings.n + settings.held_out
    examples = as_responses(task_of(task, model, n, settings.seed, options))
    if len(examples) < n:
        raise GatelensError(
            f"{examples.name} has {len(examples)} examples, fewer than {settings.n} to fit and {settings.held_out} to "
            "hold out: ask for fewer, or give it more."
        )
    examples = replace(examples, examples=examples.examples[:n])
    check_responses(model, examples, Context(settings.memory_gb))
    return examples
