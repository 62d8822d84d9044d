"""The result of a circuit job, and the files that it is saved in.

``result.json``         the summary (`CircuitRecord`)
``scores.safetensors``  the score of every gate, for each task seed
``best.safetensors``    of very many gates: the best of each prompt, which is all that a report reads (`Scores.compact`)
``curve.*``             the explained effect (`curve_files`)
``circuit.json``        edge circuits in the format of EAP-IG (`exchange`)
``example.*``           some prompts with their attention (`example`)
``heads.json``          what the best heads do (`head_table`)
``tests.json``          tests of the circuit (`circuit_tests`), and ``minimality.csv``
``stability.json``      circuits of halves of the prompts and templates (`stability`), and ``stability.csv``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from gatelens.errors import GatelensError
from gatelens.gates import LEVELS, level_named
from gatelens.gates.circuit import Circuit
from gatelens.gates.edges import EDGES, EdgeScores
from gatelens.gates.scores import Scores
from gatelens.gates.selection import selected
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.measures.circuit_tests import CircuitTests, load_tests, save_tests
from gatelens.measures.counts import Count, CountColumns
from gatelens.measures.curve_files import load_curve, save_curve
from gatelens.measures.curves import Curve
from gatelens.measures.exchange import write_graph
from gatelens.measures.head_table import HeadTable, load_head_table, save_head_table
from gatelens.measures.stability import Stability, load_stability, save_stability
from gatelens.measures.validity import Validity
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.files import read_json, read_tensors, write_json, write_tensors
from gatelens.runtime.records import SCHEMA_VERSION, Record, read_record
from gatelens.runtime.run_folder import ASKED, RESULT
from gatelens.runtime.settings import Settings
from gatelens.runtime.shown import Shown

SCORES, BEST_SCORES = "scores.safetensors", "best.safetensors"


class GraphRecord(Settings):
    """The shape of a model's component graph."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    parallel: bool = False
    coupled: bool = False

    def graph(self) -> Graph:
        return Graph(**self.model_dump())


class CircuitRecord(CountColumns, Record):
    """The schema of ``result.json``."""

    model: str
    task: str
    sparse: bool | None = Field(default=None, description="whether the model's attention is gated; None: not recorded")
    dense: str | None = Field(
        default=None, description="the dense model that a sparse one is compared with, if it was named"
    )
    graph: GraphRecord | None = None
    settings: CircuitSettings
    total: int | None = Field(default=None, description="number of gates")
    validity: Validity
    seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class CircuitResult(Shown):
    """The scores of all gates for each task seed, the curve of their circuits, and how far these can be trusted.

    Example:
        result = gatelens.load_circuit("runs/ioi", scores=True)
        print(result.count, result.validity.effect)
        result.circuit().explain(model, task)
    """

    model: str
    task: str
    settings: CircuitSettings
    scores: list[Scores]  # one for each task seed; empty if the result was read without its scores
    curve: Curve  # the explained effect of the ranking's circuits
    validity: Validity  # how far the scores and the circuit can be trusted
    seconds: float
    sparse: bool = False  # whether the model's attention is gated
    dense: str | None = None  # the dense model that a sparse one is compared with, if it was named
    graph: Graph | None = None  # None: saved by version 0.1
    heads: HeadTable | None = None  # what the best heads do; None if it was not asked for
    tests: CircuitTests | None = None  # tests of the circuit; None if they were not asked for
    stability: Stability | None = None  # circuits of halves of the prompts; None if they were not asked for

    drawn_by = "gatelens.report.plots:plot_circuit_result"

    def circuit(self, k: int | None = None) -> Circuit:
        """The circuit of the first task seed as an object.

        Arguments:
            k: how many gates to keep; by default as many as the threshold needs.
        """
        if not self.scores:
            raise GatelensError("this result was read without its scores: use load_circuit(folder, scores=True).")
        if k is None:
            k = self.curve.asked[self.curve.circuit_point(self.settings.threshold)]
        return self.scores[0].circuit(k, self.settings.ranking, self.settings.selection)

    def records(self) -> list[dict[str, Any]]:
        """What the best heads do, or the points of the curve if no head was described."""
        return self.curve.records() if self.heads is None else self.heads.records()

    def headline(self) -> str:
        return f"{self.task} in {self.model}: {level_named(self.settings.level).noun}, {self.settings.method}"

    @property
    def answered(self) -> float:
        """The share of prompts that the whole model answers correctly."""
        return float((self.curve.everything > 0).float().mean())

    @property
    def count(self) -> Count:
        """How many gates are needed for the threshold, with the interval and the number of prompts."""
        return self.curve.counted(self.settings.threshold)


def save_circuit(result: CircuitResult, model: Model, folder: Path) -> CircuitRecord:
    """Write all files of a result except ``result.json``, and return the contents of that file."""
    best = [scores.compact() for scores in result.scores]
    _save_scores(folder / SCORES, result.scores, result.settings.seed)
    if any(small is not scores for small, scores in zip(best, result.scores, strict=True)):
        _save_scores(folder / BEST_SCORES, best, result.settings.seed)
    save_curve(result.curve, folder)
    if result.heads is not None:
        save_head_table(result.heads, folder)
    if result.tests is not None:
        save_tests(result.tests, folder)
    if result.stability is not None:
        save_stability(result.stability, folder)
    point = result.curve.point_at(result.settings.threshold)
    if isinstance(scores := result.scores[0], EdgeScores) and point is not None:
        [order] = selected(scores, result.settings.ranking, result.settings.selection)
        masks = EDGES.masks(model, order, [result.curve.asked[point]])
        write_graph(folder / "circuit.json", scores, EDGES.prune(model, masks)[0], model.anatomy.width)
    return CircuitRecord(
        schema_version=SCHEMA_VERSION,
        model=result.model,
        task=result.task,
        sparse=result.sparse,
        dense=result.dense,
        graph=None if result.graph is None else GraphRecord(**asdict(result.graph)),
        settings=result.settings,
        **dict(result.count.columns()),
        total=result.curve.total,
        validity=result.validity,
        seconds=result.seconds,
    )


def _save_scores(path: Path, all_scores: Sequence[Scores], first_seed: int) -> None:
    tensors = {
        f"seed-{seed}.{name}": tensor
        for seed, scores in enumerate(all_scores, start=first_seed)
        for name, tensor in scores.tensors().items()
    }
    write_tensors(path, tensors)


def load_circuit(folder: str | Path, *, scores: bool = False) -> CircuitResult:
    """Read a saved result.

    Arguments:
        folder: the run folder.
        scores: also read the scores of all gates, which are large for attention edges.

    Example:
        result = gatelens.load_circuit("runs/ioi")
        result.curve.plot()
    """
    folder = Path(folder)
    record = read_record(folder / RESULT, CircuitRecord)
    graph = None if record.graph is None else record.graph.graph()
    return CircuitResult(
        record.model,
        record.task,
        record.settings,
        load_scores(folder, record.settings, graph) if scores else [],
        _with_prompts(load_curve(folder), folder),
        record.validity,
        record.seconds,
        # The first versions did not record whether the model is sparse, so its name has to decide.
        "sparse" in record.model if record.sparse is None else record.sparse,
        record.dense,
        graph,
        load_head_table(folder),
        load_tests(folder),
        load_stability(folder),
    )


def _with_prompts(curve: Curve, folder: Path) -> Curve:
    """The curve with the fingerprints of its prompts. The first versions saved them in the request only."""
    if curve.fingerprints or not (folder / ASKED).exists():
        return curve
    fingerprints = read_json(folder / ASKED).get("task", {}).get("fingerprints", [])
    return replace(curve, fingerprints=tuple(fingerprints))


def record_dense(folder: Path, dense: str | None) -> None:
    """Record the name of the dense model that a saved circuit is compared with. No other entry changes."""
    saved = read_json(folder / RESULT)
    if saved.get("dense") != dense:
        write_json(folder / RESULT, {**saved, "dense": dense})


def load_scores(folder: Path, settings: CircuitSettings, graph: Graph | None, *, compact: bool = False) -> list[Scores]:
    """The scores of a saved run, one for each task seed.

    Arguments:
        compact: read what a report needs (`Scores.compact`), which a shared folder has even if it lacks all scores.
    """
    is_compact = compact and (folder / BEST_SCORES).exists()
    tensors = read_tensors(folder / (BEST_SCORES if is_compact else SCORES))
    all_scores: list[Scores] = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        prefix = f"seed-{seed}."
        of_seed = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if graph is None and settings.level == EDGES.name:
            raise GatelensError(f"{folder} lacks the shape of the model's graph: run the job again.")
        if not of_seed:
            raise GatelensError(f"{folder} lacks the scores of task seed {seed}: run the job again.")
        all_scores.append(LEVELS[settings.level].read_scores(of_seed, graph, settings.method))  # type: ignore[arg-type]
    return all_scores
