"""Contrastive gates of relations: what is fitted, what is judged, the folder, the figure and mistakes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from commands import run

from gatelens import GatelensError, Model
from gatelens.errors import GatelensWarning
from gatelens.gates.responses import score_responses
from gatelens.jobs import relations as job
from gatelens.jobs.relations import find_relations, relation_tasks, relations_cost
from gatelens.measures.relations_result import RelationsSettings, load_relations
from gatelens.report.figures import relations_figure
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.builtin.word_pairs import WAYS

pytestmark = pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")
SMALL = RelationsSettings(seeds=2, updates=1, batch=2, n=3, shots=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two relations in files, and a file of an unknown relation."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, answer in (("antonym", "un{}"), ("capitalize", "{}!"), ("other", "{}?")):
        pairs = [{"input": word, "output": answer.format(word)} for word in ("one", "two", "three", "four", "five")]
        (folder / f"{name}.json").write_text(json.dumps(pairs))
    return folder


def test_each_relation_is_judged_by_gates_that_have_not_seen_it(
    trained: Model, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[tuple[ResponseTask, ResponseTask]] = []
    fit = job.fit_contrast_gates

    def spy(model: Model, keep: ResponseTask, lose: ResponseTask, *args: object, **more: object) -> object:
        fitted.append((keep, lose))
        return fit(model, keep, lose, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(job, "fit_contrast_gates", spy)
    result = find_relations(trained, SMALL, source=source, out=tmp_path / "run")
    assert [(fit.keep, fit.lose, fit.relation) for fit in result.fits] == [
        ("instruction", "examples", "antonym"),
        ("instruction", "examples", "capitalize"),
        ("examples", "instruction", "antonym"),
        ("examples", "instruction", "capitalize"),
    ]
    tasks = relation_tasks(trained, SMALL, source)
    for (keep, lose), outcome in zip(fitted, result.fits, strict=True):
        (other,) = {"antonym", "capitalize"} - {outcome.relation}
        assert keep.examples == tasks[outcome.keep][other].examples
        assert lose.examples == tasks[outcome.lose][other].examples
        assert [x.response for x in keep.examples] == [x.response for x in lose.examples]
        judged = score_responses(trained, tasks[outcome.lose][outcome.relation], outcome.contrast.gates)
        torch.testing.assert_close(outcome.accuracy.lose, judged.accuracy)
    # The folder holds everything.
    again = load_relations(tmp_path / "run")
    for a, b in zip(again.fits, result.fits, strict=True):
        assert (a.relation, a.keep, a.lose) == (b.relation, b.keep, b.lose)
        assert torch.equal(a.contrast.gates, b.contrast.gates)
        assert torch.equal(a.accuracy.keep, b.accuracy.keep)
        assert (a.accuracy.keep_open, a.contrast.lose_open) == (b.accuracy.keep_open, b.contrast.lose_open)
    lines = list(csv.DictReader((tmp_path / "run" / "relations.csv").open()))
    assert len(lines) == 8
    assert (lines[1]["asked by"], lines[1]["role"]) == ("examples", "lose")
    assert float(lines[1]["accuracy"]) == pytest.approx(float(result.fits[0].accuracy.lose.mean()), abs=1e-6)


@pytest.mark.filterwarnings("default::gatelens.errors.GatelensWarning")
def test_a_model_that_does_not_know_the_words_is_warned_about_in_each_way(trained: Model, source: Path) -> None:
    with pytest.warns(GatelensWarning) as caught:
        find_relations(trained, SMALL, source=source)
    texts = [str(warning.message) for warning in caught]
    for way in WAYS:
        (text,) = [text for text in texts if f"word-pairs (ask={way})" in text]
        task = relation_tasks(trained, SMALL, source)[way]
        scores = [
            score_responses(trained, part, torch.ones(1, trained.n_layers, trained.n_heads)) for part in task.values()
        ]
        known = sum(int(part.hits.sum()) for part in scores) / sum(int(part.tokens.sum()) for part in scores)
        assert f"predicts {known:.0%} of the response tokens" in text


def test_ten_examples_or_an_instruction_ask_for_the_same_words(trained: Model) -> None:
    tasks = relation_tasks(trained, RelationsSettings(n=2))
    assert [*tasks] == [*WAYS]
    assert len(tasks["examples"]) == 6
    for relation in tasks["examples"]:
        for told, shown in zip(*(tasks[way][relation].examples for way in WAYS), strict=True):
            assert told.prompt.split("\n")[-1] == shown.prompt.split("\n")[-1]
            assert (told.prompt.count(" ->"), shown.prompt.count(" ->")) == (2, 11)
            assert told.response == shown.response


def test_from_the_command_to_the_figure(
    trained_folder: Path,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["relations", str(trained_folder), "--source", str(source), "--out", str(tmp_path / "run"), "--no-check"]
    words += ["--seeds", "2", "--updates", "1", "--batch", "2", "--n", "3", "--shots", "2"]
    assert run(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    assert "forward passes of one example" in printed
    assert printed.count("->") >= 9
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == {"accuracy.png", "gates.png"}
    result = load_relations(tmp_path / "run")
    left, right = relations_figure(result).axes
    assert [" ".join(axis.get_title().split()) for axis in (left, right)] == [  # titles are wrapped
        "keep instruction, lose examples",
        "keep examples, lose instruction",
    ]
    dots = {line.get_label(): float(line.get_ydata()[0]) for line in right.get_lines() if line.get_label()[0] == "_"}
    for fit in result.fits[2:]:
        assert dots[f"_{fit.relation} keep"] == pytest.approx(float(fit.accuracy.keep.mean()))
        assert dots[f"_{fit.relation} lose"] == pytest.approx(float(fit.accuracy.lose.mean()))


def test_the_cost_counts_both_ways_of_all_fits(trained: Model, source: Path) -> None:
    # 2 ways x 2 relations, 2 tasks: 2 seeds x 1 update x 2 examples forward and back; 2 seeds and open gates on 3.
    assert relations_cost(trained, SMALL, source).forwards == 4 * 2 * (2 * 2 * 1 * 2 + 3 * 3)


def test_a_folder_without_relations_is_refused(trained: Model, tmp_path: Path) -> None:
    with pytest.raises(GatelensError, match="has 0 files of relations, and at least 2 are needed"):
        find_relations(trained, SMALL, source=tmp_path, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
