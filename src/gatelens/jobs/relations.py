"""Do instructions and examples use different heads? Contrastive gates, judged on a relation that no fit has seen.

Several relations between words (opposites, capitals, ...) are asked for in two ways: by an instruction, and by worked
examples. Gates that keep one way and lose the other are fitted on all relations but one, and judged by the accuracy on
this one. (Nam et al., "Causal Head Gating", arXiv 2505.13737.)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gatelens.errors import GatelensError
from gatelens.gates.response_checks import check_responses, warn_if_unknown
from gatelens.jobs._task import task_identity
from gatelens.jobs.cost import Cost, seconds_per_example
from gatelens.measures.relations_result import (
    HeldOutRelation,
    RelationsResult,
    RelationsSettings,
    load_relations,
    save_relations,
)
from gatelens.methods.contrast import evaluate_contrast, fit_contrast_gates
from gatelens.methods.registry import FORWARD_BACKWARD
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.journal import Progress
from gatelens.runtime.processes import Processes
from gatelens.runtime.run_folder import RunFolder, request
from gatelens.tasks import task as make_task
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.builtin.word_pairs import INSTRUCTIONS, RELATIONS, WAYS

Relations = Mapping[str, Mapping[str, ResponseTask]]
"""The tasks: by way of asking, then by relation. Both ways have the same queries in the same order."""


def find_relations(
    model: Model,
    settings: RelationsSettings | None = None,
    *,
    source: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> RelationsResult:
    """Fit gates that keep one way of asking and lose the other, and judge them on the relation that was held out.

    With several processes (`accelerate launch`), they share the seeds, and the main one writes the folder.

    Example:
        result = gatelens.find_relations(model, gatelens.RelationsSettings(seeds=3), out="runs/relations")

    Arguments:
        source: a folder with a file of word pairs for each relation, such as antonym.json. The default is the built-in
            pairs.
        out: the run folder. A complete one is loaded, and an unfinished one is resumed. Without it nothing is saved.
        progress: is told about every finished piece of work.

    Returns:
        One fit for each way and each relation. Cost: 2 forward-backwards for each fit, update and seed.
    """
    settings = settings or RelationsSettings()
    relations = relation_tasks(model, settings, source)
    identity = {way: [task_identity(task) for task in tasks.values()] for way, tasks in relations.items()}
    asked = request("relations", model.identity(), settings, tasks=identity)
    with RunFolder(out, asked, progress, Processes(model.device)) as run:
        if run.complete and run.path is not None:
            return load_relations(run.path)
        context = run.context(settings.memory_gb)
        for way, tasks in relations.items():
            joined = _joined(way, tasks)
            warn_if_unknown(model, joined, context, n_examples=len(joined))
        fits = [
            _hold_out(model, relations, keep, lose, relation, settings, context.part(f"{keep}-without-{relation}"))
            for (keep, lose), relation in itertools.product(itertools.permutations(WAYS), relations[WAYS[0]])
        ]
        result = RelationsResult(model.name, settings, fits, run.seconds)
        save_relations(result, run)
    return result


def relations_cost(model: Model, settings: RelationsSettings, source: str | Path | None = None) -> Cost:
    """What `find_relations` will take, before anything is fitted. Cost: 2 forwards of a few examples."""
    relations = relation_tasks(model, settings, source)
    fits = 2 * len(relations[WAYS[0]])
    fitted = FORWARD_BACKWARD * settings.seeds * settings.updates * settings.batch * settings.accumulate
    forwards = 2 * fits * (fitted + (settings.seeds + 1) * settings.n)
    context = Context(settings.memory_gb)
    times = [seconds_per_example(model, _joined(way, tasks), context) for way, tasks in relations.items()]
    return Cost(forwards, forwards * sum(times) / len(times))


def relation_tasks(model: Model, settings: RelationsSettings, source: str | Path | None = None) -> Relations:
    """The tasks of all relations in both ways, checked."""
    shots = {"instruction": settings.instruction_shots, "examples": settings.shots}
    relations: dict[str, dict[str, ResponseTask]] = {}
    for way in WAYS:
        relations[way] = {}
        for name, options in relation_sources(source).items():
            task = make_task(
                "word-pairs", model, n=settings.n, seed=settings.seed, ask=way, shots=shots[way], **options
            )
            assert isinstance(task, ResponseTask)
            check_responses(model, task, Context(settings.memory_gb))
            relations[way][name] = task
    return relations


def relation_sources(source: str | Path | None) -> dict[str, dict[str, str]]:
    """For each relation, the options of its tasks. Raise an error if a folder has too few of them. Needs no model."""
    if source is None:
        return {name: {"relation": name} for name in RELATIONS}
    files = {path.stem: {"source": str(path)} for path in sorted(Path(source).glob("*.json*"))}
    known = {name: options for name, options in files.items() if name in INSTRUCTIONS}
    if len(known) < 2:
        raise GatelensError(
            f"{source} has {len(known)} files of relations, and at least 2 are needed: give a folder with files such "
            f"as {', '.join(f'{name}.json' for name in INSTRUCTIONS)}."
        )
    return known


def _hold_out(
    model: Model,
    relations: Relations,
    keep: str,
    lose: str,
    relation: str,
    settings: RelationsSettings,
    context: Context,
) -> HeldOutRelation:
    """One fit on all relations but one."""
    kept, lost = (
        _joined(way, {name: task for name, task in relations[way].items() if name != relation}) for way in (keep, lose)
    )
    gates, losses = fit_contrast_gates(model, kept, lost, settings, context=context)
    contrast = evaluate_contrast(
        model, relations[keep][relation], relations[lose][relation], gates, losses, context=context
    )
    return HeldOutRelation(relation, keep, lose, contrast)


def _joined(way: str, tasks: Mapping[str, ResponseTask]) -> ResponseTask:
    """The examples of several relations as one task."""
    first, *others = tasks.values()
    examples = [example for task in (first, *others) for example in task.examples]
    return replace(first, name=f"word-pairs (ask={way})", examples=examples)
