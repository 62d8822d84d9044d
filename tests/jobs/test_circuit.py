"""The whole job, and its continuation after being killed at any point."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import kill
from families import tiny, wrap
from pieces import finish_in_pieces
from safetensors.torch import load_file
from toys import random_task

import gatelens
from gatelens import CircuitResult, CircuitSettings, GatelensError, Model, find_circuit
from gatelens.errors import GatelensWarning
from gatelens.gates.scores import Ranking, Scores
from gatelens.jobs.circuit_memory import memory_estimate
from gatelens.measures.circuit_result import load_circuit
from gatelens.measures.describe import best_heads
from gatelens.measures.exchange import read_graph
from gatelens.model.graph import Graph
from gatelens.sparse.in_model import make_sparse

SMALL = CircuitSettings(n=6, points=9, random_points=3, sample=18, steps=2, refine=0, allow_noise=True)
OPTIONS = {"length": 5}


def small(**changes: Any) -> CircuitSettings:
    return SMALL.replace(**changes)


def pieces(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("pieces/**/*.safetensors")}


def files(folder: Path) -> dict[str, Any]:
    """Everything in a finished folder but the time it took."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    found["result.json"] = {**json.loads(found["result.json"]), "seconds": None}
    return found


def members(scores: Scores, k: int, ranking: Ranking) -> Counter[Any]:
    """The top k, or how many of the top k of all prompts each head has, if prompts have their own gates."""
    if scores.level.shared:
        return Counter(name for _, name, _ in scores.top(k, ranking))
    heads: Counter[Any] = Counter()
    for values, exists, *_ in scores.gate_sets():
        edges = sorted(exists.nonzero().tolist(), key=lambda edge: -abs(float(values[tuple(edge)])))
        heads.update((layer, head) for layer, head, _, _ in edges[:k])
    return heads


class TestResult:
    @pytest.mark.parametrize("level", ["heads", "edges", "attention"])
    @pytest.mark.parametrize("method", ["patching", "eap", "eap-ig"])
    def test_every_level_and_method(self, trained: Model, level: str, method: str) -> None:
        n = 2 if method == "patching" and level != "heads" else 6  # a thousand gates and more, one at a time
        result = find_circuit(trained, "induction", small(level=level, method=method, n=n), options=OPTIONS)
        assert result.curve.effect[[0, -1]].tolist() == pytest.approx([0, 1], abs=1e-6)
        assert result.curve.random is not None
        assert result.curve.random.count_at(0.9) > result.curve.count_at(0.9)  # the model does have a circuit
        checked = 0 if method == "patching" else 18
        assert (result.validity.sampled, result.validity.correlation is None) == (checked, not checked)
        assert [stratum.sampled for stratum in result.validity.strata] == ([6, 6, 6] if checked else [])
        assert result.validity.overlap is None
        point = result.curve.point_at(0.9)
        assert result.count.value == round(result.validity.kept) == round(float(result.curve.kept[point]))
        assert result.count.sample.prompts == n
        assert result.validity.effect == pytest.approx(float(result.curve.effect[point]))
        assert result.heads is not None
        assert {line.head for line in result.heads.lines} == {str(head) for head in best_heads(result.scores[0], 10)}

    @pytest.mark.parametrize("level", ["heads", "edges", "attention"])
    def test_several_seeds_make_one_curve(self, trained: Model, level: str) -> None:
        """Also where prompts, and so the number of attention edges, differ between seeds."""
        result = find_circuit(trained, "induction", small(level=level, method="eap", n=2, seeds=3), options=OPTIONS)
        assert result.curve.none.shape == (3, 2)
        k = result.curve.asked[result.curve.point_at(0.9)]
        tops = [members(scores, k, result.settings.ranking) for scores in result.scores]
        pairs = list(itertools.combinations(tops, 2))
        assert len(pairs) == 3
        overlaps = [(a & b).total() / (a | b).total() for a, b in pairs]
        assert result.validity.overlap == pytest.approx(sum(overlaps) / 3, abs=1e-6)

    def test_a_sparse_model(self, trained: Model) -> None:
        sparse = wrap(copy.deepcopy(trained.hf), "sparse trained")
        sparse = Model("sparse", sparse.hf, trained.tokenizer, sparse.anatomy)
        make_sparse(sparse.hf, 0.5)
        dense, open_ = (
            find_circuit(model, "induction", small(level="attention", method="eap"), options=OPTIONS)
            for model in (trained, sparse)
        )
        assert open_.curve.total < dense.curve.total
        assert open_.curve.effect[[0, -1]].tolist() == pytest.approx([0, 1], abs=1e-6)

    def test_heads_of_the_dense_model_beside_those_of_a_sparse_one(self, trained: Model, tmp_path: Path) -> None:
        sparse = wrap(copy.deepcopy(trained.hf), "sparse trained")
        sparse = Model("sparse", sparse.hf, trained.tokenizer, sparse.anatomy)
        make_sparse(sparse.hf, 0.5)
        settings = small(method="eap", sample=0, random_points=0, describe=3)

        def find(name: str, **dense: Any) -> CircuitResult:
            return find_circuit(sparse, "induction", settings, out=tmp_path / name, options=OPTIONS, **dense)

        # 1. A model is run: every head has its line, whether the run is new or finished.
        first, named = find("model", dense=trained), find("later", dense="trained")
        assert named.heads is not None
        assert named.heads.dense is None
        later = find("later", dense=trained)
        assert first.heads is not None
        assert first.heads.dense is not None
        task = gatelens.task("induction", trained, n=6, **OPTIONS)
        alone = gatelens.describe(trained, task, [line.head for line in first.heads.lines])
        assert first.heads.dense.lines == alone.lines
        for result in (later, load_circuit(tmp_path / "model"), load_circuit(tmp_path / "later")):
            assert result.heads == first.heads
            assert result.dense == trained.name
        # 2. A run of the dense model gives the heads that it describes, and no model is run.
        run = find_circuit(trained, "induction", settings, options=OPTIONS)
        beside = find("run", dense=run).heads
        assert beside is not None
        assert beside.dense == run.heads
        with pytest.raises(GatelensError, match="is one of ioi, not of induction: give another run"):
            find("other", dense=replace(run, task="ioi"))
        with pytest.raises(GatelensError, match="give a run of the dense model that the sparse one was made from"):
            find("other", dense=replace(run, graph=replace(Graph.of(trained.anatomy), n_layers=99)))
        assert not (tmp_path / "other").exists()  # the mistake is found before any work

    def test_what_is_saved(self, trained: Model, tmp_path: Path) -> None:
        result = find_circuit(trained, "induction", small(level="edges", seeds=2), out=tmp_path, options=OPTIONS)
        asked = json.loads((tmp_path / "asked.json").read_text())
        assert asked["model"]["fingerprint"] == trained.fingerprint
        assert asked["settings"]["steps"] == 2
        assert asked["task"]["options"] == OPTIONS
        assert asked["versions"]["torch"] == torch.__version__
        saved = load_file(tmp_path / "scores.safetensors")
        for seed in (0, 1):
            assert torch.equal(saved[f"seed-{seed}.scores"], result.scores[seed].scores)
        graph = Graph.of(trained.anatomy)
        scores, kept = read_graph(tmp_path / "circuit.json", graph)
        torch.testing.assert_close(scores.scores, result.scores[0].scores)
        assert 0 < kept.sum() <= result.count.value * 2
        assert not (tmp_path / "pieces").exists()
        again = find_circuit(trained, "induction", small(level="edges", seeds=2), out=tmp_path, options=OPTIONS)
        assert load_circuit(tmp_path).heads == result.heads
        for found in (again, load_circuit(tmp_path)):
            assert torch.equal(found.curve.metrics, result.curve.metrics)
            assert (found.validity, found.settings, found.count) == (result.validity, result.settings, result.count)

    def test_what_a_killed_start_left_is_cleared_away(self, trained: Model, tmp_path: Path) -> None:
        (tmp_path / "asked.123.tmp").write_text("{")
        find_circuit(trained, "induction", small(method="eap"), out=tmp_path, options=OPTIONS)
        assert not list(tmp_path.glob("*.tmp"))

    def test_a_folder_is_not_used_twice(self, trained: Model, tmp_path: Path) -> None:
        find_circuit(trained, "induction", small(), out=tmp_path, options=OPTIONS)
        before = files(tmp_path)
        for settings, options in ((small(n=5), OPTIONS), (small(), {"length": 6}), (small(level="edges"), OPTIONS)):
            with pytest.raises(GatelensError, match="give another folder"):
                find_circuit(trained, "induction", settings, out=tmp_path, options=options)
        assert files(tmp_path) == before

    def test_a_result_of_another_version(self, tmp_path: Path) -> None:
        (tmp_path / "result.json").write_text("{}")
        with pytest.raises(GatelensError, match=r"result\.json: model is missing"):
            load_circuit(tmp_path)

    def test_the_memory_that_is_announced(self, trained: Model) -> None:
        weights, runs = memory_estimate(trained, small(memory_gb=0.5))
        assert weights == pytest.approx(4 * trained.n_parameters / 1e9)
        assert runs == 0.5
        streams = 32 * trained.n_layers * trained.anatomy.width  # of one prompt, which has to fit
        assert memory_estimate(trained, small(memory_gb=1e-6))[1] > 4e-9 * streams


@pytest.mark.parametrize(
    "wrong",
    [{"level": "neurons"}, {"method": "magic"}, {"steps": 0}, {"n": 0}, {"seeds": 0}, {"threshold": 0.0},
     {"threshold": 1.5}, {"sample": -1}, {"seed": -1}],
)  # fmt: skip
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(GatelensError):
        CircuitSettings(**wrong)


@pytest.mark.slow
class TestInterrupted:
    """Stopped anywhere and started again, a run ends with the same numbers, and no finished piece is done again."""

    @pytest.mark.parametrize("level", ["heads", "edges", "attention"])
    def test_after_every_piece(self, level: str, trained: Model, tmp_path: Path) -> None:
        """Each start is broken off at its first new piece, until none is left."""
        # Tiny memory makes many pieces.
        refine = 0.05 if level == "heads" else 0.0  # the others would take long
        settings = small(level=level, method="eap", n=3, points=4, sample=4, memory_gb=1e-4, refine=refine)
        find_circuit(trained, "induction", settings, out=tmp_path / "at once", options=OPTIONS)
        _, written = finish_in_pieces(
            lambda: find_circuit(trained, "induction", settings, out=tmp_path / "in pieces", options=OPTIONS),
            starts=300,
        )
        assert len(written) == len(set(written)) > 10
        assert files(tmp_path / "at once") == files(tmp_path / "in pieces")

    def test_killed(self, trained: Model, trained_folder: Path, tmp_path: Path) -> None:
        """The command itself, killed before its first piece and after its ninth."""
        out = tmp_path / "out"
        words = [
            "circuit", str(trained_folder), "induction", "--out", str(out), "--method", "patching", "--n", "24",
            "--points", "6", "--option", "length=5", "--memory-gb", "0.001", "--no-check", "--allow-noise",
        ]  # fmt: skip
        for n_pieces in (0, 9):
            kill(words, "patch heads", n_pieces)
            kept = {path: (out / path).stat().st_mtime_ns for path in pieces(out) if "/heads-" in path}
            assert len(kept) == n_pieces
        clock = out / "pieces" / "seconds.json"
        assert json.loads(clock.read_text())["seconds"] > 0
        clock.write_text('{"seconds": 1000}')
        kill(words, "patch heads", 12)
        for path, written in kept.items():  # no finished piece was touched again
            assert (out / path).stat().st_mtime_ns == written
        settings = CircuitSettings(n=24, method="patching", points=6, memory_gb=0.001, allow_noise=True)
        for folder in (out, tmp_path / "at once"):
            find_circuit(trained, "induction", settings, out=folder, options=OPTIONS)
        assert files(tmp_path / "at once") == files(out)
        assert load_circuit(out).seconds > 1000


def test_a_response_task_is_refused(trained: Model, tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match="use `gatelens gate` for it"):
        find_circuit(trained, "aba-abb", small(), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_warnings_point_to_the_caller(tmp_path: Path) -> None:
    with pytest.warns(GatelensWarning) as caught:
        find_circuit(tiny("llama"), random_task(n=3, lengths=(4,)), small(method="eap", sample=0), out=tmp_path / "run")
    assert {warning.filename for warning in caught} == {__file__}
