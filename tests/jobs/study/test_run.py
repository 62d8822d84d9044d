"""Studies on one machine: run, skipped, resumed, shared between processes, and what fails in them."""

from __future__ import annotations

import csv
import errno
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from studies import LEVELS, go, numbers, write_study

import gatelens.jobs.study.jobs as study_jobs
from gatelens import CircuitSettings, GatelensError, find_circuit
from gatelens.jobs.circuit_tasks import circuit_tasks
from gatelens.jobs.study._folder import StudyFolder
from gatelens.jobs.study.file import read_study
from gatelens.jobs.study.models import ModelSpec, source_fingerprint
from gatelens.jobs.study.run import run_study, running_order
from gatelens.loading import load
from gatelens.measures.circuit_result import CircuitResult, load_circuit
from gatelens.measures.describe import describe
from gatelens.measures.head_table import save_head_table
from gatelens.measures.roles_result import load_roles

pytestmark = [
    pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning"),
    pytest.mark.usefixtures("no_report"),
]


class TestResults:
    def test_each_cell_is_the_run_that_it_names(self, place: Path) -> None:
        file = write_study(place, circuit=LEVELS, gate=True)
        summary = go(file, place / "out")
        assert summary.failed == 0
        few = {"points": 6, "random_points": 3, "sample": 0, "refine": 0}
        settings = CircuitSettings(level="edges", n=4, steps=2, held_out=True, allow_noise=True, **few)
        alone = find_circuit(load(place / "sparse"), "induction", settings, options={"length": 4})
        ours = load_circuit(place / "out" / "cells" / "edges-induction-sparse")
        assert torch.equal(ours.curve.metrics, alone.curve.metrics)
        assert summary.outcomes["edges-induction-sparse"].shown == str(alone.count)
        assert summary.outcomes["edges-induction-sparse"].count_high == alone.count.interval.high
        roles = load_roles(place / "out" / "cells" / "roles-induction-dense").roles
        needed = int((roles.minus >= 0.5).all(0).sum())
        assert summary.outcomes["roles-induction-dense"].count == needed

    def test_the_summary(self, place: Path, no_report: list[list[str]]) -> None:
        go(write_study(place, circuit=LEVELS), place / "out")
        summary = json.loads((place / "out" / "summary.json").read_text())
        assert (summary["schema_version"], summary["title"], summary["done"], summary["failed"]) == (2, "Tiny", 4, 0)
        rows = {row["cell"]: row for row in csv.DictReader((place / "out" / "summary.csv").open())}
        assert sorted(rows) == sorted(cell["cell"] for cell in summary["cells"]) == sorted(no_report[0])
        for level in ("heads", "edges"):
            counts = [
                load_circuit(place / "out" / "cells" / f"{level}-induction-{model}").count.value
                for model in ("dense", "sparse")
            ]
            assert [float(rows[f"{level}-induction-{m}"]["count"]) for m in ("dense", "sparse")] == counts
            (comparison,) = [entry for entry in summary["multipliers"] if entry["level"] == level]
            assert (comparison["dense"], comparison["sparse"]) == ("dense", "sparse")
            assert comparison["multiplier"] == pytest.approx(counts[0] / counts[1])
            assert comparison["paired"]
            assert comparison["multiplier_low"] <= comparison["multiplier"]  # the upper end may be open
            assert rows[f"{level}-induction-sparse"]["prompts"] == "4"
            assert float(rows[f"{level}-induction-sparse"]["multiplier"]) == pytest.approx(counts[0] / counts[1], 1e-4)
            assert rows[f"{level}-induction-dense"]["multiplier"] == ""

    def test_seeds_and_other_axes_are_compared_each_for_itself(self, place: Path) -> None:
        file = write_study(place, circuit="seed = [0, 3]", models='same = { load = "dense", dense = "dense" }')
        summary = go(file, place / "out")
        multipliers = {(entry.sparse, entry.varied.get("seed", 0)): entry.multiplier for entry in summary.multipliers}
        # The same model needs as many heads. For the sparse model, two dense models are possible and none is named.
        assert multipliers == {("same", 0): 1.0, ("same", 3): 1.0}

    def test_counts_at_different_thresholds_are_not_compared(self, place: Path) -> None:
        file = write_study(place)
        file.write_text(f"{file.read_text()}\n[circuit.model.sparse]\nthreshold = 0.5\n")
        summary = go(file, place / "out")
        assert (summary.failed, summary.multipliers) == (0, [])

    def test_a_model_is_loaded_once(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        loaded: list[str] = []
        original = ModelSpec.open_model
        monkeypatch.setattr(ModelSpec, "open_model", lambda spec: loaded.append(spec.label) or original(spec))
        go(write_study(place, circuit=LEVELS), place / "out")
        assert loaded == ["dense", "sparse", "dense"]  # the last time for the best heads of the sparse model
        go(write_study(place, circuit=LEVELS), place / "out")  # all is done: no model is needed
        assert loaded == ["dense", "sparse", "dense"]

    def test_heads_of_a_sparse_model_have_those_of_the_dense_one_beside_them(self, place: Path) -> None:
        go(write_study(place), place / "out")
        cells = place / "out" / "cells"
        saved, dense = (load_circuit(cells / f"heads-induction-{model}").heads for model in ("sparse", "dense"))
        assert saved is not None
        assert saved.dense is not None
        assert dense is not None
        assert dense.dense is None
        settings = CircuitSettings(n=4, held_out=True)
        model = load(place / "dense")
        task = circuit_tasks(model, "induction", settings, {"length": 4}).first
        alone = describe(model, task, [line.head for line in saved.lines])
        for line in alone.lines:
            assert saved.dense[line.head].score == pytest.approx(line.score, abs=1e-5)
        # An earlier version did not save them: they are added, and the report is written again.
        save_head_table(saved.beside(None), cells / "heads-induction-sparse")
        page = place / "out" / "report" / "index.html"
        page.write_text("earlier")
        go(write_study(place), place / "out")
        again = load_circuit(cells / "heads-induction-sparse").heads
        assert again is not None
        assert again.dense == saved.dense
        assert page.read_text() != "earlier"

    def test_a_bias_gates_a_dense_model(self, place: Path) -> None:
        file = write_study(place, models='gated = { load = "dense", bias = 0.1 }')
        summary = go(file, place / "out")
        ours, saved = (load_circuit(place / "out" / "cells" / f"heads-induction-{m}") for m in ("gated", "sparse"))
        assert summary.outcomes["heads-induction-gated"].sparse
        assert torch.equal(ours.curve.metrics, saved.curve.metrics)

    def test_the_report_of_a_study(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()  # the real one
        (place / "one.toml").write_text(write_study(place).read_text().replace('sparse = "sparse"', ""))
        summary = go(place / "one.toml", place / "out")
        assert summary.report == place / "out" / "report" / "index.html"
        assert "induction" in summary.report.read_text()
        written = summary.report.stat().st_mtime_ns
        assert go(place / "one.toml", place / "out").report == summary.report
        assert summary.report.stat().st_mtime_ns == written  # nothing has changed since


class TestSkipping:
    def test_done_cells_are_left_as_they_are(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = write_study(place)
        first = go(file, place / "out")
        monkeypatch.setattr(study_jobs, "find_circuit", None)  # would fail
        assert go(file, place / "out").outcomes == first.outcomes

    def test_a_study_may_grow(self, place: Path) -> None:
        go(write_study(place), place / "out")
        before = numbers(place / "out")
        file = write_study(place, circuit=LEVELS + "\nseed = [0, 1]", models='third = "dense"')
        assert go(file, place / "out").failed == 0
        after = numbers(place / "out")
        assert before.items() <= after.items()
        assert len(list((place / "out" / "cells").iterdir())) == 3 * 2 * 2

    def test_published_results_are_completed(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = write_study(place, circuit=LEVELS)
        go(file, place / "out")
        before = numbers(place / "out")
        shutil.rmtree(place / "out" / "state")
        shutil.rmtree(place / "out" / "cells" / "heads-induction-sparse")
        made: list[Path | None] = []

        def watched(*args: Any, out: Path, **others: Any) -> CircuitResult:
            made.extend([] if (out / "result.json").exists() else [out])
            return find_circuit(*args, out=out, **others)

        monkeypatch.setattr(study_jobs, "find_circuit", watched)
        assert go(file, place / "out").failed == 0
        assert made == [place / "out" / "cells" / "heads-induction-sparse"]
        assert numbers(place / "out") == before

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('title = "Tiny"', 'title = "Other"', "holds the study 'Tiny', but .* is 'Other'"),
            ("n = 4", "n = 5", r"the cell heads-induction-dense with settings\.n 4, but .* asks for 5"),
            ('dense = "dense"', 'dense = "sparse"', "the model dense with load 'dense', but .* asks for 'sparse'"),
            ('sparse = "sparse"', "", "the model sparse, which .* does not ask for"),
            ("length = 4", "length = 5", r"options\.length 4, but .* asks for 5"),
            ("points = 6", 'points = 6\nlevel = "edges"', "the cell heads-induction-dense, which .* does not ask for"),
        ],
    )
    def test_another_study_is_refused(self, old: str, new: str, message: str, place: Path) -> None:
        file = write_study(place)
        folder = StudyFolder(place / "out")
        folder.claim(read_study(file))
        before = (place / "out" / "study.json").read_bytes()
        file.write_text(file.read_text().replace(old, new, 1))
        with pytest.raises(GatelensError, match=message):
            go(file, place / "out")
        assert (place / "out" / "study.json").read_bytes() == before

    def test_memory_and_machines_are_no_part_of_a_study(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        go(write_study(place), place / "out")
        monkeypatch.setattr(study_jobs, "find_circuit", None)
        file = write_study(place, circuit="memory_gb = 1")
        file.write_text(file.read_text().replace('dense = "dense"', 'dense = { load = "dense", cpus = 2 }'))
        assert go(file, place / "out").failed == 0

    def test_other_weights_are_run_anew_and_the_old_run_is_kept(self, place: Path) -> None:
        file = write_study(place)
        go(file, place / "out")
        before = numbers(place / "out")
        weights = (place / "dense" / "model.safetensors").read_bytes()
        (place / "dense" / "model.safetensors").write_bytes(weights[:-400] + b"\x3d" * 400)
        assert go(file, place / "out").failed == 0
        after = numbers(place / "out")
        name = "heads-induction-dense/scores.safetensors"
        assert after[name] != before[name]
        assert after[name.replace("dense", "sparse")] == before[name.replace("dense", "sparse")]
        (old,) = (place / "out" / "outdated").iterdir()
        assert (old / "scores.safetensors").read_bytes() == before[name]

    def test_folders_that_are_no_study(self, place: Path) -> None:
        file = write_study(place)
        with pytest.raises(GatelensError, match="holds other files and not a study"):
            go(file, place)
        with pytest.raises(GatelensError, match="is a file"):
            go(file, file)
        with pytest.raises(GatelensError, match="no engine 'rey'"):
            run_study(read_study(file), place / "out", engine="rey")  # type: ignore[arg-type]
        with pytest.raises(GatelensError, match="use it with the engine ray"):
            run_study(read_study(file), place / "out", address="auto")
        assert not (place / "out").exists()

    def test_processes_that_work_on_one_cell_together_are_refused(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(GatelensError, match="cannot be started by `accelerate launch`"):
            run_study(read_study(write_study(place)), place / "out")
        assert not (place / "out").exists()

    def test_large_files_are_sampled_from_end_to_end(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        seen = set()
        for at in (None, 0, 5_000_000 - 1):
            content = bytearray(5_000_000)
            if at is not None:
                content[at] = 1
            path.write_bytes(content)
            seen.add(source_fingerprint(str(tmp_path)))
        assert len(seen) == 3


class TestFailures:
    def test_the_others_go_on(
        self, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A model that cannot be read: its cells fail with the reason, on the screen and in the summary too."""
        monkeypatch.setenv("COLUMNS", "200")
        file = write_study(place, circuit=LEVELS)
        (place / "dense" / "model.safetensors").write_bytes(b"damaged")
        words = ["study", str(file), "--out", str(place / "out")]
        assert run(monkeypatch, *words) == 1
        said = capsys.readouterr()
        assert "heads-induction-dense failed: " in said.err
        assert "truncated or damaged" in said.err
        summary = json.loads((place / "out" / "summary.json").read_text())
        rows = {row["cell"]: row for row in summary["cells"]}
        assert {name: row["status"] for name, row in rows.items()} == {
            "heads-induction-dense": "failed",
            "edges-induction-dense": "failed",
            "heads-induction-sparse": "done",
            "edges-induction-sparse": "done",
        }
        assert "truncated or damaged" in rows["edges-induction-dense"]["reason"]
        assert summary["multipliers"] == []

    def test_what_failed_is_tried_again(self, place: Path) -> None:
        file = write_study(place)
        weights = (place / "dense" / "model.safetensors").read_bytes()
        (place / "dense" / "model.safetensors").write_bytes(b"damaged")
        assert go(file, place / "out").failed == 1
        (place / "dense" / "model.safetensors").write_bytes(weights)
        assert go(file, place / "out").failed == 0

    def test_an_unforeseen_error_is_kept_with_its_place(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(study_jobs, "find_circuit", broken)
        outcome = go(write_study(place), place / "out").outcomes["heads-induction-dense"]
        assert (outcome.status, outcome.reason) == ("failed", "ZeroDivisionError: a bug")
        assert "in broken" in (outcome.trace or "")

    def test_out_of_memory_is_tried_again_with_half(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = write_study(place, circuit="memory_gb = 2")
        whole = go(file, place / "whole")
        seen: list[float] = []

        def scarce(model: Any, task: Any, settings: CircuitSettings, **more: Any) -> Any:
            seen.append(settings.memory_gb)
            if settings.memory_gb > 1:
                # Begun, and then there is no room: the first pieces are of larger batches.
                with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                    patch.setattr("gatelens.jobs.circuit._validate", interrupted)
                    find_circuit(model, task, settings, **more)
                assert list(more["out"].glob("pieces/2-gb/**/curve*"))
                torch.empty(1 << 50)  # torch's own error
            return find_circuit(model, task, settings, **more)

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(study_jobs, "find_circuit", scarce)
        summary = go(file, place / "out")
        assert seen == [2.0, 1.0, 2.0, 1.0]
        assert summary.failed == 0
        counts = [{name: o.count for name, o in result.outcomes.items()} for result in (summary, whole)]
        assert counts[0] == counts[1]

    @pytest.mark.parametrize(
        "error",
        [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("CUDA error: out of memory")],
    )
    def test_out_of_memory_for_good(self, error: Exception, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[float] = []

        def scarce(model: Any, task: Any, settings: CircuitSettings, **more: Any) -> Any:
            tried.append(settings.memory_gb)
            if model.name == "dense":
                raise error
            return find_circuit(model, task, settings, **more)

        monkeypatch.setattr(study_jobs, "find_circuit", scarce)
        summary = go(write_study(place), place / "out")
        assert tried == [4.0, 2.0, 4.0]
        assert summary.failed == 1
        assert "out of memory" in (summary.outcomes["heads-induction-dense"].reason or "")

    def test_no_space_left(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """While the first cell writes; the second finds room. The first then continues."""
        import gatelens.runtime.journal as journal

        original = journal.write_tensors
        file = write_study(place)

        def full(path: Path, tensors: Any) -> None:
            if "dense" in str(path) and "curve" in path.name:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            original(path, tensors)

        monkeypatch.setattr(journal, "write_tensors", full)
        summary = go(file, place / "out")
        assert summary.failed == 1
        assert "No space left on device" in (summary.outcomes["heads-induction-dense"].reason or "")
        monkeypatch.setattr(journal, "write_tensors", original)
        assert go(file, place / "out").failed == 0

    def test_no_space_for_anything(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not even for the records: the cells fail, and so does the summary, but nothing breaks."""
        file = write_study(place)
        StudyFolder(place / "out").claim(read_study(file))

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("gatelens.jobs.study._folder.StudyFolder.write", full)
        monkeypatch.setattr("gatelens.jobs.study.summary.write_json", full)
        summary = go(file, place / "out")
        assert summary.failed == 2
        assert all("No space left" in sentence for sentence in (*summary.failures(), *summary.problems))


def test_the_longest_gate_cells_run_first_and_circuits_in_their_order(place: Path) -> None:
    gate = 'tasks = ["syntax", "math"]\nseeds = 1\nupdates = 5\n[gate.task.math]\nupdates = 6\n'
    text = '[models]\nsparse = "sparse"\ndense = "dense"\n[circuit]\ntasks = ["ioi", "docstring"]\n[gate]\n' + gate
    (place / "order.toml").write_text(text)
    cells = read_study(place / "order.toml").cells
    names = [cell.name for cell in running_order(cells)]
    wanted = [
        f"{what}-{model}"
        for model in ("sparse", "dense")
        for what in ("roles-math", "roles-syntax", "heads-ioi", "heads-docstring")
    ]
    assert names == wanted
    assert [cell.name for cell in cells] != wanted
