"""Ctrl-C and SIGTERM: every job stops with one sentence and exit code 130, and the same command continues."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run

import gatelens
from gatelens import Model
from gatelens.gates.edges import EdgeScores
from gatelens.measures.exchange import write_graph
from gatelens.model.graph import Graph
from gatelens.runtime.interrupts import Interrupted, finishing_steps
from gatelens.runtime.run_folder import RunFolder

DRIVER = Path(__file__).parent / "interrupted.py"
TINY_FITS = "--seeds 1 --updates 6 --batch 2 --no-check"
STUDY = """
[models]
trained = "{model}"
[circuit]
tasks = ["induction"]
n = 3
points = 3
random_points = 0
sample = 0
describe = 0
allow_noise = true
method = "eap"
memory_gb = 0.0001
[circuit.task.induction.options]
length = 4
"""


def interrupt(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run jobs in one new process, each until it gets its signal; the exit code and stderr of each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    done = subprocess.run(
        [sys.executable, str(DRIVER)], input=lines, env=environment, capture_output=True, text=True, check=True
    )
    ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"code"')]
    assert len(ended) == len(jobs), done.stderr
    return ended


@pytest.mark.slow
def test_every_job_says_where_it_stopped_and_continues(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study, model = tmp_path / "study.toml", str(trained_folder)
    study.write_text(STUDY.format(model=model))
    pieces = ["--n", "3", "--points", "3", "--sample", "0", "--option", "length=4", "--memory-gb", "0.0001"]
    pieces.append("--allow-noise")
    learned = ["--method", "edge-pruning", "--method-options", "updates=6", "--no-check"]
    jobs = {
        "circuit": (["circuit", model, "induction", "--method", "eap", *pieces], "SIGINT", 2, "score heads, 2 of 3"),
        "learned": (["circuit", model, "induction", *learned, *pieces], "SIGTERM", 5, "learn heads, 5 of 6"),
        "gate": (
            ["gate", model, "induction", "--n", "4", "--held-out", "2", "--most", "2", *TINY_FITS.split()],
            "SIGTERM",
            2,
            "fit G, 2 of 6",
        ),
        "contrast": (
            ["contrast", model, "induction", "syntax", "--n", "4", *TINY_FITS.split()],
            "SIGINT",
            2,
            "fit contrast, 2 of 6",
        ),
        "relations": (
            ["relations", model, "--source", str(word_pairs(tmp_path)), "--n", "3", "--shots", "2", *TINY_FITS.split()],
            "SIGTERM",
            2,
            "instruction without antonym: fit contrast, 2 of 6",
        ),
        "study": (["study", str(study)], "SIGTERM", 2, "heads-induction-trained: score heads, 2 of 3"),
        "demo": (["demo"], "SIGINT", 2, "heads-induction-trained: score heads, 2 of 3"),
    }
    asked = [
        {
            "words": [*words, "--out", str(tmp_path / name)],
            "signal": number,
            "phase": where.split(": ")[-1].split(",")[0],
            "at": at,
            "demo": str(study),
        }
        for name, (words, number, at, where) in jobs.items()
    ]
    for (name, (*_, where)), ended in zip(jobs.items(), interrupt(asked), strict=True):
        assert ended["code"] == 130, (name, ended["stderr"])
        lines = [line for line in ended["stderr"].splitlines() if not line.startswith("gatelens: warning")]
        assert lines == [f"gatelens: stopped at {where}; the same command continues."], name
    monkeypatch.setattr("gatelens.jobs.demo.STUDY", study)
    for job in asked:
        assert run(monkeypatch, *job["words"]) == 0, capsys.readouterr().err
        assert list(Path(job["words"][-1]).glob("**/result.json"))


def word_pairs(folder: Path) -> Path:
    """A folder with the word pairs of two relations."""
    (folder / "pairs").mkdir()
    for name, answer in (("antonym", "un{}"), ("capitalize", "{}!")):
        pairs = [{"input": word, "output": answer.format(word)} for word in ("one", "two", "three", "four", "five")]
        (folder / "pairs" / f"{name}.json").write_text(json.dumps(pairs))
    return folder / "pairs"


@pytest.mark.slow
def test_a_command_without_pieces_starts_again_and_leaves_nothing_half_written(
    trained: Model, trained_folder: Path, tmp_path: Path
) -> None:
    model, text, graph = str(trained_folder), tmp_path / "text.txt", Graph.of(trained.anatomy)
    text.write_text("Anna went to the park and bought a map. " * 60)
    write_graph(
        tmp_path / "circuit.json",
        EdgeScores(torch.ones(graph.edges.shape), graph, "by hand"),
        graph.edges,
        trained.anatomy.width,
    )
    small = {"method": "eap", "n": 2, "points": 3, "random_points": 0, "sample": 0, "describe": 0, "allow_noise": True}
    gatelens.find_circuit(trained, "induction", gatelens.CircuitSettings(**small), out=tmp_path / "run")
    before = sorted(tmp_path.iterdir())
    calls = {
        "tasks induction --model MODEL --quick --no-check": "gatelens.tasks.preview:preview",
        "effect MODEL induction TMP/circuit.json --quick --no-check": "gatelens.measures.effect:edges_effect",
        "evaluate MODEL --bias 0 --length 16 --text TMP/text.txt --no-check --out TMP/judged.json": (
            "gatelens.runtime.files:write_json"
        ),
        "report TMP/run --out TMP/report": "gatelens.report.page:draw_pictures",
        "report TMP/run --out TMP/report.html --single-file": "gatelens.report.page:draw_pictures",
        "convert MODEL --bias 0 --out TMP/converted": "gatelens.sparse.in_model:save_sparse",
        "export TMP/edges TMP/edges.json": "gatelens.jobs.export:export_circuit",
    }
    jobs = [
        {"words": words.replace("MODEL", model).replace("TMP", str(tmp_path)).split(), "call": call, "signal": number}
        for (words, call), number in zip(calls.items(), itertools.cycle(("SIGINT", "SIGTERM")), strict=False)
    ]
    for words, ended in zip(calls, interrupt(jobs), strict=True):
        assert ended["code"] == 130, (words, ended["stderr"])
        lines = [line for line in ended["stderr"].splitlines() if not line.startswith("gatelens: warning")]
        assert lines == ["gatelens: stopped; the same command starts again."], words
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_a_fit_keeps_the_updates_that_it_has_made(trained_folder: Path, tmp_path: Path) -> None:
    """Updates are saved every 25 or 15 seconds; a signal saves the last one at once."""
    words = ["gate", str(trained_folder), "induction", "--n", "4", "--held-out", "2", *TINY_FITS.split()]
    words += ["--out", str(tmp_path / "run")]
    ended = interrupt([{"words": words, "signal": "SIGINT", "phase": "fit G", "at": at} for at in (3, 5)])
    assert [re.findall(r"fit G, (\d) of 6", end["stderr"]) for end in ended] == [["3"], ["5"]]


@pytest.mark.slow
def test_sparsify_saves_the_step_at_which_it_stopped(trained_folder: Path, tmp_path: Path) -> None:
    """Steps 1 to 4, then 5 to 7, then 8: the same numbers as at once, and no step is made twice."""
    text = tmp_path / "text.txt"
    text.write_text("Anna went to the park and bought a map. " * 60)
    options = ["--steps", "8", "--batch", "1", "--length", "16", "--checkpoint-every", "3", "--no-check"]
    words = ["sparsify", str(trained_folder), "--text", str(text), *options, "--out"]
    stopped = [{"words": [*words, str(tmp_path / "run")], "signal": name, "at": at} for name, at in STOPS]
    at_once = {"words": [*words, str(tmp_path / "at once")], "signal": "SIGINT", "at": 99}
    ended = interrupt([*stopped, at_once])
    assert [end["code"] for end in ended] == [130, 130, 0, 0], [end["stderr"] for end in ended]
    assert [end["stderr"].splitlines()[-1] for end in ended[:2]] == [
        f"gatelens: stopped at step {step}; the same command continues." for step in (4, 7)
    ]
    assert losses(tmp_path / "run") == losses(tmp_path / "at once")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000007", "step-000008"]


STOPS = (("SIGTERM", 4), ("SIGINT", 7), ("SIGINT", 99))


def losses(out: Path) -> list[list[str]]:
    with (out / "log.csv").open(newline="") as file:
        return [[value for name, value in row.items() if name != "tokens_per_second"] for row in csv.DictReader(file)]


class TestFinishingSteps:
    def test_the_second_signal_does_not_wait(self) -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        with finishing_steps() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    def test_another_thread_cannot_handle_signals(self) -> None:
        seen = []

        def work() -> None:
            with finishing_steps() as stop:
                seen.append(stop.received)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [False]


def test_without_a_folder_nothing_continues() -> None:
    with pytest.raises(Interrupted, match=r"stopped; the same command starts again\."), RunFolder(None, {}):
        raise KeyboardInterrupt


def test_a_handler_that_was_not_set_in_python_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python can neither call it nor set it again."""
    changes: list[Any] = []
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *change: changes.append(change))
    with finishing_steps() as stop:
        assert not stop.received
    assert changes == []
