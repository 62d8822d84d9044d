"""Saved runs are read back; a run that cannot be read is named in one sentence, and the others are read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import SMALL, TOKENS, circuit_run, gate_run, sparsify_run

from gatelens import CircuitSettings, Model, find_circuit
from gatelens.model.anatomy import describe
from gatelens.model.graph import Graph
from gatelens.report._reading import read_runs, run_folders
from gatelens.report._runs import labels
from gatelens.report.page import write_report
from gatelens.runtime.files import read_tensors, write_tensors
from gatelens.sparse.in_model import make_sparse


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    circuit_run(tmp_path / "a" / "b" / "one")
    gate_run(tmp_path / "two")
    sparsify_run(tmp_path / "a" / "three")
    runs = read_runs([tmp_path, tmp_path / "two", tmp_path / "a"])
    assert [run.folder.name for run in runs.all] == ["one", "two", "three"]
    assert runs.problems == []
    assert [row["step"] for row in runs.sparsified[0].log] == [1, 2, 3, 4]  # not the half line


def test_a_run_holds_no_other_runs(tmp_path: Path) -> None:
    folder = circuit_run(tmp_path / "one")
    (folder / "inside").mkdir()
    (folder / "inside" / "asked.json").write_text("{}")
    assert run_folders(tmp_path) == [folder]


def test_what_a_circuit_run_saves_is_what_is_read(trained: Model, tmp_path: Path) -> None:
    hf = copy.deepcopy(trained.hf)
    make_sparse(hf, 0.5)
    sparse = Model("sparse trained", hf, trained.tokenizer, describe(hf))
    settings = CircuitSettings(level="edges", method="eap", n=2, points=4, random_points=2, sample=0, allow_noise=True)
    for model in (trained, sparse):
        find_circuit(model, "induction", settings, out=tmp_path / model.name, options={"length": 4})
    runs = read_runs([tmp_path])
    assert runs.problems == []
    by_name = {run.result.model: run for run in runs.circuits}
    assert [by_name[name].result.sparse for name in (trained.name, "sparse trained")] == [False, True]
    for run in runs.circuits:
        assert run.result.graph == Graph.of(trained.anatomy)
        assert run.edge_scores.shape == run.result.graph.edges.shape
        assert len(run.prompts) == 2
        assert (run.prompts[0].open is not None) == run.result.sparse


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "result.json").write_text("{"), "cannot read"),
        (lambda f: (f / "result.json").write_text("[]"), "should hold a JSON object"),
        (lambda f: (f / "result.json").unlink(), "not complete"),
        (lambda f: (f / "scores.safetensors").write_bytes(b"nonsense"), "cannot read"),
        (lambda f: (f / "scores.safetensors").unlink(), "cannot read"),
        (lambda f: (f / "curve.safetensors").write_bytes(b""), "cannot read"),
        (lambda f: (f / "curve.json").unlink(), "no curve.json"),
        (lambda f: (f / "asked.json").write_text("not json"), "cannot read"),
        (lambda f: change(f / "asked.json", kind="recipe"), "'recipe', which a report does not show"),
        (lambda f: change(f / "result.json", model=["a"]), "model is ['a']: it must be a string"),
        (lambda f: change(f / "result.json", graph={"n_layers": 3}), "graph.n_heads is missing"),
        (
            lambda f: change(f / "result.json", settings={"level": "edges", "colour": 1}),
            "settings.colour: no setting 'colour'",
        ),
        (
            lambda f: change(f / "example.json", prompts=[{"tokens": ["one"], "answer": ""}]),
            "does not fit its 1 tokens",
        ),
        (lambda f: write_tensors(f / "scores.safetensors", {"seed-0.scores": torch.zeros(2, 2)}), "another model"),
        (
            lambda f: write_tensors(
                f / "example.safetensors", {"attention-0": torch.zeros(1, 1, len(TOKENS), len(TOKENS))}
            ),
            "attention of another model",
        ),
        (
            lambda f: write_tensors(
                f / "scores.safetensors", {"seed-0.scores": torch.full(SMALL.edges.shape, torch.nan)}
            ),
            "cannot be drawn",
        ),
        (
            lambda f: write_tensors(
                f / "curve.safetensors", read_tensors(f / "curve.safetensors") | {"metrics": torch.zeros(1, 2, 3)}
            ),
            "run the job again",
        ),
        (
            lambda f: write_tensors(
                f / "curve.safetensors", read_tensors(f / "curve.safetensors") | {"none": torch.full((1, 3), torch.nan)}
            ),
            "holds a curve that cannot be drawn",
        ),
    ],
)
def test_a_damaged_run_is_a_sentence_and_the_rest_is_read(
    damage: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    good, bad = circuit_run(tmp_path / "good"), circuit_run(tmp_path / "bad")
    damage(bad)
    runs = read_runs([tmp_path])
    assert [run.folder for run in runs.all] == [good]
    assert len(runs.problems) == 1
    assert sentence in runs.problems[0]
    assert "bad" in runs.problems[0]
    assert "\n" not in runs.problems[0]


@pytest.mark.parametrize("name", ["roles.safetensors", "result.json"])
def test_damaged_roles_and_training_logs(name: str, tmp_path: Path) -> None:
    (gate_run(tmp_path / "gate") / name).write_text("{}")
    (sparsify_run(tmp_path / "sparse") / "log.csv").write_text("step,open\n1,many\n")
    (sparsify_run(tmp_path / "foreign") / "settings.json").write_text('{"theme": "dark"}')
    runs = read_runs([tmp_path])
    assert runs.all == []
    assert len(runs.problems) == 3
    assert all("\n" not in problem for problem in runs.problems)


def test_folders_without_runs_are_named(tmp_path: Path) -> None:
    (tmp_path / "holiday").mkdir()
    (tmp_path / "holiday" / "photo.jpg").write_bytes(b"...")
    runs = read_runs([tmp_path / "holiday", tmp_path / "nowhere"])
    assert "holiday does not contain a run of gatelens" in runs.problems[0]
    assert "nowhere is not a folder" in runs.problems[1]


def test_a_run_of_an_earlier_version_is_read_without_graph_and_example(tmp_path: Path) -> None:
    folder = circuit_run(tmp_path / "old", model="sparse-small")
    saved = json.loads((folder / "result.json").read_text())
    del saved["graph"], saved["sparse"]
    (folder / "result.json").write_text(json.dumps(saved))
    (folder / "example.json").unlink()
    run = read_runs([folder]).circuits[0]
    assert run.result.graph is None
    assert run.prompts == []
    assert run.result.sparse  # by its name


def test_head_scores_are_means_over_seeds_and_sums_over_attention_edges(tmp_path: Path) -> None:
    heads = circuit_run(tmp_path / "heads", level="heads")
    write_tensors(
        heads / "scores.safetensors", {"seed-0.scores": torch.ones(3, 4), "seed-1.scores": 3 * torch.ones(3, 4)}
    )
    text = (heads / "result.json").read_text()
    (heads / "result.json").write_text(text.replace('"seeds": 1', '"seeds": 2'))
    attention = circuit_run(tmp_path / "attention", level="heads")
    for name in ("result.json", "curve.json"):
        text = (attention / name).read_text()
        (attention / name).write_text(text.replace('"level": "heads"', '"level": "attention"'))
    # One prompt of 2 tokens with four edges of 1 in each head, two of 3 tokens with nine edges of 2.
    values = {2: torch.ones(1, 3, 4, 2, 2), 3: 2 * torch.ones(2, 3, 4, 3, 3)}
    tensors = {f"seed-0.bucket-{i}.scores": x for i, x in enumerate(values.values())}
    tensors |= {f"seed-0.bucket-{i}.edges": x > 0 for i, x in enumerate(values.values())}
    write_tensors(attention / "scores.safetensors", tensors)
    runs = {run.folder.name: run for run in read_runs([tmp_path]).circuits}
    assert torch.equal(runs["heads"].head_scores, 2 * torch.ones(3, 4))
    assert torch.allclose(runs["attention"].head_scores, torch.full((3, 4), (4 + 18 + 18) / 3))


def test_attention_circuits_are_shown_without_their_scores(tmp_path: Path) -> None:
    folder = circuit_run(tmp_path / "attention", level="heads")
    for name in ("result.json", "curve.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace('"level": "heads"', '"level": "attention"'))
    (folder / "scores.safetensors").unlink()
    runs = read_runs([folder])
    assert runs.problems == []
    assert runs.circuits[0].head_scores is None
    report = write_report([folder], tmp_path / "report")
    assert (report.figures, report.problems) == (1, [])  # the curve


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    circuit_run(tmp_path / "first")
    circuit_run(tmp_path / "second")
    circuit_run(tmp_path / "third", model="other")
    assert list(labels(read_runs([tmp_path]).circuits)) == ["small (first)", "small (second)", "other"]
    circuit_run(tmp_path / "deep" / "first")
    assert "small (deep/first)" not in labels(read_runs([tmp_path / "deep"]).circuits)
    both = [*read_runs([tmp_path / "first"]).circuits, *read_runs([tmp_path / "deep"]).circuits]
    assert list(labels(both)) == ["small (first)", "small (deep/first)"]


def test_the_example_is_what_was_saved(tmp_path: Path) -> None:
    run = read_runs([circuit_run(tmp_path / "one", sparse=True)]).circuits[0]
    prompt = run.prompts[0]
    assert prompt.tokens == TOKENS
    assert prompt.attention.shape == prompt.open.shape == (3, 4, len(TOKENS), len(TOKENS))
