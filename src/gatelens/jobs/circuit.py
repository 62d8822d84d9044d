"""Find the circuit of a task: score all gates, keep the best k, draw the curve, and say how far to believe it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.attention import attention_numbers
from gatelens.gates.edges import edge_numbers
from gatelens.gates.runs import gradient_numbers
from gatelens.gates.scores import AttentionScores, Scores
from gatelens.measures.curves import Curve, CurveSettings, explained_effect, pool
from gatelens.measures.example import save_example
from gatelens.measures.exchange import write_graph
from gatelens.measures.results import RESULT, load_curve, open_folder, request, save_curve
from gatelens.measures.top_k import Circuits, EdgeCircuits, circuits
from gatelens.measures.validity import Validity, agreement, complement_effect, overlap
from gatelens.methods.attribution import attribute_attention, attribute_edges, attribute_heads
from gatelens.methods.patching import patch_attention, patch_edges, patch_heads
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.files import read_json, write_json, write_tensors
from gatelens.runtime.journal import Clock, Journal, Progress
from gatelens.sparse.in_model import is_sparse
from gatelens.tasks import task as make_task
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import take

Level = Literal["heads", "edges", "attention"]
Method = Literal["patching", "eap", "eap-ig"]


@dataclass(frozen=True)
class CircuitSettings(CurveSettings):
    """What to look for, and how."""

    level: Level = field(
        default="heads", metadata={"help": "gates on heads, on edges between components, or on attention edges"}
    )
    method: Method = field(default="eap-ig", metadata={"help": "exact patching, or attribution: eap, eap-ig"})
    steps: int = field(default=5, metadata={"help": "points of eap-ig's path"})
    n: int = field(default=64, metadata={"help": "prompts for each task seed"})
    seeds: int = field(default=1, metadata={"help": "task seeds: each draws its own prompts"})
    seed: int = field(default=0, metadata={"help": "the first task seed"})
    threshold: float = field(default=0.9, metadata={"help": "explained effect at which gates are counted"})
    sample: int = field(default=48, metadata={"help": "gates patched exactly to check the scores (0: no check)"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level not in ("heads", "edges", "attention"):
            raise GatelensError(f"no level '{self.level}': levels are heads, edges and attention.")
        if self.method not in ("patching", "eap", "eap-ig"):
            raise GatelensError(f"no method '{self.method}': methods are patching, eap and eap-ig.")
        for name, least in (("steps", 1), ("n", 1), ("seeds", 1), ("seed", 0), ("sample", 0)):
            if getattr(self, name) < least:
                raise GatelensError(f"{name} is at least {least}, not {getattr(self, name)}.")
        if self.level == "attention" and self.source == "mean":
            raise GatelensError("attention edges have no mean: what is left out is put to corrupt or zero.")
        if not 0 < self.threshold <= 1:
            raise GatelensError(f"the threshold is an explained effect above 0 and up to 1, not {self.threshold}.")


@dataclass(frozen=True, eq=False)
class CircuitResult:
    """A ranking of all gates for each task seed, the curve of its circuits, and what speaks for them."""

    model: str
    task: str
    settings: CircuitSettings
    scores: list[Scores]  # one for each task seed; empty when read from a folder
    curve: Curve
    validity: Validity
    seconds: float

    @property
    def count(self) -> float | None:
        """Gates needed for the threshold."""
        return self.curve.count_at(self.settings.threshold)


def find_circuit(
    model: Model,
    task: str,
    settings: CircuitSettings | None = None,
    *,
    out: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> CircuitResult:
    """Find the circuit of a task in a model, in a folder that can be continued if it is killed.

    task: a name or a JSON-lines file; options: the task's own, such as ``corruption``.
    """
    settings = settings or CircuitSettings()
    tasks = _tasks(model, task, settings, options or {})
    folder = None if out is None else Path(out)
    pieces = None if folder is None else folder / "pieces"
    clock = Clock(pieces, progress)
    about = {**tasks[0].spec(), "fingerprints": [one.fingerprint() for one in tasks]}
    if folder is not None and open_folder(folder, request("circuit", model, settings, task=about)):
        return load_circuit(folder)

    def journal(name: str) -> Journal:
        # Pieces are batches, which another budget of memory would cut otherwise.
        budget = f"{settings.memory_gb:g}-gb"
        return Journal(None if pieces is None else pieces / budget / name, clock)

    journals = [journal(f"seed-{one.seed}") for one in tasks]
    # 1. A score for every gate.
    scores = [score(model, one, settings, kept) for one, kept in zip(tasks, journals, strict=True)]
    # 2. The metric of the top k, for a grid of k that all seeds share, and of random gates.
    most = max(_circuits(model, one, mine, settings).total for one, mine in zip(tasks, scores, strict=True))
    curves = [
        explained_effect(model, one, mine, settings, most=most, journal=kept)
        for one, mine, kept in zip(tasks, scores, journals, strict=True)
    ]
    curve = pool(curves)
    # 3. What speaks for it.
    validity = _validate(model, tasks, scores, curves, curve, settings, journal("validity"))
    result = CircuitResult(model.name, tasks[0].name, settings, scores, curve, validity, clock.seconds)
    if folder is not None:
        _save(result, model, tasks[0], folder)
    return result


def score(model: Model, task: CircuitTask, settings: CircuitSettings, journal: Journal | None = None) -> Scores:
    """Scores at the level and by the method that the settings name."""
    common: dict[str, Any] = {"memory_gb": settings.memory_gb, "journal": journal}
    if settings.method == "patching":
        exact: dict[str, Any] = {"heads": patch_heads, "edges": patch_edges, "attention": patch_attention}
        found: Scores = exact[settings.level](model, task, **common)
        return found
    attribute: dict[str, Any] = {"heads": attribute_heads, "edges": attribute_edges, "attention": attribute_attention}
    found = attribute[settings.level](model, task, steps=1 if settings.method == "eap" else settings.steps, **common)
    return found


def memory_estimate(model: Model, settings: CircuitSettings) -> tuple[float, float]:
    """GB that the weights take, and GB that runs take at the most: the budget, or what one prompt of 32 tokens needs
    if that is more (a run cannot be cut below one prompt)."""
    weights = sum(p.numel() * p.element_size() for p in model.hf.parameters()) / 1e9
    least = {
        "heads": gradient_numbers(model, 32),
        "edges": gradient_numbers(model, 32) + 2 * edge_numbers(model, 32),
        "attention": gradient_numbers(model, 32) + 4 * attention_numbers(model, 32),
    }
    return weights, max(settings.memory_gb, 4 * least[settings.level] / 1e9)


def load_circuit(folder: str | Path) -> CircuitResult:
    """A saved circuit, without its scores (they are in ``scores.safetensors``)."""
    folder = Path(folder)
    result = read_json(folder / RESULT)
    try:
        return CircuitResult(
            result["model"],
            result["task"],
            CircuitSettings(**result["settings"]),
            [],
            load_curve(folder),
            Validity(**result["validity"]),
            result["seconds"],
        )
    except (KeyError, TypeError) as error:
        raise GatelensError(f"{folder} holds no circuit of this version ({error}): run it again.") from error


def _tasks(model: Model, task: str, settings: CircuitSettings, options: Mapping[str, Any]) -> list[CircuitTask]:
    seeds = range(settings.seed, settings.seed + settings.seeds)
    tasks = [make_task(task, model, n=settings.n, seed=seed, **options) for seed in seeds]
    for one in tasks:
        if not isinstance(one, CircuitTask):
            raise GatelensError(
                f"the task {one.name} has target responses, not clean and corrupt prompts: `gatelens gate` is for it."
            )
    return tasks  # type: ignore[return-value]


def _validate(
    model: Model,
    tasks: list[CircuitTask],
    scores: list[Scores],
    curves: list[Curve],
    curve: Curve,
    settings: CircuitSettings,
    journal: Journal,
) -> Validity:
    correlation: float | None = None
    sampled = 0
    if settings.method != "patching" and settings.sample:
        # Exact patching is dear: few prompts, and the same ones on both sides.
        few = take(tasks[0], 8)
        ours = score(model, few, settings, journal.part("ours"))
        exact = journal.part("exact")
        found, sampled = agreement(model, few, ours, settings.sample, memory_gb=settings.memory_gb, journal=exact)
        correlation = None if math.isnan(found) else found  # scores that are all equal have no ranks
    point = curve.point_at(settings.threshold)
    point = len(curve.asked) - 1 if point is None else point
    k = curve.asked[point]
    return Validity(
        correlation=correlation,
        sampled=sampled,
        kept=float(curve.kept[point]),
        effect=float(curve.effect[point]),
        complement=complement_effect(model, tasks[0], scores[0], curves[0], k, settings, journal=journal),
        overlap=overlap(scores, k, settings),
    )


def _circuits(model: Model, task: CircuitTask, scores: Scores, settings: CircuitSettings) -> Circuits:
    return circuits(model, task, scores, settings.ranking, settings.source, settings.memory_gb)


def _save(result: CircuitResult, model: Model, task: CircuitTask, folder: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for seed, scores in enumerate(result.scores, start=result.settings.seed):
        if isinstance(scores, AttentionScores):
            for i, (values, edges) in enumerate(zip(scores.scores, scores.edges, strict=True)):
                tensors |= {f"seed-{seed}.bucket-{i}.scores": values, f"seed-{seed}.bucket-{i}.edges": edges}
        else:
            tensors[f"seed-{seed}.scores"] = scores.scores
    write_tensors(folder / "scores.safetensors", tensors)
    save_curve(result.curve, folder)
    point = result.curve.point_at(result.settings.threshold)
    ours = _circuits(model, task, result.scores[0], result.settings)
    if isinstance(ours, EdgeCircuits) and point is not None:
        kept = ours.kept([result.curve.asked[point]])[0]
        write_graph(folder / "circuit.json", result.scores[0], kept, model.anatomy.width)  # type: ignore[arg-type]
    save_example(model, task, folder)
    write_json(
        folder / RESULT,
        {
            "model": result.model,
            "sparse": is_sparse(model.hf),
            "graph": asdict(Graph.of(model.anatomy)),
            "task": result.task,
            "settings": asdict(result.settings),
            "count": result.count,
            "total": result.curve.total,
            "validity": asdict(result.validity),
            "seconds": result.seconds,
        },
    )
    shutil.rmtree(folder / "pieces", ignore_errors=True)
    for half_written in folder.glob("*.tmp"):  # by a start that was killed
        half_written.unlink(missing_ok=True)
