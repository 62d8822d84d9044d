"""Find the circuit of a task: score all gates, keep the best k, draw the curve, and say how far it can be trusted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gatelens.errors import GatelensError, GatelensWarning
from gatelens.gates import level_named
from gatelens.gates.scores import Scores
from gatelens.jobs.circuit_memory import held_numbers, require_memory
from gatelens.jobs.circuit_tasks import CircuitTasks, circuit_tasks
from gatelens.jobs.described import Dense, beside_dense, check_dense_one, describe_best, finished, name_of
from gatelens.measures.circuit_result import CircuitResult, save_circuit
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.measures.circuit_tests import CircuitTests, check_circuit
from gatelens.measures.curves import Curve
from gatelens.measures.effect import measure_curve, with_areas
from gatelens.measures.example import PROMPT_SOURCES, save_example
from gatelens.measures.score_check import Agreement, ScoreCheck, check_scores
from gatelens.measures.stability import Stability, measure_stability
from gatelens.measures.top_k import Circuits
from gatelens.measures.validity import Validity, complement_effect, overlap
from gatelens.measures.whole_effect import behaviour_warning, noise_problem, whole_effect
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.runtime.files import write_tensors
from gatelens.runtime.journal import Progress
from gatelens.runtime.processes import Processes
from gatelens.runtime.rank import is_main
from gatelens.runtime.run_folder import RunFolder, request
from gatelens.sparse.in_model import is_sparse
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import take

CHECKED_PROMPTS = 8  # exact patching is expensive: a check uses few prompts, the same ones on both sides


def find_circuit(
    model: Model,
    task: str | CircuitTask,
    settings: CircuitSettings | None = None,
    *,
    out: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    dense: Dense | None = None,
    progress: Progress | None = None,
) -> CircuitResult:
    """Find the circuit of a task in a model, in a folder from which a killed run resumes.

    With several processes (`accelerate launch`), they share the prompts where gates are scored by gradients, the gates
    where they are patched, and the circuits of the curve; the main one writes the folder. A run with another number of
    processes starts again.

    Example:
        result = gatelens.find_circuit(model, "ioi", gatelens.CircuitSettings(level="edges"), out="runs/ioi")

    Arguments:
        task: a name, a JSON-lines file, or a task; a task object has its own prompts, so ``n`` and ``seeds`` do not
            apply.
        out: the run folder; None keeps nothing.
        options: the task's own options, if the task is a name or a file.
        dense: the dense model that this sparse one is compared with. Its name is recorded for reports. A model is also
            run, and the table of heads has its numbers beside those of the sparse one; a circuit of the dense model, as
            `load_circuit` reads it, gives the numbers of the heads that it describes.
        progress: called as progress(title, done, total).
    """
    settings = settings or CircuitSettings()
    tasks = circuit_tasks(model, task, settings, options)
    check_dense_one(dense, model, tasks.first)
    settings = settings.replace(n=len(tasks.first), seed=tasks.first.seed, seeds=len(tasks.evaluated))
    require_memory(model, tasks, settings)
    asked = request("circuit", model.identity(), settings, task=tasks.identity())
    with RunFolder(out, asked, progress, Processes(model.device)) as run:
        if run.complete and run.path is not None:
            return finished(run.path, tasks.first, dense, Context(settings.memory_gb))
        result, circuits = _find(model, tasks, settings, dense, run)
        run.finish(_save(result, model, circuits, run.path) if run.path is not None and is_main() else {})
    return result


def _find(
    model: Model, tasks: CircuitTasks, settings: CircuitSettings, dense: Dense | None, run: RunFolder
) -> tuple[CircuitResult, list[Circuits]]:
    """The result of a job, and the circuits of each task seed."""
    context_of = partial(_context, run, settings, held_numbers(model, tasks, settings))
    seed_contexts = [context_of(f"seed-{seeded.seed}") for seeded in tasks.evaluated]
    # 1. Whether there is an effect to explain.
    try:
        _check_effect(model, tasks, settings, seed_contexts)
    except GatelensError:
        run.withdraw()
        raise
    # 2. A score for every gate, maybe on other prompts than those of the curve.
    scores = [
        score(model, ranked, settings, context) for ranked, context in zip(tasks.ranked, seed_contexts, strict=True)
    ]
    # 3. The metric of the top k, for a grid of k that is refined around the count, and of random gates.
    circuits = [
        settings.circuits(model, seeded, own, context, fitted_on)
        for seeded, own, context, fitted_on in zip(tasks.evaluated, scores, seed_contexts, tasks.fitted_on, strict=True)
    ]
    curve = with_areas(measure_curve(circuits, settings), circuits, scores, settings)
    curve = replace(curve, ranked_on=tasks.ranked_on)
    # 4. How far it can be trusted.
    validity = _validate(circuits[0], scores, curve, settings, context_of("validity"))
    tests = _test(circuits[0], scores[0], curve, settings, context_of("tests"))
    stability = _stability(circuits[0], curve, settings, context_of("stability"))
    # 5. What the best heads do.
    context = context_of("heads")
    heads = describe_best(model, tasks.first, scores[0], settings.describe, context)
    heads = beside_dense(heads, tasks.first, dense, context)
    result = CircuitResult(
        model.name,
        tasks.first.name,
        settings,
        scores,
        curve,
        validity,
        run.seconds,
        sparse=is_sparse(model.hf),
        dense=name_of(dense),
        graph=Graph.of(model.anatomy),
        heads=heads,
        tests=tests,
        stability=stability,
    )
    return result, circuits


def _context(run: RunFolder, settings: CircuitSettings, held: int, part: str) -> Context:
    """The context of one part of the work, with what the numbers that are held leave of the memory budget.

    All processes share its pieces.

    Pieces are batches, which another memory budget or number of processes would cut differently.
    """
    assert run.processes is not None
    shared = f"-{run.processes.count}-processes" if run.processes.count > 1 else ""
    context = run.context(settings.memory_gb, f"{settings.memory_gb:g}-gb{shared}/{part}")
    return replace(context.without(held), processes=run.processes)


def _save(result: CircuitResult, model: Model, circuits: Sequence[Circuits], folder: Path) -> dict[str, Any]:
    """Write all files but the summary, and return what it says."""
    settings = result.settings
    record = save_circuit(result, model, folder)
    circuit = result.circuit() if settings.source in PROMPT_SOURCES else None
    save_example(model, circuits[0].task, folder, circuit, settings.source)
    if settings.source == "optimal":
        _save_constants(circuits, folder)
    return record.model_dump(mode="json")


def _save_constants(circuits: Sequence[Circuits], folder: Path) -> None:
    """Write what closed gates read, for each task seed."""
    tensors = {
        f"seed-{own.task.seed}.{name}": values
        for own in circuits
        for name, values in own.level.constant_tensors(own.constants()).items()
    }
    write_tensors(folder / "constants.safetensors", tensors)


def score(
    model: Model, task: CircuitTask, settings: CircuitSettings | None = None, context: Context | None = None
) -> Scores:
    """Scores at the level and by the method that the settings name."""
    settings = settings or CircuitSettings()
    method, level = settings.chosen_method, level_named(settings.level)
    return method.score(level, model, task, settings.method_settings, context=context or Context())


def _check_effect(model: Model, tasks: CircuitTasks, settings: CircuitSettings, contexts: Sequence[Context]) -> None:
    """Raise an error if the effect of all gates cannot be told from 0, and warn if the model lacks the behaviour."""
    level = level_named(settings.level)
    effects = [
        whole_effect(level, model, seeded, settings.source, fitted_on=fitted_on, context=context)
        for seeded, fitted_on, context in zip(tasks.evaluated, tasks.fitted_on, contexts, strict=True)
    ]
    if problem := noise_problem(effects, level, model.name, tasks.first):
        if not settings.allow_noise:
            raise GatelensError(
                f"{problem}: use more prompts (n), another task or another model, or go on with a warning "
                "(--allow-noise)."
            )
        warnings.warn(f"{problem}.", GatelensWarning, stacklevel=4)
    if warning := behaviour_warning(effects, model.name, tasks.first):
        warnings.warn(warning, GatelensWarning, stacklevel=4)


def _test(
    circuits: Circuits, scores: Scores, curve: Curve, settings: CircuitSettings, context: Context
) -> CircuitTests | None:
    """Test the circuit of the first task seed; None if that is not asked for."""
    if not settings.tests:
        return None
    k = curve.asked[curve.circuit_point(settings.threshold)]
    return check_circuit(circuits, scores, k, curve.everything[0], context=context)


def _stability(circuits: Circuits, curve: Curve, settings: CircuitSettings, context: Context) -> Stability | None:
    """Circuits of halves of the prompts of the first task seed; None if that is not asked for."""
    if not settings.stability:
        return None
    model, k = circuits.model, curve.asked[curve.circuit_point(settings.threshold)]
    return measure_stability(
        circuits.task,
        k,
        settings.stability,
        lambda task, part: score(model, task, settings, part),
        lambda task, scores, part: settings.circuits(model, task, scores, part, circuits.fitted_on),
        context=context,
    )


def _validate(
    circuits: Circuits, scores: list[Scores], curve: Curve, settings: CircuitSettings, context: Context
) -> Validity:
    """Check the scores against patching, and the circuit against the rest of the model and between seeds.

    Arguments:
        circuits: of the first task seed.
        scores, curve: of all task seeds.
    """
    check = ScoreCheck(Agreement(), ())
    if not settings.chosen_method.exact and settings.sample:
        few = take(circuits.task, CHECKED_PROMPTS)
        own = score(circuits.model, few, settings, context.part("check-the-scores"))
        check = check_scores(
            circuits.model, few, own, settings.sample, settings.ranking, context=context.part("check-by-patching")
        )
    point = curve.circuit_point(settings.threshold)
    k = curve.asked[point]
    return Validity(
        **dict(check.overall),
        strata=check.strata,
        kept=float(curve.kept[point]),
        effect=float(curve.effect[point]),
        complement=complement_effect(circuits, curve.of_seed(0), k, context=context),
        overlap=overlap(scores, k, settings.ranking, settings.selection),
    )
