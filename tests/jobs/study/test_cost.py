"""The dry run: what a study will take, before anything is written."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from commands import run
from families import tiny
from rich.console import Console
from studies import write_study
from toys import random_task

from gatelens import CircuitSettings, Model
from gatelens.gates import LEVELS
from gatelens.jobs.circuit import score
from gatelens.jobs.circuit_cost import circuit_cost, circuit_forwards
from gatelens.jobs.cost import sparsify_cost
from gatelens.jobs.roles import roles_forwards
from gatelens.jobs.study._work import OneModel
from gatelens.jobs.study.cost import estimates, parameters_of, weights_gb
from gatelens.jobs.study.file import read_study
from gatelens.jobs.study.models import ModelSpec
from gatelens.jobs.study.run import run_study
from gatelens.measures.effect import explained_effect
from gatelens.measures.roles_result import RolesSettings
from gatelens.model.graph import Graph
from gatelens.sparse.sparsify import SparsifySettings

GRAPH, LENGTH = Graph(n_layers=2, n_heads=5, n_kv_heads=5), 8  # 10 heads


def small(**changes: Any) -> CircuitSettings:
    less = {"sample": 0, "describe": 0, "refine": 0, "areas": "none"}
    return CircuitSettings(**{"n": 4, "points": 6, "random_points": 3, **less, **changes})


@pytest.mark.parametrize(
    ("settings", "forwards"),
    [
        # 2 plain, 5 forward-backwards, 6 + 3 circuits; the circuit's complement at the end
        (small(), 4 * (2 + 5 * 2 + 6 + 3) + 4),
        (small(method="eap"), 4 * (2 + 2 + 6 + 3) + 4),
        (small(seeds=2, random_points=0, steps=2), 2 * 4 * (2 + 2 * 2 + 6) + 4),
        # half a forward for each of 10 heads
        (small(method="patching"), 4 * (5 + 6 + 3) + 4),
        # all heads one by one
        (small(points=0, random_points=0, method="eap"), 4 * (2 + 2 + 11) + 4),
        # the check: scores once more, and 7 heads patched, on as many of 8 prompts as there are
        (small(sample=7, method="eap"), 4 * (2 + 2 + 6 + 3) + 4 + 4 * (2 + 2 + 3.5)),
        (small(n=16, sample=99, method="eap"), 16 * (2 + 2 + 6 + 3) + 16 + 8 * (2 + 2 + 5)),
        # attention edges of 4 prompts: 40 patched in all prompts together; 4 random circuits, one of half the edges
        (small(level="attention", sample=40, method="eap"), 4 * (2 + 2 + 6 + 4) + 4 + 4 * (2 + 2) + 40),
        # 0, 2, 4, 6, 8 and 10 heads: one more between each two at most
        (small(method="eap", refine=0.05), 4 * (2 + 2 + 6 + 5 + 3) + 4),
        (small(level="attention", method="eap"), 4 * (2 + 2 + 6 + 4) + 4),
        (small(level="edges", method="eap"), 4 * (2 + 2 + 1.75 * 10) + 7),
        # optimal constants of edges by role are those of edges: 200 updates of 4 prompts, 5 forwards each
        (small(level="edges", method="eap", source="optimal"), 4 * (2 + 2 + 1.75 * 10) + 7 + 5 * 200 * 4),
        (small(level="edges-by-role", method="eap", source="optimal"), 4 * (2 + 2 + 1.75 * 10) + 7 + 5 * 200 * 4),
        # 10, 20 and 50 % of 10 heads: 1, 2 and 5
        (small(method="eap", areas="signed"), 4 * (2 + 2 + 6 + 3 + 3) + 4),
        # three circuits on all prompts, 64 without a gate, 50 additions with and without a gate
        (small(method="eap", tests=True), 4 * (2 + 2 + 6 + 3) + 4 + 4 * (3 + 64 + 100)),
        # two kinds of splits: scores, and four circuits
        (small(method="eap", stability=3), 4 * (2 + 2 + 6 + 3) + 4 + 2 * 3 * 4 * (2 + 2 + 4)),
        # 10 heads described: half a forward each and 6 more
        (small(describe=10), 4 * (2 + 5 * 2 + 6 + 3) + 4 + 4 * (5 + 6)),
    ],
)
def test_forwards_of_a_circuit(settings: CircuitSettings, forwards: float) -> None:
    whole = 2 * settings.seeds * settings.n * LEVELS[settings.level].cost.circuit  # all gates open, all gates closed
    assert circuit_forwards(settings, GRAPH, LENGTH) == forwards + whole


def test_cost_of_a_circuit_counts_its_own_prompts() -> None:
    model, task = tiny("llama"), random_task(n=4)
    forwards = circuit_forwards(small(), Graph.of(model.anatomy), task.buckets[0].clean.shape[1])
    assert circuit_cost(model, task, small(n=9)).startswith(f"about {forwards:,.0f} forward passes of one prompt, ")


def test_cost_of_sparsify_is_that_of_the_steps_that_are_left() -> None:
    settings = SparsifySettings(steps=10, length=8, accumulate=3)
    # one forward of the dense model, and a forward-backward of the sparse one, for each batch
    assert sparsify_cost(tiny("llama"), settings, steps_done=4).forwards == 6 * 3 * (1 + 2)


def test_forwards_of_gates() -> None:
    settings = RolesSettings(seeds=2, updates=5, batch=3, accumulate=2, held_out=7, most=4, every=3)
    # three fits of forward-backwards; four curves at 0, 3 and 4 ablated heads, ablated and retained
    assert roles_forwards(settings) == 3 * 2 * 2 * 5 * 3 * 2 + 4 * 2 * 3 * 2 * 7


@pytest.mark.parametrize("level", ["heads", "attention"])
def test_forwards_are_those_that_are_run(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and curves of a real model, counted at its first layer: within a factor of 2, backwards left out."""
    model: Model = tiny("llama")
    rows = 0

    def count(module: Any, args: Any, output: Any) -> None:
        nonlocal rows
        rows += len(output[0] if isinstance(output, tuple) else output)

    model.anatomy.blocks[0].layer.register_forward_hook(count)
    task, settings = random_task(n=4), small(level=level, points=12, method="eap")
    explained_effect(model, task, score(model, task, settings), settings)
    backward = 1 * 4
    expected = circuit_forwards(settings, Graph.of(model.anatomy), length=9) - backward
    assert expected / 2 < rows < expected * 2


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("allenai/OLMo-7B-hf", 7e9),
        ("meta-llama/Llama-3.2-1B", 1e9),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 1.35e8),
        ("Qwen/Qwen2.5-0.5B", 5e8),
        ("gpt2", 1.24e8),
        ("someone/8bit-model", None),
        ("someone/mine", None),
    ],
)
def test_parameters_by_name(name: str, parameters: float | None) -> None:
    assert parameters_of(name) == parameters


def test_weights_of_a_folder(models: Path) -> None:
    spec = ModelSpec(label="dense", load="dense", where=str(models / "dense"))
    parameters = sum(p.numel() for p in tiny("llama").hf.parameters())
    assert weights_gb(spec) == pytest.approx(4 * parameters / 1e9, rel=0.05)


@pytest.mark.slow
class TestDryRun:
    def test_says_what_it_takes_and_writes_nothing(
        self, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(place)
        monkeypatch.setenv("COLUMNS", "200")
        file = write_study(place, gate=True, models='olmo = { load = "allenai/OLMo-7B-hf", dtype = "bfloat16" }')
        before = sorted(place.rglob("*"))
        assert run(monkeypatch, "study", str(file), "--dry-run") == 0
        said = capsys.readouterr().out
        assert sorted(place.rglob("*")) == before
        rows = {line.split()[1]: line for line in said.splitlines() if "induction" in line}
        assert sorted(rows) == sorted(cell.name for cell in read_study(file).cells)
        assert "measured" in rows["heads-induction-dense"]
        assert " 4.0 GB" in rows["heads-induction-dense"]
        assert "guessed" in rows["heads-induction-olmo"]
        assert " 18.0 GB" in rows["heads-induction-olmo"]  # 14 of weights

    def test_quick_replaces_the_sizes_of_the_file(self, place: Path) -> None:
        file = write_study(place, gate=True)
        quick = read_study(file, quick=True)
        assert quick.title.endswith(", quick")
        for cell, usual in zip(quick.cells, read_study(file).cells, strict=True):
            preset = type(cell.settings).presets["quick"]
            assert {name: getattr(cell.settings, name) for name in preset} == preset
            assert cell.settings.level == usual.settings.level if cell.kind == "circuit" else True

    @pytest.mark.usefixtures("no_report")
    def test_a_study_says_its_cost_first(self, place: Path) -> None:
        printed = Console(file=StringIO(), width=200)
        study = read_study(write_study(place))
        costs = estimates(study.cells, place / "out", OneModel())
        run_study(study, place / "out", console=printed)
        said = printed.file.getvalue()
        forwards = sum(cost.forwards for cost in costs)
        assert said.startswith(f"cost: 2 cells, about {forwards:,.0f} forward passes of one prompt")
        run_study(study, place / "out", console=printed)
        assert printed.file.getvalue().count("cost:") == 1  # all are done

    @pytest.mark.usefixtures("no_report")
    def test_knows_what_is_done_and_what_cannot_be(self, place: Path) -> None:
        study = read_study(write_study(place))
        run_study(study, place / "out")
        assert [cost.note for cost in estimates(study.cells, place / "out")] == ["done", "done"]
        (place / "sparse" / "model.safetensors").write_bytes(b"damaged")
        dense, sparse = estimates(study.cells, place / "out")
        assert dense.done
        assert "cannot run" in sparse.note
        assert "damaged" in sparse.note

    def test_what_cannot_be_loaded_is_listed_too(self, place: Path) -> None:
        odd = 'odd = { load = "dense", device = "nowhere" }\nworse = "no such id"'
        costs = estimates(read_study(write_study(place, models=odd)).cells, place)
        notes = {cost.cell.model.label: cost.note for cost in costs}
        assert notes["dense"] == "measured"
        assert "cannot run: there is no device 'nowhere'" in notes["odd"]
        assert "cannot run" in notes["worse"]
